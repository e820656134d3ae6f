use std::collections::BTreeMap;

use carrel_proto::{limits::ByteSize, problem::Code};

use super::*;

pub(crate) fn claim(id: &str) -> Claim {
    Claim {
        id: id.parse().unwrap(),
        tenant: Tenant::local(),
        key: None,
        spec: Spec {
            environment: "python".into(),
            limits: Limits::default(),
            isolation: IsolationLevel::Jail,
            project: None,
            idle_timeout_s: 60,
            max_lifetime_s: 600,
            standby_after_s: 300,
            hibernate_after_s: 1800,
            undo_calls: 3,
            whereabouts: None,
            ephemeral: None,
        },
        labels: Labels::default(),
        origin: None,
        forked_from: None,
        quota: None,
    }
}

fn tenant(name: &str) -> Tenant {
    Tenant::stored(name.to_owned())
}

fn keyed(id: &str, owner: &str, key: &str) -> Claim {
    Claim { tenant: tenant(owner), key: Some(key.parse().unwrap()), ..claim(id) }
}

fn registry() -> (tempfile::TempDir, Registry) {
    let place = tempfile::tempdir().unwrap();
    let registry = Registry::open(&place.path().join("registry.db")).unwrap();
    (place, registry)
}

fn ids(page: &Page) -> Vec<&str> {
    page.records.iter().map(|record| record.id.as_str()).collect()
}

#[test]
fn two_tenants_use_one_key_and_never_meet() {
    let (_place, registry) = registry();
    let key: Key = "workflow:run_1:default".parse().unwrap();
    for (id, owner) in [("sbx_a", "tok_a"), ("sbx_b", "tok_b"), ("sbx_l", "")] {
        assert!(registry.claim(&keyed(id, owner, key.as_str())).unwrap().is_some());
    }
    assert!(registry.claim(&keyed("sbx_c", "tok_a", key.as_str())).unwrap().is_none());
    let (a, b) = (tenant("tok_a"), tenant("tok_b"));
    assert_eq!(registry.by_key(&a, &key).unwrap().unwrap().id.as_str(), "sbx_a");
    let (own, others): (SandboxId, SandboxId) = ("sbx_a".parse().unwrap(), "sbx_b".parse().unwrap());
    assert!(registry.by_id_of(&a, &own).unwrap().is_some());
    assert!(registry.by_id_of(&a, &others).unwrap().is_none());
    assert!(registry.by_id_of(&Tenant::local(), &others).unwrap().is_some());
    registry.set_state(&own, State::Ended, None).unwrap();
    assert!(registry.claim(&keyed("sbx_d", "tok_a", key.as_str())).unwrap().is_some());
    assert_eq!(registry.by_key(&b, &key).unwrap().unwrap().id.as_str(), "sbx_b");
}

#[test]
fn pages_go_on_where_the_last_one_ended() {
    let (_place, registry) = registry();
    for number in 0..25 {
        registry.claim(&claim(&format!("sbx_{number:02}"))).unwrap();
    }
    let filter = ListFilter::default();
    let first = registry.page(&filter, None, 10).unwrap();
    // What comes and goes meanwhile moves nothing.
    registry.remove(&"sbx_09".parse().unwrap()).unwrap();
    registry.remove(&"sbx_11".parse().unwrap()).unwrap();
    registry.claim(&claim("sbx_new")).unwrap();
    let cursor: Cursor = first.next.unwrap().to_string().parse().unwrap();
    let second = registry.page(&filter, Some(cursor), 10).unwrap();
    assert_eq!((ids(&first)[9], ids(&second)[0], ids(&second)[1]), ("sbx_09", "sbx_10", "sbx_12"));
    let third = registry.page(&filter, second.next, 10).unwrap();
    assert_eq!(ids(&third), ["sbx_21", "sbx_22", "sbx_23", "sbx_24", "sbx_new"]);
    assert_eq!(third.next, None);
    // A page that is exactly full is the last one.
    assert_eq!(registry.page(&filter, second.next, 5).unwrap().next, None);
    assert_eq!(registry.page(&filter, None, u32::MAX).unwrap().records.len(), 24);
    assert_eq!(registry.page(&filter, None, 0).unwrap().records.len(), 1);
    for bad in ["", "c1", "x", "c1+0000001", "c1000000001", "c2000000001", "c1ZZZZZZZZ", "c1äääää"] {
        assert_eq!(bad.parse::<Cursor>().unwrap_err().code, Code::InvalidArgument, "{bad}");
    }
}

#[test]
fn filters_are_exact() {
    let (_place, registry) = registry();
    let labels = |pairs: &[(&str, &str)]| {
        Labels::new(pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect::<BTreeMap<_, _>>())
            .unwrap()
    };
    let add = |id: &str, owner: &str, key: &str, pairs: &[(&str, &str)]| {
        registry.claim(&Claim { labels: labels(pairs), ..keyed(id, owner, key) }).unwrap().unwrap();
    };
    add("sbx_1", "tok_a", "workflow:run_1:default", &[("team", "x"), ("a.b/c", "1")]);
    add("sbx_2", "tok_a", "workflow:run_1:db", &[("team", "x")]);
    add("sbx_3", "tok_a", "workflow:run_10:default", &[("team", "y")]);
    add("sbx_4", "tok_b", "workflow:run_1:default", &[("team", "x")]);
    add("sbx_5", "tok_a", "user:tok_a:gone", &[]);
    registry.set_state(&"sbx_5".parse().unwrap(), State::Ended, None).unwrap();
    registry.set_state(&"sbx_2".parse().unwrap(), State::Lost, None).unwrap();
    let of = |filter: ListFilter| {
        let page = registry.page(&filter, None, 100).unwrap();
        ids(&page).join(" ")
    };
    let a = || ListFilter { tenant: Some(tenant("tok_a")), ..ListFilter::default() };
    assert_eq!(of(ListFilter::default()), "sbx_1 sbx_2 sbx_3 sbx_4");
    assert_eq!(of(a()), "sbx_1 sbx_2 sbx_3");
    assert_eq!(of(ListFilter { tenant: Some(Tenant::local()), ..ListFilter::default() }), "");
    assert_eq!(of(ListFilter { key: Some("workflow:run_1:default".parse().unwrap()), ..a() }), "sbx_1");
    assert_eq!(of(ListFilter { key_prefix: Some("workflow:run_1:".into()), ..a() }), "sbx_1 sbx_2");
    assert_eq!(of(ListFilter { key_prefix: Some("workflow:run_1".into()), ..a() }), "sbx_1 sbx_2 sbx_3");
    assert_eq!(of(ListFilter { key_prefix: Some("workflow:run_%".into()), ..a() }), "");
    assert_eq!(of(ListFilter { state: Some(State::Lost), ..a() }), "sbx_2");
    assert_eq!(of(ListFilter { state: Some(State::Ended), ..a() }), "");
    let labelled = |pairs: &[(&str, &str)]| ListFilter {
        labels: pairs.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned())).collect(),
        ..a()
    };
    assert_eq!(of(labelled(&[("team", "x")])), "sbx_1 sbx_2");
    assert_eq!(of(labelled(&[("team", "x"), ("a.b/c", "1")])), "sbx_1");
    assert_eq!(of(labelled(&[("team", "")])), "");
    assert!(registry.page(&labelled(&[("a\" or 1", "x")]), None, 1).is_err());
}

#[test]
fn a_page_and_a_look_up_go_by_an_index() {
    let (_place, registry) = registry();
    let plan = |sql: &str| -> String {
        registry
            .read(|connection| {
                let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
                let rows = statement.query_map([], |row| row.get::<_, String>(3))?;
                rows.collect::<Result<Vec<_>, _>>()
            })
            .unwrap()
            .join("; ")
    };
    for sql in [
        "SELECT * FROM sandboxes WHERE tenant = 'a' AND key = 'b'",
        // Whether it is another's or never was: one search, which finds nothing.
        "SELECT * FROM sandboxes WHERE id = 'b' AND ('a' = '' OR tenant = 'a')",
        "SELECT * FROM sandboxes WHERE number > 5 AND tenant = 'a' AND state != 'ended' ORDER BY number LIMIT 5",
        "SELECT * FROM sandboxes WHERE number > 5 AND state != 'ended' ORDER BY number LIMIT 5",
        "SELECT * FROM sandboxes WHERE tenant = 'a' AND key >= 'x:' AND key < 'x;' AND state != 'ended'",
    ] {
        let plan = plan(sql);
        assert!(plan.contains("SEARCH") && !plan.contains("SCAN"), "{sql}: {plan}");
    }
}

#[test]
fn a_quota_says_what_is_used_up_and_by_what() {
    let (_place, registry) = registry();
    let quota = |text: &str| Some(text.parse::<Quota>().unwrap());
    let of_a = |id: &str, text: &str| Claim { tenant: tenant("tok_a"), quota: quota(text), ..claim(id) };
    for number in 0..8 {
        let all = "sandboxes=8,cpu=16,memory=4GB,disk=8GB";
        registry.claim(&of_a(&format!("sbx_{number}"), all)).unwrap().unwrap();
    }
    let refusal = |text: &str| registry.claim(&of_a("sbx_x", text)).unwrap_err();
    let problem = refusal("sandboxes=8");
    assert_eq!(problem.code, Code::Quota);
    assert_eq!(
        problem.message,
        "the quota of sandboxes is 8: 8 used by sbx_0, sbx_1, sbx_2, sbx_3, sbx_4, …; 1 asked for"
    );
    assert!(refusal("cpu=17").message.contains("the quota of cpu is 17 CPUs: 16 CPUs used"));
    assert!(refusal("memory=4GB").message.ends_with("512 MB asked for"));
    assert!(refusal("disk=8GB").message.contains("8 GB used"));
    // Somebody else's do not count, and neither do those that have ended.
    registry.claim(&Claim { tenant: tenant("tok_b"), ..of_a("sbx_b", "sandboxes=1") }).unwrap().unwrap();
    registry.set_state(&"sbx_3".parse().unwrap(), State::Ended, None).unwrap();
    registry.claim(&of_a("sbx_y", "sandboxes=8")).unwrap().unwrap();
    // A change counts without what it takes the place of.
    let id: SandboxId = "sbx_0".parse().unwrap();
    let record = registry.by_id(&id).unwrap().unwrap();
    let mut spec = record.spec.clone();
    spec.limits.memory = ByteSize::mb(1024);
    let set = |spec: &Spec, text: &str| {
        registry.set_spec(&record.tenant, &id, spec, &record.labels, quota(text).as_ref()).map_err(|p| p.code)
    };
    assert_eq!(set(&spec, "memory=4GB"), Err(Code::Quota));
    assert_eq!(registry.by_id(&id).unwrap().unwrap().spec.limits.memory, ByteSize::mb(512));
    assert_eq!(set(&spec, "memory=4608MB"), Ok(()));
    // What no number can hold is too much.
    spec.limits.memory = ByteSize(u64::MAX);
    assert_eq!(set(&spec, "memory=4608MB"), Err(Code::Quota));
}

#[test]
fn many_at_once_never_exceed_a_quota() {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("registry.db");
    let quota: Quota = "sandboxes=20,memory=5GB".parse().unwrap();
    let made: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|thread| {
                let path = &path;
                // A registry each, as separate processes have.
                scope.spawn(move || {
                    let registry = Registry::open(path).unwrap();
                    let one = |number: u32| {
                        let id = format!("sbx_{thread}_{number}");
                        registry.claim(&Claim { tenant: tenant("tok_a"), quota: Some(quota), ..claim(&id) })
                    };
                    (0..20).filter(|number| one(*number).is_ok()).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(made, 10, "5 GB hold ten sandboxes of 512 MB");
    assert_eq!(Registry::open(&path).unwrap().all().unwrap().len(), 10);
}

#[test]
fn a_closed_scope_takes_nobody_in_until_it_is_forgotten() {
    let (_place, registry) = registry();
    let a = tenant("tok_a");
    registry.claim(&keyed("sbx_1", "tok_a", "workflow:run_1:default")).unwrap().unwrap();
    let marked = registry.mark_scope(&a, "workflow", "run_1", now_ms()).unwrap();
    assert_eq!(marked.iter().map(SandboxId::as_str).collect::<Vec<_>>(), ["sbx_1"]);
    let refused = |owner: &str, key: &str| registry.claim(&keyed("sbx_2", owner, key)).map_err(|p| p.code);
    assert_eq!(refused("tok_a", "workflow:run_1:db").unwrap_err(), Code::Conflict);
    assert!(
        matches!(refused("tok_a", "workflow:run_1:default"), Ok(None)),
        "it is there, and will be closed"
    );
    for (owner, key) in
        [("tok_b", "workflow:run_1:db"), ("tok_a", "workflow:run_10:db"), ("tok_a", "agent:run_1:db")]
    {
        assert!(refused(owner, key).unwrap().is_some(), "{owner} {key}");
        registry.remove(&"sbx_2".parse().unwrap()).unwrap();
    }
    // In the future: what is made until then goes with the rest.
    let later = now_ms() + 3_600_000;
    registry.mark_scope(&a, "workflow", "run_1", later).unwrap();
    let made = registry.claim(&keyed("sbx_3", "tok_a", "workflow:run_1:db")).unwrap().unwrap();
    assert_eq!(made.close_at_unix_ms, Some(later));
    registry.sweep_scopes().unwrap();
    let left = || {
        registry.read(|c| c.query_row("SELECT COUNT(*) FROM closed_scopes", [], |row| row.get::<_, i64>(0)))
    };
    assert_eq!(left().unwrap(), 1);
    registry.mark_scope(&a, "workflow", "run_1", now_ms() - 25 * 3_600_000).unwrap();
    assert!(registry.claim(&keyed("sbx_4", "tok_a", "workflow:run_1:new")).unwrap().is_some());
    registry.sweep_scopes().unwrap();
    assert_eq!(left().unwrap(), 0);
}

#[test]
fn a_write_that_waits_holds_up_no_reader() {
    let (place, registry) = registry();
    registry.claim(&claim("sbx_1")).unwrap();
    // Another process is in the middle of a write; a thread of ours waits for it, and holds its connection.
    let mut other = Connection::open(place.path().join("registry.db")).unwrap();
    let theirs = other.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| registry.touch(&"sbx_1".parse().unwrap()));
        while registry.connection.try_lock().is_ok() {
            std::thread::yield_now();
        }
        assert_eq!(registry.all().unwrap().len(), 1);
        assert!(!writer.is_finished());
        theirs.commit().unwrap();
        writer.join().unwrap().unwrap();
    });
}
