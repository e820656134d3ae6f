//! What is known of an interpreter's states: which there are, who has them, and the way back to one of them.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Instant,
};

use carrel_jail::tree::{self, Stat};

use super::{NO_POINT, PATIENCE, Spared};
use crate::{calls::Ending, files_back::Point, variables::Changes};

/// A process that has a state of before.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spare {
    /// As its session sees it.
    pub(super) inside: i32,
    /// As the agent sees it.
    pub(super) pid: i32,
    pub(super) start_time: u64,
    pub(super) bare: bool,
}

impl Spare {
    pub(super) fn is_alive(&self) -> bool {
        tree::start_time(self.pid) == Some(self.start_time)
    }

    /// Also while it ends.
    pub(super) fn is_there(&self) -> bool {
        Stat::of(self.pid).is_some_and(|stat| stat.start_time == self.start_time)
    }
}

/// The states of an interpreter.
#[derive(Debug, Default)]
pub(crate) struct History {
    /// The last call of each; none before the first call. The present one is not among them.
    pub(super) before: VecDeque<Option<u64>>,
    /// The last call of the present state.
    pub(super) present: Option<u64>,
    pub(super) spares: BTreeMap<u64, Spare>,
    /// The driver has yet to say whether the present state has a spare.
    pub(super) awaited: bool,
    /// Those that are no longer wanted and may still be there: not the user's either.
    pub(super) leaving: Vec<Spare>,
    /// Why the present state has no spare.
    pub(super) unspared: Option<String>,
    /// Why the state that the call leaves will have none: known when it ends.
    pub(super) leaves: Option<String>,
    /// Changes of variables that went with a call: whoever takes it back has not heard of them.
    pub(super) told: Vec<(u64, Changes)>,
    /// What files were before each call that can be taken back, and before the present one.
    pub(super) points: BTreeMap<u64, Point>,
    pub(super) returning: Option<Return>,
}

/// On the way to an earlier state.
#[derive(Debug)]
pub(super) struct Return {
    pub(super) deadline: Instant,
    /// How the interpreter ended.
    pub(super) ending: Option<Ending>,
    /// Who says that it has taken over.
    pub(super) heir: Option<Spared>,
    /// Who asked for it; nobody if a call has ended the interpreter.
    pub(super) asked: Option<Asked>,
    /// When it is to be looked again whether the interpreter runs no more code.
    pub(super) again: Option<Instant>,
}

/// A caller's connection and tag.
pub(super) type Asked = (u32, u32);

impl Return {
    pub(super) fn new(asked: Option<Asked>) -> Self {
        Self { deadline: Instant::now() + PATIENCE, ending: None, heir: None, asked, again: None }
    }
}

impl History {
    pub(crate) fn is_returning(&self) -> bool {
        self.returning.is_some()
    }

    pub(crate) fn overdue(&self) -> Option<Instant> {
        let returning = self.returning.as_ref()?;
        Some(returning.again.map_or(returning.deadline, |again| again.min(returning.deadline)))
    }

    /// Who waits for the return, which is not to be.
    pub(crate) fn take_asked(&mut self) -> Option<Asked> {
        self.returning.take()?.asked
    }

    /// The request of a call is on its way, with these changes of variables.
    pub(crate) fn begin(&mut self, number: u64, changes: &Changes) {
        if !changes.is_empty() {
            self.told.push((number, changes.clone()));
        }
    }

    /// A call has ended and left a state of its own; so many before it are kept.
    pub(crate) fn done(&mut self, number: u64, keep: u32) {
        self.before.push_back(self.present);
        self.present = Some(number);
        self.awaited = keep > 0;
        self.unspared = self.leaves.take();
        while self.before.len() > keep as usize {
            self.before.pop_front();
        }
        let oldest = self.before.front().copied().unwrap_or(self.present).unwrap_or(0);
        let wanted = self.spares.split_off(&oldest);
        self.leaving.retain(Spare::is_there);
        self.leaving.extend(std::mem::replace(&mut self.spares, wanted).into_values());
        self.told.retain(|(call, _)| *call > oldest);
        while self.points.len() > keep as usize {
            self.points.pop_first();
        }
    }

    pub(crate) fn set_point(&mut self, call: u64, point: Point) {
        self.points.insert(call, point);
    }

    pub(crate) fn forget_points_unless(&mut self, wanted: bool) {
        if !wanted {
            self.points.clear();
        }
    }

    /// Somebody else has changed files.
    pub(crate) fn spoil_points(&mut self, why: &str) {
        for point in self.points.values_mut().filter(|point| point.is_ok()) {
            *point = Err(why.to_owned());
        }
    }

    /// What files were before all calls that came after a state; these are forgotten.
    pub(super) fn point_after(&mut self, state: Option<u64>) -> Point {
        let mut later = self.points.split_off(&state.map_or(0, |state| state + 1));
        later.pop_first().map_or_else(|| Err(NO_POINT.to_owned()), |(_, point)| point)
    }

    /// Whether the driver sees something that keeps it from being copied, which may be threads.
    pub(crate) fn has_obstacle(&self) -> bool {
        self.unspared.is_some() || self.leaves.is_some()
    }

    /// Whether a call that ends the interpreter now leaves the state as it was.
    pub(super) fn is_safe(&self) -> bool {
        self.present.is_none_or(|present| self.spares.contains_key(&present))
    }

    /// The driver's word about the state that the present call leaves.
    pub(crate) fn leaves(&mut self, reason: Option<String>) {
        self.leaves = reason;
    }

    /// Nothing but the present is kept, and that only by the interpreter itself.
    pub(crate) fn forget(&mut self) {
        self.awaited = false;
        self.spares.clear();
        self.before.clear();
        self.points.clear();
    }

    /// The last call of the present state: all that an interpreter without spares has to say of its past.
    pub(crate) fn present(&self) -> Option<u64> {
        self.present
    }

    /// The spare that has the present state, if a copy of it would have all of that.
    pub(crate) fn bare_spare(&self) -> Option<i32> {
        let spare = self.spares.get(&self.present?)?;
        (spare.bare && spare.is_alive()).then_some(spare.pid)
    }

    /// Whether a copy of the present state can be asked for; from then on it is awaited.
    pub(crate) fn wants_copy(&mut self) -> bool {
        let has_one = self.present.is_some_and(|present| self.spares.contains_key(&present));
        let wants = self.present.is_some() && !has_one && !self.has_obstacle();
        self.awaited |= wants;
        wants
    }

    /// Spares are only on their way out from here on. Whether there are any.
    pub(crate) fn let_go(&mut self) -> bool {
        let any = !self.spares.is_empty();
        self.leaving.extend(std::mem::take(&mut self.spares).into_values());
        any
    }

    /// The driver is about to say whether the present state has a spare.
    pub(crate) fn awaiting(self, awaited: bool) -> Self {
        Self { awaited, ..self }
    }

    /// Of an interpreter that has come back from disk.
    pub(crate) fn with_present(present: Option<u64>) -> Self {
        Self { present, ..Self::default() }
    }

    pub(super) fn spares(&self) -> Vec<i32> {
        let leaving = self.leaving.iter().filter(|spare| spare.is_there());
        self.spares.values().chain(leaving).map(|spare| spare.pid).collect()
    }

    pub(super) fn any_alive(&self) -> bool {
        self.spares.values().any(Spare::is_alive)
    }

    /// The present is this state now. `None`: there is no such state. Else how many calls were taken back.
    pub(super) fn go_back(&mut self, to: u64, heir: i32) -> Option<u32> {
        let mut count = 0;
        if self.present != Some(to) {
            let at = self.before.iter().position(|state| *state == Some(to))?;
            count = self.before.len() - at;
            self.before.truncate(at);
            self.present = Some(to);
        }
        let gone = self.spares.split_off(&to);
        self.leaving.extend(gone.into_values().filter(|spare| spare.inside != heir));
        // Whoever takes over makes a spare of its own: one that nobody waits for would be written to disk with its session.
        (self.unspared, self.leaves, self.awaited) = (None, None, true);
        u32::try_from(count).ok()
    }
}

/// How many calls can be taken back in a row.
pub(super) fn kept(history: &History) -> usize {
    let is_kept = |state: &Option<u64>| {
        state.is_none_or(|state| history.spares.get(&state).is_some_and(Spare::is_alive))
    };
    history.before.iter().rev().take_while(|state| is_kept(state)).count()
}
