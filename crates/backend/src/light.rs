//! A directory with so little in it that it is copied through memory: making a workspace anew and writing a few files takes
//! a fraction of the time that copying its file system does, and nobody has to be root for it.
//!
//! Whoever lives in the box may be changing it meanwhile, or put links in the way: nothing is followed, and every entry is
//! opened below the directory that it was found in. What has more to it than a name, an owner, a mode, times and its content is
//! not light. What is mounted in it belongs to whoever made the box, and so do directories that only lead there: an interpreter may
//! lie anywhere, also below `/tmp`.

use std::{
    ffi::{CString, OsStr},
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::OsStrExt,
            fs::{PermissionsExt, lchown, symlink},
        },
    },
    path::{Path, PathBuf},
};

use carrel_jail::userns::Ids;
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps, flistxattr, fstat, openat,
    readlinkat, statat, utimensat,
};

use crate::stored::owner_in;

/// Entries, and bytes of all files.
const MANY: usize = 4096;
pub(crate) const MUCH: u64 = 16 << 20;
/// Directories in each other, each of which is held open.
const DEEP: usize = 32;
const WITHOUT_LINKS: OFlags =
    OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

#[derive(Debug)]
pub(crate) struct Light(Vec<Entry>);

#[derive(Debug)]
struct Entry {
    /// Below the directory; empty for itself.
    path: PathBuf,
    what: What,
    mode: u32,
    owner: (u32, u32),
    times: Timestamps,
}

#[derive(Debug)]
enum What {
    Directory,
    File(Vec<u8>),
    Link(CString),
}

impl Light {
    /// But for some names in it. `None`: it is not light, has more bytes than `most`, or cannot be read.
    pub(crate) fn read(directory: &Path, except: &[&str], most: u64) -> Option<Self> {
        let root = rustix::fs::open(directory, OFlags::DIRECTORY | WITHOUT_LINKS, Mode::empty()).ok()?;
        let device = fstat(&root).ok()?.st_dev;
        let mut all = Reading { entries: Vec::new(), bytes: 0, most, device };
        all.directory(&root, Path::new(""), 0, except)?;
        Some(Self(all.entries))
    }

    /// Into an empty directory of a box with other ids, in which nobody lives yet.
    pub(crate) fn write(&self, directory: &Path, from: &Ids, to: &Ids) -> io::Result<()> {
        for entry in &self.0 {
            let path = directory.join(&entry.path);
            match &entry.what {
                What::Directory if entry.path.as_os_str().is_empty() => {}
                What::Directory => match fs::create_dir(&path) {
                    // It also leads to a mount.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists && is_directory(&path) => {}
                    made => made?,
                },
                What::File(content) => File::create_new(&path)?.write_all(content)?,
                What::Link(target) => symlink(OsStr::from_bytes(target.as_bytes()), &path)?,
            }
        }
        // What is in a directory changes its time, so it comes after that; and a mode after the owner, who may take bits of it away.
        for entry in self.0.iter().rev() {
            let path = directory.join(&entry.path);
            let (uid, gid) = owner_in(from, to, entry.owner);
            lchown(&path, Some(uid), Some(gid))?;
            if !matches!(entry.what, What::Link(_)) {
                fs::set_permissions(&path, Permissions::from_mode(entry.mode))?;
            }
            utimensat(CWD, &path, &entry.times, AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }
}

impl Light {
    /// Nothing but the directory itself.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.len() <= 1
    }
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir())
}

struct Reading {
    entries: Vec<Entry>,
    bytes: u64,
    most: u64,
    /// Of the file system.
    device: u64,
}

impl Reading {
    /// Says whether it only leads to mounts: then it is not an entry.
    fn directory(&mut self, directory: &OwnedFd, path: &Path, depth: usize, except: &[&str]) -> Option<bool> {
        let stat = fstat(directory).ok()?;
        let own = self.entries.len();
        self.add(path, What::Directory, &stat)?;
        if depth == DEEP || !is_plain(directory.as_fd()) {
            return None;
        }
        let mut leads = false;
        for entry in Dir::read_from(directory).ok()? {
            let entry = entry.ok()?;
            let name = entry.file_name();
            let is_except = except.iter().any(|except| except.as_bytes() == name.to_bytes());
            if is_except || [&b"."[..], b".."].contains(&name.to_bytes()) {
                continue;
            }
            let below = path.join(OsStr::from_bytes(name.to_bytes()));
            let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
            if stat.st_dev != self.device {
                leads = true;
                continue;
            }
            if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                self.add(&below, What::Link(readlinkat(directory, name, Vec::new()).ok()?), &stat)?;
                continue;
            }
            let found = openat(directory, name, WITHOUT_LINKS, Mode::empty()).ok()?;
            let stat = fstat(&found).ok()?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => leads |= self.directory(&found, &below, depth + 1, &[])?,
                FileType::RegularFile => self.file(found, &below, &stat)?,
                _ => return None,
            }
        }
        let leads_only = leads && depth > 0 && self.entries.len() == own + 1;
        if leads_only {
            self.entries.truncate(own);
        }
        Some(leads_only)
    }

    fn file(&mut self, found: OwnedFd, path: &Path, stat: &Stat) -> Option<()> {
        let size = u64::try_from(stat.st_size).ok()?;
        let has_holes = u64::try_from(stat.st_blocks).ok()? * 512 < size;
        self.bytes = self.bytes.saturating_add(size);
        if self.bytes > self.most || stat.st_nlink != 1 || has_holes || !is_plain(found.as_fd()) {
            return None;
        }
        let mut content = Vec::with_capacity(usize::try_from(size).ok()?);
        File::from(found).take(size + 1).read_to_end(&mut content).ok()?;
        // It grows as it is read.
        if content.len() as u64 != size {
            return None;
        }
        self.add(path, What::File(content), stat)
    }

    fn add(&mut self, path: &Path, what: What, stat: &Stat) -> Option<()> {
        let time = |seconds: i64, nanoseconds: u64| {
            Some(Timespec { tv_sec: seconds, tv_nsec: i64::try_from(nanoseconds).ok()? })
        };
        let times = Timestamps {
            last_access: time(stat.st_atime, stat.st_atime_nsec)?,
            last_modification: time(stat.st_mtime, stat.st_mtime_nsec)?,
        };
        let (mode, owner) = (stat.st_mode & 0o7777, (stat.st_uid, stat.st_gid));
        self.entries.push(Entry { path: path.to_path_buf(), what, mode, owner, times });
        (self.entries.len() <= MANY).then_some(())
    }
}

/// Without attributes of its own.
fn is_plain(file: BorrowedFd<'_>) -> bool {
    matches!(flistxattr(file, &mut [0_u8; 1]), Ok(0) | Err(rustix::io::Errno::OPNOTSUPP))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn place() -> tempfile::TempDir {
        tempfile::tempdir().expect("a directory")
    }

    #[test]
    fn what_is_light_is_written_as_it_was() {
        let (from, to) = (place(), place());
        let at = |name: &str| from.path().join(name);
        fs::create_dir_all(at("a/b")).expect("directories");
        fs::write(at("a/b/file"), b"content\0").expect("a file");
        fs::write(at("a/empty"), b"").expect("a file");
        symlink("/etc/passwd", at("a/link")).expect("a link");
        fs::set_permissions(at("a/b/file"), Permissions::from_mode(0o4751)).expect("a mode");
        fs::set_permissions(at("a/b"), Permissions::from_mode(0o555)).expect("a mode");
        let ids = Ids::single(rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        let light = Light::read(from.path(), &[], MUCH).expect("light");
        light.write(to.path(), &ids, &ids).expect("written");
        assert_eq!(fs::read(to.path().join("a/b/file")).expect("a file"), b"content\0");
        assert_eq!(fs::read_link(to.path().join("a/link")).expect("a link"), Path::new("/etc/passwd"));
        for name in ["", "a", "a/b", "a/b/file", "a/empty", "a/link"] {
            let meta = |place: &Path| fs::symlink_metadata(place.join(name)).expect("an entry");
            let (was, is) = (meta(from.path()), meta(to.path()));
            let facts = |meta: &fs::Metadata| {
                (meta.mode(), meta.uid(), meta.gid(), meta.size(), meta.mtime(), meta.mtime_nsec())
            };
            let size = |meta: &fs::Metadata| if meta.is_dir() { 0 } else { meta.size() };
            assert_eq!((facts(&was), size(&was)), (facts(&is), size(&is)), "{name}");
        }
    }

    #[test]
    fn what_has_more_to_it_is_not_light() {
        let is_light = |make: &dyn Fn(&Path)| {
            let place = place();
            make(place.path());
            Light::read(place.path(), &["known"], MUCH).is_some()
        };
        assert!(is_light(&|_| {}));
        assert!(is_light(&|place| {
            fs::create_dir(place.join("known")).expect("a directory");
            drop(std::os::unix::net::UnixListener::bind(place.join("known/socket")).expect("a socket"));
        }));
        assert!(!is_light(&|place| {
            fs::write(place.join("a"), b"a").expect("a file");
            fs::hard_link(place.join("a"), place.join("b")).expect("another name");
        }));
        assert!(!is_light(&|place| {
            let file = File::create(place.join("holes")).expect("a file");
            file.set_len(1 << 16).expect("a hole");
        }));
        assert!(!is_light(&|place| fs::write(place.join("big"), vec![1; 17 << 20]).expect("a file")));
        assert!(!is_light(&|place| {
            (0..=MANY).for_each(|number| fs::write(place.join(number.to_string()), b"").expect("a file"));
        }));
        assert!(!is_light(&|place| {
            let path = (0..40).fold(place.to_path_buf(), |path, _| path.join("d"));
            fs::create_dir_all(path).expect("directories");
        }));
        assert!(!is_light(&|place| {
            drop(std::os::unix::net::UnixListener::bind(place.join("socket")).expect("a socket"));
        }));
        assert!(!is_light(&|place| {
            fs::write(place.join("a"), b"a").expect("a file");
            let file = File::open(place.join("a")).expect("a file");
            let set = rustix::fs::fsetxattr(&file, "user.x", b"y", rustix::fs::XattrFlags::empty());
            if set.is_err() {
                // No attributes here: something else that is not light.
                fs::hard_link(place.join("a"), place.join("b")).expect("another name");
            }
        }));
    }
}
