//! What is known of every sandbox, in SQLite: shared by all carrel processes of one state directory.
//!
//! Reads never wait for writes: while one thread writes on the first connection, others read on a second one (WAL). What
//! must not be exceeded or come twice (keys, quotas, closed scopes) is checked in the transaction that adds the row.

pub(crate) mod imports;
mod list;
mod ready;
mod schema;
mod scopes;
mod sleep;
pub(crate) mod snapshots;

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError, TryLockError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use carrel_backend::{IsolationLevel, Placed, Project, host::Whereabouts};
use carrel_proto::{
    guest::EndReason,
    id::{Key, SandboxId, SnapshotId},
    limits::Limits,
    problem::Problem,
};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, TransactionBehavior, params};
use serde::{Deserialize, Serialize};

pub use self::list::{Cursor, ListFilter, MAX_PAGE, Page};
pub use self::sleep::{Image, Sleep};
use crate::{
    quota::{self, Quota},
    tenant::{Labels, Tenant},
};

/// How long one process waits for another's write.
const BUSY: Duration = Duration::from_secs(10);
/// Between two tries to be the first.
const WAL_PAUSE: Duration = Duration::from_millis(2);
/// When a sandbox was used is known to this many milliseconds: writing it down at every call would be most of what a warm
/// call writes.
const TOUCH_MS: u64 = 5_000;
/// Statements that stay prepared: about as many as there are in this crate.
const STATEMENTS: usize = 64;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Creating,
    Running,
    /// Frozen: every process stands still and keeps its memory. See [`crate::sleep`].
    Standby,
    /// Written to disk: there is no process, and no memory is held.
    Hibernated,
    /// The box is gone; its files are still there. With the reason `closed` it was asked to, else it died.
    Lost,
    Closing,
    /// Gone; remembered so that the next caller is told why.
    Ended,
}

impl State {
    pub fn as_str(self) -> &'static str {
        match self {
            State::Creating => "creating",
            State::Running => "running",
            State::Standby => "standby",
            State::Hibernated => "hibernated",
            State::Lost => "lost",
            State::Closing => "closing",
            State::Ended => "ended",
        }
    }
    fn parse(text: &str) -> Self {
        Self::LISTED.into_iter().find(|state| state.as_str() == text).unwrap_or(State::Ended)
    }

    /// Every state that a caller can find a sandbox in.
    pub const LISTED: [State; 6] =
        [State::Creating, State::Running, State::Standby, State::Hibernated, State::Lost, State::Closing];

    /// Whether it sleeps: whoever wants something of it wakes it first.
    pub fn is_asleep(self) -> bool {
        matches!(self, State::Standby | State::Hibernated)
    }
}

/// What was asked for when the sandbox was made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    pub environment: String,
    pub limits: Limits,
    pub isolation: IsolationLevel,
    pub project: Option<Project>,
    pub idle_timeout_s: u64,
    pub max_lifetime_s: u64,
    /// Put into standby by a daemon when nobody has wanted anything for so long; 0: never.
    #[serde(default = "standby_after_s")]
    pub standby_after_s: u64,
    /// And hibernated.
    #[serde(default = "hibernate_after_s")]
    pub hibernate_after_s: u64,
    /// How many calls can be taken back. Rows of before say nothing.
    #[serde(default)]
    pub undo_calls: u32,
    /// Whose interpreters its preset has. None in rows of before: those of whoever asks.
    #[serde(default)]
    pub whereabouts: Option<Whereabouts>,
    /// Gone after its one call; the process that made it is its owner.
    pub ephemeral: Option<Owner>,
}

/// Of a sandbox whose maker said nothing of it.
pub const STANDBY_AFTER_S: u64 = 5 * 60;
pub const HIBERNATE_AFTER_S: u64 = 30 * 60;

fn standby_after_s() -> u64 {
    STANDBY_AFTER_S
}

fn hibernate_after_s() -> u64 {
    HIBERNATE_AFTER_S
}

/// A process, told from a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub pid: u32,
    pub start_time: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    pub id: SandboxId,
    pub number: u32,
    pub tenant: Tenant,
    pub key: Option<Key>,
    pub state: State,
    pub spec: Spec,
    pub labels: Labels,
    pub placed: Option<Placed>,
    /// The boot of the host that `placed` belongs to.
    pub boot: String,
    pub reason: Option<EndReason>,
    pub created_unix_ms: u64,
    /// To a few seconds.
    pub used_unix_ms: u64,
    /// It is closed then, whatever it is doing: its scope has been closed with a retention time.
    pub close_at_unix_ms: Option<u64>,
    /// Of one that sleeps, or is being put to sleep.
    #[serde(default)]
    pub sleep: Sleep,
    /// The snapshot that it was restored from, or that was taken of it last.
    #[serde(default)]
    pub origin: Option<SnapshotId>,
    /// The sandbox that it is a fork of.
    #[serde(default)]
    pub forked_from: Option<SandboxId>,
}

/// A sandbox that shall be made.
#[derive(Debug, Clone)]
pub(crate) struct Claim {
    pub(crate) id: SandboxId,
    pub(crate) tenant: Tenant,
    pub(crate) key: Option<Key>,
    pub(crate) spec: Spec,
    pub(crate) labels: Labels,
    pub(crate) quota: Option<Quota>,
    pub(crate) origin: Option<SnapshotId>,
    pub(crate) forked_from: Option<SandboxId>,
}

#[derive(Debug)]
pub struct Registry {
    path: PathBuf,
    connection: Mutex<Connection>,
    /// For readers who would have to wait for the first; most processes never open it.
    second: Mutex<Option<Connection>>,
}

pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// SQLite has no unsigned numbers.
pub(crate) fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

pub(crate) fn failed(error: rusqlite::Error) -> Problem {
    Problem::internal(format!("the registry: {error}"))
}

pub(crate) fn json<T: Serialize>(value: &T) -> Result<String, Problem> {
    serde_json::to_string(value).map_err(Problem::internal)
}

const COLUMNS: &str = "id, number, tenant, key, state, spec, labels, placed, boot, reason, created_ms, used_ms, close_at_ms, \
     image, image_made_ms, image_bytes, standby_reason, usage, origin, forked_from";

fn record(row: &Row<'_>) -> rusqlite::Result<Record> {
    let bad = |error: String| rusqlite::Error::ToSqlConversionFailure(error.into());
    let text = |at: usize| row.get::<_, String>(at);
    let optional = |at: usize| row.get::<_, Option<String>>(at);
    let parse_error = |error: serde_json::Error| bad(error.to_string());
    Ok(Record {
        id: text(0)?.parse().map_err(|error: carrel_proto::id::BadName| bad(error.to_string()))?,
        number: row.get(1)?,
        tenant: Tenant::stored(text(2)?),
        key: optional(3)?
            .map(|key| key.parse())
            .transpose()
            .map_err(|error: carrel_proto::id::BadName| bad(error.to_string()))?,
        state: State::parse(&text(4)?),
        spec: serde_json::from_str(&text(5)?).map_err(parse_error)?,
        labels: serde_json::from_str(&text(6)?).map_err(parse_error)?,
        placed: optional(7)?.map(|text| serde_json::from_str(&text)).transpose().map_err(parse_error)?,
        boot: text(8)?,
        reason: optional(9)?.map(|text| serde_json::from_str(&text)).transpose().map_err(parse_error)?,
        created_unix_ms: row.get::<_, i64>(10)?.unsigned_abs(),
        used_unix_ms: row.get::<_, i64>(11)?.unsigned_abs(),
        close_at_unix_ms: row.get::<_, Option<i64>>(12)?.map(i64::unsigned_abs),
        sleep: Sleep::read(row, 13)?,
        // Only shown and followed: one that is no name leads nowhere.
        origin: optional(18)?.and_then(|id| id.parse().ok()),
        forked_from: optional(19)?.and_then(|id| id.parse().ok()),
    })
}

/// A connection of this process; `Deref` because there are two places it can come from.
pub(crate) enum Reading<'a> {
    First(MutexGuard<'a, Connection>),
    Second(MutexGuard<'a, Option<Connection>>, &'a Path),
}

impl Reading<'_> {
    fn with<T>(mut self, work: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T, Problem> {
        match &mut self {
            Reading::First(connection) => work(connection).map_err(failed),
            Reading::Second(slot, path) => {
                let connection = match slot.take() {
                    Some(connection) => connection,
                    None => connect(path)?,
                };
                let result = work(&connection).map_err(failed);
                **slot = Some(connection);
                result
            }
        }
    }
}

/// Several processes may be the first at once. Alone among statements this one does not wait for the others by itself.
fn use_wal(connection: &Connection) -> rusqlite::Result<()> {
    let deadline = Instant::now() + BUSY;
    loop {
        let busy = match connection.execute_batch("PRAGMA journal_mode = WAL;") {
            Err(error) if error.sqlite_error_code() == Some(rusqlite::ErrorCode::DatabaseBusy) => error,
            other => return other,
        };
        if Instant::now() > deadline {
            return Err(busy);
        }
        std::thread::sleep(WAL_PAUSE);
    }
}

fn connect(path: &Path) -> Result<Connection, Problem> {
    let connection = Connection::open(path).map_err(failed)?;
    connection.busy_timeout(BUSY).map_err(failed)?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS);
    use_wal(&connection).map_err(failed)?;
    connection.execute_batch("PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;").map_err(failed)?;
    Ok(connection)
}

impl Registry {
    pub fn open(path: &Path) -> Result<Self, Problem> {
        let mut connection = connect(path)?;
        schema::migrate(&mut connection)?;
        Ok(Self { path: path.to_path_buf(), connection: Mutex::new(connection), second: Mutex::default() })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic while it was held cannot have left half a transaction: SQLite rolls it back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads; not held up by a write of another thread, which may be waiting for another process's.
    pub(crate) fn read<T>(
        &self,
        work: impl FnOnce(&Connection) -> rusqlite::Result<T>,
    ) -> Result<T, Problem> {
        let reading = match self.connection.try_lock() {
            Ok(connection) => Reading::First(connection),
            Err(TryLockError::Poisoned(poisoned)) => Reading::First(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Reading::Second(self.second.lock().unwrap_or_else(PoisonError::into_inner), &self.path)
            }
        };
        reading.with(work)
    }

    /// Writes, in a transaction that nobody else's write can come into. May wait: not for an async task.
    pub(crate) fn write<T>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, Problem>,
    ) -> Result<T, Problem> {
        let mut connection = self.connection();
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        let result = work(&transaction)?;
        transaction.commit().map_err(failed)?;
        Ok(result)
    }

    /// Adds a sandbox in the making, unless its key is taken by one that lives or may live again.
    pub(crate) fn claim(&self, claim: &Claim) -> Result<Option<Record>, Problem> {
        self.claim_with(claim, None)
    }

    /// The same; it may have a [number](Self::reserve_number) already.
    pub(crate) fn claim_with(&self, claim: &Claim, number: Option<u32>) -> Result<Option<Record>, Problem> {
        self.write(|transaction| {
            let now = now_ms();
            let Some(close_at) = admit(transaction, claim, now)? else { return Ok(None) };
            insert(transaction, claim, now, close_at, number, None)?;
            one(transaction, &claim.id).map_err(failed)
        })
    }

    pub fn by_key(&self, tenant: &Tenant, key: &Key) -> Result<Option<Record>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE tenant = ?1 AND key = ?2");
        self.read(|connection| {
            connection.prepare_cached(&sql)?.query_row([tenant.as_str(), key.as_str()], record).optional()
        })
    }

    pub fn by_id(&self, id: &SandboxId) -> Result<Option<Record>, Problem> {
        self.read(|connection| one(connection, id))
    }

    /// As [`Self::by_id`], for a tenant. What is not the tenant's own is not even read, so that it takes as long as what
    /// is not there.
    pub fn by_id_of(&self, tenant: &Tenant, id: &SandboxId) -> Result<Option<Record>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE id = ?1 AND (?2 = '' OR tenant = ?2)");
        self.read(|connection| {
            connection.prepare_cached(&sql)?.query_row([id.as_str(), tenant.as_str()], record).optional()
        })
    }

    /// All of them, oldest first.
    pub fn all(&self) -> Result<Vec<Record>, Problem> {
        let mut all = Vec::new();
        while let Some(more) = self.after(all.last().map_or(0, |record: &Record| record.number))? {
            all.extend(more);
        }
        Ok(all)
    }

    pub(crate) fn set_state(
        &self,
        id: &SandboxId,
        state: State,
        reason: Option<EndReason>,
    ) -> Result<(), Problem> {
        let reason = reason.as_ref().map(json).transpose()?;
        self.connection()
            .prepare_cached("UPDATE sandboxes SET state = ?2, reason = COALESCE(?3, reason) WHERE id = ?1")
            .and_then(|mut statement| statement.execute(params![id.as_str(), state.as_str(), reason]))
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn set_placed(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
        place(&self.connection(), id, placed)
    }

    /// All of them or none.
    pub(crate) fn set_all_placed(&self, all: &[(&SandboxId, &Placed)]) -> Result<(), Problem> {
        self.write(|transaction| all.iter().try_for_each(|(id, placed)| place(transaction, id, placed)))
    }

    /// Changes what was asked for. The quota is checked as for a new one.
    pub(crate) fn set_spec(
        &self,
        tenant: &Tenant,
        id: &SandboxId,
        spec: &Spec,
        labels: &Labels,
        quota: Option<&Quota>,
    ) -> Result<(), Problem> {
        let (spec_text, labels) = (json(spec)?, json(labels)?);
        self.write(|transaction| {
            if let Some(quota) = quota {
                quota::check(transaction, tenant, quota, &spec.limits, Some(id))?;
            }
            transaction
                .execute(
                    "UPDATE sandboxes SET spec = ?2, labels = ?3 WHERE id = ?1",
                    params![id.as_str(), spec_text, labels],
                )
                .map_err(failed)?;
            Ok(())
        })
    }

    /// Whether [`Self::touch`] would write.
    pub(crate) fn is_stale(record: &Record) -> bool {
        now_ms().abs_diff(record.used_unix_ms) >= TOUCH_MS
    }

    pub(crate) fn touch(&self, id: &SandboxId) -> Result<(), Problem> {
        self.connection()
            .prepare_cached("UPDATE sandboxes SET used_ms = ?2 WHERE id = ?1")
            .and_then(|mut statement| statement.execute(params![id.as_str(), signed(now_ms())]))
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn remove(&self, id: &SandboxId) -> Result<(), Problem> {
        self.connection()
            .prepare_cached("DELETE FROM sandboxes WHERE id = ?1")
            .and_then(|mut statement| statement.execute([id.as_str()]))
            .map_err(failed)?;
        Ok(())
    }
}

/// Whether a new sandbox may be added; when it is to be closed, if its scope will be. `None`: its key is taken.
fn admit(transaction: &Transaction<'_>, claim: &Claim, now: u64) -> Result<Option<Option<u64>>, Problem> {
    let tenant = claim.tenant.as_str();
    let mut close_at = None;
    if let Some(key) = &claim.key {
        let found = transaction
            .prepare_cached("SELECT state != 'ended' FROM sandboxes WHERE tenant = ?1 AND key = ?2")
            .and_then(|mut statement| {
                statement.query_row([tenant, key.as_str()], |row| row.get::<_, bool>(0)).optional()
            })
            .map_err(failed)?;
        if found == Some(true) {
            return Ok(None);
        }
        close_at = scopes::check_open(transaction, &claim.tenant, key, now)?;
        if found.is_some() {
            transaction
                .execute("DELETE FROM sandboxes WHERE tenant = ?1 AND key = ?2", [tenant, key.as_str()])
                .map_err(failed)?;
        }
    }
    if let Some(quota) = &claim.quota {
        quota::check(transaction, &claim.tenant, quota, &claim.spec.limits, None)?;
    }
    Ok(Some(close_at))
}

/// Adds the row of a sandbox: in the making, or with what is placed if it has been made. It gets a number unless it has one.
fn insert(
    transaction: &Transaction<'_>,
    claim: &Claim,
    now: u64,
    close_at: Option<u64>,
    number: Option<u32>,
    placed: Option<&str>,
) -> Result<(), Problem> {
    let (spec, labels) = (json(&claim.spec)?, json(&claim.labels)?);
    let state = if placed.is_some() { State::Running } else { State::Creating };
    transaction
        .prepare_cached(
            "INSERT INTO sandboxes (id, tenant, key, state, spec, labels, boot, created_ms, used_ms, close_at_ms,
             origin, forked_from, number, placed)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?8, ?9, ?10, ?11, ?12, ?13)",
        )
        .and_then(|mut statement| {
            statement.execute(params![
                claim.id.as_str(),
                claim.tenant.as_str(),
                claim.key.as_ref().map(Key::as_str),
                state.as_str(),
                spec,
                labels,
                boot_id(),
                signed(now),
                close_at.map(signed),
                claim.origin.as_ref().map(SnapshotId::as_str),
                claim.forked_from.as_ref().map(SandboxId::as_str),
                number,
                placed,
            ])
        })
        .map_err(failed)?;
    Ok(())
}

fn place(connection: &Connection, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
    let placed = json(placed)?;
    connection
        .prepare_cached(
            "UPDATE sandboxes SET state = 'running', placed = ?2, boot = ?3, reason = NULL, image = NULL,
             image_made_ms = NULL, image_bytes = NULL, standby_reason = NULL, usage = NULL WHERE id = ?1",
        )
        .and_then(|mut statement| statement.execute(params![id.as_str(), placed, boot_id()]))
        .map_err(failed)?;
    Ok(())
}

fn one(connection: &Connection, id: &SandboxId) -> rusqlite::Result<Option<Record>> {
    let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE id = ?1");
    connection.prepare_cached(&sql)?.query_row([id.as_str()], record).optional()
}

/// Changes with every start of the host; empty where the kernel does not say.
pub(crate) fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|text| text.trim().to_owned())
            .unwrap_or_default()
    })
}

impl Owner {
    /// This process.
    pub fn me() -> Self {
        let pid = std::process::id();
        Self { pid, start_time: start_time(pid).unwrap_or(0) }
    }

    pub(crate) fn is_alive(self) -> bool {
        start_time(self.pid) == Some(self.start_time)
    }
}

fn start_time(pid: u32) -> Option<u64> {
    carrel_jail::tree::start_time(i32::try_from(pid).ok()?)
}

#[cfg(test)]
pub(crate) mod tests;
