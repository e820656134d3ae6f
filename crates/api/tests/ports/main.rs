//! Ports, share links, events, tokens and the daemon's own matters, through its doors and with real sandboxes.

mod events;
mod matters;
mod proxy;
mod share;
mod telemetry;
mod world;
