//! The stories of sessions: what interpreters keep, what calls and commands do to each other, and what is left when
//! they die. Every test has a state directory and an engine of its own ([`world::World`]); nothing here waits by the
//! clock: where a test has to wait, it waits for output, for a lock or for a fifo, and the clock is only a deadline.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy's leave for tests ends at their helpers"
)]

mod artifacts;
mod bash;
mod briefs;
mod calls;
#[cfg(target_arch = "x86_64")]
mod copies;
mod endings;
mod execs;
mod files_back;
mod input;
mod limits;
mod node;
mod output;
mod ports;
mod python;
mod receipts;
mod sessions;
mod terminals;
mod undo;
mod update;
mod variables;
mod world;
