//! Making, finding, reviving and closing sandboxes.
//!
//! ```text
//!            claim                placed            box died, stopped
//! (nothing) ──────> creating ───────────────> running ─────────────> lost
//!                      │                      │ │  ^ ^                 │  ^
//!     maker died, swept│          frozen, idle│ │  │ └──── revived ────┘  │ box died, image is no good
//!                      │                      v │  │ woken               │
//!                      │              standby ──┼──┤                     │
//!                      │   written, idle │ ^    │  │ restored            │
//!                      │                 v │ cannot be written           │
//!                      │           hibernated ──┼──┴─────────────────────┘
//!                      │                        │ close, from any of them
//!                      v                        v
//!                  (nothing) <──── swept ──── closing          ended: by its own clock, told to the next caller
//! ```
//! How a sandbox is put to sleep and woken, and what a kill leaves of it, is in [`crate::sleep`].
//! Races and how they are won:
//! - *Two processes want the same key.* The claim is one SQLite transaction; the loser finds the row, waits for the
//!   sandbox's lock and looks again. The winner held the lock before the row existed, so a free lock on a row in
//!   `creating` means that its maker is dead.
//! - *A process dies at any point.* Whatever it had made is named after the id, and its lock is free: the next call
//!   ([`crate::sweep`]) removes it.
//! - *A caller goes away.* From the claim to the running box everything is done by one thread that holds the lock, and
//!   goes on to the end ([`Engine::blocking`]).
//! - *A box dies between two calls.* Its pid and start time are in the row; a call that finds them gone takes the lock and
//!   makes a new box over the same files, and says that the interpreters' state is lost.

use std::{path::PathBuf, sync::Arc};

use carrel_backend::{BoxRequest, IsolationLevel, Placed, Project, host::Whereabouts};
use carrel_proto::{
    guest::{EndReason, Language},
    id::{Key, SandboxId},
    limits::Limits,
    message::{self, MAX_UNDO, Request},
    problem::{Code, Problem},
};

use serde::{Deserialize, Serialize};

use crate::{
    Engine,
    events::{Event, Kind},
    lock::Lock,
    pool::Offer,
    quota::Quota,
    registry::{Claim, Cursor, ListFilter, Owner, Page, Record, Registry, Sleep, Spec, State, boot_id},
    sleep::{Woken, damaged},
    tenant::{Labels, Tenant},
};

/// What a caller wants of a sandbox that may have to be made.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Wish {
    /// None: any, `python` if it has to be made.
    pub environment: Option<String>,
    pub limits: Limits,
    pub isolation: IsolationLevel,
    pub project: Option<Project>,
    pub idle_timeout_s: u64,
    pub max_lifetime_s: u64,
    /// 0: never.
    #[serde(default)]
    pub standby_after_s: u64,
    #[serde(default)]
    pub hibernate_after_s: u64,
    /// The language of the call it is for: if the sandbox has to be made, the interpreter starts while the call is on its way.
    pub first: Option<Language>,
    /// How many calls can be taken back. None: as many as the environment says.
    #[serde(default)]
    pub undo_calls: Option<u32>,
    /// Whose it is. That, and what follows from it, is for the front door to say and for nobody to write down.
    #[serde(skip)]
    pub tenant: Tenant,
    pub labels: Labels,
    /// What the tenant may hold in all. None: as much as the host has.
    #[serde(skip)]
    pub quota: Option<Quota>,
    /// Who asks, for the events.
    #[serde(skip)]
    pub caller: Option<Arc<str>>,
}

/// An ephemeral sandbox whose caller is gone ends by itself after this long.
const EPHEMERAL_IDLE_S: u64 = 30;
pub(crate) const DEFAULT_ENVIRONMENT: &str = "python";

/// What a caller should be told of the sandbox it got.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Note {
    /// The sandbox of this name had ended; this is a new, empty one.
    Ended(EndReason),
    /// The box had died: files are as they were, interpreters are new.
    Revived,
    /// It had been [stopped](Engine::stop): files are as they were, interpreters are new.
    Reopened,
    /// It was hibernated, and what was written of it could not be read back: files are as they were, interpreters are new.
    Damaged,
    /// It comes from a snapshot without memory, or only its files were wanted: interpreters are new.
    FilesOnly,
}

impl Note {
    /// In words, for the caller who named the sandbox `name`.
    pub fn text(self, name: &str) -> String {
        match self {
            Note::Ended(reason) => {
                let why = match reason {
                    EndReason::Idle => "idle",
                    EndReason::Lifetime => "its lifetime was over",
                    EndReason::Closed => "closed",
                };
                format!("session '{name}' had ended ({why}); this is a new one")
            }
            Note::Revived => "the sandbox had died; files are kept, interpreters start anew".to_owned(),
            Note::Damaged => {
                "the hibernated sandbox could not be restored; files are kept, interpreters start anew"
                    .to_owned()
            }
            Note::FilesOnly => "restored from files alone; interpreters start anew".to_owned(),
            Note::Reopened => {
                "the sandbox had been closed; files are kept, interpreters start anew".to_owned()
            }
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub struct Found {
    pub record: Record,
    pub created: bool,
    pub note: Option<Note>,
}

impl Engine {
    pub(crate) fn directory(&self, id: &SandboxId) -> PathBuf {
        self.settings.state.join("sandboxes").join(id.as_str())
    }

    pub(crate) fn is_alive(&self, record: &Record) -> bool {
        record.boot == boot_id() && record.placed.as_ref().is_some_and(|placed| self.backend.is_alive(placed))
    }

    /// The sandbox of this key of the wish's tenant, made or revived if need be.
    pub async fn sandbox(&self, key: &Key, wish: &Wish) -> Result<Found, Problem> {
        let mut note = None;
        let mut turn = None;
        loop {
            let record = match self.registry.by_key(&wish.tenant, key)? {
                Some(record) if record.state != State::Ended => record,
                _ if turn.is_none() => {
                    turn = Some(self.locks.turn(&wish.tenant, key).await);
                    continue;
                }
                ended => {
                    note = ended.and_then(|record| record.reason).map(Note::Ended).or(note);
                    match self.make(Some(key), wish, None).await? {
                        Some(record) => return Ok(Found { record, created: true, note }),
                        None => continue,
                    }
                }
            };
            if record.state == State::Running && self.is_alive(&record) {
                self.check_environment(&record, wish.environment.as_deref())?;
                return self.retrieved(record, wish.caller.clone()).await;
            }
            let environment = wish.environment.clone();
            if let Some(found) =
                self.bring_back(&record.id, Some(record.state), environment, wish.caller.clone()).await?
            {
                return Ok(found);
            }
        }
    }

    /// A sandbox of its own for one call.
    pub async fn ephemeral(&self, wish: &Wish) -> Result<Record, Problem> {
        self.ephemeral_of(Owner::me(), wish).await
    }

    /// As [`Engine::ephemeral`], for another process: the sandbox goes when that one does.
    pub async fn ephemeral_of(&self, owner: Owner, wish: &Wish) -> Result<Record, Problem> {
        self.make(None, wish, Some(owner)).await?.ok_or_else(|| Problem::internal("a new id was taken"))
    }

    /// A new sandbox that stays, and is found by its id alone.
    pub async fn nameless(&self, wish: &Wish) -> Result<Record, Problem> {
        self.make(None, wish, None).await?.ok_or_else(|| Problem::internal("a new id was taken"))
    }

    /// The sandbox with this id or key, if it lives.
    pub async fn existing(&self, name: &str, key: Option<&Key>) -> Result<Found, Problem> {
        self.existing_of(&Tenant::local(), name, key).await
    }

    /// As [`Engine::existing`], for a tenant. Somebody else's sandbox is not there, in the very words and with the very
    /// code of one that never was.
    pub async fn existing_of(
        &self,
        tenant: &Tenant,
        name: &str,
        key: Option<&Key>,
    ) -> Result<Found, Problem> {
        let record = self.known_of(tenant, name, key)?;
        if record.state == State::Running && self.is_alive(&record) {
            return self.retrieved(record, None).await;
        }
        if let Some(found) = self.bring_back(&record.id, Some(record.state), None, None).await? {
            return Ok(found);
        }
        self.registry
            .by_id(&record.id)?
            .filter(|record| record.state == State::Running)
            .map_or_else(|| Err(unknown(name)), |record| Ok(Found { record, created: false, note: None }))
    }

    /// The sandbox with this id or key of a tenant as it is written down, whether it lives, sleeps or is lost.
    pub fn known_of(&self, tenant: &Tenant, name: &str, key: Option<&Key>) -> Result<Record, Problem> {
        let by_id = match name.parse::<SandboxId>() {
            Ok(id) => self.registry.by_id_of(tenant, &id)?,
            Err(_) => None,
        };
        let record = match (by_id, key) {
            (Some(record), _) => Some(record),
            (None, Some(key)) => self.registry.by_key(tenant, key)?,
            (None, None) => None,
        };
        record.filter(|record| record.state != State::Ended).ok_or_else(|| unknown(name))
    }

    /// A sandbox that was there and lives.
    async fn retrieved(&self, record: Record, caller: Option<Arc<str>>) -> Result<Found, Problem> {
        if Registry::is_stale(&record) {
            let id = record.id.clone();
            self.blocking(move |engine| engine.registry.touch(&id)).await?;
        }
        self.note(Event::of(Kind::SessionRetrieved, &record).caller(caller));
        Ok(Found { record, created: false, note: None })
    }

    /// Waits for whoever is at work on a sandbox, finishes what a dead process left, wakes it if it sleeps and revives it if
    /// it is lost. `None`: it is neither (any more), or gone.
    pub(crate) async fn bring_back(
        &self,
        id: &SandboxId,
        seen: Option<State>,
        environment: Option<String>,
        caller: Option<Arc<str>>,
    ) -> Result<Option<Found>, Problem> {
        let lock = self.lock(id).await?;
        let id = id.clone();
        let sandbox = id.clone();
        let work = move |engine: &Engine| {
            let lock = match engine.wake(&id, lock, environment.as_deref(), &caller)? {
                Woken::Here(found) => return Ok(Some(*found)),
                Woken::Gone => return Ok(None),
                Woken::Not(lock) => lock,
            };
            let Some(lock) = engine.settle(&id, lock)? else { return Ok(None) };
            let found = engine.revive(&id, environment.as_deref())?;
            drop(lock);
            if let Some(found) = &found {
                engine.note(Event::of(Kind::SessionRevived, &found.record).caller(caller));
            }
            Ok(found)
        };
        // As it is now, with the lock held: whoever had it may have written the sandbox to disk.
        let thaws = seen == Some(State::Standby)
            && self
                .registry
                .by_id(&sandbox)?
                .is_some_and(|now| now.state == State::Standby && self.is_alive(&now));
        if thaws { self.at_once(work) } else { self.blocking(work).await }
    }

    pub(crate) async fn lock(&self, id: &SandboxId) -> Result<Lock, Problem> {
        self.locks.take(&self.settings.state, id).await
    }

    /// Whether code for `wanted` is at home in this sandbox.
    pub fn check_environment(&self, record: &Record, wanted: Option<&str>) -> Result<(), Problem> {
        let Some(wanted) = wanted else { return Ok(()) };
        self.environments().source(wanted)?;
        if self.environments().same_software(wanted, &record.spec.environment) {
            return Ok(());
        }
        // A language that the sandbox's own environment has is meant as that language.
        if carrel_proto::guest::Language::parse(wanted).is_some() {
            return Ok(());
        }
        let word = format!("this sandbox has the environment `{}`, not `{wanted}`", record.spec.environment);
        Err(Problem::new(Code::EnvironmentMismatch, word)
            .hint("use another session name for another environment"))
    }

    /// Claims and makes. `None`: somebody else was first.
    async fn make(
        &self,
        key: Option<&Key>,
        wish: &Wish,
        owner: Option<Owner>,
    ) -> Result<Option<Record>, Problem> {
        let environment = wish.environment.clone().unwrap_or_else(|| DEFAULT_ENVIRONMENT.to_owned());
        self.environments().source(&environment)?;
        let undo_calls = wish.undo_calls.unwrap_or_else(|| self.environments().undo_calls(&environment));
        let spec = Spec {
            environment,
            limits: wish.limits.clone(),
            isolation: wish.isolation,
            project: wish.project.clone(),
            idle_timeout_s: if owner.is_some() { EPHEMERAL_IDLE_S } else { wish.idle_timeout_s },
            max_lifetime_s: wish.max_lifetime_s,
            standby_after_s: wish.standby_after_s,
            hibernate_after_s: wish.hibernate_after_s,
            // Nobody comes back to take something back.
            undo_calls: if owner.is_some() { 0 } else { undo_calls.min(MAX_UNDO) },
            whereabouts: Some(self.environments().whereabouts().clone()),
            ephemeral: owner,
        };
        let claim = Claim {
            id: SandboxId::from_random(random()?),
            tenant: wish.tenant.clone(),
            key: key.cloned(),
            spec,
            labels: wish.labels.clone(),
            quota: wish.quota,
            origin: None,
            forked_from: None,
        };
        let (first, caller) = (wish.first, wish.caller.clone());
        match self.take_ready(&claim, first, caller.clone()).await? {
            Offer::Made(record) => return Ok(Some(*record)),
            Offer::KeyTaken => return Ok(None),
            Offer::Nothing => {}
        }
        let environment = claim.spec.environment.clone();
        let made = self.blocking(move |engine| engine.claim_and_place(&claim, first, caller)).await?;
        if made.is_some() {
            self.warm_up(environment);
        }
        Ok(made)
    }

    fn claim_and_place(
        &self,
        claim: &Claim,
        first: Option<Language>,
        caller: Option<Arc<str>>,
    ) -> Result<Option<Record>, Problem> {
        self.backend.expect();
        // Before the row, so that nobody ever sees the row with a free lock while we live.
        let lock = Lock::take_new(&self.settings.state, &claim.id)?;
        let record = match self.registry.claim(claim) {
            Ok(Some(record)) => record,
            refused => {
                lock.discard();
                return refused;
            }
        };
        match self.place(&record, None, first) {
            Ok(placed) => {
                let record = Record { state: State::Running, placed: Some(placed), ..record };
                self.note(Event::of(Kind::SessionCreated, &record).caller(caller));
                Ok(Some(record))
            }
            Err(problem) => {
                self.erase(&record.id, None, lock)?;
                Err(problem)
            }
        }
    }

    /// Makes the box of a row whose lock is held.
    fn place(
        &self,
        record: &Record,
        before: Option<&Placed>,
        first: Option<Language>,
    ) -> Result<Placed, Problem> {
        let directory = self.make_directory(&record.id)?;
        let _ = std::fs::remove_file(directory.join("spool/ended.json"));
        if before.is_some() {
            forget_output(&directory);
        }
        let placed = self.backend.create(&self.request(record, before, first)?)?;
        self.registry.set_placed(&record.id, &placed)?;
        Ok(placed)
    }

    pub(crate) fn make_directory(&self, id: &SandboxId) -> Result<PathBuf, Problem> {
        let directory = self.directory(id);
        let made = self.backend.make_directory(&directory).and_then(|()| {
            use std::os::unix::fs::PermissionsExt;
            // Passable for the box's own ids, readable for nobody but us.
            std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o711))
        });
        made.map_err(|error| Problem::internal(format!("making {}: {error}", directory.display())))?;
        Ok(directory)
    }

    /// What a backend is asked for.
    pub(crate) fn request(
        &self,
        record: &Record,
        before: Option<&Placed>,
        first: Option<Language>,
    ) -> Result<BoxRequest, Problem> {
        Ok(BoxRequest {
            id: record.id.clone(),
            number: record.number,
            directory: self.directory(&record.id),
            environment: self.environment(&record.spec.environment, &self.maker_of(record))?,
            limits: record.spec.limits.clone(),
            isolation: record.spec.isolation,
            project: record.spec.project.clone(),
            idle_timeout_s: record.spec.idle_timeout_s,
            max_lifetime_s: record.spec.max_lifetime_s,
            workspace: before.map(|placed| placed.workspace),
            resume: false,
            first,
            life: before.map_or(0, |placed| placed.life + 1),
            undo_calls: record.spec.undo_calls,
            parent: None,
        })
    }

    /// Whose interpreters a sandbox has: those of whoever made it, also when somebody else brings it back. What is on disk maps
    /// the very files.
    fn maker_of(&self, record: &Record) -> Whereabouts {
        record.spec.whereabouts.clone().unwrap_or_else(|| self.environments().whereabouts().clone())
    }

    /// Brings a lost sandbox, whose lock is held, back over its files. `None`: it is gone.
    pub(crate) fn revive(&self, id: &SandboxId, environment: Option<&str>) -> Result<Option<Found>, Problem> {
        let Some(record) = self.registry.by_id(id)? else { return Ok(None) };
        let Some(before) = record.placed.clone().filter(|_| record.state == State::Lost) else {
            return Ok(None);
        };
        self.check_environment(&record, environment)?;
        self.put_back(&record)?;
        let placed = self.place(&record, Some(&before), None)?;
        self.registry.touch(id)?;
        let note = match record.reason {
            Some(EndReason::Closed) => Note::Reopened,
            _ => damaged(&record).unwrap_or(Note::Revived),
        };
        let boot = boot_id().to_owned();
        let record = Record {
            state: State::Running,
            placed: Some(placed),
            boot,
            reason: None,
            sleep: Sleep::default(),
            ..record
        };
        self.remove_images(&record);
        Ok(Some(Found { record, created: false, note: Some(note) }))
    }

    /// With the lock held: finishes what a dead process left half done. The lock comes back if the sandbox is lost, so that
    /// it can be revived.
    pub(crate) fn settle(&self, id: &SandboxId, lock: Lock) -> Result<Option<Lock>, Problem> {
        let Some(record) = self.registry.by_id(id)? else {
            lock.discard();
            return Ok(None);
        };
        match record.state {
            State::Running if self.is_alive(&record) => Ok(None),
            State::Standby | State::Hibernated if self.sleeps_well(&record)? => Ok(None),
            State::Ended => Ok(None),
            State::Creating | State::Closing => {
                self.erase(id, record.placed.as_ref(), lock)?;
                Ok(None)
            }
            State::Running | State::Standby | State::Hibernated | State::Lost => {
                let directory = self.directory(id);
                if let Some(reason) = end_reason(&directory) {
                    self.expire(&record, reason, lock)?;
                    return Ok(None);
                }
                if record.spec.ephemeral.is_some() || record.placed.is_none() {
                    self.erase(id, record.placed.as_ref(), lock)?;
                    self.note(Event::of(Kind::SessionDeleted, &record).detail("lost"));
                    return Ok(None);
                }
                if record.state != State::Lost {
                    self.backend.destroy(id, &directory, record.placed.as_ref())?;
                    self.forget_sleep(&record)?;
                    self.registry.set_state(id, State::Lost, None)?;
                    self.note(Event::of(Kind::SessionLost, &record));
                }
                Ok(Some(lock))
            }
        }
    }

    /// Its own clock has ended it: the next caller of its key is told why.
    pub(crate) fn expire(&self, record: &Record, reason: EndReason, lock: Lock) -> Result<(), Problem> {
        self.take_away(&record.id, record.placed.as_ref())?;
        match record.key {
            Some(_) => self.registry.set_state(&record.id, State::Ended, Some(reason))?,
            None => self.registry.remove(&record.id)?,
        }
        lock.discard();
        let word = if reason == EndReason::Lifetime { "lifetime" } else { "idle" };
        self.note(Event::of(Kind::SessionDeleted, record).detail(word));
        Ok(())
    }

    /// Removes box and files.
    pub(crate) fn take_away(&self, id: &SandboxId, placed: Option<&Placed>) -> Result<(), Problem> {
        let directory = self.directory(id);
        self.backend.destroy(id, &directory, placed)?;
        remove_tree(&directory)
    }

    pub(crate) fn erase(&self, id: &SandboxId, placed: Option<&Placed>, lock: Lock) -> Result<(), Problem> {
        self.take_away(id, placed)?;
        self.registry.remove(id)?;
        lock.discard();
        Ok(())
    }

    /// Ends a sandbox. With `keep` its workspace is moved there first.
    pub async fn close(&self, record: &Record, keep: Option<&std::path::Path>) -> Result<(), Problem> {
        let lock = self.lock(&record.id).await?;
        let (id, keep) = (record.id.clone(), keep.map(std::path::Path::to_path_buf));
        self.blocking(move |engine| engine.close_locked(&id, lock, keep.as_deref(), "closed")).await
    }

    pub(crate) fn close_locked(
        &self,
        id: &SandboxId,
        lock: Lock,
        keep: Option<&std::path::Path>,
        why: &'static str,
    ) -> Result<(), Problem> {
        let Some(record) = self.registry.by_id(id)? else {
            lock.discard();
            return Ok(());
        };
        if let Some(target) = keep {
            self.put_back(&record)?;
            self.keep_workspace(&record, target)?;
        }
        self.registry.set_state(&record.id, State::Closing, Some(EndReason::Closed))?;
        self.learn_from(&record);
        self.erase(&record.id, record.placed.as_ref(), lock)?;
        self.note(Event::of(Kind::SessionDeleted, &record).detail(why));
        self.backend.restock(&record.spec.limits);
        Ok(())
    }

    /// Ends a sandbox's processes and keeps its files: whoever means it next brings it back over them.
    pub async fn stop(&self, record: &Record) -> Result<(), Problem> {
        let lock = self.lock(&record.id).await?;
        let id = record.id.clone();
        self.blocking(move |engine| {
            let Some(record) = engine.registry.by_id(&id)? else {
                lock.discard();
                return Ok(());
            };
            if record.state != State::Running && !record.state.is_asleep() {
                return Ok(());
            }
            engine.put_back(&record)?;
            engine.backend.destroy(&id, &engine.directory(&id), record.placed.as_ref())?;
            engine.registry.set_state(&id, State::Lost, Some(EndReason::Closed))?;
            engine.remove_images(&record);
            drop(lock);
            engine.note(Event::of(Kind::SessionStopped, &record));
            Ok(())
        })
        .await
    }

    /// What is known of the sandbox with this id, whether it lives or not.
    pub fn record(&self, id: &SandboxId) -> Result<Option<Record>, Problem> {
        Ok(self.registry.by_id(id)?.filter(|record| record.state != State::Ended))
    }

    /// As [`Engine::record`], for a tenant: `None` for somebody else's as for one that never was.
    pub fn record_of(&self, tenant: &Tenant, id: &SandboxId) -> Result<Option<Record>, Problem> {
        Ok(self.registry.by_id_of(tenant, id)?.filter(|record| record.state != State::Ended))
    }

    /// The sandbox of a tenant's key as it is written down, whether it lives or not.
    pub fn record_by_key(&self, tenant: &Tenant, key: &Key) -> Result<Option<Record>, Problem> {
        Ok(self.registry.by_key(tenant, key)?.filter(|record| record.state != State::Ended))
    }

    /// The agent's own view of a sandbox.
    pub async fn status(&self, record: &Record) -> Result<carrel_proto::message::Status, Problem> {
        match self.ask(record, &Request::Status).await? {
            message::Event::Status(status) => Ok(status),
            _ => Err(Problem::new(Code::Protocol, "the agent did not say its status")),
        }
    }

    /// All sandboxes that are not gone.
    pub fn list(&self) -> Result<Vec<Record>, Problem> {
        let all = self.registry.all()?;
        Ok(all.into_iter().filter(|record| record.state != State::Ended).collect())
    }

    /// Some of them, in the order they were made; the page says how to go on.
    pub fn list_page(&self, filter: &ListFilter, after: Option<Cursor>, limit: u32) -> Result<Page, Problem> {
        self.registry.page(filter, after, limit)
    }
}

/// For a new id.
pub(crate) fn random() -> Result<[u8; 10], Problem> {
    let mut random = [0; 10];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).map_err(Problem::internal)?;
    Ok(random)
}

/// The one answer for what is not there and for what is not the caller's.
pub(crate) fn unknown(name: &str) -> Problem {
    Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{name}`"))
        .hint("`carrel ls` lists them; `carrel run -s NAME …` or `carrel open NAME` makes one")
}

/// What the agent wrote before it ended the sandbox by itself.
fn end_reason(directory: &std::path::Path) -> Option<EndReason> {
    serde_json::from_slice(&std::fs::read(directory.join("spool/ended.json")).ok()?).ok()
}

/// Takes away what calls of a box that is gone have printed: its agent alone knew what is where in it.
fn forget_output(directory: &std::path::Path) {
    for entry in std::fs::read_dir(directory.join("spool")).into_iter().flatten().flatten() {
        if entry.path().extension().is_some_and(|ending| ending == "out") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Removes a sandbox's directory, whatever user code has left in it.
pub(crate) fn remove_tree(directory: &std::path::Path) -> Result<(), Problem> {
    use carrel_proto::files::GuestPath;
    let parent = directory.parent().unwrap_or(directory);
    let Some(name) = directory.file_name() else { return Ok(()) };
    let root = carrel_files::Root::open(parent).map_err(Problem::from)?;
    let path = GuestPath::parse(name.as_encoded_bytes()).map_err(Problem::internal)?;
    match root.delete(&path, true) {
        Ok(_) | Err(carrel_files::FileError::NotFound { .. }) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
