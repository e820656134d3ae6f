use axum::{body::Body, http::Request};
use hyper::body::Incoming;
use serde_json::{Value, json};

use crate::world::{World, until};

async fn listen(world: &World, query: &str, token: Option<&str>, last: Option<u64>) -> Incoming {
    let mut request = Request::get(format!("/v1/events{query}")).header("host", "localhost");
    if let Some(token) = token {
        request = request.header("authorization", format!("Bearer {token}"));
    }
    if let Some(last) = last {
        request = request.header("last-event-id", last);
    }
    let response = world.send(request.body(Body::empty()).unwrap()).await;
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    response.into_body()
}

/// Events up to the first of this kind.
async fn heard(body: &mut Incoming, last: &str) -> Vec<(String, u64, Value)> {
    let text = until(body, &format!("event: {last}\n")).await;
    let text = if text.ends_with("\n\n") { text } else { text + &until(body, "\n\n").await };
    let blocks = text.split("\n\n").filter(|block| block.starts_with("event: "));
    let field = |block: &str, name: &str| {
        block.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned)).unwrap()
    };
    blocks
        .map(|block| {
            let data = serde_json::from_str(&field(block, "data: ")).unwrap();
            (field(block, "event: "), field(block, "id: ").parse().unwrap(), data)
        })
        .collect()
}

#[tokio::test]
async fn a_token_hears_its_own_and_takes_up_where_it_was() {
    let world = World::new().await;
    let [a, b] = [world.token(json!({ "name": "a" })).await, world.token(json!({ "name": "b" })).await];
    let mut own = listen(&world, "", Some(&a), None).await;
    let mut all = listen(&world, "?kind=session.created", None, None).await;
    let theirs = world.sandbox(Some(&b)).await;
    let mine = world.sandbox(Some(&a)).await;
    let run = |token: String, sandbox: String| {
        let world = &world;
        async move {
            let reply = world
                .post(&format!("/v1/sandboxes/{sandbox}/run"), Some(&token), json!({ "code": "1" }))
                .await;
            assert_eq!(reply.json()["exit_code"], 0, "{reply:?}");
        }
    };
    run(b.clone(), theirs.clone()).await;
    run(a.clone(), mine.clone()).await;
    let first = heard(&mut own, "run.finished").await;
    assert!(first.iter().all(|(_, _, event)| event["sandbox"] == mine.as_str()), "{first:?}");
    let kinds: Vec<&str> = first.iter().map(|(kind, ..)| kind.as_str()).collect();
    assert_eq!(kinds.first(), Some(&"session.created"));
    assert!(kinds.contains(&"run.started"));
    assert!(
        first.windows(2).all(|pair| pair[0].1 + 1 == pair[1].1),
        "numbers of others' events show: {first:?}"
    );

    // The operator hears both, and only what it asked for.
    let mut created = heard(&mut all, "session.created").await;
    while created.len() < 2 {
        created.extend(heard(&mut all, "session.created").await);
    }
    let of: Vec<&str> = created.iter().map(|(_, _, event)| event["sandbox"].as_str().unwrap()).collect();
    assert_eq!(of, [theirs.as_str(), mine.as_str()]);

    // What happened while nobody listened is there, once, and nothing of before.
    drop(own);
    let last = first.last().unwrap().1;
    run(a.clone(), mine.clone()).await;
    let mut again = listen(&world, "?since=1", Some(&a), Some(last)).await;
    let second = heard(&mut again, "run.finished").await;
    assert_eq!(second.first().unwrap().1, last + 1);
    assert_eq!(second.iter().filter(|(kind, ..)| kind == "run.started").count(), 1);

    // Filters, each for itself.
    let mut runs = listen(&world, &format!("?sandbox={mine}&kind=run.&since={last}"), Some(&a), None).await;
    let runs = heard(&mut runs, "run.finished").await;
    assert_eq!(
        runs.iter().map(|(kind, ..)| kind.as_str()).collect::<Vec<_>>(),
        ["run.started", "run.finished"]
    );
    // Another's sandbox is no filter that would open anything; what was long ago is a gap.
    let mut peek = listen(&world, &format!("?sandbox={theirs}&since=1"), Some(&a), None).await;
    let gap = heard(&mut peek, "gap").await;
    assert_eq!(gap.len(), 1);
    assert!(gap[0].2["missed"].is_null());
}

#[tokio::test]
async fn listening_needs_to_be_asked_for_properly() {
    let world = World::new().await;
    for wrong in ["?since=x", "?since=-1", "?colour=red"] {
        world.get(&format!("/v1/events{wrong}")).await.is_problem(400, "invalid_argument");
    }
    let admin = world.token(json!({ "name": "a", "scope": ["admin"] })).await;
    let refused = world.ask(axum::http::Method::GET, "/v1/events", Some(&admin), Body::empty()).await;
    refused.is_problem(403, "forbidden");
}

#[tokio::test]
async fn a_stream_that_broke_before_its_first_event_is_taken_up_all_the_same() {
    let world = World::new().await;
    world.sandbox(None).await;
    let request = Request::get("/v1/events").header("host", "localhost").body(Body::empty()).unwrap();
    let response = world.send(request).await;
    let begin: u64 = response.headers()["last-event-id"].to_str().unwrap().parse().unwrap();
    let mut body = response.into_body();
    assert_eq!(until(&mut body, "\n\n").await, format!("id: {begin}\n\n"));
    drop(body);
    let missed = world.sandbox(None).await;
    let mut again = listen(&world, "", None, Some(begin)).await;
    let heard = heard(&mut again, "session.created").await;
    assert_eq!((heard.len(), heard[0].1), (1, begin + 1));
    assert_eq!(heard[0].2["sandbox"], missed.as_str());
}
