//! Images that stay are packed: of hibernated sandboxes and of snapshots, by a daemon, when nobody waits for them.
//!
//! ```text
//! $CARREL_STATE/packing.lock   held by the one who packs
//!               packing/       what it packs, in the making
//! ```
//! *No lock of a sandbox or snapshot is held while its image is packed*, so that nobody waits: whoever wakes the sandbox or removes
//! the snapshot meanwhile wins, and the packed image is thrown away. When it is whole and on the disk, the lock is taken
//! if it is free, the row is looked at once more, and the two directories change places in one step. The row names the same
//! image before and after.
//!
//! *What a kill leaves*: before that step `packing/` is in the making, after it the image as it was; nobody needs either, and
//! the sweep removes it once nobody packs. The row may tell the size of before; nothing rests on it.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use carrel_backend::memory_of;
use carrel_proto::problem::{Code, Problem};
use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};

use crate::{
    Engine, Record,
    lock::Lock,
    registry::{MAX_PAGE, now_ms},
    sandboxes::remove_tree,
    sleep::size,
    snapshots::{Snapshot, SnapshotFilter, occupied},
};

/// An image that is not needed for so long is likely not to be needed for longer.
pub const PACK_AFTER: Duration = Duration::from_secs(5 * 60);
/// Between two looks for images to pack.
const LOOK: Duration = Duration::from_secs(30);
/// Images that are remembered as not to be packed; with more of them, all are tried again.
const MOST_REFUSED: usize = 10_000;
/// The kernel's lowest: whoever else wants the processor has it.
const NICE: i32 = 19;

fn failed(error: io::Error) -> Problem {
    Problem::internal(format!("packing images: {error}"))
}

/// What a daemon packs with: a thread of its own, now and then.
#[derive(Debug)]
pub(crate) struct Packer {
    /// `None`: never.
    after: Option<Duration>,
    next: Instant,
    work: Option<Work>,
    /// Those that could not be packed, so that a damaged one is not read for ever.
    refused: HashSet<PathBuf>,
}

#[derive(Debug)]
struct Work {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<(HashSet<PathBuf>, Result<(), Problem>)>,
}

impl Packer {
    pub(crate) fn new(after: Option<Duration>) -> Self {
        Self { after, next: Instant::now(), work: None, refused: HashSet::new() }
    }

    /// Starts packing if it is time to, and says what came of the last time. Never waits.
    pub(crate) fn round(&mut self, engine: &Engine) -> Result<(), Problem> {
        let Some(after) = self.after else { return Ok(()) };
        if let Some(work) = self.work.take_if(|work| work.thread.is_finished()) {
            self.next = Instant::now() + LOOK;
            let (refused, done) =
                work.thread.join().map_err(|_| Problem::internal("packing images: it panicked"))?;
            self.refused = refused;
            return done;
        }
        if self.work.is_some() || Instant::now() < self.next {
            return Ok(());
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (engine, stopped, mut refused) =
            (engine.clone(), Arc::clone(&stop), std::mem::take(&mut self.refused));
        let work = move || {
            // Of this thread alone, which ends with its work. Whatever it is refused for, the work is the same.
            let _ = rustix::process::setpriority_process(None, NICE);
            let done = engine.pack_images(after, &mut refused, &|| !stopped.load(Ordering::Relaxed));
            (refused, done.map(drop))
        };
        let thread = std::thread::Builder::new().name("carrel-pack".into()).spawn(work).map_err(failed)?;
        self.work = Some(Work { stop, thread });
        Ok(())
    }
}

impl Drop for Packer {
    fn drop(&mut self) {
        if let Some(work) = &self.work {
            work.stop.store(true, Ordering::Relaxed);
        }
    }
}

/// The right to pack: there is one, so that packing never takes more than one processor of a host.
struct Turn {
    making: PathBuf,
    _held: File,
}

impl Turn {
    /// `None`: somebody else packs.
    fn take(state: &Path) -> io::Result<Option<Self>> {
        let lock = state.join("packing.lock");
        let held = File::options().create(true).append(true).open(lock)?;
        match flock(&held, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { making: state.join("packing"), _held: held })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn clear(&self) -> Result<(), Problem> {
        remove_tree(&self.making)
    }
}

/// What came of the images of one round.
struct Tally<'a> {
    refused: &'a mut HashSet<PathBuf>,
    packed: u64,
    first: Result<(), Problem>,
}

impl Tally<'_> {
    fn count(&mut self, image: PathBuf, came: Result<bool, Problem>) {
        match came {
            Ok(true) => self.packed += 1,
            Ok(false) => {}
            Err(problem) => {
                // A full disk passes; what is wrong with an image stays.
                if problem.code != Code::Disk {
                    self.refused.insert(image);
                }
                if self.first.is_ok() {
                    self.first = Err(problem);
                }
            }
        }
    }
}

impl Engine {
    /// Packs the images that have been there for longer than `after`; says how many. `go_on` is asked again and again. Takes
    /// its time, and must not be called twice at once by those who count on a result: the second finds nothing to do.
    pub fn pack_images(
        &self,
        after: Duration,
        refused: &mut HashSet<PathBuf>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<u64, Problem> {
        let Some(turn) = Turn::take(&self.settings.state).map_err(failed)? else { return Ok(0) };
        let before = now_ms().saturating_sub(u64::try_from(after.as_millis()).unwrap_or(u64::MAX));
        if refused.len() > MOST_REFUSED {
            refused.clear();
        }
        let mut tally = Tally { refused, packed: 0, first: Ok(()) };
        let mut number = 0;
        while let Some(records) = self.registry.hibernated(number)? {
            for record in records {
                number = record.number;
                let Some(image) = record.image().filter(|image| image.made_unix_ms <= before) else {
                    continue;
                };
                let path = self.directory(&record.id).join(&image.name);
                if !tally.refused.contains(&path) && go_on() {
                    let came = self.pack_sandbox(&turn, &record, &path, go_on);
                    tally.count(path, came);
                }
            }
        }
        let mut next = None;
        loop {
            let page = self.registry.snapshots(&SnapshotFilter::default(), next, MAX_PAGE)?;
            for snapshot in page.snapshots {
                let path = memory_of(&self.store_of(&snapshot.id));
                let ripe = snapshot.content.memory && snapshot.made_unix_ms <= before;
                if ripe && !tally.refused.contains(&path) && go_on() {
                    let came = self.pack_snapshot(&turn, &snapshot, &path, go_on);
                    tally.count(path, came);
                }
            }
            next = page.next;
            if next.is_none() {
                break;
            }
        }
        turn.clear()?;
        tally.first.map(|()| tally.packed)
    }

    /// `false`: there is no use for it.
    fn pack_sandbox(
        &self,
        turn: &Turn,
        record: &Record,
        image: &Path,
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool, Problem> {
        let as_before = || {
            let now = self.registry.by_id(&record.id)?;
            Ok(now.is_some_and(|now| now.image() == record.image()))
        };
        if !self.pack(turn, image, &as_before, go_on)? {
            return Ok(false);
        }
        let lock = Lock::try_take(&self.settings.state, &record.id).map_err(failed)?;
        let Some(lock) = lock else { return Ok(false) };
        if self.registry.by_id(&record.id)?.is_none() {
            lock.discard();
            return Ok(false);
        }
        if !as_before()? {
            return Ok(false);
        }
        exchange(&turn.making, image)?;
        self.registry.set_image_bytes(&record.id, size(image))?;
        Ok(true)
    }

    fn pack_snapshot(
        &self,
        turn: &Turn,
        snapshot: &Snapshot,
        image: &Path,
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool, Problem> {
        let known = || self.registry.snapshot(&snapshot.id).map(|row| row.is_some());
        if !self.pack(turn, image, &known, go_on)? {
            return Ok(false);
        }
        let store = self.store_of(&snapshot.id);
        // Free unless it is being read or removed.
        let Ok(held) = File::open(&store) else { return Ok(false) };
        if flock(&held, FlockOperation::NonBlockingLockExclusive).is_err() || !known()? {
            return Ok(false);
        }
        exchange(&turn.making, image)?;
        self.registry.set_snapshot_bytes(&snapshot.id, occupied(&store))?;
        Ok(true)
    }

    /// Into the place of the one who packs. `false`: it is packed, or gone.
    fn pack(
        &self,
        turn: &Turn,
        image: &Path,
        still_there: &dyn Fn() -> Result<bool, Problem>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool, Problem> {
        if self.backend.is_packed(image) {
            return Ok(false);
        }
        turn.clear()?;
        match self.backend.pack(image, &turn.making, go_on) {
            Ok(done) => Ok(done.is_some()),
            // Whoever woke it or removed it has taken its image away.
            Err(_) if !still_there()? => Ok(false),
            Err(problem) => Err(problem),
        }
    }

    /// What somebody who was killed while packing has left.
    pub(crate) fn sweep_packing(&self) -> Result<(), Problem> {
        if !fs::exists(self.settings.state.join("packing")).unwrap_or(false) {
            return Ok(());
        }
        Turn::take(&self.settings.state).map_err(failed)?.map_or(Ok(()), |turn| turn.clear())
    }
}

/// Both are there at any time, each under one of the two names.
fn exchange(new: &Path, old: &Path) -> Result<(), Problem> {
    renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE).map_err(|error| failed(error.into()))?;
    let place = old.parent().unwrap_or(old);
    File::open(place).and_then(|place| place.sync_all()).map_err(failed)
}
