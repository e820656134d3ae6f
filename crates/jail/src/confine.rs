//! What a process of user code loses before its first instruction.

use std::io;

use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

use serde::{Deserialize, Serialize};

use crate::{landlock, seccomp, sys, userns};

/// Confinement of one process and all that come from it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Confinement {
    /// Ids inside the box.
    pub user: (u32, u32),
    /// Whether ids are to be changed (the agent has others).
    pub change_ids: bool,
    pub writable: Vec<String>,
    /// Per-user process limit where no cgroup counts processes.
    pub nproc: Option<u64>,
    /// Per-process memory limit where no cgroup counts memory.
    pub data: Option<u64>,
    /// Largest file where no file system bounds the workspace.
    pub fsize: Option<u64>,
}

/// Open files per process: enough for any server, few enough that 256 processes stay under a million.
const OPEN_FILES: u64 = 4096;

/// Applied in a forked child, right before `exec`.
pub fn apply(confinement: &Confinement) -> io::Result<()> {
    limits(confinement)?;
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    for capability in CapabilitySet::all().iter() {
        // Unknown to this kernel, or not held: then there is nothing to drop.
        let _ = remove_capability_from_bounding_set(capability);
    }
    if confinement.change_ids {
        userns::become_ids(confinement.user.0, confinement.user.1, true)?;
    }
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    fence(confinement)
}

/// What is left without namespaces: the same fences, on the host's own file system and with the caller's own id.
pub fn apply_weak(confinement: &Confinement) -> io::Result<()> {
    limits(confinement)?;
    set_no_new_privs(true)?;
    fence(confinement)
}

fn limits(confinement: &Confinement) -> io::Result<()> {
    sys::limit(sys::LIMIT_CORE, 0)?;
    sys::limit(sys::LIMIT_NOFILE, OPEN_FILES)?;
    sys::limit(sys::LIMIT_MSGQUEUE, 64 << 10)?;
    let optional = [
        (sys::LIMIT_NPROC, confinement.nproc),
        (sys::LIMIT_DATA, confinement.data),
        (sys::LIMIT_FSIZE, confinement.fsize),
    ];
    for (resource, value) in optional {
        if let Some(value) = value {
            sys::limit(resource, value)?;
        }
    }
    Ok(())
}

fn fence(confinement: &Confinement) -> io::Result<()> {
    let writable: Vec<&str> = confinement.writable.iter().map(String::as_str).collect();
    landlock::confine(&writable).map_err(io::Error::other)?;
    seccomp::confine()
}
