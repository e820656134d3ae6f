//! A box that is nobody's yet: its agent and interpreter are up, and a pool keeps it for whoever comes next.
//!
//! It hangs on the line of its keeper. When that ends before anybody has claimed the box, so does the box: a daemon that is
//! killed leaves none of its ready ones running. What it may tell of its time before the claim it does not tell: clocks
//! begin with the claim, and an interpreter that nobody has asked for is not listed.

use std::time::{Instant, SystemTime};

use carrel_proto::{
    guest::Language,
    id::SessionName,
    message::{Event, MAX_UNDO, What},
    problem::{Code, Problem},
};

use crate::{
    calls::Ending,
    drivers::{self, News, Undo},
    poll::Token,
    serve::Agent,
    variables::Changes,
};

/// The keeper, and the tag of its question until the box is warm.
#[derive(Debug)]
pub(crate) struct Ready {
    keeper: u32,
    waiting: Option<u32>,
}

/// Goes the way of a call, so that the first one finds code loaded and pages there. It shows something where that leaves no
/// trace.
fn warming_code(language: Language) -> &'static str {
    match language {
        Language::Python => "display(0)",
        Language::Bash => ":",
        Language::Node => "void 0",
    }
}

impl Agent {
    pub(crate) fn is_keeper(&self, caller: u32) -> bool {
        self.ready.as_ref().is_some_and(|ready| ready.keeper == caller)
    }

    /// Whoever finds the box by its name does so after its keeper has passed it on: that word is heard first.
    pub(crate) fn hear_keeper_first(&mut self, caller: u32) {
        if let Some(keeper) = self.ready.as_ref().map(|ready| ready.keeper).filter(|keeper| *keeper != caller)
        {
            self.hear_caller(keeper);
        }
    }

    pub(crate) fn keep_ready(&mut self, caller: u32, tag: u32) -> Result<Option<Event>, Problem> {
        if self.ready.is_some() || !self.execs.is_empty() {
            return Err(Problem::new(Code::Conflict, "this sandbox is in use"));
        }
        let first =
            self.config.first.and_then(|language| self.interpreter_of(&SessionName::main(), language));
        let Some(id) = first else {
            self.ready = Some(Ready { keeper: caller, waiting: None });
            return Ok(Some(Event::Done));
        };
        self.ready = Some(Ready { keeper: caller, waiting: Some(tag) });
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return Ok(None) };
        interpreter.unasked = true;
        if interpreter.ready {
            self.warm_up(id);
        }
        Ok(None)
    }

    /// An interpreter is up. `false`: nobody waits for it to be warm.
    pub(crate) fn warm_up(&mut self, id: u32) -> bool {
        let waited_for = self.ready.as_ref().is_some_and(|ready| ready.waiting.is_some());
        let Some(language) =
            self.interpreters.get(&id).filter(|one| waited_for && one.unasked).map(|one| one.language)
        else {
            return false;
        };
        if let Err(problem) = self.begin_warming(id, language) {
            self.not_warm(problem);
        }
        true
    }

    /// All of what a call takes, here and in the driver, so that its pages are there for the first one.
    fn begin_warming(&mut self, id: u32, language: Language) -> Result<(), Problem> {
        let number = self.record(SessionName::main(), What::Run { language }, None)?;
        let news = News { after_interrupt: false, reseed: false, warm: true };
        let undo = Undo { calls: self.config.undo_calls.min(MAX_UNDO), memory: self.config.limits.memory.0 };
        let (run, code) = (&self.config.places.run, warming_code(language));
        let request = drivers::request(language, run, id, number, code, news, &Changes::new(), undo)
            .map_err(|error| Problem::internal(format!("warming up: {error}")))?;
        if let Some(exec) = self.execs.get_mut(&number) {
            exec.process = Some(id);
        }
        self.begin(number);
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return Ok(()) };
        interpreter.warming = Some(number);
        interpreter.unsent.extend_from_slice(&request);
        if !interpreter.flush() {
            let _ = self.poller.writable(&interpreter.requests, Token::Requests(id));
        }
        Ok(())
    }

    /// The driver's answer to the call that warms it up, of which nothing stays.
    pub(crate) fn warmed(&mut self, id: u32, number: u64) {
        self.drain(id);
        self.finish(number, Ending::Done { exit: 0, exception: None });
        if let Some(exec) = self.execs.remove(&number) {
            exec.output.discard();
        }
        self.unspooled.retain(|unspooled| *unspooled != number);
        self.next_exec = number;
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        interpreter.warming = None;
        for background in &mut interpreter.background {
            let _ = background.take();
        }
        if let Some((keeper, tag)) = self.waiting_keeper() {
            self.reply(keeper, tag, &Event::Done);
        }
        self.next_call(id);
    }

    /// Its keeper takes another one.
    pub(crate) fn not_warm(&mut self, problem: Problem) {
        if let Some((keeper, tag)) = self.waiting_keeper() {
            self.reply(keeper, tag, &Event::Failed(problem));
        }
    }

    fn waiting_keeper(&mut self) -> Option<(u32, u32)> {
        let ready = self.ready.as_mut()?;
        Some((ready.keeper, ready.waiting.take()?))
    }

    pub(crate) fn claimed(
        &mut self,
        caller: u32,
        (idle_timeout_s, max_lifetime_s): (u64, u64),
        undo_calls: u32,
    ) -> Result<(), Problem> {
        if !self.is_keeper(caller) {
            return Err(Problem::new(Code::Conflict, "this sandbox is not kept ready by the caller"));
        }
        self.ready = None;
        let now = Instant::now();
        (self.started, self.last_activity) = (now, now);
        self.config.idle_timeout_s = idle_timeout_s;
        self.config.max_lifetime_s = max_lifetime_s;
        self.config.undo_calls = undo_calls;
        for session in self.sessions.values_mut() {
            session.opened = SystemTime::now();
        }
        // An interpreter that died meanwhile had no state to lose.
        self.lost.clear();
        Ok(())
    }
}
