//! The HTTP API: REST, server-sent events and WebSockets over the engine. docs/http.md is its contract.
//!
//! The way of a request: [`server`] accepts, [`guard`] admits and says who calls, a handler of the module named after its noun
//! translates, the engine acts. A handler that makes something runs to its end whether or not its client is still there.
//!
//! Invariant: nothing here is state of a sandbox. What a client can come back to (calls, output, files) is the sandbox's, so a daemon
//! that is killed loses connections and nothing else.

mod audit;
mod briefs;
mod cors;
pub mod desk;
mod environments;
mod events;
mod execs;
mod extract;
mod files;
mod guard;
mod health;
mod idempotency;
mod lease;
mod line;
pub mod mcp;
mod page;
mod place;
mod ports;
mod problem;
mod questions;
mod run;
mod sandboxes;
mod scopes;
mod server;
mod sessions;
mod shares;
mod snapshots;
mod spec;
mod sse;
#[cfg(test)]
mod tests;
mod tokens;
mod turnstile;
pub mod undo;
mod upgrade;
mod visit;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, RwLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{Method, StatusCode},
    middleware::from_fn_with_state,
};
use carrel_engine::{
    Engine, Found, Record, Wish,
    events::{Event, Kind},
    journal::Journal,
    tokens::Token,
};
use carrel_proto::{
    guest::Language,
    id::{ExecId, SandboxId, SessionName},
    outcome::Outcome,
    problem::{Code, Problem},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;

pub use guard::Guards;
pub use server::Listeners;

use crate::telemetry::Telemetry;

use self::{extract::no_sandbox, guard::Caller, place::Place, problem::Refusal, turnstile::Turnstile};

/// What can change while the daemon runs.
#[derive(Debug, Clone)]
pub struct Defaults {
    /// For sandboxes that are made.
    pub wish: Wish,
    /// Of a run that names none.
    pub timeout: Duration,
}

/// Everything the door needs to know.
#[derive(Debug)]
pub struct Options {
    pub guards: Guards,
    pub defaults: Defaults,
    /// Who did what, one line per request.
    pub audit: Option<Journal>,
    /// `https://…` under which others reach this daemon, for share links.
    pub public_url: Option<String>,
    /// Where traces and metrics go.
    pub telemetry: Option<Telemetry>,
}

/// A token that was verified lately is not looked up again: revoking one takes effect within this time.
const VERIFIED: Duration = Duration::from_secs(2);
/// Verified tokens remembered.
const MOST_VERIFIED: usize = 1024;

/// One daemon, shared by all requests.
#[derive(Debug)]
pub struct Daemon {
    engine: Engine,
    options: Options,
    defaults: RwLock<Arc<Defaults>>,
    turnstile: Turnstile,
    leases: Arc<lease::Leases>,
    questions: questions::Questions,
    verified: Mutex<HashMap<String, (Instant, Arc<Token>)>>,
    requests: AtomicU64,
    /// Distinguishes this process's request ids from those of the one before.
    run: String,
    counts: health::Counts,
    ways: ports::Ways,
    trees: Arc<shares::Shares>,
    watches: Arc<shares::Shares>,
    /// No new work; streams end.
    stop: CancellationToken,
    /// What goes on without a client.
    tasks: TaskTracker,
}

/// Finishing what goes on without a client, when the daemon stops.
const LAST_TASKS: Duration = Duration::from_secs(5);

impl Daemon {
    pub fn new(engine: Engine, options: Options) -> Arc<Self> {
        let defaults = RwLock::new(Arc::new(options.defaults.clone()));
        Arc::new(Self {
            engine,
            options,
            defaults,
            turnstile: Turnstile::default(),
            leases: Arc::default(),
            questions: questions::Questions::of(&described().1),
            verified: Mutex::default(),
            requests: AtomicU64::new(1),
            run: format!("{:x}", std::process::id()),
            counts: health::Counts::default(),
            ways: ports::Ways::default(),
            trees: files::trees(),
            watches: files::watches(),
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        })
    }

    /// Serves until [`Daemon::stop`], then drains.
    pub async fn serve(self: &Arc<Self>, listeners: Listeners) -> Result<(), Problem> {
        self.tasks.spawn(Arc::clone(&self.leases).keep(self.engine.clone(), self.stop.clone()));
        let served = server::serve(self.router(), listeners, self.stop.clone()).await;
        self.tasks.close();
        let _ = tokio::time::timeout(LAST_TASKS, self.tasks.wait()).await;
        let _ = tokio::time::timeout(LAST_TASKS, self.engine.finish_retiring()).await;
        if let Some(audit) = &self.options.audit {
            audit.flush();
        }
        if let Some(telemetry) = &self.options.telemetry {
            telemetry.shutdown().await;
        }
        served
    }

    pub fn stop(&self) {
        self.stop.cancel();
    }

    /// Takes over new defaults; sandboxes that are there keep theirs.
    pub fn reload(&self, defaults: Defaults) {
        *self.defaults.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(defaults);
    }

    fn defaults(&self) -> Arc<Defaults> {
        Arc::clone(&self.defaults.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn router(self: &Arc<Self>) -> Router {
        let (router, _) = described();
        router
            .merge(desk::routes())
            .fallback(health::nowhere)
            .method_not_allowed_fallback(health::other_method)
            .layer(from_fn_with_state(Arc::clone(self), guard::admit))
            .with_state(Arc::clone(self))
    }

    fn next_request(&self) -> String {
        format!("{}-{:x}", self.run, self.requests.fetch_add(1, Ordering::Relaxed))
    }

    fn count(&self, method: &Method, route: Option<&str>, status: StatusCode, time: Duration) {
        self.counts.request(method, route, status, time);
    }

    fn audit(&self, entry: &audit::Entry<'_>) {
        if let Some(journal) = &self.options.audit
            && entry.is_worth_a_line()
        {
            journal.write(&entry.line());
        }
    }

    async fn verify(&self, secret: &str) -> Result<Arc<Token>, Refusal> {
        if let Some((when, token)) = self.verified.lock().unwrap_or_else(PoisonError::into_inner).get(secret)
            && when.elapsed() < VERIFIED
        {
            return Ok(Arc::clone(token));
        }
        let token = Arc::new(self.engine.verify_token(secret).await?);
        let mut known = self.verified.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST_VERIFIED {
            known.clear();
        }
        known.insert(secret.to_owned(), (Instant::now(), Arc::clone(&token)));
        Ok(token)
    }

    /// So that a token that was revoked here is refused at once.
    fn forget_verified(&self) {
        self.verified.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// The sandbox of this id, asleep or not, if it is the caller's to see.
    fn record(&self, caller: &Caller, id: &SandboxId) -> Result<Record, Refusal> {
        let found = self.engine.record_of(&caller.tenant, id)?;
        found.ok_or_else(|| no_sandbox(id.as_str()).into())
    }

    /// The sandbox of this id, alive.
    async fn living(self: &Arc<Self>, caller: &Caller, id: &SandboxId) -> Result<Found, Refusal> {
        let (daemon, tenant, id) = (Arc::clone(self), caller.tenant.clone(), id.clone());
        self.complete(async move {
            daemon.engine.existing_of(&tenant, id.as_str(), None).await.map_err(|problem| {
                match problem.code {
                    Code::SandboxNotFound => no_sandbox(id.as_str()),
                    _ => problem,
                }
            })
        })
        .await
    }

    async fn find_or_make(self: &Arc<Self>, place: Place) -> Result<Found, Refusal> {
        let daemon = Arc::clone(self);
        self.complete(async move { place.find_or_make(&daemon.engine).await }).await
    }

    /// Work that must not stop halfway because a client hangs up: a sandbox in the making is somebody's to finish.
    async fn complete<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Problem>> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.tasks.spawn(work).await.map_err(Problem::internal)?.map_err(Into::into)
    }

    /// What code for `wanted` is written in, in this sandbox.
    fn language(&self, record: &Record, wanted: Option<&str>) -> Result<Language, Problem> {
        let environments = self.engine.environments();
        self.engine.check_environment(record, wanted)?;
        environments.language(&record.spec.environment, wanted)
    }

    fn note_started(
        &self,
        record: &Record,
        session: &SessionName,
        language: Option<Language>,
        exec: &ExecId,
        caller: &str,
    ) {
        let kind = if language.is_some() { Kind::RunStarted } else { Kind::ExecStarted };
        let mut event = Event::of(kind, record).caller(Some(caller.into()));
        event.session = Some(session.clone());
        event.exec = Some(exec.clone());
        self.engine.note(event);
        if let Some(telemetry) = &self.options.telemetry {
            telemetry.call_started(record, exec);
        }
    }

    /// A call that has an end, but nobody to say which: its sandbox was lost.
    fn note_lost(
        &self,
        record: &Record,
        session: &SessionName,
        language: Option<Language>,
        exec: &ExecId,
        caller: &str,
        why: Code,
    ) {
        let kind = if language.is_some() { Kind::RunFinished } else { Kind::ExecFinished };
        let mut event = Event::of(kind, record).caller(Some(caller.into()));
        event.session = Some(session.clone());
        event.exec = Some(exec.clone());
        self.engine.note(event.detail("lost"));
        if let Some(telemetry) = &self.options.telemetry {
            telemetry.call_lost(record, language, exec, caller, why);
        }
    }

    fn note_finished(
        &self,
        record: &Record,
        session: &SessionName,
        language: Option<Language>,
        outcome: &Outcome,
        caller: &str,
    ) {
        let kind = if language.is_some() { Kind::RunFinished } else { Kind::ExecFinished };
        let mut event = Event::of(kind, record).caller(Some(caller.into()));
        event.session = Some(session.clone());
        event.exec = Some(outcome.exec.clone());
        event.duration_ms = Some(outcome.receipt.duration_us / 1000);
        event.bytes = Some(outcome.receipt.stdout_bytes + outcome.receipt.stderr_bytes);
        self.engine.note(event.detail(outcome.cause.as_str()));
        self.counts.call(language, outcome);
        if let Some(telemetry) = &self.options.telemetry {
            telemetry.call_finished(record, session, language, outcome, caller);
        }
    }
}

#[derive(OpenApi)]
#[openapi(
    info(title = "carrel", description = "Sandboxes whose state stays. docs/http.md is the reference.", license(name = "Apache-2.0")),
    components(schemas(problem::ProblemDocument)),
    modifiers(&Bearer),
    security(("token" = []), ())
)]
struct Document;

#[derive(Debug)]
struct Bearer;

impl utoipa::Modify for Bearer {
    fn modify(&self, document: &mut utoipa::openapi::OpenApi) {
        use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
        let components = document.components.get_or_insert_with(Default::default);
        components.add_security_scheme("token", SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer)));
    }
}

fn described() -> (Router<Arc<Daemon>>, utoipa::openapi::OpenApi) {
    OpenApiRouter::with_openapi(Document::openapi())
        .merge(sandboxes::routes())
        .merge(scopes::routes())
        .merge(snapshots::routes())
        .merge(run::routes())
        .merge(sessions::routes())
        .merge(briefs::routes())
        .merge(execs::routes())
        .merge(files::routes())
        .merge(ports::routes())
        .merge(environments::routes())
        .merge(events::routes())
        .merge(tokens::routes())
        .merge(health::routes())
        .split_for_parts()
}

/// The OpenAPI document, as it is served and checked in.
pub fn openapi() -> String {
    let (_, document) = described();
    // It was made from types that JSON can carry.
    document.to_pretty_json().unwrap_or_default() + "\n"
}
