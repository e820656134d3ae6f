//! The agent: carrel's own supervisor, pid 1 of every box. A static program that needs nothing of the root
//! filesystem it runs in.
//!
//! The way of a call: [`serve`] reads a frame, [`requests`] turns it into work, [`interpreter`] or [`process`] starts
//! it, [`calls`] ends it. [`output`] keeps what was printed; [`runner`] is the small process around each piece of
//! user code that can end all of it.
//!
//! Invariants: one thread, so that forking is safe; no user code ever runs in this process; nothing here knows
//! keys, tokens or policy. Started as `stage` it is the program that makes the box (`carrel_jail::stage`).

#![forbid(unsafe_code)]

mod calls;
mod connection;
mod disk;
mod drivers;
mod execs;
mod input;
mod interpreter;
mod meters;
mod output;
mod poll;
mod ports;
mod process;
mod requests;
mod runner;
mod runs;
mod serve;
mod session;
mod spool;
mod streams;
mod undo;
mod usage;
mod variables;

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    match env::args().nth(1).as_deref() {
        Some("stage") => match carrel_jail::stage::run() {
            0 => ExitCode::SUCCESS,
            _ => ExitCode::FAILURE,
        },
        Some("agent") => match serve::run() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                say(&format!("the agent ends: {error}"));
                ExitCode::FAILURE
            }
        },
        _ => {
            say("this program is started by carrel, not by hand");
            ExitCode::from(2)
        }
    }
}

/// Standard error is the agent's log; when it is gone there is nobody to tell.
pub(crate) fn say(text: &str) {
    let _ = rustix::io::write(rustix::stdio::stderr(), format!("{text}\n").as_bytes());
}
