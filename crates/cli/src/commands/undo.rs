//! `carrel undo`: the last calls of a session, taken back.

use std::process::ExitCode;

use carrel_api::rest::undo::UndoReply;
use carrel_proto::{
    guest::Language,
    outcome::FilesState,
    problem::{Code, Problem},
};

use crate::{args::Undo, context::Context};

pub(crate) async fn run(args: &Undo, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let language = args.language.as_deref().map(language).transpose()?;
    let record = context.existing(&args.name).await?;
    let session = args.name.session();
    let undone = context.desk.undo(&record, &session, language, args.calls).await?;
    let reply = UndoReply::new(record.id.clone(), session, undone);
    if context.output.json {
        context.output.object(&reply)?;
        return Ok(ExitCode::SUCCESS);
    }
    let files = if reply.calls == 1 { ", with its files" } else { ", with their files" };
    let calls = if reply.calls == 1 { "1 call".to_owned() } else { format!("{} calls", reply.calls) };
    context.output.line(format_args!(
        "took back {calls} of {}{}; {} more can be taken back",
        reply.language.as_str(),
        if reply.files_state == FilesState::Restored { files } else { "" },
        reply.kept
    ))?;
    if let Some(reason) = &reply.files_reason {
        context.output.warning(format_args!("files are as the calls left them: {reason}"));
    }
    if reply.closed_handles > 0 {
        context.output.warning(format_args!("sockets and pipes that were open then are closed"));
    }
    Ok(ExitCode::SUCCESS)
}

fn language(text: &str) -> Result<Language, Problem> {
    Language::parse(text)
        .ok_or_else(|| Problem::new(Code::InvalidArgument, format!("`{text}` is not python, bash or node")))
}
