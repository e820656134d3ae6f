//! `carrel-probe`: attacks the sandbox it runs in and says whether it held. For `carrel doctor --prove`.
//!
//! ```text
//! carrel-probe list                                    what there is, as JSON
//! carrel-probe run NAME [--fact key=value]...          one attack, one JSON line
//! carrel-probe all [--group G] [--fact key=value]...   every light attack, one JSON line each
//! carrel-probe cling WAY [--fact key=value]...         stays, whatever is done to it; the host judges
//! ```
//!
//! Invariants: an attack runs in a forked process, so that none takes another down; what an attack does when
//! it *succeeds* is the smallest thing that shows it; nothing runs outside a box (see [`guard`]).
//! Deliberately absent: secrets. The host passes names and digests, and compares.

mod cling;
mod descriptors;
mod devices;
mod exhaustion;
mod facts;
mod host_files;
mod isolate;
mod kernel;
mod look;
mod network;
mod outcome;
mod processes;
mod sessions;
mod sha256;
mod sys;
mod table;

use facts::Facts;
use isolate::{End, isolate};
use outcome::{Outcome, Verdict, clip, held, skipped};
use serde::Serialize;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;
use table::{Probe, Weight};

/// A refused attack returns in microseconds; ten seconds is a hang.
const LIGHT_LIMIT: Duration = Duration::from_secs(10);
/// Heavy attacks stop themselves within ten seconds and then clean up.
const HEAVY_LIMIT: Duration = Duration::from_secs(20);

const USAGE: &str = "usage: carrel-probe list | run NAME [--fact key=value]... | all [--group G] [--fact key=value]... | cling WAY";

#[derive(Serialize)]
struct Listed {
    name: &'static str,
    group: &'static str,
    title: &'static str,
    needs: &'static [&'static str],
    weight: Weight,
}

#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    verdict: Verdict,
    detail: &'a str,
}

fn main() -> ExitCode {
    let inherited = look::open_descriptors();
    let args: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&args, inherited) {
        Ok(code) => code,
        Err(message) => {
            let _ = writeln!(std::io::stderr(), "carrel-probe: {message}");
            ExitCode::from(2)
        }
    }
}

fn dispatch(args: &[String], inherited: Vec<i32>) -> Result<ExitCode, String> {
    let mut facts = Facts::new(inherited);
    let (mut words, mut group) = (Vec::new(), None);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match arg.as_str() {
            "--fact" => facts.add(rest.next().ok_or("--fact needs key=value")?)?,
            "--group" => group = Some(rest.next().ok_or("--group needs a name")?.as_str()),
            flag if flag.starts_with('-') => return Err(format!("unknown option {flag}\nhint: {USAGE}")),
            word => words.push(word),
        }
    }
    match words.as_slice() {
        ["list"] => list(),
        ["run", name] => {
            let (_, probe) = table::all().find(|(_, probe)| probe.name == *name).ok_or_else(|| {
                format!("no probe named {name:?}\nhint: `carrel-probe list` names them all")
            })?;
            guard(&facts)?;
            attack(probe, &facts)
        }
        ["cling", way] if cling::WAYS.contains(way) => {
            guard(&facts)?;
            cling::cling(way);
            Ok(ExitCode::SUCCESS)
        }
        ["all"] => {
            if let Some(wanted) = group.filter(|wanted| !table::GROUPS.iter().any(|(name, _)| name == wanted))
            {
                let names: Vec<&str> = table::GROUPS.iter().map(|(name, _)| *name).collect();
                return Err(format!("no group {wanted:?}\nhint: the groups are {}", names.join(", ")));
            }
            guard(&facts)?;
            let mut code = ExitCode::SUCCESS;
            for (name, probe) in table::all() {
                if probe.weight == Weight::Light && group.is_none_or(|wanted| wanted == name) {
                    let ended = attack(probe, &facts)?;
                    if ended != ExitCode::SUCCESS {
                        code = ended;
                    }
                }
            }
            Ok(code)
        }
        _ => Err(USAGE.to_owned()),
    }
}

fn list() -> Result<ExitCode, String> {
    let listed: Vec<Listed> = table::all()
        .map(|(group, Probe { name, title, needs, weight, .. })| Listed {
            name,
            group,
            title,
            needs,
            weight: *weight,
        })
        .collect();
    print(&serde_json::to_string_pretty(&listed).map_err(|error| error.to_string())?)?;
    Ok(ExitCode::SUCCESS)
}

/// Attacks are for boxes only. `/run/carrel` marks one, but a host that runs the daemon may have that
/// directory too: it counts only where the user namespace is not the host's own.
fn guard(facts: &Facts) -> Result<(), String> {
    let marked = std::path::Path::new("/run/carrel").exists();
    let own_ids = std::fs::read_to_string("/proc/self/uid_map").is_ok_and(|map| !look::maps_everything(&map));
    if facts.confirmed() || (marked && own_ids) {
        return Ok(());
    }
    Err("this does not look like a carrel sandbox, and attacks are not run anywhere else\n\
         hint: inside a box, pass --fact confirmed_box=1"
        .to_owned())
}

/// Runs one probe and prints its line. The exit code is non-zero when the probe itself failed.
fn attack(probe: &Probe, facts: &Facts) -> Result<ExitCode, String> {
    let missing: Vec<&str> = probe.needs.iter().copied().filter(|need| facts.get(need).is_none()).collect();
    if !missing.is_empty() {
        return report(probe, &skipped(format!("needs the fact {}", missing.join(", "))), ExitCode::SUCCESS);
    }
    if probe.weight == Weight::Heavy && !facts.confirmed() {
        return report(probe, &skipped("only with --fact confirmed_box=1"), ExitCode::SUCCESS);
    }
    let limit = if probe.weight == Weight::Heavy { HEAVY_LIMIT } else { LIGHT_LIMIT };
    let (outcome, code) = match isolate(limit, || (probe.attack)(facts)) {
        End::Done(outcome) => (outcome, ExitCode::SUCCESS),
        End::Signal(libc::SIGSYS) => (held("killed by SIGSYS"), ExitCode::SUCCESS),
        End::Signal(signal) => (skipped(format!("the probe died of signal {signal}")), ExitCode::FAILURE),
        End::TimedOut => (skipped(format!("the probe hung for {} s", limit.as_secs())), ExitCode::FAILURE),
        End::Failed(why) => (skipped(format!("the probe failed: {why}")), ExitCode::FAILURE),
    };
    report(probe, &outcome, code)
}

fn report(probe: &Probe, outcome: &Outcome, code: ExitCode) -> Result<ExitCode, String> {
    let detail = clip(outcome.detail.clone());
    let line = Line { name: probe.name, verdict: outcome.verdict, detail: &detail };
    print(&serde_json::to_string(&line).map_err(|error| error.to_string())?)?;
    Ok(code)
}

fn print(text: &str) -> Result<(), String> {
    writeln!(std::io::stdout().lock(), "{text}").map_err(|error| format!("cannot write the result: {error}"))
}
