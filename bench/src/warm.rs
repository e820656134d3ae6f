//! Warm parents: a copied python against one that was started, in time and in memory.

use carrel_engine::Record;
use carrel_proto::{guest::Language, problem::Problem};

use crate::{
    figures::{Row, Samples, Target},
    memory,
    sandbox::World,
    smallest_code, spawn,
};

/// Sessions that live at once: what they share shows only in numbers.
const CROWD: usize = 100;

pub(crate) async fn measure(rounds: usize) -> Result<Vec<Row>, Problem> {
    let (warm, cold) = (World::warm()?, World::cold_only()?);
    let (mut floor, mut copied, mut started) = (Samples::default(), Samples::default(), Samples::default());
    let code = smallest_code(Language::Python);
    for world in [&warm, &cold] {
        world.cold(Language::Python, code).await?;
    }
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        copied.add(warm.cold(Language::Python, code).await?);
        started.add(cold.cold(Language::Python, code).await?);
    }
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("create to first python result, copied", &copied, &floor, Target::None),
        Row::ratio("  the same, started", &started, &floor, Target::None),
        Row::size(&format!("{CROWD} python sessions, each, copied"), crowd(&warm).await?, Target::None),
        Row::size("  the same, started", crowd(&cold).await?, Target::None),
    ])
}

/// What each of many sessions takes, in which code has run.
async fn crowd(world: &World) -> Result<u64, Problem> {
    let mut all: Vec<Record> = Vec::new();
    for number in 0..CROWD {
        let session = world.session(&format!("crowd-{number}"), 0).await?;
        let mut caller = world.caller(&session).await?;
        caller.call(Language::Python, "x = [str(n) for n in range(1000)]; len(x)").await?;
        all.push(session);
    }
    let total: u64 = all.iter().map(|record| memory::of_sandbox(record).total).sum();
    for record in all {
        world.close(record).await?;
    }
    Ok(total / CROWD as u64)
}
