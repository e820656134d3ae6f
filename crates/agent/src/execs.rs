//! Execs: commands, their input, signals and terminals; and waiting for the end of either kind.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    io,
    time::{Duration, Instant},
};

use carrel_proto::{
    id::{ExecId, SessionName},
    message::{self, Event, MAX_ARGS, What},
    problem::{Code, Problem},
};

use crate::{
    calls::Ending,
    connection::Follower,
    poll::Token,
    process::{self, Process, Role, Streams},
    runner::Launch,
    runs::not_started,
    serve::{Agent, Wait},
    session,
};
impl Agent {
    #[expect(clippy::too_many_arguments, reason = "one place that brings a process to life, called twice")]
    pub(crate) fn start(
        &mut self,
        session: &SessionName,
        role: Role,
        streams: Streams,
        argv: Vec<OsString>,
        env: BTreeMap<String, String>,
        cwd: String,
        control: Option<(std::os::fd::OwnedFd, std::os::fd::OwnedFd)>,
        terminal: bool,
        images: Vec<std::os::fd::OwnedFd>,
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
            images,
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
            renewed: false,
            left: false,
        };
        self.processes.insert(id, process);
        Ok(id)
    }

    pub(crate) fn exec(&mut self, caller: u32, tag: u32, exec: message::Exec) -> Result<(), Problem> {
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
        // Whatever ran before: the command may write as soon as it is started.
        self.settle_when_quiet();
        let argv = exec.argv.into_iter().map(OsString::from).collect();
        let terminal = exec.pty.is_some();
        let started = streams.and_then(|streams| {
            self.start(&exec.session, Role::Exec(number), streams, argv, env, cwd, None, terminal, Vec::new())
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

    pub(crate) fn attach(
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

    pub(crate) fn wait(
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
    pub(crate) fn live(&mut self, exec: &ExecId) -> Result<(u32, &mut Process), Problem> {
        let number = self.find(exec)?;
        let ended = || Problem::new(Code::ExecEnded, format!("`{exec}` has ended"));
        let id = self.execs[&number].process.ok_or_else(ended)?;
        let process = self.processes.get_mut(&id).ok_or_else(ended)?;
        Ok((id, process))
    }

    pub(crate) fn close_stdin(&mut self, exec: &ExecId) -> Result<Option<Event>, Problem> {
        let (id, process) = self.live(exec)?;
        if let Some(input) = &mut process.stdin {
            input.closing = true;
        }
        self.feed(id);
        Ok(Some(Event::Done))
    }

    pub(crate) fn signal(&mut self, exec: &ExecId, signal: i32) -> Result<Option<Event>, Problem> {
        if !(1..=31).contains(&signal) {
            return Err(Problem::new(Code::InvalidArgument, format!("{signal} is not a signal")));
        }
        let (id, process) = self.live(exec)?;
        match u8::try_from(signal) {
            // The strongest signal is for everything it has started, also what ran away.
            Ok(9) | Err(_) => self.kill_call(id),
            Ok(signal) => process.runner.signal(signal),
        }
        Ok(Some(Event::Done))
    }

    pub(crate) fn resize(&mut self, exec: &ExecId, rows: u16, cols: u16) -> Result<Option<Event>, Problem> {
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
