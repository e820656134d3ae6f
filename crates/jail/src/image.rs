//! Takes the image of a process that sleeps, so that copies of it can be made by grafting. What an image is and what becomes
//! of it is in [`carrel_graft`].
//!
//! Pages that the process has written are stored once, in a sealed file of memory that every copy maps privately: what no copy
//! changes is there once for all of them. Pages of files are not stored; copies map the same files.
//!
//! Whatever an image could not say is a reason not to take one: threads, handlers of other signals than those the driver sets
//! anew, files that are gone, memory shared with somebody.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use carrel_graft::format::{
    AUXV, FILE_BYTES, HEADER_BYTES, Header, Kind, MAGIC, MAX_SEGMENTS, MappedFile, PAGE, Registers,
    SEGMENT_BYTES, Segment,
};
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, memfd_create};

use crate::{
    trace::{GeneralRegisters, Traced},
    tree,
};

/// Flags of mappings: huge pages, devices, locked, not for forks, shadow stacks.
const NOT_KEPT: [&str; 5] = ["ht", "io", "lo", "dc", "ss"];
/// More than this is no interpreter that has just started.
pub const MAX_BYTES: u64 = 256 << 20;
/// Holes of pages that were never written are kept as such from this size on; every one costs copies a mapping.
const HOLE: u64 = 16 * PAGE;
/// What python sleeps in, depending on its version: `select`, `nanosleep`, `clock_nanosleep`, `pselect6`.
const SLEEPS: [u64; 4] = [23, 35, 230, 270];
const READ: u64 = 0;
/// A process can have addresses for far more than there is memory, and each page of them has to be asked for.
const MAX_ADDRESSES: u64 = 8 << 30;
/// Of what the kernel says of its mappings.
const MAX_TEXT: u64 = 16 << 20;
/// What mappings of files in memory are called.
const IN_MEMORY: &str = "/memfd:";
const SIGINT_BIT: u64 = 1 << 1;
/// What is read at once: it is still in a CPU's cache when it is written.
const CHUNK: usize = 128 << 10;
/// Floating point as every program starts with it.
const FLOAT_CONTROL: (u16, u32) = (0x37f, 0x1f80);
/// What was rounded or overflowed so far; nobody asks.
const FLOAT_RAISED: u32 = 0x3f;
/// Where the C library has a thread's id, before the head of its list of locks.
const TID_BEFORE_LIST: u64 = 16;
const PROT: [(u8, u64); 3] = [(b'r', 1), (b'w', 2), (b'x', 4)];
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;
/// Flags of a page in `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;

/// An image, ready to be handed to boxes: it can be read and mapped, and never changes.
#[derive(Debug)]
pub struct Image {
    file: OwnedFd,
    pub bytes: u64,
    /// Files that copies map: when one of them is another, no copy can be made any more.
    pub files: Vec<String>,
}

impl Image {
    pub fn file(&self) -> &OwnedFd {
        &self.file
    }
}

/// An image that is yet to be taken. Boxes can be given it already: what they are given can only be read.
#[derive(Debug)]
pub struct Blank(File);

impl Blank {
    pub fn new() -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Ok(Self(memfd_create("python", flags)?.into()))
    }

    pub fn file(&self) -> &File {
        &self.0
    }
}

fn refuse(why: impl Into<String>) -> io::Error {
    io::Error::other(why.into())
}

/// Whether a process sleeps, so that an image can be taken. Of one that may not be looked at: no.
pub fn sleeps(pid: i32) -> bool {
    let text = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let number = text.split(' ').next().and_then(|number| number.parse().ok());
    number.is_some_and(|number| SLEEPS.contains(&number))
}

/// Takes the image of a process that sleeps, and goes on sleeping.
pub fn take(pid: i32) -> io::Result<Image> {
    let blank = Blank::new()?;
    let (bytes, files) = take_in(&Traced::stop(pid)?, &SLEEPS, MAX_BYTES, &blank)?;
    let path = format!("/proc/self/fd/{}", blank.0.as_raw_fd());
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    Ok(Image { file, bytes, files })
}

/// Takes the image of one that waits for something to read, which a copy finds to be at its end. Anybody's code may have run in
/// it, and its number may be another's by now; its own memory may be of so many bytes. `WouldBlock`: it does not wait yet.
pub fn take_reader(pid: i32, start_time: u64, most: u64, blank: &Blank) -> io::Result<()> {
    let traced = Traced::stop(pid)?;
    // Held as it is now, it cannot be another any more.
    if tree::start_time(pid) != Some(start_time) {
        return Err(refuse("it has ended"));
    }
    take_in(&traced, &[READ], most, blank).map(drop)
}

/// How large it is, and which files copies map.
fn take_in(traced: &Traced, calls: &[u64], most: u64, blank: &Blank) -> io::Result<(u64, Vec<String>)> {
    let process = Process::open(traced.pid())?;
    let registers = traced.registers()?;
    if !calls.contains(&registers.orig_rax) {
        return Err(io::Error::new(io::ErrorKind::WouldBlock, "it does not sleep, or wait"));
    }
    process.refuse_what_is_not_kept(traced)?;
    let mut taken = Taken { most, ..Taken::default() };
    for mapping in process.mappings()? {
        taken.add(&process, &mapping, registers.rsp)?;
    }
    let header = process.header(traced, &registers, &taken)?;
    taken.write(header, traced, &blank.0)
}

struct Process {
    pid: i32,
    memory: File,
    pagemap: File,
}

/// A mapping as `/proc/PID/smaps` tells it.
#[derive(Debug, Clone)]
struct Mapping {
    start: u64,
    end: u64,
    protection: u64,
    shared: bool,
    offset: u64,
    inode: u64,
    name: String,
    /// Two letters each.
    flags: Vec<String>,
}

impl Mapping {
    fn has(&self, flag: &str) -> bool {
        self.flags.iter().any(|one| one == flag)
    }

    /// Of the line that a mapping begins with; `None` of any other.
    fn parse(line: &str) -> Option<Self> {
        // The name may hold anything, and is missing for memory of no file.
        let mut rest = line;
        let mut field = || {
            rest = rest.trim_start();
            let (word, after) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = after;
            word
        };
        let (start, end) = field().split_once('-')?;
        let (flags, offset, _device, inode) = (field(), field(), field(), field());
        let flag = |at: usize| flags.as_bytes().get(at).copied();
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            protection: PROT
                .iter()
                .enumerate()
                .filter(|(at, one)| flag(*at) == Some(one.0))
                .map(|(_, one)| one.1)
                .sum(),
            shared: flag(3)? == b's',
            offset: u64::from_str_radix(offset, 16).ok()?,
            inode: inode.parse().ok()?,
            name: rest.trim_start().to_owned(),
            flags: Vec::new(),
        })
    }
}

impl Process {
    fn open(pid: i32) -> io::Result<Self> {
        Ok(Self {
            pid,
            memory: File::open(format!("/proc/{pid}/mem"))?,
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
        })
    }

    fn text(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(format!("/proc/{}/{name}", self.pid))
    }

    fn mappings(&self) -> io::Result<Vec<Mapping>> {
        let mut text = String::new();
        let file = File::open(format!("/proc/{}/smaps", self.pid))?;
        if file.take(MAX_TEXT).read_to_string(&mut text)? as u64 == MAX_TEXT {
            return Err(refuse("it has too many mappings"));
        }
        let mut all: Vec<Mapping> = Vec::new();
        for line in text.lines() {
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                let last = all.last_mut().ok_or_else(|| refuse("its mappings cannot be read"))?;
                last.flags = flags.split_whitespace().map(str::to_owned).collect();
            } else {
                all.extend(Mapping::parse(line));
            }
        }
        // At the same place in every process.
        all.retain(|one| one.name != "[vsyscall]");
        Ok(all)
    }

    fn status(&self, field: &str) -> io::Result<String> {
        let status = self.text("status")?;
        let found = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        Ok(found.unwrap_or_default().trim().to_owned())
    }

    fn refuse_what_is_not_kept(&self, traced: &Traced) -> io::Result<()> {
        if self.status("Threads")? != "1" {
            return Err(refuse("it has threads"));
        }
        if !self.status("x86_Thread_features")?.is_empty() {
            return Err(refuse("it has a shadow stack"));
        }
        if self.mask("SigCgt")? & !SIGINT_BIT != 0 {
            return Err(refuse("it handles signals that the driver does not set anew"));
        }
        if traced.blocked_signals()? != 0 {
            return Err(refuse("it blocks signals"));
        }
        let (x87, sse) = traced.float_control()?;
        if (x87, sse & !FLOAT_RAISED) != FLOAT_CONTROL {
            return Err(refuse("it computes with other settings than a new program"));
        }
        Ok(())
    }

    fn mask(&self, field: &str) -> io::Result<u64> {
        u64::from_str_radix(&self.status(field)?, 16).map_err(|_| refuse(format!("{field} cannot be read")))
    }

    /// Which pages of a range are the process's own: written by it, in memory or swapped out.
    fn own_pages(&self, start: u64, end: u64) -> io::Result<Vec<bool>> {
        let count = usize::try_from((end - start) / PAGE).map_err(io::Error::other)?;
        let mut bytes = vec![0; count * 8];
        self.pagemap.read_exact_at(&mut bytes, start / PAGE * 8)?;
        let entries = bytes.chunks_exact(8).map(|entry| {
            let mut word = [0; 8];
            word.copy_from_slice(entry);
            u64::from_ne_bytes(word)
        });
        Ok(entries.map(|entry| entry & OF_FILE == 0 && entry & (PRESENT | SWAPPED) != 0).collect())
    }

    fn word(&self, at: u64) -> io::Result<u32> {
        let mut word = [0; 4];
        self.memory.read_exact_at(&mut word, at)?;
        Ok(u32::from_ne_bytes(word))
    }

    /// A file as the process's own box shows it.
    fn seen(&self, path: &str) -> io::Result<fs::Metadata> {
        fs::metadata(format!("/proc/{}/root{path}", self.pid))
    }

    fn header(&self, traced: &Traced, registers: &GeneralRegisters, taken: &Taken) -> io::Result<Header> {
        let robust_list = traced.robust_list()?;
        let tid_at = robust_list.wrapping_sub(TID_BEFORE_LIST);
        let own_id = self.status("NSpid")?.split_whitespace().last().and_then(|pid| pid.parse().ok());
        if robust_list == 0 || Some(self.word(tid_at)?) != own_id {
            return Err(refuse("its C library is not one whose threads we know"));
        }
        if registers.gs_base != 0 {
            return Err(refuse("it uses a register that a new program does not"));
        }
        let rseq = traced.rseq()?;
        let stat = self.text("stat")?;
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
        // The manual counts from 1, and the pid and the name come before these.
        let field = |number: usize| -> io::Result<u64> {
            let found = fields.get(number - 3).and_then(|field| field.parse().ok());
            found.ok_or_else(|| refuse("its layout cannot be read"))
        };
        let brk = taken.heap_end.unwrap_or(field(47)?);
        let mut auxv = [0; AUXV];
        let text = fs::read(format!("/proc/{}/auxv", self.pid))?;
        for (word, bytes) in auxv.iter_mut().zip(text.chunks_exact(8)) {
            let mut one = [0; 8];
            one.copy_from_slice(bytes);
            *word = u64::from_ne_bytes(one);
        }
        let mut name = [0; 16];
        let comm = self.text("comm")?;
        for (to, from) in name.iter_mut().take(15).zip(comm.trim_end().bytes()) {
            *to = from;
        }
        let half = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&name[at..at + 8]);
            u64::from_ne_bytes(word)
        };
        Ok(Header {
            magic: MAGIC,
            length: 0,
            segments: 0,
            files: 0,
            registers: Registers {
                // The instruction has two bytes, and is behind us.
                rip: registers.rip - 2,
                rsp: registers.rsp,
                rbx: registers.rbx,
                rbp: registers.rbp,
                rdx: registers.rdx,
                r8: registers.r8,
                r9: registers.r9,
                r10: registers.r10,
                r12: registers.r12,
                r13: registers.r13,
                r14: registers.r14,
                r15: registers.r15,
            },
            fs_base: registers.fs_base,
            tid_at,
            robust_list,
            rseq: rseq.pointer,
            rseq_size: rseq.size.into(),
            rseq_signature: rseq.signature.into(),
            ignored: self.mask("SigIgn")?,
            vdso: taken.vdso.ok_or_else(|| refuse("it has no vdso"))?,
            name: [half(0), half(8)],
            layout: [
                field(26)?,
                field(27)?,
                field(45)?,
                field(46)?,
                field(47)?,
                brk,
                field(28)?,
                field(48)?,
                field(49)?,
                field(50)?,
                field(51)?,
            ],
            auxv,
        })
    }
}

#[derive(Debug, Default)]
struct Taken {
    segments: Vec<Segment>,
    files: Vec<(String, fs::Metadata)>,
    /// Ranges of memory to be stored, in the order of their places in the image.
    stored: Vec<(u64, u64)>,
    bytes: u64,
    /// How many those may be.
    most: u64,
    /// Of the ranges that were looked at.
    addresses: u64,
    heap_end: Option<u64>,
    vdso: Option<u64>,
}

impl Taken {
    fn add(&mut self, process: &Process, mapping: &Mapping, stack: u64) -> io::Result<()> {
        let Mapping { start, end, protection, .. } = *mapping;
        let segment =
            |kind: Kind| Segment { start, end, kind: kind as u64, protection, offset: 0, file: 0, stored: 0 };
        match mapping.name.as_str() {
            "[vdso]" => self.vdso = Some(start),
            "[heap]" => self.heap_end = Some(end),
            _ => {}
        }
        if mapping.name == "[vdso]" || mapping.name.starts_with("[vvar") {
            self.segments.push(segment(Kind::System));
            return Ok(());
        }
        if let Some(flag) = NOT_KEPT.iter().find(|flag| mapping.has(flag)) {
            return Err(refuse(format!("it has memory of a kind that is not kept ({flag})")));
        }
        if mapping.has("dp") || mapping.has("wf") {
            let kind = if mapping.has("dp") { Kind::Droppable } else { Kind::Wiped };
            self.segments.push(segment(kind));
            return Ok(());
        }
        if mapping.name == "[stack]" {
            // Below the pointer is what a called function may use without moving it.
            let used = (stack.saturating_sub(128) & !(PAGE - 1)).max(start);
            if used >= end {
                return Err(refuse("its stack is elsewhere"));
            }
            let offset = self.store(used, end);
            self.segments.push(Segment { offset, stored: end - used, ..segment(Kind::Stack) });
            return Ok(());
        }
        let is_file = mapping.name.starts_with('/');
        if mapping.shared {
            if !is_file || protection & PROT_WRITE != 0 {
                return Err(refuse(format!("it shares memory: {}", mapping.name)));
            }
            return self.add_file(process, mapping, segment(Kind::Shared));
        }
        self.addresses += end - start;
        if self.addresses > MAX_ADDRESSES {
            return Err(refuse("it has too many addresses"));
        }
        let own = process.own_pages(start, end)?;
        // Of an image that it is a copy of itself.
        if mapping.name.starts_with(IN_MEMORY) && protection & PROT_EXEC == 0 {
            let offset = self.store(start, end);
            self.segments.push(Segment { offset, ..segment(Kind::Stored) });
            return Ok(());
        }
        if !own.contains(&true) {
            if is_file {
                return self.add_file(process, mapping, segment(Kind::File));
            }
            self.segments.push(segment(Kind::Zero));
            return Ok(());
        }
        if protection & PROT_EXEC != 0 {
            return Err(refuse("it has code that it has written itself"));
        }
        if is_file {
            // In part the file's: kept as one, as the process has it.
            let offset = self.store(start, end);
            self.segments.push(Segment { offset, ..segment(Kind::Stored) });
            return Ok(());
        }
        self.add_memory(&own, segment(Kind::Stored));
        Ok(())
    }

    /// Memory of no file, without its larger holes.
    fn add_memory(&mut self, own: &[bool], whole: Segment) {
        let page = |index: usize| whole.start + index as u64 * PAGE;
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for index in (0..own.len()).filter(|index| own[*index]) {
            match runs.last_mut() {
                Some(run) if page(index) - run.1 < HOLE => run.1 = page(index + 1),
                _ => runs.push((page(index), page(index + 1))),
            }
        }
        let mut at = whole.start;
        for (start, end) in runs {
            if at < start {
                self.segments.push(Segment { start: at, end: start, kind: Kind::Zero as u64, ..whole });
            }
            let offset = self.store(start, end);
            self.segments.push(Segment { start, end, offset, ..whole });
            at = end;
        }
        if at < whole.end {
            self.segments.push(Segment { start: at, kind: Kind::Zero as u64, ..whole });
        }
    }

    fn add_file(&mut self, process: &Process, mapping: &Mapping, segment: Segment) -> io::Result<()> {
        let known = self.files.iter().position(|(path, _)| *path == mapping.name);
        let index = match known {
            Some(index) => index,
            None => {
                let status = process.seen(&mapping.name)?;
                if status.ino() != mapping.inode {
                    return Err(refuse(format!("{} is another file by now", mapping.name)));
                }
                self.files.push((mapping.name.clone(), status));
                self.files.len() - 1
            }
        };
        self.segments.push(Segment { offset: mapping.offset, file: index as u64, ..segment });
        Ok(())
    }

    fn store(&mut self, start: u64, end: u64) -> u64 {
        let at = self.bytes;
        self.stored.push((start, end));
        self.bytes += end - start;
        at
    }

    fn write(mut self, mut header: Header, traced: &Traced, file: &File) -> io::Result<(u64, Vec<String>)> {
        let bytes = self
            .stored
            .iter()
            .try_fold(0, |sum: u64, (start, end)| sum.checked_add(end.checked_sub(*start)?));
        if bytes != Some(self.bytes) || self.bytes > self.most || self.segments.len() as u64 > MAX_SEGMENTS {
            return Err(refuse("it is too large"));
        }
        // Each file is opened once, for all of its segments.
        self.segments.sort_by_key(|segment| (segment.kind > Kind::Shared as u64, segment.file));
        let mut paths = Vec::new();
        let paths_at =
            HEADER_BYTES + self.segments.len() as u64 * SEGMENT_BYTES + self.files.len() as u64 * FILE_BYTES;
        let mut files = Vec::new();
        for (path, status) in &self.files {
            files.push(MappedFile {
                path_at: paths_at + paths.len() as u64,
                inode: status.ino(),
                size: status.size(),
                modified_s: status.mtime().unsigned_abs(),
                modified_ns: status.mtime_nsec().unsigned_abs(),
            });
            paths.extend_from_slice(path.as_bytes());
            paths.push(0);
        }
        header.length = (paths_at + paths.len() as u64).next_multiple_of(PAGE);
        header.segments = self.segments.len() as u64;
        header.files = files.len() as u64;
        for segment in &mut self.segments {
            if [Kind::Stored as u64, Kind::Stack as u64].contains(&segment.kind) {
                segment.offset += header.length;
            }
        }
        let words = header.words().into_iter();
        let words = words.chain(self.segments.iter().flat_map(Segment::words));
        let words = words.chain(files.iter().flat_map(MappedFile::words));
        let mut tables: Vec<u8> = words.flat_map(u64::to_ne_bytes).collect();
        tables.extend_from_slice(&paths);
        tables.resize(usize::try_from(header.length).map_err(io::Error::other)?, 0);
        file.write_all_at(&tables, 0)?;
        copy(&self.stored, traced, file, header.length)?;
        // From now on nobody can change it.
        fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
        Ok((header.length + self.bytes, self.files.into_iter().map(|(path, _)| path).collect()))
    }
}

/// Copies ranges of memory one behind the other into a file, from `to` on. Pages of a file take longer than their content, so two
/// threads do it, and each writes what it has just read.
fn copy(ranges: &[(u64, u64)], traced: &Traced, file: &File, mut to: u64) -> io::Result<()> {
    let mut pieces = Vec::new();
    for (start, end) in ranges {
        for at in (*start..*end).step_by(CHUNK) {
            let length = (end - at).min(CHUNK as u64);
            pieces.push((at, length, to));
            to += length;
        }
    }
    let (memory, next) = (traced.memory(), AtomicUsize::new(0));
    let work = || -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        while let Some((at, length, to)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            let piece = &mut chunk[..usize::try_from(*length).map_err(io::Error::other)?];
            let copied = memory.read(*at, piece).and_then(|()| file.write_all_at(piece, *to));
            copied.inspect_err(|_| next.store(pieces.len(), Ordering::Relaxed))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let other = thread::Builder::new().spawn_scoped(scope, work)?;
        let own = work();
        own.and(other.join().unwrap_or_else(|_| Err(io::Error::other("copying its memory failed"))))
    })
}
