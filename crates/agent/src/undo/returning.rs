//! On the way back: an interpreter has ended or is asked to, and a spare takes its place.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    time::{Duration, Instant},
};

use carrel_jail::tree::{self, Stat};
use carrel_proto::{
    guest::Language,
    message::Event,
    outcome::SessionState,
    problem::{Code, Problem},
};
use rustix::process::Signal;

use super::{
    PATIENCE, Spared,
    history::{Asked, History, Return, Spare},
    spares::find,
};
use crate::{
    calls::Ending,
    files_back::FilesBack,
    interpreter::resume,
    process::{self, Process},
    serve::Agent,
};

/// Reads of what an interpreter said before it ended: each takes up to a pipe's worth.
const LAST_WORDS: usize = 64;
/// How often it is looked whether one that was asked to go has stopped.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

impl Agent {
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
    pub(super) fn end_newer(&self, id: u32, spare: &Spare, main: Option<i32>) {
        let Some(process) = self.processes.get(&id) else { return };
        let mut spares = self.spares_of(id);
        spares.push(spare.pid);
        tree::kill_chosen(
            || newer(process.runner.child.pid, spare, &spares, main),
            |pids, signal| process.runner.deliver(pids, signal, false),
        );
    }
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
