//! One token cannot read, guess, enumerate or influence what is another's.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{client::Client, server::Server};

fn token(server: &Server, name: &str, more: &[&str]) -> String {
    let mut args = vec!["token", "create", "--name", name];
    args.extend(more);
    let made = server.cli(&args);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    String::from_utf8(made.stdout).unwrap().trim().to_owned()
}

fn of(server: &Server, token: &str) -> Client {
    server.client().with_token(token)
}

/// As much of a body as gets past the reading of it.
fn body_of(method: &str, below: &str) -> &'static str {
    match (method, below.rsplit('/').next().unwrap_or_default()) {
        ("PATCH", "") => r#"{"labels": {}}"#,
        ("PATCH", _) => r#"{"env": {}}"#,
        ("POST", "run") => r#"{"code": "1"}"#,
        ("POST", "sessions") => r#"{"name": "x"}"#,
        ("POST", "execs") => r#"{"argv": ["true"]}"#,
        ("POST", "signal") => r#"{"signal": 9}"#,
        ("POST", "resize") => r#"{"rows": 1, "cols": 1}"#,
        ("POST", "move") => r#"{"from": "a", "to": "b"}"#,
        ("POST", "mkdir") => r#"{"path": "a"}"#,
        ("POST", "search") => r#"{"text": "a"}"#,
        ("POST", "replace") => r#"{"path": "a", "find": "a", "with": "b"}"#,
        ("POST", "shares") => r#"{"port": 80}"#,
        _ => "",
    }
}

/// One operation on another's sandbox and on one that never was.
fn indistinguishable(
    client: &mut Client,
    [others, never]: [&str; 2],
    exec: &str,
    method: &str,
    below: &str,
    operation: &Value,
) {
    let needed = operation["parameters"].as_array().into_iter().flatten();
    let needed = needed.filter(|one| one["in"] == "query" && one["required"] == true);
    let query: Vec<String> = needed.map(|one| format!("{}=a", one["name"].as_str().unwrap())).collect();
    let answers = [others, never].map(|target| {
        let path = below.replace("{exec}", exec).replace("{session}", "default");
        let path = format!("/v1/sandboxes/{target}{path}?{}", query.join("&"));
        let answer = client.ask(method, &path, body_of(method, below).as_bytes()).unwrap();
        (answer.status, String::from_utf8(answer.body).unwrap().replace(target, "ID"))
    });
    assert_eq!(answers[0], answers[1], "{method} {below}");
    // A WebSocket is asked for before anything is looked up, and a line is the operator's.
    let status = match below {
        "/execs/{exec}/attach" => 400,
        "/line" => 403,
        _ => 404,
    };
    assert_eq!(answers[0].0, status, "{method} {below}: {}", answers[0].1);
}

#[test]
fn what_is_anothers_is_not_there() {
    let server = Server::start();
    let (one, other) = (token(&server, "one", &[]), token(&server, "other", &[]));
    let (mut one, mut other) = (of(&server, &one), of(&server, &other));
    let key = json!({"key": "workflow:run_1:default", "labels": {"secret": "x"}});
    let mine = one.post("/v1/sandboxes", &key).unwrap().with(201);
    let id = mine["id"].as_str().unwrap();
    let run = json!({"argv": ["sleep", "1000"], "stream": true});
    let exec = one.post(&format!("/v1/sandboxes/{id}/execs"), &run).unwrap().with(201);
    let exec = exec["exec"].as_str().unwrap();
    // The same key is another sandbox for another token, and nobody learns of the first.
    let theirs = other.post("/v1/sandboxes", &key).unwrap().with(201);
    assert_ne!(theirs["id"], mine["id"]);
    let listed = other.get("/v1/sandboxes?label=secret%3Dx").unwrap().with(200);
    assert_eq!(listed["items"].as_array().unwrap().len(), 1);
    assert_eq!(listed["items"][0]["id"], theirs["id"]);
    // Somebody else's and one that never was: the same answer to the letter, but for the name. Whatever the document has.
    let never = "sbx_aaaaaaaaaaaaaaaa";
    let document = one.get("/openapi.json").unwrap().with(200);
    let mut tried = 0;
    for (route, item) in document["paths"].as_object().unwrap() {
        let Some(below) = route.strip_prefix("/v1/sandboxes/{sandbox}") else { continue };
        for (method, operation) in item.as_object().unwrap() {
            tried += 1;
            indistinguishable(&mut other, [id, never], exec, &method.to_uppercase(), below, operation);
        }
    }
    for path in ["/ports/80/", "/ports/80", "/line"] {
        indistinguishable(&mut other, [id, never], exec, "GET", path, &Value::Null);
    }
    assert!(tried > 35, "{tried}");
    let still = one.get(&format!("/v1/sandboxes/{id}/execs/{exec}")).unwrap().with(200);
    assert_eq!(still["running"], true);
    // Closing the other's run of the same name closes the other's alone.
    other.ask("DELETE", "/v1/scopes/workflow/run_1", b"").unwrap().with(200);
    assert_eq!(one.get(&format!("/v1/sandboxes/{id}")).unwrap().with(200)["state"], "running");
    // A token's `user:` keys are its own, and the daemon's own matters are not a token's.
    let foreign = json!({"key": "user:local:work"});
    assert_eq!(one.post("/v1/sandboxes", &foreign).unwrap().status, 403);
    assert_eq!(one.get("/v1/tokens").unwrap().status, 403);
    // The operator sees what is left of both: the other's was closed with its run.
    let all = server.client().get("/v1/sandboxes").unwrap().with(200);
    let all: Vec<&Value> = all["items"].as_array().unwrap().iter().map(|item| &item["id"]).collect();
    assert_eq!(all, [&mine["id"]]);
}

#[test]
fn events_are_the_tenants_own() {
    let server = Server::start();
    let (one, other) = (token(&server, "one", &[]), token(&server, "other", &[]));
    let mut listener = of(&server, &other);
    listener.send("GET", "/v1/events", &[], b"").unwrap();
    assert_eq!(listener.head().unwrap().0, 200);
    of(&server, &one).post("/v1/run", &json!({"code": "1", "sandbox": "a"})).unwrap().with(200);
    let own = of(&server, &other).post("/v1/run", &json!({"code": "1", "sandbox": "b"})).unwrap().with(200);
    let mut heard = String::new();
    while !heard.contains("run.finished") {
        heard += &String::from_utf8(listener.piece().unwrap().unwrap()).unwrap();
    }
    for event in crate::client::parse(&heard) {
        assert_eq!(event.data["sandbox"], own["sandbox"], "{event:?}");
    }
}

#[test]
fn quotas_and_rates_say_what_is_used_up() {
    let server = Server::start();
    let small = token(&server, "small", &["--quota", "sandboxes=2,memory=1GB,rate=1000"]);
    let mut client = of(&server, &small);
    for name in ["a", "b"] {
        client
            .post("/v1/sandboxes", &json!({"name": name, "limits": {"memory": 256 << 20}}))
            .unwrap()
            .with(201);
    }
    let refused = client.post("/v1/sandboxes", &json!({"name": "c"})).unwrap();
    assert!(refused.header("retry-after").is_some());
    let refused = refused.with(429);
    assert_eq!(refused["code"], "quota");
    assert!(refused["detail"].as_str().unwrap().contains('2'), "{refused}");
    let id = client.get("/v1/sandboxes").unwrap().with(200)["items"][0]["id"].as_str().unwrap().to_owned();
    let grown = client.ask(
        "PATCH",
        &format!("/v1/sandboxes/{id}"),
        json!({"limits": {"memory": 1u64 << 30}}).to_string().as_bytes(),
    );
    assert_eq!(grown.unwrap().with(429)["code"], "quota");
    // Many at once do not get past it.
    client.ask("DELETE", &format!("/v1/sandboxes/{id}"), b"").unwrap();
    let made: usize = std::thread::scope(|scope| {
        let tries: Vec<_> = (0..8)
            .map(|number| {
                let (server, small) = (&server, &small);
                scope.spawn(move || {
                    let body = json!({"name": format!("race-{number}"), "limits": {"memory": 64 << 20}});
                    of(server, small).post("/v1/sandboxes", &body).unwrap().status == 201
                })
            })
            .collect();
        tries.into_iter().map(|one| usize::from(one.join().unwrap())).sum()
    });
    assert_eq!(made, 1);
    let slow = token(&server, "slow", &["--quota", "rate=3"]);
    let mut slow = of(&server, &slow);
    let statuses: Vec<u16> = (0..20).map(|_| slow.get("/v1/whoami").unwrap().status).collect();
    assert!(statuses.contains(&429) && statuses.contains(&200), "{statuses:?}");
}

#[test]
fn a_revoked_token_is_nobodys_and_a_reading_one_only_reads() {
    let server = Server::start();
    let reading = token(&server, "reading", &["--scope", "read"]);
    let mut client = of(&server, &reading);
    client.get("/v1/sandboxes").unwrap().with(200);
    assert_eq!(client.post("/v1/sandboxes", &json!({})).unwrap().with(403)["code"], "forbidden");
    let id = client.get("/v1/whoami").unwrap().with(200)["token"]["id"].as_str().unwrap().to_owned();
    assert!(server.cli(&["token", "revoke", &id]).status.success());
    let begun = Instant::now();
    while client.get("/v1/sandboxes").unwrap().status != 401 {
        assert!(begun.elapsed() < Duration::from_secs(60), "a revoked token is still good");
        std::thread::sleep(Duration::from_millis(100));
    }
    // Guesses at a secret differ in nothing from guesses at an id.
    let wrong: Vec<Value> = [
        reading.clone() + "x",
        reading[..reading.len() - 4].to_owned() + "aaaa",
        "carrel_tok_x_y".into(),
        String::new(),
    ]
    .iter()
    .map(|guess| of(&server, guess).get("/v1/sandboxes").unwrap().with(401))
    .collect();
    assert!(wrong.windows(2).all(|pair| pair[0] == pair[1]), "{wrong:?}");
}
