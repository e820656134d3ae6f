//! Receipts: what a call did to files, and what it left behind.

use carrel_proto::{
    files::{Content, FileRequest, Write},
    outcome::{Cause, FileChanges, Hosts},
};

use crate::world::{Sandbox, World, an_exec};

fn files(found: &FileChanges) -> [Vec<&str>; 3] {
    [&found.added, &found.changed, &found.removed].map(|list| list.iter().map(String::as_str).collect())
}

const NOTHING: [Vec<&str>; 3] = [vec![], vec![], vec![]];

/// A file written from outside, as an upload does.
fn upload(sandbox: &Sandbox, path: &str, text: &str) {
    let write = Write {
        path: path.parse().unwrap(),
        data: Content(text.as_bytes().to_vec()),
        append: false,
        overwrite: true,
        mode: None,
        parents: true,
        sync: false,
    };
    sandbox.engine.file(&sandbox.record, FileRequest::Write(write)).unwrap();
}

#[tokio::test]
async fn a_call_is_told_of_its_files_in_every_language() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let one =
        sandbox.python("import os; os.mkdir('d'); open('d/a', 'w').write('1'); open('b', 'w').close()").await;
    assert_eq!(files(&one.outcome.receipt.files), [vec!["b", "d/", "d/a"], vec![], vec![]]);
    let two = sandbox.bash("echo more >> d/a; rm b; echo $'\\xff' > $'odd\\xff\\n'").await.ok();
    let receipt = &two.outcome.receipt;
    assert_eq!(files(&receipt.files), [vec!["odd\\xff\\n"], vec!["d/a"], vec!["b"]]);
    assert!(receipt.files.complete && !receipt.files.shared);
    let three = sandbox.node("fs.readFileSync('d/a', 'utf8')").await;
    assert_eq!(files(&three.outcome.receipt.files), NOTHING, "reading changes nothing");
    let four = sandbox.exec(&["sh", "-c", "mv d e"]).await.ok();
    assert_eq!(files(&four.outcome.receipt.files), [vec!["e/", "e/a"], vec![], vec!["d/", "d/a"]]);
    assert_eq!((receipt.exit_code, receipt.cause), (0, Some(Cause::Exit)));
    assert_eq!(receipt.hosts, Hosts::default());
}

#[tokio::test]
async fn a_call_that_dies_is_told_of_its_files_too() {
    let world = World::new();
    // Where it is not taken back, and its files with it.
    let sandbox = world.without_undo().await;
    let died = sandbox.python("open('x', 'w').close(); import os; os.kill(os.getpid(), 9)").await;
    let receipt = &died.outcome.receipt;
    assert_eq!(files(&receipt.files)[0], ["x"]);
    assert_eq!((receipt.exit_code, receipt.cause), (137, Some(Cause::Signal)));
    let late = sandbox.hurried(carrel_proto::guest::Language::Bash, "touch y; while :; do :; done").await;
    assert_eq!(files(&late.outcome.receipt.files)[0], ["y"]);
    assert_eq!(late.outcome.receipt.cause, Some(Cause::Timeout));
}

#[tokio::test]
async fn what_comes_from_outside_between_calls_is_no_calls() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("echo 1 > mine").await.ok();
    upload(&sandbox, "given/data", "1");
    upload(&sandbox, "mine", "other");
    let read = sandbox.bash("cat given/data").await.ok();
    assert_eq!(files(&read.outcome.receipt.files), NOTHING);
    let changed = sandbox.bash("echo 22 > given/data; rm mine").await.ok();
    assert_eq!(files(&changed.outcome.receipt.files), [vec![], vec!["given/data"], vec!["mine"]]);
}

#[tokio::test]
async fn calls_that_overlap_say_so() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut long = sandbox.launch(an_exec(&["sh", "-c", "touch a; echo on; cat; touch c"])).await;
    // Without input it would be over at once.
    long.until("on").await;
    let ended = long.end().await;
    assert!(!ended.outcome.receipt.files.shared);
    let mut exec = an_exec(&["sh", "-c", "touch d; echo on; read line; touch e"]);
    exec.stdin = true;
    let mut long = sandbox.launch(exec).await;
    long.until("on").await;
    let short = sandbox.bash("touch f").await.ok();
    assert!(short.outcome.receipt.files.shared, "the other may have made it");
    long.control().input(b"go\n").await.unwrap();
    let ended = long.end().await;
    assert!(ended.outcome.receipt.files.shared);
    assert_eq!(files(&ended.outcome.receipt.files)[0], ["d", "e", "f"]);
}

/// A child is its parent's image until it has become its own.
const IS_SLEEP: &str = "until [[ $(tr '\\0' ' ' </proc/$!/cmdline) == sleep* ]]; do :; done";

#[tokio::test]
async fn what_keeps_running_is_named() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.bash(&format!("sleep 1234 & echo $!; {IS_SLEEP}")).await.ok();
    let receipt = &ran.outcome.receipt;
    assert_eq!(receipt.processes, 1);
    assert_eq!(receipt.running.len(), 1);
    assert_eq!(receipt.running[0].command, "sleep 1234");
    assert_eq!(receipt.running[0].pid.to_string(), ran.out().trim(), "as the session knows it");
    let exec = sandbox.script(&format!("sleep 4321 >/dev/null 2>&1 & {IS_SLEEP}")).await.ok();
    let commands: Vec<&str> = exec.outcome.receipt.running.iter().map(|it| it.command.as_str()).collect();
    assert_eq!(commands, ["sleep 4321"], "those of other calls are theirs");
    let gone = sandbox.bash("kill %1; wait").await;
    assert_eq!((gone.outcome.receipt.processes, gone.outcome.receipt.running.len()), (0, 0));
}

#[tokio::test]
async fn what_listens_is_told() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let code = "import socket; s = socket.create_server(('127.0.0.1', 0)); s.getsockname()[1]";
    let ran = sandbox.python(code).await.ok();
    let [port] = ran.outcome.receipt.ports.as_slice() else { panic!("{:?}", ran.outcome.receipt) };
    assert_eq!((Some(port.port.to_string().as_str()), port.address.as_str()), (ran.value(), "127.0.0.1"));
    let closed = sandbox.python("s.close()").await.ok();
    assert_eq!(closed.outcome.receipt.ports, []);
}

#[tokio::test]
async fn names_are_capped_and_counts_are_exact() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("for i in range(300): open(f'f{i:03}' + 'x' * 200, 'w').close()").await.ok();
    let found = &ran.outcome.receipt.files;
    assert_eq!((found.added.len(), found.added_count, found.complete), (20, 300, true));
    assert!(found.added.iter().all(|name| name.len() <= 200 && name.contains('…')), "{:?}", found.added);
    let gone = sandbox.bash("rm f*").await.ok();
    assert_eq!(
        (gone.outcome.receipt.files.removed.len(), gone.outcome.receipt.files.removed_count),
        (20, 300)
    );
}

#[tokio::test]
async fn a_workspace_that_is_too_large_is_said_to_be_so() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let many = "import os\nfor i in range(20_100): open(f'f{i}', 'w').close()";
    let ran = sandbox.python(many).await.ok();
    let found = &ran.outcome.receipt.files;
    assert!(!found.complete && found.reason.is_some() && found.total() == 0, "{found:?}");
    let next = sandbox.python("open('one', 'w').close()").await.ok();
    assert!(!next.outcome.receipt.files.complete, "nothing is claimed to be known");
}
