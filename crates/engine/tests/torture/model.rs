//! What must be true of a sandbox, and the steps that change it.

use std::collections::BTreeMap;

use carrel_engine::Note;
use carrel_proto::{
    guest::Language,
    outcome::{FilesState, SessionState},
};

use crate::{
    faults::Deed,
    world::{Lot, Ran},
};

/// How many calls are kept for taking back, unless an environment says otherwise.
pub(crate) const KEPT: usize = 3;
const FILES: [&str; 4] = ["a", "b", "c", "d/e"];

/// One thing that is done to a sandbox. What a sandbox learns to do becomes another variant, drawn in [`Step::draw`], done in
/// `Trial::step`, and answered for in [`Model`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    PythonSet(i64),
    PythonAppend(i64),
    PythonRead,
    PythonFile(&'static str, u64),
    /// Code that ends its interpreter, after it has changed everything it could.
    PythonCrash(&'static str),
    BashSet(i64),
    BashRead,
    BashCrash,
    Write(&'static str, u64),
    Read(&'static str),
    ExecWrite(&'static str, u64),
    ExecRead(&'static str),
    Undo(u32),
    Standby,
    Hibernate,
    Wake,
    /// Another engine on the same state directory, as after a daemon's restart.
    Restart,
    KillAgent,
    Damage(Damage),
    Snapshot,
    /// The sandbox becomes what the last snapshot of it has.
    RestoreInPlace,
    /// The last snapshot becomes another sandbox, which is looked at and closed.
    RestoreAsNew,
    /// A copy is made, looked at, and one of the two is closed: the copy, or what it was made of.
    Fork {
        adopted: bool,
    },
    /// Another process does this and is killed at the step of this number, as a daemon would be.
    Killed(Deed, usize),
}

impl Step {
    /// Whether the host has to be able to write processes to disk.
    pub(crate) fn needs_disk(&self) -> bool {
        use Step::{Fork, Hibernate, Killed, RestoreAsNew, RestoreInPlace, Snapshot};
        matches!(self, Hibernate | Snapshot | RestoreInPlace | RestoreAsNew | Fork { .. } | Killed(..))
    }
}

/// What becomes of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Damage {
    Flipped,
    Truncated,
    Missing,
    Manifest,
    /// Gone altogether.
    Gone,
    /// Written by a CRIU that is newer than ours: no damage, once that is put right.
    Newer,
}

const CRASHES: [&str; 4] = [
    "import os; os._exit(3)",
    "import os; os.kill(os.getpid(), 9)",
    "import ctypes; ctypes.string_at(0)",
    "import os; os.abort()",
];
const DAMAGES: [Damage; 7] = [
    Damage::Flipped,
    Damage::Flipped,
    Damage::Truncated,
    Damage::Missing,
    Damage::Manifest,
    Damage::Gone,
    Damage::Newer,
];

/// Which steps are drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Course {
    Everything,
    /// Calls that end their interpreter or are taken back, in quick succession: whose end was that?
    GoingBack,
}

impl Step {
    fn draw_going_back(lot: &mut Lot) -> Self {
        let value = i64::try_from(lot.below(1000)).unwrap();
        match lot.below(20) {
            0..6 => Step::PythonAppend(value),
            6..7 => Step::PythonRead,
            7..10 => Step::PythonCrash(lot.one::<&str>(&CRASHES)),
            10..11 => Step::BashRead,
            11..17 => Step::Undo(1 + u32::try_from(lot.below(4)).unwrap()),
            17..19 => Step::Standby,
            _ => Step::Restart,
        }
    }

    pub(crate) fn draw(course: Course, lot: &mut Lot, model: &Model) -> Self {
        if course == Course::GoingBack {
            return Self::draw_going_back(lot);
        }
        let value = i64::try_from(lot.below(1000)).unwrap();
        let text = lot.below(1_000_000);
        let file = *lot.one::<&str>(&FILES);
        if model.life == Life::Hibernated && lot.below(6) == 0 {
            return Step::Damage(*lot.one(&DAMAGES));
        }
        match lot.below(108) {
            0..12 => Step::PythonSet(value),
            12..24 => Step::PythonAppend(value),
            24..31 => Step::PythonRead,
            31..35 => Step::PythonFile(file, text),
            35..41 => Step::PythonCrash(lot.one::<&str>(&CRASHES)),
            41..47 => Step::BashSet(value),
            47..52 => Step::BashRead,
            52..53 => Step::BashCrash,
            53..58 => Step::Write(file, text),
            58..63 => Step::Read(file),
            63..66 => Step::ExecWrite(file, text),
            66..69 => Step::ExecRead(file),
            69..77 => Step::Undo(1 + u32::try_from(lot.below(4)).unwrap()),
            77..85 => Step::Standby,
            85..90 => Step::Hibernate,
            90..94 => Step::Wake,
            94..98 => Step::Restart,
            98..100 => Step::KillAgent,
            100..102 => Step::Snapshot,
            102..103 => Step::RestoreInPlace,
            103..104 => Step::RestoreAsNew,
            104..106 => Step::Fork { adopted: lot.below(2) == 0 },
            _ => {
                let deed = *lot.one(&[Deed::Hibernate, Deed::Wake, Deed::Snapshot]);
                Step::Killed(deed, lot.below(deed.steps().len() as u64).try_into().unwrap())
            }
        }
    }
}

/// What a sandbox holds, as far as it is copied with it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Content {
    pub(crate) python: Python,
    pub(crate) bash: Option<i64>,
    pub(crate) files: BTreeMap<&'static str, String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Python {
    number: Option<i64>,
    list: Vec<i64>,
}

impl Python {
    /// What [`SHOW`] prints of it.
    pub(crate) fn shown(&self) -> String {
        let number = self.number.map_or("None".to_owned(), |number| number.to_string());
        format!("{number} {:?}", self.list)
    }
}

pub(crate) const SHOW_BASH: &str = "echo ${b-unset}";
pub(crate) const SHOW: &str = "print(globals().get('n'), globals().get('l', []))";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Life {
    Awake,
    Standby,
    Hibernated,
}

pub(crate) type Files = BTreeMap<&'static str, String>;

/// Files before a call that can be taken back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Before {
    Sure(Files),
    /// It is not known here whether the sandbox still has them; if it says so it must be true.
    Unsure(Files),
    Gone,
}

/// What a crash writes before it.
pub(crate) const CRASHED: &str = "crashed";

#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) python: Python,
    /// States that calls can be taken back to, oldest first; with their files, unless somebody else has changed some since.
    pub(crate) past: Vec<(Python, Before)>,
    pub(crate) bash: Option<i64>,
    pub(crate) files: Files,
    pub(crate) life: Life,
    /// What whoever comes next is told.
    pub(crate) doomed: Option<Note>,
}

impl Model {
    pub(crate) fn new() -> Self {
        let (python, past) = Default::default();
        Self { python, past, bash: None, files: BTreeMap::new(), life: Life::Awake, doomed: None }
    }

    /// Every process is a new one.
    pub(crate) fn lose(&mut self) {
        let files = std::mem::take(&mut self.files);
        *self = Self { files, ..Self::new() };
    }

    pub(crate) fn content(&self) -> Content {
        Content { python: self.python.clone(), bash: self.bash, files: self.files.clone() }
    }

    /// It has come back with this, from a copy of processes without their past.
    pub(crate) fn become_content(&mut self, content: Content) {
        let Content { python, bash, files } = content;
        *self = Self { python, bash, files, ..Self::new() };
    }

    /// A python call that ended well and left this.
    pub(crate) fn call(&mut self, change: impl FnOnce(&mut Python)) {
        self.past.push((self.python.clone(), Before::Sure(self.files.clone())));
        if self.past.len() > KEPT {
            self.past.remove(0);
        }
        change(&mut self.python);
    }

    pub(crate) fn set(python: &mut Python, value: i64) {
        python.number = Some(value);
    }

    pub(crate) fn append(python: &mut Python, value: i64) {
        python.list.push(value);
    }

    /// Files were changed by somebody whose calls are not taken back with python's.
    pub(crate) fn change(&mut self, name: &'static str, text: String) {
        self.files.insert(name, text);
        self.past.iter_mut().for_each(|(_, files)| *files = Before::Gone);
    }

    /// Whether that many calls could be taken back; and the files that they would take back with them.
    pub(crate) fn undo(&mut self, calls: usize) -> Option<Before> {
        let at = self.past.len().checked_sub(calls)?;
        let (python, files) = self.past.drain(at..).next()?;
        self.python = python;
        Some(files)
    }

    /// What became of files is what had to.
    pub(crate) fn files_went(
        &mut self,
        before: Before,
        state: Option<FilesState>,
        reason: Option<&str>,
    ) -> Result<(), String> {
        match (state, before, reason) {
            (Some(FilesState::Restored), Before::Sure(before) | Before::Unsure(before), None) => {
                self.files = before;
                Ok(())
            }
            // A copy may take too long on a machine that has much else to do, and a process that is on its way out may still be
            // there when it is looked for: both are told. What must go back in quiet is in `sessions/files_back.rs`.
            (Some(FilesState::Kept), before, Some(reason))
                if !matches!(before, Before::Sure(_))
                    || reason.contains("too long")
                    || reason.contains("background") =>
            {
                for (_, files) in &mut self.past {
                    if let Before::Sure(known) = files {
                        *files = Before::Unsure(std::mem::take(known));
                    }
                }
                Ok(())
            }
            (state, before, reason) => {
                Err(format!("files were {before:?} before, and are said to be {state:?}: {reason:?}"))
            }
        }
    }

    /// What a call that ended its interpreter says must have been promised before, and is true from now on.
    pub(crate) fn crash(&mut self, language: Language, ran: &Ran) -> Result<(), String> {
        let outcome = &ran.outcome;
        match (language, outcome.session_state) {
            (Language::Python, SessionState::RolledBack) => {
                let more = outcome.taken_back.unwrap_or(1) as usize - 1;
                // Further than before the call only if that was not promised.
                let promised = outcome.transactional == Some(true) && outcome.taken_back == Some(1);
                let mut before = Before::Sure(self.files.clone());
                if !promised {
                    before = match self.undo(more).filter(|_| more > 0) {
                        Some(files) => files,
                        None => return Err(format!("taken back otherwise than was said: {outcome:?}")),
                    };
                }
                self.files.insert(CRASHED, "yes".to_owned());
                self.files_went(before, outcome.files_state, outcome.files_reason.as_deref())
            }
            (Language::Python, SessionState::Lost) if outcome.transactional != Some(true) => {
                (self.python, self.past) = Default::default();
                self.files.insert(CRASHED, "yes".to_owned());
                Ok(())
            }
            // A shell that had not run anything is as new as the next one.
            (Language::Bash, SessionState::RolledBack) if self.bash.is_none() => Ok(()),
            (Language::Bash, SessionState::Lost) => {
                self.bash = None;
                Ok(())
            }
            (_, other) => Err(format!("a crash that leaves {other:?}: {outcome:?}")),
        }
    }

    pub(crate) fn bash_shown(&self) -> String {
        bash_shown(self.bash)
    }
}

impl Content {
    /// What [`SHOW`] and [`SHOW_BASH`] print of it.
    pub(crate) fn shown(&self) -> (String, String) {
        (self.python.shown(), bash_shown(self.bash))
    }

    /// Every file there may be, and what is in it.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&'static str, Option<&String>)> {
        FILES.iter().map(|name| (*name, self.files.get(name)))
    }
}

fn bash_shown(value: Option<i64>) -> String {
    value.map_or("unset".to_owned(), |value| value.to_string())
}

/// What a sandbox can do or suffer is among what is drawn.
#[test]
fn every_kind_of_step_is_drawn() {
    let mut lot = Lot::new(1);
    let mut drawn = std::collections::BTreeSet::new();
    for life in [Life::Awake, Life::Hibernated] {
        let model = Model { life, ..Model::new() };
        for _ in 0..5000 {
            let step = format!("{:?}", Step::draw(Course::Everything, &mut lot, &model));
            drawn.insert(step.split(['(', ' ']).next().unwrap().to_owned());
        }
    }
    let all = "BashCrash BashRead BashSet Damage ExecRead ExecWrite Fork Hibernate KillAgent Killed PythonAppend PythonCrash \
        PythonFile PythonRead PythonSet Read Restart RestoreAsNew RestoreInPlace Snapshot Standby Undo Wake Write";
    assert_eq!(drawn.into_iter().collect::<Vec<_>>().join(" "), all);
}
