//! Files go back with the calls that are taken back, where it is known that nobody else has changed them.
//!
//! At rest, when no call runs, the workspace is copied ([`crate::shadow`]): right after the reply of a call, so that it is on nobody's
//! time. A call that begins finds the copy up to date, and what its interpreter's [`crate::undo::History`] keeps of it is that tree:
//!
//! ```text
//! call 4 ends ── rest: tree A ── call 5 begins, before it: A ── call 5 ends ── rest: tree B ── …
//!                                call 5 crashes, or is undone: the workspace becomes A again
//! ```
//!
//! A tree is put back only if all that has changed since is the doing of the calls that are taken back. Who else could it be:
//! - another call: the agent knows of each ([`Actors`]). One that changed nothing is no obstacle; two at a time always are.
//! - a process that a call has left behind, or an interpreter that runs threads: while there is one, there is no rest and no copy.
//! - somebody outside the box: whoever changes files from there says so beforehand (`Places::OUTSIDE`).
//!
//! A file that is mapped into an interpreter's memory can be written to without a trace once it was written to. Whenever files have
//! changed, mappings are looked for; while there is one, or nobody can tell, contents are compared and not only the index.
//!
//! Where any of these is so, or the workspace is too large to copy, files stay as they are and the reply says why.

use std::{
    fs,
    path::PathBuf,
    rc::Rc,
    time::{Duration, Instant},
};

use carrel_files::{Owner, Root};
use carrel_proto::{
    guest::{Language, Places},
    message::What,
    outcome::FilesState,
};

use crate::{
    calls::State,
    process::{Process, Role},
    receipt::left_below,
    serve::Agent,
    shadow::{self, Limits, Reason, Store, Tree},
};

/// For a copy at rest. The agent hears nobody meanwhile.
const LONGEST: Duration = Duration::from_millis(500);
/// For one on the path of a call, which only is where files were changed from outside before.
const LONGEST_ON_PATH: Duration = Duration::from_millis(100);
/// For a look at the workspace before and after it is put back.
const LONGEST_LOOK: Duration = Duration::from_secs(2);
/// Between two attempts at a workspace that takes too long.
const AGAIN: Duration = Duration::from_secs(10);
/// How long what a call has left may take to be gone once it is killed: on a machine that has much else to do, not at once.
const DYING: Duration = Duration::from_secs(5);

const OTHER_CALL: &str = "another call ran at the same time";
const OTHER_CHANGED: &str = "another call has changed files since";
const OUTSIDE_CHANGED: &str = "files were changed from outside the sandbox meanwhile";

/// What the files were before a call; or why that is not known.
pub(crate) type Point = Result<Rc<Tree>, Reason>;

/// What became of files with calls that were taken back.
#[derive(Debug, Clone)]
pub(crate) struct FilesBack {
    pub(crate) state: FilesState,
    pub(crate) reason: Option<Reason>,
}

/// Who has run since the workspace was last copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Actors {
    #[default]
    Nobody,
    /// This interpreter alone.
    One(u32),
    /// A command, or several.
    Others,
}

/// The workspace at rest.
#[derive(Debug)]
pub(crate) struct Shadow {
    store: Rc<Store>,
    root: Option<Root>,
    /// The last copy.
    last: Option<Rc<Tree>>,
    /// Why the workspace may not be that any more; none: it is.
    doubt: Option<Reason>,
    /// The walk of the index that the copy was made by.
    walk: u32,
    racy: bool,
    /// A file was mapped when it was last looked for: contents may have changed without a trace.
    mapped: bool,
    /// When something was last changed from outside.
    outside: Option<(i64, u64)>,
    actors: Actors,
    /// A call has ended since.
    pub(crate) stale: bool,
    /// Not to be tried again before.
    again: Option<Instant>,
    witness: PathBuf,
}

impl Shadow {
    pub(crate) fn new(places: &Places) -> Self {
        let spool = PathBuf::from(&places.spool);
        let witness = spool.join(Places::OUTSIDE);
        // There from the begin, so that nobody's first look from outside is taken for a change.
        if let Err(error) = fs::OpenOptions::new().append(true).create(true).open(&witness) {
            crate::say(&format!("making {}: {error}", witness.display()));
        }
        Self {
            store: Store::new(spool, PathBuf::from(&places.workspace), Limits::USUAL),
            root: None,
            last: None,
            doubt: Some("nothing was copied yet".to_owned()),
            walk: 0,
            racy: false,
            mapped: false,
            outside: None,
            actors: Actors::default(),
            stale: true,
            again: None,
            witness,
        }
    }

    fn point(&self) -> Point {
        match (&self.doubt, &self.last) {
            (None, Some(tree)) => Ok(Rc::clone(tree)),
            (doubt, _) => Err(doubt.clone().unwrap_or_default()),
        }
    }

    fn seen_from_outside(&self) -> Option<(i64, u64)> {
        let stat = rustix::fs::stat(&self.witness).ok()?;
        Some((stat.st_mtime, stat.st_mtime_nsec))
    }

    /// Somebody ran whom the agent has not started, or in a way that nobody can tell apart.
    pub(crate) fn touched(&mut self) {
        (self.actors, self.stale) = (Actors::Others, true);
    }
}

impl Agent {
    /// Whether anything here can be taken back.
    pub(crate) fn keeps_files(&self) -> bool {
        self.config.undo_calls > 0
            || self.sessions.values().any(|one| one.undo_calls.is_some_and(|calls| calls > 0))
    }

    /// A call is about to begin, `alone` or beside others.
    pub(crate) fn files_before(&mut self, number: u64, alone: bool) {
        if !self.keeps_files() {
            return;
        }
        let is_run = self.execs.get(&number).is_some_and(|exec| matches!(exec.what, What::Run { .. }));
        if alone && is_run {
            self.settle_files(LONGEST_ON_PATH);
        } else if !alone {
            for interpreter in self.interpreters.values_mut() {
                if let Some(current) = interpreter.current {
                    interpreter.history.set_point(current, Err(OTHER_CALL.to_owned()));
                }
            }
        }
        let Some(exec) = self.execs.get(&number) else { return };
        let (session, process) = (exec.session.clone(), exec.process);
        let id = process.filter(|_| is_run);
        self.shadow.actors = match (self.shadow.actors, id) {
            (Actors::Nobody, Some(id)) => Actors::One(id),
            (Actors::One(one), Some(id)) if one == id => Actors::One(id),
            _ => Actors::Others,
        };
        if self.undo_calls(&session) == 0 {
            return;
        }
        let point = if alone { self.shadow.point() } else { Err(OTHER_CALL.to_owned()) };
        if let Some(interpreter) = id.and_then(|id| self.interpreters.get_mut(&id)) {
            // Of bash and node only the first call can be taken back.
            interpreter.history.forget_points_unless(interpreter.language == Language::Python);
            interpreter.history.set_point(number, point);
        }
    }

    /// Copies what has changed, if all is at rest.
    pub(crate) fn settle_when_quiet(&mut self) {
        if self.shadow.stale && self.running() == 0 && self.resuming.is_none() {
            self.shadow.stale = false;
            if self.keeps_files() {
                self.settle_files(LONGEST);
            }
        }
    }

    fn settle_files(&mut self, longest: Duration) {
        let now = Instant::now();
        let outside = self.shadow.seen_from_outside();
        let from_outside = outside != self.shadow.outside;
        if self.shadow.again.is_some_and(|again| again > now) {
            return;
        }
        if let Some(doubt) = self.unrest() {
            self.shadow.doubt = Some(doubt);
            return;
        }
        if from_outside {
            self.changes.refresh(longest);
        }
        let shadow = &mut self.shadow;
        let idle = shadow.actors == Actors::Nobody;
        let same = self.changes.moved() == shadow.walk && !shadow.racy && !shadow.mapped;
        if !from_outside && shadow.doubt.is_none() && (idle || same) {
            shadow.actors = Actors::Nobody;
            return;
        }
        let mapped = self.maps_files();
        let verify = mapped || self.shadow.mapped;
        let root = match self.shadow.root.take() {
            Some(root) => root,
            None => match Root::open(&self.config.places.workspace) {
                Ok(root) => {
                    let (uid, gid) = self.config.user;
                    root.with_owner(Owner { uid, gid })
                }
                Err(error) => {
                    self.shadow.doubt = Some(format!("the workspace cannot be opened: {error}"));
                    return;
                }
            },
        };
        let old = self.shadow.last.take();
        let copied =
            shadow::copy(&root, &self.changes, old.as_deref(), verify, &self.shadow.store, now + longest);
        self.shadow.root = Some(root);
        match copied {
            Ok(copied) => {
                if copied.differs {
                    self.spoil(from_outside && old.is_some());
                }
                let shadow = &mut self.shadow;
                (shadow.racy, shadow.walk) = (copied.tree.is_racy(), self.changes.moved());
                (shadow.outside, shadow.actors) = (outside, Actors::Nobody);
                // The tree that calls already have, if it is as good: they share it.
                shadow.last = match old {
                    Some(old) if !copied.differs && !old.is_racy() => Some(old),
                    _ => Some(Rc::new(copied.tree)),
                };
                (shadow.doubt, shadow.again, shadow.mapped) = (None, None, mapped);
            }
            Err(reason) => {
                if Instant::now() >= now + longest {
                    self.shadow.again = Some(now + AGAIN);
                }
                (self.shadow.last, self.shadow.doubt) = (old, Some(reason));
            }
        }
    }

    /// Files have changed: what others know of how they were is of no use to them any more.
    fn spoil(&mut self, from_outside: bool) {
        let actors = self.shadow.actors;
        let why = if from_outside { OUTSIDE_CHANGED } else { OTHER_CHANGED };
        for (id, interpreter) in &mut self.interpreters {
            if from_outside || actors != Actors::One(*id) {
                interpreter.history.spoil_points(why);
            }
        }
    }

    /// What may write to files though no call runs.
    fn unrest(&self) -> Option<Reason> {
        for (id, process) in &self.processes {
            if self.has_left(*id, process) {
                return Some("processes run in the background".to_owned());
            }
            let Some(interpreter) = self.interpreters.get(id) else { continue };
            // One that has run nothing yet has no threads but its own.
            let suspect = match interpreter.language {
                Language::Node => interpreter.history.present().is_some(),
                _ => interpreter.history.has_obstacle(),
            };
            if suspect && process.runner.main().is_some_and(has_threads) {
                let language = interpreter.language.as_str();
                return Some(format!("{language} runs threads that can write between calls"));
            }
        }
        None
    }

    /// Whether an interpreter that has run something can write to files by way of its memory.
    fn maps_files(&self) -> bool {
        let used =
            self.interpreters.iter().filter(|(_, interpreter)| interpreter.history.present().is_some());
        let mut mains = used.filter_map(|(id, _)| self.processes.get(id)?.runner.main());
        mains.any(|main| maps_files(main, &self.config.places.workspace))
    }

    /// Whether processes are there that outlive the call or command that has started them.
    fn has_left(&self, id: u32, process: &Process) -> bool {
        let asleep = matches!(process.role, Role::Interpreter) || process.ended;
        asleep && process.left && !left_below(&process.runner, process.ended, &self.spares_of(id)).is_empty()
    }

    /// Puts files back to what they were before a call of an interpreter and all that came after it, if that is certain. `heir`: the
    /// process that has the state of then.
    pub(crate) fn put_files_back(&mut self, id: u32, point: Point, heir: Option<i32>) -> FilesBack {
        match self.try_to_put_back(id, point, heir) {
            Ok(()) => FilesBack { state: FilesState::Restored, reason: None },
            Err(reason) => {
                // Whatever has changed and does not go back is nobody's who could take it back later.
                self.shadow.touched();
                FilesBack { state: FilesState::Kept, reason: Some(reason) }
            }
        }
    }

    fn try_to_put_back(&mut self, id: u32, point: Point, heir: Option<i32>) -> Result<(), Reason> {
        let tree = point?;
        let runs =
            |exec: &crate::calls::Exec| matches!(exec.state, State::Running(_)) && exec.process != Some(id);
        if self.execs.values().any(runs) {
            return Err(OTHER_CALL.to_owned());
        }
        self.await_the_dying(id);
        if let Some(process) = self.processes.get_mut(&id) {
            process.left = true;
        }
        if let Some(unrest) = self.unrest() {
            return Err(unrest);
        }
        if !matches!(self.shadow.actors, Actors::Nobody) && self.shadow.actors != Actors::One(id) {
            // Another call has changed files since, or changed none and nobody could see that.
            return Err(self.shadow.doubt.clone().unwrap_or_else(|| OTHER_CHANGED.to_owned()));
        }
        let outside = self.shadow.seen_from_outside();
        if outside != self.shadow.outside {
            return Err(OUTSIDE_CHANGED.to_owned());
        }
        let verify =
            self.shadow.mapped || heir.is_some_and(|heir| maps_files(heir, &self.config.places.workspace));
        let Some(root) = self.shadow.root.take() else { return Err("nothing was copied".to_owned()) };
        self.changes.refresh(LONGEST_LOOK);
        // Whatever of theirs was seen in that look was announced before it. What comes now is another file than the one that was seen.
        let done = match self.shadow.seen_from_outside() == outside {
            true => tree.put_back(&root, &self.changes, verify),
            false => Err(OUTSIDE_CHANGED.to_owned()),
        };
        self.shadow.root = Some(root);
        done?;
        self.changes.refresh(LONGEST_LOOK);
        if self.shadow.seen_from_outside() != outside || !tree.has_names_of(&self.changes) {
            return Err(OUTSIDE_CHANGED.to_owned());
        }
        // To be looked at once more, and compared with what it should be.
        let shadow = &mut self.shadow;
        (shadow.last, shadow.racy, shadow.stale) = (Some(tree), true, true);
        (shadow.doubt, shadow.actors) = (None, Actors::One(id));
        Ok(())
    }

    /// What was killed is gone only a moment later.
    fn await_the_dying(&self, id: u32) {
        let Some(process) = self.processes.get(&id) else { return };
        let deadline = Instant::now() + DYING;
        let spares = self.spares_of(id);
        for pid in left_below(&process.runner, process.ended, &spares) {
            let pid = carrel_jail::userns::pid(pid);
            let Ok(pidfd) = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) else {
                continue;
            };
            carrel_jail::tree::wait_readable(&pidfd, deadline);
        }
    }
}

fn has_threads(pid: i32) -> bool {
    // Two names that every directory has, and one per thread.
    rustix::fs::stat(format!("/proc/{pid}/task")).is_ok_and(|stat| stat.st_nlink > 3)
}

/// Whether a process has a file below the workspace mapped such that it can write to it. One that cannot be seen may have: those of a
/// session that came back from disk are in a user namespace that is not the agent's.
fn maps_files(pid: i32, workspace: &str) -> bool {
    let Ok(maps) = fs::read(format!("/proc/{pid}/maps")) else { return true };
    maps.split(|byte| *byte == b'\n').any(|line| {
        let mut fields = line.split(|byte| *byte == b' ').filter(|field| !field.is_empty());
        let Some([_, b'w', _, b's']) = fields.nth(1) else { return false };
        // Of offset, device and inode nothing is asked.
        fields.nth(3).is_some_and(|path| path.starts_with(workspace.as_bytes()))
    })
}
