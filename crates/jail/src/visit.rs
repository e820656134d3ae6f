//! A program of the host's at work on a box: the one that writes processes to disk and brings them back.
//!
//! It sees the host's files and has the host's rights, and stands in the box's network, IPC and other shared namespaces, so
//! that these are not part of what is written. To bring processes back it also stands in the box's pid namespace, finds the
//! box's mounts at a place in its own view of them, and has the agent's ends of what the processes were connected to.
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
    sys::{self, Forked, MountAttributes, SingleThread},
    userns,
};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Visit {
    /// The box's agent, as the host sees it.
    pub agent: i32,
    pub program: PathBuf,
    pub arguments: Vec<String>,
    pub way: Way,
    /// A directory in memory that the program finds as `/run`: what it learned of the kernel is kept there, and learning it
    /// takes longer than the rest of its work.
    pub memory: Option<PathBuf>,
}

/// How close the program gets.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Way {
    /// To write processes.
    Write,
    /// To bring processes back.
    BringBack(Inside),
    /// To move files in or out, with the rights of the box's own root and no more.
    Files(Files),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Files {
    /// Where the program stands.
    pub directory: PathBuf,
    /// What it reads as its standard input.
    pub input: Option<PathBuf>,
    /// What its standard output is written to.
    pub output: Option<PathBuf>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Inside {
    /// A directory of the host's, open to all on the way to it, where the program finds the mounts, each by its number in the list.
    pub place: PathBuf,
    /// Mounts of the box, or what is in them. One by one: a mount with others on it could not be had alone in the user
    /// namespace of those who come back.
    /// The second word: not to be written to.
    pub mounts: Vec<(String, bool)>,
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
    let inside = match visit.way.clone() {
        Way::Write => {
            own_mounts(&visit)?;
            // What is at the standard output stays open with the program, and is not written to: whoever waits at its other
            // end hears of the end of the last of us.
            std::mem::forget(rustix::io::dup(rustix::stdio::stdout())?);
            sys::place(&null, 1)?;
            move_into_thread_name_spaces(agent.as_fd(), shared)?;
            return Err(become_program(&visit));
        }
        Way::Files(files) => {
            stand_in(&files)?;
            move_into_thread_name_spaces(agent.as_fd(), ThreadNameSpaceType::USER)?;
            userns::become_ids(0, 0, true)?;
            return Err(become_program(&visit));
        }
        Way::BringBack(inside) => inside,
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
    show_mounts(&agent, &inside, &visit)?;
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

/// Everything that only the host's own root may open.
fn stand_in(files: &Files) -> io::Result<()> {
    if let Some(input) = &files.input {
        sys::place(File::open(input)?, 0)?;
    }
    if let Some(output) = &files.output {
        sys::place(File::create(output)?, 1)?;
    }
    std::env::set_current_dir(&files.directory)
}

/// A view of mounts that nobody else has.
fn own_mounts(visit: &Visit) -> io::Result<()> {
    sys::unshare_mounts()?;
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    if let Some(memory) = &visit.memory {
        rustix::mount::mount_bind(memory, "/run")?;
    }
    Ok(())
}

/// Copies of the box's mounts, in a mount namespace of our own.
fn show_mounts(agent: &OwnedFd, inside: &Inside, visit: &Visit) -> io::Result<()> {
    let host = File::open("/proc/self/ns/mnt")?;
    move_into_thread_name_spaces(agent.as_fd(), ThreadNameSpaceType::MOUNT)?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let mut trees = Vec::new();
    for (path, read_only) in &inside.mounts {
        let failed = |error: io::Error| io::Error::other(format!("{path} of the box: {error}"));
        let tree = open_tree(CWD, path, flags).map_err(|error| failed(error.into()))?;
        if *read_only {
            let seal = MountAttributes { set: sys::MOUNT_READ_ONLY, ..Default::default() };
            sys::mount_setattr(tree.as_fd(), false, seal).map_err(failed)?;
        }
        trees.push(tree);
    }
    move_into_link_name_space(host.as_fd(), None)?;
    own_mounts(visit)?;
    mount("tmpfs", &inside.place, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=711"))?;
    for (number, tree) in trees.iter().enumerate() {
        let at = inside.place.join(number.to_string());
        let is_dir = rustix::fs::fstat(tree).is_ok_and(|stat| stat.st_mode & 0o170_000 == 0o040_000);
        if is_dir {
            fs::create_dir(&at)?;
        } else {
            File::create(&at)?;
        }
        move_mount(tree, "", CWD, &at, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    }
    Ok(())
}

fn become_program(visit: &Visit) -> io::Error {
    Command::new(&visit.program)
        .args(&visit.arguments)
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .exec()
}
