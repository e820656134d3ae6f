//! The system calls that no safe crate offers. All `unsafe` of this crate is here.

#![expect(unsafe_code, reason = "raw system calls; each block is one call with its own SAFETY note")]

use std::{
    io,
    marker::PhantomData,
    mem,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    ptr,
};

use crate::seccomp::Instruction;

/// Proof that this process has one thread, so that a forked child may go on running ordinary code.
#[derive(Debug)]
pub struct SingleThread(PhantomData<*const ()>);

impl SingleThread {
    /// Looks once, at the start of the program. Where `/proc` is missing there is nothing to look at: a box in
    /// the making, whose only process is us.
    pub fn witness() -> io::Result<Self> {
        if let Ok(tasks) = std::fs::read_dir("/proc/self/task")
            && tasks.count() != 1
        {
            return Err(io::Error::other("the process has several threads"));
        }
        Ok(Self(PhantomData))
    }
}

/// A descriptor as system calls with 64-bit fields take it. Open ones are never negative.
fn number(fd: BorrowedFd<'_>) -> u64 {
    fd.as_raw_fd().unsigned_abs().into()
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// The constant of the `libc` crate overflows its type.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which side of a fork this is.
#[derive(Debug)]
pub enum Forked {
    Child,
    Parent { pid: i32, pidfd: OwnedFd },
}

/// `clone3` without a new stack: a fork into new namespaces, optionally born in a v2 cgroup.
pub fn fork(_: &SingleThread, namespaces: u64, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    let mut pidfd: RawFd = -1;
    // SAFETY: clone_args is plain integers, for which all zeroes is a valid value.
    let mut args: libc::clone_args = unsafe { mem::zeroed() };
    args.flags = namespaces | libc::CLONE_PIDFD as u64;
    args.pidfd = ptr::from_mut(&mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = number(cgroup);
    }
    // SAFETY: the witness says there is one thread, no stack is given, and no memory is shared, so the child is
    // an ordinary forked process; `args` outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match check(result)? {
        0 => Ok(Forked::Child),
        pid => {
            // SAFETY: the kernel has just opened this descriptor for us and nobody else knows it.
            let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
            Ok(Forked::Parent { pid: i32::try_from(pid).map_err(io::Error::other)?, pidfd })
        }
    }
}

/// Ends the process at once, without destructors or exit handlers: the end of every forked child.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit has no preconditions.
    unsafe { libc::_exit(code) }
}

/// Attributes of a mount tree, as `mount_setattr` takes them.
#[derive(Debug, Clone, Copy, Default)]
pub struct MountAttributes<'fd> {
    pub set: u64,
    /// The user namespace whose mapping the mount shall show its files through.
    pub idmap: Option<BorrowedFd<'fd>>,
    pub private: bool,
}

pub const MOUNT_READ_ONLY: u64 = 1;
pub const MOUNT_NO_SUID: u64 = 2;
pub const MOUNT_NO_DEV: u64 = 4;
pub const MOUNT_NO_EXEC: u64 = 8;
const MOUNT_IDMAP: u64 = 0x0010_0000;

/// Sets attributes on the mount that `tree` is, and on all below it if `recursive`.
pub fn mount_setattr(
    tree: BorrowedFd<'_>,
    recursive: bool,
    attributes: MountAttributes<'_>,
) -> io::Result<()> {
    let mut attr = libc::mount_attr {
        attr_set: attributes.set | if attributes.idmap.is_some() { MOUNT_IDMAP } else { 0 },
        attr_clr: 0,
        propagation: if attributes.private { libc::MS_PRIVATE } else { 0 },
        userns_fd: attributes.idmap.map_or(0, number),
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a valid empty C string and `attr` is a valid structure of the size given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw mut attr,
            size_of::<libc::mount_attr>(),
        )
    };
    check(result).map(drop)
}

/// Marks every descriptor from `first` on close-on-exec.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: only flags of descriptors change; none is closed under its owner.
    let result = unsafe {
        libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_uint)
    };
    check(result).map(drop)
}

/// Closes every descriptor from `first` on. For a freshly forked child that will use none of them.
pub fn close_from(first: u32) -> io::Result<()> {
    // SAFETY: callers are forked children that go on to `exec` or to a loop over descriptors below `first`; the
    // owners of the closed ones live in the parent's copy of memory and are never dropped here.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, 0 as libc::c_uint) };
    check(result).map(drop)
}

/// Installs a filter for this process and its future children. Needs `no_new_privs`.
pub fn seccomp_load(filter: &[Instruction]) -> io::Result<()> {
    let program = libc::sock_fprog {
        len: u16::try_from(filter.len()).map_err(io::Error::other)?,
        filter: filter.as_ptr().cast_mut().cast(),
    };
    // SAFETY: Instruction has the layout of sock_filter, and the kernel only reads the program.
    let result = unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0 as libc::c_uint, &raw const program)
    };
    check(result).map(drop)
}

/// `IFF_UP` in the type of the field that takes it.
const UP: libc::c_short = 1;

/// Brings the loopback interface of this network namespace up.
pub fn loopback_up(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: ifreq is integers and bytes in a union; all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = UP;
    // SAFETY: SIOCSIFFLAGS reads one ifreq, which `request` is.
    let result = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request) };
    check(result.into()).map(drop)
}

const LOOP_GET_STATUS64: libc::c_ulong = 0x4C05;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LO_FLAGS_AUTOCLEAR: u32 = 4;

/// `struct loop_config` of linux/loop.h.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

#[repr(C)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    sizelimit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// The number of a loop device that is free at this moment.
pub fn loop_free(control: BorrowedFd<'_>) -> io::Result<i64> {
    // SAFETY: LOOP_CTL_GET_FREE takes no argument.
    let result = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
    check(result.into())
}

/// Backs a loop device with a file; it lets go by itself after the last unmount.
pub fn loop_configure(device: BorrowedFd<'_>, backing: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: LoopConfig is integers and byte arrays; all zeroes is a valid value.
    let mut config: LoopConfig = unsafe { mem::zeroed() };
    config.fd = u32::try_from(backing.as_raw_fd()).map_err(io::Error::other)?;
    config.info.flags = LO_FLAGS_AUTOCLEAR;
    // SAFETY: LOOP_CONFIGURE reads one loop_config, which `config` is by layout.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) };
    check(result.into()).map(drop)
}

/// The file behind a loop device, as `stat` names it: its device and its inode.
pub fn loop_backing(device: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    // SAFETY: as above.
    let mut info: LoopInfo = unsafe { mem::zeroed() };
    // SAFETY: LOOP_GET_STATUS64 writes one loop_info64, which `info` is by layout.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, &raw mut info) };
    check(result.into())?;
    Ok((info.device, info.inode))
}

/// A child that has ended, with what it used.
#[derive(Debug, Clone, Copy)]
pub struct Reaped {
    pub pid: i32,
    /// As `wait` gives it.
    pub status: i32,
    pub cpu_us: u64,
    pub peak_memory: u64,
}

/// The next child that has ended, without waiting. `None`: all that are left still run. An error of `ECHILD`:
/// there are none.
pub fn reap() -> io::Result<Option<Reaped>> {
    let mut status = 0;
    // SAFETY: rusage is integers; all zeroes is a valid value.
    let mut usage: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: both pointers are to valid, writable values.
    let pid = unsafe { libc::wait4(-1, &raw mut status, libc::WNOHANG | libc::__WALL, &raw mut usage) };
    if check(pid.into())? == 0 {
        return Ok(None);
    }
    let micros = |t: libc::timeval| t.tv_sec.unsigned_abs() * 1_000_000 + t.tv_usec.unsigned_abs();
    Ok(Some(Reaped {
        pid,
        status,
        cpu_us: micros(usage.ru_utime) + micros(usage.ru_stime),
        peak_memory: usage.ru_maxrss.unsigned_abs() * 1024,
    }))
}

/// Waits for the end of a child; its exit code, or 128 and the signal.
pub fn wait_for(pidfd: &OwnedFd) -> io::Result<i32> {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    loop {
        match waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED) {
            Ok(Some(status)) => {
                return Ok(status
                    .exit_status()
                    .or(status.terminating_signal().map(|signal| 128 + signal))
                    .unwrap_or(1));
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// A descriptor that becomes readable when a child ends; the signal itself is blocked.
pub fn child_signals() -> io::Result<OwnedFd> {
    // SAFETY: sigset_t is integers; all zeroes is a valid value.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: `set` is a valid signal set and SIGCHLD a valid signal.
    unsafe { libc::sigaddset(&raw mut set, libc::SIGCHLD) };
    // SAFETY: `set` is initialised; the old mask is not asked for.
    let masked = unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) };
    check(masked.into())?;
    // SAFETY: `set` is initialised and the call makes a new descriptor.
    let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    check(fd.into())?;
    // SAFETY: the kernel has just opened this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Signals as a fresh program expects them: nothing blocked, nothing ignored.
pub fn reset_signals() -> io::Result<()> {
    for signal in 1..=64 {
        if signal == libc::SIGKILL || signal == libc::SIGSTOP || signal == 32 || signal == 33 {
            continue;
        }
        // SAFETY: SIG_DFL is a valid disposition for every signal that is left.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    // SAFETY: sigset_t is integers; all zeroes is the empty set.
    let none: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: `none` is initialised.
    let result = unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut()) };
    check(result.into()).map(drop)
}

/// Ignores SIGPIPE: a peer that goes away is an error of that write.
pub fn ignore_sigpipe() {
    // SAFETY: SIG_IGN is a valid disposition for SIGPIPE.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

/// Sets one resource limit, soft and hard alike, never above the present hard one.
pub fn limit(resource: Resource, value: u64) -> io::Result<()> {
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `now` is a valid, writable rlimit.
    let got = unsafe { libc::getrlimit(resource, &raw mut now) };
    check(got.into())?;
    let value = value.min(now.rlim_max);
    let new = libc::rlimit { rlim_cur: value, rlim_max: value };
    // SAFETY: `new` is a valid rlimit.
    let set = unsafe { libc::setrlimit(resource, &raw const new) };
    check(set.into()).map(drop)
}

/// The kind of a resource limit; its type differs between C libraries.
pub type Resource = libc::__rlimit_resource_t;

pub const LIMIT_CORE: Resource = libc::RLIMIT_CORE;
pub const LIMIT_NPROC: Resource = libc::RLIMIT_NPROC;
pub const LIMIT_NOFILE: Resource = libc::RLIMIT_NOFILE;
pub const LIMIT_DATA: Resource = libc::RLIMIT_DATA;
pub const LIMIT_FSIZE: Resource = libc::RLIMIT_FSIZE;
pub const LIMIT_MSGQUEUE: Resource = libc::RLIMIT_MSGQUEUE;

/// Puts a copy of `from` at the number `to`, open across `exec`.
pub fn place(from: impl AsFd, to: RawFd) -> io::Result<()> {
    let from = from.as_fd().as_raw_fd();
    if from == to {
        // SAFETY: only the close-on-exec flag of an open descriptor changes.
        let result = unsafe { libc::fcntl(from, libc::F_SETFD, 0) };
        return check(result.into()).map(drop);
    }
    // SAFETY: callers are children on their way to `exec`, in which no owner of `to` will be dropped.
    let result = unsafe { libc::dup2(from, to) };
    check(result.into()).map(drop)
}

/// Takes over a descriptor that the process was started with.
pub fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: the call only reads flags of a descriptor number.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    check(flags.into())?;
    // SAFETY: it is open, and by the start-up contract nobody else in this process owns it.
    let owned = unsafe { OwnedFd::from_raw_fd(fd) };
    rustix::io::fcntl_setfd(&owned, rustix::io::FdFlags::CLOEXEC)?;
    Ok(owned)
}

/// A cgroup namespace whose root is the cgroup this process is in.
pub fn unshare_cgroup() -> rustix::io::Result<()> {
    // SAFETY: a new cgroup namespace only changes how cgroup paths are shown to this process.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWCGROUP) }
}

/// User and mounts: what a box whose pid namespace is there already needs besides its [network](unshare_network).
pub fn unshare_box(_: &SingleThread) -> rustix::io::Result<()> {
    use rustix::thread::UnshareFlags as Flags;
    // SAFETY: the witness says there is one thread, and nothing of the old namespaces is held as a path.
    unsafe { rustix::thread::unshare_unsafe(Flags::NEWUSER | Flags::NEWNS) }
}

/// The network of a box, with the IPC objects and the host name that go with it.
pub fn unshare_network(_: &SingleThread) -> rustix::io::Result<()> {
    use rustix::thread::UnshareFlags as Flags;
    // SAFETY: the witness says there is one thread; no memory, descriptors or paths change by this.
    unsafe { rustix::thread::unshare_unsafe(Flags::NEWNET | Flags::NEWIPC | Flags::NEWUTS) }
}

/// Shows another command line and environment to whoever looks at this process from outside: the program's own, whose
/// command line is `carrel stage` and whose one variable is `variable`, becomes that of an agent with the variable `shown`.
pub fn appear_as(variable: &str, shown: &str) -> io::Result<()> {
    const BEFORE: &[u8] = b"carrel\0stage\0";
    const AFTER: &[u8] = b"carrel\0agent\0";
    let (name, _) = variable.split_once('=').unwrap_or((variable, ""));
    let name = std::ffi::CString::new(name).map_err(io::Error::other)?;
    // SAFETY: there is one thread, and nobody here changes the environment.
    let value = unsafe { libc::getenv(name.as_ptr()) };
    let expected = [BEFORE, variable.as_bytes()].concat();
    let wanted = [AFTER, shown.as_bytes()].concat();
    let foreign = || io::Error::other("this program was not started as a stage");
    if value.is_null() || wanted.len() != expected.len() {
        return Err(foreign());
    }
    // SAFETY: the kernel lays arguments and variables out one after the other, on the stack and ended by NUL; this program is
    // started with exactly those in `expected`, so its length reaches from the end of the variable's name back to the first.
    let first = unsafe { value.sub(BEFORE.len() + name.as_bytes().len() + 1) }.cast::<u8>();
    // SAFETY: as above; nothing else refers to this memory while the slice lives.
    let shown = unsafe { std::slice::from_raw_parts_mut(first, expected.len()) };
    if shown != expected {
        return Err(foreign());
    }
    shown.copy_from_slice(&wanted);
    Ok(())
}

/// A mount namespace of our own, with the mounts that are there now.
pub fn unshare_mounts() -> rustix::io::Result<()> {
    // SAFETY: a new mount namespace only changes which mounts this process sees; no path is held across the call.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS) }
}
