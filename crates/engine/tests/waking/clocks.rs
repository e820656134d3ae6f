//! Clocks of processes that come back, on this machine and on another one: they go on from where they were, so that whatever
//! waits for them ends when it should.

use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use carrel_engine::{Engine, Record};
use carrel_proto::guest::Language::{Bash, Node, Python};

use crate::{
    run, with_memory,
    world::{close_all, in_time, key, open, wish},
};

const STATE: &str = "CARREL_WAKING_STATE";
const NAME: &str = "clocks";
/// For so long the other machine has been running more than this one, in seconds: one clock each, so that none passes for the other.
const MONOTONIC: u32 = 4_000_000;
const BOOTTIME: u32 = 5_000_000;
/// Far more than this test takes and far less than those.
const SOON: f64 = 3600.0;

/// Waiting of every kind is under way: in a thread, for timers of the kernel's, in a shell, in node's loop.
const SETUP_PYTHON: &str = "\
import ctypes, select, threading, time
libc = ctypes.CDLL(None)
class Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ('again_s', 'again_ns', 'value_s', 'value_ns')]
def timer(clock, absolute):
    fd = libc.timerfd_create(clock, 0)
    now = int(time.clock_gettime(clock)) if absolute else 0
    assert libc.timerfd_settime(fd, absolute, ctypes.byref(Spec(0, 0, now + 4, 0)), None) == 0
    return fd
def clocks():
    return time.clock_gettime(time.CLOCK_MONOTONIC), time.clock_gettime(time.CLOCK_BOOTTIME)
timers = [timer(clock, absolute) for clock in (1, 7) for absolute in (0, 1)]
sleeper = threading.Thread(target=lambda: time.sleep(4), daemon=True)
sleeper.start()
waiter = threading.Thread(target=lambda: threading.Event().wait(4), daemon=True)
waiter.start()
was = clocks()
print(*was)";
const SETUP_BASH: &str = "sleep 4 & short=$!; sleep 1000 & long=$!; before=$SECONDS";
const SETUP_NODE: &str =
    "var was = process.hrtime.bigint(); var rung = new Promise((ring) => setTimeout(ring, 4000, 'rung')); 0";

/// No test: what is done on the other machine, which is this program in a time namespace of its own.
#[tokio::test]
async fn on_another_machine() {
    let Some(state) = std::env::var_os(STATE) else { return };
    let engine = open(Path::new(&state));
    let record = engine.sandbox(&key(NAME), &wish()).await.unwrap().record;
    let told = run(&engine, &record, Python, SETUP_PYTHON).await;
    let clocks: Vec<f64> = told.split(' ').map(|clock| clock.parse().unwrap()).collect();
    assert!(clocks[0] > MONOTONIC.into() && clocks[1] > BOOTTIME.into(), "{told}");
    run(&engine, &record, Bash, SETUP_BASH).await;
    run(&engine, &record, Node, SETUP_NODE).await;
    in_time("hibernate", engine.hibernate(&record)).await.unwrap();
}

fn elsewhere() -> Command {
    let mut command = Command::new("unshare");
    let clocks = [format!("--monotonic={MONOTONIC}"), format!("--boottime={BOOTTIME}")];
    command.args(["--time", "--fork"]).args(clocks).stdin(Stdio::null());
    command
}

/// Whether clocks have neither gone back nor jumped since `was` was set.
async fn go_on(engine: &Engine, record: &Record, when: &str) {
    let look = "now = clocks(); print(*(b - a for a, b in zip(was, now))); was = now";
    let told = run(engine, record, Python, look).await;
    for passed in told.split(' ') {
        let passed: f64 = passed.parse().unwrap();
        assert!((0.0..SOON).contains(&passed), "{when}: {told}");
    }
}

/// Of a sandbox that [`on_another_machine`] has put to sleep, or one like it.
async fn all_ends_as_it_should(engine: &Engine, record: &Record) {
    go_on(engine, record, "after waking").await;
    let wall: f64 = run(engine, record, Python, "print(time.time())").await.parse().unwrap();
    let true_wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    assert!(true_wall.abs_diff(Duration::from_secs_f64(wall)) < Duration::from_secs_f64(SOON), "{wall}");
    let timers = "print(sum(bool(select.select([fd], [], [], 60)[0]) for fd in timers))";
    assert_eq!(run(engine, record, Python, timers).await, "4");
    let threads = "sleeper.join(60); waiter.join(60); print(sleeper.is_alive(), waiter.is_alive())";
    assert_eq!(run(engine, record, Python, threads).await, "False False");
    let jobs = "wait $short; echo $? $((SECONDS - before < 3600)); kill -0 $long && echo there";
    assert_eq!(run(engine, record, Bash, jobs).await, "0 1\nthere");
    let node = "console.log(await rung, process.hrtime.bigint() - was < 3600n * 10n ** 9n, process.hrtime.bigint() > was)";
    assert_eq!(run(engine, record, Node, node).await, "rung true true");
}

#[tokio::test]
async fn they_go_on_from_where_they_were_on_another_machine() {
    let Some((state, engine)) = with_memory() else { return };
    if !elsewhere().arg("true").status().is_ok_and(|status| status.success()) {
        return println!("skipped: this host has no time namespaces, or no `unshare` that makes them");
    }
    let mut other = elsewhere();
    other
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "clocks::on_another_machine", "--nocapture"])
        .env(STATE, state.path());
    let ended = tokio::task::spawn_blocking(move || other.status().unwrap()).await.unwrap();
    assert!(ended.success(), "{ended}");
    let found = in_time("waking it", engine.sandbox(&key(NAME), &wish())).await.unwrap();
    assert_eq!((found.created, found.note), (false, None));
    all_ends_as_it_should(&engine, &found.record).await;
    // And so again, from clocks that are its own already; and in a copy of it.
    for _ in 0..2 {
        in_time("hibernate", engine.hibernate(&found.record)).await.unwrap();
        go_on(&engine, &found.record, "after waking again").await;
    }
    let forked = in_time("fork", engine.fork(&found.record, 1, None, None)).await.unwrap();
    go_on(&engine, &forked.forks[0].record, "in a fork").await;
    close_all(state.path()).await;
}

#[tokio::test]
async fn they_go_on_from_where_they_were_here() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(NAME), &wish()).await.unwrap().record;
    run(&engine, &record, Python, SETUP_PYTHON).await;
    run(&engine, &record, Bash, SETUP_BASH).await;
    run(&engine, &record, Node, SETUP_NODE).await;
    in_time("hibernate", engine.hibernate(&record)).await.unwrap();
    all_ends_as_it_should(&engine, &record).await;
    close_all(state.path()).await;
}
