//! Streamable HTTP: the SDK's service behind our own guards.
//!
//! What the SDK leaves open and is closed here: the Origin check, the bearer token, Nagle's algorithm, the size of a body.
//! The SDK's own legacy sessions carry no state of ours, so that losing one costs a client a new `initialize` and nothing
//! else.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderValue, Method, StatusCode, header},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    serve::ListenerExt,
};
use carrel_proto::problem::{Code, Problem};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
    },
};
use subtle::ConstantTimeEq;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::{
    MAX_MESSAGE,
    presence::{Sessions, attend},
};

/// Where the protocol is spoken.
pub const PATH: &str = "/mcp";
/// A legacy session nobody used for this long is dropped; its client then says `initialize` once more.
const SESSION_IDLE: Duration = Duration::from_secs(3600);
/// How long an answered stream can still be resumed.
const RESUMABLE: Duration = Duration::from_secs(300);
const HEADERS: [&str; 5] =
    ["mcp-session-id", "mcp-protocol-version", "mcp-method", "mcp-name", "last-event-id"];

/// Who may come in.
#[derive(Debug, Clone, Default)]
pub struct Guards {
    /// `None`: anybody who can reach the port.
    pub token: Option<String>,
    /// Names of this server in a `Host` header, beside those of the loopback.
    pub hosts: Vec<String>,
    /// Pages that may call: `https://app.example.com`. Any other `Origin` is refused.
    pub origins: Vec<String>,
}

/// Serves until `stop`. Each legacy session, and each newer request, has a handler of its own.
pub async fn serve<H: ServerHandler + Send + 'static>(
    listener: TcpListener,
    guards: Guards,
    stop: CancellationToken,
    handler: impl Fn() -> H + Send + Sync + 'static,
) -> Result<(), Problem> {
    let own =
        listener.local_addr().map_err(|error| Problem::internal(format!("the own address: {error}")))?;
    let app = router(guards, own.port(), &stop, handler)?;
    let listener = listener.tap_io(|stream| {
        // Small answers wait 40 ms for the peer's acknowledgement otherwise. A stream that refuses still works.
        let _ = stream.set_nodelay(true);
    });
    axum::serve(listener, app)
        .with_graceful_shutdown(async move { stop.cancelled().await })
        .await
        .map_err(|error| Problem::internal(format!("serving HTTP: {error}")))
}

fn router<H: ServerHandler + Send + 'static>(
    guards: Guards,
    port: u16,
    stop: &CancellationToken,
    handler: impl Fn() -> H + Send + Sync + 'static,
) -> Result<Router, Problem> {
    let mut sessions = LocalSessionManager::default();
    sessions.session_config.keep_alive = Some(SESSION_IDLE);
    sessions.session_config.completed_cache_ttl = RESUMABLE;
    let own = ["localhost", "127.0.0.1", "::1"].map(str::to_owned);
    // Pages of this very port are ours. A page that only resolves to us still says its own name.
    let same = ["localhost", "127.0.0.1", "[::1]"].map(|host| format!("http://{host}:{port}"));
    let config = StreamableHttpServerConfig::default()
        .with_allowed_hosts(own.into_iter().chain(guards.hosts.clone()))
        .with_allowed_origins(same.into_iter().chain(guards.origins.iter().map(|origin| with_port(origin))))
        .enforce_origin_validation()
        .with_max_request_body_bytes(MAX_MESSAGE)
        .with_cancellation_token(stop.clone());
    let service = StreamableHttpService::new(move || Ok(handler()), Arc::new(sessions), config);
    let sessions = Arc::new(Sessions::default());
    let mut app = Router::new()
        .route_service(PATH, service)
        .layer(from_fn_with_state(sessions, attend))
        .layer(from_fn(goodbye));
    if let Some(token) = guards.token {
        app = app.layer(from_fn_with_state(Arc::new(token), admit));
    }
    if !guards.origins.is_empty() {
        app = app.layer(cors(&guards.origins)?);
    }
    Ok(app)
}

/// An origin that names no port means its scheme's; the SDK would take it for every port.
fn with_port(origin: &str) -> String {
    let origin = origin.trim_end_matches('/');
    match origin.split_once("://") {
        Some(("https", host)) if !has_port(host) => format!("{origin}:443"),
        Some(("http", host)) if !has_port(host) => format!("{origin}:80"),
        _ => origin.to_owned(),
    }
}

/// Colons inside the brackets of an IPv6 address are none.
fn has_port(host: &str) -> bool {
    host.rsplit(']').next().is_some_and(|rest| rest.contains(':'))
}

/// A session that was ended is ended: clients take the SDK's "accepted" for a failure.
async fn goodbye(request: Request, next: Next) -> Response {
    let leaving = request.method() == Method::DELETE;
    let mut response = next.run(request).await;
    if leaving && response.status() == StatusCode::ACCEPTED {
        *response.status_mut() = StatusCode::OK;
    }
    response
}

/// Lets in who has the token.
async fn admit(State(token): State<Arc<String>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let given = given.and_then(|value| value.split_at_checked("bearer ".len()));
    let right = given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(b"bearer ") && bool::from(given.ct_eq(token.as_bytes()))
    });
    if right {
        return next.run(request).await;
    }
    let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
    (StatusCode::UNAUTHORIZED, challenge, "a bearer token is needed: `Authorization: Bearer …`\n")
        .into_response()
}

/// What a browser asks before it lets a page of these origins speak to us.
fn cors(origins: &[String]) -> Result<CorsLayer, Problem> {
    let parsed: Result<Vec<HeaderValue>, _> = origins.iter().map(|origin| origin.parse()).collect();
    let parsed =
        parsed.map_err(|_| Problem::new(Code::InvalidArgument, "an origin that no header can carry"))?;
    Ok(CorsLayer::new()
        .allow_origin(AllowOrigin::list(parsed))
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(HEADERS.map(axum::http::HeaderName::from_static)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_means_one_port() {
        for (given, meant) in [
            ("https://app.example.com", "https://app.example.com:443"),
            ("http://app.example.com/", "http://app.example.com:80"),
            ("http://app.example.com:3000", "http://app.example.com:3000"),
            ("http://[::1]", "http://[::1]:80"),
            ("http://[::1]:3000", "http://[::1]:3000"),
            ("null", "null"),
        ] {
            assert_eq!(with_port(given), meant);
        }
    }
}
