//! Whole trees as tar streams, in constant memory, and as zip archives where asked for.
//!
//! Both directions speak GNU tar's format; reading also understands pax and sparse files. The reader is our own
//! because an archive may come from hostile hands: every name, header and map in it has a bound before it is
//! read, and entries are resolved like any other path, except that no link at all is followed on the way.

mod format;
mod pack;
mod unpack;
#[cfg(feature = "zip")]
mod zip;

use carrel_proto::files::{GuestPath, Name};
use std::io::{self, Read};

pub use pack::write_tar;
pub use unpack::read_tar;
#[cfg(feature = "zip")]
pub use zip::{read_zip, write_zip};

use crate::FileError;

/// Names of left-out files that a report carries; the rest is counted.
const MAX_NAMED: usize = 100;

/// How much one archive may hold.
#[derive(Debug, Clone, Copy)]
pub struct TreeLimits {
    /// Of file contents in the stream. A hostile tree can hold a sparse file of exabytes.
    pub bytes: u64,
    pub entries: u64,
}

impl Default for TreeLimits {
    /// Generous for a workspace of 1 GB, and an end for everything else.
    fn default() -> Self {
        Self { bytes: 64 << 30, entries: 1_000_000 }
    }
}

/// What becomes of symlinks in an archive that lead out of the workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutsideLinks {
    /// Fail with `path_outside`.
    #[default]
    Refuse,
    /// Leave them out and say so. A Python venv has such links.
    LeaveOut,
    /// Make them as they are, for a tree that a box gets back: they lead where they lead in the box, and nowhere for who
    /// stays below a [`Root`](crate::Root).
    Keep,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    pub path: Name,
    pub why: &'static str,
}

/// What was packed or unpacked, and what was not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TreeReport {
    pub files: u64,
    pub dirs: u64,
    pub links: u64,
    pub bytes: u64,
    /// The first hundred.
    pub left_out: Vec<LeftOut>,
    pub left_out_count: u64,
}

impl TreeReport {
    fn leave_out(&mut self, path: &[u8], why: &'static str) {
        self.left_out_count += 1;
        if self.left_out.len() < MAX_NAMED {
            self.left_out.push(LeftOut { path: Name::from(path), why });
        }
    }

    fn count_entry(&self, limits: &TreeLimits, path: &GuestPath) -> Result<(), FileError> {
        if self.files + self.dirs + self.links >= limits.entries {
            let what = format!("more than {} entries", limits.entries);
            return Err(FileError::TooLarge { path: path.to_string(), what });
        }
        Ok(())
    }

    fn count_bytes(&mut self, more: u64, limits: &TreeLimits, path: &GuestPath) -> Result<(), FileError> {
        self.bytes = self.bytes.saturating_add(more);
        if self.bytes > limits.bytes {
            let what = format!("more than {} bytes", limits.bytes);
            return Err(FileError::TooLarge { path: path.to_string(), what });
        }
        Ok(())
    }
}

/// Fills `buffer` as far as the input goes.
fn read_full(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
