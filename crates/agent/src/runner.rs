//! The runner: a small process around each interpreter and each exec, below which all of it stays.
//!
//! A runner lives in its session's pid namespace as the *subreaper* of the one process it starts: whatever that
//! process leaves behind, also after `setsid` and double forks, becomes a child of the runner and of nobody else. So
//! "the whole tree of a call" is always "everything below its runner" ([`carrel_jail::tree`]). The session's init
//! ([`crate::init`]) starts it, and inherits what is left when user code kills it.
//!
//! A runner only reaps, reports and passes signals on. Ending a tree is the init's work: where user code has the runner's
//! user id it can stop or kill it, and must gain nothing by that.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::Command,
};

use carrel_graft::format::{IMAGE_FD, MOST_FILES};
use carrel_jail::{
    caps, confine,
    confine::Confinement,
    session,
    sys::{self, Forked, SingleThread},
    tree, userns,
};
use carrel_proto::guest::Places;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::{Errno, read, write},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, getpid, ioctl_tiocsctty, kill_process_group, set_child_subreaper, setsid},
};

/// What to start, and with which descriptors.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) argv: Vec<OsString>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: String,
    /// None: `/dev/null`.
    pub(crate) stdin: Option<OwnedFd>,
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
    /// A driver's requests and replies, at 3 and 4.
    pub(crate) control: Option<(OwnedFd, OwnedFd)>,
    /// Standard input is a terminal to be led.
    pub(crate) terminal: bool,
    pub(crate) confinement: Confinement,
    /// Whether the agent has capabilities to take away (not with weak isolation).
    pub(crate) jailed: bool,
    /// What the process shall be a copy of, if anything; then `argv` makes it a graft. See [`carrel_graft`].
    pub(crate) images: Vec<OwnedFd>,
}

/// From a runner to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Word {
    /// It could not be started: the error's number.
    Failed(i32),
    /// The process has ended; `left` of its descendants still run. Before it so many others had their `turn`: see [`ADOPT`].
    Ended { status: i32, cpu_us: u64, peak_memory: u64, left: u32, turn: u32 },
    /// It has started its own program anew, as it was asked to with [`RENEW`].
    Renewed,
}

/// An order in place of a signal's number: see [`Word::Renewed`] and `Order::Renew` of [`crate::init`].
pub(crate) const RENEW: u8 = 0;
/// Where a runner finds what it knew, in its environment, which nothing in the session can read.
const KEPT: &str = "CARREL_RUNNER";

const WORD: usize = 29;
/// Of runners that were written to disk before words had a turn, and what is read for it.
const SHORT_WORD: usize = 25;
pub(crate) const UNSAID: u32 = u32::MAX;

impl Word {
    fn encode(self) -> [u8; WORD] {
        let mut out = [0; WORD];
        let (kind, number, cpu, peak, left, turn) = match self {
            Word::Failed(errno) => (2, errno, 0, 0, 0, 0),
            Word::Ended { status, cpu_us, peak_memory, left, turn } => {
                (3, status, cpu_us, peak_memory, left, turn)
            }
            Word::Renewed => (4, 0, 0, 0, 0, 0),
        };
        out[0] = kind;
        out[1..5].copy_from_slice(&number.to_le_bytes());
        out[5..13].copy_from_slice(&cpu.to_le_bytes());
        out[13..21].copy_from_slice(&peak.to_le_bytes());
        out[21..25].copy_from_slice(&left.to_le_bytes());
        out[25..].copy_from_slice(&turn.to_le_bytes());
        out
    }

    /// `None`: the runner is gone. User code may kill it, never speak for it.
    pub(crate) fn receive(from: &OwnedFd) -> Result<Option<Self>, Errno> {
        // What is not said reads as [`UNSAID`].
        let mut bytes = [u8::MAX; WORD];
        match read(from, &mut bytes) {
            Ok(WORD | SHORT_WORD) => {}
            // Reset: it has ended with an order unread.
            Ok(_) | Err(Errno::CONNRESET) => return Ok(None),
            Err(error) => return Err(error),
        }
        let (kind, rest) = (bytes[0], &bytes[1..]);
        let int = |at: usize| {
            let mut word = [0; 4];
            word.copy_from_slice(&rest[at..at + 4]);
            word
        };
        let long = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&rest[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Ok(match kind {
            2 => Some(Word::Failed(i32::from_le_bytes(int(0)))),
            3 => Some(Word::Ended {
                status: i32::from_le_bytes(int(0)),
                cpu_us: long(4),
                peak_memory: long(12),
                left: u32::from_le_bytes(int(20)),
                turn: u32::from_le_bytes(int(24)),
            }),
            4 => Some(Word::Renewed),
            _ => None,
        })
    }
}

/// An order to take another process for the one that was started: a zero and its pid. See [`crate::undo`].
///
/// Both sides count these orders. The process before may end before the order is read or after it, so its end may be told or not;
/// whose end is told is said by the count.
pub(crate) const ADOPT: usize = 5;
const SIGKILL: i32 = 9;

/// Where a runner keeps its own descriptor to the agent, right behind those of its process.
pub(crate) const ORDERS: i32 = 5;

/// The runner's life. Starts the process, then waits until nothing of it is left.
pub(crate) fn run(thread: &SingleThread, orders: OwnedFd, launch: Launch) -> i32 {
    let Ok(orders) = arrange(orders, &launch) else { return 1 };
    let _ = rustix::thread::set_name(c"carrel-runner");
    let started = set_child_subreaper(Some(getpid()))
        .map_err(io::Error::from)
        .and_then(|()| sys::child_signals())
        .and_then(|children| Ok((children, start(thread, &launch)?)));
    let (children, main) = match started {
        Ok(started) => started,
        Err(error) => {
            let _ = write(&orders, &Word::Failed(error.raw_os_error().unwrap_or(0)).encode());
            return 1;
        }
    };
    for number in numbers(&launch.images) {
        drop(sys::inherited(number));
    }
    harden(launch.jailed);
    // Only the process itself holds its pipes now, so that the agent sees their end.
    hold_nothing();
    let code = supervise(&orders, &children, Main { alive: Some(main), turn: 0 });
    if !launch.jailed {
        // The agent is gone, and no namespace ends with it.
        tree::kill_below(getpid().as_raw_nonzero().get());
    }
    code
}

/// The rest of a life, after [`RENEW`].
pub(crate) fn run_renewed() -> i32 {
    let main = std::env::var(KEPT).map(|text| Main::parse(&text)).unwrap_or_default();
    let (Ok(orders), Ok(children)) = (sys::inherited(ORDERS), sys::child_signals()) else { return 1 };
    let _ = rustix::thread::set_name(c"carrel-runner");
    harden(true);
    if write(&orders, &Word::Renewed.encode()).is_err() {
        return 1;
    }
    supervise(&orders, &children, main)
}

fn become_new(orders: &OwnedFd, main: &Main) -> io::Result<()> {
    sys::place(orders, ORDERS)?;
    let main = format!("{} {}", main.alive.unwrap_or(NOBODY), main.turn);
    Err(Command::new(Places::AGENT).arg0("carrel").arg("runner").env_clear().env(KEPT, main).exec())
}

/// Standard streams and a driver's pipes become `/dev/null`.
pub(crate) fn hold_nothing() {
    if let Ok(null) = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()) {
        for number in 0..ORDERS {
            let _ = sys::place(&null, number);
        }
    }
}

fn harden(jailed: bool) {
    let _ = session::undumpable();
    if jailed {
        let _ = caps::reduce(caps::reaper());
    }
}

/// Descriptors at their numbers, everything else of the agent's closed: this process is a fork of the agent and
/// holds copies of all it has.
fn arrange(orders: OwnedFd, launch: &Launch) -> io::Result<OwnedFd> {
    let high = |fd: &OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, 64);
    // Opened here, where the session's mounts are: one of the agent's could not be written to disk with the session.
    let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty())?;
    let stdin = high(launch.stdin.as_ref().unwrap_or(&null))?;
    let mut all = vec![(stdin, 0), (high(&launch.stdout)?, 1), (high(&launch.stderr)?, 2)];
    if let Some((requests, replies)) = &launch.control {
        all.push((high(requests)?, 3));
        all.push((high(replies)?, 4));
    }
    all.push((high(&orders)?, ORDERS));
    for (image, number) in launch.images.iter().zip(numbers(&launch.images)) {
        all.push((high(image)?, number));
    }
    for (fd, number) in &all {
        sys::place(fd, *number)?;
    }
    if launch.control.is_none() {
        // Nothing may be left of the agent's at 3 and 4.
        let null = high(&null)?;
        sys::place(&null, 3)?;
        sys::place(&null, 4)?;
    }
    std::mem::forget(all);
    std::mem::forget(orders);
    sys::close_from(numbers(&launch.images).end.unsigned_abs())?;
    sys::inherited(ORDERS)
}

/// Forks and executes; comes back when the new program runs or has failed to.
fn start(thread: &SingleThread, launch: &Launch) -> io::Result<i32> {
    let (failed, fail) = pipe_with(PipeFlags::CLOEXEC)?;
    match sys::fork(thread, 0, None)? {
        Forked::Child => {
            let error = become_program(launch);
            let _ = write(&fail, &error.raw_os_error().unwrap_or(libc_eio()).to_le_bytes());
            sys::exit_now(127)
        }
        Forked::Parent { pid, .. } => {
            drop(fail);
            let mut errno = [0; 4];
            match read(&failed, &mut errno)? {
                4 => Err(io::Error::from_raw_os_error(i32::from_le_bytes(errno))),
                _ => Ok(pid),
            }
        }
    }
}

/// Where a graft finds its image's files.
fn numbers(images: &[OwnedFd]) -> std::ops::Range<i32> {
    IMAGE_FD..IMAGE_FD + i32::try_from(images.len().min(MOST_FILES)).unwrap_or_default()
}

fn libc_eio() -> i32 {
    Errno::IO.raw_os_error()
}

fn become_program(launch: &Launch) -> io::Error {
    let prepare = || -> io::Result<()> {
        sys::reset_signals()?;
        setsid()?;
        if launch.terminal {
            ioctl_tiocsctty(rustix::stdio::stdin())?;
        }
        sys::close_on_exec_from(if launch.control.is_some() { 5 } else { 3 })?;
        for number in numbers(&launch.images) {
            // The graft closes it itself.
            std::mem::forget(
                sys::inherited(number).and_then(|image| sys::place(&image, number).map(|()| image))?,
            );
        }
        if launch.jailed {
            confine::apply(&launch.confinement)
        } else {
            confine::apply_weak(&launch.confinement)
        }
    };
    if let Err(error) = prepare() {
        crate::say(&format!("confining a process: {error}"));
        return error;
    }
    if let Err(error) = std::env::set_current_dir(&launch.cwd) {
        return error;
    }
    Command::new(&launch.argv[0]).args(&launch.argv[1..]).env_clear().envs(&launch.env).exec()
}

const NOBODY: i32 = 0;

/// The process that a runner is there for.
#[derive(Debug, Default)]
struct Main {
    alive: Option<i32>,
    turn: u32,
}

impl Main {
    fn parse(text: &str) -> Self {
        let (pid, turn) = text.split_once(' ').unwrap_or_default();
        Self { alive: pid.parse().ok().filter(|pid| *pid != NOBODY), turn: turn.parse().unwrap_or(0) }
    }

    /// It has ended, and nobody here has seen how.
    fn killed(&mut self) -> Word {
        self.alive = None;
        Word::Ended { status: SIGKILL, cpu_us: 0, peak_memory: 0, left: 0, turn: self.turn }
    }
}

fn is_gone(pid: i32) -> bool {
    pid <= 0 || rustix::process::test_kill_process(userns::pid(pid)).is_err()
}

/// Reaps and obeys. A runner ends when nothing is left below it.
fn supervise(orders: &OwnedFd, children: &OwnedFd, mut main: Main) -> i32 {
    loop {
        let (mut left, mut others) = (false, false);
        loop {
            match sys::reap() {
                Ok(None) => {
                    left = true;
                    break;
                }
                Ok(Some(reaped)) if Some(reaped.pid) == main.alive => {
                    main.alive = None;
                    let word = Word::Ended {
                        status: reaped.status,
                        cpu_us: reaped.cpu_us,
                        peak_memory: reaped.peak_memory,
                        left: u32::try_from(tree::below(getpid().as_raw_nonzero().get()).len())
                            .unwrap_or(u32::MAX),
                        turn: main.turn,
                    };
                    let _ = write(orders, &word.encode());
                }
                Ok(Some(_)) => others = true,
                Err(_) => break,
            }
        }
        // One that took the place of another was that one's child as long as it was there, and may have been reaped by it.
        if others && main.alive.is_some_and(is_gone) {
            let _ = write(orders, &main.killed().encode());
        }
        if !left {
            return 0;
        }
        let mut ready = [PollFd::new(orders, PollFlags::IN), PollFd::new(children, PollFlags::IN)];
        match poll(&mut ready, None) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            // Nothing can be waited for any more; the agent takes over what is left.
            Err(_) => return 1,
        }
        if ready[1].revents().contains(PollFlags::IN) {
            // The content of the signal does not matter: every child is looked at.
            let _ = read(children, &mut [0; 128]);
        }
        if !ready[0].revents().is_empty() {
            // A signal for the process group of the process that was started, or another process in its place.
            let mut order = [0; ADOPT];
            match read(orders.as_fd(), &mut order) {
                Ok(1) if order[0] == RENEW => {
                    // Comes back only if it went wrong: then the agent sees this runner's end.
                    let _ = become_new(orders, &main);
                    return 1;
                }
                Ok(ADOPT) => {
                    let pid = i32::from_le_bytes([order[1], order[2], order[3], order[4]]);
                    main = Main { alive: Some(pid), turn: main.turn + 1 };
                    if is_gone(pid) {
                        // It has ended before, and was reaped as any orphan is.
                        let _ = write(orders, &main.killed().encode());
                    }
                }
                Ok(1) => {
                    if let (Some(main), Some(signal)) = (main.alive, Signal::from_named_raw(order[0].into()))
                    {
                        let _ = kill_process_group(userns::pid(main), signal);
                    }
                }
                Ok(_) | Err(Errno::PIPE) => return 1,
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_says_whose_it_is_unless_it_comes_from_an_older_runner() {
        let (ours, theirs) = crate::session::line().expect("a line");
        let mut main = Main { alive: Some(7), turn: 2 };
        for word in [main.killed(), Word::Failed(5), Word::Renewed] {
            write(&theirs, &word.encode()).expect("a word");
            assert_eq!(Word::receive(&ours), Ok(Some(word)));
        }
        assert_eq!(main.alive, None);
        let old = main.killed().encode();
        write(&theirs, &old[..SHORT_WORD]).expect("a word");
        let heard = Word::receive(&ours).expect("a word");
        assert!(
            matches!(heard, Some(Word::Ended { status: SIGKILL, left: 0, turn: UNSAID, .. })),
            "{heard:?}"
        );
        drop(theirs);
        assert_eq!(Word::receive(&ours), Ok(None));
    }

    #[test]
    fn what_a_runner_knows_outlives_its_program() {
        for (text, alive, turn) in [("12 3", Some(12), 3), ("0 1", None, 1), ("", None, 0), ("x", None, 0)] {
            let main = Main::parse(text);
            assert_eq!((main.alive, main.turn), (alive, turn), "{text}");
        }
    }
}
