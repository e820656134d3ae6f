//! A zip archive as a tree. Nothing in it is trusted: every offset is checked against the file, every name has a bound, and no
//! entry gives more bytes than it said it would.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    os::unix::fs::FileExt,
};

use carrel_proto::files::{GuestPath, MAX_PATH};
use flate2::{Crc, bufread::DeflateDecoder};

use super::{
    CENTRAL, DEFLATED, ENCRYPTED, END, END_64, END_64_LOCATOR, LARGE, LOCAL, MACOS, STORED, TIMES, UNIX,
    unix_time,
};
use crate::{
    FileError, Root,
    tree::{
        OutsideLinks, TreeLimits, TreeReport,
        format::{Entry, TarError},
        read_full,
        unpack::{Unpack, broken},
    },
};

/// The end of an archive and the longest comment behind it.
const MAX_TAIL: u64 = 22 + 65_535;
const LOCATOR: u64 = 20;
const NEW_FILE: u32 = 0o644;
const NEW_DIR: u32 = 0o755;

/// Unpacks a zip archive into the directory `path`; otherwise like [`read_tar`](crate::read_tar).
pub fn read_zip(
    root: &Root,
    path: &GuestPath,
    archive: &File,
    limits: &TreeLimits,
    outside: OutsideLinks,
) -> Result<TreeReport, FileError> {
    let directory = directory(archive).map_err(broken)?;
    let mut unpack = Unpack::new(root, path, limits, outside)?;
    let mut at = directory.at;
    while at < directory.end {
        unpack.count_entry()?;
        let (listed, next) = Listed::read(archive, at, directory.end).map_err(broken)?;
        at = next;
        listed.unpack(archive, directory.at, &mut unpack)?;
    }
    unpack.finish()
}

fn bad<T>(what: &'static str) -> Result<T, TarError> {
    Err(TarError::Bad(what))
}

/// Where the list of entries is.
struct Directory {
    at: u64,
    end: u64,
}

fn directory(archive: &File) -> Result<Directory, TarError> {
    let size = archive.metadata()?.len();
    let from = size.saturating_sub(MAX_TAIL);
    let mut tail = Vec::new();
    Part { archive, at: from, end: size }.read_to_end(&mut tail)?;
    let signature = END.to_le_bytes();
    let found = (0..tail.len().saturating_sub(21)).rev().find(|at| {
        tail[*at..].starts_with(&signature)
            && *at + 22 + usize::from(field_16(&tail[*at..], 20)) == tail.len()
    });
    let Some(found) = found else { return bad("it has no directory: not a zip archive, or cut off") };
    let end = from + found as u64;
    let tail = &tail[found..];
    let (mut length, mut at) = (u64::from(field_32(tail, 12)), u64::from(field_32(tail, 16)));
    if let Some(locator) = end.checked_sub(LOCATOR) {
        let mut head = [0; 20];
        archive.read_exact_at(&mut head, locator)?;
        if field_32(&head, 0) == END_64_LOCATOR {
            let mut large = [0; 56];
            archive.read_exact_at(&mut large, field_64(&head, 8))?;
            if field_32(&large, 0) != END_64 {
                return bad("its directory is not where it says");
            }
            (length, at) = (field_64(&large, 40), field_64(&large, 48));
        }
    }
    match at.checked_add(length) {
        Some(behind) if behind <= end => Ok(Directory { at, end: behind }),
        _ => bad("its directory is not where it says"),
    }
}

/// An entry as the directory lists it.
struct Listed {
    entry: Entry,
    method: u16,
    flags: u16,
    crc: u32,
    packed: u64,
    /// Of its own header.
    at: u64,
}

impl Listed {
    /// The entry at `at`, and where the next one is.
    fn read(archive: &File, at: u64, end: u64) -> Result<(Self, u64), TarError> {
        let mut part = Part { archive, at, end };
        let mut head = [0; 46];
        if read_full(&mut part, &mut head)? < head.len() || field_32(&head, 0) != CENTRAL {
            return bad("its directory is broken");
        }
        let mut name = vec![0; field_16(&head, 28).into()];
        let mut extra = vec![0; field_16(&head, 30).into()];
        if read_full(&mut part, &mut name)? < name.len() || read_full(&mut part, &mut extra)? < extra.len() {
            return bad("its directory is broken");
        }
        let next = part.at + u64::from(field_16(&head, 32));
        let mut listed = Self {
            method: field_16(&head, 10),
            flags: field_16(&head, 8),
            crc: field_32(&head, 16),
            packed: field_32(&head, 20).into(),
            at: field_32(&head, 42).into(),
            entry: Entry {
                stored: field_32(&head, 24).into(),
                mtime: unix_time(field_16(&head, 14), field_16(&head, 12)),
                path: name,
                ..Entry::default()
            },
        };
        listed.take_extra(&extra)?;
        listed.take_kind(field_16(&head, 4) >> 8, field_32(&head, 38) >> 16);
        Ok((listed, next))
    }

    fn take_extra(&mut self, mut rest: &[u8]) -> Result<(), TarError> {
        // What is left over is somebody's padding.
        while rest.len() >= 4 {
            let (kind, length) = (field_16(rest, 0), usize::from(field_16(rest, 2)));
            let Some(mut field) = rest.get(4..4 + length) else { return Ok(()) };
            rest = &rest[4 + length..];
            match kind {
                LARGE => {
                    for value in [&mut self.entry.stored, &mut self.packed, &mut self.at] {
                        if *value == u64::from(u32::MAX) {
                            let Some((number, behind)) = field.split_first_chunk() else {
                                return bad("a size is missing");
                            };
                            (*value, field) = (u64::from_le_bytes(*number), behind);
                        }
                    }
                }
                TIMES => {
                    if let [flags, a, b, c, d, ..] = *field
                        && flags & 1 != 0
                    {
                        self.entry.mtime = i32::from_le_bytes([a, b, c, d]).into();
                    }
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// As tar names kinds.
    fn take_kind(&mut self, system: u16, attributes: u32) {
        let slash = self.entry.path.ends_with(b"/");
        let mode = if matches!(system, UNIX | MACOS) { attributes } else { 0 };
        self.entry.kind = match mode & 0o170_000 {
            0o120_000 => b'2',
            0o040_000 => b'5',
            0o100_000 | 0 if slash => b'5',
            0o100_000 | 0 => b'0',
            0o060_000 => b'4',
            0o010_000 => b'6',
            _ => b'3',
        };
        self.entry.mode = match mode {
            0 if self.entry.kind == b'5' => NEW_DIR,
            0 => NEW_FILE,
            mode => mode & 0o777,
        };
    }

    fn unpack(mut self, archive: &File, end: u64, unpack: &mut Unpack<'_>) -> Result<(), FileError> {
        let mut contents = self.contents(archive, end).map_err(broken)?;
        match self.entry.kind {
            b'2' => {
                if self.entry.stored > MAX_PATH as u64 {
                    return Err(broken(TarError::Bad("a link's target is too long")));
                }
                let mut target = vec![0; usize::try_from(self.entry.stored).unwrap_or(0)];
                let read = read_full(&mut contents, &mut target).map_err(|e| broken(TarError::Io(e)))?;
                if read < target.len() {
                    return Err(broken(TarError::Bad("it ends within a link")));
                }
                self.entry.link = target;
                self.entry.stored = 0;
            }
            b'5' => self.entry.stored = 0,
            _ => {}
        }
        unpack.entry(self.entry, &mut contents)
    }

    fn contents<'a>(&self, archive: &'a File, end: u64) -> Result<Contents<'a>, TarError> {
        if self.flags & ENCRYPTED != 0 {
            return bad("it is encrypted");
        }
        let mut head = [0; 30];
        let within = self.at.checked_add(30).is_some_and(|behind| behind <= end);
        if !within || archive.read_exact_at(&mut head, self.at).is_err() || field_32(&head, 0) != LOCAL {
            return bad("an entry is not where the directory says");
        }
        let at = self.at + 30 + u64::from(field_16(&head, 26)) + u64::from(field_16(&head, 28));
        let behind = at.checked_add(self.packed).filter(|behind| *behind <= end);
        let Some(behind) = behind else { return bad("an entry reaches beyond the archive") };
        let part = BufReader::new(Part { archive, at, end: behind });
        let packed = match self.method {
            STORED => Packed::Stored(part),
            DEFLATED => Packed::Deflated(DeflateDecoder::new(part)),
            _ => return bad("an entry is compressed in a way other than deflate"),
        };
        Ok(Contents { packed, left: self.entry.stored, crc: Crc::new(), wanted: self.crc })
    }
}

/// A part of the archive.
struct Part<'a> {
    archive: &'a File,
    at: u64,
    end: u64,
}

impl Read for Part<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.end.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(left);
        let read = self.archive.read_at(&mut buffer[..wanted], self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

enum Packed<'a> {
    Stored(BufReader<Part<'a>>),
    Deflated(DeflateDecoder<BufReader<Part<'a>>>),
}

impl Read for Packed<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Stored(part) => part.read(buffer),
            Self::Deflated(part) => part.read(buffer),
        }
    }
}

/// An entry's contents: exactly as many bytes as were promised, and those that were meant.
struct Contents<'a> {
    packed: Packed<'a>,
    left: u64,
    crc: Crc,
    wanted: u32,
}

impl Read for Contents<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let broken = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let read = self.packed.read(&mut buffer[..most])?;
        if read == 0 {
            return broken("an entry is shorter than it says");
        }
        self.crc.update(&buffer[..read]);
        self.left -= read as u64;
        // With the last byte, not after it: a reader that has all it wants does not come back.
        if self.left == 0 {
            if self.crc.sum() != self.wanted {
                return broken("an entry's checksum is wrong");
            }
            if self.packed.read(&mut [0])? > 0 {
                return broken("an entry is longer than it says");
            }
        }
        Ok(read)
    }
}

fn field_16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(field(bytes, at))
}
fn field_32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(field(bytes, at))
}
fn field_64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(field(bytes, at))
}
/// Zeroes where there is nothing.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}
