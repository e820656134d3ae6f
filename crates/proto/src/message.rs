//! Requests of the engine and events of the agent.
//!
//! Each request carries a tag of the caller's choice in its frame; every event that answers it carries the
//! same tag. A request is answered by any number of events and data frames and exactly one *last* event:
//! [`Event::is_last`].
//!
//! Output comes as data frames with chunk numbers and offsets. An offset that jumps means that what lies between
//! was not kept: the difference is its exact size.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    brief::Brief,
    files::{Content, FileReply, FileRequest},
    guest::{Interpreter, Language, Manner, Scion},
    id::{ExecId, SessionName},
    limits::Limits,
    outcome::{FilesState, Outcome},
    problem::Problem,
};

/// Raised with every incompatible change. Engine and agent of different versions refuse each other politely.
pub const PROTOCOL: u32 = 2;
/// Calls that can be taken back unless somebody wants another number.
pub const DEFAULT_UNDO: u32 = 3;
/// Most calls that can be taken back: each keeps a copy of the interpreter, as a process that shares what has not changed.
pub const MAX_UNDO: u32 = 16;
/// Largest piece of code of one run.
pub const MAX_CODE: usize = 8 << 20;
/// Most arguments plus variables of an exec: the kernel's own bound is near 2 MiB in bytes.
pub const MAX_ARGS: usize = 16 * 1024;
/// Most bytes of a session's variables, names included: half of what the kernel takes for a whole command.
pub const MAX_VARIABLES: usize = 1 << 20;
/// Longest variable, name and `=` included: the kernel's own bound, less the final zero.
pub const MAX_VARIABLE: usize = (128 << 10) - 1;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// First request on every connection.
    Hello {
        protocol: u32,
    },
    Run(Run),
    Exec(Exec),
    /// The output of a run or exec from chunk `since` on; with `follow` until it ends.
    Attach {
        exec: ExecId,
        since: u64,
        follow: bool,
    },
    /// Until it ends or the time is over (then `Waited` with no outcome).
    Wait {
        exec: ExecId,
        timeout_ms: u64,
    },
    /// Input for an exec from anyone: at most [`crate::frame::MAX_DATA`] bytes. Answered when all of it is taken or queued;
    /// one that is not taken in time is refused as a whole.
    WriteStdin {
        exec: ExecId,
        data: Content,
    },
    /// End of the exec's input. Input also comes as data frames on the tag of its `Exec` or `Attach`.
    CloseStdin {
        exec: ExecId,
    },
    Signal {
        exec: ExecId,
        signal: i32,
    },
    /// Interrupt, then kill.
    Cancel {
        exec: ExecId,
    },
    Resize {
        exec: ExecId,
        rows: u16,
        cols: u16,
    },
    Execs,
    OpenSession(OpenSession),
    CloseSession {
        name: SessionName,
    },
    /// Changes the session's variables, for what starts from now on and for the next run of interpreters that are up.
    SetEnv {
        session: SessionName,
        #[serde(default)]
        set: BTreeMap<String, String>,
        #[serde(default)]
        unset: Vec<String>,
    },
    /// Takes back the last calls of an interpreter: of the one that ran last, unless a language is named.
    Undo {
        session: SessionName,
        #[serde(default)]
        language: Option<Language>,
        calls: u32,
    },
    /// Lets go of all states that are kept to be gone back to: their memory is free. The next calls keep new ones.
    DropSpares,
    Status,
    Usage,
    /// The box is about to be frozen: may it be? With `idle_ms` only if nobody has wanted anything for so long. If the answer
    /// is yes, no clock of the agent's ends the box before somebody wants something of it again.
    Rest {
        #[serde(default)]
        idle_ms: Option<u64>,
    },
    /// Where a session stands. Looking changes nothing, and does not keep a sandbox awake.
    Brief {
        session: SessionName,
    },
    /// What listens in the sandbox.
    Ports,
    /// A TCP connection to a port of the sandbox. `Dialed` carries its socket beside the frame's first byte (`SCM_RIGHTS`);
    /// it may still be connecting.
    Dial {
        port: u16,
    },
    /// Other limits and times for a sandbox that lives. The agent takes what it holds itself.
    Configure {
        limits: Limits,
        idle_timeout_s: u64,
        max_lifetime_s: u64,
    },
    Files(FileRequest),
    /// The box is nobody's yet, and kept ready by this caller: answered when its interpreter has been warmed up. From now on it ends
    /// with this connection, until `Claimed`.
    KeepReady,
    /// Of a box that is kept ready, by its keeper: it is somebody's now, as if it had just been made with these. Not
    /// answered unless it is refused: the line is its first caller's from here on.
    Claimed {
        idle_timeout_s: u64,
        max_lifetime_s: u64,
        undo_calls: u32,
    },
    /// The sandbox is to be written to disk: nothing new starts and nobody else is heard, until `Shutdown` or the end of
    /// this connection.
    PrepareSleep,
    /// The same for one that is to be copied while it lives: all that lives in it is one python that waits, or this is refused.
    PrepareFork,
    /// Of a box that has just been made, or claimed: what is up in it and has run nothing ends.
    MakeWay,
    /// After that: it becomes a copy of one that lives. The files of an image come beside this.
    Become(Scion),
    /// The processes are written and stopped: the agent writes down what it knows.
    Save,
    /// Of an agent that was started to go on with what another wrote down: what the processes come back on.
    Offer,
    /// The processes are there. Of a copy of one that lives: are they?
    Resumed,
    /// Ends the sandbox.
    Shutdown,
}

/// Code for an interpreter of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    pub session: SessionName,
    pub language: Language,
    pub code: String,
    pub timeout_ms: u64,
    /// Cancel when this connection goes away before the end.
    #[serde(default)]
    pub cancel_on_disconnect: bool,
}

/// A command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exec {
    pub session: SessionName,
    pub argv: Vec<String>,
    /// Absolute in the box, or relative to the session's own directory.
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Input will come; else the command reads from `/dev/null`.
    #[serde(default)]
    pub stdin: bool,
    #[serde(default)]
    pub pty: Option<PtySize>,
    /// None: as long as it takes.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
    /// Answer `Started` as the last event and go on without the caller.
    #[serde(default)]
    pub detach: bool,
    #[serde(default)]
    pub cancel_on_disconnect: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PtySize {
    #[cfg_attr(feature = "schema", schema(maximum = 65535))]
    pub rows: u16,
    #[cfg_attr(feature = "schema", schema(maximum = 65535))]
    pub cols: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct OpenSession {
    pub name: SessionName,
    #[serde(default)]
    pub cwd: Option<String>,
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// How many calls can be taken back; the sandbox's own number if it is not said.
    #[serde(default)]
    pub undo_calls: Option<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    Welcome {
        protocol: u32,
    },
    /// Whom to write: the sessions' first processes in the agent's own view, and ends of sockets by their inodes.
    Prepared {
        inits: Vec<i32>,
        sockets: Vec<u64>,
    },
    /// Whose image is all the state there is, in the agent's own view; and what a process does not have in its memory.
    Forkable {
        spare: i32,
        cwd: String,
        manner: Manner,
        /// What the agent knows, for the agent of the copy.
        state: String,
    },
    /// The python of a copy, in the agent's own view, has laid out its memory: it goes on with `Resumed`, when that is filled.
    LaidOut {
        python: i32,
    },
    /// Descriptors of the agent's, and the former names of what they take the place of.
    Offered {
        files: Vec<(i32, String)>,
    },
    /// A run or exec began (or was queued). With a detached exec this is the last event.
    Started {
        exec: ExecId,
        detached: bool,
    },
    Finished(Outcome),
    /// End of an `Attach` without follow while the exec still runs; go on from chunk `next`.
    Attached {
        next: u64,
    },
    Waited {
        outcome: Option<Outcome>,
    },
    Execs {
        execs: Vec<ExecInfo>,
    },
    Status(Status),
    Usage(Usage),
    Rest(Rest),
    Brief(Box<Brief>),
    Ports {
        ports: Vec<PortInfo>,
    },
    Dialed,
    /// So many calls were taken back; so many more can be.
    Undone {
        language: Language,
        calls: u32,
        kept: usize,
        /// Sockets, pipes and the like that were open in that state and are not.
        #[serde(default)]
        closed_handles: u32,
        #[serde(default)]
        files_state: FilesState,
        /// Why files did not go back.
        #[serde(default)]
        files_reason: Option<String>,
    },
    Files(FileReply),
    Done,
    Failed(Problem),
}

impl Event {
    /// Whether nothing more comes for the request.
    pub fn is_last(&self) -> bool {
        match self {
            Event::Started { detached, .. } => *detached,
            _ => true,
        }
    }
}

/// A value in every form its type offers, as in Jupyter: binary forms are base64. Travels as a chunk of the
/// stream [`crate::frame::Stream::Display`], in order with the output around it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Display {
    pub kind: DisplayKind,
    pub mime: BTreeMap<String, serde_json::Value>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DisplayKind {
    /// The value of the last expression.
    Result,
    /// Shown on the way.
    Display,
}

/// One line of a listing of runs and execs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct ExecInfo {
    pub exec: ExecId,
    pub session: SessionName,
    pub what: What,
    pub running: bool,
    pub started_unix_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub outcome: Option<Outcome>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum What {
    Run { language: Language },
    Exec { argv: Vec<String> },
}

/// The sandbox as its agent sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub sessions: Vec<SessionInfo>,
    pub interpreters: BTreeMap<Language, Interpreter>,
    pub running: u32,
    pub idle_ms: u64,
    pub age_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct SessionInfo {
    pub name: SessionName,
    /// Interpreters that are up.
    pub interpreters: Vec<Language>,
    /// Where its commands and interpreters start.
    pub cwd: String,
    /// Its own variables, beyond those that every session has.
    pub env: BTreeMap<String, String>,
    pub opened_unix_ms: u64,
}

/// A TCP port that something in the sandbox listens on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct PortInfo {
    pub port: u16,
    /// `0.0.0.0` and `::` are all addresses.
    pub address: String,
}

/// What a sandbox uses now, and used so far.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Usage {
    /// Of the whole sandbox where a cgroup measures it, else of its processes.
    pub memory: u64,
    /// The highest so far; none where no cgroup measures it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub peak_memory: Option<u64>,
    /// CPU time since the sandbox was made; where no cgroup measures it, of the processes that are there now.
    pub cpu_us: u64,
    pub processes: u32,
    /// Bytes of the workspace that are taken, and how many there are.
    pub disk_used: u64,
    pub disk_limit: u64,
    pub uptime_ms: u64,
    /// Since the last call ended; 0 while one is under way.
    pub idle_ms: u64,
    /// Runs and execs under way.
    pub running: u32,
}

/// Whether a sandbox may be put to sleep now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rest {
    pub rests: bool,
    /// Runs under way, and callers that read or wait for something.
    pub calls: u32,
    pub usage: Usage,
}
