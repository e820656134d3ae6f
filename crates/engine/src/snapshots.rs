//! Saved sandboxes: taken, listed, given back, forked.
//!
//! ```text
//! $CARREL_STATE/snapshots/snp_…/{workspace.ext4, spool/, image/}     never changed once it has its name, but packed
//!                         snp_….new/                                 in the making
//! ```
//! A snapshot holds the files of a sandbox and, where the host can, everything that lived in it: see
//! [`carrel_backend::Backend::snapshot`]. A fork is a snapshot that nobody keeps, restored as often as asked.
//!
//! *While a snapshot is taken* the row of its sandbox says `standby`, as when it is put to sleep, and the lock is held: whoever
//! comes meanwhile waits for the lock and finds it awake. Whoever is killed in between leaves a box that runs and a row that
//! says it sleeps, which the next caller or the sweep puts right.
//!
//! *What a kill leaves* of a snapshot: a directory in the making, or one without a row. Its maker holds a lock on the directory
//! itself; one that is free is nobody's, and the sweep removes it. The row comes last, so a snapshot is there whole or not at all.
//!
//! *Restoring in place*: what the sandbox is now is hibernated first, its files are moved to `before/` in its own directory, the
//! snapshot takes their place, and when the new box runs its row says so and `before/` goes. Until then the row says
//! `hibernated` (or `lost`), and whoever finds `before/` then moves it back ([`Engine::put_back`]): a failure or a kill leaves
//! the sandbox as it was. Beside the files is what the row said of the box: one that names another box has been written since,
//! and what is in `before/` then is nobody's.

mod compare;
mod export;
mod import;
mod portable;
mod restore;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use carrel_backend::{Memory, Placed, grafts::Scion};
use carrel_proto::{
    id::{SandboxId, SnapshotId},
    problem::{Code, Problem},
};
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

pub(crate) use self::restore::BEFORE;
pub use self::{
    compare::{Change, Changes, Diff, Side},
    export::Exported,
    import::ImportWish,
    restore::{Fork, Forked, MAX_FORKS, RestoreWish},
};
pub use crate::registry::snapshots::{Content, Snapshot, SnapshotFilter, SnapshotPage};
use crate::{
    Cursor, Engine, Record, State, Step,
    events::{Event, Kind},
    lock::Lock,
    quota::Quota,
    registry::now_ms,
    sandboxes::{random, remove_tree},
    sleep::{ARRIVING, PAUSE, not_running, seal},
    tenant::Tenant,
};

/// Most tags of one snapshot, and the longest: a row stays a few kilobytes.
pub const MAX_TAGS: usize = 16;
pub const MAX_TAG: usize = 64;
const IN_THE_MAKING: &str = ".new";
/// A sweep that comes in between does so once, unless many processes start at that moment.
const MAKE_TRIES: u32 = 16;

/// What a caller wants of a new snapshot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SnapshotWish {
    pub tags: Vec<String>,
    pub files_only: bool,
    #[serde(skip)]
    pub caller: Option<Arc<str>>,
    /// Of the caller: what it may hold in all.
    #[serde(skip)]
    pub quota: Option<Quota>,
}

/// A directory in the making, whose maker lives.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) path: PathBuf,
    _held: File,
}

/// What a copy is made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// What lives in the sandbox, as it lives, for so many forks. `Code::Unsupported` where that is more than one python.
    Living(u32),
    /// What was written down of it; everything can be.
    Written,
}

/// A copy that has no name yet, and the sandbox it is of.
struct Taken {
    record: Record,
    /// What lives in the sandbox as it lives may need none.
    store: Option<Store>,
    /// Why there is no memory in it.
    memory: Result<(), String>,
    /// What lives in the sandbox, if that can be had without writing it down. For forks.
    scion: Option<Scion>,
}

fn failed(what: &str) -> impl Fn(io::Error) -> Problem {
    let what = what.to_owned();
    move |error| match error.kind() {
        io::ErrorKind::StorageFull => Problem::new(Code::Disk, format!("{what}: the host's disk is full"))
            .hint("remove snapshots (`carrel snapshots rm ID`) or sandboxes; nothing was lost"),
        _ => Problem::internal(format!("{what}: {error}")),
    }
}

impl Store {
    fn make(place: &Path, id: &SnapshotId) -> Result<Self, Problem> {
        let path = place.join(format!("{id}{IN_THE_MAKING}"));
        // None: a sweep has come in between, and taken it for a dead one's.
        let make = || -> io::Result<Option<File>> {
            fs::DirBuilder::new().mode(0o700).recursive(true).create(&path)?;
            let Ok(held) = File::open(&path) else { return Ok(None) };
            // Ours is the one that has the name, once it is held: until then the sweep may have removed it.
            flock(&held, FlockOperation::LockExclusive)?;
            let named = fs::metadata(&path).is_ok_and(|found| {
                held.metadata().is_ok_and(|held| (held.dev(), held.ino()) == (found.dev(), found.ino()))
            });
            Ok(named.then_some(held))
        };
        for _ in 0..MAKE_TRIES {
            if let Some(_held) = make().map_err(failed("making a snapshot"))? {
                return Ok(Self { path, _held });
            }
        }
        Err(Problem::new(Code::Busy, "the snapshot's directory was removed as often as it was made")
            .hint("try again: somebody is cleaning up"))
    }

    /// What went wrong leaves nothing.
    fn clear(&self) {
        for entry in fs::read_dir(&self.path).into_iter().flatten().flatten() {
            let _ = remove_tree(&entry.path());
        }
    }

    fn discard(self) {
        let _ = remove_tree(&self.path);
    }
}

/// What a tree takes on disk.
pub(crate) fn occupied(path: &Path) -> u64 {
    let mut bytes = 0;
    let mut todo = vec![path.to_path_buf()];
    while let Some(path) = todo.pop() {
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        bytes += meta.blocks() * 512;
        if meta.is_dir() {
            todo.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
        }
    }
    bytes
}

fn check_tags(tags: &[String]) -> Result<(), Problem> {
    let good = |tag: &String| {
        (1..=MAX_TAG).contains(&tag.len())
            && tag.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c))
            && !tag.starts_with("snp_")
    };
    if tags.len() <= MAX_TAGS && tags.iter().all(good) {
        return Ok(());
    }
    Err(Problem::new(Code::InvalidArgument, "these are not a snapshot's tags").hint(format!(
        "at most {MAX_TAGS}, each of 1 to {MAX_TAG} ASCII letters, digits, `.`, `_`, `-` and `/`, none like an id"
    )))
}

fn unknown(name: &str) -> Problem {
    let shown: String = name.chars().take(80).collect();
    Problem::new(Code::SnapshotNotFound, format!("there is no snapshot `{shown}`"))
        .hint("`carrel snapshots` lists them; an id or a tag names one")
}

impl Engine {
    fn snapshots_place(&self) -> PathBuf {
        self.settings.state.join("snapshots")
    }

    pub(crate) fn store_of(&self, id: &SnapshotId) -> PathBuf {
        self.snapshots_place().join(id.as_str())
    }

    /// Saves a sandbox, which goes on. One in standby is woken for it and frozen again; of one that is hibernated the image
    /// is taken; of one that is lost the files.
    pub async fn snapshot(&self, record: &Record, wish: &SnapshotWish) -> Result<Snapshot, Problem> {
        check_tags(&wish.tags)?;
        if let Some(quota) = wish.quota {
            let tenant = record.tenant.clone();
            self.blocking(move |engine| engine.registry.room_for_snapshot(&tenant, &quota)).await?;
        }
        let began = Instant::now();
        let id = SnapshotId::from_random(random()?);
        let taken = self.take(&record.id, &id, restore::kept(!wish.files_only), Source::Written).await?;
        let wish = wish.clone();
        self.blocking(move |engine| {
            let content = taken.content()?;
            let (record, Some(store)) = (taken.record, taken.store) else {
                return Err(Problem::internal("nothing was written down"));
            };
            let mut tags = wish.tags;
            tags.sort();
            tags.dedup();
            let snapshot = Snapshot {
                id,
                tenant: record.tenant.clone(),
                sandbox: record.id.clone(),
                key: record.key.clone(),
                parent: record.origin.clone(),
                tags,
                made_unix_ms: now_ms(),
                bytes: 0,
                content,
            };
            let snapshot = engine.keep_snapshot(store, snapshot, true, wish.quota.as_ref())?;
            let mut event = Event::of(Kind::SnapshotCreated, &record).caller(wish.caller);
            event.bytes = Some(snapshot.bytes);
            event.duration_ms = u64::try_from(began.elapsed().as_millis()).ok();
            engine.note(event.detail(if snapshot.content.memory { "memory" } else { "files" }));
            Ok(snapshot)
        })
        .await
    }

    /// Gives a directory in the making its name and its row, and says how large it is. With `descent` it is what its
    /// sandbox comes from, from now on. An error leaves nothing.
    fn keep_snapshot(
        &self,
        store: Store,
        snapshot: Snapshot,
        descent: bool,
        quota: Option<&Quota>,
    ) -> Result<Snapshot, Problem> {
        let path = self.store_of(&snapshot.id);
        let place = || -> io::Result<u64> {
            seal(&store.path)?;
            self.watch.reached(Step::StoreSealed);
            let bytes = occupied(&store.path);
            fs::rename(&store.path, &path)?;
            File::open(self.snapshots_place())?.sync_all()?;
            self.watch.reached(Step::StorePlaced);
            Ok(bytes)
        };
        let bytes = match place() {
            Ok(bytes) => bytes,
            Err(error) => {
                store.discard();
                return Err(failed("keeping the snapshot")(error));
            }
        };
        let snapshot = Snapshot { bytes, ..snapshot };
        if let Err(problem) = self.registry.add_snapshot(&snapshot, descent, quota) {
            let _ = remove_tree(&path);
            return Err(problem);
        }
        self.watch.reached(Step::SnapshotWritten);
        Ok(snapshot)
    }

    /// Copies a sandbox into a directory in the making.
    async fn take(
        &self,
        sandbox: &SandboxId,
        id: &SnapshotId,
        memory: Memory,
        source: Source,
    ) -> Result<Taken, Problem> {
        let until = Instant::now() + ARRIVING;
        loop {
            let lock = self.lock(sandbox).await?;
            let id = id.clone();
            let record = self.there(sandbox)?;
            if record.spec.ephemeral.is_some() {
                return Err(Problem::new(Code::Conflict, "the sandbox of one call is not saved")
                    .hint("give it a name: it is gone when the call is over"));
            }
            let take = move |engine: &Engine| engine.take_locked(record, lock, &id, memory, source);
            let taken = self.blocking(take).await;
            match taken {
                // A call is about to end, an interpreter about to be ready, or the box about to be found dead.
                Err(problem)
                    if matches!(problem.code, Code::Conflict | Code::Busy | Code::AgentLost)
                        && Instant::now() < until => {}
                Ok(None) if Instant::now() < until => {}
                Ok(None) => return Err(not_running(&self.there(sandbox)?)),
                Ok(Some(taken)) => return Ok(taken),
                Err(problem) => return Err(problem),
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// With the lock held. `None`: it has died, and its row has been put right.
    fn take_locked(
        &self,
        record: Record,
        lock: Lock,
        id: &SnapshotId,
        memory: Memory,
        source: Source,
    ) -> Result<Option<Taken>, Problem> {
        let wanted = match memory {
            Memory::Nothing => Err("only files were asked for".to_owned()),
            wanted => Ok(wanted),
        };
        let directory = self.directory(&record.id);
        let (State::Running | State::Standby | State::Hibernated | State::Lost, Some(placed)) =
            (record.state, record.placed.clone())
        else {
            return Err(not_running(&record));
        };
        if matches!(record.state, State::Running | State::Standby) {
            if !self.is_alive(&record) {
                drop(self.settle(&record.id, lock)?);
                return Ok(None);
            }
            // One that is frozen is thawed for the other way, which also says what is wrong, if anything is.
            if record.state == State::Running
                && let Source::Living(forks) = source
                && let Ok(taken) = self.cut(&record, &placed, id, forks)
            {
                return Ok(Some(taken));
            }
            let wanted = wanted.and_then(|wanted| match self.can_hibernate() {
                Ok(()) => Ok(wanted),
                Err(problem) => Err(problem.message),
            });
            let frozen = record.state == State::Standby;
            self.registry.set_standby(&record.id, None)?;
            self.watch.reached(Step::StandbyWritten);
            let taken = self.take_living(&record, frozen, id, wanted);
            // Whatever came of it, it is as before.
            let again = frozen && self.backend.freeze(&record.id, &placed).is_ok();
            if !again {
                self.registry.set_awake(&record.id, false)?;
            }
            self.watch.reached(Step::AwakeWritten);
            let (store, memory) = taken?;
            return Ok(Some(Taken { record, store: Some(store), memory, scion: None }));
        }
        self.put_back(&record)?;
        let image = record.image().map(|image| directory.join(&image.name)).filter(|image| image.is_dir());
        let store = Store::make(&self.snapshots_place(), id)?;
        let (copied, memory) = match (image, wanted) {
            (Some(image), Ok(_)) => {
                (self.backend.snapshot_of_image(&directory, &placed, &image, &store.path), Ok(()))
            }
            (_, wanted) => {
                let lost = Err("the sandbox is lost: its processes were gone already".to_owned());
                (self.backend.snapshot(&directory, &placed, &store.path, Memory::Nothing), wanted.and(lost))
            }
        };
        if let Err(problem) = copied {
            store.discard();
            return Err(problem);
        }
        Ok(Some(Taken { record, store: Some(store), memory, scion: None }))
    }

    /// The sandbox's files, and what lives in it as it lives. Its agent hears nobody meanwhile, so its row need not say anything.
    fn cut(&self, record: &Record, placed: &Placed, id: &SnapshotId, forks: u32) -> Result<Taken, Problem> {
        let (directory, limits) = (self.directory(&record.id), &record.spec.limits);
        let mut store = None;
        let mut make = || {
            let made = Store::make(&self.snapshots_place(), id)?;
            self.watch.reached(Step::StoreMade);
            Ok(store.insert(made).path.clone())
        };
        match self.backend.cut(&directory, placed, record.number, limits, forks, &mut make) {
            Ok(scion) => Ok(Taken { record: record.clone(), store, memory: Ok(()), scion: Some(scion) }),
            Err(problem) => {
                store.into_iter().for_each(Store::discard);
                Err(problem)
            }
        }
    }

    fn take_living(
        &self,
        record: &Record,
        frozen: bool,
        id: &SnapshotId,
        wanted: Result<Memory, String>,
    ) -> Result<(Store, Result<(), String>), Problem> {
        let Some(placed) = &record.placed else { return Err(not_running(record)) };
        let directory = self.directory(&record.id);
        let store = Store::make(&self.snapshots_place(), id)?;
        self.watch.reached(Step::StoreMade);
        let copy = || -> Result<Result<(), String>, Problem> {
            let without = match wanted {
                Ok(memory) => {
                    if frozen {
                        self.backend.thaw(&record.id, placed)?;
                    }
                    let why = match self.backend.snapshot(&directory, placed, &store.path, memory) {
                        Ok(()) => return Ok(Ok(())),
                        Err(problem) if problem.code == Code::Unsupported => problem.message,
                        Err(problem) => return Err(problem),
                    };
                    store.clear();
                    why
                }
                Err(why) => why,
            };
            // Where it cannot be frozen files are copied as they change.
            let stopped = self.backend.freeze(&record.id, placed).is_ok();
            let copied = self.backend.snapshot(&directory, placed, &store.path, Memory::Nothing);
            if stopped {
                self.backend.thaw(&record.id, placed)?;
            }
            copied.map(|()| Err(without))
        };
        match copy() {
            Ok(memory) => Ok((store, memory)),
            Err(problem) => {
                store.discard();
                Err(problem)
            }
        }
    }

    /// A tenant's snapshot, by its id or a tag of it.
    pub fn snapshot_of(&self, tenant: &Tenant, name: &str) -> Result<Snapshot, Problem> {
        self.registry.snapshot_of(tenant, name)?.ok_or_else(|| unknown(name))
    }

    pub fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<Cursor>,
        limit: u32,
    ) -> Result<SnapshotPage, Problem> {
        self.registry.snapshots(filter, after, limit)
    }

    /// All of them, oldest first.
    pub fn all_snapshots(&self, filter: &SnapshotFilter) -> Result<Vec<Snapshot>, Problem> {
        let mut all = Vec::new();
        let mut after = None;
        loop {
            let page = self.registry.snapshots(filter, after, crate::registry::MAX_PAGE)?;
            all.extend(page.snapshots);
            after = page.next;
            if after.is_none() {
                return Ok(all);
            }
        }
    }

    /// Removes a snapshot, after whoever is reading it.
    pub async fn delete_snapshot(
        &self,
        snapshot: &Snapshot,
        caller: Option<Arc<str>>,
    ) -> Result<(), Problem> {
        let snapshot = snapshot.clone();
        self.blocking(move |engine| {
            let path = engine.store_of(&snapshot.id);
            let held = File::open(&path);
            if let Ok(held) = &held {
                flock(held, FlockOperation::LockExclusive).map_err(Problem::internal)?;
            }
            engine.registry.remove_snapshot(&snapshot.id)?;
            remove_tree(&path)?;
            let mut event = Event::new(Kind::SnapshotDeleted, &snapshot.tenant).caller(caller);
            event.sandbox = Some(snapshot.sandbox);
            event.bytes = Some(snapshot.bytes);
            engine.note(event);
            Ok(())
        })
        .await
    }

    /// For as long as the file is held, the snapshot stays.
    fn hold(&self, snapshot: &Snapshot) -> Result<(PathBuf, File), Problem> {
        let path = self.store_of(&snapshot.id);
        let held = File::open(&path).map_err(|_| unknown(snapshot.id.as_str()))?;
        flock(&held, FlockOperation::LockShared).map_err(Problem::internal)?;
        if self.registry.snapshot(&snapshot.id)?.is_none() {
            return Err(unknown(snapshot.id.as_str()));
        }
        Ok((path, held))
    }

    /// Directories whose maker, or remover, has died.
    pub(crate) fn sweep_snapshots(&self) -> Result<(), Problem> {
        for entry in fs::read_dir(self.snapshots_place()).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let id = name.strip_suffix(IN_THE_MAKING).unwrap_or(&name);
            let Ok(id) = id.parse::<SnapshotId>() else { continue };
            let known = || self.registry.snapshot(&id).map(|row| row.is_some() && id.as_str() == name);
            if known()? {
                continue;
            }
            let Ok(held) = File::open(entry.path()) else { continue };
            if flock(&held, FlockOperation::NonBlockingLockExclusive).is_err() || known()? {
                continue;
            }
            // One that has got its name since is not there under the old one.
            remove_tree(&entry.path())?;
        }
        Ok(())
    }
}

impl Taken {
    fn content(&self) -> Result<Content, Problem> {
        let record = &self.record;
        let placed = record.placed.as_ref().ok_or_else(|| not_running(record))?;
        Ok(Content {
            memory: self.memory.is_ok(),
            reason: self.memory.clone().err(),
            spec: record.spec.clone(),
            labels: record.labels.clone(),
            workspace: placed.workspace,
            number: record.number,
        })
    }
}
