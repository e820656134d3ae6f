//! Operations against somebody who swaps a directory for a link to the outside as fast as the kernel can. Bounded by
//! iterations; what an operation answers is its own affair, what it touches is not.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
};

use carrel_files::{OutsideLinks, TreeLimits, WriteOptions, read_tar, write_tar};
use carrel_proto::files::{Replace, Search};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::{Desk, SECRET, path};

const ROUNDS: usize = 3000;

/// Runs `each` for so many rounds while `one` and `two` (a directory and a link) change places.
fn while_swapping(one: &Path, two: &Path, rounds: usize, mut each: impl FnMut(usize)) {
    let done = AtomicBool::new(false);
    let swaps = AtomicU64::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                if renameat_with(CWD, one, CWD, two, RenameFlags::EXCHANGE).is_ok() {
                    swaps.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        struct Done<'a>(&'a AtomicBool);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let _done = Done(&done);
        // On one core the other thread may not have run yet; then we go on, but not for ever.
        for round in 0..50 * rounds {
            if round >= rounds && swaps.load(Ordering::Relaxed) > 0 {
                break;
            }
            each(round);
        }
    });
    println!("{} swaps", swaps.into_inner());
}

/// A desk whose `d` is a directory and `l` a link to the outside.
fn prepared(target: &str) -> Desk {
    let desk = Desk::new();
    fs::create_dir_all(desk.workspace.join("d/sub/deep")).unwrap();
    fs::write(desk.workspace.join("d/canary"), "inside").unwrap();
    let target = if target.is_empty() { desk.outside.to_str().unwrap() } else { target };
    symlink(target, desk.workspace.join("l")).unwrap();
    desk
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    haystack.windows(needle.len()).any(|window| window == needle)
}

#[test]
fn nothing_outside_is_read() {
    for target in ["../outside", ""] {
        let desk = prepared(target);
        let (root, limits) = (&desk.root, TreeLimits::default());
        let search = Search {
            path: path("d"),
            glob: None,
            text: Some("canary".into()),
            regex: false,
            ignore_case: false,
            limit: 10,
            max_file: None,
        };
        let mut read = 0;
        while_swapping(&desk.workspace.join("d"), &desk.workspace.join("l"), ROUNDS, |round| {
            if let Ok(reply) = root.read(&path("d/canary"), 0, None) {
                assert_eq!(reply.data.as_bytes(), b"inside");
                read += 1;
            }
            if let Ok(entry) = root.stat(&path("d/canary"), true) {
                assert_eq!(entry.size, 6);
            }
            if let Ok(listing) = root.list(&path("d"), 3, 100, None) {
                assert!(listing.entries.iter().all(|e| e.name.as_bytes() != b"sub/deep/canary"));
            }
            if let Ok(found) = root.search(&search) {
                assert!(found.matches.is_empty());
            }
            let mut archive = Vec::new();
            if round % 10 == 0 && write_tar(root, &path("."), &mut archive, &limits).is_ok() {
                assert!(!contains(&archive, SECRET));
            }
        });
        println!("{read} of {ROUNDS} reads met the directory");
        desk.assert_outside_untouched();
    }
}

#[test]
fn nothing_outside_is_written() {
    for target in ["../outside", ""] {
        let desk = prepared(target);
        let root = &desk.root;
        let append = WriteOptions { append: true, parents: true, ..WriteOptions::default() };
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_size(4);
        header.set_mode(0o644);
        archive.append_data(&mut header, "d/uploaded/file", &b"tar!"[..]).unwrap();
        archive.append_data(&mut header, "d/canary", &b"tar!"[..]).unwrap();
        let archive = archive.into_inner().unwrap();
        let replace = Replace {
            path: path("d"),
            glob: None,
            find: "canary".into(),
            with: "dead".into(),
            regex: false,
            expect: None,
        };
        while_swapping(&desk.workspace.join("d"), &desk.workspace.join("l"), ROUNDS / 2, |round| {
            let _ = root.write(&path("d/canary"), b"inside", WriteOptions::default());
            let _ = root.write(&path("d/new"), b"!", append);
            let _ = root.mkdir(&path(format!("d/m{}/n", round % 50)), true, Some(0o700));
            let _ = root.write(&path("f"), b"!", WriteOptions::default());
            let _ = root.rename(&path("f"), &path("d/moved"), true, false);
            let _ = root.rename(&path("d/sub"), &path("d/sub2"), true, true);
            let _ = root.rename(&path("d/canary"), &path("stolen"), true, false);
            let _ = root.replace(&replace);
            if round % 4 == 0 {
                let _ = read_tar(root, &path("."), &*archive, &TreeLimits::default(), OutsideLinks::Refuse);
            }
        });
        assert_ne!(fs::read(desk.workspace.join("stolen")).unwrap_or_default(), SECRET);
        desk.assert_outside_untouched();
    }
}

#[test]
fn nothing_outside_is_deleted() {
    for target in ["../outside", ""] {
        let desk = prepared(target);
        let root = &desk.root;
        while_swapping(&desk.workspace.join("d"), &desk.workspace.join("l"), ROUNDS, |_| {
            let _ = root.mkdir(&path("d/sub/deep"), true, None);
            let _ = root.write(&path("d/sub/deep/canary"), b"in", WriteOptions::default());
            let _ = root.delete(&path("d/sub"), true);
            let _ = root.delete(&path("d/canary"), true);
        });
        desk.assert_outside_untouched();
        // And inside of the tree that is being deleted.
        let (one, two) = (desk.workspace.join("t/d"), desk.workspace.join("t/l"));
        let aim = if target.is_empty() { desk.outside.to_str().unwrap() } else { "../../outside" };
        while_swapping(&one, &two, ROUNDS / 5, |_| {
            let _ = fs::create_dir_all(desk.workspace.join("t/x/y"));
            let _ = fs::create_dir_all(one.join("sub/deep"));
            let _ = symlink(aim, &two);
            let _ = root.delete(&path("t"), true);
        });
        desk.assert_outside_untouched();
    }
}

#[test]
fn readers_see_the_old_or_the_new() {
    let desk = Desk::new();
    let (old, new) = (vec![b'a'; 100_000], vec![b'b'; 70_000]);
    desk.root.write(&path("f"), &old, WriteOptions::default()).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..1000 {
                let data = if round % 2 == 0 { &new } else { &old };
                desk.root.write(&path("f"), data, WriteOptions::default()).unwrap();
            }
        });
        for _ in 0..1000 {
            let seen = desk.root.read(&path("f"), 0, None).unwrap().data.0;
            assert!(seen == old || seen == new, "{} bytes", seen.len());
        }
    });
    assert_eq!(desk.names(), ["f"]);
}
