//! A daemon in this process, and a client of it.

use std::{
    future::Future,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use axum::body::Bytes;
use carrel_api::rest::{Daemon, Defaults, Guards, Listeners, Options};
use carrel_engine::{Engine, Environments, Settings, Whereabouts, Wish};
use carrel_proto::problem::Problem;
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{Request, Response, StatusCode, body::Incoming, client::conn::http1};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinHandle,
};

/// Nothing here takes this long on a machine that works; it only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(120);
/// Between two looks at something that cannot be waited for.
const LOOK: Duration = Duration::from_millis(20);

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

/// Looks until there is something to see.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    in_time(what, async {
        loop {
            if let Some(seen) = look().await {
                return seen;
            }
            tokio::time::sleep(LOOK).await;
        }
    })
    .await
}

#[derive(Debug)]
pub(crate) struct World {
    engine: Engine,
    pub(crate) daemon: Arc<Daemon>,
    serving: Option<JoinHandle<Result<(), Problem>>>,
    state: tempfile::TempDir,
}

fn open(state: &Path) -> (Engine, Arc<Daemon>, JoinHandle<Result<(), Problem>>) {
    let settings = Settings {
        state: state.into(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    };
    let engine = Engine::open(settings).unwrap();
    // Should a test be killed, its sandboxes end by themselves.
    let wish = Wish { idle_timeout_s: 120, max_lifetime_s: 900, ..Wish::default() };
    let options = Options {
        guards: Guards::default(),
        defaults: Defaults { wish, timeout: Duration::from_secs(60) },
        audit: None,
        public_url: None,
        telemetry: None,
    };
    let daemon = Daemon::new(engine.clone(), options);
    let socket = state.join("carrel.sock");
    let _ = std::fs::remove_file(&socket);
    let listeners = Listeners { unix: vec![UnixListener::bind(socket).unwrap()], ..Listeners::default() };
    let serving = tokio::spawn({
        let daemon = Arc::clone(&daemon);
        async move { daemon.serve(listeners).await }
    });
    (engine, daemon, serving)
}

impl World {
    pub(crate) fn new() -> Self {
        let state = tempfile::tempdir().unwrap();
        let (engine, daemon, serving) = open(state.path());
        Self { engine, daemon, serving: Some(serving), state }
    }

    /// The daemon stops, and another takes its place over the same state.
    pub(crate) async fn restart(&mut self) {
        self.stopped().await;
        self.open_again();
    }

    /// After [`World::stopped`].
    pub(crate) fn open_again(&mut self) {
        let (engine, daemon, serving) = open(self.state.path());
        (self.engine, self.daemon, self.serving) = (engine, daemon, Some(serving));
    }

    pub(crate) async fn stopped(&mut self) {
        self.daemon.stop();
        in_time("stopping", self.serving.take().unwrap()).await.unwrap().unwrap();
    }

    fn socket(&self) -> PathBuf {
        self.state.path().join("carrel.sock")
    }

    pub(crate) async fn stream(&self) -> UnixStream {
        UnixStream::connect(self.socket()).await.unwrap()
    }

    /// Sends a request on a line of its own.
    pub(crate) async fn send(&self, request: Request<BoxBody<Bytes, Problem>>) -> Reply {
        let (mut sender, connection) = http1::handshake(TokioIo::new(self.stream().await)).await.unwrap();
        // A client that hangs up breaks off its own connection, and that is no failure of it.
        let line = Line(tokio::spawn(async move { drop(connection.await) }));
        let response = in_time("an answer", sender.send_request(request)).await.unwrap();
        Reply { response, _line: line }
    }

    pub(crate) async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        self.call_with(method, path, body, &[]).await
    }

    pub(crate) async fn call_with(
        &self,
        method: &str,
        path: &str,
        body: Option<Value>,
        headers: &[(&str, &str)],
    ) -> Answer {
        self.send(request(method, path, body, headers)).await.answer().await
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, None).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, Some(body)).await
    }

    pub(crate) async fn sandbox(&self) -> Sandbox<'_> {
        let made = self.post("/v1/sandboxes", json!({})).await.is(StatusCode::CREATED);
        let path = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
        Sandbox { world: self, path }
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

pub(crate) fn request(
    method: &str,
    path: &str,
    body: Option<Value>,
    headers: &[(&str, &str)],
) -> Request<BoxBody<Bytes, Problem>> {
    let bytes = body.map(|body| Bytes::from(serde_json::to_vec(&body).unwrap())).unwrap_or_default();
    raw_request(method, path, bytes, headers)
}

pub(crate) fn raw_request(
    method: &str,
    path: &str,
    body: Bytes,
    headers: &[(&str, &str)],
) -> Request<BoxBody<Bytes, Problem>> {
    let mut request = Request::builder().method(method).uri(path).header("host", "localhost");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(Full::new(body).map_err(|never| match never {}).boxed()).unwrap()
}

/// Dropping it hangs up.
#[derive(Debug)]
struct Line(JoinHandle<()>);

impl Drop for Line {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// An answer whose body has not been read yet.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) response: Response<Incoming>,
    _line: Line,
}

impl Reply {
    pub(crate) async fn answer(mut self) -> Answer {
        let status = self.response.status();
        let replayed = self.response.headers().contains_key("idempotency-replayed");
        let retry_after = self.response.headers().contains_key("retry-after");
        let body = self.response.body_mut();
        let bytes = in_time("a body", body.collect()).await.unwrap().to_bytes();
        Answer { status, bytes, replayed, retry_after }
    }

    /// The answer is a stream of events.
    #[track_caller]
    pub(crate) fn events(self) -> Events {
        assert_eq!(self.response.status(), StatusCode::OK);
        assert_eq!(self.response.headers()["content-type"], "text/event-stream");
        Events { reply: self, text: Vec::new() }
    }

    /// Bytes of the body as they come.
    pub(crate) async fn frame(&mut self) -> Option<Bytes> {
        let frame = in_time("more of a body", self.response.body_mut().frame()).await?;
        Some(frame.unwrap().into_data().unwrap_or_default())
    }
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) bytes: Bytes,
    pub(crate) replayed: bool,
    pub(crate) retry_after: bool,
}

impl Answer {
    #[track_caller]
    pub(crate) fn is(self, status: StatusCode) -> Value {
        let story = String::from_utf8_lossy(&self.bytes[..self.bytes.len().min(2000)]);
        assert_eq!(self.status, status, "{story}");
        if self.bytes.is_empty() { Value::Null } else { serde_json::from_slice(&self.bytes).unwrap() }
    }

    #[track_caller]
    pub(crate) fn ok(self) -> Value {
        self.is(StatusCode::OK)
    }

    #[track_caller]
    pub(crate) fn done(self) {
        assert_eq!(self.is(StatusCode::NO_CONTENT), Value::Null);
    }

    /// A problem of this kind.
    #[track_caller]
    pub(crate) fn refused(self, status: u16, code: &str) -> Value {
        let problem = self.is(StatusCode::from_u16(status).unwrap());
        assert_eq!((&problem["code"], &problem["status"]), (&json!(code), &json!(status)), "{problem}");
        problem
    }
}

/// One server-sent event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) id: Option<String>,
    pub(crate) data: Value,
}

impl Event {
    pub(crate) fn chunk(&self) -> u64 {
        self.data["chunk"].as_u64().unwrap()
    }
}

/// A stream of events.
#[derive(Debug)]
pub(crate) struct Events {
    reply: Reply,
    text: Vec<u8>,
}

impl Events {
    pub(crate) async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(end) = self.text.windows(2).position(|two| two == b"\n\n") {
                let block: Vec<u8> = self.text.drain(..end + 2).collect();
                match event(std::str::from_utf8(&block[..end]).unwrap()) {
                    Some(event) => return Some(event),
                    // A sign of life.
                    None => continue,
                }
            }
            let bytes = self.reply.frame().await?;
            self.text.extend_from_slice(&bytes);
        }
    }

    pub(crate) async fn expect(&mut self, name: &str) -> Event {
        let event = self.next().await.unwrap();
        assert_eq!(event.name, name, "{event:?}");
        event
    }

    /// All that come.
    pub(crate) async fn rest(&mut self) -> Vec<Event> {
        let mut all = Vec::new();
        while let Some(event) = self.next().await {
            all.push(event);
        }
        all
    }
}

fn event(block: &str) -> Option<Event> {
    let mut event = Event { name: String::new(), id: None, data: Value::Null };
    for line in block.lines() {
        match line.split_once(": ") {
            Some(("event", name)) => event.name = name.to_owned(),
            Some(("id", id)) => event.id = Some(id.to_owned()),
            Some(("data", data)) => event.data = serde_json::from_str(data).unwrap(),
            _ => assert_eq!(line, ":", "{block}"),
        }
    }
    (!event.name.is_empty()).then_some(event)
}

/// Bytes as the API writes them.
#[track_caller]
pub(crate) fn bytes(value: &Value) -> Vec<u8> {
    use base64::Engine as _;
    match value {
        Value::String(text) => text.clone().into_bytes(),
        other => base64::engine::general_purpose::STANDARD.decode(other["base64"].as_str().unwrap()).unwrap(),
    }
}

#[derive(Debug)]
pub(crate) struct Sandbox<'a> {
    pub(crate) world: &'a World,
    pub(crate) path: String,
}

impl Sandbox<'_> {
    pub(crate) fn id(&self) -> &str {
        self.path.rsplit('/').next().unwrap()
    }

    /// A path below this sandbox.
    pub(crate) fn at(&self, below: &str) -> String {
        format!("{}/{below}", self.path)
    }

    pub(crate) async fn get(&self, below: &str) -> Answer {
        self.world.get(&self.at(below)).await
    }

    pub(crate) async fn post(&self, below: &str, body: Value) -> Answer {
        self.world.post(&self.at(below), body).await
    }

    pub(crate) async fn run(&self, language: &str, code: &str) -> Value {
        self.post("run", json!({"code": code, "environment": language})).await.ok()
    }

    /// Starts a command that goes on by itself.
    pub(crate) async fn start(&self, mut exec: Value) -> String {
        exec["stream"] = json!(true);
        let started = self.post("execs", exec).await.is(StatusCode::CREATED);
        started["exec"].as_str().unwrap().to_owned()
    }

    pub(crate) async fn stream(&self, below: &str, body: Option<Value>, headers: &[(&str, &str)]) -> Events {
        let method = if body.is_some() { "POST" } else { "GET" };
        self.world.send(request(method, &self.at(below), body, headers)).await.events()
    }

    pub(crate) async fn outcome(&self, exec: &str) -> Value {
        let waited = self.get(&format!("execs/{exec}/wait?timeout_seconds=100")).await.ok();
        assert!(waited["outcome"].is_object(), "{exec} still runs");
        waited["outcome"].clone()
    }

    /// Everything that a call printed, by pages of this size: stdout, stderr, and the numbers of the chunks.
    pub(crate) async fn pages(&self, exec: &str, max: u64) -> (Vec<u8>, Vec<u8>, Vec<u64>) {
        let (mut out, mut err, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
        let mut next = 0;
        loop {
            let path = format!("execs/{exec}/output?since={next}&max={max}&wait_seconds=30");
            let page = self.get(&path).await.ok();
            let chunks = page["chunks"].as_array().unwrap();
            let size: usize = chunks.iter().map(|chunk| bytes(&chunk["data"]).len()).sum();
            assert!(chunks.len() <= 1 || size as u64 <= max, "{size} bytes in a page of {max}");
            for chunk in chunks {
                let stream = if chunk["stream"] == "stderr" { &mut err } else { &mut out };
                assert_eq!(chunk["offset"], stream.len(), "a hole or a repetition");
                stream.extend(bytes(&chunk["data"]));
                numbers.push(chunk["chunk"].as_u64().unwrap());
            }
            next = page["next"].as_u64().unwrap();
            assert_eq!(next, numbers.last().map_or(0, |last| last + 1));
            if page["outcome"].is_object() {
                assert_eq!(page["running"], false);
                return (out, err, numbers);
            }
        }
    }
}
