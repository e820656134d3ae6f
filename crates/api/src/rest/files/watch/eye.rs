//! The watching itself: the kernel's events in, changes of paths out.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    future::poll_fn,
    io,
    os::{fd::AsRawFd, unix::ffi::OsStrExt},
    pin::Pin,
    task::Poll,
    time::Duration,
};

use carrel_files::{Root, is_temporary};
use carrel_proto::{
    files::{GuestPath, Kind, MAX_PAGE, Name},
    problem::Problem,
};
use inotify::{EventMask, EventOwned, EventStream, Inotify, WatchDescriptor, WatchMask, Watches};
use tokio_stream::{Stream, StreamExt};

use super::{super::blocking, Change, ChangeEvent, Watched, too_many};

/// Directories that one client watches: more than a project has without what it installs. Beyond, some changes are missed,
/// and that is told.
const MOST_WATCHES: usize = 8192;
/// The kernel's events that are taken at once.
const BUFFER: usize = 64 << 10;
/// Events that are read ahead, to find the two halves of a move.
const MOST_WAITING: usize = 4096;
/// The two halves of a move come one right after the other; a second half that is not there by then came from elsewhere.
const OTHER_HALF: Duration = Duration::from_millis(50);
/// Names that a look told and the kernel may tell again.
const MOST_TOLD: usize = 1 << 16;

/// What was seen.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Change(ChangeEvent),
    Overflow,
}

#[derive(Debug)]
pub(super) struct Eye {
    watched: Watched,
    recursive: bool,
    inotify: EventStream<Vec<u8>>,
    /// Below the watched directory, by watch. The directory itself is the empty path.
    paths: HashMap<WatchDescriptor, Vec<u8>>,
    base: WatchDescriptor,
    /// Read and not yet looked at.
    waiting: VecDeque<EventOwned>,
    /// Looked at and not yet handed on.
    seen: VecDeque<Seen>,
    /// Directories to look through, and where their list goes on.
    looks: VecDeque<(Vec<u8>, Option<Name>)>,
    /// Told from a look; the kernel's word for it may still come.
    told: HashSet<Vec<u8>>,
    short_sighted: bool,
    over: bool,
}

fn mask() -> WatchMask {
    WatchMask::CREATE
        | WatchMask::DELETE
        | WatchMask::MODIFY
        | WatchMask::ATTRIB
        | WatchMask::MOVED_FROM
        | WatchMask::MOVED_TO
        | WatchMask::DELETE_SELF
        | WatchMask::MOVE_SELF
        | WatchMask::ONLYDIR
        | WatchMask::EXCL_UNLINK
}

/// Watches one directory. `None`: it is not there any more.
fn add(watches: &mut Watches, root: &Root, below: &[u8]) -> io::Result<Option<WatchDescriptor>> {
    let Ok(path) = GuestPath::parse(if below.is_empty() { b"." } else { below }) else { return Ok(None) };
    let Ok(directory) = root.open_own_directory(&path) else { return Ok(None) };
    let itself = format!("/proc/self/fd/{}", directory.as_raw_fd());
    match watches.add(itself, mask()) {
        Ok(watch) => Ok(Some(watch)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// One page of a look: watches for the directories in it.
struct Page {
    /// Name below the watched directory, and the watch of a directory.
    found: Vec<(Vec<u8>, Option<WatchDescriptor>)>,
    next: Option<Name>,
    missed: bool,
}

/// Looks through a part of one directory. Its own watch is there already.
fn look(
    mut watches: Watches,
    watched: &Watched,
    below: &[u8],
    after: Option<&Name>,
    mut room: usize,
) -> Option<Page> {
    let root = watched.root().ok()?;
    let path = GuestPath::parse(if below.is_empty() { b"." } else { below }).ok()?;
    let directory = Root::from_fd(root.open_own_directory(&path).ok()?).ok()?;
    let listing = directory.list(&GuestPath::root(), 1, MAX_PAGE, after).ok()?;
    let mut page = Page { found: Vec::new(), next: listing.next, missed: false };
    for entry in listing.entries {
        let name = join(below, entry.name.as_bytes());
        let mut watch = None;
        if entry.kind == Kind::Dir {
            if room > 0 {
                match add(&mut watches, &root, &name) {
                    Ok(added) => watch = added,
                    Err(_) => page.missed = true,
                }
                room -= usize::from(watch.is_some());
            } else {
                page.missed = true;
            }
        }
        page.found.push((name, watch));
    }
    Some(page)
}

fn join(below: &[u8], name: &[u8]) -> Vec<u8> {
    if below.is_empty() { name.to_vec() } else { [below, b"/", name].concat() }
}

/// Whether `path` is `above` or below it.
fn is_within(path: &[u8], above: &[u8]) -> bool {
    path.strip_prefix(above).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

impl Eye {
    /// Watches from now on.
    pub(super) async fn open(watched: Watched, recursive: bool) -> Result<Self, Problem> {
        let inotify = Inotify::init().map_err(|error| too_many(&error))?;
        let mut watches = inotify.watches();
        let place = watched.clone();
        let base = blocking(move || -> Result<_, Problem> {
            let added = add(&mut watches, &place.root()?, b"").map_err(|error| too_many(&error))?;
            added.ok_or_else(|| Problem::internal("the directory went away"))
        })
        .await??;
        let inotify = inotify.into_event_stream(vec![0; BUFFER]).map_err(Problem::internal)?;
        let mut eye = Self {
            watched,
            recursive,
            inotify,
            paths: HashMap::from([(base.clone(), Vec::new())]),
            base,
            waiting: VecDeque::new(),
            seen: VecDeque::new(),
            looks: VecDeque::new(),
            told: HashSet::new(),
            short_sighted: false,
            over: false,
        };
        if recursive {
            eye.looks.push_back((Vec::new(), None));
            while eye.look().await {
                // What was there before is no news.
                eye.short_sighted |= eye.seen.contains(&Seen::Overflow);
                eye.seen.clear();
                eye.told.clear();
            }
        }
        Ok(eye)
    }

    /// There are directories that it could not watch.
    pub(super) fn is_short_sighted(&self) -> bool {
        self.short_sighted
    }

    /// The next thing seen. `None`: there is nothing left to watch. Nothing is lost when this is dropped halfway.
    pub(super) async fn next(&mut self) -> Option<Seen> {
        loop {
            if let Some(seen) = self.seen.pop_front() {
                return Some(seen);
            }
            if self.over {
                return None;
            }
            if self.look().await {
                continue;
            }
            if self.waiting.is_empty() {
                self.read(None).await;
            }
            if let Some(event) = self.waiting.front()
                && event.mask.contains(EventMask::MOVED_FROM)
                && !self.has_other_half(event.cookie)
            {
                self.read(Some(OTHER_HALF)).await;
            }
            if let Some(event) = self.waiting.pop_front() {
                self.handle(&event);
            }
        }
    }

    fn has_other_half(&self, cookie: u32) -> bool {
        self.waiting.iter().any(|event| event.mask.contains(EventMask::MOVED_TO) && event.cookie == cookie)
    }

    /// Takes what the kernel has. If that is nothing, waits for it for so long, or for as long as it takes.
    async fn read(&mut self, patience: Option<Duration>) {
        let before = self.waiting.len();
        while self.waiting.len() < MOST_WAITING {
            match poll_fn(|context| Poll::Ready(Pin::new(&mut self.inotify).poll_next(context))).await {
                Poll::Ready(event) => self.take(event),
                Poll::Pending => break,
            }
            if self.over {
                return;
            }
        }
        if self.waiting.len() > before {
            return;
        }
        // Everything that happened before the last look ended has been told by now.
        self.told.clear();
        let event = match patience {
            None => self.inotify.next().await,
            Some(time) => match tokio::time::timeout(time, self.inotify.next()).await {
                Ok(event) => event,
                Err(_) => return,
            },
        };
        self.take(event);
    }

    fn take(&mut self, event: Option<io::Result<EventOwned>>) {
        match event {
            Some(Ok(event)) => self.waiting.push_back(event),
            Some(Err(_)) | None => self.over = true,
        }
    }

    /// Does one piece of looking, if there is any to do.
    async fn look(&mut self) -> bool {
        let Some((below, after)) = self.looks.front().cloned() else { return false };
        let room = MOST_WATCHES.saturating_sub(self.paths.len());
        let (watches, watched, place) = (self.inotify.watches(), self.watched.clone(), below.clone());
        let page = blocking(move || look(watches, &watched, &place, after.as_ref(), room)).await;
        self.looks.pop_front();
        // A directory that went away meanwhile has nothing to tell.
        let Ok(Some(page)) = page else { return true };
        for (name, watch) in page.found {
            if let Some(watch) = watch {
                self.paths.insert(watch, name.clone());
                self.looks.push_back((name.clone(), None));
            }
            self.tell(name, Change::Created, None, true);
        }
        if page.missed {
            self.seen.push_back(Seen::Overflow);
        }
        if let Some(next) = page.next {
            self.looks.push_front((below, Some(next)));
        }
        true
    }

    fn handle(&mut self, event: &EventOwned) {
        let mask = event.mask;
        if mask.contains(EventMask::Q_OVERFLOW) {
            self.seen.push_back(Seen::Overflow);
            return;
        }
        if event.wd == self.base
            && mask.intersects(
                EventMask::DELETE_SELF | EventMask::MOVE_SELF | EventMask::UNMOUNT | EventMask::IGNORED,
            )
        {
            self.over = true;
            return;
        }
        if mask.contains(EventMask::IGNORED) {
            self.paths.remove(&event.wd);
            return;
        }
        let (Some(below), Some(name)) = (self.paths.get(&event.wd), event.name.as_ref()) else { return };
        let name = name.as_bytes();
        let path = join(below, name);
        let (hidden, is_dir) = (is_temporary(name), mask.contains(EventMask::ISDIR));
        if mask.contains(EventMask::MOVED_FROM) {
            self.moved(event.cookie, path, hidden, is_dir);
        } else if mask.intersects(EventMask::CREATE | EventMask::MOVED_TO) {
            self.appeared(path, hidden, is_dir);
        } else if hidden {
        } else if mask.contains(EventMask::DELETE) {
            self.told.remove(&path);
            self.tell(path, Change::Removed, None, false);
        } else {
            self.tell(path, Change::Changed, None, false);
        }
    }

    fn moved(&mut self, cookie: u32, from: Vec<u8>, hidden: bool, is_dir: bool) {
        let half = self
            .waiting
            .iter()
            .position(|event| event.mask.contains(EventMask::MOVED_TO) && event.cookie == cookie)
            .and_then(|at| self.waiting.remove(at));
        let to = half.and_then(|half| Some((self.paths.get(&half.wd)?, half.name?)));
        let to = to.map(|(below, name)| (join(below, name.as_bytes()), is_temporary(name.as_bytes())));
        match to {
            Some((to, new_hidden)) => {
                // What was at `to` is gone, and so is what was watched there.
                self.forget(&to);
                if is_dir {
                    for path in self.paths.values_mut().chain(self.looks.iter_mut().map(|(path, _)| path)) {
                        if is_within(path, &from) {
                            *path = [to.as_slice(), &path[from.len()..]].concat();
                        }
                    }
                }
                match (hidden, new_hidden) {
                    (true, true) => {}
                    (true, false) => self.tell(to, Change::Created, None, false),
                    (false, true) => self.tell(from, Change::Removed, None, false),
                    (false, false) => self.tell(to, Change::Moved, Some(from), false),
                }
            }
            None => {
                self.forget(&from);
                if !hidden {
                    self.tell(from, Change::Removed, None, false);
                }
            }
        }
    }

    /// Ends the watches of a directory that is not here any more.
    fn forget(&mut self, path: &[u8]) {
        let mut watches = self.inotify.watches();
        self.paths.retain(|watch, watched| {
            let keep = watched.is_empty() || !is_within(watched, path);
            if !keep {
                // One that the kernel has ended already is none.
                let _ = watches.remove(watch.clone());
            }
            keep
        });
        self.looks.retain(|(watched, _)| watched.is_empty() || !is_within(watched, path));
        self.told.remove(path);
    }

    fn appeared(&mut self, path: Vec<u8>, hidden: bool, is_dir: bool) {
        if self.told.remove(&path) || hidden {
            return;
        }
        if is_dir && self.recursive {
            self.watch(&path);
        }
        self.tell(path, Change::Created, None, false);
    }

    /// Watches a directory that appeared, and then looks through it. One call of the kernel: not worth a thread's turn.
    fn watch(&mut self, path: &[u8]) {
        if self.paths.len() >= MOST_WATCHES {
            self.seen.push_back(Seen::Overflow);
            return;
        }
        let mut watches = self.inotify.watches();
        let added = self.watched.root().map(|root| add(&mut watches, &root, path));
        match added {
            Ok(Ok(Some(watch))) => {
                self.paths.insert(watch, path.to_vec());
                self.looks.push_back((path.to_vec(), None));
            }
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(_)) => self.seen.push_back(Seen::Overflow),
        }
    }

    fn tell(&mut self, path: Vec<u8>, kind: Change, from: Option<Vec<u8>>, by_look: bool) {
        if by_look {
            if path.rsplit(|byte| *byte == b'/').next().is_some_and(is_temporary) {
                return;
            }
            if self.told.len() < MOST_TOLD {
                self.told.insert(path.clone());
            }
        }
        let change = Seen::Change(ChangeEvent {
            path: self.watched.name(&path),
            kind,
            from: from.map(|from| self.watched.name(&from)),
        });
        // A file that is written to is told once for all that is known of it so far.
        if kind != Change::Changed || self.seen.back() != Some(&change) {
            self.seen.push_back(change);
        }
    }
}
