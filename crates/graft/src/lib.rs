//! The graft: turns a fresh, confined process into a copy of a warm interpreter.
//!
//! A *warm parent* is an interpreter that has loaded everything and waits, in a box of its own, before the first byte of
//! anybody's code. `carrel_jail::image` writes its memory down once ([`format`] says how). A copy is made by executing the
//! agent's own program as `graft`: its entry point ([`overlay`]) runs before any library does, maps the image over its own
//! address space and goes on where the parent stood. Being executed where an interpreter would be, a copy has the same user,
//! limits, namespaces, filters and parents as one that was started; only its memory is not its own.
//!
//! Nothing is written before the mapping is complete, and whatever is not as the image says ends the process with
//! [`format::FAILED`]: the agent then starts an interpreter instead. Deliberately absent: any other architecture than
//! x86-64, threads in the parent, descriptors (a copy starts with those it was executed with).

#![no_std]
// The compiler must not turn loops into calls of a C library that is not ready yet.
#![no_builtins]

pub mod format;
#[cfg(target_arch = "x86_64")]
mod overlay;
