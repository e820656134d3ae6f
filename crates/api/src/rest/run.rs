//! Runs: code for an interpreter, answered as a whole or as a stream.
//!
//! A stream's pace is its client's, as with a pipe, for as long as that client takes something now and then ([`super::sse`]). After that
//! the call goes on without it; what it prints is kept by the sandbox, and the stream can be taken up where it broke off.

use std::sync::Arc;

use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use carrel_engine::{
    Record,
    call::{Call, Output},
    tokens::Scope,
};
use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::{ExecId, SandboxId, SessionName},
    limits::MAX_TIMEOUT,
    message::{MAX_CODE, Run},
    outcome::Outcome,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

use crate::{
    kept::Bytes,
    reply::{Reply, Transcript},
};

use super::{
    Daemon,
    extract::SandboxPath,
    guard::Caller,
    idempotency::{Once, Ticket},
    place::{Make, Place},
    problem::{ProblemDocument, Problems, Refusal, bad},
    sse::{self, Events, Gone},
};

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
    responses((status = 200, description = "how it ended, or with `stream` its events", content((Reply = "application/json"), (String = "text/event-stream"))), Problems))]
async fn run(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(request, ticket): Once<RunRequest>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let asked = Asked::new(&request.code, request.timeout_seconds, request.max_output, &ticket, request.stream)?;
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
                ephemeral: false,
            };
            call.answer(running, who, asked).await
        })
        .await
}

/// Runs code in the sandbox of a name, made if need be, or in a fresh one.
#[utoipa::path(post, path = "/v1/run", tag = "run", params(("Idempotency-Key" = Option<String>, Header)), request_body = RunAnywhere,
    responses((status = 200, description = "how it ended, or with `stream` its events", content((Reply = "application/json"), (String = "text/event-stream"))), Problems))]
async fn run_anywhere(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Once(request, ticket): Once<RunAnywhere>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let asked = Asked::new(&request.code, request.timeout_seconds, request.max_output, &ticket, request.stream)?;
    let make = Make {
        environment: request.environment.clone(),
        labels: request.labels.clone(),
        limits: request.limits.clone(),
        idle_timeout_seconds: request.idle_timeout_seconds,
        max_lifetime_seconds: request.max_lifetime_seconds,
        first: daemon.engine.environments().first_language(request.environment.as_deref()),
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
            let (ephemeral, name) = (place.is_ephemeral(), place.name().to_owned());
            let found = running.find_or_make(place).await?;
            let call = RunCall {
                language: running.language(&found.record, request.environment.as_deref())?,
                session: request.session.unwrap_or_else(SessionName::main),
                note: found.note.map(|note| note.text(&name)),
                record: found.record,
                code: request.code,
                cancel_on_disconnect: request.cancel_on_disconnect,
                ephemeral,
            };
            call.answer(running, who, asked).await
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
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to be within the bounds")]
pub(crate) fn millis(seconds: f64) -> Result<u64, Refusal> {
    let most = MAX_TIMEOUT.as_secs_f64();
    if seconds.is_finite() && seconds > 0.0 && seconds <= most {
        return Ok(((seconds * 1000.0) as u64).max(1));
    }
    Err(bad(format!("timeout_seconds is above 0 and at most {most}")).into())
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
    ephemeral: bool,
}

impl RunCall {
    async fn answer(self, daemon: Arc<Daemon>, caller: Caller, asked: Asked) -> Result<Response, Refusal> {
        let call = match self.begin(&daemon, asked).await {
            Ok(call) => call,
            Err(problem) => {
                self.leave(&daemon);
                return Err(problem.into());
            }
        };
        let following = Following {
            record: self.record.clone(),
            session: self.session.clone(),
            language: Some(self.language),
            note: self.note.clone(),
            daemon: Arc::clone(&daemon),
            caller: caller.name().to_owned(),
        };
        if asked.stream {
            let stop = daemon.stop.clone();
            let mut call = call;
            return Ok(sse::stream(stop, move |events| async move {
                let told = following.tell(&mut call, &events, Start::New).await;
                following.finish(call, told).await;
                self.leave(&following.daemon);
            }));
        }
        // The code goes on when its client hangs up, and its end is still noted: so not in the request's own task.
        let cancel = self.cancel_on_disconnect.then(tokio_util::sync::CancellationToken::new);
        let guard = cancel.clone().map(tokio_util::sync::CancellationToken::drop_guard);
        let gathering = daemon.tasks.spawn(async move {
            let gathered = following.gather(call, asked.max_output, cancel).await;
            self.leave(&following.daemon);
            gathered
        });
        let reply = gathering.await.map_err(Problem::internal)?;
        drop(guard);
        reply
    }

    async fn begin(&self, daemon: &Daemon, asked: Asked) -> Result<Call, Problem> {
        daemon.engine.ensure_session(&self.record, &self.session).await?;
        let default = daemon.defaults().timeout;
        let run = Run {
            session: self.session.clone(),
            language: self.language,
            code: self.code.clone(),
            timeout_ms: asked.timeout_ms.unwrap_or_else(|| u64::try_from(default.as_millis()).unwrap_or(u64::MAX)),
            // The daemon's own end must not end the call, unless its client wants that.
            cancel_on_disconnect: self.cancel_on_disconnect,
        };
        daemon.engine.run(&self.record, run).await
    }

    /// A sandbox of one call goes with it; nobody waits for that.
    fn leave(&self, daemon: &Arc<Daemon>) {
        if !self.ephemeral {
            return;
        }
        let (engine, record) = (daemon.engine.clone(), self.record.clone());
        daemon.tasks.spawn(async move {
            if let Err(problem) = engine.close(&record, None).await {
                tracing::warn!(sandbox = record.id.as_str(), "closing: {problem}");
            }
        });
    }
}

/// A call that is followed for a client.
#[derive(Debug)]
pub(crate) struct Following {
    pub(crate) record: Record,
    pub(crate) session: SessionName,
    pub(crate) language: Option<Language>,
    pub(crate) note: Option<String>,
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) caller: String,
}

/// Whether a stream begins with the call or takes it up later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    New,
    Resumed,
}

#[derive(Debug, Serialize, ToSchema)]
struct StartEvent<'a> {
    sandbox: &'a SandboxId,
    session: &'a SessionName,
    exec: &'a ExecId,
    environment: &'a str,
    language: Option<Language>,
}

#[derive(Debug, Serialize)]
struct BytesEvent<'a> {
    chunk: u64,
    offset: u64,
    data: Bytes<'a>,
}

#[derive(Debug, Serialize)]
struct DisplayEvent<'a> {
    chunk: u64,
    kind: carrel_proto::message::DisplayKind,
    mime: &'a std::collections::BTreeMap<String, serde_json::Value>,
}

impl Following {
    /// Gathers the whole call for one reply.
    async fn gather(
        &self,
        mut call: Call,
        most: u64,
        cancel: Option<tokio_util::sync::CancellationToken>,
    ) -> Result<Response, Refusal> {
        let mut transcript = Transcript::new(most);
        let mut cancelled = false;
        let outcome = loop {
            let (mut reader, control) = call.split();
            let gone = async {
                match &cancel {
                    Some(cancel) if !cancelled && control.has_begun() => cancel.cancelled().await,
                    _ => std::future::pending().await,
                }
            };
            let output = tokio::select! {
                biased;
                output = reader.next() => output?,
                () = gone => {
                    cancelled = true;
                    control.cancel().await?;
                    continue;
                }
            };
            if let Output::Started(exec) = &output {
                let exec = exec.clone();
                self.started(&exec);
                transcript.exec = Some(exec.clone());
                control.begun(exec);
                continue;
            }
            if let Some(outcome) = transcript.add(output) {
                break outcome;
            }
        };
        self.finished(&outcome);
        let reply = Reply::new(&self.record, &self.session, self.language, self.note.as_deref())
            .transcript(&transcript)
            .finished(&outcome);
        Ok(axum::Json(reply).into_response())
    }

    /// Tells a client what a call brings. The outcome, if it came that far; `Err(Gone)` when the client did not.
    pub(crate) async fn tell(
        &self,
        call: &mut Call,
        events: &Events,
        start: Start,
    ) -> Result<Option<Outcome>, Gone> {
        let mut exec = None;
        loop {
            let output = tokio::select! {
                biased;
                output = call.next() => output,
                () = events.closed() => return Err(Gone),
            };
            let output = match output {
                Ok(output) => output,
                Err(problem) => {
                    events.send("error", None, &ProblemDocument::from(problem)).await?;
                    return Ok(None);
                }
            };
            let id = |chunk: u64| match &exec {
                Some(exec) => format!("{}/{exec}/{chunk}", self.record.id),
                None => chunk.to_string(),
            };
            match output {
                Output::Started(name) => {
                    if start == Start::New {
                        self.started(&name);
                        let event = StartEvent {
                            sandbox: &self.record.id,
                            session: &self.session,
                            exec: &name,
                            environment: &self.record.spec.environment,
                            language: self.language,
                        };
                        events.send("start", None, &event).await?;
                    }
                    exec = Some(name);
                }
                Output::Bytes { stream, chunk, offset, bytes } => {
                    let name = if stream == Stream::Stderr { "stderr" } else { "stdout" };
                    let event = BytesEvent { chunk, offset, data: Bytes(bytes) };
                    events.send(name, Some(&id(chunk)), &event).await?;
                }
                Output::Display { chunk, display } => {
                    let event = DisplayEvent { chunk, kind: display.kind, mime: &display.mime };
                    events.send("result", Some(&id(chunk)), &event).await?;
                }
                Output::Paused { .. } => return Ok(None),
                Output::Finished(outcome) => {
                    events.send("receipt", None, &outcome.receipt).await?;
                    if let Some(problem) = &outcome.problem {
                        let problem = Problem { session_state: outcome.session_state, ..problem.clone() };
                        events.send("error", None, &ProblemDocument::from(problem)).await?;
                    }
                    let reply = Reply::new(&self.record, &self.session, self.language, self.note.as_deref())
                        .finished(&outcome);
                    events.send("end", None, &reply).await?;
                    return Ok(Some(outcome));
                }
            }
        }
    }

    /// After a stream has ended, one way or the other: the call itself goes on, and its end is noted.
    pub(crate) async fn finish(&self, mut call: Call, told: Result<Option<Outcome>, Gone>) {
        match told {
            Ok(Some(outcome)) => self.finished(&outcome),
            Ok(None) => {}
            Err(Gone) => {
                // Cancelled by the agent if that was asked for: it sees this line close.
                if self.daemon.stop.is_cancelled() {
                    return;
                }
                let (daemon, record) = (Arc::clone(&self.daemon), self.record.clone());
                let exec = call.control.name().cloned();
                drop(call);
                if let Some(exec) = exec
                    && let Ok(Some(outcome)) = daemon.engine.wait(&record, &exec, MAX_TIMEOUT).await
                {
                    self.finished(&outcome);
                }
            }
        }
    }

    fn started(&self, exec: &ExecId) {
        self.daemon.note_started(&self.record, &self.session, self.language, exec, &self.caller);
    }

    fn finished(&self, outcome: &Outcome) {
        self.daemon.note_finished(&self.record, &self.session, self.language, outcome, &self.caller);
    }
}

