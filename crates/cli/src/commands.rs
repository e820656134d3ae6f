//! One file per command. Each takes its arguments and a [`Context`], prints, and says the exit code.

mod brief;
mod close;
mod completions;
mod config;
mod cp;
mod doctor;
mod exec;
mod files;
mod inspect;
mod kill;
mod logs;
mod ls;
mod mcp;
mod open;
mod pool;
mod receipt;
mod run;
mod serve;
mod shell;
mod sleep;
mod snapshots;
mod token;
mod undo;
mod wait;

use std::{io::Write, process::ExitCode};

use carrel_proto::problem::{Code, Problem};

use crate::{
    args::{Cli, Command, Mcp, McpCommand},
    config::{Config, Surroundings},
    context::Context,
    output::Output,
};

/// Threads of the daemon at most: it passes bytes on, and the sandboxes need the rest of the machine.
const MOST_WORKERS: usize = 4;

/// One thread for one call; the daemon has several.
pub(crate) fn runtime(command: &Command) -> std::io::Result<tokio::runtime::Runtime> {
    let mut builder = match command {
        Command::Serve(_) => {
            let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            let mut builder = tokio::runtime::Builder::new_multi_thread();
            builder.worker_threads(cores.min(MOST_WORKERS));
            builder
        }
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    builder.enable_all().build()
}

pub(crate) async fn dispatch(cli: &Cli, output: &Output) -> Result<ExitCode, Problem> {
    if let Command::Completions { shell } = &cli.command {
        return completions::run(*shell, output);
    }
    let around = Surroundings::of_this_process()?;
    // Before anything of carrel's own is read: none of it matters here.
    if let Command::Mcp(Mcp { command: Some(McpCommand::Install(args)), .. }) = &cli.command {
        return mcp::install(args, &around, output);
    }
    let config = Config::load(&around, cli.global.config.as_deref(), &cli.flags())?;
    if let Command::Config(command) = &cli.command {
        return config::run(command, &config, output);
    }
    if let Command::Mcp(args) = &cli.command {
        return Box::pin(mcp::serve(args, config.settings()?, alone(cli, &around), output)).await;
    }
    if let Command::Token(args) = &cli.command {
        return token::run(args, config.settings()?, output);
    }
    if let Command::Serve(args) = &cli.command {
        return Box::pin(serve::run(cli, args, config.settings()?, &around, output)).await;
    }
    let settings = config.settings()?;
    let alone = alone(cli, &around);
    if let Command::Doctor(args) = &cli.command {
        return Box::pin(doctor::run(args, &settings, alone, output)).await;
    }
    let context = Context::open(output, settings, alone).await?;
    match &cli.command {
        Command::Run(args) => Box::pin(run::run(args, &context)).await,
        Command::Exec(args) => Box::pin(exec::run(args, &context)).await,
        Command::Logs(args) => logs::run(args, &context).await,
        Command::Wait(args) => wait::run(args, &context).await,
        Command::Kill(args) => kill::run(args, &context).await,
        Command::Undo(args) => undo::run(args, &context).await,
        Command::Ls => ls::run(&context).await,
        Command::Brief(args) => brief::run(args, &context).await,
        Command::Inspect(args) => inspect::run(args, &context).await,
        Command::Open(args) => open::run(args, &context).await,
        Command::Close(args) => close::run(args, &context).await,
        Command::Standby(args) | Command::Hibernate(args) | Command::Wake(args) => {
            sleep::run(&cli.command, args, &context).await
        }
        Command::Snapshot(args) => snapshots::take(args, &context).await,
        Command::Restore(args) => snapshots::restore(args, &context).await,
        Command::Fork(args) => snapshots::fork(args, &context).await,
        Command::Adopt(args) => snapshots::adopt(args, &context).await,
        Command::Diff(args) => snapshots::diff(args, &context).await,
        Command::Snapshots(args) => snapshots::run(args, &context).await,
        Command::Shell(args) => Box::pin(shell::run(args, &context)).await,
        Command::Cp(args) => cp::run(args, &context).await,
        Command::Files(args) => files::run(args, &context).await,
        Command::Config(_)
        | Command::Doctor(_)
        | Command::Completions { .. }
        | Command::Mcp(_)
        | Command::Serve(_)
        | Command::Token(_) => Ok(ExitCode::SUCCESS),
    }
}

/// Whether the user wants no daemon.
fn alone(cli: &Cli, around: &Surroundings) -> bool {
    let variable = around.variables.get(std::ffi::OsStr::new("CARREL_NO_DAEMON"));
    cli.global.no_daemon || variable.is_some_and(|value| !value.is_empty() && value != "0")
}

/// What a server has to say goes to stderr, line by line.
fn log(verbose: bool) {
    let level = if verbose { tracing::Level::INFO } else { tracing::Level::WARN };
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).with_max_level(level);
    // Only a second one in the same process could fail, and there is none.
    let _ = lines.without_time().try_init();
}

/// Arguments that do not parse, or a wish for help.
pub(crate) fn usage(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    // What did not parse cannot be asked whether it wanted JSON.
    let json = std::env::args_os().take_while(|word| word != "--").any(|word| word == "--json");
    if json {
        let text = error.to_string();
        let text = text.trim_start_matches("error: ");
        let (message, rest) = text.split_once("\n\n").unwrap_or((text, ""));
        let usage = rest.lines().find(|line| line.starts_with("Usage:")).unwrap_or_default();
        Output::new(true, false).fail(&Problem::new(Code::InvalidArgument, message.trim()).hint(usage));
    } else {
        let _ = error.print();
        let _ = std::io::stderr().flush();
    }
    ExitCode::from(125)
}
