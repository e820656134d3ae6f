//! Runs: code for an interpreter, from its queue to what its driver says.

use std::{
    io,
    time::{Duration, Instant},
};

use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::SessionName,
    limits::MAX_TIMEOUT,
    message::{self, MAX_CODE, What},
    outcome::{Cause, SessionState},
    problem::{Code, Problem},
};

use crate::{
    calls::{Ending, limit_problem},
    copies::Copy,
    drivers,
    interpreter::{Heard, Interpreter},
    poll::Token,
    process::{self, Role, Streams},
    serve::Agent,
    session::Session,
};
impl Agent {
    pub(crate) fn close_interpreter(&mut self, id: u32) {
        self.drain(id);
        let Some(mut interpreter) = self.interpreters.remove(&id) else { return };
        self.poller.forget(&interpreter.replies);
        self.poller.forget(&interpreter.requests);
        if let Some((caller, tag)) = interpreter.history.take_asked() {
            let problem = Problem::new(Code::Cancelled, "its session was closed").state(SessionState::Lost);
            self.reply(caller, tag, &message::Event::Failed(problem));
        }
        for number in interpreter.current.into_iter().chain(interpreter.queue) {
            let problem = Problem::new(Code::Cancelled, "its session was closed").state(SessionState::Lost);
            self.finish(number, Ending::Refused(problem));
        }
    }

    pub(crate) fn run(&mut self, caller: u32, tag: u32, run: message::Run) -> Result<(), Problem> {
        if run.code.len() > MAX_CODE {
            return Err(Problem::new(
                Code::TooLarge,
                format!("code of {} bytes; the most is {MAX_CODE}", run.code.len()),
            )
            .hint("write it to a file in /workspace and run that"));
        }
        let language = run.language;
        let known =
            self.config.interpreters.get(&language).filter(|interpreter| !interpreter.program.is_empty());
        if known.is_none() {
            let looked =
                self.config.interpreters.get(&language).map_or("", |interpreter| &interpreter.missing);
            let word = format!(
                "this environment has no {}{}{looked}",
                language.as_str(),
                if looked.is_empty() { "" } else { ": looked for " }
            );
            return Err(Problem::new(Code::InterpreterMissing, word)
                .hint("install it on the host, or use another environment"));
        }
        self.session(&run.session)?;
        let timeout = Duration::from_millis(run.timeout_ms.max(1)).min(MAX_TIMEOUT);
        let number = self.record(run.session.clone(), What::Run { language }, Some(timeout))?;
        self.follow(caller, tag, number, run.cancel_on_disconnect);
        let id = match self.interpreter_of(&run.session, language) {
            Some(id) => id,
            None if self.lost.remove(&(run.session.clone(), language)) => {
                self.finish(number, Ending::Refused(died_between_calls()));
                return Ok(());
            }
            None => match self.start_interpreter(&run.session, language) {
                Ok(id) => id,
                Err(error) => {
                    let problem = not_started(
                        &error,
                        Code::InterpreterFailed,
                        format!("starting {}: {error}", language.as_str()),
                    );
                    self.finish(number, Ending::Refused(problem));
                    return Ok(());
                }
            },
        };
        if let Some(exec) = self.execs.get_mut(&number) {
            exec.code = run.code;
            exec.process = Some(id);
        }
        if let Some(interpreter) = self.interpreters.get_mut(&id) {
            interpreter.unasked = false;
            interpreter.queue.push_back(number);
        }
        self.next_call(id);
        Ok(())
    }

    pub(crate) fn interpreter_of(&self, session: &SessionName, language: Language) -> Option<u32> {
        self.interpreters
            .iter()
            .find(|(id, interpreter)| {
                interpreter.language == language
                    && self
                        .processes
                        .get(id)
                        .is_some_and(|process| process.session == *session && !process.ended)
            })
            .map(|(id, _)| *id)
    }

    pub(crate) fn start_interpreter(&mut self, session: &SessionName, language: Language) -> io::Result<u32> {
        let Session { env, cwd, .. } = &self.sessions[session];
        let (copy, cwd) = (self.copy(language, env), cwd.clone());
        self.bring_to_life(session, language, copy, cwd)
    }

    /// The one seam through which interpreters come to life.
    pub(crate) fn bring_to_life(
        &mut self,
        session: &SessionName,
        language: Language,
        copy: Option<Copy>,
        cwd: String,
    ) -> io::Result<u32> {
        let streams = Streams::pipes(false, self.config.user)?;
        let (request_read, requests) = process::input_pipe()?;
        let (replies, reply_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        process::unblocked(&replies)?;
        for fd in [&request_read, &reply_write] {
            process::give(fd, self.config.user);
        }
        let run = self.config.places.run.clone();
        let mut env = self.sessions[session].env.clone();
        let (argv, greeting, images) = match copy {
            Some(copy) => {
                // A graft has no use for them, and what it becomes is told.
                env.clear();
                (copy.argv.iter().map(Into::into).collect(), copy.greeting, copy.images)
            }
            None => {
                let interpreter = &self.config.interpreters[&language];
                if let Some(modules) = self.config.parent.as_ref().filter(|_| language == Language::Python) {
                    env.insert("CARREL_PARENT".into(), modules.join(","));
                }
                let argv = drivers::command(language, interpreter, &run, &mut env)?;
                (argv, drivers::greeting(language, &run), Vec::new())
            }
        };
        let copy = !images.is_empty();
        let id = self.start(
            session,
            Role::Interpreter,
            streams,
            argv,
            env,
            cwd,
            Some((request_read, reply_write)),
            false,
            images,
        )?;
        let mut interpreter = Interpreter::new(language, requests, replies, greeting);
        interpreter.unproven = copy;
        if !interpreter.flush() {
            self.poller.writable(&interpreter.requests, Token::Requests(id))?;
        }
        self.poller.readable(&interpreter.replies, Token::Replies(id))?;
        self.interpreters.insert(id, interpreter);
        Ok(id)
    }

    /// Gives an interpreter its next call, if it is ready for one.
    pub(crate) fn next_call(&mut self, id: u32) {
        if !self.interpreters.get(&id).is_some_and(Interpreter::can_begin) {
            return;
        }
        self.await_spares_in_doubt();
        let undo = self.undo_of(id);
        let Some(interpreter) = self.interpreters.get_mut(&id).filter(|one| one.can_begin()) else { return };
        let Some(number) = interpreter.queue.pop_front() else { return };
        interpreter.current = Some(number);
        let early: Vec<(Stream, Vec<u8>)> = [Stream::Stdout, Stream::Stderr]
            .into_iter()
            .zip(&mut interpreter.background)
            .filter_map(|(stream, background)| Some((stream, background.take()?)))
            .collect();
        let language = interpreter.language;
        let news = drivers::News {
            after_interrupt: std::mem::take(&mut interpreter.interrupted),
            reseed: std::mem::take(&mut interpreter.reseed),
            warm: false,
        };
        let Some(exec) = self.execs.get_mut(&number) else { return };
        for (stream, bytes) in early {
            exec.output.push(stream, bytes);
        }
        let code = std::mem::take(&mut exec.code);
        let run = &self.config.places.run;
        match drivers::request(language, run, id, number, &code, news, &interpreter.untold, undo) {
            Ok(request) => {
                interpreter.history.begin(number, &interpreter.untold);
                interpreter.untold.clear();
                self.begin(number);
                let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
                interpreter.unsent.extend_from_slice(&request);
                if !interpreter.flush() {
                    let _ = self.poller.writable(&interpreter.requests, Token::Requests(id));
                }
            }
            Err(error) => {
                interpreter.current = None;
                self.finish(
                    number,
                    Ending::Refused(Problem::internal(format!("passing the code on: {error}"))),
                );
                self.next_call(id);
            }
        }
    }

    /// What a driver says.
    pub(crate) fn hear_driver(&mut self, id: u32) {
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        match interpreter.hear(&mut self.scratch) {
            Heard::End => {
                self.poller.forget(&interpreter.replies);
                interpreter.mute = Some(Instant::now());
            }
            Heard::Nonsense(what) => {
                crate::say(&format!("a driver sent {what}"));
                interpreter.history.forget();
                if let Some(process) = self.processes.get(&id) {
                    process.runner.kill_all();
                }
            }
            Heard::Replies(replies) => {
                let shown = replies.iter().rev().find(|reply| reply.display.is_some()).map(|reply| reply.id);
                for reply in replies {
                    self.driver_reply(id, reply);
                }
                // Unless that has happened with its last word.
                let current = self.interpreters.get(&id).and_then(|interpreter| interpreter.current);
                if let Some(number) = shown.filter(|shown| current == Some(*shown)) {
                    self.pump_followers(number);
                }
            }
        }
    }

    pub(crate) fn driver_reply(&mut self, id: u32, reply: crate::interpreter::Reply) {
        let undo = self.undo_of(id);
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        if reply.ready.is_some() && !interpreter.ready {
            interpreter.ready = true;
            interpreter.unproven = false;
            if self.warm_up(id) {
                return;
            }
            return self.next_call(id);
        }
        if let Some(number) = interpreter.warming {
            if reply.done.is_some() {
                self.warmed(id, number);
            }
            return;
        }
        if !reply.imports.is_empty() {
            return self.heard_imports(&reply.imports);
        }
        if let Some(spared) = reply.spare {
            return self.heard_spare(id, spared);
        }
        if let Some(unspared) = reply.unspared {
            return self.heard_unspared(id, unspared);
        }
        if let Some(spared) = reply.restored {
            return self.heard_restored(id, spared);
        }
        if reply.renewed.is_some() {
            interpreter.renewing = false;
            return;
        }
        if let Some(brief) = reply.brief {
            return self.heard_brief(id, reply.id, &brief);
        }
        let Some(number) = interpreter.current.filter(|current| *current == reply.id) else { return };
        // What was printed before comes before.
        self.drain(id);
        if let Some(display) = reply.display
            && let Some(exec) = self.execs.get_mut(&number)
        {
            exec.output.push(Stream::Display, display.get().as_bytes().to_vec());
        }
        if let Some(done) = reply.done {
            let keep = undo.calls;
            if let Some(interpreter) = self.interpreters.get_mut(&id).filter(|_| keep > 0) {
                interpreter.history.leaves(done.unspared);
            }
            self.finish(number, Ending::Done { exit: done.exit, exception: done.error });
            if let Some(interpreter) = self.interpreters.get_mut(&id) {
                interpreter.current = None;
                interpreter.renewing = done.renew;
                interpreter.history.done(number, keep);
                if keep > 0 && interpreter.language == Language::Python {
                    // Only now: a copy that is made while the receipt is would be taken for a process of the user's.
                    interpreter.unsent.extend_from_slice(drivers::KEEP);
                    if !interpreter.flush() {
                        let _ = self.poller.writable(&interpreter.requests, Token::Requests(id));
                    }
                }
            }
            self.next_call(id);
        }
    }

    /// An interpreter's process is gone, with whatever its calls were waiting for.
    pub(crate) fn interpreter_gone(&mut self, id: u32, ending: Ending) {
        if self.start_instead(id) {
            return;
        }
        if let Some(ending) = self.go_back(id, ending) {
            self.interpreter_lost(id, ending, false);
        }
    }

    /// Nothing takes its place. `told`: somebody knows already.
    pub(crate) fn interpreter_lost(&mut self, id: u32, ending: Ending, told: bool) {
        let Some(mut interpreter) = self.interpreters.remove(&id) else { return };
        self.poller.forget(&interpreter.replies);
        self.poller.forget(&interpreter.requests);
        let waiting: Vec<u64> = interpreter.queue.drain(..).collect();
        match interpreter.current {
            Some(number) => {
                self.finish(number, ending);
                for number in waiting {
                    let problem = Problem::new(
                        Code::StateLost,
                        "an earlier call took the interpreter down before this one began",
                    )
                    .hint("nothing of this call ran; the next one starts a new interpreter")
                    .state(SessionState::Lost);
                    self.finish(number, Ending::Refused(problem));
                }
            }
            None if interpreter.unasked => {
                self.not_warm(Problem::new(Code::InterpreterFailed, "the interpreter has ended"));
            }
            None if told && waiting.is_empty() => {}
            // Between calls; also one that has just taken the place of another, and was not ready yet.
            None if interpreter.ready || told || interpreter.history.present().is_some() => {
                crate::say(&format!(
                    "{} has ended between two calls: {ending:?}",
                    interpreter.language.as_str()
                ));
                // Its next call must not run as if nothing had happened.
                if waiting.is_empty()
                    && let Some(process) = self.processes.get(&id)
                {
                    self.lost.insert((process.session.clone(), interpreter.language));
                }
                for number in waiting {
                    self.finish(number, Ending::Refused(died_between_calls()));
                }
            }
            None => {
                let word =
                    interpreter.background.iter_mut().rev().find_map(crate::interpreter::Background::take);
                let said =
                    word.map(|bytes| String::from_utf8_lossy(&bytes).trim().to_owned()).unwrap_or_default();
                let language = interpreter.language.as_str();
                for number in waiting {
                    let problem =
                        Problem::new(Code::InterpreterFailed, format!("{language} did not start: {said}"))
                            .hint("`carrel doctor` shows which interpreters were found");
                    self.finish(number, Ending::Refused(problem));
                }
            }
        }
    }

    /// The program of a process could not be executed.
    pub(crate) fn start_failed(&mut self, id: u32, errno: i32) {
        let error = io::Error::from_raw_os_error(errno);
        let Some(process) = self.processes.get_mut(&id) else { return };
        process.ended = true;
        match process.role {
            Role::Exec(number) => {
                let What::Exec { argv } = &self.execs[&number].what else { return };
                let name = argv.first().cloned().unwrap_or_default();
                let problem = match error.kind() {
                    io::ErrorKind::NotFound => Problem::new(
                        Code::CommandNotFound,
                        format!("`{name}` was not found in this sandbox, or its directory does not exist"),
                    ),
                    _ => not_started(
                        &error,
                        Code::InvalidArgument,
                        format!("`{name}` could not be started: {error}"),
                    ),
                };
                self.finish(number, Ending::Refused(problem.state(SessionState::Preserved)));
            }
            Role::Interpreter => {
                if self.start_instead(id) {
                    return;
                }
                let Some(interpreter) = self.interpreters.remove(&id) else { return };
                self.not_warm(Problem::new(Code::InterpreterFailed, error.to_string()));
                let program =
                    self.config.interpreters.get(&interpreter.language).map_or("", |found| &found.program);
                let problem = match error.kind() {
                    io::ErrorKind::NotFound => {
                        let word = format!(
                            "`{program}` was not found in this environment, or the session's directory does not exist"
                        );
                        Problem::new(Code::InterpreterFailed, word)
                            .hint("`carrel doctor` shows which interpreters were found")
                    }
                    _ => not_started(
                        &error,
                        Code::InterpreterFailed,
                        format!("`{program}` could not be started: {error}"),
                    ),
                };
                for number in interpreter.queue {
                    self.finish(number, Ending::Refused(problem.clone()));
                }
            }
        }
    }

    pub(crate) fn give_up_silent_ones(&mut self, now: Instant) {
        for (id, interpreter) in &mut self.interpreters {
            if interpreter.overdue().is_some_and(|due| due <= now)
                && let Some(process) = self.processes.get(id)
            {
                process.runner.kill_all();
                interpreter.given_up = true;
            }
        }
    }
}

/// A process that could not be made. Too many of them is a limit with a name of its own.
pub(crate) fn not_started(error: &io::Error, code: Code, what: String) -> Problem {
    if error.raw_os_error() == Some(rustix::io::Errno::AGAIN.raw_os_error()) {
        return limit_problem(Cause::Pids).state(SessionState::Preserved);
    }
    Problem::new(code, what)
}

fn died_between_calls() -> Problem {
    Problem::new(Code::StateLost, "the interpreter ended between two calls")
        .hint("nothing of this call ran; the next one starts a new interpreter")
        .state(SessionState::Lost)
}
