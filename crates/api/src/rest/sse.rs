//! Server-sent events. A producer writes them into a short queue; a client that does not take them for a while loses its stream,
//! so that nobody's slowness holds up a call: what it missed is kept by the sandbox, and `Last-Event-ID` finds it.

use std::time::Duration;

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;

/// Events waiting for a client: a chunk is at most 64 KiB or so.
const AHEAD: usize = 16;
/// A client that takes nothing for this long is slow beyond patience.
const PATIENCE: Duration = Duration::from_secs(10);
/// So that no proxy takes a quiet stream for a dead one.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The writing end of a stream of events.
#[derive(Debug)]
pub(crate) struct Events(mpsc::Sender<Bytes>);

/// The client is gone or too slow.
#[derive(Debug)]
pub(crate) struct Gone;

impl Events {
    pub(crate) async fn send(&self, event: &str, id: Option<&str>, data: &impl Serialize) -> Result<(), Gone> {
        let mut text = Vec::with_capacity(256);
        text.extend_from_slice(b"event: ");
        text.extend_from_slice(event.as_bytes());
        if let Some(id) = id {
            text.extend_from_slice(b"\nid: ");
            text.extend_from_slice(id.as_bytes());
        }
        text.extend_from_slice(b"\ndata: ");
        // JSON has no raw line ends, so that one event is one line of data.
        serde_json::to_writer(&mut text, data).map_err(|_| Gone)?;
        text.extend_from_slice(b"\n\n");
        self.write(text.into()).await
    }

    async fn write(&self, bytes: Bytes) -> Result<(), Gone> {
        self.0.send_timeout(bytes, PATIENCE).await.map_err(|_| Gone)
    }

    /// Until the client is gone.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}

/// An answer whose events come from `producer`, until it ends, its client goes, or the daemon stops.
pub(crate) fn stream<F>(stop: CancellationToken, producer: impl FnOnce(Events) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(AHEAD);
    let quiet = sender.downgrade();
    let producing = producer(Events(sender));
    tokio::spawn(async move {
        let mut producing = std::pin::pin!(producing);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = &mut producing => return,
                () = tokio::time::sleep(KEEP_ALIVE) => {
                    let Some(sender) = quiet.upgrade() else { return };
                    // A full queue needs no sign of life.
                    if let Err(mpsc::error::TrySendError::Closed(_)) = sender.try_send(Bytes::from_static(b":\n\n")) {
                        // The producer finds out by itself, and may have something to finish.
                        drop(sender);
                        return producing.await;
                    }
                }
            }
        }
    });
    response(ReceiverStream::new(receiver))
}

fn response(events: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let body = Body::from_stream(events.map(Ok::<_, std::convert::Infallible>));
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // For proxies that gather answers before they pass them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}
