//! Attaching: a WebSocket on what a command says and hears, for terminals above all.
//!
//! Every viewer has a line to the sandbox of its own and reads at its own pace, so that none of them slows down the code or the
//! others. What waits for a viewer here is one message; one that does not take it in time is dropped, and can come back for the rest.

use std::{sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{
        State,
        ws::{
            CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code,
            rejection::WebSocketUpgradeRejection,
        },
    },
    response::Response,
};
use carrel_engine::{
    Record,
    call::{Call, CallReader, Control, Output},
    tokens::Scope,
};
use carrel_proto::{frame::MAX_DATA, id::ExecId, message::DisplayKind, outcome::Outcome, problem::Problem};
use futures_util::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, time::timeout};
use utoipa::IntoParams;

use crate::rest::{
    Daemon,
    extract::{ExecPath, Query, parse},
    guard::Caller,
    problem::{ProblemDocument, Problems, Refusal, bad},
    run::stream_name,
    turnstile::Places,
};

use super::{Signal, Size};

/// So that no proxy takes a quiet viewer for a dead one.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Three signs of life unanswered: the viewer is gone without a word.
const SILENCE: Duration = Duration::from_secs(45);
/// A viewer that does not take a message for so long is slow beyond patience.
const PATIENCE: Duration = Duration::from_secs(10);
/// For the other side's goodbye.
const GOODBYE: Duration = Duration::from_secs(2);
/// Complaints waiting to be told: who sends nonsense faster waits.
const COMPLAINTS: usize = 4;

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AttachQuery {
    /// The first chunk.
    #[serde(default)]
    since: u64,
    /// Take no input.
    #[serde(default)]
    read_only: bool,
}

/// A WebSocket on a run or exec: docs/http.md says what it carries.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/execs/{exec}/attach", tag = "execs", operation_id = "attach",
    params(("sandbox" = String, Path), ("exec" = String, Path), AttachQuery),
    responses((status = 101, description = "a WebSocket from here on"), Problems))]
pub(super) async fn attach(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    ExecPath(id, exec): ExecPath,
    Query(query): Query<AttachQuery>,
    Extension(places): Extension<Places>,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Refusal> {
    caller.may(if query.read_only { Scope::Read } else { Scope::Run })?;
    let upgrade = upgrade.map_err(|error| {
        bad(format!("this address takes WebSockets only: {error}")).hint("…/stream has the same as events")
    })?;
    let (record, _) = daemon.exec(&caller, &id, &exec).await?;
    let call = daemon.engine.attach(&record, &exec, query.since, true).await?;
    let viewer = Viewer { record, exec, read_only: query.read_only, daemon: Arc::clone(&daemon) };
    let upgrade = upgrade.max_message_size(MAX_DATA).max_frame_size(MAX_DATA);
    Ok(upgrade.on_upgrade(move |socket| {
        // The daemon waits for its goodbye.
        daemon.tasks.track_future(async move {
            viewer.serve(socket, call, &places).await;
            // A viewer counts as a request for as long as it looks.
            drop(places);
        })
    }))
}

/// Messages of the server that are none of the output's bytes.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Told<'a> {
    /// Where the bytes belong that follow.
    Chunk {
        chunk: u64,
        offset: u64,
        stream: &'static str,
    },
    Result {
        chunk: u64,
        kind: DisplayKind,
        mime: &'a std::collections::BTreeMap<String, serde_json::Value>,
    },
    /// What was asked for and not done.
    Error {
        problem: ProblemDocument,
    },
    End {
        outcome: &'a Outcome,
    },
}

/// Messages of a viewer that are no input.
#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Asked {
    Resize(Size),
    Signal { signal: Signal },
    CloseStdin {},
}

/// One viewer.
#[derive(Debug)]
struct Viewer {
    record: Record,
    exec: ExecId,
    read_only: bool,
    daemon: Arc<Daemon>,
}

/// Why a viewer's time is over.
#[derive(Debug)]
enum Over {
    /// The command has ended, and everything was told.
    Ended,
    /// The viewer went, or is too slow.
    Gone,
    Failed(Problem),
}

type Sender = SplitSink<WebSocket, Message>;

impl Viewer {
    async fn serve(self, socket: WebSocket, mut call: Call, places: &Places) {
        let (mut sender, mut receiver) = socket.split();
        let (complain, complaints) = mpsc::channel(COMPLAINTS);
        let (reader, control) = call.split();
        // Both ways at once: a command that does not read must not keep its viewer from seeing what it says.
        let over = tokio::select! {
            over = tell(&mut sender, reader, complaints) => over,
            over = self.hear(&mut receiver, control, &complain) => over,
            () = self.daemon.stop.cancelled() => {
                return close(sender, receiver, close_code::AWAY, "the daemon stops").await;
            }
            () = places.over() => {
                return close(sender, receiver, close_code::POLICY, "the token is good no longer").await;
            }
        };
        match over {
            Over::Ended => close(sender, receiver, close_code::NORMAL, "").await,
            // The answer to its goodbye, if it said one, is still to be sent.
            Over::Gone => drop(timeout(GOODBYE, sender.close()).await),
            Over::Failed(problem) => {
                let told = Told::Error { problem: problem.into() };
                if send(&mut sender, text(&told)).await.is_ok() {
                    close(sender, receiver, close_code::ERROR, "").await;
                }
            }
        }
    }

    /// Passes on what the viewer says, until it goes.
    async fn hear(
        &self,
        receiver: &mut SplitStream<WebSocket>,
        control: &mut Control,
        complain: &mpsc::Sender<Problem>,
    ) -> Over {
        loop {
            let message = match timeout(SILENCE, receiver.next()).await {
                Ok(Some(Ok(message))) => message,
                Ok(Some(Err(_)) | None) | Err(_) => return Over::Gone,
            };
            let done = match message {
                Message::Ping(_) | Message::Pong(_) => continue,
                Message::Close(_) => return Over::Gone,
                _ if self.read_only => Err(bad("this viewer only reads").hint("attach without read_only")),
                Message::Binary(bytes) => control.input(&bytes).await,
                Message::Text(text) => match parse::<Asked>(text.as_bytes()) {
                    Ok(asked) => self.act(asked, control).await,
                    Err(refusal) => Err(refusal.problem().clone()),
                },
            };
            if let Err(problem) = done
                && complain.send(problem).await.is_err()
            {
                return Over::Gone;
            }
        }
    }

    async fn act(&self, asked: Asked, control: &mut Control) -> Result<(), Problem> {
        let engine = &self.daemon.engine;
        match asked {
            Asked::Resize(size) => engine.resize(&self.record, &self.exec, size.rows, size.cols).await,
            Asked::Signal { signal } => engine.signal(&self.record, &self.exec, signal.number()).await,
            // On the line of the input, so that it comes after it.
            Asked::CloseStdin {} => control.close_input().await,
        }
    }
}

/// Where the next byte of output is expected.
#[derive(Debug, Default, PartialEq, Eq)]
struct Expected {
    chunk: u64,
    offset: u64,
    stream: &'static str,
}

/// Tells the viewer what the command says, until its end.
async fn tell(
    sender: &mut Sender,
    mut reader: CallReader<'_>,
    mut complaints: mpsc::Receiver<Problem>,
) -> Over {
    let mut expected = Expected::default();
    let mut sign = tokio::time::interval(KEEP_ALIVE);
    sign.reset();
    loop {
        let output = tokio::select! {
            biased;
            _ = sign.tick() => {
                if send(sender, Message::Ping(Default::default())).await.is_err() {
                    return Over::Gone;
                }
                continue;
            }
            Some(problem) = complaints.recv() => {
                if send(sender, text(&Told::Error { problem: problem.into() })).await.is_err() {
                    return Over::Gone;
                }
                continue;
            }
            output = reader.next() => output,
        };
        let sent = match output {
            Err(problem) => return Over::Failed(problem),
            Ok(Output::Started(_) | Output::Paused { .. }) => Ok(()),
            Ok(Output::Bytes { stream, chunk, offset, bytes }) => {
                let here = Expected { chunk, offset, stream: stream_name(stream) };
                let mut sent = Ok(());
                if here != expected {
                    let told = Told::Chunk { chunk, offset, stream: here.stream };
                    sent = send(sender, text(&told)).await;
                }
                expected = Expected { chunk: chunk + 1, offset: offset + bytes.len() as u64, ..here };
                match sent {
                    Ok(()) => send(sender, Message::binary(bytes.to_vec())).await,
                    gone => gone,
                }
            }
            Ok(Output::Display { chunk, display }) => {
                let told = Told::Result { chunk, kind: display.kind, mime: &display.mime };
                send(sender, text(&told)).await
            }
            Ok(Output::Finished(outcome)) => {
                return match send(sender, text(&Told::End { outcome: &outcome })).await {
                    Ok(()) => Over::Ended,
                    Err(Slow) => Over::Gone,
                };
            }
        };
        if sent.is_err() {
            return Over::Gone;
        }
    }
}

fn text(told: &Told<'_>) -> Message {
    // It holds nothing that JSON cannot carry.
    Message::text(serde_json::to_string(told).unwrap_or_default())
}

/// The viewer is gone or too slow.
struct Slow;

async fn send(sender: &mut Sender, message: Message) -> Result<(), Slow> {
    match timeout(PATIENCE, sender.send(message)).await {
        Ok(Ok(())) => Ok(()),
        _ => Err(Slow),
    }
}

/// Says goodbye, and listens for the answer, without which some clients call it an error.
async fn close(mut sender: Sender, mut receiver: SplitStream<WebSocket>, code: u16, reason: &'static str) {
    let goodbye = Message::Close(Some(CloseFrame { code, reason: reason.into() }));
    let both = async {
        if sender.send(goodbye).await.is_ok() {
            while let Some(Ok(_)) = receiver.next().await {}
        }
    };
    // Said or not: it is over.
    let _ = timeout(GOODBYE, both).await;
}
