//! A box is ended, with every process of it.

use std::{
    fs, io,
    path::Path,
    time::{Duration, Instant},
};

use carrel_jail::{cgroup::Hierarchy, tree, userns};
use carrel_proto::{id::SandboxId, problem::Problem};
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use super::Jail;
use crate::{Backend, IsolationLevel, Placed};

/// How long a killed box may take to be gone.
pub(super) const DYING: Duration = Duration::from_secs(10);

impl Jail {
    /// Ends every process of a sandbox.
    pub(super) fn end_all(
        &self,
        id: &SandboxId,
        directory: &Path,
        placed: Option<&Placed>,
    ) -> Result<(), Problem> {
        let failed = |error: io::Error| removing(id, error);
        // Of a box that was never made.
        drop(self.spares.listener(directory));
        let mut agents: Vec<i32> =
            placed.filter(|placed| self.is_alive(placed)).map(|placed| placed.pid).into_iter().collect();
        // No namespace ends with a weak agent: runners that could not end their processes are looked for as well.
        if placed.is_none_or(|placed| placed.isolation == IsolationLevel::Weak) {
            agents.extend(find_agents(id));
        }
        for pid in agents {
            // The kernel does this for a jailed box; a weak one has no namespace that ends with its agent. Not for both: whoever is
            // killed half-way leaves processes that stand still, and an agent that waits for them.
            if placed.map_or_else(|| shares_our_pids(pid), |placed| placed.isolation == IsolationLevel::Weak)
            {
                tree::kill_below(pid);
            }
            end(pid, &self.hierarchy).map_err(failed)?;
        }
        // Nothing is left in the cgroup of a jailed box whose first process is gone; a weak one may have leftovers.
        let deadline = Instant::now() + DYING;
        loop {
            let left = self.hierarchy.processes(id.as_str());
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            self.hierarchy.kill(id.as_str());
            for pid in left {
                if let Ok(fd) = pidfd_open(userns::pid(pid), PidfdFlags::empty()) {
                    let _ = kill_process(userns::pid(pid), Signal::KILL);
                    self.hierarchy.let_die(pid);
                    tree::wait_readable(&fd, deadline);
                }
            }
        }
        Ok(())
    }
}

pub(super) fn removing(id: &SandboxId, error: io::Error) -> Problem {
    Problem::internal(format!("removing sandbox {id}: {error}"))
}

/// Whether a process is in this process's own pid namespace, as nothing of a jailed box is.
fn shares_our_pids(pid: i32) -> bool {
    let namespace = |whose: &str| fs::read_link(format!("/proc/{whose}/ns/pid")).ok();
    namespace("self").is_some_and(|own| namespace(&pid.to_string()) == Some(own))
}

/// Kills a process and waits until it is gone. With pid 1 of a box goes everything in it.
pub(super) fn end(pid: i32, hierarchy: &Hierarchy) -> io::Result<()> {
    let fd = match pidfd_open(userns::pid(pid), PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match pidfd_send_signal(&fd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    hierarchy.let_die(pid);
    if tree::wait_readable(&fd, Instant::now() + DYING) {
        Ok(())
    } else {
        Err(io::Error::other(format!("process {pid} does not die")))
    }
}

/// Agents of a sandbox whose maker died before it could write down their pid. Their environment names the sandbox.
/// A session's stubs have the same one; they end with their agent, so ending them too does no harm.
fn find_agents(id: &SandboxId) -> Vec<i32> {
    let wanted = format!("CARREL_SANDBOX={id}\0");
    let is_agent = |pid: &i32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == b"carrel\0agent\0")
            && fs::read(format!("/proc/{pid}/environ")).is_ok_and(|all| all == wanted.as_bytes())
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_agent).collect()
}
