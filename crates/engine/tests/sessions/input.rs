//! Input, sizes and ends of execs from connections that did not start them.

use carrel_proto::{
    guest::Language,
    message::{Exec, PtySize},
    outcome::{Cause, SessionState::Preserved},
    problem::Code,
};

use crate::world::{World, a_run, an_exec, in_time};

fn reading(argv: &[&str]) -> Exec {
    Exec { stdin: true, ..an_exec(argv) }
}

#[tokio::test]
async fn a_detached_command_is_fed_piece_by_piece() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (engine, record) = (&sandbox.engine, &sandbox.record);
    let id = engine.start(record, reading(&["cat"])).await.unwrap();
    engine.write_stdin(record, &id, b"one\n").await.unwrap();
    engine.write_stdin(record, &id, b"").await.unwrap();
    engine.write_stdin(record, &id, b"\xff\0two\n").await.unwrap();
    engine.close_stdin(record, &id).await.unwrap();
    let ran = sandbox.follow(&id).await.ok();
    assert_eq!(ran.stdout, b"one\n\xff\0two\n");
    let late = engine.write_stdin(record, &id, b"three").await.unwrap_err();
    assert_eq!(late.code, Code::ExecEnded);
    let never = engine.write_stdin(record, &"ex_99".parse().unwrap(), b"x").await.unwrap_err();
    assert_eq!(never.code, Code::ExecNotFound);
}

#[tokio::test]
async fn much_input_waits_for_its_reader_and_none_is_lost() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (engine, record) = (&sandbox.engine, &sandbox.record);
    sandbox.script("mkfifo go").await.ok();
    let script = "read x < go; sha256sum; echo";
    let id = engine.start(record, reading(&["bash", "-c", script])).await.unwrap();
    let sent: Vec<u8> = (0..5_000_000_u32).map(|n| n.to_le_bytes()[(n % 3) as usize]).collect();
    let write = engine.write_stdin(record, &id, &sent);
    let begin = async {
        // More than is ever queued: the write cannot be over before the reader begins.
        sandbox.script("echo > go").await.ok();
    };
    let (written, ()) = in_time("feeding a reader", async { tokio::join!(write, begin) }).await;
    written.unwrap();
    engine.close_stdin(record, &id).await.unwrap();
    let sum = sandbox.follow(&id).await.ok().out();
    let mut own = sandbox.launch(reading(&["sha256sum"])).await;
    for piece in sent.chunks(100_000) {
        own.control().input(piece).await.unwrap();
    }
    own.control().close_input().await.unwrap();
    assert_eq!(sum.trim(), own.end().await.ok().out().trim());
}

#[tokio::test]
async fn a_writer_that_waits_is_told_when_nobody_will_read() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (engine, record) = (&sandbox.engine, &sandbox.record);
    let mut live = sandbox.launch(reading(&["bash", "-c", "echo up; exec tail -f /dev/null"])).await;
    live.until("up").await;
    let id = live.id.clone();
    let sent = vec![b'x'; 8 << 20];
    let mut write = std::pin::pin!(engine.write_stdin(record, &id, &sent));
    // More than is ever queued: it stands still by now, or on a slow machine soon.
    let early = tokio::time::timeout(std::time::Duration::from_millis(500), &mut write).await;
    assert!(early.is_err(), "{early:?}");
    let other = engine.write_stdin(record, &id, b"behind it");
    let kill = async {
        engine.execs(record).await.unwrap();
        engine.signal(record, &id, 9).await.unwrap();
    };
    let (one, other, ()) = in_time("ending", async { tokio::join!(write, other, kill) }).await;
    let one = one.unwrap_err();
    assert_eq!((one.code, other.unwrap_err().code), (Code::ExecEnded, Code::ExecEnded));
    assert!(one.message.contains("bytes were taken"), "{}", one.message);
    live.end().await.died(Cause::Signal, Code::Crashed, Preserved);
}

#[tokio::test]
async fn what_takes_no_input_says_so() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (engine, record) = (&sandbox.engine, &sandbox.record);
    let without = engine.start(record, an_exec(&["tail", "-f", "/dev/null"])).await.unwrap();
    assert_eq!(engine.write_stdin(record, &without, b"x").await.unwrap_err().code, Code::InvalidArgument);
    assert_eq!(engine.resize(record, &without, 1, 1).await.unwrap_err().code, Code::InvalidArgument);
    let mut run = sandbox.begin(a_run(Language::Python, "print('up', flush=True); input()")).await;
    let refused = engine.write_stdin(record, &run.id, b"x").await.unwrap_err();
    assert!(matches!(refused.code, Code::InvalidArgument | Code::ExecEnded), "{refused:?}");
    run.until("up").await;
    run.end().await;
    // Closed by one, closed for all.
    let cat = sandbox.launch(reading(&["bash", "-c", "cat; exec tail -f /dev/null"])).await;
    engine.close_stdin(record, &cat.id).await.unwrap();
    assert_eq!(engine.write_stdin(record, &cat.id, b"x").await.unwrap_err().code, Code::InvalidArgument);
}

#[tokio::test]
async fn several_viewers_of_one_terminal_type_and_resize() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (engine, record) = (&sandbox.engine, &sandbox.record);
    let shell = Exec { pty: Some(PtySize { rows: 24, cols: 80 }), ..an_exec(&["bash", "--norc", "-i"]) };
    let id = engine.start(record, shell).await.unwrap();
    let mut first = sandbox.attach(&id, 0, true).await;
    let mut second = sandbox.attach(&id, 0, true).await;
    assert!(first.control().has_begun());
    first.control().input(b"echo a$((1+1))\r").await.unwrap();
    first.until("a2").await;
    second.until("a2").await;
    second.control().resize(30, 90).await.unwrap();
    second.control().input(b"stty size; echo b$((1+1))\r").await.unwrap();
    first.until("30 90").await;
    engine.resize(record, &id, 31, 91).await.unwrap();
    engine.write_stdin(record, &id, b"stty size; exit 5\r").await.unwrap();
    first.until("31 91").await;
    // One of them leaves; the other sees all of it.
    drop(first);
    let ran = second.end().await.kept(5);
    assert!(ran.screen().contains("a2") && ran.screen().contains("31 91"), "{}", ran.screen());
}

#[tokio::test]
async fn a_viewer_that_vanishes_while_it_waits_is_noticed() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let exec = Exec { cancel_on_disconnect: true, ..reading(&["tail", "-f", "/dev/null"]) };
    let mut live = sandbox.launch(exec).await;
    let id = live.id.clone();
    // Until the agent reads no more of it.
    let piece = vec![b'x'; 256 << 10];
    let stuffed = async {
        loop {
            live.control().input(&piece).await.unwrap();
        }
    };
    let full = tokio::time::timeout(std::time::Duration::from_millis(300), stuffed).await;
    assert!(full.is_err());
    drop(live);
    let outcome =
        sandbox.engine.wait(&sandbox.record, &id, std::time::Duration::from_secs(60)).await.unwrap();
    assert_eq!(outcome.map(|outcome| outcome.cause), Some(Cause::Cancelled));
}
