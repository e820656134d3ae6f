//! What is known of snapshots, and of where sandboxes come from.

use carrel_jail::workspace;
use carrel_proto::{
    id::{Key, SandboxId, SnapshotId},
    problem::{Code, Problem},
};
use rusqlite::{OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};

use super::{Registry, Spec, failed, json, list::Cursor, signed};
use crate::{
    quota::{self, Quota},
    registry::MAX_PAGE,
    tenant::{Labels, Tenant},
};

/// A saved sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Snapshot {
    pub id: SnapshotId,
    pub tenant: Tenant,
    /// What it is of, which may be gone.
    pub sandbox: SandboxId,
    /// Its key at that time.
    pub key: Option<Key>,
    /// The snapshot that the sandbox came from, or that was taken of it before.
    pub parent: Option<SnapshotId>,
    pub tags: Vec<String>,
    pub made_unix_ms: u64,
    /// On disk.
    pub bytes: u64,
    pub content: Content,
}

/// What a snapshot holds and what it takes to make a box of it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Content {
    /// Files and everything that lived in the box; else files alone.
    pub memory: bool,
    /// Why there is no memory.
    pub reason: Option<String>,
    pub spec: Spec,
    pub labels: Labels,
    pub workspace: workspace::Kind,
    /// Of the sandbox: owners of files derive from it.
    pub number: u32,
}

/// Which snapshots are wanted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotFilter {
    /// `None`: everybody's, which is for the local user alone.
    #[serde(skip)]
    pub tenant: Option<Tenant>,
    pub sandbox: Option<SandboxId>,
    pub tag: Option<String>,
}

#[derive(Debug, Clone)]
pub struct SnapshotPage {
    pub snapshots: Vec<Snapshot>,
    /// For the next page; `None` on the last one.
    pub next: Option<Cursor>,
}

const COLUMNS: &str = "number, id, tenant, sandbox, key, parent, tags, made_ms, bytes, content";

fn snapshot(row: &Row<'_>) -> rusqlite::Result<(u32, Snapshot)> {
    let bad = |error: String| rusqlite::Error::ToSqlConversionFailure(error.into());
    let name = |error: carrel_proto::id::BadName| bad(error.to_string());
    let content = |error: serde_json::Error| bad(error.to_string());
    let text = |at: usize| row.get::<_, String>(at);
    let optional = |at: usize| row.get::<_, Option<String>>(at);
    let found = Snapshot {
        id: text(1)?.parse().map_err(name)?,
        tenant: Tenant::stored(text(2)?),
        sandbox: text(3)?.parse().map_err(name)?,
        key: optional(4)?.map(|key| key.parse()).transpose().map_err(name)?,
        parent: optional(5)?.map(|id| id.parse()).transpose().map_err(name)?,
        tags: serde_json::from_str(&text(6)?).map_err(content)?,
        made_unix_ms: row.get::<_, i64>(7)?.unsigned_abs(),
        bytes: row.get::<_, i64>(8)?.unsigned_abs(),
        content: serde_json::from_str(&text(9)?).map_err(content)?,
    };
    Ok((row.get(0)?, found))
}

impl Registry {
    /// With `descent` it is what its sandbox comes from, from now on.
    pub(crate) fn add_snapshot(
        &self,
        new: &Snapshot,
        descent: bool,
        quota: Option<&Quota>,
    ) -> Result<(), Problem> {
        let (tags, content) = (json(&new.tags)?, json(&new.content)?);
        self.write(|transaction| {
            if let Some(quota) = quota {
                quota::check_snapshot(transaction, &new.tenant, quota, new.bytes)?;
            }
            let insert =
                "INSERT INTO snapshots (id, tenant, sandbox, key, parent, tags, made_ms, bytes, content)
                          VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
            let values = params![
                new.id.as_str(),
                new.tenant.as_str(),
                new.sandbox.as_str(),
                new.key.as_ref().map(Key::as_str),
                new.parent.as_ref().map(SnapshotId::as_str),
                tags,
                signed(new.made_unix_ms),
                signed(new.bytes),
                content
            ];
            transaction.execute(insert, values).map_err(failed)?;
            if descent {
                let origin = "UPDATE sandboxes SET origin = ?2 WHERE id = ?1";
                transaction.execute(origin, [new.sandbox.as_str(), new.id.as_str()]).map_err(failed)?;
            }
            Ok(())
        })
    }

    /// Whether anything at all still fits, before it is copied.
    pub(crate) fn room_for_snapshot(&self, tenant: &Tenant, quota: &Quota) -> Result<(), Problem> {
        self.write(|transaction| quota::check_snapshot(transaction, tenant, quota, 0))
    }

    pub(crate) fn set_origin(&self, id: &SandboxId, origin: &SnapshotId) -> Result<(), Problem> {
        self.connection()
            .execute("UPDATE sandboxes SET origin = ?2 WHERE id = ?1", [id.as_str(), origin.as_str()])
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>, Problem> {
        let sql = format!("SELECT {COLUMNS} FROM snapshots WHERE id = ?1");
        let row = self.read(|connection| connection.query_row(&sql, [id.as_str()], snapshot).optional())?;
        Ok(row.map(|(_, snapshot)| snapshot))
    }

    /// By id, or the newest with this tag. What is not the tenant's own is not there.
    pub(crate) fn snapshot_of(&self, tenant: &Tenant, name: &str) -> Result<Option<Snapshot>, Problem> {
        let sql = format!(
            "SELECT {COLUMNS} FROM snapshots WHERE (?1 = '' OR tenant = ?1)
             AND (id = ?2 OR EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?2))
             ORDER BY id = ?2 DESC, number DESC LIMIT 1"
        );
        let row =
            self.read(|connection| connection.query_row(&sql, [tenant.as_str(), name], snapshot).optional())?;
        Ok(row.map(|(_, snapshot)| snapshot))
    }

    /// In the order they were made, at most `limit` of them after `after`.
    pub(crate) fn snapshots(
        &self,
        filter: &SnapshotFilter,
        after: Option<Cursor>,
        limit: u32,
    ) -> Result<SnapshotPage, Problem> {
        let limit = limit.clamp(1, MAX_PAGE);
        let sql = format!(
            "SELECT {COLUMNS} FROM snapshots WHERE number > ?1 AND (?2 IS NULL OR tenant = ?2)
             AND (?3 IS NULL OR sandbox = ?3)
             AND (?4 IS NULL OR EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?4))
             ORDER BY number LIMIT ?5"
        );
        let values = params![
            after.map_or(0, Cursor::number),
            filter.tenant.as_ref().map(Tenant::as_str),
            filter.sandbox.as_ref().map(SandboxId::as_str),
            filter.tag,
            // One more says whether there is a next page.
            i64::from(limit) + 1
        ];
        let mut rows = self.read(|connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            statement.query_map(values, snapshot)?.collect::<Result<Vec<_>, _>>()
        })?;
        let more = rows.len() > limit as usize;
        rows.truncate(limit as usize);
        let next = rows.last().filter(|_| more).map(|(number, _)| Cursor::at(*number));
        Ok(SnapshotPage { snapshots: rows.into_iter().map(|(_, snapshot)| snapshot).collect(), next })
    }

    pub(crate) fn set_snapshot_bytes(&self, id: &SnapshotId, bytes: u64) -> Result<(), Problem> {
        self.connection()
            .execute("UPDATE snapshots SET bytes = ?2 WHERE id = ?1", params![id.as_str(), signed(bytes)])
            .map_err(failed)?;
        Ok(())
    }

    pub(crate) fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), Problem> {
        self.connection().execute("DELETE FROM snapshots WHERE id = ?1", [id.as_str()]).map_err(failed)?;
        Ok(())
    }

    /// Two sandboxes of one tenant change their keys. Refused where the second has none.
    pub(crate) fn swap_keys(&self, one: &SandboxId, other: &SandboxId) -> Result<(), Problem> {
        self.write(|transaction| {
            let key = |id: &SandboxId| {
                let sql =
                    "SELECT tenant, key FROM sandboxes WHERE id = ?1 AND state NOT IN ('ended', 'closing')";
                transaction
                    .query_row(sql, [id.as_str()], |row| {
                        Ok((row.get::<_, String>(0)?, row.get::<_, Option<String>>(1)?))
                    })
                    .optional()
                    .map_err(failed)
            };
            let (Some((mine, first)), Some((theirs, second))) = (key(one)?, key(other)?) else {
                return Err(Problem::new(
                    Code::Conflict,
                    "what it was forked from is gone, and its key with it",
                )
                .hint("open a new sandbox of that name, or restore a snapshot as it"));
            };
            if mine != theirs || second.is_none() {
                return Err(Problem::new(Code::Conflict, "what it was forked from has no key")
                    .hint("use the fork by its own name or id"));
            }
            let set = "UPDATE sandboxes SET key = ?2 WHERE id = ?1";
            // A key is one sandbox's at any time.
            transaction.execute(set, params![one.as_str(), None::<String>]).map_err(failed)?;
            transaction.execute(set, params![other.as_str(), first]).map_err(failed)?;
            transaction.execute(set, params![one.as_str(), second]).map_err(failed)?;
            Ok(())
        })
    }
}
