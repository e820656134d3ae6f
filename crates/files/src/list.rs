//! Listing: pages in a fixed order, so that a directory of any size is read in bounded memory and a page can be
//! asked for at any later time. What is created or removed between two pages may or may not appear; what stays
//! appears exactly once.

use carrel_proto::files::{Entry, GuestPath, Kind, Listing, MAX_DEPTH, MAX_PAGE, MAX_PAGE_BYTES, Name};
use rustix::fs;

use crate::{
    FileError, Root,
    root::{entry, kind_of},
    walk::{Item, OPEN_DIR, Order, Walk},
};

impl Root {
    /// The entries below `path` down to `depth` levels (1: the directory alone), at most `limit` of them, from
    /// behind `after` on. Directories come before what is in them; links are not followed.
    pub fn list(
        &self,
        path: &GuestPath,
        depth: u32,
        limit: u32,
        after: Option<&Name>,
    ) -> Result<Listing, FileError> {
        let fail = |errno| FileError::at(path, errno);
        if depth == 0 || limit == 0 {
            return Err(FileError::argument("depth and limit start at 1"));
        }
        let limit = limit.min(MAX_PAGE) as usize;
        let depth = depth.min(MAX_DEPTH) as usize;
        let dir = self.resolve(path, OPEN_DIR)?;
        let mut walk = Walk::new(dir, Order::Sorted(limit + 1), depth).map_err(fail)?;
        if let Some(after) = after {
            if after.as_bytes().split(|b| *b == b'/').any(|part| matches!(part, b"" | b"." | b"..")) {
                return Err(FileError::argument("after is not the end of a page"));
            }
            walk.skip_to(after.as_bytes()).map_err(fail)?;
        }
        let mut entries: Vec<Entry> = Vec::new();
        let mut bytes = 0;
        while let Some(item) = walk.next().map_err(fail)? {
            if entries.len() == limit || bytes > MAX_PAGE_BYTES {
                let next = entries.last().map(|entry| entry.name.clone());
                return Ok(Listing { entries, next });
            }
            let entry = describe(&walk, &item);
            bytes += entry.name.0.len() + entry.target.as_ref().map_or(0, |target| target.0.len());
            entries.push(entry);
        }
        Ok(Listing { entries, next: None })
    }
}

fn describe(walk: &Walk, item: &Item) -> Entry {
    let target = match kind_of(&item.stat) {
        Kind::Symlink => fs::readlinkat(walk.dir(), item.name.as_slice(), Vec::new()).ok(),
        _ => None,
    };
    entry(&item.path, &item.stat, target.map(|target| Name(target.into_bytes())))
}
