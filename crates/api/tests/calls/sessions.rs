//! Sessions over HTTP.

use hyper::StatusCode;
use serde_json::json;

use crate::world::World;

#[tokio::test]
async fn a_session_has_a_directory_and_variables_that_change_while_it_lives() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.run("bash", "mkdir build").await;
    let body = json!({"name": "build", "cwd": "/workspace/build", "env": {"COLOUR": "blue"}});
    let made = sandbox.post("sessions", body.clone()).await.is(StatusCode::CREATED);
    assert_eq!((&made["name"], &made["cwd"]), (&json!("build"), &json!("/workspace/build")));
    assert_eq!((&made["env"], &made["interpreters"]), (&json!({"COLOUR": "blue"}), &json!([])));
    sandbox.post("sessions", body).await.refused(409, "session_exists");
    let code = "import os\n(os.environ.get('COLOUR'), os.environ.get('SIZE'), os.getcwd())";
    let run = |code: &str| json!({"code": code, "session": "build", "environment": "python"});
    let value = |ran: serde_json::Value| ran["results"][0]["mime"]["text/plain"].as_str().unwrap().to_owned();
    let before = sandbox.post("run", run(code)).await.ok();
    assert_eq!(value(before), "('blue', None, '/workspace/build')");
    let patch = json!({"env": {"SIZE": "9", "COLOUR": null}});
    let patched = world.call("PATCH", &sandbox.at("sessions/build"), Some(patch)).await.ok();
    assert_eq!((&patched["env"], &patched["interpreters"]), (&json!({"SIZE": "9"}), &json!(["python"])));
    let after =
        sandbox.post("run", run("(os.environ.get('COLOUR'), os.environ.get('SIZE'), os.getcwd())")).await;
    assert_eq!(value(after.ok()), "(None, '9', '/workspace/build')");
    let ran =
        sandbox.post("execs", json!({"argv": ["sh", "-c", "echo $SIZE"], "session": "build"})).await.ok();
    assert_eq!(ran["stdout"], "9\n");
    let ran =
        sandbox.post("execs", json!({"argv": ["sh", "-c", "echo $SIZE"], "env": {"SIZE": "1"}})).await.ok();
    assert_eq!(ran["stdout"], "1\n");
    let all = sandbox.get("sessions").await.ok();
    let names: Vec<&str> =
        all["items"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["build", "default"]);
    assert_eq!(sandbox.get("sessions/build").await.ok(), all["items"][0]);
}

#[tokio::test]
async fn deleting_a_session_ends_what_is_in_it() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.post("sessions", json!({"name": "s"})).await.is(StatusCode::CREATED);
    let exec = sandbox.start(json!({"argv": ["sleep", "1000"], "session": "s"})).await;
    world.call("DELETE", &sandbox.at("sessions/s"), None).await.done();
    assert_eq!(sandbox.outcome(&exec).await["cause"], "cancelled");
    sandbox.get("sessions/s").await.refused(404, "session_not_found");
    world.call("DELETE", &sandbox.at("sessions/s"), None).await.refused(404, "session_not_found");
    let patch = json!({"env": {}});
    world.call("PATCH", &sandbox.at("sessions/s"), Some(patch)).await.refused(404, "session_not_found");
    // The one that every sandbox has comes back.
    sandbox.run("python", "x = 1").await;
    world.call("DELETE", &sandbox.at("sessions/default"), None).await.done();
    assert_eq!(sandbox.run("python", "x").await["exception"]["name"], "NameError");
}

#[tokio::test]
async fn what_no_session_can_be_is_refused() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for body in [
        json!({}),
        json!({"name": "a/b"}),
        json!({"name": "s", "envs": {}}),
        json!({"name": "s", "env": {"A=B": "c"}}),
    ] {
        sandbox.post("sessions", body).await.refused(400, "invalid_argument");
    }
    for patch in [json!({}), json!({"env": {"A": 1}}), json!({"env": {"": "x"}})] {
        let answer = world.call("PATCH", &sandbox.at("sessions/default"), Some(patch)).await;
        answer.refused(400, "invalid_argument");
    }
    sandbox.get("sessions/..").await.refused(404, "session_not_found");
}

#[tokio::test]
async fn a_session_starts_in_a_directory_that_is_there_or_not_at_all() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.run("bash", "mkdir -p build/deep; echo > file").await;
    let made = sandbox.post("sessions", json!({"name": "relative", "cwd": "build/deep/"})).await;
    assert_eq!(made.is(StatusCode::CREATED)["cwd"], "/workspace/build/deep");
    let body = json!({"code": "pwd", "session": "relative", "environment": "bash"});
    assert_eq!(sandbox.post("run", body).await.ok()["stdout"], "/workspace/build/deep\n");
    let body = json!({"argv": ["pwd"], "session": "relative", "cwd": ".."});
    assert_eq!(sandbox.post("execs", body).await.ok()["stdout"], "/workspace/build\n");
    let missing = sandbox.post("sessions", json!({"name": "s", "cwd": "nowhere"})).await;
    let problem = missing.refused(400, "invalid_argument");
    assert!(problem["detail"].as_str().unwrap().contains("`nowhere`"), "{problem}");
    assert!(problem["hint"].as_str().unwrap().contains("/workspace"), "{problem}");
    sandbox.post("sessions", json!({"name": "s", "cwd": "file"})).await.refused(409, "not_a_directory");
    sandbox.get("sessions/s").await.refused(404, "session_not_found");
    sandbox.post("sessions", json!({"name": "s", "cwd": "/"})).await.is(StatusCode::CREATED);
}

#[tokio::test]
async fn a_receipt_and_a_brief_tell_what_was_done_and_where_it_stands() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let code = "told = [1, 2, 3]; open('made', 'w').close()";
    let ran = sandbox.post("run", json!({"code": code, "environment": "python"})).await.ok();
    let receipt = &ran["receipt"];
    assert_eq!((&receipt["cause"], &receipt["exit_code"]), (&json!("exit"), &json!(0)));
    assert_eq!(receipt["files"]["added"], json!(["made"]));
    assert_eq!((&receipt["files"]["complete"], &receipt["files"]["shared"]), (&json!(true), &json!(false)));
    assert_eq!((&receipt["running"], &receipt["ports"]), (&json!([]), &json!([])));
    assert_eq!(receipt["hosts"], json!({"reached": [], "refused": []}));
    let ran = sandbox.post("execs", json!({"argv": ["rm", "made"]})).await.ok();
    assert_eq!(ran["receipt"]["files"]["removed"], json!(["made"]));

    let told = sandbox.get("brief").await.ok();
    assert_eq!(told["brief"]["session"], "default");
    assert_eq!(told["brief"]["interpreters"][0]["variables"][0]["name"], "told");
    let text = told["text"].as_str().unwrap();
    assert!(text.len() <= 1024 && text.contains("told list[3]"), "{text}");
    assert_eq!(sandbox.get("brief?session=default").await.ok()["brief"]["session"], "default");
    sandbox.get("brief?session=none").await.refused(404, "session_not_found");
    sandbox.get("brief?session=../x").await.refused(400, "invalid_argument");
    sandbox.get("brief?sesion=x").await.refused(400, "invalid_argument");
}
