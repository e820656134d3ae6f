//! The init of a session: pid 1 of its pid namespace, the parent of all its runners, and the agent's hand in there.
//!
//! The agent asks, one thing at a time, and waits for the answer: start a runner, end what is below one, interrupt one. It
//! could do most of that itself while it has rights over the session's user namespace; a session that was written to disk
//! comes back in another one, in which only its own init has them. And only what descends from the init can be written.
//!
//! Nothing in the session can stop, kill or trace it: the kernel shields pid 1 from its own namespace, and it is closed to
//! inspection. It ends with the agent, whose end of the line closes then, and the session with it.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::Command,
};

use carrel_jail::{
    caps,
    confine::Confinement,
    session::{self, Child},
    sys::{self, Forked, SingleThread},
    tree, userns,
    work::{receive_along, send_along},
};
use carrel_proto::guest::Places;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, read},
    process::{
        PidfdFlags, Signal, getpid, kill_process, kill_process_group, pidfd_open, pidfd_send_signal, setsid,
    },
};
use serde::{Deserialize, Serialize};

use crate::runner::{self, Launch};

/// Arguments and variables of one command come in one frame, which is shorter.
const MAX_ORDER: usize = 64 << 20;

/// What dies brings its children here: so often at most they are ended in turn.
const PASSES: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// With the descriptors of the process beside it.
    Start(Start),
    /// Ends everything below a runner.
    KillBelow(i32),
    /// Ends what runners have left that were killed.
    KillOrphans,
    /// A signal for processes, or for their groups.
    Signal { pids: Vec<i32>, signal: i32, group: bool },
    /// Lets everything go on that was stopped while it was written to disk.
    GoOn,
    /// Who is there: the init itself and its runners.
    Roll,
    /// Starts its own program anew, from the session's own mounts: what is written to disk must not hold on to others.
    Renew,
}

#[derive(Debug, Serialize, Deserialize)]
struct Start {
    argv: Vec<String>,
    env: BTreeMap<String, String>,
    cwd: String,
    terminal: bool,
    stdin: bool,
    control: bool,
    images: usize,
}

/// An answer: an error's number or 0, and a pid as the session sees it.
type Answer = [u8; 8];

fn answer(errno: i32, pid: i32) -> Answer {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&errno.to_le_bytes());
    bytes[4..].copy_from_slice(&pid.to_le_bytes());
    bytes
}

/// The agent's end of the line to a session's init.
#[derive(Debug)]
pub(crate) struct Init {
    line: UnixStream,
    /// Missing while the session is yet to come back from disk.
    pidfd: RefCell<Option<OwnedFd>>,
    /// Whether the session's mounts are in place; `None` as long as nobody has asked.
    ready: Cell<Option<bool>>,
}

/// A process of a session as both sides know it.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) child: Child,
    /// Its pid in the session.
    pub(crate) inner: i32,
}

impl Init {
    /// `None`: one that is yet to come back from disk, where it was ready.
    pub(crate) fn new(line: UnixStream, pidfd: Option<OwnedFd>) -> Self {
        Self { line, ready: Cell::new(pidfd.is_none().then_some(true)), pidfd: RefCell::new(pidfd) }
    }

    /// It has come back, and is this process.
    pub(crate) fn is(&self, pidfd: OwnedFd) {
        self.pidfd.replace(Some(pidfd));
    }

    pub(crate) fn pid(&self) -> io::Result<i32> {
        self.pidfd.borrow().as_ref().map_or_else(|| Err(Errno::SRCH.into()), pid_of)
    }

    /// Ends it, and the whole session with it.
    pub(crate) fn end(&self) {
        if let Some(pidfd) = &*self.pidfd.borrow() {
            let _ = pidfd_send_signal(pidfd, Signal::KILL);
        }
    }

    /// Waits until the session's mounts are in place.
    pub(crate) fn await_ready(&self) -> io::Result<()> {
        if self.ready.get().is_none() {
            self.ready.set(Some((&self.line).read_exact(&mut [0]).is_ok()));
        }
        match self.has_failed() {
            true => Err(io::Error::other("the session's namespaces could not be made")),
            false => Ok(()),
        }
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.ready.get() == Some(false)
    }

    /// Starts a runner, which keeps `orders` and takes what `launch` describes.
    pub(crate) fn start(&self, launch: &Launch, orders: &OwnedFd) -> io::Result<Member> {
        let start = Start {
            argv: launch.argv.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
            env: launch.env.clone(),
            cwd: launch.cwd.clone(),
            terminal: launch.terminal,
            stdin: launch.stdin.is_some(),
            control: launch.control.is_some(),
            images: launch.images.len(),
        };
        let mut files = vec![orders.as_fd(), launch.stdout.as_fd(), launch.stderr.as_fd()];
        files.extend(launch.stdin.iter().map(OwnedFd::as_fd));
        if let Some((requests, replies)) = &launch.control {
            files.extend([requests.as_fd(), replies.as_fd()]);
        }
        files.extend(launch.images.iter().map(OwnedFd::as_fd));
        self.ask(&Order::Start(start), &files)?;
        self.member()?.ok_or_else(|| io::Error::other("the session did not start a runner"))
    }

    pub(crate) fn kill_below(&self, runner: i32) {
        self.tell(&Order::KillBelow(runner));
    }

    pub(crate) fn kill_orphans(&self) {
        self.tell(&Order::KillOrphans);
    }

    pub(crate) fn signal(&self, pids: Vec<i32>, signal: Signal, group: bool) {
        self.tell(&Order::Signal { pids, signal: signal.as_raw(), group });
    }

    /// Lets the session go on, wherever whoever wrote it to disk has left it: the init first, which then sees to the others.
    /// An error: it is dead, and the session with it.
    pub(crate) fn go_on(&self) -> io::Result<()> {
        if let Some(pidfd) = &*self.pidfd.borrow() {
            let _ = pidfd_send_signal(pidfd, Signal::CONT);
        }
        self.ask(&Order::GoOn, &[])?;
        self.member().map(drop)
    }

    /// The init itself, then its runners.
    pub(crate) fn roll(&self) -> io::Result<Vec<Member>> {
        self.ask(&Order::Roll, &[])?;
        let mut all = Vec::new();
        while let Some(member) = self.member()? {
            all.push(member);
        }
        Ok(all)
    }

    /// See [`Order::Renew`].
    pub(crate) fn renew(&self) -> io::Result<()> {
        self.await_ready()?;
        self.ask(&Order::Renew, &[])?;
        self.ready.set(None);
        self.await_ready()
    }

    /// An init that is gone has nothing left to do.
    fn tell(&self, order: &Order) {
        let _ = self.ask(order, &[]).and_then(|()| self.member());
    }

    fn ask(&self, order: &Order, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let text = serde_json::to_vec(order)?;
        let length = u32::try_from(text.len()).map_err(io::Error::other)?.to_le_bytes();
        let sent = send_along(self.line.as_fd(), &length, files).and_then(|()| (&self.line).write_all(&text));
        // One that died before it was ready says so by its silence.
        sent.or_else(|error| self.await_ready().and(Err(error)))
    }

    /// The next answer; `None` where it names nobody.
    fn member(&self) -> io::Result<Option<Member>> {
        self.await_ready()?;
        let mut bytes = Answer::default();
        let mut files = receive(self.line.as_fd(), &mut bytes)?;
        let word = |at: usize| i32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let (errno, inner) = (word(0), word(4));
        if errno != 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let Some(pidfd) = files.pop() else { return Ok(None) };
        // A runner may have done its work and be gone by now: then it is nobody here, and its line says the rest.
        let pid = pid_of(&pidfd).unwrap_or(NOBODY);
        Ok(Some(Member { child: Child { pid, pidfd }, inner }))
    }
}

/// No process has this pid.
const NOBODY: i32 = 0;

/// Whom a pidfd stands for, in this process's own pid namespace.
fn pid_of(pidfd: &OwnedFd) -> io::Result<i32> {
    use std::os::fd::AsRawFd;
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd()))?;
    text.lines()
        .find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok())
        .filter(|pid| *pid > 0)
        .ok_or_else(|| io::Error::from(Errno::SRCH))
}

/// Reads `bytes` in full, with the descriptors beside them.
fn receive(from: BorrowedFd<'_>, bytes: &mut [u8]) -> io::Result<Vec<OwnedFd>> {
    let mut files = Vec::new();
    let mut done = 0;
    while done < bytes.len() {
        match receive_along(from, &mut bytes[done..], &mut files)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => done += count,
        }
    }
    Ok(files)
}

/// The life of an init, in its own process. Comes back when the agent is gone.
pub(crate) fn run(thread: &SingleThread, line: OwnedFd, confinement: Confinement) -> i32 {
    let placed = || -> io::Result<()> {
        // Of its own, like all that it starts: what is written to disk holds on to nothing outside.
        setsid()?;
        let high = rustix::io::fcntl_dupfd_cloexec(&line, 64)?;
        sys::place(&high, runner::ORDERS)?;
        std::mem::forget(high);
        sys::close_from(6)
    };
    let placed = placed();
    std::mem::forget(line);
    let kept = Kept { confinement, runners: BTreeSet::new() };
    end_of(placed.and_then(|()| Nursery::open(thread, kept)).and_then(|mut nursery| nursery.serve()))
}

/// The same, after [`Order::Renew`].
pub(crate) fn run_renewed() -> i32 {
    let kept = || -> io::Result<Kept> {
        let text = std::env::var(KEPT).map_err(io::Error::other)?;
        Ok(serde_json::from_str(&text)?)
    };
    let thread = SingleThread::witness();
    end_of(thread.and_then(|thread| Nursery::open(&thread, kept()?)?.serve()))
}

fn end_of(life: io::Result<()>) -> i32 {
    i32::from(life.is_err())
}

/// Where an init finds what it knew, in its environment, which nothing in the session can read.
const KEPT: &str = "CARREL_INIT";

/// All that an init has to know.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    confinement: Confinement,
    /// Those that live. Other children are orphans.
    runners: BTreeSet<i32>,
}

struct Nursery<'a> {
    thread: &'a SingleThread,
    line: UnixStream,
    children: OwnedFd,
    kept: Kept,
}

impl<'a> Nursery<'a> {
    fn open(thread: &'a SingleThread, kept: Kept) -> io::Result<Self> {
        let _ = rustix::thread::set_name(c"carrel-init");
        let line = UnixStream::from(sys::inherited(runner::ORDERS)?);
        let children = sys::child_signals()?;
        runner::hold_nothing();
        session::undumpable()?;
        // For what it starts: their user, and the loss of everything else.
        caps::reduce(caps::init())?;
        // The first byte says that the mounts are in place.
        (&line).write_all(b"!")?;
        Ok(Self { thread, line, children, kept })
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            while let Ok(Some(reaped)) = sys::reap() {
                self.kept.runners.remove(&reaped.pid);
            }
            let mut ready =
                [PollFd::new(&self.line, PollFlags::IN), PollFd::new(&self.children, PollFlags::IN)];
            match poll(&mut ready, None) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(error) => return Err(error.into()),
            }
            let (order, ended) = (!ready[0].revents().is_empty(), !ready[1].revents().is_empty());
            if ended {
                // The content of the signal does not matter: every child is looked at.
                let _ = read(&self.children, &mut [0; 128]);
            }
            if order {
                self.obey()?;
            }
        }
    }

    fn obey(&mut self) -> io::Result<()> {
        let mut length = [0; 4];
        let files = receive(self.line.as_fd(), &mut length)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_ORDER {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut text = vec![0; length];
        (&self.line).read_exact(&mut text)?;
        match serde_json::from_slice(&text)? {
            Order::Start(start) => match start_runner(self.thread, start, files, &self.kept.confinement) {
                Ok((pid, pidfd)) => {
                    self.kept.runners.insert(pid);
                    return self.answer(0, pid, Some(&pidfd));
                }
                Err(error) => {
                    let errno = error.raw_os_error().unwrap_or(Errno::IO.raw_os_error());
                    return self.answer(errno, 0, None);
                }
            },
            // The pid of one that is gone may be somebody else's.
            Order::KillBelow(runner) if !self.kept.runners.contains(&runner) => {}
            Order::KillBelow(runner) => tree::kill_below(runner),
            Order::KillOrphans => self.kill_orphans(),
            Order::Signal { pids, signal, group } => {
                if let Some(signal) = Signal::from_named_raw(signal) {
                    send_signal(&pids, signal, group);
                }
            }
            Order::GoOn => {
                for pid in tree::below(getpid().as_raw_nonzero().get()) {
                    let _ = kill_process(userns::pid(pid), Signal::CONT);
                }
            }
            Order::Renew => return Err(self.become_new()),
            Order::Roll => {
                let own = getpid().as_raw_nonzero().get();
                for pid in std::iter::once(own).chain(self.kept.runners.iter().copied()) {
                    // One that has just ended is not there.
                    if let Ok(pidfd) = pidfd_open(userns::pid(pid), PidfdFlags::empty()) {
                        self.answer(0, pid, Some(&pidfd))?;
                    }
                }
            }
        }
        self.answer(0, 0, None)
    }

    fn answer(&self, errno: i32, pid: i32, pidfd: Option<&OwnedFd>) -> io::Result<()> {
        let files: Vec<BorrowedFd<'_>> = pidfd.into_iter().map(OwnedFd::as_fd).collect();
        send_along(self.line.as_fd(), &answer(errno, pid), &files)
    }

    /// Comes back only if it went wrong, and then the session ends.
    fn become_new(&self) -> io::Error {
        let text = match serde_json::to_string(&self.kept) {
            Ok(text) => text,
            Err(error) => return error.into(),
        };
        if let Err(error) = sys::place(&self.line, runner::ORDERS) {
            return error;
        }
        Command::new(Places::AGENT).arg0("carrel").arg("init").env_clear().env(KEPT, text).exec()
    }

    fn kill_orphans(&mut self) {
        for _ in 0..PASSES {
            while let Ok(Some(reaped)) = sys::reap() {
                self.kept.runners.remove(&reaped.pid);
            }
            let own = getpid().as_raw_nonzero().get();
            let orphans: Vec<i32> =
                tree::children(own).into_iter().filter(|pid| !self.kept.runners.contains(pid)).collect();
            if orphans.is_empty() {
                return;
            }
            for pid in orphans {
                let _ = kill_process(userns::pid(pid), Signal::STOP);
                tree::kill_below(pid);
                let _ = kill_process(userns::pid(pid), Signal::KILL);
            }
        }
    }
}

/// A signal for processes, or for their groups. What is gone has no need of it.
pub(crate) fn send_signal(pids: &[i32], signal: Signal, group: bool) {
    for pid in pids.iter().map(|pid| userns::pid(*pid)) {
        let _ = if group { kill_process_group(pid, signal) } else { kill_process(pid, signal) };
    }
}

fn start_runner(
    thread: &SingleThread,
    start: Start,
    files: Vec<OwnedFd>,
    confinement: &Confinement,
) -> io::Result<(i32, OwnedFd)> {
    let mut files = files.into_iter();
    let mut next = || files.next().ok_or_else(|| io::Error::from(Errno::BADF));
    let orders = next()?;
    let launch = Launch {
        argv: start.argv.into_iter().map(OsString::from).collect(),
        env: start.env,
        cwd: start.cwd,
        stdout: next()?,
        stderr: next()?,
        stdin: if start.stdin { Some(next()?) } else { None },
        control: if start.control { Some((next()?, next()?)) } else { None },
        images: (0..start.images).map(|_| next()).collect::<io::Result<_>>()?,
        terminal: start.terminal,
        confinement: confinement.clone(),
        jailed: true,
    };
    match sys::fork(thread, 0, None)? {
        Forked::Parent { pid, pidfd } => Ok((pid, pidfd)),
        Forked::Child => sys::exit_now(runner::run(thread, orders, launch)),
    }
}
