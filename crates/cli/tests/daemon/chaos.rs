//! `kill -9` of the daemon at random points, fifty times: what was acknowledged is there, what runs goes on, what was half done is
//! cleaned.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{
    client::{Answer, Client},
    load::Dice,
    server::Server,
};

const DEATHS: usize = 50;
const WORKERS: usize = 6;
/// So long half an upload waits for the daemon's death; as long as a daemon lives.
const HALF_SENT: Duration = Duration::from_millis(200);
/// A daemon sweeps at its start and every half minute.
const CLEANED: Duration = Duration::from_secs(90);

/// One worker's sandbox, as far as its answers said.
#[derive(Debug, Default)]
struct Known {
    id: String,
    /// Increments of `n` that were acknowledged, and those sent: one without an answer may have happened or not.
    acknowledged: u64,
    sent: u64,
    /// Versions of the file, likewise.
    written: u64,
    tried: u64,
    /// Uploads that a death cut in the middle.
    cut: u64,
    /// Execs that were acknowledged, with what they print.
    execs: BTreeMap<String, String>,
    /// Sandboxes whose creation was acknowledged.
    made: Vec<(String, String)>,
}

struct Trial {
    socket: PathBuf,
    stop: AtomicBool,
}

impl Trial {
    /// A connection, once a daemon listens again. `None`: the trial is over.
    fn connect(&self) -> Option<Client> {
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            match Client::connect(&self.socket) {
                Ok(client) => return Some(client),
                // No daemon at the moment: its starting is what is waited for, and a socket tells nobody of it.
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    fn work(&self, worker: usize, known: &mut Known) {
        let mut dice = Dice::new(worker as u64 + 77);
        let mut turn = 0;
        while let Some(mut client) = self.connect() {
            // Until the daemon dies under it.
            while !self.stop.load(Ordering::Relaxed) {
                turn += 1;
                let kind = dice.below(5);
                if step(&mut client, known, kind, worker, turn).is_err() {
                    break;
                }
            }
        }
    }
}

fn file_of(version: u64) -> String {
    format!("version {version}\n").repeat(20_000)
}

fn step(
    client: &mut Client,
    known: &mut Known,
    kind: usize,
    worker: usize,
    turn: usize,
) -> std::io::Result<()> {
    let id = known.id.clone();
    match kind {
        0 | 1 => {
            known.sent += 1;
            let body = json!({"code": "n += 1; n", "environment": "python"});
            let reply = client.post(&format!("/v1/sandboxes/{id}/run"), &body)?.with(200);
            assert_eq!(reply["session_state"], "preserved", "{reply}");
            known.acknowledged += 1;
        }
        2 => {
            let mark = format!("w{worker}t{turn}");
            let code = format!("for i in $(seq 1 40); do echo {mark} $i; sleep 0.005; done");
            let body = json!({"argv": ["bash", "-c", code], "stream": true});
            let answer = client.post(&format!("/v1/sandboxes/{id}/execs"), &body)?;
            if answer.status != 429 {
                let exec = answer.with(201)["exec"].as_str().unwrap().to_owned();
                let text = (1..=40).map(|line| format!("{mark} {line}\n")).collect();
                known.execs.insert(exec, text);
            }
        }
        3 => {
            known.tried += 1;
            let path = format!("/v1/sandboxes/{id}/files/content?path=file");
            let put = upload(client, known, &path)?;
            assert!(matches!(put.status, 200 | 201), "{put:?}");
            known.written = known.tried;
        }
        _ => {
            let key = format!("workflow:chaos-{worker}:t{turn}");
            let answer = client.post("/v1/sandboxes", &json!({"key": key, "limits": {"disk": 16 << 20}}))?;
            let made = answer.with(201)["id"].as_str().unwrap().to_owned();
            known.made.push((key, made));
        }
    }
    Ok(())
}

/// A file whose second half waits a while for a death to come in between.
fn upload(client: &mut Client, known: &mut Known, path: &str) -> std::io::Result<Answer> {
    let file = file_of(known.tried).into_bytes();
    let (first, second) = file.split_at(file.len() / 2);
    let head = format!("PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n", file.len());
    client.send_raw(head.as_bytes())?;
    client.send_raw(first)?;
    if client.hangs_up_within(HALF_SENT)? {
        known.cut += 1;
        return Err(std::io::ErrorKind::UnexpectedEof.into());
    }
    client.send_raw(second)?;
    client.answer()
}

#[test]
fn a_daemon_killed_at_any_moment_loses_connections_and_nothing_else() {
    let mut server = Server::start();
    let mut all: Vec<Known> = (0..WORKERS)
        .map(|worker| {
            let mut client = server.client();
            let made =
                client.post("/v1/sandboxes", &json!({"name": format!("w{worker}")})).unwrap().with(201);
            let id = made["id"].as_str().unwrap().to_owned();
            let body = json!({"code": "n = 0"});
            client.post(&format!("/v1/sandboxes/{id}/run"), &body).unwrap().with(200);
            Known { id, ..Known::default() }
        })
        .collect();
    let trial = Trial { socket: server.socket(), stop: AtomicBool::new(false) };
    let failed = Mutex::new(None);
    std::thread::scope(|scope| {
        let workers: Vec<_> = all
            .iter_mut()
            .enumerate()
            .map(|(worker, known)| {
                let trial = &trial;
                scope.spawn(move || trial.work(worker, known))
            })
            .collect();
        let mut dice = Dice::new(4711);
        for _ in 0..DEATHS {
            // The moment of death is what is varied here.
            std::thread::sleep(Duration::from_millis(20 + dice.below(180) as u64));
            server.crash();
        }
        trial.stop.store(true, Ordering::Relaxed);
        for worker in workers {
            if let Err(panic) = worker.join() {
                *failed.lock().unwrap() = Some(panic);
            }
        }
    });
    if let Some(panic) = failed.into_inner().unwrap() {
        std::panic::resume_unwind(panic);
    }
    let cut: u64 = all.iter().map(|known| known.cut).sum();
    println!("{cut} uploads were cut in the middle");
    assert!(cut > 0, "no death came in the middle of an upload");
    let mut client = server.client();
    for known in &all {
        check(&mut client, known);
    }
    nothing_else_is_there(&server, &mut client);
}

fn check(client: &mut Client, known: &Known) {
    let id = &known.id;
    let reply = client.post(&format!("/v1/sandboxes/{id}/run"), &json!({"code": "n"})).unwrap().with(200);
    let n: u64 = reply["results"][0]["mime"]["text/plain"].as_str().unwrap().parse().unwrap();
    assert!((known.acknowledged..=known.sent).contains(&n), "{n}: {known:?}");
    if known.tried > 0 {
        let found = client.get(&format!("/v1/sandboxes/{id}/files/content?path=file")).unwrap();
        if known.written > 0 || found.status == 200 {
            let text = String::from_utf8(found.body).unwrap();
            let whole = (known.written..=known.tried).any(|version| text == file_of(version));
            assert!(whole, "neither version {} nor {}: {:.40}", known.written, known.tried, text);
        }
    }
    for (exec, text) in &known.execs {
        client.get(&format!("/v1/sandboxes/{id}/execs/{exec}/wait?timeout_seconds=60")).unwrap().with(200);
        let (mut all, mut next) = (String::new(), 0);
        loop {
            let path = format!("/v1/sandboxes/{id}/execs/{exec}/output?since={next}");
            let page: Value = client.get(&path).unwrap().with(200);
            for chunk in page["chunks"].as_array().unwrap() {
                all += chunk["data"].as_str().unwrap();
            }
            if page["next"] == next {
                break;
            }
            next = page["next"].as_u64().unwrap();
        }
        assert_eq!(&all, text, "{exec} of {id}");
    }
    for (key, made) in &known.made {
        let found = client.post("/v1/sandboxes", &json!({"key": key})).unwrap().with(200);
        assert_eq!((found["id"].as_str().unwrap(), found["created"].as_bool()), (made.as_str(), Some(false)));
    }
}

/// Every sandbox with its state, oldest first.
fn listed(client: &mut Client) -> Vec<(String, String)> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let page = client.get(&format!("/v1/sandboxes?limit=100{after}")).unwrap().with(200);
        let text = |item: &Value, name: &str| item[name].as_str().unwrap().to_owned();
        all.extend(
            page["items"].as_array().unwrap().iter().map(|item| (text(item, "id"), text(item, "state"))),
        );
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => return all,
        }
    }
}

/// What is nobody's below the state directory.
fn strays(server: &Server, ids: &[(String, String)]) -> Vec<String> {
    let mut found = Vec::new();
    for place in ["sandboxes", "locks"] {
        for entry in std::fs::read_dir(server.state().join(place)).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with("sbx_") && !ids.iter().any(|(id, _)| *id == name) {
                found.push(format!("{place}/{name}"));
            }
        }
    }
    found
}

/// What a dead daemon was making is cleaned by the next one, which does so beside its work: so it may take a moment.
fn nothing_else_is_there(server: &Server, client: &mut Client) {
    let begun = Instant::now();
    loop {
        let swept = server.cli(&["--no-daemon", "--verbose", "ls"]);
        let said = String::from_utf8_lossy(&swept.stderr).into_owned();
        assert!(swept.status.success(), "{said}");
        let ids = listed(client);
        let unfinished: Vec<_> = ids.iter().filter(|(_, state)| state != "running").collect();
        let strays = strays(server, &ids);
        if unfinished.is_empty() && strays.is_empty() {
            return;
        }
        assert!(begun.elapsed() < CLEANED, "unfinished {unfinished:?}, nobody's {strays:?}; {said}");
        std::thread::sleep(Duration::from_millis(100));
    }
}
