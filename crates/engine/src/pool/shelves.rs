//! Which boxes are ready, and how many of which kind shall be. No I/O here, and time comes in: so all of it can be tested.
//!
//! Of a kind as many are wanted as were asked for in the last [`WINDOW`], so that a burst finds next time what it would have
//! needed this time, and what nobody asks for goes. The usual kind has a floor; all together have a ceiling.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use carrel_backend::{IsolationLevel, host::Whereabouts};
use carrel_proto::{guest::Language, limits::Limits};

use super::PoolSize;
use crate::environments::{Environments, Source};

/// So far back goes the memory of what was asked for.
pub(super) const WINDOW: Duration = Duration::from_secs(10 * 60);
/// A box that has stood for so long makes way for a new one.
pub(super) const AGE: Duration = Duration::from_secs(60 * 60);
/// After a box could not be made, so long no other of its kind is.
pub(super) const RETRY: Duration = Duration::from_secs(30);
/// A kind that was not asked for in this time gives room to one that was.
pub(super) const YIELD: Duration = Duration::from_secs(60);
/// After a claim its caller has the processors for this long: that is when it makes its first call.
pub(super) const PAUSE: Duration = Duration::from_millis(5);
/// The same while a sandbox is copied, which takes longer.
const LONG_PAUSE: Duration = Duration::from_millis(20);
/// Kinds that are known at once. Others are made as if there were no pool.
pub(super) const MOST_KINDS: usize = 16;

/// Boxes of one kind can stand for one another.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Kind {
    pub(super) environment: String,
    /// A name may mean something else to another caller, and after a reload.
    pub(super) source: Source,
    /// Whose interpreters it has.
    pub(super) whereabouts: Whereabouts,
    pub(super) limits: Limits,
    pub(super) isolation: IsolationLevel,
    /// The interpreter that is up.
    pub(super) language: Option<Language>,
}

/// How to make one of a kind.
#[derive(Debug, Clone)]
pub(super) struct Order {
    /// Those of whoever asked for it.
    pub(super) environments: Arc<Environments>,
    pub(super) undo_calls: u32,
}

#[derive(Debug)]
struct Shelf<B> {
    kind: Kind,
    order: Order,
    /// With the time since when they are ready; the oldest first.
    boxes: VecDeque<(Instant, B)>,
    making: usize,
    /// Taken out by callers who may put them back.
    tried: usize,
    /// When it was asked for; no more of them than there could be boxes.
    wanted: VecDeque<Instant>,
    not_before: Option<Instant>,
    floor: usize,
}

impl<B> Shelf<B> {
    fn new(kind: Kind, order: Order) -> Self {
        let (boxes, wanted) = (VecDeque::new(), VecDeque::new());
        Self { kind, order, boxes, making: 0, tried: 0, wanted, not_before: None, floor: 0 }
    }

    fn target(&self, now: Instant, ceiling: usize) -> usize {
        let recent = self.wanted.iter().filter(|when| now.saturating_duration_since(**when) < WINDOW).count();
        recent.max(self.floor).min(ceiling)
    }

    fn lack(&self, now: Instant, ceiling: usize) -> usize {
        if self.not_before.is_some_and(|at| now < at) {
            return 0;
        }
        self.target(now, ceiling).saturating_sub(self.count())
    }

    /// Those that are there or will be.
    fn count(&self) -> usize {
        self.boxes.len() + self.making + self.tried
    }

    /// Whether it has one that differs at most in the interpreter that is up.
    fn is_alike(&self, kind: &Kind) -> bool {
        !self.boxes.is_empty() && Kind { language: kind.language, ..self.kind.clone() } == *kind
    }

    /// Who asks at the moment finds nothing, and nothing is on its way.
    fn disappoints(&self, now: Instant) -> bool {
        self.count() == 0 && !self.is_quiet(now)
    }

    fn is_quiet(&self, now: Instant) -> bool {
        self.wanted.back().is_none_or(|when| now.saturating_duration_since(*when) > YIELD)
    }
}

#[derive(Debug)]
pub(super) struct Shelves<B> {
    all: Vec<Shelf<B>>,
    size: PoolSize,
    stopped: bool,
    /// Memory is short until then.
    held_back: Option<Instant>,
    /// Nothing is made before that.
    paused: Option<Instant>,
}

impl<B> Default for Shelves<B> {
    fn default() -> Self {
        let size = PoolSize { floor: 0, ceiling: 0 };
        Self { all: Vec::new(), size, stopped: false, held_back: None, paused: None }
    }
}

impl<B> Shelves<B> {
    pub(super) fn ceiling(&self) -> u32 {
        self.size.ceiling
    }

    fn most(&self) -> usize {
        self.size.ceiling as usize
    }

    /// Whether anything is kept ready, or would be.
    pub(super) fn is_open(&self) -> bool {
        self.size.ceiling > 0 && !self.stopped
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Whether there is anything that memory could be short for.
    pub(super) fn is_busy(&self) -> bool {
        self.is_open()
            && self
                .all
                .iter()
                .any(|shelf| !shelf.boxes.is_empty() || !shelf.wanted.is_empty() || shelf.floor > 0)
    }

    pub(super) fn ready(&self) -> usize {
        self.all.iter().map(|shelf| shelf.boxes.len()).sum()
    }

    pub(super) fn counts(&self) -> impl Iterator<Item = (&Kind, usize)> {
        self.all.iter().map(|shelf| (&shelf.kind, shelf.boxes.len())).filter(|(_, count)| *count > 0)
    }

    fn shelf(&mut self, kind: &Kind) -> Option<&mut Shelf<B>> {
        self.all.iter_mut().find(|shelf| shelf.kind == *kind)
    }

    pub(super) fn resize(&mut self, size: PoolSize, usual: Option<(Kind, Order)>, now: Instant) {
        self.size = size;
        for shelf in &mut self.all {
            shelf.floor = 0;
            if size.ceiling == 0 {
                // Who turns it on again begins anew.
                shelf.wanted.clear();
            }
        }
        let floor = size.floor.min(size.ceiling) as usize;
        if let (Some((kind, order)), true) = (usual, floor > 0)
            && let Some(shelf) = self.known(&kind, &order, now)
        {
            shelf.floor = floor;
        }
    }

    /// The shelf of a kind, a new one if there is room for it.
    fn known(&mut self, kind: &Kind, order: &Order, now: Instant) -> Option<&mut Shelf<B>> {
        if self.shelf(kind).is_none() {
            if self.all.len() >= MOST_KINDS {
                let idle = |shelf: &Shelf<B>| {
                    shelf.boxes.is_empty() && shelf.making == 0 && shelf.floor == 0 && shelf.is_quiet(now)
                };
                let at = self.all.iter().position(idle)?;
                self.all.swap_remove(at);
            }
            self.all.push(Shelf::new(kind.clone(), order.clone()));
        }
        let shelf = self.shelf(kind)?;
        shelf.order = order.clone();
        Some(shelf)
    }

    /// Somebody asks for one of this kind.
    pub(super) fn want(&mut self, kind: &Kind, order: &Order, now: Instant) {
        let most = self.most();
        if let Some(shelf) = self.known(kind, order, now) {
            if shelf.wanted.len() >= most {
                shelf.wanted.pop_front();
            }
            shelf.wanted.push_back(now);
        }
    }

    /// The newest, whose pages are the likeliest to be where they are needed.
    pub(super) fn take(&mut self, kind: &Kind, now: Instant) -> Option<(Instant, B)> {
        let taken = self.shelf(kind)?.boxes.pop_back()?;
        self.pause(now, PAUSE);
        Some(taken)
    }

    /// One with any interpreter, for somebody who needs none. The oldest: it is as good as any.
    pub(super) fn take_alike(&mut self, kind: &Kind, now: Instant) -> Option<(Kind, Instant, B)> {
        let shelf = self.all.iter_mut().find(|shelf| shelf.is_alike(kind))?;
        let (since, taken) = shelf.boxes.pop_front()?;
        let kind = shelf.kind.clone();
        self.pause(now, LONG_PAUSE);
        Some((kind, since, taken))
    }

    /// Whether there is one.
    pub(super) fn has_alike(&self, kind: &Kind) -> bool {
        self.all.iter().any(|shelf| shelf.is_alike(kind))
    }

    /// Not longer for those who come meanwhile, or a row of callers would find nothing in the end.
    fn pause(&mut self, now: Instant, pause: Duration) {
        self.paused = self.paused.filter(|until| now < *until).or(Some(now + pause));
    }

    /// One that was taken may come back: until [`Self::decided`], none is made in its place.
    pub(super) fn tries(&mut self, kind: &Kind) {
        if let Some(shelf) = self.shelf(kind) {
            shelf.tried += 1;
        }
    }

    pub(super) fn decided(&mut self, kind: &Kind) {
        if let Some(shelf) = self.shelf(kind) {
            shelf.tried = shelf.tried.saturating_sub(1);
        }
    }

    /// Puts one back. It comes out again if there is no place for it any more.
    pub(super) fn put(&mut self, kind: &Kind, since: Instant, one: B) -> Option<B> {
        let has_room = self.is_open() && self.held_back.is_none() && self.ready() < self.most();
        match self.shelf(kind) {
            Some(shelf) if has_room => {
                shelf.boxes.push_back((since, one));
                None
            }
            _ => Some(one),
        }
    }

    /// What shall be made next; it counts as being made.
    pub(super) fn next_order(&mut self, now: Instant) -> Option<(Kind, Order)> {
        self.held_back = self.held_back.filter(|until| now < *until);
        self.paused = self.paused.filter(|until| now < *until);
        let most = self.most();
        let total: usize = self.all.iter().map(Shelf::count).sum();
        if !self.is_open() || self.held_back.is_some() || self.paused.is_some() || total >= most {
            return None;
        }
        let lacking = self.all.iter_mut().filter(|shelf| shelf.lack(now, most) > 0);
        // First for those who ask at the moment, and of them for those who find nothing.
        let shelf = lacking
            .max_by_key(|shelf| (shelf.disappoints(now), !shelf.is_quiet(now), shelf.lack(now, most)))?;
        shelf.making += 1;
        Some((shelf.kind.clone(), shelf.order.clone()))
    }

    /// One that was ordered is ready. It comes out again if it is not needed any more.
    pub(super) fn made(&mut self, kind: &Kind, now: Instant, one: B) -> Option<B> {
        if let Some(shelf) = self.shelf(kind) {
            shelf.making = shelf.making.saturating_sub(1);
            shelf.not_before = None;
        }
        self.put(kind, now, one)
    }

    pub(super) fn failed(&mut self, kind: &Kind, now: Instant) {
        if let Some(shelf) = self.shelf(kind) {
            shelf.making = shelf.making.saturating_sub(1);
            shelf.not_before = Some(now + RETRY);
        }
    }

    /// Those that stand there for nothing.
    pub(super) fn surplus(&mut self, now: Instant) -> Vec<B> {
        if !self.is_open() {
            return self.empty();
        }
        let most = self.most();
        let mut out = Vec::new();
        for shelf in &mut self.all {
            while shelf.wanted.front().is_some_and(|when| now.saturating_duration_since(*when) >= WINDOW) {
                shelf.wanted.pop_front();
            }
            let target = shelf.target(now, most);
            let is_over = |shelf: &Shelf<B>| {
                let old = |(since, _): &(Instant, B)| now.saturating_duration_since(*since) >= AGE;
                shelf.boxes.len() > target || shelf.boxes.front().is_some_and(old)
            };
            while is_over(shelf) {
                out.extend(shelf.boxes.pop_front().map(|(_, one)| one));
            }
        }
        // A kind that nobody asks for at the moment makes room for one that somebody does, or when the ceiling came down. So does one
        // with several for one that has none.
        let total =
            |all: &[Shelf<B>]| all.iter().map(|shelf| shelf.boxes.len() + shelf.making).sum::<usize>();
        let lacking = self.all.iter().any(|shelf| shelf.lack(now, most) > 0 && !shelf.is_quiet(now));
        let starving = self.all.iter().any(|shelf| shelf.lack(now, most) > 0 && shelf.disappoints(now));
        loop {
            let total = total(&self.all);
            let too_many = total > most;
            if !too_many && (total < most || !lacking) {
                break;
            }
            let quiet = |shelf: &&mut Shelf<B>| {
                !shelf.boxes.is_empty()
                    && (too_many
                        || (shelf.boxes.len() > shelf.floor
                            && (shelf.is_quiet(now) || (starving && shelf.boxes.len() > 1))))
            };
            let oldest = self.all.iter_mut().filter(quiet).min_by_key(|shelf| shelf.wanted.back().copied());
            let Some((_, one)) = oldest.and_then(|shelf| shelf.boxes.pop_front()) else { break };
            out.push(one);
        }
        out
    }

    /// Memory is short: all of them go, and none is made before `until`.
    pub(super) fn hold_back(&mut self, until: Instant) -> Vec<B> {
        self.held_back = Some(until);
        self.empty()
    }

    pub(super) fn stop(&mut self) {
        self.stopped = true;
    }

    pub(super) fn empty(&mut self) -> Vec<B> {
        self.all.iter_mut().flat_map(|shelf| shelf.boxes.drain(..)).map(|(_, one)| one).collect()
    }

    /// When something is due though nobody asks for anything.
    pub(super) fn next_change(&self, now: Instant) -> Option<Instant> {
        let of_shelf = |shelf: &Shelf<B>| {
            let old = shelf.boxes.front().map(|(since, _)| *since + AGE);
            let forgotten = shelf.wanted.front().map(|when| *when + WINDOW);
            [old, forgotten, shelf.not_before].into_iter().flatten().filter(|at| *at > now).min()
        };
        self.all
            .iter()
            .filter_map(of_shelf)
            .chain([self.held_back, self.paused].into_iter().flatten().filter(|at| *at > now))
            .min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn kind(environment: &str) -> (Kind, Order) {
        let kind = Kind {
            environment: environment.to_owned(),
            source: Source::Preset(Language::Python),
            whereabouts: Whereabouts::default(),
            limits: Limits::default(),
            isolation: IsolationLevel::Jail,
            language: Some(Language::Python),
        };
        (kind, Order { environments: Arc::default(), undo_calls: 3 })
    }

    fn pool(floor: u32, ceiling: u32, now: Instant) -> Shelves<u32> {
        let mut shelves = Shelves::default();
        shelves.resize(PoolSize { floor, ceiling }, Some(kind("usual")), now);
        shelves
    }

    /// Makes everything that is wanted; says how many.
    fn fill(shelves: &mut Shelves<u32>, now: Instant) -> usize {
        let mut count = 0;
        while let Some((kind, _)) = shelves.next_order(now) {
            assert_eq!(shelves.made(&kind, now, 7), None);
            count += 1;
        }
        count
    }

    #[test]
    fn none_is_made_in_the_place_of_one_that_may_come_back() {
        let now = Instant::now();
        let mut shelves = pool(1, 1, now);
        assert_eq!(fill(&mut shelves, now), 1);
        let (usual, _) = kind("usual");
        let later = now + PAUSE;
        let (since, one) = shelves.take(&usual, now).unwrap();
        shelves.tries(&usual);
        assert_eq!(fill(&mut shelves, later), 0);
        assert_eq!(shelves.put(&usual, since, one), None);
        shelves.decided(&usual);
        assert_eq!((fill(&mut shelves, later), shelves.ready()), (0, 1));
        shelves.take(&usual, now);
        shelves.tries(&usual);
        shelves.decided(&usual);
        assert_eq!(fill(&mut shelves, later), 1, "it was claimed");
    }

    #[test]
    fn the_floor_is_there_before_anybody_asks_and_demand_brings_more() {
        let now = Instant::now();
        let mut shelves = pool(2, 5, now);
        assert_eq!(fill(&mut shelves, now), 2);
        let (usual, order) = kind("usual");
        for _ in 0..4 {
            shelves.want(&usual, &order, now);
            shelves.take(&usual, now);
        }
        assert_eq!(shelves.ready(), 0, "a burst takes them all and then finds none");
        assert_eq!(fill(&mut shelves, now), 0, "first come those who have just claimed");
        assert_eq!(shelves.next_change(now), Some(now + PAUSE));
        let now = now + PAUSE;
        assert_eq!(fill(&mut shelves, now), 4, "as many as the burst would have needed");
        let later = now + WINDOW;
        assert_eq!(shelves.surplus(later).len(), 2, "back to the floor");
        assert_eq!(fill(&mut shelves, later), 0);
    }

    #[test]
    fn who_needs_no_interpreter_gets_a_box_with_any() {
        let now = Instant::now();
        let mut shelves = pool(1, 4, now);
        let (usual, order) = kind("usual");
        let shell = Kind { language: Some(Language::Bash), ..usual.clone() };
        let take = |shelves: &mut Shelves<u32>, kind: &Kind| {
            shelves.take_alike(kind, now).map(|(kind, _, one)| (kind.language, one))
        };
        assert_eq!(take(&mut shelves, &usual), None);
        shelves.want(&shell, &order, now);
        assert_eq!(fill(&mut shelves, now), 2);
        let none = Kind { language: None, ..usual.clone() };
        assert_eq!(take(&mut shelves, &none), Some((Some(Language::Python), 7)));
        assert_eq!(take(&mut shelves, &shell), Some((Some(Language::Bash), 7)));
        assert_eq!((take(&mut shelves, &usual), shelves.ready()), (None, 0));
        assert_eq!((fill(&mut shelves, now + PAUSE), fill(&mut shelves, now + LONG_PAUSE)), (0, 2));
        assert_eq!(take(&mut shelves, &kind("another").0), None, "of other software");
    }

    #[test]
    fn no_demand_goes_beyond_the_ceiling() {
        let now = Instant::now();
        let mut shelves = pool(0, 3, now);
        for name in ["one", "two"] {
            let (kind, order) = kind(name);
            (0..10).for_each(|_| shelves.want(&kind, &order, now));
        }
        assert_eq!(fill(&mut shelves, now), 3);
        shelves.resize(PoolSize { floor: 0, ceiling: 1 }, None, now);
        assert_eq!(shelves.surplus(now).len(), 2, "a lower ceiling holds at once");
        shelves.resize(PoolSize { floor: 0, ceiling: 0 }, None, now);
        assert_eq!(shelves.surplus(now).len(), 1);
        assert!(!shelves.is_open() && fill(&mut shelves, now) == 0);
    }

    #[test]
    fn a_quiet_kind_makes_room_but_not_for_a_moment() {
        let now = Instant::now();
        let mut shelves = pool(0, 2, now);
        let ((old, old_order), (new, new_order)) = (kind("old"), kind("new"));
        (0..2).for_each(|_| shelves.want(&old, &old_order, now));
        assert_eq!(fill(&mut shelves, now), 2);
        shelves.want(&new, &new_order, now + SECOND);
        shelves.want(&new, &new_order, now + SECOND);
        assert_eq!(shelves.surplus(now + SECOND).len(), 1, "who has several gives one of them");
        assert_eq!(fill(&mut shelves, now + SECOND), 1);
        assert!(shelves.surplus(now + SECOND).is_empty(), "both are in use");
        let later = now + YIELD + 2 * SECOND;
        shelves.want(&new, &new_order, later);
        assert_eq!(shelves.surplus(later).len(), 1);
        assert_eq!(shelves.next_order(later).unwrap().0, new);
    }

    #[test]
    fn old_boxes_are_renewed_and_a_failure_is_not_repeated_at_once() {
        let now = Instant::now();
        let mut shelves = pool(1, 2, now);
        assert_eq!(fill(&mut shelves, now), 1);
        assert_eq!(shelves.next_change(now), Some(now + AGE));
        let later = now + AGE;
        assert_eq!(shelves.surplus(later).len(), 1);
        let (kind, _) = shelves.next_order(later).unwrap();
        shelves.failed(&kind, later);
        assert!(shelves.next_order(later).is_none());
        assert_eq!(shelves.next_change(later), Some(later + RETRY));
        assert!(shelves.next_order(later + RETRY).is_some());
    }

    #[test]
    fn a_shortage_clears_the_shelves_and_what_was_under_way_does_not_fill_them() {
        let now = Instant::now();
        let mut shelves = pool(2, 4, now);
        assert_eq!(fill(&mut shelves, now), 2);
        let (usual, order) = kind("usual");
        (0..3).for_each(|_| shelves.want(&usual, &order, now));
        let (under_way, _) = shelves.next_order(now).unwrap();
        assert_eq!(shelves.hold_back(now + SECOND).len(), 2);
        assert_eq!(shelves.made(&under_way, now, 7), Some(7));
        assert!(shelves.next_order(now).is_none());
        assert_eq!(shelves.next_change(now), Some(now + SECOND));
        assert_eq!(fill(&mut shelves, now + SECOND), 3);
    }

    #[test]
    fn kinds_that_anybody_can_make_up_are_bounded() {
        let now = Instant::now();
        let mut shelves = pool(0, 4, now);
        for number in 0..100 {
            let (kind, order) = kind(&format!("kind-{number}"));
            shelves.want(&kind, &order, now);
        }
        assert_eq!(shelves.all.len(), MOST_KINDS);
        // Later others may have their place.
        let (kind, order) = kind("late");
        shelves.want(&kind, &order, now + 2 * YIELD);
        assert!(shelves.shelf(&kind).is_some());
    }
}
