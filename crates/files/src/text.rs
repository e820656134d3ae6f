//! What search and replace share: which files are looked at, what counts as text, and how it is matched.

use std::{
    fs::File,
    io::Read,
    ops::ControlFlow,
    os::fd::{AsFd, BorrowedFd},
};

use carrel_proto::files::{GuestPath, Kind, MAX_DEPTH, MAX_PATTERN, Skipped};
use memchr::memmem;
use regex_lite::{Regex, RegexBuilder};
use rustix::fs::{self, AtFlags, OFlags};

use crate::{
    FileError, Root,
    glob::Glob,
    root::{kind_of, open_regular, size_of},
    walk::{OPEN_DIR, Order, Walk},
};

/// Where a zero byte says that a file is binary: as far as git looks.
const SNIFF: usize = 8000;
/// Bytes that a compiled expression may take: far beyond what people write.
const MAX_REGEX: usize = 1 << 20;
/// Bytes that one search or replacement reads in all: some seconds of work.
pub(crate) const MAX_BYTES: usize = 1 << 30;
/// Entries that one search or replacement passes by.
const MAX_VISITED: u64 = 1_000_000;
/// Names kept per directory on the way.
const BATCH: usize = 2048;

pub(crate) enum Needle {
    Literal(Box<memmem::Finder<'static>>),
    Regex(Regex),
}

impl Needle {
    pub(crate) fn new(text: &str, regex: bool, ignore_case: bool) -> Result<Self, FileError> {
        if text.is_empty() || text.len() > MAX_PATTERN {
            return Err(FileError::argument(format!("the text to look for has 1 to {MAX_PATTERN} bytes")));
        }
        if !regex && !ignore_case {
            return Ok(Self::Literal(Box::new(memmem::Finder::new(text).into_owned())));
        }
        let pattern = if regex { text.to_owned() } else { regex_lite::escape(text) };
        RegexBuilder::new(&pattern)
            .case_insensitive(ignore_case)
            .multi_line(true)
            .size_limit(MAX_REGEX)
            .build()
            .map(Self::Regex)
            .map_err(|error| FileError::argument(format!("bad regular expression: {error}")))
    }
}

/// A file (or, for names alone, anything) that a search has come to.
pub(crate) struct Candidate<'a> {
    /// Relative to the workspace.
    pub(crate) path: Vec<u8>,
    pub(crate) dir: BorrowedFd<'a>,
    pub(crate) name: &'a [u8],
    pub(crate) stat: fs::Stat,
    /// Named by the caller, so that what is wrong with it is an error.
    pub(crate) single: bool,
}

/// Calls `each` for what is at or below `path` and matches `glob`. Returns how many could not be entered, and
/// whether it came to the end.
pub(crate) fn visit(
    root: &Root,
    path: &GuestPath,
    glob: Option<&str>,
    mut each: impl FnMut(Candidate<'_>) -> Result<ControlFlow<()>, FileError>,
) -> Result<(u64, bool), FileError> {
    let fail = |errno| FileError::at(path, errno);
    let glob = glob.map(Glob::new).transpose()?;
    let start = root.stat(path, true)?;
    if start.kind != Kind::Dir {
        let slot = root.locate(path, true)?;
        let stat = fs::statat(&slot.dir, slot.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        if glob.is_none_or(|glob| glob.matches(&slot.name)) {
            let (dir, name) = (slot.dir.as_fd(), slot.name.as_slice());
            let flow = each(Candidate { path: path.as_bytes().to_vec(), dir, name, stat, single: true })?;
            return Ok((0, flow.is_continue()));
        }
        return Ok((0, true));
    }
    let dir = root.resolve(path, OPEN_DIR)?;
    // Sorted: a file that is replaced on the way must not come up twice.
    let mut walk = Walk::new(dir, Order::Sorted(BATCH), MAX_DEPTH as usize).map_err(fail)?;
    let mut complete = true;
    let mut visited = 0;
    while let Some(item) = walk.next().map_err(fail)? {
        visited += 1;
        if visited > MAX_VISITED {
            complete = false;
            break;
        }
        if glob.as_ref().is_some_and(|glob| !glob.matches(&item.path)) {
            continue;
        }
        let whole = if path.is_root() { item.path } else { [path.as_bytes(), b"/", &item.path].concat() };
        let (dir, name) = (walk.dir(), item.name.as_slice());
        if each(Candidate { path: whole, dir, name, stat: item.stat, single: false })?.is_break() {
            complete = false;
            break;
        }
    }
    Ok((walk.unreadable + walk.too_deep, complete))
}

impl Candidate<'_> {
    /// The whole text, or nothing and a count in `skipped`.
    pub(crate) fn text(&self, most: u64, skipped: &mut Skipped) -> Result<Option<Vec<u8>>, FileError> {
        let shown = carrel_proto::files::Name::from(self.path.as_slice());
        if !self.single && kind_of(&self.stat) != Kind::File {
            return Ok(None);
        }
        if !self.single && size_of(&self.stat) > most {
            skipped.too_large += 1;
            return Ok(None);
        }
        let file = match open_regular(self.dir, self.name, OFlags::RDONLY, &shown) {
            Ok((fd, _)) => File::from(fd),
            Err(error) if self.single => return Err(error),
            Err(_) => {
                skipped.unreadable += 1;
                return Ok(None);
            }
        };
        let mut text = Vec::new();
        file.take(most + 1).read_to_end(&mut text).map_err(|e| FileError::io(&shown, e))?;
        if text.len() as u64 > most {
            if self.single {
                let what = format!("more than {most} bytes to look through");
                return Err(FileError::TooLarge { path: shown.to_string(), what });
            }
            skipped.too_large += 1;
            return Ok(None);
        }
        if !self.single && memchr::memchr(0, &text[..text.len().min(SNIFF)]).is_some() {
            skipped.binary += 1;
            return Ok(None);
        }
        Ok(Some(text))
    }
}
