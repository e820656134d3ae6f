//! Snapshots become sandboxes again: in place, as new ones, as forks.

use std::{fs, io, path::Path, sync::Arc, time::Instant};

use carrel_backend::{BoxRequest, Memory, Placed, grafts::Scion, link::AgentLink, memory_of};
use carrel_proto::{
    id::{Key, SandboxId, SessionName, SnapshotId},
    outcome::SessionState,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};

use super::{Content, Snapshot, Source, Taken, occupied};
use crate::{
    Engine, Found, Note, Quota, Record, State, Step,
    events::{Event, Kind},
    lock::Lock,
    pool::{Ready, Taken as TakenReady, claimed},
    registry::{Claim, Spec, boot_id},
    sandboxes::{random, remove_tree},
    sleep::{ARRIVING, PAUSE, not_running},
    tenant::Tenant,
};

/// Forks of one call. Each is a box of its own, with memory of its own.
pub const MAX_FORKS: u32 = 100;
/// Numbers that are tried for the name of a fork.
const NAMES: u32 = 10_000;
/// Where the files of a sandbox are while a snapshot takes their place.
pub(crate) const BEFORE: &str = "before";
const FILES: [&str; 3] = ["workspace.ext4", "workspace", "spool"];
/// Beside them: what the row said then.
const WAS: &str = "was.json";

/// The row names another box as soon as the new one runs: then what is in [`BEFORE`] is nobody's.
#[derive(Debug, Serialize, Deserialize)]
struct Was {
    placed: Option<Placed>,
    spec: Spec,
}

impl Was {
    fn is_of(&self, record: &Record) -> bool {
        let which = |placed: &Option<Placed>| placed.as_ref().map(|placed| (placed.pid, placed.start_time));
        which(&self.placed) == which(&record.placed)
    }
}

/// What a caller wants of a snapshot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct RestoreWish {
    /// Of a new sandbox; `None`: one without a key.
    pub key: Option<Key>,
    /// Only the files: interpreters start anew.
    pub files_only: bool,
    #[serde(skip)]
    pub tenant: Tenant,
    #[serde(skip)]
    pub quota: Option<Quota>,
    #[serde(skip)]
    pub caller: Option<Arc<str>>,
}

/// A fork and what it cost.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Fork {
    pub record: Record,
    /// From the copy to the running box.
    pub duration_ms: u64,
    /// What it takes on disk that it does not share.
    pub disk_bytes: u64,
    /// The memory of its processes. Pages of files are shared; those that its parent had written to are copies.
    pub memory_bytes: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Forked {
    pub forks: Vec<Fork>,
    /// For so long the sandbox stood still to be copied.
    pub copy_ms: u64,
    pub memory: bool,
    /// Why they have only the files.
    pub reason: Option<String>,
    /// Copied as it lived: CRIU has written nothing, and what it is a fork of can still take back all that it could.
    pub living: bool,
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

fn failed(error: io::Error) -> Problem {
    Problem::internal(format!("restoring: {error}"))
}

/// A sandbox that is there, and whose row does not say so yet.
struct Made {
    record: Record,
    placed: Placed,
    lock: Lock,
    /// To its agent, if it had one already.
    link: Option<AgentLink>,
}

/// What became of a box that stood ready.
enum Passed {
    On(Box<Made>),
    KeyTaken,
    Dead,
}

/// What every new sandbox of a snapshot or fork has in common.
struct Heir<'a> {
    content: &'a Content,
    from: Origin<'a>,
}

/// What it is made from.
#[derive(Clone, Copy)]
enum Origin<'a> {
    Store(&'a Path, Memory),
    /// What lives, as it lives.
    Living(&'a Scion),
}

impl Engine {
    /// A new sandbox from a snapshot. An error leaves nothing of it.
    pub async fn restore_as(&self, snapshot: &Snapshot, wish: &RestoreWish) -> Result<Found, Problem> {
        let (snapshot, wish) = (snapshot.clone(), wish.clone());
        self.environments().source(&snapshot.content.spec.environment)?;
        self.blocking(move |engine| {
            let began = Instant::now();
            let (store, _held) = engine.hold(&snapshot)?;
            let memory = snapshot.content.memory && !wish.files_only;
            let heir = Heir { content: &snapshot.content, from: Origin::Store(&store, kept(memory)) };
            let claim = Claim {
                id: SandboxId::from_random(random()?),
                tenant: wish.tenant.clone(),
                key: wish.key.clone(),
                spec: snapshot.content.spec.clone(),
                labels: snapshot.content.labels.clone(),
                quota: wish.quota,
                origin: Some(snapshot.id.clone()),
                forked_from: None,
            };
            engine.backend.expect();
            let made = engine.inherit(&heir, &claim)?.ok_or_else(|| taken(wish.key.as_ref()))?;
            let record = engine.announce(vec![made])?.remove(0);
            engine.note_restored(&record, began, &wish.caller, "new");
            Ok(Found { record, created: true, note: note(memory) })
        })
        .await
    }

    /// Makes one. `None`: the key is taken.
    fn inherit(&self, heir: &Heir<'_>, claim: &Claim) -> Result<Option<Made>, Problem> {
        if let Origin::Living(scion) = heir.from {
            while let Some(taken) = self.take_for_copy(&claim.spec) {
                match self.inherit_ready(scion, claim, taken)? {
                    Passed::On(made) => return Ok(Some(*made)),
                    Passed::KeyTaken => return Ok(None),
                    Passed::Dead => {}
                }
            }
        }
        let lock = Lock::take_new(&self.settings.state, &claim.id)?;
        let record = match self.registry.claim(claim) {
            Ok(Some(record)) => record,
            refused => {
                lock.discard();
                return refused.map(|_| None);
            }
        };
        self.watch.reached(Step::RowClaimed);
        let placed = self.make_directory(&record.id).and_then(|_| {
            self.watch.reached(Step::DirectoryMade);
            self.fill(heir, &record)
        });
        match placed {
            Ok(placed) => Ok(Some(Made { record, placed, lock, link: None })),
            Err(problem) => {
                self.erase(&record.id, None, lock)?;
                Err(problem)
            }
        }
    }

    /// The same of a box that stood ready. What goes wrong when it has been told ends it.
    fn inherit_ready(&self, scion: &Scion, claim: &Claim, taken: TakenReady) -> Result<Passed, Problem> {
        let claim = Claim { id: taken.ready.id.clone(), ..claim.clone() };
        let record = match self.registry.claim_with(&claim, Some(taken.ready.number)) {
            Ok(Some(record)) => record,
            refused => {
                self.put_back_ready(taken);
                return refused.map(|_| Passed::KeyTaken);
            }
        };
        self.watch.reached(Step::RowClaimed);
        let Ready { placed: before, lock, mut link, .. } = taken.ready;
        let told = link.tell(&claimed(&claim.spec));
        let is_told = told.is_ok();
        let grafted = told
            .and_then(|()| self.request(&record, None, None))
            .and_then(|request| self.backend.graft(&request, &before, scion));
        match grafted {
            Ok(placed) => Ok(Passed::On(Box::new(Made { record, placed, lock, link: Some(link) }))),
            Err(problem) => {
                // One that has died on its shelf, or dies just now, says nothing of what is to be copied.
                let is_dead = !is_told || !self.backend.is_alive(&before);
                self.erase(&record.id, Some(&before), lock)?;
                if is_dead { Ok(Passed::Dead) } else { Err(problem) }
            }
        }
    }

    /// Their rows say that they run, of all of them or of none.
    fn announce(&self, all: Vec<Made>) -> Result<Vec<Record>, Problem> {
        let rows: Vec<_> = all.iter().map(|made| (&made.record.id, &made.placed)).collect();
        if let Err(problem) = self.registry.set_all_placed(&rows) {
            self.unmake(all);
            return Err(problem);
        }
        self.watch.reached(Step::RunningWritten);
        let record = |made: Made| {
            if let Some(link) = made.link {
                self.lines.keep(made.record.id.clone(), link);
            }
            Record { state: State::Running, placed: Some(made.placed), ..made.record }
        };
        Ok(all.into_iter().map(record).collect())
    }

    /// What cannot be removed now is left in the making, for a sweep.
    fn unmake(&self, all: Vec<Made>) {
        for made in all {
            let _ = self.erase(&made.record.id, Some(&made.placed), made.lock);
        }
    }

    /// Makes the box of a row, whose lock is held and whose directory is empty.
    fn fill(&self, heir: &Heir<'_>, record: &Record) -> Result<Placed, Problem> {
        let request = self.request(record, None, None)?;
        let request = BoxRequest { workspace: Some(heir.content.workspace), ..request };
        let (store, memory) = match heir.from {
            Origin::Living(scion) => {
                let placed = self.backend.create(&BoxRequest { workspace: None, ..request.clone() })?;
                self.watch.reached(Step::BoxMade);
                return self.backend.graft(&request, &placed, scion);
            }
            Origin::Store(store, memory) => (store, memory),
        };
        self.backend.unpack(store, heir.content.number, &request, memory != Memory::Nothing)?;
        self.watch.reached(Step::FilesLaid);
        match memory {
            Memory::Nothing => self.backend.create(&request),
            memory => self.backend.restore(&request, &memory_of(store), memory).map_err(of_snapshot),
        }
    }

    fn note_restored(&self, record: &Record, began: Instant, caller: &Option<Arc<str>>, way: &'static str) {
        let mut event = Event::of(Kind::SnapshotRestored, record).caller(caller.clone()).detail(way);
        event.duration_ms = Some(millis(began));
        self.note(event);
    }

    /// The sandbox of a snapshot becomes what it was then. An error leaves it as it is.
    pub async fn restore_in_place(&self, snapshot: &Snapshot, wish: &RestoreWish) -> Result<Found, Problem> {
        let began = Instant::now();
        let (lock, record) = self.lay_aside(snapshot).await?;
        self.watch.reached(Step::LaidAside);
        let (snapshot, wish) = (snapshot.clone(), wish.clone());
        self.blocking(move |engine| {
            let _lock = lock;
            let (store, _held) = engine.hold(&snapshot)?;
            let memory = snapshot.content.memory && !wish.files_only;
            let heir = Heir { content: &snapshot.content, from: Origin::Store(&store, kept(memory)) };
            let placed = match engine.replace(&heir, &record, wish.quota.as_ref()) {
                Ok(placed) => placed,
                Err(problem) => {
                    engine.put_back(&record)?;
                    return Err(problem.state(SessionState::Preserved));
                }
            };
            let record = Record { spec: snapshot.content.spec.clone(), ..record };
            // From here on the row says that it runs, and what was before is nobody's.
            let _ = remove_tree(&engine.directory(&record.id).join(BEFORE));
            engine.watch.reached(Step::BeforeRemoved);
            engine.remove_images(&record);
            engine.watch.reached(Step::ImagesRemoved);
            engine.registry.set_origin(&record.id, &snapshot.id)?;
            engine.watch.reached(Step::OriginWritten);
            engine.registry.touch(&record.id)?;
            let record = Record {
                state: State::Running,
                placed: Some(placed),
                boot: boot_id().to_owned(),
                reason: None,
                sleep: crate::registry::Sleep::default(),
                origin: Some(snapshot.id.clone()),
                ..record
            };
            engine.note_restored(&record, began, &wish.caller, "in place");
            Ok(Found { record, created: false, note: note(memory) })
        })
        .await
    }

    /// The sandbox of a snapshot, asleep on disk or lost, and its lock.
    async fn lay_aside(&self, snapshot: &Snapshot) -> Result<(Lock, Record), Problem> {
        let until = Instant::now() + ARRIVING;
        loop {
            let lock = self.lock(&snapshot.sandbox).await?;
            let found = self.record(&snapshot.sandbox)?.filter(|record| snapshot.tenant == record.tenant);
            let Some(record) = found else {
                return Err(Problem::new(
                    Code::SandboxNotFound,
                    format!("the sandbox `{}` of the snapshot is gone", snapshot.sandbox),
                )
                .hint("restore it as a new one: `carrel restore SNAPSHOT --as NAME`"));
            };
            match record.state {
                State::Hibernated | State::Lost => return Ok((lock, record)),
                State::Running | State::Standby if !self.is_alive(&record) => {
                    self.blocking(move |engine| engine.settle(&record.id, lock).map(drop)).await?;
                }
                State::Running | State::Standby => {
                    let written = match self.blocking(|engine| engine.can_hibernate()).await {
                        Ok(()) => self.write_out(record.clone(), lock, true).await.map(drop),
                        Err(problem) => {
                            drop(lock);
                            Err(problem)
                        }
                    };
                    match written {
                        Ok(()) => {}
                        // What cannot be kept is ended: that was asked for. Its files are kept until the new ones are there.
                        Err(problem) if problem.code == Code::Unsupported => self.stop(&record).await?,
                        Err(problem)
                            if matches!(problem.code, Code::Conflict | Code::Busy)
                                && Instant::now() < until =>
                        {
                            tokio::time::sleep(PAUSE).await;
                        }
                        Err(problem) => return Err(problem),
                    }
                }
                _ => return Err(not_running(&record)),
            }
        }
    }

    /// Puts a snapshot in the place of what the sandbox is. On error, [`Engine::put_back`] has to be called.
    fn replace(&self, heir: &Heir<'_>, record: &Record, quota: Option<&Quota>) -> Result<Placed, Problem> {
        self.backend.expect();
        self.move_away(record).map_err(failed)?;
        self.watch.reached(Step::MovedAway);
        let spec = &heir.content.spec;
        self.registry.set_spec(&record.tenant, &record.id, spec, &record.labels, quota)?;
        self.watch.reached(Step::SpecWritten);
        let placed = self.fill(heir, &Record { spec: spec.clone(), ..record.clone() })?;
        self.registry.set_placed(&record.id, &placed)?;
        self.watch.reached(Step::RunningWritten);
        Ok(placed)
    }

    fn move_away(&self, record: &Record) -> io::Result<()> {
        let directory = self.directory(&record.id);
        self.put_back(record).map_err(io::Error::other)?;
        self.backend.destroy(&record.id, &directory, record.placed.as_ref()).map_err(io::Error::other)?;
        fs::create_dir(directory.join(BEFORE))?;
        let was = Was { placed: record.placed.clone(), spec: record.spec.clone() };
        fs::write(directory.join(BEFORE).join(WAS), serde_json::to_vec(&was)?)?;
        for name in FILES {
            match fs::rename(directory.join(name), directory.join(BEFORE).join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether a restore in place is under way, or was given up by a kill.
    pub(crate) fn is_half_replaced(&self, record: &Record) -> bool {
        self.directory(&record.id).join(BEFORE).exists()
    }

    /// With the lock held, of one that does not run: what a restore in place had moved away comes back, because the new box
    /// never ran.
    pub(crate) fn put_back(&self, record: &Record) -> Result<(), Problem> {
        let directory = self.directory(&record.id);
        let before = directory.join(BEFORE);
        if !self.is_half_replaced(record) {
            return Ok(());
        }
        let was = fs::read(before.join(WAS)).ok().and_then(|text| serde_json::from_slice::<Was>(&text).ok());
        // The new box has run, and whoever made it was killed before all of the old one was gone; or nothing was moved yet.
        let Some(was) = was.filter(|was| was.is_of(record)) else { return remove_tree(&before) };
        self.backend.destroy(&record.id, &directory, None)?;
        for name in FILES.into_iter().filter(|name| before.join(name).exists()) {
            remove_tree(&directory.join(name))?;
            fs::rename(before.join(name), directory.join(name)).map_err(failed)?;
        }
        self.registry.set_spec(&record.tenant, &record.id, &was.spec, &record.labels, None)?;
        remove_tree(&before)
    }

    /// Copies a living sandbox `count` times: files, interpreters, variables, everything that runs. All of them or none, also
    /// when this process is killed: until all of them are there, each is in the making.
    pub async fn fork(
        &self,
        record: &Record,
        count: u32,
        quota: Option<Quota>,
        caller: Option<Arc<str>>,
    ) -> Result<Forked, Problem> {
        if !(1..=MAX_FORKS).contains(&count) {
            return Err(Problem::new(Code::InvalidArgument, format!("{count} forks cannot be made"))
                .hint(format!("1 to {MAX_FORKS} at once")));
        }
        let began = Instant::now();
        if !self.stands_ready(&record.spec) {
            self.backend.expect();
        }
        let mut forked = self.fork_from(record, Source::Living(count), count, quota).await;
        if forked.as_ref().is_err_and(|problem| problem.code == Code::Unsupported) {
            forked = self.fork_from(record, Source::Written, count, quota).await;
        }
        let mut forked = forked?;
        for fork in &mut forked.forks {
            fork.memory_bytes = self.usage(&fork.record).await.map_or(0, |usage| usage.memory);
            self.note(Event::of(Kind::SessionCreated, &fork.record).caller(caller.clone()).detail("fork"));
        }
        let mut event = Event::of(Kind::SessionForked, record).caller(caller);
        event.duration_ms = Some(millis(began));
        self.note(event.detail(count.to_string()));
        Ok(forked)
    }

    async fn fork_from(
        &self,
        record: &Record,
        source: Source,
        count: u32,
        quota: Option<Quota>,
    ) -> Result<Forked, Problem> {
        let began = Instant::now();
        let id = SnapshotId::from_random(random()?);
        let taken = self.take(&record.id, &id, Memory::Passed, source).await?;
        let copy_ms = millis(began);
        let forked = self.blocking(move |engine| {
            let content = taken.content()?;
            let forks = engine.fork_all(&taken, &content, count, quota);
            let living = taken.scion.is_some();
            let held = taken.scion.as_ref().is_some_and(Scion::is_held);
            let copy_ms = if held { millis(began) } else { copy_ms };
            drop(taken.scion);
            let watch = engine.watch.clone();
            if let Some(store) = taken.store {
                engine.clearing.run(move || {
                    store.discard();
                    watch.reached(Step::StoreRemoved);
                });
            }
            Ok(Forked { forks: forks?, copy_ms, memory: content.memory, reason: content.reason, living })
        });
        forked.await
    }

    fn fork_all(
        &self,
        taken: &Taken,
        content: &Content,
        count: u32,
        quota: Option<Quota>,
    ) -> Result<Vec<Fork>, Problem> {
        let memory = if content.memory { Memory::Passed } else { Memory::Nothing };
        let from = match (&taken.scion, &taken.store) {
            (Some(scion), _) => Origin::Living(scion),
            (None, Some(store)) => Origin::Store(&store.path, memory),
            (None, None) => return Err(Problem::internal("nothing was written down")),
        };
        let heir = Heir { content, from };
        let (mut all, mut costs) = (Vec::new(), Vec::new());
        for number in 1..=count {
            let began = Instant::now();
            match self.fork_one(&taken.record, &heir, number, quota) {
                Ok(made) => {
                    costs.push((millis(began), occupied(&self.directory(&made.record.id))));
                    all.push(made);
                }
                Err(problem) => {
                    self.unmake(all);
                    return Err(problem);
                }
            }
        }
        let fork =
            |(record, (duration_ms, disk_bytes))| Fork { record, duration_ms, disk_bytes, memory_bytes: 0 };
        Ok(self.announce(all)?.into_iter().zip(costs).map(fork).collect())
    }

    fn fork_one(
        &self,
        parent: &Record,
        heir: &Heir<'_>,
        number: u32,
        quota: Option<Quota>,
    ) -> Result<Made, Problem> {
        for number in number..NAMES {
            let key = match &parent.key {
                Some(key) => Some(fork_key(key, number)?),
                None => None,
            };
            if let Some(key) = &key
                && self.record_by_key(&parent.tenant, key)?.is_some()
            {
                continue;
            }
            let claim = Claim {
                id: SandboxId::from_random(random()?),
                tenant: parent.tenant.clone(),
                key,
                spec: parent.spec.clone(),
                labels: parent.labels.clone(),
                quota,
                origin: parent.origin.clone(),
                forked_from: Some(parent.id.clone()),
            };
            if let Some(made) = self.inherit(heir, &claim)? {
                return Ok(made);
            }
        }
        Err(taken(parent.key.as_ref()))
    }

    /// A fork takes the key of what it was forked from, which gets the fork's own. Both go on as they are.
    pub async fn adopt(&self, child: &Record, caller: Option<Arc<str>>) -> Result<Record, Problem> {
        let Some(parent) = child.forked_from.clone() else {
            return Err(Problem::new(Code::Conflict, "the sandbox is not a fork")
                .hint("`carrel fork NAME` makes forks; one of them can be adopted"));
        };
        let child = child.clone();
        self.blocking(move |engine| {
            engine.registry.swap_keys(&child.id, &parent)?;
            engine.watch.reached(Step::KeysSwapped);
            let record = engine.there(&child.id)?;
            engine.note(Event::of(Kind::SessionAdopted, &record).caller(caller));
            Ok(record)
        })
        .await
    }
}

/// `workflow:run_1:db` → `workflow:run_1:db-2`.
fn fork_key(key: &Key, number: u32) -> Result<Key, Problem> {
    let (place, name) = key.as_str().rsplit_once(':').unwrap_or(("", key.as_str()));
    let end = format!("-{number}");
    // Names are ASCII.
    let name = &name[..name.len().min(carrel_proto::id::MAX_NAME - end.len())];
    let name: SessionName = format!("{name}{end}").parse().map_err(Problem::internal)?;
    let text = if place.is_empty() { name.to_string() } else { format!("{place}:{name}") };
    text.parse().map_err(Problem::internal)
}

pub(super) fn kept(memory: bool) -> Memory {
    if memory { Memory::Kept } else { Memory::Nothing }
}

/// The caller is told if there were memory to have and it is not there.
fn note(memory: bool) -> Option<Note> {
    (!memory).then_some(Note::FilesOnly)
}

fn taken(key: Option<&Key>) -> Problem {
    let key = key.map_or_else(|| "the id".to_owned(), |key| format!("`{key}`"));
    Problem::new(Code::Exists, format!("{key} is taken by another sandbox"))
        .hint("choose another name, or close that sandbox first")
}

/// The words for a sandbox that sleeps would not fit.
fn of_snapshot(problem: Problem) -> Problem {
    match problem.code {
        Code::StateLost => problem.hint("its files are good: restore with files only (`--files-only`)"),
        Code::Unsupported | Code::Internal if !problem.hint.is_empty() => {
            let hint = format!("{}; or restore with files only (`--files-only`)", problem.hint);
            problem.hint(hint)
        }
        _ => problem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_are_named_after_their_parent() {
        let key = |text: &str| fork_key(&text.parse().unwrap(), 3).unwrap().to_string();
        assert_eq!(key("user:local:work"), "user:local:work-3");
        let long = format!("workflow:run:{}", "x".repeat(64));
        assert_eq!(key(&long), format!("workflow:run:{}-3", "x".repeat(62)));
    }
}
