//! The MCP door, on pipes and over HTTP, by the clients that `mcp.rs` has. A session is made by the first call that names it; the
//! protocol has no word for its end.

use std::{path::Path, time::Duration};

use carrel_proto::{guest::Language, problem::Problem};

use super::{Desk, Door, Together, cannot, in_threads, question};
use crate::mcp::{Http, Pipes};

/// What the two transports have in common.
pub(super) trait Client: Sized {
    /// Makes sure, on nobody's clock, that there is a connection.
    fn refresh(&mut self) -> Result<(), Problem> {
        Ok(())
    }

    fn start(program: &Path, state: &Path) -> Result<Self, Problem>;
    fn run_in(&mut self, session: &str, environment: &str, code: &str) -> Result<Duration, Problem>;
    fn together(&mut self, wanted: &Together, code: &str) -> Result<Vec<Duration>, Problem>;
    fn pid(&self) -> u32;
}

impl Client for Pipes {
    fn start(program: &Path, state: &Path) -> Result<Self, Problem> {
        Self::start(program, state).map(|(server, _)| server)
    }

    fn run_in(&mut self, session: &str, environment: &str, code: &str) -> Result<Duration, Problem> {
        self.run_in(session, environment, code)
    }

    fn together(&mut self, wanted: &Together, code: &str) -> Result<Vec<Duration>, Problem> {
        self.together(&wanted.names, wanted.ways, code)
    }

    fn pid(&self) -> u32 {
        self.pid()
    }
}

impl Client for Http {
    fn refresh(&mut self) -> Result<(), Problem> {
        self.renew()
    }

    fn start(program: &Path, state: &Path) -> Result<Self, Problem> {
        Self::start(program, state)
    }

    fn run_in(&mut self, session: &str, environment: &str, code: &str) -> Result<Duration, Problem> {
        self.run_in(session, environment, code)
    }

    fn together(&mut self, wanted: &Together, code: &str) -> Result<Vec<Duration>, Problem> {
        let lines: Result<Vec<_>, Problem> =
            wanted.shares().into_iter().map(|share| Ok((self.another()?, share))).collect();
        in_threads(lines?, |line, name| line.run_in(name, "python", code))
    }

    fn pid(&self) -> u32 {
        self.pid()
    }
}

pub(super) struct Mcp<C>(C);

impl<C: Client> Mcp<C> {
    pub(super) fn start(program: &Path, desk: &Desk) -> Result<Self, Problem> {
        C::start(program, desk.world.state()).map(Self)
    }
}

impl<C: Client> Door for Mcp<C> {
    fn first(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.0.refresh()?;
        self.0.run_in(name, language.as_str(), question(language))
    }

    fn together(&mut self, _: &Desk, wanted: &Together) -> Result<Vec<Duration>, Problem> {
        self.0.together(wanted, question(Language::Python))
    }

    fn open(&mut self, desk: &Desk, name: &str, undo_calls: u32) -> Result<(), Problem> {
        // The number is the server's, not the call's; this one was started without.
        if undo_calls > 0 {
            return Err(cannot("measured through the engine and the socket"));
        }
        self.first(desk, name, Language::Python).map(drop)
    }

    fn call(&mut self, desk: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.first(desk, name, language)
    }

    fn server(&self) -> u32 {
        self.0.pid()
    }
}
