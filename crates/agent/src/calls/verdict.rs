//! What becomes of a call that has ended: its outcome, and what it took.

use carrel_jail::tree;
use carrel_proto::{
    frame::Stream,
    id::ExecId,
    message::What,
    outcome::{Cause, FilesState, Outcome, Receipt, SessionState},
    problem::{Code, Problem},
};

use super::{Ending, Exec, Phase, State};
use crate::{
    process::{self, Usage},
    serve::Agent,
};

const SIGXFSZ: i32 = 25;
/// A workspace with less room than this is full: ext4 refuses a write while it still holds back blocks for the
/// bookkeeping of data on its way to the disk.
const FULL: u64 = 1 << 20;

impl Agent {
    pub(super) fn judge(&self, number: u64, ending: Ending) -> Outcome {
        let exec = &self.execs[&number];
        let is_run = matches!(exec.what, What::Run { .. });
        let mut receipt = self.receipt(number, &ending);
        let phase = match &exec.state {
            State::Running(running) => running.phase,
            _ => Phase::Running,
        };
        let stopped = match phase {
            Phase::Running => None,
            Phase::Stopping(cause, ..) | Phase::Killed(cause, _) => Some(cause),
        };
        // An exec leaves the interpreters alone, so the session's state is what it was.
        let lost = match exec.taken_back {
            Some(_) => SessionState::RolledBack,
            None if is_run => SessionState::Lost,
            None => SessionState::Preserved,
        };
        let crashed = |what: &str, is_run: bool| {
            let problem = crashed(what, is_run);
            if lost == SessionState::RolledBack { problem.hint(rolled_back(exec)) } else { problem }
        };
        let limit_problem = |cause| {
            let problem = limit_problem(cause);
            if lost == SessionState::RolledBack {
                let hint = format!("{}; {}", rolled_back(exec), problem.hint);
                return problem.hint(hint);
            }
            problem
        };
        let outcome = |cause, exit_code, session_state, problem: Option<Problem>| Outcome {
            exec: ExecId::numbered(number),
            cause,
            exit_code,
            signal: None,
            session_state,
            exception: None,
            problem: problem.map(|problem| problem.state(session_state)),
            receipt: Box::default(),
            transactional: None,
            transactional_reason: None,
            taken_back: exec.taken_back,
            files_state: exec.files_back.as_ref().map(|files| files.state),
            files_reason: exec.files_back.as_ref().and_then(|files| files.reason.clone()),
        };
        let mut result = match ending {
            Ending::Refused(problem) => {
                let (cause, exit) = match problem.code {
                    Code::Cancelled => (Cause::Cancelled, 130),
                    Code::Pids => (Cause::Pids, 127),
                    _ => (Cause::Exit, 127),
                };
                outcome(cause, exit, problem.session_state, Some(problem))
            }
            Ending::RunnerGone => match stopped {
                Some(cause) => {
                    outcome(cause, stop_code(cause), lost, Some(self.stopped_problem(number, cause, lost)))
                }
                None => outcome(
                    Cause::Signal,
                    137,
                    lost,
                    Some(crashed("its processes were killed from inside", is_run)),
                ),
            },
            Ending::Done { exit, exception } => {
                let kept = SessionState::Preserved;
                let hit = if exit == 0 { None } else { self.limit_hit(number) };
                let mut result = match stopped {
                    Some(cause) => outcome(
                        cause,
                        stop_code(cause),
                        kept,
                        Some(self.stopped_problem(number, cause, kept)),
                    ),
                    None => match hit {
                        Some(cause) => outcome(cause, exit, kept, Some(limit_problem(cause))),
                        None => outcome(Cause::Exit, exit, kept, None),
                    },
                };
                result.exception = exception;
                result
            }
            Ending::Ended { status, left, .. } => {
                receipt.processes = left;
                let signal = status & 0x7f;
                let exit = if signal == 0 { status >> 8 & 0xff } else { 128 + signal };
                let hit = if exit == 0 { None } else { self.limit_hit(number) };
                let mut result = match (stopped, hit) {
                    (Some(cause), _) => outcome(
                        cause,
                        stop_code(cause),
                        lost,
                        Some(self.stopped_problem(number, cause, lost)),
                    ),
                    (None, Some(cause)) => outcome(cause, exit, lost, Some(limit_problem(cause))),
                    (None, None) if signal == SIGXFSZ => {
                        outcome(Cause::Disk, exit, lost, Some(limit_problem(Cause::Disk)))
                    }
                    (None, None) if signal != 0 => outcome(
                        Cause::Signal,
                        exit,
                        lost,
                        Some(crashed(&format!("ended by signal {signal}"), is_run)),
                    ),
                    (None, None) if is_run => {
                        let word = format!("the interpreter ended itself with exit code {exit}");
                        outcome(Cause::Exit, exit, lost, Some(crashed(&word, true)))
                    }
                    (None, None) => outcome(Cause::Exit, exit, lost, None),
                };
                result.signal = (signal != 0).then_some(signal);
                result
            }
        };
        *result.receipt = receipt;
        (result.transactional, result.transactional_reason) = self.transactional(number);
        result
    }

    fn stopped_problem(&self, number: u64, cause: Cause, state: SessionState) -> Problem {
        let kept = match state {
            SessionState::Preserved => "it was interrupted and the session's state is kept",
            SessionState::RolledBack => {
                let what = what_went_back(&self.execs[&number]);
                &format!("it did not react to the interrupt and was killed; {what} as before the call")
            }
            _ => {
                "it did not react to the interrupt and was killed, so the interpreter's state is lost; files are kept"
            }
        };
        match cause {
            Cause::Timeout => {
                let limit = self.execs[&number].timeout.unwrap_or_default();
                Problem::new(Code::Timeout, format!("the call ran longer than {limit:?}; {kept}"))
                    .hint("give it more time (--timeout), or start it with `exec -d` and look at it later")
            }
            Cause::Disk => limit_problem(Cause::Disk),
            _ => Problem::new(Code::Cancelled, format!("the call was cancelled; {kept}")),
        }
    }

    /// Which limit a failed call ran into, if any.
    fn limit_hit(&self, number: u64) -> Option<Cause> {
        let State::Running(running) = &self.execs[&number].state else { return None };
        let now = self.meters.read();
        let grew = |now: Option<u64>, before: Option<u64>| now.unwrap_or(0) > before.unwrap_or(0);
        if grew(now.oom_kills, running.before.oom_kills) {
            Some(Cause::Oom)
        } else if grew(now.pids_refused, running.before.pids_refused) || self.is_crowded() {
            Some(Cause::Pids)
        } else if self.workspace_is_full() {
            Some(Cause::Disk)
        } else {
            None
        }
    }

    /// Without a cgroup nothing counts refused forks; a failed call in a box that has all its processes met that limit.
    fn is_crowded(&self) -> bool {
        // The agent, a session's init and a runner or two are not the user's.
        const OWN: usize = 8;
        let agent = rustix::process::getpid().as_raw_nonzero().get();
        self.config
            .nproc
            .is_some_and(|most| tree::below(agent).len() + OWN >= usize::try_from(most).unwrap_or(usize::MAX))
    }

    fn workspace_is_full(&self) -> bool {
        if let Some(watch) = &self.watch {
            return watch.is_full();
        }
        rustix::fs::statvfs(&self.config.places.workspace)
            .is_ok_and(|fs| fs.f_bavail * fs.f_frsize < FULL || (fs.f_files > 0 && fs.f_favail == 0))
    }

    fn receipt(&self, number: u64, ending: &Ending) -> Receipt {
        let exec = &self.execs[&number];
        let mut receipt = Receipt {
            stdout_bytes: exec.output.total(Stream::Stdout),
            stderr_bytes: exec.output.total(Stream::Stderr),
            output_dropped: exec.output.dropped(),
            ..Receipt::default()
        };
        let State::Running(running) = &exec.state else { return receipt };
        receipt.duration_us = u64::try_from(running.started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let now = self.meters.read();
        let process = exec.process.and_then(|id| self.processes.get(&id));
        let (others, usage) = match (process, ending) {
            (Some(process), Ending::Done { .. }) => {
                let spares = exec.process.map_or_else(Vec::new, |id| self.spares_of(id));
                process::below(&process.runner, &spares, now.cpu_us.is_none())
            }
            _ => (0, Usage::default()),
        };
        receipt.processes = others;
        let (cpu, peak) = match ending {
            Ending::Ended { cpu_us, peak_memory, .. } => (*cpu_us, *peak_memory),
            _ => (usage.cpu_us, usage.peak_memory),
        };
        receipt.cpu_us = match (now.cpu_us, running.before.cpu_us) {
            (Some(now), Some(before)) => now.saturating_sub(before),
            _ => cpu.saturating_sub(running.usage_before.cpu_us),
        };
        receipt.peak_memory = self.meters.peak().unwrap_or(peak);
        receipt
    }
}

/// What became of the state when a call has taken its interpreter down.
fn rolled_back(exec: &Exec) -> String {
    let what = what_went_back(exec);
    let mut hint = match exec.taken_back {
        Some(calls @ 2..) => format!(
            "the state right before this call could not be kept, so {} more before it are taken back with it; {what} as before \
             them",
            calls - 1
        ),
        _ => format!("{what} as before this call"),
    };
    if exec.closed_handles > 0 {
        hint.push_str("; sockets and pipes that were open are closed");
    }
    match exec.files_back.as_ref().and_then(|files| files.reason.as_deref()) {
        Some(reason) => format!("{hint}; files are as the call left them: {reason}"),
        None => hint,
    }
}

fn what_went_back(exec: &Exec) -> &'static str {
    match &exec.files_back {
        Some(files) if files.state == FilesState::Restored => "the session's variables and files are",
        _ => "the session's variables are",
    }
}

fn crashed(what: &str, is_run: bool) -> Problem {
    let problem = Problem::new(Code::Crashed, what.to_owned());
    if is_run {
        problem.hint("the next call starts a new interpreter; files in /workspace are kept")
    } else {
        problem
    }
}

pub(crate) fn limit_problem(cause: Cause) -> Problem {
    match cause {
        Cause::Oom => {
            Problem::new(Code::Oom, "the sandbox's memory limit was reached and the kernel ended a process")
                .hint("use less memory at once, or open the sandbox with a larger --memory")
        }
        Cause::Pids => Problem::new(Code::Pids, "the sandbox's process limit was reached")
            .hint("end processes that are no longer needed, or open the sandbox with a larger --pids"),
        _ => Problem::new(Code::Disk, "the workspace is full")
            .hint("delete files in /workspace, or open the sandbox with a larger --disk"),
    }
}

fn stop_code(cause: Cause) -> i32 {
    match cause {
        Cause::Timeout => 124,
        Cause::Disk => 137,
        _ => 130,
    }
}
