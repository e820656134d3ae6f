//! The namespaces of one session inside a box: its own pids and its own view of `/proc`.
//!
//! The agent stays in the box's outer pid namespace. It makes a session's *init* with new pid and mount
//! namespaces; every further process of the session descends from that, where neither the agent nor other sessions exist.

use std::{io, os::fd::OwnedFd};

use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use crate::{
    mounts,
    sys::{self, Forked, SingleThread},
};

/// A process of a box, and a name for it that is never reused.
#[derive(Debug)]
pub struct Child {
    pub pid: i32,
    pub pidfd: OwnedFd,
}

/// Forks a session's init: pid 1 of a new pid namespace, with mounts of its own. `body` never returns to the
/// agent's code: its value is the exit code.
pub fn fork_init(
    thread: &SingleThread,
    hidden: &str,
    sealed: &str,
    body: impl FnOnce(io::Result<()>) -> i32,
) -> io::Result<Child> {
    let namespaces = (libc::CLONE_NEWPID | libc::CLONE_NEWNS) as u64;
    match sys::fork(thread, namespaces, None)? {
        Forked::Parent { pid, pidfd } => Ok(Child { pid, pidfd }),
        Forked::Child => {
            // While `/proc` can still be written.
            let ready = weigh_first().and_then(|()| mounts::enter_session(hidden, sealed));
            sys::exit_now(body(ready))
        }
    }
}

/// Forks a process beside the agent, where there is no session namespace (weak isolation).
pub fn fork_beside(thread: &SingleThread, body: impl FnOnce(io::Result<()>) -> i32) -> io::Result<Child> {
    match sys::fork(thread, 0, None)? {
        Forked::Parent { pid, pidfd } => Ok(Child { pid, pidfd }),
        Forked::Child => sys::exit_now(body(weigh_first())),
    }
}

/// Weighs first when memory runs out, long before the agent. Inherited by all that follows; among equals the kernel
/// takes the biggest, which no init or runner is.
fn weigh_first() -> io::Result<()> {
    std::fs::write("/proc/self/oom_score_adj", "1000")
}

/// Closed to ptrace, `/proc/PID/environ` and the like, also for the same user.
pub fn undumpable() -> rustix::io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
}
