//! Snapshots, restores and forks, with real boxes: what was there is there again, and nobody disturbs anybody.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{future::Future, path::Path, time::Duration};

use carrel_engine::{
    Engine, Environments, Note, Record, Settings, State, Tenant, Whereabouts, Wish,
    call::Output,
    snapshots::{RestoreWish, Side, Snapshot, SnapshotFilter, SnapshotWish},
};
use carrel_proto::{
    guest::Language,
    id::{Key, SessionName},
    message::Run,
    outcome::{FilesState, Outcome, SessionState},
    problem::Code,
};
use rustix::process::{Pid, Signal, kill_process};

fn engine(state: &Path) -> Engine {
    let environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    let settings = Settings { state: state.to_path_buf(), environments };
    let engine = Engine::open(settings).unwrap();
    if std::env::var_os("CARREL_TEST_COPIES").is_some() {
        engine.parent("python").unwrap().unwrap().unwrap();
    }
    engine
}

fn wish() -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() }
}

fn key() -> Key {
    "user:local:work".parse().unwrap()
}

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(120), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

async fn run(engine: &Engine, record: &Record, language: Language, code: &str) -> String {
    end(engine, record, language, code).await.0
}

/// What it said, and how it ended.
async fn end(engine: &Engine, record: &Record, language: Language, code: &str) -> (String, Outcome) {
    let run = Run {
        session: SessionName::main(),
        language,
        code: code.to_owned(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    };
    in_time(code, async {
        let mut call = engine.run(record, run).await.unwrap();
        let mut out = Vec::new();
        loop {
            match call.next().await.unwrap() {
                Output::Bytes { bytes, .. } => out.extend_from_slice(bytes),
                Output::Finished(outcome) => return (String::from_utf8_lossy(&out).into_owned(), outcome),
                _ => {}
            }
        }
    })
    .await
}

async fn python(engine: &Engine, record: &Record, code: &str) -> String {
    run(engine, record, Language::Python, code).await
}

async fn bash(engine: &Engine, record: &Record, code: &str) -> String {
    run(engine, record, Language::Bash, code).await
}

async fn take(engine: &Engine, record: &Record, tags: &[&str]) -> Snapshot {
    let tags = tags.iter().map(|tag| (*tag).to_owned()).collect();
    let wish = SnapshotWish { tags, ..SnapshotWish::default() };
    in_time("a snapshot", engine.snapshot(record, &wish)).await.unwrap()
}

/// A state directory and an engine; none, with the reason in the output, where memory cannot be saved.
#[expect(clippy::print_stdout, reason = "a skip has its reason in the output")]
fn with_memory() -> Option<(tempfile::TempDir, Engine)> {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    match engine.can_hibernate() {
        Ok(()) => Some((state, engine)),
        Err(problem) => {
            println!("skipped: {}", problem.message);
            None
        }
    }
}

async fn close_all(state: &Path, engine: &Engine) {
    for snapshot in engine.all_snapshots(&SnapshotFilter::default()).unwrap() {
        engine.delete_snapshot(&snapshot, None).await.unwrap();
    }
    for record in engine.list().unwrap() {
        engine.close(&record, None).await.unwrap();
    }
    engine.cleared().await.unwrap();
    let left: Vec<_> = ["snapshots", "sandboxes"]
        .iter()
        .flat_map(|place| std::fs::read_dir(state.join(place)).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(left, Vec::<std::path::PathBuf>::new());
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(state.to_str().unwrap()), "{mounts}");
}

/// Whoever takes a crashed interpreter's place makes a copy of its own, and is not written to disk with one that nobody knows of.
#[tokio::test]
async fn a_fork_right_after_a_crash_has_states_of_its_own() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    for round in 0..8 {
        python(&engine, &record, &format!("n = {round}")).await;
        let (_, outcome) = end(&engine, &record, Language::Python, "n = -1; import os; os._exit(3)").await;
        assert_eq!(outcome.session_state, SessionState::RolledBack);
        let mut forked = in_time("a fork", engine.fork(&record, 1, None, None)).await.unwrap();
        let fork = forked.forks.remove(0).record;
        python(&engine, &fork, "n = -2").await;
        let undone = engine.undo(&fork, &SessionName::main(), Some(Language::Python), 1).await.unwrap();
        assert_eq!(undone.calls, 1, "round {round}");
        assert_eq!(python(&engine, &fork, "print(n)").await, format!("{round}\n"));
        engine.close(&fork, None).await.unwrap();
    }
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn a_snapshot_is_restored_in_place_and_as_new() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "x = 41; open('file', 'w').write('old')").await;
    bash(&engine, &record, "A=5; cd /tmp; echo hidden > kept; (sleep 1000 &)").await;
    let snapshot = take(&engine, &record, &["good", "first"]).await;
    assert!(snapshot.content.memory && snapshot.bytes > 0, "{snapshot:?}");
    assert_eq!(
        (snapshot.tags.as_slice(), snapshot.parent.clone()),
        (&["first".into(), "good".into()][..], None)
    );
    // It goes on.
    assert_eq!(python(&engine, &record, "x += 1; open('file', 'w').write('new'); print(x)").await, "42\n");
    assert_eq!(bash(&engine, &record, "A=6; rm kept; echo $A; pwd").await, "6\n/tmp\n");

    let by_tag = engine.snapshot_of(&Tenant::local(), "good").unwrap();
    assert_eq!(by_tag.id, snapshot.id);
    let key: Key = "user:local:other".parse().unwrap();
    let wish = RestoreWish { key: Some(key.clone()), ..RestoreWish::default() };
    let other = in_time("as new", engine.restore_as(&snapshot, &wish)).await.unwrap();
    assert_eq!((other.note, other.record.key.as_ref()), (None, Some(&key)));
    assert_ne!(other.record.id, record.id);
    let look = "print(x, open('/workspace/file').read())";
    assert_eq!(python(&engine, &other.record, look).await, "41 old\n");
    assert_eq!(bash(&engine, &other.record, "echo $A $(cat kept) $PWD").await, "5 hidden /tmp\n");
    // Found by its name, and taken for another.
    assert_eq!(engine.sandbox(&key, &self::wish()).await.unwrap().record.id, other.record.id);
    let again = engine.restore_as(&snapshot, &wish).await.unwrap_err();
    assert_eq!(again.code, Code::Exists);

    let back =
        in_time("in place", engine.restore_in_place(&snapshot, &RestoreWish::default())).await.unwrap();
    assert_eq!((back.note, &back.record.id), (None, &record.id));
    assert_eq!(python(&engine, &back.record, look).await, "41 old\n");
    assert_eq!(bash(&engine, &back.record, "echo $A $(cat kept) $PWD").await, "5 hidden /tmp\n");
    // Twice is as good as once, also after it has slept.
    engine.hibernate(&back.record).await.unwrap();
    let back = in_time("again", engine.restore_in_place(&snapshot, &RestoreWish::default())).await.unwrap();
    assert_eq!(python(&engine, &back.record, look).await, "41 old\n");
    let second = take(&engine, &back.record, &[]).await;
    assert_eq!(second.parent.as_ref(), Some(&snapshot.id));
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn forks_are_independent_and_one_is_adopted() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "import random; x = [1, 2]; open('file', 'w').write('shared')").await;
    bash(&engine, &record, "A=5").await;
    let forked = in_time("forking", engine.fork(&record, 3, None, None)).await.unwrap();
    println!("copied in {} ms", forked.copy_ms);
    assert!(forked.memory);
    let mut seen = Vec::new();
    for (number, fork) in forked.forks.iter().enumerate() {
        println!(
            "fork: {} ms, {} on disk, {} in memory",
            fork.duration_ms, fork.disk_bytes, fork.memory_bytes
        );
        assert_eq!(fork.record.key.as_ref().unwrap().as_str(), format!("user:local:work-{}", number + 1));
        assert!(fork.memory_bytes > 0);
        let own =
            format!("x.append({number}); open('file', 'a').write('{number}'); print(x, open('file').read())");
        let expected = format!("[1, 2, {number}] shared{number}\n");
        assert_eq!(python(&engine, &fork.record, &own).await, expected);
        assert_eq!(bash(&engine, &fork.record, "echo $A").await, "5\n");
        seen.push(python(&engine, &fork.record, "print(random.random())").await);
    }
    assert_eq!(python(&engine, &record, "print(x, open('file').read())").await, "[1, 2] shared\n");
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 3, "their random numbers are the same");
    // Names that are taken are passed over.
    let more = engine.fork(&record, 1, None, None).await.unwrap();
    assert_eq!(more.forks[0].record.key.as_ref().unwrap().as_str(), "user:local:work-4");

    let winner = engine.adopt(&forked.forks[1].record, None).await.unwrap();
    assert_eq!(winner.key, Some(key()));
    let found = engine.sandbox(&key(), &wish()).await.unwrap();
    assert_eq!(found.record.id, winner.id);
    assert_eq!(python(&engine, &found.record, "print(x)").await, "[1, 2, 1]\n");
    let parent = engine.record(&record.id).unwrap().unwrap();
    assert_eq!(parent.key.unwrap().as_str(), "user:local:work-2");
    assert_eq!(engine.adopt(&record, None).await.unwrap_err().code, Code::Conflict);
    engine.cleared().await.unwrap();
    assert!(std::fs::read_dir(state.path().join("snapshots")).unwrap().next().is_none());
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn the_first_call_of_one_that_has_come_back_is_taken_back() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "import os; x = 1; open('file', 'w').write('old')").await;
    let forked = in_time("forking", engine.fork(&record, 1, None, None)).await.unwrap();
    let snapshot = take(&engine, &record, &[]).await;
    let restored = in_time("as new", engine.restore_as(&snapshot, &RestoreWish::default())).await.unwrap();
    in_time("to sleep", engine.hibernate(&record)).await.unwrap();
    for (how, record) in [("fork", &forked.forks[0].record), ("restore", &restored.record), ("wake", &record)]
    {
        let crash = "x = 2; open('file', 'w').write('new'); open('more', 'w'); os._exit(1)";
        for _ in 0..2 {
            let (_, outcome) = end(&engine, record, Language::Python, crash).await;
            let told = (outcome.session_state, outcome.taken_back, outcome.files_state);
            let expected = (SessionState::RolledBack, Some(1), Some(FilesState::Restored));
            assert_eq!(told, expected, "{how}: {outcome:?}");
            let look = "print(x, open('file').read(), os.listdir())";
            assert_eq!(python(&engine, record, look).await, "1 old ['file']\n", "{how}");
        }
    }
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn files_differ_as_they_do() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    bash(&engine, &record, "echo a > same; echo a > changed; echo a > gone; mkdir d; echo a > d/touched")
        .await;
    let files = SnapshotWish { files_only: true, ..SnapshotWish::default() };
    let first = engine.snapshot(&record, &files).await.unwrap();
    assert!(!first.content.memory && first.content.reason.is_some());
    bash(&engine, &record, "echo b > changed; rm gone; echo a > d/touched; echo new > d/new").await;
    let names = |changes: &carrel_engine::snapshots::Changes| {
        changes.files.iter().map(|file| file.path.clone()).collect::<Vec<_>>()
    };
    let side = |snapshot: &Snapshot| Side::Snapshot(Box::new(snapshot.clone()));
    let now = engine.diff(side(&first), Side::Now(Box::new(record.clone()))).await.unwrap();
    assert_eq!(names(&now.added), ["d/new"]);
    assert_eq!(names(&now.changed), ["changed"]);
    assert_eq!(names(&now.removed), ["gone"]);
    let second = engine.snapshot(&record, &files).await.unwrap();
    assert_eq!(engine.diff(side(&first), side(&second)).await.unwrap(), now);
    let back = engine.diff(side(&second), side(&first)).await.unwrap();
    assert_eq!((names(&back.added), names(&back.removed)), (names(&now.removed), names(&now.added)));
    // Files alone come back with new interpreters, and say so.
    bash(&engine, &record, "A=5").await;
    let restored = engine.restore_as(&first, &RestoreWish::default()).await.unwrap();
    assert_eq!(restored.note, Some(Note::FilesOnly));
    assert_eq!(bash(&engine, &restored.record, "cat gone changed; echo \"[$A]\"").await, "a\na\n[]\n");
    bash(&engine, &restored.record, "echo mine > changed").await;
    assert_eq!(bash(&engine, &record, "cat changed").await, "b\n");
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn a_token_sees_its_own_snapshots_alone() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let new = |name: &str| carrel_engine::tokens::NewToken {
        name: name.into(),
        scopes: carrel_engine::tokens::Scopes::all(),
        ..Default::default()
    };
    let [one, two] = ["one", "two"].map(|name| engine.create_token(&new(name)).unwrap().0.tenant());
    let wish = Wish { tenant: one.clone(), ..wish() };
    let record = engine.sandbox(&"workflow:run:x".parse().unwrap(), &wish).await.unwrap().record;
    let files = SnapshotWish { files_only: true, tags: vec!["t".into()], ..SnapshotWish::default() };
    let snapshot = engine.snapshot(&record, &files).await.unwrap();
    for name in [snapshot.id.as_str(), "t"] {
        assert_eq!(engine.snapshot_of(&one, name).unwrap().id, snapshot.id);
        assert_eq!(engine.snapshot_of(&two, name).unwrap_err().code, Code::SnapshotNotFound);
        assert_eq!(engine.snapshot_of(&Tenant::local(), name).unwrap().id, snapshot.id);
    }
    let of = |tenant: &Tenant| SnapshotFilter { tenant: Some(tenant.clone()), ..SnapshotFilter::default() };
    assert_eq!(engine.all_snapshots(&of(&one)).unwrap().len(), 1);
    assert_eq!(engine.all_snapshots(&of(&two)).unwrap().len(), 0);
    let bad = SnapshotWish { tags: vec!["a b".into()], ..SnapshotWish::default() };
    assert_eq!(engine.snapshot(&record, &bad).await.unwrap_err().code, Code::InvalidArgument);
    engine.delete_snapshot(&snapshot, None).await.unwrap();
    let gone = RestoreWish { tenant: one.clone(), ..RestoreWish::default() };
    assert_eq!(engine.restore_as(&snapshot, &gone).await.unwrap_err().code, Code::SnapshotNotFound);
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn a_damaged_image_is_refused_and_nothing_is_lost() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "x = 1; open('file', 'w').write('old')").await;
    let snapshot = take(&engine, &record, &[]).await;
    python(&engine, &record, "x = 2; open('file', 'w').write('new')").await;
    let image = state.path().join("snapshots").join(snapshot.id.as_str()).join("image/0");
    let pages = std::fs::read_dir(&image).unwrap().map(|entry| entry.unwrap().path());
    let pages = pages.into_iter().find(|path| path.to_str().unwrap().contains("/pages-")).unwrap();
    let length = std::fs::metadata(&pages).unwrap().len();
    std::fs::File::options().write(true).open(&pages).unwrap().set_len(length / 2).unwrap();
    let refused = engine.restore_as(&snapshot, &RestoreWish::default()).await.unwrap_err();
    assert_eq!(refused.code, Code::StateLost);
    assert!(refused.hint.contains("files"), "{refused:?}");
    assert_eq!(engine.list().unwrap().len(), 1, "nothing is left of it");
    let refused = engine.restore_in_place(&snapshot, &RestoreWish::default()).await.unwrap_err();
    assert_eq!(refused.code, Code::StateLost);
    let found = engine.existing("work", Some(&key())).await.unwrap();
    assert_eq!(found.note, None);
    assert_eq!(python(&engine, &found.record, "print(x, open('file').read())").await, "2 new\n");
    let files = RestoreWish { files_only: true, ..RestoreWish::default() };
    let restored = engine.restore_as(&snapshot, &files).await.unwrap();
    assert_eq!(bash(&engine, &restored.record, "cat file").await, "old");
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn sleepers_and_lost_ones_are_saved_as_they_are() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    bash(&engine, &record, "A=5; echo kept > file").await;
    let look = "echo $A $(cat file)";
    engine.hibernate(&record).await.unwrap();
    let hibernated = take(&engine, &record, &[]).await;
    assert!(hibernated.content.memory);
    assert_eq!(engine.record(&record.id).unwrap().unwrap().state, State::Hibernated);
    if engine.standby(&engine.existing("work", Some(&key())).await.unwrap().record).await.is_ok() {
        let standby = take(&engine, &record, &[]).await;
        assert!(standby.content.memory, "{standby:?}");
        assert_eq!(engine.record(&record.id).unwrap().unwrap().state, State::Standby);
        let restored = engine.restore_as(&standby, &RestoreWish::default()).await.unwrap();
        assert_eq!(bash(&engine, &restored.record, look).await, "5 kept\n");
    }
    assert_eq!(bash(&engine, &record, look).await, "5 kept\n");
    let restored = engine.restore_as(&hibernated, &RestoreWish::default()).await.unwrap();
    assert_eq!(bash(&engine, &restored.record, look).await, "5 kept\n");
    let alive = engine.record(&record.id).unwrap().unwrap();
    kill_process(Pid::from_raw(alive.placed.as_ref().unwrap().pid).unwrap(), Signal::KILL).unwrap();
    let lost = take(&engine, &record, &[]).await;
    assert!(!lost.content.memory && lost.content.reason.as_ref().unwrap().contains("lost"));
    let restored = engine.restore_as(&lost, &RestoreWish::default()).await.unwrap();
    assert_eq!(bash(&engine, &restored.record, "cat file").await, "kept\n");
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn several_at_once_wait_for_each_other() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    bash(&engine, &record, "A=5").await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..2 {
        let (engine, record) = (self::engine(state.path()), record.clone());
        tasks.spawn(async move { take(&engine, &record, &[]).await });
    }
    let calls = async {
        for _ in 0..5 {
            assert_eq!(bash(&engine, &record, "echo $A").await, "5\n");
        }
    };
    calls.await;
    let mut all = Vec::new();
    while let Some(snapshot) = tasks.join_next().await {
        all.push(snapshot.unwrap());
    }
    for snapshot in &all {
        assert!(snapshot.content.memory);
        let restored = engine.restore_as(snapshot, &RestoreWish::default()).await.unwrap();
        assert_eq!(bash(&engine, &restored.record, "echo $A").await, "5\n");
    }
    close_all(state.path(), &engine).await;
}

/// Takes snapshots until it is killed, if it is told of what.
#[tokio::test]
async fn helper_that_takes_snapshots() {
    let Ok(state) = std::env::var("CARREL_TEST_SNAPSHOTS_OF") else { return };
    let engine = engine(Path::new(&state));
    let record = engine.list().unwrap().remove(0);
    loop {
        let snapshot = engine.snapshot(&record, &SnapshotWish::default()).await.unwrap();
        engine.delete_snapshot(&snapshot, None).await.unwrap();
    }
}

#[tokio::test]
async fn whoever_is_killed_while_taking_one_leaves_nothing_stopped_and_nothing_half() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "x = 41; big = bytearray(b'x') * (20 << 20)").await;
    bash(&engine, &record, "(while :; do echo x >> beat; sleep 0.01; done) & true").await;
    for round in 0..6 {
        let mut helper = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["helper_that_takes_snapshots", "--exact"])
            .env("CARREL_TEST_SNAPSHOTS_OF", state.path())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // Somewhere in its work: each time at another point of it.
        let place = state.path().join("snapshots");
        while std::fs::read_dir(&place).unwrap().next().is_none() {
            tokio::task::yield_now().await;
        }
        tokio::time::sleep(Duration::from_millis(round * 70)).await;
        helper.kill().unwrap();
        helper.wait().unwrap();
        assert_eq!(python(&engine, &record, "print(x + 1)").await, "42\n", "round {round}");
        let beats = "n=$(wc -c < beat); while (( $(wc -c < beat) == n )); do sleep 0.02; done; echo on";
        assert_eq!(bash(&engine, &record, beats).await, "on\n", "round {round}");
        engine.sweep().unwrap();
        let known = engine.all_snapshots(&SnapshotFilter::default()).unwrap();
        let mut there: Vec<String> = std::fs::read_dir(&place)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        there.sort();
        let mut expected: Vec<String> = known.iter().map(|snapshot| snapshot.id.to_string()).collect();
        expected.sort();
        assert_eq!(there, expected, "round {round}");
        for snapshot in known {
            engine.delete_snapshot(&snapshot, None).await.unwrap();
        }
    }
    assert_eq!(engine.record(&record.id).unwrap().unwrap().state, State::Running);
    close_all(state.path(), &engine).await;
}
