//! The way to a collector: one plain HTTP request per batch. Batches are seconds apart, so that nothing is gained by keeping connections.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use async_trait::async_trait;
use axum::http::{HeaderValue, Uri, header};
use carrel_proto::problem::{Code, Problem};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use tokio::{net::TcpStream, runtime::Handle};

/// For one batch. A collector beside us takes it in milliseconds.
const TIME: Duration = Duration::from_secs(10);
/// Of its answer, which says hardly anything.
const MAX_ANSWER: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Collector {
    /// The batches come from threads that have no runtime.
    runtime: Handle,
    address: String,
    host: HeaderValue,
    /// Said once, not with every batch.
    failing: AtomicBool,
}

impl Collector {
    pub(super) fn new(endpoint: &str) -> Result<Self, Problem> {
        let bad = |why: &str| Problem::new(Code::Config, format!("telemetry to `{endpoint}`: {why}"));
        let uri: Uri =
            endpoint.parse().map_err(|_| bad("not an address").hint("such as http://127.0.0.1:4318"))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                return Err(bad("https is not spoken here")
                    .hint("run a collector on this host, send to it by http, and let it send on encrypted"));
            }
            _ => return Err(bad("not an http address").hint("such as http://127.0.0.1:4318")),
        }
        let authority = uri.authority().ok_or_else(|| bad("no host"))?;
        if authority.as_str().contains('@') {
            return Err(bad("no passwords in addresses"));
        }
        Ok(Self {
            runtime: Handle::try_current().map_err(Problem::internal)?,
            address: format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(80)),
            host: HeaderValue::from_str(authority.as_str()).map_err(Problem::internal)?,
            failing: AtomicBool::new(false),
        })
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let path = request.uri().path().parse()?;
        *request.uri_mut() = path;
        request.headers_mut().insert(header::HOST, self.host.clone());
        let address = self.address.clone();
        let sending = self.runtime.spawn(async move {
            tokio::time::timeout(TIME, send(&address, request)).await.map_err(HttpError::from)?
        });
        let sent = sending.await?;
        let failed = match &sent {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(response.status().to_string()),
            Err(error) => Some(error.to_string()),
        };
        let before = self.failing.swap(failed.is_some(), Ordering::Relaxed);
        if let Some(why) = failed
            && !before
        {
            tracing::warn!("telemetry does not reach {}: {why}", self.address);
        }
        sent
    }
}

async fn send(address: &str, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let stream = TcpStream::connect(address).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    let answering = async {
        let answer = sender.send_request(request.map(Full::new)).await?;
        let (parts, body) = answer.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await?.to_bytes();
        drop(sender);
        Ok(Response::from_parts(parts, body))
    };
    let (answer, _) = tokio::join!(answering, connection);
    answer
}
