//! Tokens, which are the operator's to give, or of a token that was made for that, and who a caller is.

use std::{sync::Arc, time::Duration};

use axum::{
    extract::{Path, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use carrel_engine::{
    Quota,
    tokens::{NewToken, Scopes, Token, TokenId},
};
use carrel_proto::{
    limits::ByteSize,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{Json, Query},
    guard::Caller,
    idempotency,
    page::Page,
    problem::{Problems, Refusal, bad},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(revoke)).routes(routes!(whoami))
}

/// Ten years: longer is forever, which has no number.
const LONGEST_S: u64 = 10 * 365 * 24 * 3600;

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Create {
    #[schema(min_length = 1, max_length = 100)]
    name: String,
    /// Some of `read`, `run`, `metrics`, `admin`, or `all`; `["run"]` if it is not given.
    scope: Option<Vec<String>>,
    quota: Option<QuotaBody>,
    #[schema(minimum = 1, maximum = 315_360_000)]
    expires_seconds: Option<u64>,
}

/// Most of everything at once; what is missing or null has no limit.
#[derive(Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct QuotaBody {
    #[schema(minimum = 1)]
    sandboxes: Option<u32>,
    #[schema(minimum = 1)]
    cpu_millis: Option<u64>,
    #[schema(minimum = 1)]
    memory: Option<u64>,
    #[schema(minimum = 1)]
    disk: Option<u64>,
    /// Requests per second.
    #[schema(minimum = 1)]
    rate: Option<u32>,
}

/// Beyond what any host has, and within what a registry can add up.
const LARGEST: u64 = 1 << 60;

impl QuotaBody {
    fn of(quota: &Quota) -> Self {
        Self {
            sandboxes: quota.sandboxes,
            cpu_millis: quota.cpu_millis,
            memory: quota.memory.map(|size| size.0),
            disk: quota.disk.map(|size| size.0),
            rate: quota.rate,
        }
    }

    fn meant(&self) -> Result<Quota, Refusal> {
        let sizes = [("cpu_millis", self.cpu_millis), ("memory", self.memory), ("disk", self.disk)];
        let counts = [("sandboxes", self.sandboxes), ("rate", self.rate)];
        let all = sizes.into_iter().chain(counts.map(|(name, count)| (name, count.map(u64::from))));
        for (name, value) in all {
            if value.is_some_and(|value| value == 0 || value > LARGEST) {
                return Err(bad(format!("quota.{name} is between 1 and {LARGEST}")).into());
            }
        }
        Ok(Quota {
            sandboxes: self.sandboxes,
            cpu_millis: self.cpu_millis,
            memory: self.memory.map(ByteSize),
            disk: self.disk.map(ByteSize),
            rate: self.rate,
        })
    }
}

/// A token as it may be seen again and again.
#[derive(Debug, Serialize, ToSchema)]
struct TokenBody {
    id: String,
    name: String,
    #[schema(value_type = Vec<String>)]
    scope: Scopes,
    quota: QuotaBody,
    created_unix_ms: u64,
    expires_unix_ms: Option<u64>,
    revoked_unix_ms: Option<u64>,
    /// To a minute.
    used_unix_ms: Option<u64>,
}

impl TokenBody {
    fn of(token: &Token) -> Self {
        Self {
            id: token.id.to_string(),
            name: token.name.clone(),
            scope: token.scopes.clone(),
            quota: QuotaBody::of(&token.quota),
            created_unix_ms: token.created_unix_ms,
            expires_unix_ms: token.expires_unix_ms,
            revoked_unix_ms: token.revoked_unix_ms,
            used_unix_ms: token.used_unix_ms,
        }
    }
}

/// A token that was just made.
#[derive(Debug, Serialize, ToSchema)]
struct Made {
    id: String,
    /// The secret itself. It is shown this once.
    token: String,
    name: String,
    #[schema(value_type = Vec<String>)]
    scope: Scopes,
    quota: QuotaBody,
    created_unix_ms: u64,
    expires_unix_ms: Option<u64>,
}

/// Makes a token.
///
/// The answer holds a secret that is kept nowhere, so that it cannot be given again: an Idempotency-Key is refused.
#[utoipa::path(post, path = "/v1/tokens", tag = "tokens", request_body = Create,
    responses((status = 201, body = Made), Problems))]
async fn create(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    headers: HeaderMap,
    Json(asked): Json<Create>,
) -> Result<Response, Refusal> {
    caller.may_administer()?;
    if headers.contains_key(idempotency::KEY) {
        return Err(bad("the secret of a token is not kept, so its making takes no Idempotency-Key").into());
    }
    let scopes: Scopes = match &asked.scope {
        None => "run".parse()?,
        Some(words) => words.join(",").parse()?,
    };
    let expires_in = match asked.expires_seconds {
        Some(seconds) if !(1..=LONGEST_S).contains(&seconds) => {
            return Err(bad(format!("expires_seconds is between 1 and {LONGEST_S}")).into());
        }
        seconds => seconds.map(Duration::from_secs),
    };
    let quota = asked.quota.unwrap_or_default().meant()?;
    let new = NewToken { name: asked.name, scopes, quota, expires_in };
    let engine = daemon.engine.clone();
    let made = tokio::task::spawn_blocking(move || engine.create_token(&new));
    let (token, secret) = made.await.map_err(Problem::internal)??;
    caller.visit.acts_on_token(&token.id);
    let body = TokenBody::of(&token);
    let made = Made {
        id: body.id,
        token: secret,
        name: body.name,
        scope: body.scope,
        quota: body.quota,
        created_unix_ms: body.created_unix_ms,
        expires_unix_ms: body.expires_unix_ms,
    };
    Ok((StatusCode::CREATED, axum::Json(made)).into_response())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// Lists tokens, those that are over too, oldest first.
#[utoipa::path(get, path = "/v1/tokens", tag = "tokens", params(ListQuery),
    responses((status = 200, body = Page<TokenBody>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<TokenBody>>, Refusal> {
    caller.may_administer()?;
    let all = daemon.engine.tokens()?.iter().map(TokenBody::of).collect();
    Page::cut(all, query.after.as_deref(), query.limit).map(axum::Json)
}

/// Ends a token. Its sandboxes stay.
#[utoipa::path(delete, path = "/v1/tokens/{token}", tag = "tokens", params(("token" = String, Path)),
    responses((status = 204, description = "it is refused from now on"), Problems))]
async fn revoke(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    path: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Result<StatusCode, Refusal> {
    caller.may_administer()?;
    let text = path.map(|Path(text)| text).unwrap_or_default();
    let id: TokenId = text.parse().map_err(|_| {
        let text: String = text.chars().take(40).collect();
        Problem::new(Code::NotFound, format!("there is no token `{text}`")).hint("GET /v1/tokens lists them")
    })?;
    caller.visit.acts_on_token(&id);
    let working = Arc::clone(&daemon);
    // Both, also if the client hangs up in between.
    let revoking = tokio::task::spawn_blocking(move || {
        working.engine.revoke_token(&id)?;
        working.forget_verified();
        working.leases.end(&id);
        Ok::<_, Problem>(())
    });
    revoking.await.map_err(Problem::internal)??;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Serialize, ToSchema)]
struct Who {
    /// Null: the operator.
    token: Option<TokenBody>,
    usage: Held,
}

/// What a quota counts: what the caller's sandboxes were promised, and on disk what its snapshots take.
#[derive(Debug, Default, Serialize, ToSchema)]
struct Held {
    sandboxes: u64,
    cpu_millis: u64,
    memory: u64,
    disk: u64,
}

/// Who the caller is, and what it holds.
#[utoipa::path(get, path = "/v1/whoami", tag = "tokens", responses((status = 200, body = Who), Problems))]
async fn whoami(State(daemon): State<Arc<Daemon>>, caller: Caller) -> Result<axum::Json<Who>, Refusal> {
    let token = caller.token.as_deref().map(TokenBody::of);
    let (engine, tenant) = (daemon.engine.clone(), caller.tenant.clone());
    let held = tokio::task::spawn_blocking(move || engine.held(&tenant));
    let held = held.await.map_err(Problem::internal)??;
    let usage =
        Held { sandboxes: held.sandboxes, cpu_millis: held.cpu_millis, memory: held.memory, disk: held.disk };
    Ok(axum::Json(Who { token, usage }))
}
