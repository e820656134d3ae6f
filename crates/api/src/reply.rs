//! What a run or exec is answered with, the same on the command line (`--json`) and over HTTP: docs/cli-json.md, docs/http.md.

use carrel_engine::{Record, call::Output};
use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::{ExecId, SessionName},
    message::Display,
    outcome::{Cause, Exception, FilesState, Outcome, Receipt, SessionState},
    problem::Problem,
};
use serde::Serialize;

use crate::kept::Kept;

/// A call's output as it is gathered for a reply.
#[derive(Debug)]
pub struct Transcript {
    pub exec: Option<ExecId>,
    pub stdout: Kept,
    pub stderr: Kept,
    pub results: Vec<Display>,
}

impl Transcript {
    /// Of at most this many bytes per stream.
    pub fn new(most: u64) -> Self {
        Self { exec: None, stdout: Kept::new(most), stderr: Kept::new(most), results: Vec::new() }
    }

    pub fn bytes(&mut self, stream: Stream, offset: u64, bytes: &[u8]) {
        match stream {
            Stream::Stderr => self.stderr.add(offset, bytes),
            _ => self.stdout.add(offset, bytes),
        }
    }

    /// Bytes for which there is no room.
    pub fn skip(&mut self, stream: Stream, offset: u64, count: usize) {
        match stream {
            Stream::Stderr => self.stderr.skip(offset, count),
            _ => self.stdout.skip(offset, count),
        }
    }

    /// Bytes of both streams that are in memory.
    pub fn held(&self) -> usize {
        self.stdout.held() + self.stderr.held()
    }

    /// The outcome, once it is there.
    pub fn add(&mut self, output: Output<'_>) -> Option<Outcome> {
        match output {
            Output::Started(exec) => self.exec = Some(exec),
            Output::Bytes { stream, offset, bytes, .. } => self.bytes(stream, offset, bytes),
            Output::Display { display, .. } => self.results.push(display),
            Output::Paused { .. } => {}
            Output::Finished(outcome) => return Some(outcome),
        }
        None
    }
}

/// One call, answered.
#[derive(Debug, Serialize, utoipa::ToSchema)]
#[schema(as = RunReply)]
pub struct Reply<'a> {
    #[schema(value_type = String)]
    pub sandbox: &'a str,
    #[schema(value_type = String)]
    pub session: &'a str,
    #[schema(value_type = Option<ExecId>)]
    pub exec: Option<&'a ExecId>,
    #[schema(value_type = String)]
    pub environment: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, required = false)]
    pub language: Option<Language>,
    pub exit_code: Option<u8>,
    pub cause: Option<Cause>,
    pub session_state: SessionState,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Kept>, required = false)]
    pub stdout: Option<&'a Kept>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Kept>, required = false)]
    pub stderr: Option<&'a Kept>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<Display>>, required = false)]
    pub results: Option<&'a [Display]>,
    #[schema(value_type = Option<Exception>)]
    pub exception: Option<&'a Exception>,
    pub error: Option<Problem>,
    #[schema(value_type = Option<Receipt>)]
    pub receipt: Option<&'a Receipt>,
    /// Whether a call that takes the interpreter down leaves the session as it was before: this one, and the next. Missing where
    /// undo is off, and for commands.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<bool>, required = false)]
    pub transactional: Option<bool>,
    /// Why it is not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, required = false)]
    pub transactional_reason: Option<&'a str>,
    /// With `rolled_back`: how many calls were taken back, this one included.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, required = false)]
    pub taken_back: Option<u32>,
    /// With `rolled_back`: what became of the files.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<FilesState>, required = false)]
    pub files_state: Option<FilesState>,
    /// Why they did not go back.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, required = false)]
    pub files_reason: Option<&'a str>,
    #[schema(value_type = Option<String>)]
    pub note: Option<&'a str>,
}

impl<'a> Reply<'a> {
    /// Without output: what a stream ends with.
    pub fn new(
        record: &'a Record,
        session: &'a SessionName,
        language: Option<Language>,
        note: Option<&'a str>,
    ) -> Self {
        Self {
            sandbox: record.id.as_str(),
            session: session.as_str(),
            exec: None,
            environment: &record.spec.environment,
            language,
            exit_code: None,
            cause: None,
            session_state: SessionState::None,
            stdout: None,
            stderr: None,
            results: None,
            exception: None,
            error: None,
            receipt: None,
            transactional: None,
            transactional_reason: None,
            taken_back: None,
            files_state: None,
            files_reason: None,
            note,
        }
    }

    pub fn transcript(mut self, transcript: &'a Transcript) -> Self {
        self.exec = transcript.exec.as_ref();
        self.stdout = Some(&transcript.stdout);
        self.stderr = Some(&transcript.stderr);
        self.results = Some(&transcript.results);
        self
    }

    pub fn finished(mut self, outcome: &'a Outcome) -> Self {
        self.exec = Some(&outcome.exec);
        self.cause = Some(outcome.cause);
        self.session_state = outcome.session_state;
        self.exception = outcome.exception.as_ref();
        let session_state = outcome.session_state;
        self.error = outcome.problem.clone().map(|problem| Problem { session_state, ..problem });
        self.receipt = Some(&outcome.receipt);
        self.transactional = outcome.transactional;
        self.transactional_reason = outcome.transactional_reason.as_deref();
        self.taken_back = outcome.taken_back;
        self.files_state = outcome.files_state;
        self.files_reason = outcome.files_reason.as_deref();
        self.exit_code = Some(exit_code(outcome));
        self
    }
}

/// The exit code of a call, for a process that stands for it.
pub fn exit_code(outcome: &Outcome) -> u8 {
    match (outcome.cause, outcome.exit_code) {
        (Cause::Timeout, _) => 124,
        (Cause::Cancelled, 0) => 130,
        (_, 0) if outcome.problem.is_some() => 125,
        // As the kernel does it.
        (_, code) => u8::try_from(code.rem_euclid(256)).unwrap_or(125),
    }
}
