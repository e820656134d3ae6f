//! Scopes: everything of one run at once.

use std::{sync::Arc, time::Duration};

use axum::extract::{Path, State};
use carrel_engine::tokens::Scope;
use carrel_proto::{id::SandboxId, problem::Problem};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::Query,
    guard::Caller,
    page,
    problem::{Problems, Refusal, bad},
    sandboxes::seconds_within,
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(close))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CloseQuery {
    /// So much later; until then the scope is as it was.
    #[param(minimum = 0, maximum = 31_536_000)]
    retention_seconds: Option<u64>,
}

#[derive(Debug, Serialize, ToSchema)]
struct Closed {
    /// Those that are gone now, at most 500 of them.
    closed: Vec<SandboxId>,
    /// How many there were.
    closed_count: u64,
    /// When the scope is closed, if it is not yet.
    closing_at_unix_ms: Option<u64>,
}

/// Closes every sandbox of a scope, also those that are being made.
#[utoipa::path(delete, path = "/v1/scopes/{scope}/{owner}", tag = "sandboxes",
    params(("scope" = String, Path), ("owner" = String, Path), CloseQuery),
    responses((status = 200, body = Closed), Problems))]
async fn close(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    path: Result<Path<(String, String)>, axum::extract::rejection::PathRejection>,
    Query(query): Query<CloseQuery>,
) -> Result<axum::Json<Closed>, Refusal> {
    caller.may(Scope::Run)?;
    let Path((scope, owner)) = path.map_err(|error| bad(error.to_string()))?;
    let retention = query.retention_seconds.filter(|seconds| *seconds > 0);
    let retention = retention.map(|seconds| seconds_within("retention_seconds", seconds)).transpose()?;
    let retention = retention.map(Duration::from_secs);
    let (closing, tenant, visit) = (Arc::clone(&daemon), caller.tenant.clone(), Arc::clone(&caller.visit));
    let done = daemon
        .complete(async move {
            let done = closing.engine.close_scope(&tenant, &scope, &owner, retention).await?;
            done.closed.iter().for_each(|id| visit.acts_on(id));
            Ok::<_, Problem>(done)
        })
        .await?;
    let closing_at_unix_ms = retention.map(|_| done.at_unix_ms);
    let mut closed = done.closed;
    let closed_count = closed.len() as u64;
    closed.truncate(usize::try_from(page::MOST).unwrap_or(usize::MAX));
    Ok(axum::Json(Closed { closed, closed_count, closing_at_unix_ms }))
}
