//! Cleaning up after processes that died, and after time: at the start of every call of a process that lives for one, now
//! and then by one that stays. Cheap when there is nothing to do; reads the registry piece by piece, so that nobody waits.

use std::collections::BTreeSet;

use carrel_proto::{guest::EndReason, id::SandboxId, problem::Problem};

use crate::{
    Engine,
    lock::Lock,
    registry::{Record, State, now_ms},
    sandboxes::remove_tree,
};

/// How long an ended sandbox is remembered for a caller that comes back.
const REMEMBERED_MS: u64 = 7 * 24 * 3600 * 1000;

/// How a sandbox is ended by a sweep.
enum End {
    /// Half made, half closed, or dead: as it turns out.
    Settle,
    Close(&'static str),
    /// It sleeps, so that its agent cannot see to it.
    Expire,
}

impl Engine {
    /// Removes what nobody will come back for. Errors of one sandbox do not stop the others; the first is returned. It
    /// may take a while: not for an async task, which has [`Engine::tidy`].
    pub fn sweep(&self) -> Result<(), Problem> {
        let mut first = Ok(());
        let mut known = BTreeSet::new();
        let mut number = 0;
        while let Some(records) = self.registry.after(number)? {
            for record in records {
                number = record.number;
                if let Err(problem) = self.sweep_one(&record) {
                    first = first.and(Err(problem));
                }
                known.insert(record.id);
            }
        }
        self.backend.sweep();
        let rest = [
            self.registry.sweep_scopes(),
            self.registry.sweep_answers(),
            self.sweep_snapshots(),
            self.sweep_packing(),
        ];
        rest.into_iter().fold(self.sweep_strays(&known).and(first), Result::and)
    }

    /// [`Engine::sweep`] for a process that stays: to be called every few seconds, and right after the start. It also looks into
    /// the directories of sandboxes that run, for which a call has no time.
    pub async fn tidy(&self) -> Result<(), Problem> {
        self.blocking(|engine| engine.sweep().and(engine.sweep_images())).await
    }

    /// Waits for what is being removed after an answer: old images, and what forks were made from.
    pub async fn cleared(&self) -> Result<(), Problem> {
        self.blocking(|engine| {
            engine.clearing.wait();
            Ok(())
        })
        .await
    }

    /// What whoever woke a sandbox, or gave up putting it to sleep, was killed before removing.
    fn sweep_images(&self) -> Result<(), Problem> {
        let mut number = 0;
        while let Some(records) = self.registry.after(number)? {
            for record in records {
                number = record.number;
                if record.state != State::Running || self.nobodys(&record).is_empty() {
                    continue;
                }
                let lock = Lock::try_take(&self.settings.state, &record.id).map_err(Problem::internal)?;
                let now = self.registry.by_id(&record.id)?;
                // Nobody is at work on it, and it has not fallen asleep since.
                let runs = |now: &Record| now.state == State::Running && self.is_alive(now);
                if lock.is_some() && now.is_some_and(|now| runs(&now)) {
                    self.remove_images(&record);
                }
            }
        }
        Ok(())
    }

    fn sweep_one(&self, record: &Record) -> Result<(), Problem> {
        if record.state == State::Ended {
            if now_ms() > record.used_unix_ms.saturating_add(REMEMBERED_MS) {
                self.registry.remove(&record.id)?;
            }
            return Ok(());
        }
        if self.end_of(record).is_none() {
            return Ok(());
        }
        let lock = Lock::try_take(&self.settings.state, &record.id).map_err(Problem::internal)?;
        // Held: somebody is at work on it.
        let Some(lock) = lock else { return Ok(()) };
        // Since it was read, somebody may have brought it back, or closed it.
        let Some(record) = self.registry.by_id(&record.id)? else {
            lock.discard();
            return Ok(());
        };
        match self.end_of(&record) {
            None => Ok(()),
            Some(End::Settle) => self.settle(&record.id, lock).map(drop),
            Some(End::Close(why)) => self.close_locked(&record.id, lock, None, why),
            Some(End::Expire) => self.expire(&record, EndReason::Lifetime, lock),
        }
    }

    /// What is to be done with a sandbox that nobody is at work on.
    fn end_of(&self, record: &Record) -> Option<End> {
        let now = now_ms();
        let lifetime = record.spec.max_lifetime_s.saturating_mul(1000);
        let due = record.close_at_unix_ms.is_some_and(|at| at <= now);
        let orphan = || record.spec.ephemeral.is_some_and(|owner| !owner.is_alive());
        match record.state {
            State::Ended => None,
            State::Creating | State::Closing => Some(End::Settle),
            _ if due => Some(End::Close("scope")),
            _ if orphan() => Some(End::Close("orphan")),
            State::Running => (!self.is_alive(record)).then_some(End::Settle),
            State::Standby | State::Hibernated if record.is_over(now) => Some(End::Expire),
            State::Standby => (!self.is_alive(record) || !self.is_frozen(record)).then_some(End::Settle),
            State::Hibernated => {
                (!self.has_image(record) || self.is_half_replaced(record)).then_some(End::Settle)
            }
            State::Lost => {
                (now > record.used_unix_ms.saturating_add(lifetime)).then_some(End::Close("lifetime"))
            }
        }
    }

    /// Directories and locks without a row: their maker died before or after it.
    fn sweep_strays(&self, known: &BTreeSet<SandboxId>) -> Result<(), Problem> {
        for place in ["sandboxes", "locks"] {
            let entries = std::fs::read_dir(self.settings.state.join(place)).into_iter().flatten().flatten();
            for entry in entries {
                let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok())
                else {
                    continue;
                };
                if known.contains(&id) {
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
