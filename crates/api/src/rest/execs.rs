//! Execs: commands beside the interpreters, and everything that can be done with a run or exec by its id.
//!
//! What a call printed is the sandbox's: reading it never slows the code down, and whoever comes late, twice or after a restart of
//! the daemon reads the same chunks under the same numbers.

mod attach;
mod input;
mod output;
mod signal;
mod start;

use std::{sync::Arc, time::Duration};

use axum::{extract::State, http::StatusCode};
use carrel_engine::{Record, tokens::Scope};
use carrel_proto::{
    id::{ExecId, SandboxId},
    limits::MAX_TIMEOUT,
    message::ExecInfo,
    outcome::Outcome,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{ExecPath, Json, Query, SandboxPath},
    guard::Caller,
    page::{self, Page},
    problem::{Problems, Refusal, bad},
};
pub(crate) use input::feed;
use signal::Signal;

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(start::start, list))
        .routes(routes!(get))
        .routes(routes!(output::output))
        .routes(routes!(output::stream))
        .routes(routes!(output::raw))
        .routes(routes!(wait))
        .routes(routes!(input::stdin))
        .routes(routes!(signal))
        .routes(routes!(resize))
        .routes(routes!(cancel))
        .routes(routes!(attach::attach))
}

impl Daemon {
    /// An exec of a sandbox that lives.
    async fn exec(
        self: &Arc<Self>,
        caller: &Caller,
        sandbox: &SandboxId,
        exec: &ExecId,
    ) -> Result<(Record, ExecInfo), Refusal> {
        let record = self.living(caller, sandbox).await?.record;
        let execs = self.engine.execs(&record).await?;
        match execs.into_iter().find(|info| info.exec == *exec) {
            Some(info) => Ok((record, info)),
            None => Err(no_exec(exec).into()),
        }
    }
}

fn no_exec(exec: &ExecId) -> Problem {
    Problem::new(Code::ExecNotFound, format!("there is no exec `{exec}` in this sandbox"))
        .hint("GET …/execs lists them; only the newest are kept")
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// Lists runs and execs, newest last.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs", tag = "execs", operation_id = "list_execs",
    params(("sandbox" = String, Path), ListQuery), responses((status = 200, body = Page<ExecInfo>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<ExecInfo>>, Refusal> {
    caller.may(Scope::Read)?;
    let limit = usize::try_from(page::check(query.limit)?).unwrap_or(usize::MAX);
    // By number, not by place: old ones are forgotten while a client turns the pages.
    let after = match query.after.as_deref() {
        None => 0,
        Some(text) => number_of(text).ok_or_else(|| page::bad_cursor(text))?,
    };
    let record = daemon.living(&caller, &id).await?.record;
    let execs = daemon.engine.execs(&record).await?;
    let mut items: Vec<ExecInfo> =
        execs.into_iter().filter(|info| number_of(info.exec.as_str()).is_some_and(|it| it > after)).collect();
    let more = items.len() > limit;
    items.truncate(limit);
    let next = items.last().filter(|_| more).map(|info| info.exec.to_string());
    Ok(axum::Json(Page { items, next }))
}

fn number_of(exec: &str) -> Option<u64> {
    exec.strip_prefix("ex_")?.parse().ok()
}

/// A run or exec.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs/{exec}", tag = "execs", operation_id = "get_exec",
    params(("sandbox" = String, Path), ("exec" = String, Path)), responses((status = 200, body = ExecInfo), Problems))]
async fn get(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
) -> Result<axum::Json<ExecInfo>, Refusal> {
    caller.may(Scope::Read)?;
    Ok(axum::Json(daemon.exec(&caller, &id, &exec).await?.1))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WaitQuery {
    /// 30 unless said otherwise.
    #[param(minimum = 0.0, maximum = 3600.0)]
    timeout_seconds: Option<f64>,
}

const DEFAULT_WAIT: f64 = 30.0;

#[derive(Debug, Serialize, ToSchema)]
struct Waited {
    /// Null: it still runs.
    outcome: Option<Outcome>,
}

/// Waits for the end of a run or exec.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs/{exec}/wait", tag = "execs", operation_id = "wait_for_exec",
    params(("sandbox" = String, Path), ("exec" = String, Path), WaitQuery), responses((status = 200, body = Waited), Problems))]
async fn wait(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<WaitQuery>,
) -> Result<axum::Json<Waited>, Refusal> {
    caller.may(Scope::Read)?;
    let time = seconds("timeout_seconds", query.timeout_seconds.unwrap_or(DEFAULT_WAIT), MAX_TIMEOUT)?;
    let record = daemon.living(&caller, &id).await?.record;
    let outcome = tokio::select! {
        outcome = daemon.engine.wait(&record, &exec, time) => outcome?,
        // As if the time were over: whoever waits asks the next daemon.
        () = daemon.stop.cancelled() => None,
    };
    Ok(axum::Json(Waited { outcome }))
}

/// A time to wait, 0 included.
fn seconds(what: &str, seconds: f64, most: Duration) -> Result<Duration, Refusal> {
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) if time <= most => Ok(time),
        _ => Err(bad(format!("{what} is between 0 and {}", most.as_secs())).into()),
    }
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SignalRequest {
    signal: Signal,
}

/// Sends a signal.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/execs/{exec}/signal", tag = "execs", operation_id = "signal_exec",
    params(("sandbox" = String, Path), ("exec" = String, Path)), request_body = SignalRequest,
    responses((status = 204, description = "sent"), Problems))]
async fn signal(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Json(request): Json<SignalRequest>,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.living(&caller, &id).await?.record;
    daemon.engine.signal(&record, &exec, request.signal.number()).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// A terminal's size.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Size {
    #[schema(maximum = 65535)]
    rows: u16,
    #[schema(maximum = 65535)]
    cols: u16,
}

/// Gives a terminal another size.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/execs/{exec}/resize", tag = "execs", operation_id = "resize_exec",
    params(("sandbox" = String, Path), ("exec" = String, Path)), request_body = Size,
    responses((status = 204, description = "done"), Problems))]
async fn resize(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Json(size): Json<Size>,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.living(&caller, &id).await?.record;
    daemon.engine.resize(&record, &exec, size.rows, size.cols).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Interrupts a run or exec, and kills it if that does not end it.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/execs/{exec}/cancel", tag = "execs", operation_id = "cancel_exec",
    params(("sandbox" = String, Path), ("exec" = String, Path)), responses((status = 204, description = "on its way"), Problems))]
async fn cancel(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.living(&caller, &id).await?.record;
    daemon.engine.cancel(&record, &exec).await?;
    Ok(StatusCode::NO_CONTENT)
}
