//! WebSockets on terminals.

use axum::body::Bytes;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_tungstenite::{
    WebSocketStream, client_async,
    tungstenite::{Message, protocol::frame::coding::CloseCode},
};

use crate::world::{Sandbox, World, in_time};

/// One that looks, and may speak.
struct Viewer {
    socket: WebSocketStream<UnixStream>,
    screen: String,
    told: Vec<Value>,
}

impl Viewer {
    async fn attach(sandbox: &Sandbox<'_>, exec: &str, query: &str) -> Self {
        let url = format!("ws://localhost{}?{query}", sandbox.at(&format!("execs/{exec}/attach")));
        let (socket, _) = client_async(url, sandbox.world.stream().await).await.unwrap();
        Self { socket, screen: String::new(), told: Vec::new() }
    }

    async fn say(&mut self, message: Value) {
        self.socket.send(Message::text(message.to_string())).await.unwrap();
    }

    async fn type_in(&mut self, text: &'static str) {
        self.socket.send(Message::Binary(Bytes::from_static(text.as_bytes()))).await.unwrap();
    }

    /// One more message; the code of the last one.
    async fn step(&mut self) -> Option<CloseCode> {
        match in_time("a message", self.socket.next()).await.unwrap().unwrap() {
            Message::Binary(bytes) => self.screen.push_str(std::str::from_utf8(&bytes).unwrap()),
            Message::Text(text) => self.told.push(serde_json::from_str(&text).unwrap()),
            Message::Close(frame) => return Some(frame.unwrap().code),
            _ => {}
        }
        None
    }

    async fn until(&mut self, text: &str) {
        while !self.screen.contains(text) {
            assert!(self.step().await.is_none(), "ended before {text:?}: {:?}, {:?}", self.screen, self.told);
        }
    }

    async fn end(&mut self) -> CloseCode {
        loop {
            if let Some(code) = self.step().await {
                return code;
            }
        }
    }

    fn of_type(&self, kind: &str) -> Vec<&Value> {
        self.told.iter().filter(|told| told["type"] == kind).collect()
    }
}

const SCRIPT: &str = "stty -echo; stty size; read x; stty size; echo got $x; read y; echo bye $y";

#[tokio::test]
async fn two_look_at_a_terminal_and_one_of_them_types() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let exec = sandbox.start(json!({"argv": ["sh", "-c", SCRIPT], "pty": {"rows": 24, "cols": 80}})).await;
    let mut typist = Viewer::attach(&sandbox, &exec, "").await;
    let mut reader = Viewer::attach(&sandbox, &exec, "read_only=true").await;
    typist.until("24 80").await;
    reader.until("24 80").await;
    assert_eq!(reader.told[0], json!({"type": "chunk", "chunk": 0, "offset": 0, "stream": "stdout"}));
    reader.type_in("not me\n").await;
    while reader.of_type("error").is_empty() {
        reader.step().await;
    }
    assert_eq!(reader.of_type("error")[0]["problem"]["code"], "invalid_argument");
    typist.say(json!({"type": "resize", "rows": 30, "cols": 100})).await;
    typist.say(json!({"type": "dance"})).await;
    while typist.of_type("error").is_empty() {
        typist.step().await;
    }
    typist.type_in("hello\n").await;
    typist.until("got hello").await;
    reader.until("got hello").await;
    assert!(typist.screen.contains("30 100"), "{}", typist.screen);
    sandbox.post(&format!("execs/{exec}/resize"), json!({"rows": 5, "cols": 5})).await.done();
    // Who comes late sees it all, or what comes after a chunk.
    let mut late = Viewer::attach(&sandbox, &exec, "").await;
    late.until("got hello").await;
    let page = sandbox.get(&format!("execs/{exec}/output")).await.ok();
    let last = page["chunks"].as_array().unwrap().last().unwrap().clone();
    let mut later = Viewer::attach(&sandbox, &exec, &format!("since={}", last["chunk"])).await;
    typist.type_in("all\n").await;
    for viewer in [&mut typist, &mut reader, &mut late, &mut later] {
        assert_eq!(viewer.end().await, CloseCode::Normal);
        let end = viewer.told.last().unwrap();
        assert_eq!((&end["type"], &end["outcome"]["exit_code"]), (&json!("end"), &json!(0)));
    }
    let (out, _, _) = sandbox.pages(&exec, 1 << 20).await;
    for viewer in [&typist, &reader, &late] {
        assert_eq!(viewer.screen.as_bytes(), out);
    }
    assert_eq!((&later.told[0]["chunk"], &later.told[0]["offset"]), (&last["chunk"], &last["offset"]));
    assert!(out.ends_with(later.screen.as_bytes()));
}

#[tokio::test]
async fn pipes_are_viewed_too_and_their_input_has_an_end() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let script = "echo out; cat; echo err >&2";
    let exec = sandbox.start(json!({"argv": ["sh", "-c", script], "stdin": true})).await;
    let mut viewer = Viewer::attach(&sandbox, &exec, "").await;
    viewer.until("out").await;
    viewer.type_in("typed\n").await;
    viewer.say(json!({"type": "close_stdin"})).await;
    assert_eq!(viewer.end().await, CloseCode::Normal);
    assert_eq!(viewer.screen, "out\ntyped\nerr\n");
    assert_eq!(viewer.of_type("chunk").last().unwrap()["stream"], "stderr");
    let exec = sandbox.start(json!({"argv": ["sleep", "1000"]})).await;
    let mut viewer = Viewer::attach(&sandbox, &exec, "").await;
    viewer.say(json!({"type": "signal", "signal": "TERM"})).await;
    assert_eq!(viewer.end().await, CloseCode::Normal);
    assert_eq!(viewer.told.last().unwrap()["outcome"]["signal"], 15);
    sandbox.get(&format!("execs/{exec}/attach")).await.refused(400, "invalid_argument");
}

#[tokio::test]
async fn a_viewer_that_reads_nothing_hurts_neither_the_code_nor_the_others() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let script = "read x; head -c 20000000 /dev/zero | tr '\\0' y; echo; echo done";
    let exec = sandbox.start(json!({"argv": ["sh", "-c", script], "stdin": true})).await;
    let slow = Viewer::attach(&sandbox, &exec, "").await;
    let mut quick = Viewer::attach(&sandbox, &exec, "").await;
    quick.type_in("go\n").await;
    assert_eq!(quick.end().await, CloseCode::Normal);
    assert_eq!(quick.screen.len(), 20_000_000 + 6);
    assert_eq!(sandbox.outcome(&exec).await["exit_code"], 0);
    drop(slow);
}

#[tokio::test]
async fn the_daemon_says_goodbye_when_it_stops() {
    let mut world = World::new();
    let (mut viewer, path, exec);
    {
        let sandbox = world.sandbox().await;
        exec = sandbox.start(json!({"argv": ["sh", "-c", "echo up; exec cat"], "stdin": true})).await;
        viewer = Viewer::attach(&sandbox, &exec, "").await;
        path = sandbox.path.clone();
    }
    viewer.until("up").await;
    let (code, ()) = tokio::join!(viewer.end(), world.stopped());
    assert_eq!(code, CloseCode::Away);
    world.open_again();
    let sandbox = Sandbox { world: &world, path };
    let mut viewer = Viewer::attach(&sandbox, &exec, "since=1").await;
    viewer.type_in("again").await;
    viewer.until("again").await;
    assert_eq!(viewer.screen, "again", "and nothing twice");
}

#[tokio::test]
async fn a_quiet_viewer_is_asked_now_and_then_whether_it_lives() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let exec = sandbox.start(json!({"argv": ["sleep", "1000"]})).await;
    let mut viewer = Viewer::attach(&sandbox, &exec, "read_only=true").await;
    loop {
        if let Message::Ping(_) = in_time("a ping", viewer.socket.next()).await.unwrap().unwrap() {
            break;
        }
    }
}
