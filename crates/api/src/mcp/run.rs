//! The tool `run`.

use std::time::Duration;

use carrel_engine::{
    Engine, Record, Wish,
    call::{Call, Output},
};
use carrel_proto::{
    guest::Language,
    id::{ExecId, SandboxId, SessionName},
    message::{MAX_CODE, Run},
    outcome::Outcome,
    problem::{Code, Problem},
};
use rmcp::model::{CallToolResponse, CallToolResult, CreateTaskResult, JsonObject};
use serde::Deserialize;

use super::{
    Server,
    arguments::{Seconds, millis, parse},
    desks::Seat,
    files::{Made, mark},
    follow::{Client, End, Queue, Transcript, busy_with, follow},
    report::Report,
    scope::{Place, Scope},
    tasks, uri,
};

const DEFAULT_SESSION: &str = "default";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    code: String,
    env: Option<String>,
    session: Option<String>,
    timeout: Option<Seconds>,
}

/// A call before and after its line was found.
struct Running<'a> {
    server: &'a Server,
    engine: &'a Engine,
    place: Place,
    wish: Wish,
    code: String,
    timeout: Duration,
}

pub(super) async fn run(
    server: &Server,
    scope: &Scope,
    arguments: Option<JsonObject>,
    client: &Client,
) -> Result<CallToolResponse, Problem> {
    let Arguments { code, env, session, timeout } = parse(arguments)?;
    if code.len() > MAX_CODE {
        return Err(Problem::new(Code::TooLarge, format!("the code is larger than {MAX_CODE} bytes"))
            .hint("write it to files in /workspace in parts and run them from there"));
    }
    let engine = server.engine().await?;
    let options = &server.options;
    let environment = env.or_else(|| options.wish.environment.clone());
    let session = match (session, &environment) {
        (Some(session), _) => session,
        // Environments of other software have sandboxes of their own.
        (None, Some(name)) if !engine.environments().same_software(name, "python") => name.clone(),
        (None, _) => DEFAULT_SESSION.to_owned(),
    };
    let place = scope.place(&session)?;
    // A sandbox that has to be made starts this interpreter right away.
    let first = engine.environments().first_language(environment.as_deref());
    let first = first.filter(|_| place.session == SessionName::main());
    let running = Running {
        server,
        engine,
        place,
        wish: Wish { environment, first, ..options.wish.clone() },
        code,
        timeout: timeout.map_or(options.timeout, |seconds| seconds.0),
    };
    running.run(client).await
}

impl Running<'_> {
    async fn run(self, client: &Client) -> Result<CallToolResponse, Problem> {
        let seat = self.server.desks.take(self.engine, &self.place, &self.wish).await?;
        if !seat.kept {
            return self.run_on(seat, None, client).await.map_err(|(problem, _)| problem);
        }
        match self.run_on(seat, None, client).await {
            // What was known of it was stale, and nothing has run.
            Err((problem, false)) if problem.code == Code::AgentLost => {
                self.server.desks.forget(&self.place.key);
                let seat = self.server.desks.take(self.engine, &self.place, &self.wish).await?;
                // A box that was there was made anew by the first attempt, which alone knows why.
                let told = (seat.found && seat.note.is_none()).then_some(problem.message);
                self.run_on(seat, told, client).await.map_err(|(problem, _)| problem)
            }
            other => other.map_err(|(problem, _)| problem),
        }
    }

    /// An error comes with a word on whether the call had begun.
    async fn run_on(
        &self,
        seat: Seat,
        known: Option<String>,
        client: &Client,
    ) -> Result<CallToolResponse, (Problem, bool)> {
        let Seat { record, language, note: told, found, .. } = seat;
        let told = told.map(|told| told.text(&self.place.name));
        let mut notes: Vec<String> = told.into_iter().chain(known).collect();
        if found {
            notes.extend(self.still_running(&record).await);
        }
        let mark = mark();
        let mut call = self.start(&record, language).await.map_err(|problem| (problem, false))?;
        let mut transcript = Transcript::new(self.server.options.max_chars);
        let queue = Queue {
            engine: self.engine,
            record: &record,
            session: &self.place.session,
            patience: self.timeout,
        };
        let end = follow(&mut call, &mut transcript, client, queue).await;
        let begun = call.control.has_begun();
        match end {
            Ok(End::Finished(outcome)) => {
                call.end();
                let made = Made::since(self.engine, &record, mark);
                let report = Report {
                    record: &record,
                    session: &self.place.name,
                    exec: &outcome.exec,
                    outcome: Some(&outcome),
                    transcript: &transcript,
                    made,
                    notes,
                };
                let options = &self.server.options;
                Ok(report.result(options.max_chars, options.structured).into())
            }
            Ok(End::Later(exec)) => {
                let task = tasks::working(&record.id, &exec);
                Ok(CallToolResponse::Task(CreateTaskResult::new(task)))
            }
            Err(problem) => {
                if problem.code == Code::AgentLost {
                    self.server.desks.forget(&self.place.key);
                }
                Err((problem, begun))
            }
        }
    }

    async fn start(&self, record: &Record, language: Language) -> Result<Call, Problem> {
        let run = Run {
            session: self.place.session.clone(),
            language,
            code: self.code.clone(),
            timeout_ms: millis(self.timeout),
            // A client that gives up can still read the result later.
            cancel_on_disconnect: false,
        };
        self.engine.run(record, run).await
    }

    /// A word to a client that comes back to work that is still going on.
    async fn still_running(&self, record: &Record) -> Option<String> {
        let execs = self.engine.execs(record).await.ok()?;
        let running = execs.iter().rev().find(|info| info.running)?;
        Some(format!("found {} still at work: {}", busy_with(running), uri::exec(&record.id, &running.exec)))
    }
}

/// The result of a call so far, read from what the sandbox keeps of it, and its outcome if it is over.
pub(super) async fn result_of(
    server: &Server,
    scope: &Scope,
    sandbox: &SandboxId,
    exec: &ExecId,
    chars: usize,
) -> Result<(CallToolResult, Option<Outcome>), Problem> {
    let (engine, record) = server.living(scope, sandbox).await?;
    let mut call = engine.attach(&record, exec, 0, false).await?;
    let mut transcript = Transcript::new(chars);
    let outcome = loop {
        match call.next().await? {
            Output::Paused { .. } => break None,
            output => {
                if let Some(outcome) = transcript.add(output) {
                    break Some(outcome);
                }
            }
        }
    };
    let report = Report {
        record: &record,
        session: scope.name(&record).unwrap_or_default(),
        exec,
        outcome: outcome.as_ref(),
        transcript: &transcript,
        made: Made::default(),
        notes: Vec::new(),
    };
    Ok((report.result(chars, server.options.structured), outcome))
}
