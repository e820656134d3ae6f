//! `carrel run`: code for an interpreter.

use std::{io::Read, process::ExitCode};

use carrel_api::reply::{Reply, Transcript, exit_code};
use carrel_engine::{Record, Wish};
use carrel_proto::{
    id::SessionName,
    message::{MAX_CODE, Run as RunRequest},
    outcome::Cause,
    problem::{Code, Problem},
};

use crate::{
    args::{Making, Run},
    commands::receipt,
    context::{Context, signal_code},
    live::{Images, Live},
    output::Output,
    progress::Progress,
    signals::{Interrupts, PIPE},
    stream::{End, Input, OnSignal, Sink, pump},
};

pub(crate) async fn run(args: &Run, context: &Context<'_>) -> Result<ExitCode, Problem> {
    let code = code(args)?;
    let mut interrupts = Interrupts::listen()?;
    let (place, signal) = place(args, context, &mut interrupts).await?;
    let ended = match signal {
        Some(signal) => Ok(ExitCode::from(signal_code(signal))),
        None => place.run(args, context, code, &mut interrupts).await,
    };
    if args.session.is_none()
        && let Err(problem) = context.desk.close(&place.record, None).await
    {
        // The next call cleans up; what this one has to say matters more.
        context.output.detail(format_args!("closing the sandbox: {problem}"));
    }
    ended
}

/// Where a run takes place.
struct Place {
    record: Record,
    session: SessionName,
    note: Option<String>,
}

/// The sandbox for a run. A signal while it is made is returned with it, so that nothing half made stays behind; a second
/// one leaves at once.
async fn place(
    args: &Run,
    context: &Context<'_>,
    interrupts: &mut Interrupts,
) -> Result<(Place, Option<i32>), Problem> {
    let making = async {
        let environment = args.making.environment.as_deref();
        let in_main = args.session.as_ref().is_none_or(|target| target.session() == SessionName::main());
        let first = context.settings.environments.first_language(environment).filter(|_| in_main);
        let wish = Wish { first, ..context.settings.wish(environment) };
        let Some(target) = &args.session else {
            let _progress = Progress::start(context.output, "starting the sandbox");
            let record = context.desk.ephemeral(&wish).await?;
            return Ok::<_, Problem>(Place { record, session: SessionName::main(), note: None });
        };
        let found = context.sandbox(target, &wish).await?;
        context.desk.ensure_session(&found.record, &target.session()).await?;
        let mut notes: Vec<String> = found.note.map(|note| note.text(&target.name)).into_iter().collect();
        notes.extend(ignored(&args.making, found.created));
        let note = (!notes.is_empty()).then(|| notes.join("; "));
        Ok(Place { record: found.record, session: target.session(), note })
    };
    let mut making = std::pin::pin!(making);
    let mut got = None;
    loop {
        tokio::select! {
            place = &mut making => return Ok((place?, got)),
            signal = interrupts.next() => {
                if got.replace(signal).is_some() {
                    return Err(Problem::new(Code::Cancelled, "interrupted"));
                }
            }
        }
    }
}

impl Place {
    async fn run(
        &self,
        args: &Run,
        context: &Context<'_>,
        code: String,
        interrupts: &mut Interrupts,
    ) -> Result<ExitCode, Problem> {
        let wanted = args.making.environment.as_deref();
        let language = context.settings.environments.language(&self.record.spec.environment, wanted)?;
        if let Some(note) = &self.note {
            context.output.note(note);
        }
        let request = RunRequest {
            session: self.session.clone(),
            language,
            code,
            timeout_ms: u64::try_from(context.settings.timeout.as_millis()).unwrap_or(u64::MAX),
            // A session's call goes on without its caller and can be looked at later; an ephemeral one is nobody's.
            cancel_on_disconnect: args.session.is_none(),
        };
        let progress = Progress::start(context.output, "running");
        let call = context.desk.run(&self.record, request).await?;
        if context.output.json {
            let mut transcript = Transcript::new(args.max_output.0);
            let end = pump(call, &mut transcript, Input::default(), interrupts, OnSignal::Cancel).await?;
            let mut images = Images::to(args.save_images.clone());
            for (mime, data) in transcript.results.iter().flat_map(|result| &result.mime) {
                if let (true, Some(data)) = (mime.starts_with("image/"), data.as_str()) {
                    images.save(mime, data)?;
                }
            }
            let reply = Reply::new(&self.record, &self.session, Some(language), self.note.as_deref());
            return print(reply, &transcript, &end, context.output);
        }
        let mut live = Live::new(context.output, progress, args.save_images.clone());
        let end = pump(call, &mut live, Input::default(), interrupts, OnSignal::Cancel).await?;
        let closed = live.closed();
        drop(live);
        let code = finish(&end, closed, context.output);
        if args.receipt {
            receipt::print(&end, context.output);
        }
        Ok(code)
    }
}

/// A word on flags that came too late.
pub(crate) fn ignored(making: &Making, created: bool) -> Option<String> {
    let given = making.given();
    (!created && !given.is_empty())
        .then(|| format!("the sandbox exists already; {} changed nothing", given.join(", ")))
}

/// What people are told at the end of a call.
pub(crate) fn finish(end: &End, closed: bool, output: &Output) -> ExitCode {
    match end {
        End::Left(signal) => ExitCode::from(signal_code(*signal)),
        End::Paused(_) => ExitCode::SUCCESS,
        End::Finished(_) if closed => ExitCode::from(signal_code(PIPE)),
        End::Finished(outcome) => {
            match &outcome.problem {
                Some(problem) => {
                    let session_state = outcome.session_state;
                    output.complain(&Problem { session_state, ..problem.clone() });
                }
                None => output.state(outcome.session_state),
            }
            output.detail(receipt::summary(&outcome.receipt));
            ExitCode::from(exit_code(outcome))
        }
    }
}

/// Prints the object of `run --json` and `exec --json`: docs/cli-json.md.
pub(crate) fn print<'a>(
    mut reply: Reply<'a>,
    transcript: &'a Transcript,
    end: &'a End,
    output: &Output,
) -> Result<ExitCode, Problem> {
    reply = reply.transcript(transcript);
    let code = match end {
        End::Finished(outcome) => {
            reply = reply.finished(outcome);
            exit_code(outcome)
        }
        End::Paused(_) => 0,
        End::Left(signal) => {
            reply.cause = Some(Cause::Cancelled);
            reply.error = Some(Problem::new(Code::Cancelled, "interrupted before the call ended"));
            signal_code(*signal)
        }
    };
    reply.exit_code = Some(code);
    output.object(&reply)?;
    Ok(ExitCode::from(code))
}

/// The code, from wherever it is.
fn code(args: &Run) -> Result<String, Problem> {
    let bad = |what: String| Problem::new(Code::InvalidArgument, what);
    let too_large = || {
        Problem::new(Code::TooLarge, format!("the code is larger than {MAX_CODE} bytes"))
            .hint("copy it into the sandbox with `carrel cp` and run it there")
    };
    let read = |name: &str, input: &mut dyn Read| {
        let mut bytes = Vec::new();
        input
            .take(MAX_CODE as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(|error| bad(format!("{name}: {error}")))?;
        if bytes.len() > MAX_CODE {
            return Err(too_large());
        }
        String::from_utf8(bytes)
            .map_err(|_| bad(format!("{name} is not text in UTF-8")).hint("save it as UTF-8"))
    };
    match (&args.code, &args.file) {
        (Some(code), _) if code == "-" => read("stdin", &mut std::io::stdin()),
        (Some(code), _) if code.len() > MAX_CODE => Err(too_large()),
        (Some(code), _) => Ok(code.clone()),
        (None, Some(path)) => {
            let name = path.display().to_string();
            let mut file = std::fs::File::open(path)
                .map_err(|error| bad(format!("{name}: {error}")).hint("check the path after --file"))?;
            read(&name, &mut file)
        }
        (None, None) => {
            Err(bad("there is no code".to_owned())
                .hint("give it as an argument, with --file, or `-` for stdin"))
        }
    }
}
