//! The daemon's unix socket, by the client that `http.rs` has.

use std::{
    collections::HashMap,
    path::Path,
    time::{Duration, Instant},
};

use carrel_proto::{guest::Language, problem::Problem};

use super::{Desk, Door, Together, in_threads, question};
use crate::http::{Client, Daemon};

pub(super) struct Socket {
    client: Client,
    ids: HashMap<String, String>,
    daemon: Daemon,
}

impl Socket {
    pub(super) fn start(program: &Path, desk: &Desk) -> Result<Self, Problem> {
        let daemon = Daemon::start(program, desk.world.state())?;
        Ok(Self { client: daemon.unix()?, ids: HashMap::new(), daemon })
    }

    fn id(&self, name: &str) -> Result<&str, Problem> {
        let id = self.ids.get(name).ok_or_else(|| Problem::internal(format!("`{name}` was not opened")))?;
        Ok(id)
    }
}

impl Door for Socket {
    fn first(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        self.client.first(name, language.as_str(), question(language)).map(|(time, _)| time)
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
        let id = self.client.sandbox(name, undo_calls)?;
        self.ids.insert(name.to_owned(), id);
        Ok(())
    }

    fn call(&mut self, _: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        let id = self.id(name)?.to_owned();
        self.client.run_in(&id, language.as_str(), question(language))
    }

    fn flood(&mut self, _: &Desk, name: &str, bytes: u64) -> Result<Duration, Problem> {
        let id = self.id(name)?.to_owned();
        self.client.flood(&id, bytes)
    }

    fn fork(&mut self, _: &Desk, name: &str) -> Result<Duration, Problem> {
        let id = self.id(name)?.to_owned();
        let begun = Instant::now();
        let child = self.client.fork(&id)?;
        self.client.run(&child)?;
        let time = begun.elapsed();
        self.client.end(&child)?;
        Ok(time)
    }

    fn server(&self) -> u32 {
        self.daemon.pid()
    }
}
