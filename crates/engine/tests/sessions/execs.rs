//! Commands: what they are given, what they print, and who can read it when.

use std::{collections::BTreeMap, time::Duration};

use carrel_engine::call::Output;
use carrel_proto::{
    frame::Stream,
    message::Exec,
    outcome::{Cause, SessionState::Preserved},
    problem::Code,
};

use crate::world::{Live, SHORT_MS, Step, World, an_exec, in_time};

#[tokio::test]
async fn a_command_gets_its_arguments_directory_and_variables() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.exec(&["printf", "<%s>", "a b", "", "*", "$HOME", "ü\n"]).await.ok();
    assert_eq!(ran.out(), "<a b><><*><$HOME><ü\n>");
    assert_eq!(sandbox.exec(&["pwd"]).await.ok().out(), "/workspace\n");
    sandbox.exec(&["mkdir", "-p", "sub/dir"]).await.ok();
    for (cwd, expected) in [("/tmp", "/tmp\n"), ("sub/dir", "/workspace/sub/dir\n")] {
        let ran = sandbox.launch(Exec { cwd: Some(cwd.into()), ..an_exec(&["pwd"]) }).await.end().await;
        assert_eq!(ran.ok().out(), expected);
    }
    let env = BTreeMap::from([("A".to_owned(), "1 2".to_owned()), ("HOME".to_owned(), "/tmp".to_owned())]);
    let ran =
        sandbox.launch(Exec { env, ..an_exec(&["sh", "-c", "echo $A $HOME; echo err >&2; exit 3"]) }).await;
    let ran = ran.end().await.kept(3);
    assert_eq!((ran.out().as_str(), ran.err().as_str()), ("1 2 /tmp\n", "err\n"));
    assert_eq!(sandbox.script("echo ${A-unset} $HOME; cat").await.ok().out(), "unset /home/user\n");
    let host = std::env::vars()
        .map(|(name, _)| name)
        .find(|name| name.starts_with("CARGO") || name == "CARREL_TEST_SECRET")
        .unwrap();
    assert!(
        !sandbox.exec(&["env"]).await.ok().out().contains(&host),
        "the caller's own environment is in the box"
    );
    // Only 0, 1 and 2 are open.
    assert_eq!(
        sandbox.script("echo /proc/$$/fd/*").await.ok().out().split_whitespace().count(),
        4,
        "and bash's own 255"
    );
}

#[tokio::test]
async fn a_command_that_cannot_start_says_why() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox
        .script("echo text > /workspace/plain; echo text > /workspace/bad; chmod +x /workspace/bad")
        .await
        .ok();
    for (exec, code) in [
        (an_exec(&["no-such-command"]), Code::CommandNotFound),
        (an_exec(&["/no/such/file"]), Code::CommandNotFound),
        (Exec { cwd: Some("/no/such/dir".into()), ..an_exec(&["true"]) }, Code::CommandNotFound),
        (an_exec(&["/workspace/plain"]), Code::InvalidArgument),
        (an_exec(&["/workspace"]), Code::InvalidArgument),
    ] {
        let name = exec.argv[0].clone();
        let ran = sandbox.launch(exec).await.end().await.died(Cause::Exit, code, Preserved);
        assert!(ran.outcome.problem.unwrap().message.contains(&name));
    }
    for bad in [an_exec(&[]), an_exec(&[""]), an_exec(&["a\0b"])] {
        let mut call = sandbox.engine.exec(&sandbox.record, bad).await.unwrap();
        assert_eq!(call.next().await.unwrap_err().code, Code::InvalidArgument);
    }
    sandbox.exec(&["true"]).await.ok();
}

/// Bytes that no text has and no two places share.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..length.div_ceil(8)).flat_map(|_| next()).take(length).collect()
}

#[tokio::test]
async fn input_goes_through_unchanged_at_any_size() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let sent = noise(5_000_000);
    let mut live = sandbox.launch(Exec { stdin: true, ..an_exec(&["cat"]) }).await;
    let mut received = Vec::new();
    let (mut reader, control) = live.call().split();
    let writing = async {
        for piece in sent.chunks(100_000) {
            control.input(piece).await.unwrap();
        }
        control.close_input().await.unwrap();
    };
    let reading = async {
        loop {
            match reader.next().await.unwrap() {
                Output::Bytes { bytes, .. } => received.extend_from_slice(bytes),
                Output::Finished(outcome) => break outcome,
                other => panic!("{other:?}"),
            }
        }
    };
    let ((), outcome) = in_time("5 MB through cat", async { tokio::join!(writing, reading) }).await;
    assert_eq!((outcome.exit_code, outcome.receipt.stdout_bytes), (0, 5_000_000));
    assert!(received == sent);
    // A command that stops reading does not stop its caller.
    let mut live = sandbox.launch(Exec { stdin: true, ..an_exec(&["head", "-c", "3"]) }).await;
    for piece in sent.chunks(100_000) {
        in_time("input that nobody reads", live.control().input(piece)).await.unwrap();
    }
    assert_eq!(live.end().await.ok().stdout, &sent[..3]);
    // Without input asked for there is none, and its end is at once.
    assert_eq!(sandbox.exec(&["wc", "-c"]).await.ok().out(), "0\n");
}

#[tokio::test]
async fn a_hundred_megabytes_reach_the_caller_exactly() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let total: u64 = 100 << 20;
    let script = format!("yes 0123456789abcde | head -c {total}");
    let exec = an_exec(&["sh", "-c", &script]);
    let mut call = sandbox.engine.exec(&sandbox.record, exec).await.unwrap();
    // Counted as it comes: what a caller must hold is one chunk.
    let (mut at, mut number) = (0, 0);
    let pattern: Vec<u8> = b"0123456789abcde\n".repeat((1 << 20) / 16);
    let outcome = loop {
        match in_time("more bytes", call.next()).await.unwrap() {
            Output::Bytes { stream, chunk, offset, bytes } => {
                assert_eq!((stream, chunk, offset), (Stream::Stdout, number, at));
                let phase = usize::try_from(at % 16).unwrap();
                assert!(bytes == &pattern[phase..phase + bytes.len()], "garbled at {at}");
                at += bytes.len() as u64;
                number += 1;
            }
            Output::Finished(outcome) => break outcome,
            _ => {}
        }
    };
    assert_eq!((at, outcome.receipt.stdout_bytes, outcome.exit_code), (total, total, 0));
}

/// An echo whose every line is a chunk: the next one is sent when the last one has come back.
async fn say(live: &mut Live, words: &[&str]) {
    for word in words {
        live.control().input(format!("{word}\n").as_bytes()).await.unwrap();
        live.until(&format!("{word}\n")).await;
    }
}

#[tokio::test]
async fn output_can_be_read_from_any_chunk_on_by_anybody() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut live = sandbox.launch(Exec { stdin: true, ..an_exec(&["cat"]) }).await;
    say(&mut live, &["zero", "one", "two"]).await;
    assert_eq!(
        live.chunks.iter().map(|chunk| (chunk.number, chunk.offset)).collect::<Vec<_>>(),
        [(0, 0), (1, 5), (2, 9)]
    );
    // What there is now, and where to go on.
    let mut view = sandbox.attach(&live.id, 1, false).await;
    let next = loop {
        match view.step().await {
            Step::More => {}
            Step::Paused(next) => break next,
            Step::Finished(outcome) => panic!("{outcome:?}"),
        }
    };
    assert_eq!((next, view.stdout.as_slice(), view.chunks[0].number), (3, &b"one\ntwo\n"[..], 1));
    let waited = sandbox.engine.wait(&sandbox.record, &live.id, Duration::ZERO).await.unwrap();
    assert_eq!(waited, None, "it still runs");
    // Two that follow, and one that comes late, see the same.
    let (one, two) = (sandbox.attach(&live.id, 0, true).await, sandbox.attach(&live.id, 0, true).await);
    let id = live.id.clone();
    let waiting = sandbox.engine.wait(&sandbox.record, &id, Duration::from_secs(60));
    let ending = async {
        say(&mut live, &["three"]).await;
        live.control().close_input().await.unwrap();
        live.end().await.ok()
    };
    let (one, two, outcome, ran) = tokio::join!(one.end(), two.end(), waiting, ending);
    let late = sandbox.follow(&ran.id).await;
    for view in [&one, &two, &late] {
        assert_eq!((view.out(), &view.chunks), ("zero\none\ntwo\nthree\n".to_owned(), &ran.chunks));
    }
    assert_eq!(outcome.unwrap().unwrap(), ran.outcome);
    let tail = sandbox.attach(&ran.id, 3, true).await.end().await;
    assert_eq!(tail.out(), "three\n");
    assert_eq!(sandbox.attach(&ran.id, 99, true).await.end().await.out(), "");
}

#[tokio::test]
async fn a_detached_command_goes_on_and_is_found_from_elsewhere() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.exec(&["mkfifo", "gate"]).await.ok();
    let exec = an_exec(&["sh", "-c", "echo begun; read word < gate; echo $word; exit 5"]);
    let id = sandbox.engine.start(&sandbox.record, exec).await.unwrap();
    let other = world.another_engine();
    let found = other.existing(sandbox.record.id.as_str(), None).await.unwrap();
    let list = other.execs(&found.record).await.unwrap();
    assert!(list.iter().any(|info| info.exec == id && info.running));
    let mut view = Live::attached(other.attach(&found.record, &id, 0, true).await.unwrap(), id.clone());
    view.until("begun").await;
    sandbox.script("echo go > gate").await.ok();
    let ran = view.end().await.kept(5);
    assert_eq!(ran.out(), "begun\ngo\n");
    let outcome = other.wait(&found.record, &id, Duration::from_secs(60)).await.unwrap();
    assert_eq!(outcome.as_ref(), Some(&ran.outcome));
    for problem in [
        other.signal(&found.record, &id, 15).await.unwrap_err(),
        other.signal(&found.record, &ran.id, 9).await.unwrap_err(),
    ] {
        assert_eq!(problem.code, Code::ExecEnded);
    }
    let nobody = "ex_77".parse().unwrap();
    let mut call = other.attach(&found.record, &nobody, 0, true).await.unwrap();
    assert_eq!(call.next().await.unwrap_err().code, Code::ExecNotFound);
}

#[tokio::test]
async fn signals_and_time_end_a_command_and_only_it() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let script = "trap 'echo got TERM; exit 7' TERM; trap 'echo got USR1' USR1; echo ready; while :; do sleep 1000 & wait $!; done";
    let mut live = sandbox.launch(an_exec(&["bash", "-c", script])).await;
    live.until("ready").await;
    let signal = |number| sandbox.engine.signal(&sandbox.record, &live.id, number);
    for number in [0, 64, -1] {
        assert_eq!(signal(number).await.unwrap_err().code, Code::InvalidArgument);
    }
    signal(10).await.unwrap();
    live.until("got USR1").await;
    sandbox.engine.signal(&sandbox.record, &live.id, 15).await.unwrap();
    let ran = live.end().await.kept(7);
    assert!(ran.out().ends_with("got TERM\n"));

    let mut live = sandbox.launch(an_exec(&["sh", "-c", "echo ready; exec sleep 1000"])).await;
    live.until("ready").await;
    sandbox.engine.signal(&sandbox.record, &live.id, 15).await.unwrap();
    let ran = live.end().await.died(Cause::Signal, Code::Crashed, Preserved);
    assert_eq!((ran.outcome.signal, ran.outcome.exit_code), (Some(15), 143));

    let exec = Exec { timeout_ms: Some(SHORT_MS), ..an_exec(&["sh", "-c", "echo begun; sleep 1000"]) };
    let ran = sandbox.launch(exec).await.end().await.died(Cause::Timeout, Code::Timeout, Preserved);
    assert_eq!((ran.out().as_str(), ran.outcome.exit_code), ("begun\n", 124));
    // One whose caller goes away, told to go with it.
    let exec = Exec { cancel_on_disconnect: true, ..an_exec(&["sh", "-c", "echo begun; sleep 1000"]) };
    let mut live = sandbox.launch(exec).await;
    live.until("begun").await;
    let id = live.id.clone();
    drop(live);
    sandbox.follow(&id).await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    // What a command leaves in the background is counted, and does not keep it from ending.
    let ran = sandbox.script("sleep 1000 & echo started").await.ok();
    assert_eq!((ran.out().as_str(), ran.outcome.receipt.processes), ("started\n", 1));
}
