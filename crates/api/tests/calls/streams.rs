//! Streams of events that break and are taken up again.

use std::time::Duration;

use serde_json::{Value, json};

use crate::world::{Event, World, bytes, request, until};

/// What can be told twice is told the same twice: events with an id.
fn numbered(events: &[Event]) -> Vec<Event> {
    events.iter().filter(|event| event.id.is_some()).cloned().collect()
}

/// Everything of a stream's bytes, without a hole.
fn text(events: &[Event], name: &str) -> Vec<u8> {
    let mut all = Vec::new();
    for event in events.iter().filter(|event| event.name == name) {
        assert_eq!(event.data["offset"], all.len());
        all.extend(bytes(&event.data["data"]));
    }
    all
}

/// More than a dozen of the largest chunks, however fast they are read.
const TALKATIVE: &str = "
import os
for n in range(300):
    os.write(1, b'o%d' % n + b'.' * 12000 + b'\\n')
    os.write(2, b'e%d\\xff\\n' % n)
'end'
";

#[tokio::test]
async fn a_stream_is_taken_up_after_any_chunk() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let body = json!({"code": TALKATIVE, "environment": "python", "stream": true});
    let all = sandbox.stream("run", Some(body), &[]).await.rest().await;
    assert_eq!(all[0].name, "start");
    assert_eq!((&all[0].data["exec"], &all[0].data["language"]), (&json!("ex_1"), &json!("python")));
    let tail: Vec<&str> = all[all.len() - 3..].iter().map(|event| event.name.as_str()).collect();
    assert_eq!(tail, ["result", "receipt", "end"]);
    let end = &all.last().unwrap().data;
    assert_eq!(
        (&end["exit_code"], &end["exec"], end.get("stdout")),
        (&json!(0), &json!("ex_1"), None::<&Value>)
    );
    let events = numbered(&all);
    assert!(events.len() > 12, "{} chunks", events.len());
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event.id.as_deref(), Some(format!("{}/ex_1/{at}", sandbox.id()).as_str()));
        assert_eq!(event.chunk(), at as u64);
    }
    let expected: Vec<u8> =
        (0..300).flat_map(|n| format!("e{n}").into_bytes().into_iter().chain(*b"\xff\n")).collect();
    assert!(text(&events, "stderr") == expected);
    let last = events.len() - 1;
    for cut in [0, 1, 2, last / 2, last - 1, last] {
        let id = events[cut].id.as_deref().unwrap();
        let resumed = sandbox.stream("execs/ex_1/stream", None, &[("last-event-id", id)]).await.rest().await;
        assert_eq!(numbered(&resumed), events[cut + 1..], "after chunk {cut}");
        assert_eq!(resumed.last().unwrap().data, *end);
        let since = format!("execs/ex_1/stream?since={cut}");
        assert_eq!(numbered(&sandbox.stream(&since, None, &[]).await.rest().await), events[cut..]);
    }
    let again =
        sandbox.stream("execs/ex_1/stream?since=99", None, &[("last-event-id", "")]).await.rest().await;
    assert_eq!((again[0].name.as_str(), again.last().unwrap().name.as_str()), ("start", "end"));
    let own = sandbox.id();
    for id in [
        "0",
        "sbx_other/ex_1/0",
        &format!("{own}/ex_2/0"),
        &format!("{own}/ex_1"),
        &format!("{own}/ex_1/x"),
        &format!("{own}/ex_1/0/0"),
    ] {
        let path = sandbox.at("execs/ex_1/stream");
        let answer = world.send(request("GET", &path, None, &[("last-event-id", id)])).await.answer().await;
        answer.refused(400, "invalid_argument");
    }
}

#[tokio::test]
async fn a_stream_that_breaks_again_and_again_loses_and_repeats_nothing() {
    let mut world = World::new();
    let path = world.sandbox().await.path;
    let code = "import sys\nfor n in range(40):\n  print(n, flush=True)\n  sys.stdin = open('/workspace/go')\n  sys.stdin.read()\n";
    let mut got: Vec<Event> = Vec::new();
    {
        let sandbox = crate::world::Sandbox { world: &world, path: path.clone() };
        sandbox.run("bash", "mkfifo go").await;
        let body = json!({"code": code, "environment": "python", "stream": true, "timeout_seconds": 600});
        let mut events = sandbox.stream("run", Some(body), &[]).await;
        events.expect("start").await;
        got.push(events.expect("stdout").await);
    }
    for step in 1..40 {
        if step == 20 {
            world.restart().await;
        }
        let sandbox = crate::world::Sandbox { world: &world, path: path.clone() };
        let id = got.last().unwrap().id.clone().unwrap();
        let exec = id.split('/').nth(1).unwrap();
        let below = format!("execs/{exec}/stream");
        let mut events = sandbox.stream(&below, None, &[("last-event-id", &id)]).await;
        sandbox.post("execs", json!({"argv": ["sh", "-c", "echo x > go"]})).await.ok();
        got.push(events.expect("stdout").await);
    }
    let sandbox = crate::world::Sandbox { world: &world, path };
    let id = got.last().unwrap().id.clone().unwrap();
    let below = format!("execs/{}/stream", id.split('/').nth(1).unwrap());
    let mut events = sandbox.stream(&below, None, &[("last-event-id", &id)]).await;
    sandbox.post("execs", json!({"argv": ["sh", "-c", "echo x > go"]})).await.ok();
    let rest = events.rest().await;
    got.extend(numbered(&rest));
    assert_eq!(rest.last().unwrap().data["exit_code"], 0);
    assert_eq!(text(&got, "stdout"), (0..40).map(|n| format!("{n}\n")).collect::<String>().into_bytes());
}

#[tokio::test]
async fn a_sandbox_of_one_run_waits_for_a_client_that_was_cut_off() {
    let world = World::new();
    // Still at it when its client goes: what is small and over is in the client's own buffers, and counts as told.
    let code = "import os, time\nprint('up', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nprint('over')";
    let body = json!({"code": code, "environment": "python", "stream": true});
    let (id, chunk) = {
        let mut events = world.send(request("POST", "/v1/run", Some(body), &[])).await.events();
        let start = events.expect("start").await;
        let first = events.expect("stdout").await;
        (start.data["sandbox"].as_str().unwrap().to_owned(), first.id.unwrap())
    };
    let sandbox = crate::world::Sandbox { world: &world, path: format!("/v1/sandboxes/{id}") };
    sandbox.post("execs", json!({"argv": ["touch", "go"]})).await.ok();
    assert_eq!(sandbox.outcome("ex_1").await["exit_code"], 0);
    let rest = sandbox.stream("execs/ex_1/stream", None, &[("last-event-id", &chunk)]).await.rest().await;
    assert_eq!((&rest[0].data["data"], rest.last().unwrap().name.as_str()), (&json!("over\n"), "end"));
    // One that got everything is not waited for.
    let body = json!({"code": "1", "environment": "python", "stream": true});
    let all = world.send(request("POST", "/v1/run", Some(body), &[])).await.events().rest().await;
    let path = format!("/v1/sandboxes/{}", all[0].data["sandbox"].as_str().unwrap());
    until("the end of the sandbox", || async {
        let list = world.get("/v1/sandboxes").await.ok();
        let there =
            list["items"].as_array().unwrap().iter().any(|it| path.ends_with(it["id"].as_str().unwrap()));
        (!there).then_some(())
    })
    .await;
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn clients_that_read_nothing_stop_nobody_and_cost_little() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let flood = "import os\nfor n in range(640): os.write(1, b'y' * 65536)";
    let before = resident();
    let body = json!({"code": flood, "environment": "python", "stream": true, "timeout_seconds": 300});
    let mut first = sandbox.stream("run", Some(body), &[]).await;
    let exec = first.expect("start").await.data["exec"].as_str().unwrap().to_owned();
    let mut others = Vec::new();
    for _ in 0..8 {
        for below in ["stream", "raw?follow=true"] {
            let path = sandbox.at(&format!("execs/{exec}/{below}"));
            others.push(world.send(request("GET", &path, None, &[])).await);
        }
    }
    // All of them stay, and none of them reads.
    let outcome = sandbox.outcome(&exec).await;
    assert_eq!((&outcome["cause"], &outcome["exit_code"]), (&json!("exit"), &json!(0)));
    assert!(resident().saturating_sub(before) < 64 << 20, "{} bytes more than before", resident() - before);
    drop(others);
    // And the one that paced it for a while finds the rest.
    let mut got = Vec::new();
    let began = tokio::time::Instant::now();
    while let Some(event) = first.next().await {
        got.push(event);
        assert!(began.elapsed() < Duration::from_secs(100));
    }
    let id = got.iter().rev().find_map(|event| event.id.clone()).unwrap();
    let rest =
        sandbox.stream(&format!("execs/{exec}/stream"), None, &[("last-event-id", &id)]).await.rest().await;
    got.extend(rest);
    assert_eq!(got.last().unwrap().name, "end");
    assert!(text(&numbered(&got), "stdout").len() == 640 * 65536);
}
