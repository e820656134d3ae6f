//! Sandboxes that a server keeps ready, for as long as it serves.

use std::time::Duration;

use carrel_engine::Engine;
use tokio::task::JoinHandle;

use crate::config::Settings;

/// Nobody waits longer for what has to be ended at the end.
const CLEARING: Duration = Duration::from_secs(5);

pub(crate) struct Pool {
    engine: Engine,
    keeping: JoinHandle<()>,
}

impl Pool {
    pub(crate) fn keep(engine: &Engine, settings: &Settings) -> Self {
        engine.set_pool(settings.pool, &settings.wish(None));
        let keeping = tokio::spawn({
            let engine = engine.clone();
            async move { engine.keep_pool().await }
        });
        Self { engine: engine.clone(), keeping }
    }

    /// What nobody has asked for ends with the server; what cannot be ended in time ends by itself, and is swept.
    pub(crate) async fn end(self) {
        self.engine.stop_pool();
        let _ = tokio::time::timeout(CLEARING, self.keeping).await;
    }
}
