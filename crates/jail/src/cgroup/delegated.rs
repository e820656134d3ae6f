//! A v2 subtree that was given to this user, and the rules of living in it.

use std::{fs, io, path::Path};

/// Where a process of a delegated cgroup goes so that others can be made beside it.
const OWN_LEAF: &str = "carrel-self";
/// A parent that another process has just removed with its last box is made again, so many times.
const ATTEMPTS: usize = 5;
const WANTED: [&str; 3] = ["memory", "pids", "cpu"];

pub(super) fn writable(directory: &Path) -> bool {
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok()
}

pub(super) fn make(directory: &Path) -> io::Result<()> {
    let mut made = Ok(());
    for _ in 0..ATTEMPTS {
        made = fs::create_dir_all(directory);
        match &made {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => break,
        }
    }
    made
}

/// A slice is systemd's own, also where its owner may write: what was turned on there is turned off again.
pub(super) fn is_slice(directory: &Path) -> bool {
    directory.extension().is_some_and(|kind| kind == "slice")
}

/// A cgroup with processes cannot have limited children. One that systemd has given to this process alone gets room
/// when the process moves into a leaf of it.
pub(super) fn step_aside(own: &Path) -> io::Result<Vec<String>> {
    let mut mark = [0; 1];
    let given = rustix::fs::getxattr(own, "user.delegate", &mut mark).is_ok() && mark == *b"1";
    let pid = std::process::id().to_string();
    if !given || fs::read_to_string(own.join("cgroup.procs"))?.trim() != pid {
        return Err(io::Error::other("it is in use, and not by this process alone"));
    }
    let leaf = own.join(OWN_LEAF);
    make(&leaf)?;
    fs::write(leaf.join("cgroup.procs"), &pid)?;
    enable(own)
}

/// Turns the wanted controllers on for children of `base`; says which are on.
pub(super) fn enable(base: &Path) -> io::Result<Vec<String>> {
    let control = base.join("cgroup.subtree_control");
    let offered = fs::read_to_string(base.join("cgroup.controllers"))?;
    let mut last = Ok(());
    for name in WANTED.iter().filter(|name| offered.split_whitespace().any(|other| other == **name)) {
        if let Err(error) = fs::write(&control, format!("+{name}")) {
            last = Err(error);
        }
    }
    let on: Vec<String> = fs::read_to_string(&control)?.split_whitespace().map(str::to_owned).collect();
    if on.iter().any(|name| name == "memory") {
        Ok(on)
    } else {
        last.and(Err(io::Error::other("no memory controller")))
    }
}
