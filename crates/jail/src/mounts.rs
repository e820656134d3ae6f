//! The root of a box, assembled with the new mount API: a plan as data, and its execution.
//!
//! Binds are opened as detached trees first. A privileged stage opens them before it enters the user
//! namespace, where paths such as `/root/…` would be closed to it; an ordinary user's stage opens them inside,
//! with the same eyes as before.

use std::{
    fs, io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{AtFlags, CWD, Mode, OFlags, chmodat, chownat, mkdirat, openat, symlinkat},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
        OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen, mount,
        mount_change, move_mount, open_tree, unmount,
    },
    process::{Gid, Uid, fchdir, pivot_root},
};
use serde::{Deserialize, Serialize};

use crate::sys::{self, MountAttributes};

/// For the root's own few files, and those in its [`Step::Open`].
const ROOT_SIZE: u64 = 65 << 20;

/// One step of a plan. Targets are absolute paths inside the box; missing parents are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "step", rename_all = "snake_case")]
pub enum Step {
    /// A host file or directory with everything mounted below it.
    Bind {
        source: String,
        target: String,
        writable: bool,
        device: bool,
    },
    /// A host directory whose owner is shown as the box's user (needs root).
    BindAsUser {
        source: String,
        target: String,
        writable: bool,
    },
    Tmpfs {
        target: String,
        size: u64,
        mode: u32,
        user: bool,
    },
    Dir {
        target: String,
        mode: u32,
        user: bool,
    },
    /// A directory of the root itself, to which can be written when the root is sealed.
    Open {
        target: String,
        mode: u32,
    },
    Symlink {
        target: String,
        link: String,
    },
    File {
        target: String,
        content: String,
    },
    Proc {
        target: String,
    },
    Devpts {
        target: String,
    },
}

/// A failed step, with the words an operator needs.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {source}")]
pub struct MountError {
    what: String,
    source: io::Error,
}

trait Explain<T> {
    fn explain(self, what: impl FnOnce() -> String) -> Result<T, MountError>;
}

impl<T, E: Into<io::Error>> Explain<T> for Result<T, E> {
    fn explain(self, what: impl FnOnce() -> String) -> Result<T, MountError> {
        self.map_err(|error| MountError { what: what(), source: error.into() })
    }
}

/// The detached tree of a bind step.
#[derive(Debug)]
pub struct Tree(OwnedFd);

/// Opens the tree of one bind step; `None` for other steps. `idmap` shows the owner as the box's user.
pub fn open_bind(step: &Step, idmap: Option<BorrowedFd<'_>>) -> Result<Option<Tree>, MountError> {
    let (source, writable, device) = match step {
        Step::Bind { source, writable, device, .. } => (source, *writable, *device),
        Step::BindAsUser { source, writable, .. } => (source, *writable, false),
        _ => return Ok(None),
    };
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let tree = open_tree(CWD, source, flags).explain(|| format!("opening {source} for the box"))?;
    let mut set = sys::MOUNT_NO_SUID;
    set |= if writable { 0 } else { sys::MOUNT_READ_ONLY };
    set |= if device { sys::MOUNT_NO_EXEC } else { sys::MOUNT_NO_DEV };
    let attributes = MountAttributes { set, idmap, private: true };
    sys::mount_setattr(tree.as_fd(), true, attributes)
        .explain(|| format!("protecting the mount of {source}"))?;
    Ok(Some(Tree(tree)))
}

/// The processes of this pid namespace, for a box whose user namespace does not own it.
pub fn open_proc() -> io::Result<Tree> {
    Ok(Tree(special("proc", &[])?))
}

/// Makes the new root on the working directory and fills it. `trees` are the opened binds, in the plan's order; those
/// that are missing are opened here.
pub fn assemble(plan: &[Step], trees: Vec<Option<Tree>>, user: (u32, u32)) -> Result<OwnedFd, MountError> {
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)
        .explain(|| "making the mounts private".into())?;
    let root = tmpfs(ROOT_SIZE, 0o755).explain(|| "making the root".into())?;
    attach(&root, CWD, ".").explain(|| "mounting the root".into())?;
    let mut trees = trees.into_iter();
    for step in plan {
        let tree = trees.next().flatten();
        execute(root.as_fd(), step, tree, user)?;
    }
    Ok(root)
}

fn execute(
    root: BorrowedFd<'_>,
    step: &Step,
    tree: Option<Tree>,
    user: (u32, u32),
) -> Result<(), MountError> {
    let own = |path: &str| {
        chownat(root, path, Some(Uid::from_raw(user.0)), Some(Gid::from_raw(user.1)), AtFlags::empty())
    };
    match step {
        Step::Bind { source, target, .. } | Step::BindAsUser { source, target, .. } => {
            let tree = match tree {
                Some(tree) => tree,
                None => open_bind(step, None)?
                    .ok_or(io::Error::from(io::ErrorKind::InvalidInput))
                    .explain(String::new)?,
            };
            let is_dir = rustix::fs::fstat(&tree.0).is_ok_and(|stat| stat.st_mode & 0o170_000 == 0o040_000);
            let path = make_target(root, target, is_dir)?;
            attach(&tree.0, root, path).explain(|| format!("mounting {source} on {target}"))
        }
        Step::Tmpfs { target, size, mode, user } => {
            let path = make_target(root, target, true)?;
            let fs = tmpfs(*size, *mode).explain(|| format!("making a tmpfs for {target}"))?;
            attach(&fs, root, path).explain(|| format!("mounting a tmpfs on {target}"))?;
            if *user { own(path).explain(|| format!("giving {target} to the user")) } else { Ok(()) }
        }
        Step::Dir { target, mode, user } => {
            let path = make_target(root, target, true)?;
            chmodat(root, path, Mode::from_raw_mode(*mode), AtFlags::empty())
                .explain(|| format!("setting the mode of {target}"))?;
            if *user { own(path).explain(|| format!("giving {target} to the user")) } else { Ok(()) }
        }
        Step::Open { target, mode } => {
            let path = make_target(root, target, true)?;
            chmodat(root, path, Mode::from_raw_mode(*mode), AtFlags::empty())
                .explain(|| format!("setting the mode of {target}"))?;
            // A mount of its own, and no file system: those are dear when there are thousands of boxes.
            let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let tree = open_tree(root, path, flags).explain(|| format!("opening {target}"))?;
            attach(&tree, root, path).explain(|| format!("mounting {target}"))
        }
        Step::Symlink { target, link } => with_parents(root, target, |path| symlinkat(link, root, path))?
            .map(drop)
            .explain(|| format!("linking {target}")),
        Step::File { target, content } => {
            let path = make_target(root, target, false)?;
            let file = openat(root, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())
                .explain(|| format!("writing {target}"))?;
            rustix::io::write(&file, content.as_bytes()).explain(|| format!("writing {target}")).map(drop)
        }
        Step::Proc { target } => {
            let path = make_target(root, target, true)?;
            let fs = match tree {
                Some(Tree(fs)) => fs,
                None => special("proc", &[]).explain(|| "making a proc file system".into())?,
            };
            attach(&fs, root, path).explain(|| format!("mounting proc on {target}"))
        }
        Step::Devpts { target } => {
            let path = make_target(root, target, true)?;
            let fs = special("devpts", &[("ptmxmode", "0666"), ("mode", "0620")])
                .explain(|| "making a terminal file system".into())?;
            attach(&fs, root, path).explain(|| format!("mounting terminals on {target}"))
        }
    }
}

fn tmpfs(size: u64, mode: u32) -> rustix::io::Result<OwnedFd> {
    // One inode per 16 KB, with a floor: small files must not fill memory through their inodes.
    let inodes = (size >> 14).max(1024);
    special(
        "tmpfs",
        &[("size", &size.to_string()), ("mode", &format!("{mode:o}")), ("nr_inodes", &inodes.to_string())],
    )
}

fn special(kind: &str, options: &[(&str, &str)]) -> rustix::io::Result<OwnedFd> {
    let fs = fsopen(kind, FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in options {
        fsconfig_set_string(&fs, *key, *value)?;
    }
    fsconfig_create(&fs)?;
    let mut attributes = MountAttrFlags::MOUNT_ATTR_NOSUID;
    attributes |= match kind {
        // Programs may be built and run in /tmp and the home directory, as anywhere.
        "tmpfs" => MountAttrFlags::MOUNT_ATTR_NODEV,
        "devpts" => MountAttrFlags::MOUNT_ATTR_NOEXEC,
        _ => MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC,
    };
    fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn attach<P: rustix::path::Arg>(tree: &OwnedFd, at: BorrowedFd<'_>, path: P) -> rustix::io::Result<()> {
    move_mount(tree, "", at, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

/// Makes `target` with `make`, which is given its path relative to the root; its parents only if they are missing, which
/// they seldom are.
fn with_parents<'a>(
    root: BorrowedFd<'_>,
    target: &'a str,
    make: impl Fn(&'a str) -> rustix::io::Result<()>,
) -> Result<rustix::io::Result<&'a str>, MountError> {
    let path = target.trim_start_matches('/');
    match make(path) {
        Err(rustix::io::Errno::NOENT) => {}
        made => return Ok(made.map(|()| path)),
    }
    for (end, _) in path.match_indices('/') {
        match mkdirat(root, &path[..end], Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).explain(|| format!("making the parents of {target}")),
        }
    }
    Ok(make(path).map(|()| path))
}

fn make_target<'a>(root: BorrowedFd<'_>, target: &'a str, directory: bool) -> Result<&'a str, MountError> {
    let made = with_parents(root, target, |path| {
        if directory {
            mkdirat(root, path, Mode::from_raw_mode(0o755))
        } else {
            openat(root, path, OFlags::CREATE | OFlags::CLOEXEC | OFlags::RDONLY, Mode::from_raw_mode(0o644))
                .map(drop)
        }
    })?;
    match made {
        Ok(path) => Ok(path),
        Err(rustix::io::Errno::EXIST) => Ok(target.trim_start_matches('/')),
        Err(error) => Err(error).explain(|| format!("making {target}")),
    }
}

/// Makes `root` the root of this mount namespace and lets go of everything else. It becomes read-only: where agent and user code have
/// one id, user code could otherwise put its own files there, as in `/dev`.
pub fn enter(root: &OwnedFd) -> Result<(), MountError> {
    let seal = MountAttributes { set: sys::MOUNT_READ_ONLY, ..Default::default() };
    sys::mount_setattr(root.as_fd(), false, seal).explain(|| "sealing the root".into())?;
    fchdir(root).explain(|| "entering the root".into())?;
    pivot_root(".", ".").explain(|| "changing the root".into())?;
    unmount(".", UnmountFlags::DETACH).explain(|| "letting go of the host's root".into())
}

/// What of `/proc` says more about the host than a box needs.
pub const MASKED: &[&str] = &[
    "acpi",
    "asound",
    "interrupts",
    "kallsyms",
    "kcore",
    "keys",
    "latency_stats",
    "sched_debug",
    "scsi",
    "sysrq-trigger",
    "timer_list",
];

/// What a masked directory is covered with.
pub const EMPTY: &str = "/run/carrel/empty";

/// Whether a name of [`MASKED`] is a directory where the kernel has it.
pub fn is_masked_directory(name: &str) -> bool {
    fs::metadata(format!("/proc/{name}")).is_ok_and(|meta| meta.is_dir())
}

/// Inside a session's new mount namespace: its own processes in `/proc`, read-only, and what only the agent may
/// see taken away. `hidden` is unmounted, `sealed` becomes read-only.
pub fn enter_session(hidden: &str, sealed: &str) -> io::Result<()> {
    unmount(hidden, UnmountFlags::DETACH)?;
    let sealed = openat(CWD, sealed, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let seal = MountAttributes { set: sys::MOUNT_READ_ONLY, ..Default::default() };
    sys::mount_setattr(sealed.as_fd(), false, seal)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::RDONLY;
    mount("proc", "/proc", "proc", flags, None)?;
    for name in MASKED {
        let path = format!("/proc/{name}");
        match fs::metadata(&path) {
            Ok(meta) if meta.is_dir() => rustix::mount::mount_bind(EMPTY, path.as_str())?,
            Ok(_) => rustix::mount::mount_bind("/dev/null", path.as_str())?,
            Err(_) => {}
        }
    }
    Ok(())
}
