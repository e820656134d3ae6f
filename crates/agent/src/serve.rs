//! The agent's one loop: sleeps until something is ready, passes it on, ends the box when its time is over.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fs::File,
    io::{self, Read},
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::PathBuf,
    time::{Duration, Instant},
};

use carrel_files::Root;
use carrel_jail::{
    stage::CONFIG,
    sys::{self, SingleThread},
};
use carrel_proto::{
    frame::{Body, Stream},
    guest::{AgentConfig, EndReason, Language},
    id::{ExecId, SessionName},
    message::{Event, Request},
    outcome::Outcome,
    problem::{Code, Problem},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

use crate::{
    brief::Inquiry,
    calls::Exec,
    changes::Changes,
    connection::{self, Connection},
    disk::Watch,
    files_back::Shadow,
    input::Write,
    interpreter::Interpreter,
    listeners::Counts,
    meters::Meters,
    poll::{Poller, Token},
    process::Process,
    ready::Ready,
    runner::Word,
    session::Session,
    sleep::Resuming,
};

/// Callers at once: a daemon needs one, a handful of CLI calls a few.
const MAX_CONNECTIONS: usize = 256;
/// So long after the last request or end, nobody is in the middle of a row of calls.
const QUIET: Duration = Duration::from_millis(5);
/// The word that a call has begun waits so long for its first output, or its end.
const SOON: Duration = Duration::from_millis(1);

pub(crate) struct Agent {
    pub(crate) config: AgentConfig,
    pub(crate) thread: SingleThread,
    pub(crate) poller: Poller,
    listener: UnixListener,
    pub(crate) meters: Meters,
    pub(crate) sockets: Counts,
    pub(crate) watch: Option<Watch>,
    /// What changed below the workspace.
    pub(crate) changes: Changes,
    /// What its files are gone back to with a call.
    pub(crate) shadow: Shadow,
    pub(crate) root: Option<Root>,
    /// Of a warm python, if there is one; see [`crate::copies`].
    pub(crate) image: Option<OwnedFd>,
    /// Modules that user code has asked for.
    pub(crate) imports: BTreeSet<String>,
    pub(crate) connections: BTreeMap<u32, Connection>,
    pub(crate) sessions: BTreeMap<SessionName, Session>,
    pub(crate) processes: BTreeMap<u32, Process>,
    /// By the number of their process.
    pub(crate) interpreters: BTreeMap<u32, Interpreter>,
    /// By number; [`ExecId::numbered`] is their name.
    pub(crate) execs: BTreeMap<u64, Exec>,
    /// Interpreters that died while nobody was looking: the next call is told.
    pub(crate) lost: BTreeSet<(SessionName, Language)>,
    /// Finished calls whose output waits for a quiet moment to be written to disk.
    pub(crate) unspooled: Vec<u64>,
    pub(crate) waits: Vec<Wait>,
    /// Callers that wait for a brief.
    pub(crate) inquiries: Vec<Inquiry>,
    /// Input that waits for room, in order.
    pub(crate) writes: VecDeque<Write>,
    pub(crate) next_number: u32,
    pub(crate) next_exec: u64,
    pub(crate) started: Instant,
    pub(crate) last_activity: Instant,
    /// About to be frozen, or frozen, since then.
    pub(crate) rest: Option<Instant>,
    /// A caller whose next word waits for one more, until then.
    unflushed: Option<(u32, Instant)>,
    pub(crate) scratch: Vec<u8>,
    pub(crate) ending: Option<EndReason>,
    /// Who has asked to prepare for the disk, and is heard alone; see [`crate::sleep`].
    pub(crate) preparing: Option<u32>,
    pub(crate) resuming: Option<Resuming>,
    /// Nobody has claimed the box yet; see [`crate::ready`].
    pub(crate) ready: Option<Ready>,
}

/// A caller that waits for an end.
pub(crate) struct Wait {
    pub(crate) connection: u32,
    pub(crate) tag: u32,
    pub(crate) exec: u64,
    pub(crate) deadline: Instant,
}

/// Pid 1 collects what nobody waits for: runners that ended, and orphans of sessions that were closed.
pub(crate) fn reap() {
    while let Ok(Some(_)) = sys::reap() {}
}

/// Reads the configuration and serves until the end.
pub(crate) fn run() -> io::Result<()> {
    let thread = SingleThread::witness()?;
    let mut text = String::new();
    File::from(sys::inherited(CONFIG)?).read_to_string(&mut text)?;
    run_with(thread, serde_json::from_str(&text)?)
}

/// Serves until the end, in a process whose descriptors are those that the configuration names.
pub(crate) fn run_with(thread: SingleThread, config: AgentConfig) -> io::Result<()> {
    sys::ignore_sigpipe();
    let listener = UnixListener::from(sys::inherited(config.listener)?);
    listener.set_nonblocking(true)?;
    let meters = Meters::new(&config.meters);
    let image = config.image.map(sys::inherited).transpose()?;
    let watch = config.watch_disk.then(|| Watch::new(config.places.workspace.clone(), config.limits.disk.0));
    let shadow = Shadow::new(&config.places);
    let poller = Poller::new()?;
    poller.readable(&listener, Token::Listener)?;
    let now = Instant::now();
    let next_exec = ExecId::first_number(config.life);
    let mut agent = Agent {
        config,
        thread,
        poller,
        listener,
        meters,
        sockets: Counts::default(),
        watch,
        changes: Changes::default(),
        shadow,
        root: None,
        image,
        imports: BTreeSet::new(),
        connections: BTreeMap::new(),
        sessions: BTreeMap::new(),
        processes: BTreeMap::new(),
        interpreters: BTreeMap::new(),
        execs: BTreeMap::new(),
        lost: BTreeSet::new(),
        unspooled: Vec::new(),
        waits: Vec::new(),
        inquiries: Vec::new(),
        writes: VecDeque::new(),
        next_number: 1,
        next_exec,
        started: now,
        last_activity: now,
        rest: None,
        unflushed: None,
        scratch: Vec::new(),
        ending: None,
        preparing: None,
        resuming: None,
        ready: None,
    };
    if agent.config.resume {
        agent.look_first();
        agent.load()?;
        return agent.serve();
    }
    // Nearly every sandbox needs it, and its caller is not there yet.
    if let Err(problem) = agent.session(&SessionName::main()) {
        crate::say(&problem.message);
    }
    if let Some(language) = agent.config.first.filter(|language| agent.offers(*language))
        && let Err(error) = agent.start_interpreter(&SessionName::main(), language)
    {
        // The call that needs it tries again, and tells its caller.
        crate::say(&format!("starting {}: {error}", language.as_str()));
    }
    // While those start: no code of anybody's runs before a caller is heard.
    agent.look_first();
    agent.serve()
}

impl Agent {
    pub(crate) fn look_first(&mut self) {
        self.changes = Changes::new(self.config.places.workspace.clone());
    }

    pub(crate) fn number(&mut self) -> u32 {
        let number = self.next_number;
        self.next_number = self.next_number.wrapping_add(1);
        number
    }

    fn offers(&self, language: Language) -> bool {
        self.config.interpreters.get(&language).is_some_and(|interpreter| !interpreter.program.is_empty())
            && self.sessions.contains_key(&SessionName::main())
    }

    fn serve(&mut self) -> io::Result<()> {
        loop {
            if let Some(caller) = self.preparing {
                self.hear_only(caller);
                continue;
            }
            let timeout = self.due();
            if let Some(reason) = self.ending {
                return self.end(reason);
            }
            let ready = self.poller.wait(timeout)?;
            if ready.is_empty() && self.running() == 0 {
                // Quiet: give back what big output needed.
                self.scratch = Vec::new();
            }
            for token in ready {
                self.handle(token);
            }
        }
    }

    /// Waits for a word of one caller, and for nothing else.
    fn hear_only(&mut self, caller: u32) {
        let Some(connection) = self.connections.get(&caller) else { return self.stay_awake() };
        let _ = poll(&mut [PollFd::new(&connection.socket, PollFlags::IN)], None);
        self.hear_caller(caller);
    }

    /// Does what is due by the clock; says how long to sleep.
    fn due(&mut self) -> Option<Duration> {
        let now = Instant::now();
        // First: a caller that turns out to be gone may set clocks of its own.
        if self.unflushed.is_some_and(|(_, until)| until <= now) {
            self.flush();
        }
        let mut next = self.tick(now);
        let mut sooner = |at: Instant| next = Some(next.map_or(at, |next| next.min(at)));
        self.unflushed.into_iter().for_each(|(_, until)| sooner(until));
        let expired: Vec<usize> = self
            .waits
            .iter()
            .enumerate()
            .filter(|(_, wait)| wait.deadline <= now)
            .map(|(at, _)| at)
            .collect();
        for at in expired.into_iter().rev() {
            let wait = self.waits.swap_remove(at);
            self.reply(wait.connection, wait.tag, &Event::Waited { outcome: None });
        }
        self.waits.iter().for_each(|wait| sooner(wait.deadline));
        self.settle_inquiries(now);
        self.inquiries.iter().for_each(|inquiry| sooner(inquiry.deadline));
        self.expire_writes(now);
        self.writes.iter().for_each(|write| sooner(write.deadline));
        self.give_up_silent_ones(now);
        self.give_up_returns(now);
        self.interpreters.values().filter_map(Interpreter::overdue).for_each(&mut sooner);
        self.interpreters.values().filter_map(|one| one.history.overdue()).for_each(&mut sooner);
        let busy = self.execs.values().any(|exec| exec.outcome().is_none());
        if let Some(watch) = &mut self.watch
            && let Some(due) = watch.due
        {
            if !busy {
                watch.due = None;
            } else if due <= now {
                let over = watch.check(now);
                watch.due.into_iter().for_each(&mut sooner);
                if over {
                    self.disk_is_over();
                }
            } else {
                sooner(due);
            }
        }
        if !self.unspooled.is_empty() {
            let quiet = self.last_activity + QUIET;
            if quiet <= now {
                self.spool();
            } else {
                sooner(quiet);
            }
        }
        self.settle_when_quiet();
        if let Some(until) = self.resting(now) {
            sooner(until);
            return next.map(|next| next.saturating_duration_since(Instant::now()));
        }
        let lifetime = self.started + Duration::from_secs(self.config.max_lifetime_s);
        let idle = self.last_activity + Duration::from_secs(self.config.idle_timeout_s);
        if lifetime <= now {
            self.ending.get_or_insert(EndReason::Lifetime);
        } else if !busy && self.ready.is_none() && idle <= now {
            self.ending.get_or_insert(EndReason::Idle);
        }
        sooner(lifetime);
        if !busy && self.ready.is_none() {
            sooner(idle);
        }
        next.map(|next| next.saturating_duration_since(Instant::now()))
    }

    /// Says why, then lets the kernel end everything in the box with its pid 1.
    fn end(&mut self, reason: EndReason) -> io::Result<()> {
        let path = PathBuf::from(&self.config.places.spool).join("ended.json");
        if let Ok(text) = serde_json::to_vec(&reason) {
            let _ = std::fs::write(path, text);
        }
        if !self.config.namespaces {
            // No namespace that dies with us: every runner has to take its own with it.
            for process in self.processes.values() {
                process.runner.kill_all();
            }
        }
        for connection in self.connections.values_mut() {
            connection.flush();
        }
        Ok(())
    }

    fn handle(&mut self, token: Token) {
        match token {
            Token::Listener => {
                while let Some(socket) = connection::accept(&self.listener) {
                    if self.connections.len() >= MAX_CONNECTIONS {
                        continue;
                    }
                    let number = self.number();
                    if self.poller.readable(&socket, Token::Connection(number)).is_ok() {
                        self.connections.insert(number, Connection::new(socket));
                    }
                }
            }
            Token::Connection(number) => self.hear_caller(number),
            Token::Runner(id) => {
                let Some(process) = self.processes.get(&id) else { return };
                match Word::receive(&process.runner.orders) {
                    Ok(Some(word)) => self.word(id, word),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    Ok(None) | Err(_) => self.runner_gone(id),
                }
            }
            Token::Stdout(id) => self.hear_stream(id, Stream::Stdout),
            Token::Stderr(id) => self.hear_stream(id, Stream::Stderr),
            Token::Stdin(id) => self.feed(id),
            Token::Replies(id) => self.hear_driver(id),
            Token::Requests(id) => {
                if let Some(interpreter) = self.interpreters.get_mut(&id)
                    && interpreter.flush()
                {
                    self.poller.forget(&interpreter.requests);
                }
            }
        }
    }

    /// Frames of one caller.
    pub(crate) fn hear_caller(&mut self, number: u32) {
        let Some(caller) = self.connections.get_mut(&number) else { return };
        if caller.waiting {
            self.pump(number);
        }
        let Some(caller) = self.connections.get_mut(&number) else { return };
        if caller.stalled.is_some() {
            // Nothing is read from it, so its end is seen by nothing else.
            return if caller.is_gone() {
                self.hang_up(number)
            };
        }
        if !caller.fill() {
            return self.hang_up(number);
        }
        self.hear_frames(number);
    }

    /// Every whole frame that has come, unless the caller has to wait.
    pub(crate) fn hear_frames(&mut self, number: u32) {
        loop {
            let Some(caller) = self.connections.get_mut(&number) else { return };
            if caller.stalled.is_some() {
                return;
            }
            let (tag, request) = match caller.decoder.take() {
                Ok(None) => return,
                Err(_) => return self.hang_up(number),
                Ok(Some(frame)) => match frame.body {
                    Body::Message(_) => (frame.tag, frame.body.parse::<Request>()),
                    Body::Data { stream: Stream::Stdin, bytes, .. } => {
                        let (tag, bytes) = (frame.tag, bytes.to_vec());
                        self.input(number, tag, &bytes);
                        continue;
                    }
                    Body::Data { .. } => return self.hang_up(number),
                },
            };
            match request {
                Ok(request) => self.request(number, tag, request),
                Err(error) => {
                    let problem = Problem::new(Code::Protocol, error.to_string());
                    self.reply(number, tag, &Event::Failed(problem));
                }
            }
        }
    }

    pub(crate) fn hang_up(&mut self, number: u32) {
        let Some(caller) = self.connections.remove(&number) else { return };
        if self.preparing == Some(number) {
            self.stay_awake();
        }
        if self.is_keeper(number) {
            self.ending = Some(EndReason::Closed);
        }
        self.poller.forget(&caller.socket);
        self.waits.retain(|wait| wait.connection != number);
        self.inquiries.retain(|inquiry| inquiry.connection != number);
        self.writes.retain(|write| write.connection != number);
        for follower in caller.followers {
            let Some(exec) = self.exec_number(&follower.exec) else { continue };
            if follower.cancel_on_disconnect {
                self.stop(exec, carrel_proto::outcome::Cause::Cancelled);
            }
            self.resume(exec);
        }
    }

    pub(crate) fn reply(&mut self, number: u32, tag: u32, event: &Event) {
        if let Some(caller) = self.connections.get_mut(&number) {
            caller.send(tag, event);
            self.pump(number);
        }
    }

    /// As [`Self::pump`], together with what comes in the next moment: each word wakes the caller, who has nothing to do with the
    /// begin of a call that is over at once.
    pub(crate) fn pump_soon(&mut self, number: u32) {
        if self.unflushed.is_some_and(|(caller, _)| caller != number) {
            self.flush();
        }
        self.unflushed.get_or_insert((number, Instant::now() + SOON));
    }

    /// Lets nobody wait any longer for one more word.
    pub(crate) fn flush(&mut self) {
        if let Some((caller, _)) = self.unflushed {
            self.pump(caller);
        }
    }

    /// Sends a caller what it follows, as far as its socket takes it.
    pub(crate) fn pump(&mut self, number: u32) {
        self.unflushed.take_if(|(caller, _)| *caller == number);
        loop {
            let Some(caller) = self.connections.get_mut(&number) else { return };
            let mut more = false;
            let mut at = 0;
            while at < caller.followers.len() {
                let mut over = false;
                while caller.has_room() {
                    let follower = &caller.followers[at];
                    let Some(exec) = number_of(&follower.exec).and_then(|exec| self.execs.get(&exec)) else {
                        over = true;
                        break;
                    };
                    let (tag, next) = (follower.tag, follower.next);
                    if follower.until.is_some_and(|until| next >= until) {
                        caller.send(tag, &Event::Attached { next });
                        over = true;
                        break;
                    }
                    match exec.output.get(next) {
                        Ok(Some(chunk)) => {
                            caller.send_chunk(tag, chunk.stream, chunk.number, chunk.offset, &chunk.bytes);
                            caller.followers[at].next = chunk.number + 1;
                            more = true;
                        }
                        Ok(None) => {
                            if let Some(outcome) = exec.outcome() {
                                caller.send(tag, &Event::Finished(outcome.clone()));
                                over = true;
                            }
                            break;
                        }
                        Err(error) => {
                            let problem = Problem::internal(format!("reading kept output: {error}"));
                            caller.send(tag, &Event::Failed(problem));
                            over = true;
                            break;
                        }
                    }
                }
                if over {
                    caller.followers.swap_remove(at);
                } else {
                    at += 1;
                }
            }
            // Without room nothing was looked at, so there may be more once there is room again.
            more |= !caller.has_room();
            // What had no room may have some after the flush: nobody else would come back for it.
            more |= !caller.has_room();
            if !caller.flush() {
                return self.hang_up(number);
            }
            let blocked = caller.unsent() > 0;
            if blocked != caller.waiting {
                caller.waiting = blocked;
                let reading = caller.stalled.is_none();
                let _ = self.poller.change(&caller.socket, Token::Connection(number), reading, blocked);
            }
            if blocked || !more {
                break;
            }
        }
        let followed: Vec<u64> = self.connections.get(&number).map_or_else(Vec::new, |caller| {
            caller.followers.iter().filter_map(|follower| number_of(&follower.exec)).collect()
        });
        for exec in followed {
            self.resume(exec);
        }
    }

    /// Tells everyone who follows or waits that an exec has ended.
    pub(crate) fn tell(&mut self, exec: u64, outcome: &Outcome) {
        let (done, waits) =
            std::mem::take(&mut self.waits).into_iter().partition(|wait: &Wait| wait.exec == exec);
        self.waits = waits;
        for wait in done {
            self.reply(wait.connection, wait.tag, &Event::Waited { outcome: Some(outcome.clone()) });
        }
        self.refuse_writes(exec);
        self.pump_followers(exec);
    }

    pub(crate) fn pump_followers(&mut self, exec: u64) {
        let name = ExecId::numbered(exec);
        let callers: Vec<u32> = self
            .connections
            .iter()
            .filter(|(_, caller)| caller.followers.iter().any(|follower| follower.exec == name))
            .map(|(number, _)| *number)
            .collect();
        for number in callers {
            self.pump(number);
        }
    }

    pub(crate) fn exec_number(&self, name: &ExecId) -> Option<u64> {
        number_of(name).filter(|number| self.execs.contains_key(number))
    }
}

/// The number in an exec's name.
pub(crate) fn number_of(name: &ExecId) -> Option<u64> {
    name.as_str().strip_prefix("ex_")?.parse().ok()
}
