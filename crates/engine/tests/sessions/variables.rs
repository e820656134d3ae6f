//! Variables of a session: changed while it lives, for commands and for interpreters that are up.

use std::collections::BTreeMap;

use carrel_proto::{
    guest::Language::{Bash, Node, Python},
    id::SessionName,
    problem::{Code, Problem},
};

use crate::world::{Sandbox, World, a_run, an_exec, named};

async fn change(
    sandbox: &Sandbox,
    session: &str,
    set: &[(&str, &str)],
    unset: &[&str],
) -> Result<(), Problem> {
    let set = set.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let unset = unset.iter().map(|&name| name.to_owned()).collect();
    sandbox.engine.set_env(&sandbox.record, &named(session), set, unset).await
}

const BASH: &str = "echo $A:${B-none}; env | grep -c ^A=";
const PYTHON: &str = "import os; print(os.environ.get('A'), os.environ.get('B', 'none'), sep=':')";
const NODE: &str = "console.log(`${process.env.A}:${process.env.B ?? 'none'}`)";

#[tokio::test]
async fn changes_reach_what_runs_and_what_starts() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.open("other", None, &[("A", "other")]).await;
    // Bash and python are up before the change; node starts after it.
    sandbox.bash("own=1").await.ok();
    sandbox.python("own = 1").await.ok();
    change(&sandbox, "default", &[("A", "a b"), ("B", "2")], &[]).await.unwrap();
    assert_eq!(sandbox.bash(BASH).await.ok().out(), "a b:2\n1\n");
    assert_eq!(sandbox.python(PYTHON).await.ok().out(), "a b:2\n");
    assert_eq!(sandbox.node(NODE).await.ok().out(), "a b:2\n");
    assert_eq!(sandbox.script(BASH).await.ok().out(), "a b:2\n1\n");
    change(&sandbox, "default", &[("A", "3")], &["B", "NEVER"]).await.unwrap();
    assert_eq!(sandbox.node(NODE).await.ok().out(), "3:none\n");
    assert_eq!(sandbox.script(BASH).await.ok().out(), "3:none\n1\n");
    assert_eq!(sandbox.bash(BASH).await.ok().out(), "3:none\n1\n");
    assert_eq!(sandbox.python(PYTHON).await.ok().out(), "3:none\n");
    assert_eq!(sandbox.python("own").await.ok().value(), Some("1"));
    assert_eq!(sandbox.run_in("other", Python, PYTHON).await.ok().out(), "other:none\n");

    // A command's own variables come after.
    let mut exec = an_exec(&["bash", "-c", BASH]);
    exec.env = BTreeMap::from([("A".into(), "mine".into())]);
    assert_eq!(sandbox.launch(exec).await.end().await.ok().out(), "mine:none\n1\n");

    let sessions = sandbox.engine.sessions(&sandbox.record).await.unwrap();
    let found = |name: &str| sessions.iter().find(|session| session.name.as_str() == name).unwrap();
    let main = found("default");
    assert_eq!(main.env, BTreeMap::from([("A".into(), "3".into())]));
    assert_eq!((main.cwd.as_str(), main.interpreters.len()), ("/workspace", 3));
    assert_eq!(found("other").env, BTreeMap::from([("A".into(), "other".into())]));
    assert!(main.opened_unix_ms > 0 && main.opened_unix_ms <= found("other").opened_unix_ms);
}

#[tokio::test]
async fn a_busy_interpreter_hears_of_all_changes_with_its_next_run() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let wait = "import os; print('up', flush=True); open('go').read(); print(os.environ.get('A'))";
    sandbox.script("mkfifo go").await.ok();
    let mut busy = sandbox.begin(a_run(Python, wait)).await;
    busy.until("up").await;
    let queued = sandbox.begin(a_run(Python, PYTHON)).await;
    change(&sandbox, "default", &[("A", "1"), ("B", "1")], &[]).await.unwrap();
    change(&sandbox, "default", &[("A", "2")], &["B"]).await.unwrap();
    sandbox.script("echo > go").await.ok();
    assert_eq!(busy.end().await.ok().out(), "up\nNone\n", "not in the middle of a run");
    assert_eq!(queued.end().await.ok().out(), "2:none\n");
    // A shell that ended itself is renewed with them.
    sandbox.bash("own=1; exit 3").await.kept(3);
    change(&sandbox, "default", &[("A", "4")], &[]).await.unwrap();
    assert_eq!(sandbox.bash("echo $own $A").await.ok().out(), "1 4\n");
    // One that was lost has them from its start.
    sandbox.run(Node, "process.kill(process.pid, 'SIGKILL'); for (;;);").await;
    change(&sandbox, "default", &[("B", "5")], &[]).await.unwrap();
    assert_eq!(sandbox.node(NODE).await.ok().out(), "4:5\n");
}

#[tokio::test]
async fn what_no_process_could_have_changes_nothing() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    change(&sandbox, "default", &[("A", "1")], &[]).await.unwrap();
    let large = "x".repeat(200_000);
    type Set<'a> = &'a [(&'a str, &'a str)];
    let refused: [(Set<'_>, &[&str], Code); 8] = [
        (&[("", "x"), ("A", "2")], &[], Code::InvalidArgument),
        (&[("A=B", "x")], &["A"], Code::InvalidArgument),
        (&[("A\0", "x")], &["A"], Code::InvalidArgument),
        (&[("C", "a\0b")], &["A"], Code::InvalidArgument),
        (&[("A", "2")], &[""], Code::InvalidArgument),
        (&[("A", "2")], &["B=C"], Code::InvalidArgument),
        (&[("A", "2")], &["A"], Code::InvalidArgument),
        (&[("A", "2"), ("L", large.as_str())], &[], Code::TooLarge),
    ];
    for (set, unset, code) in refused {
        assert_eq!(change(&sandbox, "default", set, unset).await.unwrap_err().code, code, "{unset:?}");
    }
    let none = change(&sandbox, "nowhere", &[], &[]).await.unwrap_err();
    assert_eq!(none.code, Code::SessionNotFound);
    assert_eq!(sandbox.run(Bash, BASH).await.ok().out(), "1:none\n1\n");
    assert_eq!(sandbox.engine.sessions(&sandbox.record).await.unwrap()[0].name, SessionName::main());
}
