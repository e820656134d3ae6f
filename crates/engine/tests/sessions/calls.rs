//! Order, parallelism and company: what calls of one sandbox do to each other.

use carrel_proto::{
    guest::Language::{self, Bash, Node, Python},
    message::{Run, What},
    outcome::{
        Cause,
        SessionState::{Lost, Preserved},
    },
    problem::Code,
};
use tokio::task::JoinSet;

use crate::world::{World, a_run};

#[tokio::test]
async fn calls_of_one_interpreter_run_in_the_order_of_their_arrival() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for (language, prepare, append, show) in [
        (Python, "seen = []", "seen.append(N)", "print(*seen, sep=',')"),
        (Bash, "seen=", "seen=$seen,N", "echo ${seen#,}"),
        (Node, "let seen = []", "await null; seen.push(N)", "console.log(seen.join())"),
    ] {
        sandbox.run(language, prepare).await.ok();
        let mut all = JoinSet::new();
        for n in 0..10 {
            let (sandbox, code) = (sandbox.clone(), append.replace('N', &n.to_string()));
            all.spawn(async move {
                let live = sandbox.begin(a_run(language, &code)).await;
                (live.end().await.ok().id.as_str()["ex_".len()..].parse::<u64>().unwrap(), n)
            });
        }
        let mut arrived = all.join_all().await;
        arrived.sort_unstable();
        let expected: Vec<String> = arrived.iter().map(|(_, n)| n.to_string()).collect();
        assert_eq!(sandbox.run(language, show).await.ok().out().trim(), expected.join(","), "{language:?}");
    }
}

/// Code that cannot end before the other side has begun: opening a fifo waits for its other end.
fn meet(language: Language, path: &str, writes: bool) -> String {
    match (language, writes) {
        (Python, true) => format!("open('{path}', 'w').write('met')"),
        (Python, false) => format!("print(open('{path}').read())"),
        (Bash, true) => format!("echo met > {path}"),
        (Bash, false) => format!("cat {path}"),
        (Node, true) => format!("require('fs').writeFileSync('{path}', 'met')"),
        (Node, false) => format!("console.log(require('fs').readFileSync('{path}', 'utf8'))"),
    }
}

#[tokio::test]
async fn interpreters_and_sessions_run_side_by_side() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.open("other", None, &[]).await;
    sandbox.bash("mkfifo /workspace/gate").await.ok();
    let pairs = [
        (("default", Python), ("default", Bash)),
        (("default", Node), ("default", Python)),
        (("default", Bash), ("other", Bash)),
        (("other", Python), ("default", Python)),
    ];
    for ((one, speaks), (two, hears)) in pairs {
        let (speak, hear) = (meet(speaks, "/workspace/gate", true), meet(hears, "/workspace/gate", false));
        let (said, heard) =
            tokio::join!(sandbox.run_in(one, speaks, &speak), sandbox.run_in(two, hears, &hear));
        said.ok();
        assert_eq!(heard.ok().out().trim(), "met");
    }
    // An exec runs beside a call of the same session, too.
    let mut live =
        sandbox.begin(a_run(Python, "print('in', flush=True)\nopen('/workspace/gate').read()")).await;
    live.until("in").await;
    sandbox.exec(&["sh", "-c", "echo from an exec > /workspace/gate"]).await.ok();
    assert_eq!(live.end().await.ok().value(), Some("'from an exec\\n'"));
}

#[tokio::test]
async fn a_waiting_call_can_be_cancelled_alone() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("mkfifo /workspace/gate").await.ok();
    let mut first = sandbox
        .begin(a_run(Python, "print('in', flush=True); ran = ['first']; open('/workspace/gate').read()"))
        .await;
    first.until("in").await;
    let second = sandbox.begin(a_run(Python, "ran.append('second')")).await;
    let third = sandbox.begin(a_run(Python, "ran.append('third'); ran")).await;
    sandbox.cancel(&second.id).await;
    let ran = second.end().await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    assert_eq!(ran.outcome.exit_code, 130);
    sandbox.bash("echo go > /workspace/gate").await.ok();
    first.end().await.ok();
    assert_eq!(third.end().await.ok().value(), Some("['first', 'third']"));
    // Cancelling what is over is no error and changes nothing.
    sandbox.cancel(&ran.id).await;
    let nobody = "ex_9999".parse().unwrap();
    let problem = sandbox.engine.cancel(&sandbox.record, &nobody).await.unwrap_err();
    assert_eq!(problem.code, Code::ExecNotFound);
}

#[tokio::test]
async fn calls_that_wait_for_an_interpreter_that_dies_are_told() {
    let world = World::new();
    let sandbox = world.without_undo().await;
    sandbox.bash("mkfifo /workspace/gate").await.ok();
    let die = "print('in', flush=True); import os; open('/workspace/gate').read(); os._exit(1)";
    let mut first = sandbox.begin(a_run(Python, die)).await;
    first.until("in").await;
    let second = sandbox.begin(a_run(Python, "open('/workspace/ran', 'w')")).await;
    let third = sandbox.begin(a_run(Python, "open('/workspace/ran', 'w')")).await;
    sandbox.bash("kept=1; echo go > /workspace/gate").await.ok();
    first.end().await.died(Cause::Exit, Code::Crashed, Lost);
    for waiting in [second, third] {
        waiting.end().await.died(Cause::Exit, Code::StateLost, Lost);
    }
    let ran = sandbox.python("import os; os.path.exists('/workspace/ran')").await.ok();
    assert_eq!(ran.value(), Some("False"), "nothing of them ran");
    assert_eq!(sandbox.bash("echo $kept").await.ok().out(), "1\n", "other interpreters keep their state");
}

#[tokio::test]
async fn a_caller_that_hangs_up_leaves_its_call_running_unless_it_asked() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("mkfifo /workspace/gate").await.ok();
    let code = "print('in', flush=True); word = open('/workspace/gate').read(); print('out'); word";
    let mut live = sandbox.begin(a_run(Python, code)).await;
    live.until("in").await;
    let id = live.id.clone();
    drop(live);
    sandbox.bash("echo go > /workspace/gate").await.ok();
    let ran = sandbox.follow(&id).await.ok();
    assert_eq!((ran.out().as_str(), ran.value()), ("in\nout\n", Some("'go\\n'")));

    let mut live = sandbox.begin(Run { cancel_on_disconnect: true, ..a_run(Python, code) }).await;
    live.until("in").await;
    let id = live.id.clone();
    drop(live);
    let ran = sandbox.follow(&id).await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    assert_eq!(ran.out(), "in\n");
    assert_eq!(sandbox.python("word").await.ok().value(), Some("'go\\n'"), "the state of before");
    // One that still waits goes with its caller as well.
    let mut first = sandbox.begin(a_run(Python, code)).await;
    first.until("in").await;
    let waiting = sandbox.begin(Run { cancel_on_disconnect: true, ..a_run(Python, "word = 'never'") }).await;
    let id = waiting.id.clone();
    drop(waiting);
    sandbox.follow(&id).await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    sandbox.bash("echo again > /workspace/gate").await.ok();
    first.end().await.ok();
    assert_eq!(sandbox.python("word").await.ok().value(), Some("'again\\n'"));
}

#[tokio::test]
async fn a_receipt_says_what_a_call_used_and_the_list_what_there_was() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("x = b'x' * (100 << 20)\nfor _ in range(3_000_000): pass").await.ok();
    let receipt = &ran.outcome.receipt;
    assert!(receipt.peak_memory > 100 << 20, "{receipt:?}");
    assert!(receipt.cpu_us > 0 && receipt.duration_us > 0, "{receipt:?}");
    let ran = sandbox.bash("sleep 1000 & sleep 1001 & :").await.ok();
    assert_eq!(ran.outcome.receipt.processes, 2, "{:?}", ran.outcome.receipt);
    sandbox.exec(&["true"]).await.ok();
    let list = sandbox.engine.execs(&sandbox.record).await.unwrap();
    let what: Vec<What> = list.iter().map(|info| info.what.clone()).collect();
    let run = |language| What::Run { language };
    assert_eq!(what, [run(Python), run(Bash), What::Exec { argv: vec!["true".into()] }]);
    assert!(list.iter().all(|info| !info.running && info.outcome.is_some()));
    let status = sandbox.engine.status(&sandbox.record).await.unwrap();
    assert_eq!(status.sessions[0].interpreters, [Python, Bash]);
    assert_eq!(status.running, 0);
}
