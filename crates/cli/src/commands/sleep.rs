//! `carrel standby`, `carrel hibernate` and `carrel wake`.

use std::process::ExitCode;

use carrel_engine::Record;
use carrel_proto::problem::Problem;
use serde_json::json;

use crate::{
    args::{Command, Named},
    commands::ls,
    context::Context,
    progress::Progress,
};

pub(crate) async fn run(command: &Command, args: &Named, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let (record, note) = match command {
        Command::Wake(_) => {
            let _progress = Progress::start(context.output, "waking the sandbox");
            let found = context.desk.existing(&args.name.name, Some(&args.name.key)).await?;
            (found.record, found.note.map(|note| note.text(&args.name.name)))
        }
        Command::Hibernate(_) => {
            let record = context.known(&args.name).await?;
            let _progress = Progress::start(context.output, "writing the sandbox to disk");
            (context.desk.hibernate(&record).await?, None)
        }
        _ => (context.desk.standby(&context.known(&args.name).await?).await?, None),
    };
    tell(&record, note, context)
}

fn tell(record: &Record, note: Option<String>, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if context.output.json {
        let mut object = ls::object(record);
        object["note"] = json!(note);
        context.output.object(&object)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(note) = note {
        context.output.note(note);
    }
    context.output.line(format_args!("{} {}", ls::state(record), record.id))?;
    Ok(ExitCode::SUCCESS)
}
