//! Whoever puts a sandbox to sleep or wakes it is killed at some moment of it. Whoever comes next finds what was there.

use std::{
    io::{BufRead, BufReader, Lines},
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

use carrel_engine::{Note, State};
use carrel_proto::{
    guest::Language::{Bash, Python},
    outcome::SessionState,
    problem::Code,
};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde::{Deserialize, Serialize};

use crate::{
    faults::{self, Deed},
    race,
    world::{Lot, Ran, close_all, in_time, key, open, rounds, run, seed, wish},
};

const TASK: &str = "CARREL_TORTURE_TASK";
const NAME: &str = "killed";
/// What begins a line that is meant for the parent: the harness has its own.
pub(crate) const WORD: &str = "child: ";
/// Beyond what any of it takes here, so that some are killed when all is done.
const LATEST_US: u64 = 700_000;

/// What another process of this program does.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Task {
    Race { state: PathBuf, seed: u64, rounds: u64 },
    Standby { state: PathBuf },
    Hibernate { state: PathBuf },
    Wake { state: PathBuf },
    Fault { state: PathBuf, name: String, deed: Deed, at: Option<usize> },
}

/// Who is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reach {
    Alone,
    Group,
    /// With all that it has started, as a service manager does it.
    Tree,
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
    pub(crate) fn word(&mut self) -> Option<String> {
        self.lines.by_ref().map_while(Result::ok).find_map(|line| Some(line.split_once(WORD)?.1.to_owned()))
    }

    /// All that it says until its end.
    pub(crate) fn all(mut self) -> Vec<String> {
        std::iter::from_fn(|| self.word()).collect()
    }

    /// How it ended, by itself.
    pub(crate) fn ended(mut self) -> ExitStatus {
        self.process.wait().unwrap()
    }

    fn kill(&mut self, reach: Reach) {
        let pid = Pid::from_child(&self.process);
        // Those below it first: afterwards nobody knows them.
        if reach == Reach::Tree {
            for below in carrel_jail::tree::below(pid.as_raw_nonzero().get()) {
                let _ = kill_process(Pid::from_raw(below).unwrap(), Signal::KILL);
            }
        }
        let _ = match reach {
            Reach::Alone => kill_process(pid, Signal::KILL),
            Reach::Group | Reach::Tree => kill_process_group(pid, Signal::KILL),
        };
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill(Reach::Group);
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
        Task::Fault { state, name, deed, at } => faults::commit(&state, &name, deed, at).await,
    }
}

const ALL: [Reach; 3] = [Reach::Alone, Reach::Group, Reach::Tree];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    Standby,
    Hibernate,
    Wake,
}

const SETUP_PYTHON: &str = "n = 0; big = bytes(8 << 20)";
const SETUP_BASH: &str = "b=0; (while :; do sleep 1; done) & true";

fn is_told_as_lost(ran: &Ran) -> bool {
    let code = ran.outcome.problem.as_ref().map(|problem| problem.code);
    code == Some(Code::StateLost) && ran.outcome.session_state == SessionState::Lost
}

/// Kills whoever does `victim` at a moment drawn by lot, again and again.
async fn kill(victim: Victim, reaches: &[Reach]) {
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
    run(&engine, &record, Python, SETUP_PYTHON).await.unwrap();
    // Where a shell may die, no job of it outlives it.
    let setup_bash = if reaches == [Reach::Tree] { "b=0" } else { SETUP_BASH };
    run(&engine, &record, Bash, setup_bash).await.unwrap();
    let (mut ends, mut lost) = (std::collections::BTreeMap::new(), 0);
    for round in 0..rounds() {
        let task = match victim {
            Victim::Standby => Task::Standby { state: state.path().into() },
            Victim::Hibernate => Task::Hibernate { state: state.path().into() },
            Victim::Wake => {
                in_time("hibernate", engine.hibernate(&record)).await.unwrap();
                Task::Wake { state: state.path().into() }
            }
        };
        let (moment, reach) = (Duration::from_micros(lot.below(LATEST_US)), *lot.one(reaches));
        let what = format!("CARREL_TORTURE_SEED={seed}, round {round}, killed after {moment:?}, {reach:?}");
        tokio::task::spawn_blocking(move || {
            let mut child = Child::start(&task);
            assert_eq!(child.word().as_deref(), Some("ready"));
            // Not for anything to happen: the moment of the kill is the test.
            std::thread::sleep(moment);
            child.kill(reach);
        })
        .await
        .unwrap();
        let left = engine.record(&record.id).unwrap().unwrap().state;
        *ends.entry(format!("{left:?}")).or_insert(0) += 1;
        // By whoever comes next, with or without a restart of a daemon before.
        if lot.below(2) == 0 {
            engine.sweep().unwrap();
        }
        let mut found = in_time(&what, engine.sandbox(&key(NAME), &wish())).await.unwrap();
        // Whoever is stopped with foreign code in it may not live on: then that is said, and nothing else is true.
        let honest = victim == Victim::Hibernate && reach == Reach::Tree;
        let mut gone = honest && found.note == Some(Note::Revived);
        assert!(gone || found.note.is_none(), "{what}: {:?}", found.note);
        assert_eq!((found.created, found.record.state), (false, State::Running), "{what}");
        for (language, setup, count, expected) in [
            (Python, SETUP_PYTHON, "n += 1; print(n, len(big))", format!("{} {}", round + 1, 8 << 20)),
            (Bash, setup_bash, "b=$((b + 1)); echo $b; jobs -p | wc -l", format!("{}\n1", round + 1)),
        ] {
            let ran = if gone { None } else { Some(run(&engine, &found.record, language, count).await) };
            match ran {
                Some(Ok(ran)) if honest && is_told_as_lost(&ran) => {}
                Some(Ok(ran)) => {
                    let (out, expected) = match honest {
                        true => (ran.out.lines().next(), expected.lines().next()),
                        false => (Some(ran.out.as_str()), Some(expected.as_str())),
                    };
                    assert_eq!(out, expected, "{what}: {ran:?}");
                    continue;
                }
                Some(Err(problem)) if honest && problem.code == Code::AgentLost => {
                    gone = true;
                    found = in_time(&what, engine.sandbox(&key(NAME), &wish())).await.unwrap();
                }
                Some(Err(problem)) => panic!("{what}: {problem:?}"),
                None => {}
            }
            lost += 1;
            run(&engine, &found.record, language, setup).await.unwrap();
            run(&engine, &found.record, language, &format!("n={n}\nb={n}", n = round + 1)).await.unwrap();
        }
    }
    println!("{victim:?}: found {ends:?}, {lost} interpreters lost");
    close_all(state.path()).await;
}

#[tokio::test]
async fn killed_while_it_is_frozen() {
    kill(Victim::Standby, &ALL).await;
}

#[tokio::test]
async fn killed_while_it_is_written_to_disk() {
    kill(Victim::Hibernate, &[Reach::Alone, Reach::Group]).await;
}

#[tokio::test]
async fn killed_while_it_is_brought_back() {
    kill(Victim::Wake, &ALL).await;
}

#[tokio::test]
async fn killed_with_the_program_that_writes_it() {
    kill(Victim::Hibernate, &[Reach::Tree]).await;
}
