use axum::{
    body::{Body, Bytes},
    http::{Method, Request, StatusCode},
};
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::world::{Reply, World, in_time, piece, until};

/// `sha256(bytes(range(256)) * 65536)`, as the server's answer is and as what is sent to it.
fn large() -> Vec<u8> {
    let all: Vec<u8> = (0..=255).collect();
    all.repeat(65536)
}

#[tokio::test]
async fn requests_reach_the_server_and_the_token_does_not() {
    let world = World::new().await;
    let token = world.token(json!({ "name": "a" })).await;
    let sandbox = world.sandbox(Some(&token)).await;
    let port = world.server(&sandbox, Some(&token)).await;
    let base = format!("/v1/sandboxes/{sandbox}/ports/{port}");

    let listed =
        world.ask(Method::GET, &format!("/v1/sandboxes/{sandbox}/ports"), Some(&token), Body::empty()).await;
    let listed = listed.json();
    assert!(listed["items"].as_array().unwrap().iter().any(|item| item["port"] == port), "{listed}");
    assert!(listed["next"].is_null());

    // The path comes as it was sent, whatever is in it.
    for (given, seen) in [
        ("", "/"),
        ("/", "/"),
        ("/a%2Fb//c/../d?q=%20&share", "/a%2Fb//c/../d?q=%20&share"),
        ("/%ff", "/%ff"),
        ("?x=1", "/?x=1"),
    ] {
        let reply = world.ask(Method::GET, &format!("{base}{given}"), Some(&token), Body::empty()).await;
        assert_eq!(reply.status, StatusCode::OK, "{given}: {reply:?}");
        assert_eq!(reply.json()["path"], seen, "{given}");
        assert!(!reply.text().contains(&token), "the token reaches user code");
        let headers = reply.json()["headers"].to_string().to_lowercase();
        assert!(!headers.contains("authorization"), "{headers}");
        assert!(headers.contains(&format!(r#"["x-forwarded-prefix","{base}"]"#)), "{headers}");
        assert!(headers.contains(r#"["x-forwarded-host","localhost"]"#), "{headers}");
        assert!(headers.contains(r#"["x-forwarded-proto","http"]"#), "{headers}");
        assert!(headers.contains(&format!(r#"["host","localhost:{port}"]"#)), "{headers}");
    }
    for method in [
        Method::DELETE,
        Method::PUT,
        Method::PATCH,
        Method::OPTIONS,
        Method::from_bytes(b"PROPFIND").unwrap(),
    ] {
        let reply = world.ask(method.clone(), &format!("{base}/x"), Some(&token), Body::empty()).await;
        assert_eq!(reply.json()["method"], method.as_str());
    }
    let head = world.ask(Method::HEAD, &format!("{base}/x"), Some(&token), Body::empty()).await;
    assert!(head.status == StatusCode::OK && head.body.is_empty());
    let reply = world
        .ask(Method::GET, &format!("/v1/sandboxes/{sandbox}/ports/0{port}/x"), Some(&token), Body::empty())
        .await;
    assert_eq!(reply.json()["path"], "/x");
    // `share` is ours for POST alone.
    let reply = world.ask(Method::GET, &format!("{base}/share"), Some(&token), Body::empty()).await;
    assert_eq!(reply.json()["path"], "/share");
}

#[tokio::test]
async fn nobody_elses_port_and_no_port_at_all() {
    let world = World::new().await;
    let [a, b] = [world.token(json!({ "name": "a" })).await, world.token(json!({ "name": "b" })).await];
    let reader = world.token(json!({ "name": "c", "scope": ["read"] })).await;
    let sandbox = world.sandbox(Some(&a)).await;
    let port = world.server(&sandbox, Some(&a)).await;
    for path in ["", "/1", "/share"] {
        let path = format!("/v1/sandboxes/{sandbox}/ports/{port}{path}");
        let theirs = world.ask(Method::POST, &path, Some(&b), "{}").await;
        theirs.is_problem(404, "sandbox_not_found");
        world.ask(Method::POST, &path, Some(&reader), "{}").await.is_problem(403, "forbidden");
        world.ask(Method::POST, &path, Some("carrel_tok_x_y"), "{}").await.is_problem(401, "unauthorized");
    }
    world
        .ask(Method::GET, &format!("/v1/sandboxes/{sandbox}/ports"), Some(&b), Body::empty())
        .await
        .is_problem(404, "sandbox_not_found");
    for wrong in ["0", "65536", "+80", "-1", "x", "99999999999999999999", "80.0"] {
        let path = format!("/v1/sandboxes/{sandbox}/ports/{wrong}/");
        world.get(&path).await.is_problem(400, "invalid_argument");
    }
    // Nothing has ever listened there.
    let reply = world.get(&format!("/v1/sandboxes/{sandbox}/ports/9/x")).await;
    reply.is_problem(502, "port_closed");
    // It hangs up instead of answering.
    let reply = world.get(&format!("/v1/sandboxes/{sandbox}/ports/{port}/silent")).await;
    reply.is_problem(502, "port_closed");
    let closed =
        world.ask(Method::DELETE, &format!("/v1/sandboxes/{sandbox}"), Some(&a), Body::empty()).await;
    assert_eq!(closed.status, StatusCode::NO_CONTENT);
    let path = format!("/v1/sandboxes/{sandbox}/ports/{port}/");
    world.ask(Method::GET, &path, Some(&a), Body::empty()).await.is_problem(404, "sandbox_not_found");
}

#[tokio::test]
async fn bodies_flow_both_ways_as_they_come() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let base = format!("/v1/sandboxes/{sandbox}/ports/{port}");

    // The answer's first part is here before its second is made.
    let request =
        Request::get(format!("{base}/stream")).header("host", "localhost").body(Body::empty()).unwrap();
    let mut body = world.send(request).await.into_body();
    until(&mut body, "one\n").await;
    assert_eq!(world.get(&format!("{base}/go")).await.text(), "gone");
    until(&mut body, "two\n").await;
    assert!(piece(&mut body).await.is_none());

    // The request's first part is there before its second is sent.
    let (first, second) = (vec![b'a'; 65536], vec![b'b'; 100]);
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
    let request = Request::post(format!("{base}/digest")).header("host", "localhost");
    let request = request.header("content-length", first.len() + second.len()).body(body).unwrap();
    let feeding = async {
        sender.send(Ok(first.clone().into())).await.unwrap();
        assert_eq!(world.get(&format!("{base}/half")).await.text(), "half");
        sender.send(Ok(second.clone().into())).await.unwrap();
        drop(sender);
    };
    let (reply, ()) = tokio::join!(async { Reply::of(world.send(request).await).await }, feeding);
    assert_eq!(reply.text(), digest(&[first.as_slice(), &second].concat()));

    // Larger than any buffer on the way.
    let reply = world.get(&format!("{base}/large")).await;
    assert!(reply.body == large());
    let reply = world.ask(Method::POST, &format!("{base}/digest"), None, large()).await;
    assert_eq!(reply.text(), digest(&large()));

    // A client that goes away in the midst leaves the server as it was.
    let request =
        Request::get(format!("{base}/large")).header("host", "localhost").body(Body::empty()).unwrap();
    let mut body = world.send(request).await.into_body();
    piece(&mut body).await.unwrap();
    drop(body);
    assert_eq!(world.get(&format!("{base}/go")).await.text(), "gone");
}

fn digest(bytes: &[u8]) -> String {
    use sha2::Digest;
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn pages_of_a_sandbox_are_nobody_to_the_api() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let base = format!("/v1/sandboxes/{sandbox}/ports/{port}");
    let reply = world.get(&format!("{base}/origin")).await;
    assert_eq!(reply.text(), "<h1>hello</h1>");
    assert_eq!(reply.header("x-mine"), Some("1"));
    assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
    let policies: Vec<_> = reply.headers.get_all("content-security-policy").iter().collect();
    assert_eq!(
        policies,
        ["default-src 'self'", "sandbox allow-scripts allow-forms allow-popups allow-downloads"]
    );
    for name in [
        "access-control-allow-origin",
        "access-control-allow-credentials",
        "service-worker-allowed",
        "clear-site-data",
        "strict-transport-security",
        "keep-alive",
    ] {
        assert_eq!(reply.header(name), None, "{name}");
    }
    let cookies: Vec<_> =
        reply.headers.get_all("set-cookie").iter().map(|value| value.to_str().unwrap()).collect();
    assert_eq!(cookies, [format!("a=1; HttpOnly; Path={base}/"), format!("b=2; Path={base}/")]);
}

#[tokio::test]
async fn a_websocket_echoes_and_ends_with_its_sandbox() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let mut socket = socket(&world, &format!("/v1/sandboxes/{sandbox}/ports/{port}/socket")).await;
    assert_eq!(exchange(&mut socket, b"hello").await, b"hello");
    let long = [7; 60_000];
    assert_eq!(exchange(&mut socket, &long).await, long);
    // A closing handshake ends it from both sides.
    let mut second = self::socket(&world, &format!("/v1/sandboxes/{sandbox}/ports/{port}/socket")).await;
    second.write_all(&[0x88, 0x80, 0, 0, 0, 0]).await.unwrap();
    let mut rest = Vec::new();
    in_time("the end", second.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, [0x88, 0]);
    let closed = world.ask(Method::DELETE, &format!("/v1/sandboxes/{sandbox}"), None, Body::empty()).await;
    assert_eq!(closed.status, StatusCode::NO_CONTENT);
    in_time("the end", socket.read_to_end(&mut rest)).await.ok();
}

#[tokio::test]
async fn a_stopping_daemon_ends_its_websockets() {
    let mut world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let mut socket = socket(&world, &format!("/v1/sandboxes/{sandbox}/ports/{port}/socket")).await;
    assert_eq!(exchange(&mut socket, b"still here").await, b"still here");
    world.stop().await;
    in_time("the end", socket.read_to_end(&mut Vec::new())).await.ok();
}

/// A WebSocket, once it is one.
pub(crate) async fn socket(world: &World, path: &str) -> impl AsyncRead + AsyncWrite + Unpin + use<> {
    socket_of(world, path, None).await
}

pub(crate) async fn socket_of(
    world: &World,
    path: &str,
    token: Option<&str>,
) -> impl AsyncRead + AsyncWrite + Unpin + use<> {
    let mut request = Request::get(path)
        .header("host", "localhost")
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    let response = world.send(request.body(Body::empty()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    assert_eq!(response.headers()["sec-websocket-accept"], "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
    assert_eq!(response.headers()["upgrade"], "websocket");
    TokioIo::new(in_time("the upgrade", hyper::upgrade::on(response)).await.unwrap())
}

/// Sends one binary message and takes the one that comes back.
pub(crate) async fn exchange(socket: &mut (impl AsyncRead + AsyncWrite + Unpin), data: &[u8]) -> Vec<u8> {
    const MASK: [u8; 4] = [1, 2, 3, 4];
    let mut message = vec![0x82];
    match u8::try_from(data.len()) {
        Ok(size @ 0..126) => message.push(0x80 | size),
        _ => {
            message.push(0x80 | 126);
            message.extend_from_slice(&u16::try_from(data.len()).unwrap().to_be_bytes());
        }
    }
    message.extend_from_slice(&MASK);
    message.extend(data.iter().enumerate().map(|(at, byte)| byte ^ MASK[at % 4]));
    in_time("an echo", async {
        socket.write_all(&message).await.unwrap();
        socket.flush().await.unwrap();
        let mut head = [0; 2];
        socket.read_exact(&mut head).await.unwrap();
        assert_eq!(head[0], 0x82);
        let size = match head[1] {
            126 => usize::from(socket.read_u16().await.unwrap()),
            size => usize::from(size),
        };
        let mut data = vec![0; size];
        socket.read_exact(&mut data).await.unwrap();
        data
    })
    .await
}
