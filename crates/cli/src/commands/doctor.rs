//! `carrel doctor`: what this host offers, found out by trying.

use std::{collections::BTreeMap, fs, path::Path, process::ExitCode};

use carrel_api::rest::desk::About;
use carrel_backend::host::HostInterpreters;
use carrel_engine::{
    Engine,
    call::Output as Piece,
    pool::{PoolStatus, ReadyKind},
};
use carrel_proto::{
    guest::Language,
    id::SessionName,
    limits::{ByteSize, Enforced, Enforcement},
    message::Run,
    outcome::Outcome,
    problem::{Code, Problem},
};
use serde::Serialize;

use crate::{
    args::Doctor, commands::inspect::enforcement, config::Settings, context::embedded, daemon::Client,
    output::Output, progress::Progress, prove,
};

struct Looking<'a> {
    engine: Engine,
    settings: &'a Settings,
    output: &'a Output,
    daemon: Option<Client>,
}

/// What a host is asked about.
#[derive(Debug, Serialize)]
struct Facts {
    carrel: &'static str,
    kernel: String,
    user: User,
    state: String,
    /// The daemon that the other commands go through.
    daemon: Option<About>,
    /// What that keeps ready.
    pool: Option<PoolStatus>,
    cgroup: &'static str,
    /// The kernel's version of Landlock, 0 without it.
    landlock: u8,
    seccomp: bool,
    /// The host's switches for them.
    user_namespaces: BTreeMap<&'static str, String>,
    enforced: Enforced,
    interpreters: HostInterpreters,
    /// Whether idle sandboxes can be frozen; if not, why.
    standby: Ability,
    /// Whether they can be written to disk.
    hibernation: Ability,
    /// Whether python can be copied from a warm parent instead of being started.
    warm_parents: Warm,
    sandbox: Trial,
}

#[derive(Debug, Serialize)]
struct Ability {
    works: bool,
    error: Option<Problem>,
}

#[derive(Debug, Serialize)]
struct Warm {
    on: bool,
    /// Of the parent that was made to find out: what all copies share.
    bytes: Option<u64>,
    /// What it has loaded: what it was told to, and what sandboxes have asked for.
    modules: Vec<String>,
    /// What it could not, and why.
    refused: BTreeMap<String, String>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct User {
    uid: u32,
    root: bool,
}

/// What came of making a sandbox and running something in it.
#[derive(Debug, Serialize)]
struct Trial {
    works: bool,
    milliseconds: u128,
    error: Option<Problem>,
}

/// Always with an engine of its own: what is asked for is this host, not what a daemon makes of it.
pub(crate) async fn run(
    args: &Doctor,
    settings: &Settings,
    alone: bool,
    output: &Output,
) -> Result<ExitCode, Problem> {
    let engine = embedded(output, settings)?;
    let daemon = if alone { None } else { Client::find(settings, output).await };
    let context = &Looking { engine, settings, output, daemon };
    if args.prove {
        // What is attacked is what callers get: a python that is a copy, where there are copies.
        let _ = context.engine.parent(Language::Python.as_str());
        return prove::run(&context.engine, output.json, args.filter.as_deref(), args.pool).await;
    }
    let progress = Progress::start(context.output, "looking around");
    let facts = look(args, context).await;
    drop(progress);
    if context.output.json {
        context.output.object(&facts)?;
    } else {
        print(&facts, context)?;
    }
    Ok(if facts.sandbox.works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn look(args: &Doctor, context: &Looking<'_>) -> Facts {
    let place = context.engine.state_directory().join("environments");
    let environments = context.engine.environments();
    let look = if args.refresh { HostInterpreters::look } else { HostInterpreters::find };
    let interpreters = look(&place, environments.whereabouts());
    let system = rustix::system::uname();
    let word = |text: &std::ffi::CStr| text.to_string_lossy().into_owned();
    let uid = rustix::process::geteuid();
    let enforced = context.engine.enforced(&context.settings.limits);
    let ability = |error: Option<Problem>| Ability { works: error.is_none(), error };
    let freezer = match &enforced.freezer {
        Enforcement::Nothing(why) => Some(Problem::new(Code::Unsupported, why.clone())),
        _ => None,
    };
    Facts {
        carrel: env!("CARGO_PKG_VERSION"),
        kernel: format!("{} {} {}", word(system.sysname()), word(system.release()), word(system.machine())),
        user: User { uid: uid.as_raw(), root: uid.is_root() },
        state: context.engine.state_directory().display().to_string(),
        daemon: context.daemon.as_ref().map(|client| client.about.clone()),
        pool: match &context.daemon {
            // One that does not say has other troubles, which its own line shows.
            Some(client) => client.pool().await.ok(),
            None => None,
        },
        cgroup: cgroup(),
        landlock: landlock(),
        seccomp: read("/proc/sys/kernel/seccomp/actions_avail").is_some() || status_has("Seccomp:"),
        user_namespaces: user_namespaces(),
        enforced,
        standby: ability(freezer),
        hibernation: ability(context.engine.can_hibernate().err()),
        warm_parents: warm_parents(context),
        sandbox: trial(context, &interpreters).await,
        interpreters,
    }
}

fn warm_parents(context: &Looking<'_>) -> Warm {
    let warmth = context.settings.environments.warmth();
    let made = match context.engine.parent(Language::Python.as_str()) {
        Ok(made) => made,
        Err(problem) => Some(Err(problem.message)),
    };
    let nothing =
        Warm { on: warmth.on, bytes: None, modules: Vec::new(), refused: BTreeMap::new(), error: None };
    match made {
        Some(Ok(told)) => Warm {
            bytes: Some(told.bytes),
            modules: told.modules,
            refused: told.refused.into_iter().collect(),
            ..nothing
        },
        Some(Err(why)) => Warm { error: Some(why), ..nothing },
        None => nothing,
    }
}

/// Makes a sandbox, runs nothing much in it, and takes it away.
async fn trial(context: &Looking<'_>, interpreters: &HostInterpreters) -> Trial {
    let begun = std::time::Instant::now();
    let outcome = attempt(context, interpreters).await;
    Trial { works: outcome.is_ok(), milliseconds: begun.elapsed().as_millis(), error: outcome.err() }
}

async fn attempt(context: &Looking<'_>, interpreters: &HostInterpreters) -> Result<(), Problem> {
    let engine = &context.engine;
    let record = engine.ephemeral(&context.settings.wish(None)).await?;
    let there = |language: &Language| {
        interpreters.interpreters.get(language).is_some_and(|found| !found.program.is_empty())
    };
    let ran = match [Language::Bash, Language::Python, Language::Node].into_iter().find(there) {
        Some(language) => {
            let run = Run {
                session: SessionName::main(),
                language,
                code: "1".into(),
                timeout_ms: 10_000,
                cancel_on_disconnect: true,
            };
            finished(context, &record, run).await.map(drop)
        }
        None => engine.status(&record).await.map(drop),
    };
    engine.close(&record, None).await?;
    ran
}

async fn finished(
    context: &Looking<'_>,
    record: &carrel_engine::Record,
    run: Run,
) -> Result<Outcome, Problem> {
    let mut call = context.engine.run(record, run).await?;
    loop {
        if let Piece::Finished(outcome) = call.next().await? {
            return match outcome.problem {
                Some(problem) if problem.code != Code::Crashed => Err(problem),
                _ => Ok(outcome),
            };
        }
    }
}

fn print(facts: &Facts, context: &Looking<'_>) -> Result<(), Problem> {
    let output = context.output;
    let daemon = facts.daemon.as_ref().map_or_else(
        || "none: commands do the work themselves".to_owned(),
        |about| format!("pid {} at {}: commands go through it", about.pid, context.settings.socket.display()),
    );
    let mut rows = vec![
        ("carrel", facts.carrel.to_owned()),
        ("kernel", facts.kernel.clone()),
        ("user", format!("{}{}", facts.user.uid, if facts.user.root { " (root)" } else { "" })),
        ("state", facts.state.clone()),
        ("daemon", daemon),
        ("pool", pool(facts, context.settings)),
        ("cgroup", facts.cgroup.to_owned()),
        ("seccomp", if facts.seccomp { "yes" } else { "no" }.to_owned()),
        (
            "landlock",
            if facts.landlock > 0 { format!("yes, version {}", facts.landlock) } else { "no".to_owned() },
        ),
    ];
    rows.extend(facts.user_namespaces.iter().map(|(name, value)| (*name, value.clone())));
    for (language, found) in &facts.interpreters.interpreters {
        let value = match found.program.is_empty() {
            true => format!("not found: {}", found.missing),
            false => format!("{} at {}", found.version, found.program),
        };
        rows.push((language.as_str(), value));
    }
    let prefixes: Vec<String> =
        facts.interpreters.prefixes.iter().map(|prefix| prefix.display().to_string()).collect();
    rows.push(("prefixes", if prefixes.is_empty() { "/usr alone".to_owned() } else { prefixes.join(", ") }));
    rows.extend(enforcement(&facts.enforced).map(|(name, how)| (name, how)));
    for (name, ability) in [("standby", &facts.standby), ("hibernation", &facts.hibernation)] {
        let word = match &ability.error {
            None => "yes".to_owned(),
            Some(problem) if problem.hint.is_empty() => format!("no: {}", problem.message),
            Some(problem) => format!("no: {} ({})", problem.message, problem.hint),
        };
        rows.push((name, word));
    }
    let warm = &facts.warm_parents;
    let modules = if warm.modules.is_empty() { "no modules".to_owned() } else { warm.modules.join(", ") };
    let refused: String = warm.refused.iter().map(|(name, why)| format!("; not {name}: {why}")).collect();
    let word = match (warm.on, warm.bytes, &warm.error) {
        (false, _, _) => "off".to_owned(),
        (true, Some(bytes), _) => format!("yes: python with {modules}, {}{refused}", ByteSize(bytes)),
        (true, None, why) => format!("no: {}", why.as_deref().unwrap_or("python was not found")),
    };
    rows.push(("warm parents", word));
    let trial = match &facts.sandbox.error {
        None => format!("works ({} ms)", facts.sandbox.milliseconds),
        Some(_) => "cannot be made".to_owned(),
    };
    rows.push(("sandbox", trial));
    output.pairs(&rows)?;
    if let Some(problem) = &facts.sandbox.error {
        output.complain(problem);
    }
    let enforced = &facts.enforced;
    let all = [&enforced.memory, &enforced.pids, &enforced.cpu, &enforced.disk];
    if all.iter().any(|how| matches!(how, Enforcement::Nothing(_))) {
        output.warning("not every limit can be enforced on this host");
    }
    Ok(())
}

/// What stands ready, in words.
fn pool(facts: &Facts, settings: &Settings) -> String {
    let Some(pool) = &facts.pool else {
        return match settings.pool.ceiling {
            0 => "off".to_owned(),
            most => format!("of a daemon; at most {most} sandboxes would stand ready"),
        };
    };
    let named = |kind: &ReadyKind| {
        let language = kind.language.map_or("no interpreter", Language::as_str);
        format!("{} {} with {language}", kind.count, kind.environment)
    };
    let ready = match pool.ready.is_empty() {
        true => "nothing".to_owned(),
        false => pool.ready.iter().map(named).collect::<Vec<_>>().join(", "),
    };
    let made = pool.claimed + pool.cold;
    let why = pool.held_back.as_ref().map(|why| format!("; held back: {why}")).unwrap_or_default();
    format!(
        "{ready} ready, at most {}; {} of {made} new sandboxes came from it{why}",
        pool.ceiling, pool.claimed
    )
}

fn read(path: &str) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn status_has(line: &str) -> bool {
    read("/proc/self/status").is_some_and(|text| text.lines().any(|found| found.starts_with(line)))
}

fn cgroup() -> &'static str {
    let place = Path::new("/sys/fs/cgroup");
    if place.join("cgroup.controllers").exists() {
        "v2"
    } else if place.join("unified/cgroup.controllers").exists() {
        "v1 and v2 (hybrid)"
    } else if place.join("memory").exists() || place.join("pids").exists() {
        "v1"
    } else {
        "none"
    }
}

/// The switches that hosts turn user namespaces off with, where they exist.
fn user_namespaces() -> BTreeMap<&'static str, String> {
    let switches = [
        ("user.max_user_namespaces", "/proc/sys/user/max_user_namespaces"),
        ("kernel.unprivileged_userns_clone", "/proc/sys/kernel/unprivileged_userns_clone"),
        (
            "kernel.apparmor_restrict_unprivileged_userns",
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
        ),
    ];
    switches.into_iter().filter_map(|(name, path)| Some((name, read(path)?))).collect()
}

/// The newest version of Landlock that the kernel takes. Making a ruleset restricts nobody.
fn landlock() -> u8 {
    use landlock::{ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr, Scope};
    let takes = |abi: ABI| {
        let hard = || Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
        let ruleset = hard().handle_access(AccessFs::from_all(abi))?;
        let ruleset = if abi >= ABI::V4 { ruleset.handle_access(AccessNet::from_all(abi))? } else { ruleset };
        let ruleset = if abi >= ABI::V6 { ruleset.scope(Scope::from_all(abi))? } else { ruleset };
        ruleset.create().map(drop)
    };
    let versions = [(6, ABI::V6), (5, ABI::V5), (4, ABI::V4), (3, ABI::V3), (2, ABI::V2), (1, ABI::V1)];
    versions.into_iter().find(|(_, abi)| takes(*abi).is_ok()).map_or(0, |(number, _)| number)
}
