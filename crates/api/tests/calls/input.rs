//! Input of commands.

use axum::body::Bytes;
use carrel_proto::problem::Problem;
use http_body_util::{BodyExt, StreamBody};
use hyper::{Request, StatusCode, body::Frame};
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::world::{World, raw_request};

#[tokio::test]
async fn input_comes_in_pieces_and_as_a_stream() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let exec = sandbox.start(json!({"argv": ["cat"], "stdin": true})).await;
    let path = sandbox.at(&format!("execs/{exec}/stdin"));
    let write = |bytes: &'static [u8]| world.send(raw_request("POST", &path, Bytes::from_static(bytes), &[]));
    write(b"one ").await.answer().await.done();
    write(b"").await.answer().await.done();
    let page = sandbox.get(&format!("execs/{exec}/output?wait_seconds=60")).await.ok();
    assert_eq!(page["chunks"][0]["data"], "one ");
    // More than everything between here and there holds: the command has to read for the rest to be taken.
    let (sender, receiver) = mpsc::channel::<Result<Frame<Bytes>, Problem>>(1);
    let big: Vec<u8> = (0..6_000_000_u32).map(|at| u8::try_from(at % 241).unwrap()).collect();
    let pieces = big.clone();
    let feeding = tokio::spawn(async move {
        for piece in pieces.chunks(70_001) {
            sender.send(Ok(Frame::data(Bytes::copy_from_slice(piece)))).await.unwrap();
        }
    });
    let body = StreamBody::new(ReceiverStream::new(receiver)).boxed();
    let request = Request::post(format!("{path}?close=true")).header("host", "localhost").body(body).unwrap();
    world.send(request).await.answer().await.done();
    feeding.await.unwrap();
    assert_eq!(sandbox.outcome(&exec).await["exit_code"], 0);
    let (out, _, _) = sandbox.pages(&exec, 4 << 20).await;
    assert!(out[..4] == *b"one " && out[4..] == big);
    write(b"late").await.answer().await.refused(409, "exec_ended");
}

#[tokio::test]
async fn input_can_be_given_with_the_command() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.post("execs", json!({"argv": ["cat"], "stdin": "höre"})).await.ok();
    assert_eq!(ran["stdout"], "höre");
    let ran = sandbox.post("execs", json!({"argv": ["cat"], "stdin": {"base64": "/wA="}})).await.ok();
    assert_eq!(ran["stdout"], json!({"base64": "/wA="}));
    assert_eq!(sandbox.post("execs", json!({"argv": ["cat"], "stdin": ""})).await.ok()["stdout"], "");
    assert_eq!(sandbox.post("execs", json!({"argv": ["cat"]})).await.ok()["stdout"], "");
    // Both ways at once: more than any pipe holds comes back while the rest is still to go.
    let big = "x".repeat(5_000_000);
    let ran =
        sandbox.post("execs", json!({"argv": ["cat"], "stdin": big, "max_output": 10_000_000})).await.ok();
    assert_eq!(ran["stdout"].as_str().unwrap().len(), 5_000_000);
    let exec = sandbox.start(json!({"argv": ["sh", "-c", "sleep 0.1; wc -c"], "stdin": big})).await;
    assert_eq!(sandbox.outcome(&exec).await["exit_code"], 0);
    assert_eq!(sandbox.pages(&exec, 1 << 20).await.0, b"5000000\n");
    // One that does not read at all.
    let ran = sandbox.post("execs", json!({"argv": ["true"], "stdin": big})).await.ok();
    assert_eq!(ran["exit_code"], 0);
}

#[tokio::test]
async fn a_command_without_input_takes_none() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let exec = sandbox.start(json!({"argv": ["sleep", "1000"]})).await;
    let path = sandbox.at(&format!("execs/{exec}/stdin"));
    let answer = world.send(raw_request("POST", &path, "x".into(), &[])).await.answer().await;
    answer.refused(400, "invalid_argument");
    let answer =
        world.send(raw_request("POST", &format!("{path}?clos=1"), "x".into(), &[])).await.answer().await;
    answer.refused(400, "invalid_argument");
    sandbox.post(&format!("execs/{exec}/cancel"), json!({})).await.is(StatusCode::NO_CONTENT);
}
