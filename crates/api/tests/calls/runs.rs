//! Runs, answered as a whole.

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::world::{World, bytes, until};

#[tokio::test]
async fn every_language_answers_and_keeps_its_state() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran =
        sandbox.run("python", "import sys\nx = 6*7\nprint('out')\nprint('err', file=sys.stderr)\nx").await;
    assert_eq!((&ran["sandbox"], &ran["session"]), (&json!(sandbox.id()), &json!("default")));
    assert_eq!((&ran["exec"], &ran["language"]), (&json!("ex_1"), &json!("python")));
    assert_eq!((&ran["exit_code"], &ran["cause"]), (&json!(0), &json!("exit")));
    assert_eq!((&ran["stdout"], &ran["stderr"]), (&json!("out\n"), &json!("err\n")));
    assert_eq!(ran["results"], json!([{"kind": "result", "mime": {"text/plain": "42"}}]));
    assert_eq!((&ran["session_state"], &ran["error"]), (&json!("preserved"), &Value::Null));
    assert_eq!(ran["receipt"]["stdout_bytes"], 4);
    assert_eq!(sandbox.run("python", "x + 1").await["results"][0]["mime"]["text/plain"], "43");
    sandbox.run("bash", "y=7").await;
    assert_eq!(sandbox.run("bash", "echo $((y+1)); false").await["exit_code"], 1);
    sandbox.run("node", "let z = 8").await;
    assert_eq!(sandbox.run("node", "z + 1").await["results"][0]["mime"]["text/plain"], "9");
    let raised = sandbox.run("python", "1/0").await;
    assert_eq!(
        (&raised["exit_code"], &raised["exception"]["name"]),
        (&json!(1), &json!("ZeroDivisionError"))
    );
}

#[tokio::test]
async fn bytes_that_are_no_text_come_as_base64_and_long_output_is_cut_in_the_middle() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.run("bash", r"printf '\xff\x00\xfe'; printf 'é' >&2").await;
    assert_eq!(ran["stdout"], json!({"base64": "/wD+"}));
    assert_eq!(ran["stderr"], "é");
    let body = json!({"code": "print('x' * 9999)", "environment": "python", "max_output": 1000});
    let ran = sandbox.post("run", body).await.ok();
    assert_eq!(ran["stdout"]["omitted_bytes"], 9000);
    assert_eq!(bytes(&ran["stdout"]["tail"]).last(), Some(&b'\n'));
    let exec = ran["exec"].as_str().unwrap();
    assert_eq!(sandbox.pages(exec, 4096).await.0.len(), 10_000, "the sandbox has all of it");
    let body = json!({"argv": ["printf", r"\377"], "max_output": 0});
    let ran = sandbox.post("execs", body).await.ok();
    assert_eq!(ran["stdout"]["omitted_bytes"], 1);
    assert!(ran.get("language").is_none());
}

#[tokio::test]
async fn what_is_wrong_is_named_and_nothing_happens() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let problem =
        sandbox.post("run", json!({"code": "1", "cod": "2"})).await.refused(400, "invalid_argument");
    assert!(problem["detail"].as_str().unwrap().contains("`cod`"), "{problem}");
    for body in [
        json!({}),
        json!({"code": "1", "timeout_seconds": 0}),
        json!({"code": "1", "timeout_seconds": 3601}),
        json!({"code": "1", "session": "../x"}),
        json!({"code": "1", "max_output": 1_u64 << 40}),
    ] {
        sandbox.post("run", body).await.refused(400, "invalid_argument");
    }
    for body in [
        json!({"argv": []}),
        json!({"argv": ["true"], "stdin": 7}),
        json!({"argv": ["true"], "pty": {"rows": 1, "cols": 1, "depth": 1}}),
        json!({"argv": ["true"], "pty": {"rows": 1, "cols": 1}, "stdin": "x"}),
        json!({"argv": ["true"], "stream": true, "cancel_on_disconnect": true}),
        json!({"argv": ["a\0b"]}),
    ] {
        sandbox.post("execs", body).await.refused(400, "invalid_argument");
    }
    sandbox
        .post("run", json!({"code": "1", "environment": "cobol"}))
        .await
        .refused(400, "environment_unknown");
    assert_eq!(sandbox.get("execs").await.ok()["items"], json!([]));
    sandbox.get("execs?limt=1").await.refused(400, "invalid_argument");
    for path in [
        "execs/ex_1",
        "execs/ex_1/output",
        "execs/ex_1/stream",
        "execs/ex_1/raw",
        "execs/ex_1/wait",
        "execs/%20",
    ] {
        sandbox.get(path).await.refused(404, "exec_not_found");
    }
    for (path, body) in
        [("signal", json!({"signal": 9})), ("resize", json!({"rows": 1, "cols": 1})), ("cancel", json!({}))]
    {
        sandbox.post(&format!("execs/ex_1/{path}"), body).await.refused(404, "exec_not_found");
    }
    world.get("/v1/sandboxes/sbx_nobody/execs").await.refused(404, "sandbox_not_found");
    world.get("/v1/sandboxes/..%2f/execs").await.refused(404, "sandbox_not_found");
}

#[tokio::test]
async fn the_same_key_twice_is_one_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let key: [(&str, &str); 1] = [("idempotency-key", "one")];
    let (run, execs) = (sandbox.at("run"), sandbox.at("execs"));
    let body = json!({"code": "open('n', 'a').write('x')", "environment": "python"});
    let first = world.call_with("POST", &run, Some(body.clone()), &key).await;
    let again = world.call_with("POST", &run, Some(body.clone()), &key).await;
    assert!(!first.replayed && again.replayed);
    assert_eq!(first.bytes, again.bytes);
    let other = json!({"code": "2", "environment": "python"});
    world.call_with("POST", &run, Some(other), &key).await.refused(409, "conflict");
    let streamed = json!({"code": "2", "environment": "python", "stream": true});
    world
        .call_with("POST", &run, Some(streamed), &[("idempotency-key", "two")])
        .await
        .refused(400, "invalid_argument");
    let body = json!({"argv": ["true"], "stream": true});
    let key = [("idempotency-key", "three")];
    let first = world.call_with("POST", &execs, Some(body.clone()), &key).await.is(StatusCode::CREATED);
    let again = world.call_with("POST", &execs, Some(body), &key).await.is(StatusCode::CREATED);
    assert_eq!(first["exec"], again["exec"]);
    assert_eq!(sandbox.get("execs").await.ok()["items"].as_array().unwrap().len(), 2);
    assert_eq!(sandbox.run("bash", "wc -c < n").await["stdout"], "1\n");
}

#[tokio::test]
async fn a_request_that_is_sent_again_while_it_is_under_way_is_told_to_come_back() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let (run, key) = (sandbox.at("run"), [("idempotency-key", "one")]);
    let code =
        "import os, time\nopen('begun', 'w')\nwhile not os.path.exists('go'): time.sleep(0.01)\n'done'";
    let body = json!({"code": code, "environment": "python"});
    let second = async {
        let begun =
            || async { (sandbox.get("files/stat?path=begun").await.status == StatusCode::OK).then_some(()) };
        until("the first run", begun).await;
        let again = world.call_with("POST", &run, Some(body.clone()), &key).await;
        assert!(again.retry_after);
        again.refused(409, "in_progress");
        sandbox.run("bash", "touch go").await;
    };
    let (first, ()) = tokio::join!(world.call_with("POST", &run, Some(body.clone()), &key), second);
    let again = world.call_with("POST", &run, Some(body.clone()), &key).await;
    assert!(!first.replayed && again.replayed);
    assert_eq!(first.bytes, again.bytes);
}

#[tokio::test]
async fn a_sandbox_of_one_run_is_gone_afterwards() {
    let world = World::new();
    let ran = world.post("/v1/run", json!({"code": "6*7", "environment": "python"})).await.ok();
    assert_eq!(ran["results"][0]["mime"]["text/plain"], "42");
    let none = || async { (world.get("/v1/sandboxes").await.ok()["items"] == json!([])).then_some(()) };
    until("the end of the sandbox", none).await;
    let forever =
        json!({"code": "while :; do sleep 0.01; done", "environment": "bash", "timeout_seconds": 0.5});
    assert_eq!(world.post("/v1/run", forever).await.ok()["cause"], "timeout");
    until("the end of the sandbox", none).await;
    // Its client goes as soon as the sandbox is there, whatever has begun in it.
    let left =
        json!({"code": "while :; do sleep 0.01; done", "environment": "bash", "cancel_on_disconnect": true});
    let there = || async { (world.get("/v1/sandboxes").await.ok()["items"] != json!([])).then_some(()) };
    tokio::select! {
        answer = world.post("/v1/run", left) => panic!("{answer:?}"),
        () = until("the sandbox", there) => {}
    }
    until("the end of the sandbox", none).await;
}

#[tokio::test]
async fn the_list_of_calls_has_pages_and_grows_at_its_end() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for _ in 0..5 {
        sandbox.post("execs", json!({"argv": ["true"]})).await.ok();
    }
    let first = sandbox.get("execs?limit=2").await.ok();
    let name = |page: &Value, at: usize| page["items"][at]["exec"].as_str().unwrap().to_owned();
    assert_eq!((name(&first, 0), name(&first, 1)), ("ex_1".into(), "ex_2".into()));
    let after = first["next"].as_str().unwrap();
    let rest = sandbox.get(&format!("execs?limit=3&after={after}")).await.ok();
    assert_eq!((name(&rest, 0), name(&rest, 2)), ("ex_3".into(), "ex_5".into()));
    assert_eq!(rest["next"], Value::Null);
    sandbox.get("execs?after=x").await.refused(400, "invalid_argument");
    let one = sandbox.get("execs/ex_3").await.ok();
    assert_eq!((&one["what"], &one["running"]), (&json!({"exec": {"argv": ["true"]}}), &json!(false)));
    assert_eq!(one["outcome"]["cause"], "exit");
}
