//! Whether a time limit ends a call that does all it can to stay: ignoring signals, leaving copies behind in sessions
//! of their own, and attacking the stub that would have to end it.

use std::time::{Duration, Instant};

use carrel_engine::Record;
use carrel_proto::problem::Problem;

use super::{
    arena::{Arena, arm, small_limits, wish},
    attack::{PROGRAM, command, ended, listen},
    host, progress,
    report::Finding,
};

const WAYS: [&str; 5] = ["plain", "stop-runner", "limit-runner", "kill-runner", "limit-init"];
/// What a clinging call is given.
const TIME: Duration = Duration::from_secs(1);
/// The limit, two seconds of grace, and time for a busy machine.
const ENOUGH: Duration = Duration::from_secs(8);
/// A killed process may take so long to be gone.
const DYING: Duration = Duration::from_secs(2);

fn name(way: &str) -> String {
    format!("time-limit-{way}")
}

/// All ways at once, each in a box of its own: they only wait.
pub(super) async fn run(
    arena: &mut Arena<'_>,
    takes: impl Fn(&str, &str) -> bool,
) -> Result<Vec<Finding>, Problem> {
    let mut boxes = Vec::new();
    let mut made = Ok(());
    for way in WAYS.into_iter().filter(|way| takes("processes", &name(way))) {
        progress(&name(way));
        match arena.ring.sandbox(&wish(small_limits())).await {
            Ok(record) => {
                arena.remember(&record);
                made = made.and(arm(arena.engine, &record));
                boxes.push((way, record));
            }
            Err(problem) => made = made.and(Err(problem)),
        }
    }
    let at = |index: usize| {
        let chosen = boxes.get(index).filter(|_| made.is_ok());
        let arena = &*arena;
        async move {
            match chosen {
                Some((way, record)) => Some(cling(arena, way, record).await),
                None => None,
            }
        }
    };
    let all = tokio::join!(at(0), at(1), at(2), at(3), at(4));
    for (_, record) in &boxes {
        arena.engine.close(record, None).await?;
    }
    made?;
    Ok([all.0, all.1, all.2, all.3, all.4].into_iter().flatten().collect())
}

async fn cling(arena: &Arena<'_>, way: &str, record: &Record) -> Finding {
    let marker = format!("cling-{}-{way}", record.id);
    let words = ["cling", way, "--fact", "confirmed_box=1", "--fact"];
    let argv = [PROGRAM]
        .into_iter()
        .chain(words)
        .map(str::to_owned)
        .chain([format!("env_allow={marker}")])
        .collect();
    let start = Instant::now();
    let call = async { listen(arena.engine.exec(record, command(argv, TIME)).await?).await };
    let said = tokio::time::timeout(ENOUGH, call).await;
    let took = start.elapsed();
    let mut left = host::processes_with(&marker);
    while !left.is_empty() && start.elapsed() < took + DYING {
        tokio::time::sleep(Duration::from_millis(50)).await;
        left = host::processes_with(&marker);
    }
    let mut wrong = Vec::new();
    let mut fine = String::new();
    match said {
        Err(_) => {
            wrong.push(format!("the call goes on {took:.1?} after its start, with a limit of {TIME:?}"))
        }
        Ok(Err(problem)) => wrong.push(problem.message),
        Ok(Ok(said)) => {
            let answer = String::from_utf8_lossy(&said.stdout);
            fine = format!(
                "ended after {took:.1?} ({}); the attack was {}",
                ended(&said.outcome),
                answer.trim()
            );
        }
    }
    if !left.is_empty() {
        wrong.push(format!("{} of its processes live on", left.len()));
    }
    Finding::host_judged("processes", &name(way), fine, &wrong)
}
