//! `carrel completions`: for the user's shell.

use std::process::ExitCode;

use carrel_proto::problem::Problem;
use clap::CommandFactory;
use clap_complete::{Shell, generate};

use crate::{args::Cli, output::Output};

pub(crate) fn run(shell: Shell, output: &Output) -> Result<ExitCode, Problem> {
    let mut script = Vec::new();
    generate(shell, &mut Cli::command(), "carrel", &mut script);
    output.data(&script)?;
    Ok(ExitCode::SUCCESS)
}
