//! Server-sent events. A producer writes them into a short queue; a client that does not take them for a while loses its stream,
//! so that nobody's slowness holds up a call: what it missed is kept by the sandbox, and `Last-Event-ID` finds it.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;

use crate::telemetry::carried;

/// Events waiting for a client, and their bytes: what one connection may cost. A larger event waits until it is alone.
const AHEAD: usize = 64;
const AHEAD_BYTES: usize = 512 << 10;
/// A client that takes nothing for this long is slow beyond patience.
const PATIENCE: Duration = Duration::from_secs(10);
/// So that no proxy takes a quiet stream for a dead one.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The writing end of a stream of events.
#[derive(Debug)]
pub(crate) struct Events {
    queue: mpsc::Sender<Piece>,
    room: Arc<Semaphore>,
    taken: oneshot::Receiver<()>,
}

/// One event, and the room it takes while it waits.
#[derive(Debug)]
struct Piece {
    bytes: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

/// The client is gone or too slow.
#[derive(Debug)]
pub(crate) struct Gone;

impl Events {
    pub(crate) async fn send(
        &self,
        event: &str,
        id: Option<&str>,
        data: &impl Serialize,
    ) -> Result<(), Gone> {
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
        tokio::time::timeout(PATIENCE, self.write(text.into())).await.map_err(|_| Gone)?
    }

    /// Where the stream begins, for a client that loses it before the first event: an id without data is no event, and is
    /// remembered as the last one (the standard wants it so).
    pub(crate) async fn mark(&self, id: &str) -> Result<(), Gone> {
        let text = format!("id: {id}\n\n");
        tokio::time::timeout(PATIENCE, self.write(text.into())).await.map_err(|_| Gone)?
    }

    async fn write(&self, bytes: Bytes) -> Result<(), Gone> {
        // Fits, because of the constant.
        let size = u32::try_from(bytes.len().min(AHEAD_BYTES)).unwrap_or(u32::MAX);
        let room = tokio::select! {
            room = Arc::clone(&self.room).acquire_many_owned(size) => room.map_err(|_| Gone)?,
            () = self.queue.closed() => return Err(Gone),
        };
        self.queue.send(Piece { bytes, _room: Some(room) }).await.map_err(|_| Gone)
    }

    /// Until the client is gone.
    pub(crate) async fn closed(&self) {
        self.queue.closed().await;
    }

    /// Ends the stream, and says whether its client took all of it.
    pub(crate) async fn delivered(self) -> bool {
        let Self { queue, taken, .. } = self;
        drop(queue);
        taken.await.is_ok()
    }
}

/// An answer whose events come from `producer`, until it ends or the daemon stops. When its client goes, the producer finds out by
/// itself, and may have something to finish.
pub(crate) fn stream<F>(stop: CancellationToken, producer: impl FnOnce(Events) -> F) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    stream_with(stop, KEEP_ALIVE, producer)
}

fn stream_with<F>(
    stop: CancellationToken,
    keep_alive: Duration,
    producer: impl FnOnce(Events) -> F,
) -> Response
where
    F: Future<Output = ()> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(AHEAD);
    let (all, taken) = oneshot::channel();
    let quiet = sender.downgrade();
    let producing =
        carried(producer(Events { queue: sender, room: Arc::new(Semaphore::new(AHEAD_BYTES)), taken }));
    tokio::spawn(async move {
        let mut producing = std::pin::pin!(producing);
        let mut open = true;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = &mut producing => return,
                () = tokio::time::sleep(keep_alive), if open => {
                    let sign = Piece { bytes: Bytes::from_static(b":\n\n"), _room: None };
                    // A full queue needs no sign of life.
                    open = quiet.upgrade().is_some_and(|sender| {
                        !matches!(sender.try_send(sign), Err(mpsc::error::TrySendError::Closed(_)))
                    });
                }
            }
        }
    });
    response(Queue { receiver, all: Some(all) })
}

/// The reading end.
struct Queue {
    receiver: mpsc::Receiver<Piece>,
    all: Option<oneshot::Sender<()>>,
}

impl Stream for Queue {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let piece = ready!(self.receiver.poll_recv(context));
        if piece.is_none()
            && let Some(all) = self.all.take()
        {
            // Nobody has to be waiting for it.
            let _ = all.send(());
        }
        Poll::Ready(piece.map(|piece| Ok(piece.bytes)))
    }
}

fn response(events: Queue) -> Response {
    let mut response = Body::from_stream(events).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // For proxies that gather answers before they pass them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// One event of a stream, as a client's parser gives it.
#[derive(Debug, utoipa::ToSchema)]
#[expect(dead_code, reason = "describes what is written")]
pub(crate) struct ServerSentEvent {
    event: String,
    #[schema(required = false, nullable = false)]
    id: Option<String>,
    /// JSON.
    data: String,
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    #[tokio::test]
    async fn a_quiet_stream_says_now_and_then_that_it_lives() {
        let often = Duration::from_millis(10);
        let response = stream_with(CancellationToken::new(), often, |events| async move {
            events.closed().await;
        });
        let mut body = response.into_body();
        for _ in 0..3 {
            let frame = body.frame().await.unwrap().unwrap();
            // A comment, which is no event to any parser.
            assert_eq!(frame.into_data().unwrap(), ":\n\n");
        }
    }
}
