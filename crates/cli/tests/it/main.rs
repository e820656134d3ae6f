//! The program as a user has it. Each test keeps its sandboxes in a directory of its own and closes them.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on says so by panicking"
)]

mod calls;
mod configuration;
mod copies;
mod daemon;
mod daemon_signals;
mod help;
mod hosts;
mod install;
mod mcp;
mod portable;
mod serving;
mod shapes;
mod sleep;
mod support;
mod survival;
mod terminals;
mod through;
