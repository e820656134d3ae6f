//! What is written down of a sandbox that sleeps.

use carrel_proto::{id::SandboxId, message::Usage, problem::Problem};
use rusqlite::{Row, params};
use serde::{Deserialize, Serialize};

use super::{COLUMNS, Record, Registry, State, failed, json, now_ms, record, signed};

/// Rows that are read at once.
const CHUNK: u32 = 100;

/// All of it is empty while a sandbox runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sleep {
    /// Of a hibernated one; of one in standby, what it is being written to.
    pub image: Option<Image>,
    /// Why it stays in standby though it is idle for long enough to be hibernated.
    pub standby_reason: Option<String>,
    /// What it used when it fell asleep.
    pub usage: Option<Usage>,
}

/// A box on disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Of its directory in the sandbox's own.
    pub name: String,
    /// 0 until it is complete.
    pub made_unix_ms: u64,
    pub bytes: u64,
}

impl Sleep {
    /// From the columns at `at` and after it.
    pub(super) fn read(row: &Row<'_>, at: usize) -> rusqlite::Result<Self> {
        let number =
            |at: usize| row.get::<_, Option<i64>>(at).map(|number| number.map_or(0, i64::unsigned_abs));
        let image = match row.get::<_, Option<String>>(at)? {
            Some(name) => Some(Image { name, made_unix_ms: number(at + 1)?, bytes: number(at + 2)? }),
            None => None,
        };
        // Only shown, so that one of another version is not worth an error.
        let usage = row.get::<_, Option<String>>(at + 4)?;
        Ok(Self {
            image,
            standby_reason: row.get(at + 3)?,
            usage: usage.and_then(|text| serde_json::from_str(&text).ok()),
        })
    }
}

impl Record {
    /// Of a hibernated sandbox.
    pub fn image(&self) -> Option<&Image> {
        self.sleep.image.as_ref().filter(|_| self.state == State::Hibernated)
    }

    /// Why it stays in standby; of a lost one, what was wrong with its image.
    pub fn standby_reason(&self) -> Option<&str> {
        self.sleep.standby_reason.as_deref()
    }
}

impl Registry {
    /// It is frozen next, and perhaps written to `image`.
    pub(crate) fn set_standby(&self, id: &SandboxId, image: Option<&str>) -> Result<(), Problem> {
        self.connection()
            .prepare_cached(
                "UPDATE sandboxes SET state = 'standby', image = ?2, image_made_ms = NULL, image_bytes = NULL
                 WHERE id = ?1",
            )
            .and_then(|mut statement| statement.execute(params![id.as_str(), image]))
            .map_err(failed)?;
        Ok(())
    }

    /// It sleeps; this is what it used when it fell asleep, and so long nobody had wanted anything of it.
    pub(crate) fn set_resting(&self, id: &SandboxId, usage: &Usage) -> Result<(), Problem> {
        let text = json(usage)?;
        let used = signed(now_ms().saturating_sub(usage.idle_ms));
        self.connection()
            .prepare_cached("UPDATE sandboxes SET usage = ?2, used_ms = MAX(used_ms, ?3) WHERE id = ?1")
            .and_then(|mut statement| statement.execute(params![id.as_str(), text, used]))
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn set_standby_reason(&self, id: &SandboxId, reason: &str) -> Result<(), Problem> {
        self.connection()
            .prepare_cached("UPDATE sandboxes SET standby_reason = ?2 WHERE id = ?1")
            .and_then(|mut statement| statement.execute(params![id.as_str(), reason]))
            .map_err(failed)?;
        Ok(())
    }

    /// Its image is complete and its box is gone.
    pub(crate) fn set_hibernated(&self, id: &SandboxId, bytes: u64) -> Result<(), Problem> {
        self.connection()
            .prepare_cached(
                "UPDATE sandboxes SET state = 'hibernated', image_made_ms = ?2, image_bytes = ?3,
                 standby_reason = NULL WHERE id = ?1",
            )
            .and_then(|mut statement| {
                statement.execute(params![id.as_str(), signed(now_ms()), signed(bytes)])
            })
            .map_err(failed)?;
        Ok(())
    }

    /// Its image is packed.
    pub(crate) fn set_image_bytes(&self, id: &SandboxId, bytes: u64) -> Result<(), Problem> {
        self.connection()
            .prepare_cached("UPDATE sandboxes SET image_bytes = ?2 WHERE id = ?1 AND state = 'hibernated'")
            .and_then(|mut statement| statement.execute(params![id.as_str(), signed(bytes)]))
            .map_err(failed)?;
        Ok(())
    }

    /// It runs again, for a caller or because it never slept.
    pub(crate) fn set_awake(&self, id: &SandboxId, used: bool) -> Result<(), Problem> {
        let now = used.then(|| signed(now_ms()));
        self.connection()
            .prepare_cached(
                "UPDATE sandboxes SET state = 'running', image = NULL, image_made_ms = NULL, image_bytes = NULL,
                 standby_reason = NULL, usage = NULL, used_ms = COALESCE(?2, used_ms) WHERE id = ?1",
            )
            .and_then(|mut statement| statement.execute(params![id.as_str(), now]))
            .map_err(failed)?;
        Ok(())
    }

    /// Whether its row says that it sleeps. Every caller asks after its greeting, so it is one number.
    pub(crate) fn sleeps(&self, id: &SandboxId) -> Result<bool, Problem> {
        self.read(|connection| {
            connection
                .prepare_cached(
                    "SELECT COUNT(*) FROM sandboxes WHERE id = ?1 AND state IN ('standby', 'hibernated')",
                )?
                .query_row([id.as_str()], |row| row.get::<_, i64>(0))
        })
        .map(|count| count > 0)
    }

    /// Some rows of sandboxes that may have to be put to sleep, or into a deeper one, after the one of this number. `None`:
    /// there are no more.
    pub(crate) fn drowsy(&self, number: u32) -> Result<Option<Vec<Record>>, Problem> {
        self.some_in("'running', 'standby'", number)
    }

    /// The same of sandboxes that are on disk.
    pub(crate) fn hibernated(&self, number: u32) -> Result<Option<Vec<Record>>, Problem> {
        self.some_in("'hibernated'", number)
    }

    fn some_in(&self, states: &str, number: u32) -> Result<Option<Vec<Record>>, Problem> {
        let sql = format!(
            "SELECT {COLUMNS} FROM sandboxes WHERE number > ?1 AND state IN ({states})
             ORDER BY number LIMIT {CHUNK}"
        );
        let rows: Vec<Record> = self.read(|connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            statement.query_map([number], record)?.collect()
        })?;
        Ok((!rows.is_empty()).then_some(rows))
    }
}
