//! Each request becomes work here.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    path::PathBuf,
    time::{Duration, Instant, SystemTime},
};

use carrel_files::{Owner, Root};
use carrel_proto::{
    frame::Stream,
    guest::{EndReason, Language},
    id::{ExecId, SessionName},
    limits::MAX_TIMEOUT,
    message::{self, Event, MAX_ARGS, MAX_CODE, OpenSession, PROTOCOL, Request, SessionInfo, Status, What},
    outcome::{Cause, SessionState},
    problem::{Code, Problem},
};

use crate::{
    calls::{Ending, Exec, State, limit_problem},
    connection::Follower,
    drivers,
    interpreter::{Heard, Interpreter},
    output::Output,
    poll::Token,
    process::{self, Process, Role, Streams},
    runner::Launch,
    serve::{Agent, Wait},
    session::{self, Session},
};

/// Sessions of one sandbox: each is two namespaces and a process.
const MAX_SESSIONS: usize = 32;

impl Agent {
    pub(crate) fn request(&mut self, caller: u32, tag: u32, request: Request) {
        let greeted = self.connections.get(&caller).is_some_and(|connection| connection.greeted);
        self.last_activity = Instant::now();
        let answer = match request {
            Request::Hello { protocol } if protocol == PROTOCOL => {
                if let Some(connection) = self.connections.get_mut(&caller) {
                    connection.greeted = true;
                }
                Ok(Some(Event::Welcome { protocol: PROTOCOL }))
            }
            Request::Hello { protocol } => Err(Problem::new(
                Code::Protocol,
                format!("this sandbox's agent speaks protocol {PROTOCOL}, the caller {protocol}"),
            )
            .hint("close the sandbox and open it again with this version of carrel")),
            _ if !greeted => Err(Problem::new(Code::Protocol, "the first request must be hello")),
            Request::Run(run) => self.run(caller, tag, run).map(|()| None),
            Request::Exec(exec) => self.exec(caller, tag, exec).map(|()| None),
            Request::Attach { exec, since, follow } => {
                self.attach(caller, tag, &exec, since, follow).map(|()| None)
            }
            Request::Wait { exec, timeout_ms } => self.wait(caller, tag, &exec, timeout_ms),
            Request::CloseStdin { exec } => self.close_stdin(&exec),
            Request::Signal { exec, signal } => self.signal(&exec, signal),
            Request::Cancel { exec } => self.find(&exec).map(|number| {
                self.stop(number, Cause::Cancelled);
                Some(Event::Done)
            }),
            Request::Resize { exec, rows, cols } => self.resize(&exec, rows, cols),
            Request::Execs => Ok(Some(Event::Execs {
                execs: self.execs.iter().map(|(number, exec)| exec.info(*number)).collect(),
            })),
            Request::OpenSession(open) => self.open_session(open).map(|()| Some(Event::Done)),
            Request::CloseSession { name } => self.close_session(&name).map(|()| Some(Event::Done)),
            Request::Status => Ok(Some(Event::Status(self.status()))),
            Request::Files(request) => self.files(request),
            Request::Shutdown => {
                self.ending = Some(EndReason::Closed);
                Ok(Some(Event::Done))
            }
        };
        match answer {
            Ok(Some(event)) => self.reply(caller, tag, &event),
            Ok(None) => self.pump(caller),
            Err(problem) => self.reply(caller, tag, &Event::Failed(problem)),
        }
    }

    fn find(&self, exec: &ExecId) -> Result<u64, Problem> {
        self.exec_number(exec).ok_or_else(|| {
            Problem::new(Code::ExecNotFound, format!("there is no exec `{exec}` in this sandbox"))
                .hint("list them with `carrel inspect`; only the newest are kept")
        })
    }

    /// The session, made now if it is the one that every sandbox has.
    fn session(&mut self, name: &SessionName) -> Result<&Session, Problem> {
        if !self.sessions.contains_key(name) {
            if *name != SessionName::main() {
                return Err(Problem::new(
                    Code::SessionNotFound,
                    format!("there is no session `{name}` in this sandbox"),
                )
                .hint("open it first"));
            }
            self.open_session(OpenSession { name: name.clone(), cwd: None, env: BTreeMap::new() })?;
        }
        Ok(&self.sessions[name])
    }

    pub(crate) fn open_session(&mut self, open: OpenSession) -> Result<(), Problem> {
        if self.sessions.contains_key(&open.name) {
            return Err(Problem::new(
                Code::SessionExists,
                format!("session `{}` is open already", open.name),
            ));
        }
        // The one that every sandbox has needs no room.
        if open.name != SessionName::main() && self.sessions.len() >= MAX_SESSIONS {
            return Err(Problem::new(
                Code::TooMany,
                format!("a sandbox has at most {MAX_SESSIONS} sessions"),
            )
            .hint("close one, or open another sandbox"));
        }
        let places = &self.config.places;
        let mut env = self.config.variables.clone();
        env.insert("HOME".into(), places.home.clone());
        env.extend(open.env);
        let cwd = open.cwd.unwrap_or_else(|| places.workspace.clone());
        env.insert("PWD".into(), cwd.clone());
        let session = Session::open(&self.thread, &self.config, cwd, env)
            .map_err(|error| Problem::internal(format!("opening session `{}`: {error}", open.name)))?;
        self.sessions.insert(open.name, session);
        Ok(())
    }

    fn close_session(&mut self, name: &SessionName) -> Result<(), Problem> {
        let Some(session) = self.sessions.remove(name) else {
            return Err(Problem::new(
                Code::SessionNotFound,
                format!("there is no session `{name}` in this sandbox"),
            ));
        };
        let processes: Vec<u32> = self
            .processes
            .iter()
            .filter(|(_, process)| process.session == *name)
            .map(|(id, _)| *id)
            .collect();
        for id in processes {
            self.processes[&id].runner.kill_all();
            match self.processes[&id].role {
                Role::Exec(number) => self.kill(number, Cause::Cancelled),
                // Now, not when it is gone: a session of the same name may be opened before.
                Role::Interpreter => self.close_interpreter(id),
            }
        }
        session.close();
        self.lost.retain(|(session, _)| session != name);
        Ok(())
    }

    fn close_interpreter(&mut self, id: u32) {
        self.drain(id);
        let Some(interpreter) = self.interpreters.remove(&id) else { return };
        self.poller.forget(&interpreter.replies);
        self.poller.forget(&interpreter.requests);
        for number in interpreter.current.into_iter().chain(interpreter.queue) {
            let problem = Problem::new(Code::Cancelled, "its session was closed").state(SessionState::Lost);
            self.finish(number, Ending::Refused(problem));
        }
    }

    fn status(&self) -> Status {
        let sessions = self.sessions.keys().map(|name| SessionInfo {
            name: name.clone(),
            interpreters: self
                .interpreters
                .iter()
                .filter(|(id, _)| self.processes.get(id).is_some_and(|process| process.session == *name))
                .map(|(_, interpreter)| interpreter.language)
                .collect(),
        });
        let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Status {
            sessions: sessions.collect(),
            interpreters: self.config.interpreters.clone(),
            running: u32::try_from(self.running()).unwrap_or(u32::MAX),
            idle_ms: millis(self.last_activity.elapsed()),
            age_ms: millis(self.started.elapsed()),
        }
    }

    fn files(&mut self, request: carrel_proto::files::FileRequest) -> Result<Option<Event>, Problem> {
        let root = match &self.root {
            Some(root) => root,
            None => {
                let user = self.config.user;
                let root = Root::open(&self.config.places.workspace)
                    .map_err(|error| Problem::internal(format!("opening the workspace: {error}")))?;
                self.root.insert(root.with_owner(Owner { uid: user.0, gid: user.1 }))
            }
        };
        carrel_files::serve(root, request).map(|reply| Some(Event::Files(reply))).map_err(Into::into)
    }

    /// Room for one more run or exec, with its record.
    fn record(
        &mut self,
        session: SessionName,
        what: What,
        timeout: Option<Duration>,
    ) -> Result<u64, Problem> {
        let open = self.execs.values().filter(|exec| exec.outcome().is_none()).count();
        if open >= self.config.limits.execs as usize {
            return Err(Problem::new(
                Code::TooMany,
                format!("{open} runs and execs are under way, the most allowed"),
            )
            .hint("wait for some to end, or kill them"));
        }
        let number = self.next_exec;
        self.next_exec += 1;
        let path = PathBuf::from(&self.config.places.spool).join(format!("{}.out", ExecId::numbered(number)));
        let exec = Exec {
            session,
            what,
            created: SystemTime::now(),
            output: Output::new(path, self.config.limits.output.0),
            process: None,
            state: State::Queued,
            code: String::new(),
            timeout,
        };
        self.execs.insert(number, exec);
        Ok(number)
    }

    fn follow(&mut self, caller: u32, tag: u32, number: u64, cancel_on_disconnect: bool) {
        if let Some(connection) = self.connections.get_mut(&caller) {
            connection.send(tag, &Event::Started { exec: ExecId::numbered(number), detached: false });
            connection.followers.push(Follower {
                tag,
                exec: ExecId::numbered(number),
                next: 0,
                until: None,
                primary: true,
                cancel_on_disconnect,
            });
        }
    }

    fn run(&mut self, caller: u32, tag: u32, run: message::Run) -> Result<(), Problem> {
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
            interpreter.queue.push_back(number);
        }
        self.next_call(id);
        Ok(())
    }

    fn interpreter_of(&self, session: &SessionName, language: Language) -> Option<u32> {
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

    /// The one seam through which interpreters come to life.
    fn start_interpreter(&mut self, session: &SessionName, language: Language) -> io::Result<u32> {
        let streams = Streams::pipes(false, self.config.user)?;
        let (request_read, requests) = process::input_pipe()?;
        let (replies, reply_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        process::unblocked(&replies)?;
        for fd in [&request_read, &reply_write] {
            process::give(fd, self.config.user);
        }
        let run = self.config.places.run.clone();
        let session_ref = &self.sessions[session];
        let mut env = session_ref.env.clone();
        let argv = drivers::command(language, &self.config.interpreters[&language], &run, &mut env);
        let cwd = session_ref.cwd.clone();
        let id = self.start(
            session,
            Role::Interpreter,
            streams,
            argv,
            env,
            cwd,
            Some((request_read, reply_write)),
            false,
        )?;
        let mut interpreter =
            Interpreter::new(language, requests, replies, drivers::greeting(language, &run));
        interpreter.flush();
        self.poller.readable(&interpreter.replies, Token::Replies(id))?;
        self.interpreters.insert(id, interpreter);
        Ok(id)
    }

    #[expect(clippy::too_many_arguments, reason = "one place that brings a process to life, called twice")]
    fn start(
        &mut self,
        session: &SessionName,
        role: Role,
        streams: Streams,
        argv: Vec<OsString>,
        env: BTreeMap<String, String>,
        cwd: String,
        control: Option<(std::os::fd::OwnedFd, std::os::fd::OwnedFd)>,
        terminal: bool,
    ) -> io::Result<u32> {
        let Streams { ours, stdin, stdout, stderr } = streams;
        let launch = Launch {
            argv,
            env,
            cwd,
            stdin,
            stdout,
            stderr,
            control,
            terminal,
            confinement: session::confinement(&self.config),
            jailed: self.config.namespaces,
        };
        let runner = self.sessions[session].start(&self.thread, launch)?;
        process::unblocked(&runner.orders)?;
        let id = self.number();
        self.poller.readable(&runner.orders, Token::Runner(id))?;
        self.poller.readable(&ours.stdout, Token::Stdout(id))?;
        if let Some(stderr) = &ours.stderr {
            self.poller.readable(stderr, Token::Stderr(id))?;
        }
        let process = Process {
            session: session.clone(),
            runner,
            role,
            stdout: Some(ours.stdout),
            stderr: ours.stderr,
            stdin: ours.stdin,
            terminal,
            paused: false,
            ended: false,
        };
        self.processes.insert(id, process);
        Ok(id)
    }

    /// Gives an interpreter its next call, if it is ready for one.
    fn next_call(&mut self, id: u32) {
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        if !interpreter.ready || interpreter.current.is_some() {
            return;
        }
        let Some(number) = interpreter.queue.pop_front() else { return };
        interpreter.current = Some(number);
        let early: Vec<(Stream, Vec<u8>)> = [Stream::Stdout, Stream::Stderr]
            .into_iter()
            .zip(&mut interpreter.background)
            .filter_map(|(stream, background)| Some((stream, background.take()?)))
            .collect();
        let language = interpreter.language;
        let Some(exec) = self.execs.get_mut(&number) else { return };
        for (stream, bytes) in early {
            exec.output.push(stream, bytes);
        }
        let code = std::mem::take(&mut exec.code);
        match drivers::request(language, &self.config.places.run, id, number, &code) {
            Ok(request) => {
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
                if let Some(process) = self.processes.get(&id) {
                    process.runner.kill_all();
                }
            }
            Heard::Replies(replies) => {
                for reply in replies {
                    self.driver_reply(id, reply);
                }
            }
        }
    }

    fn driver_reply(&mut self, id: u32, reply: crate::interpreter::Reply) {
        let Some(interpreter) = self.interpreters.get_mut(&id) else { return };
        if reply.ready.is_some() && !interpreter.ready {
            interpreter.ready = true;
            return self.next_call(id);
        }
        if reply.renewed.is_some() {
            interpreter.renewing = false;
            return;
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
            self.finish(number, Ending::Done { exit: done.exit, exception: done.error });
            if let Some(interpreter) = self.interpreters.get_mut(&id) {
                interpreter.current = None;
                interpreter.renewing = done.renew;
            }
            self.next_call(id);
        } else {
            self.pump_followers(number);
        }
    }

    /// An interpreter's process is gone, with whatever its calls were waiting for.
    pub(crate) fn interpreter_gone(&mut self, id: u32, ending: Ending) {
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
            None if interpreter.ready => {
                // It died between calls: its next call must not run as if nothing had happened.
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
                let Some(interpreter) = self.interpreters.remove(&id) else { return };
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

    fn exec(&mut self, caller: u32, tag: u32, exec: message::Exec) -> Result<(), Problem> {
        if exec.argv.is_empty() || exec.argv[0].is_empty() {
            return Err(Problem::new(Code::InvalidArgument, "no command was given"));
        }
        if exec.argv.len() + exec.env.len() > MAX_ARGS {
            return Err(Problem::new(
                Code::TooLarge,
                format!("more than {MAX_ARGS} arguments and variables"),
            ));
        }
        let nul = |text: &String| text.contains('\0');
        if exec.argv.iter().any(nul)
            || exec
                .env
                .iter()
                .any(|(name, value)| nul(name) || nul(value) || name.contains('=') || name.is_empty())
        {
            return Err(Problem::new(
                Code::InvalidArgument,
                "arguments and variables hold no NUL, names no `=`",
            ));
        }
        let session = self.session(&exec.session)?;
        let mut env = session.env.clone();
        env.extend(exec.env);
        let base = session.cwd.clone();
        let cwd = match exec.cwd {
            Some(path) if path.starts_with('/') => path,
            Some(path) => format!("{base}/{path}"),
            None => base,
        };
        env.insert("PWD".into(), cwd.clone());
        let timeout = exec.timeout_ms.map(|millis| Duration::from_millis(millis.max(1)));
        let what = What::Exec { argv: exec.argv.clone() };
        let number = self.record(exec.session.clone(), what, timeout)?;
        if exec.detach {
            self.reply(caller, tag, &Event::Started { exec: ExecId::numbered(number), detached: true });
        } else {
            self.follow(caller, tag, number, exec.cancel_on_disconnect);
        }
        let streams = match exec.pty {
            Some(size) => {
                env.entry("TERM".into()).or_insert_with(|| "xterm-256color".into());
                Streams::terminal(size.rows, size.cols, self.config.user)
            }
            None => Streams::pipes(exec.stdin, self.config.user),
        };
        let argv = exec.argv.into_iter().map(OsString::from).collect();
        let terminal = exec.pty.is_some();
        let started = streams.and_then(|streams| {
            self.start(&exec.session, Role::Exec(number), streams, argv, env, cwd, None, terminal)
        });
        match started {
            Ok(id) => {
                if let Some(exec) = self.execs.get_mut(&number) {
                    exec.process = Some(id);
                }
                self.begin(number);
            }
            Err(error) => {
                let problem = not_started(&error, Code::Internal, format!("starting a process: {error}"));
                self.finish(number, Ending::Refused(problem));
            }
        }
        Ok(())
    }

    fn attach(
        &mut self,
        caller: u32,
        tag: u32,
        exec: &ExecId,
        since: u64,
        follow: bool,
    ) -> Result<(), Problem> {
        let number = self.find(exec)?;
        let until =
            (!follow && self.execs[&number].outcome().is_none()).then(|| self.execs[&number].output.next());
        if let Some(connection) = self.connections.get_mut(&caller) {
            let exec = exec.clone();
            connection.followers.push(Follower {
                tag,
                exec,
                next: since,
                until,
                primary: false,
                cancel_on_disconnect: false,
            });
        }
        Ok(())
    }

    fn wait(
        &mut self,
        caller: u32,
        tag: u32,
        exec: &ExecId,
        timeout_ms: u64,
    ) -> Result<Option<Event>, Problem> {
        let number = self.find(exec)?;
        if let Some(outcome) = self.execs[&number].outcome() {
            return Ok(Some(Event::Waited { outcome: Some(outcome.clone()) }));
        }
        let deadline = Instant::now() + Duration::from_millis(timeout_ms.min(u64::from(u32::MAX)));
        self.waits.push(Wait { connection: caller, tag, exec: number, deadline });
        Ok(None)
    }

    /// The process of an exec that still runs.
    fn live(&mut self, exec: &ExecId) -> Result<(u32, &mut Process), Problem> {
        let number = self.find(exec)?;
        let ended = || Problem::new(Code::ExecEnded, format!("`{exec}` has ended"));
        let id = self.execs[&number].process.ok_or_else(ended)?;
        let process = self.processes.get_mut(&id).ok_or_else(ended)?;
        Ok((id, process))
    }

    fn close_stdin(&mut self, exec: &ExecId) -> Result<Option<Event>, Problem> {
        let (id, process) = self.live(exec)?;
        if let Some(input) = &mut process.stdin {
            input.closing = true;
        }
        self.feed(id);
        Ok(Some(Event::Done))
    }

    fn signal(&mut self, exec: &ExecId, signal: i32) -> Result<Option<Event>, Problem> {
        if !(1..=31).contains(&signal) {
            return Err(Problem::new(Code::InvalidArgument, format!("{signal} is not a signal")));
        }
        let (_, process) = self.live(exec)?;
        match u8::try_from(signal) {
            // The strongest signal is for everything it has started, also what ran away.
            Ok(9) | Err(_) => process.runner.kill_all(),
            Ok(signal) => process.runner.signal(signal),
        }
        Ok(Some(Event::Done))
    }

    fn resize(&mut self, exec: &ExecId, rows: u16, cols: u16) -> Result<Option<Event>, Problem> {
        let (_, process) = self.live(exec)?;
        match &process.stdout {
            Some(master) if process.terminal => {
                process::resize(master, rows, cols).map_err(Problem::internal)?;
                Ok(Some(Event::Done))
            }
            _ => Err(Problem::new(Code::InvalidArgument, format!("`{exec}` has no terminal"))),
        }
    }

    /// Input from a caller, on the tag of its exec or attach.
    pub(crate) fn input(&mut self, caller: u32, tag: u32, bytes: &[u8]) {
        let followed = self.connections.get(&caller).and_then(|connection| {
            connection
                .followers
                .iter()
                .find(|follower| follower.tag == tag)
                .map(|follower| follower.exec.clone())
        });
        let Some(exec) = followed else { return };
        let Ok((id, process)) = self.live(&exec) else { return };
        let Some(input) = &mut process.stdin else { return };
        input.add(bytes);
        self.feed(id);
        let full = self
            .processes
            .get(&id)
            .and_then(|process| process.stdin.as_ref())
            .is_some_and(process::Input::is_full);
        if full && let Some(connection) = self.connections.get_mut(&caller) {
            connection.stalled = Some(id);
            let _ =
                self.poller.change(&connection.socket, Token::Connection(caller), false, connection.waiting);
        }
    }
}

/// A process that could not be made. Too many of them is a limit with a name of its own.
fn not_started(error: &io::Error, code: Code, what: String) -> Problem {
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
