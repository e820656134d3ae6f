//! Files that a call made, as links that a client can follow.

use carrel_engine::{Engine, Record};
use carrel_proto::{
    files::{GuestPath, Kind, MAX_PAGE},
    id::SandboxId,
};
use rmcp::model::{ContentBlock, Resource};
use rustix::time::{ClockId, clock_gettime};

use super::uri;

/// Links of one result; beyond that a number says enough.
const MOST_LINKS: usize = 12;
/// Levels below the workspace that are looked at.
const DEPTH: u32 = 4;
/// Directories that tools fill for themselves.
const NOISE: [&[u8]; 5] = [b"__pycache__", b"node_modules", b"venv", b"site-packages", b"target"];

/// What a call changed in the workspace.
#[derive(Debug, Default)]
pub(super) struct Made {
    files: Vec<(Vec<u8>, u64)>,
    /// Not linked.
    pub(super) more: usize,
}

/// Now, by the clock that file systems use for their marks.
pub(super) fn mark() -> i64 {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    now.tv_sec.saturating_mul(1_000_000_000).saturating_add(now.tv_nsec)
}

impl Made {
    /// Regular files written since `mark`, hidden ones and tools' own aside. A workspace with more entries than one page
    /// is looked at as far as that goes: links are a service, not a promise.
    pub(super) fn since(engine: &Engine, record: &Record, mark: i64) -> Self {
        let mut made = Self::default();
        let Ok(root) = engine.files(record) else { return made };
        let Ok(listing) = root.list(&GuestPath::root(), DEPTH, MAX_PAGE, None) else { return made };
        for entry in listing.entries {
            let path = entry.name.0;
            let noise =
                path.split(|byte| *byte == b'/').any(|part| part.starts_with(b".") || NOISE.contains(&part));
            if entry.kind != Kind::File || entry.mtime_ns < mark || noise {
                continue;
            }
            if made.files.len() < MOST_LINKS {
                made.files.push((path, entry.size));
            } else {
                made.more += 1;
            }
        }
        made
    }

    pub(super) fn links(&self, sandbox: &SandboxId) -> impl Iterator<Item = ContentBlock> {
        self.files.iter().map(move |(path, size)| {
            let name = String::from_utf8_lossy(path).into_owned();
            let link = Resource::new(uri::file(sandbox, path), name).with_size(*size);
            ContentBlock::resource_link(match mime(path) {
                Some(mime) => link.with_mime_type(mime),
                None => link,
            })
        })
    }

    pub(super) fn uris(&self, sandbox: &SandboxId) -> Vec<String> {
        self.files.iter().map(|(path, _)| uri::file(sandbox, path)).collect()
    }
}

/// By its ending: enough for a client to choose how to show it.
pub(super) fn mime(path: &[u8]) -> Option<&'static str> {
    let ending = path.rsplit(|byte| *byte == b'.').next()?.to_ascii_lowercase();
    Some(match ending.as_slice() {
        b"txt" | b"log" => "text/plain",
        b"md" => "text/markdown",
        b"csv" => "text/csv",
        b"html" | b"htm" => "text/html",
        b"css" => "text/css",
        b"js" | b"mjs" => "text/javascript",
        b"py" => "text/x-python",
        b"sh" => "text/x-shellscript",
        b"json" => "application/json",
        b"xml" => "application/xml",
        b"pdf" => "application/pdf",
        b"zip" => "application/zip",
        b"png" => "image/png",
        b"jpg" | b"jpeg" => "image/jpeg",
        b"gif" => "image/gif",
        b"webp" => "image/webp",
        b"svg" => "image/svg+xml",
        _ => return None,
    })
}
