//! A sandbox of one call.

use std::{sync::Arc, time::Duration};

use carrel_engine::{Found, Record};

use crate::rest::{Daemon, place::Place, problem::Refusal};

/// A client whose stream broke off finds the rest of it for so long after the call's end.
const LINGER: Duration = Duration::from_secs(30);

/// Closes its sandbox when it is dropped.
#[derive(Debug)]
pub(super) struct Ephemeral {
    daemon: Arc<Daemon>,
    record: Record,
}

impl Ephemeral {
    /// The sandbox of a place; if it is a call's own, with what closes it.
    pub(super) async fn find_or_make(
        daemon: &Arc<Daemon>,
        place: Place,
    ) -> Result<(Found, Option<Self>), Refusal> {
        let making = Arc::clone(daemon);
        // Both come out of the same task: a client that is gone when the sandbox is ready leaves nobody else to close it.
        let made = daemon.complete(async move {
            let alone = place.is_ephemeral();
            let found = place.find_or_make(&making.engine).await?;
            let ephemeral = alone.then(|| Self { record: found.record.clone(), daemon: Arc::clone(&making) });
            Ok((found, ephemeral))
        });
        made.await
    }

    /// After the call: at once if its client has everything, as far as this side of the network can tell, else when that has had time
    /// to come back.
    pub(super) async fn leave(self, delivered: bool) {
        if !delivered {
            tokio::select! {
                () = tokio::time::sleep(LINGER) => {}
                () = self.daemon.stop.cancelled() => {}
            }
        }
    }
}

impl Drop for Ephemeral {
    fn drop(&mut self) {
        let (engine, record) = (self.daemon.engine.clone(), self.record.clone());
        // Without a runtime the process is ending: whoever comes next sweeps.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            let closing = async move {
                if let Err(problem) = engine.retire(&record).await {
                    tracing::warn!(sandbox = record.id.as_str(), "closing: {problem}");
                }
            };
            self.daemon.tasks.spawn_on(closing, &runtime);
        }
    }
}
