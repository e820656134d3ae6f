//! What an image is: a header, tables, and the pages that were the parent's own.
//!
//! ```text
//! 0            Header, then `segments` × Segment, `files` × MappedFile, the files' paths
//! length …     pages that copies map, in the order of the segments that keep some
//! ```
//! Beside this file there may be a second one: the image that the parent was a copy of itself. And what the parent has written may not
//! be in it at all, but come by itself: whoever holds the parent writes it into the copy, which waits for that.
//!
//! Everything is a 64-bit word in the machine's own order: an image never leaves the machine, nor outlives its kernel.

/// "carrel" and the format's version: raised with every change here.
pub const MAGIC: u64 = u64::from_le_bytes(*b"carrel\0\x02");
pub const PAGE: u64 = 4096;
/// What many pages take together where the kernel can; a mapping without room for one has none.
pub const HUGE_PAGE: u64 = 2 << 20;
/// Exit status of a graft that found something other than the image says.
pub const FAILED: i32 = 96;
/// Where a graft finds the image: behind standard streams, a driver's pipes and what its runner keeps for itself. Its other files
/// follow.
pub const IMAGE_FD: i32 = 6;
/// Files of an image at most.
pub const MOST_FILES: usize = 2;
/// The first argument that makes the agent's program a graft.
pub const ARGUMENT: &str = "graft";
/// With a second one it says when its memory is laid out, and waits until it is told to go on: by a byte each, where it will write
/// its replies and read its requests.
pub const WAITING: &str = "waiting";
pub const REQUESTS_FD: i32 = 3;
pub const REPLIES_FD: i32 = 4;
pub const GO_ON: u8 = b'!';
/// Words of the auxiliary vector that are kept; the kernel keeps no more than this.
pub const AUXV: usize = 48;
pub const AUXV_BYTES: u32 = 8 * 48;
/// A program has a few hundred mappings; a table that is longer is not ours.
pub const MAX_SEGMENTS: u64 = 8192;

/// Registers at the system call in which the parent sleeps; `rip` is that instruction.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Registers {
    pub rip: u64,
    pub rsp: u64,
    pub rbx: u64,
    pub rbp: u64,
    pub rdx: u64,
    pub r8: u64,
    pub r9: u64,
    pub r10: u64,
    pub r12: u64,
    pub r13: u64,
    pub r14: u64,
    pub r15: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub magic: u64,
    /// Header, tables and paths, in whole pages.
    pub length: u64,
    pub segments: u64,
    pub files: u64,
    pub registers: Registers,
    pub fs_base: u64,
    /// Where the C library keeps the thread's id, and the kernel clears it at its end.
    pub tid_at: u64,
    pub robust_list: u64,
    /// 0: none is registered.
    pub rseq: u64,
    pub rseq_size: u64,
    pub rseq_signature: u64,
    /// Signals that are ignored, one bit each, the first for signal 1.
    pub ignored: u64,
    pub vdso: u64,
    /// The process's name, padded with zeroes.
    pub name: [u64; 2],
    /// `start_code` … `env_end`, as `prctl_mm_map` has them.
    pub layout: [u64; 11],
    pub auxv: [u64; AUXV],
}

/// What stands behind a segment's pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    /// A file of the box, privately.
    File = 0,
    /// A file of the box, shared and only read.
    Shared = 1,
    /// Pages of the image.
    Stored = 2,
    /// Nothing yet.
    Zero = 3,
    /// Grows; its pages are copied, because only memory of no file can grow.
    Stack = 4,
    /// The kernel's own: moved, not mapped.
    System = 5,
    /// Made anew, because its content is for one process alone: random numbers yet to be given out. A fork has it empty.
    Wiped = 6,
    /// The same; the kernel may empty it at any time.
    Droppable = 7,
    /// Pages of the image that the parent was a copy of.
    Base = 8,
    /// Nothing yet, and so much is to come that huge pages do.
    Huge = 9,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    pub start: u64,
    pub end: u64,
    /// See [`Kind`].
    pub kind: u64,
    /// As `mmap` takes it.
    pub protection: u64,
    /// Where its pages begin: in the image's file for pages of this kind, or in the file of the box.
    pub offset: u64,
    /// Of a file: its place in the table. Segments of one file follow each other.
    pub file: u64,
    /// Of a stack: how much of its upper end is in the image.
    pub stored: u64,
}

/// A file that is mapped, and how to know that it is still the same.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedFile {
    /// Of its path in the image, which ends with a zero.
    pub path_at: u64,
    pub inode: u64,
    pub size: u64,
    pub modified_s: u64,
    pub modified_ns: u64,
}

const fn words<T>() -> usize {
    size_of::<T>() / size_of::<u64>()
}

pub const HEADER_BYTES: u64 = size_of::<Header>() as u64;
pub const SEGMENT_BYTES: u64 = size_of::<Segment>() as u64;
pub const FILE_BYTES: u64 = size_of::<MappedFile>() as u64;

impl Header {
    /// As it is written.
    pub fn words(&self) -> [u64; words::<Header>()] {
        let mut out = [0; words::<Header>()];
        let r = &self.registers;
        let parts: [&[u64]; 7] = [
            &[self.magic, self.length, self.segments, self.files],
            &[r.rip, r.rsp, r.rbx, r.rbp, r.rdx, r.r8, r.r9, r.r10, r.r12, r.r13, r.r14, r.r15],
            &[self.fs_base, self.tid_at, self.robust_list, self.rseq, self.rseq_size, self.rseq_signature],
            &[self.ignored, self.vdso],
            &self.name,
            &self.layout,
            &self.auxv,
        ];
        for (word, value) in out.iter_mut().zip(parts.into_iter().flatten()) {
            *word = *value;
        }
        out
    }
}

impl Segment {
    pub fn words(&self) -> [u64; words::<Segment>()] {
        [self.start, self.end, self.kind, self.protection, self.offset, self.file, self.stored]
    }
}

impl MappedFile {
    pub fn words(&self) -> [u64; words::<MappedFile>()] {
        [self.path_at, self.inode, self.size, self.modified_s, self.modified_ns]
    }
}
