//! `carrel kill`: a signal for a run or exec.

use std::process::ExitCode;

use carrel_proto::problem::Problem;
use serde_json::json;

use crate::{args::Kill, context::Context, signals};

pub(crate) async fn run(args: &Kill, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.existing(&args.name).await?;
    context.desk.signal(&record, &args.exec, args.signal).await?;
    if context.output.json {
        context.output.object(&json!({ "sandbox": record.id, "exec": args.exec, "signal": args.signal }))?;
    } else {
        context.output.detail(format_args!("sent {} to {}", signals::name(args.signal), args.exec));
    }
    Ok(ExitCode::SUCCESS)
}
