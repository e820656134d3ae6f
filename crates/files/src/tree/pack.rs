//! A tree as an archive.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, BorrowedFd},
};

use carrel_proto::files::{GuestPath, Kind, MAX_DEPTH};
use rustix::fs::{self, AtFlags, OFlags};

use super::{
    TreeLimits, TreeReport,
    format::{BLOCK, encode},
    read_full,
};
use crate::{
    FileError, Root,
    root::{kind_of, open_regular, size_of},
    walk::{OPEN_DIR, Order, Walk},
};

const BUFFER: usize = 64 << 10;

/// Writes what is at `path` as a tar stream: of a directory what is in it, of a file the file under its name.
/// Links are stored as links; fifos, sockets, devices and what cannot be read are left out and reported. A file
/// that shrinks meanwhile is filled up with zeros and reported.
pub fn write_tar(
    root: &Root,
    path: &GuestPath,
    out: impl Write,
    limits: &TreeLimits,
) -> Result<TreeReport, FileError> {
    let fail = |errno| FileError::at(path, errno);
    let mut pack = Pack { out, path, limits, report: TreeReport::default(), buffer: vec![0; BUFFER] };
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
    pack.put(&[0; 2 * BLOCK])?;
    pack.out.flush().map_err(stream)?;
    Ok(pack.report)
}

fn stream(error: io::Error) -> FileError {
    FileError::Io { path: "the archive's stream".into(), source: error }
}

struct Pack<'a, W> {
    out: W,
    path: &'a GuestPath,
    limits: &'a TreeLimits,
    report: TreeReport,
    buffer: Vec<u8>,
}

impl<W: Write> Pack<'_, W> {
    fn put(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.out.write_all(bytes).map_err(stream)
    }

    fn entry(
        &mut self,
        dir: BorrowedFd<'_>,
        name: &[u8],
        mut path: Vec<u8>,
        stat: &fs::Stat,
    ) -> Result<(), FileError> {
        self.report.count_entry(self.limits, self.path)?;
        let mode = stat.st_mode & 0o777;
        match kind_of(stat) {
            Kind::File => return self.file(dir, name, &path),
            Kind::Dir => {
                path.push(b'/');
                self.put(&encode(b'5', &path, b"", mode, 0, stat.st_mtime))?;
                self.report.dirs += 1;
            }
            Kind::Symlink => match fs::readlinkat(dir, name, Vec::new()) {
                Ok(target) => {
                    self.put(&encode(b'2', &path, target.as_bytes(), mode, 0, stat.st_mtime))?;
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
        self.put(&encode(b'0', path, b"", stat.st_mode & 0o777, size, stat.st_mtime))?;
        let mut file = File::from(fd);
        let mut left = size;
        let mut short = false;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(BUFFER).min(BUFFER);
            let buffer = &mut self.buffer[..wanted];
            // The header promised so many bytes; a stream cannot take that back.
            let read = if short { 0 } else { read_full(&mut file, buffer).unwrap_or(0) };
            buffer[read..].fill(0);
            short |= read < wanted;
            self.out.write_all(buffer).map_err(stream)?;
            left -= wanted as u64;
        }
        let padding = usize::try_from(size.next_multiple_of(BLOCK as u64) - size).unwrap_or(0);
        self.put(&[0; BLOCK][..padding])?;
        self.report.files += 1;
        if short {
            self.report.leave_out(path, "its end: it shrank or could not be read");
        }
        Ok(())
    }
}
