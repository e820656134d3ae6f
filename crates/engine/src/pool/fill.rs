//! Fills the shelves, and clears them when there is a reason to: the one task of a pool.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use carrel_backend::link::AgentLink;
use carrel_proto::{id::SandboxId, message::Request, problem::Problem};
use tokio::{
    task::JoinSet,
    time::{sleep_until, timeout},
};

use super::{
    Ready, late, lock, pressure,
    shelves::{Kind, Order},
};
use crate::{
    Engine,
    lock::Lock,
    registry::{Record, Sleep, Spec, State, boot_id, now_ms},
    sandboxes::random,
    tenant::{Labels, Tenant},
};

/// Boxes that are made at the same time: as many as two processors have room for beside whoever calls.
const AT_ONCE: usize = 2;
/// An interpreter may take so long to start on a busy host.
const WARMING: Duration = Duration::from_secs(60);
/// A box whose keeper dies before it takes it up ends by itself after this long, and one that is kept at this age.
const UNKEPT_S: u64 = 60;
const OLDEST_S: u64 = 24 * 3600;
/// How often memory is looked at while boxes stand ready.
const LOOK: Duration = Duration::from_secs(5);
/// And at most, while there is much to do.
const OFTEN: Duration = Duration::from_secs(1);
/// So long after a shortage nothing is made ready.
const CALM: Duration = Duration::from_secs(30);

/// A box without a keeper.
struct Unclaimed {
    id: SandboxId,
    lock: Lock,
    number: u32,
    placed: carrel_backend::Placed,
    environment: carrel_backend::environment::Environment,
}

impl Engine {
    /// Keeps boxes ready, as [`Engine::set_pool`] says, until [`Engine::stop_pool`]; then removes them and is done. One task of a
    /// process runs it.
    pub async fn keep_pool(&self) {
        let mut making = JoinSet::new();
        let mut looked: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if looked.is_none_or(|when| when + OFTEN <= now) {
                looked = Some(now);
                self.look_at_memory(now).await;
            }
            let (surplus, stopped) = {
                let mut shelves = lock(&self.pool.shelves);
                let stopped = shelves.is_stopped();
                // At the end they are removed before this returns.
                (if stopped { Vec::new() } else { shelves.surplus(now) }, stopped)
            };
            self.drop_later(surplus);
            if stopped && making.is_empty() {
                break;
            }
            while making.len() < AT_ONCE
                && let Some((kind, order)) = self.next_order(now)
            {
                let engine = self.with_environments((*order.environments).clone());
                making.spawn(async move { (engine.make_ready(&kind, order).await, kind) });
            }
            let (next, ready) = {
                let shelves = lock(&self.pool.shelves);
                (shelves.next_change(now), shelves.ready())
            };
            let look = (ready > 0).then(|| now + LOOK);
            let until = [next, look].into_iter().flatten().min();
            tokio::select! {
                () = self.pool.changed.notified() => {}
                Some(made) = making.join_next(), if !making.is_empty() => self.shelve(made),
                () = wait(until) => {}
            }
        }
        let engine = self.clone();
        let _ = tokio::task::spawn_blocking(move || engine.empty_shelves()).await;
        // Those that were on their way out already are removed by others.
        drop(self.pool.clearing.write().await);
    }

    /// Nothing is kept ready any more: [`Engine::keep_pool`] clears up and ends.
    pub fn stop_pool(&self) {
        lock(&self.pool.shelves).stop();
        self.pool.changed.notify_one();
    }

    fn empty_shelves(&self) {
        let left = lock(&self.pool.shelves).empty();
        left.into_iter().for_each(|ready| self.drop_ready(ready));
    }

    fn next_order(&self, now: Instant) -> Option<(Kind, Order)> {
        lock(&self.pool.shelves).next_order(now)
    }

    /// Puts a box that has been made onto its shelf.
    fn shelve(&self, made: Result<(Result<Ready, Problem>, Kind), tokio::task::JoinError>) {
        // A task that panicked has told; its place among those under way is lost, and with it one box of its kind.
        let Ok((result, kind)) = made else { return };
        let now = Instant::now();
        let back = {
            let mut shelves = lock(&self.pool.shelves);
            match result {
                Ok(ready) => {
                    self.pool.made.fetch_add(1, Ordering::Relaxed);
                    shelves.made(&kind, now, ready)
                }
                Err(problem) => {
                    shelves.failed(&kind, now);
                    *lock(&self.pool.held_back) = Some(problem.message);
                    return;
                }
            }
        };
        self.drop_later(back.into_iter().collect());
    }

    /// Drops everything when memory is short, and makes nothing for a while.
    async fn look_at_memory(&self, now: Instant) {
        if !lock(&self.pool.shelves).is_busy() {
            return;
        }
        let short = tokio::task::spawn_blocking(pressure::shortage).await.unwrap_or_default();
        let dropped = match &short {
            Some(_) => lock(&self.pool.shelves).hold_back(now + CALM),
            None => Vec::new(),
        };
        *lock(&self.pool.held_back) = short;
        self.drop_later(dropped);
    }

    async fn make_ready(&self, kind: &Kind, order: Order) -> Result<Ready, Problem> {
        let wanted = kind.clone();
        let Unclaimed { id, lock, number, placed, environment } =
            self.blocking(move |engine| engine.make_unclaimed(&wanted, order.undo_calls)).await?;
        // The next ones are copies.
        self.warm_up(kind.environment.clone());
        let stamp = environment.stamp();
        let keeping = async {
            let mut link = AgentLink::connect(&self.backend.socket(&self.directory(&id))).await?;
            link.ask_within(&Request::KeepReady, WARMING).await.map(|_| link)
        };
        match timeout(WARMING, keeping).await.unwrap_or_else(|_| Err(late())) {
            Ok(link) => Ok(Ready { id, number, placed, lock, link, environment, stamp }),
            Err(problem) => {
                self.blocking(move |engine| {
                    engine.take_away(&id, Some(&placed))?;
                    lock.discard();
                    Ok(())
                })
                .await?;
                Err(problem)
            }
        }
    }

    fn make_unclaimed(&self, kind: &Kind, undo_calls: u32) -> Result<Unclaimed, Problem> {
        self.backend.expect();
        let environment = self.environment(&kind.environment, &kind.whereabouts)?;
        let id = SandboxId::from_random(random()?);
        // Before there is anything of it, so that no sweep ever finds it with a free lock while we live.
        let lock = Lock::take_new(&self.settings.state, &id)?;
        let made = self.registry.reserve_number().and_then(|number| {
            let record = nobodys(&id, number, kind, undo_calls);
            self.make_directory(&id)?;
            self.backend.create(&self.request(&record, None, kind.language)?).map(|placed| (number, placed))
        });
        match made {
            Ok((number, placed)) => Ok(Unclaimed { id, lock, number, placed, environment }),
            Err(problem) => {
                self.take_away(&id, None)?;
                lock.discard();
                Err(problem)
            }
        }
    }
}

async fn wait(until: Option<Instant>) {
    match until {
        Some(until) => sleep_until(until.into()).await,
        None => std::future::pending().await,
    }
}

/// What a backend is asked for by. It is never written down.
fn nobodys(id: &SandboxId, number: u32, kind: &Kind, undo_calls: u32) -> Record {
    let now = now_ms();
    Record {
        id: id.clone(),
        number,
        tenant: Tenant::local(),
        key: None,
        state: State::Creating,
        spec: Spec {
            environment: kind.environment.clone(),
            limits: kind.limits.clone(),
            isolation: kind.isolation,
            project: None,
            idle_timeout_s: UNKEPT_S,
            max_lifetime_s: OLDEST_S,
            standby_after_s: 0,
            hibernate_after_s: 0,
            undo_calls,
            ephemeral: None,
            whereabouts: Some(kind.whereabouts.clone()),
        },
        labels: Labels::default(),
        placed: None,
        boot: boot_id().to_owned(),
        reason: None,
        created_unix_ms: now,
        used_unix_ms: now,
        close_at_unix_ms: None,
        sleep: Sleep::default(),
        origin: None,
        forked_from: None,
    }
}
