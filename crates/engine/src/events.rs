//! What happens, as it happens: numbered events for whoever listens, and a journal of them.
//!
//! Telling never waits: an event goes into a ring, and who listens reads the rings at its own pace. Who is too slow, or
//! comes back too late, is told how many events it missed. There is a ring of everything, for the local user, and one for
//! each token with what is its own, numbered by itself: gaps between its numbers would tell a tenant what the others do.
//! Events say what was done, to what, by whom, how much and how long; never what it was about.

use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{SystemTime, UNIX_EPOCH},
};

use carrel_proto::id::{ExecId, Key, SandboxId, SessionName};
use serde::{Serialize, Serializer};
use tokio::sync::watch;

use crate::{
    Engine,
    journal::Journal,
    registry::{Record, now_ms},
    tenant::Tenant,
};

/// Events that the local user can come back for: minutes of a busy host, a megabyte.
const ALL_KEPT: usize = 4096;
/// And a token.
const OWN_KEPT: usize = 256;
/// Tokens with a ring of their own; beyond, the one that was quiet for longest loses its past.
const MAX_RINGS: usize = 64;

macro_rules! kinds {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// What happened. New ones may come; none changes its meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Kind { $($(#[$doc])* $variant,)* }
        impl Kind {
            pub const ALL: &[Kind] = &[$(Kind::$variant,)*];
            pub fn as_str(self) -> &'static str {
                match self { $(Kind::$variant => $text,)* }
            }
            pub fn parse(text: &str) -> Option<Self> {
                match text { $($text => Some(Kind::$variant),)* _ => None }
            }
        }
    };
}

kinds! {
    /// A sandbox was made.
    SessionCreated = "session.created",
    /// One that was there was found for a caller.
    SessionRetrieved = "session.retrieved",
    /// Its box had died or been stopped; a new one was made over its files.
    SessionRevived = "session.revived",
    /// Its box has died; its files are there.
    SessionLost = "session.lost",
    /// Its processes were ended; its files are there.
    SessionStopped = "session.stopped",
    /// Its processes were frozen.
    SessionStandby = "session.standby",
    /// It was written to disk; its processes are gone.
    SessionHibernated = "session.hibernated",
    /// It was in standby or hibernated, and runs again.
    SessionWoken = "session.woken",
    /// Limits, labels or times were changed.
    SessionUpdated = "session.updated",
    SessionDeleted = "session.deleted",
    /// A sandbox was forked; its children have events of their own.
    SessionForked = "session.forked",
    /// A fork has taken the key of what it was forked from.
    SessionAdopted = "session.adopted",
    SnapshotCreated = "snapshot.created",
    /// In place, or as a new sandbox.
    SnapshotRestored = "snapshot.restored",
    SnapshotDeleted = "snapshot.deleted",
    /// It went out as a file.
    SnapshotExported = "snapshot.exported",
    /// A file became one.
    SnapshotImported = "snapshot.imported",
    ScopeClosed = "scope.closed",
    FileList = "session.file.list",
    FileRead = "session.file.read",
    FileWrite = "session.file.write",
    FileDelete = "session.file.delete",
    RunStarted = "run.started",
    RunFinished = "run.finished",
    ExecStarted = "exec.started",
    ExecFinished = "exec.finished",
    LimitHit = "limit.hit",
    PortOpened = "port.opened",
    TokenCreated = "token.created",
    TokenRevoked = "token.revoked",
}

impl Serialize for Kind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// One thing that happened.
#[derive(Debug, Clone, Serialize)]
pub struct Event {
    pub unix_ms: u64,
    pub kind: Kind,
    #[serde(skip_serializing_if = "Tenant::is_local")]
    pub tenant: Tenant,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<SandboxId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<SessionName>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exec: Option<ExecId>,
    /// Who asked, as the front door knows it.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "caller")]
    pub caller: Option<Arc<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub duration_ms: Option<u64>,
    /// One word on how it went: a cause of death, a limit, a language. Never a caller's text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Cow<'static, str>>,
}

impl Event {
    pub fn new(kind: Kind, tenant: &Tenant) -> Self {
        Self {
            unix_ms: now_ms(),
            kind,
            tenant: tenant.clone(),
            sandbox: None,
            key: None,
            session: None,
            exec: None,
            caller: None,
            bytes: None,
            duration_ms: None,
            detail: None,
        }
    }

    /// Of a sandbox.
    pub fn of(kind: Kind, record: &Record) -> Self {
        Self { sandbox: Some(record.id.clone()), key: record.key.clone(), ..Self::new(kind, &record.tenant) }
    }

    #[must_use]
    pub fn detail(mut self, word: impl Into<Cow<'static, str>>) -> Self {
        self.detail = Some(word.into());
        self
    }

    #[must_use]
    pub fn caller(mut self, caller: Option<Arc<str>>) -> Self {
        self.caller = caller;
        self
    }
}

/// An event with its number in the view of whoever reads it.
#[derive(Debug, Clone, Serialize)]
pub struct Numbered {
    pub seq: u64,
    #[serde(flatten, serialize_with = "shared")]
    pub event: Arc<Event>,
}

fn caller<S: Serializer>(caller: &Option<Arc<str>>, serializer: S) -> Result<S::Ok, S::Error> {
    caller.as_deref().serialize(serializer)
}

fn shared<S: Serializer>(event: &Arc<Event>, serializer: S) -> Result<S::Ok, S::Error> {
    event.as_ref().serialize(serializer)
}

/// What a listener hears.
#[derive(Debug, Clone)]
pub enum Heard {
    Event(Numbered),
    /// It was too slow, or away for too long: this many were missed. `None`: nobody knows how many.
    Gap {
        missed: Option<u64>,
        seq: u64,
    },
}

#[derive(Debug)]
struct Ring {
    /// The number of the next event. It begins with the time in microseconds, so that numbers go up when a process takes
    /// the place of another, and who comes back to the new one with an old number learns that it missed something.
    next: u64,
    begun: u64,
    events: VecDeque<Arc<Event>>,
    most: usize,
    told: watch::Sender<u64>,
}

fn micros() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX)
}

impl Ring {
    fn new(most: usize) -> Self {
        let next = micros();
        Self { next, begun: next, events: VecDeque::new(), most, told: watch::channel(next).0 }
    }

    /// Whether anybody would miss it.
    fn is_heard(&self) -> bool {
        self.told.receiver_count() > 0
    }

    fn push(&mut self, event: Arc<Event>) -> u64 {
        let seq = self.next;
        self.next += 1;
        if self.events.len() == self.most {
            self.events.pop_front();
        }
        self.events.push_back(event);
        if self.is_heard() {
            self.told.send_replace(self.next);
        }
        seq
    }

    fn first(&self) -> u64 {
        self.next - self.events.len() as u64
    }
}

/// Where events come together.
#[derive(Debug)]
pub struct Hub {
    rings: Mutex<HashMap<Tenant, Ring>>,
    journal: OnceLock<Journal>,
}

impl Default for Hub {
    fn default() -> Self {
        let rings = HashMap::from([(Tenant::local(), Ring::new(ALL_KEPT))]);
        Self { rings: Mutex::new(rings), journal: OnceLock::new() }
    }
}

impl Hub {
    fn rings(&self) -> MutexGuard<'_, HashMap<Tenant, Ring>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells it to everybody whom it concerns. Never waits for any of them.
    pub fn tell(&self, event: Event) {
        let event = Arc::new(event);
        let mut rings = self.rings();
        if !event.tenant.is_local() {
            ring_of(&mut rings, &event.tenant).push(Arc::clone(&event));
        }
        let seq = ring_of(&mut rings, &Tenant::local()).push(Arc::clone(&event));
        drop(rings);
        if let Some(journal) = self.journal.get() {
            journal.event(Numbered { seq, event });
        }
    }

    /// From now on every event is also written down. Only the first journal counts.
    pub fn keep(&self, journal: Journal) -> bool {
        self.journal.set(journal).is_ok()
    }

    /// The journal, to be flushed at the end.
    pub fn journal(&self) -> Option<&Journal> {
        self.journal.get()
    }

    /// What a tenant may hear, from the event after number `since` on, or from now on.
    pub fn subscribe(self: &Arc<Self>, tenant: &Tenant, since: Option<u64>) -> Subscription {
        let mut rings = self.rings();
        let ring = ring_of(&mut rings, tenant);
        let told = ring.told.subscribe();
        // A number from the future is no place to wait for: others' clocks are not ours.
        let next = since.map_or(ring.next, |since| since.saturating_add(1).min(ring.next));
        drop(rings);
        Subscription { hub: Arc::clone(self), tenant: tenant.clone(), told, next, ready: VecDeque::new() }
    }
}

/// The ring of a tenant, made if it is new.
fn ring_of<'a>(rings: &'a mut HashMap<Tenant, Ring>, tenant: &Tenant) -> &'a mut Ring {
    if !rings.contains_key(tenant) && rings.len() > MAX_RINGS {
        let quiet = rings
            .iter()
            .filter(|(tenant, ring)| !tenant.is_local() && !ring.is_heard())
            .min_by_key(|(_, ring)| ring.events.back().map_or(0, |event| event.unix_ms))
            .map(|(tenant, _)| tenant.clone());
        if let Some(quiet) = quiet {
            rings.remove(&quiet);
        }
    }
    let most = if tenant.is_local() { ALL_KEPT } else { OWN_KEPT };
    rings.entry(tenant.clone()).or_insert_with(|| Ring::new(most))
}

/// One listener. Dropping it ends the listening.
#[derive(Debug)]
pub struct Subscription {
    hub: Arc<Hub>,
    tenant: Tenant,
    told: watch::Receiver<u64>,
    next: u64,
    ready: VecDeque<Heard>,
}

/// Events that are taken out of a ring at once: so long nobody can tell anything.
const TAKEN: usize = 64;

impl Subscription {
    /// The number after which it goes on: who gives it to [`Hub::subscribe`] misses nothing and hears nothing twice.
    pub fn since(&self) -> u64 {
        self.next.saturating_sub(1)
    }

    /// What comes next; waits for it. Can be dropped at any time without losing anything.
    pub async fn next(&mut self) -> Heard {
        loop {
            if let Some(heard) = self.ready.pop_front() {
                return heard;
            }
            self.told.mark_unchanged();
            self.take();
            if self.ready.is_empty() && self.told.changed().await.is_err() {
                // The hub is ours, so its rings outlive us; a ring with a listener is never dropped.
                std::future::pending::<()>().await;
            }
        }
    }

    fn take(&mut self) {
        let mut rings = self.hub.rings();
        let ring = ring_of(&mut rings, &self.tenant);
        let first = ring.first();
        if self.next < first {
            // Before the ring's own beginning were another one's numbers, and not one for each microsecond.
            let missed = (self.next >= ring.begun).then_some(first - self.next);
            self.ready.push_back(Heard::Gap { missed, seq: first - 1 });
            self.next = first;
        }
        let from = usize::try_from(self.next - first).unwrap_or(usize::MAX);
        for event in ring.events.iter().skip(from).take(TAKEN) {
            self.ready.push_back(Heard::Event(Numbered { seq: self.next, event: Arc::clone(event) }));
            self.next += 1;
        }
    }
}

impl Engine {
    /// Where events come together.
    pub fn events(&self) -> &Arc<Hub> {
        &self.events
    }

    /// Something happened that the engine does not see by itself.
    pub fn note(&self, event: Event) {
        self.events.tell(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::TokenId;

    fn tenant(letter: &str) -> Tenant {
        Tenant::token(&format!("tok_{}", letter.repeat(16)).parse::<TokenId>().unwrap())
    }

    fn event(number: u64) -> Event {
        Event { bytes: Some(number), ..Event::new(Kind::FileRead, &Tenant::local()) }
    }

    async fn number(subscription: &mut Subscription) -> u64 {
        match subscription.next().await {
            Heard::Event(numbered) => numbered.event.bytes.unwrap(),
            Heard::Gap { .. } => panic!("a gap"),
        }
    }

    #[tokio::test]
    async fn a_listener_hears_everything_in_order_and_can_come_back() {
        let hub = Arc::new(Hub::default());
        hub.tell(event(0));
        let mut live = hub.subscribe(&Tenant::local(), None);
        for i in 1..=200 {
            hub.tell(event(i));
        }
        let mut at = 0;
        for i in 1..=150 {
            let Heard::Event(numbered) = live.next().await else { panic!("a gap") };
            assert_eq!(numbered.event.bytes, Some(i));
            at = numbered.seq;
        }
        drop(live);
        let mut again = hub.subscribe(&Tenant::local(), Some(at));
        for i in 151..=200 {
            assert_eq!(number(&mut again).await, i);
        }
        let hub2 = Arc::clone(&hub);
        let telling = tokio::spawn(async move { hub2.tell(event(201)) });
        assert_eq!(number(&mut again).await, 201);
        telling.await.unwrap();
        // Waiting that was given up loses nothing.
        assert!(tokio::time::timeout(std::time::Duration::ZERO, again.next()).await.is_err());
        hub.tell(event(202));
        assert_eq!(number(&mut again).await, 202);
    }

    #[tokio::test]
    async fn who_is_too_slow_is_told_how_much_it_missed() {
        let hub = Arc::new(Hub::default());
        let mut slow = hub.subscribe(&Tenant::local(), None);
        for i in 0..(ALL_KEPT as u64 + 10) {
            hub.tell(event(i));
        }
        assert!(matches!(slow.next().await, Heard::Gap { missed: Some(10), .. }));
        assert_eq!(number(&mut slow).await, 10);
        // From before this process, and from a clock that is ahead.
        let mut old = hub.subscribe(&Tenant::local(), Some(7));
        assert!(matches!(old.next().await, Heard::Gap { .. }));
        assert_eq!(number(&mut old).await, 10);
        let mut future = hub.subscribe(&Tenant::local(), Some(u64::MAX));
        hub.tell(event(77));
        assert_eq!(number(&mut future).await, 77);
    }

    #[tokio::test]
    async fn a_token_hears_its_own_and_its_numbers_say_nothing_of_others() {
        let hub = Arc::new(Hub::default());
        let (a, b) = (tenant("a"), tenant("b"));
        let mut all = hub.subscribe(&Tenant::local(), None);
        let mut own = hub.subscribe(&a, None);
        let mut seqs = Vec::new();
        for i in 0..5 {
            hub.tell(Event { bytes: Some(i), ..Event::new(Kind::RunStarted, &a) });
            hub.tell(Event { bytes: Some(100 + i), ..Event::new(Kind::RunStarted, &b) });
            hub.tell(event(200 + i));
        }
        for i in 0..5 {
            let Heard::Event(numbered) = own.next().await else { panic!("a gap") };
            assert_eq!(numbered.event.bytes, Some(i));
            seqs.push(numbered.seq);
        }
        assert!(seqs.windows(2).all(|pair| pair[1] == pair[0] + 1));
        for _ in 0..15 {
            assert!(matches!(all.next().await, Heard::Event(_)));
        }
    }

    #[tokio::test]
    async fn rings_of_many_tokens_are_bounded_and_listeners_keep_theirs() {
        let hub = Arc::new(Hub::default());
        let mut own = hub.subscribe(&tenant("a"), None);
        for i in 0..500_u64 {
            let name = format!("tok_{i:0>16}");
            hub.tell(Event::new(Kind::RunStarted, &Tenant::stored(name)));
        }
        assert!(hub.rings().len() <= MAX_RINGS + 2);
        hub.tell(Event { bytes: Some(5), ..Event::new(Kind::RunStarted, &tenant("a")) });
        assert_eq!(number(&mut own).await, 5);
    }

    #[test]
    fn kinds_have_distinct_names() {
        let names: std::collections::BTreeSet<_> = Kind::ALL.iter().map(|kind| kind.as_str()).collect();
        assert_eq!(names.len(), Kind::ALL.len());
        assert!(Kind::ALL.iter().all(|kind| Kind::parse(kind.as_str()) == Some(*kind)));
        let text = serde_json::to_string(&Numbered { seq: 3, event: Arc::new(event(1)) }).unwrap();
        assert!(
            text.starts_with("{\"seq\":3,\"unix_ms\":") && text.contains("\"kind\":\"session.file.read\"")
        );
        assert!(!text.contains("null") && !text.contains("tenant"));
    }
}
