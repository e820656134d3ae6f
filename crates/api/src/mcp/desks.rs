//! What a server knows of the sandboxes it has used, so that a warm call costs of the registry one look: whether the sandbox
//! sleeps.
//!
//! That may be stale: the sandbox may have ended, or have been closed by another process. The first call in it then fails before
//! it has begun, and [`Desks::forget`] makes the next one go the whole way.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use carrel_engine::{Engine, Note, Record, Wish};
use carrel_proto::{
    guest::Language,
    id::{Key, SessionName},
    problem::Problem,
};

use super::scope::Place;

/// A sandbox is looked up again after this long, which also tells the registry that it is in use.
const FRESH: Duration = Duration::from_secs(30);
/// Sandboxes remembered.
const MOST_DESKS: usize = 256;

#[derive(Debug, Default)]
pub(super) struct Desks {
    desks: Mutex<HashMap<Key, Desk>>,
}

#[derive(Debug)]
struct Desk {
    record: Arc<Record>,
    /// Environments asked for before, and what they speak here.
    languages: HashMap<Option<String>, Language>,
    sessions: HashSet<SessionName>,
    looked_up: Instant,
}

/// The sandbox that a call means.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) record: Arc<Record>,
    pub(super) language: Language,
    pub(super) note: Option<Note>,
    /// This server has not used the sandbox before, and did not make it.
    pub(super) found: bool,
    /// Known from an earlier call, and not looked up again.
    pub(super) kept: bool,
}

impl Desks {
    fn desks(&self) -> MutexGuard<'_, HashMap<Key, Desk>> {
        // Nothing that could panic happens while it is held.
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn take(&self, engine: &Engine, place: &Place, wish: &Wish) -> Result<Seat, Problem> {
        match self.kept(place, wish) {
            Some(seat) => Ok(seat),
            None => self.look_up(engine, place, wish).await,
        }
    }

    fn kept(&self, place: &Place, wish: &Wish) -> Option<Seat> {
        let mut desks = self.desks();
        let desk = desks.get_mut(&place.key)?;
        let language = *desk.languages.get(&wish.environment)?;
        if !desk.sessions.contains(&place.session) || desk.looked_up.elapsed() > FRESH {
            return None;
        }
        let record = Arc::clone(&desk.record);
        Some(Seat { record, language, note: None, found: false, kept: true })
    }

    async fn look_up(&self, engine: &Engine, place: &Place, wish: &Wish) -> Result<Seat, Problem> {
        let found = engine.sandbox(&place.key, wish).await?;
        let record = Arc::new(found.record);
        let language =
            engine.environments().language(&record.spec.environment, wish.environment.as_deref())?;
        engine.ensure_session(&record, &place.session).await?;
        let known = self.remember(place, wish, &record, language);
        let newly = !found.created && !known;
        Ok(Seat { record, language, note: found.note, found: newly, kept: false })
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

    /// Whatever was known of the sandbox is not true any more.
    pub(super) fn forget(&self, key: &Key) {
        self.desks().remove(key);
    }
}
