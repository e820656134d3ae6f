//! Errors as callers see them: a stable code, a message, a hint, and what became of the state.

use serde::{Deserialize, Serialize};

use crate::outcome::SessionState;

macro_rules! codes {
    ($($(#[$doc:meta])* $variant:ident = $text:literal,)*) => {
        /// Stable names of what can go wrong. New ones may come; none changes its meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $text)] $variant,)*
        }
        impl Code {
            pub const ALL: &[Code] = &[$(Code::$variant,)*];
            pub fn as_str(self) -> &'static str {
                match self { $(Code::$variant => $text,)* }
            }
        }
    };
}

codes! {
    /// The call ran past its timeout.
    Timeout = "timeout",
    /// The call was cancelled by a caller.
    Cancelled = "cancelled",
    /// The interpreter or command was ended by a signal.
    Crashed = "crashed",
    /// The kernel stopped it because the sandbox's memory was used up.
    Oom = "oom",
    /// The sandbox's number of processes was used up.
    Pids = "pids",
    /// The workspace is full.
    Disk = "disk",
    /// Another call kept the interpreter until the time was over; or it is about to be ready.
    Busy = "busy",
    /// An earlier call took the interpreter down while this one was waiting.
    StateLost = "state_lost",
    /// No such interpreter in this environment.
    InterpreterMissing = "interpreter_missing",
    /// The interpreter was found but did not start.
    InterpreterFailed = "interpreter_failed",
    EnvironmentUnknown = "environment_unknown",
    /// The sandbox has another environment than the one asked for.
    EnvironmentMismatch = "environment_mismatch",
    SandboxNotFound = "sandbox_not_found",
    SnapshotNotFound = "snapshot_not_found",
    SessionNotFound = "session_not_found",
    SessionExists = "session_exists",
    ExecNotFound = "exec_not_found",
    /// The exec has ended, so it takes no input or signal.
    ExecEnded = "exec_ended",
    CommandNotFound = "command_not_found",
    InvalidArgument = "invalid_argument",
    TooLarge = "too_large",
    TooMany = "too_many",
    PathOutside = "path_outside",
    NotFound = "not_found",
    Exists = "exists",
    NotADirectory = "not_a_directory",
    /// A directory with something in it, where only an empty one can go.
    NotEmpty = "not_empty",
    IsADirectory = "is_a_directory",
    NotARegularFile = "not_a_regular_file",
    Permission = "permission",
    /// This host cannot isolate as asked; the message says what is missing.
    IsolationUnavailable = "isolation_unavailable",
    /// The sandbox's agent does not answer or answers nonsense.
    AgentLost = "agent_lost",
    Protocol = "protocol",
    Config = "config",
    /// No token came with the request, or none that is known.
    Unauthorized = "unauthorized",
    /// The token is known and may not do this.
    Forbidden = "forbidden",
    /// A quota of the caller is used up; the message says which, and by what.
    Quota = "quota",
    /// Too many requests in too short a time; the hint says when to come again.
    RateLimited = "rate_limited",
    /// It contradicts what is there, or what another call is doing.
    Conflict = "conflict",
    /// This very request came before, under the same idempotency key, and is still under way.
    InProgress = "in_progress",
    /// The thing is no longer as the caller's condition says.
    PreconditionFailed = "precondition_failed",
    /// Nothing listens on that port of the sandbox.
    PortClosed = "port_closed",
    /// None of the forms that the caller accepts can be given.
    NotAcceptable = "not_acceptable",
    /// The address is there, and does not know this method.
    MethodNotAllowed = "method_not_allowed",
    /// The daemon is shutting down or has more to do than it takes on; later it may work.
    Unavailable = "unavailable",
    /// These calls cannot be taken back; the message says why and how many can.
    UndoUnavailable = "undo_unavailable",
    Unsupported = "unsupported",
    Internal = "internal",
}

/// One error, complete for a caller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[error("{message}")]
pub struct Problem {
    pub code: Code,
    pub message: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hint: String,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub session_state: SessionState,
}

impl Problem {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: String::new(), session_state: SessionState::None }
    }
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = hint.into();
        self
    }
    pub fn state(mut self, state: SessionState) -> Self {
        self.session_state = state;
        self
    }
    pub fn internal(what: impl std::fmt::Display) -> Self {
        Self::new(Code::Internal, what.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_unique_and_survive_the_wire() {
        let mut seen = std::collections::BTreeSet::new();
        for code in Code::ALL {
            assert!(seen.insert(code.as_str()));
            let json = serde_json::to_string(code).unwrap();
            assert_eq!(json, format!("\"{}\"", code.as_str()));
            assert_eq!(serde_json::from_str::<Code>(&json).unwrap(), *code);
        }
    }
}
