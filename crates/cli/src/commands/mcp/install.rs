//! `carrel mcp install`: writes this program into the configuration file of an agent, or takes it out again.
//!
//! The way of an installation: what is known of the client ([`clients`]) gives the file and the entry; [`file`] reads the
//! text; [`format`](mod@format) edits it; the difference is shown; [`file`] keeps a backup and replaces the text. A file that does not parse
//! is never touched.

mod clients;
mod file;
mod format;
mod json;
mod report;
mod toml;

use std::{path::PathBuf, process::ExitCode};

use carrel_proto::problem::{Code, Problem};
use clap::{Parser, ValueEnum};
use serde_json::Value;

use self::{
    clients::{Facts, Server, facts},
    file::ConfigFile,
    report::{Action, Done},
};
use crate::{
    args::{Cli, Client, Command, Install},
    config::Surroundings,
    output::Output,
};

/// A server in a configuration: its keys in their order.
type Entry = Vec<(String, Value)>;

/// Keys that say how to start or find a server: ours to change. Others of an entry are the user's.
const OURS: [&str; 9] =
    ["type", "command", "args", "url", "serverUrl", "httpUrl", "headers", "bearer_token_env_var", "tools"];

pub(crate) fn run(args: &Install, around: &Surroundings, output: &Output) -> Result<ExitCode, Problem> {
    let Some(client) = args.client else {
        return report::list(&args.name, around, output);
    };
    let facts = facts(client);
    let path = file_of(&facts, args.project, around)?;
    if args.uninstall {
        let done = uninstall(args, &facts, &path)?;
        return report::done(client, &facts, args, &done, output);
    }
    let server = server(args)?;
    let entry = facts.entry(&server)?;
    if args.print {
        let text = facts.format.put("", &facts.section(&Value::Null), &args.name, &entry);
        let text = text.map_err(|fault| fault.problem(&path))?;
        return report::snippet(client, &facts, args, &path, &text, &entry, output);
    }
    let done = install(args, &facts, &path, &entry)?;
    report::done(client, &facts, args, &done, output)?;
    report::advice(&facts, args, &server, &done, around, output);
    Ok(ExitCode::SUCCESS)
}

fn file_of(facts: &Facts, project: bool, around: &Surroundings) -> Result<PathBuf, Problem> {
    if !project {
        return facts.user_file(around);
    }
    facts.project_file(around).ok_or_else(|| {
        let title = facts.title;
        Problem::new(Code::Unsupported, format!("{title} has no configuration of its own for a project"))
            .hint("leave out --project")
    })
}

/// What the client shall start or connect to.
fn server(args: &Install) -> Result<Server, Problem> {
    if let Some(url) = &args.http {
        check_url(url)?;
        return Ok(Server::Remote { url: url.clone() });
    }
    check_flags(&args.server)?;
    let program = std::env::current_exe().map_err(Problem::internal)?;
    let command = program.to_str().filter(|path| !path.ends_with(" (deleted)")).ok_or_else(|| {
        Problem::new(
            Code::InvalidArgument,
            format!("{} cannot be named in a configuration", program.display()),
        )
        .hint("run carrel from the place where it is installed")
    })?;
    let args = std::iter::once("mcp".to_owned()).chain(args.server.iter().cloned()).collect();
    Ok(Server::Program { command: command.to_owned(), args })
}

/// A mistake shows here, and not as a server that a client fails to start.
fn check_flags(flags: &[String]) -> Result<(), Problem> {
    let bad = |what: String| {
        Problem::new(Code::InvalidArgument, what).hint("`carrel mcp --help` lists the server's flags")
    };
    let words = ["carrel", "mcp"].into_iter().chain(flags.iter().map(String::as_str));
    let cli = Cli::try_parse_from(words).map_err(|error| {
        let text = error.to_string();
        let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
        bad(format!("flags after `--`: {first}"))
    })?;
    match cli.command {
        Command::Mcp(mcp) if mcp.command.is_some() => {
            Err(bad("after `--` go flags, not commands".to_owned()))
        }
        Command::Mcp(mcp) if mcp.http.is_some() => {
            Err(bad("a client that starts the server speaks stdio with it".to_owned())
                .hint("`--http URL` before the `--` connects to a server that runs"))
        }
        _ => Ok(()),
    }
}

fn check_url(url: &str) -> Result<(), Problem> {
    let bad = |what: &str| Problem::new(Code::InvalidArgument, format!("--http {url}: {what}"));
    let rest = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let rest = rest.ok_or_else(|| {
        bad("it does not begin with http:// or https://").hint("for example http://127.0.0.1:8765/mcp")
    })?;
    if rest.chars().any(|c| c.is_whitespace() || c.is_control()) {
        return Err(bad("there is a blank in it"));
    }
    let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
    if host.is_empty() || path.is_empty() {
        return Err(bad("it names no path").hint("carrel serves at /mcp"));
    }
    Ok(())
}

fn install(args: &Install, facts: &Facts, path: &std::path::Path, entry: &Entry) -> Result<Done, Problem> {
    let file = ConfigFile::read(path)?;
    let broken = |fault: format::Fault| fault.problem(&file.path);
    let before = file.text.clone().unwrap_or_default();
    let section = facts.section(&facts.format.content(&before).map_err(broken)?);
    let known = facts.format.entry(&before, &section, &args.name).map_err(broken)?;
    let entry = match &known {
        Some(known) => merged(known, entry),
        None => entry.clone(),
    };
    if known.as_ref() == Some(&entry) {
        return Ok(Done::unchanged(&file.path, Some(entry)));
    }
    let after = facts.format.put(&before, &section, &args.name, &entry).map_err(broken)?;
    check_edit(facts, &section, &args.name, &before, &after, Some(&entry)).map_err(broken)?;
    file.check_writable()?;
    let backup = file.back_up()?;
    file.replace(&after)?;
    let action = if known.is_some() { Action::Updated } else { Action::Installed };
    Ok(Done { file: file.path, action, backup, entry: Some(entry), before, after })
}

fn uninstall(args: &Install, facts: &Facts, path: &std::path::Path) -> Result<Done, Problem> {
    let file = ConfigFile::read(path)?;
    let broken = |fault: format::Fault| fault.problem(&file.path);
    let before = file.text.clone().unwrap_or_default();
    let section = facts.section(&facts.format.content(&before).map_err(broken)?);
    let Some(known) = facts.format.entry(&before, &section, &args.name).map_err(broken)? else {
        return Ok(Done::unchanged(&file.path, None));
    };
    file.check_writable()?;
    let put = |text: &str| facts.format.put(text, &section, &args.name, &known).ok();
    let lacks = |text: &str| matches!(facts.format.entry(text, &section, &args.name), Ok(None));
    // If nothing but our own change lies between a backup and now, then undoing it gives that backup, to the byte.
    let kept = file.backups().into_iter().find(|kept| lacks(kept) && put(kept).as_ref() == Some(&before));
    let made_by_us = kept.is_none() && put("").as_ref() == Some(&before);
    let done = |after: String, backup| Done {
        file: file.path.clone(),
        action: Action::Removed,
        backup,
        entry: None,
        before: before.clone(),
        after,
    };
    if made_by_us {
        // There was no file before us, and there is nothing of anybody else's in it.
        file.delete()?;
        return Ok(done(String::new(), None));
    }
    let after = match kept {
        Some(kept) => kept,
        None => facts.format.cut(&before, &section, &args.name).map_err(broken)?,
    };
    check_edit(facts, &section, &args.name, &before, &after, None).map_err(broken)?;
    let backup = file.back_up()?;
    file.replace(&after)?;
    Ok(done(after, backup))
}

/// The entry as it shall be, with what the user added to it.
fn merged(known: &Entry, wanted: &Entry) -> Entry {
    let value_of =
        |entry: &Entry, key: &str| entry.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone());
    let keep = |(key, old): &(String, Value)| match value_of(wanted, key) {
        // The user may have put the token itself there.
        Some(_) if key == "headers" => Some((key.clone(), old.clone())),
        Some(new) => Some((key.clone(), new)),
        None if OURS.contains(&key.as_str()) => None,
        None => Some((key.clone(), old.clone())),
    };
    let mut all: Entry = known.iter().filter_map(keep).collect();
    all.extend(wanted.iter().filter(|(key, _)| value_of(known, key).is_none()).cloned());
    all
}

/// A second opinion before anything is written: the new text says what the old one said, and of our server what we want.
fn check_edit(
    facts: &Facts,
    section: &[&str],
    name: &str,
    before: &str,
    after: &str,
    entry: Option<&Entry>,
) -> Result<(), format::Fault> {
    let others = |text: &str| {
        let mut content = facts.format.content(text)?;
        let mut servers = Some(&mut content);
        for key in section {
            servers = servers.and_then(|value| value.get_mut(*key));
        }
        if let Some(servers) = servers.and_then(Value::as_object_mut) {
            servers.remove(name);
        }
        // What was made for our server alone is no change for others.
        if let Some(whole) = content.as_object_mut() {
            whole.retain(|key, value| {
                key != "inputs" && (!section.contains(&key.as_str()) || !is_empty(value))
            });
        }
        Ok(if is_empty(&content) { Value::Null } else { content })
    };
    let same = others(before)? == others(after)?;
    if same && facts.format.entry(after, section, name)?.as_ref() == entry {
        return Ok(());
    }
    Err(format::Fault::shape("the change would touch more than it should"))
}

fn is_empty(value: &Value) -> bool {
    value.as_object().map_or(value.is_null(), |all| all.is_empty())
}

/// A client as the command line has it.
fn word(client: Client) -> String {
    client.to_possible_value().map_or(String::new(), |value| value.get_name().to_owned())
}
