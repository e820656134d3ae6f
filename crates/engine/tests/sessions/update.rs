//! Other limits for a sandbox that lives, and what it uses.

use carrel_proto::{
    guest::Language::Python,
    limits::{ByteSize, Enforcement, Limits},
    outcome::{Cause, SessionState},
    problem::{Code, Problem},
};

use crate::world::{Sandbox, World, an_exec};

async fn apply(sandbox: &Sandbox, limits: &Limits) -> Result<(), Problem> {
    sandbox.engine.apply_limits(&sandbox.record, limits, 120, 900).await
}

fn is_cgroup(by: &Enforcement) -> bool {
    matches!(by, Enforcement::CgroupV1 | Enforcement::CgroupV2)
}

#[tokio::test]
async fn memory_grows_and_shrinks_under_a_session_that_lives() {
    let world = World::new();
    let small = Limits { memory: ByteSize::mb(96), ..Limits::default() };
    let sandbox = world.limited(small.clone()).await;
    if !is_cgroup(&sandbox.record.placed.as_ref().unwrap().enforced.memory) {
        println!("skipped: no cgroup holds memory here");
        return;
    }
    sandbox.python("kept = 1").await.ok();
    let hungry = "data = bytearray(150 << 20); len(data) >> 20";
    sandbox.bash("own=1").await.ok();
    let large = Limits { memory: ByteSize::mb(400), ..small.clone() };
    apply(&sandbox, &large).await.unwrap();
    assert_eq!(sandbox.python(hungry).await.ok().value(), Some("150"));

    // What is in use cannot be taken away, and nothing of the request happens.
    let both = Limits { pids: 3, ..small.clone() };
    let problem = apply(&sandbox, &both).await.unwrap_err();
    assert_eq!(problem.code, Code::Conflict, "{problem:?}");
    assert!(!problem.hint.is_empty());
    sandbox.script("(sleep 0 | sleep 0 | sleep 0 | sleep 0)").await.ok();
    assert_eq!(sandbox.python("kept, len(data) >> 20").await.ok().value(), Some("(1, 150)"));

    // Given back, the limit falls and holds.
    sandbox.python("del data").await.ok();
    apply(&sandbox, &small).await.unwrap();
    assert_eq!(sandbox.python("kept").await.ok().value(), Some("1"));
    sandbox.run(Python, hungry).await.died(Cause::Oom, Code::Oom, SessionState::RolledBack);
    assert_eq!(sandbox.bash("echo $own").await.ok().out(), "1\n");
}

#[tokio::test]
async fn limits_of_the_agent_hold_from_now_on() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let engine = &sandbox.engine;
    let one = Limits { execs: 1, output: ByteSize(128 << 10), ..Limits::default() };
    apply(&sandbox, &one).await.unwrap();
    let id = engine.start(&sandbox.record, an_exec(&["tail", "-f", "/dev/null"])).await.unwrap();
    let more = engine.start(&sandbox.record, an_exec(&["true"])).await.unwrap_err();
    assert_eq!(more.code, Code::TooMany);
    engine.signal(&sandbox.record, &id, 9).await.unwrap();
    sandbox.follow(&id).await;
    let ran = sandbox.script("head -c 1000000 /dev/zero").await.ok();
    assert!(ran.outcome.receipt.output_dropped > 0, "{:?}", ran.outcome.receipt);
    apply(&sandbox, &Limits::default()).await.unwrap();
    let ran = sandbox.script("head -c 1000000 /dev/zero").await.ok();
    assert_eq!(ran.outcome.receipt.output_dropped, 0);
}

#[tokio::test]
async fn times_are_changed_as_well() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("1").await.ok();
    sandbox.engine.apply_limits(&sandbox.record, &sandbox.record.spec.limits, 120, 1).await.unwrap();
    // Older than that already, or in a moment: the box ends.
    let key = sandbox.record.key.clone().unwrap();
    crate::world::in_time("the end of its lifetime", async {
        loop {
            let found = sandbox.engine.existing(sandbox.record.id.as_str(), Some(&key)).await;
            match found {
                Err(problem) => break assert_eq!(problem.code, Code::SandboxNotFound),
                Ok(_) => tokio::time::sleep(std::time::Duration::from_millis(50)).await,
            }
        }
    })
    .await;
}

#[tokio::test]
async fn a_disk_of_a_fixed_size_says_so_and_a_watched_one_changes() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let other = Limits { disk: ByteSize::mb(20), pids: 100, ..Limits::default() };
    let answer = apply(&sandbox, &other).await;
    match &sandbox.record.placed.as_ref().unwrap().enforced.disk {
        Enforcement::SizedFilesystem => {
            let problem = answer.unwrap_err();
            assert_eq!(problem.code, Code::Unsupported);
            let usage = sandbox.engine.usage(&sandbox.record).await.unwrap();
            assert_eq!(usage.disk_limit, Limits::default().disk.0, "as it was");
        }
        _ => {
            answer.unwrap();
            let usage = sandbox.engine.usage(&sandbox.record).await.unwrap();
            assert_eq!(usage.disk_limit, other.disk.0);
        }
    }
}

#[tokio::test]
async fn use_is_told_as_it_is() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let usage = async || sandbox.engine.usage(&sandbox.record).await.unwrap();
    let before = usage().await;
    assert!(before.memory > 0 && before.processes > 0, "{before:?}");
    assert_eq!(before.running, 0);
    sandbox.python("data = bytearray(60 << 20)\nx = sum(range(10**6))").await.ok();
    sandbox.script("head -c 5000000 /dev/urandom > file; sync file").await.ok();
    let mut live = sandbox.launch(an_exec(&["bash", "-c", "echo up; exec tail -f /dev/null"])).await;
    live.until("up").await;
    let after = usage().await;
    assert!(after.memory >= before.memory + (50 << 20), "{before:?} {after:?}");
    assert!(after.peak_memory.is_none_or(|peak| peak >= 60 << 20), "{after:?}");
    assert!(after.cpu_us > before.cpu_us && after.uptime_ms > before.uptime_ms, "{before:?} {after:?}");
    assert!(after.disk_used >= before.disk_used + 4_900_000, "{before:?} {after:?}");
    assert_eq!((after.running, after.idle_ms), (1, 0));
    assert!(after.processes > before.processes);
    drop(live);
}
