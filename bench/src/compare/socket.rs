//! The daemon's unix socket, by the client that `http.rs` has.

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use carrel_proto::{guest::Language, problem::Problem};

use super::{Desk, Door, Together, in_threads, question};
use crate::http::{Client, Daemon};

/// The daemon closes connections that nobody uses, and between two measures come those of all other systems.
const FRESH: Duration = Duration::from_secs(2);

pub(super) struct Socket {
    line: Client,
    used: Instant,
    ids: HashMap<String, String>,
    daemon: Daemon,
}

impl Socket {
    pub(super) fn start(program: &Path, desk: &Desk) -> Result<Self, Problem> {
        let daemon = Daemon::start(program, desk.world.state())?;
        Ok(Self { line: daemon.unix()?, used: Instant::now(), ids: HashMap::new(), daemon })
    }

    /// An open connection; what a new one takes is on nobody's clock.
    fn client(&mut self) -> Result<&mut Client, Problem> {
        if self.used.elapsed() > FRESH {
            self.line = self.daemon.unix()?;
        }
        self.used = Instant::now();
        Ok(&mut self.line)
    }

    fn id(&self, name: &str) -> Result<String, Problem> {
        self.ids.get(name).cloned().ok_or_else(|| Problem::internal(format!("`{name}` was not opened")))
    }
}

impl Door for Socket {
    fn first(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.client()?.first(name, language.as_str(), question(language)).map(|(time, _)| time)
    }

    fn together(&mut self, _: &Desk, wanted: &Together) -> Result<Vec<Duration>, Problem> {
        let lines: Result<Vec<_>, Problem> =
            wanted.shares().into_iter().map(|share| Ok((self.daemon.unix()?, share))).collect();
        in_threads(lines?, |client, name| {
            let (time, id) = client.first(name, "python", question(Language::Python))?;
            if wanted.end {
                client.end(&id)?;
            }
            Ok(time)
        })
    }

    fn open(&mut self, _: &Desk, name: &str, undo_calls: u32) -> Result<(), Problem> {
        let id = self.client()?.sandbox(name, undo_calls)?;
        self.ids.insert(name.to_owned(), id);
        Ok(())
    }

    fn call(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        let id = self.id(name)?;
        self.client()?.run_in(&id, language.as_str(), question(language))
    }

    fn flood(&mut self, _: &Desk, name: &str, bytes: u64) -> Result<Duration, Problem> {
        let id = self.id(name)?;
        self.client()?.flood(&id, bytes)
    }

    fn fork(&mut self, _: &Desk, name: &str) -> Result<Duration, Problem> {
        let id = self.id(name)?;
        let client = self.client()?;
        let begun = Instant::now();
        let child = client.fork(&id)?;
        client.run(&child)?;
        let time = begun.elapsed();
        client.end(&child)?;
        Ok(time)
    }

    fn server(&self) -> u32 {
        self.daemon.pid()
    }
}
