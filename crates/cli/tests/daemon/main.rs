//! The daemon as many callers meet it, through its unix socket and nothing else.
//!
//! These take the whole machine: .config/nextest.toml gives them the others' places too.

mod chaos;
mod client;
mod load;
mod patience;
mod server;
mod tenants;
