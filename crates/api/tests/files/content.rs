//! Contents: streams, parts, conditions, and bodies that break off.

use std::{
    collections::HashSet,
    io::{Read, Write},
    os::unix::net::UnixStream,
};

use axum::body::{Body, Bytes};
use http_body_util::BodyExt;
use tokio_stream::StreamExt;

use crate::world::{World, in_time};

#[tokio::test]
async fn parts_and_tags_follow_the_book() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let made = sandbox.put("a", "0123456789").await.is(201);
    let tag = made.header("etag").to_owned();
    let get = async |headers: &[(&str, &str)]| sandbox.send("GET", "/content?path=a", headers, "").await;

    let whole = get(&[]).await.is(200);
    assert_eq!((whole.header("etag"), whole.header("content-length")), (tag.as_str(), "10"));
    assert_eq!(whole.header("content-type"), "application/octet-stream");
    assert_eq!(whole.header("accept-ranges"), "bytes");
    let head = sandbox.send("HEAD", "/content?path=a", &[], "").await.is(200);
    assert_eq!(
        (head.header("etag"), head.header("content-length"), head.body.len()),
        (tag.as_str(), "10", 0)
    );

    let part = get(&[("range", "bytes=2-4")]).await.is(206);
    assert_eq!((part.header("content-range"), part.body.as_ref()), ("bytes 2-4/10", &b"234"[..]));
    assert_eq!(get(&[("range", "bytes=-3")]).await.is(206).body, "789");
    assert_eq!(get(&[("range", "bytes=8-100")]).await.is(206).body, "89");
    let nowhere = get(&[("range", "bytes=10-")]).await.refused(416, "invalid_argument");
    assert_eq!(nowhere.header("content-range"), "bytes */10");
    assert_eq!(get(&[("range", "bytes=2-4"), ("if-range", "\"x\"")]).await.is(200).body, "0123456789");
    assert_eq!(get(&[("range", "bytes=2-4"), ("if-range", &tag)]).await.is(206).body, "234");

    let same = get(&[("if-none-match", &tag)]).await.is(304);
    assert_eq!((same.header("etag"), same.body.len()), (tag.as_str(), 0));
    get(&[("if-match", "\"x\"")]).await.refused(412, "precondition_failed");
    get(&[("if-match", &tag)]).await.is(200);

    sandbox.get("/content?path=missing").await.refused(404, "not_found");
    sandbox.get("/content?path=.").await.refused(409, "is_a_directory");
    sandbox.get("/content").await.refused(400, "invalid_argument");
    sandbox.get("/content?path=").await.refused(400, "invalid_argument");
}

#[tokio::test]
async fn writes_say_what_they_found_and_keep_to_what_was_asked() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let put = async |query: &str, headers: &[(&str, &str)], body: &'static str| {
        sandbox.send("PUT", &format!("/content?path=d/a{query}"), headers, body).await
    };
    put("&parents=false", &[], "x").await.refused(404, "not_found");
    sandbox.get("/stat?path=d").await.refused(404, "not_found");
    let first = put("&mode=448", &[("if-none-match", "*")], "one").await.is(201);
    assert_eq!(first.json()["mode"], 0o700);
    put("", &[("if-none-match", "*")], "two").await.refused(412, "precondition_failed");
    put("&overwrite=false", &[], "two").await.refused(409, "exists");
    put("", &[("if-match", "\"x\"")], "two").await.refused(412, "precondition_failed");
    let second = put("&sync=true", &[("if-match", first.header("etag"))], "two").await.is(200);
    // Mode and name stay; the tag is another, and the one that reading tells.
    assert_eq!(second.json()["mode"], 0o700);
    assert_ne!(second.header("etag"), first.header("etag"));
    assert_eq!(sandbox.get("/content?path=d/a").await.header("etag"), second.header("etag"));
    put("", &[("if-match", first.header("etag"))], "three").await.refused(412, "precondition_failed");
    let added = put("&append=true", &[("if-match", second.header("etag"))], "+more").await.is(200);
    assert_eq!(added.json()["size"], 8);
    put("&append=true", &[("if-match", second.header("etag"))], "+more")
        .await
        .refused(412, "precondition_failed");
    assert_eq!(sandbox.get("/content?path=d/a").await.is(200).body, "two+more");
    sandbox.send("PUT", "/content?path=log&append=true", &[], "1").await.is(201);
    put("&append=true&overwrite=false", &[], "").await.refused(400, "invalid_argument");
    put("&mode=512", &[], "").await.refused(400, "invalid_argument");
    put("&mode=rwx", &[], "").await.refused(400, "invalid_argument");
    sandbox.put("d", "x").await.refused(409, "is_a_directory");
    // Other names of a file keep their content.
    std::fs::hard_link(sandbox.workspace().join("d/a"), sandbox.workspace().join("other")).unwrap();
    sandbox.put("d/a", "replaced").await.is(200);
    assert_eq!(sandbox.get("/content?path=other").await.is(200).body, "two+more");
}

#[tokio::test]
async fn of_writers_who_saw_the_same_one_wins() {
    const WRITERS: usize = 8;
    const ROUNDS: usize = 6;
    let world = World::new();
    let sandbox = world.sandbox().await;
    let mut tag = sandbox.put("counter", "0").await.is(201).header("etag").to_owned();
    let mut tags = HashSet::from([tag.clone()]);
    for round in 0..ROUNDS {
        let write = async |writer: usize| {
            // All of one length: nothing but the tag tells them apart.
            let body = format!("{round}{writer}");
            (sandbox.send("PUT", "/content?path=counter", &[("if-match", &tag)], body.clone()).await, body)
        };
        let (a, b, c, d) = tokio::join!(write(0), write(1), write(2), write(3));
        let (e, f, g, h) = tokio::join!(write(4), write(5), write(6), write(7));
        let all = [a, b, c, d, e, f, g, h];
        let won: Vec<_> = all.iter().filter(|(reply, _)| reply.status == 200).collect();
        let lost = all.iter().filter(|(reply, _)| reply.status == 412).count();
        assert_eq!((won.len(), lost), (1, WRITERS - 1));
        assert_eq!(sandbox.get("/content?path=counter").await.is(200).body, won[0].1);
        tag = won[0].0.header("etag").to_owned();
        assert!(tags.insert(tag.clone()), "a tag came twice");
    }
}

#[tokio::test]
async fn a_body_that_breaks_off_changes_nothing() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.put("a", "the old content").await.is(201);
    let names = || {
        let mut names: Vec<_> =
            std::fs::read_dir(sandbox.workspace()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let before = names();
    for path in ["a", "new/dir/b", "a&append=true"] {
        let target = format!("/v1/sandboxes/{}/files/content?path={path}", sandbox.record.id);
        let socket = world.state.path().join("carrel.sock");
        let hung_up = tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(socket).unwrap();
            write!(stream, "PUT {target} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n").unwrap();
            stream.write_all(&[b'x'; 300_000]).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        });
        // The connection is closed by the daemon when it is done with it.
        let answer = in_time("the end of a broken request", hung_up).await.unwrap();
        assert!(!answer.contains(" 200 ") && !answer.contains(" 201 "), "{answer}");
    }
    assert_eq!(sandbox.get("/content?path=a").await.is(200).body, "the old content");
    assert_eq!(names(), before);
}

#[tokio::test]
async fn a_client_that_stalls_holds_up_nobody() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let first = sandbox.put("a", "1").await.is(201);
    // A body of which nothing more comes, for the same file and under a condition.
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    sender.send(Ok(Bytes::from_static(b"half"))).await.unwrap();
    let body = Body::from_stream(tokio_stream::wrappers::ReceiverStream::new(receiver));
    let request = sandbox.request("PUT", "/content?path=a", &[("if-match", first.header("etag"))], body);
    let mut connection = world.connect().await;
    let stalled = tokio::spawn(async move { connection.send_request(request).await });
    let second =
        sandbox.send("PUT", "/content?path=a", &[("if-match", first.header("etag"))], "2").await.is(200);
    sandbox.send("PUT", "/content?path=a", &[("if-match", second.header("etag"))], "3").await.is(200);
    // And when it goes on, it is too late.
    drop(sender);
    let late = in_time("the late answer", stalled).await.unwrap().unwrap();
    assert_eq!(late.status(), 412);
    assert_eq!(sandbox.get("/content?path=a").await.is(200).body, "3");
}

/// Of this process, which is the daemon too.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[tokio::test]
async fn large_files_flow_both_ways_without_being_held() {
    const SIZE: u64 = 100 << 20;
    const MOST_HELD: u64 = 40 << 20;
    let world = World::new();
    let sandbox = world.sandbox().await;
    let file = std::fs::File::create(sandbox.workspace().join("sparse")).unwrap();
    file.set_len(SIZE).unwrap();
    let before = memory();
    let mut most = 0;
    let mut body =
        sandbox.begin(sandbox.request("GET", "/content?path=sparse", &[], Body::empty())).await.into_body();
    let mut length = 0;
    while let Some(frame) = in_time("more", body.frame()).await {
        length += frame.unwrap().into_data().unwrap().len() as u64;
        most = most.max(memory());
    }
    assert_eq!(length, SIZE);
    let piece = Bytes::from(vec![7; 1 << 20]);
    let pieces = tokio_stream::iter(0..SIZE >> 20).map(move |_| Ok::<_, std::io::Error>(piece.clone()));
    let put = sandbox.put("copy", Body::from_stream(pieces)).await.is(201);
    most = most.max(memory());
    assert_eq!(put.json()["size"], SIZE);
    assert!(most.saturating_sub(before) < MOST_HELD, "{before} bytes grew to {most}");
    // Beyond the sandbox's disk nothing is even begun.
    let request =
        sandbox.request("PUT", "/content?path=more", &[("content-length", "300000000")], Body::empty());
    let (parts, _) = request.into_parts();
    let endless = tokio_stream::iter(0..400).map(|_| Ok::<_, std::io::Error>(Bytes::from(vec![7; 1 << 20])));
    let endless = Body::from_stream(endless);
    let mut parts = parts;
    parts.headers.remove("content-length");
    let reply = world.connect().await.send_request(hyper::Request::from_parts(parts, endless)).await;
    if let Ok(reply) = reply {
        assert!([413, 507].contains(&reply.status().as_u16()), "{}", reply.status());
    }
    sandbox.get("/stat?path=more").await.refused(404, "not_found");
}
