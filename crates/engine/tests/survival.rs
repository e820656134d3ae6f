//! Boxes die, hosts reboot, processes are killed: what was promised is still there, and nothing else is.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{path::Path, time::Duration};

use carrel_backend::IsolationLevel;
use carrel_engine::{Engine, Environments, Note, Record, Settings, State, Whereabouts, Wish, call::Output};
use carrel_proto::{
    files::{Content, FileReply, FileRequest, GuestPath, Read, Write},
    guest::{EndReason, Language},
    id::{Key, SessionName},
    message::{Exec, OpenSession, Run},
    outcome::{Outcome, SessionState},
    problem::{Code, Problem},
};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

fn engine(state: &Path) -> Engine {
    Engine::open(Settings {
        state: state.to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    })
    .unwrap()
}

fn wish() -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() }
}

fn key() -> Key {
    "user:local:work".parse().unwrap()
}

async fn bash(engine: &Engine, record: &Record, code: &str) -> Result<(String, Outcome), Problem> {
    let run = Run {
        session: SessionName::main(),
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
            Output::Finished(outcome) => return Ok((String::from_utf8_lossy(&out).into_owned(), outcome)),
            _ => {}
        }
    }
}

/// Kills the agent, and with it the box, as a crash of it would; waits until it is gone.
fn kill_box(record: &Record) {
    let pid = Pid::from_raw(record.placed.as_ref().unwrap().pid).unwrap();
    let fd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
    kill_process(pid, Signal::KILL).unwrap();
    wait_for(&fd);
}

fn wait_for(pidfd: &rustix::fd::OwnedFd) {
    let deadline = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
    let mut ready = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut ready, Some(&deadline)).unwrap(), 1, "the process still runs");
}

fn leftovers(state: &Path, record: &Record) -> Vec<String> {
    let mut left = Vec::new();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    left.extend(
        mounts.lines().filter(|line| line.contains(record.id.as_str())).map(|line| format!("mount {line}")),
    );
    // v2 has one tree, v1 one per controller.
    let controllers = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    for tree in controllers.map(|entry| entry.path()).chain(["/sys/fs/cgroup".into()]) {
        let group = tree.join("carrel").join(record.id.as_str());
        if group.exists() {
            left.push(format!("cgroup {}", group.display()));
        }
    }
    for place in ["sandboxes", "locks"] {
        let path = state.join(place).join(record.id.as_str());
        if path.exists() {
            left.push(path.display().to_string());
        }
    }
    left
}

#[tokio::test]
async fn a_killed_box_comes_back_with_its_files_and_says_what_was_lost() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let found = engine.sandbox(&key(), &wish()).await.unwrap();
    assert!(found.created);
    bash(&engine, &found.record, "A=1; echo kept > file").await.unwrap();
    kill_box(&found.record);

    let again = engine.sandbox(&key(), &wish()).await.unwrap();
    assert_eq!(again.note, Some(Note::Revived));
    assert_eq!(again.record.id, found.record.id);
    let (out, outcome) = bash(&engine, &again.record, "echo \"[$A]\" $(cat file)").await.unwrap();
    assert_eq!((out.as_str(), outcome.exit_code), ("[] kept\n", 0));
    engine.close(&again.record, None).await.unwrap();
    assert_eq!(leftovers(state.path(), &again.record), Vec::<String>::new());
}

#[tokio::test]
async fn a_reboot_is_survived_by_the_files() {
    let state = tempfile::tempdir().unwrap();
    let found = {
        let engine = engine(state.path());
        let found = engine.sandbox(&key(), &wish()).await.unwrap();
        bash(&engine, &found.record, "echo kept > file; sync").await.unwrap();
        found
    };
    kill_box(&found.record);
    // What a reboot takes besides processes: mounts, and the meaning of pids.
    let workspace = state.path().join("sandboxes").join(found.record.id.as_str()).join("workspace");
    let _ = rustix::mount::unmount(&workspace, rustix::mount::UnmountFlags::DETACH);
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry
        .execute("UPDATE sandboxes SET boot = 'before', placed = json_set(placed, '$.pid', 1)", [])
        .unwrap();
    drop(registry);

    let engine = engine(state.path());
    engine.sweep().unwrap();
    assert_eq!(engine.list().unwrap()[0].state, State::Lost);
    let again = engine.sandbox(&key(), &wish()).await.unwrap();
    assert_eq!(again.note, Some(Note::Revived));
    assert_eq!(bash(&engine, &again.record, "cat file").await.unwrap().0, "kept\n");
    engine.close(&again.record, None).await.unwrap();
    assert_eq!(leftovers(state.path(), &again.record), Vec::<String>::new());
}

#[tokio::test]
async fn the_agent_ends_an_idle_or_old_sandbox_by_itself_and_the_next_caller_is_told() {
    let cases = [
        (Wish { idle_timeout_s: 1, ..wish() }, EndReason::Idle),
        (Wish { max_lifetime_s: 1, ..wish() }, EndReason::Lifetime),
    ];
    for (short, reason) in cases {
        let state = tempfile::tempdir().unwrap();
        let engine = engine(state.path());
        let found = engine.sandbox(&key(), &short).await.unwrap();
        bash(&engine, &found.record, "echo gone > file").await.unwrap();
        let pid = Pid::from_raw(found.record.placed.as_ref().unwrap().pid).unwrap();
        if let Ok(fd) = pidfd_open(pid, PidfdFlags::empty()) {
            tokio::task::spawn_blocking(move || wait_for(&fd)).await.unwrap();
        }
        let again = engine.sandbox(&key(), &wish()).await.unwrap();
        assert_eq!(again.note, Some(Note::Ended(reason)));
        assert!(again.created);
        assert_eq!(leftovers(state.path(), &found.record), Vec::<String>::new());
        let (out, _) = bash(&engine, &again.record, "ls").await.unwrap();
        assert_eq!(out, "");
        engine.close(&again.record, None).await.unwrap();
    }
}

#[tokio::test]
async fn a_box_that_dies_during_a_call_is_an_error_that_says_so() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let found = engine.sandbox(&key(), &wish()).await.unwrap();
    let run = Run {
        session: SessionName::main(),
        language: Language::Bash,
        code: "echo started; sleep 1000".into(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    };
    let mut call = engine.run(&found.record, run).await.unwrap();
    while !matches!(call.next().await.unwrap(), Output::Bytes { .. }) {}
    kill_box(&found.record);
    let problem = loop {
        match call.next().await {
            Ok(_) => {}
            Err(problem) => break problem,
        }
    };
    assert_eq!(problem.code, carrel_proto::problem::Code::AgentLost);
    assert_eq!(problem.session_state, carrel_proto::outcome::SessionState::Lost);
    engine.close(&found.record, None).await.unwrap();
    assert_eq!(leftovers(state.path(), &found.record), Vec::<String>::new());
}

#[tokio::test]
async fn many_callers_of_one_key_get_one_sandbox() {
    let state = tempfile::tempdir().unwrap();
    let path = state.path().to_path_buf();
    let calls: Vec<_> = (0..8)
        .map(|_| {
            let path = path.clone();
            // An engine each, as separate processes have.
            tokio::spawn(async move { engine(&path).sandbox(&key(), &wish()).await.unwrap() })
        })
        .collect();
    let mut found = Vec::new();
    for call in calls {
        found.push(call.await.unwrap());
    }
    assert_eq!(found.iter().filter(|found| found.created).count(), 1);
    assert!(found.iter().all(|other| other.record.id == found[0].record.id));
    let engine = engine(&path);
    assert_eq!(engine.list().unwrap().len(), 1);
    engine.close(&found[0].record, None).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_whose_maker_died_half_way_is_cleaned_and_made_anew() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let found = engine.sandbox(&key(), &wish()).await.unwrap();
    // As if its maker had been killed right before it could write down what it had made: the box runs, the row does
    // not know it, and nobody holds the lock.
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry.execute("UPDATE sandboxes SET state = 'creating', placed = NULL", []).unwrap();
    drop(registry);
    let again = engine.sandbox(&key(), &wish()).await.unwrap();
    assert_ne!(again.record.id, found.record.id);
    assert!(again.created);
    assert_eq!(leftovers(state.path(), &found.record), Vec::<String>::new());
    let pid = found.record.placed.as_ref().unwrap().pid;
    assert!(!Path::new(&format!("/proc/{pid}/cwd")).exists(), "the first box still runs");

    // And after a crash in the middle of closing.
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry.execute("UPDATE sandboxes SET state = 'closing'", []).unwrap();
    drop(registry);
    engine.sweep().unwrap();
    assert_eq!(engine.list().unwrap().len(), 0);
    assert_eq!(leftovers(state.path(), &again.record), Vec::<String>::new());
}

#[tokio::test]
async fn an_ephemeral_sandbox_does_not_outlive_its_owner() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let record = engine.ephemeral(&wish()).await.unwrap();
    engine.sweep().unwrap();
    assert_eq!(engine.list().unwrap().len(), 1, "its owner lives");
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry.execute("UPDATE sandboxes SET spec = json_set(spec, '$.ephemeral.start_time', 7)", []).unwrap();
    drop(registry);
    engine.sweep().unwrap();
    assert_eq!(engine.list().unwrap().len(), 0);
    assert_eq!(leftovers(state.path(), &record), Vec::<String>::new());
}

#[tokio::test]
async fn files_are_reached_from_outside_and_belong_to_the_box() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    let path = GuestPath::parse("dir/from outside").unwrap();
    let write = Write {
        path: path.clone(),
        data: Content(b"hello".to_vec()),
        append: false,
        overwrite: true,
        mode: None,
        parents: true,
        sync: false,
    };
    engine.file(&record, FileRequest::Write(write)).unwrap();
    let (out, _) =
        bash(&engine, &record, "cat dir/*; stat -c %U dir/*; echo ' inside' >> dir/*; ln -s /etc/passwd out")
            .await
            .unwrap();
    assert_eq!(out, "hellouser\n");
    let FileReply::Read(read) =
        engine.file(&record, FileRequest::Read(Read { path, offset: 0, len: None })).unwrap()
    else {
        panic!("another answer")
    };
    assert_eq!(read.data.0, b"hello inside\n");
    let out = GuestPath::parse("out").unwrap();
    let problem =
        engine.file(&record, FileRequest::Read(Read { path: out, offset: 0, len: None })).unwrap_err();
    assert_eq!(problem.code, carrel_proto::problem::Code::PathOutside);
    engine.close(&record, None).await.unwrap();
}

#[tokio::test]
async fn an_agent_that_answers_nonsense_costs_one_sandbox() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let good = engine.sandbox(&key(), &wish()).await.unwrap().record;
    let bad = engine.sandbox(&"user:local:bad".parse().unwrap(), &wish()).await.unwrap().record;
    // Somebody else answers in its place.
    let socket = state.path().join("sandboxes").join(bad.id.as_str()).join("agent.sock");
    std::fs::remove_file(&socket).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let liar = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.write_all(&[0xff; 4096]);
    });
    let problem = bash(&engine, &bad, "echo hi").await.unwrap_err();
    assert_eq!(problem.code, carrel_proto::problem::Code::AgentLost);
    liar.join().unwrap();
    assert_eq!(bash(&engine, &good, "echo hi").await.unwrap().0, "hi\n");
    tokio::time::timeout(Duration::from_secs(60), engine.close(&bad, None)).await.unwrap().unwrap();
    assert_eq!(leftovers(state.path(), &bad), Vec::<String>::new());
    engine.close(&good, None).await.unwrap();
}

/// Stops the agent as a debugger, a freezer or a bug would. From then on the clock jumps whenever nothing else happens.
fn hang(record: &Record) {
    let pid = Pid::from_raw(record.placed.as_ref().unwrap().pid).unwrap();
    kill_process(pid, Signal::STOP).unwrap();
    tokio::time::pause();
}

fn is_given_up(problem: &Problem) {
    assert_eq!((problem.code, problem.session_state), (Code::AgentLost, SessionState::Lost), "{problem:?}");
}

#[tokio::test]
async fn a_hung_agent_costs_its_own_sandbox_and_nothing_else() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let other = engine.sandbox(&"user:local:other".parse().unwrap(), &wish()).await.unwrap().record;
    bash(&engine, &other, "A=1").await.unwrap();
    let run = |code: &str| Run {
        session: SessionName::main(),
        language: Language::Bash,
        code: code.to_owned(),
        timeout_ms: 30_000,
        cancel_on_disconnect: false,
    };
    let exec = Exec {
        session: SessionName::main(),
        argv: vec!["sleep".into(), "1000".into()],
        cwd: None,
        env: std::collections::BTreeMap::new(),
        timeout_ms: None,
        stdin: false,
        pty: None,
        detach: false,
        cancel_on_disconnect: false,
    };
    for what in ["run", "queued run", "exec", "attach", "hello", "status"] {
        let found = engine.sandbox(&key(), &wish()).await.unwrap();
        bash(&engine, &found.record, &format!("echo {what} > file")).await.unwrap();
        let record = found.record;
        let begun = match what {
            "run" | "queued run" => Some(engine.run(&record, run("echo begun; sleep 1000")).await.unwrap()),
            "exec" | "attach" => Some(engine.exec(&record, exec.clone()).await.unwrap()),
            _ => None,
        };
        let problem = match (what, begun) {
            (_, Some(mut call)) => {
                let Output::Started(id) = call.next().await.unwrap() else { panic!("{what}") };
                let mut waiting = match what {
                    "queued run" => engine.run(&record, run("echo later")).await.unwrap(),
                    "attach" => engine.attach(&record, &id, 0, true).await.unwrap(),
                    _ => call,
                };
                hang(&record);
                loop {
                    if let Err(problem) = waiting.next().await {
                        break problem;
                    }
                }
            }
            (what, None) => {
                hang(&record);
                // Files are on the host and do not wait for anybody.
                let path = GuestPath::parse(b"file").unwrap();
                engine.file(&record, FileRequest::Read(Read { path, offset: 0, len: None })).unwrap();
                match what {
                    "status" => engine.status(&record).await.unwrap_err(),
                    _ => engine.run(&record, run("echo never")).await.unwrap_err(),
                }
            }
        };
        tokio::time::resume();
        is_given_up(&problem);
        let again = engine.sandbox(&key(), &wish()).await.unwrap();
        assert_eq!(again.note, Some(Note::Revived), "{what}");
        let (out, _) = bash(&engine, &again.record, "cat file").await.unwrap();
        assert_eq!(out, format!("{what}\n"));
    }
    let (out, _) = bash(&engine, &other, "echo $A").await.unwrap();
    assert_eq!(out, "1\n", "the neighbour was left alone");
    for key in ["user:local:work", "user:local:other"] {
        let found = engine.existing(key, Some(&key.parse().unwrap())).await.unwrap();
        engine.close(&found.record, None).await.unwrap();
    }
}

#[tokio::test]
async fn a_call_that_takes_its_time_is_waited_for() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    let run = Run {
        session: SessionName::main(),
        language: Language::Bash,
        code: "mkfifo gate; echo at the gate; read < gate; echo done".to_owned(),
        timeout_ms: 3_600_000,
        cancel_on_disconnect: false,
    };
    let mut call = engine.run(&record, run).await.unwrap();
    while !matches!(call.next().await.unwrap(), Output::Bytes { .. }) {}
    // Long after the first looks at the agent: it answers, so the call goes on.
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(60)).await;
    tokio::time::resume();
    let opened = bash_in(&engine, &record, "second", "echo > gate").await;
    let mut text = Vec::new();
    let outcome = loop {
        match call.next().await.unwrap() {
            Output::Bytes { bytes, .. } => text.extend_from_slice(bytes),
            Output::Finished(outcome) => break outcome,
            _ => {}
        }
    };
    assert_eq!((opened, outcome.exit_code, text.as_slice()), (0, 0, &b"done\n"[..]));
    engine.close(&record, None).await.unwrap();
}

/// Runs in a session of its own; says its exit code.
async fn bash_in(engine: &Engine, record: &Record, name: &str, code: &str) -> i32 {
    let name: SessionName = name.parse().unwrap();
    let open = OpenSession { name: name.clone(), ..OpenSession::default() };
    engine.session(record, open).await.unwrap();
    let run = Run {
        session: name,
        language: Language::Bash,
        code: code.to_owned(),
        timeout_ms: 30_000,
        cancel_on_disconnect: false,
    };
    let mut call = engine.run(record, run).await.unwrap();
    loop {
        if let Output::Finished(outcome) = call.next().await.unwrap() {
            return outcome.exit_code;
        }
    }
}

#[tokio::test]
async fn weak_isolation_leaves_nothing_when_its_agent_is_killed() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let wish = Wish { isolation: IsolationLevel::Weak, ..wish() };
    let record = engine.sandbox(&key(), &wish).await.unwrap().record;
    let (out, _) = bash(
        &engine,
        &record,
        "setsid sleep 4811 > /dev/null & echo $!; (setsid sleep 4812 > /dev/null & echo $!) | cat",
    )
    .await
    .unwrap();
    let started: Vec<_> = out
        .split_whitespace()
        .map(|pid| pidfd_open(Pid::from_raw(pid.parse().unwrap()).unwrap(), PidfdFlags::empty()).unwrap())
        .collect();
    assert_eq!(started.len(), 2, "{out}");
    kill_box(&record);
    started.iter().for_each(wait_for);
    let again = engine.sandbox(&key(), &wish).await.unwrap();
    assert_eq!(again.note, Some(Note::Revived));
    engine.close(&again.record, None).await.unwrap();
}
