//! The agent: carrel's own supervisor, pid 1 of every box. A static program that needs nothing of the root
//! filesystem it runs in.
//!
//! The way of a call: [`serve`] reads a frame, [`requests`] turns it into work, [`interpreter`] or [`process`] starts
//! it, [`calls`] ends it. [`output`] keeps what was printed; [`runner`] is the small process around each piece of
//! user code that can end all of it.
//!
//! Invariants: one thread, so that forking is safe; no user code ever runs in this process; nothing here knows
//! keys, tokens or policy. Started as `stage` it is the program that makes the box (`carrel_jail::stage`), as
//! `visit` the one that takes another program to it (`carrel_jail::visit`).

#![forbid(unsafe_code)]

mod brief;
mod calls;
mod changes;
mod connection;
mod copies;
mod disk;
mod drivers;
mod execs;
mod files_back;
mod forks;
mod init;
mod input;
mod interpreter;
mod listeners;
mod meters;
mod output;
mod poll;
mod ports;
mod process;
mod ready;
mod receipt;
mod requests;
mod rest;
mod runner;
mod runs;
mod serve;
mod session;
mod shadow;
mod sleep;
mod spool;
mod streams;
mod undo;
mod usage;
mod variables;

use std::{env, io, process::ExitCode};

use carrel_jail::sys::SingleThread;
use carrel_proto::guest::AgentConfig;

fn main() -> ExitCode {
    let code = match env::args().nth(1).as_deref() {
        Some("stage") => carrel_jail::stage::run(serve),
        Some("visit") => carrel_jail::visit::run(),
        Some("init") => init::run_renewed(),
        Some("runner") => runner::run_renewed(),
        Some("agent") => told(serve::run()),
        _ => {
            say("this program is started by carrel, not by hand");
            2
        }
    };
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The agent in the process of its stage.
fn serve(thread: SingleThread, config: AgentConfig) -> i32 {
    told(serve::run_with(thread, config))
}

fn told(ended: io::Result<()>) -> i32 {
    match ended {
        Ok(()) => 0,
        Err(error) => {
            say(&format!("the agent ends: {error}"));
            1
        }
    }
}

/// Standard error is the agent's log; when it is gone there is nobody to tell.
pub(crate) fn say(text: &str) {
    let _ = rustix::io::write(rustix::stdio::stderr(), format!("{text}\n").as_bytes());
}
