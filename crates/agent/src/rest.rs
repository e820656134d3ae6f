//! Being put to sleep: the agent says whether it is idle, and then lets no clock of its own end the box.
//!
//! What the engine does and why it asks twice is at the head of its module `sleep`. The agent cannot see that it is frozen;
//! it only sees, afterwards, that time has passed. So a rest ends by itself: whoever is meant to sleep and runs all the same
//! was woken, and its idle time begins anew.

use std::time::{Duration, Instant};

use carrel_proto::message::{Rest, What};

use crate::serve::Agent;

/// Between the answer and the freezing are a few system calls of another process.
const RUNNING: Duration = Duration::from_secs(2);
/// Who has connected so recently and asked for nothing yet is about to. Longer than any caller takes from its greeting to its request.
const ARRIVING_MS: u128 = 2_000;

impl Agent {
    /// `idle`: since when nobody wanted anything. `wanted`: for how long nobody may have; `None`: whatever is going on.
    /// In either case not while somebody is arriving, who would wait for an answer without knowing why.
    pub(crate) fn lie_down(&mut self, asker: u32, idle: Duration, wanted: Option<u64>) -> Rest {
        let usage = self.usage(idle);
        let others = || self.connections.iter().filter(|(number, _)| **number != asker);
        let waits = |number: u32| {
            self.waits.iter().any(|wait| wait.connection == number)
                || self.writes.iter().any(|write| write.connection == number)
        };
        let reading =
            others().filter(|(number, caller)| !caller.followers.is_empty() || waits(**number)).count();
        let runs = self
            .execs
            .values()
            .filter(|exec| exec.outcome().is_none() && matches!(exec.what, What::Run { .. }))
            .count();
        let is_new = |since: Instant| since.elapsed().as_millis() < ARRIVING_MS;
        let arriving = others().any(|(_, caller)| caller.arriving.is_some_and(is_new));
        let idle = |wanted: u64| usage.running == 0 && usage.idle_ms >= wanted && reading == 0;
        let rests = !arriving && wanted.is_none_or(idle);
        if rests {
            self.rest = Some(Instant::now());
        }
        Rest { rests, calls: u32::try_from(runs + reading).unwrap_or(u32::MAX), usage }
    }

    /// Until when a rest goes on at least. One that is over was slept through, or came to nothing.
    pub(crate) fn resting(&mut self, now: Instant) -> Option<Instant> {
        let until = self.rest? + RUNNING;
        if until > now {
            return Some(until);
        }
        self.rest = None;
        self.last_activity = now;
        None
    }
}
