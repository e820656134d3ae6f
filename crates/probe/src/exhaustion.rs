//! exhaustion: taking more than the limits give. Heavy: one at a time, only in a confirmed box.
//!
//! Every attack is bounded by itself (an amount of at most twice to four times the limit, and [`BUDGET`] of
//! time) and cleans up. The greedy part runs in a child that offers itself first to the OOM killer, so that
//! the verdict survives. Where the kernel kills the whole box at once (`memory.oom.group`), no line is printed:
//! the host reads that death as held.

pub(crate) mod objects;
pub(crate) mod storage;

use crate::facts::Facts;
use crate::isolate::{End, isolate};
use crate::outcome::{Outcome, breach, held, name, skipped};
use crate::sys::fork;
use crate::table::Probe;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

/// What the greedy part may take of the ten seconds.
pub(super) const BUDGET: Duration = Duration::from_secs(8);
pub(super) const MB: u64 = 1 << 20;

pub(crate) const PROBES: &[Probe] = &[
    Probe::heavy("fork-bomb", "start more processes than the limit", fork_bomb)
        .needs(&["confirmed_box", "pids"]),
    Probe::heavy("thread-bomb", "start more threads than the limit", thread_bomb)
        .needs(&["confirmed_box", "pids"]),
    Probe::heavy("memory", "use twice the memory", memory).needs(&["confirmed_box", "memory_mb"]),
    Probe::heavy("memory-many-processes", "use twice the memory from several processes", memory_many)
        .needs(&["confirmed_box", "memory_mb"]),
    Probe::heavy("cpu", "use more CPU than the limit", cpu),
    Probe::heavy("output-flood", "print without end", output_flood),
];

/// Lets the kernel pick this process first when memory runs out; raising is always allowed.
pub(super) fn volunteer() {
    let _ = fs::write("/proc/self/oom_score_adj", "1000");
}

/// Takes bytes step by step up to `target` in a child. Held when a step fails with a limit, or the child is
/// killed for it; a breach when all of it could be had.
pub(super) fn take_bytes(
    what: &str,
    target: u64,
    limits: &[Errno],
    mut step: impl FnMut() -> Result<u64, Errno>,
) -> Outcome {
    let ended = isolate(BUDGET + Duration::from_secs(1), || {
        volunteer();
        let start = Instant::now();
        let mut taken = 0;
        while taken < target {
            if start.elapsed() > BUDGET {
                return skipped(format!("{what}: too slow to tell, took {} MB in {BUDGET:?}", taken / MB));
            }
            match step() {
                Ok(bytes) => taken += bytes,
                Err(errno) if limits.contains(&errno) => {
                    return held(format!("{what}: {} after {} MB", name(errno), taken / MB));
                }
                Err(errno) => return skipped(format!("{what}: {} after {} MB", name(errno), taken / MB)),
            }
        }
        breach(format!("{what}: took {} MB", taken / MB))
    });
    killed_is_held(what, ended)
}

pub(super) fn killed_is_held(what: &str, ended: End) -> Outcome {
    match ended {
        End::Done(outcome) => outcome,
        End::Signal(libc::SIGKILL) => held(format!("{what}: killed by the kernel or the host (SIGKILL)")),
        End::Signal(libc::SIGXFSZ) => held(format!("{what}: SIGXFSZ")),
        End::Signal(libc::SIGBUS) => held(format!("{what}: SIGBUS, no page to be had")),
        End::Signal(libc::SIGABRT) => held(format!("{what}: allocation failed")),
        End::Signal(libc::SIGSYS) => held(format!("{what}: killed by SIGSYS")),
        End::Signal(signal) => skipped(format!("{what}: died of signal {signal}")),
        End::TimedOut => skipped(format!("{what}: too slow to tell")),
        End::Failed(why) => skipped(format!("{what}: {why}")),
    }
}

/// Takes objects one by one up to `most`, in a child that owns them all and so frees them by ending.
pub(super) fn take_objects(what: &str, most: u64, mut step: impl FnMut(u64) -> Result<(), Errno>) -> Outcome {
    let ended = isolate(BUDGET + Duration::from_secs(1), || {
        volunteer();
        let start = Instant::now();
        for count in 0..most {
            if start.elapsed() > BUDGET {
                return skipped(format!("{what}: too slow to tell, {count} in {BUDGET:?}"));
            }
            if let Err(errno) = step(count) {
                return held(format!("{what}: {} after {count}", name(errno)));
            }
        }
        breach(format!("{what}: {most} without any limit"))
    });
    killed_is_held(what, ended)
}

/// Processes that belong to carrel and the probe itself count against the limit as well, never for it.
fn fork_bomb(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("pids") else { return skipped("pids is not a number") };
    let most = (limit * 4).min(20_000);
    let mut children = Vec::new();
    let mut stopped = None;
    let start = Instant::now();
    while (children.len() as u64) < most && start.elapsed() < BUDGET {
        let sleeping = fork(|| {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            std::thread::sleep(Duration::from_secs(20));
            0
        });
        match sleeping.map(Pid::from_raw) {
            Ok(Some(pid)) => children.push(pid),
            Ok(None) => break,
            Err(errno) => {
                stopped = Some(errno);
                break;
            }
        }
    }
    let count = children.len() as u64;
    for pid in &children {
        let _ = kill_process(*pid, Signal::KILL);
    }
    for pid in &children {
        let _ = waitpid(Some(*pid), WaitOptions::empty());
    }
    match stopped {
        Some(errno) if count <= limit => {
            held(format!("fork: {} after {count} processes (limit {limit})", name(errno)))
        }
        Some(errno) => breach(format!("fork: {} only after {count} processes, limit {limit}", name(errno))),
        None if count > limit => breach(format!("{count} processes, limit {limit}")),
        None => skipped(format!("too slow to tell: {count} processes in {BUDGET:?}")),
    }
}

fn thread_bomb(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("pids") else { return skipped("pids is not a number") };
    let most = (limit * 4).min(20_000);
    let ended = isolate(BUDGET + Duration::from_secs(1), || {
        let start = Instant::now();
        for count in 0..most {
            if start.elapsed() > BUDGET {
                return skipped(format!("too slow to tell: {count} threads"));
            }
            let started = std::thread::Builder::new()
                .stack_size(64 << 10)
                .spawn(|| std::thread::sleep(Duration::from_secs(20)));
            if let Err(error) = started {
                let errno = name(crate::outcome::errno_of(&error));
                let text = format!("threads: {errno} after {count} (limit {limit})");
                return if count <= limit { held(text) } else { breach(text) };
            }
        }
        breach(format!("{most} threads, limit {limit}"))
    });
    killed_is_held("threads", ended)
}

/// Memory that is touched, in pieces of 8 MB; the pattern keeps pages from being shared or dropped.
fn hoard(hoarded: &mut Vec<Vec<u8>>) -> Result<u64, Errno> {
    let mut piece: Vec<u8> = Vec::new();
    piece.try_reserve_exact(8 << 20).map_err(|_| Errno::NOMEM)?;
    let mark = u8::try_from(hoarded.len() % 251).unwrap_or_default() | 1;
    piece.resize(8 << 20, mark);
    hoarded.push(piece);
    Ok(8 * MB)
}

/// Above this, filling takes longer than a probe may.
const MEMORY_MAX_MB: u64 = 8192;

fn memory_target(facts: &Facts) -> Result<u64, Outcome> {
    match facts.number("memory_mb") {
        None => Err(skipped("memory_mb is not a number")),
        Some(mb) if mb > MEMORY_MAX_MB => Err(skipped(format!("a limit of {mb} MB takes too long to fill"))),
        Some(mb) => Ok(2 * mb * MB),
    }
}

fn memory(facts: &Facts) -> Outcome {
    let target = match memory_target(facts) {
        Ok(target) => target,
        Err(outcome) => return outcome,
    };
    let mut hoarded = Vec::new();
    take_bytes("memory", target, &[Errno::NOMEM], || hoard(&mut hoarded))
}

/// Four children of half the limit each: a limit per process would let all of them through.
fn memory_many(facts: &Facts) -> Outcome {
    let target = match memory_target(facts) {
        Ok(target) => target,
        Err(outcome) => return outcome,
    };
    let mut children = Vec::new();
    for _ in 0..4 {
        let child = fork(|| {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            volunteer();
            let mut hoarded = Vec::new();
            for _ in 0..(target / 4).div_ceil(8 * MB) {
                if hoard(&mut hoarded).is_err() {
                    return 1;
                }
            }
            // Hold on until all have theirs.
            std::thread::sleep(BUDGET);
            i32::from(hoarded.is_empty())
        });
        match child.map(Pid::from_raw) {
            Ok(Some(pid)) => children.push(pid),
            _ => return skipped("cannot start the children"),
        }
    }
    let start = Instant::now();
    let mut ended = None;
    while ended.is_none() && start.elapsed() < BUDGET - Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(50));
        ended = children.iter().find_map(|pid| waitpid(Some(*pid), WaitOptions::NOHANG).ok().flatten());
    }
    let resident: u64 = children.iter().map(|pid| resident_bytes(pid.as_raw_nonzero().get())).sum();
    for pid in &children {
        let _ = kill_process(*pid, Signal::KILL);
        let _ = waitpid(Some(*pid), WaitOptions::empty());
    }
    match ended {
        Some((_, status)) if status.signaled() => {
            held(format!("a child was killed by signal {:?}", status.terminating_signal()))
        }
        Some(_) => held("a child got no more memory"),
        None if resident * 10 >= target * 9 => {
            breach(format!("four processes hold {} MB together", resident / MB))
        }
        None => skipped(format!("too slow to tell: {} MB held", resident / MB)),
    }
}

fn resident_bytes(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/statm")).unwrap_or_default();
    text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or_default() * 4096
}

/// Seconds that all CPUs of the machine together have been idle, where `/proc/stat` tells.
fn machine_idle() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let ticks: f64 = stat.lines().next()?.split_whitespace().nth(4)?.parse().ok()?;
    Some(ticks / 100.0)
}

fn cpu(facts: &Facts) -> Outcome {
    let limit: Option<f64> = facts.get("cpus").and_then(|text| text.parse().ok());
    let ended = isolate(BUDGET, || {
        let machine = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (machine * 2).min(64);
        let idle_before = machine_idle();
        let (got, wall) = spin(threads);
        // CPUs that stood idle meanwhile: with some to spare, it was the limit that kept them from us.
        let spare = idle_before.zip(machine_idle()).map(|(before, after)| (after - before) / wall);
        let text = format!("{got:.2} CPUs from {threads} threads on a machine of {machine}");
        let Some(limit) = limit else { return skipped(format!("{text}; the host judges (no fact cpus)")) };
        let at_limit = got >= limit * 0.85;
        match spare {
            _ if got > limit * 1.25 + 0.1 => breach(format!("{text}, limit {limit}")),
            Some(spare) if spare > 0.2 => held(format!("{text}, limit {limit}, {spare:.2} CPUs left idle")),
            None if at_limit => held(format!("{text}, limit {limit}")),
            _ => skipped(format!(
                "{text}; no CPU was idle beyond the limit of {limit}, so nothing was kept back"
            )),
        }
    });
    killed_is_held("cpu", ended)
}

/// Spins for three seconds; CPU time got per wall time, and the wall time in seconds.
fn spin(threads: usize) -> (f64, f64) {
    let wall = Duration::from_secs(3);
    let start = Instant::now();
    let work = move || {
        while start.elapsed() < wall {
            std::hint::spin_loop();
        }
    };
    let spinners: Vec<_> =
        (0..threads).filter_map(|_| std::thread::Builder::new().spawn(work).ok()).collect();
    for spinner in spinners {
        let _ = spinner.join();
    }
    let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    let seconds = u64::try_from(used.tv_sec).unwrap_or_default();
    let nanos = u32::try_from(used.tv_nsec).unwrap_or_default();
    let wall = start.elapsed().as_secs_f64();
    (Duration::new(seconds, nanos).as_secs_f64() / wall, wall)
}

/// Whether the daemon keeps its head is for the host to see; this only prints.
fn output_flood(facts: &Facts) -> Outcome {
    let wanted = facts.number("flood_mb").unwrap_or(64).min(4096);
    let mut line = vec![b'#'; 1023];
    line.push(b'\n');
    let block = line.repeat(1024);
    let start = Instant::now();
    let mut written = 0;
    let mut stdout = std::io::stdout().lock();
    while written < wanted && start.elapsed() < BUDGET {
        if let Err(error) = stdout.write_all(&block) {
            return skipped(format!("stdout ended after {written} MB: {error}; the host judges"));
        }
        written += 1;
    }
    skipped(format!("printed {written} MB in {:.1} s; the host judges", start.elapsed().as_secs_f64()))
}
