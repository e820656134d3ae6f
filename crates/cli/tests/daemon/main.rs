//! The daemon as many callers meet it, through its unix socket and nothing else.
//!
//! These take the whole machine: .config/nextest.toml gives them the others' places too.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on says so by panicking")]

mod chaos;
mod client;
mod load;
mod patience;
mod pool;
mod server;
mod tenants;
