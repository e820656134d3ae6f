//! `carrel wait`: until a run or exec ends.

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use carrel_api::reply::exit_code;
use carrel_proto::problem::{Code, Problem};
use serde_json::json;

use crate::{
    args::Wait,
    commands::exec::{LONGEST, parse_time},
    commands::run::finish,
    context::Context,
    progress::Progress,
    stream::End,
};

/// One question to the agent lasts at most this long; then it is asked again.
const TURN: Duration = Duration::from_secs(600);

pub(crate) async fn run(args: &Wait, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let time = args.timeout.as_deref().map(parse_time).transpose()?.unwrap_or(LONGEST);
    let deadline = Instant::now() + time;
    let record = context.existing(&args.name).await?;
    let progress = Progress::start(context.output, "waiting");
    let outcome = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(outcome) = context.desk.wait(&record, &args.exec, left.min(TURN)).await? {
            break outcome;
        }
        if deadline <= Instant::now() {
            return Err(Problem::new(Code::Timeout, format!("{} is still running", args.exec))
                .hint("wait longer, or `carrel kill` it"));
        }
    };
    drop(progress);
    if context.output.json {
        context.output.object(&json!({ "sandbox": record.id, "exec": args.exec, "outcome": outcome }))?;
        return Ok(ExitCode::from(exit_code(&outcome)));
    }
    Ok(finish(&End::Finished(Box::new(outcome)), false, context.output))
}
