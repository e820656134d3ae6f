//! Sandboxes on disk: written, woken, forked. Pages that come back with the first call are on its time.

use std::time::{Duration, Instant};

use carrel_engine::Record;
use carrel_proto::{
    guest::Language,
    message::DEFAULT_UNDO,
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

/// A heap of 10 MB, written to.
const SMALL_HEAP: &str = "heap = bytearray(b'x') * (10 << 20)";

pub(crate) async fn measure(rounds: usize) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    let [mut floor, mut write, mut wake, mut write_large, mut wake_large, mut fork, mut fork_mixed] =
        [const { Samples::new() }; 7];
    let fresh = world.session("sleep", 0).await?;
    let large = world.session("sleep-large", 0).await?;
    let parent = world.session("sleep-fork", DEFAULT_UNDO).await?;
    let mixed = world.session("sleep-fork-mixed", DEFAULT_UNDO).await?;
    world.run(&fresh, "x = 1").await?;
    world.run(&large, HEAP).await?;
    world.run(&parent, SMALL_HEAP).await?;
    world.run(&mixed, SMALL_HEAP).await?;
    world.run_in(&mixed, Language::Bash, "A=1").await?;
    for _ in 0..(rounds / SHARE).max(3) {
        for _ in 0..8 {
            floor.add(spawn("/bin/true", &[]));
        }
        let Some((down, up)) = sleep_and_wake(&world, &fresh, "sleep").await? else {
            for record in [fresh, large, parent, mixed] {
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
        for (parent, figures) in [(&parent, &mut fork), (&mixed, &mut fork_mixed)] {
            let start = Instant::now();
            let child = world.fork(parent).await?;
            world.run(&child, "len(heap)").await?;
            figures.add(start.elapsed());
            world.close(child).await?;
        }
    }
    for record in [fresh, large, parent, mixed] {
        world.close(record).await?;
    }
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("hibernate, python", &write, &floor, Target::AtMost(60.0)),
        Row::ratio("wake to first result, python", &wake, &floor, Target::AtMost(45.0)),
        Row::ratio("hibernate with a heap of 100 MB", &write_large, &floor, Target::None),
        Row::ratio("wake to first result with a heap of 100 MB", &wake_large, &floor, Target::AtMost(160.0)),
        Row::ratio("fork to first result, python with a heap of 10 MB", &fork, &floor, Target::AtMost(10.0)),
        Row::ratio("the same with a shell beside it", &fork_mixed, &floor, Target::None),
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
