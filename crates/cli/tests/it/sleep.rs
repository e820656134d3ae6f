//! Sandboxes that sleep, as the command line, the daemon and MCP clients meet them.

use std::{
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    mcp::Client,
    serving::{Daemon, PATIENCE, ask},
    support::{Place, sandboxes},
};

/// Whether this place's sandboxes can be frozen; if not, the reason is printed.
fn can_sleep(place: &Place) -> bool {
    if !sandboxes(place) {
        return false;
    }
    let standby = place.run(&["doctor", "--json"]).json()["standby"].clone();
    if standby["works"] != true {
        println!("skipped: {}", standby["error"]["message"]);
    }
    standby["works"] == true
}

fn state(place: &Place) -> String {
    let all = place.run(&["ls", "--json"]).json();
    all["sandboxes"][0]["state"].as_str().unwrap_or_default().to_owned()
}

fn becomes(place: &Place, wanted: &str) {
    let begun = Instant::now();
    while state(place) != wanted {
        assert!(begun.elapsed() < PATIENCE, "it never was {wanted}, but {}", state(place));
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Of all sandboxes, also those that are being removed.
fn images(place: &Place) -> usize {
    let below = |path: PathBuf| std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path());
    let named = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    let is_image = |path: &PathBuf| ["image", "away"].iter().any(|of| named(path).starts_with(of));
    below(place.path().join("state/sandboxes")).flat_map(below).filter(is_image).count()
}

#[test]
fn by_hand_without_a_daemon() {
    let place = Place::new();
    if !can_sleep(&place) {
        return;
    }
    place.run(&["open", "work", "--standby-after", "7s", "--hibernate-after", "0"]).with(0);
    place.run(&["run", "-s", "work", "x = 5; open('file', 'w').write('kept')"]).with(0);
    let asleep = place.run(&["standby", "work", "--json"]).json();
    assert_eq!((&asleep["state"], &asleep["standby_after_seconds"]), (&json!("standby"), &json!(7)));
    assert_eq!(asleep["hibernate_after_seconds"], 0);
    assert!(place.run(&["standby", "work"]).with(0).starts_with("standby sbx_"));
    // Looking and files do not wake it.
    assert!(place.run(&["inspect", "work"]).with(0).contains("standby"));
    assert_eq!(place.run(&["inspect", "work", "--json"]).json()["status"], Value::Null);
    assert_eq!(place.run(&["files", "cat", "work", "file"]).with(0), "kept");
    assert_eq!(place.run(&["cp", "work:file", "-"]).with(0), "kept");
    assert_eq!(state(&place), "standby");
    assert_eq!(place.run(&["run", "-s", "work", "x"]).with(0), "5\n");
    assert_eq!(state(&place), "running");

    let hibernation = place.run(&["doctor", "--json"]).json()["hibernation"].clone();
    let ended = place.run(&["hibernate", "work", "--json"]);
    if hibernation["works"] == true {
        assert_eq!(ended.json()["state"], "hibernated", "{}", ended.err);
        assert!(ended.json()["image_bytes"].as_u64() > Some(0));
        assert_eq!(place.run(&["files", "cat", "work", "file"]).with(0), "kept");
        assert_eq!(state(&place), "hibernated");
        assert!(images(&place) > 0);
        assert_eq!(place.run(&["run", "-s", "work", "x"]).with(0), "5\n");
        assert_eq!(images(&place), 0, "nobody else would remove it");
    } else {
        println!("hibernation is not tried: {}", hibernation["error"]["message"]);
        assert_eq!(ended.code, 125);
        assert_eq!(ended.json()["error"]["code"], "unsupported", "{}", ended.out);
        assert_ne!(ended.json()["error"]["hint"], "");
    }
    place.run(&["standby", "work"]).with(0);
    assert_eq!(place.run(&["wake", "work", "--json"]).json()["state"], "running");
    assert_eq!(place.run(&["wake", "nope"]).code, 125);
    place.run(&["standby", "work"]).with(0);
    place.run(&["close", "work"]).with(0);
}

#[test]
fn a_daemon_puts_the_idle_to_sleep_and_its_death_wakes_nobody() {
    let place = Place::new();
    if !can_sleep(&place) {
        return;
    }
    let mut daemon = Daemon::start(&place, &[]);
    let made =
        place.run(&["open", "work", "--standby-after", "1s", "--hibernate-after", "0", "--json"]).json();
    let id = made["id"].as_str().unwrap().to_owned();
    place.run(&["run", "-s", "work", "x = 5"]).with(0);
    becomes(&place, "standby");
    assert_eq!(place.run(&["run", "-s", "work", "x"]).with(0), "5\n");
    becomes(&place, "standby");
    // Over HTTP: seen, measured, woken, put back.
    let http = |request: String| {
        let answer = ask(UnixStream::connect(place.socket()).unwrap(), &request, "", "");
        (answer.status, answer.json())
    };
    let (status, seen) = http(format!("GET /v1/sandboxes/{id}"));
    assert_eq!((status, &seen["state"], &seen["standby_after_seconds"]), (200, &json!("standby"), &json!(1)));
    let (status, usage) = http(format!("GET /v1/sandboxes/{id}/metrics"));
    assert!(status == 200 && usage["memory"].as_u64() > Some(0), "{usage}");
    assert_eq!(http(format!("GET /v1/sandboxes/{id}")).1["state"], "standby");
    assert_eq!(http(format!("POST /v1/sandboxes/{id}/wake")).1["state"], "running");
    assert_eq!(http(format!("POST /v1/sandboxes/{id}/standby")).1["state"], "standby");
    let (status, page) = http("GET /v1/sandboxes?state=standby".to_owned());
    assert_eq!((status, page["items"].as_array().map(Vec::len)), (200, Some(1)));
    let (_, execs) = http(format!("GET /v1/sandboxes/{id}/execs"));
    assert!(!execs["items"].as_array().unwrap().is_empty(), "{execs}");
    becomes(&place, "standby");

    daemon.child.kill().unwrap();
    daemon.wait();
    assert_eq!(state(&place), "standby");
    assert_eq!(place.run(&["run", "-s", "work", "x"]).with(0), "5\n");
}

#[test]
fn an_mcp_clients_kept_line_wakes_it() {
    let place = Place::new();
    if !can_sleep(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &[], "sleeper");
    let said = |answer: Value| answer["content"][0]["text"].as_str().unwrap_or_default().to_owned();
    client.call("run", json!({"code": "x = 5"}));
    for _ in 0..3 {
        let all = place.run(&["ls", "--json"]).json();
        let id = all["sandboxes"][0]["id"].as_str().unwrap().to_owned();
        place.run(&["standby", &id]).with(0);
        assert!(said(client.call("run", json!({"code": "x"}))).contains('5'));
        assert_eq!(state(&place), "running");
    }
}
