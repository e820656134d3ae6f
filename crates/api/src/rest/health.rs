//! Being written.

use std::{sync::Arc, time::Duration};

use axum::http::{Method, StatusCode};
use carrel_proto::{guest::Language, outcome::Outcome, problem::{Code, Problem}};
use utoipa_axum::router::OpenApiRouter;

use super::{Daemon, problem::Refusal};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
}

#[derive(Debug, Default)]
pub(crate) struct Counts;

impl Counts {
    pub(crate) fn request(&self, _: &Method, _: Option<&str>, _: StatusCode, _: Duration) {}
    pub(crate) fn call(&self, _: Option<Language>, _: &Outcome) {}
}

pub(crate) async fn nowhere() -> Refusal {
    Problem::new(Code::NotFound, "there is nothing here").hint("/openapi.json lists every path").into()
}

pub(crate) async fn other_method() -> Refusal {
    Problem::new(Code::MethodNotAllowed, "this path takes other methods").hint("/openapi.json lists them").into()
}
