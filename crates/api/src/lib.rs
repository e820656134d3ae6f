//! Front doors over the engine, one folder per protocol. They translate and guard; what a sandbox is, the engine knows.
//!
//! Deliberately absent: the caller's environment, home directory and terminal, which come in as values.

#![forbid(unsafe_code)]

pub mod kept;
pub mod mcp;
pub mod reply;
pub mod rest;
pub mod telemetry;
