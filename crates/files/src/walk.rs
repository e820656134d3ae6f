//! Walks a tree by descriptors: each directory is opened from its parent's by a single name and never through a
//! link, so the walk stays inside whatever is renamed meanwhile. Holds one descriptor per level, at most
//! [`MAX_DEPTH`](carrel_proto::files::MAX_DEPTH), and a bounded number of names per level.

use std::{
    collections::{BinaryHeap, VecDeque},
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    fs::{self, AtFlags, Dir, OFlags},
    io::Errno,
};

use carrel_proto::files::Kind;

use crate::root::{STRICT, kind_of, open_at};

/// Names read ahead per level when order does not matter.
const BATCH: usize = 2048;

pub(crate) const OPEN_DIR: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NONBLOCK);

#[derive(Clone, Copy)]
pub(crate) enum Order {
    /// By name, so that a walk can go on after a given path. Reads each directory once per so many entries.
    Sorted(usize),
    /// As the file system gives them, sorted only batch by batch. Reads each directory once.
    Batches,
}

pub(crate) struct Walk {
    frames: Vec<Frame>,
    order: Order,
    max_depth: usize,
    /// A directory that was returned last and is entered next.
    enter: Option<(Vec<u8>, Vec<u8>)>,
    /// Directories that could not be entered: no permission, or gone.
    pub(crate) unreadable: u64,
    /// Directories that were not entered because of the depth.
    pub(crate) too_deep: u64,
}

struct Frame {
    dir: Dir,
    /// Below the start; empty for the start itself.
    path: Vec<u8>,
    names: VecDeque<Vec<u8>>,
    last: Option<Vec<u8>>,
    done: bool,
}

pub(crate) struct Item {
    /// Below the start.
    pub(crate) path: Vec<u8>,
    pub(crate) name: Vec<u8>,
    pub(crate) stat: fs::Stat,
}

impl Walk {
    /// `dir` is open for reading.
    pub(crate) fn new(dir: OwnedFd, order: Order, max_depth: usize) -> Result<Self, Errno> {
        let frames = vec![Frame::new(dir, Vec::new())?];
        Ok(Self { frames, order, max_depth, enter: None, unreadable: 0, too_deep: 0 })
    }

    /// Goes on after `path`, which need not exist any more. Only with [`Order::Sorted`].
    pub(crate) fn skip_to(&mut self, path: &[u8]) -> Result<(), Errno> {
        let mut whole = Vec::new();
        for name in path.split(|b| *b == b'/') {
            let Some(frame) = self.frames.last_mut() else { return Ok(()) };
            frame.last = Some(name.to_vec());
            if self.frames.len() >= self.max_depth {
                return Ok(());
            }
            if !whole.is_empty() {
                whole.push(b'/');
            }
            whole.extend_from_slice(name);
            match open_at(self.dir(), name, OPEN_DIR | OFlags::NOFOLLOW, STRICT) {
                Ok(fd) => self.frames.push(Frame::new(fd, whole.clone())?),
                // A file, or gone: what follows it in its parent is next.
                Err(_) => return Ok(()),
            }
        }
        Ok(())
    }

    /// The directory of the item returned last, until the next one is asked for.
    pub(crate) fn dir(&self) -> BorrowedFd<'_> {
        self.frames.last().expect("an item comes from an open directory").fd()
    }

    pub(crate) fn next(&mut self) -> Result<Option<Item>, Errno> {
        loop {
            if let Some((name, path)) = self.enter.take() {
                match open_at(self.dir(), &name, OPEN_DIR | OFlags::NOFOLLOW, STRICT) {
                    Ok(fd) => self.frames.push(Frame::new(fd, path)?),
                    Err(_) => self.unreadable += 1,
                }
            }
            let depth = self.frames.len();
            let Some(frame) = self.frames.last_mut() else { return Ok(None) };
            let Some(name) = frame.names.pop_front() else {
                if frame.done {
                    self.frames.pop();
                } else {
                    frame.fill(self.order)?;
                }
                continue;
            };
            let Ok(stat) = fs::statat(frame.fd(), name.as_slice(), AtFlags::SYMLINK_NOFOLLOW) else {
                continue; // gone meanwhile
            };
            let mut path = frame.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(&name);
            if kind_of(&stat) == Kind::Dir {
                if depth < self.max_depth {
                    self.enter = Some((name.clone(), path.clone()));
                } else {
                    self.too_deep += 1;
                }
            }
            return Ok(Some(Item { path, name, stat }));
        }
    }
}

impl Frame {
    fn new(fd: OwnedFd, path: Vec<u8>) -> Result<Self, Errno> {
        let dir = Dir::new(fd)?;
        Ok(Self { dir, path, names: VecDeque::new(), last: None, done: false })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.dir.fd().expect("on Linux a directory stream always has its descriptor")
    }

    fn fill(&mut self, order: Order) -> Result<(), Errno> {
        match order {
            Order::Batches => {
                let mut names = Vec::new();
                while names.len() < BATCH {
                    let Some(name) = self.read()? else {
                        self.done = true;
                        break;
                    };
                    names.push(name);
                }
                names.sort_unstable();
                self.names = names.into();
            }
            Order::Sorted(most) => {
                self.dir.rewind();
                self.done = true;
                let mut smallest = BinaryHeap::new();
                while let Some(name) = self.read()? {
                    if self.last.as_ref().is_some_and(|last| name <= *last) {
                        continue;
                    }
                    smallest.push(name);
                    if smallest.len() > most {
                        smallest.pop();
                        self.done = false;
                    }
                }
                self.names = smallest.into_sorted_vec().into();
                self.last = self.names.back().cloned().or(self.last.take());
            }
        }
        Ok(())
    }

    fn read(&mut self) -> Result<Option<Vec<u8>>, Errno> {
        loop {
            match self.dir.read() {
                // A directory that is removed while it is read is at its end.
                None | Some(Err(Errno::NOENT)) => return Ok(None),
                Some(Err(errno)) => return Err(errno),
                Some(Ok(entry)) => match entry.file_name().to_bytes() {
                    b"." | b".." => {}
                    name => return Ok(Some(name.to_vec())),
                },
            }
        }
    }
}
