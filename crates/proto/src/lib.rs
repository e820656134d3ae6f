//! The nouns and the wire format that host and guest share. No I/O happens here.
//!
//! Read in this order: [`id`] (names), [`limits`], [`outcome`] (what became of a call), [`problem`] (errors),
//! [`message`] (requests and events), [`frame`] (how those become bytes), [`guest`] (what an agent is told
//! when its box is made). [`files`] has the file operations, [`brief`] where a session stands.
//!
//! Invariant: everything an agent sends is untrusted. A frame has a largest size that is checked before
//! anything is allocated, and a frame that does not parse ends that one connection.

#![forbid(unsafe_code)]

pub mod brief;
pub mod files;
pub mod frame;
pub mod guest;
pub mod id;
pub mod limits;
pub mod message;
pub mod outcome;
pub mod problem;
#[cfg(feature = "schema")]
mod schema;
