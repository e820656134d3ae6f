//! A snapshot as one file: a zstd stream of records, each a kind, a length and that many bytes.
//!
//! ```text
//! "carrel snapshot\n" version
//! H  what it is of, as JSON
//! W  …  the workspace as a tar, in pieces; an empty piece ends it
//! S  …  output of execs, the same: only with memory
//! M  …  what lived in the box, the same: only with memory
//! E  a digest of everything before, and its seal
//! ```
//! A file that breaks off, was changed, or has something behind its end is refused as a whole. The digest finds damage, not
//! malice: whoever makes a file can make its digest. *The seal* is an HMAC with a key of the state directory (`snapshot.key`), and
//! says that this very host, or one that was given the same key, has written every byte. See [`super::import`] for what
//! rests on it.

use std::io::{self, Read, Write};

use carrel_proto::{
    id::{Key, SandboxId},
    problem::{Code, Problem},
};
use hmac::{Hmac, KeyInit, Mac};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use crate::{Engine, registry::Spec, secret, tenant::Labels};

const MAGIC: &[u8; 16] = b"carrel snapshot\n";
/// Raised with every change of what is in a file.
const VERSION: u32 = 1;
/// Largest JSON of a record: a header has a few kilobytes.
const MAX_JSON: u32 = 256 << 10;
/// Largest piece of a tar.
const MAX_PIECE: u32 = 64 << 10;
const PIECE: usize = MAX_PIECE as usize;
/// Between speed and size, for a file that may go over a network.
const LEVEL: i32 = 3;
/// Largest window that is accepted, as a power of two: 8 MB.
const WINDOW: u32 = 23;
/// In the state directory.
const KEY_FILE: &str = "snapshot.key";
/// So that no other use of the key can ever stand for a seal.
const DOMAIN: &[u8] = b"carrel snapshot seal\0";

pub(super) const WORKSPACE: u8 = b'W';
pub(super) const SPOOL: u8 = b'S';
pub(super) const MEMORY: u8 = b'M';
const HEADER: u8 = b'H';
const END: u8 = b'E';

/// What is said before anything else.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    /// The carrel that wrote it.
    pub(super) carrel: String,
    pub(super) sandbox: SandboxId,
    pub(super) key: Option<Key>,
    pub(super) tags: Vec<String>,
    pub(super) made_unix_ms: u64,
    pub(super) memory: bool,
    /// Why there is no memory.
    pub(super) reason: Option<String>,
    pub(super) spec: Spec,
    pub(super) labels: Labels,
    /// Which key it is sealed with, so that a reader who has another need not keep what it will not use.
    pub(super) sealed_with: String,
}

#[derive(Debug, Serialize, Deserialize)]
struct End {
    sha256: String,
    seal: String,
}

/// What a reader finds at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Seal {
    Ours,
    /// Whole, and by somebody else.
    Foreign,
}

pub(super) fn broken(why: impl std::fmt::Display) -> Problem {
    Problem::new(Code::InvalidArgument, format!("this is not a usable snapshot file: {why}"))
        .hint("export it again (`carrel snapshots export`) and send it whole; nothing was imported")
}

/// What decompression says of bytes that make no sense has many names; that the host's disk is full has one.
fn unreadable(error: io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => broken("it breaks off"),
        _ => broken(error),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Seals files, and tells its own seals.
pub(super) struct Sealer {
    keyed: Hmac<Sha256>,
}

impl Sealer {
    fn mac(&self, said: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.keyed.clone();
        mac.update(DOMAIN);
        mac.update(said);
        mac
    }

    /// Tells keys apart and says nothing of them.
    pub(super) fn name(&self) -> String {
        hex(&self.mac(b"name").finalize().into_bytes()[..8])
    }

    fn seal(&self, digest: &[u8]) -> String {
        hex(&self.mac(digest).finalize().into_bytes())
    }

    fn is_ours(&self, digest: &[u8], seal: &str) -> bool {
        let digits = seal.as_bytes().chunks(2).map(|pair| {
            let text = std::str::from_utf8(pair).ok().filter(|text| text.len() == 2)?;
            u8::from_str_radix(text, 16).ok()
        });
        let tag: Option<Vec<u8>> = digits.collect();
        tag.is_some_and(|tag| self.mac(digest).verify_slice(&tag).is_ok())
    }
}

impl Engine {
    pub(super) fn sealer(&self) -> Result<Sealer, Problem> {
        let failed = |error: io::Error| {
            let path = self.settings.state.join(KEY_FILE);
            Problem::internal(format!("the key of exported snapshots, {}: {error}", path.display()))
        };
        let key = secret::key(&self.settings.state, KEY_FILE).map_err(failed)?;
        Hmac::new_from_slice(&key).map(|keyed| Sealer { keyed }).map_err(Problem::internal)
    }
}

/// Writes a file.
pub(super) struct Writer<W: Write> {
    out: zstd::stream::write::Encoder<'static, W>,
    digest: Sha256,
}

impl<W: Write> Writer<W> {
    pub(super) fn begin(out: W, header: &Header) -> Result<Self, Problem> {
        let out = zstd::stream::write::Encoder::new(out, LEVEL).map_err(Problem::internal)?;
        let mut writer = Self { out, digest: Sha256::new() };
        writer.put(MAGIC).and_then(|()| writer.put(&VERSION.to_le_bytes())).map_err(stream)?;
        writer.record(HEADER, &serde_json::to_vec(header).map_err(Problem::internal)?).map_err(stream)?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.digest.update(bytes);
        self.out.write_all(bytes)
    }

    fn record(&mut self, kind: u8, bytes: &[u8]) -> io::Result<()> {
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        self.put(&[kind])?;
        self.put(&length.to_le_bytes())?;
        self.put(bytes)
    }

    /// Where the tar of a part goes. It ends with [`Writer::end_part`].
    pub(super) fn part(&mut self, kind: u8) -> Part<'_, W> {
        Part { writer: self, kind }
    }

    pub(super) fn end_part(&mut self, kind: u8) -> Result<(), Problem> {
        self.record(kind, b"").map_err(stream)
    }

    pub(super) fn finish(mut self, sealer: &Sealer) -> Result<(), Problem> {
        let digest = self.digest.clone().finalize();
        let end = End { sha256: hex(&digest), seal: sealer.seal(&digest) };
        self.record(END, &serde_json::to_vec(&end).map_err(Problem::internal)?).map_err(stream)?;
        self.out.finish().and_then(|mut out| out.flush()).map_err(stream)
    }
}

fn stream(error: io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::StorageFull => Problem::new(Code::Disk, "writing the snapshot file: the disk is full"),
        _ => Problem::internal(format!("writing the snapshot file: {error}")),
    }
}

#[derive(Debug)]
pub(super) struct Part<'a, W: Write> {
    writer: &'a mut Writer<W>,
    kind: u8,
}

impl<W: Write> std::fmt::Debug for Writer<W> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Writer")
    }
}

impl<W: Write> Write for Part<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(PIECE);
        // An empty piece would be the end.
        if taken > 0 {
            self.writer.record(self.kind, &bytes[..taken])?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a file. Nothing in it is trusted.
pub(super) struct Reader<R: Read> {
    input: zstd::stream::read::Decoder<'static, io::BufReader<R>>,
    digest: Sha256,
}

impl<R: Read> Reader<R> {
    pub(super) fn begin(input: R) -> Result<(Self, Header), Problem> {
        let mut input = zstd::stream::read::Decoder::new(input).map_err(unreadable)?;
        input.window_log_max(WINDOW).map_err(Problem::internal)?;
        let mut reader = Self { input, digest: Sha256::new() };
        let mut magic = [0; MAGIC.len()];
        let foreign = |_| broken("it does not begin like one");
        reader.take(&mut magic).map_err(foreign)?;
        if magic != *MAGIC {
            return Err(broken("it does not begin like one"));
        }
        let mut version = [0; 4];
        reader.take(&mut version).map_err(unreadable)?;
        match u32::from_le_bytes(version) {
            VERSION => {}
            other => {
                return Err(broken(format!("it is of version {other}, and {VERSION} is what is known here")));
            }
        }
        let header = reader.json(HEADER)?;
        Ok((reader, header))
    }

    fn take(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.input.read_exact(bytes)?;
        self.digest.update(bytes);
        Ok(())
    }

    /// The length of the next record, which must be of this kind.
    fn record(&mut self, kind: u8, most: u32) -> io::Result<u32> {
        let (mut found, mut length) = ([0; 1], [0; 4]);
        self.take(&mut found)?;
        self.take(&mut length)?;
        let length = u32::from_le_bytes(length);
        if found[0] != kind || length > most {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "its parts are not in their order"));
        }
        Ok(length)
    }

    fn json<T: DeserializeOwned>(&mut self, kind: u8) -> Result<T, Problem> {
        let length = self.record(kind, MAX_JSON).map_err(unreadable)?;
        let mut text = vec![0; length as usize];
        self.take(&mut text).map_err(unreadable)?;
        serde_json::from_slice(&text).map_err(broken)
    }

    /// The tar of a part, of at most so many bytes. What is left of it is read by [`Pieces::finish`].
    pub(super) fn part(&mut self, kind: u8, most: u64) -> Pieces<'_, R> {
        Pieces { reader: self, kind, piece: 0, left: most, ended: false }
    }

    pub(super) fn finish(mut self, sealer: &Sealer) -> Result<Seal, Problem> {
        let digest = self.digest.clone().finalize();
        let end: End = self.json(END)?;
        if end.sha256 != hex(&digest) {
            return Err(broken("its checksum is wrong"));
        }
        match self.input.read(&mut [0]) {
            Ok(0) => {}
            _ => return Err(broken("there is something behind its end")),
        }
        Ok(if sealer.is_ours(&digest, &end.seal) { Seal::Ours } else { Seal::Foreign })
    }
}

pub(super) struct Pieces<'a, R: Read> {
    reader: &'a mut Reader<R>,
    kind: u8,
    /// Left of the current piece.
    piece: u32,
    /// Left of what is allowed.
    left: u64,
    ended: bool,
}

impl<R: Read> Pieces<'_, R> {
    pub(super) fn finish(mut self) -> Result<(), Problem> {
        io::copy(&mut self, &mut io::sink()).map(drop).map_err(unreadable)
    }
}

impl<R: Read> Read for Pieces<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        if self.piece == 0 && !self.ended {
            self.piece = self.reader.record(self.kind, MAX_PIECE)?;
            self.ended = self.piece == 0;
            self.left = self.left.checked_sub(u64::from(self.piece)).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "it is larger than the sandbox it is of could be")
            })?;
        }
        let count = buffer.len().min(self.piece as usize);
        self.reader.take(&mut buffer[..count])?;
        self.piece -= u32::try_from(count).unwrap_or(self.piece);
        Ok(count)
    }
}
