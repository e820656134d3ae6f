//! Accepts connections and serves them, within limits, until told to stop.
//!
//! Drawn as a life: listening → draining (nothing new is accepted, answers under way are finished, streams end at once: their
//! clients take them up again) → detached (what is still open is dropped). Sandboxes notice nothing of it.

use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body, http::Request};
use carrel_proto::problem::Problem;
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
};
use tokio_io_timeout::TimeoutStream;
use tokio_rustls::TlsAcceptor;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::ServiceExt;

/// Connections per listener: a connection costs tens of kilobytes, and each may hold a descriptor to an agent.
const MAX_CONNECTIONS: usize = 2048;
/// A request's head has to be there within this time; also how long an unused connection is kept.
const HEAD_TIME: Duration = Duration::from_secs(75);
/// A peer that takes nothing for this long is gone.
const STALLED: Duration = Duration::from_secs(30);
const TLS_TIME: Duration = Duration::from_secs(10);
/// Headers of one request, and bytes of its head.
const MAX_HEADERS: usize = 100;
const MAX_HEAD: usize = 64 << 10;
/// Answers under way when the daemon is told to stop get this long.
const DRAIN: Duration = Duration::from_secs(10);
/// After a failed accept: out of descriptors, most likely.
const ACCEPT_AGAIN: Duration = Duration::from_millis(50);

/// Which door a request came through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    Unix,
    Tcp { own: SocketAddr, peer: SocketAddr, tls: bool },
}

/// Open doors.
#[derive(Default)]
pub struct Listeners {
    pub unix: Vec<UnixListener>,
    pub tcp: Vec<TcpListener>,
    /// For all of `tcp`.
    pub tls: Option<TlsAcceptor>,
}

impl std::fmt::Debug for Listeners {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Listeners({:?}, {:?}, tls: {})", self.unix, self.tcp, self.tls.is_some())
    }
}

/// With every request of the very user who runs the daemon, and not of others who may open its socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnUser;

/// What each connection needs.
#[derive(Clone)]
struct Serving {
    app: Router,
    stop: CancellationToken,
    /// After the drain.
    leave: CancellationToken,
    tasks: TaskTracker,
    /// [`HEAD_TIME`].
    head_time: Duration,
}

/// Serves until `stop`, then drains.
pub(crate) async fn serve(app: Router, listeners: Listeners, stop: CancellationToken) -> Result<(), Problem> {
    let (leave, tasks) = (CancellationToken::new(), TaskTracker::new());
    let serving = Serving { app, stop, leave, tasks, head_time: HEAD_TIME };
    let loops = TaskTracker::new();
    for listener in listeners.unix {
        loops.spawn(accept_unix(listener, serving.clone()));
    }
    for listener in listeners.tcp {
        let own = listener.local_addr().map_err(Problem::internal)?;
        loops.spawn(accept_tcp(listener, own, listeners.tls.clone(), serving.clone()));
    }
    loops.close();
    loops.wait().await;
    serving.tasks.close();
    if tokio::time::timeout(DRAIN, serving.tasks.wait()).await.is_err() {
        serving.leave.cancel();
        serving.tasks.wait().await;
    }
    Ok(())
}

async fn accept_unix(listener: UnixListener, serving: Serving) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Some((stream, place)) = next(&serving.stop, &places, || listener.accept()).await {
        let connection = serving.clone();
        serving.tasks.spawn(async move {
            let peer = stream.0.peer_cred().map(|peer| peer.uid());
            let own = peer.is_ok_and(|peer| peer == rustix::process::geteuid().as_raw());
            connection.serve(stream.0, Door::Unix, own).await;
            drop(place);
        });
    }
}

async fn accept_tcp(listener: TcpListener, own: SocketAddr, tls: Option<TlsAcceptor>, serving: Serving) {
    let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Some(((stream, peer), place)) = next(&serving.stop, &places, || listener.accept()).await {
        // Small answers wait 40 ms for the peer's acknowledgement otherwise. A stream that refuses still works.
        let _ = stream.set_nodelay(true);
        let _ = rustix::net::sockopt::set_socket_keepalive(&stream, true);
        let _ = rustix::net::sockopt::set_tcp_keepidle(&stream, STALLED);
        let (connection, tls) = (serving.clone(), tls.clone());
        serving.tasks.spawn(async move {
            let door = Door::Tcp { own, peer, tls: tls.is_some() };
            match tls {
                None => connection.serve(stream, door, false).await,
                Some(tls) => {
                    if let Ok(Ok(stream)) = tokio::time::timeout(TLS_TIME, tls.accept(stream)).await {
                        connection.serve(stream, door, false).await;
                    }
                }
            }
            drop(place);
        });
    }
}

/// The next connection, once there is a place for it. `None`: it is time to stop.
async fn next<T, F: Future<Output = io::Result<T>>>(
    stop: &CancellationToken,
    places: &Arc<Semaphore>,
    accept: impl Fn() -> F,
) -> Option<(T, tokio::sync::OwnedSemaphorePermit)> {
    // The stop is asked first, so that nobody is let in after it.
    loop {
        let place = tokio::select! {
            biased;
            () = stop.cancelled() => return None,
            place = Arc::clone(places).acquire_owned() => place.ok()?,
        };
        tokio::select! {
            biased;
            () = stop.cancelled() => return None,
            accepted = accept() => match accepted {
                Ok(accepted) => return Some((accepted, place)),
                Err(error) => {
                    tracing::warn!("accepting a connection: {error}");
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                }
            },
        }
    }
}

impl Serving {
    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Send + 'static, door: Door, own: bool) {
        let app = self.app.map_request(move |mut request: Request<Incoming>| {
            request.extensions_mut().insert(door);
            if own {
                request.extensions_mut().insert(OwnUser);
            }
            request.map(Body::new)
        });
        let mut stream = TimeoutStream::new(stream);
        stream.set_write_timeout(Some(STALLED));
        let connection = hyper::server::conn::http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_time)
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD)
            .serve_connection(TokioIo::new(Box::pin(stream)), TowerToHyperService::new(app))
            .with_upgrades();
        let mut connection = std::pin::pin!(connection);
        // How a connection ends is its client's business: there is nobody left to tell.
        tokio::select! {
            _ = &mut connection => {}
            () = self.stop.cancelled() => {
                connection.as_mut().graceful_shutdown();
                tokio::select! {
                    _ = &mut connection => {}
                    () = self.leave.cancelled() => {}
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// What comes back for these bytes, until the server hangs up.
    async fn answer(sent: &[u8], head_time: Duration) -> String {
        let serving = Serving {
            app: Router::new(),
            stop: CancellationToken::new(),
            leave: CancellationToken::new(),
            tasks: TaskTracker::new(),
            head_time,
        };
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let serving = tokio::spawn(serving.serve(server, Door::Unix, false));
        client.write_all(sent).await.unwrap();
        let mut text = String::new();
        client.read_to_string(&mut text).await.unwrap();
        serving.await.unwrap();
        text
    }

    #[tokio::test]
    async fn a_head_that_does_not_come_is_not_waited_for() {
        let said = answer(b"GET / HTTP/1.1\r\nhost: loc", Duration::from_millis(20)).await;
        assert!(!said.contains("200"), "{said}");
    }

    #[tokio::test]
    async fn a_head_has_so_many_headers_and_bytes() {
        let with = |headers: String| format!("GET / HTTP/1.1\r\nconnection: close\r\n{headers}\r\n");
        let many = |count: usize| with((0..count).map(|at| format!("x-{at}: y\r\n")).collect());
        assert!(answer(many(MAX_HEADERS - 1).as_bytes(), HEAD_TIME).await.starts_with("HTTP/1.1 404 "));
        assert!(answer(many(MAX_HEADERS).as_bytes(), HEAD_TIME).await.starts_with("HTTP/1.1 431 "));
        let long = |bytes: usize| with(format!("x: {}\r\n", "y".repeat(bytes)));
        assert!(answer(long(MAX_HEAD / 2).as_bytes(), HEAD_TIME).await.starts_with("HTTP/1.1 404 "));
        // Hyper looks at the size before it reads more, not after.
        let said = answer(long(MAX_HEAD * 2).as_bytes(), HEAD_TIME).await;
        assert!(said.starts_with("HTTP/1.1 431 "), "{said}");
    }

    #[tokio::test]
    async fn a_connection_beyond_the_most_waits_until_one_is_free() {
        let (stop, places) = (CancellationToken::new(), Arc::new(Semaphore::new(1)));
        let come = || async { Ok(()) };
        let (_, place) = next(&stop, &places, come).await.unwrap();
        assert!(futures_util::FutureExt::now_or_never(next(&stop, &places, come)).is_none());
        drop(place);
        assert!(next(&stop, &places, come).await.is_some());
        stop.cancel();
        assert!(next(&stop, &places, come).await.is_none());
    }
}
