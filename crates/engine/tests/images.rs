//! Images that stay: packed, damaged, moved to another place; with real boxes.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{
    cell::Cell,
    collections::HashSet,
    fs,
    future::Future,
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_engine::{
    Engine, Environments, Note, Record, Settings, Source, State, Wish,
    call::Output,
    snapshots::{RestoreWish, SnapshotFilter, SnapshotWish},
};
use carrel_proto::{
    guest::Language,
    id::{Key, SessionName},
    message::Run,
    problem::Code,
};

fn engine(state: &Path) -> Engine {
    Engine::open(Settings { state: state.to_path_buf(), environments: Environments::default() }).unwrap()
}

fn wish() -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() }
}

fn key() -> Key {
    "user:local:work".parse().unwrap()
}

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(120), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

async fn python(engine: &Engine, record: &Record, code: &str) -> String {
    run(engine, record, Language::Python, code).await
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

/// A state directory, an engine, and a hibernated sandbox that knows something; none, with the reason in the output, where
/// nothing can be hibernated.
#[expect(clippy::print_stdout, reason = "a skip has its reason in the output")]
async fn asleep() -> Option<(tempfile::TempDir, Engine, Record)> {
    let state = tempfile::tempdir().unwrap();
    let engine = engine(state.path());
    if let Err(problem) = engine.can_hibernate() {
        println!("skipped: {}", problem.message);
        return None;
    }
    let record = engine.sandbox(&key(), &wish()).await.unwrap().record;
    python(&engine, &record, "x = 41; big = list(range(200000)); open('file', 'w').write('kept')").await;
    let record = in_time("hibernating", engine.hibernate(&record)).await.unwrap();
    Some((state, engine, record))
}

const LOOK: &str = "print(x, sum(big), open('/workspace/file').read())";
const SEEN: &str = "41 19999900000 kept\n";

fn image_of(state: &Path, record: &Record) -> PathBuf {
    state.join("sandboxes").join(record.id.as_str()).join(&record.image().unwrap().name)
}

fn pack(engine: &Engine) -> Result<u64, carrel_proto::problem::Problem> {
    engine.pack_images(Duration::ZERO, &mut HashSet::new(), &|| true)
}

fn files_of(image: &Path) -> Vec<PathBuf> {
    let mut todo = vec![image.to_path_buf()];
    let mut files = Vec::new();
    while let Some(path) = todo.pop() {
        match path.is_dir() {
            true => todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path())),
            false => files.push(path),
        }
    }
    files
}

/// Cuts the largest file of an image in half.
fn cut(image: &Path) {
    let largest = files_of(image).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let length = fs::metadata(&largest).unwrap().len();
    fs::File::options().write(true).open(&largest).unwrap().set_len(length / 2).unwrap();
}

async fn close_all(state: &Path, engine: &Engine) {
    for snapshot in engine.all_snapshots(&SnapshotFilter::default()).unwrap() {
        engine.delete_snapshot(&snapshot, None).await.unwrap();
    }
    for record in engine.list().unwrap() {
        engine.close(&record, None).await.unwrap();
    }
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

#[tokio::test]
async fn a_packed_image_is_small_and_wakes_as_it_was() {
    let Some((state, engine, record)) = asleep().await else { return };
    let image = image_of(state.path(), &record);
    let before = record.image().unwrap().bytes;
    // What is younger than asked for stays as it is.
    let young = engine.pack_images(Duration::from_secs(3600), &mut HashSet::new(), &|| true);
    assert_eq!(young.unwrap(), 0);
    assert!(!image.join("agent.json.zst").exists());
    assert_eq!(pack(&engine).unwrap(), 1);
    let packed = engine.record(&record.id).unwrap().unwrap();
    assert_eq!(
        (packed.state, &packed.image().unwrap().name),
        (State::Hibernated, &record.image().unwrap().name)
    );
    let after = packed.image().unwrap().bytes;
    assert!(after * 2 < before, "{before} became {after}");
    assert!(image.join("agent.json.zst").exists() && !image.join("agent.json").exists());
    assert!(!state.path().join("packing").exists(), "the image of before is gone");
    assert_eq!(pack(&engine).unwrap(), 0, "once is enough");
    // Another engine, as after a reboot of the host.
    drop(engine);
    let engine = self::engine(state.path());
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!(found.note, None);
    assert_eq!(python(&engine, &found.record, LOOK).await, SEEN);
    let directory = state.path().join("sandboxes").join(record.id.as_str());
    let left: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("image"))
        .collect();
    assert_eq!(left, Vec::<String>::new());
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn snapshots_are_packed_and_restored_and_forked_from() {
    let Some((state, engine, record)) = asleep().await else { return };
    let snapshot = engine.snapshot(&record, &SnapshotWish::default()).await.unwrap();
    assert!(snapshot.content.memory);
    // The sandbox's own image and the snapshot's.
    assert_eq!(pack(&engine).unwrap(), 2);
    let packed = engine.all_snapshots(&SnapshotFilter::default()).unwrap().remove(0);
    assert!(packed.bytes < snapshot.bytes, "{} became {}", snapshot.bytes, packed.bytes);
    let image = state.path().join("snapshots").join(snapshot.id.as_str()).join("image");
    assert!(image.join("agent.json.zst").exists());
    let new = in_time("as new", engine.restore_as(&packed, &RestoreWish::default())).await.unwrap();
    assert_eq!(new.note, None);
    assert_eq!(python(&engine, &new.record, LOOK).await, SEEN);
    // Of one that sleeps in a packed image.
    let forked = in_time("a fork", engine.fork(&record, 1, None, None)).await.unwrap();
    assert!(forked.memory, "{forked:?}");
    assert_eq!(python(&engine, &forked.forks[0].record, LOOK).await, SEEN);
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn whoever_wakes_it_while_it_is_packed_wins() {
    let Some((state, engine, record)) = asleep().await else { return };
    let (begun, has_begun) = std::sync::mpsc::channel();
    let (woken, is_woken) = std::sync::mpsc::channel();
    let packer = self::engine(state.path());
    let packing = std::thread::spawn(move || {
        let first = Cell::new(true);
        packer.pack_images(Duration::ZERO, &mut HashSet::new(), &|| {
            // The second question comes in the midst of it.
            if !first.replace(false) && begun.send(()).is_ok() {
                let _: Result<(), _> = is_woken.recv();
            }
            true
        })
    });
    tokio::task::spawn_blocking(move || has_begun.recv().unwrap()).await.unwrap();
    assert!(state.path().join("packing").exists());
    // A sweep leaves alone what somebody is at work on.
    engine.sweep().unwrap();
    assert!(state.path().join("packing").exists());
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!(python(&engine, &found.record, LOOK).await, SEEN);
    drop(woken);
    assert_eq!(packing.join().unwrap().unwrap(), 0);
    assert_eq!(python(&engine, &record, LOOK).await, SEEN);
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn what_a_killed_packer_leaves_is_swept() {
    let Some((state, engine, record)) = asleep().await else { return };
    let (image, packing) = (image_of(state.path(), &record), state.path().join("packing"));
    // Half of it is packed.
    fs::create_dir(&packing).unwrap();
    fs::write(packing.join("agent.json.zst"), "half").unwrap();
    engine.sweep().unwrap();
    assert!(!packing.exists());
    assert_eq!(pack(&engine).unwrap(), 1);
    // The two have changed places, and the old one is still there.
    fs::create_dir(&packing).unwrap();
    fs::write(packing.join("manifest.json"), "old").unwrap();
    assert_eq!(pack(&engine).unwrap(), 0);
    assert!(!packing.exists());
    // One that stops half-way leaves the image as it is.
    assert!(image.join("agent.json.zst").exists());
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!((found.note, python(&engine, &found.record, LOOK).await.as_str()), (None, SEEN));
    let record = in_time("hibernating", engine.hibernate(&found.record)).await.unwrap();
    let asked = Cell::new(0);
    let stopped = engine.pack_images(Duration::ZERO, &mut HashSet::new(), &|| {
        asked.set(asked.get() + 1);
        asked.get() < 4
    });
    assert_eq!(stopped.unwrap(), 0);
    assert!(image_of(state.path(), &record).join("agent.json").exists() && !packing.exists());
    assert_eq!(python(&engine, &record, LOOK).await, SEEN);
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn damage_is_found_before_packing_and_after() {
    let Some((state, engine, record)) = asleep().await else { return };
    let snapshot = engine.snapshot(&record, &SnapshotWish::default()).await.unwrap();
    let store = state.path().join("snapshots").join(snapshot.id.as_str()).join("image");
    // Of its own, so that the snapshot is good: the two share their files.
    let image = image_of(state.path(), &record);
    let pages = files_of(&image).into_iter().max_by_key(|path| fs::metadata(path).unwrap().len()).unwrap();
    let content = fs::read(&pages).unwrap();
    fs::remove_file(&pages).unwrap();
    fs::write(&pages, &content[..content.len() / 2]).unwrap();
    let mut refused = HashSet::new();
    let problem = engine.pack_images(Duration::ZERO, &mut refused, &|| true).unwrap_err();
    assert_eq!(problem.code, Code::StateLost);
    assert_eq!(refused, HashSet::from([image.clone()]));
    assert!(!image.join("agent.json.zst").exists() && store.join("agent.json.zst").exists());
    cut(&store);
    let problem = engine.restore_as(&snapshot, &RestoreWish::default()).await.unwrap_err();
    assert_eq!(problem.code, Code::StateLost);
    assert_eq!(engine.list().unwrap().len(), 1, "nothing is left of it");
    // Mended, packed and damaged again: its files are kept.
    fs::write(&pages, &content).unwrap();
    assert_eq!(pack(&engine).unwrap(), 1);
    cut(&image);
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!(found.note, Some(Note::Damaged));
    assert_eq!(python(&engine, &found.record, "print(open('/workspace/file').read())").await, "kept\n");
    assert_eq!(python(&engine, &found.record, "print('x' in globals())").await, "False\n");
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn a_state_directory_that_was_moved_still_wakes() {
    let Some((state, engine, record)) = asleep().await else { return };
    assert_eq!(pack(&engine).unwrap(), 1);
    let unpacked = engine.sandbox(&"user:local:other".parse().unwrap(), &wish()).await.unwrap().record;
    python(&engine, &unpacked, "y = 7").await;
    let unpacked = in_time("hibernating", engine.hibernate(&unpacked)).await.unwrap();
    let snapshot = engine.snapshot(&record, &SnapshotWish::default()).await.unwrap();
    drop(engine);
    // As if the host had been switched off: nothing is mounted.
    for id in [&record.id, &unpacked.id] {
        let workspace = state.path().join("sandboxes").join(id.as_str()).join("workspace");
        let _ = rustix::mount::unmount(&workspace, rustix::mount::UnmountFlags::DETACH);
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let moved = elsewhere.path().join("another place/carrel");
    fs::create_dir_all(&moved).unwrap();
    let copied = std::process::Command::new("cp")
        .args(["--archive", "--sparse=always", "--no-target-directory", "--"])
        .args([state.path(), &moved])
        .status()
        .unwrap();
    assert!(copied.success());
    drop(state);
    let engine = self::engine(&moved);
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!((found.note, python(&engine, &found.record, LOOK).await.as_str()), (None, SEEN));
    assert_eq!(python(&engine, &unpacked, "print(y)").await, "7\n");
    let restored = in_time("restoring", engine.restore_as(&snapshot, &RestoreWish::default())).await.unwrap();
    assert_eq!((restored.note, python(&engine, &restored.record, LOOK).await.as_str()), (None, SEEN));
    close_all(&moved, &engine).await;
}

/// An environment of its own: a shell, and the libraries that it maps.
fn artifact(directory: &Path) {
    let shell = Path::new("/usr/bin/bash");
    let listed = std::process::Command::new("ldd").arg(shell).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    let libraries = text.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new);
    for file in [shell].into_iter().chain(libraries) {
        let target = directory.join("rootfs").join(file.strip_prefix("/").unwrap());
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(file, target).unwrap();
    }
    let manifest = "version = 1\ndefault = \"bash\"\n[interpreters.bash]\nprogram = \"/usr/bin/bash\"\n";
    fs::write(directory.join("manifest.toml"), manifest).unwrap();
}

#[tokio::test]
#[expect(clippy::print_stdout, reason = "a skip has its reason in the output")]
async fn an_interpreter_that_was_replaced_is_named_and_nothing_is_lost() {
    let (state, software) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    artifact(software.path());
    let mut environments = Environments::default();
    environments.add("small".into(), Source::Artifact(software.path().into()));
    let engine = Engine::open(Settings { state: state.path().to_path_buf(), environments }).unwrap();
    if let Err(problem) = engine.can_hibernate() {
        return println!("skipped: {}", problem.message);
    }
    let wish = Wish { environment: Some("small".into()), ..wish() };
    let record = engine.sandbox(&key(), &wish).await.unwrap().record;
    run(&engine, &record, Language::Bash, "A=5; echo kept > file").await;
    let record = in_time("hibernating", engine.hibernate(&record)).await.unwrap();
    let program = software.path().join("rootfs/usr/bin/bash");
    let old = fs::read(&program).unwrap();
    // An upgrade: another file of the same name, which works as well.
    let newer = software.path().join("newer");
    fs::write(&newer, [&old[..], &[0; 4096]].concat()).unwrap();
    fs::set_permissions(&newer, fs::metadata(&program).unwrap().permissions()).unwrap();
    fs::rename(&newer, &program).unwrap();
    let problem = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap_err();
    assert_eq!(problem.code, Code::Unsupported, "{problem:?}");
    assert!(problem.message.contains("usr/bin/bash"), "it names what has changed: {problem:?}");
    assert!(problem.hint.contains("files"), "{problem:?}");
    let asleep = engine.record(&record.id).unwrap().unwrap();
    assert_eq!((asleep.state, asleep.image()), (State::Hibernated, record.image()));
    let path = carrel_proto::files::GuestPath::parse(b"file").unwrap();
    assert!(engine.files(&asleep).unwrap().reader(&path).is_ok());
    // Put back, it is as it was.
    fs::write(&newer, &old).unwrap();
    fs::set_permissions(&newer, fs::metadata(&program).unwrap().permissions()).unwrap();
    fs::rename(&newer, &program).unwrap();
    assert_eq!(run(&engine, &record, Language::Bash, "echo $A $(< file)").await, "5 kept\n");
    // Whoever wants to go on with the new one does, over the files.
    let record = engine.record(&record.id).unwrap().unwrap();
    in_time("hibernating", engine.hibernate(&record)).await.unwrap();
    fs::write(&newer, [&old[..], &[0; 4096]].concat()).unwrap();
    fs::set_permissions(&newer, fs::metadata(&program).unwrap().permissions()).unwrap();
    fs::rename(&newer, &program).unwrap();
    engine.stop(&record).await.unwrap();
    let found = in_time("anew", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!(run(&engine, &found.record, Language::Bash, "echo -$A- $(< file)").await, "-- kept\n");
    close_all(state.path(), &engine).await;
}

#[tokio::test]
async fn an_image_of_another_kind_of_host_is_told() {
    let Some((state, engine, record)) = asleep().await else { return };
    let manifest = image_of(state.path(), &record).join("manifest.json");
    let before = fs::read_to_string(&manifest).unwrap();
    let change = |field: &str, value: serde_json::Value| {
        let mut told: serde_json::Value = serde_json::from_str(&before).unwrap();
        told[field] = value;
        fs::write(&manifest, told.to_string()).unwrap();
    };
    // A newer CRIU can be installed: nothing is given up.
    change("criu", "99.1".into());
    let problem = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap_err();
    assert!(problem.code == Code::Unsupported && problem.message.contains("99.1"), "{problem:?}");
    assert_eq!(engine.record(&record.id).unwrap().unwrap().state, State::Hibernated);
    // Another kernel is no reason not to try.
    change("kernel", "2.6.32".into());
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!((found.note, python(&engine, &found.record, LOOK).await.as_str()), (None, SEEN));
    // Of another machine nothing can ever be brought back: files are kept, and why is said.
    let record = in_time("hibernating", engine.hibernate(&found.record)).await.unwrap();
    let manifest = image_of(state.path(), &record).join("manifest.json");
    let other = fs::read_to_string(&manifest).unwrap().replace("\"machine\":\"", "\"machine\":\"not-");
    fs::write(&manifest, other).unwrap();
    let found = in_time("waking", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!(found.note, Some(Note::Damaged));
    assert_eq!(python(&engine, &found.record, "print(open('/workspace/file').read())").await, "kept\n");
    close_all(state.path(), &engine).await;
}
