//! The directory handle, and the only place where paths of more than one component are resolved.
//!
//! Symlinks: the kernel follows relative ones and refuses whatever leaves the directory. It refuses absolute
//! ones too, although inside the box `/workspace/…` means our directory. So when it answers `EXDEV`, we look for
//! the first symlink on the way, put its target in its place as text (`/workspace/` cut off), and ask the kernel
//! again *from the root*, at most [`MAX_LINKS`] times. A link that changes in between only changes which path
//! we ask about; whether that is inside is still for the kernel alone to say.

use std::{
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use carrel_proto::files::{Entry, GuestPath, Kind, Name};
use rustix::{
    fs::{self, AtFlags, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps},
    io::Errno,
};

use crate::FileError;

/// As many symlinks as the kernel itself follows.
const MAX_LINKS: usize = 40;
/// `openat2` answers EAGAIN when a rename raced with `..`, and an open with `O_NONBLOCK` does so on a leased file.
/// The first passes by itself; the second is not ours to wait for.
const RETRIES: usize = 256;

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_MAGICLINKS);
/// For a name or path that must be exactly where it says: no links at all on the way.
pub(crate) const STRICT: ResolveFlags = BENEATH.union(ResolveFlags::NO_SYMLINKS);
/// How a regular file is opened when the name may turn into something else under our hands.
pub(crate) const CAREFUL: OFlags = OFlags::NONBLOCK.union(OFlags::NOCTTY).union(OFlags::NOFOLLOW);

/// Whom created files are given to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Tells one content of a file from the next, as far as the file system does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    pub inode: u64,
    pub mtime_ns: i64,
    pub size: u64,
}

/// A directory that no operation leaves.
#[derive(Debug)]
pub struct Root {
    pub(crate) dir: OwnedFd,
    pub(crate) owner: Option<Owner>,
    pub(crate) witness: Option<Witness>,
}

/// A file whose time says when something was last changed by way of a [`Root`].
#[derive(Debug, Clone)]
pub(crate) struct Witness(Arc<OwnedFd>);

impl Witness {
    /// In nanoseconds and not by the kernel's own clock for files, which stands still for milliseconds.
    pub(crate) fn note(&self) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now = Timespec {
            tv_sec: i64::try_from(now.as_secs()).unwrap_or(0),
            tv_nsec: now.subsec_nanos().into(),
        };
        // It is of no use to whoever makes the change, and must not keep it from being made.
        let _ = fs::futimens(&self.0, &Timestamps { last_access: now, last_modification: now });
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// A name in an open directory: what is created, renamed and removed.
#[derive(Debug)]
pub(crate) struct Slot {
    pub(crate) dir: OwnedFd,
    pub(crate) name: Vec<u8>,
}

impl Root {
    /// Opens a trusted path of the host (its own symlinks are followed).
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FileError> {
        let path = path.as_ref();
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = fs::open(path, flags, Mode::empty()).map_err(|e| FileError::at(path.display(), e))?;
        Self::from_fd(dir)
    }

    /// Takes a directory's descriptor (`O_PATH` is enough) and makes sure that this kernel can resolve below it.
    pub fn from_fd(dir: OwnedFd) -> Result<Self, FileError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let dir = open_at(dir.as_fd(), b".", flags, BENEATH).map_err(|e| FileError::at(".", e))?;
        Ok(Self { dir, owner: None, witness: None })
    }

    /// Gives everything created from now on to `owner`. For a host that acts for the box's user; needs privilege.
    #[must_use]
    pub fn with_owner(mut self, owner: Owner) -> Self {
        self.owner = Some(owner);
        self
    }

    /// Notes every change that is made from now on in the time of that file, right before and right after it: for whoever has to know
    /// whether somebody else has changed something. Who looks at the files while that time stays the same has seen all changes.
    #[must_use]
    pub fn with_witness(mut self, witness: OwnedFd) -> Self {
        self.witness = Some(Witness(Arc::new(witness)));
        self
    }

    /// Something is about to be changed, or has been.
    pub(crate) fn note_change(&self) {
        self.witness.iter().for_each(Witness::note);
    }

    /// A directory's descriptor, good for naming it to the kernel and nothing else.
    pub fn open_directory(&self, path: &GuestPath) -> Result<OwnedFd, FileError> {
        self.resolve(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC)
    }

    /// The same for one that is exactly where its path says: no link on the way.
    pub fn open_own_directory(&self, path: &GuestPath) -> Result<OwnedFd, FileError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        open_at(self.dir.as_fd(), path.as_bytes(), flags, STRICT).map_err(|e| FileError::at(path, e))
    }

    /// Opens `path`, following links that stay inside (`O_NOFOLLOW` in `flags` spares the last one).
    pub(crate) fn resolve(&self, path: &GuestPath, flags: OFlags) -> Result<OwnedFd, FileError> {
        self.resolve_bytes(path.as_bytes().to_vec(), flags)
            .map(|(fd, _)| fd)
            .map_err(|e| FileError::at(path, e))
    }

    /// Also returns the path that was opened in the end, links on the way possibly replaced.
    fn resolve_bytes(&self, mut path: Vec<u8>, flags: OFlags) -> Result<(OwnedFd, Vec<u8>), Errno> {
        for _ in 0..=MAX_LINKS {
            match open_at(self.dir.as_fd(), &path, flags, BENEATH) {
                Ok(fd) => return Ok((fd, path)),
                Err(Errno::XDEV) => {
                    path = self.replace_first_link(&path, !flags.contains(OFlags::NOFOLLOW))?;
                }
                Err(other) => return Err(other),
            }
        }
        Err(Errno::LOOP)
    }

    fn replace_first_link(&self, path: &[u8], last_too: bool) -> Result<Vec<u8>, Errno> {
        let ends = path.iter().enumerate().filter(|(_, b)| **b == b'/').map(|(at, _)| at);
        for end in ends.chain(last_too.then_some(path.len())) {
            let prefix = &path[..end];
            let fd = open_at(self.dir.as_fd(), prefix, OFlags::PATH | OFlags::NOFOLLOW, BENEATH)?;
            if kind_of(&fs::fstat(&fd)?) == Kind::Symlink {
                let target = fs::readlinkat(&fd, "", Vec::new())?;
                let parent = prefix.iter().rposition(|b| *b == b'/').map_or(&b"."[..], |at| &prefix[..at]);
                return follow(parent, target.as_bytes(), &path[end..]);
            }
        }
        Err(Errno::XDEV)
    }

    /// The directory and name that `path` stands for. With `follow` a symlink there is followed, also to a name
    /// that does not exist yet; by the time the slot is used, its name may be anything again.
    ///
    /// Only what is about to be changed is located.
    pub(crate) fn locate(&self, path: &GuestPath, follow_last: bool) -> Result<Slot, FileError> {
        self.note_change();
        let fail = |errno| FileError::at(path, errno);
        let mut at = path.clone();
        for _ in 0..=MAX_LINKS {
            let (parent, name) = match at.split() {
                Some((parent, name)) if name != b".." => (parent, name.to_vec()),
                _ => {
                    let what = "its last part must be a name";
                    return Err(FileError::InvalidPath { path: path.to_string(), what });
                }
            };
            let (dir, parent) = self
                .resolve_bytes(parent.as_bytes().to_vec(), OFlags::PATH | OFlags::DIRECTORY)
                .map_err(fail)?;
            if !follow_last {
                return Ok(Slot { dir, name });
            }
            match fs::readlinkat(&dir, name.as_slice(), Vec::new()) {
                Ok(target) => {
                    let bytes = follow(&parent, target.as_bytes(), b"").map_err(fail)?;
                    at = GuestPath::parse(&bytes).map_err(|_| fail(Errno::NAMETOOLONG))?;
                }
                Err(Errno::INVAL | Errno::NOENT) => return Ok(Slot { dir, name }),
                Err(errno) => return Err(fail(errno)),
            }
        }
        Err(fail(Errno::LOOP))
    }

    /// What is known of `path` without opening it.
    pub fn stat(&self, path: &GuestPath, follow: bool) -> Result<Entry, FileError> {
        let flags = if follow { OFlags::PATH } else { OFlags::PATH | OFlags::NOFOLLOW };
        let fd = self.resolve(path, flags)?;
        let stat = fs::fstat(&fd).map_err(|e| FileError::at(path, e))?;
        let target = match kind_of(&stat) {
            Kind::Symlink => fs::readlinkat(&fd, "", Vec::new()).ok().map(|t| Name(t.into_bytes())),
            _ => None,
        };
        Ok(entry(path.as_bytes(), &stat, target))
    }
}

/// The text of a path in which a symlink in `parent` with `target` was reached and `rest` (`/…` or nothing) is
/// left. Says nothing about where it leads.
fn follow(parent: &[u8], target: &[u8], rest: &[u8]) -> Result<Vec<u8>, Errno> {
    let joined = match target {
        [] => return Err(Errno::NOENT),
        [b'/', ..] => [target, rest].concat(),
        _ => [parent, b"/", target, rest].concat(),
    };
    match GuestPath::parse(&joined) {
        Ok(path) => Ok(path.as_bytes().to_vec()),
        Err(carrel_proto::files::PathError::Outside) => Err(Errno::XDEV),
        Err(_) => Err(Errno::NAMETOOLONG),
    }
}

/// One `openat2`. The only call in this crate that opens by path.
pub(crate) fn open_at(
    dir: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
    resolve: ResolveFlags,
) -> Result<OwnedFd, Errno> {
    let mode = if flags.contains(OFlags::CREATE) { Mode::RUSR | Mode::WUSR } else { Mode::empty() };
    for _ in 0..RETRIES {
        match fs::openat2(dir, path, flags | OFlags::CLOEXEC, mode, resolve) {
            Err(Errno::AGAIN | Errno::INTR) => std::thread::yield_now(),
            other => return other,
        }
    }
    Err(Errno::AGAIN)
}

/// Opens the regular file `name` of `dir` and nothing else. Errors name `shown`.
pub(crate) fn open_regular(
    dir: BorrowedFd<'_>,
    name: &[u8],
    flags: OFlags,
    shown: &dyn std::fmt::Display,
) -> Result<(OwnedFd, fs::Stat), FileError> {
    let fail = |errno| FileError::at(shown, errno);
    let before = fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
    expect_regular(&before, shown)?;
    let fd = open_at(dir, name, flags | CAREFUL, STRICT).map_err(fail)?;
    let stat = fs::fstat(&fd).map_err(fail)?;
    expect_regular(&stat, shown)?;
    Ok((fd, stat))
}

pub(crate) fn expect_regular(stat: &fs::Stat, shown: &dyn std::fmt::Display) -> Result<(), FileError> {
    match kind_of(stat) {
        Kind::File => Ok(()),
        Kind::Dir => Err(FileError::IsADirectory { path: shown.to_string() }),
        _ => Err(FileError::NotARegularFile { path: shown.to_string() }),
    }
}

pub(crate) fn kind_of(stat: &fs::Stat) -> Kind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Dir,
        FileType::Symlink => Kind::Symlink,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        _ => Kind::Device,
    }
}

pub(crate) fn size_of(stat: &fs::Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

pub(crate) fn stamp(stat: &fs::Stat) -> Stamp {
    Stamp { inode: stat.st_ino, mtime_ns: mtime_ns(stat), size: size_of(stat) }
}

fn mtime_ns(stat: &fs::Stat) -> i64 {
    let nanos = i64::try_from(stat.st_mtime_nsec).unwrap_or(0);
    stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(nanos)
}

pub(crate) fn entry(name: &[u8], stat: &fs::Stat, target: Option<Name>) -> Entry {
    Entry {
        name: Name::from(name),
        kind: kind_of(stat),
        size: size_of(stat),
        mode: stat.st_mode & 0o7777,
        mtime_ns: mtime_ns(stat),
        target,
    }
}
