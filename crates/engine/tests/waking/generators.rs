//! One image, restored several times: no generator of random numbers gives any of the copies what another one gets, unless it was
//! given a seed for that.

use std::collections::BTreeMap;

use carrel_engine::snapshots::{RestoreWish, SnapshotWish};
use carrel_proto::{
    guest::Language::{self, Bash, Node, Python},
    id::SessionName,
};

use crate::{
    run, with_memory,
    world::{close_all, in_time, key, wish},
};

/// Draws from every generator there is, one to a line: `name value`.
const DRAW_PYTHON: &str = "\
import os, random, secrets, ssl, uuid
def draw():
    print('random', random.random())
    print('secrets', secrets.token_hex())
    print('urandom', os.urandom(8).hex())
    print('uuid', uuid.uuid4())
    print('openssl', ssl.RAND_bytes(8).hex())
draw()";
const DRAW_NUMPY: &str = "\
import numpy
kept, seeded, legacy = numpy.random.default_rng(), numpy.random.default_rng(42), numpy.random.RandomState(42)
def draw_numpy():
    print('numpy', numpy.random.random())
    print('numpy_new', numpy.random.default_rng().random())
    print('numpy_kept', kept.random())
    print('same_numpy_seeded', seeded.random())
    print('same_numpy_legacy', legacy.random_sample())
draw_numpy()";
const DRAW_BASH: &str = "\
draw() {
  echo random $RANDOM $RANDOM $RANDOM
  [ -z \"$SRANDOM\" ] || echo srandom $SRANDOM $SRANDOM
}
draw";
const DRAW_NODE: &str = "\
var openssl = require('crypto'), random = Math.random;
var key = () => openssl.generateKeyPairSync('x25519').privateKey.export({ type: 'pkcs8', format: 'der' }).toString('hex');
var draw = () => {
  console.log('math', Math.random());
  console.log('math_kept', random());
  console.log('bytes', openssl.randomBytes(8).toString('hex'));
  console.log('uuid', openssl.randomUUID());
  console.log('integer', openssl.randomInt(2 ** 47));
  console.log('web', openssl.webcrypto.getRandomValues(new Uint32Array(2)).join('-'));
  console.log('key', key());
};
draw()";

fn lines(told: &str) -> impl Iterator<Item = (String, String)> {
    let pair = |line: &str| line.split_once(' ').map(|(name, value)| (name.to_owned(), value.to_owned()));
    told.lines().filter_map(pair).collect::<Vec<_>>().into_iter()
}

#[tokio::test]
async fn copies_of_one_image_have_numbers_of_their_own() {
    let Some((state, engine)) = with_memory() else { return };
    let record = engine.sandbox(&key("random"), &wish()).await.unwrap().record;
    let mut draws: Vec<(Language, &str, &str)> =
        vec![(Python, DRAW_PYTHON, "draw()"), (Bash, DRAW_BASH, "draw"), (Node, DRAW_NODE, "draw()")];
    let look = "import importlib.util as u; print(u.find_spec('numpy') is not None)";
    if run(&engine, &record, Python, look).await == "True" {
        draws.push((Python, DRAW_NUMPY, "draw_numpy()"));
    } else {
        println!("numpy is not here, so it is not tried");
    }
    for (language, setup, _) in &draws {
        run(&engine, &record, *language, setup).await;
    }
    let snapshot = in_time("snapshot", engine.snapshot(&record, &SnapshotWish::default())).await.unwrap();
    let forked = in_time("fork", engine.fork(&record, 2, None, None)).await.unwrap();
    let mut records: Vec<_> = forked.forks.into_iter().map(|fork| fork.record).collect();
    for _ in 0..2 {
        let restored =
            in_time("restore", engine.restore_as(&snapshot, &RestoreWish::default())).await.unwrap();
        records.push(restored.record);
    }
    let back = in_time("restore", engine.restore_in_place(&snapshot, &RestoreWish::default())).await.unwrap();
    records.push(back.record);
    let mut seen: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for record in &records {
        for (language, _, draw) in &draws {
            let told = run(&engine, record, *language, draw).await;
            for (name, value) in lines(&told) {
                seen.entry(format!("{language:?} {name}")).or_default().push(value);
            }
        }
    }
    let mut wrong = Vec::new();
    for (name, values) in &seen {
        let mut different = values.clone();
        different.sort();
        different.dedup();
        let expected = if name.contains("same_") { 1 } else { values.len() };
        if values.len() < records.len() || different.len() != expected {
            wrong.push((name, values));
        }
    }
    assert!(seen.len() > 10 && wrong.is_empty(), "{wrong:#?}");
    engine.delete_snapshot(&snapshot, None).await.unwrap();
    close_all(state.path()).await;
}

/// What is gone back to is the state as it was, `random` included. Numbers that guard something are never the same again.
#[tokio::test]
async fn secrets_are_not_given_again_after_an_undo() {
    let state = tempfile::tempdir().unwrap();
    let engine = crate::world::open(state.path());
    let record = engine.sandbox(&key("undone"), &wish()).await.unwrap().record;
    run(&engine, &record, Python, DRAW_PYTHON).await;
    let first = run(&engine, &record, Python, "draw()").await;
    in_time("undo", engine.undo(&record, &SessionName::main(), Some(Python), 1)).await.unwrap();
    let second = run(&engine, &record, Python, "draw()").await;
    for ((name, one), (_, other)) in lines(&first).zip(lines(&second)) {
        assert_eq!(one == other, name == "random", "{name}: {one} {other}");
    }
    close_all(state.path()).await;
}
