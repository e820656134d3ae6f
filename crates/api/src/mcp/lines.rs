//! Lines to agents that are kept open between calls, so that a warm call costs no connection, and of the registry one look:
//! whether the sandbox sleeps.
//!
//! A kept line may be stale: its sandbox may have ended, or have been closed by another process. The first call on it then
//! fails before it has begun, and [`Lines::forget`] makes the next one go the whole way.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use carrel_engine::{Engine, Note, Record, Wish, call::AgentLink};
use carrel_proto::{
    guest::Language,
    id::{Key, SessionName},
    problem::Problem,
};

use super::scope::Place;

/// A sandbox is looked up again after this long, which also tells the registry that it is in use.
const FRESH: Duration = Duration::from_secs(30);
/// Lines kept per sandbox: more calls at once than that are rare.
const MOST_IDLE: usize = 4;
/// Sandboxes remembered.
const MOST_DESKS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Lines {
    desks: Mutex<HashMap<Key, Desk>>,
}

#[derive(Debug)]
struct Desk {
    record: Arc<Record>,
    /// Environments asked for before, and what they speak here.
    languages: HashMap<Option<String>, Language>,
    sessions: HashSet<SessionName>,
    idle: Vec<AgentLink>,
    looked_up: Instant,
}

/// A line to the agent of the sandbox that a call means.
#[derive(Debug)]
pub(super) struct Line {
    pub(super) record: Arc<Record>,
    pub(super) language: Language,
    pub(super) link: AgentLink,
    pub(super) note: Option<Note>,
    /// This server has not used the sandbox before, and did not make it.
    pub(super) found: bool,
    /// Kept from an earlier call.
    pub(super) kept: bool,
}

impl Lines {
    fn desks(&self) -> MutexGuard<'_, HashMap<Key, Desk>> {
        // Nothing that could panic happens while it is held.
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn take(&self, engine: &Engine, place: &Place, wish: &Wish) -> Result<Line, Problem> {
        match self.kept(place, wish) {
            Some(line) => Ok(line),
            None => self.look_up(engine, place, wish).await,
        }
    }

    fn kept(&self, place: &Place, wish: &Wish) -> Option<Line> {
        let mut desks = self.desks();
        let desk = desks.get_mut(&place.key)?;
        let language = *desk.languages.get(&wish.environment)?;
        if !desk.sessions.contains(&place.session) || desk.looked_up.elapsed() > FRESH {
            return None;
        }
        let link = desk.idle.pop()?;
        let record = Arc::clone(&desk.record);
        Some(Line { record, language, link, note: None, found: false, kept: true })
    }

    async fn look_up(&self, engine: &Engine, place: &Place, wish: &Wish) -> Result<Line, Problem> {
        let found = engine.sandbox(&place.key, wish).await?;
        let record = Arc::new(found.record);
        let language =
            engine.environments().language(&record.spec.environment, wish.environment.as_deref())?;
        engine.ensure_session(&record, &place.session).await?;
        let link = engine.connect(&record).await?;
        let known = self.remember(place, wish, &record, language);
        let newly = !found.created && !known;
        Ok(Line { record, language, link, note: found.note, found: newly, kept: false })
    }

    /// Says whether the sandbox was known.
    fn remember(&self, place: &Place, wish: &Wish, record: &Arc<Record>, language: Language) -> bool {
        let mut desks = self.desks();
        let known = desks.get(&place.key).is_some_and(|desk| desk.record.id == record.id);
        if !known {
            if desks.len() >= MOST_DESKS {
                let oldest = desks.iter().min_by_key(|(_, desk)| desk.looked_up).map(|(key, _)| key.clone());
                oldest.and_then(|key| desks.remove(&key));
            }
            let desk = Desk {
                record: Arc::clone(record),
                languages: HashMap::new(),
                sessions: HashSet::from([SessionName::main()]),
                idle: Vec::new(),
                looked_up: Instant::now(),
            };
            desks.insert(place.key.clone(), desk);
        }
        if let Some(desk) = desks.get_mut(&place.key) {
            desk.record = Arc::clone(record);
            desk.looked_up = Instant::now();
            desk.languages.insert(wish.environment.clone(), language);
            desk.sessions.insert(place.session.clone());
        }
        known
    }

    /// Takes a line back after its call has ended.
    pub(super) fn give_back(&self, key: &Key, record: &Record, link: AgentLink) {
        let mut desks = self.desks();
        if let Some(desk) = desks.get_mut(key)
            && desk.record.id == record.id
            && desk.idle.len() < MOST_IDLE
        {
            desk.idle.push(link);
        }
    }

    /// Whatever was known of the sandbox is not true any more.
    pub(super) fn forget(&self, key: &Key) {
        self.desks().remove(key);
    }
}
