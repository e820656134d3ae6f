//! Many clients, many sandboxes, mixed calls: nothing lost, nothing repeated, memory flat.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{client::Client, server::Server};

const CLIENTS: usize = 64;
const SANDBOXES: usize = 200;
/// Of these, so many have a python too: an interpreter takes a second to start on a machine that is this busy.
const PYTHONS: usize = 40;
/// Unless CARREL_LOAD_SECONDS says otherwise.
const SECONDS: u64 = 20;
/// A daemon may keep this much more at the end than after its first third: allocators round up.
const SLACK: u64 = 16 << 20;

fn seconds() -> Duration {
    let text = std::env::var("CARREL_LOAD_SECONDS").ok();
    Duration::from_secs(text.and_then(|text| text.parse().ok()).unwrap_or(SECONDS))
}

/// Numbers that look random and are the same in every run.
#[derive(Debug)]
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % most as u64).unwrap()
    }
}

/// What the code of a call prints, and what must arrive.
fn lines(mark: &str, count: usize) -> String {
    (0..count).map(|line| format!("{mark} {line}\n")).collect()
}

fn bash(mark: &str, count: usize) -> String {
    format!("for ((i = 0; i < {count}; i++)); do echo '{mark}' $i; done")
}

fn python(mark: &str, count: usize) -> String {
    format!("for i in range({count}): print('{mark}', i)")
}

struct Trial {
    ids: Vec<String>,
    stop: AtomicBool,
    calls: AtomicUsize,
    refused: AtomicUsize,
    /// Of runs in each language.
    times: [Mutex<Vec<Duration>>; 2],
}

impl Trial {
    /// One call of some kind; what it gives back must be exact.
    fn one(&self, client: &mut Client, dice: &mut Dice, mark: &str) {
        let id = &self.ids[dice.below(self.ids.len())];
        let count = 1 + dice.below(400);
        let begun = Instant::now();
        let kind = dice.below(10);
        let refused = match kind {
            0..3 => self.run(client, id, "bash", mark, count),
            8.. => self.run(client, &self.ids[dice.below(PYTHONS)], "python", mark, count),
            3 => self.stream(client, id, mark, count),
            4 => self.exec(client, id, mark, count),
            5 => self.detached(client, id, mark, count),
            6 => self.file(client, id, mark, count),
            7 => self.look(client, id),
        };
        self.calls.fetch_add(1, Ordering::Relaxed);
        if refused {
            self.refused.fetch_add(1, Ordering::Relaxed);
        } else if kind < 3 {
            self.times[0].lock().unwrap().push(begun.elapsed());
        } else if kind >= 8 {
            self.times[1].lock().unwrap().push(begun.elapsed());
        }
    }

    /// `true`: a limit said no, which is an answer.
    fn run(&self, client: &mut Client, id: &str, language: &str, mark: &str, count: usize) -> bool {
        let code = if language == "python" { python(mark, count) } else { bash(mark, count) };
        let body = json!({"code": code, "environment": language});
        let answer = client.post(&format!("/v1/sandboxes/{id}/run"), &body).unwrap();
        if answer.status == 429 {
            return true;
        }
        let reply = answer.with(200);
        assert_eq!(reply["stdout"], lines(mark, count), "{reply}");
        assert_eq!(reply["session_state"], "preserved");
        false
    }

    fn stream(&self, client: &mut Client, id: &str, mark: &str, count: usize) -> bool {
        let body = json!({"code": bash(mark, count), "environment": "bash", "stream": true}).to_string();
        let events = client.events("POST", &format!("/v1/sandboxes/{id}/run"), &[], body.as_bytes());
        let events = match events {
            Err(error) if error.to_string().starts_with("429") => return true,
            events => events.unwrap(),
        };
        let mut text = String::new();
        for event in events.iter().filter(|event| event.name == "stdout") {
            assert_eq!(event.data["offset"], text.len(), "{event:?}");
            text += event.data["data"].as_str().unwrap();
        }
        assert_eq!(text, lines(mark, count));
        assert_eq!(events.last().unwrap().name, "end");
        false
    }

    fn exec(&self, client: &mut Client, id: &str, mark: &str, count: usize) -> bool {
        let body = json!({"argv": ["bash", "-c", bash(mark, count)]});
        let answer = client.post(&format!("/v1/sandboxes/{id}/execs"), &body).unwrap();
        if answer.status == 429 {
            return true;
        }
        let answer = answer.with(200);
        assert_eq!(answer["stdout"], lines(mark, count), "{answer}");
        false
    }

    fn detached(&self, client: &mut Client, id: &str, mark: &str, count: usize) -> bool {
        let body = json!({"argv": ["bash", "-c", bash(mark, count)], "stream": true});
        let answer = client.post(&format!("/v1/sandboxes/{id}/execs"), &body).unwrap();
        if answer.status == 429 {
            return true;
        }
        let exec = answer.with(201)["exec"].as_str().unwrap().to_owned();
        let (mut text, mut next) = (String::new(), 0);
        loop {
            let path =
                format!("/v1/sandboxes/{id}/execs/{exec}/output?since={next}&max=2000&wait_seconds=10");
            let page = client.get(&path).unwrap().with(200);
            for chunk in page["chunks"].as_array().unwrap() {
                assert_eq!(chunk["offset"], text.len(), "{page}");
                text += chunk["data"].as_str().unwrap();
            }
            let more = page["next"].as_u64().unwrap() > next;
            next = page["next"].as_u64().unwrap();
            if page["running"] == false && !more {
                break;
            }
        }
        assert_eq!(text, lines(mark, count));
        false
    }

    fn file(&self, client: &mut Client, id: &str, mark: &str, count: usize) -> bool {
        let path = format!("/v1/sandboxes/{id}/files/content?path={mark}.txt");
        let text = lines(mark, count);
        let put = client.ask("PUT", &path, text.as_bytes()).unwrap();
        assert!(matches!(put.status, 200 | 201), "{put:?}");
        assert_eq!(client.get(&path).unwrap().body, text.as_bytes());
        client.ask("DELETE", &format!("/v1/sandboxes/{id}/files?path={mark}.txt"), b"").unwrap().with(200);
        false
    }

    fn look(&self, client: &mut Client, id: &str) -> bool {
        assert_eq!(client.get(&format!("/v1/sandboxes/{id}")).unwrap().with(200)["state"], "running");
        let page = client.get("/v1/sandboxes?limit=50").unwrap().with(200);
        assert_eq!(page["items"].as_array().unwrap().len(), 50);
        client.get(&format!("/v1/sandboxes/{id}/metrics")).unwrap().with(200);
        false
    }
}

/// How long calls of one kind took.
struct Spread(Vec<Duration>);

impl Spread {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        assert!(!times.is_empty(), "not one call of a kind was made");
        Self(times)
    }

    fn at(&self, part: usize) -> f64 {
        self.0[(self.0.len() - 1) * part / 100].as_secs_f64()
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} runs, p50 {:.0} ms, p99/p50 {:.1}x",
            self.0.len(),
            self.at(50) * 1e3,
            self.at(99) / self.at(50)
        )
    }
}

#[test]
fn many_clients_at_once_lose_nothing_and_cost_nothing_lasting() {
    let server = Server::start();
    let ids = Arc::new(Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (server, ids) = (&server, Arc::clone(&ids));
            scope.spawn(move || {
                let mut client = server.client();
                for number in (worker..SANDBOXES).step_by(4) {
                    let body = json!({"name": format!("load-{number}"), "limits": {"disk": 64 << 20}});
                    let made: Value = client.post("/v1/sandboxes", &body).unwrap().with(201);
                    ids.lock().unwrap().push(made["id"].as_str().unwrap().to_owned());
                }
            });
        }
    });
    let ids = std::mem::take(&mut *ids.lock().unwrap());
    let trial = Trial {
        ids,
        stop: AtomicBool::new(false),
        calls: AtomicUsize::new(0),
        refused: AtomicUsize::new(0),
        times: Default::default(),
    };
    let (time, mut early) = (seconds(), 0);
    std::thread::scope(|scope| {
        for number in 0..CLIENTS {
            let (trial, server) = (&trial, &server);
            scope.spawn(move || {
                let (mut client, mut dice) = (server.client(), Dice::new(number as u64 + 1));
                let mut call = 0;
                while !trial.stop.load(Ordering::Relaxed) {
                    trial.one(&mut client, &mut dice, &format!("c{number}-{call}"));
                    call += 1;
                }
            });
        }
        let begun = Instant::now();
        // How long the trial lasts is its length, not something to wait for.
        while begun.elapsed() < time {
            std::thread::sleep(Duration::from_millis(100));
            if early == 0 && begun.elapsed() > time / 3 {
                early = server.resident();
            }
        }
        trial.stop.store(true, Ordering::Relaxed);
    });
    let late = server.resident();
    let [bash, python] = trial.times.map(|times| Spread::of(times.into_inner().unwrap()));
    println!(
        "load: {} calls ({} refused by a limit) in {time:?}; bash {bash}; python {python}; memory {} MB, then {} MB",
        trial.calls.load(Ordering::Relaxed),
        trial.refused.load(Ordering::Relaxed),
        early >> 20,
        late >> 20
    );
    assert!(late < early + early / 4 + SLACK, "memory grew from {early} to {late}");
}
