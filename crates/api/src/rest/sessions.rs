//! Sessions of a sandbox: lines of work with a directory and variables of their own.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use carrel_engine::{Record, tokens::Scope};
use carrel_proto::{
    id::SessionName,
    message::{OpenSession, SessionInfo},
    problem::{Code, Problem},
};
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{Json, Query, SandboxPath, SessionPath},
    guard::Caller,
    idempotency::Once,
    page::Page,
    problem::{Problems, Refusal},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(get, update, delete))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct CreateSession {
    name: SessionName,
    /// Where its commands and interpreters start; `/workspace` unless said otherwise.
    #[schema(max_length = 4096)]
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// How many calls can be taken back; as many as the sandbox says unless said otherwise. 0 turns it off.
    #[schema(maximum = 16)]
    undo_calls: Option<u32>,
}

/// Opens a session.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/sessions", tag = "sessions", operation_id = "create_session",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)), request_body = CreateSession,
    responses((status = 201, description = "opened", body = SessionInfo), Problems))]
async fn create(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(request, ticket): Once<CreateSession>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let (opening, who) = (Arc::clone(&daemon), caller.clone());
    ticket
        .once(&daemon, &caller, async move {
            let record = opening.living(&who, &id).await?.record;
            let name = request.name.clone();
            let open = OpenSession {
                name: request.name,
                cwd: request.cwd,
                env: request.env,
                undo_calls: request.undo_calls.map(super::undo::calls_within).transpose()?,
            };
            if !opening.engine.session(&record, open).await? {
                return Err(Problem::new(Code::SessionExists, format!("session `{name}` is open already"))
                    .hint("PATCH changes its variables, DELETE ends it")
                    .into());
            }
            let session = find(&opening, &record, &name).await?;
            Ok((StatusCode::CREATED, axum::Json(session)).into_response())
        })
        .await
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// Lists the open sessions, by name.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/sessions", tag = "sessions", operation_id = "list_sessions",
    params(("sandbox" = String, Path), ListQuery), responses((status = 200, body = Page<SessionInfo>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<SessionInfo>>, Refusal> {
    caller.may(Scope::Read)?;
    let record = daemon.living(&caller, &id).await?.record;
    let sessions = daemon.engine.status(&record).await?.sessions;
    Page::by_name(sessions, |session| session.name.to_string(), query.after.as_deref(), query.limit)
        .map(axum::Json)
}

/// A session.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/sessions/{session}", tag = "sessions", operation_id = "get_session",
    params(("sandbox" = String, Path), ("session" = String, Path)), responses((status = 200, body = SessionInfo), Problems))]
async fn get(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SessionPath(id, session): SessionPath,
) -> Result<axum::Json<SessionInfo>, Refusal> {
    caller.may(Scope::Read)?;
    let record = daemon.living(&caller, &id).await?.record;
    find(&daemon, &record, &session).await.map(axum::Json)
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SessionPatch {
    /// Null unsets a variable.
    env: BTreeMap<String, Option<String>>,
}

/// Sets and unsets variables: for what starts from now on, and for interpreters that are up with their next run.
#[utoipa::path(patch, path = "/v1/sandboxes/{sandbox}/sessions/{session}", tag = "sessions", operation_id = "update_session",
    params(("sandbox" = String, Path), ("session" = String, Path)), request_body = SessionPatch,
    responses((status = 200, body = SessionInfo), Problems))]
async fn update(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SessionPath(id, session): SessionPath,
    Json(patch): Json<SessionPatch>,
) -> Result<axum::Json<SessionInfo>, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.living(&caller, &id).await?.record;
    let (mut set, mut unset) = (BTreeMap::new(), Vec::new());
    for (name, value) in patch.env {
        match value {
            Some(value) => drop(set.insert(name, value)),
            None => unset.push(name),
        }
    }
    daemon.engine.set_env(&record, &session, set, unset).await?;
    find(&daemon, &record, &session).await.map(axum::Json)
}

/// Ends a session and everything in it.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/sessions/{session}", tag = "sessions", operation_id = "delete_session",
    params(("sandbox" = String, Path), ("session" = String, Path)), responses((status = 204, description = "ended"), Problems))]
async fn delete(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SessionPath(id, session): SessionPath,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.living(&caller, &id).await?.record;
    daemon.engine.close_session(&record, &session).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn find(daemon: &Daemon, record: &Record, name: &SessionName) -> Result<SessionInfo, Refusal> {
    let sessions = daemon.engine.status(record).await?.sessions;
    sessions.into_iter().find(|session| session.name == *name).ok_or_else(|| {
        Problem::new(Code::SessionNotFound, format!("there is no session `{name}` in this sandbox"))
            .hint("GET …/sessions lists them, POST …/sessions opens one")
            .into()
    })
}
