//! `carrel files`: one file operation each, straight on the workspace.

use std::{ffi::OsStr, fs::File, os::unix::ffi::OsStrExt, process::ExitCode};

use carrel_api::kept::Bytes;
use carrel_engine::Record;
use carrel_proto::{
    files::{
        Delete, Entry, FileReply, FileRequest, GuestPath, Kind, List, MAX_PAGE, Mkdir, Move, PathError,
        Search, Stat,
    },
    limits::ByteSize,
    problem::{Code, Problem},
};
use serde_json::{Value, json};

use crate::{
    args::Files,
    commands::{cp, ls::now_ms},
    context::Context,
    output::short_time,
    target::Target,
};

pub(crate) async fn run(args: &Files, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.for_files(name(args)).await?;
    let output = context.output;
    match args {
        Files::Ls { path, depth, long, .. } => list(context, &record, guest_path(path)?, *depth, *long)?,
        Files::Cat { path, .. } => print_file(context, &record, &guest_path(path)?)?,
        Files::Rm { paths, recursive, .. } => {
            let mut removed = 0;
            for path in paths {
                let request = FileRequest::Delete(Delete { path: guest_path(path)?, recursive: *recursive });
                if let FileReply::Delete(reply) = ask(context, &record, request)? {
                    removed += reply.removed;
                }
            }
            if output.json {
                output.object(&json!({ "removed": removed }))?;
            } else {
                output.detail(format_args!("removed {removed}"));
            }
        }
        Files::Stat { path, follow, .. } => {
            let request = FileRequest::Stat(Stat { path: guest_path(path)?, follow: *follow });
            if let FileReply::Stat(entry) = ask(context, &record, request)? {
                if output.json { output.object(&entry)? } else { output.pairs(&facts(&entry))? }
            }
        }
        Files::Mkdir { path, parents, .. } => {
            let request =
                FileRequest::Mkdir(Mkdir { path: guest_path(path)?, parents: *parents, mode: None });
            quietly(context, ask(context, &record, request)?)?;
        }
        Files::Mv { from, to, force, .. } => {
            let (from, to) = (guest_path(from)?, guest_path(to)?);
            let request = FileRequest::Move(Move { from, to, overwrite: *force, parents: false });
            quietly(context, ask(context, &record, request)?)?;
        }
        Files::Search { text, path, glob, regex, ignore_case, limit, .. } => {
            let request = Search {
                path: guest_path(path)?,
                glob: glob.clone(),
                text: text.clone(),
                regex: *regex,
                ignore_case: *ignore_case,
                limit: *limit,
                max_file: None,
            };
            return search(context, &record, request);
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn name(args: &Files) -> &Target {
    match args {
        Files::Ls { name, .. }
        | Files::Cat { name, .. }
        | Files::Rm { name, .. }
        | Files::Stat { name, .. }
        | Files::Mkdir { name, .. }
        | Files::Mv { name, .. }
        | Files::Search { name, .. } => name,
    }
}

/// A path in a sandbox, in any bytes.
pub(crate) fn guest_path(path: &OsStr) -> Result<GuestPath, Problem> {
    GuestPath::parse(path.as_bytes()).map_err(|error| {
        let code = if error == PathError::Outside { Code::PathOutside } else { Code::InvalidArgument };
        Problem::new(code, format!("{}: {error}", path.display()))
            .hint("use a path relative to /workspace, or an absolute one inside it")
    })
}

fn ask(context: &Context<'_>, record: &Record, request: FileRequest) -> Result<FileReply, Problem> {
    context.desk.file(record, request).map_err(in_flags)
}

/// Hints name fields of requests; here they are flags.
fn in_flags(mut problem: Problem) -> Problem {
    for (field, flag) in [
        ("pass parents=true", "use -p"),
        ("pass recursive=true", "use -r"),
        ("pass overwrite=true", "use --force"),
    ] {
        problem.hint = problem.hint.replace(field, flag);
    }
    problem
}

/// Of what changed something, only JSON tells.
fn quietly(context: &Context<'_>, reply: FileReply) -> Result<(), Problem> {
    match reply {
        FileReply::Mkdir(entry) | FileReply::Move(entry) if context.output.json => {
            context.output.object(&entry)
        }
        _ => Ok(()),
    }
}

/// Page by page: a directory of any size is printed in constant memory, but for JSON's one object.
fn list(
    context: &Context<'_>,
    record: &Record,
    path: GuestPath,
    depth: u32,
    long: bool,
) -> Result<(), Problem> {
    let mut all: Vec<Entry> = Vec::new();
    let mut after = None;
    loop {
        let request = FileRequest::List(List { path: path.clone(), depth, limit: MAX_PAGE, after });
        let FileReply::List(page) = ask(context, record, request)? else { break };
        if context.output.json {
            all.extend(page.entries);
        } else if long {
            let rows: Vec<Vec<String>> = page.entries.iter().map(row).collect();
            context.output.table(&["MODE", "SIZE", "CHANGED", "NAME"], &rows)?;
        } else {
            let lines: String =
                page.entries.iter().map(|entry| format!("{}{}\n", entry.name, mark(entry.kind))).collect();
            context.output.data(lines.as_bytes())?;
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    if context.output.json {
        context.output.object(&json!({ "entries": all }))?;
    }
    Ok(())
}

fn mark(kind: Kind) -> &'static str {
    match kind {
        Kind::Dir => "/",
        Kind::Symlink => "@",
        Kind::Fifo => "|",
        Kind::Socket => "=",
        Kind::File | Kind::Device => "",
    }
}

fn row(entry: &Entry) -> Vec<String> {
    let target = entry.target.as_ref().map(|target| format!(" -> {target}")).unwrap_or_default();
    vec![mode(entry), ByteSize(entry.size).to_string(), changed(entry), format!("{}{target}", entry.name)]
}

/// `-rw-r--r--`.
fn mode(entry: &Entry) -> String {
    let kind = match entry.kind {
        Kind::File => '-',
        Kind::Dir => 'd',
        Kind::Symlink => 'l',
        Kind::Fifo => 'p',
        Kind::Socket => 's',
        Kind::Device => 'c',
    };
    let bit = |at: u32| if entry.mode >> at & 1 == 1 { ['x', 'w', 'r'][at as usize % 3] } else { '-' };
    std::iter::once(kind).chain((0..9).rev().map(bit)).collect()
}

fn changed(entry: &Entry) -> String {
    let then = u64::try_from(entry.mtime_ns / 1_000_000).unwrap_or(0);
    format!("{} ago", short_time(now_ms().saturating_sub(then)))
}

fn facts(entry: &Entry) -> Vec<(&'static str, String)> {
    let kind = match serde_json::to_value(entry.kind) {
        Ok(Value::String(kind)) => kind,
        _ => String::new(),
    };
    let mut facts = vec![
        ("path", entry.name.to_string()),
        ("kind", kind),
        ("size", format!("{} bytes", entry.size)),
        ("mode", format!("{:04o} {}", entry.mode, mode(entry))),
        ("changed", changed(entry)),
    ];
    if let Some(target) = &entry.target {
        facts.push(("target", target.to_string()));
    }
    facts
}

fn print_file(context: &Context<'_>, record: &Record, path: &GuestPath) -> Result<(), Problem> {
    let root = context.desk.files(record)?;
    if context.output.json {
        let reply = root.read(path, 0, None)?;
        let content = serde_json::to_value(Bytes(reply.data.as_bytes())).map_err(Problem::internal)?;
        return context.output.object(&json!({ "path": path, "size": reply.size, "content": content }));
    }
    let mut stdout = File::from(rustix::io::dup(rustix::stdio::stdout()).map_err(Problem::internal)?);
    cp::cat(&root, path, &mut stdout).map(drop)
}

/// Exit code 1 when nothing was found, as `grep` has it.
fn search(context: &Context<'_>, record: &Record, request: Search) -> Result<ExitCode, Problem> {
    let FileReply::Search(found) = ask(context, record, FileRequest::Search(request))? else {
        return Err(Problem::internal("another answer than asked for"));
    };
    let code = if found.matches.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    if context.output.json {
        context.output.object(&found)?;
        return Ok(code);
    }
    let lines = found.matches.iter().map(|one| match (one.line, &one.text) {
        (Some(line), Some(text)) => format!("{}:{line}: {text}\n", one.path),
        _ => format!("{}\n", one.path),
    });
    context.output.data(lines.collect::<String>().as_bytes())?;
    if !found.complete {
        context.output.note("there is more; raise --limit or narrow the search");
    }
    Ok(code)
}
