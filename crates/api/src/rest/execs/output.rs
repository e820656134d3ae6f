//! What a run or exec printed: in pages, as events, as bytes.

use std::{sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, header},
    response::{IntoResponse, Response},
};
use carrel_engine::{
    Record,
    call::{Call, Output},
    tokens::Scope,
};
use carrel_proto::{
    files::Content,
    frame::Stream,
    id::{ExecId, SandboxId},
    message::{DisplayKind, What},
    outcome::Outcome,
    problem::Problem,
};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use utoipa::{IntoParams, ToSchema};

use crate::rest::{
    Daemon,
    extract::{ExecPath, Query},
    guard::Caller,
    problem::{Problems, Refusal, bad},
    run::{Following, Heard, stream_name},
    sse::{self, ServerSentEvent},
    turnstile::{Room, Taken},
};

/// Bytes of one page.
const DEFAULT_PAGE: u64 = 1 << 20;
const MOST_PAGE: u64 = 16 << 20;
/// A reply that waits cannot show that it lives, and proxies lose patience after a minute.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OutputQuery {
    /// The first chunk: `next` of the page before.
    #[serde(default)]
    since: u64,
    /// Most bytes, 1 MB unless said otherwise; the first chunk comes whole in any case.
    #[param(minimum = 1, maximum = 16_777_216)]
    max: Option<u64>,
    /// Wait so long for the first chunk.
    #[param(minimum = 0.0, maximum = 60.0)]
    wait_seconds: Option<f64>,
}

/// A page of output.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct OutputPage {
    chunks: Vec<Chunk>,
    /// `since` of the next page.
    next: u64,
    running: bool,
    /// How it ended, once there is nothing more to read.
    outcome: Option<Outcome>,
}

/// Bytes of a stream, or a value that was shown.
#[derive(Debug, Serialize, ToSchema)]
struct Chunk {
    chunk: u64,
    /// `stdout`, `stderr` or `result`; a terminal's is `stdout`.
    stream: &'static str,
    /// Of the first byte in its stream: a jump is what was not kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    data: Option<Content>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    kind: Option<DisplayKind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false, nullable = false)]
    mime: Option<std::collections::BTreeMap<String, serde_json::Value>>,
}

/// A page of what a run or exec printed.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs/{exec}/output", tag = "execs", operation_id = "read_output",
    params(("sandbox" = String, Path), ("exec" = String, Path), OutputQuery), responses((status = 200, body = OutputPage), Problems))]
pub(super) async fn output(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<OutputQuery>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Read)?;
    let most = match query.max.unwrap_or(DEFAULT_PAGE) {
        most @ 1..=MOST_PAGE => most,
        _ => return Err(bad(format!("max is between 1 and {MOST_PAGE}")).into()),
    };
    let wait = super::seconds("wait_seconds", query.wait_seconds.unwrap_or(0.0), LONGEST_WAIT)?;
    let record = daemon.living(&caller, &id).await?.record;
    let mut taken = Taken::default();
    let mut room = (&caller.room, &mut taken);
    let mut page = read(&daemon, &record, &exec, query.since, most, &mut room).await?;
    if page.chunks.is_empty() && page.running && !wait.is_zero() {
        let mut following = daemon.engine.attach(&record, &exec, query.since, true).await?;
        let came = tokio::select! {
            came = following.next() => came.map(|_| true)?,
            () = tokio::time::sleep(wait) => false,
            () = daemon.stop.cancelled() => false,
        };
        drop(following);
        if came {
            page = read(&daemon, &record, &exec, query.since, most, &mut room).await?;
        }
    }
    let mut response = axum::Json(page).into_response();
    // As long as the page is there.
    response.extensions_mut().insert(Arc::new(taken));
    Ok(response)
}

/// What is there now.
async fn read(
    daemon: &Daemon,
    record: &Record,
    exec: &ExecId,
    since: u64,
    most: u64,
    (room, taken): &mut (&Room, &mut Taken),
) -> Result<OutputPage, Problem> {
    let mut call = daemon.engine.attach(record, exec, since, false).await?;
    let mut page = OutputPage { chunks: Vec::new(), next: since, running: true, outcome: None };
    let mut left = most;
    loop {
        let (chunk, size) = match call.next().await? {
            Output::Started(_) => continue,
            Output::Bytes { stream, chunk, offset, bytes } => {
                let stream = stream_name(stream);
                let data = Some(Content(bytes.to_vec()));
                (
                    Chunk { chunk, stream, offset: Some(offset), data, kind: None, mime: None },
                    bytes.len() as u64,
                )
            }
            Output::Display { chunk, display } => {
                let size = serde_json::to_vec(&display).map_or(u64::MAX, |text| text.len() as u64);
                let (kind, mime) = (Some(display.kind), Some(display.mime));
                let stream = stream_name(Stream::Display);
                (Chunk { chunk, stream, offset: None, data: None, kind, mime }, size)
            }
            Output::Paused { next } => {
                page.next = next.max(since);
                return Ok(page);
            }
            Output::Finished(outcome) => {
                page.running = false;
                page.outcome = Some(outcome);
                return Ok(page);
            }
        };
        let no_room = room.take(usize::try_from(size).unwrap_or(usize::MAX), taken);
        if page.chunks.is_empty() {
            no_room?;
        } else if size > left || no_room.is_err() {
            drop(call);
            page.running = daemon.engine.wait(record, exec, Duration::ZERO).await?.is_none();
            return Ok(page);
        }
        left = left.saturating_sub(size);
        page.next = chunk.chunk + 1;
        page.chunks.push(chunk);
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StreamQuery {
    /// The first chunk.
    since: Option<u64>,
}

const LAST_EVENT_ID: &str = "last-event-id";

/// What a run or exec prints, as events, until it ends.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs/{exec}/stream", tag = "execs", operation_id = "stream_output",
    params(("sandbox" = String, Path), ("exec" = String, Path), StreamQuery, ("Last-Event-ID" = Option<String>, Header, description = "`SANDBOX/EXEC/CHUNK`: go on after it")),
    responses((status = 200, description = "the events", body = ServerSentEvent, content_type = "text/event-stream"), Problems))]
pub(super) async fn stream(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<StreamQuery>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    caller.may(Scope::Read)?;
    let last = headers.get(LAST_EVENT_ID).filter(|value| !value.is_empty());
    let after = last.map(|value| after(value, &id, &exec)).transpose()?;
    let since = after.or(query.since).unwrap_or(0);
    let (record, info) = daemon.exec(&caller, &id, &exec).await?;
    let mut call = daemon.engine.attach(&record, &exec, since, true).await?;
    let language = match info.what {
        What::Run { language } => Some(language),
        What::Exec { .. } => None,
    };
    let following = Following {
        record,
        session: info.session,
        language,
        note: None,
        daemon: Arc::clone(&daemon),
        caller: caller.name().to_owned(),
        room: caller.room.clone(),
    };
    Ok(sse::stream(daemon.stop.clone(), move |events| async move {
        // Who comes back has heard the beginning.
        if after.is_none() && following.announce(&events, &exec).await.is_err() {
            return;
        }
        let mut heard = Heard { exec: Some(exec), outcome: None };
        // Its end is noted for the client that began it.
        let _ = following.tell(&mut call, &events, &mut heard).await;
    }))
}

/// The chunk after the one that an event's id names, which must be of this call.
fn after(value: &HeaderValue, sandbox: &SandboxId, exec: &ExecId) -> Result<u64, Refusal> {
    let parse = || {
        let mut parts = value.to_str().ok()?.split('/');
        let of = (parts.next()?, parts.next()?);
        let chunk: u64 = parts.next()?.parse().ok()?;
        let whole = of == (sandbox.as_str(), exec.as_str()) && parts.next().is_none();
        whole.then(|| chunk.saturating_add(1))
    };
    parse().ok_or_else(|| {
        bad("Last-Event-ID is not one of this call's events")
            .hint("ids are SANDBOX/EXEC/CHUNK; leave it out to begin at the beginning")
            .into()
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum RawStream {
    Stdout,
    Stderr,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct RawQuery {
    /// One of them; both, as they came, if none is named.
    #[param(inline)]
    stream: Option<RawStream>,
    /// Until the end, not only what is there.
    #[serde(default)]
    follow: bool,
    /// The first chunk.
    #[serde(default)]
    since: u64,
}

/// Pieces read ahead of a client: each has at most 256 KiB.
const AHEAD: usize = 2;

/// Why a body has to break off: a client must not take half of the output for all of it.
type Broken = Box<dyn std::error::Error + Send + Sync>;

/// The bytes that a run or exec printed.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs/{exec}/raw", tag = "execs", operation_id = "read_raw_output",
    params(("sandbox" = String, Path), ("exec" = String, Path), RawQuery),
    responses((status = 200, description = "the bytes; a body that breaks off is not all of them", body = String, content_type = "application/octet-stream"), Problems))]
pub(super) async fn raw(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<RawQuery>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Read)?;
    let (record, _) = daemon.exec(&caller, &id, &exec).await?;
    let call = daemon.engine.attach(&record, &exec, query.since, query.follow).await?;
    let (sender, receiver) = mpsc::channel(AHEAD);
    let stop = daemon.stop.clone();
    tokio::spawn(async move {
        // A client that goes closes the channel; one that takes nothing is ended by its connection. The code waits for neither.
        let copied: Result<(), Broken> = tokio::select! {
            copied = copy(call, query.stream, &sender) => copied.map_err(Into::into),
            () = sender.closed() => Ok(()),
            () = stop.cancelled() => Err("the daemon stops".into()),
        };
        if let Err(broken) = copied {
            // Its client is gone, if it is not heard.
            let _ = sender.send(Err(broken)).await;
        }
    });
    let mut response = Body::from_stream(ReceiverStream::new(receiver)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    Ok(response)
}

async fn copy(
    mut call: Call,
    wanted: Option<RawStream>,
    sender: &mpsc::Sender<Result<Bytes, Broken>>,
) -> Result<(), Problem> {
    loop {
        match call.next().await? {
            Output::Bytes { stream, bytes, .. } => {
                let from = if stream == Stream::Stderr { RawStream::Stderr } else { RawStream::Stdout };
                if wanted.is_none_or(|wanted| wanted == from)
                    && sender.send(Ok(Bytes::copy_from_slice(bytes))).await.is_err()
                {
                    return Ok(());
                }
            }
            Output::Started(_) | Output::Display { .. } => {}
            Output::Paused { .. } | Output::Finished(_) => return Ok(()),
        }
    }
}
