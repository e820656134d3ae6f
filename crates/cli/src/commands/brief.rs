//! `carrel brief`: where a session stands.

use std::process::ExitCode;

use carrel_proto::problem::Problem;
use serde_json::json;

use crate::{args::Named, context::Context};

pub(crate) async fn run(args: &Named, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let record = context.existing(&args.name).await?;
    let brief = context.desk.brief(&record, &args.name.session()).await?;
    if context.output.json {
        context.output.object(&json!({ "sandbox": record.id, "brief": brief, "text": brief.text() }))?;
    } else {
        context.output.line(brief.text())?;
    }
    Ok(ExitCode::SUCCESS)
}
