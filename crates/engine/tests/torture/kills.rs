//! Whoever puts a sandbox to sleep or wakes it is killed at some moment of it. Whoever comes next finds what was there.

use std::{
    io::{BufRead, BufReader, Lines},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{ChildStdout, Command, Stdio},
    time::Duration,
};

use carrel_engine::State;
use carrel_proto::guest::Language::{Bash, Python};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};

use crate::{
    race,
    world::{Lot, close_all, in_time, key, open, rounds, run, seed, wish},
};

const TASK: &str = "CARREL_TORTURE_TASK";
const NAME: &str = "killed";
/// What begins a line that is meant for the parent: the harness has its own.
const WORD: &str = "child: ";
/// Beyond what any of it takes here, so that some are killed when all is done.
const LATEST_US: u64 = 700_000;

/// What another process of this program does.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    Race { state: PathBuf, seed: u64, rounds: u64 },
    Standby { state: PathBuf },
    Hibernate { state: PathBuf },
    Wake { state: PathBuf },
}

/// Another process of this program, in a group of its own. Ended when dropped.
pub(crate) struct Child {
    process: std::process::Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Child {
    pub(crate) fn start(task: &Task) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kills::another_process", "--nocapture", "--test-threads=1"])
            .env(TASK, serde_json::to_string(task).unwrap())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .process_group(0)
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Self { process, lines }
    }

    /// The next thing it says.
    fn word(&mut self) -> Option<String> {
        self.lines.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once(WORD)?.1.to_owned()))
    }

    /// All that it says until its end.
    pub(crate) fn all(mut self) -> Vec<String> {
        std::iter::from_fn(|| self.word()).collect()
    }

    fn kill(&mut self, group: bool) {
        let pid = Pid::from_child(&self.process);
        let _ = if group { kill_process_group(pid, Signal::KILL) } else { kill_process(pid, Signal::KILL) };
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill(true);
    }
}

/// No test: what [`Child`] runs.
#[tokio::test]
async fn another_process() {
    let Ok(text) = std::env::var(TASK) else { return };
    match serde_json::from_str(&text).unwrap() {
        Task::Race { state, seed, rounds } => match race::contend(&open(&state), seed, rounds).await {
            Ok(seen) => seen.values.iter().for_each(|value| println!("\n{WORD}value {value}")),
            Err(problem) => println!("\n{WORD}failed {}", problem.replace('\n', " ")),
        },
        Task::Standby { state } => {
            let engine = open(&state);
            let record = engine.list().unwrap().remove(0);
            println!("\n{WORD}ready");
            engine.standby(&record).await.unwrap();
        }
        Task::Hibernate { state } => {
            let engine = open(&state);
            engine.can_hibernate().unwrap();
            let record = engine.list().unwrap().remove(0);
            println!("\n{WORD}ready");
            engine.hibernate(&record).await.unwrap();
        }
        Task::Wake { state } => {
            let engine = open(&state);
            println!("\n{WORD}ready");
            engine.sandbox(&key(NAME), &wish()).await.unwrap();
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Standby,
    Hibernate,
    Wake,
}

/// Kills whoever does `victim` at a moment drawn by lot, again and again.
async fn kill(victim: Victim) {
    let seed = seed();
    let mut lot = Lot::new(seed);
    let state = tempfile::tempdir().unwrap();
    let engine = open(state.path());
    if victim != Victim::Standby
        && let Err(problem) = engine.can_hibernate()
    {
        return println!("skipped: {}", problem.message);
    }
    let record = engine.sandbox(&key(NAME), &wish()).await.unwrap().record;
    if let Err(problem) = engine.standby(&record).await {
        println!("skipped: {}", problem.message);
        return close_all(state.path()).await;
    }
    run(&engine, &record, Python, "n = 0; big = bytes(8 << 20)").await.unwrap();
    run(&engine, &record, Bash, "b=0; (while :; do sleep 1; done) & true").await.unwrap();
    let mut ends = std::collections::BTreeMap::new();
    for round in 0..rounds() {
        let task = match victim {
            Victim::Standby => Task::Standby { state: state.path().into() },
            Victim::Hibernate => Task::Hibernate { state: state.path().into() },
            Victim::Wake => {
                in_time("hibernate", engine.hibernate(&record)).await.unwrap();
                Task::Wake { state: state.path().into() }
            }
        };
        let (moment, group) = (Duration::from_micros(lot.below(LATEST_US)), lot.below(2) == 0);
        let what =
            format!("CARREL_TORTURE_SEED={seed}, round {round}, killed after {moment:?}, group: {group}");
        tokio::task::spawn_blocking(move || {
            let mut child = Child::start(&task);
            assert_eq!(child.word().as_deref(), Some("ready"));
            // Not for anything to happen: the moment of the kill is the test.
            std::thread::sleep(moment);
            child.kill(group);
        })
        .await
        .unwrap();
        let left = engine.record(&record.id).unwrap().unwrap().state;
        *ends.entry(format!("{left:?}")).or_insert(0) += 1;
        // By whoever comes next, with or without a restart of a daemon before.
        if lot.below(2) == 0 {
            engine.sweep().unwrap();
        }
        let found = in_time(&what, engine.sandbox(&key(NAME), &wish())).await.unwrap();
        assert_eq!((found.note, found.created, found.record.state), (None, false, State::Running), "{what}");
        let ran = run(&engine, &found.record, Python, "n += 1; print(n, len(big))").await;
        let ran = ran.unwrap_or_else(|problem| panic!("{what}: {problem:?}"));
        assert_eq!(ran.out, format!("{} {}", round + 1, 8 << 20), "{what}: {ran:?}");
        let ran = run(&engine, &found.record, Bash, "b=$((b + 1)); echo $b; jobs -p | wc -l").await;
        let ran = ran.unwrap_or_else(|problem| panic!("{what}: {problem:?}"));
        assert_eq!(ran.out, format!("{}\n1", round + 1), "{what}: {ran:?}");
    }
    println!("{victim:?}: found {ends:?}");
    close_all(state.path()).await;
}

#[tokio::test]
async fn killed_while_it_is_frozen() {
    kill(Victim::Standby).await;
}

#[tokio::test]
async fn killed_while_it_is_written_to_disk() {
    kill(Victim::Hibernate).await;
}

#[tokio::test]
async fn killed_while_it_is_brought_back() {
    kill(Victim::Wake).await;
}
