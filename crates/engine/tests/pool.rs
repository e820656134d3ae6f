//! Boxes that are ready before anybody asks: claimed once, by one, as if they had just been made; and none is left.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{
    collections::BTreeSet,
    future::Future,
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_engine::{
    Engine, Environments, Quota, Record, Settings, Source, Tenant, Whereabouts, Wish, call::Output,
    pool::PoolSize,
};
use carrel_proto::{
    guest::Language,
    id::{Key, SessionName},
    message::{Run, Status},
    outcome::{FilesState, Outcome, SessionState},
    problem::{Code, Problem},
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::{JoinHandle, JoinSet};

/// Between two looks at something that cannot be waited for.
const LOOK: Duration = Duration::from_millis(20);

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(120), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    in_time(what, async {
        while !is_so() {
            tokio::time::sleep(LOOK).await;
        }
    })
    .await;
}

fn wish() -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, first: Some(Language::Python), ..Wish::default() }
}

fn key(name: &str) -> Key {
    format!("user:local:{name}").parse().unwrap()
}

/// An engine with a pool.
struct World {
    engine: Engine,
    keeping: JoinHandle<()>,
    state: tempfile::TempDir,
}

fn open(state: &Path) -> Engine {
    Engine::open(Settings {
        state: state.to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    })
    .unwrap()
}

impl World {
    fn new(floor: u32, ceiling: u32) -> Self {
        let state = tempfile::tempdir().unwrap();
        let engine = open(state.path());
        engine.set_pool(PoolSize { floor, ceiling }, &wish());
        let keeping = tokio::spawn({
            let engine = engine.clone();
            async move { engine.keep_pool().await }
        });
        Self { engine, keeping, state }
    }

    async fn ready(&self, count: u32) {
        until("boxes are made ready", || ready(&self.engine) == count).await;
    }

    /// The directories of all boxes, ready ones too.
    fn directories(&self) -> BTreeSet<PathBuf> {
        let all = std::fs::read_dir(self.state.path().join("sandboxes")).unwrap();
        all.map(|entry| entry.unwrap().path()).collect()
    }

    async fn make(&self, name: &str) -> Record {
        let found = in_time("making", self.engine.sandbox(&key(name), &wish())).await.unwrap();
        assert!(found.created && found.note.is_none());
        found.record
    }

    /// Everything ends, and nothing is left.
    async fn end(self) {
        self.engine.stop_pool();
        in_time("the pool ends", self.keeping).await.unwrap();
        for record in self.engine.list().unwrap() {
            in_time("closing", self.engine.close(&record, None)).await.unwrap();
        }
        self.engine.sweep().unwrap();
        let left = std::fs::read_dir(self.state.path().join("sandboxes")).unwrap().count();
        assert_eq!(left, 0);
    }
}

fn ready(engine: &Engine) -> u32 {
    engine.pool().ready.iter().map(|kind| kind.count).sum()
}

async fn call(engine: &Engine, record: &Record, language: Language, code: &str) -> (String, Outcome) {
    let run = Run {
        session: SessionName::main(),
        language,
        code: code.to_owned(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    };
    let mut out = Vec::new();
    in_time(code, async {
        let mut call = engine.run(record, run).await?;
        loop {
            match call.next().await? {
                Output::Bytes { bytes, .. } => out.extend_from_slice(bytes),
                Output::Finished(outcome) => return Ok::<_, Problem>(outcome),
                _ => {}
            }
        }
    })
    .await
    .map(|outcome| (String::from_utf8_lossy(&out).into_owned(), outcome))
    .unwrap()
}

async fn python(engine: &Engine, record: &Record, code: &str) -> String {
    let (out, outcome) = call(engine, record, Language::Python, code).await;
    assert_eq!(outcome.exit_code, 0, "{out}{outcome:?}");
    out.trim().to_owned()
}

#[tokio::test]
async fn a_ready_box_is_nobodys_until_it_is_claimed_and_then_like_any_other() {
    let world = World::new(1, 2);
    world.ready(1).await;
    let before = world.directories();
    assert_eq!(before.len(), 1);
    assert!(world.engine.list().unwrap().is_empty(), "it is in no list");
    let id = before.iter().next().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let found = world.engine.existing(&id, None).await;
    assert_eq!(found.unwrap_err().code, Code::SandboxNotFound, "and cannot be found by its id");

    let labels = [("team", "red")].map(|(name, value)| (name.to_owned(), value.to_owned()));
    let labels = carrel_engine::Labels::new(labels.into()).unwrap();
    let wish = Wish { labels, idle_timeout_s: 77, max_lifetime_s: 88, undo_calls: Some(2), ..wish() };
    let found = world.engine.sandbox(&key("one"), &wish).await.unwrap();
    let record = found.record;
    assert_eq!((record.id.as_str(), found.created), (id.as_str(), true));
    assert_eq!(world.engine.pool().claimed, 1);
    // What the row says is what was asked for, to the letter.
    let stored = world.engine.record(&record.id).unwrap().unwrap();
    assert_eq!(stored.spec, record.spec);
    assert_eq!((stored.spec.idle_timeout_s, stored.spec.max_lifetime_s, stored.spec.undo_calls), (77, 88, 2));
    assert_eq!(stored.labels, wish.labels);
    assert_eq!(stored.number, record.number);
    assert_eq!(serde_json::to_value(&stored.placed).unwrap(), serde_json::to_value(&record.placed).unwrap());
    let status: Status = world.engine.status(&record).await.unwrap();
    assert_eq!(status.sessions.len(), 1);
    assert!(status.sessions[0].interpreters.is_empty(), "nobody has asked for one");

    let (_, outcome) = call(&world.engine, &record, Language::Python, "x = 1").await;
    assert_eq!(outcome.exec.as_str(), "ex_1", "its first call is the first one: {outcome:?}");
    python(&world.engine, &record, "x = 2").await;
    let undone = world.engine.undo(&record, &SessionName::main(), None, 1).await.unwrap();
    assert_eq!((undone.calls, python(&world.engine, &record, "print(x)").await.as_str()), (1, "1"));
    let (_, outcome) = call(&world.engine, &record, Language::Python, "import os; os._exit(3)").await;
    assert_eq!(outcome.session_state, SessionState::RolledBack);
    // The same key means the same sandbox.
    assert_eq!(world.engine.sandbox(&key("one"), &wish).await.unwrap().record.id, record.id);
    world.end().await;
}

/// Looks at everything that an earlier call could have left.
const TRACES: [(Language, &str); 3] = [
    (
        Language::Python,
        "import sys, os\nprint(sorted(globals()), sorted(vars(__import__('builtins'))), sorted(os.environ), sorted(os.listdir('.')), \
         sys.gettrace(), sys.getrecursionlimit(), os.getcwd(), sorted(os.listdir('/tmp')))",
    ),
    (
        Language::Bash,
        "echo \"$? $- $#\"; compgen -v | grep -v carrel | sort; shopt; alias; trap; ls -A . /tmp; pwd",
    ),
    (
        Language::Node,
        "console.log(Object.getOwnPropertyNames(globalThis).sort().join(), process.exitCode, typeof _, process.cwd())",
    ),
];

#[tokio::test]
async fn a_claimed_box_shows_no_trace_of_having_stood_ready() {
    let world = World::new(0, 9);
    let installed = world.engine.host_interpreters();
    for (language, code) in TRACES {
        if installed.get(&language).is_none_or(|found| found.program.is_empty()) {
            continue;
        }
        let wish = Wish { first: Some(language), undo_calls: Some(0), ..wish() };
        let cold = world.engine.sandbox(&key("cold"), &wish).await.unwrap().record;
        let (expected, _) = call(&world.engine, &cold, language, code).await;
        let is_ready = || world.engine.pool().ready.iter().any(|kind| kind.language == Some(language));
        until("one like it is made ready", is_ready).await;
        let claimed = world.engine.pool().claimed;
        let warm = world.engine.sandbox(&key("warm"), &wish).await.unwrap().record;
        assert_eq!(world.engine.pool().claimed, claimed + 1, "it came from the pool");
        let (seen, _) = call(&world.engine, &warm, language, code).await;
        assert_eq!(seen, expected, "{language:?}");
        for record in [cold, warm] {
            world.engine.close(&record, None).await.unwrap();
        }
    }
    world.end().await;
}

#[tokio::test]
async fn callers_of_one_key_get_one_sandbox_and_those_of_many_get_one_each() {
    let world = World::new(3, 3);
    world.ready(3).await;
    let mut same = JoinSet::new();
    let mut each = JoinSet::new();
    for number in 0..8 {
        let (engine, other) = (world.engine.clone(), world.engine.clone());
        same.spawn(async move { engine.sandbox(&key("same"), &wish()).await.unwrap().record.id });
        each.spawn(async move {
            let record = other.sandbox(&key(&format!("each-{number}")), &wish()).await.unwrap().record;
            let marked = python(&other, &record, "mark = globals().get('mark', 0) + 1; print(mark)").await;
            assert_eq!(marked, "1", "nobody was here before");
            record.id
        });
    }
    let same: BTreeSet<_> = in_time("one key", same.join_all()).await.into_iter().collect();
    let each: BTreeSet<_> = in_time("many keys", each.join_all()).await.into_iter().collect();
    assert_eq!((same.len(), each.len()), (1, 8));
    assert!(same.is_disjoint(&each));
    let pool = world.engine.pool();
    assert_eq!(pool.claimed + pool.cold, 9, "{pool:?}");
    assert!(pool.claimed >= 3, "a burst takes what there is, and the rest is made: {pool:?}");
    world.end().await;
}

#[tokio::test]
async fn two_engines_that_want_one_key_at_once_share_it() {
    let world = World::new(2, 2);
    let other = open(world.state.path());
    for round in 0..5 {
        world.ready(2).await;
        let wanted = key(&format!("round-{round}"));
        let usual = wish();
        let (one, two) = tokio::join!(world.engine.sandbox(&wanted, &usual), other.sandbox(&wanted, &usual));
        let (one, two) = (one.unwrap(), two.unwrap());
        assert_eq!(one.record.id, two.record.id);
        assert!(one.created != two.created);
    }
    world.end().await;
}

#[tokio::test]
async fn a_refused_claim_costs_no_box() {
    let world = World::new(1, 1);
    world.ready(1).await;
    let before = world.directories();
    let quota = Quota { sandboxes: Some(0), ..Quota::default() };
    let refused = world.engine.sandbox(&key("quota"), &Wish { quota: Some(quota), ..wish() }).await;
    assert_eq!(refused.unwrap_err().code, Code::Quota);
    world.engine.close_scope(&Tenant::local(), "workflow", "over", None).await.unwrap();
    let closed = "workflow:over:default".parse().unwrap();
    assert_eq!(world.engine.sandbox(&closed, &wish()).await.unwrap_err().code, Code::Conflict);
    assert_eq!((world.directories(), world.engine.pool().dropped), (before, 0));
    world.make("fine").await;
    assert_eq!(world.engine.pool().claimed, 1);
    world.end().await;
}

#[tokio::test]
async fn a_box_that_died_on_its_shelf_is_not_handed_out() {
    let world = World::new(1, 1);
    world.ready(1).await;
    let before = world.directories();
    let id = before.iter().next().unwrap().file_name().unwrap().to_str().unwrap().to_owned();
    let own = agents(&id);
    assert!(!own.is_empty());
    for pid in &own {
        // With the agent go its stubs.
        let _ = kill_process(Pid::from_raw(*pid).unwrap(), Signal::KILL);
    }
    // Whoever is just ending still holds its end of the line.
    until("it is dead", || own.iter().all(|pid| has_ended(*pid))).await;
    let record = world.make("one").await;
    assert_ne!(record.id.as_str(), id);
    assert_eq!(python(&world.engine, &record, "print(6*7)").await, "42");
    until("it is removed", || !world.directories().contains(&world.state.path().join("sandboxes").join(&id)))
        .await;
    world.end().await;
}

#[tokio::test]
async fn boxes_of_another_kind_are_made() {
    let world = World::new(1, 4);
    world.ready(1).await;
    let project = tempfile::tempdir().unwrap();
    let mut limits = wish().limits;
    limits.pids = 99;
    let wishes = [
        Wish { limits, ..wish() },
        Wish {
            project: Some(carrel_backend::Project { directory: project.path().into(), writable: false }),
            ..wish()
        },
    ];
    for (number, wish) in wishes.into_iter().enumerate() {
        let found = world.engine.sandbox(&key(&number.to_string()), &wish).await.unwrap();
        assert_eq!(found.record.spec.limits, wish.limits);
        assert_eq!(python(&world.engine, &found.record, "print(1)").await, "1");
    }
    assert_eq!(world.engine.pool().claimed, 0);
    // Another language in a box that stands ready with python.
    let record = world.make("bash").await;
    let (out, _) = call(&world.engine, &record, Language::Bash, "echo $((6*7))").await;
    assert_eq!((out.as_str(), world.engine.pool().claimed), ("42\n", 1));
    world.end().await;
}

#[tokio::test]
async fn a_name_that_means_something_else_now_takes_no_old_box() {
    let world = World::new(0, 2);
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    environments.add("work".into(), Source::Preset(Language::Python));
    world.engine.set_environments(environments.clone());
    let wish = Wish { environment: Some("work".into()), ..wish() };
    world.engine.sandbox(&key("first"), &wish).await.unwrap();
    world.ready(1).await;
    // As after a reload of the configuration.
    environments.add("work".into(), Source::Preset(Language::Bash));
    world.engine.set_environments(environments);
    world.engine.sandbox(&key("second"), &wish).await.unwrap();
    assert_eq!(world.engine.pool().claimed, 0);
    world.end().await;
}

#[tokio::test]
async fn forks_of_what_lives_take_ready_boxes_and_are_like_any_other() {
    let world = World::new(0, 0);
    let found = world.engine.sandbox(&key("parent"), &Wish { idle_timeout_s: 77, ..wish() }).await.unwrap();
    let record = found.record;
    // Another interpreter is up in them than the one that comes.
    let shell = Wish { first: Some(Language::Bash), ..wish() };
    world.engine.set_pool(PoolSize { floor: 2, ceiling: 2 }, &shell);
    world.ready(2).await;
    let before = world.directories();
    let is_ready = |fork: &Record| before.iter().any(|path| path.ends_with(fork.id.as_str()));
    let code = "import os; x = 1; open('file', 'w').write('old'); open('/tmp/kept', 'w').write('kept')";
    python(&world.engine, &record, code).await;
    let forked = in_time("forking", world.engine.fork(&record, 3, None, None)).await.unwrap();
    assert!(forked.living && forked.memory, "{forked:?}");
    let forks: Vec<Record> = forked.forks.into_iter().map(|fork| fork.record).collect();
    assert_eq!(forks.iter().map(is_ready).collect::<Vec<_>>(), [true, true, false], "then they are made");
    for fork in &forks {
        assert_eq!((fork.spec.idle_timeout_s, fork.forked_from.as_ref()), (77, Some(&record.id)));
        // What the box had before is in no state that this call could go back to.
        let crash = "x = 2; open('file', 'w').write('new'); os._exit(1)";
        let (_, outcome) = call(&world.engine, fork, Language::Python, crash).await;
        let told = (outcome.session_state, outcome.files_state);
        assert_eq!(told, (SessionState::RolledBack, Some(FilesState::Restored)), "{outcome:?}");
        let look = "print(x, open('file').read(), open('/tmp/kept').read(), os.listdir())";
        assert_eq!(python(&world.engine, fork, look).await, "1 old kept ['file']");
        let sessions = world.engine.status(fork).await.unwrap().sessions;
        assert!(sessions.len() == 1 && sessions[0].interpreters == [Language::Python], "{sessions:?}");
    }
    // Those that nobody gets for lack of a place stay where they are.
    world.ready(2).await;
    let before = world.directories();
    let quota = Quota { sandboxes: Some(4), ..Quota::default() };
    let refused = world.engine.fork(&record, 1, Some(quota), None).await.unwrap_err();
    assert_eq!(refused.code, Code::Quota);
    assert_eq!((ready(&world.engine), world.directories()), (2, before));
    // One that has died there is nobody's either.
    for path in &world.directories() {
        let id = path.file_name().unwrap().to_str().unwrap();
        if !world.engine.list().unwrap().iter().any(|record| record.id.as_str() == id) {
            for agent in agents(id) {
                // One of them may go with another.
                let _ = kill_process(Pid::from_raw(agent).unwrap(), Signal::KILL);
            }
        }
    }
    let forked = in_time("forking", world.engine.fork(&record, 1, None, None)).await.unwrap();
    assert!(forked.living, "{forked:?}");
    assert_eq!(python(&world.engine, &forked.forks[0].record, "print(x)").await, "1");
    world.end().await;
}

#[tokio::test]
async fn a_pool_that_is_made_smaller_or_turned_off_gives_its_boxes_up() {
    let world = World::new(2, 2);
    world.ready(2).await;
    world.engine.set_pool(PoolSize { floor: 1, ceiling: 1 }, &wish());
    world.ready(1).await;
    until("its directory goes", || world.directories().len() == 1).await;
    world.engine.set_pool(PoolSize { floor: 0, ceiling: 0 }, &wish());
    world.ready(0).await;
    until("all directories go", || world.directories().is_empty()).await;
    let record = world.make("one").await;
    assert_eq!(python(&world.engine, &record, "print(1)").await, "1");
    world.end().await;
}

#[tokio::test]
async fn what_a_keeper_leaves_ends_by_itself_and_is_swept() {
    let world = World::new(2, 2);
    world.ready(2).await;
    let ids: Vec<String> = world
        .directories()
        .iter()
        .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
        .collect();
    let World { engine, keeping, state } = world;
    let other = open(state.path());
    other.sweep().unwrap();
    assert_eq!(std::fs::read_dir(state.path().join("sandboxes")).unwrap().count(), 2, "they have a keeper");
    // As if it had been killed: nobody clears up.
    keeping.abort();
    let _ = keeping.await;
    drop(engine);
    until("their agents end", || ids.iter().all(|id| agents(id).is_empty())).await;
    other.sweep().unwrap();
    assert_eq!(std::fs::read_dir(state.path().join("sandboxes")).unwrap().count(), 0);
    assert_eq!(std::fs::read_dir(state.path().join("locks")).unwrap().count(), 0);
}

#[tokio::test]
async fn a_retired_sandbox_is_gone_at_once_and_its_key_and_quota_are_free() {
    let world = World::new(0, 0);
    let quota = Quota { sandboxes: Some(1), ..Quota::default() };
    let wish = Wish { quota: Some(quota), ..wish() };
    let mut seen = BTreeSet::new();
    for _ in 0..5 {
        let found = in_time("making", world.engine.sandbox(&key("again"), &wish)).await.unwrap();
        assert!(found.created && found.note.is_none(), "a new one, and nothing to tell of the old");
        assert!(seen.insert(found.record.id.clone()));
        assert_eq!(python(&world.engine, &found.record, "print(globals().get('x')); x = 1").await, "None");
        world.engine.retire(&found.record).await.unwrap();
        assert!(agents(found.record.id.as_str()).is_empty(), "its processes are dead");
        assert!(world.engine.list().unwrap().is_empty());
        let found = world.engine.existing(found.record.id.as_str(), None).await;
        assert_eq!(found.unwrap_err().code, Code::SandboxNotFound);
    }
    in_time("clearing up", world.engine.finish_retiring()).await;
    assert!(world.directories().is_empty());
    let locks = std::fs::read_dir(world.state.path().join("locks")).unwrap().count();
    assert_eq!(locks, 0);
    world.end().await;
}

#[tokio::test]
async fn retiring_what_sleeps_is_gone_or_is_being_closed_by_another_is_no_error() {
    let world = World::new(0, 0);
    let record = world.make("one").await;
    match world.engine.standby(&record).await {
        Ok(_) => {}
        Err(problem) => assert_eq!(problem.code, Code::Unsupported),
    }
    let (one, two, three) = tokio::join!(
        world.engine.retire(&record),
        world.engine.retire(&record),
        world.engine.close(&record, None)
    );
    one.and(two).and(three).unwrap();
    world.engine.retire(&record).await.unwrap();
    in_time("clearing up", world.engine.finish_retiring()).await;
    assert!(world.directories().is_empty() && agents(record.id.as_str()).is_empty());
    world.end().await;
}

#[tokio::test]
async fn what_a_killed_process_leaves_of_a_retired_sandbox_is_swept() {
    let world = World::new(0, 0);
    let record = world.make("one").await;
    // As if it had been killed right after the row was gone: nobody has the lock, and everything lives.
    let registry = rusqlite::Connection::open(world.state.path().join("registry.db")).unwrap();
    registry.execute("DELETE FROM sandboxes WHERE id = ?1", [record.id.as_str()]).unwrap();
    assert!(!agents(record.id.as_str()).is_empty());
    open(world.state.path()).sweep().unwrap();
    assert!(world.directories().is_empty() && agents(record.id.as_str()).is_empty());
    world.end().await;
}

/// Processes that have a sandbox's name: its agent and what that has forked.
fn has_ended(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with(['Z', 'X']))
}

fn agents(id: &str) -> Vec<i32> {
    let wanted = format!("CARREL_SANDBOX={id}\0");
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| std::fs::read(format!("/proc/{pid}/environ")).is_ok_and(|all| all == wanted.as_bytes()))
        .collect()
}
