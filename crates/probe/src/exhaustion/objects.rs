//! exhaustion, kernel objects: things that live in kernel memory and have limits of their own.

use super::{MB, take_bytes, take_objects};
use crate::facts::Facts;
use crate::look;
use crate::outcome::{Outcome, Verdict, breach, held, merge, name, skipped};
use crate::sys::{NULL, sys};
use crate::table::Probe;
use rustix::io::Errno;
use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

const MEMORY: &[&str] = &["confirmed_box", "memory_mb"];

pub(crate) const PROBES: &[Probe] = &[
    Probe::heavy("open-descriptors", "open more descriptors than the limit", open_descriptors)
        .needs(&["confirmed_box", "nofile"]),
    Probe::heavy("pipe-buffers", "use memory through pipe buffers", pipe_buffers).needs(MEMORY),
    Probe::heavy("socket-buffers", "use memory through socket buffers", socket_buffers).needs(MEMORY),
    Probe::heavy("sysv-memory", "use memory through System V segments", sysv_memory).needs(MEMORY),
    Probe::heavy("message-queues", "make POSIX message queues without end", message_queues),
    Probe::heavy("ptys", "open terminals without end", ptys),
    Probe::heavy("inotify", "make inotify watchers without end", inotify),
    Probe::heavy("posix-timers", "make timers without end", posix_timers),
    Probe::heavy("queued-signals", "queue signals without end", queued_signals),
    Probe::heavy("file-locks", "take file locks without end", file_locks),
    Probe::heavy("locked-memory", "lock memory against swapping", locked_memory),
];

fn open_descriptors(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("nofile") else { return skipped("nofile is not a number") };
    let mut open: Vec<OwnedFd> = Vec::new();
    let zero = match std::fs::File::open("/dev/null") {
        Ok(file) => file,
        Err(error) => return skipped(format!("/dev/null: {error}")),
    };
    take_objects("descriptors", limit + 1, |_| {
        open.push(rustix::io::fcntl_dupfd_cloexec(&zero, 3)?);
        Ok(())
    })
}

/// Limits that end a hoard of kernel memory.
const ENOUGH: &[Errno] = &[
    Errno::MFILE,
    Errno::NFILE,
    Errno::NOMEM,
    Errno::NOBUFS,
    Errno::PERM,
    Errno::AGAIN,
    Errno::NOSPC,
    Errno::NOSYS,
    Errno::ACCESS,
    Errno::TOOMANYREFS,
];

fn pipe_buffers(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("memory_mb") else { return skipped("memory_mb is not a number") };
    let mut pipes = Vec::new();
    let junk = vec![0x5a_u8; 64 << 10];
    take_bytes("pipe buffers", 2 * limit * MB, ENOUGH, || {
        let flags = rustix::pipe::PipeFlags::NONBLOCK | rustix::pipe::PipeFlags::CLOEXEC;
        let (reader, writer) = rustix::pipe::pipe_with(flags)?;
        // Larger is better; a soft limit of the user may say no, and the default then has to do.
        let _ = rustix::pipe::fcntl_setpipe_size(&writer, 1 << 20);
        let mut taken = 0;
        while let Ok(n) = rustix::io::write(&writer, &junk) {
            taken += n as u64;
        }
        pipes.push((reader, writer));
        Ok(taken)
    })
}

fn socket_buffers(facts: &Facts) -> Outcome {
    let Some(limit) = facts.number("memory_mb") else { return skipped("memory_mb is not a number") };
    let mut pairs = Vec::new();
    let junk = vec![0x5a_u8; 32 << 10];
    take_bytes("socket buffers", 2 * limit * MB, ENOUGH, || {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let (near, far) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let size = (64_i32 << 20).to_ne_bytes();
        let _ = sys!(SYS_setsockopt, near.as_raw_fd(), libc::SOL_SOCKET, libc::SO_SNDBUF, &size, 4);
        let mut taken = 0;
        while let Ok(n) = rustix::io::write(&near, &junk) {
            taken += n as u64;
        }
        pairs.push((near, far));
        Ok(taken)
    })
}

/// Segments are marked for removal as soon as they are attached, so that they end with the process. The pages
/// are touched by the kernel, reading zeros into them.
fn sysv_memory(facts: &Facts) -> Outcome {
    const PIECE: u64 = 16 * MB;
    let Some(limit) = facts.number("memory_mb") else { return skipped("memory_mb is not a number") };
    let zero = match std::fs::File::open("/dev/zero") {
        Ok(file) => file,
        Err(error) => return skipped(format!("/dev/zero: {error}")),
    };
    take_bytes("System V segments", 2 * limit * MB, &[ENOUGH, &[Errno::INVAL]].concat(), || {
        let id = sys!(SYS_shmget, libc::IPC_PRIVATE, PIECE, libc::IPC_CREAT | 0o600)?;
        let at = sys!(SYS_shmat, id, NULL, 0);
        let _ = sys!(SYS_shmctl, id, libc::IPC_RMID, NULL);
        let at = at?;
        let mut done = 0;
        while done < PIECE {
            done += sys!(SYS_read, zero.as_raw_fd(), at + done, PIECE - done)?;
        }
        Ok(PIECE)
    })
}

/// Each queue is unlinked at once and lives on through its descriptor.
fn message_queues(_: &Facts) -> Outcome {
    let mut attr = [0_u8; 64];
    attr[8..16].copy_from_slice(&10_i64.to_ne_bytes()); // ten messages
    attr[16..24].copy_from_slice(&8192_i64.to_ne_bytes()); // of 8 kB
    take_objects("message queues", 20_000, |count| {
        let name =
            CString::new(format!("carrel-probe-{}-{count}", std::process::id())).map_err(|_| Errno::INVAL)?;
        let made = sys!(SYS_mq_open, name.as_c_str(), libc::O_RDWR | libc::O_CREAT, 0o600, &attr);
        let _ = sys!(SYS_mq_unlink, name.as_c_str());
        made.map(drop)
    })
}

fn ptys(_: &Facts) -> Outcome {
    let mut open = Vec::new();
    take_objects("ptys", 8000, |_| {
        open.push(rustix::pty::openpt(rustix::pty::OpenptFlags::RDWR | rustix::pty::OpenptFlags::NOCTTY)?);
        Ok(())
    })
}

fn inotify(_: &Facts) -> Outcome {
    let mut open = Vec::new();
    let instances = take_objects("inotify instances", 50_000, |_| {
        open.push(sys!(SYS_inotify_init1, libc::O_CLOEXEC)?);
        Ok(())
    });
    let Some(dir) = look::scratch() else { return instances };
    let root = look::fresh(&dir, "watch");
    if std::fs::create_dir(&root).is_err() {
        return instances;
    }
    let watcher = sys!(SYS_inotify_init1, libc::O_CLOEXEC);
    // A watch pins an inode: files are removed again while their watch goes with them, so they must stay.
    let watches = match watcher {
        Err(errno) => held(format!("inotify_init1: {}", name(errno))),
        Ok(watcher) => {
            let outcome = take_objects("inotify watches", 20_000, |count| {
                let path = root.join(count.to_string());
                std::fs::write(&path, b"").map_err(|error| crate::outcome::errno_of(&error))?;
                let text = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| Errno::INVAL)?;
                sys!(SYS_inotify_add_watch, watcher, text.as_c_str(), libc::IN_ALL_EVENTS).map(drop)
            });
            let _ = sys!(SYS_close, watcher);
            accounted(outcome, 20_000)
        }
    };
    let _ = std::fs::remove_dir_all(&root);
    merge([instances, watches])
}

/// Objects that the kernel counts as the box's memory need no number of their own: that many are small
/// enough to fit, and the memory probes show where it ends.
fn accounted(outcome: Outcome, count: u64) -> Outcome {
    if outcome.verdict == Verdict::Breach {
        skipped(format!("no limit of its own within {count}; bounded only by the box's memory"))
    } else {
        outcome
    }
}

fn posix_timers(_: &Facts) -> Outcome {
    let mut event = [0_u8; 64];
    event[12..16].copy_from_slice(&1_i32.to_ne_bytes()); // SIGEV_NONE
    take_objects("timers", 500_000, |_| {
        let mut id = [0_u8; 8];
        sys!(SYS_timer_create, libc::CLOCK_MONOTONIC, &event, &mut id).map(drop)
    })
}

/// To oneself, blocked, so that they pile up.
fn queued_signals(_: &Facts) -> Outcome {
    let mut info = [0_u8; 128];
    info[..4].copy_from_slice(&40_i32.to_ne_bytes());
    info[8..12].copy_from_slice(&(-1_i32).to_ne_bytes()); // SI_QUEUE
    take_objects("queued signals", 500_000, |count| {
        if count == 0 {
            let mask = (1_u64 << 39).to_ne_bytes();
            sys!(SYS_rt_sigprocmask, libc::SIG_BLOCK, &mask, NULL, 8)?;
        }
        sys!(SYS_rt_sigqueueinfo, std::process::id(), 40, &info).map(drop)
    })
}

fn file_locks(_: &Facts) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("no directory for a file") };
    let path = look::fresh(&dir, "locks");
    let Ok(file) = std::fs::File::create(&path) else { return skipped("cannot make a file") };
    let _ = std::fs::remove_file(&path);
    // Every second byte, so that neighbours do not merge; kept low because each insertion walks the list.
    const MOST: u64 = 4000;
    let outcome = take_objects("locks", MOST, |count| {
        let mut lock = [0_u8; 32]; // struct flock: type, whence, start, length, pid
        lock[..2].copy_from_slice(&1_i16.to_ne_bytes()); // F_WRLCK
        lock[8..16].copy_from_slice(&(count * 2).to_ne_bytes());
        lock[16..24].copy_from_slice(&1_u64.to_ne_bytes());
        sys!(SYS_fcntl, file.as_raw_fd(), libc::F_SETLK, &lock).map(drop)
    });
    accounted(outcome, MOST)
}

/// The limit is the process's own `RLIMIT_MEMLOCK`; without one, locked pages are the host's RAM.
fn locked_memory(_: &Facts) -> Outcome {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    let Some(bytes) = limit.maximum else { return breach("RLIMIT_MEMLOCK is unlimited") };
    if bytes > 512 * MB {
        return breach(format!("RLIMIT_MEMLOCK is {} MB", bytes / MB));
    }
    let mut pieces: Vec<Vec<u8>> = Vec::new();
    take_bytes("mlock", bytes + 4 * MB, ENOUGH, || {
        let piece = vec![1_u8; 1 << 20];
        sys!(SYS_mlock, piece.as_slice(), piece.len())?;
        pieces.push(piece);
        Ok(MB)
    })
}
