//! Reading requests strictly: what is wrong is named, and nothing has happened yet.

use std::time::Duration;

use axum::{
    body::{Body, Bytes, HttpBody},
    extract::{FromRequest, FromRequestParts, Path, Request, rejection::PathRejection},
    http::request::Parts,
};
use carrel_proto::{
    id::{ExecId, SandboxId, SessionName},
    problem::{Code, Problem},
};
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;

use super::{
    problem::{Refusal, bad},
    turnstile::Places,
};

/// Largest JSON body: the largest code as a JSON string, escapes included.
pub(crate) const MAX_JSON: usize = 4 * carrel_proto::message::MAX_CODE;

/// How long a body may take.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// A client that sends nothing for this long is gone: its request has a place, and others wait for one.
    silence: Duration,
    /// For a whole JSON body, so that a byte now and then keeps no place for ever: a hundred kilobytes a second are enough.
    whole: Duration,
}

const PATIENCE: Patience = Patience { silence: Duration::from_secs(60), whole: Duration::from_secs(300) };

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
    gather(request, most, PATIENCE).await
}

async fn gather(request: Request, most: usize, patience: Patience) -> Result<Bytes, Refusal> {
    let places = request.extensions().get::<Places>().cloned().unwrap_or_default();
    let mut body = request.into_body();
    let too_large = || Problem::new(Code::TooLarge, format!("the body has more than {most} bytes"));
    // One that says how long it is need not be read.
    if body.size_hint().lower() > most as u64 {
        return Err(too_large().into());
    }
    let gathering = async {
        let mut whole = Vec::new();
        while let Some(bytes) = piece_within(&mut body, patience.silence).await? {
            if whole.len() + bytes.len() > most {
                return Err(too_large());
            }
            places.hold(bytes.len())?;
            whole.extend_from_slice(&bytes);
        }
        Ok(Bytes::from(whole))
    };
    match tokio::time::timeout(patience.whole, gathering).await {
        Ok(gathered) => gathered.map_err(Into::into),
        Err(_) => {
            let word = format!("the body took more than {:?}", patience.whole);
            Err(Problem::new(Code::Timeout, word).hint("nothing was changed: send it again").into())
        }
    }
}

/// The next bytes of a body; `None` at its end.
pub(crate) async fn piece(body: &mut Body) -> Result<Option<Bytes>, Problem> {
    piece_within(body, PATIENCE.silence).await
}

async fn piece_within(body: &mut Body, silence: Duration) -> Result<Option<Bytes>, Problem> {
    loop {
        let frame = tokio::time::timeout(silence, body.frame()).await.map_err(|_| {
            let word = format!("nothing of the body came for {silence:?}");
            Problem::new(Code::Timeout, word).hint("nothing was changed: send it again")
        })?;
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(bad(format!("the body broke off: {error}"))),
            Some(Ok(frame)) => {
                // Trailers say nothing to us.
                if let Ok(bytes) = frame.into_data()
                    && !bytes.is_empty()
                {
                    return Ok(Some(bytes));
                }
            }
        }
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

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use tokio_stream::{StreamExt, wrappers::IntervalStream};

    use super::*;

    fn request(body: Body) -> Request {
        Request::new(body)
    }

    fn code(gathered: Result<Bytes, Refusal>) -> Code {
        gathered.unwrap_err().problem().code
    }

    #[tokio::test]
    async fn a_body_that_stops_coming_is_not_waited_for() {
        let long = Duration::from_secs(3600);
        let short = Duration::from_millis(20);
        let silent = tokio_stream::once(Ok::<_, Infallible>(Bytes::from_static(b"{")));
        let silent = request(Body::from_stream(silent.chain(tokio_stream::pending())));
        let gathered = gather(silent, MAX_JSON, Patience { silence: short, whole: long }).await;
        assert_eq!(code(gathered), Code::Timeout);
        // A byte now and then is no body either.
        let drops = IntervalStream::new(tokio::time::interval(short / 4));
        let drops = request(Body::from_stream(drops.map(|_| Ok::<_, Infallible>(Bytes::from_static(b" ")))));
        let gathered = gather(drops, MAX_JSON, Patience { silence: long, whole: short }).await;
        assert_eq!(code(gathered), Code::Timeout);
    }

    #[tokio::test]
    async fn a_body_has_a_most_whether_or_not_it_says_how_long_it_is() {
        assert_eq!(body(request(Body::from("12345678")), 8).await.unwrap(), "12345678");
        assert_eq!(code(body(request(Body::from("123456789")), 8).await), Code::TooLarge);
        let pieces = tokio_stream::iter(["12345", "6789"]).map(Ok::<_, Infallible>);
        assert_eq!(code(body(request(Body::from_stream(pieces)), 8).await), Code::TooLarge);
    }
}
