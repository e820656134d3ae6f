//! `carrel exec`: a command in a sandbox.

use std::{process::ExitCode, time::Duration};

use carrel_api::reply::{Reply, Transcript};
use carrel_engine::Record;
use carrel_proto::{
    message::Exec as ExecRequest,
    problem::{Code, Problem},
};

use crate::{
    args::Exec,
    commands::{
        receipt,
        run::{finish, print},
    },
    config::time,
    context::Context,
    live::Live,
    progress::Progress,
    signals::Interrupts,
    stream::{Input, OnSignal, Sink, pump},
    terminal::{self, RawMode},
};

/// Longer than any sandbox lives.
pub(crate) const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

pub(crate) async fn run(args: &Exec, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let timeout = args.timeout.as_deref().map(parse_time).transpose()?;
    let mut env: std::collections::BTreeMap<String, String> = args.variables.iter().cloned().collect();
    if args.tty {
        env.entry("TERM".into()).or_insert_with(|| std::env::var("TERM").unwrap_or_else(|_| "xterm".into()));
    }
    let request = ExecRequest {
        session: args.name.session(),
        argv: args.argv.clone(),
        cwd: args.cwd.clone(),
        env,
        stdin: args.interactive,
        pty: args.tty.then(terminal::size),
        timeout_ms: timeout.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        detach: args.detach,
        cancel_on_disconnect: args.tty,
    };
    let record = context.existing(&args.name).await?;
    context.desk.ensure_session(&record, &request.session).await?;
    if args.detach {
        return detach(request, &record, context).await;
    }
    if context.output.json {
        let session = request.session.clone();
        let mut interrupts = Interrupts::listen()?;
        let input = if args.interactive { Input::default().stdin()? } else { Input::default() };
        let call = context.desk.exec(&record, request).await?;
        let mut transcript = Transcript::new(args.max_output.0);
        let end = pump(call, &mut transcript, input, &mut interrupts, OnSignal::Cancel).await?;
        let reply = Reply::new(&record, &session, None, None);
        return print(reply, &transcript, &end, context.output);
    }
    attached(request, &record, context, args.receipt).await
}

async fn detach(request: ExecRequest, record: &Record, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let session = request.session.clone();
    let exec = context.desk.start(record, request).await?;
    if context.output.json {
        let object = serde_json::json!({ "sandbox": record.id, "session": session, "exec": exec });
        context.output.object(&object)?;
    } else {
        context.output.line(exec)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Stays with a command until its end, with the user's own terminal where it has one.
pub(crate) async fn attached(
    request: ExecRequest,
    record: &Record,
    context: &Context<'_>,
    with_receipt: bool,
) -> Result<ExitCode, Problem> {
    let mut interrupts = Interrupts::listen()?;
    let (stdin, pty) = (request.stdin, request.pty.is_some());
    let progress = if pty { Progress::none() } else { Progress::start(context.output, "running") };
    let call = context.desk.exec(record, request).await?;
    let mut input = Input::default();
    if stdin {
        input = input.stdin()?;
    }
    if pty {
        input = input.resizes()?;
    }
    let raw = if stdin && pty { RawMode::enter()? } else { None };
    let mut live = Live::new(context.output, progress, None);
    let end = pump(call, &mut live, input, &mut interrupts, OnSignal::Cancel).await;
    let closed = live.closed();
    drop(live);
    // Before a word is said on it.
    drop(raw);
    let end = end?;
    let code = finish(&end, closed, context.output);
    if with_receipt {
        receipt::print(&end, context.output);
    }
    Ok(code)
}

pub(crate) fn parse_time(text: &str) -> Result<Duration, Problem> {
    time(text, LONGEST).map_err(|why| {
        Problem::new(Code::InvalidArgument, format!("--timeout: {why}")).hint("write 30s, 5m or 1h")
    })
}
