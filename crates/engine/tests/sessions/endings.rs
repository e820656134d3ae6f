//! Time and cancellation: interrupt first, keep the state where it can be kept, and never leave a process.

use carrel_proto::{
    guest::Language::{Bash, Node, Python},
    message::{Exec, Run},
    outcome::{
        Cause,
        SessionState::{Lost, Preserved},
    },
    problem::Code,
};

use crate::world::{SHORT_MS, Sandbox, World, a_run, an_exec};

#[tokio::test]
async fn time_that_is_over_interrupts_and_keeps_the_state() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("x = 1; import time, asyncio, subprocess, threading").await.ok();
    sandbox.bash("x=1; cd /tmp; f() { echo f; }").await.ok();
    sandbox.node("let x = 1").await.ok();
    for (language, code) in [
        (Python, "while True: pass"),
        (Python, "time.sleep(1000)"),
        (Python, "await asyncio.sleep(1000)"),
        (Python, "subprocess.run(['sleep', '1000'])"),
        (Python, "threading.Event().wait()"),
        (Bash, "sleep 1000"),
        (Bash, "while :; do :; done"),
        (Bash, "f2() { local y=2; sleep 1000; }; f2"),
        (Bash, "(sleep 1000; echo not reached) | cat"),
        (Bash, "sleep 1000 & wait"),
        (Bash, "read < <(sleep 1000)"),
        (Node, "while (true) {}"),
        (Node, "await new Promise(() => {})"),
        (Node, "setInterval(() => {}, 1); await new Promise(() => {})"),
        (Node, "require('child_process').spawnSync('sleep', ['1000'])"),
    ] {
        let first = if language == Bash {
            "echo begun; "
        } else if language == Node {
            "console.log('begun'); "
        } else {
            "print('begun')\n"
        };
        let ran = sandbox.hurried(language, &format!("{first}{code}")).await;
        let ran = ran.died(Cause::Timeout, Code::Timeout, Preserved);
        assert_eq!((ran.out().as_str(), ran.outcome.exit_code), ("begun\n", 124), "{code}");
        assert!(ran.outcome.problem.as_ref().unwrap().message.contains("kept"));
        match language {
            Python => assert_eq!(sandbox.python("x").await.ok().value(), Some("1"), "after {code}"),
            Bash => {
                assert_eq!(sandbox.bash("echo $x $PWD; f").await.ok().out(), "1 /tmp\nf\n", "after {code}")
            }
            Node => assert_eq!(sandbox.node("x").await.ok().value(), Some("1"), "after {code}"),
        }
    }
}

#[tokio::test]
async fn cancelling_from_elsewhere_is_the_same_interrupt() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for (language, prepare, code, check) in [
        (Python, "x = 1", "print('in', flush=True)\nwhile True: pass", "print(x)"),
        (Bash, "x=1", "echo in; sleep 1000", "echo $x"),
        (Node, "let x = 1", "console.log('in'); while (true) {}", "console.log(x)"),
    ] {
        sandbox.run(language, prepare).await.ok();
        let mut live = sandbox.begin(a_run(language, code)).await;
        live.until("in").await;
        world.another_engine().cancel(&sandbox.record, &live.id).await.unwrap();
        let ran = live.end().await.died(Cause::Cancelled, Code::Cancelled, Preserved);
        assert_eq!(ran.outcome.exit_code, 130);
        assert_eq!(sandbox.run(language, check).await.ok().out(), "1\n");
    }
    // By the caller's own line, and code that catches the interrupt and ends well is still a cancelled call.
    let caught = "try:\n    print('in', flush=True)\n    while True: pass\nexcept KeyboardInterrupt:\n    x = 'caught'";
    let mut live = sandbox.begin(a_run(Python, caught)).await;
    live.until("in").await;
    live.control().cancel().await.unwrap();
    live.end().await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    assert_eq!(sandbox.python("x").await.ok().value(), Some("'caught'"));
}

/// Python that starts runaways of every kind, each with a shared lock on a file, and then does not listen.
const RUNAWAYS: &str = "
import fcntl, os, signal, subprocess
lock = open('/workspace/lock', 'w')
fcntl.flock(lock, fcntl.LOCK_SH)
os.set_inheritable(lock.fileno(), True)
def start(*argv): subprocess.Popen(argv, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
start('setsid', 'sleep', '4711')
start('nohup', 'sleep', '4712')
subprocess.run(['bash', '-c', '(setsid sleep 4713 &) &'], close_fds=False)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: signal.pause()
    os._exit(0)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print('ready', flush=True)
while True: pass
";

/// Waits until nobody holds the lock, that is until all of them are gone.
async fn all_are_gone(sandbox: &Sandbox) {
    let exec = Exec { timeout_ms: Some(30_000), ..an_exec(&["flock", "/workspace/lock", "echo", "free"]) };
    assert_eq!(sandbox.launch(exec).await.end().await.ok().out(), "free\n");
    let left = sandbox.processes().await;
    assert!(!left.contains("sleep 471"), "{left}");
}

#[tokio::test]
async fn code_that_does_not_listen_is_killed_with_all_it_started() {
    let world = World::new();
    let sandbox = world.without_undo().await;
    sandbox.bash("kept=1").await.ok();
    let ran = sandbox.begin(Run { timeout_ms: SHORT_MS, ..a_run(Python, RUNAWAYS) }).await.end().await;
    let ran = ran.died(Cause::Timeout, Code::Timeout, Lost);
    assert_eq!(ran.out(), "ready\n");
    assert!(ran.outcome.problem.as_ref().unwrap().message.contains("lost"));
    all_are_gone(&sandbox).await;
    assert_eq!(sandbox.python("'lock' in globals()").await.ok().value(), Some("False"));

    let mut live = sandbox.begin(a_run(Python, RUNAWAYS)).await;
    live.until("ready").await;
    let running = sandbox.processes().await;
    assert!(["4711", "4712", "4713"].iter().all(|n| running.contains(n)), "{running}");
    sandbox.cancel(&live.id).await;
    live.end().await.died(Cause::Cancelled, Code::Cancelled, Lost);
    all_are_gone(&sandbox).await;

    // The same as an exec, killed by a signal, by its time, and by cancelling.
    sandbox.python(&format!("open('/workspace/run.py', 'w').write({RUNAWAYS:?})")).await.ok();
    let argv = ["python3", "/workspace/run.py"];
    let mut live = sandbox.launch(an_exec(&argv)).await;
    live.until("ready").await;
    sandbox.engine.signal(&sandbox.record, &live.id, 9).await.unwrap();
    let ran = live.end().await.died(Cause::Signal, Code::Crashed, Preserved);
    assert_eq!(ran.outcome.signal, Some(9));
    all_are_gone(&sandbox).await;
    let exec = Exec { timeout_ms: Some(SHORT_MS), ..an_exec(&argv) };
    sandbox.launch(exec).await.end().await.died(Cause::Timeout, Code::Timeout, Preserved);
    all_are_gone(&sandbox).await;
    let mut live = sandbox.launch(an_exec(&argv)).await;
    live.until("ready").await;
    sandbox.cancel(&live.id).await;
    live.end().await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    all_are_gone(&sandbox).await;
    assert_eq!(sandbox.bash("echo $kept").await.ok().out(), "1\n", "nothing else was touched");
}

#[tokio::test]
async fn a_shell_or_node_that_does_not_listen_is_killed_too() {
    let world = World::new();
    let sandbox = world.without_undo().await;
    let deaf = "trap '' INT; exec 9> /workspace/lock; flock -s 9; (setsid sleep 4714 &); while :; do sleep 4715; done";
    sandbox.hurried(Bash, deaf).await.died(Cause::Timeout, Code::Timeout, Lost);
    all_are_gone(&sandbox).await;
    assert_eq!(sandbox.bash("echo fresh; trap").await.ok().out(), "fresh\n");
    let deaf = "require('child_process').execFileSync('bash', ['-c', `trap '' INT; exec 9> /workspace/lock; flock -s 9; (setsid sleep 4716 &); while :; do sleep 4717; done`])";
    sandbox.hurried(Node, deaf).await.died(Cause::Timeout, Code::Timeout, Lost);
    all_are_gone(&sandbox).await;
    assert_eq!(sandbox.node("1 + 1").await.ok().value(), Some("2"));
}

#[tokio::test]
async fn calls_behind_one_that_is_killed_are_told() {
    let world = World::new();
    let sandbox = world.without_undo().await;
    let deaf = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('in', flush=True)\nwhile True: pass";
    let mut first = sandbox.begin(a_run(Python, deaf)).await;
    first.until("in").await;
    let second = sandbox.begin(a_run(Python, "1")).await;
    sandbox.cancel(&first.id).await;
    first.end().await.died(Cause::Cancelled, Code::Cancelled, Lost);
    second.end().await.died(Cause::Exit, Code::StateLost, Lost);
    assert_eq!(sandbox.python("2").await.ok().value(), Some("2"));
}

#[tokio::test]
async fn an_interrupt_that_comes_at_once_is_not_lost() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for (language, prepare, code, check) in [
        (Python, "x = 1", "while True: pass", "print(x)"),
        (Bash, "x=1", "while :; do :; done", "echo $x"),
        (Node, "let x = 1", "while (true) {}", "console.log(x)"),
    ] {
        sandbox.run(language, prepare).await.ok();
        for _ in 0..3 {
            let live = sandbox.begin(a_run(language, code)).await;
            sandbox.cancel(&live.id).await;
            live.end().await.died(Cause::Cancelled, Code::Cancelled, Preserved);
        }
        assert_eq!(sandbox.run(language, check).await.ok().out(), "1\n");
    }
}

#[tokio::test]
async fn an_interrupt_never_hits_the_next_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    // Cancels race with ends: whatever wins, the session lives and the next call is whole.
    for (language, code, check) in [
        (Python, "x = 1", "print('whole')"),
        (Bash, "x=1", "echo whole"),
        (Node, "var x = 1", "console.log('whole')"),
    ] {
        for _ in 0..30 {
            let live = sandbox.begin(a_run(language, code)).await;
            let id = live.id.clone();
            let (ran, ()) = tokio::join!(live.end(), sandbox.cancel(&id));
            assert_eq!(ran.outcome.session_state, Preserved, "{ran:?}");
            assert_eq!(sandbox.run(language, check).await.ok().out(), "whole\n", "{language:?}");
        }
    }
}
