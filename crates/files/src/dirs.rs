//! Making directories and moving things.

use std::os::fd::{AsFd, BorrowedFd};

use carrel_proto::files::{Entry, GuestPath, Kind};
use rustix::{
    fs::{self, Mode, OFlags, RenameFlags},
    io::Errno,
    process,
};

use crate::{
    FileError, Root,
    root::{Owner, STRICT, open_at},
    stage::dress,
};

pub(crate) const NEW_DIR_MODE: u32 = 0o755;

impl Root {
    /// Makes a directory. With `parents` those above too, and one that exists is fine.
    pub fn mkdir(&self, path: &GuestPath, parents: bool, mode: Option<u32>) -> Result<Entry, FileError> {
        if !parents {
            self.mkdir_one(path, mode)?;
            return self.stat(path, false);
        }
        // From the longest that exists on down: few calls in the usual case, and no recursion.
        let mut missing = Vec::new();
        let mut at = path.clone();
        loop {
            match self.resolve(&at, OFlags::PATH | OFlags::DIRECTORY) {
                Ok(_) => break,
                Err(FileError::NotFound { .. }) => {}
                Err(other) => return Err(other),
            }
            let Some((parent, _)) = at.split() else { break };
            missing.push(std::mem::replace(&mut at, parent));
        }
        for (left, dir) in missing.iter().enumerate().rev() {
            match self.mkdir_one(dir, if left == 0 { mode } else { None }) {
                // Somebody else was quicker; whether it is a directory shows at the next step.
                Err(FileError::Exists { .. }) => {}
                other => other?,
            }
        }
        let entry = self.stat(path, true)?;
        match entry.kind {
            Kind::Dir => Ok(entry),
            _ => Err(FileError::NotADirectory { path: path.to_string() }),
        }
    }

    fn mkdir_one(&self, path: &GuestPath, mode: Option<u32>) -> Result<(), FileError> {
        if path.split().is_none_or(|(_, name)| name == b"..") {
            return Err(FileError::Exists { path: path.to_string() });
        }
        let slot = self.locate(path, false)?;
        let made = make_dir(slot.dir.as_fd(), &slot.name, mode.unwrap_or(NEW_DIR_MODE), self.owner);
        self.note_change();
        made.map_err(|e| FileError::at(path, e))
    }

    /// Renames `from` to exactly `to`. Links are moved, not followed. Without `overwrite` an existing `to` is an
    /// error; with it a file or an empty directory is replaced.
    pub fn rename(
        &self,
        from: &GuestPath,
        to: &GuestPath,
        overwrite: bool,
        parents: bool,
    ) -> Result<Entry, FileError> {
        let source = self.locate(from, false)?;
        if parents && let Some((parent, _)) = to.split() {
            // Not for nothing: the source must be there before directories are made for it.
            self.stat(from, false)?;
            self.mkdir(&parent, true, None)?;
        }
        let target = self.locate(to, false)?;
        let flags = if overwrite { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        fs::renameat_with(&source.dir, source.name.as_slice(), &target.dir, target.name.as_slice(), flags)
            .map_err(|errno| match errno {
                Errno::INVAL => FileError::argument(format!("{from} cannot be moved into itself")),
                Errno::XDEV => FileError::Unsupported { what: "moving between file systems" },
                Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR | Errno::NOTDIR => FileError::at(to, errno),
                other => FileError::at(from, other),
            })?;
        self.note_change();
        self.stat(to, false)
    }
}

/// Makes the directory `name` and gives it its mode and owner. If the box puts another directory in its place at
/// once, that one is dressed instead only if it is ours; everything there that is ours, we made for the box.
pub(crate) fn make_dir(
    dir: BorrowedFd<'_>,
    name: &[u8],
    mode: u32,
    owner: Option<Owner>,
) -> Result<(), Errno> {
    fs::mkdirat(dir, name, Mode::RWXU)?;
    let made = open_at(dir, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW, STRICT)?;
    if fs::fstat(&made)?.st_uid == process::geteuid().as_raw() {
        dress(&made, mode, owner)?;
    }
    Ok(())
}
