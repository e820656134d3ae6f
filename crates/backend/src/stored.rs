//! The files of a box in a store: the other half of a snapshot, beside what [`crate::checkpoint`] writes.
//!
//! ```text
//! STORE/workspace.ext4   or workspace/: as it was at one moment
//!       spool/           output of execs that the agent in the image knows of
//!       image/           memory
//! ```
//! Copies share their blocks with what they are of where the file system can do that. Files keep the owners that they had; a box
//! that they are given to has other ids, and they become its own.

use std::{
    fs, io,
    os::unix::fs::{MetadataExt, PermissionsExt, fchown, lchown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use carrel_jail::{
    stage,
    userns::{self, Ids, Mapping},
    workspace::{self, Kind, Ready},
};
use carrel_proto::{
    guest::{IMPORTS, Places},
    limits::ByteSize,
    problem::{Code, Problem},
};

const IMAGE: &str = "workspace.ext4";
const DIRECTORY: &str = "workspace";
const SPOOL: &str = "spool";
/// What an agent says of itself belongs to its own box.
pub(crate) const OWN: [&str; 5] = ["agent.json", "agent.log", "ended.json", IMPORTS, Places::OUTSIDE];

fn failed(what: &str) -> impl Fn(io::Error) -> Problem {
    let what = what.to_owned();
    move |error| match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            Problem::new(Code::Disk, format!("{what}: the host's disk is full")).hint(
                "remove snapshots (`carrel snapshots rm ID`) or sandboxes; nothing of this one was lost",
            )
        }
        _ => Problem::internal(format!("{what}: {error}")),
    }
}

pub(crate) fn put_files(directory: &Path, kind: Kind, store: &Path) -> Result<(), Problem> {
    let what = "copying the workspace";
    match kind {
        Kind::Image => {
            workspace::copy(&directory.join(DIRECTORY), &directory.join(IMAGE), &store.join(IMAGE))
                .map_err(failed(what))
        }
        Kind::Directory => {
            copy_tree(&directory.join(DIRECTORY), &store.join(DIRECTORY)).map_err(failed(what))
        }
    }
}

pub(crate) fn take_files(store: &Path, directory: &Path, from: &Ids, to: &Ids) -> Result<(), Problem> {
    let what = "copying the snapshot's files";
    let workspace = directory.join(DIRECTORY);
    let take = || -> io::Result<()> {
        let (image, kept) = (directory.join(IMAGE), store.join(IMAGE));
        if kept.exists() {
            fs::create_dir_all(&workspace)?;
            workspace::unfold(&kept, &workspace, &image)?;
        } else {
            if workspace.exists() {
                fs::remove_dir(&workspace)?;
            }
            copy_tree(&store.join(DIRECTORY), &workspace)?;
        }
        give_all(&workspace, from, to)
    };
    take().map_err(failed(what))
}

/// With everything but sockets, which are nobody's any more; links stay links.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    let output = Command::new("cp")
        .args(["--archive", "--reflink=auto", "--sparse=auto", "--no-target-directory", "--"])
        .args([from, to])
        .stdin(Stdio::null())
        .output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let kind = if said.contains("No space left") { io::ErrorKind::StorageFull } else { io::ErrorKind::Other };
    Err(io::Error::new(kind, said.lines().next().unwrap_or("cp failed").to_owned()))
}

/// What an owner in one box is in another.
pub(crate) fn owner_in(from: &Ids, to: &Ids, (uid, gid): (u32, u32)) -> (u32, u32) {
    let other = |from: &[Mapping], to: &[Mapping], id: u32| {
        let same = from.iter().zip(to).find(|(old, _)| old.outside == id);
        same.map_or(id, |(_, new)| new.outside)
    };
    (other(&from.uid, &to.uid, uid), other(&from.gid, &to.gid, gid))
}

/// What belonged to a box becomes another's. Nobody else has a hand in the tree.
fn give_all(root: &Path, from: &Ids, to: &Ids) -> io::Result<()> {
    if from == to {
        return Ok(());
    }
    let mut todo = vec![root.to_path_buf()];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path)?;
        let (uid, gid) = owner_in(from, to, (meta.uid(), meta.gid()));
        lchown(&path, Some(uid), Some(gid))?;
        if meta.is_dir() {
            for entry in fs::read_dir(&path)? {
                todo.push(entry?.path());
            }
        } else if meta.is_file() && meta.mode() & 0o6000 != 0 {
            // The kernel has taken these bits away with the owner.
            fs::set_permissions(&path, fs::Permissions::from_mode(meta.mode() & 0o7777))?;
        }
    }
    Ok(())
}

pub(crate) fn put_spool(directory: &Path, store: &Path) -> Result<(), Problem> {
    copy_spool(&directory.join(SPOOL), &store.join(SPOOL)).map(drop).map_err(failed("copying output"))
}

pub(crate) fn take_spool(store: &Path, directory: &Path, to: &Ids) -> Result<(), Problem> {
    let take = || -> io::Result<()> {
        let spool = directory.join(SPOOL);
        let agent = to.agent_outside();
        // Copies are ours, whoever had them; and an agent goes on writing to them.
        for path in copy_spool(&store.join(SPOOL), &spool)? {
            stage::give(&path, agent, agent)?;
        }
        Ok(())
    };
    take().map_err(failed("copying output"))
}

fn copy_spool(from: &Path, to: &Path) -> io::Result<Vec<PathBuf>> {
    fs::create_dir_all(to)?;
    let mut copied = Vec::new();
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let name = entry.file_name();
        if !entry.file_type()?.is_file() || OWN.iter().any(|own| name == *own) {
            continue;
        }
        fs::copy(entry.path(), to.join(&name))?;
        copied.push(to.join(&name));
    }
    Ok(copied)
}

/// An image is never changed, so that another name for its files is as good as a copy.
pub(crate) fn put_image(image: &Path, store: &Path) -> Result<(), Problem> {
    let mut todo = vec![(image.to_path_buf(), store.to_path_buf())];
    let mut put = || -> io::Result<()> {
        while let Some((from, to)) = todo.pop() {
            fs::create_dir(&to)?;
            for entry in fs::read_dir(&from)? {
                let entry = entry?;
                let target = to.join(entry.file_name());
                if entry.file_type()?.is_dir() {
                    todo.push((entry.path(), target));
                } else if fs::hard_link(entry.path(), &target).is_err() {
                    fs::copy(entry.path(), target)?;
                }
            }
        }
        Ok(())
    };
    put().map_err(failed("copying the image"))
}

pub(crate) fn fill(
    store: &Path,
    disk: ByteSize,
    templates: &Path,
    ids: &Ids,
    fill: &mut dyn FnMut(&carrel_files::Root) -> Result<(), Problem>,
) -> Result<Kind, Problem> {
    let failed = failed("making a workspace");
    let (uid, gid) = ids.user_outside();
    let kind = workspace::probe(disk).0;
    let directory = store.join(DIRECTORY);
    let (root, ready) = match kind {
        Kind::Image => {
            // In no directory: gone with this process, however that ends, until it is kept.
            let ready = Ready::make(templates, disk).map_err(&failed)?;
            (ready.root().map_err(&failed)?, Some(ready))
        }
        Kind::Directory => {
            fs::create_dir(&directory).map_err(&failed)?;
            (fs::File::open(&directory).map_err(&failed)?.into(), None)
        }
    };
    fchown(&root, Some(uid), Some(gid)).map_err(&failed)?;
    let root = carrel_files::Root::from_fd(root)?;
    fill(&match userns::has_many_ids() {
        true => root.with_owner(carrel_files::Owner { uid, gid }),
        false => root,
    })?;
    if let Some(ready) = ready {
        ready.keep(&store.join(IMAGE)).map_err(failed)?;
    }
    Ok(kind)
}

pub(crate) fn look(store: &Path) -> Result<carrel_files::Root, Problem> {
    let image = store.join(IMAGE);
    if !image.exists() {
        return Ok(carrel_files::Root::open(store.join(DIRECTORY))?);
    }
    let mount = workspace::look(&image).map_err(|error| {
        Problem::new(Code::StateLost, format!("the files of the snapshot cannot be read: {error}"))
            .hint("its file system is damaged; `fsck.ext4` may mend it")
    })?;
    Ok(carrel_files::Root::from_fd(mount)?)
}
