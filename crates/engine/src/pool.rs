//! Boxes that are ready before anybody asks for them, in a process that stays.
//!
//! ```text
//!            made, warmed up            claimed: one transaction
//! (nothing) ────────────────> ready ───────────────────────────> a running sandbox, as if it had just been made
//!                               │
//!                               └──> (nothing)   too old, too many, short of memory, software changed, end of the process
//! ```
//! A ready box has a directory, a lock that this process holds, a number and a line to its agent, and no row: it is in no
//! list, counts for no quota and has no tenant. Nothing but carrel's own warming call has run in it.
//!
//! Races and how they are won:
//! - *Two callers.* Whoever claims takes the box off its shelf first; there is nobody to share it with. If the claim is
//!   refused (the key is taken, the scope closed, the quota full), the box was not told and goes back.
//! - *This process dies.* The agent ends with its line ([`carrel_proto::message::Request::KeepReady`]); the lock is free and
//!   there is no row, so the next sweep removes the rest.
//! - *It dies in the midst of a claim.* The agent is told after all checks and before the row can be seen: a row is always
//!   that of a box that knows it is somebody's.
//! - *The agent died on the shelf*, or the host's software is not what it was made of: the claim sees it, and takes another.
//! - *More callers than boxes.* They are served as if there were no pool.
//!
//! Deliberately absent: a pool across processes, and one for sandboxes that show a project's directory.

mod fill;
mod pressure;
mod shelves;

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use carrel_backend::{Placed, environment::Environment, link::AgentLink};
use carrel_proto::{
    guest::Language,
    id::SandboxId,
    message::Request,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, RwLock};

use self::shelves::{Kind, Order, Shelves};
use crate::{
    Engine, Whereabouts, Wish,
    events::{Event, Kind as Said},
    lock::Lock,
    registry::{Claim, Record, Spec},
    sandboxes::DEFAULT_ENVIRONMENT,
};

/// Unless the configuration says otherwise: none before the first sandbox, and some tens of megabytes at most.
pub const DEFAULT_FLOOR: u32 = 0;
pub const DEFAULT_CEILING: u32 = 8;
/// Most that a configuration may ask for.
pub const MOST: u32 = 1000;

/// How many boxes are kept ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolSize {
    /// Of sandboxes as they are made when nobody asks for anything special: at least so many.
    pub floor: u32,
    /// Of all kinds together. 0: there is no pool.
    pub ceiling: u32,
}

impl Default for PoolSize {
    fn default() -> Self {
        Self { floor: DEFAULT_FLOOR, ceiling: DEFAULT_CEILING }
    }
}

/// What a pool has and did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolStatus {
    pub ceiling: u32,
    pub ready: Vec<ReadyKind>,
    /// Sandboxes that came from it, and those that were made while their caller waited.
    pub claimed: u64,
    pub cold: u64,
    /// Boxes that were made ready, and those that went unused.
    pub made: u64,
    pub dropped: u64,
    /// Why nothing is kept ready at the moment.
    pub held_back: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadyKind {
    pub environment: String,
    pub language: Option<Language>,
    pub count: u32,
}

/// A box that is on no shelf for the moment.
#[derive(Debug)]
pub(crate) struct Taken {
    kind: Kind,
    since: Instant,
    pub(crate) ready: Ready,
}

/// A box on a shelf.
#[derive(Debug)]
pub(crate) struct Ready {
    pub(crate) id: SandboxId,
    pub(crate) number: u32,
    pub(crate) placed: Placed,
    pub(crate) lock: Lock,
    pub(crate) link: AgentLink,
    /// What it was made of.
    environment: Environment,
    stamp: Vec<Option<(u64, u64, i64, i64)>>,
}

/// The part of an engine that knows of ready boxes. Empty and asleep until [`Engine::keep_pool`] runs.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    shelves: Mutex<Shelves<Ready>>,
    /// Something changed that whoever fills the shelves should know.
    changed: Notify,
    /// Held by everyone who removes boxes.
    clearing: Arc<RwLock<()>>,
    claimed: AtomicU64,
    cold: AtomicU64,
    made: AtomicU64,
    dropped: AtomicU64,
    held_back: Mutex<Option<String>>,
}

/// What came of asking for a ready box.
pub(crate) enum Offer {
    Made(Box<Record>),
    /// The key is somebody's already.
    KeyTaken,
    /// There is none: it has to be made.
    Nothing,
}

/// What came of trying one box.
enum Passed {
    On(Box<Record>),
    KeyTaken,
    Unusable,
    Refused(Problem),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// How many boxes are kept ready from now on, and what a sandbox is that nobody asks anything special of.
    pub fn set_pool(&self, size: PoolSize, usual: &Wish) {
        let usual = self.usual_kind(usual);
        lock(&self.pool.shelves).resize(size, usual, Instant::now());
        self.pool.changed.notify_one();
    }

    /// What the pool of this process has and did.
    pub fn pool(&self) -> PoolStatus {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (ceiling, ready) = {
            let shelves = lock(&self.pool.shelves);
            let kinds = shelves.counts().map(|(kind, count)| ReadyKind {
                environment: kind.environment.clone(),
                language: kind.language,
                count: u32::try_from(count).unwrap_or(u32::MAX),
            });
            (shelves.ceiling(), kinds.collect())
        };
        PoolStatus {
            ceiling,
            ready,
            claimed: count(&self.pool.claimed),
            cold: count(&self.pool.cold),
            made: count(&self.pool.made),
            dropped: count(&self.pool.dropped),
            held_back: lock(&self.pool.held_back).clone(),
        }
    }

    fn usual_kind(&self, wish: &Wish) -> Option<(Kind, Order)> {
        let environment = wish.environment.clone().unwrap_or_else(|| DEFAULT_ENVIRONMENT.to_owned());
        let environments = self.environments();
        let kind = Kind {
            source: environments.source(&environment).ok()?.clone(),
            whereabouts: environments.whereabouts().clone(),
            language: environments.first_language(Some(&environment)),
            limits: wish.limits.clone(),
            isolation: wish.isolation,
            environment,
        };
        let undo_calls = wish.undo_calls.unwrap_or_else(|| environments.undo_calls(&kind.environment));
        Some((kind, Order { environments, undo_calls }))
    }

    /// The kind of a sandbox that shall be made; `None`: no pool has such.
    fn kind_of(&self, spec: &Spec, first: Option<Language>) -> Option<(Kind, Order)> {
        if spec.project.is_some() || !lock(&self.pool.shelves).is_open() {
            return None;
        }
        let environments = self.environments();
        let kind = Kind {
            environment: spec.environment.clone(),
            source: environments.source(&spec.environment).ok()?.clone(),
            whereabouts: spec.whereabouts.clone().unwrap_or_else(|| environments.whereabouts().clone()),
            limits: spec.limits.clone(),
            isolation: spec.isolation,
            language: first.or_else(|| environments.first_language(Some(&spec.environment))),
        };
        Some((kind, Order { environments, undo_calls: spec.undo_calls }))
    }

    /// A ready box for this claim, if there is one.
    pub(crate) async fn take_ready(
        &self,
        claim: &Claim,
        first: Option<Language>,
        caller: Option<Arc<str>>,
    ) -> Result<Offer, Problem> {
        let Some((kind, order)) = self.kind_of(&claim.spec, first) else {
            self.pool.cold.fetch_add(1, Ordering::Relaxed);
            return Ok(Offer::Nothing);
        };
        lock(&self.pool.shelves).want(&kind, &order, Instant::now());
        loop {
            let taken = {
                let mut shelves = lock(&self.pool.shelves);
                shelves.take(&kind, Instant::now()).inspect(|_| shelves.tries(&kind))
            };
            let Some((since, ready)) = taken else {
                self.pool.cold.fetch_add(1, Ordering::Relaxed);
                self.pool.changed.notify_one();
                return Ok(Offer::Nothing);
            };
            let claim = Claim { id: ready.id.clone(), ..claim.clone() };
            // One transaction, and no caller who goes away in the midst of it.
            let passed = self.at_once(|engine| {
                let passed = engine.pass_on(ready, since, &claim, &kind, caller.clone());
                lock(&engine.pool.shelves).decided(&kind);
                engine.pool.changed.notify_one();
                Ok(passed)
            });
            match passed? {
                Passed::On(record) => return Ok(Offer::Made(record)),
                Passed::KeyTaken => return Ok(Offer::KeyTaken),
                Passed::Refused(problem) => return Err(problem),
                Passed::Unusable => {}
            }
        }
    }

    /// A ready box for a sandbox that is to be a copy of another one: whatever interpreter is up in it makes way.
    pub(crate) fn take_for_copy(&self, spec: &Spec) -> Option<Taken> {
        let (kind, order) = self.kind_of(spec, None)?;
        lock(&self.pool.shelves).want(&kind, &order, Instant::now());
        let taken = loop {
            let taken = lock(&self.pool.shelves).take_alike(&kind, Instant::now());
            match taken {
                Some((kind, _, ready)) if !self.is_usable(&ready, &kind.whereabouts) => {
                    self.drop_later(vec![ready]);
                }
                taken => break taken,
            }
        };
        let counter = if taken.is_some() { &self.pool.claimed } else { &self.pool.cold };
        counter.fetch_add(1, Ordering::Relaxed);
        self.pool.changed.notify_one();
        taken.map(|(kind, since, ready)| Taken { kind, since, ready })
    }

    /// It was not told that it is somebody's.
    pub(crate) fn put_back_ready(&self, taken: Taken) {
        let Taken { kind, since, ready } = taken;
        self.pool.claimed.fetch_sub(1, Ordering::Relaxed);
        let back = lock(&self.pool.shelves).put(&kind, since, ready);
        self.drop_later(back.into_iter().collect());
    }

    /// Whether [`Self::take_for_copy`] is likely to find one.
    pub(crate) fn stands_ready(&self, spec: &Spec) -> bool {
        self.kind_of(spec, None).is_some_and(|(kind, _)| lock(&self.pool.shelves).has_alike(&kind))
    }

    /// Makes a ready box a caller's own. It goes back to its shelf if it was not told of that.
    fn pass_on(
        &self,
        mut ready: Ready,
        since: Instant,
        claim: &Claim,
        kind: &Kind,
        caller: Option<Arc<str>>,
    ) -> Passed {
        if !self.is_usable(&ready, &kind.whereabouts) {
            self.drop_later(vec![ready]);
            return Passed::Unusable;
        }
        let word = claimed(&claim.spec);
        let mut told = None;
        let (number, placed) = (ready.number, ready.placed.clone());
        let claimed = self.registry.claim_ready(claim, number, &placed, || {
            let result = ready.link.tell(&word);
            told = Some(result.is_ok());
            result
        });
        let passed = match (claimed, told) {
            (Ok(Some(record)), _) => {
                let Ready { lock, link, id, .. } = ready;
                // Somebody may have found the row already, and wait.
                drop(lock);
                // Its first caller needs no other.
                self.lines.keep(id, link);
                self.pool.claimed.fetch_add(1, Ordering::Relaxed);
                self.note(Event::of(Said::SessionCreated, &record).caller(caller));
                return Passed::On(Box::new(record));
            }
            (Ok(None), None) => Passed::KeyTaken,
            (Err(problem), None) => Passed::Refused(problem),
            // Its line is gone.
            (_, Some(false)) => Passed::Unusable,
            (Err(problem), Some(true)) => Passed::Refused(problem),
            (Ok(None), Some(true)) => Passed::Refused(Problem::internal("a claim was made and is not there")),
        };
        let back =
            if told.is_none() { lock(&self.pool.shelves).put(kind, since, ready) } else { Some(ready) };
        self.drop_later(back.into_iter().collect());
        passed
    }

    /// Whether what it was made of is what a new one would be made of. Whether its agent lives is seen when that is told.
    fn is_usable(&self, ready: &Ready, maker: &Whereabouts) -> bool {
        self.environment(&ready.environment.name, maker).is_ok_and(|now| now == ready.environment)
            && ready.environment.stamp() == ready.stamp
    }

    /// Removes ready boxes that nobody gets, off the caller's path.
    fn drop_later(&self, boxes: Vec<Ready>) {
        if boxes.is_empty() {
            return;
        }
        let engine = self.clone();
        // Whoever ends the pool waits for this one.
        let under_way = Arc::clone(&self.pool.clearing).try_read_owned().ok();
        let work = move || {
            boxes.into_iter().for_each(|ready| engine.drop_ready(ready));
            drop(under_way);
        };
        match tokio::runtime::Handle::try_current() {
            Ok(runtime) => drop(runtime.spawn_blocking(work)),
            Err(_) => work(),
        }
    }

    fn drop_ready(&self, ready: Ready) {
        let Ready { id, placed, lock, link, .. } = ready;
        self.pool.dropped.fetch_add(1, Ordering::Relaxed);
        drop(link);
        // What cannot be removed now is found by the sweep.
        if self.take_away(&id, Some(&placed)).is_ok() {
            lock.discard();
        }
    }
}

/// What the agent of a ready box is told when it is somebody's.
pub(crate) fn claimed(spec: &Spec) -> Request {
    Request::Claimed {
        idle_timeout_s: spec.idle_timeout_s,
        max_lifetime_s: spec.max_lifetime_s,
        undo_calls: spec.undo_calls,
    }
}

fn late() -> Problem {
    Problem::new(Code::AgentLost, "a box that was to be kept ready does not get ready")
}
