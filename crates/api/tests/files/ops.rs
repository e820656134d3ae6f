//! The plain operations, as callers use them.

use std::{
    ffi::OsStr,
    os::unix::{
        ffi::OsStrExt,
        fs::{MetadataExt, PermissionsExt, symlink},
    },
};

use serde_json::json;

use crate::world::World;

#[tokio::test]
async fn files_are_made_listed_moved_searched_changed_and_deleted() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let made = sandbox.put("src/a.txt", "one two\nthree\n").await.is(201).json();
    assert_eq!(
        (&made["name"], &made["kind"], &made["size"]),
        (&json!("src/a.txt"), &json!("file"), &json!(14))
    );
    sandbox.put("src/b.txt", "two\n").await.is(201);
    sandbox.post("/mkdir", json!({"path": "src/deep/er", "parents": true, "mode": 0o700})).await.is(200);
    symlink("a.txt", sandbox.workspace().join("src/link")).unwrap();

    let list = sandbox.get("?path=src&depth=2").await.is(200).json();
    let names: Vec<_> =
        list["items"].as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["a.txt", "b.txt", "deep", "deep/er", "link"]);
    assert_eq!(list["next"], json!(null));
    assert_eq!(list["items"][4]["target"], "a.txt");

    let stat = sandbox.get("/stat?path=src/link").await.is(200).json();
    assert_eq!(stat["kind"], "symlink");
    let stat = sandbox.get("/stat?path=/workspace/src/link&follow=true").await.is(200).json();
    assert_eq!((&stat["kind"], &stat["size"]), (&json!("file"), &json!(14)));

    let moved =
        sandbox.post("/move", json!({"from": "src/b.txt", "to": "new/c.txt", "parents": true})).await.is(200);
    assert_eq!(moved.json()["name"], "new/c.txt");
    sandbox.post("/move", json!({"from": "src/a.txt", "to": "new/c.txt"})).await.refused(409, "exists");

    let found = sandbox.post("/search", json!({"text": "two"})).await.is(200).json();
    assert_eq!(found["matches"].as_array().unwrap().len(), 2);
    assert_eq!(found["complete"], true);
    let replaced =
        sandbox.post("/replace", json!({"path": "src", "find": "two", "with": "2"})).await.is(200).json();
    assert_eq!((&replaced["count"], &replaced["files"][0]["path"]), (&json!(1), &json!("src/a.txt")));
    assert_eq!(sandbox.get("/content?path=src/a.txt").await.is(200).body, "one 2\nthree\n");

    sandbox.send("DELETE", "?path=src", &[], "").await.refused(409, "not_empty");
    let deleted = sandbox.send("DELETE", "?path=src&recursive=true", &[], "").await.is(200).json();
    assert_eq!(deleted["removed"], 5);
    sandbox.get("/stat?path=src").await.refused(404, "not_found");
}

#[tokio::test]
async fn long_directories_come_in_pages_that_lose_nothing() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for number in 0..25 {
        std::fs::write(sandbox.workspace().join(format!("f{number:02}")), "").unwrap();
    }
    std::fs::write(sandbox.workspace().join(OsStr::from_bytes(b"e\xff")), "odd").unwrap();
    let mut names = Vec::new();
    let mut after = String::new();
    loop {
        let page = sandbox.get(&format!("?limit=1{after}")).await.is(200).json();
        names.extend(page["items"].as_array().unwrap().iter().map(|item| item["name"].clone()));
        let Some(next) = page["next"].as_str() else { break };
        after = format!("&after={next}");
    }
    assert_eq!(names.len(), 26);
    // The name that is not text travels as bytes, and is found by them.
    assert_eq!(names[0], json!({"base64": "Zf8="}));
    assert_eq!(sandbox.get("/content?path=e%FF").await.is(200).body, "odd");
    sandbox.get("?limit=0").await.refused(400, "invalid_argument");
    sandbox.get("?limit=1001").await.refused(400, "invalid_argument");
    sandbox.get("?depth=0").await.refused(400, "invalid_argument");
    sandbox.get("?after=../x").await.refused(400, "invalid_argument");
    sandbox.get("?colour=red").await.refused(400, "invalid_argument");
}

#[tokio::test]
async fn files_of_a_stopped_sandbox_come_back_with_it() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.put("kept", "still here").await.is(201);
    let owner = std::fs::metadata(sandbox.workspace().join("kept")).unwrap().uid();
    world.engine.stop(&sandbox.record).await.unwrap();
    assert_eq!(sandbox.get("/content?path=kept").await.is(200).body, "still here");
    sandbox.put("new", "written after").await.is(201);
    let meta = std::fs::metadata(sandbox.workspace().join("new")).unwrap();
    assert_eq!((meta.uid(), meta.permissions().mode() & 0o777), (owner, 0o644));
    world.engine.close(&sandbox.record, None).await.unwrap();
    sandbox.get("/content?path=kept").await.refused(404, "sandbox_not_found");
}

#[test]
fn the_document_describes_every_call() {
    let document: serde_json::Value = serde_json::from_str(&carrel_api::rest::openapi()).unwrap();
    for (path, methods) in [
        ("", &["get", "delete"][..]),
        ("/stat", &["get"]),
        ("/content", &["get", "head", "put"]),
        ("/move", &["post"]),
        ("/mkdir", &["post"]),
        ("/search", &["post"]),
        ("/replace", &["post"]),
        ("/tree", &["get", "put"]),
        ("/watch", &["get"]),
    ] {
        let described =
            document["paths"][format!("/v1/sandboxes/{{sandbox}}/files{path}")].as_object().unwrap();
        assert_eq!(described.len(), methods.len(), "{path}");
        for method in methods {
            let call = &described[*method];
            assert!(
                call["responses"]["default"].is_object() && call["summary"].is_string(),
                "{method} {path}"
            );
            assert!(call["parameters"].as_array().unwrap().iter().any(|one| one["name"] == "sandbox"));
        }
    }
}
