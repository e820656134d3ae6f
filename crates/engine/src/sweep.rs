//! Cleaning up after processes that died: done at the start of every call, cheap when there is nothing to do.

use std::collections::BTreeSet;

use carrel_proto::{id::SandboxId, problem::Problem};

use crate::{
    Engine,
    lock::Lock,
    registry::{Record, State, now_ms},
    sandboxes::remove_tree,
};

/// How long an ended sandbox is remembered for a caller that comes back.
const REMEMBERED_MS: u64 = 7 * 24 * 3600 * 1000;

impl Engine {
    /// Removes what nobody will come back for. Errors of one sandbox do not stop the others; the first is returned.
    pub fn sweep(&self) -> Result<(), Problem> {
        let records = self.registry.all()?;
        let mut first = Ok(());
        for record in &records {
            if let Err(problem) = self.sweep_one(record) {
                first = first.and(Err(problem));
            }
        }
        self.sweep_strays(&records).and(first)
    }

    fn sweep_one(&self, record: &Record) -> Result<(), Problem> {
        let now = now_ms();
        let too_old = now > record.used_unix_ms + record.spec.max_lifetime_s * 1000;
        let wanted = match record.state {
            State::Ended => {
                if now > record.used_unix_ms + REMEMBERED_MS {
                    self.registry.remove(&record.id)?;
                }
                return Ok(());
            }
            State::Running => {
                let orphan = record.spec.ephemeral.is_some_and(|owner| !owner.is_alive());
                orphan || !self.is_alive(record)
            }
            State::Lost => too_old,
            State::Creating | State::Closing => true,
        };
        if !wanted {
            return Ok(());
        }
        let lock = Lock::try_take(&self.settings.state, &record.id).map_err(Problem::internal)?;
        // Held: somebody is at work on it.
        let Some(lock) = lock else { return Ok(()) };
        let orphan = record.spec.ephemeral.is_some_and(|owner| !owner.is_alive());
        if orphan || (record.state == State::Lost && too_old) {
            return self.erase(&record.id, record.placed.as_ref(), lock);
        }
        self.settle(&record.id, lock).map(drop)
    }

    /// Directories and locks without a row: their maker died before or after it.
    fn sweep_strays(&self, records: &[Record]) -> Result<(), Problem> {
        let known: BTreeSet<&str> = records.iter().map(|record| record.id.as_str()).collect();
        for place in ["sandboxes", "locks"] {
            let entries = std::fs::read_dir(self.settings.state.join(place)).into_iter().flatten().flatten();
            for entry in entries {
                let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok())
                else {
                    continue;
                };
                if known.contains(id.as_str()) {
                    continue;
                }
                let Some(lock) = Lock::try_take(&self.settings.state, &id).map_err(Problem::internal)? else {
                    continue;
                };
                // It may have been made since the rows were read.
                if self.registry.by_id(&id)?.is_some() {
                    continue;
                }
                let directory = self.directory(&id);
                self.backend.destroy(&id, &directory, None)?;
                remove_tree(&directory)?;
                lock.discard();
            }
        }
        Ok(())
    }
}
