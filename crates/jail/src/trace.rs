//! Stopping another process to look at it, and writing into one: `ptrace` and its like, as far as [`crate::image`] needs them. x86-64
//! only.

#![expect(
    unsafe_code,
    reason = "ptrace has no safe wrapper; each block is one call with its own SAFETY note"
)]

use std::{
    io,
    marker::PhantomData,
    mem, ptr, thread,
    time::{Duration, Instant},
};

/// How long a process may take to stop, and how often it is looked whether it has.
const STOPPING: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_micros(20);
const NT_PRSTATUS: usize = 1;
const NT_PRFPREG: usize = 2;
const PTRACE_GETREGSET: libc::c_uint = 0x4204;
const PTRACE_GETSIGMASK: libc::c_uint = 0x420a;
const PTRACE_GET_RSEQ_CONFIGURATION: libc::c_uint = 0x420f;

pub type GeneralRegisters = libc::user_regs_struct;

/// The area that the C library shares with the scheduler.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rseq {
    pub pointer: u64,
    pub size: u32,
    pub signature: u32,
    pub flags: u32,
    padding: u32,
}

/// A process that this thread holds; it goes on when this is dropped. Bound to its thread, as the kernel wants it.
#[derive(Debug)]
pub struct Traced {
    pid: i32,
    of_this_thread: PhantomData<*const ()>,
}

fn check(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Traced {
    /// Holds a process and stops it.
    pub fn stop(pid: i32) -> io::Result<Self> {
        // SAFETY: seizing changes no memory of ours.
        let seized = unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0_usize, 0_usize) };
        check(seized)?;
        let traced = Self { pid, of_this_thread: PhantomData };
        // SAFETY: neither does stopping.
        let stopped = unsafe { libc::ptrace(libc::PTRACE_INTERRUPT, pid, 0_usize, 0_usize) };
        check(stopped)?;
        traced.wait()?;
        Ok(traced)
    }

    /// One that waits for a child which shares its memory cannot be stopped: it is given up, and let go of with this thread.
    fn wait(&self) -> io::Result<()> {
        let mut status = 0;
        let deadline = Instant::now() + STOPPING;
        loop {
            // SAFETY: `status` is a valid, writable integer.
            let pid = unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL | libc::WNOHANG) };
            match check(pid.into()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
                Ok(0) if Instant::now() > deadline => return Err(io::ErrorKind::TimedOut.into()),
                Ok(0) => thread::sleep(LOOK),
                Ok(_) if libc::WIFSTOPPED(status) => return Ok(()),
                Ok(_) => return Err(io::Error::other("the process has ended")),
            }
        }
    }

    pub fn pid(&self) -> i32 {
        self.pid
    }

    fn regset<T>(&self, which: usize) -> io::Result<T> {
        // SAFETY: callers ask for structures of integers, for which all zeroes is a valid value.
        let mut out: T = unsafe { mem::zeroed() };
        let mut part = libc::iovec { iov_base: ptr::from_mut(&mut out).cast(), iov_len: size_of::<T>() };
        // SAFETY: the kernel writes at most `iov_len` bytes to `out`, which is that long.
        let got = unsafe { libc::ptrace(PTRACE_GETREGSET, self.pid, which, &raw mut part) };
        check(got)?;
        if part.iov_len != size_of::<T>() {
            return Err(io::Error::other("the kernel has other registers"));
        }
        Ok(out)
    }

    pub fn registers(&self) -> io::Result<GeneralRegisters> {
        self.regset(NT_PRSTATUS)
    }

    /// Control words of the floating point units: x87, then SSE.
    pub fn float_control(&self) -> io::Result<(u16, u32)> {
        let all: libc::user_fpregs_struct = self.regset(NT_PRFPREG)?;
        Ok((all.cwd, all.mxcsr))
    }

    pub fn blocked_signals(&self) -> io::Result<u64> {
        let mut mask = 0_u64;
        // SAFETY: the kernel writes 8 bytes, as it is told, which `mask` has.
        let got = unsafe { libc::ptrace(PTRACE_GETSIGMASK, self.pid, size_of::<u64>(), &raw mut mask) };
        check(got)?;
        Ok(mask)
    }

    pub fn rseq(&self) -> io::Result<Rseq> {
        let mut rseq = Rseq::default();
        // SAFETY: the kernel writes at most the size it is told, which is that of `rseq`.
        let got = unsafe {
            libc::ptrace(PTRACE_GET_RSEQ_CONFIGURATION, self.pid, size_of::<Rseq>(), &raw mut rseq)
        };
        check(got)?;
        Ok(rseq)
    }

    /// For any thread, as long as it is stopped.
    pub fn memory(&self) -> Memory<'_> {
        Memory { pid: self.pid, stopped: PhantomData }
    }

    /// The head of the list of locks that the kernel frees at the process's end.
    pub fn robust_list(&self) -> io::Result<u64> {
        let (mut head, mut length) = (0_u64, 0_usize);
        // SAFETY: both pointers are to valid, writable integers of the sizes that the kernel writes.
        let got =
            unsafe { libc::syscall(libc::SYS_get_robust_list, self.pid, &raw mut head, &raw mut length) };
        check(got)?;
        Ok(head)
    }
}

/// The memory of a process that is stopped.
#[derive(Debug, Clone, Copy)]
pub struct Memory<'a> {
    pid: i32,
    stopped: PhantomData<&'a ()>,
}

impl Memory<'_> {
    /// From an address on.
    pub fn read(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let rest = &mut into[done..];
            let ours = libc::iovec { iov_base: rest.as_mut_ptr().cast(), iov_len: rest.len() };
            let theirs = theirs(at, done, rest.len())?;
            // SAFETY: the kernel writes at most `iov_len` bytes to `rest`, which is that long; the other address is the process's.
            let count =
                unsafe { libc::process_vm_readv(self.pid, &raw const ours, 1, &raw const theirs, 1, 0) };
            done += some(count)?;
        }
        Ok(())
    }
}

/// Writes into the memory of another process, from an address on.
pub fn write_memory(pid: i32, at: u64, from: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < from.len() {
        let rest = &from[done..];
        let ours = libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: rest.len() };
        let theirs = theirs(at, done, rest.len())?;
        // SAFETY: the kernel reads at most `iov_len` bytes of `rest`, which is that long; the other address is the process's.
        let count = unsafe { libc::process_vm_writev(pid, &raw const ours, 1, &raw const theirs, 1, 0) };
        done += some(count)?;
    }
    Ok(())
}

fn theirs(at: u64, done: usize, length: usize) -> io::Result<libc::iovec> {
    let at = usize::try_from(at).map_err(io::Error::other)? + done;
    Ok(libc::iovec { iov_base: ptr::without_provenance_mut(at), iov_len: length })
}

/// How much was copied.
fn some(count: libc::ssize_t) -> io::Result<usize> {
    match check(count as libc::c_long)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        count => usize::try_from(count).map_err(io::Error::other),
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        // SAFETY: letting go changes no memory of ours; a process that has ended has nothing to let go of.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.pid, 0_usize, 0_usize) };
    }
}
