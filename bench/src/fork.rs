//! Copies of a sandbox that lives, to the first result in the copy. Pages that come back with the first call are on its time.

use std::time::Instant;

use carrel_engine::pool::PoolSize;
use carrel_proto::{guest::Language, message::DEFAULT_UNDO, problem::Problem};

use crate::{
    figures::{Row, Samples, Target},
    sandbox::World,
    spawn,
};

/// A heap of 10 MB, written to.
const HEAP: &str = "heap = bytearray(b'x') * (10 << 20)";
/// Boxes that stand ready, as a daemon has them.
const READY: u32 = 2;
/// By way of CRIU it takes tens of milliseconds: fewer of them say as much.
const SHARE: usize = 4;

pub(crate) async fn measure(rounds: usize) -> Result<Vec<Row>, Problem> {
    let world = World::warm()?;
    let [mut floor, mut fork, mut alone, mut mixed] = [const { Samples::new() }; 4];
    let parent = world.session("fork", DEFAULT_UNDO).await?;
    let other = world.session("fork-mixed", DEFAULT_UNDO).await?;
    world.run(&parent, HEAP).await?;
    world.run(&other, HEAP).await?;
    world.run_in(&other, Language::Bash, "A=1").await?;
    let mut measured = async |parent, figures: &mut Samples| {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        let start = Instant::now();
        let child = world.fork(parent).await?;
        world.run(&child, "len(heap)").await?;
        figures.add(start.elapsed());
        world.close(child).await?;
        // What it was made from goes in the background.
        world.cleared().await
    };
    for round in 0..rounds {
        measured(&parent, &mut alone).await?;
        if round % SHARE == 0 {
            measured(&other, &mut mixed).await?;
        }
    }
    world.keep_pool(PoolSize { floor: READY, ceiling: READY });
    for _ in 0..rounds {
        // All of them: nothing else is under way.
        world.await_ready(Language::Python, READY).await;
        measured(&parent, &mut fork).await?;
    }
    world.end_pool().await;
    world.close_all().await?;
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("fork to first result, python with a heap of 10 MB", &fork, &floor, Target::AtMost(10.0)),
        Row::ratio("  the same where no box stands ready", &alone, &floor, Target::None),
        Row::ratio("  the same with a shell beside it", &mixed, &floor, Target::AtMost(100.0)),
    ])
}
