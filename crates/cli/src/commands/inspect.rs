//! `carrel inspect`: all that is known of one sandbox.

use std::process::ExitCode;

use carrel_engine::Record;
use carrel_proto::{
    limits::{ByteSize, Enforced, Enforcement},
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
    let known = context.known(&args.name).await?;
    // What only its agent knows would wake it.
    let (record, status, execs) = match known.state.is_asleep() {
        true => (known, None, None),
        false => {
            let record = context.existing(&args.name).await?;
            let status = context.desk.status(&record).await?;
            let execs = context.desk.execs(&record).await?;
            (record, Some(status), Some(execs))
        }
    };
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
    context.output.pairs(&facts(&record, status.as_ref()))?;
    if let Some(execs) = execs.filter(|execs| !execs.is_empty()) {
        context.output.line("")?;
        let rows: Vec<Vec<String>> = execs.iter().map(row).collect();
        context.output.table(&["EXEC", "SESSION", "WHAT", "AGE", "END"], &rows)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn facts(record: &Record, status: Option<&Status>) -> Vec<(&'static str, String)> {
    let spec = &record.spec;
    let limits = &spec.limits;
    let seconds = |seconds: u64| short_time(seconds.saturating_mul(1000));
    let mut facts = vec![
        ("name", ls::name(record)),
        ("id", record.id.to_string()),
        ("state", ls::state(record)),
        ("environment", spec.environment.clone()),
    ];
    let since = |then: u64| now_ms().saturating_sub(then);
    let (mut age, mut idle) = (since(record.created_unix_ms), since(record.used_unix_ms));
    if let Some(status) = status {
        let sessions = status.sessions.iter().map(|session| {
            let up: Vec<&str> = session.interpreters.iter().map(|language| language.as_str()).collect();
            match up.is_empty() {
                true => session.name.to_string(),
                false => format!("{} ({})", session.name, up.join(", ")),
            }
        });
        let versions = status.interpreters.iter().map(|(language, found)| match found.program.is_empty() {
            true => format!("{} missing", language.as_str()),
            false => format!("{} {}", language.as_str(), found.version),
        });
        facts.push(("interpreters", versions.collect::<Vec<_>>().join(", ")));
        facts.push(("sessions", sessions.collect::<Vec<_>>().join(", ")));
        (age, idle) = (status.age_ms, status.idle_ms);
    }
    facts.push(("age", format!("{} of {}", short_time(age), seconds(spec.max_lifetime_s))));
    facts.push(("idle", format!("{} of {}", short_time(idle), seconds(spec.idle_timeout_s))));
    let never = |time: u64| if time == 0 { "never".to_owned() } else { format!("after {}", seconds(time)) };
    facts.push(("standby", never(spec.standby_after_s)));
    facts.push(("hibernate", never(spec.hibernate_after_s)));
    if let Some(image) = record.image() {
        facts.push(("image", ByteSize(image.bytes).to_string()));
    }
    if let Some(reason) = record.standby_reason() {
        facts.push(("not hibernated", reason.to_owned()));
    }
    facts.push(("isolation", format!("{:?}", spec.isolation).to_lowercase()));
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
    match status {
        Some(status) => {
            facts.push(("execs", format!("{} under way, at most {}", status.running, limits.execs)))
        }
        None => facts.push(("execs", format!("at most {}", limits.execs))),
    }
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
