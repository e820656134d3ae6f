//! Sandboxes on disk: written and woken. Pages that come back with the first call are on its time.

use std::time::{Duration, Instant};

use carrel_engine::Record;
use carrel_proto::{
    guest::Language,
    problem::{Code, Problem},
};

use crate::{
    HEAP,
    figures::{Row, Samples, Target},
    sandbox::World,
    spawn,
};

/// CRIU takes tens of milliseconds: fewer of them say as much.
const SHARE: usize = 4;

pub(crate) async fn measure(rounds: usize) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    let [mut floor, mut write, mut wake, mut write_large, mut wake_large] = [const { Samples::new() }; 5];
    let fresh = world.session("sleep", 0).await?;
    let large = world.session("sleep-large", 0).await?;
    world.run(&fresh, "x = 1").await?;
    world.run(&large, HEAP).await?;
    for _ in 0..(rounds / SHARE).max(3) {
        for _ in 0..8 {
            floor.add(spawn("/bin/true", &[]));
        }
        let Some((down, up)) = sleep_and_wake(&world, &fresh, "sleep").await? else {
            for record in [fresh, large] {
                world.close(record).await?;
            }
            return Ok(Vec::new());
        };
        write.add(down);
        wake.add(up);
        if let Some((down, up)) = sleep_and_wake(&world, &large, "sleep-large").await? {
            write_large.add(down);
            wake_large.add(up);
        }
    }
    for record in [fresh, large] {
        world.close(record).await?;
    }
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("hibernate, python", &write, &floor, Target::AtMost(60.0)),
        Row::ratio("wake to first result, python", &wake, &floor, Target::AtMost(45.0)),
        Row::ratio("hibernate with a heap of 100 MB", &write_large, &floor, Target::None),
        Row::ratio("wake to first result with a heap of 100 MB", &wake_large, &floor, Target::AtMost(160.0)),
    ])
}

/// How long it takes to be written, and to answer again. `None`: this host cannot do it.
async fn sleep_and_wake(
    world: &World,
    record: &Record,
    name: &str,
) -> Result<Option<(Duration, Duration)>, Problem> {
    let start = Instant::now();
    match world.hibernate(record).await {
        Ok(()) => {}
        Err(problem) if problem.code == Code::Unsupported => return Ok(None),
        Err(problem) => return Err(problem),
    }
    let down = start.elapsed();
    Ok(Some((down, world.awake_by_name(name, Language::Python).await?)))
}
