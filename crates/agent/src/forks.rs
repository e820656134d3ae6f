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

use carrel_graft::format::ARGUMENT;
use carrel_jail::{sys, tree};
use carrel_proto::{
    guest::{Language, Manner, Places, Scion},
    id::SessionName,
    message::Event,
    problem::{Code, Problem},
};

use crate::{
    copies::Copy,
    drivers::{COPY, KEEP},
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

/// A python that is to come to life.
#[derive(Debug)]
pub(crate) struct Graft {
    saved: interpreter::Saved,
    session: SessionName,
    image: OwnedFd,
}

impl Agent {
    /// Nothing new starts from here on; says whose image is the box's state.
    pub(crate) fn prepare_fork(&mut self, caller: u32) -> Result<Event, Problem> {
        if !self.config.namespaces {
            return Err(refused("it has no namespaces of its own"));
        }
        if self.execs.values().any(|exec| exec.outcome().is_none()) {
            return Err(refused("a call or command is under way"));
        }
        let id = self.only_python()?;
        self.have_copy_made(id);
        let forkable = self.forkable(id).inspect_err(|_| self.let_go_of_copies())?;
        self.preparing = Some(caller);
        Ok(forkable)
    }

    fn forkable(&self, id: u32) -> Result<Event, Problem> {
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
        Ok(Event::Forkable { spare, cwd, manner: manner(spare).map_err(outside)? })
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

    fn start_graft(&mut self, graft: Graft, cwd: &str) -> io::Result<u32> {
        let Graft { saved, session, image } = graft;
        let id = saved.id;
        let next = std::mem::replace(&mut self.next_number, id);
        let copy = Copy { argv: [Places::AGENT, ARGUMENT], image, greeting: Vec::new() };
        self.bring_to_life(&session, Language::Python, Some(copy), cwd.to_owned())?;
        self.next_number = next;
        let keeps = self.undo_calls(&session) > 0;
        let new = self.interpreters.remove(&id).ok_or(io::ErrorKind::NotFound)?;
        let mut interpreter = Interpreter::grown(saved, new, keeps);
        if !interpreter.flush() {
            self.poller.writable(&interpreter.requests, Token::Requests(id))?;
        }
        self.interpreters.insert(id, interpreter);
        Ok(id)
    }

    /// Takes over what another agent wrote down, but for its python.
    pub(crate) fn take_root(&mut self, scion: &Scion) -> io::Result<()> {
        let image = scion.image.ok_or_else(|| io::Error::other("the image is gone"))?;
        let image = sys::inherited(image)?;
        let saved = Saved::read(&self.saved_file())?;
        let Saved { sessions, processes, mut interpreters, execs, .. } = self.load_numbers(saved);
        for SavedSession { name, cwd, env, own, opened_ms, undo_calls, .. } in sessions {
            let session = Session::open(&self.thread, &self.config, cwd, env, own)?;
            self.sessions.insert(name, Session { opened: at(opened_ms), undo_calls, ..session });
        }
        let (Some(saved), Some(process), true) =
            (interpreters.pop(), processes.into_iter().next(), interpreters.is_empty())
        else {
            return Err(io::Error::other("it is not of one interpreter"));
        };
        self.load_execs(execs)?;
        let graft = Graft { saved, session: process.session, image };
        self.resuming = Some(Resuming { graft: Some(graft), ..Resuming::default() });
        Ok(())
    }

    /// The image is whole: has the python come to life, and waits until it has.
    pub(crate) fn grow(&mut self, scion: &Scion) -> Result<Event, Problem> {
        let graft = self.resuming.as_mut().and_then(|resuming| resuming.graft.take());
        let graft = graft.ok_or_else(|| refused("it is not of one interpreter"))?;
        let id = self.start_graft(graft, &scion.cwd).map_err(|error| refused(&error.to_string()))?;
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
        if manner(main).ok().as_ref() != Some(&scion.manner) {
            return Err(refused("user code has changed limits of its own process"));
        }
        let _ = fs::remove_file(self.saved_file());
        self.resuming = None;
        self.last_activity = Instant::now();
        Ok(Event::Done)
    }
}
