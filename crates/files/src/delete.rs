//! Deleting, also of trees that were built to resist it.
//!
//! The tree is emptied through descriptors, never through links. It may be deeper than we have descriptors for:
//! a directory found at depth [`MAX_OPEN`] is renamed to the top of the tree and handled from there, so each
//! level is visited once, and neither stack nor descriptors grow with the depth. The box may keep on adding; each
//! directory is tried a few times, then the deletion gives up with `not_empty`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use carrel_proto::files::{Deleted, GuestPath, Kind};
use rustix::{
    fs::{self, AtFlags, Dir, FileType, Mode, OFlags, RenameFlags},
    io::Errno,
};

use crate::{
    FileError, Root,
    root::{STRICT, Slot, kind_of, open_at},
    stage::temporary_name,
    walk::OPEN_DIR,
};

/// Levels held open at once: small beside the usual 1024 descriptors, large beside real trees.
const MAX_OPEN: usize = 64;
/// Rounds over a directory that is not empty after all was removed from it.
const MAX_ROUNDS: u32 = 16;
/// Removals after which a tree that still is not gone must be growing: more files than most disks hold.
const MAX_REMOVED: u64 = 100_000_000;

impl Root {
    /// Removes a file, a link (never what it leads to), an empty directory, or with `recursive` any directory.
    pub fn delete(&self, path: &GuestPath, recursive: bool) -> Result<Deleted, FileError> {
        let slot = self.locate(path, false)?;
        let fail = |errno| FileError::at(path, errno);
        let stat = fs::statat(&slot.dir, slot.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        if kind_of(&stat) != Kind::Dir {
            fs::unlinkat(&slot.dir, slot.name.as_slice(), AtFlags::empty()).map_err(fail)?;
            self.note_change();
            return Ok(Deleted { removed: 1 });
        }
        if !recursive {
            fs::unlinkat(&slot.dir, slot.name.as_slice(), AtFlags::REMOVEDIR).map_err(fail)?;
            self.note_change();
            return Ok(Deleted { removed: 1 });
        }
        let mut purge = Purge { slot, frames: Vec::new(), removed: 0, moved: 0 };
        let purged = purge.run();
        // It may have taken long.
        self.note_change();
        purged.map_err(fail)?;
        Ok(Deleted { removed: purge.removed })
    }
}

struct Purge {
    slot: Slot,
    frames: Vec<Frame>,
    removed: u64,
    /// Directories renamed to the top since its last round.
    moved: u64,
}

struct Frame {
    dir: Dir,
    name: Vec<u8>,
    rounds: u32,
}

/// What a name turned out to be.
enum Opened {
    Dir(OwnedFd),
    Other,
    Gone,
}

impl Purge {
    fn run(&mut self) -> Result<(), Errno> {
        let name = self.slot.name.clone();
        self.remove(name)?;
        while let Some(frame) = self.frames.last_mut() {
            if self.removed > MAX_REMOVED {
                return Err(Errno::NOTEMPTY);
            }
            match frame.dir.read() {
                None | Some(Err(Errno::NOENT)) => self.leave()?,
                Some(Err(errno)) => return Err(errno),
                Some(Ok(entry)) => {
                    let name = entry.file_name().to_bytes();
                    if matches!(name, b"." | b"..") {
                        continue;
                    }
                    let name = name.to_vec();
                    match entry.file_type() {
                        FileType::Directory | FileType::Unknown => self.remove(name)?,
                        // What was swapped for a directory since is met again in the next round.
                        _ => match fs::unlinkat(self.here()?, name, AtFlags::empty()) {
                            Ok(()) => self.removed += 1,
                            Err(Errno::NOENT | Errno::ISDIR) => {}
                            Err(errno) => return Err(errno),
                        },
                    }
                }
            }
        }
        Ok(())
    }

    /// The directory whose entries are being removed.
    fn here(&self) -> Result<BorrowedFd<'_>, Errno> {
        match self.frames.last() {
            Some(frame) => frame.dir.fd(),
            None => Ok(self.slot.dir.as_fd()),
        }
    }

    /// Removes `name` from here, or opens it to be emptied first.
    fn remove(&mut self, name: Vec<u8>) -> Result<(), Errno> {
        let here = self.here()?;
        match open_to_empty(here, &name)? {
            Opened::Gone => {}
            Opened::Other => match fs::unlinkat(here, name, AtFlags::empty()) {
                Ok(()) => self.removed += 1,
                Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(errno) => return Err(errno),
            },
            Opened::Dir(_) if self.frames.len() >= MAX_OPEN => {
                let top = self.frames[0].dir.fd()?;
                match fs::renameat_with(here, name, top, temporary_name()?, RenameFlags::NOREPLACE) {
                    Ok(()) => self.moved += 1,
                    Err(Errno::NOENT) => {}
                    Err(errno) => return Err(errno),
                }
            }
            Opened::Dir(fd) => self.frames.push(Frame { dir: Dir::new(fd)?, name, rounds: 0 }),
        }
        Ok(())
    }

    /// The innermost directory was read to its end.
    fn leave(&mut self) -> Result<(), Errno> {
        let Some(mut frame) = self.frames.pop() else { return Ok(()) };
        let here = self.here()?;
        match fs::unlinkat(here, frame.name.as_slice(), AtFlags::REMOVEDIR) {
            Ok(()) => self.removed += 1,
            Err(Errno::NOENT) => {}
            // The name is something else by now; whatever it is, it was to go.
            Err(Errno::NOTDIR) => match fs::unlinkat(here, frame.name, AtFlags::empty()) {
                Ok(()) => self.removed += 1,
                Err(Errno::NOENT | Errno::ISDIR) => {}
                Err(errno) => return Err(errno),
            },
            Err(Errno::NOTEMPTY | Errno::EXIST) => {
                if self.frames.is_empty() && self.moved > 0 {
                    self.moved = 0;
                    frame.rounds = 0;
                } else {
                    frame.rounds += 1;
                }
                if frame.rounds > MAX_ROUNDS {
                    return Err(Errno::NOTEMPTY);
                }
                frame.dir.rewind();
                self.frames.push(frame);
            }
            Err(errno) => return Err(errno),
        }
        Ok(())
    }
}

/// Opens a directory such that its entries can be removed: a box that shares our user can take its own
/// permissions away, and we give them back. The mode is changed through a descriptor (`fchmodat` would follow a
/// link put there meanwhile); for one that may not be read, `/proc/self/fd` is the way to do that.
fn open_to_empty(dir: BorrowedFd<'_>, name: &[u8]) -> Result<Opened, Errno> {
    let opened = match open_at(dir, name, OPEN_DIR | OFlags::NOFOLLOW, STRICT) {
        Err(Errno::ACCESS) => {
            let locked = open_at(dir, name, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW, STRICT)?;
            fs::chmod(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&locked)), Mode::RWXU)
                .map_err(|_| Errno::ACCESS)?;
            open_at(locked.as_fd(), b".", OPEN_DIR, STRICT)
        }
        other => other,
    };
    match opened {
        Ok(fd) => {
            if fs::fstat(&fd)?.st_mode & 0o700 != 0o700 {
                // Not ours to change: then the removals below it will say so.
                let _ = fs::fchmod(&fd, Mode::RWXU);
            }
            Ok(Opened::Dir(fd))
        }
        Err(Errno::NOTDIR | Errno::LOOP) => Ok(Opened::Other),
        Err(Errno::NOENT) => Ok(Opened::Gone),
        Err(errno) => Err(errno),
    }
}
