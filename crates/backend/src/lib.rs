//! Makes boxes. [`Backend`] is the page to read; [`jail`] is the one implementation so far.
//!
//! A backend knows how to make a box for a [`BoxRequest`], where its agent's socket is, and how to take all of it
//! away again. It knows nothing of keys, sessions or languages; [`link::AgentLink`] speaks to any agent, whatever made its box.

#![forbid(unsafe_code)]

mod checkpoint;
pub mod environment;
pub mod etc;
pub mod grafts;
pub mod guest_programs;
pub mod host;
pub mod jail;
mod light;
pub mod link;
mod memfd_image;
mod packed;
pub mod port;
mod pstree_image;
mod spares;
mod stages;
pub mod steps;
mod stored;
mod sums;
mod unfinished;
mod userns_image;
pub mod warm;

use std::path::{Path, PathBuf};

use carrel_jail::workspace;
use carrel_proto::{
    guest::Language,
    id::SandboxId,
    limits::{ByteSize, Enforced, Limits},
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};

use crate::{environment::Environment, grafts::Scion};

/// What a sandbox shall be.
#[derive(Debug, Clone)]
pub struct BoxRequest {
    pub id: SandboxId,
    /// A number no other sandbox of this host's root has: its user ids derive from it.
    pub number: u32,
    /// The sandbox's own directory on the host; exists.
    pub directory: PathBuf,
    pub environment: Environment,
    pub limits: Limits,
    pub isolation: IsolationLevel,
    pub project: Option<Project>,
    pub idle_timeout_s: u64,
    pub max_lifetime_s: u64,
    /// Set when the directory already holds a workspace to go on with.
    pub workspace: Option<workspace::Kind>,
    /// The agent goes on with what another wrote down; see [`Backend::restore`].
    pub resume: bool,
    /// The language of the first call, as far as it is known.
    pub first: Option<Language>,
    /// How often the sandbox was brought back before.
    pub life: u32,
    /// How many calls can be taken back.
    pub undo_calls: u32,
    /// A box for a warm parent, with these modules; see [`warm`].
    pub parent: Option<Vec<String>>,
}

/// How strongly a sandbox is shut in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum IsolationLevel {
    #[default]
    Jail,
    /// No namespaces. Never chosen by itself.
    Weak,
}

/// A host directory shown at `/project`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Project {
    pub directory: PathBuf,
    pub writable: bool,
}

/// What became of a request: all that is needed to find, judge and remove the box later.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Placed {
    /// The agent's pid on the host and when it was started, so that a reused pid is never mistaken for it.
    pub pid: i32,
    pub start_time: u64,
    pub workspace: workspace::Kind,
    pub isolation: IsolationLevel,
    pub enforced: Enforced,
    /// The host's ids of user code: files made from outside are given to them.
    pub owner: (u32, u32),
    /// How often the sandbox was brought back over its files.
    #[serde(default)]
    pub life: u32,
}

/// A file of this name is in every image that is complete. [`Backend::hibernate`] writes it last, before anything of the box
/// ends, so that a box whose maker is killed in between is found in one place or the other.
pub const COMPLETE: &str = "complete";

/// What a copy of a box has of its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    Nothing,
    /// To be brought back some day.
    Kept,
    /// To be brought back at once, by whoever has written it: nobody looks whether it has changed meanwhile.
    Passed,
}

/// Makes and removes boxes. Calls may block for milliseconds; run them where that is allowed.
pub trait Backend: Send + Sync + std::fmt::Debug {
    fn name(&self) -> &'static str;

    /// A sandbox will be made in a moment: what does not depend on which one may start now.
    fn expect(&self) {}

    /// Makes the sandbox's own directory on the host, unless it is there.
    fn make_directory(&self, directory: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(directory)
    }

    /// Makes the box and waits until its agent runs. On error nothing is left.
    fn create(&self, request: &BoxRequest) -> Result<Placed, Problem>;

    /// Whether the agent is still there.
    fn is_alive(&self, placed: &Placed) -> bool;

    /// Ends the agent of a box, which hangs, and the box with it. What is left is found by [`Backend::destroy`].
    fn end(&self, placed: &Placed) -> Result<(), Problem>;

    /// Gives a living box other limits: all of them, or none and a reason. What the agent holds is not changed here.
    fn update(
        &self,
        id: &SandboxId,
        placed: &Placed,
        before: &Limits,
        limits: &Limits,
    ) -> Result<(), Problem>;

    /// Stops every process of a box where it stands, the agent too. Memory is kept; [`Backend::thaw`] lets them go on. On
    /// error they all run. `Code::Unsupported`: this box cannot be stopped, ever.
    fn freeze(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem>;

    /// Lets a frozen box go on; of one that is not frozen, does nothing. `Code::AgentLost`: it was killed in its sleep.
    fn thaw(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem>;

    /// Whether a box is frozen, whoever did it: what a row says may be older.
    fn is_frozen(&self, id: &SandboxId, placed: &Placed) -> bool;

    /// Whether this host can write boxes to disk; the reason and a hint if not.
    fn can_hibernate(&self) -> Result<(), Problem> {
        Err(cannot_hibernate())
    }

    /// Writes everything that lives in the box into the directory `image`, which does not exist yet, and ends the box. The
    /// box is not frozen when this is called, and its workspace stays as it is. Before the box ends, [`COMPLETE`] is in the
    /// image. On error the box goes on as it was and `image` is gone. `Code::Unsupported` with a reason: this box cannot be
    /// written (now).
    fn hibernate(
        &self,
        _id: &SandboxId,
        _directory: &Path,
        _placed: &Placed,
        _image: &Path,
    ) -> Result<(), Problem> {
        Err(cannot_hibernate())
    }

    /// Makes the box anew from `image`, over the workspace that is there. On error nothing is left but the image and the
    /// files. `Code::StateLost`: the image is no good and never will be.
    fn restore(&self, _request: &BoxRequest, _image: &Path, _memory: Memory) -> Result<Placed, Problem> {
        Err(cannot_hibernate())
    }

    /// Whether an image is packed, or such that packing does nothing for it.
    fn is_packed(&self, _image: &Path) -> bool {
        true
    }

    /// Packs an image into the directory `target`, which does not exist yet: it is as good as the first for everything that
    /// takes one, smaller, and on the disk when this returns. `go_on` is asked again and again. `None`: it said no; then, and on
    /// error, what is there is for the caller to remove.
    fn pack(&self, _image: &Path, _target: &Path, _go_on: &dyn Fn() -> bool) -> Result<Option<()>, Problem> {
        Err(cannot_hibernate())
    }

    /// Copies a box into `store`, an empty directory: its files, and with its memory everything that lives in it. It goes on
    /// afterwards, whatever came of it, also when the caller is killed. Without memory nothing in the box may be writing; it
    /// need not live. `Code::Unsupported` with a reason: memory cannot be had of this box (now).
    fn snapshot(
        &self,
        _directory: &Path,
        _placed: &Placed,
        _store: &Path,
        _memory: Memory,
    ) -> Result<(), Problem> {
        Err(no_snapshots())
    }

    /// Copies a box that is not frozen without writing down what lives in it, for so many times of [`Backend::graft`]. Its agent
    /// starts nothing meanwhile. `store` makes an empty directory, which stays until the last of these; it may not be needed.
    /// `Code::Unsupported` with a reason: there is more in this box (now) than can be copied like that.
    fn cut(
        &self,
        _directory: &Path,
        _placed: &Placed,
        _number: u32,
        _limits: &Limits,
        _copies: u32,
        _store: &mut dyn FnMut() -> Result<PathBuf, Problem>,
    ) -> Result<Scion, Problem> {
        Err(no_snapshots())
    }

    /// A box in which nobody's code has run becomes the one that `scion` is of once more, with its files. On error it is there, and of
    /// no use any more. `Code::Unsupported` with a reason: it cannot be had like that.
    fn graft(&self, _request: &BoxRequest, _placed: &Placed, _scion: &Scion) -> Result<Placed, Problem> {
        Err(no_snapshots())
    }

    /// The same as [`Backend::snapshot`] of a box that is in `image`.
    fn snapshot_of_image(
        &self,
        _directory: &Path,
        _placed: &Placed,
        _image: &Path,
        _store: &Path,
    ) -> Result<(), Problem> {
        Err(no_snapshots())
    }

    /// Lays the files of a store out in the directory of a request, which exists and holds no files of a box; its workspace is
    /// then the one to go on with. The box that they were copied from had the number `number`. With `memory` for
    /// [`Backend::restore`] from [`memory_of`] the store.
    fn unpack(
        &self,
        _store: &Path,
        _number: u32,
        _request: &BoxRequest,
        _memory: bool,
    ) -> Result<(), Problem> {
        Err(no_snapshots())
    }

    /// Makes an empty workspace of `disk` bytes in a store that has none, has `fill` put files into it, and keeps it. They belong to
    /// the box of that number. On error what is there is for the caller to remove.
    fn fill(
        &self,
        _store: &Path,
        _disk: ByteSize,
        _number: u32,
        _fill: &mut dyn FnMut(&carrel_files::Root) -> Result<(), Problem>,
    ) -> Result<workspace::Kind, Problem> {
        Err(no_snapshots())
    }

    /// The files in a store, to look at.
    fn look(&self, _store: &Path) -> Result<carrel_files::Root, Problem> {
        Err(no_snapshots())
    }

    /// Ends every process of a sandbox and removes what is outside its directory: mounts, cgroups. `placed` is
    /// missing when its maker died before it could be recorded; names derive from the id, so all is found anyway.
    fn destroy(&self, id: &SandboxId, directory: &Path, placed: Option<&Placed>) -> Result<(), Problem>;

    /// Whether this is a moment to look for a warm parent with [`Backend::make_parent`].
    fn wants_parent(&self) -> bool {
        false
    }

    /// Prepares interpreters of this environment to be copied instead of started, if that is due; called when nobody waits. Besides
    /// what it is told to load, a parent has these modules, as far as it can.
    fn make_parent(&self, _environment: &Environment, _learned: &[String]) {}

    /// Removes what somebody who was killed has left of a box that is on disk; its files stay within reach. Nearly always there is
    /// nothing, and a caller waits.
    fn clear_way(&self, id: &SandboxId, directory: &Path) -> Result<(), Problem> {
        self.destroy(id, directory, None)
    }

    /// Removes what processes that were killed have left and no sandbox's name leads to.
    fn sweep(&self) {}

    /// Prepares for the next sandbox like this one; called when nobody waits.
    fn restock(&self, _limits: &Limits) {}

    /// The socket of the agent.
    fn socket(&self, directory: &Path) -> PathBuf {
        directory.join("agent.sock")
    }

    /// The workspace on the host, where files are reachable without the agent.
    fn workspace(&self, directory: &Path) -> Option<PathBuf>;
}

/// Where the image is in a store with memory.
pub fn memory_of(store: &Path) -> PathBuf {
    store.join("image")
}

/// Where the output of execs is in a store with memory.
pub fn spool_of(store: &Path) -> PathBuf {
    store.join("spool")
}

fn no_snapshots() -> Problem {
    Problem::new(Code::Unsupported, "this backend cannot take snapshots")
}

fn cannot_hibernate() -> Problem {
    Problem::new(Code::Unsupported, "this backend cannot write sandboxes to disk")
        .hint("standby works without: a sandbox in standby keeps its memory")
}
