//! Boxes that are nobody's yet have a number and no row: so they are in no list, count for no quota and belong to no tenant. What a
//! dead process leaves of them is a directory and a free lock without a row, which the sweep removes.

use carrel_backend::Placed;
use carrel_proto::problem::Problem;

use super::{Claim, Record, Registry, Sleep, State, admit, boot_id, failed, insert, json, now_ms};

impl Registry {
    /// A number that no sandbox has or will have.
    pub(crate) fn reserve_number(&self) -> Result<u32, Problem> {
        self.write(|transaction| {
            // The table counts only once it has had a row.
            transaction
                .prepare_cached(
                    "INSERT INTO sqlite_sequence (name, seq) SELECT 'sandboxes', 0
                     WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'sandboxes')",
                )
                .and_then(|mut statement| statement.execute([]))
                .map_err(failed)?;
            transaction
                .prepare_cached(
                    "UPDATE sqlite_sequence SET seq = seq + 1 WHERE name = 'sandboxes' RETURNING seq",
                )
                .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
                .map_err(failed)
        })
    }

    /// As [`Registry::claim`], of a box that is there: the row says at once that it runs. `pass_on` tells the box, after
    /// everything has been checked and before anybody can see the row; if it fails, there is none.
    pub(crate) fn claim_ready(
        &self,
        claim: &Claim,
        number: u32,
        placed: &Placed,
        pass_on: impl FnOnce() -> Result<(), Problem>,
    ) -> Result<Option<Record>, Problem> {
        let text = json(placed)?;
        self.write(|transaction| {
            let now = now_ms();
            let Some(close_at_unix_ms) = admit(transaction, claim, now)? else { return Ok(None) };
            insert(transaction, claim, now, close_at_unix_ms, Some(number), Some(&text))?;
            pass_on()?;
            Ok(Some(Record {
                id: claim.id.clone(),
                number,
                tenant: claim.tenant.clone(),
                key: claim.key.clone(),
                state: State::Running,
                spec: claim.spec.clone(),
                labels: claim.labels.clone(),
                placed: Some(placed.clone()),
                boot: boot_id().to_owned(),
                reason: None,
                created_unix_ms: now,
                used_unix_ms: now,
                close_at_unix_ms,
                sleep: Sleep::default(),
                origin: None,
                forked_from: None,
            }))
        })
    }
}
