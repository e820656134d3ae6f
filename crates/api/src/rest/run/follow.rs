//! Following a call for a client: the whole of it for one reply, or piece by piece.

use std::{collections::BTreeMap, sync::Arc};

use axum::response::{IntoResponse, Response};
use carrel_engine::{
    Record, State,
    call::{Call, Output},
};
use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::{ExecId, SandboxId, SessionName},
    limits::MAX_TIMEOUT,
    message::{Display, DisplayKind},
    outcome::Outcome,
    problem::{Code, Problem},
};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

use crate::{
    kept::Bytes,
    reply::{Reply, Transcript},
    rest::{
        Daemon,
        execs::feed,
        problem::{ProblemDocument, Refusal},
        sse::{Events, Gone},
        turnstile::{Room, Taken},
    },
};

/// Shown values in one reply: a few of the largest pictures. Code may show them without end, and a reply is held in memory.
const MOST_SHOWN: usize = 64 << 20;

/// Room for output is asked for in steps.
const ROOM_STEP: usize = 64 << 10;

/// A run or, without a language, an exec that is followed for a client.
#[derive(Debug)]
pub(crate) struct Following {
    pub(crate) record: Record,
    pub(crate) session: SessionName,
    pub(crate) language: Option<Language>,
    pub(crate) note: Option<String>,
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) caller: String,
    /// For a reply that is gathered.
    pub(crate) room: Room,
}

/// What a stream has learned of its call so far.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    pub(crate) exec: Option<ExecId>,
    pub(crate) outcome: Option<Outcome>,
}

#[derive(Debug, Serialize)]
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
    kind: DisplayKind,
    mime: &'a BTreeMap<String, serde_json::Value>,
}

/// As callers see it: a terminal has one stream.
pub(crate) fn stream_name(stream: Stream) -> &'static str {
    match stream {
        Stream::Stderr => "stderr",
        Stream::Display => "result",
        Stream::Stdin | Stream::Stdout | Stream::Pty => "stdout",
    }
}

impl Following {
    /// Gathers the whole call for one reply, gives it its `input`, and cancels it when the client is `gone`.
    pub(crate) async fn gather(
        &self,
        call: Call,
        input: Option<Vec<u8>>,
        most: u64,
        gone: Option<CancellationToken>,
    ) -> Result<Response, Refusal> {
        let mut begun = None;
        let gathered = self.gather_all(call, input, most, gone, &mut begun).await;
        if let (Err(refusal), Some(exec)) = (&gathered, begun) {
            self.lost(&exec, refusal.problem());
        }
        gathered
    }

    async fn gather_all(
        &self,
        mut call: Call,
        input: Option<Vec<u8>>,
        most: u64,
        gone: Option<CancellationToken>,
        begun: &mut Option<ExecId>,
    ) -> Result<Response, Refusal> {
        let mut transcript = Transcript::new(most);
        let Output::Started(exec) = call.next().await? else {
            return Err(Problem::new(Code::Protocol, "a call that does not begin with its name").into());
        };
        self.started(&exec);
        *begun = Some(exec.clone());
        if let Some(bytes) = input {
            feed(&self.daemon, &self.record, &exec, bytes).await;
        }
        transcript.exec = Some(exec);
        let (mut shown, mut left_out, mut cancelled) = (0, 0, false);
        let (mut room_for, mut taken) = (0, Taken::default());
        let outcome = loop {
            let (mut reader, control) = call.split();
            let cancel = async {
                match &gone {
                    Some(gone) if !cancelled => gone.cancelled().await,
                    _ => std::future::pending().await,
                }
            };
            tokio::select! {
                // First: code that prints without end always has something to read.
                biased;
                () = cancel => {
                    cancelled = true;
                    control.cancel().await?;
                }
                output = reader.next() => match output? {
                    Output::Display { display, .. } => {
                        let more = weight(&display);
                        if shown + more > MOST_SHOWN || self.room.take(more, &mut taken).is_err() {
                            left_out += 1;
                        } else {
                            shown += more;
                            transcript.results.push(display);
                        }
                    }
                    Output::Bytes { stream, offset, bytes, .. } => {
                        let needed = (transcript.held() + bytes.len()).saturating_sub(room_for);
                        let step = if needed == 0 { 0 } else { needed.max(ROOM_STEP) };
                        // The code runs and prints all the same: what there is no room for is counted, and kept by the sandbox.
                        if self.room.take(step, &mut taken).is_ok() {
                            room_for += step;
                            transcript.bytes(stream, offset, bytes);
                        } else {
                            transcript.skip(stream, offset, bytes.len());
                        }
                    }
                    other => if let Some(outcome) = transcript.add(other) {
                        break outcome;
                    }
                },
            }
        };
        call.end();
        self.finished(&outcome);
        let note = match (&self.note, left_out) {
            (note, 0) => note.clone(),
            (note, count) => {
                let word = format!("{count} results are left out of this reply; …/output has them");
                Some(note.iter().cloned().chain([word]).collect::<Vec<_>>().join("; "))
            }
        };
        let reply = Reply::new(&self.record, &self.session, self.language, note.as_deref())
            .transcript(&transcript)
            .finished(&outcome);
        let mut response = axum::Json(reply).into_response();
        // As long as the reply is there.
        response.extensions_mut().insert(Arc::new(taken));
        Ok(response)
    }

    /// Tells a client what a call brings, until it ends; `Err(Gone)` when the client did not wait for that.
    pub(crate) async fn tell(&self, call: &mut Call, events: &Events, heard: &mut Heard) -> Result<(), Gone> {
        loop {
            let output = tokio::select! {
                biased;
                output = call.next() => output,
                () = events.closed() => return Err(Gone),
            };
            let output = match output {
                Ok(output) => output,
                Err(problem) => return events.send("error", None, &ProblemDocument::from(problem)).await,
            };
            let id = |chunk: u64| {
                let exec = heard.exec.as_ref().map_or("", ExecId::as_str);
                format!("{}/{exec}/{chunk}", self.record.id)
            };
            match output {
                Output::Started(exec) => {
                    self.started(&exec);
                    self.announce(events, &exec).await?;
                    heard.exec = Some(exec);
                }
                Output::Bytes { stream, chunk, offset, bytes } => {
                    let event = BytesEvent { chunk, offset, data: Bytes(bytes) };
                    events.send(stream_name(stream), Some(&id(chunk)), &event).await?;
                }
                Output::Display { chunk, display } => {
                    let event = DisplayEvent { chunk, kind: display.kind, mime: &display.mime };
                    events.send("result", Some(&id(chunk)), &event).await?;
                }
                // Only where nobody follows to the end.
                Output::Paused { .. } => return Ok(()),
                Output::Finished(outcome) => {
                    let outcome = heard.outcome.insert(outcome);
                    events.send("receipt", None, &outcome.receipt).await?;
                    if let Some(problem) = &outcome.problem {
                        let problem = Problem { session_state: outcome.session_state, ..problem.clone() };
                        events.send("error", None, &ProblemDocument::from(problem)).await?;
                    }
                    let reply = Reply::new(&self.record, &self.session, self.language, self.note.as_deref())
                        .finished(outcome);
                    return events.send("end", None, &reply).await;
                }
            }
        }
    }

    /// What a stream begins with.
    pub(crate) async fn announce(&self, events: &Events, exec: &ExecId) -> Result<(), Gone> {
        let event = StartEvent {
            sandbox: &self.record.id,
            session: &self.session,
            exec,
            environment: &self.record.spec.environment,
            language: self.language,
        };
        events.send("start", None, &event).await
    }

    /// After the stream of the client that began the call: its end is noted also if that client did not wait for it.
    pub(crate) async fn note_end(&self, heard: Heard) {
        match (heard.outcome, heard.exec) {
            (Some(outcome), _) => self.finished(&outcome),
            (None, Some(exec)) => self.watch(&exec).await,
            (None, None) => {}
        }
    }

    /// Waits for the end of a call that nobody follows, and notes it.
    pub(crate) async fn watch(&self, exec: &ExecId) {
        loop {
            let outcome = tokio::select! {
                () = self.daemon.stop.cancelled() => return,
                outcome = self.daemon.engine.wait(&self.record, exec, MAX_TIMEOUT) => outcome,
            };
            match outcome {
                Ok(Some(outcome)) => return self.finished(&outcome),
                Ok(None) => {}
                Err(problem) => return self.unheard(exec, &problem),
            }
        }
    }

    pub(crate) fn started(&self, exec: &ExecId) {
        self.daemon.note_started(&self.record, &self.session, self.language, exec, &self.caller);
    }

    /// Nobody says how the call ends: its sandbox sleeps, and the call with it, or is gone.
    fn unheard(&self, exec: &ExecId, problem: &Problem) {
        let record = self.daemon.engine.record(&self.record.id);
        let state = record.ok().flatten().map(|record| record.state);
        match (state, &self.daemon.options.telemetry) {
            (Some(State::Standby | State::Hibernated), Some(telemetry)) => {
                telemetry.forget(&self.record, exec)
            }
            (Some(State::Standby | State::Hibernated), None) => {}
            _ => self.lost(exec, problem),
        }
    }

    /// The sandbox is gone, and the call with it.
    fn lost(&self, exec: &ExecId, problem: &Problem) {
        self.daemon.note_lost(&self.record, &self.session, self.language, exec, &self.caller, problem.code);
    }

    fn finished(&self, outcome: &Outcome) {
        self.daemon.note_finished(&self.record, &self.session, self.language, outcome, &self.caller);
    }
}

/// About as many bytes as it takes in memory.
fn weight(display: &Display) -> usize {
    let of = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string().len(), str::len);
    display.mime.iter().map(|(kind, value)| kind.len() + of(value)).sum()
}
