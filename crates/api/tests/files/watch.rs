//! Watching. What is awaited is an event, never a time.

use std::os::unix::ffi::OsStrExt;

use axum::body::Body;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::world::{Sandbox, World, in_time};

/// A stream of events, read one by one.
struct Listening {
    body: Incoming,
    text: Vec<u8>,
}

impl Listening {
    async fn to(sandbox: &Sandbox<'_>, query: &str) -> Self {
        let response =
            sandbox.begin(sandbox.request("GET", &format!("/watch{query}"), &[], Body::empty())).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let mut listening = Self { body: response.into_body(), text: Vec::new() };
        assert_eq!(listening.next().await, Some(("ready".into(), json!({}))));
        listening
    }

    /// The next event; `None` at the end of the stream.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some(end) = self.text.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.text.drain(..end + 2).collect();
                let event = String::from_utf8(event).unwrap();
                let field =
                    |name: &str| event.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
                if let (Some(kind), Some(data)) = (field("event: "), field("data: ")) {
                    return Some((kind, serde_json::from_str(&data).unwrap()));
                }
                continue;
            }
            let frame = in_time("an event", self.body.frame()).await?;
            self.text.extend_from_slice(&frame.unwrap().into_data().unwrap());
        }
    }

    /// Reads on until this change is told, and returns all that came before.
    async fn until(&mut self, change: Value) -> Vec<Value> {
        let mut before = Vec::new();
        loop {
            let (kind, data) =
                self.next().await.unwrap_or_else(|| panic!("ended before {change}: {before:?}"));
            assert_eq!(kind, "change", "{data}");
            if data == change {
                return before;
            }
            before.push(data);
        }
    }
}

fn created(path: &str) -> Value {
    json!({"path": path, "kind": "created", "from": null})
}

#[tokio::test]
async fn changes_are_told_as_they_happen() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let at = |path: &str| sandbox.workspace().join(path);
    std::fs::create_dir_all(at("old/deep")).unwrap();
    let mut watch = Listening::to(&sandbox, "").await;
    std::fs::write(at("old/deep/f"), "1").unwrap();
    assert_eq!(watch.until(created("old/deep/f")).await, Vec::<Value>::new());
    watch.until(json!({"path": "old/deep/f", "kind": "changed", "from": null})).await;
    std::fs::rename(at("old/deep/f"), at("g")).unwrap();
    watch.until(json!({"path": "g", "kind": "moved", "from": "old/deep/f"})).await;
    std::fs::remove_file(at("g")).unwrap();
    watch.until(json!({"path": "g", "kind": "removed", "from": null})).await;
    // A directory that moves takes its watches along.
    std::fs::rename(at("old"), at("new")).unwrap();
    watch.until(json!({"path": "new", "kind": "moved", "from": "old"})).await;
    std::fs::write(at("new/deep").join(std::ffi::OsStr::from_bytes(b"\xff")), "").unwrap();
    watch.until(json!({"path": {"base64": "bmV3L2RlZXAv/w=="}, "kind": "created", "from": null})).await;
    // What we write ourselves is told once, under its own name.
    sandbox.put("put", "body").await.is(201);
    let before = watch.until(created("put")).await;
    assert!(before.iter().all(|change| !change.to_string().contains(".carrel-")), "{before:?}");
}

#[tokio::test]
async fn what_is_made_in_new_directories_is_told_once() {
    const ROUNDS: usize = 20;
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut watch = Listening::to(&sandbox, "?path=.").await;
    for round in 0..ROUNDS {
        // Faster than any watch can be set.
        let deep = format!("d{round}/a/b/c");
        std::fs::create_dir_all(sandbox.workspace().join(&deep)).unwrap();
        std::fs::write(sandbox.workspace().join(&deep).join("f"), "").unwrap();
    }
    std::fs::write(sandbox.workspace().join("last"), "").unwrap();
    let mut wanted: std::collections::HashSet<String> = (0..ROUNDS)
        .flat_map(|round| ["", "/a", "/a/b", "/a/b/c", "/a/b/c/f"].map(|part| format!("d{round}{part}")))
        .chain(["last".into()])
        .collect();
    while !wanted.is_empty() {
        let (kind, data) = watch.next().await.unwrap();
        assert_eq!(kind, "change");
        if data["kind"] == "created" {
            let path = data["path"].as_str().unwrap();
            assert!(wanted.remove(path), "{path} came twice, or from nowhere");
        }
    }
}

#[tokio::test]
async fn a_watch_keeps_to_its_directory_and_ends_with_it() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let at = |path: &str| sandbox.workspace().join(path);
    std::fs::create_dir_all(at("here/below")).unwrap();
    let mut flat = Listening::to(&sandbox, "?path=here&recursive=false").await;
    let mut all = Listening::to(&sandbox, "").await;
    std::fs::write(at("elsewhere"), "").unwrap();
    std::fs::write(at("here/below/f"), "").unwrap();
    std::fs::write(at("here/g"), "").unwrap();
    assert_eq!(flat.next().await, Some(("change".into(), created("here/g"))));
    all.until(created("here/g")).await;
    sandbox.get("/watch?path=here/g").await.refused(409, "not_a_directory");
    sandbox.get("/watch?path=nowhere").await.refused(404, "not_found");
    std::fs::remove_dir_all(at("here")).unwrap();
    while flat.next().await.is_some() {}
    world.engine.close(&sandbox.record, None).await.unwrap();
    while all.next().await.is_some() {}
}
