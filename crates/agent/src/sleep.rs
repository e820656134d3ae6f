//! A sandbox is written to disk and comes back: the agent's part.
//!
//! The processes of sessions are written by a program of the host's; the agent itself is not. It is asked to prepare (then
//! it starts nothing new and hears nobody else), the host writes and stops the processes, the agent takes what they still
//! had in their pipes and writes down what it knows ([`Saved`]), and the box is ended. A new agent reads that, offers new
//! ends for every pipe and line that the processes had, the host brings them back on these, and all goes on.
//!
//! Whoever asked to prepare and went away meant it no longer: then all goes on as well.

use std::{
    fs,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use carrel_jail::{session::Child, tree};
use carrel_proto::{
    files::Content,
    guest::Language,
    id::{ExecId, SessionName},
    message::{Event, What},
    outcome::Outcome,
    problem::{Code, Problem},
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::{
    calls::{Exec, State, unix_ms},
    forks::Growing,
    init::Init,
    interpreter::{self, Interpreter},
    output::{Output, SavedOutput},
    poll::Token,
    process::{self, Process, Role},
    runner::{RENEW, Word},
    serve::Agent,
    session::{self, Runner, Session},
};

/// Raised with every change of [`Saved`].
const VERSION: u32 = 1;
/// Below the spool.
pub(crate) const FILE: &str = "agent.json";
/// A runner that does not answer within this time is not ours any more.
const RENEWING: Duration = Duration::from_secs(5);

/// All that an agent knows and the processes do not.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    version: u32,
    next_number: u32,
    next_exec: u64,
    age_ms: u64,
    pub(crate) sessions: Vec<SavedSession>,
    pub(crate) processes: Vec<SavedProcess>,
    pub(crate) interpreters: Vec<interpreter::Saved>,
    pub(crate) execs: Vec<SavedExec>,
    lost: Vec<(SessionName, Language)>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedSession {
    pub(crate) name: SessionName,
    pub(crate) cwd: String,
    pub(crate) env: std::collections::BTreeMap<String, String>,
    pub(crate) own: std::collections::BTreeMap<String, String>,
    pub(crate) opened_ms: u64,
    pub(crate) undo_calls: Option<u32>,
    /// The init's end of its line.
    line: u64,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedProcess {
    id: u32,
    pub(crate) session: SessionName,
    exec: Option<u64>,
    /// The runner, as its session sees it, and its end of its line.
    runner: i32,
    line: u64,
    /// Who has taken the place of the runner's first process.
    heir: Option<i32>,
    #[serde(default)]
    turn: u32,
    stdout: Option<u64>,
    stderr: Option<u64>,
    stdin: Option<SavedInput>,
    ended: bool,
}

#[derive(Debug, Serialize, Deserialize)]
struct SavedInput {
    pipe: u64,
    queue: Content,
    closing: bool,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SavedExec {
    number: u64,
    session: SessionName,
    what: What,
    created_ms: u64,
    process: Option<u32>,
    timeout_ms: Option<u64>,
    /// How long it has run, and how much of its time is left.
    running: Option<(u64, Option<u64>)>,
    outcome: Option<Outcome>,
    output: SavedOutput,
}

/// New ends for processes that come back, until they are there.
#[derive(Debug, Default)]
pub(crate) struct Resuming {
    pub(crate) files: Vec<(OwnedFd, String)>,
    /// Or what is to come to life.
    pub(crate) growing: Option<Growing>,
}

/// What a pipe or socket is called by the kernel.
pub(crate) fn inode(fd: impl AsFd) -> io::Result<u64> {
    Ok(rustix::fs::fstat(fd)?.st_ino)
}

fn pipe_name(inode: u64) -> String {
    format!("pipe:[{inode}]")
}

fn socket_name(inode: u64) -> String {
    format!("socket:[{inode}]")
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

pub(crate) fn at(unix_ms: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(unix_ms)
}

fn ago(millis: u64) -> Instant {
    let now = Instant::now();
    now.checked_sub(Duration::from_millis(millis)).unwrap_or(now)
}

fn refused(why: impl Into<String>) -> Problem {
    Problem::new(Code::Unsupported, why).hint("the sandbox stays in memory; standby works all the same")
}

impl Agent {
    /// Nothing new starts from here on; says whom the host shall write.
    pub(crate) fn prepare_sleep(&mut self, caller: u32) -> Result<Event, Problem> {
        if !self.config.namespaces {
            return Err(refused("weak isolation has no namespaces that could be written to disk"));
        }
        let is_run = |exec: &Exec| matches!(exec.what, What::Run { .. });
        if self.execs.values().any(|exec| exec.outcome().is_none() && is_run(exec)) {
            return Err(
                Problem::new(Code::Conflict, "a call is under way").hint("wait for its end, or cancel it")
            );
        }
        if self.interpreters.values().any(|interpreter| !interpreter.ready || interpreter.renewing) {
            return Err(Problem::new(Code::Busy, "an interpreter is just starting").hint("try again"));
        }
        if self.processes.values().any(|process| process.terminal) {
            return Err(refused("a terminal is open in it"));
        }
        self.preparing = Some(caller);
        // Copies of states that are gone would be as big as the present one.
        self.await_all_spares();
        if !self.drop_spares(None) {
            self.preparing = None;
            return Err(
                Problem::new(Code::Busy, "a copy of an earlier state is just ending").hint("try again")
            );
        }
        let prepared = self.renew_all().and_then(|()| self.whom_to_write());
        prepared.map_err(|error| {
            self.preparing = None;
            Problem::internal(format!("preparing to sleep: {error}"))
        })
    }

    /// From the session's own mounts: see `Order::Renew` of [`crate::init`].
    fn renew_all(&mut self) -> io::Result<()> {
        for session in self.sessions.values_mut() {
            if session.renewed {
                continue;
            }
            if let Some(init) = &session.init {
                init.renew()?;
            }
        }
        let moment = Timespec { tv_sec: i64::try_from(RENEWING.as_secs()).unwrap_or(i64::MAX), tv_nsec: 0 };
        let mut words = Vec::new();
        for (id, process) in &self.processes {
            if process.renewed {
                continue;
            }
            process.runner.signal(RENEW);
            loop {
                let count = poll(&mut [PollFd::new(&process.runner.orders, PollFlags::IN)], Some(&moment))?;
                match Word::receive(&process.runner.orders)? {
                    _ if count == 0 => return Err(io::ErrorKind::TimedOut.into()),
                    Some(Word::Renewed) => break,
                    // The process ended just now.
                    Some(word) => words.push((*id, word)),
                    None => break,
                }
            }
        }
        for session in self.sessions.values_mut() {
            session.renewed = true;
        }
        for process in self.processes.values_mut() {
            process.renewed = true;
        }
        for (id, word) in words {
            self.word(id, word);
        }
        Ok(())
    }

    fn whom_to_write(&self) -> io::Result<Event> {
        let (mut inits, mut sockets) = (Vec::new(), Vec::new());
        for session in self.sessions.values() {
            let Some(init) = &session.init else { continue };
            inits.push(init.pid()?);
            sockets.push(session.line);
        }
        sockets.extend(self.processes.values().map(|process| process.runner.line));
        Ok(Event::Prepared { inits, sockets })
    }

    /// The processes are written and stopped: what they left in their pipes is taken, and all is written down.
    pub(crate) fn save(&mut self) -> Result<Event, Problem> {
        let state = self.state()?;
        let path = self.saved_file();
        // One that was meant for an agent which did not come to reading it is not ours to write to.
        let _ = fs::remove_file(&path);
        // Whoever keeps it sees to it that it is on the disk.
        let written = fs::File::create_new(path).and_then(|mut file| file.write_all(state.as_bytes()));
        written.map_err(|error| Problem::internal(format!("writing down the agent's state: {error}")))?;
        Ok(Event::Done)
    }

    /// What is known of processes that stand still, for another agent.
    pub(crate) fn state(&mut self) -> Result<String, Problem> {
        let ids: Vec<u32> = self.processes.keys().copied().collect();
        for id in ids {
            self.drain(id);
        }
        for exec in self.execs.values_mut().filter(|exec| exec.outcome().is_some()) {
            exec.output.close().map_err(|error| Problem::internal(format!("keeping output: {error}")))?;
        }
        self.unspooled.clear();
        let state = self.saved().and_then(|saved| Ok(serde_json::to_string(&saved)?));
        state.map_err(|error| Problem::internal(format!("writing down the agent's state: {error}")))
    }

    pub(crate) fn saved_file(&self) -> PathBuf {
        PathBuf::from(&self.config.places.spool).join(FILE)
    }

    fn saved(&mut self) -> io::Result<Saved> {
        let mut sessions = Vec::new();
        for (name, session) in &self.sessions {
            sessions.push(SavedSession {
                name: name.clone(),
                cwd: session.cwd.clone(),
                env: session.env.clone(),
                own: session.own.clone(),
                opened_ms: unix_ms(session.opened),
                undo_calls: session.undo_calls,
                line: session.line,
            });
        }
        let mut processes = Vec::new();
        for (id, process) in &mut self.processes {
            let pipe = |fd: &Option<OwnedFd>| fd.as_ref().map(inode).transpose();
            processes.push(SavedProcess {
                id: *id,
                session: process.session.clone(),
                exec: match process.role {
                    Role::Exec(number) => Some(number),
                    Role::Interpreter => None,
                },
                runner: process.runner.init.as_ref().map_or(0, |(_, inner)| *inner),
                line: process.runner.line,
                heir: process.runner.heir.and_then(tree::innermost),
                turn: process.runner.turn,
                stdout: pipe(&process.stdout)?,
                stderr: pipe(&process.stderr)?,
                stdin: process.stdin.as_mut().map(SavedInput::of).transpose()?,
                ended: process.ended,
            });
        }
        let mut interpreters = Vec::new();
        for (id, interpreter) in &self.interpreters {
            interpreters.push(interpreter.saved(*id)?);
        }
        let mut execs = Vec::new();
        for (number, exec) in &mut self.execs {
            execs.push(SavedExec {
                number: *number,
                session: exec.session.clone(),
                what: exec.what.clone(),
                created_ms: unix_ms(exec.created),
                process: exec.process,
                timeout_ms: exec.timeout.map(millis),
                running: match &exec.state {
                    State::Running(running) => Some(running.times()),
                    _ => None,
                },
                outcome: exec.outcome().cloned(),
                output: exec.output.saved()?,
            });
        }
        Ok(Saved {
            version: VERSION,
            next_number: self.next_number,
            next_exec: self.next_exec,
            age_ms: millis(self.started.elapsed()),
            sessions,
            processes,
            interpreters,
            execs,
            lost: self.lost.iter().cloned().collect(),
        })
    }

    /// Nobody is to sleep after all.
    pub(crate) fn stay_awake(&mut self) {
        if self.preparing.take().is_none() {
            return;
        }
        let mut inits = self.sessions.values().filter_map(|session| session.init.as_ref());
        if inits.any(|init| init.go_on().is_err()) {
            // Whoever wrote it was killed with its code still in there. Nothing can run in that session any more: the box ends,
            // so that whoever comes is told, and finds a new one over the same files.
            carrel_jail::sys::exit_now(1);
        }
        let _ = fs::remove_file(self.saved_file());
        self.let_go_of_copies();
        self.last_activity = Instant::now();
        // What was taken back of their input is theirs again.
        let ids: Vec<u32> = self.processes.keys().copied().collect();
        for id in ids {
            self.feed(id);
        }
    }

    /// Takes over what another agent wrote down. The processes are yet to come.
    pub(crate) fn load(&mut self) -> io::Result<()> {
        let saved = Saved::parse(&fs::read_to_string(self.saved_file())?)?;
        let saved = self.load_numbers(saved);
        let mut files = Vec::new();
        for session in saved.sessions {
            let (mine, theirs) = UnixStream::pair()?;
            let line = inode(&theirs)?;
            files.push((OwnedFd::from(theirs), socket_name(session.line)));
            let loaded = Session {
                // Itself until the processes are there: then it is asked who it is.
                init: Some(Rc::new(Init::new(mine, None))),
                cwd: session.cwd,
                env: session.env,
                own: session.own,
                opened: at(session.opened_ms),
                line,
                // Before it is written again: CRIU's own memory, in which it comes back, is closed to whoever has only the
                // session's rights.
                renewed: false,
                undo_calls: session.undo_calls,
            };
            self.sessions.insert(session.name, loaded);
        }
        for process in saved.processes {
            self.load_process(process, &mut files)?;
        }
        for interpreter in saved.interpreters {
            let (request_read, requests) = process::input_pipe()?;
            let (replies, reply_write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            process::unblocked(&replies)?;
            for fd in [&request_read, &reply_write] {
                process::give(fd, self.config.user);
            }
            files.push((request_read, pipe_name(interpreter.requests)));
            files.push((reply_write, pipe_name(interpreter.replies)));
            let id = interpreter.id;
            let loaded = Interpreter::load(interpreter, requests, replies);
            self.poller.readable(&loaded.replies, Token::Replies(id))?;
            self.interpreters.insert(id, loaded);
        }
        self.load_execs(saved.execs)?;
        self.resuming = Some(Resuming { files, growing: None });
        Ok(())
    }

    pub(crate) fn load_numbers(&mut self, mut saved: Saved) -> Saved {
        self.next_number = saved.next_number;
        self.next_exec = saved.next_exec;
        self.started = ago(saved.age_ms);
        self.lost = std::mem::take(&mut saved.lost).into_iter().collect();
        saved
    }

    pub(crate) fn load_execs(&mut self, execs: Vec<SavedExec>) -> io::Result<()> {
        let spool = PathBuf::from(&self.config.places.spool);
        for exec in execs {
            let path = spool.join(format!("{}.out", ExecId::numbered(exec.number)));
            let state = match (exec.outcome, exec.running) {
                (Some(outcome), _) => State::Finished(Box::new(outcome)),
                (None, Some(times)) => State::Running(self.going_on(times)),
                (None, None) => State::Queued,
            };
            let loaded = Exec {
                session: exec.session,
                what: exec.what,
                created: at(exec.created_ms),
                output: Output::load(path, self.config.limits.output.0, exec.output)?,
                process: exec.process,
                state,
                code: String::new(),
                taken_back: None,
                files_back: None,
                closed_handles: 0,
                timeout: exec.timeout_ms.map(Duration::from_millis),
            };
            self.execs.insert(exec.number, loaded);
        }
        Ok(())
    }

    fn load_process(&mut self, saved: SavedProcess, files: &mut Vec<(OwnedFd, String)>) -> io::Result<()> {
        let (orders, theirs) = session::line()?;
        process::unblocked(&orders)?;
        let line = inode(&theirs)?;
        files.push((theirs, socket_name(saved.line)));
        let init = self.sessions.get(&saved.session).and_then(|session| session.init.clone());
        let owner = self.config.user;
        let mut output = |inode: Option<u64>| -> io::Result<Option<OwnedFd>> {
            let Some(inode) = inode else { return Ok(None) };
            let (ours, theirs) = process::output_pipe()?;
            process::give(&theirs, owner);
            files.push((theirs, pipe_name(inode)));
            Ok(Some(ours))
        };
        let (stdout, stderr) = (output(saved.stdout)?, output(saved.stderr)?);
        let stdin = match saved.stdin {
            None => None,
            Some(input) => {
                let (theirs, ours) = process::input_pipe()?;
                process::give(&theirs, owner);
                files.push((theirs, pipe_name(input.pipe)));
                Some(process::Input::load(ours, input.queue.0, input.closing))
            }
        };
        self.poller.readable(&orders, Token::Runner(saved.id))?;
        if let Some(stdout) = &stdout {
            self.poller.readable(stdout, Token::Stdout(saved.id))?;
        }
        if let Some(stderr) = &stderr {
            self.poller.readable(stderr, Token::Stderr(saved.id))?;
        }
        // Nobody's pid until the processes are there.
        let own = rustix::process::getpid();
        let pidfd = rustix::process::pidfd_open(own, rustix::process::PidfdFlags::empty())?;
        let runner = Runner {
            child: Child { pid: 0, pidfd },
            init: init.map(|init| (init, saved.runner)),
            orders,
            line,
            // As its session sees it, until the processes are there.
            heir: saved.heir,
            turn: saved.turn,
        };
        let process = Process {
            session: saved.session,
            runner,
            role: saved.exec.map_or(Role::Interpreter, Role::Exec),
            stdout,
            stderr,
            stdin,
            terminal: false,
            paused: false,
            ended: saved.ended,
            renewed: true,
            left: true,
        };
        self.processes.insert(saved.id, process);
        Ok(())
    }

    /// What the host shall bring the processes back on: descriptors of this process, and their former names.
    pub(crate) fn offer(&self) -> Result<Event, Problem> {
        let Some(resuming) = &self.resuming else {
            return Err(Problem::new(Code::Conflict, "this sandbox does not come back from disk"));
        };
        let files = resuming.files.iter().map(|(file, name)| (file.as_raw_fd(), name.clone())).collect();
        Ok(Event::Offered { files })
    }

    /// The processes are there.
    pub(crate) fn resumed(&mut self) -> Result<Event, Problem> {
        let lost = |error: io::Error| {
            Problem::new(Code::StateLost, format!("the processes did not come back as they were: {error}"))
        };
        self.resuming = None;
        for (name, session) in &mut self.sessions {
            let Some(init) = &session.init else { continue };
            let mut members = init.roll().map_err(lost)?.into_iter();
            let own = members.next().ok_or_else(|| lost(io::ErrorKind::NotFound.into()))?;
            init.is(own.child.pidfd);
            for member in members {
                let known = self.processes.values_mut().find(|process| {
                    process.session == *name
                        && process.runner.init.as_ref().is_some_and(|(_, inner)| *inner == member.inner)
                });
                if let Some(process) = known {
                    let is_heir = |pid: &i32| tree::innermost(*pid) == process.runner.heir;
                    process.runner.heir = process
                        .runner
                        .heir
                        .and_then(|_| tree::children(member.child.pid).into_iter().find(is_heir));
                    process.runner.child = member.child;
                }
            }
        }
        let _ = fs::remove_file(self.saved_file());
        let ids: Vec<u32> = self.processes.keys().copied().collect();
        for id in ids {
            self.feed(id);
        }
        self.last_activity = Instant::now();
        Ok(Event::Done)
    }
}

impl Saved {
    pub(crate) fn parse(text: &str) -> io::Result<Self> {
        let saved: Self = serde_json::from_str(text)?;
        match saved.version {
            VERSION => Ok(saved),
            version => Err(io::Error::other(format!("its state is of version {version}"))),
        }
    }
}

impl SavedInput {
    /// With what the process has not read of its pipe.
    fn of(input: &mut process::Input) -> io::Result<Self> {
        let pipe = inode(&input.fd)?;
        // The other end, by its name: our own copy only writes.
        let mut reader = fs::OpenOptions::new()
            .read(true)
            .open(format!("/proc/self/fd/{}", input.fd.as_raw_fd()))
            .and_then(|reader| {
                rustix::fs::fcntl_setfl(&reader, rustix::fs::OFlags::NONBLOCK)?;
                Ok(reader)
            })?;
        let left = process::available(&input.fd);
        let mut unread = vec![0; left];
        reader.read_exact(&mut unread)?;
        input.unread(unread);
        Ok(Self { pipe, queue: Content(input.queued().to_vec()), closing: input.closing })
    }
}
