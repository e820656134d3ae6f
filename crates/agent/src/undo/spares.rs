//! The processes that have earlier states: found by their interpreter's word, awaited, and ended.

use std::time::{Duration, Instant};

use carrel_jail::tree::{self, Stat};
use carrel_proto::{guest::Language, id::SessionName};
use rustix::process::Signal;

use super::{PATIENCE, SOON, Spared, Unspared, history::Spare};
use crate::{process::Process, serve::Agent};

impl Agent {
    /// The spares of an interpreter, as the agent sees them: processes that are not the user's.
    pub(crate) fn spares_of(&self, id: u32) -> Vec<i32> {
        self.interpreters.get(&id).map_or_else(Vec::new, |interpreter| interpreter.history.spares())
    }

    pub(crate) fn living_spares(&self, id: u32) -> u32 {
        let Some(interpreter) = self.interpreters.get(&id) else { return 0 };
        let living = interpreter.history.spares.values().filter(|spare| spare.is_alive()).count();
        u32::try_from(living).unwrap_or(0)
    }

    /// Waits for the words about spares that are on their way, for whoever has to know them all.
    pub(crate) fn await_all_spares(&mut self) {
        let ids: Vec<u32> = self.interpreters.keys().copied().collect();
        self.await_spares(&ids, PATIENCE);
    }

    /// The same where something besides an interpreter may run: a copy that is not known would be taken for that, and files stay
    /// as they are. Whoever is heard meanwhile may begin or end calls.
    pub(crate) fn await_spares_in_doubt(&mut self) {
        if self.running() > 0 || !self.keeps_files() {
            return;
        }
        let left = |id: &&u32| self.processes.get(id).is_some_and(|process| process.left && !process.ended);
        let ids: Vec<u32> = self.interpreters.keys().filter(left).copied().collect();
        self.await_spares(&ids, SOON);
    }

    pub(super) fn await_spares(&mut self, ids: &[u32], patience: Duration) {
        let deadline = Instant::now() + patience;
        for &id in ids {
            while let Some(interpreter) = self.interpreters.get(&id)
                && interpreter.history.awaited
                && interpreter.language == Language::Python
                && interpreter.mute.is_none()
                && Instant::now() < deadline
            {
                if !tree::wait_readable(&interpreter.replies, deadline) {
                    break;
                }
                self.hear_driver(id);
            }
        }
    }

    /// Ends all spares, of one session or of all, for whoever needs it without them: their memory, or a session that is to be
    /// written to disk. The next call of each interpreter makes one again before it begins. Says whether they are gone.
    pub(crate) fn drop_spares(&mut self, session: Option<&SessionName>) -> bool {
        let mut ending = Vec::new();
        for (id, interpreter) in &mut self.interpreters {
            let Some(process) = self.processes.get(id) else { continue };
            if session.is_some_and(|session| process.session != *session)
                || interpreter.history.is_returning()
            {
                continue;
            }
            let history = &interpreter.history;
            for spare in history.spares.values().chain(&history.leaving).filter(|spare| spare.is_there()) {
                let pid = carrel_jail::userns::pid(spare.pid);
                let pidfd = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty());
                process.runner.deliver(&[spare.pid], Signal::KILL, false);
                ending.extend(pidfd);
            }
            interpreter.history.forget();
        }
        let deadline = Instant::now() + PATIENCE;
        ending.iter().all(|pidfd| tree::wait_readable(pidfd, deadline))
    }

    pub(crate) fn heard_spare(&mut self, id: u32, spared: Spared) {
        let (Some(interpreter), Some(process)) = (self.interpreters.get_mut(&id), self.processes.get(&id))
        else {
            return;
        };
        let history = &mut interpreter.history;
        history.awaited = false;
        let known = history.present == Some(spared.id) || history.before.contains(&Some(spared.id));
        if let Some(spare) = find(process, spared.pid, self.config.namespaces).filter(|_| known) {
            history.spares.insert(spared.id, Spare { bare: spared.bare, ..spare });
            history.unspared = None;
        }
    }

    pub(crate) fn heard_unspared(&mut self, id: u32, unspared: Unspared) {
        if let Some(interpreter) = self.interpreters.get_mut(&id) {
            interpreter.history.unspared = Some(unspared.reason);
            interpreter.history.awaited = false;
        }
    }
}

/// A spare, which is a child of its interpreter.
pub(super) fn find(process: &Process, inside: i32, namespaces: bool) -> Option<Spare> {
    // Without its interpreter it is the runner's.
    let parents = [Some(process.runner.child.pid), process.runner.main()];
    let is_it = |pid: &i32| if namespaces { tree::innermost(*pid) == Some(inside) } else { *pid == inside };
    // Most likely the youngest of the interpreter's.
    let children = parents.into_iter().flatten().flat_map(tree::children).collect::<Vec<_>>();
    let pid = children.into_iter().rev().find(is_it).or_else(|| {
        let is_child = |pid: &i32| Stat::of(*pid).is_some_and(|stat| parents.contains(&Some(stat.parent)));
        tree::below(process.runner.child.pid).into_iter().find(|pid| is_it(pid) && is_child(pid))
    })?;
    Some(Spare { inside, pid, start_time: tree::start_time(pid)?, bare: false })
}
