//! Sandboxes that stand ready: how long a claim takes to its first result, how many a second in a row, and how a call fares
//! among neighbours.

use std::time::Duration;

use carrel_engine::pool::PoolSize;
use carrel_proto::{guest::Language, problem::Problem};

use crate::{
    figures::{Row, Samples, Target},
    sandbox::World,
    smallest_code, spawn,
};

/// Boxes that stand ready.
const SIZE: u32 = 16;
/// Sandboxes that are made in a row, by so many callers at once.
const ROW: usize = 300;
const SHORT_ROW: usize = 60;
const CALLERS: usize = 4;
/// Neighbours, and calls beside them.
const IDLE: usize = 50;
const BUSY: usize = 2;
const CALLS: usize = 1000;

pub(crate) async fn measure(rounds: usize, short: bool) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    world.keep_pool(PoolSize { floor: 0, ceiling: SIZE });
    let mut floor = Samples::new();
    let mut claims = [const { Samples::new() }; 3];
    let mut close = Samples::new();
    let languages = [Language::Python, Language::Bash, Language::Node];
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        for (slot, language) in claims.iter_mut().zip(languages) {
            if !world.has(language) {
                continue;
            }
            if let Some((first, last)) = world.claim(language, smallest_code(language)).await? {
                slot.add(first);
                close.add(last);
            }
        }
    }
    let count = if short { SHORT_ROW } else { ROW };
    let rate = world.in_a_row(count, CALLERS).await?;
    world.end_pool().await;
    let (alone, beside) = neighbours(&world, if short { CALLS / 5 } else { CALLS }).await?;
    world.close_all().await?;
    let mut rows = vec![Row::floor(&floor)];
    // Half of what one that is made takes, for node.
    let targets = [Target::AtMost(0.5), Target::AtMost(3.0), Target::AtMost(20.0)];
    for ((language, samples), target) in languages.into_iter().zip(&claims).zip(targets) {
        let name = format!("claim to first result, {}", language.as_str());
        rows.push(Row::ratio(&name, samples, &floor, target));
    }
    rows.push(Row::ratio("close, with the clearing up left to itself", &close, &floor, Target::None));
    rows.push(Row::per_second(
        "python sandboxes made, called and closed",
        count,
        rate,
        Target::AtLeast(150.0),
    ));
    rows.push(Row::ratio("warm python call, alone", &alone, &floor, Target::AtMost(0.25)));
    rows.push(Row::spread("  p99 to p50 beside 50 idle and 2 busy", &beside, Target::AtMost(5.0)));
    Ok(rows)
}

/// Warm calls of one sandbox, alone and beside others.
async fn neighbours(world: &World, calls: usize) -> Result<(Samples, Samples), Problem> {
    let session = world.session("measured", 0).await?;
    let mut caller = world.caller(&session).await?;
    let (mut alone, mut beside) = (Samples::new(), Samples::new());
    for _ in 0..calls {
        alone.add(caller.call(Language::Python, "1").await?);
    }
    for number in 0..IDLE {
        let idle = world.session(&format!("idle-{number}"), 0).await?;
        world.run(&idle, "1").await?;
    }
    for number in 0..BUSY {
        let record = world.session(&format!("busy-{number}"), 0).await?;
        world.start(&record, &["sh", "-c", "while :; do :; done"]).await?;
    }
    for _ in 0..calls {
        beside.add(caller.call(Language::Python, "1").await?);
        // As callers do, who have something to do with an answer.
        tokio::time::sleep(Duration::from_micros(200)).await;
    }
    Ok((alone, beside))
}
