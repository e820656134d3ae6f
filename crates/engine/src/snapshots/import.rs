//! Files come in as snapshots.
//!
//! A file may come from hostile hands, so nothing in it is taken as it is:
//!
//! - *Files* are put into a new workspace one by one, each exactly where its name says, as the box's own user; an image of a file
//!   system is never taken over, since the kernel would read it. Devices are refused. Links stay links, wherever they lead: they are
//!   followed in the box alone, where user code can make any it likes, and the host's own file operations never leave
//!   the workspace ([`carrel_files`]).
//! - *Memory* is brought back by CRIU, with root's rights, and a forged process image could have it do anything. So it is taken
//!   only with a seal of this state directory's key, or if the operator says so; else the snapshot has files alone, and says why.
//! - *What the sandbox was* (limits, times) has bounds like any request's; isolation, project directory and owner are not taken.
//!
//! All or nothing: a directory in the making becomes a snapshot with its row, which comes last. What a kill leaves is swept like
//! any snapshot in the making.

use std::{fs, io::Read, path::Path, sync::Arc};

use carrel_backend::{IsolationLevel, memory_of, spool_of};
use carrel_files::{OutsideLinks, Root, TreeLimits, read_tar};
use carrel_jail::workspace;
use carrel_proto::{
    files::GuestPath,
    id::SnapshotId,
    limits::{ByteSize, Limits},
    message::MAX_UNDO,
    problem::{Code, Problem},
};

use super::{
    Content, Snapshot, Store, check_tags, failed,
    portable::{Header, MEMORY, Pieces, Reader, SPOOL, Seal, Sealer, WORKSPACE, broken},
};
use crate::{
    Engine, Quota,
    events::{Event, Kind},
    keys,
    registry::{Spec, now_ms},
    sandboxes::{random, remove_tree},
    tenant::{Labels, Tenant},
};

/// Files belong to this box's ids until they are a sandbox's own.
const NUMBER: u32 = 0;
/// Contents beside the disk that they go to: holes count here and take nothing there.
const SPARSE: u64 = 4;
/// What lived in a box beside its memory: files without a name, kept output, and what CRIU says of both.
const BESIDE_MEMORY: u64 = 8 << 30;
/// Names, headers and padding of a tar beside its contents.
const BESIDE_CONTENTS: u64 = 1 << 30;
/// A year; and a petabyte, and 1024 CPUs: far beyond any host, far from overflow.
const MOST_SECONDS: u64 = 366 * 24 * 3600;
const LARGEST: u64 = 1 << 50;
const MOST_CPU_MILLIS: u32 = 1_024_000;
const MOST_PIDS: u32 = 1_000_000;
const MOST_EXECS: u32 = 10_000;

/// What a caller wants of a file.
#[derive(Debug, Clone, Default)]
pub struct ImportWish {
    pub tenant: Tenant,
    pub quota: Option<Quota>,
    /// Memory is taken whoever has sealed it. For the operator alone to say: it is brought back with root's rights.
    pub trust_memory: bool,
    pub caller: Option<Arc<str>>,
}

impl Engine {
    /// Makes a snapshot of a file that [`Engine::export_snapshot`] wrote. Takes its time, and a thread: not for an async task.
    /// An error leaves nothing.
    pub fn import_snapshot(&self, input: impl Read, wish: &ImportWish) -> Result<Snapshot, Problem> {
        let sealer = self.sealer()?;
        let (reader, header) = Reader::begin(input)?;
        let spec = accept(header.spec.clone())?;
        fits(&spec.limits, wish.quota.as_ref())?;
        check_tags(&header.tags)?;
        let own = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        let labels = Labels::new(header.labels.iter().map(own).collect())?;
        let id = SnapshotId::from_random(random()?);
        let store = Store::make(&self.snapshots_place(), &id)?;
        let taken = self.take_in(&store.path, reader, &header, &sealer, wish.trust_memory);
        let (workspace, memory) = match taken {
            Ok(taken) => taken,
            Err(problem) => {
                store.discard();
                return Err(problem);
            }
        };
        let content =
            Content { memory: memory.is_ok(), reason: memory.err(), spec, labels, workspace, number: NUMBER };
        let snapshot = Snapshot {
            id,
            tenant: wish.tenant.clone(),
            // Nothing is done to it unless it is the tenant's own.
            sandbox: header.sandbox,
            key: header.key.filter(|key| keys::check(&wish.tenant, key).is_ok()),
            parent: None,
            tags: header.tags,
            made_unix_ms: header.made_unix_ms.min(now_ms()),
            bytes: 0,
            content,
        };
        let snapshot = self.keep_snapshot(store, snapshot, false, wish.quota.as_ref())?;
        let mut event = Event::new(Kind::SnapshotImported, &snapshot.tenant).caller(wish.caller.clone());
        event.bytes = Some(snapshot.bytes);
        self.note(event.detail(if snapshot.content.memory { "memory" } else { "files" }));
        Ok(snapshot)
    }

    /// The kind of its workspace, and whether it has memory; if not, why.
    fn take_in<R: Read>(
        &self,
        store: &Path,
        mut reader: Reader<R>,
        header: &Header,
        sealer: &Sealer,
        trusted: bool,
    ) -> Result<(workspace::Kind, Result<(), String>), Problem> {
        let Limits { disk, memory, .. } = header.spec.limits;
        let room = disk.0.saturating_mul(SPARSE);
        let workspace = self.backend.fill(store, disk, NUMBER, &mut |root| {
            take(reader.part(WORKSPACE, room.saturating_add(BESIDE_CONTENTS)), root, room, OutsideLinks::Keep)
        })?;
        let room = memory.0.saturating_mul(2).saturating_add(BESIDE_MEMORY);
        // What says to be sealed by somebody else need not be kept until the end shows that it is.
        let wanted = trusted || header.sealed_with == sealer.name();
        let parts = [(SPOOL, spool_of(store)), (MEMORY, memory_of(store))];
        for (kind, place) in parts.iter().filter(|_| header.memory) {
            let pieces = reader.part(*kind, room.saturating_add(BESIDE_CONTENTS));
            if wanted {
                fs::create_dir(place).map_err(failed("importing a snapshot"))?;
                take(pieces, &Root::open(place)?, room, OutsideLinks::Refuse)?;
            } else {
                pieces.finish()?;
            }
        }
        let seal = reader.finish(sealer)?;
        if !header.memory {
            return Ok((workspace, Err(header.reason.clone().unwrap_or_else(|| "it had none".to_owned()))));
        }
        if trusted || (wanted && seal == Seal::Ours) {
            return Ok((workspace, Ok(())));
        }
        for (_, place) in parts {
            remove_tree(&place)?;
        }
        Ok((workspace, Err(FOREIGN.to_owned())))
    }
}

/// Why an imported snapshot has no memory though its file has.
const FOREIGN: &str = "the file was not sealed with this host's key (`snapshot.key` of the state directory), and memory from elsewhere is not trusted";

fn take<R: Read>(
    mut pieces: Pieces<'_, R>,
    root: &Root,
    room: u64,
    links: OutsideLinks,
) -> Result<(), Problem> {
    let limits = TreeLimits { bytes: room, ..TreeLimits::default() };
    read_tar(root, &GuestPath::root(), &mut pieces, &limits, links).map_err(|error| {
        let problem = Problem::from(error);
        match problem.code {
            Code::InvalidArgument => broken(problem.message),
            _ => problem,
        }
    })?;
    pieces.finish()
}

/// What a file says of the sandbox, as far as it may.
fn accept(spec: Spec) -> Result<Spec, Problem> {
    let Limits { cpu_millis, memory, pids, disk, output, execs } = &spec.limits;
    let size = |size: &ByteSize, least: u64| (least..=LARGEST).contains(&size.0);
    let good = (10..=MOST_CPU_MILLIS).contains(cpu_millis)
        && size(memory, 16 << 20)
        && size(disk, 1 << 20)
        && size(output, 4096)
        && (8..=MOST_PIDS).contains(pids)
        && (1..=MOST_EXECS).contains(execs);
    let times = [spec.idle_timeout_s, spec.max_lifetime_s, spec.standby_after_s, spec.hibernate_after_s];
    if !good || times.iter().any(|time| *time > MOST_SECONDS) || spec.undo_calls > MAX_UNDO {
        return Err(broken("it asks for limits that no sandbox can have"));
    }
    Ok(Spec { isolation: IsolationLevel::Jail, project: None, ephemeral: None, ..spec })
}

/// A snapshot that could never be restored is not taken.
fn fits(limits: &Limits, quota: Option<&Quota>) -> Result<(), Problem> {
    let Some(quota) = quota else { return Ok(()) };
    let over = |most: Option<u64>, wanted: u64| most.is_some_and(|most| wanted > most);
    let size = |size: Option<ByteSize>| size.map(|size| size.0);
    if over(size(quota.memory), limits.memory.0)
        || over(size(quota.disk), limits.disk.0)
        || over(quota.cpu_millis, limits.cpu_millis.into())
    {
        let word = format!("a sandbox of this snapshot is larger than the whole quota, {quota}");
        return Err(Problem::new(Code::Quota, word).hint("ask for a larger quota; nothing was imported"));
    }
    Ok(())
}
