//! Scopes that are closed, or will be: `workflow:run_42`, and with it every sandbox whose key begins so.

use carrel_proto::{
    id::{Key, SandboxId},
    problem::{Code, Problem},
};
use rusqlite::{OptionalExtension, Transaction, params};

use super::{Registry, failed, now_ms, signed};
use crate::tenant::Tenant;

/// So long a closed scope stays closed: a straggler of a run that is over makes nothing new. Then its name is free again.
const REMEMBERED_MS: u64 = 24 * 3600 * 1000;

/// The first two parts of `scope:owner:name`.
fn scope_of(key: &Key) -> Option<(&str, &str)> {
    let mut parts = key.as_str().splitn(3, ':');
    let (scope, owner, _name) = (parts.next()?, parts.next()?, parts.next()?);
    Some((scope, owner))
}

/// Refuses a key of a closed scope. Of one that will be closed it says when.
pub(super) fn check_open(
    transaction: &Transaction<'_>,
    tenant: &Tenant,
    key: &Key,
    now: u64,
) -> Result<Option<u64>, Problem> {
    let Some((scope, owner)) = scope_of(key) else { return Ok(None) };
    let closed: Option<i64> = transaction
        .prepare_cached("SELECT closed_ms FROM closed_scopes WHERE tenant = ?1 AND scope = ?2 AND owner = ?3")
        .and_then(|mut statement| {
            statement.query_row([tenant.as_str(), scope, owner], |row| row.get(0)).optional()
        })
        .map_err(failed)?;
    match closed.map(i64::unsigned_abs) {
        Some(closed) if closed > now => Ok(Some(closed)),
        Some(closed) if closed.saturating_add(REMEMBERED_MS) > now => {
            let hours = (closed + REMEMBERED_MS - now).div_ceil(3600 * 1000);
            Err(Problem::new(
                Code::Conflict,
                format!("`{scope}:{owner}` is closed; nothing new is made in it"),
            )
            .hint(format!("use another name for a new run; this one is free again in {hours} h")))
        }
        _ => Ok(None),
    }
}

impl Registry {
    /// Marks a scope as closed from `at` on, and every sandbox of it; says which they are.
    pub(crate) fn mark_scope(
        &self,
        tenant: &Tenant,
        scope: &str,
        owner: &str,
        at: u64,
    ) -> Result<Vec<SandboxId>, Problem> {
        self.write(|transaction| {
            transaction
                .execute(
                    "INSERT INTO closed_scopes (tenant, scope, owner, closed_ms) VALUES (?1, ?2, ?3, ?4)
                     ON CONFLICT DO UPDATE SET closed_ms = excluded.closed_ms",
                    params![tenant.as_str(), scope, owner, signed(at)],
                )
                .map_err(failed)?;
            let (from, to) = range(scope, owner);
            let mut statement = transaction
                .prepare_cached(
                    "UPDATE sandboxes SET close_at_ms = ?4 WHERE tenant = ?1 AND key >= ?2 AND key < ?3 AND state != 'ended'
                     RETURNING id",
                )
                .map_err(failed)?;
            let ids = statement
                .query_map(params![tenant.as_str(), from, to, signed(at)], |row| row.get::<_, String>(0))
                .and_then(Iterator::collect::<Result<Vec<_>, _>>)
                .map_err(failed)?;
            ids.into_iter().map(|id| id.parse().map_err(Problem::internal)).collect()
        })
    }

    /// The sandboxes of a scope that are not gone.
    pub(crate) fn in_scope(
        &self,
        tenant: &Tenant,
        scope: &str,
        owner: &str,
    ) -> Result<Vec<super::Record>, Problem> {
        let (from, to) = range(scope, owner);
        let sql = format!(
            "SELECT {} FROM sandboxes WHERE tenant = ?1 AND key >= ?2 AND key < ?3 AND state != 'ended' ORDER BY number",
            super::COLUMNS
        );
        self.read(|connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            statement.query_map([tenant.as_str(), &from, &to], super::record)?.collect()
        })
    }

    /// Those that ended by themselves are not remembered beyond their scope; its next user is somebody else.
    pub(crate) fn forget_ended(&self, tenant: &Tenant, scope: &str, owner: &str) -> Result<(), Problem> {
        let (from, to) = range(scope, owner);
        self.write(|transaction| {
            transaction
                .execute(
                    "DELETE FROM sandboxes WHERE tenant = ?1 AND key >= ?2 AND key < ?3 AND state = 'ended'",
                    [tenant.as_str(), &from, &to],
                )
                .map_err(failed)?;
            Ok(())
        })
    }

    /// Forgets closed scopes whose time is over.
    pub(crate) fn sweep_scopes(&self) -> Result<(), Problem> {
        let old = signed(now_ms().saturating_sub(REMEMBERED_MS));
        let any: bool = self.read(|connection| {
            connection
                .prepare_cached("SELECT EXISTS (SELECT 1 FROM closed_scopes WHERE closed_ms < ?1)")?
                .query_row([old], |row| row.get(0))
        })?;
        if any {
            self.write(|transaction| {
                transaction.execute("DELETE FROM closed_scopes WHERE closed_ms < ?1", [old]).map_err(failed)
            })?;
        }
        Ok(())
    }
}

/// All keys `scope:owner:…`, as a range: `;` comes right after `:`.
fn range(scope: &str, owner: &str) -> (String, String) {
    (format!("{scope}:{owner}:"), format!("{scope}:{owner};"))
}
