//! An archive as a tree.
//!
//! Names are relative and without `..`; directories on the way are opened without following any link, existing or
//! from the archive, so an entry lands exactly where its name says. A symlink may point below `/workspace`, or
//! relatively with `..` only at its start and not above the destination: since no directory on the way is a link,
//! that many steps up are still inside. `..` later in a target could be turned by another link, and is refused.
//! Devices and fifos are refused. Modes keep their nine bits; owners are [`Root`]'s.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom, Write},
    os::fd::{AsFd, OwnedFd},
};

use carrel_proto::files::{GuestPath, Kind, MAX_DEPTH, Name};
use rustix::{
    fs::{self, AtFlags, Mode, OFlags, Timespec, Timestamps},
    io::Errno,
    process,
};

use super::{
    OutsideLinks, TreeLimits, TreeReport,
    format::{Entry, Reader, Sparse, TarError},
    read_full,
};
use crate::{
    FileError, Root,
    dirs::{NEW_DIR_MODE, make_dir},
    root::{STRICT, kind_of, open_at},
    stage::{Stage, temporary_name},
};

const BUFFER: usize = 64 << 10;
static ZEROS: [u8; BUFFER] = [0; BUFFER];
/// How much of a path goes to the kernel at once; its bound is 4096.
const STEP: usize = 3000;
const DIR: OFlags = OFlags::PATH.union(OFlags::DIRECTORY);

/// Unpacks a tar stream into the directory `path`, which is made if missing. Existing files are replaced, each
/// atomically; the whole is not: what came before an error stays.
pub fn read_tar(
    root: &Root,
    path: &GuestPath,
    input: impl Read,
    limits: &TreeLimits,
    outside: OutsideLinks,
) -> Result<TreeReport, FileError> {
    let mut unpack = Unpack::new(root, path, limits, outside)?;
    let mut reader = Reader::new(input);
    while let Some(entry) = reader.next().map_err(broken)? {
        unpack.count_entry()?;
        unpack.entry(entry, &mut reader)?;
    }
    unpack.finish()
}

pub(super) fn broken(error: TarError) -> FileError {
    match error {
        TarError::Bad(what) => FileError::argument(format!("not a usable archive: {what}")),
        // What decompression says of bytes that make no sense, and reading of an offset that is none.
        TarError::Io(source)
            if matches!(
                source.kind(),
                io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof
            ) =>
        {
            FileError::argument(format!("not a usable archive: {source}"))
        }
        TarError::Io(source) => FileError::Io { path: "the archive's stream".into(), source },
    }
}

/// Puts entries in their places, whatever archive they come from.
pub(super) struct Unpack<'a> {
    root: &'a Root,
    path: &'a GuestPath,
    top: OwnedFd,
    limits: &'a TreeLimits,
    outside: OutsideLinks,
    report: TreeReport,
    /// Directories whose final mode would keep us from filling them.
    locked: Vec<(Vec<u8>, u32)>,
}

/// An entry's name, checked: components without `.`, `..` and NUL.
struct Place<'a> {
    parents: Vec<&'a [u8]>,
    name: &'a [u8],
}

impl<'a> Unpack<'a> {
    pub(super) fn new(
        root: &'a Root,
        path: &'a GuestPath,
        limits: &'a TreeLimits,
        outside: OutsideLinks,
    ) -> Result<Self, FileError> {
        root.mkdir(path, true, None)?;
        let top = root.resolve(path, DIR)?;
        Ok(Self { root, path, top, limits, outside, report: TreeReport::default(), locked: Vec::new() })
    }

    pub(super) fn count_entry(&self) -> Result<(), FileError> {
        self.report.count_entry(self.limits, self.path)
    }

    pub(super) fn finish(mut self) -> Result<TreeReport, FileError> {
        self.lock()?;
        self.root.note_change();
        Ok(self.report)
    }

    pub(super) fn entry(&mut self, entry: Entry, contents: &mut impl Read) -> Result<(), FileError> {
        let shown = Name::from(entry.path.as_slice());
        let Some(place) = place(&entry.path)? else {
            // The top itself, as `./`.
            return match entry.kind {
                b'5' => Ok(()),
                _ => Err(FileError::InvalidPath { path: shown.to_string(), what: "it has no name" }),
            };
        };
        let kind = match entry.kind {
            // Before there was a kind for directories, a slash told them.
            b'0' | 0 if entry.path.ends_with(b"/") => b'5',
            other => other,
        };
        match kind {
            b'0' | 0 | b'7' | b'S' => {
                let dir = self.parent(&place, true)?;
                self.file(dir, &place, &entry, contents)?;
                self.report.files += 1;
            }
            b'5' => {
                self.dir(&place, &entry).map_err(|e| FileError::at(&shown, e))?;
                self.report.dirs += 1;
            }
            b'2' if self.outside != OutsideLinks::Keep && !leads_inside(&entry.link, place.parents.len()) => {
                if self.outside == OutsideLinks::Refuse {
                    return Err(FileError::PathOutside { path: format!("{shown} -> {}", Name(entry.link)) });
                }
                self.report.leave_out(&entry.path, "a link that leads out");
            }
            b'2' => {
                let dir = self.parent(&place, true)?;
                self.symlink(dir, &place, &entry.link).map_err(|e| FileError::at(&shown, e))?;
                self.report.links += 1;
            }
            b'1' => {
                self.hard_link(&place, &entry, &shown)?;
                self.report.links += 1;
            }
            b'3' | b'4' | b'6' => return Err(FileError::NotARegularFile { path: shown.to_string() }),
            _ => return Err(broken(TarError::Bad("an entry of a kind we do not know"))),
        }
        self.root.note_change();
        Ok(())
    }

    /// Opens the directory that an entry belongs into.
    fn parent(&self, place: &Place<'_>, create: bool) -> Result<OwnedFd, FileError> {
        let shown = || match place.parents.is_empty() {
            true => self.path.to_string(),
            false => Name(place.parents.join(&b'/')).to_string(),
        };
        self.open_dir(&place.parents, create).map_err(|errno| match errno {
            Errno::LOOP => FileError::NotADirectory { path: shown() },
            other => FileError::at(shown(), other),
        })
    }

    fn open_dir(&self, names: &[&[u8]], create: bool) -> Result<OwnedFd, Errno> {
        // Whoever asks is about to make something there.
        self.root.note_change();
        let mut dir = open_at(self.top.as_fd(), b".", DIR, STRICT)?;
        let mut rest = names;
        while !rest.is_empty() {
            let mut length = 0;
            let fits = rest.iter().take_while(|name| {
                length += name.len() + 1;
                length < STEP
            });
            let (step, behind) = rest.split_at(fits.count().max(1));
            match open_at(dir.as_fd(), &step.join(&b'/'), DIR, STRICT) {
                Ok(next) => dir = next,
                Err(Errno::NOENT) if create => {
                    for name in step {
                        match make_dir(dir.as_fd(), name, NEW_DIR_MODE, self.root.owner) {
                            Ok(()) | Err(Errno::EXIST) => {}
                            Err(errno) => return Err(errno),
                        }
                        dir = open_at(dir.as_fd(), name, DIR, STRICT)?;
                    }
                }
                Err(errno) => return Err(errno),
            }
            rest = behind;
        }
        Ok(dir)
    }

    fn file(
        &mut self,
        dir: OwnedFd,
        place: &Place<'_>,
        entry: &Entry,
        contents: &mut impl Read,
    ) -> Result<(), FileError> {
        let shown = Name::from(entry.path.as_slice());
        self.report.count_bytes(entry.stored, self.limits, self.path)?;
        let mut stage = Stage::create(dir).map_err(|e| FileError::at(&shown, e))?;
        fill(&mut stage.file, entry, contents, &shown)?;
        let mtime = Timespec { tv_sec: entry.mtime, tv_nsec: 0 };
        // A time that the file system cannot keep is not worth failing for.
        let _ = fs::futimens(&stage.file, &Timestamps { last_access: mtime, last_modification: mtime });
        self.root.note_change();
        stage
            .publish(place.name, entry.mode, self.root.owner, true, false)
            .map_err(|e| FileError::at(&shown, e))?;
        Ok(())
    }

    fn dir(&mut self, place: &Place<'_>, entry: &Entry) -> Result<(), Errno> {
        let dir = self.open_dir(&place.parents, true)?;
        let mode = entry.mode & 0o777;
        match make_dir(dir.as_fd(), place.name, mode | 0o700, self.root.owner) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
                let old = open_at(dir.as_fd(), place.name, flags, STRICT)?;
                fs::fchmod(old, Mode::from_raw_mode(mode | 0o700))?;
            }
            Err(errno) => return Err(errno),
        }
        if mode & 0o700 != 0o700 {
            self.locked.push((entry.path.clone(), mode));
        }
        Ok(())
    }

    /// Gives directories their final modes, the innermost first.
    fn lock(&mut self) -> Result<(), FileError> {
        for (path, mode) in std::mem::take(&mut self.locked).into_iter().rev() {
            let Some(place) = place(&path)? else { continue };
            let Ok(dir) = self.parent(&place, false) else { continue };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            // Gone or changed already: the box's own doing.
            if let Ok(dir) = open_at(dir.as_fd(), place.name, flags, STRICT) {
                let _ = fs::fchmod(dir, Mode::from_raw_mode(mode));
            }
        }
        Ok(())
    }

    fn symlink(&self, dir: OwnedFd, place: &Place<'_>, target: &[u8]) -> Result<(), Errno> {
        let name = temporary_name()?;
        fs::symlinkat(target, &dir, name.as_str())?;
        if let Some(owner) = self.root.owner {
            // By descriptor, and only if it is still ours: the name may have changed hands.
            let link = open_at(dir.as_fd(), name.as_bytes(), OFlags::PATH | OFlags::NOFOLLOW, STRICT)?;
            let stat = fs::fstat(&link)?;
            if kind_of(&stat) == Kind::Symlink && stat.st_uid == process::geteuid().as_raw() {
                let (uid, gid) = (process::Uid::from_raw(owner.uid), process::Gid::from_raw(owner.gid));
                fs::chownat(&link, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?;
            }
        }
        settle(dir, &name, place.name)
    }

    fn hard_link(&self, place: &Place<'_>, entry: &Entry, shown: &Name) -> Result<(), FileError> {
        let target = Name::from(entry.link.as_slice());
        let Some(old) = self::place(&entry.link)? else {
            return Err(FileError::NotARegularFile { path: target.to_string() });
        };
        let from = self.parent(&old, false)?;
        let stat =
            fs::statat(&from, old.name, AtFlags::SYMLINK_NOFOLLOW).map_err(|e| FileError::at(&target, e))?;
        crate::root::expect_regular(&stat, &target)?;
        let dir = self.parent(place, true)?;
        let fail = |errno| FileError::at(shown, errno);
        let name = temporary_name().map_err(fail)?;
        // Without AT_SYMLINK_FOLLOW the name itself is linked, whatever it has become.
        fs::linkat(from, old.name, &dir, name.as_str(), AtFlags::empty()).map_err(fail)?;
        settle(dir, &name, place.name).map_err(fail)
    }
}

/// Renames a temporary name to its final one.
fn settle(dir: OwnedFd, temporary: &str, name: &[u8]) -> Result<(), Errno> {
    let renamed = fs::renameat(&dir, temporary, &dir, name);
    // Renaming one link of a file over another does nothing and succeeds, so there may be something to remove.
    let _ = fs::unlinkat(&dir, temporary, AtFlags::empty());
    renamed
}

fn place(path: &[u8]) -> Result<Option<Place<'_>>, FileError> {
    let shown = || Name::from(path).to_string();
    if path.starts_with(b"/") || path.split(|b| *b == b'/').any(|part| part == b"..") {
        return Err(FileError::PathOutside { path: shown() });
    }
    if path.contains(&0) {
        return Err(FileError::InvalidPath { path: shown(), what: "it contains a zero byte" });
    }
    let mut parents: Vec<_> =
        path.split(|b| *b == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    if parents.len() > MAX_DEPTH as usize {
        return Err(FileError::TooLarge { path: shown(), what: format!("deeper than {MAX_DEPTH} levels") });
    }
    Ok(parents.pop().map(|name| Place { parents, name }))
}

/// Whether a link at `depth` below the destination stays inside. See the module's head.
fn leads_inside(target: &[u8], depth: usize) -> bool {
    let (up_allowed, target) = match target {
        [] => return false,
        [b'/', ..] => match GuestPath::parse(target) {
            Ok(path) => (0, path.as_bytes().to_vec()),
            Err(_) => return false,
        },
        _ => (depth, target.to_vec()),
    };
    let parts: Vec<_> = target.split(|b| *b == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
    let up = parts.iter().take_while(|part| **part == b"..").count();
    up <= up_allowed && !parts[up..].contains(&&b".."[..])
}

/// Writes the contents; runs of zeros become holes, so that a sparse file stays small also from a plain archive.
fn fill(file: &mut File, entry: &Entry, contents: &mut impl Read, shown: &Name) -> Result<(), FileError> {
    let whole;
    let sparse = match &entry.sparse {
        Some(sparse) => sparse,
        None => {
            whole = Sparse { pieces: vec![(0, entry.stored)], size: entry.stored };
            &whole
        }
    };
    let mut buffer = vec![0; BUFFER];
    let fail = |error| FileError::io(shown, error);
    for (offset, length) in &sparse.pieces {
        file.seek(SeekFrom::Start(*offset)).map_err(fail)?;
        let mut left = *length;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(BUFFER).min(BUFFER);
            let chunk = &mut buffer[..wanted];
            let read = read_full(contents, chunk).map_err(|e| broken(TarError::Io(e)))?;
            if read < wanted {
                return Err(broken(TarError::Bad("it ends within a file")));
            }
            if *chunk == ZEROS {
                skip(file, wanted).map_err(fail)?;
            } else {
                file.write_all(chunk).map_err(fail)?;
            }
            left -= wanted as u64;
        }
    }
    file.set_len(sparse.size).map_err(fail)
}

fn skip(file: &mut File, bytes: usize) -> io::Result<()> {
    file.seek(SeekFrom::Current(i64::try_from(bytes).unwrap_or(0))).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_judged_by_where_they_lead() {
        for (target, depth) in
            [("a", 0), ("../a", 1), ("./../../a/b", 2), ("/workspace/a", 0), ("/workspace", 0), (".", 0)]
        {
            assert!(leads_inside(target.as_bytes(), depth), "{target}");
        }
        for (target, depth) in [
            ("..", 0),
            ("../../a", 1),
            ("a/../..", 2),
            ("/etc/passwd", 5),
            ("/workspace/../etc", 5),
            ("", 1),
            ("/workspace/a/../b", 5),
        ] {
            assert!(!leads_inside(target.as_bytes(), depth), "{target}");
        }
    }
}
