//! Entries as they are, taken down and put back exactly: content, mode, time, and what a link says.
//!
//! For whoever keeps a copy of a tree to go back to. Paths here are names from a walk, not words of a caller: bytes relative to the
//! root (`""` is the root itself), and each is resolved in one step with no link on the way. What is there is shown as a [`Sight`]; a
//! copy is good only if the file looked the same before and after it was made. User code may have set any bit of a mode on what is
//! its own, so here, and only here, those bits come back as well.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    time::Instant,
};

use carrel_proto::files::{Kind, Name};
use rustix::{
    fs::{self, AtFlags, CWD, Mode, OFlags, Timespec, Timestamps},
    io::{Errno, pread, pwrite},
    process,
};

use crate::{
    FileError, Root,
    root::{CAREFUL, STRICT, kind_of, open_at, open_regular, size_of},
};

/// Of one copy at a time, and between two looks at the clock.
const BUFFER: usize = 256 << 10;

/// What the kernel says of an entry, without following a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    pub kind: Kind,
    /// All twelve bits.
    pub mode: u32,
    pub size: u64,
    pub inode: u64,
    /// Names of the file.
    pub links: u64,
    /// Its last change of any kind, which no code can set.
    pub changed_ns: u64,
    pub written: Time,
}

/// A time that can be set: seconds and nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time(i64, i64);

/// A piece of a file: where contents are kept, or are to be.
#[derive(Debug, Clone, Copy)]
pub struct Piece<'a> {
    pub file: &'a File,
    pub at: u64,
    pub size: u64,
}

impl Sight {
    fn of(stat: &fs::Stat) -> Self {
        let part = |value| i64::try_from(value).unwrap_or(0);
        let nanos = stat.st_ctime.saturating_mul(1_000_000_000).saturating_add(part(stat.st_ctime_nsec));
        Self {
            kind: kind_of(stat),
            mode: stat.st_mode & 0o7777,
            size: size_of(stat),
            inode: stat.st_ino,
            links: stat.st_nlink,
            changed_ns: u64::try_from(nanos).unwrap_or(0),
            written: Time(stat.st_mtime, part(stat.st_mtime_nsec)),
        }
    }
}

impl Root {
    /// What is there.
    pub fn sight(&self, path: &[u8]) -> Result<Sight, FileError> {
        let (dir, name) = self.hold(path)?;
        let stat = match name {
            Some(name) => fs::statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW),
            None => fs::fstat(&dir),
        };
        stat.map(|stat| Sight::of(&stat)).map_err(|errno| at(path, errno))
    }

    /// Copies a regular file of that sight. `Changed`: it does not look so any more; `TooLarge`: the time is over.
    pub fn copy_out(
        &self,
        path: &[u8],
        sight: &Sight,
        to: Piece<'_>,
        until: Instant,
    ) -> Result<(), FileError> {
        let (from, stat) = self.open_kept(path, OFlags::RDONLY)?;
        let changed = || FileError::Changed { path: shown(path) };
        if Sight::of(&stat) != *sight || sight.size > to.size {
            return Err(changed());
        }
        copy(&from, 0, to.file.as_fd(), to.at, sight.size, Some(until), path)?;
        let after = fs::fstat(&from).map_err(|errno| at(path, errno))?;
        if Sight::of(&after) == *sight { Ok(()) } else { Err(changed()) }
    }

    /// Whether a regular file has this content.
    pub fn has_content(&self, path: &[u8], content: Piece<'_>, until: Instant) -> Result<bool, FileError> {
        let (from, stat) = self.open_kept(path, OFlags::RDONLY)?;
        if size_of(&stat) != content.size {
            return Ok(false);
        }
        let (mut mine, mut theirs) = (vec![0; BUFFER], vec![0; BUFFER]);
        let mut done = 0;
        while done < content.size {
            in_time(until, path)?;
            let want = usize::try_from(content.size - done).unwrap_or(BUFFER).min(BUFFER);
            let count = pread(&from, &mut mine[..want], done).map_err(|errno| at(path, errno))?;
            if count == 0 {
                return Ok(false);
            }
            read_all(content.file, &mut theirs[..count], content.at + done, path)?;
            if mine[..count] != theirs[..count] {
                return Ok(false);
            }
            done += count as u64;
        }
        Ok(true)
    }

    /// What a symlink says.
    pub fn link_text(&self, path: &[u8]) -> Result<Vec<u8>, FileError> {
        let (dir, name) = self.hold_named(path)?;
        fs::readlinkat(&dir, name, Vec::new())
            .map(std::ffi::CString::into_bytes)
            .map_err(|errno| at(path, errno))
    }

    /// Gives the file that is there this content, mode and time. It stays the same file for whoever has it open.
    pub fn put_content(&self, path: &[u8], from: Piece<'_>, mode: u32, time: Time) -> Result<(), FileError> {
        // A file that may not be written has its mode put back anyway, so it may be changed first.
        let (dir, name) = self.hold_named(path)?;
        let held =
            open_at(dir.as_fd(), name, OFlags::PATH | OFlags::NOFOLLOW, STRICT).map_err(|e| at(path, e))?;
        let stat = fs::fstat(&held).map_err(|errno| at(path, errno))?;
        if kind_of(&stat) == Kind::File && stat.st_mode & 0o600 != 0o600 {
            chmod(&held, 0o600).map_err(|errno| at(path, errno))?;
        }
        let (file, _) = open_regular(dir.as_fd(), name, OFlags::WRONLY, &shown(path))?;
        fill(&file, from, mode, time, path)
    }

    /// Makes a file, which is not there.
    pub fn put_file(&self, path: &[u8], from: Piece<'_>, mode: u32, time: Time) -> Result<(), FileError> {
        let (dir, name) = self.hold_named(path)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | CAREFUL;
        let file = open_at(dir.as_fd(), name, flags, STRICT).map_err(|errno| at(path, errno))?;
        self.give(&file, path)?;
        fill(&file, from, mode, time, path)
    }

    /// Makes a symlink, wherever it leads: it is user code's own.
    pub fn put_link(&self, path: &[u8], text: &[u8], time: Time) -> Result<(), FileError> {
        let (dir, name) = self.hold_named(path)?;
        fs::symlinkat(text, &dir, name).map_err(|errno| at(path, errno))?;
        let made =
            open_at(dir.as_fd(), name, OFlags::PATH | OFlags::NOFOLLOW, STRICT).map_err(|e| at(path, e))?;
        self.give(&made, path)?;
        // A time that the file system cannot keep is not worth failing for.
        let _ = fs::utimensat(&dir, name, &times(time), AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    /// Makes a directory or a fifo, to be given its mode and time by [`Root::dress_as`] when all that is in it is there: until then it
    /// can be filled.
    pub fn put_empty(&self, path: &[u8], kind: Kind, mode: u32) -> Result<(), FileError> {
        let (dir, name) = self.hold_named(path)?;
        let made = match kind {
            Kind::Dir => fs::mkdirat(&dir, name, Mode::RWXU),
            _ => fs::mknodat(&dir, name, fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0),
        };
        made.map_err(|errno| at(path, errno))?;
        let made =
            open_at(dir.as_fd(), name, OFlags::PATH | OFlags::NOFOLLOW, STRICT).map_err(|e| at(path, e))?;
        // Before it is given away: a group's bit can be set only by its members.
        chmod(&made, mode | 0o700).map_err(|errno| at(path, errno))?;
        self.give(&made, path)
    }

    /// Gives mode and time to what is there, unless it is a symlink. Without a time the mode alone.
    pub fn dress_as(&self, path: &[u8], mode: u32, time: Option<Time>) -> Result<(), FileError> {
        let (dir, name) = self.hold(path)?;
        let held = match name {
            Some(name) => open_at(dir.as_fd(), name, OFlags::PATH | OFlags::NOFOLLOW, STRICT),
            None => open_at(dir.as_fd(), b".", OFlags::PATH | OFlags::DIRECTORY, STRICT),
        };
        let held = held.map_err(|errno| at(path, errno))?;
        let now = fs::fstat(&held).map_err(|errno| at(path, errno))?;
        if kind_of(&now) == Kind::Symlink {
            return Ok(());
        }
        if now.st_mode & 0o7777 != mode {
            chmod(&held, mode).map_err(|errno| at(path, errno))?;
        }
        if let Some(time) = time {
            let _ = fs::utimensat(CWD, itself(&held), &times(time), AtFlags::empty());
        }
        Ok(())
    }

    /// Removes a name: of a directory, if it is empty, or of anything else.
    pub fn take_away(&self, path: &[u8], directory: bool) -> Result<(), FileError> {
        let (dir, name) = self.hold_named(path)?;
        let flags = if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
        fs::unlinkat(&dir, name, flags).map_err(|errno| at(path, errno))
    }

    /// The directory that an entry is in, and its name there; none for the root.
    fn hold<'a>(&self, path: &'a [u8]) -> Result<(OwnedFd, Option<&'a [u8]>), FileError> {
        let path = path.strip_suffix(b"/").unwrap_or(path);
        let (parent, name) = match path.iter().rposition(|byte| *byte == b'/') {
            Some(slash) => (&path[..slash], Some(&path[slash + 1..])),
            None => (&b"."[..], Some(path).filter(|path| !path.is_empty())),
        };
        let dir = open_at(self.dir.as_fd(), parent, OFlags::PATH | OFlags::DIRECTORY, STRICT);
        dir.map(|dir| (dir, name)).map_err(|errno| at(path, errno))
    }

    fn hold_named<'a>(&self, path: &'a [u8]) -> Result<(OwnedFd, &'a [u8]), FileError> {
        match self.hold(path)? {
            (dir, Some(name)) => Ok((dir, name)),
            _ => Err(FileError::InvalidPath { path: ".".into(), what: "its last part must be a name" }),
        }
    }

    fn open_kept(&self, path: &[u8], flags: OFlags) -> Result<(OwnedFd, fs::Stat), FileError> {
        let (dir, name) = self.hold_named(path)?;
        open_regular(dir.as_fd(), name, flags, &shown(path))
    }

    /// Gives what was just made to the owner of everything here.
    fn give(&self, made: &OwnedFd, path: &[u8]) -> Result<(), FileError> {
        let Some(owner) = self.owner else { return Ok(()) };
        let stat = fs::fstat(made).map_err(|errno| at(path, errno))?;
        // As elsewhere: the name may have changed hands, and only what is ours was made by us.
        if (stat.st_uid, stat.st_gid) == (owner.uid, owner.gid) || stat.st_uid != process::geteuid().as_raw()
        {
            return Ok(());
        }
        let (uid, gid) = (process::Uid::from_raw(owner.uid), process::Gid::from_raw(owner.gid));
        fs::chownat(made, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH).map_err(|errno| at(path, errno))
    }
}

fn shown(path: &[u8]) -> String {
    Name::from(path).to_string()
}

fn at(path: &[u8], errno: Errno) -> FileError {
    FileError::at(shown(path), errno)
}

/// By way of `/proc`, because the descriptor may be one that only names.
fn itself(held: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(held))
}

fn chmod(held: &OwnedFd, mode: u32) -> Result<(), Errno> {
    fs::chmod(itself(held), Mode::from_raw_mode(mode))
}

fn times(time: Time) -> Timestamps {
    let time = Timespec { tv_sec: time.0, tv_nsec: time.1 };
    Timestamps { last_access: time, last_modification: time }
}

fn fill(file: &OwnedFd, from: Piece<'_>, mode: u32, time: Time, path: &[u8]) -> Result<(), FileError> {
    let fail = |errno| at(path, errno);
    fs::ftruncate(file, 0).map_err(fail)?;
    copy(from.file.as_fd(), from.at, file.as_fd(), 0, from.size, None, path)?;
    fs::fchmod(file, Mode::from_raw_mode(mode)).map_err(fail)?;
    let _ = fs::futimens(file, &times(time));
    Ok(())
}

fn in_time(until: Instant, path: &[u8]) -> Result<(), FileError> {
    if Instant::now() < until {
        return Ok(());
    }
    Err(FileError::TooLarge { path: shown(path), what: "it takes too long to copy".into() })
}

/// Shares the blocks where both files are on a file system that can do that.
fn copy(
    from: impl AsFd,
    mut read: u64,
    to: impl AsFd,
    mut write: u64,
    mut left: u64,
    until: Option<Instant>,
    path: &[u8],
) -> Result<(), FileError> {
    let mut buffer = Vec::new();
    while left > 0 {
        until.map_or(Ok(()), |until| in_time(until, path))?;
        if buffer.is_empty() {
            let most = usize::try_from(left).unwrap_or(usize::MAX);
            // In one go: a part that does not end at a block could not be shared. The kernel bounds it by itself.
            match fs::copy_file_range(&from, Some(&mut read), &to, Some(&mut write), most) {
                Ok(0) => return Err(FileError::Changed { path: shown(path) }),
                Ok(count) => {
                    left -= count as u64;
                    continue;
                }
                Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => {
                    buffer = vec![0; BUFFER];
                }
                Err(errno) => return Err(at(path, errno)),
            }
        }
        let want = usize::try_from(left).unwrap_or(BUFFER).min(BUFFER);
        let count = pread(&from, &mut buffer[..want], read).map_err(|errno| at(path, errno))?;
        if count == 0 {
            return Err(FileError::Changed { path: shown(path) });
        }
        let mut put = 0;
        while put < count {
            put += pwrite(&to, &buffer[put..count], write + put as u64).map_err(|errno| at(path, errno))?;
        }
        let count = count as u64;
        (read, write, left) = (read + count, write + count, left - count);
    }
    Ok(())
}

fn read_all(file: &File, buffer: &mut [u8], mut from: u64, path: &[u8]) -> Result<(), FileError> {
    let mut done = 0;
    while done < buffer.len() {
        let count = pread(file, &mut buffer[done..], from).map_err(|errno| at(path, errno))?;
        if count == 0 {
            return Err(FileError::Changed { path: shown(path) });
        }
        done += count;
        from += count as u64;
    }
    Ok(())
}
