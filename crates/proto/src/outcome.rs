//! What became of a call.

use serde::{Deserialize, Serialize};

use crate::{id::ExecId, problem::Problem};

/// What became of the session's state. Every reply says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SessionState {
    /// Everything is as the call left it.
    Preserved,
    /// As it was before the call.
    RolledBack,
    /// The interpreter is gone; the next call starts a new one. Files stay.
    Lost,
    /// There is no state this call could have touched.
    #[default]
    None,
}

/// Why a run or exec ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    Exit,
    Signal,
    Oom,
    Pids,
    Disk,
    Timeout,
    Cancelled,
}

impl Cause {
    pub fn as_str(self) -> &'static str {
        match self {
            Cause::Exit => "exit",
            Cause::Signal => "signal",
            Cause::Oom => "oom",
            Cause::Pids => "pids",
            Cause::Disk => "disk",
            Cause::Timeout => "timeout",
            Cause::Cancelled => "cancelled",
        }
    }
}

/// What a call used.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Receipt {
    pub duration_us: u64,
    /// CPU time of the call: of the whole sandbox while it ran where a cgroup measures it, else of its processes.
    pub cpu_us: u64,
    /// Highest memory of the sandbox during the call, or of the call's processes where no cgroup measures it.
    pub peak_memory: u64,
    /// Processes of the call that are still running.
    pub processes: u32,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// Bytes that were produced but not kept because of the output limit.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub output_dropped: u64,
}

/// How a run or exec ended, complete for a caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Outcome {
    pub exec: ExecId,
    pub cause: Cause,
    /// As a shell would say it: 128 + n for signal n.
    pub exit_code: i32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub signal: Option<i32>,
    pub session_state: SessionState,
    /// An exception of the user's code, in short; the traceback is in stderr.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub exception: Option<Exception>,
    /// Set when something other than the user's own exit ended the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub problem: Option<Problem>,
    pub receipt: Receipt,
    /// Whether a call that takes the interpreter down leaves the session as it was before: this one, and the next. Nothing where
    /// undo is off, and for commands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub transactional: Option<bool>,
    /// Why it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub transactional_reason: Option<String>,
    /// With `rolled_back`: how many calls were taken back, this one included. More than 1 where the state right before this call
    /// was one that could not be kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub taken_back: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Exception {
    pub name: String,
    pub message: String,
}
