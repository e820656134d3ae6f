//! What a person, or a program, is told of an installation.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::ExitCode,
};

use carrel_proto::problem::Problem;
use clap::ValueEnum;
use serde_json::{Map, Value, json};
use similar::TextDiff;

use super::{
    Entry,
    clients::{Facts, PASTE, Server, TOKEN, Token, facts},
    file::ConfigFile,
    word,
};
use crate::{
    args::{Client, Install},
    config::Surroundings,
    output::Output,
};

/// Of a line in a difference: some clients write all they know on one line.
const SHOWN_LINE: usize = 160;
const SHOWN_LINES: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Installed,
    Updated,
    Removed,
    Unchanged,
}

impl Action {
    fn word(self) -> &'static str {
        match self {
            Action::Installed => "installed",
            Action::Updated => "updated",
            Action::Removed => "removed",
            Action::Unchanged => "unchanged",
        }
    }
}

/// What was done to a file.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) file: PathBuf,
    pub(super) action: Action,
    pub(super) backup: Option<PathBuf>,
    /// As it is in the file now.
    pub(super) entry: Option<Entry>,
    pub(super) before: String,
    pub(super) after: String,
}

impl Done {
    pub(super) fn unchanged(file: &Path, entry: Option<Entry>) -> Self {
        let (before, after) = (String::new(), String::new());
        Self { file: file.to_path_buf(), action: Action::Unchanged, backup: None, entry, before, after }
    }
}

fn object(entry: &Entry) -> Map<String, Value> {
    entry.iter().cloned().collect()
}

fn scope(args: &Install) -> &'static str {
    if args.project { "project" } else { "user" }
}

pub(super) fn done(
    client: Client,
    facts: &Facts,
    args: &Install,
    done: &Done,
    output: &Output,
) -> Result<ExitCode, Problem> {
    let file = done.file.display().to_string();
    let difference = difference(done);
    if output.json {
        output.object(&json!({
            "client": word(client),
            "scope": scope(args),
            "file": file,
            "name": args.name,
            "action": done.action.word(),
            "backup": done.backup.as_ref().map(|path| path.display().to_string()),
            "entry": done.entry.as_ref().map(object),
            "diff": difference,
        }))?;
        return Ok(ExitCode::SUCCESS);
    }
    // Nobody is left to tell when stderr is gone.
    let _ = std::io::stderr().write_all(difference.as_bytes());
    let (name, title) = (&args.name, facts.title);
    match done.action {
        Action::Unchanged if args.uninstall => {
            output.note(format_args!("nothing to do: {title} has no server `{name}` in {file}"));
        }
        Action::Unchanged => output.note(format_args!("nothing to do: `{name}` is in {file} already")),
        action => output.note(format_args!("{} `{name}` for {title}: {file}", action.word())),
    }
    if let Some(backup) = &done.backup {
        output.note(format_args!("the file as it was: {}", backup.display()));
    }
    Ok(ExitCode::SUCCESS)
}

fn difference(done: &Done) -> String {
    if done.before == done.after {
        return String::new();
    }
    let file = done.file.display().to_string();
    let diff = TextDiff::from_lines(&done.before, &done.after);
    let text = diff.unified_diff().context_radius(3).header(&file, &file).to_string();
    let cut = |line: &str| match line.char_indices().nth(SHOWN_LINE) {
        Some((end, _)) => format!("{}…\n", &line[..end]),
        None => format!("{}\n", line.trim_end_matches('\r')),
    };
    text.lines().take(SHOWN_LINES).map(cut).collect()
}

/// What remains for the user to do or know.
pub(super) fn advice(
    facts: &Facts,
    args: &Install,
    server: &Server,
    done: &Done,
    around: &Surroundings,
    output: &Output,
) {
    let title = facts.title;
    match server {
        Server::Remote { url } => {
            let host = url.split("://").nth(1).unwrap_or_default();
            let local = ["127.0.0.1", "localhost", "[::1]"].iter().any(|own| host.starts_with(own));
            if url.starts_with("http://") && !local {
                output.warning("the token travels to that server in the clear: use https");
            }
            match facts.token {
                Token::Reference(reference) if reference.contains("input:") => {
                    output.note(format_args!("{title} will ask for the server's token once"));
                }
                Token::Pasted => {
                    let file = done.file.display();
                    output.note(format_args!("put the server's token in {file} in the place of {PASTE}"));
                }
                _ => output.note(format_args!("{title} takes the server's token from the variable {TOKEN}")),
            }
        }
        Server::Program { .. } => {
            let flags = args.server.join(" ");
            for (variable, flag) in [("CARREL_STATE", "--state"), ("CARREL_CONFIG", "--config")] {
                let set = around.variables.contains_key(std::ffi::OsStr::new(variable));
                if set && !flags.contains(flag) {
                    output.note(format_args!(
                        "{variable} is set here and may not be where {title} runs: `-- {flag} …` makes it certain"
                    ));
                }
            }
            if args.project && done.action != Action::Unchanged {
                output.note("the file names this program by its path here, which may differ for others");
            }
        }
    }
    if done.action != Action::Unchanged {
        output.note(format_args!("{title} sees it when it starts the next time"));
    }
}

/// `--print`: the snippet is data, where it goes is for people.
pub(super) fn snippet(
    client: Client,
    facts: &Facts,
    args: &Install,
    path: &Path,
    text: &str,
    entry: &Entry,
    output: &Output,
) -> Result<ExitCode, Problem> {
    let file = path.display().to_string();
    if output.json {
        output.object(&json!({
            "client": word(client),
            "scope": scope(args),
            "file": file,
            "name": args.name,
            "snippet": text,
            "entry": object(entry),
        }))?;
    } else {
        output.data(text.as_bytes())?;
        output.note(format_args!("for {}: {file}", facts.title));
    }
    Ok(ExitCode::SUCCESS)
}

/// Without a client: all that are known.
pub(super) fn list(name: &str, around: &Surroundings, output: &Output) -> Result<ExitCode, Problem> {
    let mut rows = Vec::new();
    let mut objects = Vec::new();
    for &client in Client::value_variants() {
        let facts = facts(client);
        let path = facts.user_file(around)?;
        let state = state(&facts, &path, name);
        let found = facts.found(around);
        let project = facts.project_file(around);
        let shown = match (state, found) {
            ("absent", true) => "found",
            ("absent", false) => "not found",
            (state, _) => state,
        };
        rows.push(vec![word(client), shown.to_owned(), path.display().to_string()]);
        objects.push(json!({
            "client": word(client),
            "title": facts.title,
            "found": found,
            "server": state,
            "file": path.display().to_string(),
            "project_file": project.map(|path| path.display().to_string()),
        }));
    }
    if output.json {
        output.object(&json!({ "clients": objects }))?;
    } else {
        output.table(&["CLIENT", "STATE", "FILE"], &rows)?;
        output.hint("carrel mcp install CLIENT");
    }
    Ok(ExitCode::SUCCESS)
}

/// What a client's file says of us: `installed`, `absent`, or `unreadable`.
fn state(facts: &Facts, path: &Path, name: &str) -> &'static str {
    let Ok(file) = ConfigFile::read(path) else { return "unreadable" };
    let text = file.text.unwrap_or_default();
    let entry = facts
        .format
        .content(&text)
        .and_then(|content| facts.format.entry(&text, &facts.section(&content), name));
    match entry {
        Ok(Some(_)) => "installed",
        Ok(None) => "absent",
        Err(_) => "unreadable",
    }
}
