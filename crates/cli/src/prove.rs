//! `carrel doctor --prove`: starts real sandboxes and attacks them from inside.
//!
//! ```text
//! arena    bait on the host (a canary file, listeners), two small sandboxes A and B, the probe program in both
//! light    every quick attack in A: as a command, on a terminal, and below each interpreter
//! host     what only the outside can see: rights, namespaces and cgroups of A's processes, whether bait was touched
//! limits   a call that clings to life by every means, against its time limit
//! heavy    every exhaustion attack in a box of its own, one after another, while B must go on answering
//! report   a table, or JSON; a breach makes the exit code 1, and so does nothing that held
//! ```
//! Invariants: an attack that needs a limit runs only in a box that has one; every sandbox is ephemeral, so a killed
//! `carrel` leaves nothing that the next call does not sweep; *held* is said only of what was tried.
//!
//! Deliberately absent: the attacks themselves. They are the program `carrel-probe`, which knows nothing of carrel but
//! the facts it is given.

mod arena;
mod attack;
mod heavy;
mod host;
mod limits;
mod report;
mod ring;
// The probe compares digests, so both sides must mean the same.
#[path = "../../probe/src/sha256.rs"]
mod sha256;

use std::{io::Write, process::ExitCode};

use carrel_engine::Engine;
use carrel_proto::{
    guest::Language,
    problem::{Code, Problem},
};
use serde::Deserialize;

use self::{
    arena::Arena,
    attack::Way,
    report::{Finding, Verdict},
    ring::Ring,
};

/// One attack that the probe program knows.
#[derive(Debug, Clone, Deserialize)]
struct Probe {
    name: String,
    group: String,
    needs: Vec<String>,
    weight: Weight,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Weight {
    Light,
    Heavy,
}

/// What was asked for: everything, one group, or the probes whose name has this in it.
#[derive(Debug, Clone, Copy)]
struct Filter<'a>(Option<&'a str>);

impl Filter<'_> {
    fn takes(self, group: &str, name: &str) -> bool {
        self.0.is_none_or(|wanted| wanted == group || name.contains(wanted))
    }
}

/// Groups in which it matters how a process was started: what it inherits, what it may call, whom it can see.
const INHERITED: [&str; 3] = ["descriptors", "kernel", "processes"];

pub(crate) async fn run(
    engine: &Engine,
    json: bool,
    filter: Option<&str>,
    pool: bool,
) -> Result<ExitCode, Problem> {
    let filter = Filter(filter);
    let mut arena = Arena::set_up(Ring::new(engine, pool)).await?;
    let attacked = attack_all(&mut arena, filter).await;
    // Whatever happened, the boxes go first.
    let left = arena.tear_down().await;
    progress("");
    let mut findings = attacked?;
    findings.extend(left.into_iter().filter(|finding| filter.takes(&finding.group, &finding.name)));
    if let (Some(wanted), true) = (filter.0, findings.is_empty()) {
        return Err(Problem::new(
            Code::InvalidArgument,
            format!("there is no probe or group of probes `{wanted}`"),
        )
        .hint(format!("the groups are {}", report::GROUPS.join(", "))));
    }
    let mut out = std::io::stdout().lock();
    let printed = if json { report::json(&mut out, &findings) } else { report::table(&mut out, &findings) };
    printed.map_err(|error| Problem::internal(format!("writing the report: {error}")))?;
    Ok(if proves(&findings) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// No breach, and something that held: a host on which nothing could be tried has proved nothing.
fn proves(findings: &[Finding]) -> bool {
    let has = |verdict| findings.iter().any(|finding| finding.verdict == verdict);
    has(Verdict::Held) && !has(Verdict::Breach)
}

async fn attack_all(arena: &mut Arena<'_>, filter: Filter<'_>) -> Result<Vec<Finding>, Problem> {
    let probes = arena.probes().await?;
    let chosen = |weight: Weight| -> Vec<&Probe> {
        probes
            .iter()
            .filter(|probe| probe.weight == weight && filter.takes(&probe.group, &probe.name))
            .collect()
    };
    let light = chosen(Weight::Light);
    let mut findings = arena.light(&light, Way::Exec).await;
    let inherited: Vec<&Probe> =
        light.into_iter().filter(|probe| INHERITED.contains(&probe.group.as_str())).collect();
    let ways = [Way::Terminal].into_iter().chain(Language::ALL.map(Way::Interpreter));
    for way in ways.filter(|_| !inherited.is_empty()) {
        findings.extend(arena.light(&inherited, way).await);
    }
    let seen = arena.judge_from_host().await;
    findings.extend(limits::run(arena, |group, name| filter.takes(group, name)).await?);
    let heavy = heavy::run(arena, &chosen(Weight::Heavy)).await?;
    let untouched = arena.judge_bait();
    findings.extend(
        seen.into_iter().chain(heavy).chain(untouched).filter(|one| filter.takes(&one.group, &one.name)),
    );
    Ok(findings)
}

/// One line for a person that waits, overwritten by the next; nothing where nobody looks.
fn progress(what: &str) {
    use std::io::IsTerminal;
    let mut err = std::io::stderr().lock();
    if err.is_terminal() {
        let line = if what.is_empty() { "\r\x1b[K".to_owned() } else { format!("\r\x1b[Kattacking: {what}") };
        // Nobody to tell when the terminal is gone.
        let _ = err.write_all(line.as_bytes()).and_then(|()| err.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_breach_or_nothing_that_held_is_a_failure() {
        use Verdict::{Breach, Held, NotEnforced, Skipped};
        for (verdicts, proved) in [
            (&[Held][..], true),
            (&[Held, NotEnforced, Skipped], true),
            (&[Held, Breach, Held], false),
            (&[Breach], false),
            (&[Skipped, NotEnforced, Skipped], false),
            (&[], false),
        ] {
            let findings: Vec<Finding> =
                verdicts.iter().map(|verdict| Finding::host("kernel", "probe", *verdict, "")).collect();
            assert_eq!(proves(&findings), proved, "{verdicts:?}");
        }
    }
}
