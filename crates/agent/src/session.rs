//! Sessions of a box: their namespaces, directory and variables.

use std::{
    collections::BTreeMap,
    io,
    os::{fd::OwnedFd, unix::net::UnixStream},
    rc::Rc,
    time::SystemTime,
};

use carrel_jail::{
    confine::Confinement,
    session::{self as namespace, Child},
    sys::SingleThread,
    tree,
};
use carrel_proto::guest::AgentConfig;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Signal, pidfd_send_signal},
};

use crate::{
    init::{self, Init, Member},
    process,
    runner::{self, Launch},
    sleep::inode,
};

#[derive(Debug)]
pub(crate) struct Session {
    /// Pid 1 of the session's namespace; `None` with weak isolation.
    pub(crate) init: Option<Rc<Init>>,
    pub(crate) cwd: String,
    /// All variables of what starts in it.
    pub(crate) env: BTreeMap<String, String>,
    /// Those of them that a caller gave it.
    pub(crate) own: BTreeMap<String, String>,
    pub(crate) opened: SystemTime,
    /// The init's end of its line, by its inode.
    pub(crate) line: u64,
    /// Its init has started its program anew, see [`crate::sleep`].
    pub(crate) renewed: bool,
    /// How many calls can be taken back; `None`: as many as in the sandbox's other sessions.
    pub(crate) undo_calls: Option<u32>,
}

const SIGINT: u8 = 2;
const SIGKILL: u8 = 9;

/// A started runner and the line to it.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) child: Child,
    /// Its session's init, and its pid there.
    pub(crate) init: Option<(Rc<Init>, i32)>,
    pub(crate) orders: OwnedFd,
    /// The other end of that, by its inode.
    pub(crate) line: u64,
    /// The process that has taken the place of the one which the runner started.
    pub(crate) heir: Option<i32>,
    /// How many have done so: of the ends of those before it the runner may still tell.
    pub(crate) turn: u32,
}

impl Runner {
    /// The runner's process, as long as it lives.
    pub(crate) fn main(&self) -> Option<i32> {
        self.heir.or_else(|| process::main_of(self.child.pid))
    }

    /// Whether an end that the runner tells of is that of a process before this one.
    pub(crate) fn is_of_predecessor(&self, turn: u32) -> bool {
        // A runner that was written to disk by an older agent does not say.
        let unsaid = turn == runner::UNSAID && self.heir.is_some_and(process::is_running);
        turn < self.turn || unsaid
    }

    /// Another process has taken the place of the one that the runner is there for.
    pub(crate) fn adopt(&mut self, heir: i32, inside: i32) {
        self.heir = Some(heir);
        self.turn += 1;
        let mut order = [0; runner::ADOPT];
        order[1..].copy_from_slice(&inside.to_le_bytes());
        let _ = rustix::io::write(&self.orders, &order);
    }

    /// Passes a signal on to the process group of the runner's process.
    pub(crate) fn signal(&self, signal: u8) {
        // A runner that is gone has nothing left to signal.
        let _ = rustix::io::write(&self.orders, &[signal]);
    }

    /// Interrupts the runner's process at once. By way of the runner it would arrive a moment later: in the next call.
    pub(crate) fn interrupt(&self) {
        match self.main() {
            Some(main) => self.deliver(&[main], Signal::INT, true),
            None => self.signal(SIGINT),
        }
    }

    /// A signal for processes below the runner, by their pids here. Their session's init sends it, by their pids there.
    pub(crate) fn deliver(&self, pids: &[i32], signal: Signal, group: bool) {
        match &self.init {
            Some((init, _)) => {
                let inner: Vec<i32> = pids.iter().filter_map(|pid| tree::innermost(*pid)).collect();
                init.signal(inner, signal, group);
            }
            None => init::send_signal(pids, signal, group),
        }
    }

    /// Ends everything below the runner.
    pub(crate) fn kill_all(&self) {
        // One that has not started its process yet finds this when it has.
        self.signal(SIGKILL);
        match &self.init {
            Some((init, inner)) => init.kill_below(*inner),
            None => tree::kill_below(self.child.pid),
        }
    }

    /// Ends the runner itself, which user code may have stopped.
    pub(crate) fn kill(&self) {
        let _ = pidfd_send_signal(&self.child.pidfd, Signal::KILL);
    }
}

pub(crate) fn line() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

impl Session {
    pub(crate) fn open(
        thread: &SingleThread,
        config: &AgentConfig,
        cwd: String,
        env: BTreeMap<String, String>,
        own: BTreeMap<String, String>,
    ) -> io::Result<Self> {
        let mut line = 0;
        let init = if config.namespaces {
            let (mine, theirs) = UnixStream::pair()?;
            line = inode(&theirs)?;
            let confinement = confinement(config);
            let child = namespace::fork_init(thread, &config.places.spool, &config.places.run, |ready| {
                if let Err(error) = ready {
                    crate::say(&format!("making a session: {error}"));
                    return 1;
                }
                init::run(thread, theirs.into(), confinement)
            })?;
            Some(Rc::new(Init::new(mine, Some(child.pidfd))))
        } else {
            None
        };
        Ok(Self { init, cwd, env, own, opened: SystemTime::now(), line, renewed: false, undo_calls: None })
    }

    /// Waits until it can be used; whoever starts something in it waits by that.
    pub(crate) fn await_ready(&self) -> io::Result<()> {
        self.init.as_ref().map_or(Ok(()), |init| init.await_ready())
    }

    /// Its making went wrong, and somebody has been told.
    pub(crate) fn has_failed(&self) -> bool {
        self.init.as_ref().is_some_and(|init| init.has_failed())
    }

    /// Starts a runner in this session.
    pub(crate) fn start(&self, thread: &SingleThread, launch: Launch) -> io::Result<Runner> {
        let (mine, theirs) = line()?;
        let line = inode(&theirs)?;
        if let Some(init) = &self.init {
            let Member { child, inner } = init.start(&launch, &theirs)?;
            return Ok(Runner {
                child,
                init: Some((Rc::clone(init), inner)),
                orders: mine,
                line,
                heir: None,
                turn: 0,
            });
        }
        let child = namespace::fork_beside(thread, |ready| {
            if let Err(error) = ready {
                crate::say(&format!("starting a process: {error}"));
                return 1;
            }
            runner::run(thread, theirs, launch)
        })?;
        Ok(Runner { child, init: None, orders: mine, line, heir: None, turn: 0 })
    }

    /// A runner was killed: what it left goes to the session's init, and is nobody's any more. Its line closes a moment
    /// before that happens, so its end is awaited first.
    pub(crate) fn kill_orphans(&self, runner: &Runner) {
        let moment = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&runner.child.pidfd, PollFlags::IN)], Some(&moment));
        runner.kill_all();
        if let Some(init) = &self.init {
            init.kill_orphans();
        }
    }

    /// Ends everything in the session's namespace.
    pub(crate) fn close(self) {
        if let Some(init) = &self.init {
            init.end();
        }
    }
}

/// How user code of this box is confined.
pub(crate) fn confinement(config: &AgentConfig) -> Confinement {
    let places = &config.places;
    let own = [places.workspace.as_str(), places.home.as_str()];
    let shared = ["/tmp", "/dev/shm", "/dev", "/project"];
    // Without a mount namespace the host's own shared places are not ours to give.
    let shared = if config.namespaces { &shared[..] } else { &["/dev/null", "/dev/zero", "/dev/tty"] };
    Confinement {
        user: config.user,
        change_ids: config.namespaces && rustix::process::getuid().as_raw() != config.user.0,
        writable: own.iter().chain(shared).map(|path| (*path).to_owned()).collect(),
        nproc: config.nproc,
        data: config.nproc.map(|_| config.limits.memory.0),
        fsize: config.watch_disk.then_some(config.limits.disk.0),
    }
}
