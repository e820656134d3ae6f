//! Other limits and times for a sandbox that lives.

use std::sync::Arc;

use carrel_proto::{limits::Limits, message::Request, problem::Problem};

use crate::{Engine, registry::Record};

impl Engine {
    /// Makes a living box keep these limits and times instead of those of its row; one that does not live gets them when it
    /// is made again. On error nothing is changed. The row is the caller's to write, with the sandbox's lock held around
    /// both: else a box that is revived in between has the old ones.
    pub async fn apply_limits(
        &self,
        record: &Record,
        limits: &Limits,
        idle_timeout_s: u64,
        max_lifetime_s: u64,
    ) -> Result<(), Problem> {
        let before = &record.spec.limits;
        if limits.memory < before.memory && self.is_alive(record) {
            // What is kept only to be taken back is in nobody's way.
            self.ask(record, &Request::DropSpares).await?;
        }
        self.update_box(record, before, limits).await?;
        if !self.is_alive(record) {
            return Ok(());
        }
        let request = Request::Configure { limits: limits.clone(), idle_timeout_s, max_lifetime_s };
        if let Err(problem) = self.ask(record, &request).await {
            // What this makes smaller may be in use by now: then it stays, and the first problem is the one to tell.
            let _ = self.update_box(record, limits, before).await;
            return Err(problem);
        }
        Ok(())
    }

    async fn update_box(&self, record: &Record, before: &Limits, limits: &Limits) -> Result<(), Problem> {
        let Some(placed) = record.placed.clone() else { return Ok(()) };
        let (backend, id) = (Arc::clone(&self.backend), record.id.clone());
        let (before, limits) = (before.clone(), limits.clone());
        tokio::task::spawn_blocking(move || backend.update(&id, &placed, &before, &limits))
            .await
            .map_err(Problem::internal)?
    }
}
