//! Sandboxes in standby: frozen and woken, by whoever and in whatever order, with nothing lost and nobody left waiting.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that cannot go on fails here, and one with nothing to try says why"
)]

use std::{
    future::Future,
    path::Path,
    time::{Duration, Instant},
};

use carrel_engine::{
    Engine, Environments, Note, Quota, Record, Settings, State, Tenant, Update, Whereabouts, Wish,
    call::Output, keeper::Keeper,
};
use carrel_proto::{
    files::{Content, FileReply, FileRequest, GuestPath, Read, Write},
    guest::Language,
    id::{Key, SessionName},
    limits::Limits,
    message::{Exec, Run},
    outcome::Outcome,
    problem::{Code, Problem},
};
use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

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
    match tokio::time::timeout(Duration::from_secs(60), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

fn code(text: &str) -> Run {
    Run {
        session: SessionName::main(),
        language: Language::Bash,
        code: text.to_owned(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    }
}

async fn finish(mut call: carrel_engine::call::Call) -> Result<(String, Outcome), Problem> {
    let mut out = Vec::new();
    loop {
        match call.next().await? {
            Output::Bytes { bytes, .. } => out.extend_from_slice(bytes),
            Output::Finished(outcome) => {
                call.end();
                return Ok((String::from_utf8_lossy(&out).into_owned(), outcome));
            }
            _ => {}
        }
    }
}

async fn bash(engine: &Engine, record: &Record, text: &str) -> String {
    in_time(text, async { finish(engine.run(record, code(text)).await?).await }).await.unwrap().0
}

/// A sandbox in standby; `None` where this host has no freezer, with a word on it.
async fn asleep(engine: &Engine, wish: &Wish, setup: &str) -> Option<Record> {
    let record = engine.sandbox(&key(), wish).await.unwrap().record;
    bash(engine, &record, setup).await;
    match engine.standby(&record).await {
        Ok(record) => {
            assert_eq!(record.state, State::Standby);
            Some(record)
        }
        Err(problem) if problem.code == Code::Unsupported => {
            println!("skipped: {}", problem.message);
            engine.close(&record, None).await.unwrap();
            None
        }
        Err(problem) => panic!("{problem:?}"),
    }
}

fn state_of(engine: &Engine, record: &Record) -> State {
    engine.record(&record.id).unwrap().unwrap().state
}

fn sql(state: &Path, statement: &str) {
    rusqlite::Connection::open(state.join("registry.db")).unwrap().execute(statement, []).unwrap();
}

fn pid(record: &Record) -> Pid {
    Pid::from_raw(record.placed.as_ref().unwrap().pid).unwrap()
}

fn leftovers(state: &Path, record: &Record) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut left: Vec<String> =
        mounts.lines().filter(|line| line.contains(record.id.as_str())).map(str::to_owned).collect();
    let trees = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    for tree in trees.map(|entry| entry.path()).chain(["/sys/fs/cgroup".into()]) {
        let group = tree.join("carrel").join(record.id.as_str());
        left.extend(group.exists().then(|| group.display().to_string()));
    }
    for place in ["sandboxes", "locks"] {
        let path = state.join(place).join(record.id.as_str());
        left.extend(path.exists().then(|| path.display().to_string()));
    }
    left
}

#[tokio::test]
async fn any_call_wakes_it_and_finds_it_as_it_was() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "A=5; cd /tmp").await else { return };
    assert!(record.sleep.usage.is_some());
    // Looking does not wake it.
    let usage = engine.usage(&record).await.unwrap();
    assert!(usage.memory > 0 && usage.processes > 0);
    engine.sweep().unwrap();
    assert_eq!(state_of(&engine, &record), State::Standby);
    assert_eq!(engine.standby(&record).await.unwrap().state, State::Standby, "again is no error");

    let found = engine.existing("work", Some(&key())).await.unwrap();
    assert_eq!((found.note, found.record.state), (None, State::Running));
    assert_eq!(bash(&engine, &found.record, "echo $A; pwd").await, "5\n/tmp\n");
    // With a record from before: the call itself wakes it.
    engine.standby(&record).await.unwrap();
    assert_eq!(bash(&engine, &found.record, "echo $A").await, "5\n");
    engine.standby(&record).await.unwrap();
    assert!(!engine.execs(&found.record).await.unwrap().is_empty());
    engine.standby(&record).await.unwrap();
    engine.sessions(&found.record).await.unwrap();
    // Without a freezer for hibernation there is a reason and a hint; standby is as it was.
    if let Err(problem) = engine.can_hibernate() {
        engine.standby(&record).await.unwrap();
        let refused = engine.hibernate(&record).await.unwrap_err();
        assert_eq!((refused.code, refused.hint.is_empty()), (problem.code, false));
        assert_eq!(state_of(&engine, &record), State::Standby);
    }
    engine.close(&record, None).await.unwrap();
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn a_frozen_process_stands_still_and_goes_on_where_it_was() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) =
        asleep(&engine, &wish(), "echo x > beat; (while :; do echo x >> beat; done) & true").await
    else {
        return;
    };
    let beat = || {
        let read = FileRequest::Stat(carrel_proto::files::Stat {
            path: GuestPath::parse(b"beat").unwrap(),
            follow: false,
        });
        match engine.file(&record, read).unwrap() {
            FileReply::Stat(entry) => entry.size,
            other => panic!("{other:?}"),
        }
    };
    let before = beat();
    let spin = Instant::now();
    while spin.elapsed() < Duration::from_millis(100) {
        assert_eq!(beat(), before);
    }
    let found = engine.existing("work", Some(&key())).await.unwrap();
    while beat() == before {
        tokio::task::yield_now().await;
    }
    engine.close(&found.record, None).await.unwrap();
}

#[tokio::test]
async fn fifty_callers_of_two_processes_all_get_their_answer() {
    let state = tempfile::tempdir().unwrap();
    let engines = [engine(state.path()), engine(state.path())];
    let Some(record) = asleep(&engines[0], &wish(), "A=5").await else { return };
    for _ in 0..3 {
        let mut calls = tokio::task::JoinSet::new();
        for number in 0..50 {
            let engine = engines[number % 2].clone();
            calls.spawn(async move {
                let found = engine.sandbox(&key(), &wish()).await.unwrap();
                assert!(!found.created && found.note.is_none());
                bash(&engine, &found.record, "echo $A").await
            });
        }
        while let Some(out) = calls.join_next().await {
            assert_eq!(out.unwrap(), "5\n");
        }
        engines[1].standby(&record).await.unwrap();
    }
    engines[0].close(&record, None).await.unwrap();
}

#[tokio::test]
async fn whoever_arrives_while_it_is_put_to_sleep_is_served() {
    let state = tempfile::tempdir().unwrap();
    let engines = [engine(state.path()), engine(state.path())];
    let Some(record) = asleep(&engines[0], &wish(), "A=5").await else { return };
    let sleeper = {
        let (engine, record) = (engines[1].clone(), record.clone());
        tokio::spawn(async move {
            let mut slept = 0;
            for _ in 0..40 {
                // Refused when callers keep coming, which is as good.
                slept += usize::from(engine.standby(&record).await.is_ok());
            }
            slept
        })
    };
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let engine = engines[0].clone();
        let record = record.clone();
        calls.spawn(async move {
            for _ in 0..50 {
                // As a caller does who knows the sandbox: by an old record, without a lock.
                assert_eq!(bash(&engine, &record, "echo $A").await, "5\n");
            }
        });
    }
    while let Some(done) = calls.join_next().await {
        done.unwrap();
    }
    assert!(in_time("sleeping", sleeper).await.unwrap() > 0);
    engines[0].close(&record, None).await.unwrap();
}

#[tokio::test]
async fn what_a_killed_process_leaves_half_asleep_is_put_right() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "A=5").await else { return };
    let awake = engine.existing("work", Some(&key())).await.unwrap().record;
    // Killed between the row and the freezing, or between the thawing and the row.
    sql(state.path(), "UPDATE sandboxes SET state = 'standby', image = 'image-1'");
    assert_eq!(bash(&engine, &awake, "echo $A").await, "5\n");
    assert_eq!(state_of(&engine, &record), State::Running);
    sql(state.path(), "UPDATE sandboxes SET state = 'standby'");
    engine.sweep().unwrap();
    assert_eq!(state_of(&engine, &record), State::Running);
    // Frozen by somebody who does not write rows: the freezer itself is asked.
    engine.standby(&record).await.unwrap();
    sql(state.path(), "UPDATE sandboxes SET state = 'running'");
    assert_eq!(bash(&engine, &awake, "echo $A").await, "5\n");
    engine.close(&record, None).await.unwrap();
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn one_killed_in_its_sleep_is_revived_over_its_files() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "A=5; echo kept > file").await else { return };
    kill_process(pid(&record), Signal::KILL).unwrap();
    let found = in_time("reviving", engine.sandbox(&key(), &wish())).await.unwrap();
    assert_eq!(found.note, Some(Note::Revived));
    assert_eq!(bash(&engine, &found.record, "echo \"[$A]\" $(cat file)").await, "[] kept\n");
    engine.close(&record, None).await.unwrap();
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn closed_stopped_and_reopened_from_sleep() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "A=5; echo kept > file; (sleep 1000 &)").await else {
        return;
    };
    in_time("stopping", engine.stop(&record)).await.unwrap();
    assert_eq!(state_of(&engine, &record), State::Lost);
    let found = engine.sandbox(&key(), &wish()).await.unwrap();
    assert_eq!(found.note, Some(Note::Reopened));
    assert_eq!(bash(&engine, &found.record, "cat file").await, "kept\n");
    engine.standby(&record).await.unwrap();
    let target = state.path().join("kept");
    in_time("closing", engine.close(&record, Some(&target))).await.unwrap();
    assert_eq!(std::fs::read_to_string(target.join("file")).unwrap(), "kept\n");
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn a_scope_closes_with_its_sleepers_and_they_count_for_a_quota() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let new = carrel_engine::tokens::NewToken {
        name: "test".into(),
        scopes: carrel_engine::tokens::Scopes::all(),
        ..Default::default()
    };
    let tenant = engine.create_token(&new).unwrap().0.tenant();
    let quota = Quota { sandboxes: Some(1), ..Quota::default() };
    let wish = Wish { tenant: tenant.clone(), quota: Some(quota), ..wish() };
    let record = engine.sandbox(&"workflow:run_1:default".parse().unwrap(), &wish).await.unwrap().record;
    if let Err(problem) = engine.standby(&record).await {
        println!("skipped: {}", problem.message);
        return engine.close(&record, None).await.unwrap();
    }
    let other = engine.sandbox(&"workflow:run_2:default".parse().unwrap(), &wish).await.unwrap_err();
    assert_eq!(other.code, Code::Quota);
    // Of others it is as if it were not there, asleep or not.
    let stranger = Tenant::local();
    assert!(engine.existing_of(&stranger, "no such", None).await.is_err());
    let closed = engine.close_scope(&tenant, "workflow", "run_1", None).await.unwrap();
    assert_eq!(closed.closed, std::slice::from_ref(&record.id));
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn a_call_is_frozen_in_its_midst_and_ends_as_it_would_have() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "mkfifo gate").await else { return };
    let mut call = engine.run(&record, code("read -r line < gate; echo \"got $line\"")).await.unwrap();
    assert!(matches!(call.next().await.unwrap(), Output::Started(_)));
    // Its line is too young to tell it from somebody who arrives: waited for, then frozen.
    let asleep = in_time("freezing", engine.standby(&record)).await.unwrap();
    assert_eq!(asleep.state, State::Standby);
    let waiting = tokio::spawn(finish(call));
    // Longer than whoever waits goes without looking whether its agent hangs: it neither ends nor wakes it.
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert_eq!(state_of(&engine, &record), State::Standby);
    let found = engine.existing("work", Some(&key())).await.unwrap();
    let open = Exec {
        session: SessionName::main(),
        argv: ["sh", "-c", "echo on > gate"].map(str::to_owned).into(),
        cwd: None,
        env: Default::default(),
        stdin: false,
        pty: None,
        timeout_ms: None,
        detach: true,
        cancel_on_disconnect: false,
    };
    engine.start(&found.record, open).await.unwrap();
    assert_eq!(in_time("the call", waiting).await.unwrap().unwrap().0, "got on\n");
    engine.close(&record, None).await.unwrap();
}

#[tokio::test]
async fn files_are_reached_without_waking_it() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "echo kept > file").await else { return };
    let path = |name: &str| GuestPath::parse(name.as_bytes()).unwrap();
    let read = FileRequest::Read(Read { path: path("file"), offset: 0, len: None });
    let FileReply::Read(reply) = engine.file(&record, read).unwrap() else { panic!() };
    assert_eq!(reply.data.as_bytes(), b"kept\n");
    let write = Write {
        path: path("new"),
        data: Content(b"from outside".to_vec()),
        append: false,
        overwrite: true,
        mode: None,
        parents: true,
        sync: false,
    };
    engine.file(&record, FileRequest::Write(write)).unwrap();
    assert_eq!(state_of(&engine, &record), State::Standby);
    assert_eq!(bash(&engine, &record, "cat new").await, "from outside");
    engine.close(&record, None).await.unwrap();
}

#[tokio::test]
async fn a_connection_to_a_port_wakes_it() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let server = "import socket, threading\n\
        s = socket.create_server(('127.0.0.1', 8000))\n\
        def serve():\n    while True:\n        c, _ = s.accept(); c.sendall(c.recv(9).upper()); c.close()\n\
        threading.Thread(target=serve, daemon=True).start()";
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    let run = Run { language: Language::Python, ..code(server) };
    finish(engine.run(&record, run).await.unwrap()).await.unwrap();
    if let Err(problem) = engine.standby(&record).await {
        println!("skipped: {}", problem.message);
        return engine.close(&record, None).await.unwrap();
    }
    let mut stream = in_time("dialling", engine.dial(&record, 8000)).await.unwrap();
    stream.write_all(b"hello").await.unwrap();
    let mut answer = String::new();
    in_time("the server", stream.read_to_string(&mut answer)).await.unwrap();
    assert_eq!(answer, "HELLO");
    assert_eq!(state_of(&engine, &record), State::Running);
    engine.close(&record, None).await.unwrap();
}

#[tokio::test]
async fn a_fork_bomb_is_frozen_and_closed() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let wish = Wish { limits: Limits { pids: 60, ..Limits::default() }, ..wish() };
    let bomb = "(b() { b | b & }; b) 2>/dev/null & true";
    let Some(record) = asleep(&engine, &wish, bomb).await else { return };
    in_time("closing", engine.close(&record, None)).await.unwrap();
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn an_idle_end_does_not_come_in_sleep() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let wish = Wish { idle_timeout_s: 2, ..wish() };
    let Some(record) = asleep(&engine, &wish, "A=5").await else { return };
    // Well beyond what its agent would have stayed for.
    tokio::time::sleep(Duration::from_secs(4)).await;
    let found = engine.sandbox(&key(), &wish).await.unwrap();
    assert_eq!((found.created, found.note), (false, None));
    assert_eq!(bash(&engine, &found.record, "echo $A").await, "5\n");
    engine.close(&record, None).await.unwrap();
}

#[tokio::test]
async fn limits_of_a_sleeper_are_changed_and_labels_leave_it_asleep() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let Some(record) = asleep(&engine, &wish(), "A=5").await else { return };
    let labels = carrel_engine::Labels::new([("a".to_owned(), "b".to_owned())].into()).unwrap();
    let update = Update { labels: Some(labels), standby_after_s: Some(7), ..Update::default() };
    let updated = engine.update(&record, update).await.unwrap();
    assert_eq!((updated.state, updated.spec.standby_after_s), (State::Standby, 7));
    let limits = Limits { pids: 77, ..record.spec.limits.clone() };
    let updated =
        in_time("updating", engine.update(&record, Update { limits: Some(limits), ..Update::default() }))
            .await
            .unwrap();
    assert_eq!((updated.state, updated.spec.limits.pids), (State::Running, 77));
    assert_eq!(bash(&engine, &record, "echo $A").await, "5\n");
    engine.close(&record, None).await.unwrap();
}

#[tokio::test]
async fn the_keeper_lets_the_busy_be_and_puts_the_idle_to_sleep() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let drowsy = Wish { standby_after_s: 1, ..wish() };
    let record = engine.sandbox(&key(), &drowsy).await.unwrap().record;
    let never = engine.sandbox(&"user:local:never".parse().unwrap(), &wish()).await.unwrap().record;
    let server = Exec {
        session: SessionName::main(),
        argv: ["sleep", "1000"].map(str::to_owned).into(),
        cwd: None,
        env: Default::default(),
        stdin: false,
        pty: None,
        timeout_ms: None,
        detach: true,
        cancel_on_disconnect: false,
    };
    let exec = engine.start(&record, server).await.unwrap();
    let rounds = async |time: u64| {
        // A new one each time: it would remember when to look again.
        let until = Instant::now() + Duration::from_millis(time);
        while Instant::now() < until {
            Keeper::default().round(&engine).await.unwrap();
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    rounds(2500).await;
    assert_eq!(state_of(&engine, &record), State::Running, "a command runs in it");
    engine.signal(&record, &exec, 9).await.unwrap();
    engine.wait(&record, &exec, Duration::from_secs(10)).await.unwrap();
    rounds(4500).await;
    let expected = match engine.enforced(&Limits::default()).freezer {
        carrel_proto::limits::Enforcement::Nothing(why) => {
            println!("skipped: {why}");
            State::Running
        }
        _ => State::Standby,
    };
    assert_eq!(state_of(&engine, &record), expected);
    assert_eq!(state_of(&engine, &never), State::Running);
    for record in [record, never] {
        engine.close(&record, None).await.unwrap();
    }
}

#[tokio::test]
async fn a_kept_line_finds_a_box_that_others_put_to_sleep_and_its_call_runs_once() {
    let place = tempfile::tempdir().unwrap();
    let (here, elsewhere) = (engine(place.path()), engine(place.path()));
    let Some(record) = asleep(&here, &wish(), "n=0").await else { return };
    let count = "n=$((n + 1)); echo $n";
    assert_eq!(bash(&here, &record, count).await, "1\n");
    in_time("standby", elsewhere.standby(&record)).await.unwrap();
    assert_eq!(bash(&here, &record, count).await, "2\n");
    if elsewhere.can_hibernate().is_ok() {
        let written = in_time("hibernate", elsewhere.hibernate(&record)).await.unwrap();
        assert_eq!(written.state, State::Hibernated);
        assert_eq!(bash(&here, &record, count).await, "3\n");
    }
    here.close(&record, None).await.unwrap();
}
