//! A disk that is full: what sleeps stays where it is, and nothing of it is lost.

use std::{fs::File, io::Write, path::Path};

use carrel_engine::State;
use carrel_proto::{guest::Language::Python, problem::Code};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::world::{close_all, in_time, key, open, run, wish};

/// Enough for the state directory and one image.
const SIZE: &std::ffi::CStr = c"size=192m";
/// What is left free: enough for the registry, and not for what the interpreter holds.
const FREE: u64 = 4 << 20;

struct Disk(tempfile::TempDir);

impl Disk {
    fn mount() -> Option<Self> {
        let place = tempfile::tempdir().unwrap();
        let mounted = mount("tmpfs", place.path(), "tmpfs", MountFlags::empty(), SIZE);
        mounted.map_err(|error| println!("skipped: a small disk cannot be mounted: {error}")).ok()?;
        Some(Self(place))
    }

    /// Something else takes all the room but a little.
    fn fill(&self) -> std::path::PathBuf {
        let path = self.0.path().join("other");
        let mut file = File::create(&path).unwrap();
        let mut size = 0;
        while let Ok(count) = file.write(&[1; 64 << 10]) {
            size += count as u64;
        }
        file.set_len(size - FREE).unwrap();
        path
    }

    fn state(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

#[tokio::test]
async fn a_full_disk_keeps_a_sandbox_awake() {
    let Some(disk) = Disk::mount() else { return };
    let engine = open(disk.state());
    if let Err(problem) = engine.can_hibernate() {
        return println!("skipped: {}", problem.message);
    }
    let record = engine.sandbox(&key("full"), &wish()).await.unwrap().record;
    let code = "import os, hashlib; big = os.urandom(24 << 20); print(hashlib.md5(big).hexdigest())";
    let sum = run(&engine, &record, Python, code).await.unwrap().out;
    let same =
        async || run(&engine, &record, Python, "print(hashlib.md5(big).hexdigest())").await.unwrap().out;
    for frozen in [false, true] {
        let other = disk.fill();
        if frozen {
            in_time("standby", engine.standby(&record)).await.unwrap();
        }
        let problem = in_time("hibernate", engine.hibernate(&record)).await.unwrap_err();
        assert_eq!((problem.code, problem.hint.is_empty()), (Code::Disk, false), "{problem:?}");
        let expected = if frozen { State::Standby } else { State::Running };
        assert_eq!(engine.record(&record.id).unwrap().unwrap().state, expected);
        assert_eq!(same().await, sum);
        std::fs::remove_file(other).unwrap();
    }
    let record = in_time("hibernate", engine.hibernate(&record)).await.unwrap();
    // There is no room to pack it: it stays as it is, and nothing lies about.
    let other = disk.fill();
    let pack = || engine.pack_images(std::time::Duration::ZERO, &mut Default::default(), &|| true);
    assert_eq!(pack().unwrap_err().code, Code::Disk);
    assert_eq!(engine.record(&record.id).unwrap().unwrap().image(), record.image());
    std::fs::remove_file(other).unwrap();
    engine.sweep().unwrap();
    assert!(!disk.state().join("packing").exists());
    assert_eq!(pack().unwrap(), 1);
    // Nor to unpack it: it sleeps on, and wakes when there is.
    let other = disk.fill();
    let problem = run(&engine, &record, Python, "1").await.map(|ran| ran.out).unwrap_err();
    assert_eq!((problem.code, problem.hint.is_empty()), (Code::Disk, false), "{problem:?}");
    assert_eq!(engine.record(&record.id).unwrap().unwrap().state, State::Hibernated);
    std::fs::remove_file(other).unwrap();
    assert_eq!(same().await, sum);
    close_all(disk.state()).await;
}
