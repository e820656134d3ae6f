//! Runs: code for an interpreter, answered as a whole or as a stream.
//!
//! A stream's pace is its client's, as with a pipe, for as long as that client takes something now and then ([`super::sse`]). After that
//! the call goes on without it; what it prints is kept by the sandbox, and the stream can be taken up where it broke off.
//!
//! Invariant: a sandbox of one run alone has an [`Ephemeral`] from the moment it is there. Wherever the run, its request or its
//! client ends, that one is dropped, and the sandbox with it.

mod ephemeral;
mod follow;

use std::sync::Arc;

use axum::{extract::State, response::Response};
use carrel_engine::{Record, call::Call, tokens::Scope};
use carrel_proto::{
    guest::Language,
    id::SessionName,
    limits::MAX_TIMEOUT,
    message::{MAX_CODE, Run},
    problem::{Code, Problem},
};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{reply::Reply, telemetry::carried};

use super::{
    Daemon,
    extract::SandboxPath,
    guard::Caller,
    idempotency::{Once, Ticket},
    place::{Make, Place},
    problem::{Problems, Refusal, bad},
    sse::{self, ServerSentEvent},
};
use ephemeral::Ephemeral;
pub(crate) use follow::{Following, Heard, stream_name};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(run)).routes(routes!(run_anywhere))
}

/// Output of one stream in a reply, unless asked for more or less; the command line's own default.
pub(crate) const DEFAULT_OUTPUT: u64 = 1 << 20;
/// A reply is held in memory as a whole.
pub(crate) const MOST_OUTPUT: u64 = 64 << 20;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RunRequest {
    #[schema(max_length = 8_388_608)]
    code: String,
    /// An environment or a language: `python`, `bash`, `node`.
    environment: Option<String>,
    session: Option<SessionName>,
    #[schema(exclusive_minimum = 0.0, maximum = 3600.0)]
    timeout_seconds: Option<f64>,
    /// Answer with events as they happen.
    #[serde(default)]
    stream: bool,
    /// Interrupt the code if this client goes away before the end.
    #[serde(default)]
    cancel_on_disconnect: bool,
    /// Most bytes of each output stream in the reply.
    #[schema(maximum = 67_108_864)]
    max_output: Option<u64>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct RunAnywhere {
    #[schema(max_length = 8_388_608)]
    code: String,
    /// A name, key or id. None: a fresh sandbox that is gone afterwards.
    sandbox: Option<String>,
    workflow_run: Option<String>,
    agent_run: Option<String>,
    environment: Option<String>,
    session: Option<SessionName>,
    labels: Option<std::collections::BTreeMap<String, String>>,
    limits: Option<super::sandboxes::LimitsPatch>,
    #[schema(minimum = 1, maximum = 31_536_000)]
    idle_timeout_seconds: Option<u64>,
    #[schema(minimum = 1, maximum = 31_536_000)]
    max_lifetime_seconds: Option<u64>,
    /// How many calls can be taken back, in a sandbox that has to be made.
    #[schema(maximum = 16)]
    undo_calls: Option<u32>,
    #[schema(exclusive_minimum = 0.0, maximum = 3600.0)]
    timeout_seconds: Option<f64>,
    #[serde(default)]
    stream: bool,
    #[serde(default)]
    cancel_on_disconnect: bool,
    #[schema(maximum = 67_108_864)]
    max_output: Option<u64>,
}

/// Runs code in a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/run", tag = "run", params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)), request_body = RunRequest,
    responses((status = 200, description = "how it ended, or with `stream` its events", content((Reply = "application/json"), (ServerSentEvent = "text/event-stream"))), Problems))]
async fn run(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(request, ticket): Once<RunRequest>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let asked =
        Asked::new(&request.code, request.timeout_seconds, request.max_output, &ticket, request.stream)?;
    // Dropped with this request, whoever works on it.
    let (gone, _here) = presence(request.cancel_on_disconnect);
    let (running, who) = (Arc::clone(&daemon), caller.clone());
    ticket
        .once(&daemon, &caller, async move {
            let found = running.living(&who, &id).await?;
            let call = RunCall {
                language: running.language(&found.record, request.environment.as_deref())?,
                session: request.session.unwrap_or_else(SessionName::main),
                note: found.note.map(|note| note.text(id.as_str())),
                record: found.record,
                code: request.code,
                cancel_on_disconnect: request.cancel_on_disconnect,
                ephemeral: None,
            };
            call.answer(running, who, asked, gone).await
        })
        .await
}

/// Runs code in the sandbox of a name, made if need be, or in a fresh one.
#[utoipa::path(post, path = "/v1/run", tag = "run", params(("Idempotency-Key" = Option<String>, Header)), request_body = RunAnywhere,
    responses((status = 200, description = "how it ended, or with `stream` its events", content((Reply = "application/json"), (ServerSentEvent = "text/event-stream"))), Problems))]
async fn run_anywhere(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Once(request, ticket): Once<RunAnywhere>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let asked =
        Asked::new(&request.code, request.timeout_seconds, request.max_output, &ticket, request.stream)?;
    // Dropped with this request, whoever works on it.
    let (gone, _here) = presence(request.cancel_on_disconnect);
    let make = Make {
        environment: request.environment.clone(),
        labels: request.labels.clone(),
        limits: request.limits.clone(),
        idle_timeout_seconds: request.idle_timeout_seconds,
        max_lifetime_seconds: request.max_lifetime_seconds,
        undo_calls: request.undo_calls,
        first: daemon.engine.environments().first_language(request.environment.as_deref()),
        ..Make::default()
    };
    let place = Place::of_run(
        &daemon,
        &caller,
        request.sandbox.as_deref(),
        (request.workflow_run.as_deref(), request.agent_run.as_deref()),
        make,
    )?;
    let (running, who) = (Arc::clone(&daemon), caller.clone());
    ticket
        .once(&daemon, &caller, async move {
            let name = place.name().to_owned();
            let (found, ephemeral) = Ephemeral::find_or_make(&running, place).await?;
            let call = RunCall {
                language: running.language(&found.record, request.environment.as_deref())?,
                session: request.session.unwrap_or_else(SessionName::main),
                note: found.note.map(|note| note.text(&name)),
                record: found.record,
                code: request.code,
                cancel_on_disconnect: request.cancel_on_disconnect,
                ephemeral,
            };
            call.answer(running, who, asked, gone).await
        })
        .await
}

/// What was asked for, checked.
#[derive(Debug, Clone, Copy)]
struct Asked {
    timeout_ms: Option<u64>,
    max_output: u64,
    stream: bool,
}

impl Asked {
    fn new(
        code: &str,
        timeout: Option<f64>,
        max_output: Option<u64>,
        ticket: &Ticket,
        stream: bool,
    ) -> Result<Self, Refusal> {
        if code.len() > MAX_CODE {
            return Err(Problem::new(Code::TooLarge, format!("the code is larger than {MAX_CODE} bytes"))
                .hint("write it to files in /workspace in parts and run them from there")
                .into());
        }
        if stream {
            ticket.refuse()?;
        }
        let max_output = output_within(max_output)?;
        Ok(Self { timeout_ms: timeout.map(millis).transpose()?, max_output, stream })
    }
}

pub(crate) fn output_within(most: Option<u64>) -> Result<u64, Refusal> {
    match most.unwrap_or(DEFAULT_OUTPUT) {
        most if most <= MOST_OUTPUT => Ok(most),
        _ => Err(bad(format!("max_output is at most {MOST_OUTPUT}"))
            .hint("stream the output, or read it from …/execs/{exec}/raw")
            .into()),
    }
}

/// A call's time in milliseconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "checked to be within the bounds"
)]
pub(crate) fn millis(seconds: f64) -> Result<u64, Refusal> {
    let most = MAX_TIMEOUT.as_secs_f64();
    if seconds.is_finite() && seconds > 0.0 && seconds <= most {
        return Ok(((seconds * 1000.0) as u64).max(1));
    }
    Err(bad(format!("timeout_seconds is above 0 and at most {most}")).into())
}

/// Says when a client that wanted to be missed is gone: when the second half is dropped.
pub(crate) fn presence(wanted: bool) -> (Option<CancellationToken>, Option<tokio_util::sync::DropGuard>) {
    let gone = wanted.then(CancellationToken::new);
    let here = gone.clone().map(CancellationToken::drop_guard);
    (gone, here)
}

/// A run whose sandbox is known.
#[derive(Debug)]
struct RunCall {
    record: Record,
    session: SessionName,
    language: Language,
    note: Option<String>,
    code: String,
    cancel_on_disconnect: bool,
    /// The sandbox is this run's alone.
    ephemeral: Option<Ephemeral>,
}

impl RunCall {
    async fn answer(
        mut self,
        daemon: Arc<Daemon>,
        caller: Caller,
        asked: Asked,
        gone: Option<CancellationToken>,
    ) -> Result<Response, Refusal> {
        let following = Following {
            record: self.record.clone(),
            session: self.session.clone(),
            language: Some(self.language),
            note: self.note.take(),
            daemon: Arc::clone(&daemon),
            caller: caller.name().to_owned(),
            room: caller.room.clone(),
        };
        if asked.stream {
            let call = self.begin(&daemon, asked).await?;
            return Ok(self.tell(call, following));
        }
        // The code goes on when its client hangs up, and its end is still noted: so not in the request's own task.
        let gathering = daemon.tasks.spawn(carried(async move {
            let call = self.begin(&following.daemon, asked).await?;
            following.gather(call, None, asked.max_output, gone).await
        }));
        gathering.await.map_err(Problem::internal)?
    }

    fn tell(self, mut call: Call, following: Following) -> Response {
        let stop = following.daemon.stop.clone();
        sse::stream(stop, move |events| async move {
            let mut heard = Heard::default();
            let told = following.tell(&mut call, &events, &mut heard).await;
            // The agent sees this line close: a call that shall not outlive its client is cancelled, any other no longer waits for it.
            drop(call);
            let delivered = told.is_ok() && events.delivered().await;
            let daemon = Arc::clone(&following.daemon);
            daemon.tasks.spawn(async move {
                following.note_end(heard).await;
                if let Some(ephemeral) = self.ephemeral {
                    ephemeral.leave(delivered).await;
                }
            });
        })
    }

    async fn begin(&self, daemon: &Daemon, asked: Asked) -> Result<Call, Problem> {
        daemon.engine.ensure_session(&self.record, &self.session).await?;
        let default = daemon.defaults().timeout;
        let run = Run {
            session: self.session.clone(),
            language: self.language,
            code: self.code.clone(),
            timeout_ms: asked
                .timeout_ms
                .unwrap_or_else(|| u64::try_from(default.as_millis()).unwrap_or(u64::MAX)),
            // The daemon's own end must not end the call, unless its client wants that.
            cancel_on_disconnect: self.cancel_on_disconnect,
        };
        daemon.engine.run(&self.record, run).await
    }
}
