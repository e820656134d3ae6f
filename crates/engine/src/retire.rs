//! Closing without waiting for the clearing up.
//!
//! When [`Engine::retire`] answers, the sandbox's processes are dead and its row is gone: nobody finds it, it counts for no
//! quota and its key is free. What is left of it (files, mounts, cgroups) is removed by a thread of this process, which holds the
//! sandbox's lock all the while. A process that is killed meanwhile leaves a directory with a free lock and no row, which is what
//! the sweep removes; one that ends in good order waits first ([`Engine::finish_retiring`]).

use std::sync::Arc;

use carrel_proto::{id::SandboxId, problem::Problem};
use tokio::sync::Semaphore;

use crate::{
    Engine,
    events::{Event, Kind},
    lock::Lock,
    registry::Record,
};

/// Sandboxes that are cleared up at the same time. Whoever closes more waits for its turn, so that what is closed never piles up
/// faster than it goes.
const AT_ONCE: u32 = 16;

/// The places of those that are being cleared up.
#[derive(Debug)]
pub(crate) struct Retiring(Arc<Semaphore>);

impl Default for Retiring {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(AT_ONCE as usize)))
    }
}

impl Engine {
    /// Ends a sandbox, and clears up after it when this has answered. For a process that stays: one that lives for a single
    /// call uses [`Engine::close`].
    pub async fn retire(&self, record: &Record) -> Result<(), Problem> {
        let place = Arc::clone(&self.retiring.0).acquire_owned().await.map_err(Problem::internal)?;
        let lock = self.lock(&record.id).await?;
        let id = record.id.clone();
        self.blocking(move |engine| {
            let Some(record) = engine.registry.by_id(&id)? else {
                lock.discard();
                return Ok(());
            };
            engine.registry.remove(&id)?;
            // From here on it goes, whatever happens: nobody can find it any more.
            let ended = record.placed.as_ref().map_or(Ok(()), |placed| engine.backend.end(placed));
            engine.note(Event::of(Kind::SessionDeleted, &record).detail("closed"));
            let clearer = engine.clone();
            tokio::runtime::Handle::current().spawn_blocking(move || {
                clearer.clear_up(&id, &record, lock);
                drop(place);
            });
            ended
        })
        .await
    }

    /// Waits until everything that was retired is gone.
    pub async fn finish_retiring(&self) {
        let _ = self.retiring.0.acquire_many(AT_ONCE).await;
    }

    fn clear_up(&self, id: &SandboxId, record: &Record, lock: Lock) {
        self.learn_from(record);
        // What cannot be removed now is tried again by every sweep.
        if self.take_away(id, record.placed.as_ref()).is_ok() {
            lock.discard();
        }
        self.backend.restock(&record.spec.limits);
    }
}
