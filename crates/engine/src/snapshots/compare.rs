//! What has become of files between two snapshots, or since one.

use carrel_files::{Comparison, Differences, Root};
use carrel_proto::{
    files::Kind,
    id::Key,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};

use super::Snapshot;
use crate::{Engine, Record, Tenant};

/// Names of each sort in one answer; the counts are exact.
const MOST: usize = 1000;

/// What is compared.
#[derive(Debug, Clone)]
pub enum Side {
    Snapshot(Box<Snapshot>),
    /// A sandbox as it is.
    Now(Box<Record>),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// Below `/workspace`; what is no UTF-8 in it is replaced.
    pub path: String,
    pub kind: Kind,
    /// As it is now; of what was removed, as it was.
    pub size: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changes {
    pub count: u64,
    /// The first of them by name.
    pub files: Vec<Change>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diff {
    pub added: Changes,
    pub changed: Changes,
    pub removed: Changes,
}

impl From<Differences> for Changes {
    fn from(all: Differences) -> Self {
        let one = |one: carrel_files::Difference| Change {
            path: String::from_utf8_lossy(&one.path).into_owned(),
            kind: one.kind,
            size: one.size,
        };
        Self { count: all.count, files: all.first.into_iter().map(one).collect() }
    }
}

impl Engine {
    /// The files of `from` and of `to`: what was added, changed and removed. Nothing is woken for it.
    pub async fn diff(&self, from: Side, to: Side) -> Result<Diff, Problem> {
        self.blocking(move |engine| {
            // Held until both have been read.
            let (old, _held) = engine.side(&from)?;
            let (new, _held_too) = engine.side(&to)?;
            let Comparison { added, changed, removed } = old.compare(&new, MOST)?;
            Ok(Diff { added: added.into(), changed: changed.into(), removed: removed.into() })
        })
        .await
    }

    /// What two names stand for: a snapshot's id or tag, or a sandbox. Without the second, the sandbox of the first snapshot.
    pub fn sides(
        &self,
        tenant: &Tenant,
        from: (&str, Option<&Key>),
        to: Option<(&str, Option<&Key>)>,
    ) -> Result<(Side, Side), Problem> {
        let named = |(name, key): (&str, Option<&Key>)| -> Result<Side, Problem> {
            match self.snapshot_of(tenant, name) {
                Ok(snapshot) => Ok(Side::Snapshot(Box::new(snapshot))),
                Err(problem) if problem.code == Code::SnapshotNotFound => {
                    // A name that is neither is more likely to be meant as a snapshot's.
                    self.known_of(tenant, name, key)
                        .map(|record| Side::Now(Box::new(record)))
                        .map_err(|_| problem)
                }
                Err(problem) => Err(problem),
            }
        };
        let from = named(from)?;
        let to = match (to, &from) {
            (Some(to), _) => named(to)?,
            (None, Side::Snapshot(snapshot)) => {
                Side::Now(Box::new(self.known_of(tenant, snapshot.sandbox.as_str(), None)?))
            }
            (None, Side::Now(_)) => {
                return Err(Problem::new(Code::InvalidArgument, "a sandbox is compared with something else")
                    .hint("name a snapshot and a sandbox, or two snapshots"));
            }
        };
        Ok((from, to))
    }

    fn side(&self, side: &Side) -> Result<(Root, Option<std::fs::File>), Problem> {
        match side {
            Side::Snapshot(snapshot) => {
                let (store, held) = self.hold(snapshot)?;
                Ok((self.backend.look(&store)?, Some(held)))
            }
            Side::Now(record) => match self.files(record) {
                // Nobody has mounted them since its box went away.
                Err(problem) if problem.code == Code::Unavailable => {
                    Ok((self.backend.look(&self.directory(&record.id))?, None))
                }
                root => Ok((root?, None)),
            },
        }
    }
}
