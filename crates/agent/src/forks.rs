//! A sandbox is copied while it lives: the agent's part.
//!
//! Where nothing lives in a box but one python between two calls, its spare ([`crate::undo`]) is all that a copy needs: it
//! has the state, waits, and holds nothing. The host takes its image, and the agent of the new box has its python come to life as
//! a graft of that ([`carrel_graft`]), in a session that is made like any other. Neither the processes nor the pipes of the first box are
//! written anywhere, and nothing new starts in it for as long as it takes to copy memory and files.
//!
//! Any doubt speaks against it: then the host copies the box the slow way, by [`crate::sleep`].

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use carrel_graft::format::{ARGUMENT, GO_ON, WAITING};
use carrel_jail::tree;
use carrel_proto::{
    guest::{Language, Manner, Places, Scion},
    id::SessionName,
    message::Event,
    problem::{Code, Problem},
};

use crate::{
    copies::Copy,
    drivers::{COPY, KEEP},
    files_back::Shadow,
    interpreter::{self, Interpreter},
    poll::Token,
    serve::Agent,
    session::Session,
    sleep::{Resuming, Saved, SavedSession, at},
};

/// A graft that has not said by then that it is ready is none.
const GROWING: Duration = Duration::from_secs(10);
/// What of a process's status user code can have changed and a graft would not have.
const KEPT: [&str; 4] = ["Umask", "NoNewPrivs", "Seccomp_filters", "Cpus_allowed"];

fn refused(why: &str) -> Problem {
    Problem::new(Code::Unsupported, format!("it cannot be copied as it lives: {why}"))
}

/// What a process has besides its memory and its descriptors.
fn manner(pid: i32) -> io::Result<Manner> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let is_kept = |line: &&str| line.split_once(':').is_some_and(|(name, _)| KEPT.contains(&name));
    let limits = fs::read_to_string(format!("/proc/{pid}/limits"))?;
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // Counted from its state on, which is the third: priority, nice value, and how it is scheduled.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let scheduled = [15, 16, 37, 38].map(|at| fields.get(at).copied().unwrap_or(""));
    let lines = status.lines().filter(is_kept).chain(limits.lines()).chain(scheduled);
    Ok(Manner(lines.map(str::to_owned).collect()))
}

/// A python that waits for its memory to be filled.
#[derive(Debug)]
pub(crate) struct Growing {
    id: u32,
    manner: Manner,
}

impl Agent {
    /// Nothing new starts from here on; says whose image is the box's state, and what this agent knows.
    pub(crate) fn prepare_fork(&mut self, caller: u32) -> Result<Event, Problem> {
        if !self.config.namespaces {
            return Err(refused("it has no namespaces of its own"));
        }
        if self.execs.values().any(|exec| exec.outcome().is_none()) {
            return Err(refused("a call or command is under way"));
        }
        let id = self.only_python()?;
        self.have_copy_made(id);
        let (spare, cwd, manner) = self.forkable(id).inspect_err(|_| self.let_go_of_copies())?;
        self.preparing = Some(caller);
        let state = self.state().inspect_err(|_| self.stay_awake())?;
        Ok(Event::Forkable { spare, cwd, manner, state })
    }

    fn forkable(&self, id: u32) -> Result<(i32, String, Manner), Problem> {
        let spare = self.spare_of_all(id)?;
        let outside = |error: io::Error| refused(&error.to_string());
        let main = self.processes.get(&id).and_then(|process| process.runner.main()).unwrap_or(spare);
        // A spare has neither, whatever the driver says.
        if tree::Stat::of(main).is_none_or(|stat| stat.threads > 1) {
            return Err(refused("it has threads"));
        }
        if !fs::read_to_string(format!("/proc/{main}/timers")).unwrap_or_default().is_empty() {
            return Err(refused("it has timers"));
        }
        let cwd = fs::read_link(format!("/proc/{spare}/cwd")).map_err(outside)?;
        let Some(cwd) = cwd.to_str().filter(|cwd| !cwd.ends_with(" (deleted)")).map(str::to_owned) else {
            return Err(refused("its working directory has no name"));
        };
        Ok((spare, cwd, manner(spare).map_err(outside)?))
    }

    /// If it is all that lives in the box, as far as the agent has started it.
    fn only_python(&self) -> Result<u32, Problem> {
        let (mut interpreters, mut processes) = (self.interpreters.iter(), self.processes.iter());
        let (Some((id, interpreter)), None) = (interpreters.next(), interpreters.next()) else {
            return Err(refused("it is not one interpreter that lives in it"));
        };
        let (Some((own, process)), None) = (processes.next(), processes.next()) else {
            return Err(refused("other processes live in it"));
        };
        let waits = interpreter.language == Language::Python && interpreter.is_at_rest();
        if !waits || own != id || process.ended {
            return Err(refused("it is not python, between two calls, that lives in it"));
        }
        Ok(*id)
    }

    /// Of the state as it is: where none is kept for undoing, or it was let go.
    fn have_copy_made(&mut self, id: u32) {
        self.await_all_spares();
        if let Some(interpreter) = self.interpreters.get_mut(&id)
            && interpreter.history.wants_copy()
        {
            interpreter.unsent.extend_from_slice(COPY);
            interpreter.flush();
        }
        self.await_all_spares();
    }

    /// Of those that nobody keeps for undoing.
    pub(crate) fn let_go_of_copies(&mut self) {
        let ids: Vec<u32> = self.interpreters.keys().copied().collect();
        for id in ids {
            let keeps = self.undo_of(id).calls > 0;
            if let Some(interpreter) = self.interpreters.get_mut(&id)
                && !keeps
                && interpreter.history.let_go()
            {
                interpreter.unsent.extend_from_slice(KEEP);
                if !interpreter.flush() {
                    let _ = self.poller.writable(&interpreter.requests, Token::Requests(id));
                }
            }
        }
    }

    /// The one that has all the state there is.
    fn spare_of_all(&self, id: u32) -> Result<i32, Problem> {
        let spare = self.interpreters.get(&id).and_then(|interpreter| interpreter.history.bare_spare());
        let Some(spare) = spare else {
            return Err(refused("there is no copy of its state, or it holds what a copy cannot have"));
        };
        let mut known: BTreeSet<i32> = self.spares_of(id).into_iter().collect();
        for process in self.processes.values() {
            known.insert(process.runner.child.pid);
            known.extend(process.runner.main());
        }
        for session in self.sessions.values() {
            let init = session.init.as_ref().map(|init| init.pid());
            known.extend(init.transpose().map_err(|error| refused(&error.to_string()))?);
        }
        // Those that have ended as well: their parent has yet to ask how.
        let mut parents = self
            .processes
            .values()
            .flat_map(|process| [Some(process.runner.child.pid), process.runner.main()]);
        if parents.any(|parent| {
            parent.is_some_and(|parent| tree::children(parent).iter().any(|pid| !known.contains(pid)))
        }) {
            return Err(refused("its interpreter has other children"));
        }
        let own = rustix::process::getpid().as_raw_nonzero().get();
        let is_other = |pid: &i32| !known.contains(pid) && tree::start_time(*pid).is_some();
        if tree::below(own).iter().any(is_other) {
            return Err(refused("other processes live in it"));
        }
        Ok(spare)
    }

    /// It goes on when it is told that its memory is filled.
    fn start_graft(
        &mut self,
        saved: interpreter::Saved,
        session: &SessionName,
        images: Vec<OwnedFd>,
        cwd: String,
    ) -> io::Result<u32> {
        let id = saved.id;
        let next = std::mem::replace(&mut self.next_number, id);
        let copy = Copy { argv: &[Places::AGENT, ARGUMENT, WAITING], images, greeting: Vec::new() };
        self.bring_to_life(session, Language::Python, Some(copy), cwd)?;
        self.next_number = next;
        let keeps = self.undo_calls(session) > 0;
        let new = self.interpreters.remove(&id).ok_or(io::ErrorKind::NotFound)?;
        self.interpreters.insert(id, Interpreter::grown(saved, new, keeps));
        Ok(id)
    }

    /// In a box that was just made, or kept ready and is somebody's since a moment ago.
    pub(crate) fn make_way(&mut self) -> Result<Event, Problem> {
        let is_new = self.ready.is_none() && self.execs.is_empty();
        if !is_new || self.interpreters.values().any(|interpreter| !interpreter.unasked) {
            return Err(Problem::new(Code::Conflict, "this sandbox is in use"));
        }
        let ids: Vec<u32> = self.processes.keys().copied().collect();
        for id in ids {
            if let Some(process) = self.processes.get(&id) {
                process.runner.kill_all();
            }
            self.close_interpreter(id);
            self.runner_gone(id);
        }
        Ok(Event::Done)
    }

    /// Where nothing is up.
    pub(crate) fn take_place(&mut self, caller: u32, scion: Scion) -> Result<Event, Problem> {
        let images = self.connections.get_mut(&caller).map(|caller| std::mem::take(&mut caller.given));
        if self.ready.is_some() || !self.execs.is_empty() || !self.processes.is_empty() {
            return Err(Problem::new(Code::Conflict, "this sandbox is in use"));
        }
        let taken = self.take_root(scion, images.unwrap_or_default());
        let id = taken.map_err(|error| refused(&error.to_string()))?;
        // Files have come; a copy of those that were there before would be put back in their place.
        self.look_first();
        self.shadow = Shadow::new(&self.config.places);
        let deadline = Instant::now() + GROWING;
        let Some(interpreter) = self.interpreters.get(&id) else {
            return Err(refused("the copy did not come to life"));
        };
        let mut byte = [0];
        let is_laid_out = tree::wait_readable(&interpreter.replies, deadline)
            && rustix::io::read(&interpreter.replies, &mut byte) == Ok(1)
            && byte == [GO_ON];
        let python = self.processes.get(&id).and_then(|process| process.runner.main());
        match python.filter(|_| is_laid_out) {
            Some(python) => Ok(Event::LaidOut { python }),
            None => Err(refused("the copy did not come to life")),
        }
    }

    /// Takes over what another agent knows, but for its python, which is started and waits.
    fn take_root(&mut self, scion: Scion, images: Vec<OwnedFd>) -> io::Result<u32> {
        if images.is_empty() {
            return Err(io::Error::other("the image is gone"));
        }
        let saved = Saved::parse(&scion.state)?;
        let Saved { sessions, processes, mut interpreters, execs, .. } = self.load_numbers(saved);
        for SavedSession { name, cwd, env, own, opened_ms, undo_calls, .. } in sessions {
            let session = match self.sessions.remove(&name).filter(|session| !session.has_failed()) {
                Some(session) => Session { cwd, env, own, ..session },
                None => Session::open(&self.thread, &self.config, cwd, env, own)?,
            };
            self.sessions.insert(name, Session { opened: at(opened_ms), undo_calls, ..session });
        }
        let (Some(saved), Some(process), true) =
            (interpreters.pop(), processes.into_iter().next(), interpreters.is_empty())
        else {
            return Err(io::Error::other("it is not of one interpreter"));
        };
        self.load_execs(execs)?;
        let id = self.start_graft(saved, &process.session, images, scion.cwd)?;
        let growing = Some(Growing { id, manner: scion.manner });
        self.resuming = Some(Resuming { growing, ..Resuming::default() });
        Ok(id)
    }

    /// Its memory is filled: waits until the python has come to life. `None`: none is to.
    pub(crate) fn grow(&mut self) -> Option<Result<Event, Problem>> {
        let Growing { id, manner } = self.resuming.as_mut()?.growing.take()?;
        Some(self.bring_up(id, &manner))
    }

    fn bring_up(&mut self, id: u32, kept: &Manner) -> Result<Event, Problem> {
        if let Some(interpreter) = self.interpreters.get_mut(&id) {
            interpreter.unsent.insert(0, GO_ON);
            if !interpreter.flush() {
                let written = self.poller.writable(&interpreter.requests, Token::Requests(id));
                written.map_err(|error| refused(&error.to_string()))?;
            }
        }
        let deadline = Instant::now() + GROWING;
        while let Some(interpreter) = self.interpreters.get(&id)
            && !interpreter.ready
            && interpreter.mute.is_none()
            && Instant::now() < deadline
            && tree::wait_readable(&interpreter.replies, deadline)
        {
            self.hear_driver(id);
        }
        let lives = self.interpreters.get(&id).is_some_and(|interpreter| interpreter.ready);
        let main = self.processes.get(&id).and_then(|process| process.runner.main()).filter(|_| lives);
        let Some(main) = main else { return Err(refused("the copy did not come to life")) };
        if manner(main).ok().as_ref() != Some(kept) {
            return Err(refused("user code has changed limits of its own process"));
        }
        self.resuming = None;
        self.last_activity = Instant::now();
        Ok(Event::Done)
    }
}
