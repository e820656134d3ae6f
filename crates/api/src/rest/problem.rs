//! Errors as RFC 9457 problem documents, and the one table from codes to statuses.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use carrel_proto::{
    outcome::SessionState,
    problem::{Code, Problem},
};
use serde::Serialize;

/// What every error of this door is.
#[derive(Debug, Clone, Serialize, utoipa::ToSchema)]
pub(crate) struct ProblemDocument {
    #[serde(rename = "type")]
    kind: &'static str,
    title: &'static str,
    status: u16,
    detail: String,
    code: Code,
    #[serde(skip_serializing_if = "String::is_empty")]
    #[schema(required = false)]
    hint: String,
    session_state: SessionState,
}

impl From<Problem> for ProblemDocument {
    fn from(problem: Problem) -> Self {
        let status = status(problem.code);
        Self {
            kind: "about:blank",
            title: status.canonical_reason().unwrap_or("Error"),
            status: status.as_u16(),
            detail: problem.message,
            code: problem.code,
            hint: problem.hint,
            session_state: problem.session_state,
        }
    }
}

/// A refused or failed request.
#[derive(Debug)]
pub(crate) struct Refusal {
    problem: Problem,
    /// Seconds, with 429 and 503 and a request that is under way.
    retry_after: Option<u64>,
}

impl Refusal {
    pub(crate) fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after = Some(seconds.max(1));
        self
    }

    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }
}

impl<P: Into<Problem>> From<P> for Refusal {
    fn from(problem: P) -> Self {
        Self { problem: problem.into(), retry_after: None }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = status(self.problem.code);
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::error!(code = self.problem.code.as_str(), "{}", self.problem.message);
        }
        let document = ProblemDocument::from(self.problem);
        // It holds nothing that JSON cannot carry.
        let body = serde_json::to_vec(&document).unwrap_or_default();
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        let hurried = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE)
            || document.code == Code::InProgress;
        if let Some(seconds) = self.retry_after.or(hurried.then_some(1)) {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        response
    }
}

pub(crate) fn bad(what: impl Into<String>) -> Problem {
    Problem::new(Code::InvalidArgument, what)
}

/// The one table: docs/http.md shows it to callers.
pub(crate) fn status(code: Code) -> StatusCode {
    match code {
        Code::InvalidArgument
        | Code::EnvironmentUnknown
        | Code::Protocol
        | Code::Config
        | Code::PathOutside => StatusCode::BAD_REQUEST,
        Code::Unauthorized => StatusCode::UNAUTHORIZED,
        Code::Forbidden | Code::Permission => StatusCode::FORBIDDEN,
        Code::SandboxNotFound
        | Code::SnapshotNotFound
        | Code::SessionNotFound
        | Code::ExecNotFound
        | Code::NotFound => StatusCode::NOT_FOUND,
        Code::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
        Code::NotAcceptable => StatusCode::NOT_ACCEPTABLE,
        Code::Conflict
        | Code::InProgress
        | Code::Exists
        | Code::SessionExists
        | Code::ExecEnded
        | Code::EnvironmentMismatch
        | Code::NotADirectory
        | Code::NotEmpty
        | Code::IsADirectory
        | Code::NotARegularFile
        | Code::Busy
        | Code::UndoUnavailable
        | Code::StateLost => StatusCode::CONFLICT,
        Code::PreconditionFailed => StatusCode::PRECONDITION_FAILED,
        Code::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Code::CommandNotFound | Code::InterpreterMissing | Code::InterpreterFailed | Code::Unsupported => {
            StatusCode::UNPROCESSABLE_ENTITY
        }
        Code::Quota | Code::RateLimited | Code::TooMany => StatusCode::TOO_MANY_REQUESTS,
        Code::AgentLost | Code::PortClosed => StatusCode::BAD_GATEWAY,
        Code::Unavailable | Code::IsolationUnavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::Timeout => StatusCode::GATEWAY_TIMEOUT,
        Code::Disk => StatusCode::INSUFFICIENT_STORAGE,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Every response that is none of a call's own: a problem document.
#[derive(Debug)]
pub(crate) struct Problems;

impl utoipa::IntoResponses for Problems {
    fn responses() -> std::collections::BTreeMap<String, utoipa::openapi::RefOr<utoipa::openapi::Response>> {
        use utoipa::openapi::{ContentBuilder, Ref, ResponseBuilder};
        let content = ContentBuilder::new().schema(Some(Ref::from_schema_name("ProblemDocument"))).build();
        let response = ResponseBuilder::new()
            .description("a problem: `code` says which, `hint` what to do next")
            .content("application/problem+json", content)
            .build();
        [("default".to_owned(), response.into())].into()
    }
}
