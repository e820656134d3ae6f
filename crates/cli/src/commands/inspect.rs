//! `carrel inspect`: all that is known of one sandbox.

use std::process::ExitCode;

use carrel_engine::Record;
use carrel_proto::{
    limits::{Enforced, Enforcement},
    message::{ExecInfo, Status, What},
    outcome::Outcome,
    problem::Problem,
};
use serde_json::json;

use crate::{
    args::Named,
    commands::ls::{self, now_ms},
    context::Context,
    output::short_time,
};

pub(crate) async fn run(args: &Named, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.existing(&args.name).await?;
    let status = context.desk.status(&record).await?;
    let execs = context.desk.execs(&record).await?;
    if context.output.json {
        let mut object = ls::object(&record);
        let placed = record.placed.as_ref();
        object["enforced"] = json!(placed.map(|placed| &placed.enforced));
        object["agent_pid"] = json!(placed.map(|placed| placed.pid));
        object["status"] = json!(status);
        object["execs"] = json!(execs);
        context.output.object(&object)?;
        return Ok(ExitCode::SUCCESS);
    }
    context.output.pairs(&facts(&record, &status))?;
    if !execs.is_empty() {
        context.output.line("")?;
        let rows: Vec<Vec<String>> = execs.iter().map(row).collect();
        context.output.table(&["EXEC", "SESSION", "WHAT", "AGE", "END"], &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn facts(record: &Record, status: &Status) -> Vec<(&'static str, String)> {
    let spec = &record.spec;
    let limits = &spec.limits;
    let seconds = |seconds: u64| short_time(seconds.saturating_mul(1000));
    let sessions = status.sessions.iter().map(|session| {
        let up: Vec<&str> = session.interpreters.iter().map(|language| language.as_str()).collect();
        if up.is_empty() { session.name.to_string() } else { format!("{} ({})", session.name, up.join(", ")) }
    });
    let versions = status.interpreters.iter().map(|(language, found)| match found.program.is_empty() {
        true => format!("{} missing", language.as_str()),
        false => format!("{} {}", language.as_str(), found.version),
    });
    let mut facts = vec![
        ("name", ls::name(record)),
        ("id", record.id.to_string()),
        ("state", ls::state(record)),
        ("environment", spec.environment.clone()),
        ("interpreters", versions.collect::<Vec<_>>().join(", ")),
        ("sessions", sessions.collect::<Vec<_>>().join(", ")),
        ("age", format!("{} of {}", short_time(status.age_ms), seconds(spec.max_lifetime_s))),
        ("idle", format!("{} of {}", short_time(status.idle_ms), seconds(spec.idle_timeout_s))),
        ("isolation", format!("{:?}", spec.isolation).to_lowercase()),
    ];
    if let Some(project) = &spec.project {
        let how = if project.writable { "writable" } else { "read-only" };
        facts.push(("project", format!("{} ({how})", project.directory.display())));
    }
    let cpus = crate::config::Value::Cpus(limits.cpu_millis).to_string();
    let values = [
        ("memory", limits.memory.to_string()),
        ("pids", limits.pids.to_string()),
        ("cpus", cpus),
        ("disk", limits.disk.to_string()),
    ];
    match record.placed.as_ref().map(|placed| enforcement(&placed.enforced)) {
        Some(how) => facts.extend(
            values.into_iter().zip(how).map(|((name, value), (_, how))| (name, format!("{value}, {how}"))),
        ),
        None => facts.extend(values),
    }
    facts.push(("output", format!("{} kept per call", limits.output)));
    facts.push(("execs", format!("{} under way, at most {}", status.running, limits.execs)));
    facts
}

/// Each limit and how it is held, in words.
pub(crate) fn enforcement(enforced: &Enforced) -> [(&'static str, String); 5] {
    let all = [
        ("memory", &enforced.memory),
        ("pids", &enforced.pids),
        ("cpus", &enforced.cpu),
        ("disk", &enforced.disk),
        ("freezer", &enforced.freezer),
    ];
    all.map(|(name, how)| {
        let words = match how {
            Enforcement::CgroupV2 => "by cgroup v2".to_owned(),
            Enforcement::CgroupV1 => "by cgroup v1".to_owned(),
            Enforcement::Rlimit(word) => format!("by a process limit: {word}"),
            Enforcement::SizedFilesystem => "by a file system of that size".to_owned(),
            Enforcement::Watched(word) => format!("watched: {word}"),
            Enforcement::Nothing(word) => format!("NOT enforced: {word}"),
        };
        (name, words)
    })
}

fn row(info: &ExecInfo) -> Vec<String> {
    let what = match &info.what {
        What::Run { language } => format!("run {}", language.as_str()),
        What::Exec { argv } => clip(&argv.join(" ")),
    };
    let end = match &info.outcome {
        Some(Outcome { exit_code, cause, .. }) => match serde_json::to_value(cause) {
            Ok(serde_json::Value::String(cause)) => format!("{cause} {exit_code}"),
            _ => exit_code.to_string(),
        },
        None if info.running => "running".to_owned(),
        None => "-".to_owned(),
    };
    let age = short_time(now_ms().saturating_sub(info.started_unix_ms));
    vec![info.exec.to_string(), info.session.to_string(), what, age, end]
}

/// One line without terminal tricks.
fn clip(text: &str) -> String {
    const MOST: usize = 60;
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(MOST + 1).collect();
    if clean.chars().count() > MOST { clean.chars().take(MOST - 1).chain(['…']).collect() } else { clean }
}
