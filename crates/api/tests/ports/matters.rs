//! The daemon's own matters: tokens, scopes, environments, metrics, health.

use std::collections::BTreeMap;

use axum::{
    body::Body,
    http::{Method, StatusCode},
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::world::World;

/// Names and labels to values; panics at what is not a line of OpenMetrics.
fn parse(text: &str) -> BTreeMap<String, f64> {
    assert!(text.ends_with("# EOF\n"));
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            let bare = name.split('{').next().unwrap();
            assert!(bare.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_'), "{line}");
            (name.to_owned(), value.parse().unwrap())
        })
        .collect()
}

#[tokio::test]
async fn metrics_count_requests_calls_and_sandboxes() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    for code in ["1", "exit(3)"] {
        world.post(&format!("/v1/sandboxes/{sandbox}/run"), None, json!({ "code": code })).await;
    }
    world.get("/v1/nowhere").await;
    let watcher = world.token(json!({ "name": "m", "scope": ["metrics"] })).await;
    let reply = world.ask(Method::GET, "/metrics", Some(&watcher), Body::empty()).await;
    assert_eq!(reply.status, StatusCode::OK);
    assert!(reply.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    let found = parse(reply.text());
    let value = |name: &str| *found.get(name).unwrap_or_else(|| panic!("no {name} in {found:#?}"));
    let route = r#"{method="POST",route="/v1/sandboxes/{sandbox}/run",status="2xx"}"#;
    assert!(value(&format!("carrel_http_requests_total{route}")) == 2.0);
    assert!(value(r#"carrel_http_requests_total{method="GET",route="(none)",status="4xx"}"#) == 1.0);
    let count =
        r#"carrel_http_request_duration_seconds_count{method="POST",route="/v1/sandboxes/{sandbox}/run"}"#;
    assert!(value(count) == 2.0);
    assert!(value(r#"carrel_calls_total{kind="python",cause="exit"}"#) == 2.0);
    assert!(value(r#"carrel_sandboxes{state="running"}"#) == 1.0);
    assert!(value("carrel_resident_memory_bytes") > 1e6);
    assert!(value("carrel_open_files") > 3.0);
    let other = world.token(json!({ "name": "r", "scope": ["run"] })).await;
    world.ask(Method::GET, "/metrics", Some(&other), Body::empty()).await.is_problem(403, "forbidden");
}

#[tokio::test]
async fn what_is_not_there_is_a_problem_too() {
    let mut world = World::new().await;
    for path in ["/", "/v1", "/v2/sandboxes", "/v1/sandboxes/", "/shared"] {
        world.get(path).await.is_problem(404, "not_found");
    }
    let reply = world.ask(Method::DELETE, "/v1/run", None, Body::empty()).await;
    reply.is_problem(405, "method_not_allowed");
    assert_eq!(reply.header("allow"), Some("POST"));
    assert_eq!(world.get("/health").await.json()["status"], "ok");
    assert_eq!(world.get("/ready").await.json()["status"], "ok");
    let document = world.get("/openapi.json").await;
    assert_eq!(document.header("content-type"), Some("application/json"));
    let document = document.json();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    for path in
        ["/v1/events", "/v1/tokens/{token}", "/v1/scopes/{scope}/{owner}", "/v1/sandboxes/{sandbox}/shares"]
    {
        assert!(document["paths"][path].is_object(), "{path}");
    }
    world.stop().await;
}

#[tokio::test]
async fn tokens_are_the_operators_to_give() {
    let world = World::new().await;
    let quota =
        json!({ "sandboxes": 1, "cpu_millis": 4000, "memory": 1_073_741_824, "disk": null, "rate": 1000 });
    let made = world
        .post("/v1/tokens", None, json!({ "name": "ci", "quota": quota, "expires_seconds": 60 }))
        .await
        .json();
    let (id, secret) = (made["id"].as_str().unwrap(), made["token"].as_str().unwrap());
    assert_eq!(made["scope"], json!(["run"]));
    let who = world.ask(Method::GET, "/v1/whoami", Some(secret), Body::empty()).await.json();
    assert_eq!(who["token"]["id"], id);
    assert_eq!(who["token"]["quota"], quota);
    assert_eq!(who["usage"]["sandboxes"], 0);
    world.sandbox(Some(secret)).await;
    let who = world.ask(Method::GET, "/v1/whoami", Some(secret), Body::empty()).await;
    assert_eq!(who.json()["usage"]["sandboxes"], 1);
    assert!(who.json()["usage"]["memory"].as_u64().unwrap() > 0 && !who.text().contains(secret));
    world.post("/v1/sandboxes", Some(secret), json!({})).await.is_problem(429, "quota");
    // The operator's own are counted apart.
    let operator = world.get("/v1/whoami").await.json();
    assert!(operator["token"].is_null() && operator["usage"]["sandboxes"] == 0, "{operator}");

    let listed = world.get("/v1/tokens?limit=1").await;
    assert_eq!(listed.json()["items"][0]["id"], id);
    assert!(!listed.text().contains(secret.rsplit('_').next().unwrap()));
    for (method, path) in
        [(Method::GET, "/v1/tokens"), (Method::POST, "/v1/tokens"), (Method::DELETE, "/v1/tokens/x")]
    {
        let body = json!({ "name": "x" }).to_string();
        world.ask(method, path, Some(secret), body).await.is_problem(403, "forbidden");
    }
    for wrong in [
        json!({}),
        json!({ "name": "" }),
        json!({ "name": "x", "scope": ["root"] }),
        json!({ "name": "x", "scope": [] }),
        json!({ "name": "x", "quota": { "sandboxes": 0 } }),
        json!({ "name": "x", "quota": { "memory": 0 } }),
        json!({ "name": "x", "quota": { "cpus": 1 } }),
        json!({ "name": "x", "expires_seconds": 0 }),
    ] {
        world.post("/v1/tokens", None, wrong).await.is_problem(400, "invalid_argument");
    }
    let gone = world.ask(Method::DELETE, &format!("/v1/tokens/{id}"), None, Body::empty()).await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    // At once, although it was verified a moment ago.
    world.ask(Method::GET, "/v1/whoami", Some(secret), Body::empty()).await.is_problem(401, "unauthorized");
    world
        .ask(Method::DELETE, "/v1/tokens/tok_aaaaaaaaaaaaaaaa", None, Body::empty())
        .await
        .is_problem(404, "not_found");
    world.ask(Method::DELETE, "/v1/tokens/%00", None, Body::empty()).await.is_problem(404, "not_found");
}

#[tokio::test]
async fn a_scope_is_closed_as_a_whole_and_only_its_owners() {
    let world = World::new().await;
    let [a, b] = [world.token(json!({ "name": "a" })).await, world.token(json!({ "name": "b" })).await];
    let mut ids = Vec::new();
    for (token, session) in [(&a, "default"), (&a, "second"), (&b, "default")] {
        let made = world
            .post("/v1/sandboxes", Some(token), json!({ "workflow_run": "run1", "session": session }))
            .await;
        assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
        ids.push(made.json()["id"].as_str().unwrap().to_owned());
    }
    let later = world
        .ask(Method::DELETE, "/v1/scopes/workflow/run1?retention_seconds=3600", Some(&b), Body::empty())
        .await;
    assert!(later.json()["closed"] == json!([]) && later.json()["closing_at_unix_ms"].is_u64(), "{later:?}");
    let closed = world.ask(Method::DELETE, "/v1/scopes/workflow/run1", Some(&a), Body::empty()).await.json();
    let mut found: Vec<&str> =
        closed["closed"].as_array().unwrap().iter().map(|id| id.as_str().unwrap()).collect();
    let mut wanted = vec![ids[0].as_str(), &ids[1]];
    found.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
    assert!(closed["closing_at_unix_ms"].is_null());
    let theirs = world.ask(Method::GET, &format!("/v1/sandboxes/{}", ids[2]), Some(&b), Body::empty()).await;
    assert_eq!(theirs.status, StatusCode::OK);
    for wrong in
        ["/v1/scopes/workflow/a%2Fb", "/v1/scopes/workflow/run1?retention_seconds=-1", "/v1/scopes/%20/x"]
    {
        world.ask(Method::DELETE, wrong, Some(&a), Body::empty()).await.is_problem(400, "invalid_argument");
    }
}

#[tokio::test]
async fn environments_say_whether_they_are_here() {
    let world = World::new().await;
    let listed = world.get("/v1/environments").await.json();
    let python = listed["items"].as_array().unwrap().iter().find(|item| item["name"] == "python").unwrap();
    assert_eq!(
        *python,
        json!({ "name": "python", "source": "preset", "language": "python", "available": true, "why": null })
    );
    let first = world.get("/v1/environments?limit=1").await.json();
    let next = first["next"].as_str().unwrap();
    let second = world.get(&format!("/v1/environments?limit=1&after={next}")).await.json();
    assert_ne!(first["items"][0]["name"], second["items"][0]["name"]);
}

#[tokio::test]
async fn a_daemon_that_shuts_down_is_not_ready() {
    let mut world = World::new().await;
    // A request that is on its way when the daemon is told to stop; the ones before it on other lines have been heard by then.
    let mut early = world.stream().await;
    early.write_all(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n").await.unwrap();
    assert_eq!(world.get("/ready").await.status, StatusCode::OK);
    world.daemon.stop();
    early.write_all(b"\r\n").await.unwrap();
    let mut answer = String::new();
    early.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 503 ") && answer.contains("retry-after: 1\r\n"), "{answer}");
    assert!(answer.contains(r#""code":"unavailable""#), "{answer}");
    world.stop().await;
}
