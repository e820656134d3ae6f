//! Reading requests strictly: what is wrong is named, and nothing has happened yet.

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Path, Request, rejection::PathRejection},
    http::request::Parts,
};
use carrel_proto::{
    id::{ExecId, SandboxId, SessionName},
    problem::{Code, Problem},
};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::problem::{Refusal, bad};

/// Largest JSON body: the largest code as a JSON string, escapes included.
pub(crate) const MAX_JSON: usize = 4 * carrel_proto::message::MAX_CODE;

/// A JSON body. An empty one is `{}`, so that a call without arguments needs none.
#[derive(Debug)]
pub(crate) struct Json<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Json<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        parse(&body(request, MAX_JSON).await?).map(Self)
    }
}

pub(crate) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Refusal> {
    let text: &[u8] = if body.is_empty() { b"{}" } else { body };
    serde_json::from_slice(text).map_err(|error| {
        bad(format!("the body: {error}")).hint("/openapi.json describes every request").into()
    })
}

/// The whole body, if it is not too large.
pub(crate) async fn body(request: Request, most: usize) -> Result<Bytes, Refusal> {
    match Limited::new(request.into_body(), most).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => {
            Err(Problem::new(Code::TooLarge, format!("the body has more than {most} bytes")).into())
        }
        Err(error) => Err(bad(format!("the body broke off: {error}")).into()),
    }
}

/// Query parameters.
#[derive(Debug)]
pub(crate) struct Query<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Query<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Refusal> {
        serde_html_form::from_str(parts.uri.query().unwrap_or_default())
            .map(Self)
            .map_err(|error| bad(format!("the query: {error}")).into())
    }
}

/// `{sandbox}` in a path. What cannot be an id is no sandbox.
#[derive(Debug)]
pub(crate) struct SandboxPath(pub(crate) SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for SandboxPath {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        named(parts, state, "sandbox").await.map(Self).map_err(|text| no_sandbox(&text).into())
    }
}

/// `{sandbox}` and `{session}`.
#[derive(Debug)]
pub(crate) struct SessionPath(pub(crate) SandboxId, pub(crate) SessionName);

impl<S: Send + Sync> FromRequestParts<S> for SessionPath {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let SandboxPath(sandbox) = SandboxPath::from_request_parts(parts, state).await?;
        let session = named(parts, state, "session")
            .await
            .map_err(|text| Problem::new(Code::SessionNotFound, format!("there is no session `{text}`")))?;
        Ok(Self(sandbox, session))
    }
}

/// `{sandbox}` and `{exec}`.
#[derive(Debug)]
pub(crate) struct ExecPath(pub(crate) SandboxId, pub(crate) ExecId);

impl<S: Send + Sync> FromRequestParts<S> for ExecPath {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Refusal> {
        let SandboxPath(sandbox) = SandboxPath::from_request_parts(parts, state).await?;
        let exec = named(parts, state, "exec")
            .await
            .map_err(|text| Problem::new(Code::ExecNotFound, format!("there is no exec `{text}`")))?;
        Ok(Self(sandbox, exec))
    }
}

pub(crate) fn no_sandbox(name: &str) -> Problem {
    let name: String = name.chars().take(80).collect();
    Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{name}`"))
        .hint("GET /v1/sandboxes lists them, POST /v1/sandboxes makes one")
}

/// One part of the path; as text where it does not parse.
async fn named<S: Send + Sync, T: std::str::FromStr>(
    parts: &mut Parts,
    state: &S,
    name: &str,
) -> Result<T, String> {
    let all: Result<Path<Vec<(String, String)>>, PathRejection> =
        Path::from_request_parts(parts, state).await;
    let text = all
        .ok()
        .and_then(|Path(all)| all.into_iter().find(|(key, _)| key == name))
        .map(|(_, value)| value)
        .unwrap_or_default();
    text.parse().map_err(|_| text)
}
