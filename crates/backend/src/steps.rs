//! The points at which whoever puts a sandbox to sleep, copies it or brings it back may die.
//!
//! Each is reached when what it names has just been done and nothing after it has begun. In a program that works nobody
//! listens. A test does: it dies at every one of them in turn, and says what must be true then
//! (`engine/tests/torture/faults.rs`). A step that the test does not know fails it, so a new one comes with its proof.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

macro_rules! steps {
    ($($(#[$about:meta])* $name:ident,)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum Step { $($(#[$about])* $name,)* }

        impl Step {
            pub const ALL: &[Step] = &[$(Step::$name,)*];
        }
    };
}

steps! {
    /// The row says `standby`; of a snapshot, too.
    StandbyWritten,
    BoxFrozen,
    BoxThawed,
    /// The row says `running`, of one that was not brought back from disk.
    AwakeWritten,

    /// The row names the image that is about to be made.
    ImageNamed,
    /// The agent starts nothing new.
    AgentPrepared,
    /// One session is on disk, and its processes are stopped.
    SessionWritten,
    /// So is what the agent knows.
    AgentSaved,
    /// So are files in memory.
    MemoryPacked,
    /// The image of an interpreter that lives is in memory.
    ImageTaken,
    ManifestWritten,
    /// The image is on disk, whole, and its box still there.
    ImageComplete,
    BoxEnded,
    /// With its cgroup and socket.
    BoxRemoved,
    ImageSealed,
    /// The image has its name.
    ImagePlaced,
    /// The row says `hibernated`.
    HibernatedWritten,

    /// Nothing is left of anybody who tried to wake it before.
    WayCleared,
    /// What the agent knew is where the new one looks for it.
    StateGiven,
    /// There is a new box, and nothing in it but the agent.
    BoxMade,
    MemoryUnpacked,
    /// A copy of an interpreter that lives has all of its memory.
    MemoryFilled,
    /// The agent has new ends for pipes and lines.
    EndsOffered,
    /// One session is back.
    SessionBack,
    /// All are, and the agent knows them.
    BoxBack,
    /// The row says `running`, and names the new box.
    RunningWritten,
    ImagesRemoved,

    /// A directory for a snapshot, or for the copy that forks are made from.
    StoreMade,
    FilesCopied,
    SpoolCopied,
    StoreSealed,
    /// The snapshot has its name.
    StorePlaced,
    /// Its row is there.
    SnapshotWritten,

    /// A row for a sandbox that is made from a snapshot or a fork.
    RowClaimed,
    DirectoryMade,
    /// The snapshot's files are in the sandbox's directory.
    FilesLaid,
    /// The copy that forks were made from is gone.
    StoreRemoved,

    /// Before a restore in place: what is there now sleeps on disk.
    LaidAside,
    /// Its files are out of the way.
    MovedAway,
    /// The row says what the snapshot's sandbox was asked to be.
    SpecWritten,
    /// What was there before is gone for good.
    BeforeRemoved,
    /// The row says which snapshot it came from.
    OriginWritten,

    /// A fork has its parent's key, and its parent the fork's.
    KeysSwapped,
}

/// Who is told of every step: nobody, unless somebody was given.
#[derive(Clone, Default)]
pub struct Watch(Option<Arc<dyn Fn(Step) + Send + Sync>>);

impl Watch {
    pub fn new(told: impl Fn(Step) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(told)))
    }

    pub fn reached(&self, step: Step) {
        if let Some(told) = &self.0 {
            told(step);
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Watch(somebody)" } else { "Watch(nobody)" })
    }
}
