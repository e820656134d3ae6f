//! The process that an image is taken of, as `/proc` shows it.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{FileExt, MetadataExt},
    },
};

use carrel_graft::format::{AUXV, Header, MAGIC, PAGE, Registers};
use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};

use super::refuse;
use crate::{
    image::taken::Taken,
    trace::{GeneralRegisters, Traced},
};

/// Of what the kernel says of its mappings.
const MAX_TEXT: u64 = 16 << 20;
const SIGINT_BIT: u64 = 1 << 1;
/// Floating point as every program starts with it.
const FLOAT_CONTROL: (u16, u32) = (0x37f, 0x1f80);
/// What was rounded or overflowed so far; nobody asks.
const FLOAT_RAISED: u32 = 0x3f;
/// Where the C library has a thread's id, before the head of its list of locks.
const TID_BEFORE_LIST: u64 = 16;
const PROT: [(u8, u64); 3] = [(b'r', 1), (b'w', 2), (b'x', 4)];
/// Flags of a page in `/proc/PID/pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;

/// A process whose image is taken, as `/proc` shows it.
pub(super) struct Process {
    pid: i32,
    memory: File,
    pagemap: File,
    /// Of its own view of files.
    root: OwnedFd,
}

/// A mapping as `/proc/PID/smaps` tells it.
#[derive(Debug, Clone)]
pub(super) struct Mapping {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) protection: u64,
    pub(super) shared: bool,
    pub(super) offset: u64,
    /// The device as the kernel writes it, and the inode.
    pub(super) file: (String, u64),
    pub(super) name: String,
    /// Two letters each.
    flags: Vec<String>,
}

impl Mapping {
    pub(super) fn has(&self, flag: &str) -> bool {
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
        let (flags, offset, device, inode) = (field(), field(), field(), field());
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
            file: (device.to_owned(), inode.parse().ok()?),
            name: rest.trim_start().to_owned(),
            flags: Vec::new(),
        })
    }
}

impl Process {
    pub(super) fn open(pid: i32) -> io::Result<Self> {
        Ok(Self {
            pid,
            memory: File::open(format!("/proc/{pid}/mem"))?,
            pagemap: File::open(format!("/proc/{pid}/pagemap"))?,
            root: open(
                format!("/proc/{pid}/root"),
                OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
                Mode::empty(),
            )?,
        })
    }

    fn text(&self, name: &str) -> io::Result<String> {
        fs::read_to_string(format!("/proc/{}/{name}", self.pid))
    }

    pub(super) fn mappings(&self) -> io::Result<Vec<Mapping>> {
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

    pub(super) fn refuse_what_is_not_kept(&self, traced: &Traced) -> io::Result<()> {
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
    pub(super) fn own_pages(&self, start: u64, end: u64) -> io::Result<Vec<bool>> {
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

    /// Whether the pages of a file's mapping that are the process's own say what the file says.
    pub(super) fn is_like_file(&self, mapping: &Mapping, own: &[bool]) -> io::Result<bool> {
        let shown = self.shown(&mapping.name)?;
        let meta = shown.metadata()?;
        if !meta.is_file() || meta.ino() != mapping.file.1 {
            return Ok(false);
        }
        let file = File::open(format!("/proc/self/fd/{}", shown.as_raw_fd()))?;
        let page = usize::try_from(PAGE).map_err(io::Error::other)?;
        let (mut here, mut there) = (vec![0; page], vec![0; page]);
        for index in (0..own.len()).filter(|index| own[*index]) {
            let at = index as u64 * PAGE;
            self.memory.read_exact_at(&mut here, mapping.start + at)?;
            there.fill(0);
            let mut done = 0;
            while let count @ 1.. = file.read_at(&mut there[done..], mapping.offset + at + done as u64)? {
                done += count;
            }
            if here != there {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn word(&self, at: u64) -> io::Result<u32> {
        let mut word = [0; 4];
        self.memory.read_exact_at(&mut word, at)?;
        Ok(u32::from_ne_bytes(word))
    }

    /// A file as the process's own box shows it.
    pub(super) fn seen(&self, path: &str) -> io::Result<fs::Metadata> {
        self.shown(path)?.metadata()
    }

    /// Only to be asked what it is: user code names it, and can have put a link or a pipe there.
    fn shown(&self, path: &str) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_SYMLINKS;
        let path = path.trim_start_matches('/');
        Ok(openat2(&self.root, path, flags, Mode::empty(), resolve)?.into())
    }

    /// The file itself, whatever has its name.
    pub(super) fn mapped(&self, mapping: &Mapping) -> io::Result<File> {
        File::open(format!("/proc/{}/map_files/{:x}-{:x}", self.pid, mapping.start, mapping.end))
    }

    /// Whose it is.
    pub(super) fn user(&self) -> io::Result<u32> {
        Ok(fs::metadata(format!("/proc/{}", self.pid))?.uid())
    }

    pub(super) fn header(
        &self,
        traced: &Traced,
        registers: &GeneralRegisters,
        taken: &Taken<'_>,
    ) -> io::Result<Header> {
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
