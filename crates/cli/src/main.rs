//! The program `carrel`. The way of a call: [`args`] (as typed), [`config`] (as meant), one file of [`commands`].
//!
//! stdout is data, stderr is for people; all of it goes through [`output`]. Deliberately absent: anything that knows how
//! a sandbox is made. That is the engine's.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod config;
mod context;
mod daemon;
mod desk;
mod live;
mod output;
mod progress;
mod prove;
mod signals;
mod stream;
mod target;
mod terminal;
mod transcript;

use std::process::ExitCode;

use carrel_proto::problem::Problem;
use clap::Parser;

use crate::{args::Cli, output::Output};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return commands::usage(&error),
    };
    let output = Output::new(cli.global.json, cli.global.verbose);
    start(&cli, &output).unwrap_or_else(|problem| {
        output.fail(&problem);
        ExitCode::from(output::exit_code(&problem))
    })
}

fn start(cli: &Cli, output: &Output) -> Result<ExitCode, Problem> {
    let runtime = commands::runtime(&cli.command).map_err(Problem::internal)?;
    let ended = runtime.block_on(commands::dispatch(cli, output));
    // A thread may still wait for a key that nobody will press.
    runtime.shutdown_background();
    ended
}
