//! Pages of allowed origins: what their browsers ask before a request, and what they want to read in an answer.
//!
//! Only such a question is answered here, and only to such pages: it comes from the browser itself, never with a token. Any other OPTIONS
//! is a request like all, for a server in a sandbox for instance. Share links have rules of their own.

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    response::{IntoResponse, Response},
};

use super::guard::Guards;

/// Headers that a page may read beside the few that it always may.
const EXPOSED: HeaderValue =
    HeaderValue::from_static("etag,x-request-id,retry-after,idempotency-replayed,content-disposition");
/// What an answer depends on, for caches between.
const DEPENDS: HeaderValue =
    HeaderValue::from_static("origin, access-control-request-method, access-control-request-headers");
/// What is read from the question and said in the answer.
const ASKED: [(HeaderName, HeaderName); 2] = [
    (header::ACCESS_CONTROL_REQUEST_METHOD, header::ACCESS_CONTROL_ALLOW_METHODS),
    (header::ACCESS_CONTROL_REQUEST_HEADERS, header::ACCESS_CONTROL_ALLOW_HEADERS),
];

/// The origin of a page that may read answers.
#[derive(Debug)]
pub(crate) struct Page(HeaderValue);

impl Page {
    pub(crate) fn of(guards: &Guards, request: &Request) -> Option<Self> {
        let origin = request.headers().get(header::ORIGIN)?;
        let allowed = guards.allows_origin(origin.to_str().ok()?);
        (allowed && !request.uri().path().starts_with("/shared/")).then(|| Self(origin.clone()))
    }

    /// The answer to a browser's question, if this is one.
    pub(crate) fn preflight(&self, request: &Request) -> Option<Response> {
        let headers = request.headers();
        let asked = request.method() == Method::OPTIONS
            && headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
            && !headers.contains_key(header::AUTHORIZATION);
        if !asked {
            return None;
        }
        let mut response = StatusCode::NO_CONTENT.into_response();
        for (question, answer) in ASKED {
            if let Some(value) = headers.get(question) {
                response.headers_mut().insert(answer, value.clone());
            }
        }
        Some(response)
    }

    /// Lets the page read an answer.
    pub(crate) fn allow(self, headers: &mut HeaderMap) {
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, self.0);
        headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        headers.append(header::VARY, DEPENDS);
    }
}
