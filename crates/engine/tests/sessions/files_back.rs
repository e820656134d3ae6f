//! Files go back with the calls that are taken back, or stay, and the reply says which.

use carrel_engine::{Wish, call::Undone};
use carrel_files::WriteOptions;
use carrel_proto::{
    files::GuestPath,
    guest::Language::{Bash, Node, Python},
    id::SessionName,
    outcome::{
        Cause, FileChanges, FilesState,
        SessionState::{Lost, RolledBack},
    },
    problem::Code,
};

use crate::world::{Ran, Sandbox, World, a_run, an_exec};

/// Everything about the workspace that is to be as it was.
const LOOK: &str =
    r"find . -printf '%P|%y|%m|%l|%T@|' \( -type f -exec sha256sum {} \; -o -printf '\n' \) | sort";

async fn look(sandbox: &Sandbox) -> String {
    sandbox.script(LOOK).await.ok().out()
}

#[track_caller]
fn restored(ran: &Ran) {
    let outcome = &ran.outcome;
    assert_eq!((outcome.files_state, &outcome.files_reason), (Some(FilesState::Restored), &None), "{ran:?}");
    let problem = outcome.problem.as_ref().unwrap();
    let told = format!("{} {}", problem.message, problem.hint);
    assert!(told.contains("variables and files are as before"), "{told}");
    assert_eq!(outcome.receipt.files, FileChanges::default(), "what went back did not happen");
}

#[track_caller]
fn kept(ran: &Ran, why: &str) {
    let outcome = &ran.outcome;
    assert_eq!(outcome.files_state, Some(FilesState::Kept), "{ran:?}");
    let reason = outcome.files_reason.as_deref().unwrap_or_default();
    assert!(reason.contains(why), "{reason}");
    let hint = &outcome.problem.as_ref().unwrap().hint;
    assert!(hint.contains("files are as the call left them: ") && hint.contains(reason), "{hint}");
}

#[track_caller]
fn undone(undone: Undone, calls: u32) {
    assert_eq!((undone.calls, undone.files_state, undone.files_reason), (calls, FilesState::Restored, None));
}

async fn undo(sandbox: &Sandbox, calls: u32) -> Undone {
    sandbox.engine.undo(&sandbox.record, &SessionName::main(), Some(Python), calls).await.unwrap()
}

async fn crash(sandbox: &Sandbox, code: &str) -> Ran {
    let ran = sandbox.python(&format!("import os\n{code}\nos._exit(1)")).await;
    ran.died(Cause::Exit, Code::Crashed, RolledBack)
}

/// A little of everything, with names that are no text.
const FURNISH: &str = r"
import os
os.makedirs('d/e/f'); os.makedirs('empty'); os.makedirs('shut')
for name, text in [('a', 'one'), ('d/b', 'two' * 9000), ('d/e/c', ''), ('shut/x', 'x'), (b'n\xff\n', 'odd')]:
    open(name, 'w').write(text)
os.symlink('/etc/passwd', 'out'); os.symlink('nowhere', 'd/dangling')
os.mkfifo('pipe'); os.chmod('a', 0o640); os.chmod('d/e', 0o2750); os.chmod('shut', 0o500)
";

/// And all that can be done to it.
const RAVAGE: &str = r"
import shutil, socket
open('a', 'r+').write('2'); os.chmod('a', 0o000)
open('d/b', 'a').write('more'); os.utime('d/b', (1, 1))
os.unlink('out'); os.symlink('elsewhere', 'out')
os.unlink('d/dangling'); os.mkdir('d/dangling'); open('d/dangling/in', 'w').write('in')
shutil.rmtree('d/e'); open('d/e', 'w').write('a file now')
os.rename('empty', 'full'); os.mkdir('full/of'); os.mkfifo('full/of/pipe')
os.unlink('pipe'); os.link('d/b', 'pipe')
os.unlink(b'n\xff\n'); open(b'm\xfe', 'w').write('new'); os.chmod('shut', 0o700); os.unlink('shut/x'); os.chmod('shut', 0)
s = socket.socket(socket.AF_UNIX); s.bind('socket')
os.makedirs('deep/' + '/'.join(['x' * 50] * 20)); os.chmod('deep', 0)
";

#[tokio::test]
async fn a_crash_takes_files_back_exactly() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python(FURNISH).await.ok();
    let before = look(&sandbox).await;
    for _ in 0..3 {
        restored(&crash(&sandbox, RAVAGE).await);
        assert_eq!(look(&sandbox).await, before);
    }
    // A call that changed nothing, and one that only looked.
    restored(&crash(&sandbox, "os.listdir('.')").await);
    assert_eq!(look(&sandbox).await, before);
}

#[tokio::test]
async fn undo_takes_files_back_as_far_as_calls() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut looks = vec![String::new()];
    sandbox.python(FURNISH).await.ok();
    looks.push(look(&sandbox).await);
    sandbox.python(&format!("{RAVAGE}\nos.unlink('pipe')")).await.ok();
    looks.push(look(&sandbox).await);
    // Twice within one tick of a coarse clock, with the same size.
    sandbox.python("f = open('d/b', 'r+'); f.write('x'); f.flush()").await.ok();
    looks.push(look(&sandbox).await);
    sandbox.python("f.seek(0); f.write('y'); f.flush()").await.ok();
    undone(undo(&sandbox, 1).await, 1);
    assert_eq!(look(&sandbox).await, looks[3]);
    undone(undo(&sandbox, 2).await, 2);
    assert_eq!(look(&sandbox).await, looks[1]);
    assert_eq!(sandbox.python("open('a').read()").await.ok().value(), Some("'one'"));
    undone(undo(&sandbox, 1).await, 1);
    assert_eq!(look(&sandbox).await, looks[1]);
    // Before its first call an interpreter was new, and the workspace empty.
    let sandbox = world.sandbox().await;
    sandbox.python(FURNISH).await.ok();
    sandbox.python("os.unlink('a')").await.ok();
    undone(undo(&sandbox, 2).await, 2);
    assert_eq!(sandbox.script("ls -A").await.ok().out(), "");
}

#[tokio::test]
async fn the_first_call_of_any_language_takes_its_files_back() {
    let world = World::new();
    for (language, code) in [
        (Python, "open('f', 'w').write('x'); import os; os._exit(1)"),
        (Bash, "echo x > f; kill -9 $$"),
        (Node, "require('fs').writeFileSync('f', 'x'); process.kill(process.pid, 'SIGKILL')"),
    ] {
        let sandbox = world.sandbox().await;
        let ran = sandbox.run(language, code).await;
        assert_eq!(ran.outcome.session_state, RolledBack, "{ran:?}");
        restored(&ran);
        assert_eq!(sandbox.script("ls -A").await.ok().out(), "");
    }
}

#[tokio::test]
async fn a_file_that_is_open_stays_the_same_file() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("log = open('log', 'w'); log.write('one\\n'); log.flush()").await.ok();
    restored(&crash(&sandbox, "log.write('lost\\n' * 1000); log.flush()").await);
    sandbox.python("log.write('two\\n'); log.flush()").await.ok();
    assert_eq!(sandbox.script("cat log").await.ok().out(), "one\ntwo\n");
}

#[tokio::test]
async fn what_somebody_else_has_changed_stays() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("open('mine', 'w').write('1')").await.ok();
    // A command that changes nothing is no obstacle.
    sandbox.exec(&["ls"]).await.ok();
    restored(&crash(&sandbox, "open('mine', 'w').write('2')").await);
    sandbox.python("open('mine', 'w').write('3')").await.ok();
    sandbox.script("echo theirs > theirs").await.ok();
    let back = undo(&sandbox, 1).await;
    let reason = back.files_reason.unwrap();
    assert!(back.files_state == FilesState::Kept && reason.contains("another call"), "{reason}");
    assert_eq!(sandbox.script("cat mine theirs").await.ok().out(), "3theirs\n");
    // From then on it is as ever.
    restored(&crash(&sandbox, "os.unlink('theirs')").await);
    assert_eq!(sandbox.script("cat mine theirs").await.ok().out(), "3theirs\n");
}

#[tokio::test]
async fn what_is_changed_from_outside_stays() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let put = |name: &str, text: &str| {
        let root = sandbox.engine.files(&sandbox.record).unwrap();
        root.write(&GuestPath::parse(name).unwrap(), text.as_bytes(), WriteOptions::default()).unwrap();
    };
    sandbox.python("open('mine', 'w').write('1')").await.ok();
    // Between two calls: the second one finds it, and a crash leaves it as it was found.
    put("given", "1");
    restored(&crash(&sandbox, "open('given', 'w').write('2'); open('mine', 'w').write('2')").await);
    assert_eq!(sandbox.script("cat given mine").await.ok().out(), "11");
    // But what was before it was there is not to be had any more.
    let back = undo(&sandbox, 1).await;
    assert!(back.files_reason.is_some_and(|why| why.contains("outside")));
    assert_eq!(sandbox.script("cat given mine").await.ok().out(), "11");
    // While a call runs.
    sandbox.python("import os").await.ok();
    let code = "open('mine', 'w').write('3'); print('in', flush=True)\nwhile not os.path.exists('go'): pass\nos._exit(1)";
    let mut live = sandbox.begin(a_run(Python, code)).await;
    live.until("in").await;
    put("go", "");
    kept(&live.end().await.died(Cause::Exit, Code::Crashed, RolledBack), "outside");
    assert_eq!(sandbox.script("cat mine; ls").await.ok().out(), "3given\ngo\nmine\n");
    // Whoever only looks from outside is no obstacle.
    sandbox.engine.files(&sandbox.record).unwrap().list(&GuestPath::root(), 1, 10, None).unwrap();
    restored(&crash(&sandbox, "os.unlink('go')").await);
}

#[tokio::test]
async fn while_others_run_files_stay() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("import os, subprocess").await.ok();
    // A command that runs at the same time.
    let mut long = sandbox.launch(an_exec(&["sh", "-c", "echo in; cat fifo 2>/dev/null; sleep 4711"])).await;
    long.until("in").await;
    kept(&crash(&sandbox, "open('f', 'w').write('1')").await, "another call");
    long.control().cancel().await.unwrap();
    long.end().await;
    // A process that an earlier call has left behind goes on, and may write.
    sandbox.python("p = subprocess.Popen(['sleep', '4712'])").await.ok();
    kept(&crash(&sandbox, "open('f', 'w').write('2')").await, "background");
    assert_eq!(sandbox.script("cat f").await.ok().out(), "2");
    // One of the call's own is ended with it.
    sandbox
        .script("pkill -f 'sleep 471[2]'; while pgrep -f 'sleep 471[2]' >/dev/null; do :; done")
        .await
        .ok();
    sandbox.python("pass").await.ok();
    let code = "subprocess.Popen(['sh', '-c', 'while :; do date +%N > f; done'])\nwhile os.path.getsize('f') < 5: pass";
    restored(&crash(&sandbox, code).await);
    assert_eq!(sandbox.script("cat f").await.ok().out(), "2");
    // And so are those of calls that are taken back on purpose.
    sandbox.python("subprocess.Popen(['sh', '-c', 'while :; do date +%N > f; done']); None").await.ok();
    sandbox.python("while os.path.getsize('f') < 5: pass").await.ok();
    undone(undo(&sandbox, 2).await, 2);
    assert_eq!(sandbox.script("cat f").await.ok().out(), "2");
    // Threads, of another interpreter as well.
    sandbox.node("1").await.ok();
    kept(&crash(&sandbox, "open('f', 'w').write('3')").await, "node");
    assert_eq!(sandbox.script("cat f").await.ok().out(), "3");
}

#[tokio::test]
async fn what_cannot_be_copied_stays_and_the_reply_says_why() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("import os, mmap; open('small', 'w').write('1')").await.ok();
    // A crash may leave as much as it likes: what it made is taken away.
    restored(&crash(&sandbox, "open('large', 'wb').write(bytes(40 << 20)); open('small', 'w')").await);
    restored(&crash(&sandbox, "[open(f'{n:06}', 'w').close() for n in range(3000)]").await);
    assert_eq!(sandbox.script("ls; cat small").await.ok().out(), "small\n1");
    sandbox.python("open('large', 'wb').truncate(17 << 20)").await.ok();
    kept(&crash(&sandbox, "open('small', 'w').write('2')").await, "larger than 16 MB");
    sandbox.python("os.unlink('large'); os.link('small', 'other')").await.ok();
    kept(&crash(&sandbox, "open('small', 'w').write('4')").await, "several names");
    sandbox
        .python("os.unlink('other'); f = open('small', 'r+b'); m = mmap.mmap(f.fileno(), 1); m[0] = 53")
        .await
        .ok();
    sandbox.python("m[0] = 54").await.ok();
    // Writing to memory leaves no trace, and goes back all the same.
    restored(&crash(&sandbox, "m[0] = 55").await);
    assert_eq!(sandbox.python("m[0]").await.ok().value(), Some("54"));
    assert_eq!(sandbox.script("cat small").await.ok().out(), "6");
    sandbox.python("m[0] = 56; m.close(); f.close()").await.ok();
    restored(&crash(&sandbox, "open('small', 'w').write('9')").await);
    assert_eq!(sandbox.script("cat small").await.ok().out(), "8");
    sandbox.python("[open(f'{n}', 'w').close() for n in range(1100)]; None").await.ok();
    let ran = crash(&sandbox, "open('small', 'w').write('9')").await;
    let reason = ran.outcome.files_reason.clone().unwrap();
    // On a machine that has much else to do they are not even counted.
    kept(&ran, if reason.contains("too long") { "too long" } else { "more than 1024 files" });
}

#[tokio::test]
async fn a_full_disk_is_emptied_again() {
    let world = World::new();
    let limits = carrel_proto::limits::Limits {
        disk: carrel_proto::limits::ByteSize::mb(16),
        ..carrel_proto::limits::Limits::default()
    };
    let sandbox = world.limited(limits).await;
    sandbox.python("import os; open('a', 'w').write('a' * 100000)").await.ok();
    let fill = "
open('a', 'w').close()
try:
    with open('big', 'wb', 0) as f:
        while True: f.write(bytes(1 << 16))
except OSError: pass
os._exit(1)";
    let ran = sandbox.python(fill).await;
    assert_eq!(
        (ran.outcome.session_state, ran.outcome.files_state),
        (RolledBack, Some(FilesState::Restored)),
        "{ran:?}"
    );
    assert_eq!(sandbox.script("ls; wc -c < a").await.ok().out(), "a\n100000\n");
}

#[tokio::test]
async fn without_undo_nothing_is_copied() {
    let world = World::new();
    let sandbox = world.sandbox_with(Wish { undo_calls: Some(0), ..Wish::default() }).await;
    sandbox.python("import os; open('f', 'w').write('1')").await.ok();
    let ran = sandbox.python("open('f', 'w').write('2'); os._exit(1)").await;
    let ran = ran.died(Cause::Exit, Code::Crashed, Lost);
    assert_eq!((ran.outcome.files_state, &ran.outcome.files_reason), (None, &None));
    assert_eq!(sandbox.script("cat f").await.ok().out(), "2");
}
