//! Sandboxes under torture: random steps against a model of what must be true, callers who race, and processes that are killed
//! while they put a sandbox to sleep or wake it: at random moments, and at every step there is.
//!
//! | variable | |
//! |---|---|
//! | `CARREL_TORTURE_SEED` | replays what a failure printed; else the time |
//! | `CARREL_TORTURE_STEPS` | steps of each of the three sandboxes, 300 if unset; thousands are run by hand and at night |
//! | `CARREL_TORTURE_ROUNDS` | rounds of races and kills, 12 if unset |
//!
//! What this host cannot do (standby without a freezer, hibernation without CRIU) is left out, with a printed word.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails here, and one with less to try says why"
)]

mod copies;
mod faults;
mod full;
mod kills;
mod model;
mod race;
mod steps;
mod world;
