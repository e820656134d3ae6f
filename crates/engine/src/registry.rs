//! What is known of every sandbox, in SQLite: shared by all carrel processes of one state directory.

use std::{
    path::Path,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use carrel_backend::{IsolationLevel, Placed, Project};
use carrel_proto::{
    guest::EndReason,
    id::{Key, SandboxId},
    limits::Limits,
    problem::Problem,
};
use rusqlite::{Connection, OptionalExtension, Row, TransactionBehavior, params};
use serde::{Deserialize, Serialize};

/// Raised with every change of the tables; older ones are brought up to date on opening.
const SCHEMA: i64 = 1;
/// How long one process waits for another's write.
const BUSY: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    Creating,
    Running,
    /// The box is gone; its files are still there. With the reason `closed` it was asked to, else it died.
    Lost,
    Closing,
    /// Gone; remembered so that the next caller is told why.
    Ended,
}

impl State {
    fn as_str(self) -> &'static str {
        match self {
            State::Creating => "creating",
            State::Running => "running",
            State::Lost => "lost",
            State::Closing => "closing",
            State::Ended => "ended",
        }
    }
    fn parse(text: &str) -> Self {
        [State::Creating, State::Running, State::Lost, State::Closing]
            .into_iter()
            .find(|state| state.as_str() == text)
            .unwrap_or(State::Ended)
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
    /// Gone after its one call; the process that made it is its owner.
    pub ephemeral: Option<Owner>,
}

/// A process, told from a later one with the same number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub pid: u32,
    pub start_time: u64,
}

#[derive(Debug, Clone)]
pub struct Record {
    pub id: SandboxId,
    pub number: u32,
    pub key: Option<Key>,
    pub state: State,
    pub spec: Spec,
    pub placed: Option<Placed>,
    /// The boot of the host that `placed` belongs to.
    pub boot: String,
    pub reason: Option<EndReason>,
    pub created_unix_ms: u64,
    pub used_unix_ms: u64,
}

#[derive(Debug)]
pub struct Registry {
    connection: Mutex<Connection>,
}

pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn failed(error: rusqlite::Error) -> Problem {
    Problem::internal(format!("the registry: {error}"))
}

fn json<T: Serialize>(value: &T) -> Result<String, Problem> {
    serde_json::to_string(value).map_err(Problem::internal)
}

const COLUMNS: &str = "id, number, key, state, spec, placed, boot, reason, created_ms, used_ms";

fn record(row: &Row<'_>) -> rusqlite::Result<Record> {
    let bad = |error: String| rusqlite::Error::ToSqlConversionFailure(error.into());
    let text = |at: usize| row.get::<_, String>(at);
    let optional = |at: usize| row.get::<_, Option<String>>(at);
    let parse_error = |error: serde_json::Error| bad(error.to_string());
    Ok(Record {
        id: text(0)?.parse().map_err(|error: carrel_proto::id::BadName| bad(error.to_string()))?,
        number: row.get(1)?,
        key: optional(2)?
            .map(|key| key.parse())
            .transpose()
            .map_err(|error: carrel_proto::id::BadName| bad(error.to_string()))?,
        state: State::parse(&text(3)?),
        spec: serde_json::from_str(&text(4)?).map_err(parse_error)?,
        placed: optional(5)?.map(|text| serde_json::from_str(&text)).transpose().map_err(parse_error)?,
        boot: text(6)?,
        reason: optional(7)?.map(|text| serde_json::from_str(&text)).transpose().map_err(parse_error)?,
        created_unix_ms: row.get::<_, i64>(8)?.unsigned_abs(),
        used_unix_ms: row.get::<_, i64>(9)?.unsigned_abs(),
    })
}

impl Registry {
    pub fn open(path: &Path) -> Result<Self, Problem> {
        let mut connection = Connection::open(path).map_err(failed)?;
        connection.busy_timeout(BUSY).map_err(failed)?;
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;",
            )
            .map_err(failed)?;
        migrate(&mut connection)?;
        Ok(Self { connection: Mutex::new(connection) })
    }

    fn connection(&self) -> MutexGuard<'_, Connection> {
        // A panic while it was held cannot have left half a transaction: SQLite rolls it back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a sandbox in the making, unless its key is taken by one that lives or may live again.
    pub(crate) fn claim(
        &self,
        id: &SandboxId,
        key: Option<&Key>,
        spec: &Spec,
    ) -> Result<Option<Record>, Problem> {
        let mut connection = self.connection();
        let transaction =
            connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
        if let Some(key) = key {
            let taken: bool = transaction
                .query_row(
                    "SELECT EXISTS (SELECT 1 FROM sandboxes WHERE key = ?1 AND state != 'ended')",
                    [key.as_str()],
                    |row| row.get(0),
                )
                .map_err(failed)?;
            if taken {
                return Ok(None);
            }
            transaction.execute("DELETE FROM sandboxes WHERE key = ?1", [key.as_str()]).map_err(failed)?;
        }
        let spec = json(spec)?;
        let now = i64::try_from(now_ms()).unwrap_or(i64::MAX);
        transaction
            .prepare_cached(
                "INSERT INTO sandboxes (id, key, state, spec, boot, created_ms, used_ms) VALUES (?1, ?2, 'creating', ?3, ?4, ?5, ?5)",
            )
            .and_then(|mut statement| statement.execute(
                params![id.as_str(), key.map(Key::as_str), spec, boot_id(), now],
            ))
            .map_err(failed)?;
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE id = ?1");
        let made = transaction
            .prepare_cached(&sql)
            .and_then(|mut statement| statement.query_row([id.as_str()], record))
            .map_err(failed)?;
        transaction.commit().map_err(failed)?;
        Ok(Some(made))
    }

    pub fn by_key(&self, key: &Key) -> Result<Option<Record>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE key = ?1");
        self.connection().query_row(&sql, [key.as_str()], record).optional().map_err(failed)
    }

    pub fn by_id(&self, id: &SandboxId) -> Result<Option<Record>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM sandboxes WHERE id = ?1");
        self.connection().query_row(&sql, [id.as_str()], record).optional().map_err(failed)
    }

    /// All of them, oldest first.
    pub fn all(&self) -> Result<Vec<Record>, Problem> {
        let connection = self.connection();
        let mut statement = connection
            .prepare(&format!("SELECT {COLUMNS} FROM sandboxes ORDER BY number"))
            .map_err(failed)?;
        let rows = statement.query_map([], record).map_err(failed)?;
        rows.collect::<Result<_, _>>().map_err(failed)
    }

    pub(crate) fn set_state(
        &self,
        id: &SandboxId,
        state: State,
        reason: Option<EndReason>,
    ) -> Result<(), Problem> {
        let reason = reason.as_ref().map(json).transpose()?;
        self.connection()
            .execute(
                "UPDATE sandboxes SET state = ?2, reason = COALESCE(?3, reason) WHERE id = ?1",
                params![id.as_str(), state.as_str(), reason],
            )
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn set_placed(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
        let placed = json(placed)?;
        self.connection()
            .prepare_cached(
                "UPDATE sandboxes SET state = 'running', placed = ?2, boot = ?3, reason = NULL WHERE id = ?1",
            )
            .and_then(|mut statement| statement.execute(params![id.as_str(), placed, boot_id()]))
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn touch(&self, id: &SandboxId) -> Result<(), Problem> {
        let now = i64::try_from(now_ms()).unwrap_or(i64::MAX);
        self.connection()
            .execute("UPDATE sandboxes SET used_ms = ?2 WHERE id = ?1", params![id.as_str(), now])
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn remove(&self, id: &SandboxId) -> Result<(), Problem> {
        self.connection().execute("DELETE FROM sandboxes WHERE id = ?1", [id.as_str()]).map_err(failed)?;
        Ok(())
    }
}

fn migrate(connection: &mut Connection) -> Result<(), Problem> {
    let version =
        |connection: &Connection| connection.query_row("PRAGMA user_version", [], |row| row.get::<_, i64>(0));
    let found = version(connection).map_err(failed)?;
    if found == SCHEMA {
        return Ok(());
    }
    if found > SCHEMA {
        return Err(Problem::internal(format!(
            "the registry was written by a newer carrel (schema {found})"
        ))
        .hint("use that version, or another CARREL_STATE"));
    }
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    // Another process may have been first.
    if version(&transaction).map_err(failed)? < SCHEMA {
        transaction
            .execute_batch(
                "CREATE TABLE sandboxes (
                    number     INTEGER PRIMARY KEY AUTOINCREMENT,
                    id         TEXT NOT NULL UNIQUE,
                    key        TEXT UNIQUE,
                    state      TEXT NOT NULL,
                    spec       TEXT NOT NULL,
                    placed     TEXT,
                    boot       TEXT NOT NULL,
                    reason     TEXT,
                    created_ms INTEGER NOT NULL,
                    used_ms    INTEGER NOT NULL
                ) STRICT;
                CREATE INDEX sandboxes_by_state ON sandboxes (state);
                PRAGMA user_version = 1;",
            )
            .map_err(failed)?;
    }
    transaction.commit().map_err(failed)
}

/// Changes with every start of the host; empty where the kernel does not say.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

impl Owner {
    /// This process.
    pub(crate) fn me() -> Self {
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
