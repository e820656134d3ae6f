//! Chunks, offsets and counts: nothing is cut without a number.

use std::time::Duration;

use carrel_proto::{
    frame::Stream::{Stderr, Stdout},
    guest::Language,
    limits::{ByteSize, Limits},
    outcome::{Cause, SessionState::Preserved},
    problem::Code,
};

use crate::world::{Ran, Step, World, a_run};

/// Chunks are numbered without a gap and each stream's offsets meet.
fn is_whole(ran: &Ran) {
    // A value is a chunk as well.
    let numbers: Vec<u64> = ran.chunks.iter().map(|chunk| chunk.number).collect();
    assert_eq!(numbers, (0..ran.chunks.len() as u64).collect::<Vec<_>>());
    assert_eq!((ran.omitted(Stdout), ran.omitted(Stderr)), (0, 0));
    let receipt = &ran.outcome.receipt;
    assert_eq!(
        (receipt.stdout_bytes, receipt.stderr_bytes),
        (ran.stdout.len() as u64, ran.stderr.len() as u64)
    );
}

#[tokio::test]
async fn streams_are_in_order_and_counted_and_can_be_read_again() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let code = "import sys\nfor i in range(5000):\n    print(i)\n    if i % 100 == 0: print(i, file=sys.stderr)\n'v'";
    let ran = sandbox.python(code).await.ok();
    is_whole(&ran);
    assert!(
        ran.out().lines().eq((0..5000).map(|i| i.to_string()).collect::<Vec<_>>().iter().map(String::as_str))
    );
    assert_eq!(ran.err().lines().count(), 50);
    assert_eq!(ran.outcome.receipt.output_dropped, 0);
    let again = sandbox.follow(&ran.id).await;
    assert_eq!(
        (again.stdout, again.stderr, again.displays, again.chunks, again.outcome),
        (ran.stdout, ran.stderr, ran.displays, ran.chunks, ran.outcome)
    );
}

#[tokio::test]
async fn a_flood_reaches_its_caller_whole_and_is_kept_with_an_exact_gap() {
    let world = World::new();
    let sandbox = world.limited(Limits { output: ByteSize::mb(1), ..Limits::default() }).await;
    let flood = "yes 0123456789abcde | head -c 25000000";
    let ran = sandbox.bash(&format!("echo begin >&2; {flood}; echo middle >&2; {flood}")).await.ok();
    is_whole(&ran);
    assert_eq!(ran.stdout.len(), 50_000_000);
    let pattern = b"0123456789abcde\n";
    assert!(ran.stdout.iter().enumerate().all(|(at, byte)| *byte == pattern[at % 16]));

    let kept = sandbox.follow(&ran.id).await;
    let (received, omitted) = (kept.stdout.len() as u64, kept.omitted(Stdout));
    assert_eq!(received + omitted, 50_000_000);
    assert_eq!(omitted, kept.outcome.receipt.output_dropped);
    assert!((1 << 19..=1 << 20).contains(&received), "{received} bytes kept of a limit of 1 MB");
    assert_eq!(kept.chunks[0].offset, 0, "the head is there");
    let last = kept.chunks.iter().rfind(|chunk| chunk.stream == Stdout).unwrap();
    assert_eq!(last.offset + last.length, 50_000_000, "and the tail");
    // Every kept byte is the one that stood there.
    let mut at = 0;
    for chunk in kept.chunks.iter().filter(|chunk| chunk.stream == Stdout) {
        let length = usize::try_from(chunk.length).unwrap();
        let from = usize::try_from(chunk.offset).unwrap();
        assert!(kept.stdout[at..at + length] == ran.stdout[from..from + length]);
        at += length;
    }
    assert_eq!(kept.err(), "begin\nmiddle\n", "a flood on one stream leaves the other one alone");
}

#[tokio::test]
async fn printing_for_ever_ends_with_the_time_and_keeps_the_state() {
    let world = World::new();
    let sandbox = world.limited(Limits { output: ByteSize::mb(1), ..Limits::default() }).await;
    for (language, prepare, flood, check) in [
        (Language::Python, "x = 1", "while True: print('spam' * 100)", "print(x)"),
        (Language::Bash, "x=1", "yes", "echo $x"),
        (Language::Bash, "y=1", "while :; do echo spam; done", "echo $x"),
        (Language::Node, "let x = 1", "while (true) console.log('spam'.repeat(100))", "console.log(x)"),
    ] {
        sandbox.run(language, prepare).await.ok();
        let ran = sandbox.hurried(language, flood).await.died(Cause::Timeout, Code::Timeout, Preserved);
        is_whole(&ran);
        assert!(!ran.stdout.is_empty());
        assert_eq!(sandbox.run(language, check).await.ok().out(), "1\n", "after {flood}");
        let kept = sandbox.follow(&ran.id).await;
        assert_eq!(
            kept.stdout.len() as u64 + kept.omitted(Stdout),
            ran.outcome.receipt.stdout_bytes,
            "{flood}"
        );
    }
}

#[tokio::test]
async fn nobody_has_to_listen() {
    let world = World::new();
    let sandbox = world.limited(Limits { output: ByteSize::mb(1), ..Limits::default() }).await;
    // A caller that hears the beginning and hangs up: the code goes on and its end can be read.
    let mut live = sandbox.begin(a_run(Language::Bash, "echo begun; yes | head -c 20000000; echo end")).await;
    live.until("begun").await;
    let id = live.id.clone();
    drop(live);
    let ran = sandbox.follow(&id).await;
    let ran = ran.ok();
    let total = ran.outcome.receipt.stdout_bytes;
    assert_eq!(total, 20_000_000 + "begun\nend\n".len() as u64);
    assert!(ran.out().starts_with("begun\n") && ran.out().ends_with("end\n"));
    assert!(ran.stdout.len() as u64 + ran.omitted(Stdout) == total);
    // A caller that does not read does not stop others: neither their calls nor their view of this one.
    let lazy = sandbox.begin(a_run(Language::Bash, "yes | head -c 20000000")).await;
    sandbox.python("print('others')").await.ok();
    let mut view = sandbox.attach(&lazy.id, 0, true).await;
    assert!(matches!(view.step().await, Step::More));
    is_whole(&lazy.end().await.ok());
    view.end().await.ok();
}

#[tokio::test]
async fn a_caller_that_reads_late_does_not_hold_up_the_next_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    // As much as makes the agent stop reading, and the rest still fits the pipe: the call ends unread.
    let lazy = sandbox.begin(a_run(Language::Python, "print('x' * 3_400_000)")).await;
    let outcome = sandbox.engine.wait(&sandbox.record, &lazy.id, Duration::from_secs(60)).await.unwrap();
    assert_eq!(outcome.unwrap().receipt.stdout_bytes, 3_400_001);
    assert_eq!(sandbox.python("print('y' * 5_000_000)").await.ok().stdout.len(), 5_000_001);
    let late = lazy.end().await.ok();
    is_whole(&late);
    assert_eq!(late.stdout.len(), 3_400_001);
    assert_eq!(sandbox.python("print('z' * 5_000_000)").await.ok().stdout.len(), 5_000_001);
}

#[tokio::test]
async fn what_is_printed_between_calls_comes_with_the_next_one() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox
        .bash("mkfifo /tmp/gate /tmp/said; (read < /tmp/gate; echo between; echo > /tmp/said) &")
        .await
        .ok();
    sandbox.exec(&["sh", "-c", "echo > /tmp/gate; read line < /tmp/said"]).await.ok();
    assert_eq!(sandbox.bash("echo now").await.ok().out(), "between\nnow\n");
}

#[tokio::test]
async fn large_values_and_long_code_pass() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("'x' * 500_000").await.ok();
    assert_eq!(ran.value().unwrap().len(), 500_002);
    let ran = sandbox.python("class P:\n    def _repr_png_(self): return bytes(10 << 20)\nP()").await.ok();
    assert_eq!(ran.displays[0].mime["image/png"].as_str().unwrap().len(), (10_usize << 20).div_ceil(3) * 4);
    let long = format!("x = '{}'\nlen(x)", "y".repeat(4 << 20));
    assert_eq!(sandbox.python(&long).await.ok().value(), Some("4194304"));
    let long = format!("x='{}'; echo ${{#x}}", "y".repeat(4 << 20));
    assert_eq!(sandbox.bash(&long).await.ok().out(), "4194304\n");
    let long = format!("let x = '{}'; x.length", "y".repeat(4 << 20));
    assert_eq!(sandbox.node(&long).await.ok().value(), Some("4194304"));
    let problem = sandbox.refused(a_run(Language::Python, &" ".repeat((8 << 20) + 1))).await;
    assert_eq!(problem.code, Code::TooLarge);
}
