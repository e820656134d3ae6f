//! A program of the host's at work on a box: the one that writes processes to disk and brings them back.
//!
//! It sees the host's files and has the host's rights, and stands in the box's network, IPC and other shared namespaces, so
//! that these are not part of what is written. To bring processes back it also stands in the box's pid namespace, finds the
//! box's root at a place in its own view of mounts, and has the agent's ends of what the processes were connected to.
//!
//! ```text
//! backend ── spawns ──> visit (host, one thread) ── setns ──> exec the program            (writing)
//!                         └─ fork ──> child in the box's pid namespace ── exec it         (bringing back)
//! ```

use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::PathBuf,
    process::Command,
};

use rustix::{
    fs::CWD,
    mount::{
        MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount,
        open_tree,
    },
    process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open},
    thread::{ThreadNameSpaceType, move_into_link_name_space, move_into_thread_name_spaces},
};
use serde::{Deserialize, Serialize};

use crate::{
    sys::{self, Forked, SingleThread},
    userns,
};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Visit {
    /// The box's agent, as the host sees it.
    pub agent: i32,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    /// To bring processes back.
    pub inside: Option<Inside>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Inside {
    /// An empty directory of the host's, where the program finds the box's root.
    pub root: PathBuf,
    /// `tasks` or `cgroup.procs` files of the box's cgroups.
    pub cgroups: Vec<PathBuf>,
    /// Descriptors of the agent's, and what they take the place of.
    pub files: Vec<(i32, String)>,
}

/// The whole life of a visit. Reads a [`Visit`] from standard input; its end is the program's.
pub fn run() -> i32 {
    match try_run() {
        Ok(code) => code,
        Err(error) => {
            let _ = rustix::io::write(rustix::stdio::stderr(), format!("{error}\n").as_bytes());
            1
        }
    }
}

fn try_run() -> io::Result<i32> {
    let thread = SingleThread::witness()?;
    let mut text = Vec::new();
    File::from(sys::inherited(0)?).read_to_end(&mut text)?;
    let null = File::options().read(true).write(true).open("/dev/null")?;
    sys::place(&null, 0)?;
    let mut visit: Visit = serde_json::from_slice(&text)?;
    let agent = pidfd_open(userns::pid(visit.agent), PidfdFlags::empty())?;
    let shared = ThreadNameSpaceType::NETWORK
        | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
        | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
        | ThreadNameSpaceType::CONTROL_GROUP;
    let Some(inside) = visit.inside.take() else {
        move_into_thread_name_spaces(agent.as_fd(), shared)?;
        return Err(become_program(&visit));
    };
    for file in &inside.cgroups {
        fs::write(file, "0")?;
    }
    let mut kept = Vec::new();
    for (number, name) in &inside.files {
        let file = pidfd_getfd(&agent, *number, PidfdGetfdFlags::empty())?;
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty())?;
        visit.arguments.push("--inherit-fd".into());
        visit.arguments.push(format!("fd[{}]:{name}", file.as_raw_fd()));
        kept.push(file);
    }
    show_root(&agent, &inside.root)?;
    move_into_thread_name_spaces(agent.as_fd(), shared | ThreadNameSpaceType::PROCESS_ID)?;
    match sys::fork(&thread, 0, None)? {
        Forked::Child => {
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            let error = match mount("proc", "/proc", "proc", flags, None) {
                Ok(()) => become_program(&visit),
                Err(error) => error.into(),
            };
            let _ = rustix::io::write(rustix::stdio::stderr(), format!("{error}\n").as_bytes());
            sys::exit_now(127)
        }
        Forked::Parent { pidfd, .. } => sys::wait_for(&pidfd),
    }
}

/// A copy of the box's mounts at `root`, in a mount namespace of our own.
fn show_root(agent: &OwnedFd, root: &std::path::Path) -> io::Result<()> {
    let host = File::open("/proc/self/ns/mnt")?;
    move_into_thread_name_spaces(agent.as_fd(), ThreadNameSpaceType::MOUNT)?;
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, "/", flags)?;
    move_into_link_name_space(host.as_fd(), None)?;
    sys::unshare_mounts()?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    move_mount(&tree, "", CWD, root, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    Ok(())
}

fn become_program(visit: &Visit) -> io::Error {
    Command::new(&visit.program)
        .args(&visit.arguments)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .exec()
}
