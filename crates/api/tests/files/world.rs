//! A daemon of its own for each test, and a client for it. All of it ends with the test, also when the test fails.

use std::{future::Future, path::PathBuf, sync::Arc, time::Duration};

use axum::body::{Body, Bytes};
use carrel_api::rest::{Daemon, Defaults, Guards, Listeners, Options};
use carrel_engine::{Engine, Environments, Record, Settings, Whereabouts, Wish};
use carrel_proto::{limits::ByteSize, problem::Problem};
use http_body_util::BodyExt;
use hyper::{
    HeaderMap, Request, StatusCode,
    body::Incoming,
    client::conn::http1::{SendRequest, handshake},
    header::HeaderValue,
};
use hyper_util::rt::TokioIo;
use serde_json::Value;

/// Nothing here takes this long on a machine that works; it only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) engine: Engine,
    daemon: Arc<Daemon>,
    socket: PathBuf,
    pub(crate) state: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let state = tempfile::tempdir().unwrap();
        let settings = Settings {
            state: state.path().into(),
            environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
        };
        let engine = Engine::open(settings).unwrap();
        let defaults = Defaults { wish: Wish::default(), timeout: Duration::from_secs(60) };
        let options =
            Options { guards: Guards::default(), defaults, audit: None, public_url: None, telemetry: None };
        let daemon = Daemon::new(engine.clone(), options);
        let socket = state.path().join("carrel.sock");
        let unix = vec![tokio::net::UnixListener::bind(&socket).unwrap()];
        let serving = Arc::clone(&daemon);
        tokio::spawn(async move { serving.serve(Listeners { unix, ..Listeners::default() }).await });
        Self { engine, daemon, socket, state }
    }

    pub(crate) async fn sandbox(&self) -> Sandbox<'_> {
        self.sandbox_of(ByteSize::mb(256)).await
    }

    pub(crate) async fn sandbox_of(&self, disk: ByteSize) -> Sandbox<'_> {
        // Should a test be killed, its sandboxes end by themselves.
        let mut wish = Wish { idle_timeout_s: 120, max_lifetime_s: 900, ..Wish::default() };
        wish.limits.disk = disk;
        let key = format!("user:local:{}", self.engine.list().unwrap().len()).parse().unwrap();
        let found = in_time("a sandbox", self.engine.sandbox(&key, &wish)).await.unwrap();
        Sandbox { world: self, record: found.record }
    }

    pub(crate) async fn connect(&self) -> SendRequest<Body> {
        let stream = tokio::net::UnixStream::connect(&self.socket).await.unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        sender
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.daemon.stop();
        let engine = self.engine.clone();
        // A thread and a runtime of its own: the test's may be unwinding.
        let closing = std::thread::spawn(move || -> Result<(), Problem> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(engine.finish_retiring());
            engine.list()?.iter().try_for_each(|record| runtime.block_on(engine.close(record, None)))
        });
        let closed = closing.join();
        if !std::thread::panicking() {
            closed.unwrap().unwrap();
        }
    }
}

#[derive(Debug)]
pub(crate) struct Sandbox<'a> {
    pub(crate) world: &'a World,
    pub(crate) record: Record,
}

pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    #[track_caller]
    pub(crate) fn is(self, status: u16) -> Self {
        assert_eq!(self.status.as_u16(), status, "{}", String::from_utf8_lossy(&self.body));
        self
    }

    /// A problem document with this code.
    #[track_caller]
    pub(crate) fn refused(self, status: u16, code: &str) -> Self {
        let this = self.is(status);
        assert_eq!(this.header("content-type"), "application/problem+json");
        let document = this.json();
        assert_eq!(document["code"], code, "{document}");
        assert_eq!(document["status"], status);
        this
    }

    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    #[track_caller]
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}")).to_str().unwrap()
    }
}

impl Sandbox<'_> {
    /// Where its files are on the host.
    pub(crate) fn workspace(&self) -> PathBuf {
        self.world.state.path().join("sandboxes").join(self.record.id.as_str()).join("workspace")
    }

    pub(crate) fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Body,
    ) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = method.parse().unwrap();
        *request.uri_mut() = format!("/v1/sandboxes/{}/files{path}", self.record.id).parse().unwrap();
        request.headers_mut().insert("host", HeaderValue::from_static("localhost"));
        for (name, value) in headers {
            request.headers_mut().append(
                hyper::header::HeaderName::from_bytes(name.as_bytes()).unwrap(),
                value.parse().unwrap(),
            );
        }
        request
    }

    /// The head of the answer, and its body to come.
    pub(crate) async fn begin(&self, request: Request<Body>) -> hyper::Response<Incoming> {
        let mut sender = self.world.connect().await;
        let answering = async {
            let response = sender.send_request(request).await.unwrap();
            // Not hung up before the body is read.
            tokio::spawn(async move {
                let _ = tokio::time::timeout(DEADLINE, sender.ready()).await;
            });
            response
        };
        in_time("an answer", answering).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Body>,
    ) -> Reply {
        let response = self.begin(self.request(method, path, headers, body.into())).await;
        let (parts, body) = response.into_parts();
        let body = in_time("a body", body.collect()).await.unwrap().to_bytes();
        Reply { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], Body::empty()).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Reply {
        self.send("POST", path, &[], body.to_string()).await
    }

    pub(crate) async fn put(&self, name: &str, body: impl Into<Body>) -> Reply {
        self.send("PUT", &format!("/content?path={name}"), &[], body).await
    }
}
