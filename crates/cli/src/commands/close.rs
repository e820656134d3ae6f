//! `carrel close`: the end of sandboxes, or of one session.

use std::process::ExitCode;

use carrel_engine::Record;
use carrel_proto::{
    id::SandboxId,
    problem::{Code, Problem},
};
use serde_json::json;

use crate::{args::Close, context::Context, progress::Progress, target::Target};

pub(crate) async fn run(args: &Close, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if args.keep_workspace.is_some() && args.names.len() != 1 {
        return Err(Problem::new(Code::InvalidArgument, "--keep-workspace takes one sandbox")
            .hint("close them one by one"));
    }
    if let (Some(_), [target]) = (&args.keep_workspace, args.names.as_slice()) {
        // The workspace of a dead sandbox may be a disk that is not mounted: that comes with its revival.
        context.for_files(target).await?;
    }
    let records = context.desk.list().await?;
    let _progress = Progress::start(context.output, "closing");
    let mut closed: Vec<SandboxId> = Vec::new();
    let mut first = None;
    let wanted: Vec<Result<&Record, Problem>> = match args.all {
        true => records.iter().map(Ok).collect(),
        false => {
            let mut wanted = Vec::new();
            for target in &args.names {
                match &target.session {
                    None => wanted.push(find(&records, target)),
                    Some(session) => {
                        let record = find(&records, target)?;
                        context.desk.close_session(record, session).await?;
                    }
                }
            }
            wanted
        }
    };
    for record in wanted {
        let ended = match record {
            Ok(record) => {
                context.desk.close(record, args.keep_workspace.as_deref()).await.map(|()| record.id.clone())
            }
            Err(problem) => Err(problem),
        };
        match ended {
            Ok(id) => closed.push(id),
            // The others are closed all the same.
            Err(problem) if first.is_none() => first = Some(problem),
            Err(problem) => context.output.warning(problem),
        }
    }
    match first {
        Some(problem) => Err(problem),
        None => {
            if context.output.json {
                context.output.object(&json!({ "closed": closed }))?;
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Not by way of [`Context::existing`]: a dead sandbox is not brought back to be closed.
fn find<'r>(records: &'r [Record], target: &Target) -> Result<&'r Record, Problem> {
    let is_meant =
        |record: &&Record| record.id.as_str() == target.name || record.key.as_ref() == Some(&target.key);
    records.iter().find(is_meant).ok_or_else(|| {
        Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{}`", target.name))
            .hint("`carrel ls` lists them")
    })
}
