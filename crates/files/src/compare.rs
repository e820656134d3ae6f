//! What differs between two trees.
//!
//! Both are walked side by side in the order of their names, so that neither is held in memory. A regular file is the same if its
//! size and the time of its last change are, else if its bytes are. Owners do not count: a copy of a tree may belong to others.

use std::{cmp::Ordering, fs::File, io::Read, os::fd::BorrowedFd};

use carrel_proto::files::{GuestPath, Kind, MAX_DEPTH};
use rustix::{fs, io::Errno};

use crate::{
    FileError, Root,
    root::{CAREFUL, STRICT, kind_of, open_at},
    walk::{Item, OPEN_DIR, Order, Walk},
};

/// Names of one directory that are read at once.
const AHEAD: usize = 4096;
const BUFFER: usize = 128 << 10;

/// One entry that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Below the root.
    pub path: Vec<u8>,
    pub kind: Kind,
    /// As it is now; of what was removed, as it was.
    pub size: u64,
}

/// All of one sort, with the first of them by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Differences {
    pub count: u64,
    pub first: Vec<Difference>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    pub added: Differences,
    pub changed: Differences,
    pub removed: Differences,
}

impl Differences {
    fn add(&mut self, item: &Item, most: usize) {
        self.count += 1;
        if self.first.len() < most {
            let size = if kind_of(&item.stat) == Kind::Dir { 0 } else { item.stat.st_size.unsigned_abs() };
            self.first.push(Difference { path: item.path.clone(), kind: kind_of(&item.stat), size });
        }
    }
}

impl Root {
    /// What has become of this tree in `now`; at most `most` of each sort by name, all of them counted.
    pub fn compare(&self, now: &Root, most: usize) -> Result<Comparison, FileError> {
        let root = GuestPath::root();
        let fail = |errno: Errno| FileError::from_io(&root, errno.into());
        let walk = |tree: &Root| -> Result<Walk, FileError> {
            let dir = tree.resolve(&root, OPEN_DIR)?;
            Walk::new(dir, Order::Sorted(AHEAD), MAX_DEPTH as usize).map_err(fail)
        };
        let (mut old, mut new) = (walk(self)?, walk(now)?);
        let mut found = Comparison::default();
        let (mut before, mut after) = (old.next().map_err(fail)?, new.next().map_err(fail)?);
        loop {
            let order = match (&before, &after) {
                (None, None) => return Ok(found),
                (Some(_), None) => Ordering::Less,
                (None, Some(_)) => Ordering::Greater,
                (Some(before), Some(after)) => by_steps(&before.path, &after.path),
            };
            match (order, &before, &after) {
                (Ordering::Less, Some(item), _) => found.removed.add(item, most),
                (Ordering::Greater, _, Some(item)) => found.added.add(item, most),
                (_, Some(was), Some(is)) if !same(was, old.dir(), is, new.dir()) => {
                    found.changed.add(is, most)
                }
                _ => {}
            }
            if order != Ordering::Greater {
                before = old.next().map_err(fail)?;
            }
            if order != Ordering::Less {
                after = new.next().map_err(fail)?;
            }
        }
    }
}

/// The order of a walk: a directory's entries come right after it.
fn by_steps(a: &[u8], b: &[u8]) -> Ordering {
    a.split(|byte| *byte == b'/').cmp(b.split(|byte| *byte == b'/'))
}

/// What cannot be read counts as changed.
fn same(was: &Item, old: BorrowedFd<'_>, is: &Item, new: BorrowedFd<'_>) -> bool {
    let (a, b) = (&was.stat, &is.stat);
    // The kind is in the mode.
    if a.st_mode != b.st_mode {
        return false;
    }
    let time = |stat: &fs::Stat| (stat.st_mtime, stat.st_mtime_nsec);
    match kind_of(a) {
        Kind::File if a.st_size != b.st_size => false,
        Kind::File => time(a) == time(b) || same_bytes(was, old, is, new).unwrap_or(false),
        Kind::Symlink => {
            let target = |dir, item: &Item| fs::readlinkat(dir, item.name.as_slice(), Vec::new());
            match (target(old, was), target(new, is)) {
                (Ok(a), Ok(b)) => a == b,
                _ => false,
            }
        }
        Kind::Device => a.st_rdev == b.st_rdev,
        Kind::Dir | Kind::Fifo | Kind::Socket => true,
    }
}

fn same_bytes(was: &Item, old: BorrowedFd<'_>, is: &Item, new: BorrowedFd<'_>) -> std::io::Result<bool> {
    let open = |dir, item: &Item| -> std::io::Result<Option<File>> {
        let fd = open_at(dir, &item.name, fs::OFlags::RDONLY | CAREFUL, STRICT)?;
        // It may have become something else since it was looked at.
        let regular = kind_of(&fs::fstat(&fd)?) == Kind::File;
        Ok(regular.then(|| File::from(fd)))
    };
    let (Some(mut a), Some(mut b)) = (open(old, was)?, open(new, is)?) else { return Ok(false) };
    let (mut left, mut right) = (vec![0; BUFFER], vec![0; BUFFER]);
    loop {
        let count = a.read(&mut left)?;
        if count == 0 {
            return Ok(b.read(&mut right[..1])? == 0);
        }
        if b.read_exact(&mut right[..count]).is_err() || left[..count] != right[..count] {
            return Ok(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(all: &Differences) -> Vec<String> {
        all.first.iter().map(|one| String::from_utf8_lossy(&one.path).into_owned()).collect()
    }

    #[test]
    fn added_changed_removed() {
        let place = tempfile::tempdir().unwrap();
        let (a, b) = (place.path().join("a"), place.path().join("b"));
        for (root, text) in [(&a, "one"), (&b, "two")] {
            std::fs::create_dir_all(root.join("d/e")).unwrap();
            std::fs::write(root.join("d/e/same"), "same").unwrap();
            std::fs::write(root.join("d/changed"), text).unwrap();
            std::os::unix::fs::symlink(text, root.join("link")).unwrap();
        }
        // Both were written within one tick of the kernel's clock, perhaps.
        let changed = std::fs::File::options().write(true).open(b.join("d/changed")).unwrap();
        changed.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        std::fs::write(a.join("d.txt"), "sorted after d/ by steps, before it by bytes").unwrap();
        std::fs::create_dir(a.join("gone")).unwrap();
        std::fs::write(a.join("gone/file"), "").unwrap();
        std::fs::write(b.join("new"), "12345").unwrap();
        let compared = Root::open(&a).unwrap().compare(&Root::open(&b).unwrap(), 10).unwrap();
        assert_eq!(names(&compared.added), ["new"]);
        assert_eq!(compared.added.first[0].size, 5);
        assert_eq!(names(&compared.changed), ["d/changed", "link"]);
        assert_eq!(names(&compared.removed), ["d.txt", "gone", "gone/file"]);
        let short = Root::open(&a).unwrap().compare(&Root::open(&b).unwrap(), 1).unwrap();
        assert_eq!((short.removed.count, short.removed.first.len()), (3, 1));
    }

    #[test]
    fn a_file_that_became_a_directory_is_changed_and_its_content_added() {
        let place = tempfile::tempdir().unwrap();
        let (a, b) = (place.path().join("a"), place.path().join("b"));
        std::fs::create_dir_all(&a).unwrap();
        std::fs::create_dir_all(b.join("x")).unwrap();
        std::fs::write(a.join("x"), "").unwrap();
        std::fs::write(b.join("x/y"), "").unwrap();
        let compared = Root::open(&a).unwrap().compare(&Root::open(&b).unwrap(), 10).unwrap();
        assert_eq!(names(&compared.changed), ["x"]);
        assert_eq!(names(&compared.added), ["x/y"]);
        assert_eq!(compared.removed.count, 0);
    }
}
