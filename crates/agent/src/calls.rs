//! The life of one run or exec: begun, interrupted, killed, finished.
//!
//! ```text
//! queued ──> running ──(deadline, cancel)──> stopping ──(grace over)──> killed
//!                │                              │                         │
//!                └────────── finished <─────────┴─────────────────────────┘
//! ```

mod verdict;

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use carrel_proto::{
    guest::Language,
    id::{ExecId, SessionName},
    limits::INTERRUPT_GRACE,
    message::{ExecInfo, What},
    outcome::{Cause, Exception, Outcome, SessionState},
    problem::{Code, Problem},
};

pub(crate) use self::verdict::limit_problem;
use crate::{
    changes::Mark,
    files_back::FilesBack,
    meters::Reading,
    output::Output,
    process::{self, Role, Usage},
    runner::Word,
    serve::Agent,
    session::Runner,
};

/// Finished runs and execs that stay readable; the oldest go first.
const KEPT: usize = 256;
/// Finished calls whose output is still in memory alone, at most 64 KB each.
const UNSPOOLED: usize = 8;
/// Finished calls whose caller still has to get what cannot be kept, a few MB each. The caller of an older one finds a gap.
const UNREAD: usize = 4;
/// How long a runner may take to report the end of its process.
const RUNNER_GRACE: Duration = Duration::from_millis(500);
const REMINDER: Duration = Duration::from_millis(100);
/// The last moment at which another interrupt can still save the state.
const LAST_CALL: Duration = Duration::from_millis(500);

pub(crate) fn unix_ms(time: SystemTime) -> u64 {
    u64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) session: SessionName,
    pub(crate) what: What,
    pub(crate) created: SystemTime,
    pub(crate) output: Output,
    pub(crate) process: Option<u32>,
    pub(crate) state: State,
    /// The code of a queued run.
    pub(crate) code: String,
    pub(crate) timeout: Option<Duration>,
    /// It took its interpreter down, and so many calls were taken back, itself included.
    pub(crate) taken_back: Option<u32>,
    /// What became of the files with these calls.
    pub(crate) files_back: Option<FilesBack>,
    /// Of the state that was gone back to: sockets and pipes that are closed in it.
    pub(crate) closed_handles: u32,
}

#[derive(Debug)]
pub(crate) enum State {
    Queued,
    Running(Running),
    Finished(Box<Outcome>),
}

#[derive(Debug)]
pub(crate) struct Running {
    started: Instant,
    deadline: Option<Instant>,
    phase: Phase,
    before: Reading,
    usage_before: Usage,
    /// Where the history of the workspace stood when it began.
    pub(crate) mark: Mark,
    /// Other calls ran meanwhile.
    pub(crate) shared: bool,
}

#[derive(Debug, Clone, Copy)]
enum Phase {
    Running,
    /// Interrupted; to be killed at the first time, and until then reminded at the second.
    Stopping(Cause, Instant, Instant),
    /// Killed; a runner that has not said so by this time is killed too.
    Killed(Cause, Instant),
}

/// How a process or call came to its end.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The driver said so.
    Done {
        exit: i32,
        exception: Option<Exception>,
    },
    /// The process ended.
    Ended {
        status: i32,
        cpu_us: u64,
        peak_memory: u64,
        left: u32,
    },
    /// The runner was killed.
    RunnerGone,
    Refused(Problem),
}

impl Exec {
    pub(crate) fn outcome(&self) -> Option<&Outcome> {
        match &self.state {
            State::Finished(outcome) => Some(outcome),
            _ => None,
        }
    }

    fn share(&mut self) {
        if let State::Running(running) = &mut self.state {
            running.shared = true;
        }
    }

    /// How long its code has been running.
    pub(crate) fn running_for(&self) -> Option<Duration> {
        match &self.state {
            State::Running(running) => Some(running.started.elapsed()),
            _ => None,
        }
    }

    pub(crate) fn info(&self, number: u64) -> ExecInfo {
        ExecInfo {
            exec: ExecId::numbered(number),
            session: self.session.clone(),
            what: self.what.clone(),
            running: self.outcome().is_none(),
            started_unix_ms: unix_ms(self.created),
            outcome: self.outcome().cloned(),
        }
    }
}

impl Running {
    /// How long it has run, and how much of its time is left, in milliseconds.
    pub(crate) fn times(&self) -> (u64, Option<u64>) {
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let left = |deadline: Instant| millis(deadline.saturating_duration_since(Instant::now()));
        (millis(self.started.elapsed()), self.deadline.map(left))
    }
}

impl Agent {
    /// The clock of a call that comes back from disk goes on where it stood.
    pub(crate) fn going_on(&mut self, (ran, left): (u64, Option<u64>)) -> Running {
        let now = Instant::now();
        Running {
            started: now.checked_sub(Duration::from_millis(ran)).unwrap_or(now),
            deadline: left.map(|left| now + Duration::from_millis(left)),
            phase: Phase::Running,
            before: self.meters.read(),
            usage_before: Usage::default(),
            mark: self.changes.begin(),
            shared: false,
        }
    }

    /// The clock of a call starts: its code runs now.
    pub(crate) fn begin(&mut self, number: u64) {
        let now = Instant::now();
        if let Some(watch) = &mut self.watch {
            watch.arm(now);
        }
        let shared = self.running() > 0;
        if shared {
            self.execs.values_mut().for_each(Exec::share);
        } else {
            self.meters.reset_peak();
        }
        self.files_before(number, !shared);
        let mark = self.changes.begin();
        let before = self.meters.read();
        let Some(exec) = self.execs.get_mut(&number) else { return };
        let usage_before = match (before.cpu_us, exec.process.and_then(|id| self.processes.get(&id))) {
            (None, Some(process)) => process::below(&process.runner, &[], true).1,
            _ => Usage::default(),
        };
        let deadline = exec.timeout.map(|timeout| now + timeout);
        exec.state = State::Running(Running {
            started: now,
            deadline,
            phase: Phase::Running,
            before,
            usage_before,
            mark,
            shared,
        });
    }

    /// Calls whose code runs now.
    pub(crate) fn running(&self) -> usize {
        self.execs.values().filter(|exec| matches!(exec.state, State::Running(_))).count()
    }

    /// Interrupts a call; the grace decides the rest. One that still waits ends at once.
    pub(crate) fn stop(&mut self, number: u64, cause: Cause) {
        let Some(exec) = self.execs.get_mut(&number) else { return };
        match &mut exec.state {
            State::Queued => {
                for interpreter in self.interpreters.values_mut() {
                    interpreter.queue.retain(|queued| *queued != number);
                }
                let problem =
                    Problem::new(Code::Cancelled, "cancelled before it began").state(SessionState::Preserved);
                self.finish(number, Ending::Refused(problem));
            }
            State::Running(running) => {
                if matches!(running.phase, Phase::Running) {
                    let now = Instant::now();
                    let kill = now + INTERRUPT_GRACE;
                    running.phase = Phase::Stopping(cause, kill, next_reminder(&exec.what, now, kill));
                    self.interrupt(number);
                }
            }
            State::Finished(_) => {}
        }
    }

    /// Ends the whole tree of a call now.
    pub(crate) fn kill(&mut self, number: u64, cause: Cause) {
        if let Some(Exec { state: State::Running(running), .. }) = self.execs.get_mut(&number) {
            running.phase = Phase::Killed(cause, Instant::now() + RUNNER_GRACE);
        }
        if let Some(process) = self.execs.get(&number).and_then(|exec| exec.process) {
            self.kill_call(process);
        }
    }

    /// Unless the interpreter is at a point where a signal would end it.
    fn interrupt(&mut self, number: u64) {
        let process = self.execs.get(&number).and_then(|exec| exec.process);
        if let Some(interpreter) = process.and_then(|id| self.interpreters.get_mut(&id)) {
            if interpreter.renewing {
                return;
            }
            interpreter.interrupted = true;
        }
        self.runner(number).into_iter().for_each(Runner::interrupt);
    }

    fn is_returning(&self, number: u64) -> bool {
        let process = self.execs.get(&number).and_then(|exec| exec.process);
        let interpreter = process.and_then(|id| self.interpreters.get(&id));
        interpreter.is_some_and(|interpreter| interpreter.history.is_returning())
    }

    fn runner(&self, number: u64) -> Option<&Runner> {
        let process = self.execs.get(&number)?.process?;
        self.processes.get(&process).map(|process| &process.runner)
    }

    /// Deadlines that are over. Says when to look again.
    pub(crate) fn tick(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut sooner = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        let mut late = Vec::new();
        for (number, exec) in &self.execs {
            let State::Running(running) = &exec.state else { continue };
            let due = match running.phase {
                Phase::Running => running.deadline,
                Phase::Stopping(_, kill, remind) => Some(kill.min(remind)),
                Phase::Killed(_, late) => Some(late),
            };
            match due {
                Some(due) if due <= now => late.push((*number, running.phase)),
                Some(due) => sooner(due),
                None => {}
            }
        }
        for (number, phase) in late {
            match phase {
                Phase::Running => {
                    self.stop(number, Cause::Timeout);
                    sooner(now + REMINDER);
                }
                Phase::Stopping(cause, kill, _) if kill <= now => {
                    self.kill(number, cause);
                    sooner(now + RUNNER_GRACE);
                }
                Phase::Stopping(cause, kill, _) => sooner(self.remind(number, cause, kill, now)),
                // Dead already; whoever takes its place has a deadline of its own.
                Phase::Killed(..) if self.is_returning(number) => sooner(now + RUNNER_GRACE),
                Phase::Killed(cause, _) => {
                    // Again, for what was born in between; and the runner, so that its end is seen.
                    self.kill(number, cause);
                    self.runner(number).into_iter().for_each(Runner::kill);
                    sooner(now + RUNNER_GRACE);
                }
            }
        }
        next
    }

    /// Interrupts once more; says when to look again.
    fn remind(&mut self, number: u64, cause: Cause, kill: Instant, now: Instant) -> Instant {
        let Some(exec) = self.execs.get_mut(&number) else { return kill };
        let is_run = matches!(exec.what, What::Run { .. });
        let next = next_reminder(&exec.what, now, kill);
        if let State::Running(running) = &mut exec.state {
            running.phase = Phase::Stopping(cause, kill, next);
        }
        if is_run {
            self.interrupt(number);
        }
        next.min(kill)
    }

    /// The workspace has passed its limit and grows: everything that runs is ended.
    pub(crate) fn disk_is_over(&mut self) {
        let running: Vec<u64> = self
            .execs
            .iter()
            .filter(|(_, exec)| matches!(exec.state, State::Running(_)))
            .map(|(number, _)| *number)
            .collect();
        for number in running {
            self.kill(number, Cause::Disk);
        }
    }

    /// Records the end and tells everyone who waits for it.
    pub(crate) fn finish(&mut self, number: u64, ending: Ending) {
        let mut outcome = self.judge(number, ending);
        if self.execs.get(&number).is_none_or(|exec| exec.outcome().is_some()) {
            return;
        }
        self.complete_receipt(number, &mut outcome);
        let Some(exec) = self.execs.get_mut(&number) else { return };
        exec.code = String::new();
        exec.state = State::Finished(Box::new(outcome.clone()));
        let process = exec.process;
        self.last_activity = Instant::now();
        self.tell(number, &outcome);
        process.into_iter().for_each(|id| self.unpause(id));
        self.changes.forget(self.running() > 0);
        self.shadow.stale = true;
        self.unspooled.push(number);
        if self.unspooled.len() > UNSPOOLED {
            self.spool();
        }
    }

    /// Writes the output of finished calls to disk. Not right at their end: the next call may be on its way.
    pub(crate) fn spool(&mut self) {
        let (mut unread, mut done) = (Vec::new(), Vec::new());
        for number in std::mem::take(&mut self.unspooled) {
            let Some(exec) = self.execs.get(&number) else { continue };
            if exec.output.is_awaited(self.primary(number)) {
                unread.push(number);
            } else if !(exec.output.is_full() && self.may_still_print(exec)) {
                done.push(number);
            }
        }
        self.unspooled = unread.split_off(unread.len().saturating_sub(UNREAD));
        for number in done.into_iter().chain(unread) {
            if let Some(exec) = self.execs.get_mut(&number)
                && let Err(error) = exec.output.close()
            {
                crate::say(&format!("keeping output: {error}"));
            }
        }
        self.forget_oldest();
    }

    fn forget_oldest(&mut self) {
        let finished: Vec<u64> = self
            .execs
            .iter()
            .filter(|(_, exec)| exec.outcome().is_some() && !self.may_still_print(exec))
            .map(|(number, _)| *number)
            .collect();
        let excess = finished.len().saturating_sub(KEPT);
        for number in &finished[..excess] {
            if let Some(exec) = self.execs.remove(number) {
                exec.output.discard();
            }
        }
    }

    /// Whether processes that a finished command left behind may hold its streams.
    fn may_still_print(&self, exec: &Exec) -> bool {
        matches!(exec.what, What::Exec { .. })
            && exec.process.is_some_and(|id| self.processes.contains_key(&id))
    }

    /// A runner's word about its process.
    pub(crate) fn word(&mut self, id: u32, word: Word) {
        let Some(process) = self.processes.get_mut(&id) else { return };
        let role = process.role;
        match word {
            Word::Failed(errno) => self.start_failed(id, errno),
            // Awaited where it was asked for.
            Word::Renewed => {}
            // The end of one that was asked to go, whose place another has taken before.
            Word::Ended { turn, .. } if process.runner.is_of_predecessor(turn) => {}
            Word::Ended { status, cpu_us, peak_memory, left, .. } => {
                process.ended = true;
                self.drain(id);
                let left = left.saturating_sub(self.living_spares(id));
                let ending = Ending::Ended { status, cpu_us, peak_memory, left };
                match role {
                    Role::Exec(number) => self.finish(number, ending),
                    Role::Interpreter => self.interpreter_gone(id, ending),
                }
            }
        }
    }

    /// The line to a runner is closed: nothing is left below it, or user code has killed it.
    pub(crate) fn runner_gone(&mut self, id: u32) {
        let Some(process) = self.processes.get(&id) else { return };
        let (role, ended, session) = (process.role, process.ended, process.session.clone());
        self.drain(id);
        if !ended {
            if let (Some(session), Some(process)) = (self.sessions.get(&session), self.processes.get(&id)) {
                session.kill_orphans(&process.runner);
            }
            match role {
                Role::Exec(number) => self.finish(number, Ending::RunnerGone),
                Role::Interpreter => self.interpreter_gone(id, Ending::RunnerGone),
            }
        }
        if let Some(process) = self.processes.remove(&id) {
            for fd in [process.stdout, process.stderr].into_iter().flatten() {
                self.poller.forget(&fd);
            }
            if let Some(input) = &process.stdin {
                self.poller.forget(&input.fd);
            }
            self.poller.forget(&process.runner.orders);
        }
        if let Role::Exec(number) = role
            && self.execs.get(&number).is_some_and(|exec| exec.outcome().is_some() && exec.output.is_full())
            && !self.unspooled.contains(&number)
        {
            // Nobody can print any more: what it said last can be kept now.
            self.unspooled.push(number);
        }
        self.unstall(id);
        crate::serve::reap();
    }
}

/// A shell that had not yet read its request takes an interrupt for one between calls: bash is asked again and again.
/// Others are asked once more, late: an interrupt can also come between python's look for one and the system call that
/// then waits for ever, and one more would be in the way of code that is cleaning up.
fn next_reminder(what: &What, now: Instant, kill: Instant) -> Instant {
    let late = kill - LAST_CALL;
    match what {
        What::Run { language: Language::Bash } => now + REMINDER,
        _ if now < late => late,
        _ => kill,
    }
}
