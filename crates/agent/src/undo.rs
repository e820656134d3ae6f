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

mod history;
mod returning;
mod spares;

use std::time::Duration;

use carrel_proto::{
    guest::Language,
    id::SessionName,
    message::{Event, MAX_UNDO, What},
    outcome::SessionState,
    problem::{Code, Problem},
};
use serde::Deserialize;

pub(crate) use self::history::History;
use self::history::{Return, Spare, kept};
use crate::{drivers::Undo, files_back::FilesBack, interpreter::Interpreter, serve::Agent};

/// How long a spare may take to take over, and an interpreter to go away when it is to be taken back.
const PATIENCE: Duration = Duration::from_secs(5);
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

impl Agent {
    /// How many calls of a session can be taken back.
    pub(crate) fn undo_calls(&self, session: &SessionName) -> u32 {
        let own = self.sessions.get(session).and_then(|session| session.undo_calls);
        own.unwrap_or(self.config.undo_calls).min(MAX_UNDO)
    }

    pub(super) fn undo_calls_of(&self, id: u32) -> u32 {
        self.processes.get(&id).map_or(0, |process| self.undo_calls(&process.session))
    }

    /// What a driver is told with a call.
    pub(crate) fn undo_of(&self, id: u32) -> Undo {
        Undo { calls: self.undo_calls_of(id), memory: self.config.limits.memory.0 }
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

    pub(super) fn undone(
        &mut self,
        id: u32,
        caller: u32,
        tag: u32,
        calls: u32,
        closed_handles: u32,
        files: FilesBack,
    ) {
        let Some(interpreter) = self.interpreters.get(&id) else { return };
        let (language, kept) = (interpreter.language, kept(&interpreter.history));
        let FilesBack { state: files_state, reason: files_reason } = files;
        let event = Event::Undone { language, calls, kept, closed_handles, files_state, files_reason };
        self.reply(caller, tag, &event);
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
