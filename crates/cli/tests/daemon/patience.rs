//! Clients that read slowly, send half a request, or vanish: bounded memory, and nothing of a sandbox gets stuck.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::{client::Client, server::Server};

/// Longer than the daemon waits for any part of a request, on a machine that may stand still for a while.
const DROPPED: Duration = Duration::from_secs(180);

/// Held back by all slow readers together, at the most: what queues and sockets hold.
const MEMORY: u64 = 48 << 20;

fn sandbox(client: &mut Client, name: &str) -> String {
    let made = client.post("/v1/sandboxes", &json!({"name": name})).unwrap();
    made.json()["id"].as_str().unwrap().to_owned()
}

#[test]
fn who_reads_slowly_holds_up_neither_the_code_nor_the_daemon() {
    let server = Server::start();
    let mut client = server.client();
    let id = sandbox(&mut client, "slow");
    client.post(&format!("/v1/sandboxes/{id}/run"), &json!({"code": "1"})).unwrap().with(200);
    let before = server.resident();
    // 40 MB each, of which nobody reads a byte.
    let code = "import sys\nfor _ in range(40): sys.stdout.write('x' * 999_999 + '\\n')";
    let mut readers = Vec::new();
    for number in 0..4 {
        let mut reader = server.client();
        let session = format!("s{number}");
        let body =
            json!({"code": code, "stream": true, "session": session, "timeout_seconds": 300}).to_string();
        reader.send("POST", &format!("/v1/sandboxes/{id}/run"), &[], body.as_bytes()).unwrap();
        readers.push(reader);
    }
    // The code ends all the same, once the daemon has lost patience with its readers.
    let begun = Instant::now();
    loop {
        let page = client.get(&format!("/v1/sandboxes/{id}/execs?limit=100")).unwrap().with(200);
        let running = page["items"].as_array().unwrap().iter().filter(|exec| exec["running"] == true).count();
        if running == 0 && page["items"].as_array().unwrap().len() == 5 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "still held up: {page}");
        std::thread::sleep(Duration::from_millis(100));
    }
    let grown = server.resident().saturating_sub(before);
    assert!(grown < MEMORY, "the daemon grew by {} MB", grown >> 20);
    // Nothing is lost: the whole output can be read.
    let page = client.get(&format!("/v1/sandboxes/{id}/execs?limit=100")).unwrap().with(200);
    let last = page["items"].as_array().unwrap().last().unwrap()["exec"].as_str().unwrap().to_owned();
    let raw = client.get(&format!("/v1/sandboxes/{id}/execs/{last}/raw?stream=stdout")).unwrap();
    assert_eq!((raw.status, raw.body.len()), (200, 40_000_000));
    drop(readers);
}

#[test]
fn half_a_request_and_a_vanished_client_leave_nothing_stuck() {
    let server = Server::start();
    let mut client = server.client();
    let id = sandbox(&mut client, "half");
    client.ask("PUT", &format!("/v1/sandboxes/{id}/files/content?path=a"), b"old").unwrap();
    let mut open = Vec::new();
    for number in 0..50 {
        let mut half = server.client();
        match number % 3 {
            // A head that never ends, a body that never comes, and a stream whose reader is gone.
            0 => half.send_raw(b"GET /v1/sandboxes HTTP/1.1\r\nhost: loc").unwrap(),
            1 => {
                let head = format!(
                    "PUT /v1/sandboxes/{id}/files/content?path=a HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nnew"
                );
                half.send_raw(head.as_bytes()).unwrap();
            }
            _ => {
                let body = json!({"code": "print('x' * 100)", "stream": true}).to_string();
                half.send("POST", &format!("/v1/sandboxes/{id}/run"), &[], body.as_bytes()).unwrap();
            }
        }
        if number % 2 == 0 {
            open.push((number % 3, half));
        }
    }
    let reply = client.post(&format!("/v1/sandboxes/{id}/run"), &json!({"code": "6*7"})).unwrap().with(200);
    assert_eq!(reply["results"][0]["mime"]["text/plain"], "42");
    assert_eq!(client.get(&format!("/v1/sandboxes/{id}/files/content?path=a")).unwrap().body, b"old");
    // The daemon does not wait for ever: a head that does not come ends the connection, a body that does not come is answered.
    for (kind, mut half) in open {
        match kind {
            0 => assert!(half.hangs_up_within(DROPPED).unwrap(), "half a head is still waited for"),
            1 => {
                assert!(!half.hangs_up_within(DROPPED).unwrap(), "without a word");
                let answer = half.answer().unwrap();
                assert_eq!(answer.json()["code"], "timeout", "{answer:?}");
                assert!(half.hangs_up_within(DROPPED).unwrap(), "and the connection is kept");
            }
            _ => assert_eq!(half.head().unwrap().0, 200),
        }
    }
    assert_eq!(client.get(&format!("/v1/sandboxes/{id}/files/content?path=a")).unwrap().body, b"old");
    // Nothing of the half uploads is left beside the file.
    let listed = client.get(&format!("/v1/sandboxes/{id}/files?path=.")).unwrap().with(200);
    assert_eq!(
        listed["items"].as_array().unwrap().iter().filter(|entry| entry["name"] != "lost+found").count(),
        1
    );
}
