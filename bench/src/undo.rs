//! What it costs that calls can be taken back, and taking one back.
//!
//! A copy of the state is made after the reply. A model thinks before its next call, a program may not; after a thought the
//! machine has fallen asleep, which any call pays for. So the cost is the distance to a session that keeps nothing and is
//! called after the same thought.

use std::time::Duration;

use carrel_proto::{guest::Language, message::DEFAULT_UNDO, problem::Problem};

use crate::{
    HEAP,
    figures::{Row, Samples, Target},
    memory,
    sandbox::World,
    spawn,
};

/// Calls per round.
const CALLS: usize = 10;
const THOUGHT: Duration = Duration::from_millis(20);

pub(crate) async fn measure(rounds: usize) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    let [mut floor, mut plain, mut kept, mut kept_large, mut in_a_row, mut undo] =
        [const { Samples::new() }; 6];
    let sessions = [
        world.session("undo-off", 0).await?,
        world.session("undo", DEFAULT_UNDO).await?,
        world.session("undo-large", DEFAULT_UNDO).await?,
    ];
    let mut callers = Vec::new();
    for session in &sessions {
        callers.push(world.caller(session).await?);
    }
    callers[2].call(Language::Python, HEAP).await?;
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        for _ in 0..CALLS {
            for (caller, samples) in callers.iter_mut().zip([&mut plain, &mut kept, &mut kept_large]) {
                tokio::time::sleep(THOUGHT).await;
                samples.add(caller.call(Language::Python, "1").await?);
            }
        }
        let heavy = &mut callers[2];
        heavy.call(Language::Python, "1").await?;
        in_a_row.add(heavy.call(Language::Python, "1").await?);
        tokio::time::sleep(THOUGHT).await;
        undo.add(world.undo(&sessions[2]).await?);
        // The next call waits until the state is ready; that is not what is measured.
        heavy.call(Language::Python, "1").await?;
    }
    let size = memory::of_sandbox(&sessions[1]).total;
    for session in sessions {
        world.close(session).await?;
    }
    let most = Target::AtMost(0.7);
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("warm python call after a thought", &plain, &floor, Target::None),
        Row::ratio("  the same, 3 calls can be taken back", &kept, &floor, Target::None),
        Row::distance("  which costs a call", &kept, &plain, &floor, most),
        Row::ratio("  the same with a heap of 100 MB", &kept_large, &floor, Target::None),
        Row::distance("  which costs a call", &kept_large, &plain, &floor, most),
        Row::ratio("  the same right after another call", &in_a_row, &floor, Target::None),
        Row::ratio("undo with a heap of 100 MB", &undo, &floor, Target::AtMost(5.0)),
        Row::size("idle python session that keeps 3 calls", size, Target::AtMost(14.0)),
    ])
}
