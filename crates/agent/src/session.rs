//! Sessions of a box: their namespaces, directory and variables.

use std::{collections::BTreeMap, io, os::fd::OwnedFd, time::SystemTime};

use carrel_jail::{
    confine::Confinement,
    session::{self as namespace, Child},
    sys::SingleThread,
    tree, userns,
};
use carrel_proto::guest::AgentConfig;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
};

use crate::{
    process,
    runner::{self, Launch},
};

#[derive(Debug)]
pub(crate) struct Session {
    /// Pid 1 of the session's namespace; `None` with weak isolation.
    init: Option<(Child, OwnedFd)>,
    pub(crate) cwd: String,
    /// All variables of what starts in it.
    pub(crate) env: BTreeMap<String, String>,
    /// Those of them that a caller gave it.
    pub(crate) own: BTreeMap<String, String>,
    pub(crate) opened: SystemTime,
    /// How many calls can be taken back; `None`: as many as in the sandbox's other sessions.
    pub(crate) undo_calls: Option<u32>,
}

const SIGINT: u8 = 2;

/// A started runner and the line to it.
#[derive(Debug)]
pub(crate) struct Runner {
    pub(crate) child: Child,
    pub(crate) orders: OwnedFd,
    /// The process that has taken the place of the one which the runner started.
    pub(crate) heir: Option<i32>,
}

impl Runner {
    /// The runner's process, as long as it lives.
    pub(crate) fn main(&self) -> Option<i32> {
        self.heir.or_else(|| process::main_of(self.child.pid))
    }

    /// Passes a signal on to the process group of the runner's process.
    pub(crate) fn signal(&self, signal: u8) {
        // A runner that is gone has nothing left to signal.
        let _ = rustix::io::write(&self.orders, &[signal]);
    }

    /// Interrupts the runner's process at once. By way of the runner it would arrive a moment later: in the next call.
    pub(crate) fn interrupt(&self) {
        use rustix::process::{Signal, kill_process_group};
        match self.main() {
            Some(main) => drop(kill_process_group(userns::pid(main), Signal::INT)),
            None => self.signal(SIGINT),
        }
    }

    /// Ends everything below the runner.
    pub(crate) fn kill_all(&self) {
        tree::kill_below(self.child.pid);
    }

    /// Ends the runner itself, which user code may have stopped.
    pub(crate) fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.child.pidfd, rustix::process::Signal::KILL);
    }
}

fn line() -> io::Result<(OwnedFd, OwnedFd)> {
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
        let init = if config.namespaces {
            let (mine, theirs) = line()?;
            let child = namespace::fork_init(thread, &config.places.spool, &config.places.run, |ready| {
                if let Err(error) = ready {
                    crate::say(&format!("making a session: {error}"));
                    return 1;
                }
                // The first byte says that the mounts are in place.
                let _ = rustix::io::write(&theirs, b"!");
                runner::run_init(theirs, true)
            })?;
            if rustix::io::read(&mine, &mut [0; 1]) != Ok(1) {
                return Err(io::Error::other("the session's namespaces could not be made"));
            }
            Some((child, mine))
        } else {
            None
        };
        Ok(Self { init, cwd, env, own, opened: SystemTime::now(), undo_calls: None })
    }

    /// Starts a runner in this session.
    pub(crate) fn start(&self, thread: &SingleThread, launch: Launch) -> io::Result<Runner> {
        let (mine, theirs) = line()?;
        let init = self.init.as_ref().map(|(child, _)| &child.pidfd);
        let child = namespace::fork_into(thread, init, |inside| {
            if let Err(error) = inside {
                crate::say(&format!("entering a session: {error}"));
                return 1;
            }
            runner::run(thread, theirs, launch)
        })?;
        Ok(Runner { child, orders: mine, heir: None })
    }

    /// A runner was killed: what it left goes to the session's init, and is nobody's any more. Its line closes a moment
    /// before that happens, so its end is awaited first.
    pub(crate) fn kill_orphans(&self, runner: &Runner) {
        let moment = Timespec { tv_sec: 1, tv_nsec: 0 };
        let _ = poll(&mut [PollFd::new(&runner.child.pidfd, PollFlags::IN)], Some(&moment));
        runner.kill_all();
        if let Some((child, _)) = &self.init {
            tree::kill_below(child.pid);
        }
    }

    /// Ends everything in the session's namespace.
    pub(crate) fn close(self) {
        if let Some((child, _)) = &self.init {
            let _ = rustix::process::pidfd_send_signal(&child.pidfd, rustix::process::Signal::KILL);
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
