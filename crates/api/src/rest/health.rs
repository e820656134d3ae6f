//! The daemon's own matters: whether it lives, whether it takes calls, what it counts, and what is where.

mod counts;

use std::sync::{Arc, OnceLock};

use axum::{
    body::Bytes,
    extract::State,
    http::{HeaderValue, header},
    response::{IntoResponse, Response},
};
use carrel_engine::tokens::Scope;
use carrel_proto::problem::{Code, Problem};
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

pub(crate) use self::counts::Counts;
use super::{
    Daemon,
    guard::Caller,
    problem::{Problems, Refusal},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(health))
        .routes(routes!(ready))
        .routes(routes!(document))
        .routes(routes!(metrics))
}

#[derive(Debug, Serialize, ToSchema)]
struct Health {
    #[schema(pattern = "^ok$")]
    status: &'static str,
    version: &'static str,
}

const OK: Health = Health { status: "ok", version: env!("CARGO_PKG_VERSION") };

/// The process lives.
#[utoipa::path(get, path = "/health", tag = "daemon", security(()), responses((status = 200, body = Health), Problems))]
async fn health() -> axum::Json<Health> {
    axum::Json(OK)
}

/// It takes calls; 503 while it shuts down.
#[utoipa::path(get, path = "/ready", tag = "daemon", security(()), responses((status = 200, body = Health), Problems))]
async fn ready(State(daemon): State<Arc<Daemon>>) -> Result<axum::Json<Health>, Refusal> {
    if daemon.stop.is_cancelled() {
        return Err(Problem::new(Code::Unavailable, "the daemon is shutting down").into());
    }
    Ok(axum::Json(OK))
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "daemon", security(()),
    responses((status = 200, body = Object, content_type = "application/json"), Problems))]
async fn document() -> Response {
    static DOCUMENT: OnceLock<Bytes> = OnceLock::new();
    let text = DOCUMENT.get_or_init(|| super::openapi().into());
    ([(header::CONTENT_TYPE, HeaderValue::from_static("application/json"))], text.clone()).into_response()
}

/// Counters and gauges for Prometheus, in the format of OpenMetrics.
#[utoipa::path(get, path = "/metrics", tag = "daemon",
    responses((status = 200, body = String, content_type = "application/openmetrics-text"), Problems))]
async fn metrics(State(daemon): State<Arc<Daemon>>, caller: Caller) -> Result<Response, Refusal> {
    caller.may(Scope::Metrics)?;
    let text = tokio::task::spawn_blocking(move || {
        let audit = daemon.options.audit.as_ref();
        daemon.counts.text(&daemon.engine, audit)
    });
    let text = text.await.map_err(Problem::internal)??;
    let kind = HeaderValue::from_static("application/openmetrics-text; version=1.0.0; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

/// For every path that is none.
pub(crate) async fn nowhere() -> Refusal {
    Problem::new(Code::NotFound, "there is nothing at this path")
        .hint("/openapi.json lists every path")
        .into()
}

/// For every method that a path does not take; `Allow` says which it does.
pub(crate) async fn other_method() -> Refusal {
    Problem::new(Code::MethodNotAllowed, "this path does not take this method")
        .hint("the header Allow says which it takes")
        .into()
}
