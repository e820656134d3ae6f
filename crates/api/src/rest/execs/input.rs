//! Input of commands, from whoever has it.
//!
//! Bytes go to the sandbox piece by piece, each answered when it is on its way: so a command that reads slowly slows down who
//! writes, and nothing piles up here.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use axum::{body::Body, extract::State, http::StatusCode};
use carrel_engine::{Record, call::AgentLink, tokens::Scope};
use carrel_proto::{
    files::Content,
    frame::MAX_DATA,
    id::ExecId,
    message::Request,
    problem::{Code, Problem},
};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::rest::{
    Daemon,
    extract::{ExecPath, Query, piece},
    guard::Caller,
    problem::{Problems, Refusal},
};

/// A command that takes nothing for so long is not waited for any more.
const PATIENCE: Duration = Duration::from_secs(60);
/// Input of this size is taken by the sandbox whether or not the command reads.
const AT_ONCE: usize = 1 << 20;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StdinQuery {
    /// End the command's input afterwards.
    #[serde(default)]
    close: bool,
}

/// Writes to a command's input.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/execs/{exec}/stdin", tag = "execs", operation_id = "write_stdin",
    params(("sandbox" = String, Path), ("exec" = String, Path), StdinQuery),
    request_body(content = String, content_type = "application/octet-stream", description = "the bytes, as many as you like"),
    responses((status = 204, description = "all of it is on its way"), Problems))]
pub(super) async fn stdin(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<StdinQuery>,
    mut body: Body,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.living(&caller, &id).await?.record;
    let mut writer = Writer::to(&daemon, &record, &exec).await?;
    // Nothing is a question, too: whether input would be taken.
    if !query.close {
        writer.write(&[]).await?;
    }
    loop {
        let bytes = match piece(&mut body).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break,
            Err(problem) => {
                let word = format!("{}; {} bytes of this input were taken", problem.message, writer.taken);
                let hint = "…/attach is for input that takes its time";
                return Err(Problem { message: word, ..problem }.hint(hint).into());
            }
        };
        writer.write(&bytes).await?;
    }
    if query.close {
        writer.close().await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Gives a command its whole input and closes it. Comes back at once: what the sandbox does not take yet is given to it later.
pub(crate) async fn feed(daemon: &Arc<Daemon>, record: &Record, exec: &ExecId, bytes: Vec<u8>) {
    let (feeding, record, exec) = (Arc::clone(daemon), record.clone(), exec.clone());
    let small = bytes.len() <= AT_ONCE;
    let task = daemon.tasks.spawn(async move {
        let all = async {
            let mut writer = Writer::to(&feeding, &record, &exec).await?;
            // As long as the command lives, and it may take its time.
            writer.patience = None;
            writer.write(&bytes).await?;
            writer.close().await
        };
        // A command that ends before it has read everything is none of our business.
        tokio::select! {
            _ = all => {}
            () = feeding.stop.cancelled() => {}
        }
    });
    if small {
        // A task that panicked has said so.
        let _ = task.await;
    }
}

/// One line to a sandbox, for the input of one command.
struct Writer {
    link: AgentLink,
    exec: ExecId,
    taken: u64,
    patience: Option<Duration>,
}

impl Writer {
    async fn to(daemon: &Daemon, record: &Record, exec: &ExecId) -> Result<Self, Problem> {
        let link = daemon.engine.connect(record).await?;
        Ok(Self { link, exec: exec.clone(), taken: 0, patience: Some(PATIENCE) })
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let mut rest = bytes;
        loop {
            let (piece, more) = rest.split_at(rest.len().min(MAX_DATA));
            self.piece(piece).await?;
            self.taken += piece.len() as u64;
            rest = more;
            if rest.is_empty() {
                return Ok(());
            }
        }
    }

    /// The sandbox takes a piece as a whole or refuses it after a while, because the command does not read.
    async fn piece(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        let began = Instant::now();
        loop {
            let request = Request::WriteStdin { exec: self.exec.clone(), data: Content(bytes.to_vec()) };
            let Err(mut problem) = self.link.ask(&request).await else { return Ok(()) };
            if problem.code == Code::Busy && self.patience.is_none_or(|most| began.elapsed() < most) {
                continue;
            }
            if self.taken > 0 {
                problem.message =
                    format!("{}; {} bytes of this input were taken", problem.message, self.taken);
            }
            return Err(problem);
        }
    }

    async fn close(mut self) -> Result<(), Problem> {
        let request = Request::CloseStdin { exec: self.exec.clone() };
        self.link.ask(&request).await.map(drop)
    }
}
