//! Watches how much a workspace holds, where no file system of its own bounds it.

use std::{
    os::fd::{AsFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, open, openat, statat};

/// Charged per entry, so that empty files count too.
const PER_ENTRY: u64 = 1024;
/// A walk takes at most this part of the time.
const SHARE: u32 = 10;
const SHORTEST: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Watch {
    path: String,
    limit: u64,
    last: u64,
    pub(crate) due: Option<Instant>,
}

impl Watch {
    pub(crate) fn new(path: String, limit: u64) -> Self {
        Self { path, limit, last: 0, due: None }
    }

    /// Code begins to run: look soon, and from what is there now.
    pub(crate) fn arm(&mut self, now: Instant) {
        if self.due.is_none() {
            self.last = u64::MAX;
            self.due = Some(now);
        }
    }

    /// Looks. `true`: over the limit and still growing. What is over but shrinks is being cleaned up.
    pub(crate) fn check(&mut self, now: Instant) -> bool {
        let used = used(&self.path);
        let over = used > self.limit && used > self.last;
        self.last = used;
        self.due = Some(Instant::now() + ((Instant::now() - now) * SHARE).max(SHORTEST));
        over
    }

    pub(crate) fn is_full(&self) -> bool {
        self.used() > self.limit
    }

    pub(crate) fn used(&self) -> u64 {
        used(&self.path)
    }

    pub(crate) fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }
}

/// Bytes on disk below `path`. Follows no links and holds one descriptor per level, to a bounded depth.
fn used(path: &str) -> u64 {
    const DEEPEST: usize = 128;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut total = 0;
    let mut stack: Vec<(OwnedFd, Dir)> = Vec::new();
    let enter = |at: rustix::fd::BorrowedFd<'_>, name: &std::ffi::CStr| {
        let fd = openat(at, name, flags, Mode::empty()).ok()?;
        let dir = Dir::read_from(&fd).ok()?;
        Some((fd, dir))
    };
    if let Ok(fd) = open(path, flags, Mode::empty())
        && let Ok(dir) = Dir::read_from(&fd)
    {
        stack.push((fd, dir));
    }
    while let Some((fd, dir)) = stack.last_mut() {
        let Some(Ok(entry)) = dir.read() else {
            stack.pop();
            continue;
        };
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        if let Ok(stat) = statat(&*fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            total += PER_ENTRY + u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
            let is_dir = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
            if is_dir && let Some(inner) = enter(fd.as_fd(), name) {
                if stack.len() == DEEPEST {
                    // No honest tree is this deep; what cannot be measured counts as too much.
                    return u64::MAX;
                }
                stack.push(inner);
            }
        }
    }
    total
}
