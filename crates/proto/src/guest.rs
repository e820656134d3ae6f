//! What an agent is told when its box is made, and the fixed places inside a box.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{id::SandboxId, limits::Limits};

/// A language that has a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Language {
    Python,
    Bash,
    Node,
}

impl Language {
    pub const ALL: [Language; 3] = [Language::Python, Language::Bash, Language::Node];

    pub fn as_str(self) -> &'static str {
        match self {
            Language::Python => "python",
            Language::Bash => "bash",
            Language::Node => "node",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|language| language.as_str() == text)
    }
}

/// How to start one interpreter inside the box.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Interpreter {
    /// Absolute path inside the box.
    pub program: String,
    pub version: String,
    /// Directories with third-party modules (python: site-packages).
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub site: Vec<String>,
    /// What was looked for and not found, when `program` is empty.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub missing: String,
}

/// Where things are, as the agent sees them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Places {
    pub workspace: String,
    pub home: String,
    /// Drivers and code files: written by the agent, read by user code.
    pub run: String,
    /// Kept output. Seen by the agent alone.
    pub spool: String,
}

impl Places {
    pub const WORKSPACE: &str = "/workspace";
    pub const PROJECT: &str = "/project";
    pub const HOME: &str = "/home/user";
    pub const RUN: &str = "/run/carrel";
    pub const SPOOL: &str = "/run/carrel-spool";
    pub const AGENT: &str = "/run/carrel/agent";
    /// Below the spool: its time says when something in the workspace was last changed from outside the box.
    pub const OUTSIDE: &str = "outside";

    /// Inside a box of its own mount namespace.
    pub fn in_box() -> Self {
        Self {
            workspace: Self::WORKSPACE.into(),
            home: Self::HOME.into(),
            run: Self::RUN.into(),
            spool: Self::SPOOL.into(),
        }
    }
}

/// Open descriptors on files of the box's cgroup, from which the agent reads usage. All optional.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Meters {
    /// `memory.events` (v2) or `memory.oom_control` (v1): has a line `oom_kill N`.
    pub oom: Option<i32>,
    /// `memory.peak` or `memory.max_usage_in_bytes`.
    pub memory_peak: Option<i32>,
    /// `cpu.stat` (`usage_usec N`) or `cpuacct.usage` (nanoseconds).
    pub cpu: Option<i32>,
    /// `pids.events`: has a line `max N`.
    pub pids: Option<i32>,
    /// `memory.current` or `memory.usage_in_bytes`.
    pub memory: Option<i32>,
    /// `pids.current`.
    pub processes: Option<i32>,
}

/// The agent's whole configuration, handed over once at the start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AgentConfig {
    pub protocol: u32,
    pub sandbox: SandboxId,
    pub limits: Limits,
    pub interpreters: BTreeMap<Language, Interpreter>,
    /// Variables of every session.
    pub variables: BTreeMap<String, String>,
    pub places: Places,
    /// Listening unix socket: the one way in.
    pub listener: i32,
    pub meters: Meters,
    /// Whether sessions get pid and mount namespaces of their own (not with weak isolation).
    pub namespaces: bool,
    /// Whom user code runs as; the agent's own ids differ where the host's user could map two.
    pub user: (u32, u32),
    /// Watch the workspace's use because no file system of its own bounds it.
    pub watch_disk: bool,
    /// A process limit in place of the cgroup's, where there is none.
    pub nproc: Option<u64>,
    /// The agent ends the sandbox after this much idle time, and at this age.
    pub idle_timeout_s: u64,
    pub max_lifetime_s: u64,
    /// Go on with what another agent wrote down; see `Request::Offer`.
    #[serde(default)]
    pub resume: bool,
    /// The language of the call that the sandbox is made for: its interpreter starts with the agent.
    #[serde(default)]
    pub first: Option<Language>,
    /// How often the sandbox was brought back over its files. Execs are numbered on, so that no id means two.
    #[serde(default)]
    pub life: u32,
    /// How many calls can be taken back, in sessions that do not say otherwise.
    #[serde(default)]
    pub undo_calls: u32,
    /// Open descriptor on the image of a warm python with `variables`, of which new ones are copies.
    #[serde(default)]
    pub image: Option<i32>,
    /// This box is for a warm parent, with these modules: its python waits for its image to be taken.
    #[serde(default)]
    pub parent: Option<Vec<String>>,
}

/// A python that lives in another box, to be grafted into this one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scion {
    pub cwd: String,
    pub manner: Manner,
    /// What the agent of the other box knows.
    pub state: String,
}

/// Limits and the like of a process, in the kernel's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manner(pub Vec<String>);

/// Below the spool: modules that user code has asked for, a line each.
pub const IMPORTS: &str = "imports";

/// What a module may be called that user code asks for and a warm parent could load.
pub fn is_module(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    (1..=64).contains(&name.len())
        && name.chars().all(word)
        && !name.starts_with(|c: char| c.is_ascii_digit())
}

/// Written by the agent to `<spool>/ended.json` before it ends the sandbox by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    Idle,
    Lifetime,
    Closed,
}
