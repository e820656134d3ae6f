//! The engine in this process, as an embedding program or the command line without a daemon has it.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use carrel_proto::{guest::Language, problem::Problem};
use tokio::task::JoinSet;

use super::{Desk, Door, Together, question};
use crate::sandbox::Caller;

/// Lines that stay open between calls, by session.
#[derive(Default)]
pub(super) struct Embedded {
    lines: HashMap<String, Caller>,
}

impl Door for Embedded {
    fn first(&mut self, desk: &Desk, _: &str, language: Language) -> Result<Duration, Problem> {
        desk.runtime.block_on(desk.world.cold(language, question(language)))
    }

    fn together(&mut self, desk: &Desk, wanted: &Together) -> Result<Vec<Duration>, Problem> {
        desk.runtime.block_on(async {
            let mut ways = JoinSet::new();
            for share in wanted.shares() {
                let (world, end) = (std::sync::Arc::clone(&desk.world), wanted.end);
                ways.spawn(async move {
                    let mut times = Vec::new();
                    for name in share {
                        let (record, time) = world.first(&name, Language::Python).await?;
                        times.push(time);
                        if end {
                            world.close(record).await?;
                        }
                    }
                    Ok::<_, Problem>(times)
                });
            }
            let mut times = Vec::new();
            while let Some(way) = ways.join_next().await {
                times.extend(way.map_err(Problem::internal)??);
            }
            Ok(times)
        })
    }

    fn open(&mut self, desk: &Desk, name: &str, undo_calls: u32) -> Result<(), Problem> {
        let caller = desk.runtime.block_on(async {
            let record = desk.world.session(name, undo_calls).await?;
            desk.world.caller(&record).await
        })?;
        self.lines.insert(name.to_owned(), caller);
        Ok(())
    }

    fn call(&mut self, desk: &Desk, name: &str, language: Language) -> Result<Duration, Problem> {
        let line = self.lines.get_mut(name);
        let line = line.ok_or_else(|| Problem::internal(format!("`{name}` was not opened")))?;
        desk.runtime.block_on(line.call(language, question(language)))
    }

    fn wake(&mut self, desk: &Desk, name: &str) -> Result<Duration, Problem> {
        desk.runtime.block_on(desk.world.awake_by_name(name, Language::Python))
    }

    fn flood(&mut self, desk: &Desk, name: &str, bytes: u64) -> Result<Duration, Problem> {
        let record = desk.known(name)?;
        desk.runtime.block_on(desk.world.flood(&record, bytes)).map(|(_, time)| time)
    }

    fn fork(&mut self, desk: &Desk, name: &str) -> Result<Duration, Problem> {
        let parent = desk.known(name)?;
        desk.runtime.block_on(async {
            let begun = Instant::now();
            let child = desk.world.fork(&parent).await?;
            desk.world.run(&child, "len(heap)").await?;
            let time = begun.elapsed();
            desk.world.close(child).await?;
            Ok(time)
        })
    }

    fn server(&self) -> u32 {
        std::process::id()
    }
}
