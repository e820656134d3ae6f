//! Reading: a whole file or a range into memory, or any file as a stream.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
};

use carrel_proto::files::{Content, Entry, GuestPath, MAX_READ, ReadReply};
use rustix::fs::{self, OFlags};

use crate::{
    FileError, Root,
    root::{CAREFUL, Stamp, entry, expect_regular, stamp},
};

/// An open regular file, read at the caller's pace.
#[derive(Debug)]
pub struct FileReader {
    file: File,
    entry: Entry,
    stamp: Stamp,
}

impl FileReader {
    /// As it was when opened.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }
    /// Likewise.
    pub fn stamp(&self) -> Stamp {
        self.stamp
    }
    /// For callers that hand the descriptor on.
    pub fn into_file(self) -> File {
        self.file
    }
}

impl Read for FileReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.file.read(buffer)
    }
}
impl Seek for FileReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file.seek(to)
    }
}

impl Root {
    /// Opens a regular file for reading, following links that stay inside.
    pub fn reader(&self, path: &GuestPath) -> Result<FileReader, FileError> {
        let fail = |errno| FileError::at(path, errno);
        let before = fs::fstat(self.resolve(path, OFlags::PATH)?).map_err(fail)?;
        expect_regular(&before, path)?;
        let flags = OFlags::RDONLY | CAREFUL.difference(OFlags::NOFOLLOW);
        let file = File::from(self.resolve(path, flags)?);
        let stat = fs::fstat(&file).map_err(fail)?;
        expect_regular(&stat, path)?;
        Ok(FileReader { file, entry: entry(path.as_bytes(), &stat, None), stamp: stamp(&stat) })
    }

    /// Reads from `offset`. With `len` at most so many bytes, cut to [`MAX_READ`]; without it all of the rest, or
    /// an error when that is more than [`MAX_READ`].
    pub fn read(&self, path: &GuestPath, offset: u64, len: Option<u64>) -> Result<ReadReply, FileError> {
        let mut reader = self.reader(path)?;
        let fail = |error| FileError::io(path, error);
        let size = reader.entry.size;
        let most = len.unwrap_or(MAX_READ).min(MAX_READ);
        if offset > 0 {
            reader.seek(SeekFrom::Start(offset)).map_err(|_| FileError::argument("offset is too large"))?;
        }
        let mut data = Vec::new();
        // One byte more tells the end from a limit, also when the file grows meanwhile.
        (&mut reader).take(most + 1).read_to_end(&mut data).map_err(fail)?;
        let eof = data.len() as u64 <= most;
        if !eof {
            if len.is_none() {
                let what = format!("{size} bytes, at most {MAX_READ} in one reply");
                return Err(FileError::TooLarge { path: path.to_string(), what });
            }
            data.pop();
        }
        Ok(ReadReply { data: Content(data), offset, size, eof })
    }
}
