//! What the tools look like to a model. Written by hand: plain types only (several clients refuse nullable unions), and
//! every word is paid for in tokens by each conversation. `spec/mcp-tools.json` is the same, checked in.

use std::sync::Arc;

use rmcp::model::{JsonObject, MetaObject, Tool, ToolAnnotations};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Which tools are offered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToolSet {
    /// `run` alone.
    #[default]
    Run,
    /// The `sandbox_…` tools.
    Code,
    All,
}

/// Said to the model once per conversation.
pub(super) const RUN_INSTRUCTIONS: &str = "Sandbox for code: `run` executes it and keeps state per session (variables, \
     cwd, background jobs, /workspace files) between calls. No network by default. After a timeout or error the \
     session goes on unless the result says that state was lost.";
pub(super) const CODE_INSTRUCTIONS: &str = "Sandbox for code: sandbox_open once, then sandbox_fs_* and sandbox_exec with \
     its sandbox_id. Files in /workspace persist between calls. No network by default.";

const UNDO: &str = "sandbox_undo";

impl ToolSet {
    /// As flags and configuration name it.
    pub fn parse(text: &str) -> Result<Self, String> {
        match text {
            "run" => Ok(ToolSet::Run),
            "code" => Ok(ToolSet::Code),
            "all" => Ok(ToolSet::All),
            _ => Err(format!("there is no tool set `{text}`: run, code or all")),
        }
    }

    pub(super) fn instructions(self) -> &'static str {
        match self {
            ToolSet::Run | ToolSet::All => RUN_INSTRUCTIONS,
            ToolSet::Code => CODE_INSTRUCTIONS,
        }
    }

    /// In the order a client shows them.
    pub(super) fn tools(self, structured: bool) -> Vec<Tool> {
        let code = || code_tools(structured);
        match self {
            ToolSet::Run => vec![run(structured)],
            ToolSet::Code => code(),
            ToolSet::All => {
                std::iter::once(run(structured)).chain(code()).chain([undo(structured)]).collect()
            }
        }
    }

    pub(super) fn has(self, name: &str) -> bool {
        match self {
            ToolSet::Run => name == "run",
            ToolSet::Code => name.starts_with("sandbox_") && name != UNDO,
            ToolSet::All => true,
        }
    }
}

/// What a tool does to the world, for clients that ask before they call.
#[derive(Clone, Copy)]
enum Effect {
    Reads,
    /// Changes things; the same call again changes nothing more.
    Settles,
    Adds,
    Destroys,
    /// Destroys, and the same call again destroys nothing more.
    Removes,
}

impl Effect {
    fn annotations(self) -> ToolAnnotations {
        // Whatever it is, it happens inside a sandbox.
        let closed = ToolAnnotations::new().open_world(false);
        match self {
            Effect::Reads => closed.read_only(true),
            Effect::Settles => closed.read_only(false).destructive(false).idempotent(true),
            Effect::Adds => closed.read_only(false).destructive(false).idempotent(false),
            Effect::Destroys => closed.read_only(false).destructive(true).idempotent(false),
            Effect::Removes => closed.read_only(false).destructive(true).idempotent(true),
        }
    }
}

fn object(value: Value) -> Arc<JsonObject> {
    match value {
        Value::Object(map) => Arc::new(map),
        _ => Arc::default(),
    }
}

fn tool(
    name: &'static str,
    description: &'static str,
    effect: Effect,
    properties: Value,
    required: &[&str],
) -> Tool {
    let schema = json!({"type": "object", "properties": properties, "required": required});
    Tool::new(name, description, object(schema)).with_annotations(effect.annotations())
}

fn run(structured: bool) -> Tool {
    let run = tool(
        "run",
        "Run code in a sandbox. State and files in /workspace persist per session. Returns stdout, stderr and the last \
         expression's value; plots come back as images.",
        Effect::Destroys,
        json!({
            "code": {"type": "string"},
            "env": {"type": "string", "description": "python, node, bash or a configured environment"},
            "session": {"type": "string", "description": "Default: default"},
            "timeout": {"type": "number", "description": "Seconds"},
        }),
        &["code", "env"],
    );
    // Where clients hide tools behind a search, this one is there at once.
    let always = json!({"anthropic/alwaysLoad": true});
    let run = match always {
        Value::Object(map) => run.with_meta(MetaObject(map)),
        _ => run,
    };
    if structured { run.with_raw_output_schema(object(run_output())) } else { run }
}

/// Only beside `run`: the calls that it takes back are of interpreters, which the `sandbox_…` tools alone have none of.
fn undo(structured: bool) -> Tool {
    let undo = tool(
        UNDO,
        "Take back a session's last runs: variables are as before, files stay.",
        Effect::Destroys,
        json!({"sandbox_id": {"type": "string"}, "calls": {"type": "integer", "description": "Default 1"}}),
        &["sandbox_id"],
    );
    let number = json!({"type": "integer"});
    let output = json!({"calls": number, "kept": number, "language": {"type": "string"}});
    match structured {
        true => undo.with_raw_output_schema(object(json!({"type": "object", "properties": output}))),
        false => undo,
    }
}

fn run_output() -> Value {
    let text = json!({"type": "string"});
    json!({
        "type": "object",
        "properties": {
            "stdout": text, "stderr": text, "value": text,
            "exit_code": {"type": "integer"},
            "session": text, "sandbox_id": text, "exec_id": text,
            "session_state": {"type": "string", "enum": ["preserved", "rolled_back", "lost", "none"]},
            "truncated": {"type": "boolean"},
            "duration_ms": {"type": "integer"},
            "receipt": {"type": "object"},
            "files": {"type": "array", "items": {"type": "string"}},
            "notes": {"type": "array", "items": {"type": "string"}},
            "error": {
                "type": "object",
                "properties": {"code": text, "message": text, "hint": text},
                "required": ["code", "message"],
            },
        },
        "required": ["stdout", "stderr", "exit_code", "session", "session_state", "truncated"],
    })
}

/// Names and shapes are a contract: each is `(tool, output schema)`.
fn code_tools(structured: bool) -> Vec<Tool> {
    let text = || json!({"type": "string"});
    let flag = || json!({"type": "boolean"});
    let number = || json!({"type": "integer"});
    let map = || json!({"type": "object", "additionalProperties": {"type": "string"}});
    let list = || json!({"type": "array", "items": {"type": "string"}});
    let all = [
        (
            tool(
                "sandbox_open",
                "Create or resume a sandbox.",
                Effect::Settles,
                json!({"session_key": {"type": "string", "description": "Name; same name, same sandbox"}}),
                &[],
            ),
            json!({"sandbox_id": text(), "image": text(), "workdir": text(), "created": flag()}),
        ),
        (
            tool(
                "sandbox_exec",
                "Run a command. stream=true returns an exec_id at once.",
                Effect::Destroys,
                json!({
                    "sandbox_id": text(), "cmd": list(), "cwd": text(), "env": map(),
                    "timeout_seconds": number(), "stream": flag(),
                }),
                &["sandbox_id", "cmd"],
            ),
            json!({"exec_id": text(), "exit_code": number(), "stdout": text(), "stderr": text(), "status": text()}),
        ),
        (
            tool(
                "sandbox_exec_read",
                "Output chunks with seq above since_seq.",
                Effect::Reads,
                json!({"sandbox_id": text(), "exec_id": text(), "since_seq": number(), "max_chunks": number()}),
                &["sandbox_id", "exec_id"],
            ),
            json!({
                "chunks": {"type": "array", "items": {
                    "type": "object", "properties": {"seq": number(), "stream": text(), "text": text()},
                }},
                "done": flag(),
            }),
        ),
        (
            tool(
                "sandbox_exec_wait",
                "Wait for an exec to end.",
                Effect::Reads,
                json!({"sandbox_id": text(), "exec_id": text(), "timeout_seconds": number()}),
                &["sandbox_id", "exec_id"],
            ),
            json!({"done": flag(), "exit_code": number()}),
        ),
        (
            tool(
                "sandbox_brief",
                "Summary of variables, jobs, files, errors.",
                Effect::Reads,
                json!({"sandbox_id": text()}),
                &["sandbox_id"],
            ),
            json!({"brief": text()}),
        ),
        (
            tool(
                "sandbox_fs_write",
                "Write a file, as text or base64.",
                Effect::Removes,
                json!({
                    "sandbox_id": text(), "path": {"type": "string", "description": "Relative to /workspace"},
                    "contents": text(), "contents_b64": text(),
                    "mode": {"type": "string", "description": "Default 0644"}, "overwrite": flag(),
                }),
                &["sandbox_id", "path"],
            ),
            json!({"ok": flag(), "path": text()}),
        ),
        (
            tool(
                "sandbox_fs_read",
                "Read a file; contents_b64 if it is not text.",
                Effect::Reads,
                json!({
                    "sandbox_id": text(), "path": text(),
                    "max_bytes": {"type": "integer", "description": "Default 262144"},
                }),
                &["sandbox_id", "path"],
            ),
            json!({"contents": text(), "contents_b64": text(), "truncated": flag(), "size_bytes": number()}),
        ),
        (
            tool(
                "sandbox_fs_list",
                "List a directory.",
                Effect::Reads,
                json!({"sandbox_id": text(), "path": {"type": "string", "description": "Default ."}, "recursive": flag()}),
                &["sandbox_id"],
            ),
            json!({"entries": {"type": "array", "items": {
                "type": "object",
                "properties": {
                    "path": text(), "type": text(), "size": number(), "mode": text(), "mtime_unix": number(),
                },
            }}}),
        ),
        (
            tool(
                "sandbox_fs_delete",
                "Delete a file, or with recursive a directory.",
                Effect::Removes,
                json!({"sandbox_id": text(), "path": text(), "recursive": flag()}),
                &["sandbox_id", "path"],
            ),
            json!({"ok": flag(), "deleted": text()}),
        ),
        (
            tool(
                "sandbox_close",
                "End a sandbox. Its files stay unless delete_workspace.",
                Effect::Removes,
                json!({"sandbox_id": text(), "delete_workspace": flag()}),
                &["sandbox_id"],
            ),
            json!({"ok": flag()}),
        ),
        (
            tool(
                "sandbox_run",
                "Run code once in a fresh sandbox.",
                Effect::Adds,
                json!({
                    "runtime": {"type": "string", "description": "python, node or bash"},
                    "code": text(), "args": list(), "env": map(),
                    "files": map(), "timeout_seconds": number(),
                }),
                &["code"],
            ),
            json!({
                "ok": flag(), "runtime": text(), "exit_code": number(), "duration_ms": number(),
                "stdout": text(), "stderr": text(), "error": text(),
            }),
        ),
    ];
    let schema = |properties: Value| object(json!({"type": "object", "properties": properties}));
    all.into_iter()
        .map(|(tool, output)| if structured { tool.with_raw_output_schema(schema(output)) } else { tool })
        .collect()
}

#[cfg(test)]
mod tests;
