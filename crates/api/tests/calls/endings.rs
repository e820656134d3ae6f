//! How calls end before their time.

use hyper::StatusCode;
use serde_json::json;

use crate::world::{World, request, until};

#[tokio::test]
async fn time_runs_out_and_the_state_stays() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.run("python", "x = 1").await;
    let body = json!({"code": "import time\nwhile True: time.sleep(0.01)", "timeout_seconds": 0.7, "environment": "python"});
    let ran = sandbox.post("run", body).await.ok();
    assert_eq!((&ran["cause"], &ran["exit_code"]), (&json!("timeout"), &json!(124)));
    assert_eq!((&ran["error"]["code"], &ran["session_state"]), (&json!("timeout"), &json!("preserved")));
    assert_eq!(sandbox.run("python", "x").await["results"][0]["mime"]["text/plain"], "1");
    let ran = sandbox.post("execs", json!({"argv": ["sleep", "1000"], "timeout_seconds": 0.5})).await.ok();
    assert_eq!((&ran["cause"], &ran["exit_code"]), (&json!("timeout"), &json!(124)));
    let body =
        json!({"code": "while True: pass", "timeout_seconds": 0.7, "environment": "python", "stream": true});
    let events = sandbox.stream("run", Some(body), &[]).await.rest().await;
    let names: Vec<&str> =
        events.iter().map(|event| event.name.as_str()).filter(|name| *name != "stderr").collect();
    assert_eq!(names, ["start", "receipt", "error", "end"]);
    assert_eq!(events[events.len() - 2].data["code"], "timeout");
}

#[tokio::test]
async fn anybody_cancels_by_id() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let body =
        json!({"code": "print('up', flush=True)\nwhile True: pass", "environment": "python", "stream": true});
    let mut events = sandbox.stream("run", Some(body), &[]).await;
    let exec = events.expect("start").await.data["exec"].as_str().unwrap().to_owned();
    events.expect("stdout").await;
    sandbox.post(&format!("execs/{exec}/cancel"), json!({})).await.done();
    let rest = events.rest().await;
    let end = &rest.last().unwrap().data;
    assert_eq!((&end["cause"], &end["session_state"]), (&json!("cancelled"), &json!("preserved")));
    // What has ended is cancelled already.
    sandbox.post(&format!("execs/{exec}/cancel"), json!({})).await.done();
    sandbox
        .post(&format!("execs/{exec}/signal"), json!({"signal": "rubbish"}))
        .await
        .refused(400, "invalid_argument");
}

/// Sends a request and hangs up once its call runs.
async fn abandoned(world: &World, path: &str, below: &str, body: serde_json::Value) -> String {
    let request = request("POST", &format!("{path}/{below}"), Some(body), &[]);
    let call = world.send(request);
    let running = until("a call that runs", || async {
        let list = world.get(&format!("{path}/execs")).await.ok();
        let last = list["items"].as_array().unwrap().last()?.clone();
        (last["running"] == true).then(|| last["exec"].as_str().unwrap().to_owned())
    });
    tokio::select! {
        _ = call => panic!("it was answered"),
        exec = running => exec,
    }
}

#[tokio::test]
async fn a_client_that_goes_takes_its_call_along_only_if_it_said_so() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    // Prints without end: there is always something to read, and the hang-up is seen all the same.
    let body = json!({"code": "while True: print('x' * 1000)", "environment": "python", "cancel_on_disconnect": true});
    let exec = abandoned(&world, &sandbox.path, "run", body).await;
    assert_eq!(sandbox.outcome(&exec).await["cause"], "cancelled");
    let body = json!({"argv": ["sleep", "1000"], "cancel_on_disconnect": true});
    let exec = abandoned(&world, &sandbox.path, "execs", body).await;
    assert_eq!(sandbox.outcome(&exec).await["cause"], "cancelled");
    let exec = abandoned(&world, &sandbox.path, "execs", json!({"argv": ["cat"], "stdin": true})).await;
    sandbox.post(&format!("execs/{exec}/stdin?close=true"), json!("still here")).await.done();
    let outcome = sandbox.outcome(&exec).await;
    assert_eq!((&outcome["cause"], &outcome["exit_code"]), (&json!("exit"), &json!(0)));
    assert_eq!(sandbox.pages(&exec, 1 << 20).await.0, b"\"still here\"");
    let body = json!({"code": "print('up', flush=True)\nwhile True: pass", "environment": "python", "stream": true, "cancel_on_disconnect": true});
    let mut events = sandbox.stream("run", Some(body), &[]).await;
    let exec = events.expect("start").await.data["exec"].as_str().unwrap().to_owned();
    events.expect("stdout").await;
    drop(events);
    assert_eq!(sandbox.outcome(&exec).await["cause"], "cancelled");
}

#[tokio::test]
async fn signals_come_by_number_and_name() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let script = "trap 'echo usr; exit 3' USR1; echo up; while :; do sleep 0.01; done";
    let exec = sandbox.start(json!({"argv": ["bash", "-c", script]})).await;
    let page = sandbox.get(&format!("execs/{exec}/output?wait_seconds=60")).await.ok();
    assert_eq!(page["chunks"][0]["data"], "up\n");
    sandbox.post(&format!("execs/{exec}/signal"), json!({"signal": "SIGUSR1"})).await.done();
    assert_eq!(sandbox.outcome(&exec).await["exit_code"], 3);
    let exec = sandbox.start(json!({"argv": ["sleep", "1000"]})).await;
    sandbox
        .post(&format!("execs/{exec}/resize"), json!({"rows": 1, "cols": 1}))
        .await
        .refused(400, "invalid_argument");
    sandbox.post(&format!("execs/{exec}/signal"), json!({"signal": 9})).await.done();
    assert_eq!(sandbox.outcome(&exec).await["signal"], 9);
    sandbox.post(&format!("execs/{exec}/signal"), json!({"signal": 9})).await.refused(409, "exec_ended");
}

#[tokio::test]
async fn a_command_that_is_not_there_says_so() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.post("execs", json!({"argv": ["no-such-command"]})).await.ok();
    assert_eq!((&ran["error"]["code"], &ran["exit_code"]), (&json!("command_not_found"), &json!(127)));
    let started =
        sandbox.post("execs", json!({"argv": ["no-such-command"], "stream": true, "stdin": "x"})).await;
    let exec = started.is(StatusCode::CREATED)["exec"].as_str().unwrap().to_owned();
    assert_eq!(sandbox.outcome(&exec).await["problem"]["code"], "command_not_found");
}

#[tokio::test]
async fn an_id_of_a_call_means_no_other_call_after_the_sandbox_was_brought_back() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let before = sandbox.run("bash", "echo before").await["exec"].clone();
    let close = format!("/v1/sandboxes/{}?delete_workspace=false", sandbox.id());
    for life in 1..3 {
        world.call("DELETE", &close, None).await.done();
        let after = sandbox.run("bash", "echo after").await["exec"].clone();
        assert_eq!((before.as_str(), after), (Some("ex_1"), json!(format!("ex_{life}000001"))));
        sandbox.get("execs/ex_1/output").await.refused(404, "exec_not_found");
        assert_eq!(sandbox.get("execs").await.ok()["items"].as_array().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn calls_are_taken_back() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for n in 0..3 {
        let ran = sandbox.run("python", &format!("x = {n}")).await;
        assert_eq!(ran["transactional"], true, "{ran}");
    }
    let ran = sandbox.run("python", "x = 9; open('f', 'w').write('x'); import os; os._exit(3)").await;
    assert_eq!((&ran["session_state"], &ran["taken_back"]), (&json!("rolled_back"), &json!(1)), "{ran}");
    assert_eq!((&ran["files_state"], ran.get("files_reason")), (&json!("restored"), None), "{ran}");
    let undone = sandbox.post("undo", json!({"calls": 2})).await.ok();
    assert_eq!(
        (&undone["language"], &undone["calls"], &undone["kept"]),
        (&json!("python"), &json!(2), &json!(1))
    );
    assert_eq!(
        (&undone["files_state"], &undone["files_reason"]),
        (&json!("restored"), &json!(null)),
        "{undone}"
    );
    assert_eq!(sandbox.run("python", "x").await["results"][0]["mime"]["text/plain"], "0");
    sandbox.post("undo", json!({"calls": 9})).await.refused(409, "undo_unavailable");
    sandbox.post("undo", json!({"calls": 0})).await.refused(400, "invalid_argument");
    sandbox.post("undo", json!({"call": 1})).await.refused(400, "invalid_argument");
    sandbox.post("undo", json!({"session": "none"})).await.refused(404, "session_not_found");
    let bash = sandbox.run("bash", "x=1").await;
    assert_eq!(bash["transactional"], false);
    assert!(bash["transactional_reason"].as_str().is_some_and(|reason| !reason.is_empty()));
}
