//! Ports, share links, events, tokens and the daemon's own matters, through its doors and with real sandboxes.

#![expect(clippy::unwrap_used, reason = "clippy's leave for tests ends at their helpers")]

mod audit;
mod events;
mod guards;
mod matters;
mod proxy;
mod share;
mod snapshots;
mod telemetry;
mod world;
