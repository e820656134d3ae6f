//! A process of user code as the agent holds it: its runner, its streams, what it is for.

use std::{fs, io, os::fd::OwnedFd};

use carrel_jail::tree::{self, Stat};
use carrel_proto::{frame::MAX_DATA, id::SessionName};
use rustix::{
    fs::{Mode, OFlags, fcntl_setfl, open},
    io::{Errno, read, write},
    pipe::{PipeFlags, fcntl_setpipe_size, pipe_with},
    pty::{OpenptFlags, openpt, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use crate::session::Runner;

/// A pipe's size: what one read takes at most, so that a fast writer is not woken for every page.
const PIPE: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    Interpreter,
    /// The number of its exec.
    Exec(u64),
}

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) session: SessionName,
    pub(crate) runner: Runner,
    pub(crate) role: Role,
    pub(crate) stdout: Option<OwnedFd>,
    pub(crate) stderr: Option<OwnedFd>,
    pub(crate) stdin: Option<Input>,
    pub(crate) terminal: bool,
    /// Not read from at present, because the caller is behind.
    pub(crate) paused: bool,
    /// The process itself has ended; descendants may hold its streams.
    pub(crate) ended: bool,
    /// Its runner has started its program anew, see [`crate::sleep`].
    pub(crate) renewed: bool,
    /// Something besides it may run below its runner: there was when its last call ended, or nobody has looked.
    pub(crate) left: bool,
}

/// What is still to be fed to a process.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) fd: OwnedFd,
    queue: Vec<u8>,
    pub(crate) closing: bool,
}

/// Input held for a process that does not read: beyond it the caller has to wait.
const MAX_INPUT: usize = 1 << 20;

impl Input {
    fn new(fd: OwnedFd) -> Self {
        Self { fd, queue: Vec::new(), closing: false }
    }

    pub(crate) fn load(fd: OwnedFd, queue: Vec<u8>, closing: bool) -> Self {
        Self { fd, queue, closing }
    }

    pub(crate) fn queued(&self) -> &[u8] {
        &self.queue
    }

    /// Takes back what the process has not read of its pipe.
    pub(crate) fn unread(&mut self, mut bytes: Vec<u8>) {
        bytes.append(&mut self.queue);
        self.queue = bytes;
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.queue.extend_from_slice(bytes);
    }

    pub(crate) fn is_full(&self) -> bool {
        self.queue.len() > MAX_INPUT
    }

    /// Writes what fits. `Ok(true)`: all is written. An error: nobody reads any more.
    pub(crate) fn flush(&mut self) -> Result<bool, Errno> {
        let mut done = 0;
        let result = loop {
            if done == self.queue.len() {
                break Ok(true);
            }
            match write(&self.fd, &self.queue[done..]) {
                Ok(count) => done += count,
                Err(Errno::AGAIN) => break Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => break Err(error),
            }
        };
        self.queue.drain(..done);
        result
    }
}

/// Both ends of a process's streams: ours without blocking, theirs as programs expect.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) ours: Ours,
    /// None: `/dev/null`, which the process's own session has.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

#[derive(Debug)]
pub(crate) struct Ours {
    pub(crate) stdin: Option<Input>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: Option<OwnedFd>,
}

pub(crate) fn unblocked(fd: &OwnedFd) -> io::Result<()> {
    Ok(fcntl_setfl(fd, OFlags::NONBLOCK)?)
}

pub(crate) fn output_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
    unblocked(&ours)?;
    // Refused where the user's pipe memory is used up: then the default size does.
    let _ = fcntl_setpipe_size(&ours, PIPE);
    Ok((ours, theirs))
}

/// A pipe towards the process.
pub(crate) fn input_pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
    unblocked(&ours)?;
    Ok((theirs, ours))
}

/// Gives a stream to the box's user: `/dev/stdout` and `/proc/self/fd/1` are opened anew by name, as any file is.
pub(crate) fn give(fd: &OwnedFd, owner: (u32, u32)) {
    let (uid, gid) = (rustix::fs::Uid::from_raw(owner.0), rustix::fs::Gid::from_raw(owner.1));
    // With one id for agent and user code it is theirs already.
    let _ = rustix::fs::fchown(fd, Some(uid), Some(gid));
}

impl Streams {
    pub(crate) fn pipes(with_stdin: bool, owner: (u32, u32)) -> io::Result<Self> {
        let (out, stdout) = output_pipe()?;
        let (err, stderr) = output_pipe()?;
        let (stdin, input) = if with_stdin {
            let (theirs, ours) = input_pipe()?;
            give(&theirs, owner);
            (Some(theirs), Some(Input::new(ours)))
        } else {
            (None, None)
        };
        for fd in [&stdout, &stderr] {
            give(fd, owner);
        }
        Ok(Self { ours: Ours { stdin: input, stdout: out, stderr: Some(err) }, stdin, stdout, stderr })
    }

    pub(crate) fn terminal(rows: u16, cols: u16, owner: (u32, u32)) -> io::Result<Self> {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        unlockpt(&master)?;
        let name = rustix::pty::ptsname(&master, Vec::new())?;
        let slave = open(name.as_c_str(), OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())?;
        give(&slave, owner);
        resize(&master, rows, cols)?;
        unblocked(&master)?;
        let input = Input::new(master.try_clone()?);
        Ok(Self {
            ours: Ours { stdin: Some(input), stdout: master, stderr: None },
            stdin: Some(slave.try_clone()?),
            stdout: slave.try_clone()?,
            stderr: slave,
        })
    }
}

pub(crate) fn resize(master: &OwnedFd, rows: u16, cols: u16) -> io::Result<()> {
    Ok(tcsetwinsize(master, Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })?)
}

/// One read of a stream.
#[derive(Debug)]
pub(crate) enum Piece {
    Bytes(Vec<u8>),
    Nothing,
    End,
}

pub(crate) fn take(fd: &OwnedFd, scratch: &mut Vec<u8>, most: usize) -> Piece {
    scratch.resize(MAX_DATA, 0);
    let most = most.min(scratch.len());
    match read(fd, &mut scratch[..most]) {
        Ok(0) => Piece::End,
        Ok(count) => Piece::Bytes(scratch[..count].to_vec()),
        Err(Errno::AGAIN | Errno::INTR) => Piece::Nothing,
        // A terminal whose last user is gone says so with EIO.
        Err(_) => Piece::End,
    }
}

/// How much of a stream is there now.
pub(crate) fn available(fd: &OwnedFd) -> usize {
    rustix::io::ioctl_fionread(fd).map_or(0, |count| usize::try_from(count).unwrap_or(usize::MAX))
}

/// CPU time and highest memory of one process, for hosts whose cgroups do not say; and the processes below a runner.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) cpu_us: u64,
    pub(crate) peak_memory: u64,
}

/// Not merely waiting for its parent to take note of its end.
pub(crate) fn is_running(pid: i32) -> bool {
    Stat::of(pid).is_some_and(|stat| !stat.zombie)
}

/// The process that a runner has started: the first of its children for as long as it lives.
pub(crate) fn main_of(runner: i32) -> Option<i32> {
    tree::children(runner).first().copied()
}

/// What runs below a runner besides its own process and that one's spares; and that process's use.
pub(crate) fn below(runner: &Runner, spares: &[i32], with_usage: bool) -> (u32, Usage) {
    let direct = tree::children(runner.child.pid);
    let Some(main) = runner.heir.or(direct.first().copied()) else { return (0, Usage::default()) };
    let is_other = |pid: &i32| *pid != main && !spares.contains(pid) && is_running(*pid);
    let others = direct.into_iter().chain(tree::children(main)).filter(is_other).count();
    let usage = if with_usage { usage(main) } else { None };
    (u32::try_from(others).unwrap_or(u32::MAX), usage.unwrap_or_default())
}

/// Of every kernel that we run on.
const PAGE: u64 = 4096;

/// Memory now and CPU time so far of all of these.
pub(crate) fn sum(pids: &[i32]) -> (u64, u64) {
    // The second number, in pages: what is in memory now.
    let resident = |pid: &i32| -> Option<u64> {
        let text = fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
        text.split(' ').nth(1)?.parse().ok()
    };
    let pages: u64 = pids.iter().filter_map(resident).sum();
    let ticks: u64 = pids.iter().filter_map(|pid| Some(Stat::of(*pid)?.cpu_ticks)).sum();
    (pages * PAGE, ticks * 10_000)
}

fn usage(pid: i32) -> Option<Usage> {
    let ticks = Stat::of(pid)?.cpu_ticks;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kilobytes: u64 = peak.trim().trim_end_matches(" kB").trim().parse().ok()?;
    Some(Usage { cpu_us: ticks * 10_000, peak_memory: kilobytes * 1024 })
}
