//! The stories of calls over HTTP: runs, commands, their output and input, sessions, viewers. Every test has a daemon of its own on
//! a unix socket, with real sandboxes behind it ([`world::World`]). Where a test has to wait, it waits for output or for an answer;
//! the clock is only a deadline.

#![expect(clippy::unwrap_used, reason = "clippy's leave for tests ends at their helpers")]

mod endings;
mod input;
mod output;
mod runs;
mod sessions;
mod streams;
mod viewers;
mod world;
