//! What became of a call.

use serde::{Deserialize, Serialize};

use crate::{id::ExecId, message::PortInfo, problem::Problem};

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

/// What became of the files with calls that were taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FilesState {
    /// All of `/workspace` is as it was before those calls.
    Restored,
    /// As the calls left them; a reason says why they did not go back.
    #[default]
    Kept,
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

/// What a call used and did.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Receipt {
    pub duration_us: u64,
    /// CPU time of the call: of the whole sandbox while it ran where a cgroup measures it, else of its processes.
    pub cpu_us: u64,
    /// Highest memory of the sandbox during the call, or of the call's processes where no cgroup measures it.
    pub peak_memory: u64,
    /// Processes of the call that are still running; `running` names the first of them.
    pub processes: u32,
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// Bytes that were produced but not kept because of the output limit.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub output_dropped: u64,
    /// As the reply itself says it, so that a receipt is complete without it.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub exit_code: i32,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub cause: Option<Cause>,
    #[serde(default = "FileChanges::unsaid")]
    #[cfg_attr(feature = "schema", schema(required))]
    pub files: FileChanges,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required, max_items = 16))]
    pub running: Vec<ProcessInfo>,
    /// What listens in the sandbox at the end of the call, whoever opened it.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required, max_items = 32))]
    pub ports: Vec<PortInfo>,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub hosts: Hosts,
}

/// Names of one kind of change that a receipt lists; the counts are exact beyond it.
pub const MAX_NAMES: usize = 20;
/// Bytes of such a name; the middle of a longer one is left out.
pub const MAX_NAME: usize = 200;
/// Processes that a receipt lists.
pub const MAX_RUNNING: usize = 16;
/// Ports that a receipt lists.
pub const MAX_PORTS: usize = 32;

/// What changed below `/workspace` between the begin and the end of a call. Names are relative to it, directories end with `/`;
/// bytes that are no UTF-8 are written `\xNN`. A directory counts as added or removed, never as changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct FileChanges {
    #[cfg_attr(feature = "schema", schema(max_items = 20))]
    pub added: Vec<String>,
    #[cfg_attr(feature = "schema", schema(max_items = 20))]
    pub changed: Vec<String>,
    #[cfg_attr(feature = "schema", schema(max_items = 20))]
    pub removed: Vec<String>,
    pub added_count: u64,
    pub changed_count: u64,
    pub removed_count: u64,
    /// False: `reason` says why not all of it is known.
    pub complete: bool,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub reason: Option<String>,
    /// Other calls ran meanwhile: what they changed is among it.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub shared: bool,
}

impl Default for FileChanges {
    /// Nothing changed: what a call that never began has to say.
    fn default() -> Self {
        Self {
            added: Vec::new(),
            changed: Vec::new(),
            removed: Vec::new(),
            added_count: 0,
            changed_count: 0,
            removed_count: 0,
            complete: true,
            reason: None,
            shared: false,
        }
    }
}

impl FileChanges {
    /// Nothing is known.
    pub fn unknown(reason: &str) -> Self {
        Self { complete: false, reason: Some(reason.to_owned()), ..Self::default() }
    }

    /// An agent of an earlier version says nothing of files.
    fn unsaid() -> Self {
        Self::unknown("the sandbox was made by a version of carrel that does not look")
    }

    /// How many files and directories in all.
    pub fn total(&self) -> u64 {
        self.added_count + self.changed_count + self.removed_count
    }
}

/// A process of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ProcessInfo {
    /// As code in its session knows it.
    pub pid: i32,
    /// Its command line, at most 80 characters of it.
    pub command: String,
}

/// Hosts that a call reached, and those that it was refused. A sandbox has no network yet, so both are empty.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Hosts {
    pub reached: Vec<String>,
    pub refused: Vec<String>,
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
    pub receipt: Box<Receipt>,
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
    /// With `rolled_back`: what became of the files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub files_state: Option<FilesState>,
    /// Why they did not go back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub files_reason: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Exception {
    pub name: String,
    pub message: String,
}
