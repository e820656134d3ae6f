//! Kept output on disk: one file per run or exec, a record per chunk.
//!
//! ```text
//! u64 LE chunk number · u64 LE offset in its stream · u32 LE length · u8 stream · 3 zero bytes · content
//! ```
//! The file describes itself, so what a sandbox printed can be read after its agent is gone.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use carrel_proto::frame::Stream;

use crate::output::Chunk;

const RECORD: usize = 24;
/// One remembered position per this many bytes: finding a chunk reads at most so much.
const STRIDE: u64 = 64 << 10;

#[derive(Debug)]
pub(crate) struct Spool {
    path: PathBuf,
    /// Closed once all is written: hundreds of finished calls must not hold a descriptor each.
    file: Option<File>,
    /// Where the next record goes.
    end: u64,
    /// Number of the next record.
    next: u64,
    /// Sparse: chunk number and position.
    index: Vec<(u64, u64)>,
}

impl Spool {
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        Ok(Self { path: path.to_path_buf(), file: Some(file), end: 0, next: 0, index: Vec::new() })
    }

    /// One that is there, with what is in it.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let mut spool = Self { path: path.to_path_buf(), file: None, end: 0, next: 0, index: Vec::new() };
        let length = file.metadata()?.len();
        while spool.end + RECORD as u64 <= length {
            let mut header = [0; RECORD];
            file.read_exact_at(&mut header, spool.end)?;
            let mut number = [0; 8];
            number.copy_from_slice(&header[..8]);
            let number = u64::from_le_bytes(number);
            if spool.index.last().is_none_or(|(_, position)| spool.end - position >= STRIDE) {
                spool.index.push((number, spool.end));
            }
            let size = u32::from_le_bytes([header[16], header[17], header[18], header[19]]);
            spool.end += RECORD as u64 + u64::from(size);
            spool.next = number + 1;
        }
        Ok(spool)
    }

    pub(crate) fn close(&mut self) {
        self.file = None;
    }

    /// Number of the first chunk that is not here.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    pub(crate) fn append(&mut self, chunk: &Chunk) -> io::Result<()> {
        if self.index.last().is_none_or(|(_, position)| self.end - position >= STRIDE) {
            self.index.push((chunk.number, self.end));
        }
        let length = u32::try_from(chunk.bytes.len()).map_err(io::Error::other)?;
        let mut header = [0; RECORD];
        header[..8].copy_from_slice(&chunk.number.to_le_bytes());
        header[8..16].copy_from_slice(&chunk.offset.to_le_bytes());
        header[16..20].copy_from_slice(&length.to_le_bytes());
        header[20] = chunk.stream.code();
        let file = match &mut self.file {
            Some(file) => file,
            // A process that a finished command left behind still prints.
            closed => closed.insert(File::options().read(true).write(true).open(&self.path)?),
        };
        let mut record = Vec::with_capacity(RECORD + chunk.bytes.len());
        record.extend_from_slice(&header);
        record.extend_from_slice(&chunk.bytes);
        file.write_all_at(&record, self.end)?;
        self.end += RECORD as u64 + u64::from(length);
        self.next = chunk.number + 1;
        Ok(())
    }

    /// The first kept chunk with this number or a later one.
    pub(crate) fn read(&self, number: u64) -> io::Result<Option<Chunk>> {
        let reopened;
        let file = match &self.file {
            Some(file) => file,
            None => {
                reopened = File::open(&self.path)?;
                &reopened
            }
        };
        let slot = self.index.partition_point(|(first, _)| *first <= number);
        let mut position = slot.checked_sub(1).map_or(0, |slot| self.index[slot].1);
        while position < self.end {
            let mut header = [0; RECORD];
            file.read_exact_at(&mut header, position)?;
            let word = |at: usize| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&header[at..at + 8]);
                u64::from_le_bytes(bytes)
            };
            let length = u32::from_le_bytes([header[16], header[17], header[18], header[19]]);
            if word(0) >= number {
                let mut bytes = vec![0; length as usize];
                file.read_exact_at(&mut bytes, position + RECORD as u64)?;
                let stream = Stream::from_code(header[20]).unwrap_or(Stream::Stdout);
                return Ok(Some(Chunk { number: word(0), stream, offset: word(8), bytes }));
            }
            position += RECORD as u64 + u64::from(length);
        }
        Ok(None)
    }
}
