//! An image as it comes together: what it says of each mapping, and which pages it keeps.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::{FileExt, MetadataExt},
    slice,
    sync::{Mutex, PoisonError},
    thread,
};

use carrel_graft::format::{
    FILE_BYTES, HEADER_BYTES, HUGE_PAGE, Header, Kind, MAX_SEGMENTS, MappedFile, PAGE, SEGMENT_BYTES, Segment,
};
use rustix::{
    fs::{SealFlags, fcntl_add_seals},
    process::setpriority_process,
    thread::gettid,
};

use super::{
    Base, Facts, Helper, IN_MEMORY, Sharing, refuse,
    sleeper::{Mapping, Process},
};
use crate::trace::Traced;

/// Flags of mappings: huge pages, devices, locked, not for forks, shadow stacks.
const NOT_KEPT: [&str; 5] = ["ht", "io", "lo", "dc", "ss"];
/// Holes of pages that were never written are kept as such from this size on; every one costs copies a mapping.
const HOLE: u64 = 16 * PAGE;
/// A process can have addresses for far more than there is memory, and each page of them has to be asked for.
const MAX_ADDRESSES: u64 = 8 << 30;
/// What is read at once: it is still in a CPU's cache when it is written.
const CHUNK: usize = 128 << 10;
/// The lowest priority.
const LEAST: i32 = 19;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;

#[derive(Debug)]
pub(super) struct Taken<'a> {
    base: Option<&'a Base>,
    sharing: Sharing,
    segments: Vec<Segment>,
    files: Vec<(String, fs::Metadata)>,
    /// Copies map these ranges, which are one behind the other in the image.
    stored: Vec<(u64, u64)>,
    kept: u64,
    /// These are written into copies.
    written: Vec<(u64, u64)>,
    /// Of both.
    bytes: u64,
    /// How many those may be.
    most: u64,
    /// Of the ranges that were looked at.
    addresses: u64,
    pub(super) heap_end: Option<u64>,
    pub(super) vdso: Option<u64>,
}

impl<'a> Taken<'a> {
    pub(super) fn new(base: Option<&'a Base>, sharing: Sharing, most: u64) -> Self {
        Self {
            base,
            sharing,
            segments: Vec::new(),
            files: Vec::new(),
            stored: Vec::new(),
            kept: 0,
            written: Vec::new(),
            bytes: 0,
            most,
            addresses: 0,
            heap_end: None,
            vdso: None,
        }
    }

    pub(super) fn add(&mut self, process: &Process, mapping: &Mapping, stack: u64) -> io::Result<()> {
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
        let is_written = own.contains(&true);
        // The kernel lets nobody write to what is there for reading alone.
        let is_apart = self.sharing == Sharing::Nothing && (protection & PROT_WRITE != 0 || !is_written);
        // Of an image that it is a copy of itself.
        if mapping.name.starts_with(IN_MEMORY) && protection & PROT_EXEC == 0 {
            if is_apart && self.is_of_base(mapping) {
                self.segments.push(Segment { offset: mapping.offset, ..segment(Kind::Base) });
                self.add_written(&own, start, PAGE);
                return Ok(());
            }
            let offset = self.store(start, end);
            self.segments.push(Segment { offset, ..segment(Kind::Stored) });
            return Ok(());
        }
        if !is_written {
            if is_file {
                return self.add_file(process, mapping, segment(Kind::File));
            }
            self.segments.push(segment(Kind::Zero));
            return Ok(());
        }
        if protection & PROT_EXEC != 0 {
            // A debugger's breakpoint, or whoever has written it to disk, leaves a page that is like the file's.
            if is_file && process.is_like_file(mapping, &own)? {
                return self.add_file(process, mapping, segment(Kind::File));
            }
            return Err(refuse("it has code that it has written itself"));
        }
        if is_apart {
            if is_file {
                self.add_file(process, mapping, segment(Kind::File))?;
            } else {
                let is_huge = is_mostly_written(&own, start) && !mapping.has("nh");
                self.segments.push(segment(if is_huge { Kind::Huge } else { Kind::Zero }));
            }
            self.add_written(&own, start, if is_file { PAGE } else { HOLE });
            return Ok(());
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

    fn is_of_base(&self, mapping: &Mapping) -> bool {
        self.base.is_some_and(|base| (base.device.as_str(), base.inode) == (&mapping.file.0, mapping.file.1))
    }

    /// Memory of no file, without its larger holes.
    fn add_memory(&mut self, own: &[bool], whole: Segment) {
        let mut at = whole.start;
        for (start, end) in runs(own, whole.start, HOLE) {
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

    fn add_written(&mut self, own: &[bool], start: u64, hole: u64) {
        for (start, end) in runs(own, start, hole) {
            self.written.push((start, end));
            self.bytes = self.bytes.saturating_add(end.saturating_sub(start));
        }
    }

    /// Gives back its place behind the tables.
    fn store(&mut self, start: u64, end: u64) -> u64 {
        let bytes = end.saturating_sub(start);
        let at = self.kept;
        self.kept = at.saturating_add(bytes);
        self.stored.push((start, end));
        self.bytes = self.bytes.saturating_add(bytes);
        at
    }

    fn add_file(&mut self, process: &Process, mapping: &Mapping, segment: Segment) -> io::Result<()> {
        let known = self.files.iter().position(|(path, _)| *path == mapping.name);
        let index = match known {
            Some(index) => index,
            None => {
                let status = process.seen(&mapping.name)?;
                if status.ino() != mapping.file.1 {
                    return Err(refuse(format!("{} is another file by now", mapping.name)));
                }
                self.files.push((mapping.name.clone(), status));
                self.files.len() - 1
            }
        };
        self.segments.push(Segment { offset: mapping.offset, file: index as u64, ..segment });
        Ok(())
    }

    pub(super) fn write(mut self, mut header: Header, traced: &Traced, file: &File) -> io::Result<Facts> {
        let is_sound = self.stored.iter().chain(&self.written).all(|(start, end)| start < end);
        if !is_sound || self.bytes > self.most || self.segments.len() as u64 > MAX_SEGMENTS {
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
        let mut starts = Vec::new();
        let mut at = header.length;
        for (start, end) in &self.stored {
            starts.push((*start, at));
            at += end - start;
        }
        starts.sort_unstable();
        copy(&self.stored, traced, Helper::Modest, |from, bytes| {
            // Pieces are of one range each.
            let (start, at) = starts[starts.partition_point(|(start, _)| *start <= from) - 1];
            file.write_all_at(bytes, at + (from - start))
        })?;
        // From now on nobody can change it.
        fcntl_add_seals(file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
        let files = self.files.into_iter().map(|(path, _)| path).collect();
        Ok(Facts { bytes: header.length + self.bytes, files, written: self.written })
    }
}

/// Whether huge pages would be of use, and hold little that was never written.
fn is_mostly_written(own: &[bool], start: u64) -> bool {
    let skip = (start.next_multiple_of(HUGE_PAGE) - start) / PAGE;
    let within = own.get(usize::try_from(skip).unwrap_or(usize::MAX)..).unwrap_or_default();
    let pages = usize::try_from(HUGE_PAGE / PAGE).unwrap_or(usize::MAX);
    let all = within.len() / pages * pages;
    let written = within[..all].iter().filter(|own| **own).count();
    all > 0 && written * 4 >= all * 3
}

/// Ranges of pages that are the process's own, from `start` on; holes that are smaller than this belong to them.
fn runs(own: &[bool], start: u64, hole: u64) -> Vec<(u64, u64)> {
    let page = |index: usize| start + index as u64 * PAGE;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for index in (0..own.len()).filter(|index| own[*index]) {
        match runs.last_mut() {
            Some(run) if page(index) - run.1 < hole => run.1 = page(index + 1),
            _ => runs.push((page(index), page(index + 1))),
        }
    }
    runs
}

type Pieces<'a> = slice::Iter<'a, (u64, u64)>;

/// Hands out ranges of a process's memory in pieces, each with its address. Two threads do it, and each writes what it has just read.
pub(super) fn copy(
    ranges: &[(u64, u64)],
    traced: &Traced,
    helper: Helper,
    write: impl Fn(u64, &[u8]) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let pieces: Vec<(u64, u64)> = ranges
        .iter()
        .flat_map(|(start, end)| {
            (*start..*end).step_by(CHUNK).map(move |at| (at, (end - at).min(CHUNK as u64)))
        })
        .collect();
    let (memory, left) = (traced.memory(), Mutex::new(pieces.iter()));
    let work = |next: fn(&mut Pieces<'_>) -> Option<(u64, u64)>| -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        loop {
            let piece = next(&mut left.lock().unwrap_or_else(PoisonError::into_inner));
            let Some((at, length)) = piece else { return Ok(()) };
            let piece = &mut chunk[..usize::try_from(length).map_err(io::Error::other)?];
            memory.read(at, piece).and_then(|()| write(at, piece))?;
        }
    };
    let (first, last) =
        (|left: &mut Pieces<'_>| left.next().copied(), |left: &mut Pieces<'_>| left.next_back().copied());
    if pieces.len() < 2 {
        return work(first);
    }
    // From both ends, so that they are not in one huge page, which each of them would want to make.
    thread::scope(|scope| {
        let other = thread::Builder::new().spawn_scoped(scope, || {
            if helper == Helper::Modest {
                let _ = setpriority_process(Some(gettid()), LEAST);
            }
            work(last)
        })?;
        let own = work(first);
        own.and(other.join().unwrap_or_else(|_| Err(io::Error::other("copying its memory failed"))))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_for_what_was_written() {
        let pages = (HUGE_PAGE / PAGE) as usize;
        let own = |written: usize, of: usize| {
            let mut own = vec![true; written];
            own.resize(of, false);
            own
        };
        assert!(is_mostly_written(&own(pages, pages), HUGE_PAGE));
        assert!(!is_mostly_written(&own(pages, pages), HUGE_PAGE + PAGE), "there is no room for one");
        assert!(is_mostly_written(&own(pages + 1, pages + 1), HUGE_PAGE - PAGE));
        assert!(is_mostly_written(&own(3 * pages, 4 * pages), 0));
        assert!(!is_mostly_written(&own(3 * pages - 1, 4 * pages), 0), "it would become larger");
        assert!(!is_mostly_written(&[], 0));
    }

    #[test]
    fn small_holes_belong_to_what_is_around_them() {
        let own = |text: &str| text.bytes().map(|byte| byte == b'x').collect::<Vec<bool>>();
        let at = |page: u64| 0x10_000 + page * PAGE;
        let runs = |text: &str, hole: u64| runs(&own(text), at(0), hole * PAGE);
        assert_eq!(runs("....", 4), []);
        assert_eq!(runs("xx..x", 4), [(at(0), at(5))]);
        assert_eq!(runs("xx....x.", 4), [(at(0), at(2)), (at(6), at(7))]);
        assert_eq!(runs(".x.x", 1), [(at(1), at(2)), (at(3), at(4))]);
    }
}
