//! How much memory many sessions take, and what it consists of.

use std::{
    collections::BTreeMap,
    fs,
    time::{Duration, Instant},
};

use carrel_engine::Record;
use carrel_proto::problem::{Code, Problem};

use crate::{
    figures::{Row, Target},
    memory,
    sandbox::World,
};

const COUNT: usize = 1000;
/// Memory of the kernel's is given back a moment after its user has gone.
const SETTLED: Duration = Duration::from_secs(2);

/// Live python sessions that have each run code, and the same in standby.
pub(crate) async fn measure(count: Option<usize>) -> Result<Vec<Row>, Problem> {
    let count = count.unwrap_or(COUNT).max(1);
    let world = World::open()?;
    // What is needed once, however many there are.
    let first = world.session("first", 0).await?;
    world.run(&first, "1").await?;
    let before = kernel();
    let engine = memory::resident(std::process::id());
    let mut sessions = Vec::new();
    let begun = Instant::now();
    let made = make(&world, count, &mut sessions).await;
    let time = begun.elapsed();
    let rows = match made {
        Ok(()) => {
            tokio::time::sleep(SETTLED).await;
            let mut rows = figures(&sessions, before, engine, time);
            rows.push(standby(&world, &sessions).await?);
            Ok(rows)
        }
        Err(problem) => Err(Problem::new(
            problem.code,
            format!("after {} sandboxes: {}", sessions.len(), problem.message),
        )
        .hint(problem.hint)),
    };
    world.close_all().await?;
    rows
}

async fn make(world: &World, count: usize, sessions: &mut Vec<Record>) -> Result<(), Problem> {
    for number in 0..count {
        let record = world.session(&format!("dense-{number}"), 0).await?;
        sessions.push(record.clone());
        world.run(&record, "x = 1").await?;
    }
    Ok(())
}

fn figures(sessions: &[Record], before: u64, engine: u64, time: Duration) -> Vec<Row> {
    let count = sessions.len() as u64;
    let mut parts: BTreeMap<&str, memory::Part> = BTreeMap::new();
    for session in sessions {
        for (name, part) in memory::parts(session) {
            parts.entry(name).or_default().add(&part);
        }
    }
    let processes: u64 = parts.values().map(|part| part.proportional).sum();
    let kernel = kernel().saturating_sub(before);
    let grown = memory::resident(std::process::id()).saturating_sub(engine);
    let each = |name: &str, bytes: u64, target| Row::size(name, bytes / count, target);
    let mut rows = vec![
        Row::per_second("python sessions made, one after another", sessions.len(), time, Target::None),
        each("a python session in all", processes + kernel, Target::AtMost(3.5)),
        each("  of it the kernel's (slab, stacks, tables)", kernel, Target::None),
    ];
    for (name, part) in &parts {
        rows.push(each(&format!("  of it {name}"), part.proportional, Target::None));
        rows.push(each("    private", part.private, Target::None));
    }
    rows.push(Row::resident("the engine's process, grown by", grown, Target::None));
    rows
}

/// How long all of them take to fall asleep.
async fn standby(world: &World, sessions: &[Record]) -> Result<Row, Problem> {
    let begun = Instant::now();
    let mut count = 0;
    for session in sessions {
        match world.standby(session).await {
            Ok(()) => count += 1,
            Err(problem) if problem.code == Code::Unsupported => break,
            Err(problem) => return Err(problem),
        }
    }
    Ok(Row::per_second("put into standby, one after another", count, begun.elapsed(), Target::None))
}

/// What the kernel itself uses.
fn kernel() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
    };
    ["SUnreclaim", "KernelStack", "PageTables", "Percpu"].into_iter().map(field).sum()
}
