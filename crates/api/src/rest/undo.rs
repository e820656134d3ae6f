//! Taking calls back.

use std::sync::Arc;

use axum::extract::State;
use carrel_engine::{call::Undone, tokens::Scope};
use carrel_proto::{
    guest::Language,
    id::{SandboxId, SessionName},
    message::MAX_UNDO,
    outcome::FilesState,
};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    Daemon,
    extract::SandboxPath,
    guard::Caller,
    idempotency::Once,
    problem::{Problems, Refusal, bad},
};
use axum::response::{IntoResponse, Response};

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UndoRequest {
    /// How many; 1 unless said otherwise.
    #[schema(minimum = 1, maximum = 16)]
    calls: Option<u32>,
    session: Option<SessionName>,
    /// Whose calls: those of the interpreter that ran last, unless said otherwise.
    language: Option<Language>,
}

/// What taking back has brought.
#[derive(Debug, Serialize, ToSchema)]
pub struct UndoReply {
    pub sandbox: SandboxId,
    pub session: SessionName,
    pub language: Language,
    /// So many calls were taken back.
    pub calls: u32,
    /// So many more can be.
    pub kept: usize,
    /// Sockets, pipes and the like that were open in that state and are closed now.
    pub closed_handles: u32,
    pub files_state: FilesState,
    /// Why files did not go back.
    pub files_reason: Option<String>,
}

impl UndoReply {
    pub fn new(sandbox: SandboxId, session: SessionName, undone: Undone) -> Self {
        let Undone { language, calls, kept, closed_handles, files_state, files_reason } = undone;
        Self { sandbox, session, language, calls, kept, closed_handles, files_state, files_reason }
    }
}

pub(crate) fn calls_within(calls: u32) -> Result<u32, Refusal> {
    if calls <= MAX_UNDO {
        return Ok(calls);
    }
    Err(bad(format!("`undo_calls` is at most {MAX_UNDO}")).into())
}

/// Takes back the last calls of a session's interpreter.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/undo", tag = "run",
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)), request_body = UndoRequest,
    responses((status = 200, description = "taken back", body = UndoReply), Problems))]
pub(crate) async fn undo(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(request, ticket): Once<UndoRequest>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let (asked, who) = (Arc::clone(&daemon), caller.clone());
    ticket
        .once(&daemon, &caller, async move {
            let record = asked.living(&who, &id).await?.record;
            let session = request.session.unwrap_or_else(SessionName::main);
            let calls = request.calls.unwrap_or(1);
            let undone = asked.engine.undo(&record, &session, request.language, calls).await?;
            Ok(axum::Json(UndoReply::new(record.id, session, undone)).into_response())
        })
        .await
}
