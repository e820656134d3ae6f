//! Who comes in, what it may do and how much of it, and what ends it.

use axum::{
    body::Body,
    http::{Method, Request, StatusCode},
};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{
    proxy::{exchange, socket_of},
    world::{Reply, World, in_time, piece, until},
};

/// Everything that a token can have open: streams, an answer that is waited for, WebSockets.
#[tokio::test]
async fn a_token_that_is_revoked_loses_what_it_has_open() {
    let world = World::new().await;
    let mut ends = Vec::new();
    for out_of_process in [false, true] {
        let made = world.post("/v1/tokens", None, json!({ "name": "t" })).await.json();
        let (id, token) = (made["id"].as_str().unwrap(), made["token"].as_str().unwrap().to_owned());
        let other = world.token(json!({ "name": "other" })).await;
        let sandbox = world.sandbox(Some(&token)).await;
        let port = world.server(&sandbox, Some(&token)).await;
        let base = format!("/v1/sandboxes/{sandbox}");
        let send = |method: Method, path: String, token: &str, body: Value| {
            let request = Request::builder()
                .method(method)
                .uri(path)
                .header("host", "localhost")
                .header("authorization", format!("Bearer {token}"));
            world.send(request.body(Body::from(body.to_string())).unwrap())
        };
        let mut theirs = send(Method::GET, "/v1/events".into(), &other, Value::Null).await.into_body();
        let mut events = send(Method::GET, "/v1/events".into(), &token, Value::Null).await.into_body();
        let code =
            json!({ "code": "print('on', flush=True)\nimport time\ntime.sleep(1000)", "stream": true });
        let mut run = send(Method::POST, format!("{base}/run"), &token, code).await.into_body();
        let begun = until(&mut run, "event: stdout").await;
        let exec = begun.split("\"exec\":\"").nth(1).unwrap().split('"').next().unwrap().to_owned();
        let mut watch =
            send(Method::GET, format!("{base}/files/watch"), &token, Value::Null).await.into_body();
        until(&mut watch, "event: ready").await;
        let mut tunnel = socket_of(&world, &format!("{base}/ports/{port}/socket"), Some(&token)).await;
        assert_eq!(exchange(&mut tunnel, b"open").await, b"open");
        let mut attached = socket_of(&world, &format!("{base}/execs/{exec}/attach"), Some(&token)).await;
        attached.read_u8().await.unwrap();
        let waiting =
            send(Method::GET, format!("{base}/execs/{exec}/wait?timeout_seconds=3600"), &token, Value::Null);
        let waiting = std::pin::pin!(waiting);
        let revoke = async {
            if out_of_process {
                // As `carrel token revoke` does it: the daemon has to find out.
                let (engine, id) = (world.engine.clone(), id.parse().unwrap());
                tokio::task::spawn_blocking(move || engine.revoke_token(&id)).await.unwrap().unwrap();
            } else {
                let gone = world.ask(Method::DELETE, &format!("/v1/tokens/{id}"), None, "").await;
                assert_eq!(gone.status, StatusCode::NO_CONTENT);
            }
        };
        let (waited, ()) = tokio::join!(waiting, revoke);
        // Either it was under way, or it came too late.
        Reply::of(waited).await.is_problem(401, "unauthorized");
        for stream in [&mut events, &mut run, &mut watch] {
            while piece(stream).await.is_some() {}
        }
        in_time("a tunnel's end", tunnel.read_to_end(&mut Vec::new())).await.ok();
        let mut rest = Vec::new();
        in_time("a viewer's end", attached.read_to_end(&mut rest)).await.ok();
        assert!(rest.windows(2).any(|two| two == 1008_u16.to_be_bytes()), "no goodbye: {rest:?}");
        // The code itself goes on: the sandbox is still there, and the operator's to close.
        let still = world.get(&format!("{base}/execs/{exec}")).await.json();
        assert_eq!(still["running"], true, "{still}");
        // Nobody else notices anything.
        world.post("/v1/run", Some(&other), json!({ "code": "1", "sandbox": "o" })).await;
        until(&mut theirs, "run.finished").await;
        ends.push(id.to_owned());
    }
    assert_eq!(ends.len(), 2);
}

fn preflight(path: &str, origin: &str) -> axum::http::request::Builder {
    Request::builder()
        .method(Method::OPTIONS)
        .uri(path)
        .header("host", "localhost")
        .header("origin", origin)
        .header("access-control-request-method", "PUT")
        .header("access-control-request-headers", "authorization")
}

#[tokio::test]
async fn a_browser_is_answered_for_pages_that_may_call_and_for_no_others() {
    const PAGE: &str = "https://app.example";
    let world = World::made(|options| options.guards.origins = vec![format!("{PAGE}/")]).await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let link = world.post(&format!("/v1/sandboxes/{sandbox}/shares"), None, json!({ "port": port })).await;
    let link = link.json()["path"].as_str().unwrap().to_owned();
    let own = format!("/v1/sandboxes/{sandbox}/ports/{port}/x");
    for path in ["/v1/sandboxes", "/v1/run", own.as_str()] {
        let answer = world.over_tcp(preflight(path, PAGE).body(Body::empty()).unwrap()).await;
        assert_eq!(answer.status, StatusCode::NO_CONTENT, "{path}: {answer:?}");
        assert_eq!(answer.header("access-control-allow-origin"), Some(PAGE));
        assert_eq!(answer.header("access-control-allow-methods"), Some("PUT"));
        assert_eq!(answer.header("access-control-allow-headers"), Some("authorization"));
        assert!(answer.header("vary").unwrap().contains("origin"));
        let refused =
            world.over_tcp(preflight(path, "https://evil.example").body(Body::empty()).unwrap()).await;
        refused.is_problem(403, "forbidden");
        assert_eq!(refused.header("access-control-allow-origin"), None);
    }
    // Answers can be read, errors too.
    let get = |path: &str| Request::get(path).header("host", "localhost").header("origin", PAGE);
    let answer = world.over_tcp(get("/v1/sandboxes").body(Body::empty()).unwrap()).await;
    answer.is_problem(401, "unauthorized");
    assert_eq!(answer.header("access-control-allow-origin"), Some(PAGE));
    assert!(answer.header("access-control-expose-headers").unwrap().contains("x-request-id"));
    // A share link has its own rules, which are everybody's.
    let answer = world.over_tcp(preflight(&link, PAGE).body(Body::empty()).unwrap()).await;
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "{answer:?}");
    // An OPTIONS that no browser asks in its own name is the server's.
    let token = world.token(json!({ "name": "x" })).await;
    let theirs = world.sandbox(Some(&token)).await;
    let port = world.server(&theirs, Some(&token)).await;
    let path = format!("/v1/sandboxes/{theirs}/ports/{port}/mine");
    let asked = Request::builder().method(Method::OPTIONS).uri(&path).header("host", "localhost");
    let asked = asked.header("authorization", format!("Bearer {token}")).header("origin", PAGE);
    let answer = world.over_tcp(asked.body(Body::empty()).unwrap()).await;
    assert_eq!(answer.json()["path"], "/mine");
}

#[tokio::test]
async fn without_allowed_pages_there_is_no_cors_and_hosts_are_checked() {
    let world = World::made(|options| options.guards.hosts = vec!["carrel.example".into()]).await;
    let sandbox = world.sandbox(None).await;
    let own = world.tcp.to_string();
    // A page of the daemon's own address asks as any other client does.
    for path in ["/v1/sandboxes".to_owned(), format!("/v1/sandboxes/{sandbox}/ports/80/")] {
        let answer =
            world.over_tcp(preflight(&path, &format!("http://{own}")).body(Body::empty()).unwrap()).await;
        answer.is_problem(401, "unauthorized");
        assert!(!answer.headers.keys().any(|name| name.as_str().starts_with("access-control")), "{answer:?}");
    }
    let from = |host: &str| Request::get("/health").header("host", host).body(Body::empty()).unwrap();
    for good in ["carrel.example", "Carrel.Example:8700", "localhost", "[::1]:1", own.as_str()] {
        assert_eq!(world.over_tcp(from(good)).await.status, StatusCode::OK, "{good}");
    }
    for bad in ["evil.example", "carrel.example.evil", "", "10.1.2.3"] {
        world.over_tcp(from(bad)).await.is_problem(403, "forbidden");
    }
}

/// As much of a body as gets past the reading of it.
fn body_of(method: &str, path: &str) -> &'static str {
    let end = path.rsplit('/').next().unwrap_or_default();
    match (method, end) {
        ("post", "run") => r#"{"code": "1"}"#,
        ("post", "sessions") => r#"{"name": "x"}"#,
        ("patch", "{session}") => r#"{"env": {}}"#,
        ("post", "execs") => r#"{"argv": ["true"]}"#,
        ("post", "signal") => r#"{"signal": 9}"#,
        ("post", "resize") => r#"{"rows": 1, "cols": 1}"#,
        ("post", "shares") => r#"{"port": 80}"#,
        ("post", "move") => r#"{"from": "a", "to": "b"}"#,
        ("post", "mkdir") => r#"{"path": "a"}"#,
        ("post", "search") => r#"{"text": "a"}"#,
        ("post", "replace") => r#"{"path": "a", "find": "a", "with": "b"}"#,
        ("post", "tokens") => r#"{"name": "x"}"#,
        _ => "",
    }
}

#[tokio::test]
async fn a_token_does_what_its_scopes_say_and_no_more() {
    let world = World::new().await;
    let tokens = [
        world.token(json!({ "name": "m", "scope": ["metrics"] })).await,
        world.token(json!({ "name": "r", "scope": ["read"] })).await,
    ];
    let document = world.get("/openapi.json").await.json();
    let mut tried = 0;
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if matches!(path.as_str(), "/health" | "/ready" | "/openapi.json" | "/v1/whoami" | "/metrics") {
                continue;
            }
            let mut url = path
                .replace("{sandbox}", "sbx_aaaaaaaaaaaaaaaa")
                .replace("{exec}", "ex_1")
                .replace("{session}", "default")
                .replace("{snapshot}", "snp_aaaaaaaaaaaaaaaa")
                .replace("{token}", "tok_aaaaaaaaaaaaaaaa")
                .replace("{scope}", "workflow")
                .replace("{owner}", "x");
            let needed = operation["parameters"].as_array().into_iter().flatten();
            let needed = needed.filter(|one| one["in"] == "query" && one["required"] == true);
            let query: Vec<String> =
                needed.map(|one| format!("{}=a", one["name"].as_str().unwrap())).collect();
            if !query.is_empty() {
                url = format!("{url}?{}", query.join("&"));
            }
            let verb: Method = method.to_uppercase().parse().unwrap();
            for (at, token) in tokens.iter().enumerate() {
                if at == 1 && path == "/v1/events" {
                    // Without an end; other tests listen.
                    continue;
                }
                let answer = world.ask(verb.clone(), &url, Some(token), body_of(method, path)).await;
                let reads = matches!(method.as_str(), "get" | "head") || path.ends_with("/files/search");
                let more = path == "/v1/tokens" || path.ends_with("/attach");
                if at == 1 && reads && !more {
                    assert_ne!(answer.status, StatusCode::FORBIDDEN, "{method} {url}: {}", answer.text());
                } else {
                    assert_eq!(answer.status, StatusCode::FORBIDDEN, "{method} {url}: {}", answer.text());
                }
                tried += 1;
            }
        }
    }
    assert!(tried > 80, "{tried}");
    // A viewer that only looks is one that reads.
    let looks = "/v1/sandboxes/sbx_aaaaaaaaaaaaaaaa/execs/ex_1/attach?read_only=true";
    let answer = world.ask(Method::GET, looks, Some(&tokens[0]), "").await;
    assert_eq!(answer.status, StatusCode::FORBIDDEN);
    assert_ne!(world.ask(Method::GET, looks, Some(&tokens[1]), "").await.status, StatusCode::FORBIDDEN);
    // Tokens are what `admin` is for; it opens nobody's sandboxes.
    let admin = world.token(json!({ "name": "a", "scope": ["admin"] })).await;
    let made = world.post("/v1/tokens", Some(&admin), json!({ "name": "made" })).await;
    assert_eq!(made.status, StatusCode::CREATED, "{made:?}");
    let id = made.json()["id"].as_str().unwrap().to_owned();
    assert!(world.ask(Method::GET, "/v1/tokens", Some(&admin), "").await.text().contains(&id));
    let gone = world.ask(Method::DELETE, &format!("/v1/tokens/{id}"), Some(&admin), "").await;
    assert_eq!(gone.status, StatusCode::NO_CONTENT);
    world.ask(Method::GET, "/v1/sandboxes", Some(&admin), "").await.is_problem(403, "forbidden");
}

#[tokio::test]
async fn parameters_that_nobody_takes_are_errors_everywhere() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let port = world.server(&sandbox, None).await;
    let base = format!("/v1/sandboxes/{sandbox}");
    for (method, path) in [
        (Method::GET, format!("{base}?wake=true")),
        (Method::GET, format!("{base}/metrics?x")),
        (Method::POST, format!("{base}/wake?now=1")),
        (Method::POST, "/v1/run?stream=true".to_owned()),
        (Method::GET, "/v1/whoami?a=b&c=d".to_owned()),
        (Method::GET, "/health?deep=1".to_owned()),
        (Method::GET, "/v1/sandboxes?limt=5".to_owned()),
    ] {
        let answer = world.ask(method, &path, None, r#"{"code": "1"}"#).await;
        answer.is_problem(400, "invalid_argument");
        let name = path.split_once('?').unwrap().1.split(['=', '&']).next().unwrap();
        assert!(answer.json()["detail"].as_str().unwrap().contains(&format!("`{name}`")), "{answer:?}");
    }
    assert_eq!(world.get(&format!("{base}?")).await.status, StatusCode::OK);
    // What follows a port is the server's.
    assert_eq!(world.get(&format!("{base}/ports/{port}/x?y=z")).await.json()["path"], "/x?y=z");
}

#[tokio::test]
async fn one_token_takes_its_share_of_archives_and_leaves_the_rest() {
    let world = World::new().await;
    let token = world.token(json!({ "name": "greedy" })).await;
    let sandbox = world.sandbox(Some(&token)).await;
    let path = format!("/v1/sandboxes/{sandbox}/files/tree?path=t");
    let mut open = Vec::new();
    for _ in 0..8 {
        let mut stream = world.stream().await;
        let head = format!(
            "PUT {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {token}\r\ncontent-length: 10240\r\n\r\nx"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        open.push(stream);
    }
    // Until all of them have been heard.
    in_time("a refusal", async {
        loop {
            let answer = world.ask(Method::GET, &path.replace("path=t", ""), Some(&token), "").await;
            if answer.status == StatusCode::TOO_MANY_REQUESTS {
                answer.is_problem(429, "too_many");
                return;
            }
        }
    })
    .await;
    let other = world.token(json!({ "name": "other" })).await;
    let theirs = world.sandbox(Some(&other)).await;
    let answer =
        world.ask(Method::GET, &format!("/v1/sandboxes/{theirs}/files/tree"), Some(&other), "").await;
    assert_eq!(answer.status, StatusCode::OK, "{answer:?}");
}

#[tokio::test]
async fn snapshots_count_on_disk() {
    const DISK: u64 = 64 << 20;
    let world = World::new().await;
    let quota = json!({ "name": "t", "quota": { "disk": DISK + (1 << 20) } });
    let token = world.token(quota).await;
    let made = json!({ "name": "work", "limits": { "disk": DISK } });
    let made = world.post("/v1/sandboxes", Some(&token), made).await.json();
    let base = format!("/v1/sandboxes/{}", made["id"].as_str().unwrap());
    let held = || async {
        let who = world.ask(Method::GET, "/v1/whoami", Some(&token), "").await.json();
        who["usage"]["disk"].as_u64().unwrap()
    };
    assert_eq!(held().await, DISK);
    let code = "open('/workspace/big', 'wb').write(__import__('os').urandom(4 << 20)); None";
    world.post(&format!("{base}/run"), Some(&token), json!({ "code": code })).await;
    let path = format!("{base}/snapshots");
    let take = || world.post(&path, Some(&token), json!({ "files_only": true }));
    let refused = take().await;
    refused.is_problem(429, "quota");
    assert!(refused.json()["detail"].as_str().unwrap().contains("the quota of disk is 65 MB"), "{refused:?}");
    // Nothing of it is left, and the sandbox goes on.
    let left = std::fs::read_dir(world.state.path().join("snapshots"));
    assert_eq!(left.map_or(0, |all| all.count()), 0);
    assert_eq!(held().await, DISK);
    let ran = world.post(&format!("{base}/run"), Some(&token), json!({ "code": "1" })).await.json();
    assert_eq!(ran["session_state"], "preserved");
    // The operator's are without bounds, and say what they take.
    let kept = world.post(&format!("{base}/snapshots"), None, json!({ "files_only": true })).await.json();
    assert!(kept["bytes"].as_u64().unwrap() >= 4 << 20, "{kept}");
    assert_eq!(held().await, DISK + kept["bytes"].as_u64().unwrap());
    let refused = take().await;
    refused.is_problem(429, "quota");
    assert!(refused.json()["detail"].as_str().unwrap().contains("and 1 snapshots ("), "{refused:?}");
    let snapshot = format!("/v1/snapshots/{}", kept["id"].as_str().unwrap());
    assert_eq!(world.ask(Method::DELETE, &snapshot, Some(&token), "").await.status, StatusCode::NO_CONTENT);
    assert_eq!(held().await, DISK);
}

#[tokio::test]
async fn a_call_that_goes_down_with_its_sandbox_has_an_end() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let mut events = world.send(Request::get("/v1/events").body(Body::empty()).unwrap()).await.into_body();
    let base = format!("/v1/sandboxes/{sandbox}");
    let (path, run) = (format!("{base}/run"), json!({ "code": "import time; time.sleep(1000)" }));
    let (answer, ()) = tokio::join!(world.post(&path, None, run), async {
        until(&mut events, "run.started").await;
        world.ask(Method::DELETE, &base, None, "").await;
    });
    assert!(!answer.status.is_success(), "{answer:?}");
    let heard = until(&mut events, "run.finished").await;
    assert!(heard.contains(r#""detail":"lost""#), "{heard}");
}

#[tokio::test]
async fn an_agents_run_has_sandboxes_of_its_own() {
    let world = World::new().await;
    let token = world.token(json!({ "name": "a" })).await;
    let run = |body: Value| world.post("/v1/run", Some(&token), body);
    let first = run(json!({ "code": "x = 1; x", "agent_run": "r7" })).await.json();
    let again = run(json!({ "code": "x + 1", "agent_run": "r7" })).await.json();
    assert_eq!(again["results"][0]["mime"]["text/plain"], "2", "{again}");
    assert_eq!(first["sandbox"], again["sandbox"]);
    // Steps of it may have others, workflows of that name are others', and neither runs without a name.
    let step = run(json!({ "code": "'x' in globals()", "agent_run": "r7", "sandbox": "db" })).await.json();
    assert_eq!(step["results"][0]["mime"]["text/plain"], "False", "{step}");
    let workflow = run(json!({ "code": "1", "workflow_run": "r7" })).await.json();
    assert_ne!(workflow["sandbox"], first["sandbox"]);
    let found = world.post("/v1/sandboxes", Some(&token), json!({ "agent_run": "r7" })).await;
    assert_eq!((found.status, &found.json()["id"]), (StatusCode::OK, &first["sandbox"]));
    assert_eq!(found.json()["key"], "agent:r7:default");
    let closed = world.ask(Method::DELETE, "/v1/scopes/agent/r7", Some(&token), "").await.json();
    assert_eq!((closed["closed"].as_array().unwrap().len(), &closed["closed_count"]), (2, &json!(2)));
}

#[tokio::test]
async fn requests_are_bounded() {
    let world = World::new().await;
    let mut stream = world.stream().await;
    // It says how long it is, and is answered before it is sent.
    let head = format!("POST /v1/run HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", 33 << 20);
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let count = in_time("an answer", stream.read(&mut answer)).await.unwrap();
    let answer = String::from_utf8_lossy(&answer[..count]);
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("too_large"), "{answer}");
}
