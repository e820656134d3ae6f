//! Images that stay are packed: small, as good as before, and in nobody's way.

use std::{
    cell::Cell,
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_engine::{
    Note, State,
    keeper::Keeper,
    snapshots::{RestoreWish, SnapshotFilter, SnapshotWish},
};
use carrel_proto::problem::Code;

use crate::world::{LOOK, SEEN, asleep, close_all, image_of, in_time, key, open, pack, python};

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
    let engine = open(state.path());
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
async fn the_keeper_packs_what_has_slept_for_long() {
    let Some((state, engine, record)) = asleep().await else { return };
    let image = image_of(state.path(), &record);
    Keeper::new(None).round(&engine).await.unwrap();
    assert!(!state.path().join("packing.lock").exists(), "one that never packs does not begin");
    let mut keeper = Keeper::new(Some(Duration::ZERO));
    in_time("packing", async {
        // Until what was there before is gone, too.
        while !image.join("agent.json.zst").exists() || state.path().join("packing").exists() {
            keeper.round(&engine).await.unwrap();
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(python(&engine, &record, LOOK).await, SEEN);
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
    let packer = open(state.path());
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
