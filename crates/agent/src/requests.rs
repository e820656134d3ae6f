//! Each request becomes work here.

use std::{
    io,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use carrel_files::{Owner, Root};
use carrel_proto::{
    guest::EndReason,
    id::{ExecId, SessionName},
    message::{Event, OpenSession, PROTOCOL, Request, SessionInfo, Status, What},
    outcome::Cause,
    problem::{Code, Problem},
};

use crate::{
    calls::{Exec, State, unix_ms},
    connection::Follower,
    output::Output,
    process::Role,
    serve::Agent,
    session::Session,
    variables,
};

/// Sessions of one sandbox: each is two namespaces and a process.
const MAX_SESSIONS: usize = 32;

impl Agent {
    pub(crate) fn request(&mut self, caller: u32, tag: u32, request: Request) {
        self.hear_keeper_first(caller);
        let greeted = self.connections.get(&caller).is_some_and(|connection| connection.greeted);
        // Whoever only looks does not keep a sandbox awake.
        let idle = self.last_activity.elapsed();
        if let Some(connection) = self.connections.get_mut(&caller)
            && !matches!(request, Request::Hello { .. })
        {
            connection.arriving = None;
        }
        if !matches!(
            request,
            Request::Hello { .. } | Request::Usage | Request::Rest { .. } | Request::Brief { .. }
        ) {
            self.last_activity = Instant::now();
            self.rest = None;
        }
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
            Request::Offer => self.offer().map(Some),
            Request::Resumed => match self.grow() {
                Some(grown) => grown.map(Some),
                None => self.resumed().map(Some),
            },
            _ if self.resuming.is_some() => {
                Err(Problem::new(Code::Conflict, "the sandbox is coming back from disk").hint("try again"))
            }
            _ if !greeted => Err(Problem::new(Code::Protocol, "the first request must be hello")),
            Request::Run(run) => match self.run(caller, tag, run) {
                Ok(()) => return self.pump_soon(caller),
                Err(problem) => Err(problem),
            },
            Request::Exec(exec) => self.exec(caller, tag, exec).map(|()| None),
            Request::Attach { exec, since, follow } => {
                self.attach(caller, tag, &exec, since, follow).map(|()| None)
            }
            Request::Wait { exec, timeout_ms } => self.wait(caller, tag, &exec, timeout_ms),
            Request::WriteStdin { exec, data } => self.write_stdin(caller, tag, &exec, data.0),
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
            Request::SetEnv { session, set, unset } => {
                self.set_env(&session, set, unset).map(|()| Some(Event::Done))
            }
            Request::Usage => Ok(Some(Event::Usage(self.usage(idle)))),
            Request::Rest { idle_ms } => {
                // Whoever has not heard that its call has begun would wake the box for it.
                self.flush();
                Ok(Some(Event::Rest(self.lie_down(caller, idle, idle_ms))))
            }
            Request::Brief { session } => self.brief(caller, tag, &session),
            Request::Ports => self.ports().map(|ports| Some(Event::Ports { ports })),
            Request::Dial { port } => self.dial(caller, tag, port).map(|()| None),
            Request::Configure { limits, idle_timeout_s, max_lifetime_s } => {
                self.configure(limits, idle_timeout_s, max_lifetime_s);
                Ok(Some(Event::Done))
            }
            Request::Undo { session, language, calls } => {
                self.undo(caller, tag, &session, language, calls).map(|()| None)
            }
            Request::DropSpares => {
                self.drop_spares(None);
                Ok(Some(Event::Done))
            }
            Request::KeepReady => self.keep_ready(caller, tag),
            Request::Claimed { idle_timeout_s, max_lifetime_s, undo_calls } => {
                self.claimed(caller, (idle_timeout_s, max_lifetime_s), undo_calls).map(|()| None)
            }
            Request::Status => Ok(Some(Event::Status(self.status()))),
            Request::Files(request) => self.files(request),
            Request::PrepareSleep => self.prepare_sleep(caller).map(Some),
            Request::PrepareFork => self.prepare_fork(caller).map(Some),
            Request::MakeWay => self.make_way().map(Some),
            Request::Become(scion) => self.take_place(caller, scion).map(Some),
            Request::Save => self.save().map(Some),
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

    pub(crate) fn find(&self, exec: &ExecId) -> Result<u64, Problem> {
        self.exec_number(exec).ok_or_else(|| {
            Problem::new(Code::ExecNotFound, format!("there is no exec `{exec}` in this sandbox"))
                .hint("list them with `carrel inspect`; only the newest are kept")
        })
    }

    /// The session, made now if it is the one that every sandbox has.
    pub(crate) fn session(&mut self, name: &SessionName) -> Result<&Session, Problem> {
        if self.sessions.get(name).is_some_and(Session::has_failed) {
            self.sessions.remove(name);
        }
        if !self.sessions.contains_key(name) {
            if *name != SessionName::main() {
                return Err(Problem::new(
                    Code::SessionNotFound,
                    format!("there is no session `{name}` in this sandbox"),
                )
                .hint("open it first"));
            }
            self.begin_session(OpenSession { name: name.clone(), ..OpenSession::default() })?;
        }
        Ok(&self.sessions[name])
    }

    pub(crate) fn open_session(&mut self, open: OpenSession) -> Result<(), Problem> {
        let name = open.name.clone();
        self.begin_session(open)?;
        self.sessions[&name].await_ready().map_err(|error| {
            self.sessions.remove(&name);
            not_opened(&name, &error)
        })
    }

    /// Does not wait until its mounts are in place: what it is opened for is prepared meanwhile.
    fn begin_session(&mut self, open: OpenSession) -> Result<(), Problem> {
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
        variables::check(&open.env)?;
        let places = &self.config.places;
        let mut env = self.config.variables.clone();
        env.insert("HOME".into(), places.home.clone());
        env.extend(open.env.clone());
        let cwd = match open.cwd {
            None => places.workspace.clone(),
            Some(asked) => start_directory(&places.workspace, &asked)?,
        };
        env.insert("PWD".into(), cwd.clone());
        let mut session = Session::open(&self.thread, &self.config, cwd, env, open.env)
            .map_err(|error| not_opened(&open.name, &error))?;
        session.undo_calls = open.undo_calls;
        self.sessions.insert(open.name, session);
        Ok(())
    }

    pub(crate) fn close_session(&mut self, name: &SessionName) -> Result<(), Problem> {
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

    pub(crate) fn status(&self) -> Status {
        let sessions = self.sessions.iter().map(|(name, session)| SessionInfo {
            name: name.clone(),
            interpreters: self
                .interpreters
                .iter()
                .filter(|(id, _)| self.processes.get(id).is_some_and(|process| process.session == *name))
                .filter(|(_, interpreter)| !interpreter.unasked)
                .map(|(_, interpreter)| interpreter.language)
                .collect(),
            cwd: session.cwd.clone(),
            env: session.own.clone(),
            opened_unix_ms: unix_ms(session.opened),
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

    pub(crate) fn files(
        &mut self,
        request: carrel_proto::files::FileRequest,
    ) -> Result<Option<Event>, Problem> {
        let root = match &self.root {
            Some(root) => root,
            None => {
                let user = self.config.user;
                let root = Root::open(&self.config.places.workspace)
                    .map_err(|error| Problem::internal(format!("opening the workspace: {error}")))?;
                self.root.insert(root.with_owner(Owner { uid: user.0, gid: user.1 }))
            }
        };
        self.shadow.touched();
        carrel_files::serve(root, request).map(|reply| Some(Event::Files(reply))).map_err(Into::into)
    }

    /// Room for one more run or exec, with its record.
    pub(crate) fn record(
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
            taken_back: None,
            files_back: None,
            closed_handles: 0,
        };
        self.execs.insert(number, exec);
        Ok(number)
    }

    pub(crate) fn follow(&mut self, caller: u32, tag: u32, number: u64, cancel_on_disconnect: bool) {
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
}

/// Where a session shall start: relative to the workspace, and there. Every call in it would fail otherwise.
fn start_directory(workspace: &str, asked: &str) -> Result<String, Problem> {
    // `join` of an absolute path is that path.
    let path = Path::new(workspace).join(asked);
    let no = |code, what: &str| {
        Problem::new(code, format!("a session cannot start in `{asked}`: {what}"))
            .hint("make the directory first, or name another: relative to /workspace, or absolute")
    };
    if asked.contains('\0') {
        return Err(no(Code::InvalidArgument, "a path has no zero byte"));
    }
    match std::fs::metadata(&path) {
        Ok(meta) if meta.is_dir() => Ok(path.to_string_lossy().trim_end_matches('/').to_owned())
            .map(|path| if path.is_empty() { "/".to_owned() } else { path }),
        Ok(_) => Err(no(Code::NotADirectory, "it is not a directory")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(no(Code::InvalidArgument, "there is no such directory"))
        }
        Err(error) => Err(no(Code::InvalidArgument, &error.to_string())),
    }
}

fn not_opened(name: &SessionName, error: &io::Error) -> Problem {
    Problem::internal(format!("opening session `{name}`: {error}"))
}
