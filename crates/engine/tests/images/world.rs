//! What the tests of images have in common.

use std::{
    fs,
    future::Future,
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_engine::{
    Engine, Environments, Record, Settings, Whereabouts, Wish, call::Output, snapshots::SnapshotFilter,
};
use carrel_proto::{
    guest::Language,
    id::{Key, SessionName},
    message::Run,
    problem::Problem,
};

pub(crate) fn open(state: &Path) -> Engine {
    Engine::open(Settings {
        state: state.to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    })
    .unwrap()
}

pub(crate) fn wish() -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() }
}

pub(crate) fn key() -> Key {
    "user:local:work".parse().unwrap()
}

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(120), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

async fn run(engine: &Engine, record: &Record, language: Language, code: &str) -> String {
    let run = Run {
        session: SessionName::main(),
        language,
        code: code.to_owned(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    };
    in_time(code, async {
        let mut call = engine.run(record, run).await.unwrap();
        let mut out = Vec::new();
        loop {
            match call.next().await.unwrap() {
                Output::Bytes { bytes, .. } => out.extend_from_slice(bytes),
                Output::Finished(_) => return String::from_utf8_lossy(&out).into_owned(),
                _ => {}
            }
        }
    })
    .await
}

pub(crate) async fn python(engine: &Engine, record: &Record, code: &str) -> String {
    run(engine, record, Language::Python, code).await
}

pub(crate) async fn bash(engine: &Engine, record: &Record, code: &str) -> String {
    run(engine, record, Language::Bash, code).await
}

/// A state directory, an engine, and a hibernated sandbox that knows something; none, with the reason in the output, where
/// nothing can be hibernated.
pub(crate) async fn asleep() -> Option<(tempfile::TempDir, Engine, Record)> {
    let state = tempfile::tempdir().unwrap();
    let engine = open(state.path());
    if let Err(problem) = engine.can_hibernate() {
        println!("skipped: {}", problem.message);
        return None;
    }
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "x = 41; big = list(range(200000)); open('file', 'w').write('kept')").await;
    let record = in_time("hibernating", engine.hibernate(&record)).await.unwrap();
    Some((state, engine, record))
}

pub(crate) const LOOK: &str = "print(x, sum(big), open('/workspace/file').read())";
pub(crate) const SEEN: &str = "41 19999900000 kept\n";

pub(crate) fn image_of(state: &Path, record: &Record) -> PathBuf {
    state.join("sandboxes").join(record.id.as_str()).join(&record.image().unwrap().name)
}

pub(crate) fn pack(engine: &Engine) -> Result<u64, Problem> {
    engine.pack_images(Duration::ZERO, &mut Default::default(), &|| true)
}

pub(crate) async fn close_all(state: &Path, engine: &Engine) {
    for snapshot in engine.all_snapshots(&SnapshotFilter::default()).unwrap() {
        engine.delete_snapshot(&snapshot, None).await.unwrap();
    }
    for record in engine.list().unwrap() {
        engine.close(&record, None).await.unwrap();
    }
    engine.cleared().await.unwrap();
    let left: Vec<_> = ["snapshots", "sandboxes"]
        .iter()
        .flat_map(|place| fs::read_dir(state.join(place)).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(left, Vec::<PathBuf>::new());
    assert!(!state.join("packing").exists());
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(state.to_str().unwrap()), "{mounts}");
}
