//! The `sandbox_…` tools: names and shapes are a contract with agents that were written for it.

use std::{collections::BTreeMap, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use carrel_engine::{Engine, Record, Wish, call::Output};
use carrel_proto::{
    files::{
        Content, Delete, Entry, FileReply, FileRequest, GuestPath, Kind, List, MAX_DEPTH, MAX_PAGE, Read,
        WORKSPACE, Write,
    },
    frame::Stream,
    id::{ExecId, SandboxId, SessionName},
    message::Exec,
    outcome::Outcome,
    problem::{Code, Problem},
};
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, MetaObject};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    Server,
    arguments::{Seconds, millis, parse},
    compute,
    files::Made,
    follow::{Client, End, Queue, Transcript, follow},
    report::{Report, receipt},
    scope::Scope,
};

/// Bytes of a read that asks for no number.
const DEFAULT_READ: u64 = 256 << 10;
/// Chunks of a read that asks for no number.
const DEFAULT_CHUNKS: usize = 200;
/// A wait that asks for no number.
const DEFAULT_WAIT: Duration = Duration::from_secs(30);
/// Entries of a listing in all: more than a model can use.
const MOST_ENTRIES: usize = 5000;
const DEFAULT_NAME: &str = "default";

/// A tool's answer: the object, and words that go with it.
#[derive(Debug)]
pub(super) struct Answer {
    object: Value,
    words: Vec<String>,
    failed: bool,
    meta: Option<MetaObject>,
}

impl Answer {
    pub(super) fn new(object: Value) -> Self {
        Self { object, words: Vec::new(), failed: false, meta: None }
    }

    pub(super) fn failed(self, failed: bool) -> Self {
        Self { failed, ..self }
    }

    /// What the call did, for programs.
    pub(super) fn receipt(self, outcome: &Outcome) -> Self {
        Self { meta: Some(receipt(outcome)), ..self }
    }

    pub(super) fn words(self, words: Vec<String>) -> Self {
        Self { words, ..self }
    }

    /// The object as text for those who read text, as it is for those who read structures.
    pub(super) fn result(self) -> CallToolResult {
        let mut content = vec![ContentBlock::text(self.object.to_string())];
        if !self.words.is_empty() {
            content.push(ContentBlock::text(format!("[{}]", self.words.join(" · "))));
        }
        let mut result =
            if self.failed { CallToolResult::error(content) } else { CallToolResult::success(content) };
        result.structured_content = Some(self.object);
        result.meta = self.meta;
        result
    }
}

/// One tool call. `None`: there is no such tool.
pub(super) async fn call(
    server: &Server,
    scope: &Scope,
    name: &str,
    arguments: Option<JsonObject>,
    client: &Client,
) -> Option<Result<Answer, Problem>> {
    let desk = Desk { server, scope };
    Some(match name {
        "sandbox_open" => desk.open(arguments).await,
        "sandbox_exec" => desk.exec(arguments, client).await,
        "sandbox_exec_read" => desk.exec_read(arguments).await,
        "sandbox_exec_wait" => desk.exec_wait(arguments).await,
        "sandbox_brief" => desk.brief(arguments).await,
        "sandbox_undo" => desk.undo(arguments).await,
        "sandbox_fs_write" => desk.write(arguments).await,
        "sandbox_fs_read" => desk.read(arguments).await,
        "sandbox_fs_list" => desk.list(arguments).await,
        "sandbox_fs_delete" => desk.delete(arguments).await,
        "sandbox_close" => desk.close(arguments).await,
        "sandbox_run" => compute::run(server, arguments, client).await,
        _ => return None,
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct OpenArguments {
    session_key: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecArguments {
    sandbox_id: SandboxId,
    cmd: Vec<String>,
    cwd: Option<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    timeout_seconds: Option<Seconds>,
    #[serde(default)]
    stream: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecReadArguments {
    sandbox_id: SandboxId,
    exec_id: ExecId,
    #[serde(default)]
    since_seq: u64,
    max_chunks: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExecWaitArguments {
    sandbox_id: SandboxId,
    exec_id: ExecId,
    timeout_seconds: Option<Seconds>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct BriefArguments {
    sandbox_id: SandboxId,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct UndoArguments {
    sandbox_id: SandboxId,
    calls: Option<u32>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WriteArguments {
    sandbox_id: SandboxId,
    path: String,
    contents: Option<String>,
    contents_b64: Option<String>,
    mode: Option<String>,
    #[serde(default)]
    overwrite: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadArguments {
    sandbox_id: SandboxId,
    path: String,
    max_bytes: Option<u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ListArguments {
    sandbox_id: SandboxId,
    path: Option<String>,
    #[serde(default)]
    recursive: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DeleteArguments {
    sandbox_id: SandboxId,
    path: String,
    #[serde(default)]
    recursive: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CloseArguments {
    sandbox_id: SandboxId,
    #[serde(default)]
    delete_workspace: bool,
}

struct Desk<'a> {
    server: &'a Server,
    scope: &'a Scope,
}

impl Desk<'_> {
    /// The sandbox of an id, alive.
    async fn sandbox(&self, id: &SandboxId) -> Result<(&Engine, Record), Problem> {
        self.server.living(self.scope, id).await
    }

    async fn open(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let OpenArguments { session_key } = parse(arguments)?;
        let engine = self.server.engine().await?;
        let name = session_key.unwrap_or_else(|| DEFAULT_NAME.to_owned());
        let place = self.scope.place(&name)?;
        let wish: Wish = self.server.options.wish.clone();
        let found = engine.sandbox(&place.key, &wish).await?;
        let object = json!({
            "sandbox_id": found.record.id,
            "image": found.record.spec.environment,
            "workdir": WORKSPACE,
            "created": found.created,
        });
        let words = found.note.map(|told| told.text(&place.name)).into_iter().collect();
        Ok(Answer::new(object).words(words))
    }

    async fn exec(&self, arguments: Option<JsonObject>, client: &Client) -> Result<Answer, Problem> {
        let arguments: ExecArguments = parse(arguments)?;
        let (engine, record) = self.sandbox(&arguments.sandbox_id).await?;
        let timeout = arguments.timeout_seconds.map(|seconds| seconds.0);
        let exec = Exec {
            session: SessionName::main(),
            argv: arguments.cmd,
            cwd: arguments.cwd,
            env: arguments.env,
            stdin: false,
            pty: None,
            timeout_ms: timeout.map(millis),
            detach: arguments.stream,
            cancel_on_disconnect: false,
        };
        if arguments.stream {
            let id = engine.start(&record, exec).await?;
            return Ok(Answer::new(json!({"exec_id": id, "status": "running"})));
        }
        let patience = timeout.unwrap_or(self.server.options.timeout);
        let exec = Exec { timeout_ms: Some(millis(patience)), ..exec };
        let mut call = engine.exec(&record, exec).await?;
        let mut transcript = Transcript::new(self.server.options.max_chars);
        let queue = Queue { engine, record: &record, session: &SessionName::main(), patience };
        match follow(&mut call, &mut transcript, client, queue).await? {
            End::Finished(outcome) => Ok(self.ended(&record, &outcome, &transcript)),
            End::Later(id) => Ok(Answer::new(json!({"exec_id": id, "status": "running"}))),
        }
    }

    fn ended(&self, record: &Record, outcome: &Outcome, transcript: &Transcript) -> Answer {
        let (stdout, stderr, cut) = transcript.streams(self.server.options.max_chars);
        let report = Report {
            record,
            session: "",
            exec: &outcome.exec,
            outcome: Some(outcome),
            transcript,
            made: Made::default(),
            notes: Vec::new(),
        };
        let object = json!({
            "exec_id": outcome.exec,
            "exit_code": outcome.exit_code,
            "stdout": stdout,
            "stderr": stderr,
            "status": "completed",
        });
        let words = report.status(cut, 0);
        // A command's own exit code is an answer; what ended it from outside is a failure.
        Answer::new(object).words(words).receipt(outcome).failed(outcome.problem.is_some())
    }

    async fn exec_read(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let arguments: ExecReadArguments = parse(arguments)?;
        let (engine, record) = self.sandbox(&arguments.sandbox_id).await?;
        // Numbers start at 1 here, so that 0 stands for the beginning and the last one seen for what follows.
        let mut call = engine.attach(&record, &arguments.exec_id, arguments.since_seq, false).await?;
        let most = arguments.max_chunks.unwrap_or(DEFAULT_CHUNKS).max(1);
        let (mut chunks, mut bytes_left) = (Vec::new(), 4 * self.server.options.max_chars);
        let done = loop {
            match call.next().await? {
                Output::Bytes { stream, chunk, bytes, .. } => {
                    if chunks.len() == most || bytes.len() > bytes_left {
                        // One chunk is always given, or a caller would ask for it for ever.
                        if !chunks.is_empty() {
                            break false;
                        }
                    }
                    bytes_left = bytes_left.saturating_sub(bytes.len());
                    let stream = if stream == Stream::Stderr { "stderr" } else { "stdout" };
                    chunks.push(
                        json!({"seq": chunk + 1, "stream": stream, "text": String::from_utf8_lossy(bytes)}),
                    );
                }
                Output::Finished(_) => break true,
                Output::Paused { .. } => break false,
                Output::Started(_) | Output::Display { .. } => {}
            }
        };
        Ok(Answer::new(json!({"chunks": chunks, "done": done})))
    }

    async fn exec_wait(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let arguments: ExecWaitArguments = parse(arguments)?;
        let (engine, record) = self.sandbox(&arguments.sandbox_id).await?;
        let time = arguments.timeout_seconds.map_or(DEFAULT_WAIT, |seconds| seconds.0);
        Ok(match engine.wait(&record, &arguments.exec_id, time).await? {
            Some(outcome) => Answer::new(json!({"done": true, "exit_code": outcome.exit_code})),
            None => Answer::new(json!({"done": false})),
        })
    }

    async fn brief(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let BriefArguments { sandbox_id } = parse(arguments)?;
        let (engine, record) = self.sandbox(&sandbox_id).await?;
        let brief = engine.brief(&record, &SessionName::main()).await?;
        Ok(Answer::new(json!({"brief": brief.text()})))
    }

    async fn undo(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let UndoArguments { sandbox_id, calls } = parse(arguments)?;
        let (engine, record) = self.sandbox(&sandbox_id).await?;
        let undone = engine.undo(&record, &SessionName::main(), None, calls.unwrap_or(1)).await?;
        let words = match undone.closed_handles {
            0 => Vec::new(),
            closed => vec![format!("{closed} open connections or pipes of that state are closed")],
        };
        let object = json!({"calls": undone.calls, "kept": undone.kept, "language": undone.language});
        Ok(Answer::new(object).words(words))
    }

    /// A file operation, off the thread that serves everybody.
    async fn file(&self, id: &SandboxId, request: FileRequest) -> Result<FileReply, Problem> {
        let (engine, record) = self.sandbox(id).await?;
        let root = engine.files(&record)?;
        tokio::task::spawn_blocking(move || carrel_files::serve(&root, request))
            .await
            .map_err(Problem::internal)?
            .map_err(Into::into)
    }

    async fn write(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let arguments: WriteArguments = parse(arguments)?;
        let path = path(&arguments.path)?;
        let data = match (arguments.contents, arguments.contents_b64) {
            (Some(_), Some(_)) => return Err(bad("give contents or contents_b64, not both")),
            (Some(text), None) => text.into_bytes(),
            (None, Some(text)) => {
                STANDARD.decode(text.trim()).map_err(|error| bad(format!("contents_b64: {error}")))?
            }
            (None, None) => Vec::new(),
        };
        let mode = arguments.mode.as_deref().map(mode).transpose()?;
        let write = Write {
            path: path.clone(),
            data: Content(data),
            append: false,
            overwrite: arguments.overwrite,
            mode,
            parents: true,
            sync: false,
        };
        match self.file(&arguments.sandbox_id, FileRequest::Write(write)).await {
            Err(problem) if problem.code == Code::Exists => {
                Err(problem.hint("pass overwrite: true to replace it"))
            }
            other => other.map(|_| Answer::new(json!({"ok": true, "path": absolute(&path)}))),
        }
    }

    async fn read(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let arguments: ReadArguments = parse(arguments)?;
        let path = path(&arguments.path)?;
        let len = arguments.max_bytes.unwrap_or(DEFAULT_READ);
        let read = FileRequest::Read(Read { path, offset: 0, len: Some(len) });
        let FileReply::Read(reply) = self.file(&arguments.sandbox_id, read).await? else {
            return Err(Problem::internal("a read answered otherwise"));
        };
        let truncated = !reply.eof;
        let mut object = json!({"truncated": truncated, "size_bytes": reply.size});
        match text_of(&reply.data.0, truncated) {
            Some(text) => object["contents"] = text.into(),
            None => object["contents_b64"] = STANDARD.encode(&reply.data.0).into(),
        }
        Ok(Answer::new(object))
    }

    async fn list(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let arguments: ListArguments = parse(arguments)?;
        let base = path(arguments.path.as_deref().unwrap_or("."))?;
        let depth = if arguments.recursive { MAX_DEPTH } else { 1 };
        let (mut entries, mut after) = (Vec::new(), None);
        let mut words = Vec::new();
        loop {
            let list = List { path: base.clone(), depth, limit: MAX_PAGE, after };
            let FileReply::List(page) = self.file(&arguments.sandbox_id, FileRequest::List(list)).await?
            else {
                return Err(Problem::internal("a listing answered otherwise"));
            };
            entries.extend(page.entries.iter().filter_map(|entry| described(&base, entry)));
            after = page.next;
            if after.is_none() {
                break;
            }
            if entries.len() >= MOST_ENTRIES {
                words.push(format!("only the first {MOST_ENTRIES} entries; list a directory below"));
                break;
            }
        }
        Ok(Answer::new(json!({"entries": entries})).words(words))
    }

    async fn delete(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let arguments: DeleteArguments = parse(arguments)?;
        let path = path(&arguments.path)?;
        let deleted = absolute(&path);
        let request = FileRequest::Delete(Delete { path, recursive: arguments.recursive });
        self.file(&arguments.sandbox_id, request).await?;
        Ok(Answer::new(json!({"ok": true, "deleted": deleted})))
    }

    async fn close(&self, arguments: Option<JsonObject>) -> Result<Answer, Problem> {
        let CloseArguments { sandbox_id, delete_workspace } = parse(arguments)?;
        let (engine, record) = self.server.known(self.scope, &sandbox_id).await?;
        if let Some(key) = &record.key {
            self.server.desks.forget(key);
        }
        if delete_workspace {
            engine.retire(&record).await?;
        } else {
            engine.stop(&record).await?;
        }
        Ok(Answer::new(json!({"ok": true})))
    }
}

fn bad(what: impl Into<String>) -> Problem {
    Problem::new(Code::InvalidArgument, what)
}

fn path(text: &str) -> Result<GuestPath, Problem> {
    GuestPath::parse(text).map_err(|error| {
        Problem::new(Code::PathOutside, format!("`{text}`: {error}")).hint("paths are relative to /workspace")
    })
}

/// `0644`, `644` or `0o644`.
fn mode(text: &str) -> Result<u32, Problem> {
    u32::from_str_radix(text.trim_start_matches("0o"), 8)
        .ok()
        .filter(|mode| *mode <= 0o777)
        .ok_or_else(|| bad(format!("mode `{text}` is not an octal number up to 0777")))
}

fn absolute(path: &GuestPath) -> String {
    if path.is_root() {
        WORKSPACE.to_owned()
    } else {
        format!("{WORKSPACE}/{}", String::from_utf8_lossy(path.as_bytes()))
    }
}

/// Text, also if the cut went through its last character.
fn text_of(bytes: &[u8], truncated: bool) -> Option<String> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Some(text.to_owned()),
        Err(error) if truncated && error.error_len().is_none() => {
            Some(String::from_utf8_lossy(&bytes[..error.valid_up_to()]).into_owned())
        }
        Err(_) => None,
    }
}

/// An entry with its path below the workspace. Links and the like are files to this contract.
fn described(base: &GuestPath, entry: &Entry) -> Option<Value> {
    let path = base.join(entry.name.as_bytes()).ok()?;
    let kind = if entry.kind == Kind::Dir { "dir" } else { "file" };
    Some(json!({
        "path": String::from_utf8_lossy(path.as_bytes()),
        "type": kind,
        "size": entry.size,
        "mode": format!("{:04o}", entry.mode & 0o7777),
        "mtime_unix": entry.mtime_ns.div_euclid(1_000_000_000),
    }))
}
