//! Output in pages and as bytes.

use serde_json::json;

use crate::world::{World, raw_request};

/// So much on each stream, in uneven pieces.
const EACH: usize = 2_600_000;

/// Writes both streams in turns; byte n of a stream is `n % 251`, or that plus one on the other.
const MIXED: &str = "
import os
def put(fd, first, size):
    data = bytes((first + i) % 251 + (fd == 2) for i in range(size))
    while data: data = data[os.write(fd, data):]
at, size = 0, 1
while at < 2600000:
    size = min(size * 7 % 65521, 2600000 - at)
    put(1, at, size); put(2, at, size)
    at += size
";

fn expected(second: bool) -> Vec<u8> {
    (0..EACH).map(|at| u8::try_from(at % 251).unwrap() + u8::from(second)).collect()
}

#[tokio::test]
async fn pages_are_exact_while_it_runs_after_the_end_and_after_a_restart() {
    let mut world = World::new();
    let (path, exec);
    {
        let sandbox = world.sandbox().await;
        exec = sandbox.start(json!({"argv": ["python3", "-c", MIXED]})).await;
        path = sandbox.path.clone();
        let (out, err, numbers) = sandbox.pages(&exec, 300_000).await;
        assert!(out == expected(false) && err == expected(true));
        assert!(numbers.iter().copied().eq(0..numbers.len() as u64), "numbers without gaps");
        assert_eq!(sandbox.pages(&exec, 16 << 20).await, (out, err, numbers));
        sandbox.get(&format!("execs/{exec}/output?max=0")).await.refused(400, "invalid_argument");
        sandbox.get(&format!("execs/{exec}/output?wait_seconds=-1")).await.refused(400, "invalid_argument");
    }
    world.restart().await;
    let sandbox = crate::world::Sandbox { world: &world, path };
    let (out, err, _) = sandbox.pages(&exec, 900_000).await;
    assert!(out == expected(false) && err == expected(true));
    let raw = sandbox.get(&format!("execs/{exec}/raw?stream=stdout")).await;
    assert!(raw.bytes == expected(false));
    let raw = sandbox.get(&format!("execs/{exec}/raw?stream=stderr")).await;
    assert!(raw.bytes == expected(true));
    assert_eq!(sandbox.get(&format!("execs/{exec}/raw")).await.bytes.len(), 2 * EACH);
}

#[tokio::test]
async fn raw_bytes_follow_to_the_end() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let exec = sandbox
        .start(json!({"argv": ["sh", "-c", "echo one; read x; echo $x; echo no >&2"], "stdin": true}))
        .await;
    let path = sandbox.at(&format!("execs/{exec}/raw?stream=stdout&follow=true"));
    let mut reply = world.send(raw_request("GET", &path, Default::default(), &[])).await;
    assert_eq!(reply.frame().await.unwrap(), "one\n");
    // Without follow: what is there.
    assert_eq!(sandbox.get(&format!("execs/{exec}/raw")).await.bytes, "one\n");
    let stdin = sandbox.at(&format!("execs/{exec}/stdin"));
    world.send(raw_request("POST", &stdin, "two\n".into(), &[])).await.answer().await.done();
    assert_eq!(reply.frame().await.unwrap(), "two\n");
    assert_eq!(reply.frame().await, None);
    sandbox.get(&format!("execs/{exec}/raw?stream=stdin")).await.refused(400, "invalid_argument");
}

#[tokio::test]
async fn results_have_their_place_among_the_output_and_waiting_has_an_end() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.run("python", "print('a', flush=True)\n7").await;
    let page = sandbox.get("execs/ex_1/output").await.ok();
    assert_eq!(page["chunks"][0], json!({"chunk": 0, "stream": "stdout", "offset": 0, "data": "a\n"}));
    let value = json!({"chunk": 1, "stream": "result", "kind": "result", "mime": {"text/plain": "7"}});
    assert_eq!((&page["chunks"][1], &page["next"]), (&value, &json!(2)));
    assert_eq!((&page["running"], &page["outcome"]["exit_code"]), (&json!(false), &json!(0)));
    // Past the end there is nothing, and no number is made up.
    let page = sandbox.get("execs/ex_1/output?since=9").await.ok();
    assert_eq!((&page["chunks"], &page["next"]), (&json!([]), &json!(9)));
    let exec = sandbox.start(json!({"argv": ["cat"], "stdin": true})).await;
    let page = sandbox.get(&format!("execs/{exec}/output?wait_seconds=0.05")).await.ok();
    assert_eq!((&page["chunks"], &page["next"], &page["running"]), (&json!([]), &json!(0), &json!(true)));
    let waited = sandbox.get(&format!("execs/{exec}/wait?timeout_seconds=0.05")).await.ok();
    assert_eq!(waited, json!({"outcome": null}));
    sandbox.get(&format!("execs/{exec}/wait?timeout_seconds=1e9")).await.refused(400, "invalid_argument");
}
