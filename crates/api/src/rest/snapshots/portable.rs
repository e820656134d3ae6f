//! Snapshots as files, in both directions, as they flow.

use std::{io::Write, sync::Arc};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use carrel_engine::{snapshots::ImportWish, tokens::Scope};
use carrel_proto::problem::Problem;
use serde::Deserialize;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    super::{
        Daemon,
        extract::Query,
        files::{flow, tree::LONGEST},
        guard::Caller,
        problem::{Problems, Refusal},
    },
    Named, Snapshot, known,
};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(export)).routes(routes!(import))
}

/// A snapshot file.
#[derive(ToSchema)]
#[schema(value_type = String, format = Binary)]
struct SnapshotFile(#[expect(dead_code, reason = "describes a stream")] Vec<u8>);

/// A snapshot as one file, which an import takes.
#[utoipa::path(get, path = "/v1/snapshots/{snapshot}/export", operation_id = "export_snapshot", tag = "snapshots",
    params(("snapshot" = String, Path)),
    responses((status = 200, description = "the file; one that breaks off ends without its last chunk, and is refused by an import",
        body = SnapshotFile, content_type = "application/zstd"), Problems))]
async fn export(State(daemon): State<Arc<Daemon>>, caller: Caller, path: Named) -> Result<Response, Refusal> {
    caller.may(Scope::Read)?;
    let snapshot = known(&daemon, &caller, path)?;
    let place = daemon.trees.take(&caller.tenant)?;
    let engine = daemon.engine.clone();
    let name = format!("attachment; filename=\"{}.carrel\"", snapshot.id);
    let (mut outlet, body) = flow::outlet(LONGEST);
    tokio::task::spawn_blocking(move || {
        let _place = place;
        let done = engine.export_snapshot(&snapshot, &mut outlet);
        if let Err(problem) = done.and_then(|_| outlet.flush().map_err(Problem::internal)) {
            outlet.fail(problem.message);
        }
    });
    let mut response = body.into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/zstd"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if let Ok(name) = HeaderValue::from_str(&name) {
        headers.insert(header::CONTENT_DISPOSITION, name);
    }
    Ok(response)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// Takes what lived in the sandbox whoever has sealed the file. For the operator alone: it is brought back with root's
    /// rights.
    trust_memory: Option<bool>,
}

/// Makes a snapshot of a file that was exported here or elsewhere. All of it or nothing.
#[utoipa::path(post, path = "/v1/snapshots", operation_id = "import_snapshot", tag = "snapshots", params(ImportQuery),
    request_body(content = SnapshotFile, content_type = "application/zstd"),
    responses((status = 201, body = Snapshot), Problems))]
async fn import(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ImportQuery>,
    body: Body,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let trust_memory = query.trust_memory.unwrap_or(false);
    if trust_memory {
        caller.operator_only()?;
    }
    let place = daemon.trees.take(&caller.tenant)?;
    let engine = daemon.engine.clone();
    let wish = ImportWish {
        tenant: caller.tenant.clone(),
        quota: caller.quota(),
        trust_memory,
        caller: Some(Arc::from(caller.name())),
    };
    let (made, _) = flow::feed(body, move |inlet| {
        let _place = place;
        engine.import_snapshot(inlet, &wish)
    })
    .await?;
    Ok((StatusCode::CREATED, axum::Json(Snapshot::of(made?))).into_response())
}
