//! Files over HTTP: a daemon on a unix socket, real sandboxes, and clients that behave and that do not.

#![expect(clippy::unwrap_used, reason = "clippy's leave for tests ends at their helpers")]

mod content;
mod hostile;
mod ops;
mod trees;
mod watch;
mod world;
