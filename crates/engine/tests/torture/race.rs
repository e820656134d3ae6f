//! Two engines of one process and one of another, all at one sandbox: every call has its answer or is told that another is at it,
//! and every number is counted once.

use std::path::Path;

use carrel_engine::Engine;
use carrel_proto::{
    guest::Language::Python,
    problem::{Code, Problem},
};

use crate::{
    kills::{Child, Task},
    world::{Lot, close_all, in_time, key, open, rounds, run, seed, wish},
};

pub(crate) const NAME: &str = "raced";

/// What somebody who races has seen.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Numbers that were counted.
    pub(crate) values: Vec<u64>,
    pub(crate) slept: u64,
    pub(crate) refused: u64,
}

/// Somebody else is at it: nothing has happened, and that is said.
fn is_refusal(problem: &Problem) -> bool {
    matches!(problem.code, Code::Conflict | Code::Busy) && !problem.hint.is_empty()
}

/// One who does things to the sandbox, while others do.
pub(crate) async fn contend(engine: &Engine, seed: u64, rounds: u64) -> Result<Seen, String> {
    let (mut lot, mut seen) = (Lot::new(seed), Seen::default());
    let deep = engine.can_hibernate().is_ok();
    for _ in 0..rounds {
        let found = in_time("finding it", engine.sandbox(&key(NAME), &wish())).await;
        let found = match found {
            Ok(found) if found.note.is_none() && !found.created => found,
            Err(problem) if is_refusal(&problem) => {
                seen.refused += 1;
                continue;
            }
            other => return Err(format!("finding it: {other:?}")),
        };
        let done = match lot.below(4) {
            0 => in_time("standby", engine.standby(&found.record)).await.map(|_| seen.slept += 1),
            1 if deep => in_time("hibernate", engine.hibernate(&found.record)).await.map(|_| seen.slept += 1),
            _ => match run(engine, &found.record, Python, "n += 1; print(n)").await {
                Ok(ran) => {
                    let value = ran.out.parse().map_err(|_| format!("{ran:?}"))?;
                    seen.values.push(value);
                    Ok(())
                }
                Err(problem) => Err(problem),
            },
        };
        match done {
            Ok(()) => {}
            // This host has no freezer.
            Err(problem) if problem.code == Code::Unsupported => {}
            Err(problem) if is_refusal(&problem) => seen.refused += 1,
            Err(problem) => return Err(format!("{problem:?}")),
        }
    }
    // Somebody else's call may stand still since this one's last deed.
    while let Err(problem) = in_time("waking it", engine.sandbox(&key(NAME), &wish())).await {
        if !is_refusal(&problem) {
            return Err(format!("waking it: {problem:?}"));
        }
    }
    Ok(seen)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_who_race_lose_nothing() {
    let (seed, rounds) = (seed(), rounds());
    let state = tempfile::tempdir().unwrap();
    let engines = [open(state.path()), open(state.path())];
    let record = engines[0].sandbox(&key(NAME), &wish()).await.unwrap().record;
    run(&engines[0], &record, Python, "n = 0").await.unwrap();
    let raced = race(state.path(), engines, seed, rounds).await;
    let engine = open(state.path());
    let last = in_time("finding it", engine.sandbox(&key(NAME), &wish())).await.unwrap();
    let ran = run(&engine, &last.record, Python, "print(n)").await.unwrap();
    let mut seen = raced.unwrap_or_else(|problem| panic!("CARREL_TORTURE_SEED={seed}: {problem}"));
    println!("{} calls, {} times asleep, {} refused", seen.values.len(), seen.slept, seen.refused);
    seen.values.sort_unstable();
    let expected: Vec<u64> = (1..=seen.values.len() as u64).collect();
    assert_eq!(seen.values, expected, "CARREL_TORTURE_SEED={seed}");
    assert_eq!((ran.out, last.note), (seen.values.len().to_string(), None));
    close_all(state.path()).await;
}

async fn race(state: &Path, engines: [Engine; 2], seed: u64, rounds: u64) -> Result<Seen, String> {
    let child = Child::start(&Task::Race { state: state.to_path_buf(), seed: seed ^ 7, rounds });
    let mut contenders = tokio::task::JoinSet::new();
    for (number, engine) in engines.into_iter().enumerate() {
        contenders.spawn(async move { contend(&engine, seed ^ number as u64, rounds).await });
    }
    let mut all = Seen::default();
    let mut first = Ok(());
    while let Some(seen) = contenders.join_next().await {
        match seen.unwrap() {
            Ok(seen) => {
                all.values.extend(seen.values);
                all.slept += seen.slept;
                all.refused += seen.refused;
            }
            Err(problem) => first = first.and(Err(problem)),
        }
    }
    let said = tokio::task::spawn_blocking(move || child.all()).await.unwrap();
    first?;
    for line in said {
        match line.split_once(' ') {
            Some(("value", value)) => all.values.push(value.parse().unwrap()),
            Some(("failed", problem)) => return Err(format!("the other process: {problem}")),
            _ => {}
        }
    }
    Ok(all)
}
