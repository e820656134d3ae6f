//! Arguments as typed. What they mean is decided in [`crate::config`] and by each command.

use std::{ffi::OsString, path::PathBuf};

use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;

use crate::{
    args::examples as ex,
    config::{Flag, Key},
    target::Target,
};

mod examples;
mod mcp;
mod serve;

pub(crate) use mcp::{Client, Install, Mcp, McpCommand};
pub(crate) use serve::{Serve, Token, TokenCreate};

/// A sandbox for AI agents whose state persists: code, shells, files and running jobs are still there at the next
/// call.
#[derive(Debug, Parser)]
#[command(name = "carrel", version, after_help = ex::ALL, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Print one JSON object (docs/cli-json.md) instead of text.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Read this configuration file and no other.
    #[arg(long, global = true, value_name = "FILE", env = "CARREL_CONFIG", hide_env_values = true)]
    pub(crate) config: Option<PathBuf>,
    /// Keep sandboxes in this directory [env: CARREL_STATE].
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) state: Option<String>,
    /// Do the work in this process, also when a daemon runs [env: CARREL_NO_DAEMON=1].
    #[arg(long, global = true)]
    pub(crate) no_daemon: bool,
    /// Say more on stderr.
    #[arg(short, long, global = true)]
    pub(crate) verbose: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run code in a sandbox: a fresh one, or a session that keeps its state.
    #[command(after_help = ex::RUN)]
    Run(Run),
    /// Start a command in a sandbox.
    #[command(after_help = ex::EXEC)]
    Exec(Exec),
    /// Show what a run or exec has printed.
    #[command(after_help = ex::LOGS)]
    Logs(Logs),
    /// Wait for a run or exec; its exit code becomes this one's.
    #[command(after_help = ex::WAIT)]
    Wait(Wait),
    /// Send a signal to a run or exec.
    #[command(after_help = ex::KILL)]
    Kill(Kill),
    /// Take back the last calls of a session.
    #[command(after_help = ex::UNDO)]
    Undo(Undo),
    /// List sandboxes.
    #[command(after_help = ex::LS)]
    Ls,
    /// Show where a session stands: variables, jobs, files, errors, limits.
    #[command(after_help = ex::BRIEF)]
    Brief(Named),
    /// Show all that is known of a sandbox.
    #[command(after_help = ex::INSPECT)]
    Inspect(Named),
    /// Make a sandbox, or find the one of this name.
    #[command(after_help = ex::OPEN)]
    Open(Open),
    /// End sandboxes: every process, mount and file of theirs.
    #[command(after_help = ex::CLOSE)]
    Close(Close),
    /// Freeze a sandbox: it keeps its memory, and any call wakes it.
    #[command(after_help = ex::STANDBY)]
    Standby(Named),
    /// Write a sandbox to disk: it holds no memory, and any call restores it.
    #[command(after_help = ex::HIBERNATE)]
    Hibernate(Named),
    /// Wake a sandbox that sleeps, or bring back one that died.
    #[command(after_help = ex::WAKE)]
    Wake(Named),
    /// Save a sandbox: its files, and everything that lives in it.
    #[command(after_help = ex::SNAPSHOT)]
    Snapshot(SnapshotArgs),
    /// Give a snapshot back: in place, or as a new sandbox.
    #[command(after_help = ex::RESTORE)]
    Restore(RestoreArgs),
    /// Copy a living sandbox: files, interpreters, variables.
    #[command(after_help = ex::FORK)]
    Fork(ForkArgs),
    /// Let a fork take the name of what it was forked from.
    #[command(after_help = ex::ADOPT)]
    Adopt(Named),
    /// Show what has become of files between snapshots, or since one.
    #[command(after_help = ex::DIFF)]
    Diff(DiffArgs),
    /// List, remove, export and import snapshots.
    #[command(after_help = ex::SNAPSHOTS)]
    Snapshots(SnapshotsArgs),
    /// An interactive shell in a sandbox.
    #[command(after_help = ex::SHELL)]
    Shell(ShellArgs),
    /// Copy files into or out of a sandbox.
    #[command(after_help = ex::CP)]
    Cp(Cp),
    /// Look at and change files of a sandbox.
    #[command(subcommand, after_help = ex::FILES)]
    Files(Files),
    /// Serve agents over MCP: on stdio, or over HTTP.
    #[command(after_help = ex::MCP)]
    Mcp(Mcp),
    /// Serve many callers over HTTP: the daemon.
    #[command(after_help = ex::SERVE)]
    Serve(Serve),
    /// Tokens for the daemon's TCP door.
    #[command(subcommand, after_help = ex::TOKEN)]
    Token(Token),
    /// Say what this host offers, and whether sandboxes can be made.
    #[command(after_help = ex::DOCTOR)]
    Doctor(Doctor),
    /// The configuration.
    #[command(subcommand, after_help = ex::CONFIG)]
    Config(ConfigCommand),
    /// Print a shell's completion script.
    #[command(after_help = ex::COMPLETIONS)]
    Completions { shell: Shell },
}

#[derive(Debug, Args)]
pub(crate) struct Run {
    /// The code, or `-` to read it from stdin.
    #[arg(required_unless_present = "file", conflicts_with = "file", allow_hyphen_values = true)]
    pub(crate) code: Option<String>,
    /// Read the code from a file.
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Keep state in the sandbox of this name: NAME or NAME/SESSION.
    #[arg(long, short, value_name = "NAME")]
    pub(crate) session: Option<Target>,
    /// Write images that the code shows into this directory.
    #[arg(long, value_name = "DIR")]
    pub(crate) save_images: Option<PathBuf>,
    /// Say on stderr what the call used and did: time, memory, files, processes, ports.
    #[arg(long)]
    pub(crate) receipt: bool,
    /// With --json: most bytes of each stream, as head and tail.
    #[arg(long, value_name = "SIZE", default_value = "1MB")]
    pub(crate) max_output: carrel_proto::limits::ByteSize,
    /// Interrupt the code after this long: 30s, 5m, 1h.
    #[arg(long, short, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    #[command(flatten)]
    pub(crate) making: Making,
}

/// What a new sandbox shall be. A sandbox that exists stays as it is.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options for a new sandbox")]
pub(crate) struct Making {
    /// python, node, bash, or an environment from the configuration.
    #[arg(long = "env", short, value_name = "ENV", alias = "environment", help_heading = None)]
    pub(crate) environment: Option<String>,
    /// Show this host directory at /project, read-only [env: PROJECT_DIR].
    #[arg(long, value_name = "DIR")]
    pub(crate) project: Option<String>,
    /// Let code change the project.
    #[arg(long)]
    pub(crate) project_writable: bool,
    /// How to shut code in: jail, or weak (no namespaces).
    #[arg(long, value_name = "LEVEL")]
    pub(crate) isolation: Option<String>,
    /// Most memory: 512MB, 2GB.
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory: Option<String>,
    /// Most processes and threads.
    #[arg(long, value_name = "N")]
    pub(crate) pids: Option<String>,
    /// Most CPUs: 2, 0.5.
    #[arg(long, value_name = "N")]
    pub(crate) cpus: Option<String>,
    /// Size of the workspace.
    #[arg(long, value_name = "SIZE")]
    pub(crate) disk: Option<String>,
    /// End the sandbox when it was not used for this long.
    #[arg(long, value_name = "TIME")]
    pub(crate) idle_timeout: Option<String>,
    /// End the sandbox at this age.
    #[arg(long, value_name = "TIME")]
    pub(crate) max_lifetime: Option<String>,
    /// A daemon freezes the sandbox when it was not used for this long; 0: never.
    #[arg(long, value_name = "TIME")]
    pub(crate) standby_after: Option<String>,
    /// A daemon writes it to disk when it was not used for this long; 0: never.
    #[arg(long, value_name = "TIME")]
    pub(crate) hibernate_after: Option<String>,
    /// How many calls can be taken back; 0 turns it off.
    #[arg(long, value_name = "N")]
    pub(crate) undo_calls: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Exec {
    /// Go on without waiting; print the exec's id.
    #[arg(long, short, conflicts_with_all = ["interactive", "tty"])]
    pub(crate) detach: bool,
    /// Pass stdin on to the command.
    #[arg(long, short)]
    pub(crate) interactive: bool,
    /// Give the command a terminal.
    #[arg(long, short)]
    pub(crate) tty: bool,
    /// Set a variable (repeatable).
    #[arg(long = "env", short = 'e', value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) variables: Vec<(String, String)>,
    /// Working directory inside the sandbox.
    #[arg(long, short = 'C', value_name = "DIR")]
    pub(crate) cwd: Option<String>,
    /// Say on stderr what the command used and did: time, memory, files, processes, ports.
    #[arg(long)]
    pub(crate) receipt: bool,
    /// Interrupt the command after this long.
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    /// With --json: most bytes of each stream, as head and tail.
    #[arg(long, value_name = "SIZE", default_value = "1MB")]
    pub(crate) max_output: carrel_proto::limits::ByteSize,
    /// NAME, NAME/SESSION or a sandbox id.
    pub(crate) name: Target,
    /// The command and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) argv: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Logs {
    /// NAME or a sandbox id.
    pub(crate) name: Target,
    /// The exec's id, as `exec -d` or `inspect` print it.
    pub(crate) exec: carrel_proto::id::ExecId,
    /// Stay until it ends.
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// From this chunk on.
    #[arg(long, value_name = "CHUNK", default_value_t = 0)]
    pub(crate) since: u64,
    /// With --json: most bytes of each stream, as head and tail.
    #[arg(long, value_name = "SIZE", default_value = "1MB")]
    pub(crate) max_output: carrel_proto::limits::ByteSize,
}

#[derive(Debug, Args)]
pub(crate) struct Wait {
    /// NAME or a sandbox id.
    pub(crate) name: Target,
    pub(crate) exec: carrel_proto::id::ExecId,
    /// Give up after this long, with exit code 124.
    #[arg(long, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Kill {
    /// NAME or a sandbox id.
    pub(crate) name: Target,
    pub(crate) exec: carrel_proto::id::ExecId,
    /// By name or number: TERM, SIGKILL, 9.
    #[arg(long, short, default_value = "TERM", value_parser = crate::signals::parse)]
    pub(crate) signal: i32,
}

#[derive(Debug, Args)]
pub(crate) struct Undo {
    /// NAME, NAME/SESSION or a sandbox id.
    pub(crate) name: Target,
    /// How many calls.
    #[arg(long, short = 'k', value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) calls: u32,
    /// Of this interpreter instead of the one that ran last: python, bash or node.
    #[arg(long = "env", short = 'e', value_name = "LANGUAGE")]
    pub(crate) language: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Named {
    /// NAME or a sandbox id.
    pub(crate) name: Target,
}

#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// NAME or a sandbox id.
    pub(crate) name: Target,
    /// A word to find it again (repeatable).
    #[arg(long = "tag", value_name = "TAG")]
    pub(crate) tags: Vec<String>,
    /// Without what lives in the sandbox.
    #[arg(long)]
    pub(crate) files_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// A snapshot's id, or a tag: the newest with it.
    pub(crate) snapshot: String,
    /// As a new sandbox of this name; without it the snapshot's own sandbox becomes what it was.
    #[arg(long = "as", value_name = "NAME")]
    pub(crate) name: Option<Target>,
    /// Interpreters start anew.
    #[arg(long)]
    pub(crate) files_only: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ForkArgs {
    /// NAME or a sandbox id.
    pub(crate) name: Target,
    /// So many.
    #[arg(short = 'n', long = "count", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) count: u32,
}

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// A snapshot's id or tag, or the name of a sandbox.
    pub(crate) from: String,
    /// The same; without it the snapshot's sandbox as it is now.
    pub(crate) to: Option<String>,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct SnapshotsArgs {
    /// As a tree, with the sandboxes that came from them.
    #[arg(long)]
    pub(crate) tree: bool,
    #[command(subcommand)]
    pub(crate) command: Option<SnapshotsCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotsCommand {
    /// Remove snapshots. Sandboxes that came from them stay.
    Rm {
        /// Ids or tags.
        #[arg(required = true)]
        snapshots: Vec<String>,
    },
    /// Write a snapshot to one file, for another host or for later.
    Export {
        /// An id, or a tag: the newest with it.
        snapshot: String,
        /// Where to; `-` is standard output.
        file: PathBuf,
    },
    /// Make a snapshot of such a file.
    Import {
        /// From where; `-` is standard input.
        file: PathBuf,
        /// Also take what lived in the sandbox if another host has written the file. It is brought back with root's rights:
        /// only for files that you would run as root.
        #[arg(long)]
        trust_memory: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Open {
    /// NAME, or NAME/SESSION to open that session too. With --spec it may be missing.
    #[arg(required_unless_present = "spec")]
    pub(crate) name: Option<Target>,
    /// A sandbox spec: JSON, YAML, or the front matter of an agent file; `-` for stdin.
    #[arg(long, value_name = "FILE")]
    pub(crate) spec: Option<PathBuf>,
    /// Write a label on a new sandbox (repeatable).
    #[arg(long = "label", value_name = "NAME=VALUE", value_parser = variable)]
    pub(crate) labels: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) making: Making,
}

#[derive(Debug, Args)]
pub(crate) struct Close {
    /// Names or sandbox ids; NAME/SESSION ends that session alone.
    #[arg(required_unless_present = "all", conflicts_with = "all")]
    pub(crate) names: Vec<Target>,
    /// All sandboxes of this state directory.
    #[arg(long)]
    pub(crate) all: bool,
    /// Copy the workspace to this new directory first.
    #[arg(long, value_name = "DIR", conflicts_with = "all")]
    pub(crate) keep_workspace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ShellArgs {
    /// NAME, NAME/SESSION or a sandbox id.
    pub(crate) name: Target,
    /// bash, python or node.
    #[arg(long = "env", short = 'e', value_name = "LANGUAGE", default_value = "bash")]
    pub(crate) language: String,
}

#[derive(Debug, Args)]
pub(crate) struct Cp {
    /// Copy directories; with `-` a tar stream.
    #[arg(long, short)]
    pub(crate) recursive: bool,
    /// A host path, NAME:PATH, or `-` for stdin.
    pub(crate) source: OsString,
    /// A host path, NAME:PATH, or `-` for stdout.
    pub(crate) target: OsString,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Files {
    /// List a directory.
    Ls {
        name: Target,
        #[arg(default_value = ".")]
        path: OsString,
        /// Levels to go down; 1 is the directory alone.
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        depth: u32,
        /// Mode, size and time too.
        #[arg(long, short)]
        long: bool,
    },
    /// Print a file.
    Cat { name: Target, path: OsString },
    /// Delete files.
    Rm {
        name: Target,
        #[arg(required = true)]
        paths: Vec<OsString>,
        /// Directories with all that is in them.
        #[arg(long, short)]
        recursive: bool,
    },
    /// Show what is known of a file.
    Stat {
        name: Target,
        path: OsString,
        /// Of a symlink: what it leads to.
        #[arg(long, short = 'L')]
        follow: bool,
    },
    /// Make a directory.
    Mkdir {
        name: Target,
        path: OsString,
        /// Make missing directories above, and accept one that is there.
        #[arg(long, short)]
        parents: bool,
    },
    /// Rename a file or directory.
    Mv {
        name: Target,
        from: OsString,
        to: OsString,
        /// Replace what is there.
        #[arg(long, short)]
        force: bool,
    },
    /// Find files by name, by content, or both.
    Search {
        name: Target,
        /// Text that a line must contain.
        #[arg(required_unless_present = "glob")]
        text: Option<String>,
        /// Where to look.
        #[arg(default_value = ".")]
        path: OsString,
        /// Names or paths that match: '*.py', 'src/**/test_*'.
        #[arg(long, short)]
        glob: Option<String>,
        /// The text is a regular expression.
        #[arg(long, short = 'E')]
        regex: bool,
        #[arg(long, short)]
        ignore_case: bool,
        /// Most matches.
        #[arg(long, default_value_t = 100)]
        limit: u32,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Attack real sandboxes from inside and show what held.
    #[arg(long)]
    pub(crate) prove: bool,
    /// With --prove: only probes whose name contains this.
    #[arg(long, value_name = "TEXT", requires = "prove")]
    pub(crate) filter: Option<String>,
    /// With --prove: attack sandboxes that stood ready in a pool, as a daemon's do.
    #[arg(long, requires = "prove")]
    pub(crate) pool: bool,
    /// Look for interpreters anew.
    #[arg(long)]
    pub(crate) refresh: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Print the effective settings and where each came from.
    Show,
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(format!("`{text}` is not NAME=VALUE")),
    }
}

impl Making {
    fn flags(&self) -> Vec<Flag> {
        let given = [
            (Key::ProjectDirectory, "--project", &self.project),
            (Key::Isolation, "--isolation", &self.isolation),
            (Key::Memory, "--memory", &self.memory),
            (Key::Pids, "--pids", &self.pids),
            (Key::Cpus, "--cpus", &self.cpus),
            (Key::Disk, "--disk", &self.disk),
            (Key::IdleTimeout, "--idle-timeout", &self.idle_timeout),
            (Key::MaxLifetime, "--max-lifetime", &self.max_lifetime),
            (Key::StandbyAfter, "--standby-after", &self.standby_after),
            (Key::HibernateAfter, "--hibernate-after", &self.hibernate_after),
            (Key::UndoCalls, "--undo-calls", &self.undo_calls),
        ];
        let mut flags: Vec<Flag> = given
            .into_iter()
            .filter_map(|(key, name, text)| Some(Flag { key, name, text: text.clone()? }))
            .collect();
        if self.project_writable {
            flags.push(Flag { key: Key::ProjectWritable, name: "--project-writable", text: "true".into() });
        }
        flags
    }

    /// Names of the flags that have no say over a sandbox that exists.
    pub(crate) fn given(&self) -> Vec<&'static str> {
        self.flags().into_iter().map(|flag| flag.name).collect()
    }
}

impl Cli {
    /// Settings among the flags.
    pub(crate) fn flags(&self) -> Vec<Flag> {
        let mut flags = match &self.command {
            Command::Run(run) => run.making.flags(),
            Command::Open(open) => open.making.flags(),
            Command::Mcp(mcp) => mcp.making.flags(),
            Command::Serve(serve) => serve.flags(),
            _ => Vec::new(),
        };
        if let Command::Run(Run { timeout: Some(text), .. }) | Command::Mcp(Mcp { timeout: Some(text), .. }) =
            &self.command
        {
            flags.push(Flag { key: Key::Timeout, name: "--timeout", text: text.clone() });
        }
        if let Some(text) = &self.global.state {
            flags.push(Flag { key: Key::State, name: "--state", text: text.clone() });
        }
        flags
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn code_may_look_like_an_option() {
        let cli = Cli::try_parse_from(["carrel", "run", "-s", "work", "-1"]).unwrap();
        let Command::Run(run) = cli.command else { panic!() };
        assert_eq!(run.code.as_deref(), Some("-1"));
        let cli = Cli::try_parse_from(["carrel", "exec", "work", "--", "ls", "-d", "--json"]).unwrap();
        assert!(!cli.global.json);
        let Command::Exec(exec) = cli.command else { panic!() };
        assert_eq!((exec.detach, exec.argv.len()), (false, 3));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        for bad in [
            &["carrel", "run"][..],
            &["carrel", "run", "1", "--file", "a.py"],
            &["carrel", "mcp", "--structured", "install", "cursor"],
            &["carrel", "mcp", "install", "cursor", "--http", "http://x/mcp", "--", "--structured"],
            &["carrel", "mcp", "install", "cursor", "--print", "--uninstall"],
            &["carrel", "exec", "-d", "-t", "work", "--", "ls"],
            &["carrel", "exec", "work"],
            &["carrel", "exec", "-e", "X", "work", "--", "ls"],
            &["carrel", "close"],
            &["carrel", "close", "--all", "work"],
            &["carrel", "kill", "work", "ex_1", "-s", "NOPE"],
            &["carrel", "run", "-s", "a/b/c", "1"],
            &["carrel", "files", "search", "work"],
        ] {
            assert!(Cli::try_parse_from(bad).is_err(), "{bad:?}");
        }
    }
}
