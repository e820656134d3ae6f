//! Where the attacked sandboxes come from: made for the attack, or kept ready by a pool as in a daemon.

use std::time::Duration;

use carrel_engine::{Engine, Record, Wish, pool::PoolSize};
use carrel_proto::{guest::Language, problem::Problem};
use tokio::task::JoinHandle;

/// One stands ready at a time: what is proved is how it came to be, not how many there are.
const ONE: PoolSize = PoolSize { floor: 1, ceiling: 1 };
const NONE: PoolSize = PoolSize { floor: 0, ceiling: 0 };
/// Between two looks at the shelf, and how often at most: a box that does not get ready in a minute never will.
const LOOK: Duration = Duration::from_millis(20);
const LOOKS: usize = 3000;
/// What stands ready may be one of another kind that was under way when the pool was emptied.
const TRIES: usize = 3;

#[derive(Debug)]
pub(super) struct Ring<'a> {
    pub(super) engine: &'a Engine,
    /// Fills the pool.
    keeping: Option<JoinHandle<()>>,
}

impl<'a> Ring<'a> {
    pub(super) fn new(engine: &'a Engine, pool: bool) -> Self {
        let keeping = pool.then(|| {
            let engine = engine.clone();
            tokio::spawn(async move { engine.keep_pool().await })
        });
        Self { engine, keeping }
    }

    /// A sandbox to attack. With a pool, one that stood ready, or an error: nothing is said of the others.
    pub(super) async fn sandbox(&self, wish: &Wish) -> Result<Record, Problem> {
        if self.keeping.is_none() {
            return self.engine.ephemeral(wish).await;
        }
        let wish = Wish { first: Some(Language::Python), ..wish.clone() };
        for _ in 0..TRIES {
            // First without any, so that the next one is of this kind.
            self.engine.set_pool(NONE, &wish);
            self.ready(false).await?;
            self.engine.set_pool(ONE, &wish);
            self.ready(true).await?;
            let before = self.engine.pool().claimed;
            let record = self.engine.ephemeral(&wish).await?;
            if self.engine.pool().claimed > before {
                return Ok(record);
            }
            self.engine.close(&record, None).await?;
        }
        Err(Problem::internal("the sandbox did not come from the pool"))
    }

    async fn ready(&self, wanted: bool) -> Result<(), Problem> {
        for _ in 0..LOOKS {
            let pool = self.engine.pool();
            if pool.ready.iter().any(|kind| kind.count > 0) == wanted {
                return Ok(());
            }
            tokio::time::sleep(LOOK).await;
        }
        let why = self.engine.pool().held_back.unwrap_or_else(|| "it takes too long".to_owned());
        Err(Problem::internal(format!("no sandbox gets ready: {why}")))
    }

    /// Nothing stands ready any more.
    pub(super) async fn close(&mut self) {
        if let Some(keeping) = self.keeping.take() {
            self.engine.stop_pool();
            let _ = keeping.await;
        }
    }
}
