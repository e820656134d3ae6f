//! The MCP door, on pipes and over HTTP, by the clients that `mcp.rs` has. A session is made by the first call that names it; the
//! protocol has no word for its end.

use std::{path::Path, time::Duration};

use carrel_proto::{guest::Language, problem::Problem};

use super::{Desk, Door, Together, cannot, in_threads, question};
use crate::mcp::{Http, Pipes};

fn without_undo(undo_calls: u32) -> Result<(), Problem> {
    // The number is the server's, not the call's; this one was started without.
    if undo_calls == 0 { Ok(()) } else { Err(cannot("measured through the engine and the socket")) }
}

pub(super) struct Stdio(Pipes);

impl Stdio {
    pub(super) fn start(program: &Path, desk: &Desk) -> Result<Self, Problem> {
        Pipes::start(program, desk.world.state()).map(|(server, _)| Self(server))
    }
}

impl Door for Stdio {
    fn first(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.0.run_in(name, language.as_str(), question(language))
    }

    fn together(&mut self, _: &Desk, wanted: &Together) -> Result<Vec<Duration>, Problem> {
        self.0.together(&wanted.names, wanted.ways, question(Language::Python))
    }

    fn open(&mut self, _: &Desk, name: &str, undo_calls: u32) -> Result<(), Problem> {
        without_undo(undo_calls)?;
        self.0.run(name).map(drop)
    }

    fn call(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.0.run_in(name, language.as_str(), question(language))
    }

    fn server(&self) -> u32 {
        self.0.pid()
    }
}

pub(super) struct Web(Http);

impl Web {
    pub(super) fn start(program: &Path, desk: &Desk) -> Result<Self, Problem> {
        Http::start(program, desk.world.state()).map(Self)
    }
}

impl Door for Web {
    fn first(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.0.run_in(name, language.as_str(), question(language))
    }

    fn together(&mut self, _: &Desk, wanted: &Together) -> Result<Vec<Duration>, Problem> {
        let lines: Result<Vec<_>, Problem> =
            wanted.shares().into_iter().map(|share| Ok((self.0.another()?, share))).collect();
        in_threads(lines?, |line, name| line.run_in(name, "python", question(Language::Python)))
    }

    fn open(&mut self, _: &Desk, name: &str, undo_calls: u32) -> Result<(), Problem> {
        without_undo(undo_calls)?;
        self.0.run(name).map(drop)
    }

    fn call(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.0.run_in(name, language.as_str(), question(language))
    }

    fn server(&self) -> u32 {
        self.0.pid()
    }
}
