//! Who may come in, and as whom. Every request passes here once, before anything of it is read.
//!
//! The order matters: names of this server and of the calling page first (a page that resolves to us must not even learn whether
//! its token is good), then the token, then how much its owner may do at once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use carrel_engine::{
    Quota, Tenant,
    rate::Rates,
    tokens::{Scope, Token},
};
use carrel_proto::problem::{Code, Problem};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, CorsLayer};

use super::{Daemon, problem::Refusal, server::Door};

/// Requests under way in all; streams count for as long as they last.
const MAX_REQUESTS: usize = 4096;
/// Of one token: so that no single one can take all places.
const MAX_REQUESTS_OF_ONE: usize = 1024;
/// Tokens that are kept count of before those without a request are forgotten.
const MOST_TOKENS: usize = 1024;
/// Headers that a page may read beside the few that it always may.
const EXPOSED: [&str; 5] =
    ["etag", "x-request-id", "retry-after", "idempotency-replayed", "content-disposition"];

pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Who may come in through TCP.
#[derive(Debug, Clone, Default)]
pub struct Guards {
    /// Nobody is asked for a token: loopback only.
    pub no_auth: bool,
    /// Names of this server in a `Host` header, beside those of the loopback and its own address.
    pub hosts: Vec<String>,
    /// Pages that may call: `https://app.example.com`. Any other `Origin` is refused.
    pub origins: Vec<String>,
}

/// Who calls.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) tenant: Tenant,
    /// `None`: the operator.
    pub(crate) token: Option<Arc<Token>>,
    pub(crate) door: Door,
}

impl Caller {
    pub(crate) fn is_operator(&self) -> bool {
        self.token.is_none()
    }

    /// As the log and events name the caller.
    pub(crate) fn name(&self) -> &str {
        self.token.as_ref().map_or("local", |token| token.id.as_str())
    }

    pub(crate) fn may(&self, scope: Scope) -> Result<(), Refusal> {
        self.token.as_ref().map_or(Ok(()), |token| token.scopes.check(scope)).map_err(Into::into)
    }

    /// What the caller may hold in all.
    pub(crate) fn quota(&self) -> Option<Quota> {
        self.token.as_ref().map(|token| token.quota)
    }

    /// What only the operator may do.
    pub(crate) fn operator_only(&self) -> Result<(), Refusal> {
        if self.is_operator() {
            return Ok(());
        }
        Err(Problem::new(Code::Forbidden, "only the operator may do this")
            .hint("use the daemon's unix socket without a token")
            .into())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Refusal;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        parts
            .extensions
            .get::<Self>()
            .cloned()
            .ok_or_else(|| Problem::internal("a request without a caller").into())
    }
}

/// Places and paces of callers.
#[derive(Debug)]
pub(crate) struct Turnstile {
    all: Arc<Semaphore>,
    tokens: Mutex<HashMap<Tenant, Arc<Semaphore>>>,
    rates: Rates,
}

impl Default for Turnstile {
    fn default() -> Self {
        Self {
            all: Arc::new(Semaphore::new(MAX_REQUESTS)),
            tokens: Mutex::default(),
            rates: Rates::default(),
        }
    }
}

impl Turnstile {
    /// A place for one request. It is free again when the answer, stream included, has been sent.
    fn enter(&self, caller: &Caller) -> Result<Vec<OwnedSemaphorePermit>, Refusal> {
        let full = || Refusal::from(Problem::new(Code::Unavailable, "too many requests are under way"));
        let mut places = Vec::with_capacity(2);
        if let Some(token) = &caller.token {
            if let Some(rate) = token.quota.rate
                && let Err(refusal) = self.rates.take(&caller.tenant, rate)
            {
                let wait = refusal.retry_after.as_secs() + 1;
                return Err(Refusal::from(Problem::from(refusal)).retry_after(wait));
            }
            let mut tokens = self.tokens.lock().unwrap_or_else(PoisonError::into_inner);
            if tokens.len() >= MOST_TOKENS {
                // Who holds a place holds its semaphore too.
                tokens.retain(|_, places| Arc::strong_count(places) > 1);
            }
            let places_of_one = tokens
                .entry(caller.tenant.clone())
                .or_insert_with(|| Arc::new(Semaphore::new(MAX_REQUESTS_OF_ONE)));
            let place = Arc::clone(places_of_one).try_acquire_owned().map_err(|_| {
                let word = format!("{MAX_REQUESTS_OF_ONE} requests of this token are under way");
                Problem::new(Code::RateLimited, word).hint("end some streams, or wait")
            })?;
            places.push(place);
        }
        places.push(Arc::clone(&self.all).try_acquire_owned().map_err(|_| full())?);
        Ok(places)
    }
}

/// Guards one request.
pub(crate) async fn admit(State(daemon): State<Arc<Daemon>>, mut request: Request, next: Next) -> Response {
    let began = Instant::now();
    let number = daemon.next_request();
    let method = request.method().clone();
    let path = request.uri().path().to_owned();
    let route = request.extensions().get::<axum::extract::MatchedPath>().map(|path| path.as_str().to_owned());
    let span =
        daemon.options.telemetry.as_ref().map(|telemetry| telemetry.request(&method, request.headers()));
    let mut who = None;
    let mut response = match check(&daemon, &mut request).await {
        Ok((caller, places)) => {
            who = caller.as_ref().map(|caller| caller.name().to_owned());
            let places = Places(Arc::new(places));
            request.extensions_mut().insert(places.clone());
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            let response = match &span {
                None => next.run(request).await,
                Some(span) => span.scope(next.run(request)).await,
            };
            // The answer is over when its body is.
            response.map(|body| axum::body::Body::new(Held { body, _places: places }))
        }
        Err(refusal) => refusal.into_response(),
    };
    if let Ok(value) = HeaderValue::from_str(&number) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    if let Some(span) = span {
        span.end(route.as_deref(), response.status(), &number, began.elapsed());
    }
    daemon.count(&method, route.as_deref(), response.status(), began.elapsed());
    daemon.audit(&super::audit::Entry {
        request: &number,
        caller: who.as_deref(),
        method: method.as_str(),
        route: route.as_deref(),
        path: &path,
        status: response.status().as_u16(),
        duration: began.elapsed(),
    });
    response
}

type Admitted = (Option<Caller>, Vec<OwnedSemaphorePermit>);

async fn check(daemon: &Daemon, request: &mut Request) -> Result<Admitted, Refusal> {
    let door = request.extensions().get::<Door>().copied().unwrap_or(Door::Unix);
    if let Door::Tcp { own, .. } = door {
        check_host(&daemon.options.guards, request, own)?;
    }
    // A shared page has no origin that could be allowed, and needs none: its link says what it may reach.
    if !request.uri().path().starts_with("/shared/") {
        check_origin(&daemon.options.guards, request.headers(), door)?;
    }
    if is_public(request.uri().path()) || is_preflight(request) {
        return Ok((None, Vec::new()));
    }
    let caller = identify(daemon, request.headers(), door).await?;
    let places = daemon.turnstile.enter(&caller)?;
    Ok((Some(caller), places))
}

/// What a browser asks in its own name, without a token. Any other OPTIONS is a request like all.
fn is_preflight(request: &Request) -> bool {
    request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// Needs no token. A share link is its own.
fn is_public(path: &str) -> bool {
    matches!(path, "/health" | "/ready" | "/openapi.json") || path.starts_with("/shared/")
}

async fn identify(daemon: &Daemon, headers: &HeaderMap, door: Door) -> Result<Caller, Refusal> {
    let Some(given) = headers.get(header::AUTHORIZATION) else {
        let open = match door {
            Door::Unix => true,
            Door::Tcp { .. } => daemon.options.guards.no_auth,
        };
        return if open {
            Ok(Caller { tenant: Tenant::local(), token: None, door })
        } else {
            Err(Problem::new(Code::Unauthorized, "a token is needed: `Authorization: Bearer …`")
                .hint("`carrel token create --name …` makes one")
                .into())
        };
    };
    let given = given.to_str().unwrap_or_default();
    let secret = given.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    let secret = secret.map(|(_, secret)| secret.trim()).unwrap_or_default();
    let token = daemon.verify(secret).await?;
    Ok(Caller { tenant: token.tenant(), token: Some(token), door })
}

/// A name that is not ours means that somebody's page resolves to us.
fn check_host(guards: &Guards, request: &Request, own: std::net::SocketAddr) -> Result<(), Refusal> {
    let host = request.uri().host().map(str::to_owned).or_else(|| {
        let value = request.headers().get(header::HOST)?.to_str().ok()?;
        Some(without_port(value).to_owned())
    });
    let host = host.unwrap_or_default();
    let bare = host.trim_matches(['[', ']']);
    let known = ["localhost", "127.0.0.1", "::1"].contains(&bare)
        || own.ip().to_string() == bare
        || guards.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(&host));
    if known {
        return Ok(());
    }
    Err(Problem::new(Code::Forbidden, "this server has another name than the request's Host")
        .hint("--allow-host NAME adds one")
        .into())
}

fn without_port(host: &str) -> &str {
    match host.rfind(':') {
        // Colons inside the brackets of an IPv6 address are none.
        Some(at) if !host[at..].contains(']') => &host[..at],
        _ => host,
    }
}

fn check_origin(guards: &Guards, headers: &HeaderMap, door: Door) -> Result<(), Refusal> {
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or_default();
    let own = match door {
        // No page can reach a unix socket; whoever sends an Origin there copied a browser's request.
        Door::Unix => true,
        Door::Tcp { own, tls, .. } => {
            let scheme = if tls { "https" } else { "http" };
            ["localhost", "127.0.0.1", "[::1]"]
                .iter()
                .any(|host| origin == format!("{scheme}://{host}:{}", own.port()))
        }
    };
    if own || guards.origins.iter().any(|allowed| allowed.trim_end_matches('/') == origin) {
        return Ok(());
    }
    Err(Problem::new(Code::Forbidden, "pages of this Origin may not call")
        .hint("--allow-origin ORIGIN lets them")
        .into())
}

/// What a browser asks before it lets a page of these origins speak to us.
pub(crate) fn cors(origins: &[String]) -> Result<CorsLayer, Problem> {
    let parsed: Result<Vec<HeaderValue>, _> =
        origins.iter().map(|origin| origin.trim_end_matches('/').parse()).collect();
    let parsed =
        parsed.map_err(|_| Problem::new(Code::InvalidArgument, "an origin that no header can carry"))?;
    Ok(CorsLayer::new()
        .allow_origin(AllowOrigin::list(parsed))
        .allow_methods(AllowMethods::mirror_request())
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED.map(HeaderName::from_static)))
}

/// The places of a request. What goes on behind its answer, as a WebSocket does, holds them too.
#[derive(Debug, Clone)]
pub(crate) struct Places(#[expect(dead_code, reason = "held, not read")] Arc<Vec<OwnedSemaphorePermit>>);

/// A body that keeps its request's places until it is sent or dropped.
struct Held {
    body: axum::body::Body,
    _places: Places,
}

impl hyper::body::Body for Held {
    type Data = axum::body::Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<Self::Data>, Self::Error>>> {
        std::pin::Pin::new(&mut self.body).poll_frame(context)
    }
    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_cut_off_and_addresses_are_not() {
        for (given, meant) in [
            ("localhost:80", "localhost"),
            ("localhost", "localhost"),
            ("[::1]:80", "[::1]"),
            ("[::1]", "[::1]"),
        ] {
            assert_eq!(without_port(given), meant);
        }
    }
}
