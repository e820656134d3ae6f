//! A file that has no name yet, for contents that come slowly and may break off: nobody sees it, it counts against the workspace's
//! own disk, and it is gone with its descriptor, however its writer ends.
//!
//! It becomes a file at the end, in one step: [`Root::place`]. Only then are directories made, so that a content that never came
//! whole leaves no trace.

use std::{
    fs::File,
    io::{self, Seek, Write},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{SystemTime, UNIX_EPOCH},
};

use carrel_proto::files::{Entry, GuestPath, Kind};
use rustix::{
    fs::{self, AtFlags, CWD, OFlags, RenameFlags, Timespec, Timestamps},
    io::Errno,
};

use crate::{
    FileError, Root, WriteOptions,
    root::{Owner, STRICT, Slot, Stamp, entry, expect_regular, kind_of, open_at, stamp},
    stage::{dress, temporary_name},
    write::NEW_FILE_MODE,
};

/// Contents without a place.
#[derive(Debug)]
pub struct Scratch {
    file: File,
}

impl Scratch {
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }
}

impl Write for Scratch {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.file.write(data)
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A file as it was put in its place.
#[derive(Debug)]
pub struct Placed {
    pub entry: Entry,
    pub stamp: Stamp,
    /// There was none of that name.
    pub created: bool,
}

impl Root {
    pub fn scratch(&self) -> Result<Scratch, FileError> {
        let file =
            open_at(self.dir.as_fd(), b".", OFlags::TMPFILE | OFlags::RDWR, STRICT).map_err(|e| match e {
                Errno::OPNOTSUPP | Errno::ISDIR => {
                    FileError::Unsupported { what: "files without a name, on this file system" }
                }
                other => FileError::at(".", other),
            })?;
        Ok(Scratch { file: file.into() })
    }

    /// Gives a scratch its place. `alone` is held while `meant` looks at the file that is there and the new one takes its
    /// place: whoever writes with the same lock cannot come in between.
    pub fn place<G>(
        &self,
        scratch: Scratch,
        path: &GuestPath,
        options: WriteOptions,
        alone: impl FnOnce() -> G,
        meant: impl FnOnce(Option<&Stamp>) -> bool,
    ) -> Result<Placed, FileError> {
        let fail = |errno| FileError::at(path, errno);
        if options.append && options.create_new {
            return Err(FileError::argument("append and overwrite=false exclude each other"));
        }
        if options.parents
            && let Some((parent, _)) = path.split()
        {
            self.mkdir(&parent, true, None)?;
        }
        if options.sync && !options.append {
            fs::fsync(&scratch.file).map_err(fail)?;
        }
        let held = alone();
        // For a file that must be new, a link counts as something of that name, wherever it leads.
        let slot = if options.create_new { self.locate(path, false)? } else { self.locate_file(path)? };
        let old = match fs::statat(&slot.dir, slot.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(fail(errno)),
        };
        if !meant(old.as_ref().map(stamp).as_ref()) {
            return Err(FileError::Changed { path: path.to_string() });
        }
        match &old {
            Some(_) if options.create_new => return Err(fail(Errno::EXIST)),
            // A link that appeared after it was resolved: replaced like any file would be.
            Some(stat) if kind_of(stat) == Kind::Symlink => {}
            Some(stat) => expect_regular(stat, path)?,
            None => {}
        }
        let (stat, dir) = if options.append {
            (self.add(scratch, path, slot, old.is_none(), options)?, None)
        } else {
            let stat = self.settle(scratch, &slot, old.as_ref(), options).map_err(fail)?;
            (stat, Some(slot.dir))
        };
        drop(held);
        self.note_change();
        if let Some(dir) = dir.filter(|_| options.sync) {
            let dir = open_at(dir.as_fd(), b".", OFlags::RDONLY | OFlags::DIRECTORY, STRICT).map_err(fail)?;
            fs::fsync(dir).map_err(fail)?;
        }
        let entry = entry(path.as_bytes(), &stat, None);
        Ok(Placed { entry, stamp: stamp(&stat), created: old.is_none() })
    }

    fn settle(
        &self,
        scratch: Scratch,
        slot: &Slot,
        old: Option<&fs::Stat>,
        options: WriteOptions,
    ) -> Result<fs::Stat, Errno> {
        let old = old.filter(|stat| kind_of(stat) == Kind::File);
        let mode = options.mode.or(old.map(|stat| stat.st_mode)).unwrap_or(NEW_FILE_MODE);
        let file = OwnedFd::from(scratch.file);
        if let Some(old) = old.filter(|_| self.owner.is_none()) {
            // As in `write`: kept where we may.
            let _ = dress(&file, 0o600, Some(Owner { uid: old.st_uid, gid: old.st_gid }));
        }
        dress(&file, mode, self.owner)?;
        // The kernel's own clock for files ticks in milliseconds, and inodes are used again at once: two contents of one length
        // could share a stamp. Nanoseconds tell them apart.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = Timespec {
            tv_sec: i64::try_from(now.as_secs()).unwrap_or(0),
            tv_nsec: now.subsec_nanos().into(),
        };
        fs::futimens(&file, &Timestamps { last_access: now, last_modification: now })?;
        let stat = fs::fstat(&file)?;
        let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
        let link = |name: &[u8]| fs::linkat(CWD, &itself, &slot.dir, name, AtFlags::SYMLINK_FOLLOW);
        if options.create_new {
            link(&slot.name)?;
            return Ok(stat);
        }
        let name = temporary_name()?;
        link(name.as_bytes())?;
        let renamed =
            fs::renameat_with(&slot.dir, &name, &slot.dir, slot.name.as_slice(), RenameFlags::empty());
        if renamed.is_err() {
            let _ = fs::unlinkat(&slot.dir, &name, AtFlags::empty());
        }
        renamed.map(|()| stat)
    }

    /// Adds a scratch's contents to the end of a file: all of them, or none.
    fn add(
        &self,
        mut scratch: Scratch,
        path: &GuestPath,
        slot: Slot,
        new: bool,
        options: WriteOptions,
    ) -> Result<fs::Stat, FileError> {
        let fail = |errno| FileError::at(path, errno);
        let dir = slot.dir.try_clone().map_err(|e| FileError::io(path, e))?;
        let name = slot.name.clone();
        let mut writer = self.append(path, slot, options)?;
        let before = writer.in_place().map(fs::fstat).transpose().map_err(fail)?;
        let copied = scratch.file.rewind().and_then(|()| io::copy(&mut scratch.file, &mut writer));
        if let Err(error) = copied {
            if let (Some(file), Some(before)) = (writer.in_place(), before) {
                // Nothing can be done if even this fails.
                let _ = fs::ftruncate(file, crate::root::size_of(&before));
                if new {
                    let _ = fs::unlinkat(&dir, name, AtFlags::empty());
                }
            }
            return Err(FileError::io(path, error));
        }
        writer.commit()?;
        fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)
    }
}
