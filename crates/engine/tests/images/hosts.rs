//! Images on a host that is another one by now: moved, upgraded, replaced.

use std::{fs, path::Path};

use carrel_engine::{
    Engine, Environments, Note, Settings, Source, State, Whereabouts, Wish,
    snapshots::{RestoreWish, SnapshotWish},
};
use carrel_proto::problem::Code;

use crate::world::{LOOK, SEEN, asleep, bash, close_all, image_of, in_time, key, open, pack, python, wish};

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
    let engine = open(&moved);
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
async fn an_interpreter_that_was_replaced_is_named_and_nothing_is_lost() {
    let (state, software) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    artifact(software.path());
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    environments.add("small".into(), Source::Artifact(software.path().into()));
    let engine = Engine::open(Settings { state: state.path().to_path_buf(), environments }).unwrap();
    if let Err(problem) = engine.can_hibernate() {
        return println!("skipped: {}", problem.message);
    }
    let wish = Wish { environment: Some("small".into()), ..wish() };
    let record = engine.sandbox(&key(), &wish).await.unwrap().record;
    bash(&engine, &record, "A=5; echo kept > file").await;
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
    assert_eq!(bash(&engine, &record, "echo $A $(< file)").await, "5 kept\n");
    // Whoever wants to go on with the new one does, over the files.
    let record = engine.record(&record.id).unwrap().unwrap();
    in_time("hibernating", engine.hibernate(&record)).await.unwrap();
    fs::write(&newer, [&old[..], &[0; 4096]].concat()).unwrap();
    fs::set_permissions(&newer, fs::metadata(&program).unwrap().permissions()).unwrap();
    fs::rename(&newer, &program).unwrap();
    engine.stop(&record).await.unwrap();
    let found = in_time("anew", engine.existing("work", Some(&key()))).await.unwrap();
    assert_eq!(bash(&engine, &found.record, "echo -$A- $(< file)").await, "-- kept\n");
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
