//! `carrel shell`: an interpreter on the user's own terminal.

use std::process::ExitCode;

use carrel_proto::{
    guest::Language,
    message::Exec,
    problem::{Code, Problem},
};

use crate::{args::ShellArgs, commands::exec::attached, context::Context, terminal};

pub(crate) async fn run(args: &ShellArgs, context: &Context<'_>) -> Result<ExitCode, Problem> {
    if context.output.json {
        return Err(
            Problem::new(Code::InvalidArgument, "a shell has no JSON form").hint("use `carrel exec --json`")
        );
    }
    let names = Language::ALL.map(Language::as_str).join(", ");
    let language = Language::parse(&args.language).ok_or_else(|| {
        Problem::new(Code::InvalidArgument, format!("there is no shell for `{}`", args.language))
            .hint(format!("choose one of: {names}"))
    })?;
    let record = context.existing(&args.name).await?;
    let session = args.name.session();
    context.desk.ensure_session(&record, &session).await?;
    let status = context.desk.status(&record).await?;
    let interpreter =
        status.interpreters.get(&language).filter(|found| !found.program.is_empty()).ok_or_else(|| {
            let missing = status.interpreters.get(&language).map_or("", |found| found.missing.as_str());
            Problem::new(Code::InterpreterMissing, format!("this environment has no {}", language.as_str()))
                .hint(format!("looked for: {missing}"))
        })?;
    let term = std::env::var("TERM").unwrap_or_else(|_| "xterm".into());
    // No profile of the host is in a sandbox, so the prompt comes from here.
    let prompt = format!("\\[\\e[36m\\]{}\\[\\e[0m\\]:\\w\\$ ", args.name.name);
    let request = Exec {
        session,
        argv: vec![interpreter.program.clone(), "-i".into()],
        cwd: None,
        env: [("TERM".to_owned(), term), ("PS1".to_owned(), prompt)].into(),
        stdin: true,
        pty: Some(terminal::size()),
        timeout_ms: None,
        detach: false,
        cancel_on_disconnect: true,
    };
    attached(request, &record, context, false).await
}
