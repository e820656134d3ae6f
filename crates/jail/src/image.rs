//! Takes the image of a process that sleeps, so that copies of it can be made by grafting. What an image is and what becomes
//! of it is in [`carrel_graft`].
//!
//! Pages that the process has written are stored once, in a sealed file of memory that every copy maps privately: what no copy
//! changes is there once for all of them. Pages of files are not stored; copies map the same files.
//!
//! For a few copies that are made at once nothing is stored ([`Original`]): what the process has written is copied from it into each of
//! them, in huge pages where there is much of it. That takes a tenth of the time in which a file in memory gets its pages.
//!
//! Whatever an image could not say is a reason not to take one: threads, handlers of other signals than those the driver sets
//! anew, files that are gone, memory shared with somebody.

mod sleeper;
mod taken;

use std::{
    fs::{self, File},
    io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{MemfdFlags, SealFlags, fcntl_get_seals, memfd_create},
    process::{Pid, PidfdFlags, geteuid, pidfd_open},
};

use self::{
    sleeper::{Mapping, Process},
    taken::Taken,
};
use crate::{
    trace::{Traced, write_memory},
    tree,
};

/// More than this is no interpreter that has just started.
pub const MAX_BYTES: u64 = 256 << 20;
/// What python sleeps in, depending on its version: `select`, `nanosleep`, `clock_nanosleep`, `pselect6`.
const SLEEPS: [u64; 4] = [23, 35, 230, 270];
const READ: u64 = 0;
/// What mappings of files in memory are called.
const IN_MEMORY: &str = "/memfd:";

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

/// A process that waits for something to read, held where it is for as long as this is there: copies of it are made meanwhile. Bound
/// to its thread.
#[derive(Debug)]
pub struct Original {
    traced: Traced,
    /// The tables, and what copies map; the image that the process is a copy of itself, whose pages they map as well.
    files: Vec<File>,
    /// What is written into each copy.
    written: Vec<(u64, u64)>,
}

/// What copies share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// All that none of them changes: it is kept in memory once.
    Everything,
    /// What the process shares itself.
    Nothing,
}

impl Original {
    /// Anybody's code may have run in the process, and its number may be another's by now; its own memory may be of so many bytes.
    /// `WouldBlock`: it does not wait yet.
    pub fn hold(pid: i32, start_time: u64, most: u64, sharing: Sharing) -> io::Result<Self> {
        let traced = Traced::stop(pid)?;
        // Held as it is now, it cannot be another any more.
        if tree::start_time(pid) != Some(start_time) {
            return Err(refuse("it has ended"));
        }
        let (file, base, facts) = take_in(&traced, &[READ], most, sharing)?;
        let base = base.map(|base| open_again(&base.file)).transpose()?;
        Ok(Self { files: std::iter::once(file).chain(base).collect(), written: facts.written, traced })
    }

    /// In the order in which a graft has them. They can only be read.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// Writes what a copy shares with nobody into one that has laid out its memory and waits.
    pub fn fill(&self, copy: i32, start_time: u64) -> io::Result<()> {
        let ended = || refuse("the copy has ended");
        let pid = Pid::from_raw(copy).ok_or_else(ended)?;
        let end = pidfd_open(pid, PidfdFlags::empty())?;
        if tree::start_time(copy) != Some(start_time) {
            return Err(ended());
        }
        taken::copy(&self.written, &self.traced, Helper::Equal, |at, bytes| {
            // Its number may be another's as soon as it has ended.
            match poll(&mut [PollFd::new(&end, PollFlags::IN)], Some(&Timespec::default()))? {
                0 => write_memory(copy, at, bytes),
                _ => Err(ended()),
            }
        })
    }
}

/// Whether the second thread that copies makes way for whoever has something else to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Helper {
    Equal,
    Modest,
}

/// For reading alone.
fn open_again(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[derive(Debug)]
struct Base {
    file: File,
    device: String,
    inode: u64,
}

impl Base {
    /// If there is one, and it can be had: only root can open what another process has mapped. It was made by us, and nobody can
    /// change it any more.
    fn among(process: &Process, mappings: &[Mapping]) -> Option<Self> {
        let mapping = mappings.iter().find(|mapping| mapping.name.starts_with(IN_MEMORY))?;
        let (device, inode) = mapping.file.clone();
        let file = process.mapped(mapping).ok()?;
        let (meta, own) = (file.metadata().ok()?, geteuid().as_raw());
        if meta.ino() != inode || meta.uid() != own || process.user().ok()? == own {
            return None;
        }
        let seals = fcntl_get_seals(&file).ok()?;
        seals.contains(SealFlags::WRITE | SealFlags::SHRINK).then_some(Self { file, device, inode })
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
    let (file, _, facts) = take_in(&Traced::stop(pid)?, &SLEEPS, MAX_BYTES, Sharing::Everything)?;
    Ok(Image { file: file.into(), bytes: facts.bytes, files: facts.files })
}

/// What was taken.
struct Facts {
    bytes: u64,
    /// Those that copies map.
    files: Vec<String>,
    written: Vec<(u64, u64)>,
}

/// The image's own file can only be read.
fn take_in(
    traced: &Traced,
    calls: &[u64],
    most: u64,
    sharing: Sharing,
) -> io::Result<(File, Option<Base>, Facts)> {
    let process = Process::open(traced.pid())?;
    let registers = traced.registers()?;
    if !calls.contains(&registers.orig_rax) {
        return Err(io::Error::new(io::ErrorKind::WouldBlock, "it does not sleep, or wait"));
    }
    process.refuse_what_is_not_kept(traced)?;
    let mappings = process.mappings()?;
    let base = if sharing == Sharing::Nothing { Base::among(&process, &mappings) } else { None };
    let mut taken = Taken::new(base.as_ref(), sharing, most);
    for mapping in &mappings {
        taken.add(&process, mapping, registers.rsp)?;
    }
    let header = process.header(traced, &registers, &taken)?;
    let file = memfd_create("python", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?.into();
    let facts = taken.write(header, traced, &file)?;
    Ok((open_again(&file)?, base, facts))
}
