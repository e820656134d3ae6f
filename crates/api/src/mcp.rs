//! The MCP door. A request's way: transport ([`stdio`] or [`http`]) → the SDK → [`handler`] → one file per kind of request
//! ([`run`], [`code`], [`resources`], …) → the engine; a call's answer comes back through [`follow`] and [`report`].
//!
//! All state is the sandboxes': a connection owns nothing but the [`scope`] that its session names are looked up in. So a
//! client may reconnect, speak another version of the protocol, or come back as another process, and find what it left.

mod arguments;
mod code;
mod complete;
mod compute;
mod desks;
mod files;
mod follow;
mod handler;
pub mod http;
mod json_id;
mod log;
mod presence;
mod report;
mod resources;
mod run;
mod scope;
pub mod stdio;
mod tasks;
mod text;
mod tools;
mod uri;
mod watch;

use std::{
    fs::File,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use carrel_engine::{Engine, Record, Settings, Wish};
use carrel_proto::{id::SandboxId, problem::Problem};
use tokio::sync::OnceCell;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use handler::Connection;
pub use tools::ToolSet;

use self::{desks::Desks, scope::Scope};

/// Largest message of a client: room for the largest code, escaped. What is larger is answered with an error.
pub const MAX_MESSAGE: usize = 16 << 20;
/// Levels of arrays and objects in a message: as deep as the SDK's parser goes.
const MAX_DEPTH: usize = 127;
/// Stands for a message that was too large or too deep: see [`stdio`].
const TOO_LARGE_METHOD: &str = "carrel/message-too-large";
/// Characters of a text result unless configured.
pub const DEFAULT_CHARS: usize = 10_000;
/// No client shows a model more without spilling it into a file.
pub const MAX_CHARS: usize = 40_000;

/// How the door is set up.
#[derive(Debug, Clone)]
pub struct Options {
    pub tools: ToolSet,
    /// Structured content and output schemas, with the same facts as the text.
    pub structured: bool,
    /// Session names are shared by all who name the same one. None: each client has its own.
    pub scope: Option<String>,
    /// Sandboxes of a client end when it disconnects.
    pub end_on_disconnect: bool,
    /// What tells clients of the same name apart: the directory they work in, say.
    pub place: String,
    /// Characters of a text result, at most [`MAX_CHARS`].
    pub max_chars: usize,
    /// Of a call that asks for none.
    pub timeout: Duration,
    /// What a new sandbox shall be.
    pub wish: Wish,
    pub engine: Settings,
}

/// What all connections of a server share.
#[derive(Debug)]
pub struct Server {
    options: Options,
    engine: OnceCell<Engine>,
    desks: Desks,
    /// Scopes of clients that were here, for the time after them.
    scopes: Mutex<Vec<Weak<Scope>>>,
    farewells: TaskTracker,
    leaving: CancellationToken,
}

impl Server {
    pub fn new(options: Options) -> Arc<Self> {
        Self::with(None, options)
    }

    /// With an engine that is open already.
    pub fn over(engine: Engine, options: Options) -> Arc<Self> {
        Self::with(Some(engine), options)
    }

    fn with(engine: Option<Engine>, options: Options) -> Arc<Self> {
        let max_chars = options.max_chars.clamp(500, MAX_CHARS);
        let options = Options { max_chars, ..options };
        Arc::new(Self {
            options,
            engine: OnceCell::new_with(engine),
            desks: Desks::default(),
            scopes: Mutex::default(),
            farewells: TaskTracker::new(),
            leaving: CancellationToken::new(),
        })
    }

    /// Opened by the first who needs it, so that a client's greeting does not wait for it.
    pub async fn engine(&self) -> Result<&Engine, Problem> {
        let open = || async {
            let settings = self.options.engine.clone();
            let opened = tokio::task::spawn_blocking(move || {
                let engine = Engine::open(settings)?;
                // What a dead process left is no reason to refuse a living one; the next call tries again.
                let _ = engine.sweep();
                Ok(engine)
            });
            opened.await.map_err(Problem::internal)?
        };
        self.engine.get_or_try_init(open).await
    }

    /// A sandbox of this scope, whether it lives or not.
    async fn known(&self, scope: &Scope, id: &SandboxId) -> Result<(&Engine, Record), Problem> {
        let engine = self.engine().await?;
        Ok((engine, scope.check(id, engine.record(id)?)?))
    }

    /// A sandbox of this scope, brought back if it does not live.
    async fn living(&self, scope: &Scope, id: &SandboxId) -> Result<(&Engine, Record), Problem> {
        let (engine, record) = self.known(scope, id).await?;
        Ok((engine, engine.existing(record.id.as_str(), None).await?.record))
    }

    /// Opens the engine ahead of the first call.
    pub async fn warm(&self) {
        // Whoever needs it meets the same problem and says it.
        let _ = self.engine().await;
    }

    fn scopes(&self) -> MutexGuard<'_, Vec<Weak<Scope>>> {
        self.scopes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remember(&self, scope: &Arc<Scope>) {
        let mut scopes = self.scopes();
        scopes.retain(|scope| scope.strong_count() > 0);
        scopes.push(Arc::downgrade(scope));
    }

    /// The slot of a client that is not there any more, for the next one of its name.
    fn abandoned(&self, prefix: &str) -> Option<File> {
        // Where sandboxes end with their client, a slot is free when they have ended.
        if self.options.end_on_disconnect {
            return None;
        }
        let scopes = self.scopes();
        scopes.iter().filter_map(Weak::upgrade).find_map(|scope| scope.give_up(prefix))
    }

    /// A client has gone away.
    fn left(self: &Arc<Self>, scope: &Arc<Scope>) {
        if self.options.end_on_disconnect
            && scope.is_leased()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            let (server, scope) = (Arc::clone(self), Arc::clone(scope));
            self.farewells.spawn(async move { server.end(&scope).await });
        }
    }

    /// Closes every sandbox of a client.
    async fn end(&self, scope: &Scope) {
        let Ok(engine) = self.engine().await else { return };
        let all = engine.list().unwrap_or_default();
        for record in all.iter().filter(|record| scope.name(record).is_some()) {
            // The sandbox's own idle clock ends what cannot be closed now.
            let _ = engine.close(record, None).await;
        }
    }

    /// The server is about to stop: calls go on without it.
    pub fn leave(&self) {
        self.leaving.cancel();
    }

    /// Ends what clients leave behind, if it is to end with them.
    pub async fn finish(&self) {
        if self.options.end_on_disconnect {
            let left: Vec<Arc<Scope>> = self.scopes().iter().filter_map(Weak::upgrade).collect();
            for scope in left {
                self.end(&scope).await;
            }
        }
        self.farewells.close();
        self.farewells.wait().await;
        if let Some(engine) = self.engine.get() {
            engine.finish_retiring().await;
        }
    }

    /// A handler for one connection.
    pub fn connection(self: &Arc<Self>) -> Connection {
        Connection::new(Arc::clone(self))
    }
}
