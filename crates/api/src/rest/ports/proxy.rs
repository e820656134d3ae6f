//! Passes one request on to a server in a sandbox, and what it answers back, as it comes: nothing is held longer than a buffer.
//!
//! The server is user code and its pages would come from the API's own address. So every answer says `Content-Security-Policy: sandbox`: a
//! page has an origin of its own that nobody trusts. Headers by which a server speaks for its whole origin stop here, and its cookies
//! are bound to its own path. The other way, the caller's token stops here: user code never sees it.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::{Body, Bytes},
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, Version, header},
    response::{IntoResponse, Response},
};
use carrel_engine::Record;
use carrel_proto::problem::{Code, Problem};
use hyper::{
    body::{Frame, Incoming, SizeHint},
    client::conn::http1,
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use tokio::task::JoinHandle;

use super::{
    super::{Daemon, problem::Refusal, server::Door, turnstile},
    places::Place,
};

/// For a connection into the box; a server that lives accepts at once.
const CONNECT: Duration = Duration::from_secs(15);
/// For the head of an answer, from when the request's body last moved. Long polls take a minute or so.
const ANSWER: Duration = Duration::from_secs(120);
/// Headers of an answer, and bytes of its head: as many as we take from clients.
const MAX_HEADERS: usize = 100;
const MAX_HEAD: usize = 64 << 10;

const POLICY: HeaderValue =
    HeaderValue::from_static("sandbox allow-scripts allow-forms allow-popups allow-downloads");
/// What concerns one connection and not the message (RFC 9110, 7.6.1), and what is a thing between us and the client.
const HOPS: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];
/// By which a server would speak for everything at this address.
const FOR_THE_ORIGIN: [HeaderName; 7] = [
    HeaderName::from_static("service-worker-allowed"),
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    HeaderName::from_static("reporting-endpoints"),
    header::ALT_SVC,
    header::STRICT_TRANSPORT_SECURITY,
];

/// How a request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// With a token, or as the operator.
    Own,
    /// Through a link.
    Shared,
}

/// Where a request goes.
#[derive(Debug)]
pub(super) struct Onward {
    pub(super) daemon: Arc<Daemon>,
    pub(super) record: Record,
    pub(super) port: u16,
    /// Of the path, up to where the server's own begins.
    pub(super) prefix: String,
    pub(super) way: Way,
}

impl Onward {
    pub(super) async fn pass(self, mut request: Request) -> Result<Response, Refusal> {
        let place = self.daemon.ways.places.take(&self.record.tenant, &self.record.id)?;
        let client = wants_upgrade(request.headers()).then(|| hyper::upgrade::on(&mut request));
        let stay = request.extensions().get::<turnstile::Places>().cloned().unwrap_or_default();
        let (request, moved) = self.prepare(request)?;
        let stream =
            tokio::time::timeout(CONNECT, self.daemon.engine.dial(&self.record, self.port)).await.map_err(
                |_| Problem::new(Code::Timeout, format!("port {} does not accept connections", self.port)),
            )??;
        let (mut sender, connection) = http1::Builder::new()
            .max_headers(MAX_HEADERS)
            .max_buf_size(MAX_HEAD)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| self.broken(&error))?;
        // It ends with what it carries; how is seen there.
        let connection = Task(self.daemon.tasks.spawn(async move { drop(connection.with_upgrades().await) }));
        let answered = std::pin::pin!(sender.send_request(request));
        let response = self.answered(answered, &moved).await?;
        let carried = Carried { _tasks: [connection, self.keep_awake()], _place: place };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            return match client {
                Some(client) => Ok(self.tunnel(client, response, carried, stay)),
                None => Err(self.broken(&"it switches to a protocol that nobody asked for").into()),
            };
        }
        let mut response = response.map(|body| Body::new(Answer { body, _carried: carried }));
        self.clean(response.headers_mut());
        Ok(response)
    }

    /// The request as the server in the box shall see it.
    fn prepare(&self, request: Request) -> Result<(hyper::Request<Counted>, Arc<AtomicU64>), Refusal> {
        let (mut parts, body) = request.into_parts();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let path = path.strip_prefix(self.prefix.as_str()).unwrap_or(path);
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let door = parts.extensions.get::<Door>().copied().unwrap_or(Door::Unix);
        let asked = parts.uri.authority().map(|authority| authority.as_str().to_owned());
        let upgrade =
            wants_upgrade(&parts.headers).then(|| parts.headers.get(header::UPGRADE).cloned()).flatten();
        strip_hops(&mut parts.headers);
        let headers = &mut parts.headers;
        headers.remove(header::AUTHORIZATION);
        // Answered by us when the body is asked for.
        headers.remove(header::EXPECT);
        if let Some(upgrade) = upgrade {
            headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
            headers.insert(header::UPGRADE, upgrade);
        }
        let own = HeaderValue::from_str(&format!("localhost:{}", self.port)).map_err(Problem::internal)?;
        let host = headers.insert(header::HOST, own);
        let host = asked.and_then(|asked| HeaderValue::from_str(&asked).ok()).or(host);
        let set = |headers: &mut HeaderMap, name: &'static str, value: Option<HeaderValue>| match value {
            Some(value) => drop(headers.insert(name, value)),
            None => drop(headers.remove(name)),
        };
        let scheme = if matches!(door, Door::Tcp { tls: true, .. }) { "https" } else { "http" };
        set(headers, "x-forwarded-host", host);
        set(headers, "x-forwarded-proto", Some(HeaderValue::from_static(scheme)));
        set(headers, "x-forwarded-prefix", HeaderValue::from_str(&self.prefix).ok());
        if let Door::Tcp { peer, .. } = door
            && let Ok(peer) = HeaderValue::from_str(&peer.ip().to_string())
        {
            headers.append("x-forwarded-for", peer);
        }
        let moved = Arc::new(AtomicU64::new(0));
        let mut onward = hyper::Request::new(Counted { body, moved: Arc::clone(&moved) });
        *onward.method_mut() = parts.method;
        *onward.uri_mut() = path
            .parse::<Uri>()
            .map_err(|_| Problem::new(Code::InvalidArgument, "a path that cannot be passed on"))?;
        *onward.version_mut() = Version::HTTP_11;
        *onward.headers_mut() = parts.headers;
        Ok((onward, moved))
    }

    /// The head of the answer. The time runs only while nothing of the request moves: a large upload takes as long as it takes.
    async fn answered(
        &self,
        mut answered: Pin<&mut impl Future<Output = hyper::Result<hyper::Response<Incoming>>>>,
        moved: &AtomicU64,
    ) -> Result<hyper::Response<Incoming>, Refusal> {
        let mut before = moved.load(Ordering::Relaxed);
        loop {
            match tokio::time::timeout(ANSWER, &mut answered).await {
                Ok(answered) => return answered.map_err(|error| self.broken(&error).into()),
                Err(_) if moved.load(Ordering::Relaxed) != before => before = moved.load(Ordering::Relaxed),
                Err(_) => {
                    let word = format!(
                        "the server on port {} has not answered for {} s",
                        self.port,
                        ANSWER.as_secs()
                    );
                    return Err(Problem::new(Code::Timeout, word).into());
                }
            }
        }
    }

    /// The agent does not see what flows through a connection, and would end its box in the midst of a long one for being
    /// idle, or let it be put to sleep.
    fn keep_awake(&self) -> Task {
        let (daemon, record) = (Arc::clone(&self.daemon), self.record.clone());
        let standby = Some(record.spec.standby_after_s).filter(|time| *time > 0).unwrap_or(u64::MAX);
        let often = Duration::from_secs(record.spec.idle_timeout_s.min(standby))
            .div_f32(3.0)
            .max(Duration::from_millis(250));
        Task(self.daemon.tasks.spawn(async move {
            loop {
                tokio::time::sleep(often).await;
                if daemon.engine.ports(&record).await.is_err() {
                    return;
                }
            }
        }))
    }

    fn broken(&self, why: &dyn std::fmt::Display) -> Problem {
        Problem::new(
            Code::PortClosed,
            format!("what listens on port {} gives no HTTP answer: {why}", self.port),
        )
        .hint("look at what the server in the sandbox prints")
    }

    fn clean(&self, headers: &mut HeaderMap) {
        strip_hops(headers);
        for name in FOR_THE_ORIGIN {
            headers.remove(name);
        }
        let cors: Vec<HeaderName> =
            headers.keys().filter(|name| name.as_str().starts_with("access-control-")).cloned().collect();
        for name in cors {
            headers.remove(name);
        }
        bind_cookies(headers, &self.prefix);
        // Beside the server's own policy, if it has one: a browser holds to all of them.
        headers.append(header::CONTENT_SECURITY_POLICY, POLICY);
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        if self.way == Way::Shared {
            // Such a page is a stranger even to its own server; whoever can ask has the link.
            headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        }
    }

    /// From here on bytes go both ways, until one side ends, the daemon or the caller's token does.
    fn tunnel(
        self,
        client: OnUpgrade,
        response: hyper::Response<Incoming>,
        carried: Carried,
        stay: turnstile::Places,
    ) -> Response {
        let mut answer = StatusCode::SWITCHING_PROTOCOLS.into_response();
        *answer.headers_mut() = response.headers().clone();
        let upgrade = answer.headers().get(header::UPGRADE).cloned();
        self.clean(answer.headers_mut());
        answer.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(upgrade) = upgrade {
            answer.headers_mut().insert(header::UPGRADE, upgrade);
        }
        let stop = self.daemon.stop.clone();
        self.daemon.tasks.spawn(async move {
            let tunnel = async {
                let (client, server) = tokio::try_join!(client, hyper::upgrade::on(response))?;
                let (mut client, mut server) = (TokioIo::new(client), TokioIo::new(server));
                // How it ends is for both ends to know; there is nobody else to tell.
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
                Ok::<(), hyper::Error>(())
            };
            tokio::select! {
                () = stop.cancelled() => {}
                () = stay.over() => {}
                _ = tunnel => {}
            }
            drop((carried, stay));
        });
        answer
    }
}

fn wants_upgrade(headers: &HeaderMap) -> bool {
    headers.contains_key(header::UPGRADE) && listed(headers).any(|name| name.eq_ignore_ascii_case("upgrade"))
}

/// Names in `Connection`.
fn listed(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(header::CONNECTION).iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',').map(str::trim))
}

fn strip_hops(headers: &mut HeaderMap) {
    let also: Vec<HeaderName> = listed(headers).filter_map(|name| name.parse().ok()).collect();
    for name in HOPS.into_iter().chain(also) {
        headers.remove(name);
    }
}

/// A cookie for all of this address would be told to every other sandbox's server.
fn bind_cookies(headers: &mut HeaderMap, prefix: &str) {
    let cookies: Vec<HeaderValue> = headers.get_all(header::SET_COOKIE).iter().cloned().collect();
    headers.remove(header::SET_COOKIE);
    for cookie in cookies {
        let Ok(text) = cookie.to_str() else { continue };
        let kept = text.split(';').enumerate().filter(|(at, part)| {
            let name = part.split('=').next().unwrap_or_default().trim();
            *at == 0 || !(name.eq_ignore_ascii_case("path") || name.eq_ignore_ascii_case("domain"))
        });
        let kept: Vec<&str> = kept.map(|(_, part)| part).collect();
        if let Ok(bound) = HeaderValue::from_str(&format!("{}; Path={prefix}/", kept.join(";"))) {
            headers.append(header::SET_COOKIE, bound);
        }
    }
}

/// A task that ends with its exchange.
#[derive(Debug)]
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What an exchange holds until it is over.
#[derive(Debug)]
struct Carried {
    /// The connection into the box, and what keeps the box from being idle.
    _tasks: [Task; 2],
    _place: Place,
}

/// The body of a request, with a count of what has gone.
struct Counted {
    body: Body,
    moved: Arc<AtomicU64>,
}

impl hyper::body::Body for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if polled.is_ready() {
            self.moved.fetch_add(1, Ordering::Relaxed);
        }
        polled
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer, with the connection that it comes from.
struct Answer {
    body: Incoming,
    _carried: Carried,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn what_concerns_one_connection_stays_there() {
        let mut given =
            headers(&[("connection", "close, X-Mine"), ("x-mine", "1"), ("te", "trailers"), ("accept", "a")]);
        strip_hops(&mut given);
        assert_eq!(given, headers(&[("accept", "a")]));
        assert!(wants_upgrade(&headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")])));
        assert!(!wants_upgrade(&headers(&[("connection", "keep-alive"), ("upgrade", "websocket")])));
    }

    #[test]
    fn cookies_are_bound_to_their_own_server() {
        let mut given =
            headers(&[("set-cookie", "path=x; Path=/; HttpOnly; Domain=example.com"), ("set-cookie", "b=2")]);
        // `from_iter` keeps the last of a name.
        given.append("set-cookie", "a=1; PATH = /; Max-Age=3".parse().unwrap());
        bind_cookies(&mut given, "/shared/x");
        let bound: Vec<_> = given.get_all("set-cookie").iter().map(|value| value.to_str().unwrap()).collect();
        assert_eq!(bound.last().unwrap(), &"a=1; Max-Age=3; Path=/shared/x/");
        assert!(
            bound.iter().all(|cookie| !cookie.contains("Domain") && cookie.ends_with("; Path=/shared/x/"))
        );
    }
}
