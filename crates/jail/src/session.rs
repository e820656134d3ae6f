//! The namespaces of one session inside a box: its own pids and its own view of `/proc`.
//!
//! The agent stays in the box's outer pid namespace. It makes a session's *init* with new pid and mount
//! namespaces, and injects every further process of the session by `setns` + fork: such a process is the
//! agent's own child, yet lives in the session's namespace, where neither the agent nor other sessions exist.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    process::{DumpableBehavior, PidfdFlags, getpid, pidfd_open, set_dumpable_behavior},
    thread::{ThreadNameSpaceType, move_into_thread_name_spaces},
};

use crate::{
    mounts,
    sys::{self, Forked, SingleThread},
};

/// A child of the agent.
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
            let ready = mounts::enter_session(hidden, sealed);
            sys::exit_now(body(ready))
        }
    }
}

/// Forks a process into a session, or beside the agent when there is no session namespace (weak isolation).
pub fn fork_into(
    thread: &SingleThread,
    init: Option<&OwnedFd>,
    body: impl FnOnce(io::Result<()>) -> i32,
) -> io::Result<Child> {
    let own = match init {
        Some(init) => {
            let own = pidfd_open(getpid(), PidfdFlags::empty())?;
            move_into_thread_name_spaces(init.as_fd(), ThreadNameSpaceType::PROCESS_ID)?;
            Some(own)
        }
        None => None,
    };
    let forked = sys::fork(thread, 0, None);
    if let Ok(Forked::Child) = forked {
        // Weighs first when memory runs out, long before the agent. Inherited by all that follows.
        let heavy = std::fs::write("/proc/self/oom_score_adj", "1000");
        let inside = match init {
            Some(init) => {
                move_into_thread_name_spaces(init.as_fd(), ThreadNameSpaceType::MOUNT).map_err(Into::into)
            }
            None => Ok(()),
        };
        sys::exit_now(body(heavy.and(inside)))
    }
    if let Some(own) = own {
        // Back to where further sessions are made. Failing here would put them into the wrong place.
        move_into_thread_name_spaces(own.as_fd(), ThreadNameSpaceType::PROCESS_ID)?;
    }
    match forked? {
        Forked::Parent { pid, pidfd } => Ok(Child { pid, pidfd }),
        Forked::Child => Err(io::Error::other("unreachable: the child never comes here")),
    }
}

/// Closed to ptrace, `/proc/PID/environ` and the like, also for the same user.
pub fn undumpable() -> rustix::io::Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
}
