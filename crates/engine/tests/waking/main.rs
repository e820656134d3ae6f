//! What must be true of a sandbox that has come back from disk beside its state: its clocks, its generators of random numbers,
//! its connections.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails here, and one with less to try says why"
)]

mod clocks;
mod connections;
mod generators;
#[path = "../torture/world.rs"]
#[allow(dead_code, reason = "what torture needs as well, and more than is needed here")]
mod world;

use carrel_engine::{Engine, Record};
use carrel_proto::guest::Language;

/// A state directory and an engine; none, with the reason in the output, where memory cannot be saved.
fn with_memory() -> Option<(tempfile::TempDir, Engine)> {
    let state = tempfile::tempdir().unwrap();
    let engine = world::open(state.path());
    if let Err(problem) = engine.can_hibernate() {
        println!("skipped: {}", problem.message);
        return None;
    }
    Some((state, engine))
}

/// Runs code that must end well, and gives what it printed.
async fn run(engine: &Engine, record: &Record, language: Language, code: &str) -> String {
    let ran = world::run(engine, record, language, code).await.unwrap();
    assert_eq!(ran.outcome.exit_code, 0, "{code}: {ran:?}");
    ran.out
}
