//! Memory, processes and disk: each limit with its own name, and the truth about the state.

use carrel_engine::Wish;
use carrel_proto::{
    guest::Language::{Bash, Python},
    limits::{ByteSize, Enforcement, Limits},
    outcome::{
        Cause,
        SessionState::{Lost, Preserved},
    },
    problem::Code,
};

use crate::world::{Sandbox, World, a_run, an_exec};

#[tokio::test]
async fn memory_beyond_the_limit_is_an_oom_and_says_what_is_lost() {
    let world = World::new();
    let limits = Limits { memory: ByteSize::mb(128), ..Limits::default() };
    let sandbox = world.sandbox_with(Wish { limits, undo_calls: Some(0), ..Wish::default() }).await;
    sandbox.bash("kept=1").await.ok();
    if let Enforcement::Rlimit(_) = sandbox.record.placed.as_ref().unwrap().enforced.memory {
        // Per process, as it says: whoever asks for too much is refused, and nobody dies.
        let ran = sandbox.python("x = 1\ny = b'x' * (400 << 20)").await.kept(1);
        assert_eq!(ran.exception().unwrap().0, "MemoryError");
        assert_eq!(sandbox.python("x").await.ok().value(), Some("1"));
        return;
    }
    sandbox.python("x = 1").await.ok();
    // A child that is too big dies, and only it: the interpreter is still there.
    let ran =
        sandbox.bash("python3 -c \"x = b'x' * (400 << 20)\"").await.died(Cause::Oom, Code::Oom, Preserved);
    assert_eq!(ran.outcome.exit_code, 137);
    assert_eq!(sandbox.bash("echo $kept").await.ok().out(), "1\n");
    assert_eq!(sandbox.python("x").await.ok().value(), Some("1"));
    // An interpreter that is too big dies itself.
    let ran =
        sandbox.python("print('begun')\ny = b'x' * (400 << 20)").await.died(Cause::Oom, Code::Oom, Lost);
    assert_eq!((ran.out().as_str(), ran.outcome.signal), ("begun\n", Some(9)));
    let peak = ran.outcome.receipt.peak_memory;
    assert!(peak > 64 << 20 && peak <= 129 << 20, "{peak}");
    assert_eq!(sandbox.python("'x' in globals()").await.ok().value(), Some("False"));
    assert_eq!(sandbox.bash("echo $kept").await.ok().out(), "1\n", "the shell beside it lives");
    sandbox.exec(&["python3", "-c", "x = b'x' * (400 << 20)"]).await.died(Cause::Oom, Code::Oom, Preserved);
    // A failure that has nothing to do with memory is not blamed on it.
    sandbox.python("1 / 0").await.kept(1);
    sandbox.exec(&["false"]).await.kept(1);
}

#[tokio::test]
async fn a_fork_bomb_stays_in_its_box_and_can_be_ended() {
    let world = World::new();
    let sandbox = world.limited(Limits { pids: 64, ..Limits::default() }).await;
    sandbox.bash("kept=1").await.ok();
    if let Enforcement::Rlimit(_) = sandbox.record.placed.as_ref().unwrap().enforced.pids {
        // Counted in the box's user namespace: forking fails, what runs goes on, and the bomb is ended with its call.
        let ran = sandbox
            .python("import subprocess\nall = [subprocess.Popen(['sleep', '1000']) for _ in range(100)]")
            .await;
        assert_eq!(ran.exception().unwrap().0, "BlockingIOError");
        assert_eq!(ran.outcome.cause, Cause::Pids);
        let ran = sandbox.hurried(Bash, "bomb() { bomb | bomb; }; bomb 2>/dev/null").await;
        assert!([Cause::Pids, Cause::Timeout].contains(&ran.outcome.cause), "{:?}", ran.outcome);
        return;
    }
    let many = "import subprocess\nall = [subprocess.Popen(['sleep', '1000']) for _ in range(100)]";
    let ran = sandbox.python(many).await.died(Cause::Pids, Code::Pids, Preserved);
    assert_eq!(ran.exception().unwrap().0, "BlockingIOError");
    // There is no room for one more, which is said by name; what runs already needs none and can clean up.
    sandbox.exec(&["true"]).await.died(Cause::Pids, Code::Pids, Preserved);
    sandbox.node("1").await.died(Cause::Pids, Code::Pids, Preserved);
    end_everything(&sandbox, "kill -9 -1; echo $kept", Some("1\n")).await;
    assert_eq!(sandbox.bash("/bin/echo usable").await.ok().out(), "usable\n");
    sandbox.python("1").await.died(Cause::Exit, Code::StateLost, Lost);
    // Bombs that wait for their children, in each language that forks.
    let ran = sandbox.hurried(Bash, "bomb() { bomb | bomb; }; bomb 2>/dev/null").await;
    assert!([Cause::Pids, Cause::Timeout].contains(&ran.outcome.cause), "{:?}", ran.outcome);
    assert_eq!(sandbox.bash("/bin/echo usable").await.ok().out(), "usable\n");
    let ran = sandbox.python("import os\nwhile True: os.fork()").await;
    assert!([Cause::Pids, Cause::Timeout].contains(&ran.outcome.cause), "{:?}", ran.outcome);
    assert_eq!(sandbox.python("1").await.ok().value(), Some("1"));
    // The classic one goes into the background and does not end; the session's own shell can still end it.
    sandbox.bash("b() { b | b & }; b 2>/dev/null").await;
    end_everything(&sandbox, "kill -9 -1", None).await;
    assert_eq!(sandbox.bash("/bin/echo usable").await.ok().out(), "usable\n");
}

/// All that code in a session can end. Where it has no id of its own that is its runner, too: then its shell is lost, which is told
/// with this call or the next.
async fn end_everything(sandbox: &Sandbox, code: &str, out: Option<&str>) {
    let ran = sandbox.bash(code).await;
    if rustix::process::geteuid().is_root() {
        let ran = ran.ok();
        assert_eq!(out.unwrap_or(&ran.out()), ran.out());
    } else if ran.outcome.session_state == Preserved {
        sandbox.bash("true").await.died(Cause::Exit, Code::StateLost, Lost);
    }
}

#[tokio::test]
async fn a_full_workspace_is_named_and_can_be_emptied() {
    let world = World::new();
    let sandbox = world.limited(Limits { disk: ByteSize::mb(64), ..Limits::default() }).await;
    println!("the disk limit is held by {:?}", sandbox.record.placed.as_ref().unwrap().enforced.disk);
    sandbox.python("x = 1").await.ok();
    if let Enforcement::Watched(_) = sandbox.record.placed.as_ref().unwrap().enforced.disk {
        // The watch ends what passes the limit; a command's end leaves the interpreters alone.
        let ran = sandbox.exec(&["dd", "if=/dev/zero", "of=/workspace/more", "bs=1M", "count=2000"]).await;
        assert_eq!(ran.outcome.cause, Cause::Disk, "{:?}", ran.outcome);
        assert_eq!(sandbox.python("x").await.ok().value(), Some("1"));
        sandbox.bash("rm /workspace/*; echo room > /workspace/f && cat /workspace/f").await.ok();
        return;
    }
    let write = "for i in range(200):\n    with open(f'/workspace/f{i}', 'wb') as f: f.write(bytes(1 << 20))";
    let ran = sandbox.python(write).await.died(Cause::Disk, Code::Disk, Preserved);
    assert_eq!(ran.exception().unwrap().0, "OSError");
    let ran = sandbox.bash("head -c 200000000 /dev/zero > /workspace/big").await;
    ran.died(Cause::Disk, Code::Disk, Preserved);
    sandbox.exec(&["dd", "if=/dev/zero", "of=/workspace/more", "bs=1M", "count=200"]).await.died(
        Cause::Disk,
        Code::Disk,
        Preserved,
    );
    sandbox.bash("rm /workspace/*; echo room > /workspace/f && cat /workspace/f").await.ok();
    assert_eq!(sandbox.python("x").await.ok().value(), Some("1"));
    sandbox.python("1 / 0").await.kept(1);
}

#[tokio::test]
async fn too_many_calls_at_once_are_refused_and_nothing_else_happens() {
    let world = World::new();
    let sandbox = world.limited(Limits { execs: 3, ..Limits::default() }).await;
    let mut blocked = Vec::new();
    for _ in 0..3 {
        blocked.push(sandbox.launch(an_exec(&["sleep", "1000"])).await);
    }
    let problem = sandbox.refused(a_run(Python, "1")).await;
    assert_eq!(problem.code, Code::TooMany);
    for live in blocked {
        sandbox.cancel(&live.id).await;
        live.end().await.died(Cause::Cancelled, Code::Cancelled, Preserved);
    }
    assert_eq!(sandbox.python("1").await.ok().value(), Some("1"));
}
