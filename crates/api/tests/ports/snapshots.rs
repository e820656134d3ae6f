//! Snapshots as files, through the door: whose they are, what is refused, and that nothing is left of it.

use axum::{
    body::Body,
    http::{Method, Request, StatusCode},
};
use serde_json::{Value, json};

use crate::world::{Reply, World};

impl World {
    async fn import(&self, token: Option<&str>, query: &str, file: Vec<u8>) -> Reply {
        self.ask(Method::POST, &format!("/v1/snapshots{query}"), token, file).await
    }

    async fn run(&self, sandbox: &Value, token: Option<&str>, code: &str) -> String {
        let path = format!("/v1/sandboxes/{}/run", sandbox["id"].as_str().unwrap());
        self.post(&path, token, json!({ "code": code })).await.json()["stdout"].as_str().unwrap().to_owned()
    }

    async fn names(&self, token: Option<&str>) -> Vec<Value> {
        let page = self.ask(Method::GET, "/v1/snapshots", token, Body::empty()).await.json();
        page["items"].as_array().unwrap().iter().map(|one| one["id"].clone()).collect()
    }

    fn in_the_making(&self) -> usize {
        std::fs::read_dir(self.state.path().join("snapshots")).unwrap().count()
    }
}

#[tokio::test]
async fn a_snapshot_goes_out_and_comes_in_as_its_callers_own() {
    let world = World::new().await;
    let mine = world.token(json!({ "name": "mine", "scope": ["run", "read"] })).await;
    let other = world.token(json!({ "name": "other", "scope": ["run", "read"] })).await;
    let reader = world.token(json!({ "name": "reader", "scope": ["read"] })).await;
    let sandbox = world.sandbox(Some(&mine)).await;
    let run = format!("/v1/sandboxes/{sandbox}/run");
    let code = "open('/workspace/file', 'w').write('kept')";
    world.post(&run, Some(&mine), json!({ "code": code })).await;
    let take = format!("/v1/sandboxes/{sandbox}/snapshots");
    let taken = world.post(&take, Some(&mine), json!({ "tags": ["good"], "files_only": true })).await.json();
    let path = format!("/v1/snapshots/{}/export", taken["id"].as_str().unwrap());

    let file = world.ask(Method::GET, &path, Some(&mine), Body::empty()).await;
    assert_eq!((file.status, file.header("content-type")), (StatusCode::OK, Some("application/zstd")));
    assert!(file.header("content-disposition").unwrap().contains(".carrel"));
    let file = file.body.to_vec();
    // Another's is not there, by id and by tag.
    for path in [path.as_str(), "/v1/snapshots/good/export", "/v1/snapshots/snp_none/export"] {
        let reply = world.ask(Method::GET, path, Some(&other), Body::empty()).await;
        reply.is_problem(404, "snapshot_not_found");
    }

    let imported = world.import(Some(&other), "", file.clone()).await;
    assert_eq!(imported.status, StatusCode::CREATED, "{imported:?}");
    let imported = imported.json();
    assert_ne!(imported["id"], taken["id"]);
    assert_eq!((&imported["tags"], &imported["memory"]), (&json!(["good"]), &json!(false)));
    assert_eq!(world.names(Some(&other)).await, [imported["id"].clone()]);
    assert_eq!(world.names(Some(&mine)).await, [taken["id"].clone()]);
    let restored = world.post("/v1/snapshots/good/restore", Some(&other), json!({ "new": true })).await;
    assert_eq!(restored.status, StatusCode::CREATED, "{restored:?}");
    let seen = world.run(&restored.json(), Some(&other), "print(open('/workspace/file').read())").await;
    assert_eq!(seen, "kept\n");

    // Whoever may only read takes out and puts nothing in; whom to trust is the operator's to say.
    world.import(Some(&reader), "", file.clone()).await.is_problem(403, "forbidden");
    world.import(Some(&mine), "?trust_memory=true", file.clone()).await.is_problem(403, "forbidden");
    world.import(Some(&mine), "?trust_memory=yes", file.clone()).await.is_problem(400, "invalid_argument");
    let trusted = world.import(None, "?trust_memory=true", file.clone()).await;
    assert_eq!(trusted.status, StatusCode::CREATED, "{trusted:?}");
    let small = world.token(json!({ "name": "small", "quota": { "disk": 1 << 20 } })).await;
    assert_eq!(world.import(Some(&small), "", file).await.json()["code"], "quota");
}

#[tokio::test]
async fn what_is_not_whole_is_refused_and_leaves_nothing() {
    let world = World::new().await;
    let sandbox = world.sandbox(None).await;
    let take = format!("/v1/sandboxes/{sandbox}/snapshots");
    let taken = world.post(&take, None, json!({ "files_only": true })).await.json();
    let file = world.get(&format!("/v1/snapshots/{}/export", taken["id"].as_str().unwrap())).await.body;
    let before = world.in_the_making();
    for wrong in [&b""[..], b"something else", &file[..file.len() / 2], &file[..file.len() - 1]] {
        world.import(None, "", wrong.to_vec()).await.is_problem(400, "invalid_argument");
        assert_eq!(world.in_the_making(), before);
    }
    // A client that goes away in the midst of it.
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Vec<u8>, std::io::Error>>(2);
    let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
    let mut request = Request::new(body);
    *request.method_mut() = Method::POST;
    *request.uri_mut() = "/v1/snapshots".parse().unwrap();
    request.headers_mut().insert("host", "localhost".parse().unwrap());
    sender.send(Ok(file[..file.len() / 2].to_vec())).await.unwrap();
    sender.send(Err(std::io::ErrorKind::BrokenPipe.into())).await.unwrap();
    let stream = world.stream().await;
    let (mut http, connection) =
        hyper::client::conn::http1::handshake(hyper_util::rt::TokioIo::new(stream)).await.unwrap();
    let connection = tokio::spawn(connection);
    assert!(http.send_request(request).await.is_err());
    drop(http);
    let _ = connection.await;
    crate::world::in_time("the import to be given up", async {
        while world.in_the_making() != before {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(world.names(None).await.len(), 1);
}
