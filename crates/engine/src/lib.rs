//! The engine: finds or makes the sandbox a caller means, passes calls to its agent, and cleans up after crashes.
//!
//! Every CLI call is a process with an engine of its own; they meet in the registry ([`registry`]) and at the
//! sandboxes' sockets. What makes that safe is drawn in [`sandboxes`]. Front doors see [`Engine`] and [`call::Call`].
//!
//! One engine serves any number of tasks, and is cloned for nothing. What may wait for a disk, a process or another
//! writer runs on threads of its own ([`Engine::blocking`]), and runs to its end when the caller goes away meanwhile: so
//! a sandbox is never left half made, nor its lock free while somebody is still at work on it.
//!
//! Deliberately absent: HTTP, terminals, the caller's environment and home directory. All of that comes in as values.

#![forbid(unsafe_code)]

pub mod answers;
pub mod call;
mod changes;
pub mod environments;
pub mod events;
pub mod files;
mod input;
pub mod journal;
pub mod keeper;
pub mod keys;
mod learn;
mod lines;
mod lock;
pub mod nearest;
pub mod packing;
mod patience;
pub mod pool;
mod ports;
pub mod quota;
pub mod rate;
pub mod registry;
mod reshape;
mod retire;
pub mod sandboxes;
mod scopes;
pub mod secret;
mod sessions;
pub mod sleep;
pub mod snapshots;
pub mod spec;
mod sweep;
pub mod tenant;
pub mod tokens;

use std::{
    ops::Deref,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, Instant},
};

use carrel_backend::{Backend, environment::Environment, jail::Jail};
use carrel_proto::{limits::Limits, problem::Problem};

pub use crate::{
    changes::Update,
    environments::{Environments, Source},
    quota::Quota,
    registry::{Cursor, ListFilter, Owner, Page, Record, State, snapshots::Snapshot},
    sandboxes::{Found, Note, Wish},
    scopes::ScopeClosed,
    tenant::{Labels, Tenant},
};
use crate::{
    events::Hub, lines::Lines, lock::Locks, pool::Pool, registry::Registry, retire::Retiring, sleep::Clearing,
};
pub use carrel_backend::{
    IsolationLevel,
    host::Whereabouts,
    steps::{Step, Watch},
    warm::{Told, Warmth},
};

/// Everything an engine needs to know of its surroundings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// `$CARREL_STATE`.
    pub state: PathBuf,
    pub environments: Environments,
}

#[derive(Debug, Clone)]
pub struct Engine {
    core: Arc<Core>,
    /// Shared by clones, and swapped when the configuration is read again.
    environments: Arc<RwLock<Arc<Environments>>>,
}

/// What the clones of an engine share.
#[derive(Debug)]
pub struct Core {
    settings: Settings,
    registry: Registry,
    backend: Arc<dyn Backend>,
    jail: Arc<Jail>,
    /// The preset that was looked up last, when and for whom.
    preset: Mutex<Option<(Instant, Whereabouts, Environment)>>,
    locks: Locks,
    events: Arc<Hub>,
    watch: Watch,
    pool: Pool,
    lines: Lines,
    retiring: Retiring,
    clearing: Clearing,
}

impl Deref for Engine {
    type Target = Core;
    fn deref(&self) -> &Core {
        &self.core
    }
}

/// So long the host's interpreters are taken to be where they were. Looking takes a stat of every place they could be.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

impl Engine {
    /// Opens the state directory, making it if it is new.
    pub fn open(settings: Settings) -> Result<Self, Problem> {
        Self::watched(settings, Watch::default())
    }

    /// The same, with somebody who is told of every step: see [`carrel_backend::steps`].
    pub fn watched(settings: Settings, watch: Watch) -> Result<Self, Problem> {
        let failed = |what: &str, error: std::io::Error| {
            Problem::internal(format!("{what} {}: {error}", settings.state.display()))
        };
        for directory in ["sandboxes", "locks", "snapshots"] {
            std::fs::create_dir_all(settings.state.join(directory))
                .map_err(|error| failed("making", error))?;
        }
        // Relative paths would mean another place in every process that uses them.
        let state = std::fs::canonicalize(&settings.state).map_err(|error| failed("opening", error))?;
        let registry = Registry::open(&state.join("registry.db"))?;
        let jail = Arc::new(Jail::watched(&state, watch.clone()));
        let settings = Settings { state, ..settings };
        let environments = Arc::new(RwLock::new(Arc::new(settings.environments.clone())));
        let core = Arc::new(Core {
            settings,
            registry,
            backend: jail.clone(),
            jail,
            preset: Mutex::default(),
            locks: Locks::default(),
            events: Arc::default(),
            watch,
            pool: Pool::default(),
            lines: Lines::default(),
            retiring: Retiring::default(),
            clearing: Clearing::default(),
        });
        Ok(Self { core, environments })
    }

    /// Runs what may wait where waiting is allowed. It is done to its end, also when nobody waits for it any more.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Engine) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let engine = self.clone();
        tokio::task::spawn_blocking(move || work(&engine)).await.map_err(Problem::internal)?
    }

    /// As [`Engine::blocking`], for what mostly takes less time than another thread takes to wake up.
    pub(crate) fn at_once<T>(&self, work: impl FnOnce(&Engine) -> Result<T, Problem>) -> Result<T, Problem> {
        use tokio::runtime::{Handle, RuntimeFlavor};
        match Handle::current().runtime_flavor() {
            // Others go on meanwhile, on another of its threads.
            RuntimeFlavor::MultiThread => tokio::task::block_in_place(|| work(self)),
            _ => work(self),
        }
    }

    pub fn environments(&self) -> Arc<Environments> {
        Arc::clone(&self.environments.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Other environments for sandboxes that are made from now on, by this engine and its clones.
    pub fn set_environments(&self, environments: Environments) {
        *self.environments.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(environments);
    }

    /// This engine for a caller who has environments of its own.
    #[must_use]
    pub fn with_environments(&self, mut environments: Environments) -> Self {
        // What parents load is the operator's to say: they are for everybody.
        environments.set_warmth(self.environments().warmth().clone());
        Self { core: Arc::clone(&self.core), environments: Arc::new(RwLock::new(Arc::new(environments))) }
    }

    pub fn state_directory(&self) -> &std::path::Path {
        &self.settings.state
    }

    /// What presets offer on this host.
    pub fn host_interpreters(
        &self,
    ) -> std::collections::BTreeMap<carrel_proto::guest::Language, carrel_proto::guest::Interpreter> {
        carrel_backend::host::HostInterpreters::find(&self.derived(), self.environments().whereabouts())
            .interpreters
    }

    /// The software of an environment, for a sandbox that was made by somebody at `maker`.
    pub(crate) fn environment(&self, name: &str, maker: &Whereabouts) -> Result<Environment, Problem> {
        let environments = self.environments();
        let source = environments.source(name)?;
        let preset = matches!(source, Source::Preset(_));
        let mut last = self.preset.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((looked, whose, known)) = last.as_ref()
            && known.name == name
            && whose == maker
            // Another caller's preset of this name may be for another language.
            && *source == Source::Preset(known.language)
            && known.warmth == *environments.warmth()
            && looked.elapsed() < LOOK_AGAIN
        {
            return Ok(known.clone());
        }
        let found = environments.resolve(name, &self.derived(), maker)?;
        if preset {
            *last = Some((Instant::now(), maker.clone(), found.clone()));
        }
        Ok(found)
    }

    /// Sees to it that interpreters of new sandboxes with this environment can be copied from a warm parent, while others work.
    /// Nobody depends on it: without a parent they are started.
    pub(crate) fn warm_up(&self, name: String) {
        if !self.backend.wants_parent() {
            return;
        }
        let engine = self.clone();
        drop(tokio::task::spawn_blocking(move || {
            if let Ok(environment) = engine.environment(&name, engine.environments().whereabouts()) {
                engine.backend.make_parent(&environment, &engine.learned(&name));
            }
        }));
    }

    /// Makes the warm parent of an environment now, if one is due, and says what there is: `None` where none is wanted.
    pub fn parent(&self, name: &str) -> Result<Option<Result<Told, String>>, Problem> {
        let environment = self.environment(name, self.environments().whereabouts())?;
        self.backend.make_parent(&environment, &self.learned(name));
        Ok(self.jail.parent(&environment))
    }

    /// Where what is derived from the host is kept.
    pub(crate) fn derived(&self) -> PathBuf {
        self.settings.state.join("environments")
    }

    /// How this host would hold these limits.
    pub fn enforced(&self, limits: &Limits) -> carrel_proto::limits::Enforced {
        self.jail.enforced(limits)
    }
}
