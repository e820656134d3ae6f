//! exhaustion, storage: disk, memory-backed files, inodes.
//!
//! Files are unlinked while open wherever that is not itself the attack, so that a kill leaves nothing behind.

use super::{BUDGET, MB, killed_is_held, take_bytes, take_objects};
use crate::facts::Facts;
use crate::isolate::isolate;
use crate::look;
use crate::outcome::{Outcome, breach, errno_of, held, merge, name, skipped};
use crate::table::Probe;
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

const DISK: &[&str] = &["confirmed_box", "disk_mb"];
const MEMORY: &[&str] = &["confirmed_box", "memory_mb"];

pub(crate) const PROBES: &[Probe] = &[
    Probe::heavy("disk-one-file", "fill the disk with one file", |f| disk(f, Way::Visible)).needs(DISK),
    Probe::heavy("disk-unlinked-file", "fill the disk with a file that has no name", |f| {
        disk(f, Way::Unlinked)
    })
    .needs(DISK),
    Probe::heavy("disk-many-files", "fill the disk with many files", |f| disk(f, Way::Many)).needs(DISK),
    Probe::heavy("disk-fallocate", "reserve the disk without writing", disk_fallocate).needs(DISK),
    Probe::heavy("disk-home", "fill the disk from the home directory", |f| disk_elsewhere(f, "/home/user"))
        .needs(DISK),
    Probe::heavy("tmpfs-memory", "use memory through files in /tmp and /dev/shm", tmpfs_memory).needs(MEMORY),
    Probe::heavy("memfd-memory", "use memory through files without a name", memfd_memory).needs(MEMORY),
    Probe::heavy("inodes", "create very many empty files", inodes).needs(&["confirmed_box", "max_inodes"]),
    Probe::heavy("sparse-file", "make a sparse file of a terabyte", sparse_file),
];

const FULL: &[Errno] = &[Errno::NOSPC, Errno::DQUOT, Errno::FBIG, Errno::NOMEM];

#[derive(Clone, Copy, PartialEq)]
enum Way {
    Visible,
    Unlinked,
    Many,
}

/// One MB that neither compresses to nothing nor is the same twice.
fn block(seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(1 << 20);
    while bytes.len() < 1 << 20 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_ne_bytes());
    }
    bytes
}

fn io(error: &std::io::Error) -> Errno {
    errno_of(error)
}

fn disk(facts: &Facts, way: Way) -> Outcome {
    fill(facts, "/workspace", way)
}

fn fill(facts: &Facts, place: &str, way: Way) -> Outcome {
    let Some(limit) = facts.number("disk_mb") else { return skipped("disk_mb is not a number") };
    let dir = look::fresh(Path::new(place), "fill");
    if let Err(error) = fs::create_dir(&dir) {
        return skipped(format!("{place}: {error}"));
    }
    let one = dir.join("one");
    let mut file: Option<File> = None;
    let mut count = 0_u64;
    let outcome = take_bytes(place, 2 * limit * MB, FULL, || {
        if file.is_none() {
            let made =
                OpenOptions::new().write(true).create_new(true).open(&one).map_err(|error| io(&error))?;
            if way == Way::Unlinked {
                let _ = fs::remove_file(&one);
            }
            file = Some(made);
        }
        count += 1;
        let bytes = block(count);
        match (way, &mut file) {
            (Way::Many, _) => fs::write(dir.join(count.to_string()), &bytes).map_err(|error| io(&error))?,
            (_, Some(file)) => file.write_all(&bytes).map_err(|error| io(&error))?,
            (_, None) => return Err(Errno::IO),
        }
        Ok(MB)
    });
    let _ = fs::remove_dir_all(&dir);
    outcome
}

/// Only where the home directory is on a disk of its own or shares the workspace's; tmpfs is another probe.
fn disk_elsewhere(facts: &Facts, place: &str) -> Outcome {
    if on_tmpfs(place) { skipped(format!("{place} is memory-backed")) } else { fill(facts, place, Way::Many) }
}

fn disk_fallocate(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("disk_mb") else { return skipped("disk_mb is not a number") };
    let path = look::fresh(Path::new("/workspace"), "fallocate");
    let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
        Ok(file) => file,
        Err(error) => return skipped(format!("/workspace: {error}")),
    };
    let _ = fs::remove_file(&path);
    let mut at = 0;
    let outcome =
        take_bytes("fallocate", 2 * limit * MB, &[FULL, &[Errno::PERM, Errno::NOSYS]].concat(), || {
            rustix::fs::fallocate(&file, FallocateFlags::empty(), at, 16 * MB)?;
            at += 16 * MB;
            Ok(16 * MB)
        });
    // Some file systems cannot, which says nothing about the limit.
    drop(file);
    outcome
}

fn on_tmpfs(place: &str) -> bool {
    const TMPFS_MAGIC: u64 = 0x0102_1994;
    const RAMFS_MAGIC: u64 = 0x8584_58f6;
    rustix::fs::statfs(place).is_ok_and(|fs| {
        let kind = u64::try_from(fs.f_type).unwrap_or_default();
        kind == TMPFS_MAGIC || kind == RAMFS_MAGIC
    })
}

fn tmpfs_memory(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("memory_mb") else { return skipped("memory_mb is not a number") };
    // Together, because each alone may stay below what both take.
    let mut files = Vec::new();
    let mut places = Vec::new();
    for place in ["/tmp", "/dev/shm", "/home/user", "/run", "/var/tmp"] {
        let path = look::fresh(Path::new(place), "tmpfs");
        if on_tmpfs(place)
            && let Ok(file) = OpenOptions::new().write(true).create_new(true).open(&path)
        {
            let _ = fs::remove_file(&path);
            files.push(file);
            places.push(place);
        }
    }
    if files.is_empty() {
        return skipped("no writable memory-backed directory");
    }
    let what = places.join("+");
    let mut count = 0;
    let mut full = 0;
    take_bytes(&what, 2 * limit * MB, FULL, || {
        count += 1;
        loop {
            let Some(file) = files.get_mut(full) else { return Err(Errno::NOSPC) };
            match file.write_all(&block(count)).map_err(|error| io(&error)) {
                Ok(()) => return Ok(MB),
                // This one is full: on to the next.
                Err(errno) if FULL.contains(&errno) => full += 1,
                Err(errno) => return Err(errno),
            }
        }
    })
}

fn memfd_memory(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("memory_mb") else { return skipped("memory_mb is not a number") };
    let file = match rustix::fs::memfd_create("carrel-probe", rustix::fs::MemfdFlags::CLOEXEC) {
        Ok(fd) => fd,
        Err(errno) => return held(format!("memfd_create: {}", name(errno))),
    };
    let mut file = File::from(file);
    let mut count = 0;
    take_bytes("memfd", 2 * limit * MB, FULL, || {
        count += 1;
        file.write_all(&block(count)).map_err(|error| io(&error))?;
        Ok(MB)
    })
}

/// Most files ever tried, whatever the bound: enough to fill a small file system's inode table.
const INODES_TRIED: u64 = 400_000;

fn inodes(facts: &Facts) -> Outcome {
    let Some(bound) = facts.number("max_inodes") else { return skipped("max_inodes is not a number") };
    if bound >= INODES_TRIED {
        return skipped(format!("a bound of {bound} is more than the {INODES_TRIED} that are tried"));
    }
    let dir = look::fresh(Path::new("/workspace"), "inodes");
    if let Err(error) = fs::create_dir(&dir) {
        return skipped(format!("/workspace: {error}"));
    }
    let most = (bound + bound / 10 + 100).min(INODES_TRIED);
    let outcome = take_objects("files", most, |count| {
        let sub = dir.join((count / 1000).to_string());
        if count % 1000 == 0 {
            fs::create_dir(&sub).map_err(|error| io(&error))?;
        }
        File::create(sub.join(count.to_string())).map(drop).map_err(|error| io(&error))
    });
    // The host's limit for the whole probe leaves time for this.
    let start = Instant::now();
    let _ = isolate(Duration::from_secs(9), || {
        let _ = fs::remove_dir_all(&dir);
        held("")
    });
    let left =
        if dir.exists() { format!("; not all removed after {:?}", start.elapsed()) } else { String::new() };
    Outcome { detail: format!("{}{left}", outcome.detail), ..outcome }
}

/// A sparse file may be of any size as long as it takes no space: its holes are not the attack.
fn sparse_file(_: &Facts) -> Outcome {
    merge(["/workspace", "/tmp"].map(|place| {
        let ended = isolate(BUDGET, || {
            let path = look::fresh(Path::new(place), "sparse");
            let made = OpenOptions::new().write(true).create_new(true).open(&path);
            let mut file = match made {
                Ok(file) => file,
                Err(error) => return skipped(format!("{place}: {error}")),
            };
            let _ = fs::remove_file(&path);
            let grown = file.set_len(1 << 40).and_then(|()| {
                file.seek(SeekFrom::Start((1 << 40) - 1))?;
                file.write_all(b"x")
            });
            match (grown, file.metadata().map(|meta| meta.blocks() * 512)) {
                (Err(error), _) => held(format!("{place}: {}", name(io(&error)))),
                (Ok(()), Ok(space)) if space <= MB => {
                    held(format!("{place}: 1 TB sparse takes {space} bytes"))
                }
                (Ok(()), space) => breach(format!("{place}: 1 TB, takes {space:?}")),
            }
        });
        killed_is_held(place, ended)
    }))
}
