//! `carrel open`: a sandbox that is there before the first call.

use std::{io::Read, path::Path, process::ExitCode};

use carrel_engine::{
    Found, Labels, Wish,
    keys::Session,
    spec::{MAX_FILE, Mode, SandboxSpec},
};
use carrel_proto::problem::{Code, Problem};
use serde_json::json;

use crate::{
    args::Open,
    commands::{ls, run::ignored},
    context::Context,
    progress::Progress,
    target::Target,
};

pub(crate) async fn run(args: &Open, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if args.name.as_ref().is_some_and(Target::is_id) {
        return Err(bad("a sandbox is opened by a name, not by an id").hint("choose a name"));
    }
    let labels = Labels::new(args.labels.iter().cloned().collect())?;
    let wish = Wish { labels, ..context.settings.wish(args.making.environment.as_deref()) };
    let spec = args.spec.as_deref().map(|path| read(path, context)).transpose()?;
    let (name, wish) = match &spec {
        None => (args.name.clone(), wish),
        Some(spec) => {
            agree(args, spec, &wish)?;
            (named(args, spec)?, spec.wish(&wish))
        }
    };
    let Some(target) = name else {
        let progress = Progress::start(context.output, "starting the sandbox");
        let record = context.desk.nameless(&wish).await?;
        drop(progress);
        return tell(&Found { record, created: true, note: None }, None, context);
    };
    let found = context.sandbox(&target, &wish).await?;
    context.desk.ensure_session(&found.record, &target.session()).await?;
    let mut notes: Vec<String> = found.note.map(|note| note.text(&target.name)).into_iter().collect();
    notes.extend(ignored(&args.making, found.created));
    tell(&found, (!notes.is_empty()).then(|| notes.join("; ")), context)
}

fn tell(found: &Found, note: Option<String>, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if context.output.json {
        let mut object = ls::object(&found.record);
        object["created"] = json!(found.created);
        object["note"] = json!(note);
        object["enforced"] = json!(found.record.placed.as_ref().map(|placed| &placed.enforced));
        context.output.object(&object)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(note) = note {
        context.output.note(note);
    }
    let word = if found.created { "created" } else { "existing" };
    context.output.line(format_args!("{word} {}", found.record.id))?;
    Ok(ExitCode::SUCCESS)
}

fn bad(what: impl Into<String>) -> Problem {
    Problem::new(Code::InvalidArgument, what)
}

fn read(path: &Path, context: &Context<'_>) -> Result<SandboxSpec, Problem> {
    let failed = |error: std::io::Error| {
        bad(format!("{}: {error}", path.display())).hint("check the path after --spec")
    };
    let mut text = String::new();
    let most = MAX_FILE as u64 + 1;
    if path == Path::new("-") {
        std::io::stdin().take(most).read_to_string(&mut text).map_err(failed)?;
    } else {
        std::fs::File::open(path)
            .and_then(|file| file.take(most).read_to_string(&mut text))
            .map_err(failed)?;
    }
    SandboxSpec::from_text(&text, &context.settings.environments)
        .map_err(|problem| Problem { message: format!("{}: {}", path.display(), problem.message), ..problem })
}

/// What a flag says and the spec says otherwise is an error: neither is the one that was meant.
fn agree(args: &Open, spec: &SandboxSpec, wish: &Wish) -> Result<(), Problem> {
    let making = &args.making;
    let differs = [
        (
            "--env",
            making.environment.is_some()
                && spec.environment.is_some()
                && spec.environment != wish.environment,
        ),
        (
            "--cpus",
            making.cpus.is_some() && spec.cpu_millis.is_some_and(|cpus| cpus != wish.limits.cpu_millis),
        ),
        ("--memory", making.memory.is_some() && spec.memory.is_some_and(|size| size != wish.limits.memory)),
        ("--disk", making.disk.is_some() && spec.disk.is_some_and(|size| size != wish.limits.disk)),
        (
            "--idle-timeout",
            making.idle_timeout.is_some()
                && spec.idle_timeout_s.is_some_and(|time| time != wish.idle_timeout_s),
        ),
    ];
    match differs.iter().find(|(_, differs)| *differs) {
        Some((flag, _)) => Err(bad(format!("{flag} and the spec say different things")).hint("say it once")),
        None => Ok(()),
    }
}

/// Which sandbox a spec means. `None`: a fresh one.
fn named(args: &Open, spec: &SandboxSpec) -> Result<Option<Target>, Problem> {
    match (spec.mode, &args.name) {
        (Mode::Compute, Some(_)) => {
            Err(bad("the spec's `mode: compute` means a fresh sandbox, and NAME is one that stays")
                .hint("use `mode: code`, or leave the name out"))
        }
        (Mode::Compute, None) => Ok(None),
        (Mode::Code, Some(name)) => Ok(Some(name.clone())),
        (Mode::Code, None) => {
            let name = match &spec.session {
                Session::Isolated => return Ok(None),
                Session::Default => "default",
                Session::Named(name) => name.as_str(),
            };
            name.parse().map(Some).map_err(bad)
        }
    }
}
