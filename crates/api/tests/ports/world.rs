//! A daemon of its own for each test: state directory, engine, doors. All of it ends with the test, also when the test fails.

use std::{future::Future, net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use axum::{
    body::{Body, Bytes},
    http::{HeaderMap, Method, Request, Response, StatusCode},
};
use carrel_api::{
    rest::{Daemon, Defaults, Guards, Listeners, Options},
    telemetry::Telemetry,
};
use carrel_engine::{Engine, Environments, Settings, Whereabouts, Wish};
use carrel_proto::problem::Problem;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Nothing here takes this long on a machine that works; it only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(120);

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

pub(crate) struct World {
    pub(crate) engine: Engine,
    pub(crate) daemon: Arc<Daemon>,
    pub(crate) state: tempfile::TempDir,
    socket: PathBuf,
    pub(crate) tcp: SocketAddr,
    serving: Option<tokio::task::JoinHandle<Result<(), Problem>>>,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(None).await
    }

    pub(crate) async fn with(telemetry: Option<Telemetry>) -> Self {
        Self::made(|options| options.telemetry = telemetry).await
    }

    /// With other options than the usual ones.
    pub(crate) async fn made(change: impl FnOnce(&mut Options)) -> Self {
        let state = tempfile::tempdir().unwrap();
        let settings = Settings {
            state: state.path().into(),
            environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
        };
        let engine = Engine::open(settings).unwrap();
        // Should a test be killed, its sandboxes end by themselves.
        let wish = Wish { idle_timeout_s: 120, max_lifetime_s: 900, ..Wish::default() };
        let mut options = Options {
            guards: Guards::default(),
            defaults: Defaults { wish, timeout: Duration::from_secs(60) },
            audit: None,
            public_url: Some("https://carrel.example/".to_owned()),
            telemetry: None,
        };
        change(&mut options);
        let daemon = Daemon::new(engine.clone(), options);
        let socket = state.path().join("carrel.sock");
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let tcp = listener.local_addr().unwrap();
        let listeners =
            Listeners { unix: vec![UnixListener::bind(&socket).unwrap()], tcp: vec![listener], tls: None };
        let serving = Arc::clone(&daemon);
        let serving = tokio::spawn(async move { serving.serve(listeners).await });
        Self { engine, daemon, state, socket, tcp, serving: Some(serving) }
    }

    /// Tells the daemon to stop, and waits until it has.
    pub(crate) async fn stop(&mut self) {
        self.daemon.stop();
        in_time("stopping", self.serving.take().unwrap()).await.unwrap().unwrap();
    }

    /// A connection, and what goes over it is the test's.
    pub(crate) async fn stream(&self) -> UnixStream {
        UnixStream::connect(&self.socket).await.unwrap()
    }

    /// One request on a connection of its own; the answer's body is still to come.
    pub(crate) async fn send(&self, request: Request<Body>) -> Response<Incoming> {
        let stream = self.stream().await;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection.with_upgrades());
        in_time("an answer", sender.send_request(request)).await.unwrap()
    }

    /// One request through the TCP door, and its answer.
    pub(crate) async fn over_tcp(&self, request: Request<Body>) -> Reply {
        let stream = TcpStream::connect(self.tcp).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Reply::of(in_time("an answer", sender.send_request(request)).await.unwrap()).await
    }

    pub(crate) async fn ask(
        &self,
        method: Method,
        path: &str,
        token: Option<&str>,
        body: impl Into<Body>,
    ) -> Reply {
        let mut request = Request::new(body.into());
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().unwrap();
        request.headers_mut().insert("host", "localhost".parse().unwrap());
        if let Some(token) = token {
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        Reply::of(self.send(request).await).await
    }

    pub(crate) async fn get(&self, path: &str) -> Reply {
        self.ask(Method::GET, path, None, Body::empty()).await
    }

    pub(crate) async fn post(&self, path: &str, token: Option<&str>, body: Value) -> Reply {
        self.ask(Method::POST, path, token, body.to_string()).await
    }

    /// The secret of a new token.
    pub(crate) async fn token(&self, body: Value) -> String {
        let made = self.post("/v1/tokens", None, body).await;
        assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
        made.json()["token"].as_str().unwrap().to_owned()
    }

    /// The id of a new sandbox.
    pub(crate) async fn sandbox(&self, token: Option<&str>) -> String {
        let made = self.post("/v1/sandboxes", token, json!({ "labels": { "test": "ports" } })).await;
        assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
        made.json()["id"].as_str().unwrap().to_owned()
    }

    /// Starts [`SERVER`] in a sandbox; its port, on which it listens when this returns.
    pub(crate) async fn server(&self, sandbox: &str, token: Option<&str>) -> u16 {
        let run = self.post(&format!("/v1/sandboxes/{sandbox}/run"), token, json!({ "code": SERVER })).await;
        let reply = run.json();
        assert_eq!(reply["cause"], "exit", "{reply}");
        assert_eq!(reply["exit_code"], 0, "{reply}");
        reply["stdout"].as_str().unwrap().trim().parse().unwrap()
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

/// An answer as a whole.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) async fn of(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let body = in_time("a body", body.collect()).await.unwrap().to_bytes();
        Self { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    #[track_caller]
    pub(crate) fn is_problem(&self, status: u16, code: &str) {
        assert_eq!(self.status.as_u16(), status, "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem = self.json();
        assert_eq!(problem["code"], code, "{problem}");
        assert_eq!(problem["status"], status, "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|text| !text.is_empty()));
    }
}

/// The next piece of a body.
pub(crate) async fn piece(body: &mut Incoming) -> Option<Bytes> {
    loop {
        let frame = in_time("a piece", body.frame()).await?;
        match frame {
            Ok(frame) => {
                if let Ok(data) = frame.into_data() {
                    return Some(data);
                }
            }
            Err(_) => return None,
        }
    }
}

/// Reads until what was read contains `end`.
pub(crate) async fn until(body: &mut Incoming, end: &str) -> String {
    let mut text = String::new();
    while !text.contains(end) {
        let next = piece(body).await.unwrap_or_else(|| panic!("it ended before `{end}`: {text}"));
        text.push_str(std::str::from_utf8(&next).unwrap());
    }
    text
}

/// A server of many talents, in an interpreter: it listens when the run that starts it ends.
pub(crate) const SERVER: &str = r#"
import base64, hashlib, http.server, json, struct, threading

go, half = threading.Event(), threading.Event()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, *headers):
        self.send_response(200)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def echo(self):
        seen = {"method": self.command, "path": self.path, "headers": self.headers.items()}
        self.answer(json.dumps(seen).encode(), ("Content-Type", "application/json"))

    do_DELETE = do_PUT = do_PATCH = do_OPTIONS = do_HEAD = do_PROPFIND = echo

    def do_POST(self):
        if self.path == "/digest":
            digest, left = hashlib.sha256(), int(self.headers["Content-Length"])
            while left:
                data = self.rfile.read(min(left, 65536))
                digest.update(data)
                left -= len(data)
                half.set()
            self.answer(digest.hexdigest().encode())
        else:
            self.echo()

    def do_GET(self):
        if self.path == "/stream":
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"4\r\none\n\r\n")
            self.wfile.flush()
            go.wait()
            self.wfile.write(b"4\r\ntwo\n\r\n0\r\n\r\n")
        elif self.path == "/go":
            go.set()
            self.answer(b"gone")
        elif self.path == "/half":
            half.wait()
            self.answer(b"half")
        elif self.path == "/large":
            self.answer(bytes(range(256)) * 65536)
        elif self.path == "/silent":
            self.connection.shutdown(2)
            self.close_connection = True
        elif self.path == "/origin":
            self.answer(b"<h1>hello</h1>", ("Content-Type", "text/html"),
                ("Access-Control-Allow-Origin", "*"), ("Access-Control-Allow-Credentials", "true"),
                ("Service-Worker-Allowed", "/"), ("Clear-Site-Data", '"*"'), ("Strict-Transport-Security", "max-age=9"),
                ("Content-Security-Policy", "default-src 'self'"), ("X-Mine", "1"), ("Keep-Alive", "timeout=5"),
                ("Set-Cookie", "a=1; Path=/; Domain=localhost; HttpOnly"), ("Set-Cookie", "b=2"))
        elif self.path == "/socket":
            key = self.headers["Sec-WebSocket-Key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
            self.end_headers()
            self.close_connection = True
            while head := self.rfile.read(2):
                size = head[1] & 127
                if size == 126:
                    size = struct.unpack(">H", self.rfile.read(2))[0]
                mask = self.rfile.read(4)
                data = bytes(byte ^ mask[at % 4] for at, byte in enumerate(self.rfile.read(size)))
                if head[0] & 15 == 8:
                    self.wfile.write(b"\x88\x00")
                    return
                size = bytes([size]) if size < 126 else b"\x7e" + struct.pack(">H", size)
                self.wfile.write(bytes([0x80 | head[0] & 15]) + size + data)
        else:
            self.echo()

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port)
"#;
