//! Speed, as ratios against `fork+exec /bin/true` measured in the same run: absolute times say more about the machine
//! and its neighbours than about carrel. Measures are interleaved round by round, so that a noisy moment hits all.
//!
//! `cargo run --release -p carrel-bench [-- --short] [--only LANGUAGE|standby|sleep|fork|undo|pool|warm|density]` prints the table and ends with 2 if a target
//! is missed. `--only` measures the cold start of one language, or waking from `standby`, and so on, and nothing else, for comparing two
//! builds. `density` is measured by itself alone: it makes `--count` sandboxes (1000) that stay. `adapter DOOR PROGRAM` makes it one of the
//! systems that `bench/compare` measures.

mod compare;
mod density;
mod figures;
mod fork;
mod http;
mod mcp;
mod memory;
mod pool;
mod sandbox;
mod sleep;
mod undo;
mod warm;

use std::{
    io::Write,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use carrel_proto::{
    guest::Language,
    message::DEFAULT_UNDO,
    problem::{Code, Problem},
};
use figures::{Row, Samples, Target};
use sandbox::World;

/// How often each cold start is measured; the short form is for CI.
const ROUNDS: usize = 40;
const SHORT_ROUNDS: usize = 8;
/// Warm calls per round.
const WARM: usize = 50;
/// A python heap of 100 MB, in small objects as programs have them.
const HEAP: &str = "heap = [(i, str(i)) for i in range(700_000)]";
/// Output pushed through to the caller, in bytes.
const FLOOD: u64 = 256 << 20;
/// Output of a command through HTTP: beyond what is kept of it, so that its pace is the client's.
const HTTP_FLOOD: u64 = 100 << 20;
/// Sandboxes that idle beside the one that is called, in the short form and in the long one.
const IDLE_SANDBOXES: [usize; 2] = [100, 1000];
/// How long an idle server is watched.
const IDLE: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    if arguments.next().as_deref() == Some("adapter") { compare::serve(arguments) } else { bench() }
}

#[tokio::main(flavor = "current_thread")]
async fn bench() -> ExitCode {
    let short = std::env::args().any(|argument| argument == "--short");
    let rounds = if short { SHORT_ROUNDS } else { ROUNDS };
    let only = std::env::args().skip_while(|argument| argument != "--only").nth(1);
    let measured = match only.as_deref().map(|word| (word, Language::parse(word))) {
        None => measure(rounds).await,
        Some(("standby", _)) => measure_wake(rounds).await,
        Some(("sleep", _)) => sleep::measure(rounds).await,
        Some(("fork", _)) => fork::measure(rounds).await,
        Some(("undo", _)) => undo::measure(rounds).await,
        Some(("pool", _)) => pool::measure(rounds, short).await,
        Some(("warm", _)) => warm::measure(rounds).await,
        Some(("density", _)) => density::measure(number("--count")).await,
        Some((_, Some(language))) => measure_cold(rounds, language).await,
        Some((_, None)) => Err(Problem::new(
            Code::InvalidArgument,
            "`--only` takes python, bash, node, standby, sleep, fork, undo, pool, warm or density",
        )),
    };
    match measured {
        Ok(rows) => {
            let table = figures::table(&rows);
            let _ = std::io::stdout().write_all(table.as_bytes());
            if rows.iter().all(Row::is_met) { ExitCode::SUCCESS } else { MISSED.into() }
        }
        Err(problem) => {
            let _ = writeln!(std::io::stderr(), "error: {problem}\nhint: {}", problem.hint);
            ExitCode::FAILURE
        }
    }
}

/// What it ends with when all was measured and a target was missed.
const MISSED: u8 = 2;

/// The number after a word of the command line.
fn number(name: &str) -> Option<usize> {
    std::env::args().skip_while(|argument| argument != name).nth(1)?.parse().ok()
}

/// Wall time of one command from start to end.
fn spawn(program: &str, arguments: &[&str]) -> Duration {
    let start = Instant::now();
    let status = Command::new(program)
        .args(arguments)
        .env_clear()
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    match status {
        Ok(_) => start.elapsed(),
        Err(_) => Duration::ZERO,
    }
}

/// What a cold start is measured with.
fn smallest_code(language: Language) -> &'static str {
    match language {
        Language::Bash => ":",
        Language::Python | Language::Node => "1",
    }
}

async fn measure_cold(rounds: usize, language: Language) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    let (mut floor, mut cold) = (Samples::default(), Samples::default());
    world.cold(language, smallest_code(language)).await?;
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        cold.add(world.cold(language, smallest_code(language)).await?);
    }
    let name = format!("create to first result, {}", language.as_str());
    Ok(vec![Row::floor(&floor), Row::ratio(&name, &cold, &floor, Target::None)])
}

/// Waking from standby, and what the same call takes when it is awake.
async fn measure_wake(rounds: usize) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    let (mut floor, mut wake, mut awake) = (Samples::default(), Samples::default(), Samples::default());
    let session = world.session("warm", 0).await?;
    world.awake(Language::Python).await?;
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        match world.wake(Language::Python).await? {
            Some(time) => wake.add(time),
            None => {
                world.close(session).await?;
                return Err(Problem::new(Code::Unsupported, "this host has no freezer"));
            }
        }
        awake.add(world.awake(Language::Python).await?);
    }
    world.close(session).await?;
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("standby to first result, python", &wake, &floor, Target::AtMost(1.0)),
        Row::ratio("  the same call when it is awake", &awake, &floor, Target::None),
    ])
}

async fn measure(rounds: usize) -> Result<Vec<Row>, Problem> {
    let world = World::open()?;
    let has = |language| world.has(language);
    let mut floor = Samples::default();
    let mut bare_node = Samples::default();
    let mut cold = [Samples::default(), Samples::default(), Samples::default()];
    let mut warm = Samples::default();
    let mut boxes = Samples::default();
    let mut bare_python = Samples::default();
    let mut wake = Samples::default();
    let languages = [Language::Python, Language::Bash, Language::Node];

    let session = world.session("warm", 0).await?;
    let mut caller = world.caller(&session).await?;
    // One of each before counting: templates, caches and page cache are not what is measured.
    for language in languages.into_iter().filter(|language| has(*language)) {
        world.cold(language, smallest_code(language)).await?;
    }
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        for (slot, language) in cold.iter_mut().zip(languages) {
            if has(language) {
                slot.add(world.cold(language, smallest_code(language)).await?);
            }
        }
        boxes.add(world.create().await?);
        if has(Language::Python) {
            bare_python.add(spawn(world.program(Language::Python), &["-I", "-S", "-c", "1"]));
        }
        if has(Language::Node) {
            bare_node.add(spawn(world.program(Language::Node), &["-e", "0"]));
        }
        if has(Language::Python)
            && let Some(time) = world.wake(Language::Python).await?
        {
            wake.add(time);
        }
        for _ in 0..if has(Language::Python) { WARM } else { 0 } {
            warm.add(caller.call(Language::Python, "1").await?);
        }
    }
    let mut rows = vec![Row::floor(&floor)];
    rows.push(Row::ratio("bare `python -I -S -c 1`", &bare_python, &floor, Target::None));
    rows.push(Row::ratio("create a sandbox", &boxes, &floor, Target::None));
    rows.push(Row::ratio("create to first result, python", &cold[0], &floor, Target::AtMost(25.0)));
    rows.push(Row::ratio("create to first result, bash", &cold[1], &floor, Target::AtMost(10.0)));
    rows.push(Row::ratio("create to first result, node", &cold[2], &floor, Target::None));
    rows.push(Row::ratio("  the same against bare `node -e 0`", &cold[2], &bare_node, Target::AtMost(1.5)));
    rows.push(Row::ratio("warm python call", &warm, &floor, Target::AtMost(0.5)));
    if !wake.is_empty() {
        rows.push(Row::ratio("standby to first result, python", &wake, &floor, Target::AtMost(1.0)));
    }
    if has(Language::Python) {
        let memory = memory::of_sandbox(&session);
        rows.push(Row::size("idle python session, all processes", memory.total, Target::AtMost(14.0)));
        rows.push(Row::size("  of it carrel's own (agent, init, runner)", memory.own, Target::None));
        rows.push(Row::size("  of it the agent", memory.agent, Target::AtMost(2.0)));
        let (bytes, time) = world.flood(&session, FLOOD).await?;
        rows.push(Row::rate("stdout through to the caller", bytes, time, Target::AtLeast(200.0)));
    }
    world.close(session).await?;
    if has(Language::Python) {
        rows.extend(undo::measure(rounds).await?);
        rows.extend(sleep::measure(rounds).await?);
        rows.extend(fork::measure(rounds).await?);
        rows.extend(pool::measure(rounds, rounds == SHORT_ROUNDS).await?);
        rows.extend(warm::measure(rounds).await?);
        rows.extend(measure_mcp(&world, rounds)?);
        rows.extend(measure_http(&world, rounds)?);
        world.close_all().await?;
    }
    Ok(rows)
}

/// The same, through the MCP door.
fn measure_mcp(world: &World, rounds: usize) -> Result<Vec<Row>, Problem> {
    let program = mcp::program()?;
    let (mut floor, mut start, mut fresh) = (Samples::default(), Samples::default(), Samples::default());
    let (mut pipes, mut web) = (Samples::default(), Samples::default());
    let mut http = mcp::Http::start(&program, world.state())?;
    let (mut idle, _) = mcp::Pipes::start(&program, world.state())?;
    // The first of each starts interpreters, which is measured elsewhere.
    idle.run("warm")?;
    http.run("warm")?;
    for round in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        let begun = Instant::now();
        let (mut server, time) = mcp::Pipes::start(&program, world.state())?;
        start.add(time);
        server.run(&format!("fresh-{round}"))?;
        fresh.add(begun.elapsed());
        drop(server);
        for _ in 0..WARM {
            pipes.add(idle.run("warm")?);
            web.add(http.run("warm")?);
        }
    }
    let before = memory::cpu_ticks(idle.pid());
    std::thread::sleep(IDLE);
    let busy = memory::cpu_ticks(idle.pid()) - before;
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("MCP: start to `initialize` answered", &start, &floor, Target::AtMost(12.0)),
        Row::ratio("MCP: start to first python result", &fresh, &floor, Target::AtMost(30.0)),
        Row::ratio("MCP: warm python `run` over stdio", &pipes, &floor, Target::AtMost(1.2)),
        Row::ratio("MCP: warm python `run` over HTTP", &web, &floor, Target::AtMost(1.6)),
        Row::resident("MCP: idle server", memory::resident(idle.pid()), Target::AtMost(15.0)),
        Row::ticks("MCP: CPU of an idle server", busy, IDLE, Target::AtMost(0.0)),
    ])
}

/// The same, through the daemon's HTTP door.
fn measure_http(world: &World, rounds: usize) -> Result<Vec<Row>, Problem> {
    let daemon = http::Daemon::start(&mcp::program()?, world.state())?;
    let (mut unix, mut tcp) = (daemon.unix()?, daemon.tcp()?);
    let id = unix.sandbox("http-warm", 0)?;
    unix.run(&id)?;
    let careful = unix.sandbox("http-undo", DEFAULT_UNDO)?;
    unix.run(&careful)?;
    let mut kept = Samples::default();
    let (mut floor, mut by_unix, mut by_tcp) = (Samples::default(), Samples::default(), Samples::default());
    let (mut alone, mut beside) = (Samples::default(), Samples::default());
    for _ in 0..rounds {
        for _ in 0..4 {
            floor.add(spawn("/bin/true", &[]));
        }
        for _ in 0..WARM {
            by_unix.add(unix.run(&id)?);
            by_tcp.add(tcp.run(&id)?);
            kept.add(unix.run(&careful)?);
        }
    }
    let flood = unix.flood(&id, HTTP_FLOOD)?;
    for _ in 0..rounds * WARM {
        alone.add(unix.run(&id)?);
    }
    let count = IDLE_SANDBOXES[usize::from(rounds == ROUNDS)];
    for number in 0..count {
        unix.sandbox(&format!("http-idle-{number}"), 0)?;
    }
    for _ in 0..rounds * WARM {
        beside.add(unix.run(&id)?);
    }
    Ok(vec![
        Row::floor(&floor),
        Row::ratio("HTTP: warm python `run`, unix socket", &by_unix, &floor, Target::AtMost(1.0)),
        Row::ratio("  the same, 3 calls can be taken back", &kept, &floor, Target::None),
        Row::ratio("HTTP: warm python `run`, TCP keep-alive", &by_tcp, &floor, Target::AtMost(1.2)),
        Row::ratio(
            &format!("HTTP: warm with {count} idle against alone"),
            &beside,
            &alone,
            Target::AtMost(1.2),
        ),
        Row::resident(
            &format!("HTTP: daemon with {count} sandboxes"),
            memory::resident(daemon.pid()),
            Target::AtMost(40.0),
        ),
        Row::rate("HTTP: output of a command", HTTP_FLOOD, flood, Target::AtLeast(200.0)),
    ])
}
