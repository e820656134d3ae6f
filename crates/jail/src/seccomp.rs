//! The system call filter of user code: an allow-list, compiled from `policy/seccomp.json` at build time.

use std::io;

use crate::sys;

/// One instruction, laid out as the kernel's `sock_filter`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Instruction {
    pub code: u16,
    pub jt: u8,
    pub jf: u8,
    pub k: u32,
}

mod filters {
    use super::Instruction;
    include!(concat!(env!("OUT_DIR"), "/seccomp_filters.rs"));
}

/// Confines this process and its children for good. `no_new_privs` must be set.
///
/// Two filters: `allow` refuses with EPERM what is not listed; `absent` answers ENOSYS for calls whose
/// callers know what to do without them (libc falls back from clone3 to clone).
pub fn confine() -> io::Result<()> {
    sys::seccomp_load(filters::ABSENT)?;
    sys::seccomp_load(filters::ALLOW)
}
