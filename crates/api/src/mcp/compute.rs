//! `sandbox_run`: one program in a sandbox of its own, which is gone afterwards.

use std::collections::BTreeMap;

use carrel_engine::{Engine, Record, Wish};
use carrel_proto::{
    files::{Content, FileRequest, GuestPath, WORKSPACE, Write},
    guest::Language,
    id::SessionName,
    message::Exec,
    problem::{Code, Problem},
};
use rmcp::model::JsonObject;
use serde::Deserialize;
use serde_json::json;

use super::{
    Server,
    arguments::{Seconds, millis, parse},
    code::Answer,
    follow::{Client, End, Queue, Transcript, follow},
};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Arguments {
    runtime: Option<String>,
    code: String,
    #[serde(default)]
    args: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    files: BTreeMap<String, String>,
    timeout_seconds: Option<Seconds>,
}

pub(super) async fn run(
    server: &Server,
    arguments: Option<JsonObject>,
    client: &Client,
) -> Result<Answer, Problem> {
    let arguments: Arguments = parse(arguments)?;
    let engine = server.engine().await?;
    let runtime = arguments.runtime.clone().or_else(|| server.options.wish.environment.clone());
    let wish = Wish { environment: runtime, ..server.options.wish.clone() };
    let record = engine.ephemeral(&wish).await?;
    let ended = Once { server, engine, record: &record }.run(arguments, client).await;
    // The sweep of the next call finds what could not be closed.
    let _ = engine.retire(&record).await;
    ended
}

struct Once<'a> {
    server: &'a Server,
    engine: &'a Engine,
    record: &'a Record,
}

impl Once<'_> {
    async fn run(&self, arguments: Arguments, client: &Client) -> Result<Answer, Problem> {
        let options = &self.server.options;
        let runtime = self.record.spec.environment.clone();
        let wanted = arguments.runtime.as_deref().or(Some(&runtime));
        let language = self.engine.environments().language(&runtime, wanted)?;
        for (path, contents) in arguments.files {
            self.write(&path, contents)?;
        }
        let (program, command) = match language {
            Language::Python => ("main.py", "python3"),
            Language::Node => ("main.js", "node"),
            Language::Bash => ("main.sh", "bash"),
        };
        self.write(program, arguments.code)?;
        let timeout = arguments.timeout_seconds.map_or(options.timeout, |seconds| seconds.0);
        let mut argv = vec![command.to_owned(), format!("{WORKSPACE}/{program}")];
        argv.extend(arguments.args);
        let exec = Exec {
            session: SessionName::main(),
            argv,
            cwd: None,
            env: arguments.env,
            stdin: false,
            pty: None,
            timeout_ms: Some(millis(timeout)),
            detach: false,
            cancel_on_disconnect: true,
        };
        let mut call = self.engine.exec(self.record, exec).await?;
        let mut transcript = Transcript::new(options.max_chars);
        let session = SessionName::main();
        let queue = Queue { engine: self.engine, record: self.record, session: &session, patience: timeout };
        let End::Finished(outcome) = follow(&mut call, &mut transcript, client, queue).await? else {
            return Err(Problem::internal("a single run was put off"));
        };
        let (stdout, stderr, _) = transcript.streams(options.max_chars);
        let mut object = json!({
            "ok": outcome.exit_code == 0 && outcome.problem.is_none(),
            "runtime": wanted,
            "exit_code": outcome.exit_code,
            "duration_ms": outcome.receipt.duration_us / 1000,
            "stdout": stdout,
            "stderr": stderr,
        });
        if let Some(problem) = &outcome.problem {
            object["error"] = format!("{}: {}", problem.code.as_str(), problem.message).into();
        }
        Ok(Answer::new(object).receipt(&outcome).failed(outcome.problem.is_some()))
    }

    fn write(&self, path: &str, contents: String) -> Result<(), Problem> {
        let path = GuestPath::parse(path)
            .map_err(|error| Problem::new(Code::PathOutside, format!("`{path}`: {error}")))?;
        let write = Write {
            path,
            data: Content(contents.into_bytes()),
            append: false,
            overwrite: true,
            mode: None,
            parents: true,
            sync: false,
        };
        self.engine.file(self.record, FileRequest::Write(write)).map(drop)
    }
}
