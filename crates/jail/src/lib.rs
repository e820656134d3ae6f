//! Linux containment: one mechanism per file.
//!
//! On the host, the backend describes a box ([`stage::BoxSpec`]) and starts the *stage*: the agent's program in
//! a single-threaded process of its own, which makes the namespaces, assembles the root and becomes the agent
//! ([`stage::run`]). In the box, the agent uses [`session`] for the inner namespaces and [`confine`] for what user
//! code loses before its first instruction.
//!
//! Invariants:
//! - all `unsafe` code is in [`sys`], and in [`trace`] for looking at another process; of the product's other crates only
//!   the graft has some;
//! - no process is forked from a threaded process: [`sys::SingleThread`] is the witness;
//! - nothing here knows languages, sessions' names, keys or policy of the engine.

pub mod caps;
pub mod cgroup;
pub mod confine;
#[cfg_attr(not(target_arch = "x86_64"), path = "no_image.rs")]
pub mod image;
pub mod landlock;
pub mod mounts;
pub mod net;
pub mod seccomp;
pub mod session;
pub mod stage;
pub mod sys;
#[cfg(target_arch = "x86_64")]
pub mod trace;
pub mod tree;
pub mod userns;
pub mod visit;
pub mod work;
pub mod workspace;
