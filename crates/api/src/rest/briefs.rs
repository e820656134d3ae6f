//! Where a session stands: for a caller that comes back to it.

use std::sync::Arc;

use axum::extract::State;
use carrel_engine::tokens::Scope;
use carrel_proto::{
    brief::Brief,
    id::{SandboxId, SessionName},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{Query, SandboxPath},
    guard::Caller,
    problem::{Problems, Refusal},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(brief))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct BriefQuery {
    /// `default` unless said otherwise.
    session: Option<SessionName>,
}

#[derive(Debug, Serialize, ToSchema)]
struct BriefReply {
    sandbox: SandboxId,
    /// At most 4 KB of JSON.
    brief: Brief,
    /// The same in words, at most 1 KB: for a model.
    #[schema(max_length = 1024)]
    text: String,
    /// What had become of the sandbox, if anything.
    note: Option<String>,
}

/// Where a session stands. No code of the session's runs for it, and a call under way is not waited for.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/brief", tag = "sessions", operation_id = "brief",
    params(("sandbox" = String, Path), BriefQuery), responses((status = 200, body = BriefReply), Problems))]
async fn brief(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Query(query): Query<BriefQuery>,
) -> Result<axum::Json<BriefReply>, Refusal> {
    caller.may(Scope::Read)?;
    let found = daemon.living(&caller, &id).await?;
    let session = query.session.unwrap_or_else(SessionName::main);
    let brief = daemon.engine.brief(&found.record, &session).await?;
    let note = found.note.map(|note| note.text(id.as_str()));
    Ok(axum::Json(BriefReply { sandbox: found.record.id, text: brief.text(), brief, note }))
}
