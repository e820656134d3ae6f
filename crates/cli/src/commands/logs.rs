//! `carrel logs`: what a run or exec has printed, now or long ago.

use std::process::ExitCode;

use carrel_api::reply::Transcript;
use carrel_proto::problem::Problem;
use serde_json::json;

use crate::{
    args::Logs,
    context::{Context, signal_code},
    live::Live,
    progress::Progress,
    signals::Interrupts,
    stream::{End, Input, OnSignal, pump},
};

pub(crate) async fn run(args: &Logs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let mut interrupts = Interrupts::listen()?;
    let record = context.existing(&args.name).await?;
    let call = context.desk.attach(&record, &args.exec, args.since, args.follow).await?;
    if context.output.json {
        let mut transcript = Transcript::new(args.max_output.0);
        let end = pump(call, &mut transcript, Input::default(), &mut interrupts, OnSignal::Leave).await?;
        let (outcome, next) = match &end {
            End::Finished(outcome) => (Some(outcome), None),
            End::Paused(next) => (None, Some(next)),
            End::Left(_) => (None, None),
        };
        context.output.object(&json!({
            "sandbox": record.id,
            "exec": args.exec,
            "running": outcome.is_none(),
            "next": next,
            "stdout": transcript.stdout,
            "stderr": transcript.stderr,
            "results": transcript.results,
            "outcome": outcome,
        }))?;
        return Ok(ended(&end));
    }
    let mut live = Live::new(context.output, Progress::none(), None);
    let end = pump(call, &mut live, Input::default(), &mut interrupts, OnSignal::Leave).await?;
    if let End::Paused(next) = end {
        context.output.detail(format_args!("still running; go on with --since {next} or --follow"));
    }
    Ok(ended(&end))
}

/// How the exec ended is for `wait` to say.
fn ended(end: &End) -> ExitCode {
    match end {
        End::Left(signal) => ExitCode::from(signal_code(*signal)),
        End::Finished(_) | End::Paused(_) => ExitCode::SUCCESS,
    }
}
