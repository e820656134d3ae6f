//! carrel as one of the systems that `bench/compare` measures, through one of its doors: a program that is told what to do by lines
//! of words on its stdin and answers each with one line of JSON. `bench/README.md` has the words; others' adapters speak the
//! same. Times are taken here, next to the call, so that whoever asks may be as slow as it likes.
//!
//! Every adapter has a state directory of its own. What a door has no word for (freezing, ending) is done by an engine on the
//! same directory, and is never on a measured path.

mod engine;
mod mcp;
mod socket;
mod words;

use std::{
    io::{BufRead, Write},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use carrel_engine::Record;
use carrel_proto::{
    guest::Language,
    problem::{Code, Problem},
};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use words::Adapter;

use crate::{
    mcp::{Http, Pipes},
    sandbox::World,
    spawn,
};

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
        let is_it = |record: &Record| record.key.as_ref().is_some_and(|key| key.to_string().ends_with(&ends));
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
        "mcp-stdio" => Box::new(mcp::Mcp::<Pipes>::start(&program()?, &desk)?),
        "mcp-http" => Box::new(mcp::Mcp::<Http>::start(&program()?, &desk)?),
        _ => {
            let doors = "the doors are floor, engine, socket, mcp-stdio and mcp-http";
            return Err(Problem::new(Code::InvalidArgument, doors));
        }
    };
    let mut adapter = Adapter::new(desk, door);
    let answered = each_line(|words| adapter.answer(words));
    answered.and(adapter.end())
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

/// Runs one closure per share, each in a thread with a line of its own; the times of all.
fn in_threads<L: Send>(
    lines: Vec<(L, Vec<String>)>,
    first: impl Fn(&mut L, &str) -> Result<Duration, Problem> + Sync,
) -> Result<Vec<Duration>, Problem> {
    let first = &first;
    std::thread::scope(|scope| {
        let way = |(mut line, names): (L, Vec<String>)| {
            scope
                .spawn(move || names.iter().map(|name| first(&mut line, name)).collect::<Result<Vec<_>, _>>())
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
        assert!(told(&cannot("no"))["cannot"].as_str().unwrap().contains("no"));
        assert!(told(&Problem::internal("broke"))["error"].as_str().unwrap().contains("broke"));
    }
}
