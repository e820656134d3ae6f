//! Making, finding, reviving and closing sandboxes.
//!
//! ```text
//!            claim                placed            box died, stopped
//! (nothing) ──────> creating ───────────────> running ─────────────> lost
//!                      │                        │  ^                   │
//!     maker died, swept│                  close │  └──── revived ──────┘
//!                      v                        v
//!                  (nothing) <──── swept ──── closing          ended: by its own clock, told to the next caller
//! ```
//! Races and how they are won:
//! - *Two processes want the same key.* The claim is one SQLite transaction; the loser finds the row, waits for the
//!   sandbox's lock and looks again. The winner held the lock before the row existed, so a free lock on a row in
//!   `creating` means that its maker is dead.
//! - *A process dies at any point.* Whatever it had made is named after the id, and its lock is free: the next call
//!   ([`crate::sweep`]) removes it.
//! - *A box dies between two calls.* Its pid and start time are in the row; a call that finds them gone takes the lock and
//!   makes a new box over the same files, and says that the interpreters' state is lost.

use std::{path::PathBuf, sync::Arc};

use carrel_backend::{BoxRequest, IsolationLevel, Placed, Project};
use carrel_proto::{
    guest::{EndReason, Language},
    id::{Key, SandboxId},
    limits::Limits,
    message::{Event, Request},
    problem::{Code, Problem},
};

use crate::{
    Engine,
    lock::Lock,
    registry::{Owner, Record, Spec, State, boot_id},
};

/// What a caller wants of a sandbox that may have to be made.
#[derive(Debug, Clone, Default)]
pub struct Wish {
    /// None: any, `python` if it has to be made.
    pub environment: Option<String>,
    pub limits: Limits,
    pub isolation: IsolationLevel,
    pub project: Option<Project>,
    pub idle_timeout_s: u64,
    pub max_lifetime_s: u64,
    /// The language of the call it is for: if the sandbox has to be made, the interpreter starts while the call is on its way.
    pub first: Option<Language>,
}

/// An ephemeral sandbox whose caller is gone ends by itself after this long.
const EPHEMERAL_IDLE_S: u64 = 30;
pub(crate) const DEFAULT_ENVIRONMENT: &str = "python";

/// What a caller should be told of the sandbox it got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Note {
    /// The sandbox of this name had ended; this is a new, empty one.
    Ended(EndReason),
    /// The box had died: files are as they were, interpreters are new.
    Revived,
    /// It had been [stopped](Engine::stop): files are as they were, interpreters are new.
    Reopened,
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
            Note::Reopened => {
                "the sandbox had been closed; files are kept, interpreters start anew".to_owned()
            }
        }
    }
}

#[derive(Debug)]
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

    /// The sandbox of this key, made or revived if need be.
    pub async fn sandbox(&self, key: &Key, wish: &Wish) -> Result<Found, Problem> {
        let mut note = None;
        loop {
            let Some(record) = self.registry.by_key(key)? else {
                match self.make(Some(key), wish, None).await? {
                    Some(record) => return Ok(Found { record, created: true, note }),
                    None => continue,
                }
            };
            match record.state {
                State::Running if self.is_alive(&record) => {
                    self.check_environment(&record, wish)?;
                    self.registry.touch(&record.id)?;
                    return Ok(Found { record, created: false, note });
                }
                State::Ended => {
                    note = record.reason.map(Note::Ended);
                    if let Some(record) = self.make(Some(key), wish, None).await? {
                        return Ok(Found { record, created: true, note });
                    }
                }
                State::Creating | State::Closing => {
                    let lock = Lock::take(&self.settings.state, &record.id).await?;
                    self.settle(&record.id, lock)?;
                }
                State::Running | State::Lost => {
                    let lock = Lock::take(&self.settings.state, &record.id).await?;
                    if self.settle(&record.id, lock)? {
                        self.check_environment(&record, wish)?;
                        if let Some(found) = self.revive(&record.id).await? {
                            return Ok(found);
                        }
                    }
                }
            }
        }
    }

    /// A sandbox of its own for one call.
    pub async fn ephemeral(&self, wish: &Wish) -> Result<Record, Problem> {
        self.make(None, wish, Some(Owner::me())).await?.ok_or_else(|| Problem::internal("a new id was taken"))
    }

    /// The sandbox with this id or key, if it lives.
    pub async fn existing(&self, name: &str, key: Option<&Key>) -> Result<Found, Problem> {
        let unknown = || {
            Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{name}`"))
                .hint("`carrel ls` lists them; `carrel run -s NAME …` or `carrel open NAME` makes one")
        };
        let by_id = match name.parse::<SandboxId>() {
            Ok(id) => self.registry.by_id(&id)?,
            Err(_) => None,
        };
        let record = match (by_id, key) {
            (Some(record), _) => Some(record),
            (None, Some(key)) => self.registry.by_key(key)?,
            (None, None) => None,
        };
        let record = record.filter(|record| record.state != State::Ended).ok_or_else(unknown)?;
        if record.state == State::Running && self.is_alive(&record) {
            self.registry.touch(&record.id)?;
            return Ok(Found { record, created: false, note: None });
        }
        let lock = Lock::take(&self.settings.state, &record.id).await?;
        if self.settle(&record.id, lock)?
            && let Some(found) = self.revive(&record.id).await?
        {
            return Ok(found);
        }
        self.registry
            .by_id(&record.id)?
            .filter(|record| record.state == State::Running)
            .map_or_else(|| Err(unknown()), |record| Ok(Found { record, created: false, note: None }))
    }

    fn check_environment(&self, record: &Record, wish: &Wish) -> Result<(), Problem> {
        let Some(wanted) = &wish.environment else { return Ok(()) };
        self.settings.environments.source(wanted)?;
        if self.settings.environments.same_software(wanted, &record.spec.environment) {
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
        self.settings.environments.source(&environment)?;
        let spec = Spec {
            environment,
            limits: wish.limits.clone(),
            isolation: wish.isolation,
            project: wish.project.clone(),
            idle_timeout_s: if owner.is_some() { EPHEMERAL_IDLE_S } else { wish.idle_timeout_s },
            max_lifetime_s: wish.max_lifetime_s,
            ephemeral: owner,
        };
        self.backend.expect();
        let mut random = [0; 10];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(Problem::internal)?;
        let id = SandboxId::from_random(random);
        // Before the row, so that nobody ever sees the row with a free lock while we live.
        let lock = Lock::take_new(&self.settings.state, &id).await?;
        let Some(record) = self.registry.claim(&id, key, &spec)? else {
            lock.discard();
            return Ok(None);
        };
        match self.place(&record, None, wish.first).await {
            Ok(placed) => Ok(Some(Record { state: State::Running, placed: Some(placed), ..record })),
            Err(problem) => {
                self.erase(&record.id, None, lock)?;
                Err(problem)
            }
        }
    }

    /// Makes the box of a row whose lock is held.
    async fn place(
        &self,
        record: &Record,
        before: Option<&Placed>,
        first: Option<Language>,
    ) -> Result<Placed, Problem> {
        let directory = self.directory(&record.id);
        let made = self.backend.make_directory(&directory).and_then(|()| {
            use std::os::unix::fs::PermissionsExt;
            // Passable for the box's own ids, readable for nobody but us.
            std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o711))
        });
        made.map_err(|error| Problem::internal(format!("making {}: {error}", directory.display())))?;
        let _ = std::fs::remove_file(directory.join("spool/ended.json"));
        let environment = self.environment(&record.spec.environment)?;
        let request = BoxRequest {
            id: record.id.clone(),
            number: record.number,
            directory,
            environment,
            limits: record.spec.limits.clone(),
            isolation: record.spec.isolation,
            project: record.spec.project.clone(),
            idle_timeout_s: record.spec.idle_timeout_s,
            max_lifetime_s: record.spec.max_lifetime_s,
            workspace: before.map(|placed| placed.workspace),
            first,
        };
        let backend = Arc::clone(&self.backend);
        let placed = tokio::task::spawn_blocking(move || backend.create(&request))
            .await
            .map_err(Problem::internal)??;
        self.registry.set_placed(&record.id, &placed)?;
        Ok(placed)
    }

    /// Brings a lost sandbox back over its files. `None`: it is not lost any more, or gone.
    async fn revive(&self, id: &SandboxId) -> Result<Option<Found>, Problem> {
        let _lock = Lock::take(&self.settings.state, id).await?;
        let Some(record) = self.registry.by_id(id)? else { return Ok(None) };
        let Some(before) = record.placed.clone().filter(|_| record.state == State::Lost) else {
            return Ok(None);
        };
        let placed = self.place(&record, Some(&before), None).await?;
        self.registry.touch(id)?;
        let note = if record.reason == Some(EndReason::Closed) { Note::Reopened } else { Note::Revived };
        let record =
            Record { state: State::Running, placed: Some(placed), boot: boot_id(), reason: None, ..record };
        Ok(Some(Found { record, created: false, note: Some(note) }))
    }

    /// With the lock held: finishes what a dead process left half done. `true`: the sandbox is lost and can be revived.
    pub(crate) fn settle(&self, id: &SandboxId, lock: Lock) -> Result<bool, Problem> {
        let Some(record) = self.registry.by_id(id)? else {
            lock.discard();
            return Ok(false);
        };
        match record.state {
            State::Running if self.is_alive(&record) => Ok(false),
            State::Ended => Ok(false),
            State::Creating | State::Closing => {
                self.erase(id, record.placed.as_ref(), lock)?;
                Ok(false)
            }
            State::Running | State::Lost => {
                let directory = self.directory(id);
                if let Some(reason) = end_reason(&directory) {
                    self.take_away(id, record.placed.as_ref())?;
                    match record.key {
                        Some(_) => self.registry.set_state(id, State::Ended, Some(reason))?,
                        None => self.registry.remove(id)?,
                    }
                    lock.discard();
                    return Ok(false);
                }
                if record.spec.ephemeral.is_some() || record.placed.is_none() {
                    self.erase(id, record.placed.as_ref(), lock)?;
                    return Ok(false);
                }
                if record.state == State::Running {
                    self.backend.destroy(id, &directory, record.placed.as_ref())?;
                    self.registry.set_state(id, State::Lost, None)?;
                }
                Ok(true)
            }
        }
    }

    /// Removes box and files.
    fn take_away(&self, id: &SandboxId, placed: Option<&Placed>) -> Result<(), Problem> {
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
        let lock = Lock::take(&self.settings.state, &record.id).await?;
        let Some(record) = self.registry.by_id(&record.id)? else {
            lock.discard();
            return Ok(());
        };
        if let Some(target) = keep {
            self.keep_workspace(&record, target)?;
        }
        self.registry.set_state(&record.id, State::Closing, Some(EndReason::Closed))?;
        self.erase(&record.id, record.placed.as_ref(), lock)?;
        self.backend.restock(&record.spec.limits);
        Ok(())
    }

    /// Ends a sandbox's processes and keeps its files: whoever means it next brings it back over them.
    pub async fn stop(&self, record: &Record) -> Result<(), Problem> {
        let _lock = Lock::take(&self.settings.state, &record.id).await?;
        let Some(record) = self.registry.by_id(&record.id)?.filter(|record| record.state == State::Running)
        else {
            return Ok(());
        };
        self.backend.destroy(&record.id, &self.directory(&record.id), record.placed.as_ref())?;
        self.registry.set_state(&record.id, State::Lost, Some(EndReason::Closed))
    }

    /// What is known of the sandbox with this id, whether it lives or not.
    pub fn record(&self, id: &SandboxId) -> Result<Option<Record>, Problem> {
        Ok(self.registry.by_id(id)?.filter(|record| record.state != State::Ended))
    }

    /// The agent's own view of a sandbox.
    pub async fn status(&self, record: &Record) -> Result<carrel_proto::message::Status, Problem> {
        match self.ask(record, &Request::Status).await? {
            Event::Status(status) => Ok(status),
            _ => Err(Problem::new(Code::Protocol, "the agent did not say its status")),
        }
    }

    /// All sandboxes that are not gone.
    pub fn list(&self) -> Result<Vec<Record>, Problem> {
        let all = self.registry.all()?;
        Ok(all.into_iter().filter(|record| record.state != State::Ended).collect())
    }
}

/// What the agent wrote before it ended the sandbox by itself.
fn end_reason(directory: &std::path::Path) -> Option<EndReason> {
    serde_json::from_slice(&std::fs::read(directory.join("spool/ended.json")).ok()?).ok()
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
