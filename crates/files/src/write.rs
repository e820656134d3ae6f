//! Writing: atomic replacement, creation, and appending.
//!
//! Hard links. Replacing never touches the old file, so its other names keep their content. Appending is the one
//! operation in place, and therefore asks: a file with more than one name is copied, and the copy replaces
//! the name that was given. The box cannot link to host files (`linkat` does not cross mounts, and the workspace is
//! a mount of its own there), but a workspace that an operator fills can hold such links: package managers
//! link modules to a store outside. A link that the box makes between the check and the write is to a file of
//! its own.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::AsFd,
};

use carrel_proto::files::{Entry, GuestPath, Kind};
use rustix::{
    fs::{self, AtFlags, OFlags},
    io::Errno,
};

use crate::{
    FileError, Root,
    root::{CAREFUL, Owner, STRICT, Slot, Witness, entry, expect_regular, kind_of, open_at, open_regular},
    stage::{Stage, dress},
};

/// Of a new file, unless asked otherwise.
pub(crate) const NEW_FILE_MODE: u32 = 0o644;

/// How a file is written. The default replaces what is there and makes nothing above it.
#[derive(Debug, Clone, Copy, Default)]
pub struct WriteOptions {
    pub append: bool,
    /// Fail with `exists` if there is anything of that name.
    pub create_new: bool,
    /// The lowest nine bits; otherwise those of the file that is replaced, or 0644.
    pub mode: Option<u32>,
    /// Make missing directories above.
    pub parents: bool,
    /// [`FileWriter::commit`] returns when it is on the disk.
    pub sync: bool,
}

/// A file being written. Nothing of it is seen before [`commit`](Self::commit), except when appending in place;
/// dropping it is the same as [`abort`](Self::abort).
#[derive(Debug)]
pub struct FileWriter {
    path: GuestPath,
    target: Target,
    sync: bool,
    witness: Option<Witness>,
}

#[derive(Debug)]
enum Target {
    New { stage: Stage, name: Vec<u8>, mode: u32, owner: Option<Owner>, replace: bool },
    InPlace(File),
}

impl FileWriter {
    pub fn commit(self) -> Result<Entry, FileError> {
        let fail = |errno| FileError::at(&self.path, errno);
        // Once more: its content may have taken long to come.
        self.witness.iter().for_each(Witness::note);
        let stat = match self.target {
            Target::New { stage, name, mode, owner, replace } => {
                stage.publish(&name, mode, owner, replace, self.sync).map_err(fail)?
            }
            Target::InPlace(file) => {
                if self.sync {
                    fs::fsync(&file).map_err(fail)?;
                }
                fs::fstat(&file).map_err(fail)?
            }
        };
        self.witness.iter().for_each(Witness::note);
        Ok(entry(self.path.as_bytes(), &stat, None))
    }

    /// The file itself, where it is appended to in place.
    pub(crate) fn in_place(&self) -> Option<&File> {
        match &self.target {
            Target::New { .. } => None,
            Target::InPlace(file) => Some(file),
        }
    }

    /// Leaves what was there. What was appended in place stays.
    pub fn abort(self) {}
}

impl Write for FileWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match &mut self.target {
            Target::New { stage, .. } => stage.file.write(data),
            Target::InPlace(file) => file.write(data),
        }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Root {
    /// Writes a whole file.
    pub fn write(&self, path: &GuestPath, data: &[u8], options: WriteOptions) -> Result<Entry, FileError> {
        let mut writer = self.writer(path, options)?;
        writer.write_all(data).map_err(|e| FileError::io(path, e))?;
        writer.commit()
    }

    /// Opens a file for writing as a stream, following links that stay inside.
    pub fn writer(&self, path: &GuestPath, options: WriteOptions) -> Result<FileWriter, FileError> {
        if options.append && options.create_new {
            return Err(FileError::argument("append and overwrite=false exclude each other"));
        }
        if options.parents
            && let Some((parent, _)) = path.split()
        {
            self.mkdir(&parent, true, None)?;
        }
        if options.create_new {
            // A link counts as something of that name, wherever it leads.
            return self.stage(path, self.locate(path, false)?, None, options);
        }
        let slot = self.locate_file(path)?;
        let fail = |errno| FileError::at(path, errno);
        let old = match fs::statat(&slot.dir, slot.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Some(stat),
            Err(Errno::NOENT) => None,
            Err(errno) => return Err(fail(errno)),
        };
        match &old {
            // A link that appeared after it was resolved: replaced like any file would be.
            Some(stat) if kind_of(stat) == Kind::Symlink => {}
            Some(stat) => expect_regular(stat, path)?,
            None => {}
        }
        if options.append { self.append(path, slot, options) } else { self.stage(path, slot, old, options) }
    }

    /// Like `locate`, but says what a path without a name is.
    pub(crate) fn locate_file(&self, path: &GuestPath) -> Result<Slot, FileError> {
        match self.locate(path, true) {
            Err(FileError::InvalidPath { path: shown, .. }) if path.is_root() => {
                Err(FileError::IsADirectory { path: shown })
            }
            other => other,
        }
    }

    fn stage(
        &self,
        path: &GuestPath,
        slot: Slot,
        old: Option<fs::Stat>,
        options: WriteOptions,
    ) -> Result<FileWriter, FileError> {
        let fail = |errno| FileError::at(path, errno);
        if options.create_new
            && fs::statat(&slot.dir, slot.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).is_ok()
        {
            // Early, before anything is streamed; the rename decides.
            return Err(fail(Errno::EXIST));
        }
        let old = old.filter(|stat| kind_of(stat) == Kind::File);
        let mode = options.mode.or(old.as_ref().map(|stat| stat.st_mode)).unwrap_or(NEW_FILE_MODE);
        let stage = Stage::create(slot.dir).map_err(fail)?;
        if let Some(old) = old.filter(|_| self.owner.is_none()) {
            // With nobody to act for, a file keeps its owner as far as we may give it away. Often we may not.
            let _ = dress(&stage.file, 0o600, Some(Owner { uid: old.st_uid, gid: old.st_gid }));
        }
        let target =
            Target::New { stage, name: slot.name, mode, owner: self.owner, replace: !options.create_new };
        Ok(FileWriter { path: path.clone(), target, sync: options.sync, witness: self.witness.clone() })
    }

    pub(crate) fn append(
        &self,
        path: &GuestPath,
        slot: Slot,
        options: WriteOptions,
    ) -> Result<FileWriter, FileError> {
        let fail = |errno| FileError::at(path, errno);
        let dir = slot.dir.as_fd();
        let create = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL | CAREFUL;
        let file = match open_at(dir, &slot.name, create, STRICT) {
            Ok(fd) => {
                dress(&fd, options.mode.unwrap_or(NEW_FILE_MODE), self.owner).map_err(fail)?;
                fd
            }
            Err(Errno::EXIST) => {
                let (fd, stat) = open_regular(dir, &slot.name, OFlags::WRONLY | OFlags::APPEND, path)?;
                if stat.st_nlink > 1 {
                    return self.copy_to_append(path, slot, options);
                }
                fd
            }
            Err(errno) => return Err(fail(errno)),
        };
        let target = Target::InPlace(file.into());
        Ok(FileWriter { path: path.clone(), target, sync: options.sync, witness: self.witness.clone() })
    }

    fn copy_to_append(
        &self,
        path: &GuestPath,
        slot: Slot,
        options: WriteOptions,
    ) -> Result<FileWriter, FileError> {
        let (fd, stat) = open_regular(slot.dir.as_fd(), &slot.name, OFlags::RDONLY, path)?;
        let mut writer = self.stage(path, slot, Some(stat), options)?;
        io::copy(&mut File::from(fd), &mut writer).map_err(|e| FileError::io(path, e))?;
        Ok(writer)
    }
}
