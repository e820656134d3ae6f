//! Much of everything: entries, depth, bytes.

use std::{
    collections::BTreeSet,
    fs,
    io::{self, Read},
    os::fd::OwnedFd,
};

use carrel_files::{OutsideLinks, Root, TreeLimits, WriteOptions, read_tar, write_tar};
use carrel_proto::files::Name;
use rustix::fs::{Mode, OFlags, mkdirat, openat};

use crate::{Desk, alone, code, path};

fn pages(root: &Root, depth: u32, limit: u32) -> Vec<Vec<u8>> {
    let mut names = Vec::new();
    let mut after: Option<Name> = None;
    loop {
        let page = root.list(&path("."), depth, limit, after.as_ref()).unwrap();
        assert!(page.entries.len() <= limit as usize);
        names.extend(page.entries.into_iter().map(|entry| entry.name.0));
        match page.next {
            Some(next) => after = Some(next),
            None => return names,
        }
    }
}

#[test]
fn ten_thousand_entries_come_in_order_once() {
    let desk = Desk::new();
    for n in 0..10_000 {
        fs::write(desk.workspace.join(format!("f{n}")), "").unwrap();
    }
    let names = pages(&desk.root, 1, 777);
    assert_eq!(names.len(), 10_000);
    assert!(names.is_sorted_by(|a, b| a < b));
    assert_eq!(desk.root.delete(&path("f0"), false).unwrap().removed, 1);
    assert_eq!(pages(&desk.root, 1, 1000).len(), 9999);
}

#[test]
fn recursive_pages_resume_anywhere() {
    let desk = Desk::new();
    let mut expected = BTreeSet::new();
    for a in ["a", "a.b", "b", "c"] {
        expected.insert(vec![a.to_owned()]);
        for b in 0..12 {
            expected.insert(vec![a.to_owned(), format!("d{b}")]);
            fs::create_dir_all(desk.workspace.join(format!("{a}/d{b}"))).unwrap();
            for c in 0..3 {
                fs::write(desk.workspace.join(format!("{a}/d{b}/{c}")), "").unwrap();
                expected.insert(vec![a.to_owned(), format!("d{b}"), c.to_string()]);
            }
        }
    }
    let expected: Vec<_> = expected.into_iter().map(|parts| parts.join("/").into_bytes()).collect();
    for limit in [1, 2, 7, 50, 1000] {
        assert_eq!(pages(&desk.root, 3, limit), expected, "{limit}");
    }
    assert_eq!(pages(&desk.root, 2, 5).len(), 4 + 48);
    // What a page ended with may be gone by the next one.
    let first = desk.root.list(&path("."), 3, 7, None).unwrap();
    desk.root.delete(&path("a"), true).unwrap();
    let second = desk.root.list(&path("."), 3, 1, first.next.as_ref()).unwrap();
    assert_eq!(second.entries[0].name.as_bytes(), b"a.b");
    assert_eq!(code(desk.root.list(&path("."), 3, 1, Some(&Name::from("../x")))), "invalid_argument");
}

#[test]
fn ten_thousand_levels_are_deleted_with_few_descriptors() {
    if !alone("large::ten_thousand_levels_are_deleted_with_few_descriptors", None) {
        return;
    }
    let desk = Desk::new();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let mut dir: OwnedFd = fs::File::open(&desk.workspace).unwrap().into();
    for level in 0..10_000 {
        if level % 1000 == 500 {
            mkdirat(&dir, "beside", Mode::RWXU).unwrap();
        }
        mkdirat(&dir, "d", Mode::RWXU).unwrap();
        dir = openat(&dir, "d", flags, Mode::empty()).unwrap();
    }
    drop(dir);
    let few = rustix::process::Rlimit { current: Some(100), maximum: Some(100) };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, few).unwrap();
    assert_eq!(desk.root.delete(&path("d"), true).unwrap().removed, 10_010 - 1 + 1);
    assert!(desk.names().is_empty());
}

/// Of our own memory: the most that was ever in use, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_gigabyte_streams_in_constant_memory() {
    if !alone("large::a_gigabyte_streams_in_constant_memory", None) {
        return;
    }
    let desk = Desk::new();
    let size = 1 << 30;
    fs::create_dir(desk.workspace.join("from")).unwrap();
    fs::File::create(desk.workspace.join("from/big")).unwrap().set_len(size).unwrap();
    let before = peak();
    let mut reader = desk.root.reader(&path("from/big")).unwrap();
    assert_eq!(io::copy(&mut reader.by_ref().take(256 << 20), &mut io::sink()).unwrap(), 256 << 20);
    let mut writer = desk.root.writer(&path("copy"), WriteOptions::default()).unwrap();
    io::copy(&mut reader.take(32 << 20), &mut writer).unwrap();
    writer.commit().unwrap();
    let (output, input) = io::pipe().unwrap();
    std::thread::scope(|scope| {
        let packing = scope.spawn(|| write_tar(&desk.root, &path("from"), input, &TreeLimits::default()));
        let report =
            read_tar(&desk.root, &path("to"), output, &TreeLimits::default(), OutsideLinks::Refuse).unwrap();
        assert_eq!((report.files, report.bytes), (1, size));
        // The writer may still be at the end mark when the reader has seen enough of it.
        let _ = packing.join().unwrap();
    });
    let grown = peak() - before;
    assert!(grown < 16 << 20, "{grown} bytes");
    let meta = fs::metadata(desk.workspace.join("to/big")).unwrap();
    assert_eq!(meta.len(), size);
    // Zeros became a hole again.
    assert!(std::os::unix::fs::MetadataExt::blocks(&meta) < 1000);
}

#[test]
fn limits_end_what_has_no_end() {
    let desk = Desk::new();
    fs::File::create(desk.workspace.join("huge")).unwrap().set_len(1 << 42).unwrap();
    let limits = TreeLimits { bytes: 1 << 30, entries: 10 };
    assert_eq!(code(write_tar(&desk.root, &path("."), io::sink(), &limits)), "too_large");
    desk.root.delete(&path("huge"), false).unwrap();
    for n in 0..11 {
        fs::write(desk.workspace.join(n.to_string()), "").unwrap();
    }
    assert_eq!(code(write_tar(&desk.root, &path("."), io::sink(), &limits)), "too_large");
}
