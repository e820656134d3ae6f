//! What a kill leaves at every point of hibernating and waking. The backend is the jail, but for the images: instead of a
//! checkpoint they hold one file, which a restored box is told by.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use carrel_backend::{Backend, BoxRequest, Placed, jail::Jail};
use carrel_proto::{guest::Language, id::Key, limits::Limits, message::Run};

use super::*;
use crate::{Core, Environments, Settings, Whereabouts, Wish, call::Output, registry::Registry};

/// Where a process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Killed {
    Nowhere,
    /// The image is half written.
    Writing,
    /// It is complete, and the box still there.
    Written,
    /// The box is gone, the image has not got its name.
    Ended,
    /// Not killed, but the disk is full when the box is gone.
    Failing,
    /// Restored, and the row does not say so.
    Restored,
}

#[derive(Debug)]
struct Double {
    jail: Arc<Jail>,
    killed: Mutex<Killed>,
    refuse: Mutex<Option<Problem>>,
    restored: AtomicUsize,
}

impl Double {
    fn is_killed(&self, at: Killed) -> bool {
        *self.killed.lock().unwrap() == at
    }

    fn refused(&self) -> Result<(), Problem> {
        self.refuse.lock().unwrap().clone().map_or(Ok(()), Err)
    }
}

impl Backend for Double {
    fn name(&self) -> &'static str {
        "double"
    }
    fn create(&self, request: &BoxRequest) -> Result<Placed, Problem> {
        self.jail.create(request)
    }
    fn is_alive(&self, placed: &Placed) -> bool {
        self.jail.is_alive(placed)
    }
    fn end(&self, placed: &Placed) -> Result<(), Problem> {
        self.jail.end(placed)
    }
    fn update(
        &self,
        id: &SandboxId,
        placed: &Placed,
        before: &Limits,
        limits: &Limits,
    ) -> Result<(), Problem> {
        self.jail.update(id, placed, before, limits)
    }
    fn freeze(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
        self.jail.freeze(id, placed)
    }
    fn thaw(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
        self.jail.thaw(id, placed)
    }
    fn is_frozen(&self, id: &SandboxId, placed: &Placed) -> bool {
        self.jail.is_frozen(id, placed)
    }
    fn can_hibernate(&self) -> Result<(), Problem> {
        Ok(())
    }
    fn hibernate(&self, _: &SandboxId, _: &Path, placed: &Placed, image: &Path) -> Result<(), Problem> {
        self.refused()?;
        let dead = || Problem::internal("killed");
        fs::create_dir(image).unwrap();
        if self.is_killed(Killed::Writing) {
            panic!("killed");
        }
        fs::write(image.join("pages"), [7; 1000]).unwrap();
        fs::write(image.join(COMPLETE), "").unwrap();
        if self.is_killed(Killed::Written) {
            panic!("killed");
        }
        self.jail.end(placed)?;
        if self.is_killed(Killed::Ended) {
            panic!("{}", dead().message);
        }
        if self.is_killed(Killed::Failing) {
            return Err(dead());
        }
        Ok(())
    }
    fn restore(&self, request: &BoxRequest, image: &Path, _memory: Memory) -> Result<Placed, Problem> {
        self.refused()?;
        assert!(image.join(COMPLETE).exists() && image.join("pages").exists());
        let placed = self.jail.create(request)?;
        self.restored.fetch_add(1, Ordering::Relaxed);
        if self.is_killed(Killed::Restored) {
            panic!("killed");
        }
        Ok(placed)
    }
    fn destroy(&self, id: &SandboxId, directory: &Path, placed: Option<&Placed>) -> Result<(), Problem> {
        self.jail.destroy(id, directory, placed)
    }
    fn workspace(&self, directory: &Path) -> Option<std::path::PathBuf> {
        self.jail.workspace(directory)
    }
}

struct World {
    _place: tempfile::TempDir,
    engine: Engine,
    double: Arc<Double>,
    record: Record,
}

impl World {
    async fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let state = fs::canonicalize(place.path()).unwrap();
        for directory in ["sandboxes", "locks"] {
            fs::create_dir(state.join(directory)).unwrap();
        }
        let jail = Arc::new(Jail::new(&state));
        let double = Arc::new(Double {
            jail: Arc::clone(&jail),
            killed: Mutex::new(Killed::Nowhere),
            refuse: Mutex::default(),
            restored: AtomicUsize::new(0),
        });
        let core = Core {
            registry: Registry::open(&state.join("registry.db")).unwrap(),
            settings: Settings {
                state,
                environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
            },
            backend: double.clone(),
            jail,
            preset: Mutex::default(),
            locks: Default::default(),
            events: Arc::default(),
            watch: Default::default(),
            pool: Default::default(),
            lines: Default::default(),
            retiring: Default::default(),
            clearing: Default::default(),
        };
        let engine = Engine { core: Arc::new(core), environments: Arc::default() };
        let wish = Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() };
        let record = engine.sandbox(&key(), &wish).await.unwrap().record;
        Self { _place: place, engine, double, record }
    }

    fn kill(&self, at: Killed) {
        *self.double.killed.lock().unwrap() = at;
    }

    fn refuse(&self, problem: Option<Problem>) {
        *self.double.refuse.lock().unwrap() = problem;
    }

    fn now(&self) -> Record {
        self.engine.record(&self.record.id).unwrap().unwrap()
    }

    fn images(&self) -> Vec<String> {
        let entries = fs::read_dir(self.engine.directory(&self.record.id)).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name.starts_with("image")).collect()
    }

    async fn call(&self, code: &str) -> (String, Option<Note>) {
        let found = self.engine.existing(self.record.id.as_str(), None).await.unwrap();
        (bash(&self.engine, &found.record, code).await.unwrap(), found.note)
    }

    async fn end(self) {
        self.engine.close(&self.record, None).await.unwrap();
    }
}

fn key() -> Key {
    "user:local:work".parse().unwrap()
}

async fn bash(engine: &Engine, record: &Record, code: &str) -> Result<String, Problem> {
    let run = Run {
        session: carrel_proto::id::SessionName::main(),
        language: Language::Bash,
        code: code.to_owned(),
        timeout_ms: 30_000,
        cancel_on_disconnect: false,
    };
    let mut call = engine.run(record, run).await?;
    let mut out = Vec::new();
    loop {
        match call.next().await? {
            Output::Bytes { bytes, .. } => out.extend_from_slice(bytes),
            Output::Finished(_) => return Ok(String::from_utf8_lossy(&out).into_owned()),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_hibernated_sandbox_has_an_image_and_no_box_and_any_call_restores_it() {
    let world = World::new().await;
    world.call("echo kept > file").await;
    let asleep = world.engine.hibernate(&world.record).await.unwrap();
    assert_eq!(asleep.state, State::Hibernated);
    let image = asleep.sleep.image.clone().unwrap();
    assert!(image.bytes >= 1000 && image.made_unix_ms > 0);
    assert!(!world.engine.is_alive(&asleep));
    assert_eq!(world.images(), [image.name]);
    let usage = world.engine.usage(&asleep).await.unwrap();
    assert_eq!((usage.memory, usage.processes), (0, 0));
    // Again is no error, and the sweep lets it sleep.
    world.engine.hibernate(&world.record).await.unwrap();
    world.engine.sweep().unwrap();
    assert_eq!(world.now().state, State::Hibernated);
    assert!(world.engine.standby(&world.record).await.unwrap_err().hint.contains("deeply"));

    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let (engine, record) = (world.engine.clone(), world.record.clone());
        calls.spawn(async move {
            let found = engine.existing(record.id.as_str(), None).await?;
            assert_eq!(found.note, None);
            bash(&engine, &found.record, "cat file").await
        });
    }
    while let Some(out) = calls.join_next().await {
        assert_eq!(out.unwrap().unwrap(), "kept\n");
    }
    assert_eq!(world.double.restored.load(Ordering::Relaxed), 1);
    assert_eq!((world.now().state, world.images().len()), (State::Running, 0));
    assert_eq!(world.now().sleep, crate::registry::Sleep::default());
    world.end().await;
}

#[tokio::test]
async fn whoever_holds_an_old_record_is_served_by_the_restored_box() {
    let world = World::new().await;
    world.engine.hibernate(&world.record).await.unwrap();
    // Its record says that it runs, with the pid of a box that is gone.
    assert_eq!(bash(&world.engine, &world.record, "echo here").await.unwrap(), "here\n");
    world.end().await;
}

#[tokio::test]
async fn killed_while_writing_the_box_is_the_one_that_counts() {
    for at in [Killed::Writing, Killed::Written] {
        let world = World::new().await;
        world.call("A=5").await;
        world.kill(at);
        world.engine.hibernate(&world.record).await.unwrap_err();
        let left = world.now();
        assert_eq!((left.state, left.sleep.image.is_some()), (State::Standby, true), "{at:?}");
        assert_eq!(world.images(), ["image.new"]);
        world.kill(Killed::Nowhere);
        world.engine.sweep().unwrap();
        assert_eq!((world.now().state, world.images().len()), (State::Running, 0), "{at:?}");
        assert_eq!(world.call("echo $A").await, ("5\n".to_owned(), None), "{at:?}");
        assert_eq!(world.double.restored.load(Ordering::Relaxed), 0);
        world.end().await;
    }
}

#[tokio::test]
async fn killed_after_the_box_is_gone_the_image_is_the_one_that_counts() {
    for (swept, at) in
        [(true, Killed::Ended), (false, Killed::Ended), (true, Killed::Failing), (false, Killed::Failing)]
    {
        let world = World::new().await;
        world.kill(at);
        world.engine.hibernate(&world.record).await.unwrap_err();
        world.kill(Killed::Nowhere);
        assert_eq!(world.now().state, State::Standby);
        if swept {
            world.engine.sweep().unwrap();
            let found = world.now();
            assert_eq!(found.state, State::Hibernated);
            assert_eq!(world.images(), [found.sleep.image.unwrap().name]);
        }
        assert_eq!(world.call("echo up").await, ("up\n".to_owned(), None));
        assert_eq!(world.double.restored.load(Ordering::Relaxed), 1);
        world.end().await;
    }
}

#[tokio::test]
async fn killed_while_waking_it_is_woken_again_and_is_there_once() {
    let world = World::new().await;
    world.engine.hibernate(&world.record).await.unwrap();
    world.kill(Killed::Restored);
    world.engine.existing(world.record.id.as_str(), None).await.unwrap_err();
    assert_eq!((world.now().state, world.images().len()), (State::Hibernated, 1));
    world.kill(Killed::Nowhere);
    assert_eq!(world.call("echo up").await, ("up\n".to_owned(), None));
    assert_eq!(world.double.restored.load(Ordering::Relaxed), 2);
    let agents = fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
        let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
        environ == format!("CARREL_SANDBOX={}\0", world.record.id).as_bytes()
            && fs::read(entry.path().join("cmdline")).is_ok_and(|line| line == b"carrel\0agent\0")
            && carrel_jail::tree::Stat::of(entry.file_name().to_str().unwrap().parse().unwrap()).is_some_and(
                |stat| stat.parent == 1 || stat.parent == i32::try_from(std::process::id()).unwrap(),
            )
    });
    assert!(agents.count() <= 1, "what was restored first is gone");
    world.end().await;
}

#[tokio::test]
async fn an_image_that_its_row_does_not_name_is_never_restored() {
    let world = World::new().await;
    // As of a waking that was killed before it removed the image.
    let stale = world.engine.directory(&world.record.id).join("image-1");
    fs::create_dir(&stale).unwrap();
    fs::write(stale.join(COMPLETE), "").unwrap();
    world.double.jail.end(world.now().placed.as_ref().unwrap()).unwrap();
    assert_eq!(world.call("echo up").await, ("up\n".to_owned(), Some(Note::Revived)));
    assert_eq!(world.double.restored.load(Ordering::Relaxed), 0);
    assert_eq!(world.images().len(), 0);
    world.end().await;
}

#[tokio::test]
async fn a_damaged_image_loses_the_state_aloud_and_keeps_the_files() {
    let world = World::new().await;
    world.call("echo kept > file").await;
    world.engine.hibernate(&world.record).await.unwrap();
    // What may pass is no reason to give up the state.
    world.refuse(Some(Problem::internal("no memory just now")));
    let problem = world.engine.existing(world.record.id.as_str(), None).await.unwrap_err();
    assert!(problem.message.contains("no memory"));
    assert_eq!((world.now().state, world.images().len()), (State::Hibernated, 1));
    world.refuse(Some(Problem::new(Code::StateLost, "a page is missing")));
    assert_eq!(world.call("cat file").await, ("kept\n".to_owned(), Some(Note::Damaged)));
    assert_eq!((world.now().state, world.images().len()), (State::Running, 0));
    // The same for one whose image somebody has removed.
    world.refuse(None);
    let asleep = world.engine.hibernate(&world.record).await.unwrap();
    let image = world.engine.directory(&asleep.id).join(asleep.sleep.image.unwrap().name);
    fs::remove_dir_all(image).unwrap();
    world.engine.sweep().unwrap();
    assert_eq!(world.now().state, State::Lost);
    assert_eq!(world.call("cat file").await, ("kept\n".to_owned(), Some(Note::Damaged)));
    world.end().await;
}

#[tokio::test]
async fn what_cannot_be_written_stays_in_standby_and_says_why() {
    let world = World::new().await;
    world.call("A=5").await;
    if let Err(problem) = world.engine.standby(&world.record).await {
        println!("skipped: {}", problem.message);
        return world.end().await;
    }
    world.refuse(Some(Problem::new(Code::Unsupported, "it has an io_uring")));
    let problem = world.engine.hibernate(&world.record).await.unwrap_err();
    assert_eq!(problem.code, Code::Unsupported);
    let stays = world.now();
    assert_eq!(
        (stays.state, stays.sleep.standby_reason.as_deref()),
        (State::Standby, Some("it has an io_uring"))
    );
    assert!(world.engine.backend.is_frozen(&stays.id, stays.placed.as_ref().unwrap()));
    assert_eq!(world.images().len(), 0);
    assert_eq!(world.call("echo $A").await, ("5\n".to_owned(), None));
    assert_eq!(world.now().sleep.standby_reason, None);
    world.end().await;
}

#[tokio::test]
async fn nobody_is_hibernated_in_the_midst_of_a_call() {
    let world = World::new().await;
    let run = Run {
        session: carrel_proto::id::SessionName::main(),
        language: Language::Bash,
        code: "read -r line < gate; echo $line".to_owned(),
        timeout_ms: 30_000,
        cancel_on_disconnect: false,
    };
    world.call("mkfifo gate").await;
    let mut call = world.engine.run(&world.record, run).await.unwrap();
    assert!(matches!(call.next().await.unwrap(), Output::Started(_)));
    assert_eq!(world.engine.hibernate(&world.record).await.unwrap_err().code, Code::Conflict);
    assert_eq!(world.now().state, State::Running);
    let open = carrel_proto::message::Exec {
        session: carrel_proto::id::SessionName::main(),
        argv: ["sh", "-c", "echo on > gate"].map(str::to_owned).into(),
        cwd: None,
        env: Default::default(),
        stdin: false,
        pty: None,
        timeout_ms: None,
        detach: true,
        cancel_on_disconnect: false,
    };
    world.engine.start(&world.record, open).await.unwrap();
    loop {
        if let Output::Finished(_) = call.next().await.unwrap() {
            break;
        }
    }
    drop(call);
    world.engine.hibernate(&world.record).await.unwrap();
    world.end().await;
}

#[tokio::test]
async fn a_lifetime_ends_in_sleep_too() {
    let world = World::new().await;
    world.engine.hibernate(&world.record).await.unwrap();
    let long_ago = "UPDATE sandboxes SET created_ms = 5";
    world
        .engine
        .registry
        .write(|transaction| transaction.execute(long_ago, []).map_err(crate::registry::failed))
        .unwrap();
    let wish = Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() };
    let found = world.engine.sandbox(&key(), &wish).await.unwrap();
    assert_eq!((found.created, found.note), (true, Some(Note::Ended(EndReason::Lifetime))));
    assert!(!world.engine.directory(&world.record.id).exists());
    world.engine.close(&found.record, None).await.unwrap();
}

#[tokio::test]
async fn the_keeper_goes_from_running_by_standby_to_hibernated() {
    let world = World::new().await;
    let mut keeper = crate::keeper::Keeper::default();
    let times = crate::Update { standby_after_s: Some(1), hibernate_after_s: Some(2), ..Default::default() };
    world.engine.update(&world.record, times).await.unwrap();
    let began = Instant::now();
    let mut seen = vec![State::Running];
    while world.now().state != State::Hibernated {
        keeper.round(&world.engine).await.unwrap();
        let state = world.now().state;
        if seen.last() != Some(&state) {
            seen.push(state);
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{seen:?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(seen, [State::Running, State::Standby, State::Hibernated]);
    assert!(began.elapsed() >= Duration::from_secs(2));
    assert_eq!(world.call("echo up").await, ("up\n".to_owned(), None));
    world.end().await;
}
