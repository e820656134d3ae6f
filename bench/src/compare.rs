//! carrel as one of the systems that `bench/compare` measures, through one of its doors: a program that is told what to do by lines
//! of words on its stdin and answers each with one line of JSON. `bench/README.md` has the words; others' adapters speak the
//! same. Times are taken here, next to the call, so that whoever asks may be as slow as it likes.
//!
//! Every adapter has a state directory of its own. What a door has no word for (freezing, ending) is done by an engine on the
//! same directory, and is never on a measured path.

mod engine;
mod mcp;
mod socket;

use std::{
    io::{BufRead, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use carrel_engine::Record;
use carrel_proto::{
    guest::Language,
    message::DEFAULT_UNDO,
    problem::{Code, Problem},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::{sandbox::World, spawn};

/// Most samples that one line may ask for, sessions at a time, and bytes of output: a mistyped number shall not take the machine.
const MAX_SAMPLES: usize = 10_000;
const MAX_SESSIONS: usize = 200;
const MAX_FLOOD: u64 = 1 << 30;
/// How long a sandbox that shall be written to disk may be found busy, and how often it is tried.
const ARRIVING: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// Of a fork's heap, as in the rows of `sleep.rs`.
const HEAP: &str = "heap = bytearray(10 << 20)";

/// One way to a sandbox. Sessions are made by name.
trait Door {
    /// From nothing to the first result of a session that does not exist yet.
    fn first(&mut self, desk: &Desk, name: &str, language: Language) -> Result<Duration, Problem>;

    /// The same with all of these names, so many at a time; each one's time. `end`: each is ended before the next is made, where
    /// the door has a word for it.
    fn together(&mut self, desk: &Desk, wanted: &Together) -> Result<Vec<Duration>, Problem>;

    /// A session that stays, so many calls of which can be taken back.
    fn open(&mut self, desk: &Desk, name: &str, undo_calls: u32) -> Result<(), Problem>;

    /// One call to one that was opened.
    fn call(&mut self, desk: &Desk, name: &str, language: Language) -> Result<Duration, Problem>;

    /// The call that wakes a session, as a caller makes it that knows its name and nothing else.
    fn wake(&mut self, desk: &Desk, name: &str) -> Result<Duration, Problem> {
        self.call(desk, name, Language::Python)
    }

    /// So many bytes of output through to the caller.
    fn flood(&mut self, _: &Desk, _: &str, _: u64) -> Result<Duration, Problem> {
        Err(cannot("a reply through this door is cut to what a model reads"))
    }

    /// A copy of a living session to its first result.
    fn fork(&mut self, _: &Desk, _: &str) -> Result<Duration, Problem> {
        Err(cannot("this door has no word for it"))
    }

    /// The process that serves, for its memory.
    fn server(&self) -> u32;
}

struct Together {
    names: Vec<String>,
    ways: usize,
    end: bool,
}

impl Together {
    /// One list of names per way.
    fn shares(&self) -> Vec<Vec<String>> {
        let mut shares = vec![Vec::new(); self.ways.clamp(1, self.names.len().max(1))];
        let count = shares.len();
        for (index, name) in self.names.iter().enumerate() {
            shares[index % count].push(name.clone());
        }
        shares
    }
}

/// The engine on the adapter's state directory.
struct Desk {
    runtime: Runtime,
    world: std::sync::Arc<World>,
}

impl Desk {
    fn open() -> Result<Self, Problem> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Problem::internal)?;
        let world = runtime.block_on(async { World::open() })?;
        Ok(Self { runtime, world: std::sync::Arc::new(world) })
    }

    /// Whoever made it, and whatever its key begins with.
    fn record(&self, name: &str) -> Result<Option<Record>, Problem> {
        let ends = format!(":{name}");
        let is_it =
            |record: &Record| record.key.as_ref().is_some_and(|key| key.to_string().ends_with(&ends));
        Ok(self.world.living()?.into_iter().find(is_it))
    }

    fn known(&self, name: &str) -> Result<Record, Problem> {
        self.record(name)?.ok_or_else(|| Problem::internal(format!("there is no sandbox `{name}`")))
    }

    /// Ends it, if it is there.
    fn close(&self, name: &str) -> Result<(), Problem> {
        match self.record(name)? {
            Some(record) => self.runtime.block_on(self.world.close(record)),
            None => Ok(()),
        }
    }

    fn close_all(&self) -> Result<(), Problem> {
        self.runtime.block_on(self.world.close_all())
    }
}

fn cannot(why: &str) -> Problem {
    Problem::new(Code::Unsupported, why)
}

/// What every language is asked; the answer is 42.
fn question(language: Language) -> &'static str {
    match language {
        Language::Bash => "echo $((6*7))",
        Language::Python | Language::Node => "6*7",
    }
}

/// Answers lines until there are no more. What was made is ended in any case.
pub(crate) fn serve(mut arguments: impl Iterator<Item = String>) -> ExitCode {
    let door = arguments.next().unwrap_or_default();
    let program = arguments.next().map(PathBuf::from);
    match answer_lines(&door, program) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            let _ = writeln!(std::io::stdout(), "{}", told(&problem));
            ExitCode::FAILURE
        }
    }
}

fn answer_lines(door: &str, program: Option<PathBuf>) -> Result<(), Problem> {
    if door == "floor" {
        return each_line(|words| match words {
            ["create", ..] => Ok(seconds(&[spawn("/bin/true", &[])])),
            _ => Err(cannot("it is the floor of a start, and nothing else")),
        });
    }
    let desk = Desk::open()?;
    let program = || program.ok_or_else(|| Problem::new(Code::InvalidArgument, "name the program too"));
    let door: Box<dyn Door> = match door {
        "engine" => Box::new(engine::Embedded::default()),
        "socket" => Box::new(socket::Socket::start(&program()?, &desk)?),
        "mcp-stdio" => Box::new(mcp::Stdio::start(&program()?, &desk)?),
        "mcp-http" => Box::new(mcp::Web::start(&program()?, &desk)?),
        _ => {
            let doors = "the doors are floor, engine, socket, mcp-stdio and mcp-http";
            return Err(Problem::new(Code::InvalidArgument, doors));
        }
    };
    let mut adapter = Adapter { desk, door, made: 0, opened: Vec::new(), idle: Vec::new() };
    let answered = each_line(|words| adapter.answer(words));
    // The server first: what it is still making is found and ended with the rest.
    let Adapter { desk, door, .. } = adapter;
    drop(door);
    answered.and(desk.close_all())
}

fn each_line(mut answer: impl FnMut(&[&str]) -> Result<Value, Problem>) -> Result<(), Problem> {
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(Problem::internal)?;
        let words: Vec<&str> = line.split_whitespace().collect();
        let reply = match words.as_slice() {
            [] => continue,
            ["hello"] => json!({"version": env!("CARGO_PKG_VERSION")}),
            words => answer(words).unwrap_or_else(|problem| told(&problem)),
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{reply}").and_then(|()| out.flush()).map_err(Problem::internal)?;
    }
    Ok(())
}

fn told(problem: &Problem) -> Value {
    let text = format!("{problem}");
    if problem.code == Code::Unsupported { json!({"cannot": text}) } else { json!({"error": text}) }
}

fn seconds(times: &[Duration]) -> Value {
    json!({"seconds": times.iter().map(Duration::as_secs_f64).collect::<Vec<_>>()})
}

struct Adapter {
    desk: Desk,
    door: Box<dyn Door>,
    /// So that no two names are the same.
    made: usize,
    /// Sessions that stay for calls, and those that idle to be weighed.
    opened: Vec<&'static str>,
    idle: Vec<String>,
}

impl Adapter {
    fn answer(&mut self, words: &[&str]) -> Result<Value, Problem> {
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
        let begun = std::time::Instant::now();
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
    let until = std::time::Instant::now() + ARRIVING;
    loop {
        match world.hibernate(record).await {
            Err(problem) if problem.code == Code::Conflict && std::time::Instant::now() < until => {
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

/// Runs one closure per share, each in a thread with a line of its own; the times of all.
fn in_threads<L: Send>(
    lines: Vec<(L, Vec<String>)>,
    first: impl Fn(&mut L, &str) -> Result<Duration, Problem> + Sync,
) -> Result<Vec<Duration>, Problem> {
    let first = &first;
    std::thread::scope(|scope| {
        let way = |(mut line, names): (L, Vec<String>)| {
            scope.spawn(move || {
                names.iter().map(|name| first(&mut line, name)).collect::<Result<Vec<_>, _>>()
            })
        };
        let ways: Vec<_> = lines.into_iter().map(way).collect();
        let mut times = Vec::new();
        for way in ways {
            times.extend(way.join().map_err(|_| Problem::internal("a way has panicked"))??);
        }
        Ok(times)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shared_out_and_none_is_lost() {
        let names: Vec<String> = (0..10).map(|number| number.to_string()).collect();
        for ways in [0, 1, 3, 10, 50] {
            let shares = Together { names: names.clone(), ways, end: true }.shares();
            assert!(shares.iter().all(|share| !share.is_empty()), "{ways} ways: {shares:?}");
            let mut all: Vec<String> = shares.concat();
            all.sort();
            assert_eq!(all, names, "{ways} ways");
        }
    }

    #[test]
    fn what_a_system_cannot_do_is_told_apart_from_what_failed() {
        assert_eq!(told(&cannot("no")).as_object().map(|reply| reply.contains_key("cannot")), Some(true));
        assert!(told(&Problem::internal("broke"))["error"].as_str().unwrap().contains("broke"));
        assert!(sessions(MAX_SESSIONS + 1).is_err());
        assert!(number("ten").is_err());
    }
}
