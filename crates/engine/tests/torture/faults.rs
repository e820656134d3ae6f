//! Whoever puts a sandbox to sleep, wakes, copies, restores or forks it dies at every step of that in turn. Afterwards there is the
//! old state or the new one, never neither and never a mixture, and nothing is left that belongs to nobody.
//!
//! [`Deed::steps`] says which steps each deed has, in their order. A step that is not there, or comes elsewhere, fails the deed's own
//! test, and one that no deed has fails [`every_step_belongs_to_a_deed`].

use std::{
    collections::BTreeSet,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use carrel_backend::link::AgentLink;
use carrel_engine::{
    Engine, Environments, Record, Settings, State, Step, Update, Watch, Whereabouts, Wish,
    pool::PoolSize,
    snapshots::{RestoreWish, Snapshot, SnapshotFilter, SnapshotWish},
};
use carrel_proto::{
    guest::Language::{Bash, Python},
    id::SessionName,
    message::Request,
};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

use crate::{
    kills::{Child, Task, WORD},
    world::{close_all, in_time, key, open, read, run, wish},
};

const NAME: &str = "fault";
/// What the snapshot has, and what the sandbox has that it was taken of.
const THEN: u64 = 1;
const NOW: u64 = 2;
/// The lifetime at the time of the snapshot is that of [`wish`].
const LIFETIME_NOW: u64 = 7100;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Deed {
    Standby,
    Thaw,
    Hibernate,
    Wake,
    Snapshot,
    RestoreAsNew,
    RestoreInPlace,
    Fork,
    /// Of one in which only python lives.
    ForkLiving,
    /// Of the same into boxes that stand ready.
    ForkReady,
    Adopt,
}

const DEEDS: [Deed; 11] = [
    Deed::Standby,
    Deed::Thaw,
    Deed::Hibernate,
    Deed::Wake,
    Deed::Snapshot,
    Deed::RestoreAsNew,
    Deed::RestoreInPlace,
    Deed::Fork,
    Deed::ForkLiving,
    Deed::ForkReady,
    Deed::Adopt,
];

const WRITE: [Step; 5] =
    [Step::AgentPrepared, Step::SessionWritten, Step::AgentSaved, Step::MemoryPacked, Step::ManifestWritten];
const BRING_BACK: [Step; 7] = [
    Step::StateGiven,
    Step::BoxMade,
    Step::MemoryUnpacked,
    Step::EndsOffered,
    Step::SessionBack,
    Step::BoxBack,
    Step::RunningWritten,
];

impl Deed {
    /// What it does, in its order.
    pub(crate) fn steps(self) -> Vec<Step> {
        let copy = [
            &[Step::StandbyWritten, Step::StoreMade],
            &WRITE[..],
            &[Step::FilesCopied, Step::SpoolCopied, Step::AwakeWritten],
        ]
        .concat();
        let making = &BRING_BACK[..BRING_BACK.len() - 1];
        let heir = [&[Step::RowClaimed, Step::DirectoryMade, Step::FilesLaid], making].concat();
        match self {
            Deed::Standby => vec![Step::StandbyWritten, Step::BoxFrozen],
            Deed::Thaw => vec![Step::BoxThawed, Step::AwakeWritten],
            Deed::Hibernate => [
                &[Step::ImageNamed],
                &WRITE[..],
                &[Step::ImageComplete, Step::BoxEnded, Step::BoxRemoved, Step::ImageSealed],
                &[Step::ImagePlaced, Step::HibernatedWritten],
            ]
            .concat(),
            Deed::Wake => [&[Step::WayCleared], &BRING_BACK[..], &[Step::ImagesRemoved]].concat(),
            Deed::Snapshot => {
                [&copy[..], &[Step::StoreSealed, Step::StorePlaced, Step::SnapshotWritten]].concat()
            }
            Deed::RestoreAsNew => [&heir[..], &[Step::RunningWritten]].concat(),
            Deed::RestoreInPlace => [
                &[Step::LaidAside, Step::MovedAway, Step::SpecWritten, Step::FilesLaid],
                &BRING_BACK[..],
                &[Step::BeforeRemoved, Step::ImagesRemoved, Step::OriginWritten],
            ]
            .concat(),
            // First it is looked whether it can be had as it lives, which leaves no trace.
            Deed::Fork => [&copy[..], &heir, &heir, &[Step::RunningWritten, Step::StoreRemoved]].concat(),
            Deed::ForkLiving | Deed::ForkReady => {
                let cut = [Step::AgentPrepared, Step::FilesCopied, Step::SpoolCopied, Step::MemoryPacked];
                let making = [Step::RowClaimed, Step::DirectoryMade, Step::BoxMade];
                let making = if self == Deed::ForkReady { &making[..1] } else { &making };
                let laid = [Step::FilesLaid, Step::MemoryUnpacked];
                let come = [Step::MemoryFilled, Step::BoxBack];
                // The first waits for the image, of which they all come.
                let first = [making, &laid, &[Step::ImageTaken], &come].concat();
                [&cut[..], &first, making, &laid, &come, &[Step::RunningWritten]].concat()
            }
            Deed::Adopt => vec![Step::KeysSwapped],
        }
    }

    /// Forks begin as a snapshot does, for which every step is tried.
    fn first(self) -> usize {
        if self == Deed::Fork { Deed::Snapshot.steps().len() - 4 } else { 0 }
    }
}

#[test]
fn every_step_belongs_to_a_deed() {
    let tried: BTreeSet<Step> = DEEDS.into_iter().flat_map(Deed::steps).collect();
    let all: BTreeSet<Step> = Step::ALL.iter().copied().collect();
    assert_eq!(tried, all);
}

/// In another process: does it, and dies at the step with this number.
pub(crate) async fn commit(state: &Path, name: &str, deed: Deed, at: Option<usize>) {
    let reached = AtomicUsize::new(0);
    let watch = Watch::new(move |step| {
        println!("\n{WORD}{}", serde_json::to_string(&step).unwrap());
        if Some(reached.fetch_add(1, Ordering::SeqCst)) == at {
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    });
    let settings = Settings {
        state: state.to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    };
    let engine = Engine::watched(settings, watch).unwrap();
    let record = engine.record_by_key(&Default::default(), &key(name)).unwrap().unwrap();
    let snapshot = || engine.all_snapshots(&SnapshotFilter::default()).unwrap().remove(0);
    let wish_of_restore = RestoreWish::default();
    match deed {
        Deed::Standby => drop(engine.standby(&record).await.unwrap()),
        Deed::Thaw | Deed::Wake => drop(engine.sandbox(&key(name), &wish()).await.unwrap()),
        Deed::Hibernate => drop(engine.hibernate(&record).await.unwrap()),
        Deed::Snapshot => drop(engine.snapshot(&record, &SnapshotWish::default()).await.unwrap()),
        Deed::RestoreAsNew => drop(engine.restore_as(&snapshot(), &wish_of_restore).await.unwrap()),
        Deed::RestoreInPlace => drop(engine.restore_in_place(&snapshot(), &wish_of_restore).await.unwrap()),
        Deed::Fork | Deed::ForkLiving => drop(engine.fork(&record, 2, None, None).await.unwrap()),
        Deed::ForkReady => {
            engine.set_pool(PoolSize { floor: 2, ceiling: 2 }, &Wish { first: Some(Python), ..wish() });
            let keeping = tokio::spawn({
                let engine = engine.clone();
                async move { engine.keep_pool().await }
            });
            in_time("boxes are made ready", async {
                while engine.pool().ready.iter().map(|kind| kind.count).sum::<u32>() < 2 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            })
            .await;
            drop(engine.fork(&record, 2, None, None).await.unwrap());
            engine.stop_pool();
            keeping.await.unwrap();
        }
        Deed::Adopt => {
            let is_fork = |other: &Record| other.forked_from.as_ref() == Some(&record.id);
            let child = engine.list().unwrap().into_iter().find(is_fork).unwrap();
            drop(engine.adopt(&child, None).await.unwrap());
        }
    }
}

/// Another process does it to the sandbox of this name, and dies at the step with this number; says which steps it came to, and
/// whether it died.
pub(crate) async fn act(state: &Path, name: &str, deed: Deed, at: Option<usize>) -> (Vec<Step>, bool) {
    let task = Task::Fault { state: state.to_path_buf(), name: name.to_owned(), deed, at };
    let (words, ended) = tokio::task::spawn_blocking(move || {
        let mut child = Child::start(&task);
        let words: Vec<String> = std::iter::from_fn(|| child.word()).collect();
        (words, child.ended())
    })
    .await
    .unwrap();
    let killed = ended.signal() == Some(Signal::KILL.as_raw());
    assert!(killed || ended.success(), "{deed:?} at {at:?}: {ended}");
    (words.iter().map(|word| serde_json::from_str(word).unwrap()).collect(), killed)
}

struct Scene {
    deed: Deed,
    state: tempfile::TempDir,
    engine: Engine,
    record: Record,
    /// Of [`THEN`].
    snapshot: Option<Snapshot>,
}

impl Scene {
    async fn set(deed: Deed) -> Option<Self> {
        let state = tempfile::tempdir().unwrap();
        let engine = open(state.path());
        if let Err(problem) = engine.can_hibernate() {
            println!("skipped: {}", problem.message);
            return None;
        }
        let record = engine.sandbox(&key(NAME), &wish()).await.unwrap().record;
        let mut scene = Self { deed, state, engine, record, snapshot: None };
        scene.make(THEN).await;
        if matches!(deed, Deed::RestoreAsNew | Deed::RestoreInPlace) {
            let taken = scene.engine.snapshot(&scene.record, &SnapshotWish::default()).await.unwrap();
            scene.snapshot = Some(taken);
        }
        scene.make(NOW).await;
        Some(scene)
    }

    fn is_of_python_alone(&self) -> bool {
        matches!(self.deed, Deed::ForkLiving | Deed::ForkReady)
    }

    /// Variables of two languages, a file, and what was asked for say the same.
    async fn make(&self, value: u64) {
        let python = format!("n = {value}; open('n', 'w').write('{value}')");
        run(&self.engine, &self.record, Python, &python).await.unwrap();
        if !self.is_of_python_alone() {
            run(&self.engine, &self.record, Bash, &format!("n={value}")).await.unwrap();
        }
        let lifetime = if value == NOW { LIFETIME_NOW } else { wish().max_lifetime_s };
        let update = Update { max_lifetime_s: Some(lifetime), ..Update::default() };
        self.engine.update(&self.record, update).await.unwrap();
    }

    /// What a sandbox holds: one value everywhere, or it is a mixture.
    async fn value(&self, record: &Record, what: &str) -> u64 {
        let python = run(&self.engine, record, Python, "print(n, open('n').read())").await;
        let python = python.unwrap_or_else(|problem| panic!("{what}: {problem:?}")).out;
        let bash = match self.is_of_python_alone() {
            true => python.clone(),
            false => run(&self.engine, record, Bash, "echo $n").await.unwrap().out,
        };
        let row = self.engine.record(&record.id).unwrap().unwrap();
        let asked = if row.spec.max_lifetime_s == LIFETIME_NOW { NOW } else { THEN };
        let found: Vec<u64> =
            format!("{python} {bash}").split(' ').map(|word| word.parse().unwrap()).chain([asked]).collect();
        assert!(found.iter().all(|value| *value == found[0]), "{what}: a mixture: {found:?}");
        found[0]
    }

    async fn prepare(&self, deed: Deed) {
        match deed {
            Deed::Thaw => drop(in_time("standby", self.engine.standby(&self.record)).await.unwrap()),
            Deed::Wake | Deed::RestoreInPlace => {
                drop(in_time("hibernate", self.engine.hibernate(&self.record)).await.unwrap());
            }
            Deed::Adopt => drop(self.engine.fork(&self.record, 1, None, None).await.unwrap()),
            _ => {}
        }
    }

    /// The sandbox of the key answers, with nothing to say of what happened.
    async fn check(&self, deed: Deed, swept: bool, what: &str) {
        // From outside there is nothing to be seen, or what is found by waking it.
        let outside = if swept { read(&self.engine, &self.record, "n").ok() } else { None };
        let found = in_time(what, self.engine.sandbox(&key(NAME), &wish())).await.unwrap();
        assert_eq!((found.created, found.note, found.record.state), (false, None, State::Running), "{what}");
        let value = self.value(&found.record, what).await;
        assert!(
            outside.is_none_or(|outside| outside == value.to_string()),
            "{what}: other files from outside"
        );
        if deed == Deed::RestoreInPlace {
            // Nothing of the other state comes back at its next turn either.
            in_time(what, self.engine.hibernate(&found.record)).await.unwrap();
            assert_eq!(self.value(&found.record, what).await, value, "{what}");
        } else {
            assert_eq!(value, NOW, "{what}");
        }
        self.engine.tidy().await.unwrap();
        if matches!(deed, Deed::Fork | Deed::ForkLiving | Deed::ForkReady) {
            let forks = self.engine.list().unwrap().len() - 1;
            assert!(forks == 0 || forks == 2, "{what}: {forks} forks");
        }
        for other in self.engine.list().unwrap() {
            if other.id == self.record.id {
                continue;
            }
            // What there is of another is all of it.
            let expected = if deed == Deed::RestoreAsNew { THEN } else { NOW };
            assert_eq!(self.value(&other, what).await, expected, "{what}");
            if deed == Deed::Adopt {
                self.check_keys(&other, what);
            }
            in_time(what, self.engine.close(&other, None)).await.unwrap();
        }
        for taken in self.engine.all_snapshots(&SnapshotFilter::default()).unwrap() {
            if self.snapshot.as_ref().is_some_and(|kept| kept.id == taken.id) {
                continue;
            }
            let new = in_time(what, self.engine.restore_as(&taken, &RestoreWish::default())).await.unwrap();
            assert_eq!(self.value(&new.record, what).await, NOW, "{what}");
            self.engine.close(&new.record, None).await.unwrap();
            self.engine.delete_snapshot(&taken, None).await.unwrap();
        }
        self.engine.cleared().await.unwrap();
        self.nothing_is_nobodys(what);
        if value != NOW {
            self.make(NOW).await;
        }
    }

    /// Two sandboxes have the two keys, each one.
    fn check_keys(&self, other: &Record, what: &str) {
        let of = |id| self.engine.record(id).unwrap().unwrap().key.unwrap().to_string();
        let keys = BTreeSet::from([of(&self.record.id), of(&other.id)]);
        let name = key(NAME).to_string();
        assert_eq!(keys, BTreeSet::from([name.clone(), format!("{name}-1")]), "{what}");
    }

    fn nothing_is_nobodys(&self, what: &str) {
        let state = self.state.path();
        let names = |place: PathBuf| -> BTreeSet<String> {
            let entries = std::fs::read_dir(place).unwrap().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        };
        let own = BTreeSet::from([self.record.id.to_string()]);
        assert_eq!(names(state.join("sandboxes")), own, "{what}");
        assert_eq!(names(state.join("locks")), own, "{what}");
        let kept: BTreeSet<String> = self.snapshot.iter().map(|kept| kept.id.to_string()).collect();
        assert_eq!(names(state.join("snapshots")), kept, "{what}");
        let directory = state.join("sandboxes").join(self.record.id.as_str());
        let stray = |name: &String| ["image", "before", "away"].iter().any(|of| name.starts_with(of));
        let strays: Vec<String> = names(directory).into_iter().filter(stray).collect();
        assert_eq!(strays, Vec::<String>::new(), "{what}");
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mounted = mounts.lines().filter(|line| line.contains(state.to_str().unwrap())).count();
        assert!(mounted <= 1, "{what}: {mounts}");
    }
}

/// Dies at every step of a deed, and once at none.
async fn die_everywhere(deed: Deed) {
    let Some(scene) = Scene::set(deed).await else { return };
    let steps = deed.steps();
    let deaths = (deed.first()..steps.len()).map(Some);
    for at in std::iter::once(None).chain(deaths) {
        let what = match at {
            Some(at) => format!("{deed:?}, killed at step {at}, {:?}", steps[at]),
            None => format!("{deed:?}, not killed"),
        };
        scene.prepare(deed).await;
        let (came, killed) = act(scene.state.path(), NAME, deed, at).await;
        assert_eq!(
            (&came[..], killed),
            (&steps[..at.map_or(steps.len(), |at| at + 1)], at.is_some()),
            "{what}"
        );
        // With and without the start of a daemon before the next caller.
        let swept = at.is_none_or(|at| at % 2 == 0);
        if swept {
            scene.engine.sweep().unwrap();
        }
        if deed == Deed::Adopt {
            scene.give_back_key().await;
        }
        scene.check(deed, swept, &what).await;
    }
    if let Some(snapshot) = &scene.snapshot {
        scene.engine.delete_snapshot(snapshot, None).await.unwrap();
    }
    close_all(scene.state.path()).await;
}

impl Scene {
    /// After an adoption that has happened the other one has the key: it is swapped again.
    async fn give_back_key(&self) {
        let row = |id| self.engine.record(id).unwrap().unwrap();
        if row(&self.record.id).key == Some(key(NAME)) {
            return;
        }
        let child =
            self.engine.list().unwrap().into_iter().find(|other| other.forked_from.is_some()).unwrap();
        assert_eq!(child.key, Some(key(NAME)));
        self.engine.adopt(&child, None).await.unwrap();
    }
}

#[tokio::test]
async fn standby() {
    Box::pin(die_everywhere(Deed::Standby)).await;
    Box::pin(die_everywhere(Deed::Thaw)).await;
}

#[tokio::test]
async fn hibernate() {
    Box::pin(die_everywhere(Deed::Hibernate)).await;
}

#[tokio::test]
async fn wake() {
    Box::pin(die_everywhere(Deed::Wake)).await;
}

#[tokio::test]
async fn snapshot() {
    Box::pin(die_everywhere(Deed::Snapshot)).await;
}

#[tokio::test]
async fn restore_as_new() {
    Box::pin(die_everywhere(Deed::RestoreAsNew)).await;
}

#[tokio::test]
async fn restore_in_place() {
    Box::pin(die_everywhere(Deed::RestoreInPlace)).await;
}

#[tokio::test]
async fn fork_and_adopt() {
    Box::pin(die_everywhere(Deed::Fork)).await;
    Box::pin(die_everywhere(Deed::ForkLiving)).await;
    Box::pin(die_everywhere(Deed::ForkReady)).await;
    Box::pin(die_everywhere(Deed::Adopt)).await;
}

/// The caller is gone as soon as it has asked; what takes the interpreter's place is a process of the box, and needs nobody.
#[tokio::test]
async fn the_promotion_of_a_spare_needs_no_caller() {
    let state = tempfile::tempdir().unwrap();
    let engine = open(state.path());
    let record = engine.sandbox(&key(NAME), &wish()).await.unwrap().record;
    for round in 0..4 {
        run(&engine, &record, Python, &format!("n = {round}")).await.unwrap();
        run(&engine, &record, Python, "n = 'gone'").await.unwrap();
        let socket = state.path().join("sandboxes").join(record.id.as_str()).join("agent.sock");
        let mut link = AgentLink::connect(&socket).await.unwrap();
        let session = SessionName::main();
        link.send(&Request::Undo { session, language: Some(Python), calls: 1 }).await.unwrap();
        drop(link);
        // Whoever comes next waits for it, and finds one interpreter with one of the two states.
        let seen = run(&engine, &record, Python, "print(n)").await.unwrap();
        assert!(seen.out == round.to_string() || seen.out == "gone", "{seen:?}");
        let again = run(&engine, &record, Python, "print(n)").await.unwrap();
        assert_eq!(again.out, seen.out, "{again:?}");
    }
    close_all(state.path()).await;
}
