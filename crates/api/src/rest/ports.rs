//! What listens in a sandbox, and ways to it: with a token below the sandbox's own address, without one through a share link.
//!
//! The servers behind these addresses are user code: [`proxy`] lets nothing through that would make their pages anybody to the API, and
//! [`share`] signs links that open one port of one sandbox and nothing else.

mod places;
mod proxy;
mod share;

use std::sync::{Arc, OnceLock};

use axum::{
    extract::{FromRequestParts, Request, State},
    http::{HeaderValue, Method, StatusCode, header, request::Parts},
    response::{IntoResponse, Response},
    routing::any,
};
use carrel_engine::tokens::Scope;
use carrel_proto::{
    id::SandboxId,
    message::PortInfo,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use self::{
    places::Places,
    proxy::{Onward, Way},
    share::Links,
};
use super::{
    Daemon,
    extract::{Query, SandboxPath, no_sandbox},
    guard::Caller,
    idempotency::Once,
    page::Page,
    problem::{Problems, Refusal, bad},
    visit::Visit,
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(share_port))
        // Any method: what they take and answer is the sandbox's to say, so the document leaves them out.
        .route("/v1/sandboxes/{sandbox}/ports/{port}", any(pass))
        .route("/v1/sandboxes/{sandbox}/ports/{port}/", any(pass))
        .route("/v1/sandboxes/{sandbox}/ports/{port}/{*path}", any(pass))
        .route("/shared/{link}", any(pass_shared))
        .route("/shared/{link}/", any(pass_shared))
        .route("/shared/{link}/{*path}", any(pass_shared))
}

/// What this module keeps while the daemon runs.
#[derive(Debug, Default)]
pub(crate) struct Ways {
    places: Arc<Places>,
    /// Made when the first link is asked for or comes in.
    links: OnceLock<Links>,
}

impl Ways {
    fn links(&self, daemon: &Daemon) -> Result<&Links, Problem> {
        if let Some(links) = self.links.get() {
            return Ok(links);
        }
        // Whoever is second reads what the first has written.
        let opened = Links::open(daemon.engine.state_directory())?;
        Ok(self.links.get_or_init(|| opened))
    }
}

/// `{sandbox}` and `{port}`, taken from the path as it was sent: what follows them is the server's, and need not even be UTF-8. The port is
/// checked here, so that nobody is asked for one that cannot be.
#[derive(Debug)]
struct PortPath(SandboxId, u16);

impl<S: Send + Sync> FromRequestParts<S> for PortPath {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        // `/v1/sandboxes/{sandbox}/ports/{port}`
        let mut path = parts.uri.path().split('/').skip(3);
        let (sandbox, port) = (path.next().unwrap_or_default(), path.nth(1).unwrap_or_default());
        let sandbox = sandbox.parse().map_err(|_| no_sandbox(sandbox))?;
        // `parse` alone would take `+80`.
        let digits = port.bytes().all(|byte| byte.is_ascii_digit());
        match port.parse::<u16>() {
            Ok(number) if number > 0 && digits => Ok(Self(sandbox, number)),
            _ => {
                let text: String = port.chars().take(40).collect();
                Err(bad(format!("`{text}` is no port: 1 to 65535")).into())
            }
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// What listens in a sandbox. One that does not live has nothing that could; it is not woken.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/ports", tag = "ports",
    params(("sandbox" = String, Path), ListQuery), responses((status = 200, body = Page<PortInfo>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<PortInfo>>, Refusal> {
    caller.may(Scope::Read)?;
    let record = daemon.record(&caller, &id)?;
    let items = match daemon.engine.ports(&record).await {
        Ok(ports) => ports,
        Err(problem) if problem.code == Code::AgentLost => Vec::new(),
        Err(problem) => return Err(problem.into()),
    };
    // With zeros, so that they sort as numbers do.
    let name = |port: &PortInfo| format!("{:05}-{}", port.port, port.address);
    Page::by_name(items, name, query.after.as_deref(), query.limit).map(axum::Json)
}

/// A month: a link that is needed for longer is better made anew by whoever may.
const LONGEST_SHARE_S: u64 = 30 * 24 * 3600;
const DEFAULT_SHARE_S: u64 = 3600;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Share {
    #[schema(value_type = u16, minimum = 1)]
    port: std::num::NonZeroU16,
    /// An hour if it is not given.
    #[schema(minimum = 1, maximum = 2_592_000)]
    expires_seconds: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Shared {
    /// Below the daemon's own address.
    path: String,
    /// Where the daemon knows under which address others reach it.
    url: Option<String>,
    expires_unix_ms: u64,
}

/// A link to a port, good for whoever has it.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/shares", tag = "ports", request_body = Share,
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 201, body = Shared), Problems))]
async fn share_port(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(asked, ticket): Once<Share>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let port = asked.port.get();
    let seconds = asked.expires_seconds.unwrap_or(DEFAULT_SHARE_S);
    if !(1..=LONGEST_SHARE_S).contains(&seconds) {
        return Err(bad(format!("expires_seconds is between 1 and {LONGEST_SHARE_S}")).into());
    }
    let sharing = Arc::clone(&daemon);
    ticket
        .once(&daemon, &caller, async move {
            let expires_unix_ms = share::now_ms() + seconds * 1000;
            let path =
                format!("/shared/{}/", sharing.ways.links(&sharing)?.sign(&record.id, port, expires_unix_ms));
            let url =
                sharing.options.public_url.as_ref().map(|url| format!("{}{path}", url.trim_end_matches('/')));
            Ok((StatusCode::CREATED, axum::Json(Shared { path, url, expires_unix_ms })).into_response())
        })
        .await
}

/// Passes a request of the sandbox's owner on.
async fn pass(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    PortPath(id, port): PortPath,
    request: Request,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let found = daemon.living(&caller, &id).await?;
    // As it was sent: a port may have zeros before it.
    let prefix: Vec<&str> = request.uri().path().splitn(7, '/').take(6).collect();
    let prefix = prefix.join("/");
    Onward { daemon, record: found.record, port, prefix, way: Way::Own }.pass(request).await
}

/// Passes on a request of whoever has a link. One that was never signed, is over, or whose sandbox is gone are the same to them.
async fn pass_shared(State(daemon): State<Arc<Daemon>>, request: Request) -> Result<Response, Refusal> {
    // `/shared/{link}`, and then what is the server's.
    let text = request.uri().path().split('/').nth(2).unwrap_or_default().to_owned();
    let link = daemon.ways.links(&daemon)?.read(&text, share::now_ms()).ok_or_else(no_link)?;
    if let Some(visit) = request.extensions().get::<Arc<Visit>>() {
        visit.acts_on(&link.sandbox);
    }
    if let Some(answer) = preflight(&request) {
        return Ok(answer);
    }
    let (living, id) = (Arc::clone(&daemon), link.sandbox.clone());
    let found = daemon.complete(async move {
        living.engine.existing_of(&carrel_engine::Tenant::local(), id.as_str(), None).await
    });
    let found = found.await.map_err(|refusal| match refusal.problem().code {
        Code::SandboxNotFound => no_link().into(),
        _ => refusal,
    })?;
    let prefix = format!("/shared/{text}");
    Onward { daemon, record: found.record, port: link.port, prefix, way: Way::Shared }.pass(request).await
}

fn no_link() -> Problem {
    Problem::new(Code::NotFound, "this link leads nowhere")
        .hint("it may be mistyped or over; whoever shared it can make another")
}

/// A shared page has no origin of its own, so that its browser asks before it lets it speak even to its own server. The link is all that
/// counts here, and whoever asks has it.
fn preflight(request: &Request) -> Option<Response> {
    let method = request.headers().get(header::ACCESS_CONTROL_REQUEST_METHOD)?;
    if request.method() != Method::OPTIONS {
        return None;
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, method.clone());
    if let Some(wanted) = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted.clone());
    }
    Some(response)
}
