//! `Idempotency-Key`: a request that makes something and is sent again, because its answer got lost, is answered again, not done again.

use std::sync::Arc;

use axum::{
    body::{Body, Bytes},
    extract::{FromRequest, Request},
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use carrel_engine::answers::{Answer, Begun, MAX_ANSWER};
use carrel_proto::problem::Problem;
use http_body_util::BodyExt;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::telemetry::carried;

use super::{
    Daemon,
    extract::{MAX_JSON, body, parse},
    guard::Caller,
    problem::{Refusal, bad},
};

pub(crate) const KEY: HeaderName = HeaderName::from_static("idempotency-key");
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const LONGEST_KEY: usize = 255;

/// A JSON body, and the right to act on it once.
#[derive(Debug)]
pub(crate) struct Once<T>(pub(crate) T, pub(crate) Ticket);

/// The key of a request, if it has one, and what tells the request from others.
#[derive(Debug)]
pub(crate) struct Ticket(Option<(String, [u8; 32])>);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Once<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, _: &S) -> Result<Self, Refusal> {
        let key = match request.headers().get(KEY) {
            None => None,
            Some(value) => {
                let text = value.to_str().ok().filter(|text| (1..=LONGEST_KEY).contains(&text.len()));
                let text = text.filter(|text| text.bytes().all(|byte| byte.is_ascii_graphic()));
                let text = text.ok_or_else(|| {
                    bad(format!("Idempotency-Key has 1 to {LONGEST_KEY} visible ASCII characters"))
                })?;
                Some(text.to_owned())
            }
        };
        let mut digest = Sha256::new();
        if key.is_some() {
            digest.update(request.method().as_str());
            digest.update([0]);
            digest.update(request.uri().to_string());
            digest.update([0]);
        }
        let bytes = body(request, MAX_JSON).await?;
        let value = parse(&bytes)?;
        let ticket = key.map(|key| {
            digest.update(&bytes);
            (key, digest.finalize().into())
        });
        Ok(Self(value, Ticket(ticket)))
    }
}

impl Ticket {
    /// For answers that cannot be given twice.
    pub(crate) fn refuse(&self) -> Result<(), Refusal> {
        match self.0 {
            None => Ok(()),
            Some(_) => Err(bad("a stream cannot be replayed, so it takes no Idempotency-Key").into()),
        }
    }

    /// Does what was asked for, unless it was done before.
    pub(crate) async fn once<F>(
        self,
        daemon: &Arc<Daemon>,
        caller: &Caller,
        work: F,
    ) -> Result<Response, Refusal>
    where
        F: Future<Output = Result<Response, Refusal>> + Send + 'static,
    {
        let Some((key, digest)) = self.0 else { return work.await };
        let ticket = match daemon.engine.begin_once(&caller.tenant, &key, &digest).await? {
            Begun::Known(answer) => return Ok(replay(answer)),
            Begun::New(ticket) => ticket,
        };
        // Also if the client hangs up meanwhile: that is when the key is needed.
        let working = daemon.tasks.spawn(carried(async move {
            match work.await {
                Ok(response) => {
                    let (answer, response) = keep(response).await?;
                    ticket.finish(answer).await?;
                    Ok(response)
                }
                Err(refusal) => {
                    ticket.abandon();
                    Err(refusal)
                }
            }
        }));
        working.await.map_err(Problem::internal)?
    }
}

/// Instead of an answer that is too large to be kept: whoever asks again is told that the request was done.
const TOO_LARGE: u16 = 0;

async fn keep(response: Response) -> Result<(Answer, Response), Refusal> {
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.map_err(Problem::internal)?.to_bytes();
    let answer = if bytes.len() <= MAX_ANSWER {
        Answer { status: parts.status.as_u16(), body: bytes.to_vec() }
    } else {
        Answer { status: TOO_LARGE, body: Vec::new() }
    };
    Ok((answer, Response::from_parts(parts, Body::from(bytes))))
}

fn replay(answer: Answer) -> Response {
    if answer.status == TOO_LARGE {
        let problem = Problem::new(
            carrel_proto::problem::Code::Conflict,
            "this was done, and its answer was too large to be kept",
        );
        return Refusal::from(problem.hint("look at what was made instead of asking again")).into_response();
    }
    let status = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::OK);
    let mut response = (status, Bytes::from(answer.body)).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(REPLAYED, HeaderValue::from_static("true"));
    response
}
