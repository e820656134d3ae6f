//! A daemon's pool: what stands ready is seen in the metrics, ends with the daemon however that ends, and is nobody's.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use serde_json::json;

use crate::server::Server;

/// Longer than anything here takes on a machine that works.
const PATIENCE: Duration = Duration::from_secs(90);
/// Between two looks at something that cannot be waited for.
const LOOK: Duration = Duration::from_millis(50);

const TWO: &str = "[pool]\nfloor = 2\nceiling = 3\n";

#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "not so: {what}");
        std::thread::sleep(LOOK);
    }
}

/// The sum of a metric over its labels.
fn metric(server: &Server, name: &str) -> f64 {
    let answer = server.client().get("/metrics").unwrap();
    let text = String::from_utf8(answer.body).unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name));
    lines.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

fn boxes(state: &Path) -> Vec<String> {
    let all = std::fs::read_dir(state.join("sandboxes")).unwrap();
    all.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Processes that have one of these names.
fn processes(ids: &[String]) -> usize {
    let wanted: Vec<String> = ids.iter().map(|id| format!("CARREL_SANDBOX={id}\0")).collect();
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| std::fs::read(entry.path().join("environ")).ok())
        .filter(|environ| wanted.iter().any(|word| environ == word.as_bytes()))
        .count()
}

#[test]
fn sandboxes_come_from_the_pool_and_a_killed_daemon_leaves_none_of_it() {
    let mut server = Server::configured(TWO);
    until("two stand ready", || metric(&server, "carrel_pool_ready{") >= 2.0);
    let mut client = server.client();
    let listed = |client: &mut crate::client::Client| {
        client.get("/v1/sandboxes").unwrap().with(200)["items"].as_array().unwrap().len()
    };
    assert_eq!(listed(&mut client), 0, "they are in no list");
    let made = client.post("/v1/sandboxes", &json!({"name": "one"})).unwrap().with(201);
    let id = made["id"].as_str().unwrap().to_owned();
    let run = format!("/v1/sandboxes/{id}/run");
    let reply = client.post(&run, &json!({"code": "x = 6*7; x"})).unwrap().with(200);
    assert_eq!(reply["results"][0]["mime"]["text/plain"], "42");
    assert!(metric(&server, r#"carrel_pool_claims_total{source="pool"}"#) >= 1.0);
    let doctor = server.cli(&["doctor", "--json"]);
    let doctor: serde_json::Value = serde_json::from_slice(&doctor.stdout).unwrap();
    assert_eq!((&doctor["pool"]["claimed"], &doctor["pool"]["ceiling"]), (&json!(1), &json!(3)));

    until("the shelf is filled again", || metric(&server, "carrel_pool_ready{") >= 2.0);
    let ready: Vec<String> = boxes(&server.state()).into_iter().filter(|name| *name != id).collect();
    assert!(ready.len() >= 2 && processes(&ready) > 0);
    drop(client);
    server.crash();
    until("the boxes of the dead one end", || processes(&ready) == 0);
    until("and are swept by the next", || {
        let there = boxes(&server.state());
        ready.iter().all(|name| !there.contains(name))
    });
    let reply = server.client().post(&run, &json!({"code": "x"})).unwrap().with(200);
    assert_eq!(reply["results"][0]["mime"]["text/plain"], "42", "what was claimed lives on");
}

#[test]
fn a_daemon_that_ends_takes_its_ready_boxes_with_it() {
    let mut server = Server::configured(TWO);
    until("two stand ready", || metric(&server, "carrel_pool_ready{") >= 2.0);
    let ready = boxes(&server.state());
    server.end();
    assert_eq!(boxes(&server.state()), Vec::<String>::new());
    assert_eq!(processes(&ready), 0);
}
