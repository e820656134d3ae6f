//! What is written down of requests.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use axum::{
    body::Body,
    http::{Method, Request},
};
use carrel_engine::journal::{Journal, Rotation};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;

use crate::world::{World, in_time, until};

/// The lines of an audit log.
fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// A daemon that keeps an audit log, and where.
async fn audited() -> (World, TempDir, PathBuf) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("audit.jsonl");
    let journal = Journal::open(&path, Rotation::default()).unwrap();
    (World::made(|options| options.audit = Some(journal)).await, place, path)
}

/// The first line like this, once it is there: a journal is written by a thread of its own, which tells nobody.
async fn line(path: &Path, like: impl Fn(&Value) -> bool) -> Value {
    in_time("a line", async {
        loop {
            if let Some(line) = lines(path).into_iter().find(&like) {
                return line;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
}

/// Sends a request and hangs up when `heard` of the daemon's events was seen.
async fn hang_up_after(world: &World, heard: &str, path: &str, body: Value) {
    let mut events = world.send(Request::get("/v1/events").body(Body::empty()).unwrap()).await.into_body();
    let mut stream = world.stream().await;
    let body = body.to_string();
    let head = format!("POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    until(&mut events, heard).await;
}

#[tokio::test]
async fn who_hangs_up_is_in_the_audit_log_all_the_same() {
    let (world, _place, log) = audited().await;
    let sandbox = world.sandbox(None).await;
    let run = format!("/v1/sandboxes/{sandbox}/run");
    hang_up_after(&world, "run.started", &run, json!({ "code": "import time; time.sleep(1000)" })).await;
    let left = line(&log, |line| line["route"] == "/v1/sandboxes/{sandbox}/run").await;
    assert_eq!((&left["status"], &left["sandbox"]), (&json!(499), &json!(sandbox)), "{left}");
    assert_eq!(left["caller"], "local");
    // The sandbox is made by somebody who is gone before it has an id.
    let mut stream = world.stream().await;
    let body = json!({ "code": "1", "sandbox": "late" }).to_string();
    let head = format!("POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    drop(stream);
    let left = line(&log, |line| line["route"] == "/v1/run").await;
    let made = world.get("/v1/sandboxes?key=user%3Alocal%3Alate").await.json();
    // Null twice, if the hanging up was seen before anything was done.
    assert_eq!(left["sandbox"], made["items"][0]["id"], "{left}");
    let metrics = world.get("/metrics").await;
    let counted = r#"{method="POST",route="/v1/sandboxes/{sandbox}/run",status="4xx"} 1"#;
    assert!(metrics.text().contains(counted), "{}", metrics.text());
}

#[tokio::test]
async fn the_audit_log_names_what_was_acted_upon_whatever_the_path() {
    let (world, _place, log) = audited().await;
    let made = world.post("/v1/sandboxes", None, json!({ "key": "workflow:r1:default" })).await.json();
    let id = made["id"].as_str().unwrap();
    let of = |route: &'static str| line(&log, move |line| line["route"] == route);
    assert_eq!(of("/v1/sandboxes").await["sandbox"], id);
    let ran = world.post("/v1/run", None, json!({ "code": "1", "sandbox": "workflow:r1:default" })).await;
    assert_eq!(ran.json()["sandbox"], id);
    assert_eq!(of("/v1/run").await["sandbox"], id);
    let saved = world
        .post(&format!("/v1/sandboxes/{id}/snapshots"), None, json!({ "files_only": true, "tags": ["t"] }))
        .await
        .json();
    let taken = of("/v1/sandboxes/{sandbox}/snapshots").await;
    assert!(taken["snapshot"] == saved["id"] && taken["sandbox"] == id, "{taken}");
    let back = world.post("/v1/snapshots/t/restore", None, json!({ "new": true })).await.json();
    let restored = of("/v1/snapshots/{snapshot}/restore").await;
    assert!(restored["snapshot"] == saved["id"] && restored["sandbox"] == back["id"], "{restored}");
    assert!(restored["sandbox"].is_string());
    let token = world.post("/v1/tokens", None, json!({ "name": "x" })).await.json();
    let made = of("/v1/tokens").await;
    assert_eq!(made["token"], token["id"]);
    world.ask(Method::DELETE, &format!("/v1/tokens/{}", token["id"].as_str().unwrap()), None, "").await;
    assert_eq!(of("/v1/tokens/{token}").await["token"], token["id"]);
    let share = world.post(&format!("/v1/sandboxes/{id}/shares"), None, json!({ "port": 80 })).await.json();
    world.get(share["path"].as_str().unwrap()).await;
    assert_eq!(of("/shared/{link}/").await["sandbox"], id);
    world.ask(Method::DELETE, "/v1/scopes/workflow/r1", None, "").await;
    assert_eq!(of("/v1/scopes/{scope}/{owner}").await["sandbox"], id);
    let text = std::fs::read_to_string(&log).unwrap();
    let link = share["path"].as_str().unwrap().split('/').nth(2).unwrap();
    let secret = token["token"].as_str().unwrap();
    assert!(!text.contains(link) && !text.contains(secret) && !text.contains("\"1\""), "{text}");
}
