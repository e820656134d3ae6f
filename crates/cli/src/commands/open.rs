//! `carrel open`: a sandbox that is there before the first call.

use std::process::ExitCode;

use carrel_proto::problem::{Code, Problem};
use serde_json::json;

use crate::{
    args::Open,
    commands::{ls, run::ignored},
    context::Context,
};

pub(crate) async fn run(args: &Open, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if args.name.is_id() {
        return Err(Problem::new(Code::InvalidArgument, "a sandbox is opened by a name, not by an id")
            .hint("choose a name"));
    }
    let found =
        context.sandbox(&args.name, &context.settings.wish(args.making.environment.as_deref())).await?;
    context.desk.ensure_session(&found.record, &args.name.session()).await?;
    let mut notes: Vec<String> = found.note.map(|note| note.text(&args.name.name)).into_iter().collect();
    notes.extend(ignored(&args.making, found.created));
    let note = (!notes.is_empty()).then(|| notes.join("; "));
    if context.output.json {
        let mut object = ls::object(&found.record);
        object["created"] = json!(found.created);
        object["note"] = json!(note);
        object["enforced"] = json!(found.record.placed.as_ref().map(|placed| &placed.enforced));
        context.output.object(&object)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(note) = note {
        context.output.note(note);
    }
    let word = if found.created { "created" } else { "existing" };
    context.output.line(format_args!("{word} {}", found.record.id))?;
    Ok(ExitCode::SUCCESS)
}
