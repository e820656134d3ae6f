//! What a call did, beyond what it used: files, processes that stay, ports.

use std::fs;

use carrel_jail::tree;
use carrel_proto::{
    brief::clip,
    message::PortInfo,
    outcome::{FileChanges, FilesState, MAX_PORTS, MAX_RUNNING, Outcome, ProcessInfo},
};

use crate::{calls::State, serve::Agent, session::Runner};

/// Characters of a command line.
const COMMAND: usize = 80;
/// Bytes of it that are read.
const READ: usize = 512;

impl Agent {
    /// Completes the receipt of a call that is about to be told of.
    pub(crate) fn complete_receipt(&mut self, number: u64, outcome: &mut Outcome) {
        let receipt = &mut outcome.receipt;
        (receipt.exit_code, receipt.cause) = (outcome.exit_code, Some(outcome.cause));
        let Some(exec) = self.execs.get(&number) else { return };
        let State::Running(running) = &exec.state else { return };
        let files = FileChanges { shared: running.shared, ..self.changes.end(running.mark) };
        let went_back = exec.files_back.as_ref().is_some_and(|files| files.state == FilesState::Restored);
        // What went back is as if it had never been, though the kernel knows better.
        receipt.files = if went_back { FileChanges::default() } else { files };
        if receipt.processes > 0
            && let Some(id) = exec.process
            && let Some(process) = self.processes.get(&id)
        {
            let all = left_below(&process.runner, process.ended, &self.spares_of(id));
            receipt.processes = u32::try_from(all.len()).unwrap_or(u32::MAX);
            receipt.running = all.into_iter().take(MAX_RUNNING).filter_map(described).collect();
        }
        if let Some(process) = exec.process.and_then(|id| self.processes.get_mut(&id)) {
            process.left = receipt.processes > 0;
        }
        receipt.ports = self.listeners();
        receipt.ports.truncate(MAX_PORTS);
    }

    /// What listens in the box; nothing where it has no network of its own.
    pub(crate) fn listeners(&self) -> Vec<PortInfo> {
        if !self.config.namespaces || self.sockets.are_zero() {
            return Vec::new();
        }
        self.ports().unwrap_or_default()
    }
}

/// Everything below a runner but its own process and that one's spares.
pub(crate) fn left_below(runner: &Runner, ended: bool, spares: &[i32]) -> Vec<i32> {
    let main = if ended { None } else { runner.main() };
    let mut all = tree::below(runner.child.pid);
    all.retain(|pid| Some(*pid) != main && !spares.contains(pid));
    all.sort_unstable();
    all
}

/// `None`: it has ended meanwhile.
pub(crate) fn described(pid: i32) -> Option<ProcessInfo> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    // The last one is of the innermost namespace, which is its session's.
    let inner = field("NSpid:").and_then(|pids| pids.split_whitespace().last()?.parse().ok()).unwrap_or(pid);
    Some(ProcessInfo { pid: inner, command: command(pid).unwrap_or_else(|| name(field("Name:"))) })
}

/// A kernel's name for a process, where its command line is not to be had.
fn name(text: Option<&str>) -> String {
    clip(text.unwrap_or_default().trim(), COMMAND)
}

fn command(pid: i32) -> Option<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    fs::File::open(format!("/proc/{pid}/cmdline")).ok()?.take(READ as u64).read_to_end(&mut bytes).ok()?;
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    (!text.is_empty()).then(|| clip(&text, COMMAND))
}
