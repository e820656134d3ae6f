//! A tree as a zip archive, without going back.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::{AsFd, BorrowedFd},
};

use carrel_proto::files::{GuestPath, Kind, MAX_DEPTH};
use flate2::{Compression, Crc, write::DeflateEncoder};
use rustix::fs::{self, AtFlags, OFlags};

use super::{
    BEHIND, CENTRAL, DEFLATED, DESCRIPTOR, END, END_64, END_64_LOCATOR, LARGE, LOCAL, STORED, TIMES, UNIX,
    UTF_8, dos_time,
};
use crate::{
    FileError, Root,
    root::{kind_of, open_regular, size_of},
    tree::{TreeLimits, TreeReport},
    walk::{OPEN_DIR, Order, Walk},
};

const BUFFER: usize = 64 << 10;
/// The archive's own directory, held until its end: some 150 thousand files. A larger tree goes as tar.
const MAX_DIRECTORY: usize = 16 << 20;
/// From here on a file gets room for large sizes: compressed it may be larger than it is.
const LARGE_FROM: u64 = 0xf000_0000;
const NONE_16: u16 = u16::MAX;
const NONE_32: u32 = u32::MAX;

/// Writes what is at `path` as a zip stream; otherwise like [`write_tar`](crate::write_tar). A file that shrinks meanwhile is
/// stored as short as it was found.
pub fn write_zip(
    root: &Root,
    path: &GuestPath,
    out: impl Write,
    limits: &TreeLimits,
) -> Result<TreeReport, FileError> {
    let fail = |errno| FileError::at(path, errno);
    let mut pack = Pack {
        out: Counted { out, at: 0 },
        path,
        limits,
        report: TreeReport::default(),
        directory: Vec::new(),
        entries: 0,
    };
    if root.stat(path, true)?.kind == Kind::Dir {
        let dir = root.resolve(path, OPEN_DIR)?;
        let mut walk = Walk::new(dir, Order::Batches, MAX_DEPTH as usize).map_err(fail)?;
        while let Some(item) = walk.next().map_err(fail)? {
            pack.entry(walk.dir(), &item.name, item.path, &item.stat)?;
        }
        for _ in 0..walk.unreadable {
            pack.report.leave_out(b"", "a directory that cannot be read");
        }
        for _ in 0..walk.too_deep {
            pack.report.leave_out(b"", "a directory that is too deep");
        }
    } else {
        let slot = root.locate(path, true)?;
        let stat = fs::statat(&slot.dir, slot.name.as_slice(), AtFlags::SYMLINK_NOFOLLOW).map_err(fail)?;
        crate::root::expect_regular(&stat, path)?;
        pack.entry(slot.dir.as_fd(), &slot.name, slot.name.clone(), &stat)?;
    }
    pack.end().map_err(stream)?;
    Ok(pack.report)
}

fn stream(error: io::Error) -> FileError {
    FileError::Io { path: "the archive's stream".into(), source: error }
}

struct Counted<W> {
    out: W,
    at: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.at += written as u64;
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

struct Pack<'a, W> {
    out: Counted<W>,
    path: &'a GuestPath,
    limits: &'a TreeLimits,
    report: TreeReport,
    directory: Vec<u8>,
    entries: u64,
}

/// What both headers of an entry say.
struct Head<'a> {
    name: &'a [u8],
    /// With its kind.
    mode: u32,
    mtime: i64,
    method: u16,
    flags: u16,
    large: bool,
    at: u64,
}

/// What is known when the contents are written.
#[derive(Clone, Copy, Default)]
struct Sizes {
    crc: u32,
    packed: u64,
    whole: u64,
}

impl<W: Write> Pack<'_, W> {
    fn entry(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        mut path: Vec<u8>,
        stat: &fs::Stat,
    ) -> Result<(), FileError> {
        self.report.count_entry(self.limits, self.path)?;
        if self.directory.len() > MAX_DIRECTORY || path.len() >= usize::from(u16::MAX) {
            let what = "more names than a zip archive is made for: take it as tar".to_owned();
            return Err(FileError::TooLarge { path: self.path.to_string(), what });
        }
        match kind_of(stat) {
            Kind::File => return self.file(dir, name, &path),
            Kind::Dir => {
                path.push(b'/');
                self.whole(&path, stat, b"")?;
                self.report.dirs += 1;
            }
            Kind::Symlink => match fs::readlinkat(dir, name, Vec::new()) {
                Ok(target) => {
                    self.whole(&path, stat, target.as_bytes())?;
                    self.report.links += 1;
                }
                Err(_) => self.report.leave_out(&path, "it changed meanwhile"),
            },
            Kind::Fifo | Kind::Socket | Kind::Device => {
                self.report.leave_out(&path, "not a regular file");
            }
        }
        Ok(())
    }

    /// A directory, a link, or a file without contents: all of it is at hand.
    fn whole(&mut self, path: &[u8], stat: &fs::Stat, contents: &[u8]) -> Result<(), FileError> {
        let mut crc = Crc::new();
        crc.update(contents);
        let length = contents.len() as u64;
        let sizes = Sizes { crc: crc.sum(), packed: length, whole: length };
        let head = self.head(path, stat, STORED, 0, false);
        self.out.write_all(&head.local(sizes)).map_err(stream)?;
        self.out.write_all(contents).map_err(stream)?;
        self.list(&head, sizes);
        Ok(())
    }

    fn file(&mut self, dir: BorrowedFd<'_>, name: &[u8], path: &[u8]) -> Result<(), FileError> {
        let (fd, stat) = match open_regular(dir, name, OFlags::RDONLY, self.path) {
            Ok(opened) => opened,
            Err(error) => {
                let why = match error {
                    FileError::Permission { .. } => "no permission",
                    _ => "it changed meanwhile",
                };
                self.report.leave_out(path, why);
                return Ok(());
            }
        };
        let size = size_of(&stat);
        self.report.count_bytes(size, self.limits, self.path)?;
        if size == 0 {
            self.report.files += 1;
            return self.whole(path, &stat, b"");
        }
        let head = self.head(path, &stat, DEFLATED, BEHIND, size >= LARGE_FROM);
        self.out.write_all(&head.local(Sizes::default())).map_err(stream)?;
        let began = self.out.at;
        let mut crc = Crc::new();
        let mut file = File::from(fd).take(size);
        let mut buffer = vec![0; BUFFER];
        let mut whole = 0;
        let mut deflating = DeflateEncoder::new(&mut self.out, Compression::fast());
        loop {
            // What cannot be read is missing at the end, like what was cut off meanwhile.
            let read = file.read(&mut buffer).unwrap_or(0);
            if read == 0 {
                break;
            }
            crc.update(&buffer[..read]);
            whole += read as u64;
            deflating.write_all(&buffer[..read]).map_err(stream)?;
        }
        deflating.finish().map_err(stream)?;
        let sizes = Sizes { crc: crc.sum(), packed: self.out.at - began, whole };
        self.out.write_all(&head.descriptor(sizes)).map_err(stream)?;
        self.list(&head, sizes);
        self.report.files += 1;
        if whole < size {
            self.report.leave_out(path, "its end: it shrank or could not be read");
        }
        Ok(())
    }

    fn head<'n>(&self, name: &'n [u8], stat: &fs::Stat, method: u16, flags: u16, large: bool) -> Head<'n> {
        let text = std::str::from_utf8(name).is_ok();
        let flags = if text { flags | UTF_8 } else { flags };
        // Kind and permissions; never the bits that give rights away.
        let mode = stat.st_mode & 0o170_777;
        Head { name, mode, mtime: stat.st_mtime, method, flags, large, at: self.out.at }
    }

    fn list(&mut self, head: &Head<'_>, sizes: Sizes) {
        self.entries += 1;
        head.central(sizes, &mut self.directory);
    }

    fn end(&mut self) -> io::Result<()> {
        let at = self.out.at;
        let size = self.directory.len() as u64;
        self.out.write_all(&self.directory)?;
        let mut end = Vec::with_capacity(98);
        if self.entries >= u64::from(NONE_16) || at >= u64::from(NONE_32) || size >= u64::from(NONE_32) {
            let end_at = self.out.at;
            put_32(&mut end, END_64);
            put_64(&mut end, 44);
            put_16(&mut end, UNIX << 8 | 45);
            put_16(&mut end, 45);
            put_32(&mut end, 0);
            put_32(&mut end, 0);
            put_64(&mut end, self.entries);
            put_64(&mut end, self.entries);
            put_64(&mut end, size);
            put_64(&mut end, at);
            put_32(&mut end, END_64_LOCATOR);
            put_32(&mut end, 0);
            put_64(&mut end, end_at);
            put_32(&mut end, 1);
        }
        put_32(&mut end, END);
        put_32(&mut end, 0);
        let entries = u16::try_from(self.entries).unwrap_or(NONE_16);
        put_16(&mut end, entries);
        put_16(&mut end, entries);
        put_32(&mut end, within(size));
        put_32(&mut end, within(at));
        put_16(&mut end, 0);
        self.out.write_all(&end)?;
        self.out.flush()
    }
}

impl Head<'_> {
    fn local(&self, sizes: Sizes) -> Vec<u8> {
        let mut extra = self.times();
        if self.large {
            put_16(&mut extra, LARGE);
            put_16(&mut extra, 16);
            put_64(&mut extra, 0);
            put_64(&mut extra, 0);
        }
        let mut out = Vec::with_capacity(64 + self.name.len());
        put_32(&mut out, LOCAL);
        let size = |size| if self.large { NONE_32 } else { within(size) };
        self.common(&mut out, sizes.crc, size(sizes.packed), size(sizes.whole), extra.len());
        out.extend_from_slice(self.name);
        out.extend_from_slice(&extra);
        out
    }

    fn descriptor(&self, sizes: Sizes) -> Vec<u8> {
        let mut out = Vec::with_capacity(24);
        put_32(&mut out, DESCRIPTOR);
        put_32(&mut out, sizes.crc);
        if self.large {
            put_64(&mut out, sizes.packed);
            put_64(&mut out, sizes.whole);
        } else {
            put_32(&mut out, within(sizes.packed));
            put_32(&mut out, within(sizes.whole));
        }
        out
    }

    fn central(&self, sizes: Sizes, out: &mut Vec<u8>) {
        let mut large = Vec::new();
        for value in [sizes.whole, sizes.packed, self.at] {
            if value >= u64::from(NONE_32) {
                put_64(&mut large, value);
            }
        }
        let mut extra = self.times();
        if !large.is_empty() {
            put_16(&mut extra, LARGE);
            put_16(&mut extra, u16::try_from(large.len()).unwrap_or(0));
            extra.extend_from_slice(&large);
        }
        put_32(out, CENTRAL);
        put_16(out, UNIX << 8 | self.version());
        self.common(out, sizes.crc, within(sizes.packed), within(sizes.whole), extra.len());
        // No comment, the first disk, no kind of text.
        put_16(out, 0);
        put_16(out, 0);
        put_16(out, 0);
        let directory = u32::from(self.name.ends_with(b"/")) << 4;
        put_32(out, self.mode << 16 | directory);
        put_32(out, within(self.at));
        out.extend_from_slice(self.name);
        out.extend_from_slice(&extra);
    }

    /// From the version to the lengths of name and extra fields.
    fn common(&self, out: &mut Vec<u8>, crc: u32, packed: u32, whole: u32, extra: usize) {
        let (date, time) = dos_time(self.mtime);
        put_16(out, self.version());
        put_16(out, self.flags);
        put_16(out, self.method);
        put_16(out, time);
        put_16(out, date);
        put_32(out, crc);
        put_32(out, packed);
        put_32(out, whole);
        put_16(out, u16::try_from(self.name.len()).unwrap_or(0));
        put_16(out, u16::try_from(extra).unwrap_or(0));
    }

    fn version(&self) -> u16 {
        if self.large { 45 } else { 20 }
    }

    /// The time of the last change, where 32 bits can say it.
    fn times(&self) -> Vec<u8> {
        let mut extra = Vec::with_capacity(9);
        if let Ok(seconds) = i32::try_from(self.mtime) {
            put_16(&mut extra, TIMES);
            put_16(&mut extra, 5);
            extra.push(1);
            extra.extend_from_slice(&seconds.to_le_bytes());
        }
        extra
    }
}

/// What does not fit is in an extra field.
fn within(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(NONE_32)
}

fn put_16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}
fn put_32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}
fn put_64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}
