//! The only place with `unsafe`: raw system calls, fork, immediate exit and the foreign call gates.
//!
//! An attacker does not go through a friendly library, so the attacks call the kernel directly. Arguments
//! are typed ([`Arg`]) so that a pointer is always that of a live buffer; the attack chooses a buffer at
//! least as large as the call fills. Not for calls that would unmap or replace Rust-owned memory.
#![expect(unsafe_code, reason = "attacks are raw system calls; every unsafe block of the crate is here")]

use rustix::io::Errno;
use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One argument of a raw system call.
#[derive(Debug)]
pub(crate) enum Arg<'a> {
    Int(i64),
    Text(&'a CStr),
    In(&'a [u8]),
    Out(&'a mut [u8]),
    Null,
}

/// A null pointer, where `0` would read as a number.
pub(crate) const NULL: Arg<'static> = Arg::Null;

macro_rules! arg_from {
    ($($from:ty => |$value:ident| $make:expr;)*) => {
        $(impl<'a> From<$from> for Arg<'a> {
            fn from($value: $from) -> Self { $make }
        })*
    };
}

arg_from! {
    i32 => |value| Arg::Int(i64::from(value));
    u32 => |value| Arg::Int(i64::from(value));
    i64 => |value| Arg::Int(value);
    u64 => |value| Arg::Int(value.cast_signed());
    usize => |value| Arg::Int((value as u64).cast_signed());
    &'a CStr => |value| Arg::Text(value);
    &'a [u8] => |value| Arg::In(value);
    &'a mut [u8] => |value| Arg::Out(value);
}

impl<'a, const N: usize> From<&'a [u8; N]> for Arg<'a> {
    fn from(value: &'a [u8; N]) -> Self {
        Arg::In(value)
    }
}

impl<'a, const N: usize> From<&'a mut [u8; N]> for Arg<'a> {
    fn from(value: &'a mut [u8; N]) -> Self {
        Arg::Out(value)
    }
}

impl Arg<'_> {
    fn raw(&mut self) -> i64 {
        match self {
            Arg::Int(value) => *value,
            Arg::Text(text) => address(text.as_ptr().expose_provenance()),
            Arg::In(bytes) => address(bytes.as_ptr().expose_provenance()),
            Arg::Out(bytes) => address(bytes.as_mut_ptr().expose_provenance()),
            Arg::Null => 0,
        }
    }
}

fn address(value: usize) -> i64 {
    (value as u64).cast_signed()
}

/// Makes the system call `nr`; `Ok` carries its (non-negative) return value.
pub(crate) fn call<const N: usize>(nr: i64, mut args: [Arg<'_>; N]) -> Result<u64, Errno> {
    let mut raw = [0_i64; 6];
    for (slot, arg) in raw.iter_mut().zip(args.iter_mut()) {
        *slot = arg.raw();
    }
    // SAFETY: every pointer among the arguments is that of a buffer borrowed in `args` until after the
    // call, and callers size `Out` buffers for what the call writes; the other arguments are integers.
    let returned = unsafe { libc::syscall(nr, raw[0], raw[1], raw[2], raw[3], raw[4], raw[5]) };
    u64::try_from(returned).map_err(|_| last_errno())
}

/// `sys!(SYS_mount, c"none", c"/mnt", …)`: [`call`] with each argument converted.
macro_rules! sys {
    ($nr:ident $(, $arg:expr)* $(,)?) => {
        $crate::sys::call(libc::$nr, [$($crate::sys::Arg::from($arg)),*])
    };
}
pub(crate) use sys;

pub(crate) fn last_errno() -> Errno {
    Errno::from_raw_os_error(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

/// Ends this process at once, without destructors or buffered output: for forked children.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: _exit takes no pointers and does not return.
    unsafe { libc::_exit(code) }
}

/// Forks; the child runs `body` and ends with its value, or with 101 when it panics.
///
/// The program has one thread wherever this is called (threads are started only in children that do not
/// fork again), so the child may use everything the parent could. Unit tests have more; what their children do
/// (allocate, write to a pipe, signal themselves) glibc keeps safe after a fork.
pub(crate) fn fork(body: impl FnOnce() -> i32) -> Result<i32, Errno> {
    // SAFETY: the process has a single thread, so no lock can be held by a thread the child lacks.
    match unsafe { libc::fork() } {
        -1 => Err(last_errno()),
        0 => exit_now(catch_unwind(AssertUnwindSafe(body)).unwrap_or(101)),
        child => Ok(child),
    }
}

/// `getpid` through the 32-bit gate `int 0x80`, which a filter that knows only the 64-bit table misses.
#[cfg(target_arch = "x86_64")]
pub(crate) fn getpid_int80() -> i64 {
    let mut value: i64 = 20; // __NR_getpid of i386
    // SAFETY: getpid has no arguments and no side effects. The kernel clobbers r8 to r11 on this gate, which
    // are declared; everything else is preserved.
    unsafe {
        core::arch::asm!("int 0x80", inout("rax") value, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    value
}
