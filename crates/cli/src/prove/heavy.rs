//! Exhaustion: every attack in a box of its own, one after another, while the neighbour must go on answering.
//!
//! An attack on a limit that this host does not hold at all is not run: it would take from the host itself.

use std::{
    cell::Cell,
    fs,
    path::Path,
    time::{Duration, Instant},
};

use carrel_engine::{Engine, Record, call::Output};
use carrel_proto::{
    frame::Stream,
    limits::{Enforced, Enforcement, Limits},
    outcome::{Cause, Outcome},
    problem::Problem,
};

use super::{
    Probe,
    arena::{Arena, arm, small_limits, wish},
    attack::{PROGRAM, Said, Way, attack, command, ended, finding, listen, results},
    host, progress,
    report::{Finding, Verdict},
};

/// The probe gives up by itself after 20 seconds.
const ATTACK_TIME: Duration = Duration::from_secs(40);
const PING_TIME: Duration = Duration::from_secs(20);
/// Between two calls of the neighbour.
const PING_PAUSE: Duration = Duration::from_millis(20);
const QUIET_PINGS: usize = 15;
/// A neighbour's call may take so many times its quiet time, and so much besides: a loaded machine is no breach.
const SLOWER: u32 = 20;
const SLOWER_BY: Duration = Duration::from_millis(200);
/// Most descriptors that a process of a box may ever hold.
const DESCRIPTORS: u64 = 8192;
const FLOOD_MB: u64 = 128;
/// What this process may grow by while a box floods it.
const FLOOD_MEMORY: u64 = 32 << 20;

/// The limit an attack goes against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    Memory,
    Pids,
    Disk,
    Cpu,
    /// The agent's own: output, descriptors.
    Own,
}

impl Limit {
    fn of(probe: &Probe) -> Self {
        let needs = |fact: &str| probe.needs.iter().any(|need| need == fact);
        match probe.name.as_str() {
            "cpu" => Limit::Cpu,
            "output-flood" | "open-descriptors" | "sparse-file" => Limit::Own,
            _ if needs("pids") => Limit::Pids,
            _ if needs("disk_mb") || needs("max_inodes") => Limit::Disk,
            // Memory by its name, and objects of the kernel's: those that have no number of their own are memory too.
            _ => Limit::Memory,
        }
    }

    fn enforcement(self, enforced: &Enforced) -> Option<&Enforcement> {
        match self {
            Limit::Memory => Some(&enforced.memory),
            Limit::Pids => Some(&enforced.pids),
            Limit::Disk => Some(&enforced.disk),
            Limit::Cpu => Some(&enforced.cpu),
            Limit::Own => None,
        }
    }
}

/// How firmly a limit stands, and the host's word where it does not.
fn firmness(enforcement: Option<&Enforcement>) -> (bool, String) {
    match enforcement {
        None | Some(Enforcement::CgroupV1 | Enforcement::CgroupV2 | Enforcement::SizedFilesystem) => {
            (true, String::new())
        }
        Some(Enforcement::Rlimit(word) | Enforcement::Watched(word) | Enforcement::Nothing(word)) => {
            (false, word.clone())
        }
    }
}

fn facts(limits: &Limits, disk: Option<&Enforcement>) -> Vec<(&'static str, String)> {
    let mb = |bytes: u64| (bytes >> 20).to_string();
    // A sized file system has one inode per 16 kB (and rounds up); a watch charges 1 kB for each file.
    let per_file = if matches!(disk, Some(Enforcement::SizedFilesystem)) { 8 << 10 } else { 1 << 10 };
    vec![
        ("memory_mb", mb(limits.memory.0)),
        ("pids", limits.pids.to_string()),
        ("disk_mb", mb(limits.disk.0)),
        ("cpus", format!("{}.{:03}", limits.cpu_millis / 1000, limits.cpu_millis % 1000)),
        ("nofile", DESCRIPTORS.to_string()),
        ("max_inodes", (limits.disk.0 / per_file).to_string()),
        ("flood_mb", FLOOD_MB.to_string()),
    ]
}

pub(super) async fn run(arena: &mut Arena<'_>, probes: &[&Probe]) -> Result<Vec<Finding>, Problem> {
    if probes.is_empty() {
        return Ok(Vec::new());
    }
    let quiet = quiet(arena).await?;
    let mut neighbour = Neighbour {
        quiet,
        calls: 0,
        worst: Duration::ZERO,
        wrong: Vec::new(),
        firm: true,
        word: String::new(),
    };
    let mut lost = Vec::new();
    let mut findings = Vec::new();
    for probe in probes {
        progress(&format!("{} ({})", probe.name, probe.group));
        let mut limits = small_limits();
        if probe.name == "cpu" {
            // Half a CPU can be told from all of them on any machine.
            limits.cpu_millis = 500;
        }
        let record = arena.ring.sandbox(&wish(limits)).await?;
        arena.remember(&record);
        let judged = one(arena, probe, &record, &mut neighbour).await;
        if let Err(problem) = arena.engine.status(&record).await {
            lost.push(format!("{}: {}", probe.name, problem.message));
        }
        arena.engine.close(&record, None).await?;
        findings.push(judged);
    }
    let (firm, word) = firmness(arena.b.placed.as_ref().map(|placed| &placed.enforced.cpu));
    (neighbour.firm, neighbour.word) = (firm, word);
    findings.push(neighbour.judged());
    let fine = format!("the agents of {} attacked boxes still answered", probes.len());
    findings.push(Finding::host_judged("exhaustion", "agents-survive", fine, &lost));
    Ok(findings)
}

async fn one(arena: &Arena<'_>, probe: &Probe, record: &Record, neighbour: &mut Neighbour) -> Finding {
    let said = |verdict, detail: String| finding(probe, Way::Exec, verdict, detail);
    let limit = Limit::of(probe);
    let enforcement = record.placed.as_ref().and_then(|placed| limit.enforcement(&placed.enforced));
    let (firm, word) = firmness(enforcement);
    if matches!(enforcement, Some(Enforcement::Nothing(_))) && limit != Limit::Cpu {
        return said(Verdict::NotEnforced, format!("not tried: {word}"));
    }
    if let Err(problem) = arm(arena.engine, record) {
        return said(Verdict::Skipped, problem.message);
    }
    let disk = record.placed.as_ref().map(|placed| &placed.enforced.disk);
    let args = arena.args(&["run", &probe.name], &facts(&record.spec.limits, disk));
    let attacked = neighbour.while_it(&probe.name, arena, async {
        match probe.name.as_str() {
            "output-flood" => flood(arena.engine, record, args).await,
            _ => attack(arena.engine, record, Way::Exec, &args, ATTACK_TIME)
                .await
                .map(|said| judge(probe, &said, limit)),
        }
    });
    let (verdict, detail) = match attacked.await {
        Ok(judged) => judged,
        Err(problem) => (Verdict::Breach, format!("the sandbox did not survive: {}", problem.message)),
    };
    match verdict {
        Verdict::Breach if !firm => said(Verdict::NotEnforced, format!("{detail}: {word}")),
        _ => said(verdict, detail),
    }
}

fn judge(probe: &Probe, said: &Said, limit: Limit) -> (Verdict, String) {
    let stopped = matches!(said.outcome.cause, Cause::Oom | Cause::Disk | Cause::Pids | Cause::Signal);
    match results(&said.stdout).remove(&probe.name) {
        Some((Verdict::Skipped, detail)) if probe.name == "cpu" => judge_cpu(&said.outcome, &detail),
        Some(result) => result,
        None if stopped && limit != Limit::Own => {
            (Verdict::Held, format!("stopped ({})", ended(&said.outcome)))
        }
        None => (Verdict::Skipped, format!("the probe gave no answer ({})", ended(&said.outcome))),
    }
}

/// Where the probe cannot tell, the receipt says at least that no more was had.
fn judge_cpu(outcome: &Outcome, detail: &str) -> (Verdict, String) {
    #[expect(clippy::cast_precision_loss, reason = "microseconds of one call, for a ratio")]
    let used = outcome.receipt.cpu_us as f64 / outcome.receipt.duration_us.max(1) as f64;
    (Verdict::Skipped, format!("{detail}; the receipt says {used:.2} CPUs"))
}

/// Reads a flood to its end: every byte must be accounted for, and neither this process nor the disk may grow with it.
async fn flood(engine: &Engine, record: &Record, args: Vec<String>) -> Result<(Verdict, String), Problem> {
    let argv = [vec![PROGRAM.to_owned()], args].concat();
    // Lets the kernel's high-water mark begin anew; where it cannot, the mark is only less sharp.
    let _ = fs::write("/proc/self/clear_refs", "5");
    let before = memory_peak();
    let mut call = engine.exec(record, command(argv, ATTACK_TIME)).await?;
    let (mut got, mut gaps, mut next) = (0_u64, 0_u64, 0_u64);
    let mut wrong = Vec::new();
    let outcome = loop {
        match call.next().await? {
            Output::Bytes { stream: Stream::Stdout, offset, bytes, .. } => {
                if offset < next {
                    wrong.push(format!("offset {offset} after {next}"));
                }
                gaps += offset.saturating_sub(next);
                got += bytes.len() as u64;
                next = offset + bytes.len() as u64;
            }
            Output::Finished(outcome) => break outcome,
            _ => {}
        }
    };
    let grown = memory_peak().saturating_sub(before);
    let spooled = size_of(&host::directory(engine, record).join("spool"));
    if got + gaps != outcome.receipt.stdout_bytes {
        wrong.push(format!(
            "{got} bytes came, {gaps} were left out, {} were counted",
            outcome.receipt.stdout_bytes
        ));
    }
    if grown > FLOOD_MEMORY {
        wrong.push(format!("this process grew by {} MB", grown >> 20));
    }
    // The head up to the limit, a tail, and what a chunk may overshoot.
    if spooled > record.spec.limits.output.0 + (4 << 20) {
        wrong.push(format!("{} MB lie in the spool", spooled >> 20));
    }
    // The probe stops by itself long before: a call that is still there was held up on its way.
    if outcome.cause == Cause::Timeout {
        wrong.push(format!("the output stalled after {} MB", got >> 20));
    }
    if outcome.receipt.stdout_bytes < FLOOD_MB << 20 && wrong.is_empty() {
        return Ok((Verdict::Skipped, format!("too slow to tell: {} MB ({})", got >> 20, ended(&outcome))));
    }
    let fine = format!(
        "{} MB printed, {} MB left out, all counted; this process grew by {} kB, {} MB kept",
        outcome.receipt.stdout_bytes >> 20,
        gaps >> 20,
        grown >> 10,
        spooled >> 20
    );
    Ok(if wrong.is_empty() { (Verdict::Held, fine) } else { (Verdict::Breach, wrong.join("; ")) })
}

/// The most memory this process has had, in bytes.
fn memory_peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|text| text.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or_default() << 10
}

fn size_of(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.metadata().ok()).map(|meta| meta.len()).sum()
}

/// One small call of the neighbour.
async fn ping(arena: &Arena<'_>) -> Result<Duration, Problem> {
    let start = Instant::now();
    let call = arena.engine.exec(&arena.b, command(vec![PROGRAM.into(), "list".into()], PING_TIME)).await?;
    let said = listen(call).await?;
    match said.outcome.exit_code {
        0 => Ok(start.elapsed()),
        _ => Err(Problem::internal(format!("the neighbour's call failed: {}", ended(&said.outcome)))),
    }
}

async fn quiet(arena: &Arena<'_>) -> Result<Duration, Problem> {
    let mut times = Vec::new();
    for _ in 0..QUIET_PINGS {
        times.push(ping(arena).await?);
    }
    Ok(median(times))
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// What the other sandbox noticed.
#[derive(Debug)]
struct Neighbour {
    quiet: Duration,
    calls: usize,
    worst: Duration,
    wrong: Vec<String>,
    firm: bool,
    word: String,
}

impl Neighbour {
    /// Keeps calling the neighbour while the attack goes on.
    async fn while_it<T>(&mut self, name: &str, arena: &Arena<'_>, attack: impl Future<Output = T>) -> T {
        let over = Cell::new(false);
        let attacking = async {
            let done = attack.await;
            over.set(true);
            done
        };
        let mut times = Vec::new();
        // A call that is under way when the attack ends is waited for: one that hangs must not be missed.
        let calling = async {
            while !over.get() {
                match ping(arena).await {
                    Ok(time) => times.push(time),
                    Err(problem) => {
                        self.wrong.push(format!("during {name}: {}", problem.message));
                        break;
                    }
                }
                tokio::time::sleep(PING_PAUSE).await;
            }
        };
        let (done, ()) = tokio::join!(attacking, calling);
        self.calls += times.len();
        let usual = median(times);
        self.worst = self.worst.max(usual);
        if usual > self.quiet * SLOWER + SLOWER_BY {
            self.wrong.push(format!("during {name} a call took {usual:.1?} instead of {:.1?}", self.quiet));
        }
        done
    }

    fn judged(&self) -> Finding {
        let fine = format!(
            "{} calls of the neighbour: {:.1?} when quiet, at most {:.1?} (median) under attack",
            self.calls, self.quiet, self.worst
        );
        let judged = Finding::host_judged("exhaustion", "neighbour-answers", fine, &self.wrong);
        if judged.verdict == Verdict::Breach && !self.firm {
            return Finding {
                verdict: Verdict::NotEnforced,
                detail: format!("{}: {}", judged.detail, self.word),
                ..judged
            };
        }
        judged
    }
}
