//! Several sessions in one sandbox: one desk, separate readers.

use carrel_proto::{
    guest::Language::{Bash, Python},
    message::{Exec, OpenSession, Run},
    outcome::{
        Cause,
        SessionState::{Lost, Preserved},
    },
    problem::Code,
};

use crate::world::{World, a_run, an_exec, named};

#[tokio::test]
async fn sessions_share_files_and_ports_and_nothing_else() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.open("a", None, &[("WHO", "a")]).await;
    sandbox.open("b", Some("/tmp"), &[("WHO", "b")]).await;
    let who = "import os; (os.environ['WHO'], os.getcwd())";
    assert_eq!(sandbox.run_in("a", Python, who).await.ok().value(), Some("('a', '/workspace')"));
    assert_eq!(sandbox.run_in("b", Python, who).await.ok().value(), Some("('b', '/tmp')"));
    // Interpreters of their own.
    sandbox.run_in("a", Python, "x = 'of a'; os.chdir('/'); os.environ['WHO'] = 'changed'").await.ok();
    assert_eq!(
        sandbox
            .run_in("b", Python, "'x' in globals(), *eval(repr((os.environ['WHO'], os.getcwd())))")
            .await
            .ok()
            .value(),
        Some("(False, 'b', '/tmp')")
    );
    assert_eq!(sandbox.run_in("b", Bash, "echo $WHO $PWD").await.ok().out(), "b /tmp\n");
    let exec = Exec { session: named("b"), ..an_exec(&["sh", "-c", "echo $WHO; pwd"]) };
    assert_eq!(sandbox.launch(exec).await.end().await.ok().out(), "b\n/tmp\n");
    // Files and ports of all.
    sandbox.run_in("a", Bash, "echo shared > /workspace/f; echo too > /tmp/g").await.ok();
    assert_eq!(sandbox.run_in("b", Bash, "cat /workspace/f /tmp/g").await.ok().out(), "shared\ntoo\n");
    let serve = "
import socket, threading
server = socket.create_server(('127.0.0.1', 0))
def answer():
    line, _ = server.accept()
    line.sendall(b'hello ' + line.recv(100)); line.close()
threading.Thread(target=answer).start()
server.getsockname()[1]";
    let ran = sandbox.run_in("a", Python, serve).await.ok();
    let port = ran.value().unwrap();
    let ask = format!(
        "import socket; s = socket.create_connection(('localhost', {port})); s.sendall(b'b'); s.recv(100)"
    );
    assert_eq!(sandbox.run_in("b", Python, &ask).await.ok().value(), Some("b'hello b'"));
}

#[tokio::test]
async fn sessions_neither_see_nor_touch_each_others_processes() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for name in ["a", "b"] {
        sandbox.open(name, None, &[]).await;
    }
    sandbox.run_in("a", Bash, "exec -a secret-of-a sleep 1000 & disown; kept=1; echo $! $$").await.ok();
    sandbox.run_in("b", Bash, "kept=2; sleep 2000 &").await.ok();
    let seen =
        sandbox.run_in("b", Bash, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ps -e -o args=").await.ok().out();
    assert!(seen.contains("sleep 2000") && !seen.contains("secret"), "{seen}");
    // Whatever numbers it tries, and all at once.
    let strike = "
import os
mine = {os.getpid(), os.getppid()}
for pid in range(2, 400):
    if pid not in mine:
        try: os.kill(pid, 9)
        except OSError: pass
os.kill(-1, 9)";
    let exec = Exec { session: named("b"), ..an_exec(&["python3", "-c", strike]) };
    sandbox.launch(exec).await.end().await;
    assert_eq!(sandbox.run_in("a", Bash, "echo $kept; jobs -p | wc -l").await.ok().out(), "1\n0\n");
    let seen = sandbox.run_in("a", Bash, "ps -e -o args=").await.ok().out();
    assert!(seen.contains("secret-of-a"), "{seen}");
    // The stricken session says what it lost and goes on.
    let ran = sandbox.run_in("b", Bash, "echo ${kept-fresh}").await;
    assert_eq!((ran.outcome.problem.unwrap().code, ran.outcome.session_state), (Code::StateLost, Lost));
    assert_eq!(sandbox.run_in("b", Bash, "echo ${kept-fresh}").await.ok().out(), "fresh\n");
    // Pid 1 of a session is not to be ended from inside, the agent not even to be seen.
    let ran = sandbox
        .run_in("b", Bash, "kill -9 1; ls /run/carrel-spool; cat /proc/1/environ; ls /proc/1/fd")
        .await;
    assert_eq!((ran.out().as_str(), ran.outcome.session_state), ("", Preserved));
    sandbox.run_in("b", Bash, "/bin/true").await.ok();
}

#[tokio::test]
async fn closing_one_session_leaves_the_other() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for name in ["a", "b"] {
        sandbox.open(name, None, &[]).await;
        sandbox.run_in(name, Python, &format!("x = 'of {name}'")).await.ok();
    }
    let hold = "exec 9> /workspace/lock; flock -s 9; setsid sleep 1000 & echo holding";
    sandbox.run_in("a", Bash, hold).await.ok();
    let mut running = sandbox
        .begin(Run { session: named("a"), ..a_run(Python, "print('in', flush=True)\nwhile True: pass") })
        .await;
    running.until("in").await;
    let waiting = sandbox.begin(Run { session: named("a"), ..a_run(Python, "1") }).await;
    let mut command =
        sandbox.launch(Exec { session: named("a"), ..an_exec(&["sh", "-c", "echo in; sleep 1000"]) }).await;
    command.until("in").await;
    let command_id = command.id.clone();
    sandbox.engine.close_session(&sandbox.record, &named("a")).await.unwrap();
    for live in [running, waiting, command] {
        let ran = live.end().await;
        let state = if ran.id == command_id { Preserved } else { Lost };
        ran.died(Cause::Cancelled, Code::Cancelled, state);
    }
    let exec = Exec {
        session: named("b"),
        timeout_ms: Some(30_000),
        ..an_exec(&["flock", "/workspace/lock", "true"])
    };
    sandbox.launch(exec).await.end().await.ok();
    assert_eq!(sandbox.run_in("b", Python, "x").await.ok().value(), Some("'of b'"));
    let problem = sandbox.refused(Run { session: named("a"), ..a_run(Python, "x") }).await;
    assert_eq!(problem.code, Code::SessionNotFound);
    let problem = sandbox.engine.close_session(&sandbox.record, &named("a")).await.unwrap_err();
    assert_eq!(problem.code, Code::SessionNotFound);
    // The same name again is a new session, however quickly.
    for _ in 0..10 {
        sandbox.open("a", None, &[]).await;
        assert_eq!(sandbox.run_in("a", Python, "'x' in globals()").await.ok().value(), Some("False"));
        sandbox.run_in("a", Python, "x = 1").await.ok();
        sandbox.engine.close_session(&sandbox.record, &named("a")).await.unwrap();
    }
    let again = OpenSession { name: named("b"), ..OpenSession::default() };
    assert!(!sandbox.engine.session(&sandbox.record, again).await.unwrap(), "it was open");
}

#[tokio::test]
async fn a_session_that_cannot_be_is_refused() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let problem = sandbox.refused(Run { session: named("never"), ..a_run(Python, "1") }).await;
    assert_eq!(problem.code, Code::SessionNotFound);
    let nowhere =
        OpenSession { name: named("lost"), cwd: Some("/no/such/place".into()), ..OpenSession::default() };
    let problem = sandbox.engine.session(&sandbox.record, nowhere).await.unwrap_err();
    assert_eq!(problem.code, Code::InvalidArgument);
    for n in 1.. {
        let open = OpenSession { name: named(&format!("s{n}")), ..OpenSession::default() };
        if let Err(problem) = sandbox.engine.session(&sandbox.record, open).await {
            assert_eq!(problem.code, Code::TooMany);
            break;
        }
        assert!(n < 100, "no bound on sessions");
    }
    assert_eq!(sandbox.python("1").await.ok().value(), Some("1"), "the default one has its place");
}
