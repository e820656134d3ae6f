use axum::{
    body::Body,
    http::{Method, Request, StatusCode},
};
use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit, Mac};
use serde_json::json;

use crate::{
    proxy::{exchange, socket},
    world::{Reply, World},
};

/// A link as the daemon would have signed it, with its own key.
fn signed(world: &World, sandbox: &str, port: u16, expires_unix_ms: u64) -> String {
    let key = std::fs::read(world.state.path().join("share.key")).unwrap();
    let mut bytes = vec![1];
    bytes.extend_from_slice(&port.to_be_bytes());
    bytes.extend_from_slice(&expires_unix_ms.to_be_bytes());
    bytes.extend_from_slice(sandbox.as_bytes());
    let mut mac = Hmac::<sha2::Sha256>::new_from_slice(&key).unwrap();
    mac.update(b"carrel share link\0");
    mac.update(&bytes);
    bytes.extend_from_slice(&mac.finalize().into_bytes());
    format!("/shared/{}/", URL_SAFE_NO_PAD.encode(bytes))
}

#[tokio::test]
async fn whoever_has_the_link_reaches_the_port_and_nothing_else() {
    let world = World::new().await;
    let token = world.token(json!({ "name": "a" })).await;
    let sandbox = world.sandbox(Some(&token)).await;
    let port = world.server(&sandbox, Some(&token)).await;
    let share = format!("/v1/sandboxes/{sandbox}/shares");
    let made = world.post(&share, Some(&token), json!({ "port": port })).await;
    assert_eq!(made.status, StatusCode::CREATED);
    let made = made.json();
    let path = made["path"].as_str().unwrap();
    assert_eq!(made["url"], format!("https://carrel.example{path}"));
    let expires = made["expires_unix_ms"].as_u64().unwrap();
    assert_eq!(signed(&world, &sandbox, port, expires), path);

    // A server's own address of that name is the server's.
    let own = format!("/v1/sandboxes/{sandbox}/ports/{port}/share");
    assert_eq!(world.post(&own, Some(&token), json!({})).await.json()["path"], "/share");

    let reply = world.get(&format!("{path}a/b?c=d")).await;
    assert_eq!(reply.json()["path"], "/a/b?c=d");
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
    assert!(reply.header("content-security-policy").unwrap().starts_with("sandbox "));
    // A token that is sent along by mistake stops here too.
    let reply = world.ask(Method::POST, path, Some(&token), "x").await;
    assert!(reply.status == StatusCode::OK && !reply.text().contains(&token));
    let mut socket = socket(&world, &format!("{path}socket")).await;
    assert_eq!(exchange(&mut socket, b"through a link").await, b"through a link");

    // Over TCP nobody else comes in without a token, and a page of the sandbox, which has no origin, comes in here alone.
    let tcp = |path: &str, method: Method, extra: &[(&str, &str)]| {
        let mut request =
            Request::builder().method(method).uri(path).header("host", "localhost").header("origin", "null");
        for (name, value) in extra {
            request = request.header(*name, *value);
        }
        let (request, address) = (request.body(Body::empty()).unwrap(), world.tcp);
        async move {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let stream = hyper_util::rt::TokioIo::new(stream);
            let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            Reply::of(sender.send_request(request).await.unwrap()).await
        }
    };
    let reply = tcp(path, Method::GET, &[]).await;
    assert!(reply.json()["headers"].to_string().contains(r#"["x-forwarded-for","127.0.0.1"]"#), "{reply:?}");
    let asked = [("access-control-request-method", "PUT"), ("access-control-request-headers", "x-a")];
    let reply = tcp(path, Method::OPTIONS, &asked).await;
    assert_eq!(reply.status, StatusCode::NO_CONTENT);
    assert_eq!(reply.header("access-control-allow-methods"), Some("PUT"));
    assert_eq!(reply.header("access-control-allow-headers"), Some("x-a"));
    tcp("/v1/whoami", Method::GET, &[]).await.is_problem(403, "forbidden");
}

#[tokio::test]
async fn links_that_are_over_changed_or_foreign_are_all_the_same() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let share = format!("/v1/sandboxes/{sandbox}/shares");
    for wrong in [
        json!({}),
        json!({ "port": 0 }),
        json!({ "port": 65_536 }),
        json!({ "port": port, "expires_seconds": 0 }),
        json!({ "port": port, "expires_seconds": 2_592_001 }),
        json!({ "port": port, "expires": 1 }),
    ] {
        world.post(&share, None, wrong).await.is_problem(400, "invalid_argument");
    }
    let made = world.post(&share, None, json!({ "port": port, "expires_seconds": 2_592_000 })).await.json();
    let path = made["path"].as_str().unwrap().to_owned();
    let expires = made["expires_unix_ms"].as_u64().unwrap();
    assert_eq!(world.get(&path).await.status, StatusCode::OK);

    let over = signed(&world, &sandbox, port, expires - 2_592_000_001);
    let unknown = signed(&world, "sbx_aaaaaaaaaaaaaaaa", port, expires);
    let other = World::new().await;
    let elsewhere = format!("/v1/sandboxes/{}/shares", other.sandbox(None).await);
    other.post(&elsewhere, None, json!({ "port": 1 })).await;
    let foreign = signed(&other, &sandbox, port, expires);
    let mut answers = Vec::new();
    for wrong in
        ["/shared/x/", "/shared/%00%ff/", &over, &unknown, &foreign, &path.replace("/shared/A", "/shared/B")]
    {
        let reply = world.get(wrong).await;
        reply.is_problem(404, "not_found");
        answers.push(reply.body);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));

    // The link ends with its sandbox; what is made afterwards is another one.
    let closed = world.ask(Method::DELETE, &format!("/v1/sandboxes/{sandbox}"), None, Body::empty()).await;
    assert_eq!(closed.status, StatusCode::NO_CONTENT);
    let reply = world.get(&path).await;
    reply.is_problem(404, "not_found");
    assert_eq!(reply.body, answers[0]);
}

#[tokio::test]
async fn the_same_request_gets_the_same_link() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let request = || {
        let request = Request::post(format!("/v1/sandboxes/{sandbox}/shares"));
        let request = request.header("host", "localhost").header("idempotency-key", "once");
        request.body(Body::from(r#"{"port": 80}"#)).unwrap()
    };
    let first = Reply::of(world.send(request()).await).await;
    let again = Reply::of(world.send(request()).await).await;
    assert_eq!(first.status, StatusCode::CREATED);
    assert_eq!(first.body, again.body);
    assert_eq!(again.header("idempotency-replayed"), Some("true"));
}
