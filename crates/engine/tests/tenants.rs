//! Many callers of one engine: whose sandboxes are whose, closing a run while it makes more, callers that go away.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{collections::BTreeMap, path::Path, sync::Arc, time::Duration};

use carrel_engine::{
    Engine, Environments, Labels, ListFilter, Settings, State, Tenant, Update, Whereabouts, Wish,
    events::{Heard, Kind, Subscription},
    tokens::{NewToken, Scopes},
};
use carrel_proto::{
    id::Key,
    limits::{ByteSize, Limits},
    problem::Code,
};

fn engine(state: &Path) -> Engine {
    Engine::open(Settings {
        state: state.to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    })
    .unwrap()
}

fn tenant(engine: &Engine) -> Tenant {
    let new = NewToken { name: "test".into(), scopes: Scopes::all(), ..NewToken::default() };
    engine.create_token(&new).unwrap().0.tenant()
}

fn wish(tenant: &Tenant) -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, tenant: tenant.clone(), ..Wish::default() }
}

fn key(text: &str) -> Key {
    text.parse().unwrap()
}

/// Nothing of any sandbox is left below the state directory.
fn is_empty(state: &Path) {
    for place in ["sandboxes", "locks"] {
        let left: Vec<_> =
            std::fs::read_dir(state.join(place)).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert!(left.is_empty(), "{place}: {left:?}");
    }
}

/// The kinds that were told so far.
async fn kinds(heard: &mut Subscription) -> Vec<&'static str> {
    let mut kinds = Vec::new();
    while let Ok(Heard::Event(numbered)) = tokio::time::timeout(Duration::ZERO, heard.next()).await {
        kinds.push(numbered.event.kind.as_str());
    }
    kinds
}

#[tokio::test]
async fn a_token_sees_its_own_and_cannot_tell_others_from_nothing() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let (a, b) = (tenant(&engine), tenant(&engine));
    let shared = key("workflow:run_1:default");
    let of_a = engine.sandbox(&shared, &wish(&a)).await.unwrap().record;
    let of_b = engine.sandbox(&shared, &wish(&b)).await.unwrap().record;
    let locals = engine.sandbox(&shared, &wish(&Tenant::local())).await.unwrap().record;
    assert!(of_a.id != of_b.id && of_a.id != locals.id);

    let asked = |tenant: Tenant, name: String| {
        let engine = engine.clone();
        async move { engine.existing_of(&tenant, &name, None).await }
    };
    assert_eq!(asked(a.clone(), of_a.id.to_string()).await.unwrap().record.id, of_a.id);
    assert_eq!(asked(Tenant::local(), of_a.id.to_string()).await.unwrap().record.id, of_a.id);
    for theirs in [&of_b, &locals] {
        let problem = asked(a.clone(), theirs.id.to_string()).await.unwrap_err();
        let never = format!("{}x", &theirs.id.as_str()[..19]);
        let mut nothing = asked(a.clone(), never.clone()).await.unwrap_err();
        nothing.message = nothing.message.replace(&never, theirs.id.as_str());
        assert_eq!(problem, nothing);
        assert!(engine.record_of(&a, &theirs.id).unwrap().is_none());
    }
    let page = engine.list_page(&ListFilter { tenant: Some(a.clone()), ..ListFilter::default() }, None, 10);
    assert_eq!(page.unwrap().records.len(), 1);
    assert_eq!(engine.list().unwrap().len(), 3);
    let usage = engine.held(&a).unwrap();
    assert_eq!((usage.sandboxes, usage.memory), (1, Limits::default().memory.0));
    for record in [of_a, of_b, locals] {
        engine.close(&record, None).await.unwrap();
    }
    assert_eq!(engine.held(&a).unwrap().sandboxes, 0);
    is_empty(state.path());
}

#[tokio::test]
async fn of_a_closed_run_nothing_is_left_however_many_make_more() {
    let state = tempfile::tempdir().unwrap();
    let engine = Arc::new(engine(state.path()));
    let (a, b) = (tenant(&engine), tenant(&engine));
    let neighbours = [
        engine.sandbox(&key("workflow:run_1:default"), &wish(&b)).await.unwrap().record,
        engine.sandbox(&key("workflow:run_10:default"), &wish(&a)).await.unwrap().record,
    ];
    let mut makers = tokio::task::JoinSet::new();
    let begun = Arc::new(tokio::sync::Barrier::new(4));
    for maker in 0..3 {
        let (engine, wish, begun) = (Arc::clone(&engine), wish(&a), Arc::clone(&begun));
        makers.spawn(async move {
            for number in 0.. {
                let key = key(&format!("workflow:run_1:s{maker}_{}", number % 3));
                if let Err(problem) = engine.sandbox(&key, &wish).await {
                    return problem.code;
                }
                if number == 0 {
                    begun.wait().await;
                }
            }
            unreachable!("there are enough numbers")
        });
    }
    begun.wait().await;
    let closed = engine.close_scope(&a, "workflow", "run_1", None).await.unwrap();
    assert!(closed.closed.len() >= 3, "{closed:?}");
    // At the end of the closing, and not at some time after it.
    let of_run = |tenant: &Tenant, prefix: &str| {
        let filter = ListFilter {
            tenant: Some(tenant.clone()),
            key_prefix: Some(prefix.to_owned()),
            ..ListFilter::default()
        };
        engine.list_page(&filter, None, 100).unwrap().records.len()
    };
    assert_eq!(of_run(&a, "workflow:run_1:"), 0);
    while let Some(code) = makers.join_next().await {
        assert_eq!(code.unwrap(), Code::Conflict);
    }
    assert_eq!(of_run(&a, "workflow:run_1:"), 0);
    assert_eq!((of_run(&b, "workflow:run_1:"), of_run(&a, "workflow:run_10:")), (1, 1));
    for record in neighbours {
        engine.close(&record, None).await.unwrap();
    }
    is_empty(state.path());
}

#[tokio::test]
async fn with_a_retention_a_run_is_closed_later() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let local = Tenant::local();
    let first = engine.sandbox(&key("agent:run_7:default"), &wish(&local)).await.unwrap().record;
    let hour = Some(Duration::from_secs(3600));
    let closed = engine.close_scope(&local, "agent", "run_7", hour).await.unwrap();
    assert_eq!((closed.closed.len(), &closed.later), (0, &vec![first.id.clone()]));
    let second = engine.sandbox(&key("agent:run_7:second"), &wish(&local)).await.unwrap().record;
    assert_eq!(second.close_at_unix_ms, Some(closed.at_unix_ms));
    engine.tidy().await.unwrap();
    assert_eq!(engine.list().unwrap().len(), 2);
    // An hour passes.
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry.execute("UPDATE sandboxes SET close_at_ms = close_at_ms - 3600001", []).unwrap();
    registry.execute("UPDATE closed_scopes SET closed_ms = closed_ms - 3600001", []).unwrap();
    drop(registry);
    engine.tidy().await.unwrap();
    assert_eq!(engine.list().unwrap().len(), 0);
    is_empty(state.path());
    let problem = engine.sandbox(&key("agent:run_7:third"), &wish(&local)).await.unwrap_err();
    assert_eq!(problem.code, Code::Conflict);
    is_empty(state.path());
    assert!(engine.close_scope(&local, "agent", "a:b", None).await.is_err());
}

#[tokio::test]
async fn a_caller_that_goes_away_leaves_a_whole_sandbox_or_none() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let wish = wish(&Tenant::local());
    for round in 0..20_u32 {
        let key = key("user:local:work");
        // Given up at its first waits, one after the other.
        {
            let mut making = std::pin::pin!(engine.sandbox(&key, &wish));
            for _ in 0..round % 4 {
                tokio::select! {
                    biased;
                    _ = &mut making => break,
                    () = tokio::task::yield_now() => {}
                }
            }
        }
        if round % 5 == 4 {
            let record = engine.sandbox(&key, &wish).await.unwrap().record;
            engine.close(&record, None).await.unwrap();
        }
    }
    let record = engine.sandbox(&key("user:local:work"), &wish).await.unwrap().record;
    engine.status(&record).await.unwrap();
    engine.close(&record, None).await.unwrap();
    engine.tidy().await.unwrap();
    assert_eq!(engine.list().unwrap().len(), 0);
    is_empty(state.path());
}

#[tokio::test]
async fn what_a_sandbox_is_can_be_changed_within_the_quota() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let owner = tenant(&engine);
    let quota = Some("sandboxes=1,memory=1GB".parse().unwrap());
    let record = engine.sandbox(&key("user:x:y"), &Wish { quota, ..wish(&owner) }).await.unwrap().record;
    let problem = engine.sandbox(&key("user:x:z"), &Wish { quota, ..wish(&owner) }).await.unwrap_err();
    assert_eq!(problem.code, Code::Quota);
    assert!(problem.message.contains(record.id.as_str()), "{problem:?}");
    assert_eq!(engine.nameless(&Wish { quota, ..wish(&owner) }).await.unwrap_err().code, Code::Quota);
    let labels = Labels::new(BTreeMap::from([("team".to_owned(), "a".to_owned())])).unwrap();
    let update = |memory: u64| Update {
        limits: Some(Limits { memory: ByteSize::mb(memory), ..Limits::default() }),
        labels: Some(labels.clone()),
        idle_timeout_s: Some(77),
        quota,
        ..Update::default()
    };
    assert_eq!(engine.update(&record, update(2048)).await.unwrap_err().code, Code::Quota);
    assert_eq!(engine.update(&record, update(0)).await.unwrap_err().code, Code::InvalidArgument);
    assert!(engine.record(&record.id).unwrap().unwrap().labels.is_empty());
    let after = engine.update(&record, update(1024)).await.unwrap();
    let stored = engine.record(&record.id).unwrap().unwrap();
    assert_eq!((&stored.spec, &stored.labels), (&after.spec, &labels));
    assert_eq!((stored.spec.idle_timeout_s, stored.spec.max_lifetime_s), (77, 3600));
    engine.close(&record, None).await.unwrap();
    assert_eq!(engine.update(&record, update(512)).await.unwrap_err().code, Code::SandboxNotFound);
    is_empty(state.path());
}

#[tokio::test]
async fn the_life_of_a_sandbox_is_told() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let (owner, other) = (tenant(&engine), tenant(&engine));
    let mut own = engine.events().subscribe(&owner, None);
    let mut others = engine.events().subscribe(&other, None);
    let mut all = engine.events().subscribe(&Tenant::local(), None);
    let wish = Wish { caller: Some("test".into()), ..wish(&owner) };
    let record = engine.sandbox(&key("user:x:y"), &wish).await.unwrap().record;
    let Heard::Event(first) = own.next().await else { panic!("a gap") };
    assert_eq!((first.event.kind, &first.event.sandbox), (Kind::SessionCreated, &Some(record.id.clone())));
    assert_eq!((&first.event.key, first.event.caller.as_deref()), (&Some(key("user:x:y")), Some("test")));
    engine.sandbox(&key("user:x:y"), &wish).await.unwrap();
    engine.stop(&record).await.unwrap();
    assert_eq!(engine.record(&record.id).unwrap().unwrap().state, State::Lost);
    engine.sandbox(&key("user:x:y"), &wish).await.unwrap();
    engine.update(&record, Update { idle_timeout_s: Some(5), ..Update::default() }).await.unwrap();
    engine.close_scope(&owner, "user", "x", None).await.unwrap();
    let told = [
        "session.retrieved",
        "session.stopped",
        "session.revived",
        "session.updated",
        "session.deleted",
        "scope.closed",
    ];
    assert_eq!(kinds(&mut own).await, told);
    assert_eq!(kinds(&mut all).await.len(), 7);
    assert!(kinds(&mut others).await.is_empty());
}

#[tokio::test]
async fn a_thousand_sandboxes_are_listed_page_by_page() {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    let local = Tenant::local();
    let first = engine.sandbox(&key("user:local:n0"), &wish(&local)).await.unwrap().record;
    engine.stop(&first).await.unwrap();
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry
        .execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 999)
             INSERT INTO sandboxes (id, key, state, spec, placed, boot, created_ms, used_ms)
             SELECT 'sbx_' || i, 'user:local:n' || i, state, spec, placed, boot, created_ms, used_ms FROM sandboxes, n",
            [],
        )
        .unwrap();
    drop(registry);
    let (mut seen, mut after) = (std::collections::BTreeSet::new(), None);
    loop {
        let page = engine.list_page(&ListFilter::default(), after, 64).unwrap();
        seen.extend(page.records.iter().map(|record| record.id.clone()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 1000);
    engine.tidy().await.unwrap();
    assert_eq!(engine.list().unwrap().len(), 1000, "they may still be brought back");
    let registry = rusqlite::Connection::open(state.path().join("registry.db")).unwrap();
    registry.execute("UPDATE sandboxes SET used_ms = 5", []).unwrap();
    drop(registry);
    engine.tidy().await.unwrap();
    assert_eq!(engine.list().unwrap().len(), 0);
    is_empty(state.path());
}
