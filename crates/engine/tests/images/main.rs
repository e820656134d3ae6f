//! Sandboxes on disk: packed, moved to other places, sent as files; with real boxes.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails here, and a skip has its reason in the output"
)]

mod exports;
mod hosts;
mod packed;
mod world;
