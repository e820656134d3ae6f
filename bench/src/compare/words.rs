//! What is done for each word of the comparison, whatever the door.

use std::time::{Duration, Instant};

use carrel_engine::Record;
use carrel_proto::{
    guest::Language,
    message::DEFAULT_UNDO,
    problem::{Code, Problem},
};
use serde_json::{Value, json};

use super::{Desk, Door, Together, cannot, seconds};
use crate::sandbox::World;

/// Most samples that one line may ask for, sessions at a time, and bytes of output: a mistyped number shall not take the machine.
const MAX_SAMPLES: usize = 10_000;
const MAX_SESSIONS: usize = 200;
const MAX_FLOOD: u64 = 1 << 30;
/// How long a sandbox that shall be written to disk may be found busy, and how often it is tried.
const ARRIVING: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Of a fork's heap, as in the rows of `sleep.rs`.
const HEAP: &str = "heap = bytearray(10 << 20)";

pub(super) struct Adapter {
    desk: Desk,
    door: Box<dyn Door>,
    /// So that no two names are the same.
    made: usize,
    /// Sessions that stay for calls, and those that idle to be weighed.
    opened: Vec<&'static str>,
    idle: Vec<String>,
}

impl Adapter {
    pub(super) fn new(desk: Desk, door: Box<dyn Door>) -> Self {
        Self { desk, door, made: 0, opened: Vec::new(), idle: Vec::new() }
    }

    /// Ends all that was made. The server first: what it is still making is found and ended with the rest.
    pub(super) fn end(self) -> Result<(), Problem> {
        drop(self.door);
        self.desk.close_all()
    }

    pub(super) fn answer(&mut self, words: &[&str]) -> Result<Value, Problem> {
        match words {
            ["create", language] => self.create(language),
            ["warm", "python", count] => self.warm("warm", 0, Language::Python, count),
            ["warm", "bash", count] => self.warm("warm", 0, Language::Bash, count),
            ["warm", "undo", count] => self.warm("kept", DEFAULT_UNDO, Language::Python, count),
            ["together", ways, count] => self.together(number(ways)?, number(count)?, true),
            ["burst", count] => self.together(number(count)?, number(count)?, false),
            ["flood", bytes] => {
                let bytes = number(bytes)? as u64;
                if bytes > MAX_FLOOD {
                    return Err(Problem::new(Code::InvalidArgument, "that is too much output"));
                }
                self.stand("flood", 0)?;
                Ok(seconds(&[self.door.flood(&self.desk, "flood", bytes)?]))
            }
            ["wake", "standby"] => self.wake(false),
            ["wake", "hibernated"] => self.wake(true),
            ["fork"] => self.fork(),
            ["open", count] => self.open(number(count)?),
            ["shut"] => self.shut(),
            _ => Err(cannot("not one of its words")),
        }
    }

    fn names(&mut self, count: usize) -> Vec<String> {
        let from = self.made;
        self.made += count;
        (from..self.made).map(|number| format!("fresh-{number}")).collect()
    }

    /// A session that stays until the end, made when it is first needed. A few calls, so that what is measured is warm.
    fn stand(&mut self, name: &'static str, undo_calls: u32) -> Result<(), Problem> {
        if !self.opened.contains(&name) {
            self.door.open(&self.desk, name, undo_calls)?;
            self.opened.push(name);
            for _ in 0..3 {
                self.door.call(&self.desk, name, Language::Python)?;
            }
        }
        Ok(())
    }

    fn create(&mut self, language: &str) -> Result<Value, Problem> {
        let known = Language::parse(language).filter(|language| self.desk.world.has(*language));
        let language = known.ok_or_else(|| cannot(&format!("there is no {language} here")))?;
        let name = self.names(1).remove(0);
        let time = self.door.first(&self.desk, &name, language);
        self.desk.close(&name)?;
        Ok(seconds(&[time?]))
    }

    fn warm(
        &mut self,
        name: &'static str,
        undo_calls: u32,
        language: Language,
        count: &str,
    ) -> Result<Value, Problem> {
        self.stand(name, undo_calls)?;
        // Starts the interpreter, if it is another one than the session began with.
        self.door.call(&self.desk, name, language)?;
        let count = number(count)?.min(MAX_SAMPLES);
        let calls = (0..count).map(|_| self.door.call(&self.desk, name, language));
        Ok(seconds(&calls.collect::<Result<Vec<_>, _>>()?))
    }

    fn together(&mut self, ways: usize, count: usize, end: bool) -> Result<Value, Problem> {
        let names = self.names(sessions(count)?);
        let wanted = Together { names, ways: sessions(ways)?, end };
        let begun = Instant::now();
        let times = self.door.together(&self.desk, &wanted);
        let all = begun.elapsed();
        for name in &wanted.names {
            self.desk.close(name)?;
        }
        let mut reply = seconds(&times?);
        reply["all"] = all.as_secs_f64().into();
        Ok(reply)
    }

    fn wake(&mut self, from_disk: bool) -> Result<Value, Problem> {
        let name = if from_disk { "disk" } else { "frozen" };
        self.stand(name, 0)?;
        let record = self.desk.known(name)?;
        let world = &self.desk.world;
        self.desk.runtime.block_on(async {
            if from_disk { hibernate(world, &record).await } else { world.standby(&record).await }
        })?;
        Ok(seconds(&[self.door.wake(&self.desk, name)?]))
    }

    fn fork(&mut self) -> Result<Value, Problem> {
        if !self.opened.contains(&"parent") {
            self.stand("parent", 0)?;
            let record = self.desk.known("parent")?;
            self.desk.runtime.block_on(self.desk.world.run(&record, HEAP))?;
        }
        Ok(seconds(&[self.door.fork(&self.desk, "parent")?]))
    }

    /// Sessions that have answered once and idle; the roots of all processes that this takes.
    fn open(&mut self, count: usize) -> Result<Value, Problem> {
        for name in self.names(sessions(count)?) {
            self.door.open(&self.desk, &name, 0)?;
            self.idle.push(name.clone());
            self.door.call(&self.desk, &name, Language::Python)?;
        }
        let mut pids = vec![i64::from(self.door.server())];
        for name in &self.idle {
            pids.extend(self.desk.known(name)?.placed.map(|placed| i64::from(placed.pid)));
        }
        Ok(json!({"pids": pids}))
    }

    fn shut(&mut self) -> Result<Value, Problem> {
        for name in std::mem::take(&mut self.idle) {
            self.desk.close(&name)?;
        }
        Ok(json!({}))
    }
}

/// Hibernates, as soon as the agent lets it: a line that was opened in the last two seconds counts as somebody who arrives, and
/// a server opens one with every waking.
async fn hibernate(world: &World, record: &Record) -> Result<(), Problem> {
    let until = Instant::now() + ARRIVING;
    loop {
        match world.hibernate(record).await {
            Err(problem) if problem.code == Code::Conflict && Instant::now() < until => {
                tokio::time::sleep(ASK_AGAIN).await;
            }
            result => return result,
        }
    }
}

fn number(word: &str) -> Result<usize, Problem> {
    word.parse().map_err(|_| Problem::new(Code::InvalidArgument, format!("`{word}` is not a number")))
}

fn sessions(count: usize) -> Result<usize, Problem> {
    if count <= MAX_SESSIONS {
        Ok(count)
    } else {
        Err(Problem::new(Code::InvalidArgument, format!("at most {MAX_SESSIONS} sessions")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_number_is_refused() {
        assert!(sessions(MAX_SESSIONS + 1).is_err());
        assert!(number("ten").is_err());
        assert!(number("-1").is_err());
    }
}
