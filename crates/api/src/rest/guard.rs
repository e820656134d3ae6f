//! Who may come in, and as whom. Every request passes here once, before anything of it is read.
//!
//! The order matters: names of this server and of the calling page first (a page that resolves to us must not even learn whether
//! its token is good), then the token, then how much its owner may do at once, and whether the question can be meant.

use std::sync::Arc;

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use carrel_engine::{
    Quota, Tenant,
    tokens::{Scope, Token},
};
use carrel_proto::problem::{Code, Problem};

use super::{
    Daemon, cors,
    problem::Refusal,
    server::Door,
    turnstile::{Places, Room, Taken},
    visit::{Attended, Visit},
};

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

impl Guards {
    /// Whether pages of this origin were allowed to call.
    pub(crate) fn allows_origin(&self, origin: &str) -> bool {
        self.origins.iter().any(|allowed| allowed.trim_end_matches('/') == origin)
    }
}

/// Who calls.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    pub(crate) tenant: Tenant,
    /// `None`: the operator.
    pub(crate) token: Option<Arc<Token>>,
    pub(crate) door: Door,
    /// For what is held in memory for it.
    pub(crate) room: Room,
    /// What this request will be known as.
    pub(crate) visit: Arc<Visit>,
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

    /// The daemon's own matters: the operator's, and of a token that was made for them.
    pub(crate) fn may_administer(&self) -> Result<(), Refusal> {
        self.may(Scope::Admin)
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

/// Guards one request.
pub(crate) async fn admit(State(daemon): State<Arc<Daemon>>, mut request: Request, next: Next) -> Response {
    let visit = Visit::new(Arc::clone(&daemon), daemon.next_request(), &request);
    let telemetry = daemon.options.telemetry.as_ref();
    let span = telemetry.map(|telemetry| telemetry.request(request.method(), request.headers()));
    let attended = Attended::new(Arc::clone(&visit), span);
    let page = cors::Page::of(&daemon.options.guards, &request);
    let mut response = match check(&daemon, &mut request, &visit, page.as_ref()).await {
        Ok(Admitted::Answered(response)) => response,
        Ok(Admitted::With(places)) => {
            request.extensions_mut().insert(places.clone());
            request.extensions_mut().insert(Arc::clone(&visit));
            let answering = attended.scope(next.run(request));
            tokio::select! {
                biased;
                response = answering => {
                    let (mut parts, body) = response.into_parts();
                    let taken = parts.extensions.remove::<Arc<Taken>>();
                    Response::from_parts(parts, places.answer(body, taken))
                }
                () = places.over() => no_longer().into_response(),
            }
        }
        Err(refusal) => refusal.into_response(),
    };
    if let Some(page) = page {
        page.allow(response.headers_mut());
    }
    if let Ok(value) = HeaderValue::from_str(visit.number()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    attended.answered(response.status());
    response
}

/// The token was good when the request came.
fn no_longer() -> Refusal {
    Problem::new(Code::Unauthorized, "the token was revoked or has expired meanwhile")
        .hint("what it began goes on in its sandbox; another token is needed")
        .into()
}

enum Admitted {
    With(Places),
    /// By the guard itself.
    Answered(Response),
}

async fn check(
    daemon: &Daemon,
    request: &mut Request,
    visit: &Arc<Visit>,
    page: Option<&cors::Page>,
) -> Result<Admitted, Refusal> {
    let door = request.extensions().get::<Door>().copied().unwrap_or(Door::Unix);
    if let Door::Tcp { own, .. } = door {
        check_host(&daemon.options.guards, request, own)?;
    }
    // A shared page has no origin that could be allowed, and needs none: its link says what it may reach.
    if !request.uri().path().starts_with("/shared/") {
        check_origin(&daemon.options.guards, request.headers(), door)?;
    }
    if let Some(answer) = page.and_then(|page| page.preflight(request)) {
        return Ok(Admitted::Answered(answer));
    }
    if is_public(request.uri().path()) {
        daemon.questions.check(request)?;
        return Ok(Admitted::With(Places::default()));
    }
    let mut caller = identify(daemon, request.headers(), door, visit).await?;
    visit.caller(caller.name());
    let lease = caller.token.as_ref().map(|token| daemon.leases.take(&token.id));
    let places = daemon.turnstile.enter(caller.token.as_deref(), lease)?;
    caller.room = places.room();
    daemon.questions.check(request)?;
    request.extensions_mut().insert(caller);
    Ok(Admitted::With(places))
}

/// Needs no token. A share link is its own.
fn is_public(path: &str) -> bool {
    matches!(path, "/health" | "/ready" | "/openapi.json") || path.starts_with("/shared/")
}

async fn identify(
    daemon: &Daemon,
    headers: &HeaderMap,
    door: Door,
    visit: &Arc<Visit>,
) -> Result<Caller, Refusal> {
    let come =
        |tenant, token| Caller { tenant, token, door, room: Room::default(), visit: Arc::clone(visit) };
    let Some(given) = headers.get(header::AUTHORIZATION) else {
        let open = match door {
            Door::Unix => true,
            Door::Tcp { .. } => daemon.options.guards.no_auth,
        };
        return if open {
            Ok(come(Tenant::local(), None))
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
    Ok(come(token.tenant(), Some(token)))
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
    if own || guards.allows_origin(origin) {
        return Ok(());
    }
    Err(Problem::new(Code::Forbidden, "pages of this Origin may not call")
        .hint("--allow-origin ORIGIN lets them")
        .into())
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
