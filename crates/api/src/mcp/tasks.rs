//! Calls as tasks, for clients that can poll: a task is a run of a sandbox and nothing more, so it outlives the
//! connection, this process, and every store that a server could keep.

use carrel_proto::{
    id::{ExecId, SandboxId},
    problem::{Code, Problem},
};
use rmcp::{
    model::{DetailedTask, GetTaskResult, Task, TaskPayload, TaskStatus},
    task_manager::current_timestamp,
};

use super::{Server, run::result_of, scope::Scope};

/// How often a client should ask.
const POLL_MS: u64 = 1000;

fn id(sandbox: &SandboxId, exec: &ExecId) -> String {
    format!("{sandbox}.{exec}")
}

/// What a task's id means.
fn parse(text: &str) -> Result<(SandboxId, ExecId), Problem> {
    let unknown = || Problem::new(Code::NotFound, format!("there is no task `{text}`"));
    let (sandbox, exec) = text.split_once('.').ok_or_else(unknown)?;
    Ok((sandbox.parse().map_err(|_| unknown())?, exec.parse().map_err(|_| unknown())?))
}

fn task(sandbox: &SandboxId, exec: &ExecId, status: TaskStatus) -> Task {
    let now = current_timestamp();
    Task::new(id(sandbox, exec), status, now.clone(), now).with_poll_interval_ms(POLL_MS)
}

/// A task that has just become one.
pub(super) fn working(sandbox: &SandboxId, exec: &ExecId) -> Task {
    task(sandbox, exec, TaskStatus::Working)
}

pub(super) async fn get(server: &Server, scope: &Scope, text: &str) -> Result<GetTaskResult, Problem> {
    let (sandbox, exec) = parse(text)?;
    let (result, outcome) = result_of(server, scope, &sandbox, &exec, server.options.max_chars).await?;
    let payload = match outcome {
        None => TaskPayload::Working,
        Some(_) => {
            let value = serde_json::to_value(result).map_err(Problem::internal)?;
            let object = value.as_object().cloned().unwrap_or_default();
            TaskPayload::Completed { result: object }
        }
    };
    Ok(GetTaskResult::new(DetailedTask::new(task(&sandbox, &exec, payload.status()), payload)))
}

pub(super) async fn cancel(server: &Server, scope: &Scope, text: &str) -> Result<(), Problem> {
    let (sandbox, exec) = parse(text)?;
    let (engine, record) = server.known(scope, &sandbox).await?;
    match engine.cancel(&record, &exec).await {
        Err(problem) if problem.code != Code::ExecEnded => Err(problem),
        _ => Ok(()),
    }
}
