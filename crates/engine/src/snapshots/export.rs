//! Snapshots go out as files.

use std::io::Write;

use carrel_backend::{memory_of, spool_of};
use carrel_files::{Root, TreeLimits, TreeReport, write_tar};
use carrel_proto::{files::GuestPath, problem::Problem};

use super::{
    Snapshot,
    portable::{Header, MEMORY, SPOOL, WORKSPACE, Writer},
};
use crate::{
    Engine,
    events::{Event, Kind},
    registry::Spec,
};

/// What went out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exported {
    pub memory: bool,
    /// Why it has only the files.
    pub reason: Option<String>,
    /// Of the workspace.
    pub files: u64,
    /// Before compression.
    pub bytes: u64,
    /// Files that a file cannot hold: sockets, fifos.
    pub left_out: u64,
}

impl Engine {
    /// Writes a snapshot as one file. Takes its time, and a thread: not for an async task. An error leaves a file that no
    /// import accepts.
    pub fn export_snapshot(&self, snapshot: &Snapshot, out: impl Write) -> Result<Exported, Problem> {
        let sealer = self.sealer()?;
        let (store, _held) = self.hold(snapshot)?;
        let content = &snapshot.content;
        // It would be missing where the file is imported, and what lived in the box has it open.
        let bound = content.memory && content.spec.project.is_some();
        let memory = content.memory && !bound;
        let reason = match bound {
            true => Some("the project directory of its sandbox is this host's".to_owned()),
            false => content.reason.clone(),
        };
        let header = Header {
            carrel: env!("CARGO_PKG_VERSION").to_owned(),
            sandbox: snapshot.sandbox.clone(),
            key: snapshot.key.clone(),
            tags: snapshot.tags.clone(),
            made_unix_ms: snapshot.made_unix_ms,
            memory,
            reason: reason.clone(),
            spec: Spec { project: None, ephemeral: None, ..content.spec.clone() },
            labels: content.labels.clone(),
            sealed_with: sealer.name(),
        };
        let mut writer = Writer::begin(out, &header)?;
        let files = put(&mut writer, WORKSPACE, &self.backend.look(&store)?)?;
        let mut bytes = files.bytes;
        if memory {
            for (kind, place) in [(SPOOL, spool_of(&store)), (MEMORY, memory_of(&store))] {
                bytes += put(&mut writer, kind, &Root::open(place)?)?.bytes;
            }
        }
        writer.finish(&sealer)?;
        let mut event = Event::new(Kind::SnapshotExported, &snapshot.tenant);
        event.sandbox = Some(snapshot.sandbox.clone());
        event.bytes = Some(bytes);
        self.note(event);
        Ok(Exported { memory, reason, files: files.files, bytes, left_out: files.left_out_count })
    }
}

fn put<W: Write>(writer: &mut Writer<W>, kind: u8, root: &Root) -> Result<TreeReport, Problem> {
    let report = write_tar(root, &GuestPath::root(), writer.part(kind), &TreeLimits::default())?;
    writer.end_part(kind)?;
    Ok(report)
}
