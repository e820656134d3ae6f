//! Puts idle sandboxes to sleep: the part of a daemon that looks after those nobody looks after.
//!
//! A sandbox is idle when no run or exec is under way in it, nobody reads or waits, and the last request was long enough ago. An
//! interpreter's own threads do not count: what shall go on without a caller is started as an exec. One that a caller has in
//! hand has its lock held, or is found to be busy; both are met again at the next round. What sleeps on disk for long is packed
//! ([`crate::packing`]).

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use carrel_backend::link::AgentLink;
use carrel_proto::{
    id::SandboxId,
    message::{Event, Request, Usage},
    problem::{Code, Problem},
};
use tokio::time::timeout;

use crate::{
    Engine, Record, State,
    lock::Lock,
    packing::{PACK_AFTER, Packer},
    registry::now_ms,
};

/// How often a round is due.
pub const ROUND: Duration = Duration::from_secs(3);
/// A busy sandbox is asked again after this long at the latest.
const BUSY: Duration = Duration::from_secs(30);
/// One that cannot be put to sleep is tried again.
const REFUSED: Duration = Duration::from_secs(600);
const ANSWER: Duration = Duration::from_secs(2);

/// What one keeper remembers between its rounds: when a sandbox is worth another look, and what is packed.
#[derive(Debug)]
pub struct Keeper {
    later: HashMap<SandboxId, Instant>,
    packer: Packer,
}

impl Default for Keeper {
    fn default() -> Self {
        Self::new(Some(PACK_AFTER))
    }
}

/// What came of a try.
enum Tried {
    Asleep,
    NotBefore(Duration),
}

impl Keeper {
    /// One that packs images which are older than this; `None`: none.
    pub fn new(pack_after: Option<Duration>) -> Self {
        Self { later: HashMap::new(), packer: Packer::new(pack_after) }
    }

    /// Looks at every sandbox once. Errors of one do not stop the others; the first is returned.
    pub async fn round(&mut self, engine: &Engine) -> Result<(), Problem> {
        let now = Instant::now();
        self.later.retain(|_, again| *again > now);
        let mut first = Ok(());
        let mut number = 0;
        while let Some(records) = engine.registry.drowsy(number)? {
            for record in records {
                number = record.number;
                if self.later.contains_key(&record.id) || record.spec.ephemeral.is_some() {
                    continue;
                }
                let id = record.id.clone();
                let tried = match record.state {
                    State::Running => engine.doze_off(record).await,
                    _ => engine.sleep_deeper(record).await,
                };
                let again = match tried {
                    Ok(Tried::Asleep) => continue,
                    Ok(Tried::NotBefore(time)) => time,
                    Err(problem) => {
                        // What this host or this sandbox cannot do is no fault.
                        let usual = [Code::Unsupported, Code::Conflict, Code::Busy, Code::AgentLost];
                        if !usual.contains(&problem.code) {
                            first = first.and(Err(problem));
                        }
                        REFUSED
                    }
                };
                self.later.insert(id, Instant::now() + again);
            }
        }
        first.and(self.packer.round(engine))
    }
}

/// How much is left of a time that began at `since`; `None`: it is over.
fn left(since_unix_ms: u64, seconds: u64) -> Option<Duration> {
    let until = since_unix_ms.saturating_add(seconds.saturating_mul(1000));
    Some(Duration::from_millis(until.saturating_sub(now_ms()))).filter(|left| !left.is_zero())
}

impl Engine {
    async fn doze_off(&self, record: Record) -> Result<Tried, Problem> {
        let after = record.spec.standby_after_s;
        if after == 0 {
            return Ok(Tried::NotBefore(BUSY));
        }
        if let Some(left) = left(record.used_unix_ms, after) {
            return Ok(Tried::NotBefore(left.min(BUSY)));
        }
        if !self.is_alive(&record) {
            // For the sweep.
            return Ok(Tried::NotBefore(BUSY));
        }
        // First without a word to anybody: most are found busy again and again.
        let usage = self.glance(&record.id).await?;
        let wanted = Duration::from_secs(after);
        if usage.running > 0 {
            return Ok(Tried::NotBefore(BUSY.min(wanted)));
        }
        if let Some(left) =
            wanted.checked_sub(Duration::from_millis(usage.idle_ms)).filter(|left| !left.is_zero())
        {
            return Ok(Tried::NotBefore(left.min(BUSY)));
        }
        let Some((record, lock)) = self.in_hand(&record, State::Running).await? else {
            return Ok(Tried::NotBefore(ROUND));
        };
        match self.freeze(record, lock, Some(wanted)).await? {
            Some(_) => Ok(Tried::Asleep),
            None => Ok(Tried::NotBefore(BUSY.min(wanted))),
        }
    }

    async fn sleep_deeper(&self, record: Record) -> Result<Tried, Problem> {
        let after = record.spec.hibernate_after_s;
        if after == 0 || record.sleep.standby_reason.is_some() {
            return Ok(Tried::NotBefore(BUSY));
        }
        if let Some(left) = left(record.used_unix_ms, after) {
            return Ok(Tried::NotBefore(left.min(BUSY)));
        }
        // The sweep sees to one that died.
        if !self.is_alive(&record) {
            return Ok(Tried::NotBefore(BUSY));
        }
        if let Err(problem) = self.blocking(|engine| engine.can_hibernate()).await {
            let id = record.id.clone();
            self.blocking(move |engine| engine.registry.set_standby_reason(&id, &problem.message)).await?;
            return Ok(Tried::NotBefore(REFUSED));
        }
        let Some((record, lock)) = self.in_hand(&record, State::Standby).await? else {
            return Ok(Tried::NotBefore(ROUND));
        };
        self.write_out(record, lock, false).await.map(|_| Tried::Asleep)
    }

    /// The sandbox with its lock, unless somebody else has it or it is in another state by now.
    async fn in_hand(&self, record: &Record, state: State) -> Result<Option<(Record, Lock)>, Problem> {
        let id = record.id.clone();
        self.blocking(move |engine| {
            let lock = Lock::try_take(&engine.settings.state, &id).map_err(Problem::internal)?;
            let Some(lock) = lock else { return Ok(None) };
            match engine.registry.by_id(&id)? {
                None => {
                    lock.discard();
                    Ok(None)
                }
                Some(record) => Ok((record.state == state).then_some((record, lock))),
            }
        })
        .await
    }

    /// What an agent says of itself, without waking or ending anything.
    async fn glance(&self, id: &SandboxId) -> Result<Usage, Problem> {
        let asking = async {
            let mut link = AgentLink::connect(&self.backend.socket(&self.directory(id))).await?;
            match link.ask(&Request::Usage).await? {
                Event::Usage(usage) => Ok(usage),
                _ => Err(Problem::new(Code::Protocol, "the agent did not say what it uses")),
            }
        };
        let late = || Problem::new(Code::AgentLost, "the sandbox's agent does not answer");
        timeout(ANSWER, asking).await.map_err(|_| late())?
    }
}
