//! Going back: to the state before a call that took its interpreter down, or before the last calls, because someone asks.
//!
//! A python driver forks between calls; the fork, a *spare*, has the state and waits for the interpreter's end (see
//! docs/drivers.md). Which states there are, oldest first, is an interpreter's [`History`]:
//!
//! ```text
//! states   new ──call 4──> 4 ──call 5──> 5 ──call 7──> 7     the last one is the present
//! spares   (start anew)    spare         none: threads spare
//! ```
//!
//! The interpreter's end and the word of the spare that takes over come on two lines, in any order: [`Return`] waits for
//! both, and only then is the call told about. One that goes because it was asked to is waited for until it runs no more
//! code, in no thread: giving back the memory of a big one takes longer than all else. Everything that a driver says may be
//! user code's word: a spare counts only if it is a living process below the interpreter's runner, and one that stays silent
//! is given up.
//!
//! What a call that is taken back has started is ended; what ran before it goes on, though no longer as a child of the interpreter.
//! Files go back with it where that is certain to be right: [`crate::files_back`].

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    time::{Duration, Instant},
};

use carrel_jail::tree::{self, Stat};
use carrel_proto::{
    guest::Language,
    id::SessionName,
    message::{Event, MAX_UNDO, What},
    outcome::SessionState,
    problem::{Code, Problem},
};
use rustix::process::Signal;
use serde::Deserialize;

use crate::{
    calls::Ending,
    drivers::Undo,
    files_back::{FilesBack, Point},
    interpreter::{Interpreter, resume},
    process::{self, Process},
    serve::Agent,
    variables::Changes,
};

/// How long a spare may take to take over, and an interpreter to go away when it is to be taken back.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads of what an interpreter said before it ended: each takes up to a pipe's worth.
const LAST_WORDS: usize = 64;
/// How often it is looked whether one that was asked to go has stopped.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// For a word about a spare that somebody waits for. Nobody else is served meanwhile.
const SOON: Duration = Duration::from_millis(200);
const GONE: &str = "the copy of the state before this call is gone";
const NO_POINT: &str = "what they were before was not kept";

/// A driver's word about a spare: the last call of its state, and its pid in the session.
#[derive(Debug, Clone, Copy, Deserialize)]
pub(crate) struct Spared {
    id: u64,
    pid: i32,
    /// Sockets, pipes and the like of its state that it had to give up.
    #[serde(default)]
    closed: u32,
    /// Its state has no descriptors, timers or event loop: nothing that only this process could have.
    #[serde(default)]
    bare: bool,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Unspared {
    reason: String,
}

/// A process that has a state of before.
#[derive(Debug, Clone, Copy)]
struct Spare {
    /// As its session sees it.
    inside: i32,
    /// As the agent sees it.
    pid: i32,
    start_time: u64,
    bare: bool,
}

impl Spare {
    fn is_alive(&self) -> bool {
        tree::start_time(self.pid) == Some(self.start_time)
    }

    /// Also while it ends.
    fn is_there(&self) -> bool {
        Stat::of(self.pid).is_some_and(|stat| stat.start_time == self.start_time)
    }
}

/// The states of an interpreter.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The last call of each; none before the first call. The present one is not among them.
    before: VecDeque<Option<u64>>,
    /// The last call of the present state.
    present: Option<u64>,
    spares: BTreeMap<u64, Spare>,
    /// The driver has yet to say whether the present state has a spare.
    awaited: bool,
    /// Those that are no longer wanted and may still be there: not the user's either.
    leaving: Vec<Spare>,
    /// Why the present state has no spare.
    unspared: Option<String>,
    /// Why the state that the call leaves will have none: known when it ends.
    leaves: Option<String>,
    /// Changes of variables that went with a call: whoever takes it back has not heard of them.
    told: Vec<(u64, Changes)>,
    /// What files were before each call that can be taken back, and before the present one.
    points: BTreeMap<u64, Point>,
    returning: Option<Return>,
}

/// On the way to an earlier state.
#[derive(Debug)]
struct Return {
    deadline: Instant,
    /// How the interpreter ended.
    ending: Option<Ending>,
    /// Who says that it has taken over.
    heir: Option<Spared>,
    /// Who asked for it; nobody if a call has ended the interpreter.
    asked: Option<Asked>,
    /// When it is to be looked again whether the interpreter runs no more code.
    again: Option<Instant>,
}

/// A caller's connection and tag.
type Asked = (u32, u32);

impl Return {
    fn new(asked: Option<Asked>) -> Self {
        Self { deadline: Instant::now() + PATIENCE, ending: None, heir: None, asked, again: None }
    }
}

impl History {
    pub(crate) fn is_returning(&self) -> bool {
        self.returning.is_some()
    }

    pub(crate) fn overdue(&self) -> Option<Instant> {
        let returning = self.returning.as_ref()?;
        Some(returning.again.map_or(returning.deadline, |again| again.min(returning.deadline)))
    }

    /// Who waits for the return, which is not to be.
    pub(crate) fn take_asked(&mut self) -> Option<Asked> {
        self.returning.take()?.asked
    }

    /// The request of a call is on its way, with these changes of variables.
    pub(crate) fn begin(&mut self, number: u64, changes: &Changes) {
        if !changes.is_empty() {
            self.told.push((number, changes.clone()));
        }
    }

    /// A call has ended and left a state of its own; so many before it are kept.
    pub(crate) fn done(&mut self, number: u64, keep: u32) {
        self.before.push_back(self.present);
        self.present = Some(number);
        self.awaited = keep > 0;
        self.unspared = self.leaves.take();
        while self.before.len() > keep as usize {
            self.before.pop_front();
        }
        let oldest = self.before.front().copied().unwrap_or(self.present).unwrap_or(0);
        let wanted = self.spares.split_off(&oldest);
        self.leaving.retain(Spare::is_there);
        self.leaving.extend(std::mem::replace(&mut self.spares, wanted).into_values());
        self.told.retain(|(call, _)| *call > oldest);
        while self.points.len() > keep as usize {
            self.points.pop_first();
        }
    }

    pub(crate) fn set_point(&mut self, call: u64, point: Point) {
        self.points.insert(call, point);
    }

    pub(crate) fn forget_points_unless(&mut self, wanted: bool) {
        if !wanted {
            self.points.clear();
        }
    }

    /// Somebody else has changed files.
    pub(crate) fn spoil_points(&mut self, why: &str) {
        for point in self.points.values_mut().filter(|point| point.is_ok()) {
            *point = Err(why.to_owned());
        }
    }

    /// What files were before all calls that came after a state; these are forgotten.
    fn point_after(&mut self, state: Option<u64>) -> Point {
        let mut later = self.points.split_off(&state.map_or(0, |state| state + 1));
        later.pop_first().map_or_else(|| Err(NO_POINT.to_owned()), |(_, point)| point)
    }

    /// Whether the driver sees something that keeps it from being copied, which may be threads.
    pub(crate) fn has_obstacle(&self) -> bool {
        self.unspared.is_some() || self.leaves.is_some()
    }

    /// Whether a call that ends the interpreter now leaves the state as it was.
    fn is_safe(&self) -> bool {
        self.present.is_none_or(|present| self.spares.contains_key(&present))
    }

    /// The driver's word about the state that the present call leaves.
    pub(crate) fn leaves(&mut self, reason: Option<String>) {
        self.leaves = reason;
    }

    /// Nothing but the present is kept, and that only by the interpreter itself.
    pub(crate) fn forget(&mut self) {
        self.awaited = false;
        self.spares.clear();
        self.before.clear();
        self.points.clear();
    }

    /// The last call of the present state: all that an interpreter without spares has to say of its past.
    pub(crate) fn present(&self) -> Option<u64> {
        self.present
    }

    /// The spare that has the present state, if a copy of it would have all of that.
    pub(crate) fn bare_spare(&self) -> Option<i32> {
        let spare = self.spares.get(&self.present?)?;
        (spare.bare && spare.is_alive()).then_some(spare.pid)
    }

    /// Whether a copy of the present state can be asked for; from then on it is awaited.
    pub(crate) fn wants_copy(&mut self) -> bool {
        let has_one = self.present.is_some_and(|present| self.spares.contains_key(&present));
        let wants = self.present.is_some() && !has_one && !self.has_obstacle();
        self.awaited |= wants;
        wants
    }

    /// Spares are only on their way out from here on. Whether there are any.
    pub(crate) fn let_go(&mut self) -> bool {
        let any = !self.spares.is_empty();
        self.leaving.extend(std::mem::take(&mut self.spares).into_values());
        any
    }

    /// The driver is about to say whether the present state has a spare.
    pub(crate) fn awaiting(self, awaited: bool) -> Self {
        Self { awaited, ..self }
    }

    /// Of an interpreter that has come back from disk.
    pub(crate) fn with_present(present: Option<u64>) -> Self {
        Self { present, ..Self::default() }
    }

    fn spares(&self) -> Vec<i32> {
        let leaving = self.leaving.iter().filter(|spare| spare.is_there());
        self.spares.values().chain(leaving).map(|spare| spare.pid).collect()
    }

    fn any_alive(&self) -> bool {
        self.spares.values().any(Spare::is_alive)
    }

    /// The present is this state now. `None`: there is no such state. Else how many calls were taken back.
    fn go_back(&mut self, to: u64, heir: i32) -> Option<u32> {
        let mut count = 0;
        if self.present != Some(to) {
            let at = self.before.iter().position(|state| *state == Some(to))?;
            count = self.before.len() - at;
            self.before.truncate(at);
            self.present = Some(to);
        }
        let gone = self.spares.split_off(&to);
        self.leaving.extend(gone.into_values().filter(|spare| spare.inside != heir));
        // Whoever takes over makes a spare of its own: one that nobody waits for would be written to disk with its session.
        (self.unspared, self.leaves, self.awaited) = (None, None, true);
        u32::try_from(count).ok()
    }
}

impl Agent {
    /// How many calls of a session can be taken back.
    pub(crate) fn undo_calls(&self, session: &SessionName) -> u32 {
        let own = self.sessions.get(session).and_then(|session| session.undo_calls);
        own.unwrap_or(self.config.undo_calls).min(MAX_UNDO)
    }

    fn undo_calls_of(&self, id: u32) -> u32 {
        self.processes.get(&id).map_or(0, |process| self.undo_calls(&process.session))
    }

    /// What a driver is told with a call.
    pub(crate) fn undo_of(&self, id: u32) -> Undo {
        Undo { calls: self.undo_calls_of(id), memory: self.config.limits.memory.0 }
    }

    /// The spares of an interpreter, as the agent sees them: processes that are not the user's.
    pub(crate) fn spares_of(&self, id: u32) -> Vec<i32> {
        self.interpreters.get(&id).map_or_else(Vec::new, |interpreter| interpreter.history.spares())
    }

    pub(crate) fn living_spares(&self, id: u32) -> u32 {
        let Some(interpreter) = self.interpreters.get(&id) else { return 0 };
        let living = interpreter.history.spares.values().filter(|spare| spare.is_alive()).count();
        u32::try_from(living).unwrap_or(0)
    }

    /// Waits for the words about spares that are on their way, for whoever has to know them all.
    pub(crate) fn await_all_spares(&mut self) {
        let ids: Vec<u32> = self.interpreters.keys().copied().collect();
        self.await_spares(&ids, PATIENCE);
    }

    /// The same where something besides an interpreter may run: a copy that is not known would be taken for that, and files stay
    /// as they are. Whoever is heard meanwhile may begin or end calls.
    pub(crate) fn await_spares_in_doubt(&mut self) {
        if self.running() > 0 || !self.keeps_files() {
            return;
        }
        let left = |id: &&u32| self.processes.get(id).is_some_and(|process| process.left && !process.ended);
        let ids: Vec<u32> = self.interpreters.keys().filter(left).copied().collect();
        self.await_spares(&ids, SOON);
    }

    fn await_spares(&mut self, ids: &[u32], patience: Duration) {
        let deadline = Instant::now() + patience;
        for &id in ids {
            while let Some(interpreter) = self.interpreters.get(&id)
                && interpreter.history.awaited
                && interpreter.language == Language::Python
                && interpreter.mute.is_none()
                && Instant::now() < deadline
            {
                if !tree::wait_readable(&interpreter.replies, deadline) {
                    break;
                }
                self.hear_driver(id);
            }
        }
    }

    /// Ends all spares, of one session or of all, for whoever needs it without them: their memory, or a session that is to be
    /// written to disk. The next call of each interpreter makes one again before it begins. Says whether they are gone.
    pub(crate) fn drop_spares(&mut self, session: Option<&SessionName>) -> bool {
        let mut ending = Vec::new();
        for (id, interpreter) in &mut self.interpreters {
            let Some(process) = self.processes.get(id) else { continue };
            if session.is_some_and(|session| process.session != *session)
                || interpreter.history.is_returning()
            {
                continue;
            }
            let history = &interpreter.history;
            for spare in history.spares.values().chain(&history.leaving).filter(|spare| spare.is_there()) {
                let pid = carrel_jail::userns::pid(spare.pid);
                let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
                process.runner.deliver(&[spare.pid], Signal::KILL, false);
                ending.extend(pidfd);
            }
            interpreter.history.forget();
        }
        let deadline = Instant::now() + PATIENCE;
        ending.iter().all(|pidfd| tree::wait_readable(pidfd, deadline))
    }

    pub(crate) fn heard_spare(&mut self, id: u32, spared: Spared) {
        let (Some(interpreter), Some(process)) = (self.interpreters.get_mut(&id), self.processes.get(&id))
        else {
            return;
        };
        let history = &mut interpreter.history;
        history.awaited = false;
        let known = history.present == Some(spared.id) || history.before.contains(&Some(spared.id));
        if let Some(spare) = find(process, spared.pid, self.config.namespaces).filter(|_| known) {
            history.spares.insert(spared.id, Spare { bare: spared.bare, ..spare });
            history.unspared = None;
        }
    }

    pub(crate) fn heard_unspared(&mut self, id: u32, unspared: Unspared) {
        if let Some(interpreter) = self.interpreters.get_mut(&id) {
            interpreter.history.unspared = Some(unspared.reason);
            interpreter.history.awaited = false;
        }
    }

    pub(crate) fn heard_restored(&mut self, id: u32, spared: Spared) {
        let (Some(interpreter), Some(process)) = (self.interpreters.get_mut(&id), self.processes.get(&id))
        else {
            return;
        };
        let history = &mut interpreter.history;
        // The interpreter may have died between making it and telling of it.
        if history.awaited
            && history.present == Some(spared.id)
            && let Some(spare) = find(process, spared.pid, self.config.namespaces)
        {
            history.awaited = false;
            history.spares.insert(spared.id, spare);
        }
        let returning = history.returning.get_or_insert_with(|| Return::new(None));
        returning.heir = Some(spared);
        self.go_on(id);
    }

    /// An interpreter has ended. Gives the ending back where no earlier state can take its place.
    pub(crate) fn go_back(&mut self, id: u32, ending: Ending) -> Option<Ending> {
        let turn = |agent: &Self| agent.processes.get(&id).map(|process| process.runner.turn);
        let whose = turn(self);
        // What it said last may still be in the pipe. A copy of it that user code has made could write for ever.
        for _ in 0..LAST_WORDS {
            let Some(interpreter) = self.interpreters.get(&id) else { return Some(ending) };
            if interpreter.mute.is_some() || process::available(&interpreter.replies) == 0 {
                break;
            }
            self.hear_driver(id);
        }
        let ended = matches!(ending, Ending::Ended { .. });
        if ended && turn(self) != whose {
            // By that its place has been taken, and the end is not that of whoever has it now.
            if let Some(process) = self.processes.get_mut(&id) {
                process.ended = false;
            }
            return None;
        }
        let keep = self.undo_calls_of(id);
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return Some(ending) };
        let history = &mut interpreter.history;
        let begun = interpreter.ready || history.is_returning();
        let heard = history.returning.as_ref().is_some_and(|returning| returning.heir.is_some());
        let is_new = history.present.is_none() && history.returning.is_none();
        // One that was made, and not told of any more, is about to speak for itself.
        let untold = history.awaited && matches!(ending, Ending::Ended { left: 1.., .. });
        if keep == 0 || !begun || !ended || (!is_new && !heard && !untold && !history.any_alive()) {
            // A spare that was dying already may have been waited for: what ended the interpreter is what counts.
            let (first, asked) = history
                .returning
                .take()
                .map_or((None, None), |returning| (returning.ending, returning.asked));
            let ending = first.unwrap_or(ending);
            if asked.is_some() {
                self.cannot_go_on(id, ending, asked);
                return None;
            }
            return Some(ending);
        }
        if is_new {
            if interpreter.current.is_none() {
                return Some(ending);
            }
            self.start_anew(id, ending);
            return None;
        }
        history.returning.get_or_insert_with(|| Return::new(None)).ending.get_or_insert(ending);
        if let Some(process) = self.processes.get_mut(&id) {
            process.ended = false;
        }
        self.go_on(id);
        None
    }

    /// The first call has ended its interpreter: a new one is what was there before.
    fn start_anew(&mut self, id: u32, ending: Ending) {
        let Some(mut interpreter) = self.interpreters.remove(&id) else { return };
        self.poller.forget(&interpreter.replies);
        self.poller.forget(&interpreter.requests);
        if let Some(process) = self.processes.get(&id) {
            process.runner.kill_all();
        }
        let number = interpreter.current.take();
        let files = self.put_files_back(id, interpreter.history.point_after(None), None);
        self.took_back(number, 1, files);
        if let Some(number) = number {
            self.finish(number, ending);
        }
        if interpreter.queue.is_empty() {
            return;
        }
        let Some(session) = self.processes.get(&id).map(|process| process.session.clone()) else { return };
        match self.start_interpreter(&session, interpreter.language) {
            Ok(new) => self.queue_for(new, interpreter.queue),
            Err(error) => self.refuse_all(interpreter.language, interpreter.queue, &error),
        }
    }

    /// Calls that waited for an interpreter wait for the one that has taken its place.
    pub(crate) fn queue_for(&mut self, id: u32, queue: VecDeque<u64>) {
        for number in &queue {
            if let Some(exec) = self.execs.get_mut(number) {
                exec.process = Some(id);
            }
        }
        if let Some(interpreter) = self.interpreters.get_mut(&id) {
            interpreter.queue = queue;
        }
    }

    /// Nothing could take its place.
    pub(crate) fn refuse_all(&mut self, language: Language, queue: VecDeque<u64>, error: &io::Error) {
        for number in queue {
            let what = format!("starting {}: {error}", language.as_str());
            self.finish(number, Ending::Refused(Problem::new(Code::InterpreterFailed, what)));
        }
    }

    fn took_back(&mut self, number: Option<u64>, calls: u32, files: FilesBack) {
        if let Some(exec) = number.and_then(|number| self.execs.get_mut(&number)) {
            exec.taken_back = Some(calls);
            exec.files_back = Some(files);
        }
    }

    /// Once the interpreter has ended and a spare has taken over: the spare is the interpreter.
    fn go_on(&mut self, id: u32) {
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        let Some(Return { heir: Some(heir), ending, asked, .. }) = &interpreter.history.returning else {
            return;
        };
        let heir = *heir;
        let predecessor = self.processes.get(&id).and_then(|process| process.runner.main()).and_then(ends);
        if ending.is_none() && (asked.is_none() || predecessor.is_none()) {
            if asked.is_some()
                && let Some(returning) = &mut interpreter.history.returning
            {
                returning.again = Some(Instant::now() + LOOK_AGAIN);
            }
            return;
        }
        let Some(returning) = interpreter.history.returning.take() else { return };
        let spare =
            interpreter.history.spares.get(&heir.id).copied().filter(|spare| spare.inside == heir.pid);
        // Of one that was asked to go it does not matter.
        let ending = returning.ending.unwrap_or(Ending::RunnerGone);
        let (Some(spare), Some(taken)) = (spare, interpreter.history.go_back(heir.id, heir.pid)) else {
            return self.cannot_go_on(id, ending, returning.asked);
        };
        interpreter.history.leaving.extend(predecessor);
        if interpreter.current.is_none() && returning.asked.is_none() && taken > 0 {
            // Between calls only the present state may take over unnoticed.
            return self.cannot_go_on(id, ending, None);
        }
        let number = interpreter.current.take();
        let point = interpreter.history.point_after(Some(heir.id));
        interpreter.taken_over();
        interpreter.unsent = resume(heir.id);
        // Told again, the oldest first; what has not been told at all is newer.
        let newer = std::mem::take(&mut interpreter.untold);
        let (kept, again): (Vec<_>, Vec<_>) =
            std::mem::take(&mut interpreter.history.told).into_iter().partition(|(call, _)| *call <= heir.id);
        interpreter.history.told = kept;
        interpreter.untold = again.into_iter().flat_map(|(_, changes)| changes).chain(newer).collect();
        if number.is_some() || returning.asked.is_some() {
            self.end_newer(id, &spare, predecessor.map(|process| process.pid));
        }
        if let Some(process) = self.processes.get_mut(&id) {
            process.runner.adopt(spare.pid, spare.inside);
        }
        // Between calls nothing is taken back.
        let goes_back = number.is_some() || returning.asked.is_some();
        let files = goes_back.then(|| self.put_files_back(id, point, Some(spare.pid)));
        // Only now may it go on: it makes a spare of its own at once, which would be taken for a process that the call has left.
        if let Some(interpreter) = self.interpreters.get_mut(&id)
            && !interpreter.flush()
        {
            let _ = self.poller.writable(&interpreter.requests, crate::poll::Token::Requests(id));
        }
        let Some(files) = files else { return };
        if let Some(number) = number {
            self.took_back(Some(number), taken + 1, files.clone());
            if let Some(exec) = self.execs.get_mut(&number) {
                exec.closed_handles = heir.closed;
            }
            self.finish(number, ending);
        }
        if let Some((caller, tag)) = returning.asked {
            self.undone(id, caller, tag, taken, heir.closed, files);
        }
    }

    fn undone(&mut self, id: u32, caller: u32, tag: u32, calls: u32, closed_handles: u32, files: FilesBack) {
        let Some(interpreter) = self.interpreters.get(&id) else { return };
        let (language, kept) = (interpreter.language, kept(&interpreter.history));
        let FilesBack { state: files_state, reason: files_reason } = files;
        let event = Event::Undone { language, calls, kept, closed_handles, files_state, files_reason };
        self.reply(caller, tag, &event);
    }

    fn cannot_go_on(&mut self, id: u32, ending: Ending, asked: Option<Asked>) {
        if let Some(process) = self.processes.get_mut(&id) {
            process.ended = true;
            process.runner.kill_all();
        }
        if let Some((caller, tag)) = asked {
            let problem =
                Problem::new(Code::StateLost, "the state of before is gone, and the present one with it")
                    .hint("the next call starts a new interpreter; files in /workspace are kept")
                    .state(SessionState::Lost);
            self.reply(caller, tag, &Event::Failed(problem));
        }
        if let Some(interpreter) = self.interpreters.get_mut(&id) {
            interpreter.history = History::with_present(interpreter.history.present);
        }
        self.interpreter_lost(id, ending, asked.is_some());
    }

    /// Nobody has taken over in time.
    pub(crate) fn give_up_returns(&mut self, now: Instant) {
        let late: Vec<u32> = self
            .interpreters
            .iter()
            .filter(|(_, interpreter)| interpreter.history.overdue().is_some_and(|due| due <= now))
            .map(|(id, _)| *id)
            .collect();
        for id in late {
            let Some(interpreter) = self.interpreters.get_mut(&id) else { continue };
            if interpreter.history.returning.as_ref().is_some_and(|returning| returning.deadline > now) {
                self.go_on(id);
                continue;
            }
            let Some(returning) = interpreter.history.returning.take() else { continue };
            match returning.ending {
                Some(ending) => self.cannot_go_on(id, ending, returning.asked),
                None if returning.asked.is_some() => {
                    // The interpreter did not go by itself.
                    interpreter.history.returning =
                        Some(Return { deadline: now + PATIENCE, asked: returning.asked, ..returning });
                    if let Some(process) = self.processes.get(&id)
                        && let Some(main) = process.runner.main()
                    {
                        process.runner.deliver(&[main], Signal::KILL, false);
                    }
                }
                // It has ended, and is not reaped yet: one before it is still giving back its memory, and was its parent.
                None if returning.heir.is_some() && !self.processes.get(&id).is_some_and(has_living_main) => {
                    interpreter.history.returning = Some(Return { deadline: now + PATIENCE, ..returning });
                }
                // A word of user code's own: the interpreter lives.
                None => {}
            }
        }
    }

    /// Ends a call's interpreter and all that the call has started; everything below it where nothing can take its place.
    pub(crate) fn kill_call(&self, id: u32) {
        let (Some(process), Some(interpreter)) = (self.processes.get(&id), self.interpreters.get(&id)) else {
            return self.processes.get(&id).into_iter().for_each(|process| process.runner.kill_all());
        };
        let history = &interpreter.history;
        let spare = history.present.and_then(|present| history.spares.get(&present));
        match spare.filter(|spare| spare.is_alive()) {
            Some(spare) => self.end_newer(id, spare, process.runner.main()),
            None => process.runner.kill_all(),
        }
    }

    /// Ends what was started after a spare was made, and the interpreter if it is named.
    fn end_newer(&self, id: u32, spare: &Spare, main: Option<i32>) {
        let Some(process) = self.processes.get(&id) else { return };
        let mut spares = self.spares_of(id);
        spares.push(spare.pid);
        tree::kill_chosen(
            || newer(process.runner.child.pid, spare, &spares, main),
            |pids, signal| process.runner.deliver(pids, signal, false),
        );
    }

    /// Takes back the last calls of a session's interpreter.
    pub(crate) fn undo(
        &mut self,
        caller: u32,
        tag: u32,
        session: &SessionName,
        language: Option<Language>,
        calls: u32,
    ) -> Result<(), Problem> {
        self.session(session)?;
        let keep = self.undo_calls(session);
        if keep == 0 {
            return Err(cannot("nothing can be taken back: undo is off for this session")
                .hint("open the sandbox or session with --undo-calls"));
        }
        if calls == 0 {
            return Err(Problem::new(Code::InvalidArgument, "at least one call is to be taken back"));
        }
        let last = || {
            self.execs.values().rev().find_map(|exec| match exec.what {
                What::Run { language } if exec.session == *session => Some(language),
                _ => None,
            })
        };
        let Some(language) = language.or_else(last) else {
            return Err(cannot("nothing can be taken back: no call has run in this session"));
        };
        if let Some(why) = never(language) {
            return Err(cannot(format!("calls of {} cannot be taken back: {why}", language.as_str())));
        }
        let Some(id) = self.interpreter_of(session, language) else {
            return Err(cannot(format!(
                "nothing can be taken back: no {} is up in this session",
                language.as_str()
            )));
        };
        // One that is not known would be taken for somebody in the background while it ends.
        self.await_spares(&[id], SOON);
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return Ok(()) };
        if interpreter.current.is_some()
            || !interpreter.queue.is_empty()
            || interpreter.history.is_returning()
        {
            return Err(Problem::new(
                Code::Busy,
                "a call is under way; only calls that have ended are taken back",
            )
            .hint("wait for it, or cancel it")
            .state(SessionState::Preserved));
        }
        let history = &interpreter.history;
        let kept = kept(history);
        let at = history.before.len().checked_sub(calls as usize);
        let Some(target) = at.and_then(|at| history.before.get(at).copied()) else {
            return Err(cannot(format!("{calls} calls cannot be taken back: {kept} are kept"))
                .hint(format!("at most {keep} are kept (--undo-calls)")));
        };
        let Some(target) = target else {
            // Before its first call an interpreter was new.
            if let Some(process) = self.processes.get_mut(&id) {
                process.runner.kill_all();
                // With all that is below its runner: files are put back when that is gone.
                process.ended = true;
            }
            let point = self.interpreters.get_mut(&id).map(|one| one.history.point_after(None));
            self.close_interpreter(id);
            let files = self.put_files_back(id, point.unwrap_or_else(|| Err(NO_POINT.to_owned())), None);
            let FilesBack { state: files_state, reason: files_reason } = files;
            let event =
                Event::Undone { language, calls, kept: 0, closed_handles: 0, files_state, files_reason };
            self.reply(caller, tag, &event);
            return Ok(());
        };
        if !history.spares.get(&target).is_some_and(Spare::is_alive) {
            return Err(cannot(format!(
                "{calls} calls cannot be taken back: the state before them could not be kept; {kept} are kept"
            ))
            .hint("a call whose reply says `transactional: false` leaves a state that is not kept"));
        }
        interpreter.history.returning = Some(Return::new(Some((caller, tag))));
        interpreter.ready = false;
        interpreter.unsent.extend_from_slice(format!("{{\"undo\":{target}}}\n").as_bytes());
        if !interpreter.flush() {
            let _ = self.poller.writable(&interpreter.requests, crate::poll::Token::Requests(id));
        }
        Ok(())
    }

    /// Whether the session would be as before, had the call taken its interpreter down or did the next one do so; and why not.
    pub(crate) fn transactional(&self, number: u64) -> (Option<bool>, Option<String>) {
        let exec = &self.execs[&number];
        let What::Run { language } = exec.what else { return (None, None) };
        if self.undo_calls(&exec.session) == 0 {
            return (None, None);
        }
        if let Some(why) = never(language) {
            return (Some(false), Some(why.to_owned()));
        }
        // Of a first call's interpreter nothing is left.
        if exec.taken_back.is_some() {
            return (Some(true), None);
        }
        let interpreter = exec.process.and_then(|id| self.interpreters.get(&id));
        let Some(Interpreter { history, .. }) = interpreter else { return (None, None) };
        let unsafe_before = (!history.is_safe()).then(|| history.unspared.as_deref().unwrap_or(GONE));
        match history.leaves.as_deref().or(unsafe_before) {
            Some(reason) => (Some(false), Some(reason.to_owned())),
            None => (Some(true), None),
        }
    }
}

/// How many calls can be taken back in a row.
fn kept(history: &History) -> usize {
    let is_kept = |state: &Option<u64>| {
        state.is_none_or(|state| history.spares.get(&state).is_some_and(Spare::is_alive))
    };
    history.before.iter().rev().take_while(|state| is_kept(state)).count()
}

fn cannot(what: impl Into<String>) -> Problem {
    Problem::new(Code::UndoUnavailable, what).state(SessionState::Preserved)
}

/// Why states of this language are never kept.
fn never(language: Language) -> Option<&'static str> {
    match language {
        Language::Python => None,
        Language::Bash => Some("a copy of a shell has neither its jobs nor its traps"),
        Language::Node => Some("node runs threads of its own, and a copy of the process has none of them"),
    }
}

/// A spare, which is a child of its interpreter.
fn find(process: &Process, inside: i32, namespaces: bool) -> Option<Spare> {
    // Without its interpreter it is the runner's.
    let parents = [Some(process.runner.child.pid), process.runner.main()];
    let is_it = |pid: &i32| if namespaces { tree::innermost(*pid) == Some(inside) } else { *pid == inside };
    // Most likely the youngest of the interpreter's.
    let children = parents.into_iter().flatten().flat_map(tree::children).collect::<Vec<_>>();
    let pid = children.into_iter().rev().find(is_it).or_else(|| {
        let is_child = |pid: &i32| Stat::of(*pid).is_some_and(|stat| parents.contains(&Some(stat.parent)));
        tree::below(process.runner.child.pid).into_iter().find(|pid| is_it(pid) && is_child(pid))
    })?;
    Some(Spare { inside, pid, start_time: tree::start_time(pid)?, bare: false })
}

fn has_living_main(process: &Process) -> bool {
    process.runner.main().is_some_and(process::is_running)
}

/// An interpreter that runs no more code, and may still be there for a while. Other threads of it may be in the middle of a write.
fn ends(pid: i32) -> Option<Spare> {
    let stat = Stat::of(pid).filter(|stat| stat.exiting && stat.threads <= 1)?;
    Some(Spare { inside: tree::innermost(pid).unwrap_or(pid), pid, start_time: stat.start_time, bare: false })
}

/// What was started below a runner after a spare was made, but by what was there before it; and `main`.
fn newer(runner: i32, spare: &Spare, spares: &[i32], main: Option<i32>) -> Vec<i32> {
    let all: BTreeMap<i32, Stat> =
        tree::below(runner).into_iter().filter_map(|pid| Some((pid, Stat::of(pid)?))).collect();
    let stays = |mut pid: i32| {
        loop {
            if Some(pid) == main {
                return false;
            }
            let Some(stat) = all.get(&pid) else { return false };
            // Ticks are coarse; within one of them the later pid is the younger.
            if spares.contains(&pid) || (stat.start_time, pid) < (spare.start_time, spare.pid) {
                return true;
            }
            pid = stat.parent;
        }
    };
    all.keys().copied().filter(|pid| !stays(*pid)).collect()
}
