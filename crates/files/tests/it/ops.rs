//! Everyday operations.

use std::{
    fs,
    io::{Read, Write},
    os::unix::fs::{MetadataExt, PermissionsExt},
};

use carrel_files::{Owner, Root, WriteOptions, serve};
use carrel_proto::files::{self as wire, Content, FileReply, FileRequest, Kind};

use crate::{Desk, code, is_root, path};

#[test]
fn a_file_is_written_read_moved_and_deleted() {
    let desk = Desk::new();
    let ask = |request| serve(&desk.root, request);
    let write = wire::Write {
        path: path("/workspace/a/b.txt"),
        data: Content::from("hello"),
        append: false,
        overwrite: false,
        mode: None,
        parents: true,
        sync: true,
    };
    let FileReply::Write(entry) = ask(FileRequest::Write(write.clone())).unwrap() else { panic!() };
    assert_eq!((entry.kind, entry.size, entry.mode), (Kind::File, 5, 0o644));
    assert_eq!(code(ask(FileRequest::Write(write.clone()))), "exists");
    ask(FileRequest::Write(wire::Write { append: true, overwrite: true, ..write })).unwrap();
    let read = wire::Read { path: path("a/b.txt"), offset: 3, len: Some(4) };
    let FileReply::Read(reply) = ask(FileRequest::Read(read)).unwrap() else { panic!() };
    assert_eq!((reply.data, reply.size, reply.eof), (Content::from("lohe"), 10, false));
    let moved = wire::Move { from: path("a/b.txt"), to: path("c/d.txt"), overwrite: false, parents: true };
    ask(FileRequest::Move(moved)).unwrap();
    assert_eq!(fs::read(desk.workspace.join("c/d.txt")).unwrap(), b"hellohello");
    let delete = wire::Delete { path: path("c"), recursive: false };
    assert_eq!(code(ask(FileRequest::Delete(delete.clone()))), "not_empty");
    let FileReply::Delete(deleted) =
        ask(FileRequest::Delete(wire::Delete { recursive: true, ..delete })).unwrap()
    else {
        panic!()
    };
    assert_eq!(deleted.removed, 2);
    assert_eq!(desk.names(), ["a"]);
}

#[test]
fn streams_commit_or_leave_nothing() {
    let desk = Desk::new();
    desk.root.write(&path("f"), b"old", WriteOptions::default()).unwrap();
    let mut writer = desk.root.writer(&path("f"), WriteOptions::default()).unwrap();
    writer.write_all(b"new").unwrap();
    writer.abort();
    drop(desk.root.writer(&path("g"), WriteOptions::default()).unwrap());
    assert_eq!(desk.names(), ["f"]);
    let mut writer = desk.root.writer(&path("f"), WriteOptions::default()).unwrap();
    writer.write_all(b"new").unwrap();
    let mut text = String::new();
    desk.root.reader(&path("f")).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "old");
    writer.commit().unwrap();
    assert_eq!(desk.root.read(&path("f"), 0, None).unwrap().data, Content::from("new"));
    // Two creators: the second loses at the rename at the latest.
    let new = WriteOptions { create_new: true, ..WriteOptions::default() };
    let (one, two) = (desk.root.writer(&path("n"), new).unwrap(), desk.root.writer(&path("n"), new).unwrap());
    one.commit().unwrap();
    assert_eq!(code(two.commit()), "exists");
    assert_eq!(desk.names(), ["f", "n"]);
}

#[test]
fn errors_tell_what_is_in_the_way() {
    let desk = Desk::new();
    let root = &desk.root;
    root.mkdir(&path("d"), false, None).unwrap();
    root.write(&path("f"), b"x", WriteOptions::default()).unwrap();
    assert_eq!(code(root.read(&path("d"), 0, None)), "is_a_directory");
    assert_eq!(code(root.read(&path("."), 0, None)), "is_a_directory");
    assert_eq!(code(root.write(&path("."), b"", WriteOptions::default())), "is_a_directory");
    assert_eq!(code(root.write(&path("d"), b"", WriteOptions::default())), "is_a_directory");
    assert_eq!(code(root.write(&path("f/x"), b"", WriteOptions::default())), "not_a_directory");
    assert_eq!(code(root.write(&path("no/x"), b"", WriteOptions::default())), "not_found");
    assert_eq!(code(root.read(&path("no"), 0, None)), "not_found");
    assert_eq!(code(root.list(&path("f"), 1, 10, None)), "not_a_directory");
    assert_eq!(code(root.mkdir(&path("d"), false, None)), "exists");
    assert_eq!(code(root.mkdir(&path("."), false, None)), "exists");
    assert_eq!(code(root.mkdir(&path("f"), true, None)), "not_a_directory");
    root.mkdir(&path("d"), true, None).unwrap();
    assert_eq!(code(root.rename(&path("f"), &path("d"), false, false)), "exists");
    assert_eq!(code(root.rename(&path("f"), &path("d"), true, false)), "is_a_directory");
    assert_eq!(code(root.rename(&path("d"), &path("d/e"), false, false)), "invalid_argument");
    assert_eq!(code(root.delete(&path("."), true)), "invalid_path");
    assert_eq!(code(root.delete(&path("d/.."), true)), "invalid_path");
    assert_eq!(code(root.write(&path("n".repeat(256)), b"", WriteOptions::default())), "invalid_path");
    let error = root.read(&path(b"no\xff\n"), 0, None).unwrap_err();
    assert_eq!(error.to_string(), "no\\xff\\n does not exist");
    assert!(!error.hint().is_empty());
}

#[test]
fn a_whole_read_is_whole_or_an_error() {
    let desk = Desk::new();
    let file = fs::File::create(desk.workspace.join("big")).unwrap();
    file.set_len(wire::MAX_READ + 1).unwrap();
    assert_eq!(code(desk.root.read(&path("big"), 0, None)), "too_large");
    let reply = desk.root.read(&path("big"), 1, None).unwrap();
    assert_eq!((reply.data.0.len() as u64, reply.eof), (wire::MAX_READ, true));
    let reply = desk.root.read(&path("big"), wire::MAX_READ + 5, Some(9)).unwrap();
    assert!(reply.eof && reply.data.0.is_empty());
    assert_eq!(code(desk.root.read(&path("big"), u64::MAX, None)), "invalid_argument");
}

#[test]
fn modes_keep_nine_bits_and_owners_are_given() {
    let desk = Desk::new();
    let mode = |name: &str| fs::metadata(desk.workspace.join(name)).unwrap().mode() & 0o7777;
    let all = WriteOptions { mode: Some(0o7777), ..WriteOptions::default() };
    desk.root.write(&path("f"), b"", all).unwrap();
    desk.root.mkdir(&path("d"), false, Some(0o7711)).unwrap();
    assert_eq!((mode("f"), mode("d")), (0o777, 0o711));
    fs::set_permissions(desk.workspace.join("f"), PermissionsExt::from_mode(0o4751)).unwrap();
    desk.root.write(&path("f"), b"x", WriteOptions::default()).unwrap();
    assert_eq!(mode("f"), 0o751);
    if !is_root() {
        println!("skip owners: not root");
        return;
    }
    let root = Root::open(&desk.workspace).unwrap().with_owner(Owner { uid: 12345, gid: 54321 });
    let parents = WriteOptions { parents: true, ..WriteOptions::default() };
    root.write(&path("p/q/f"), b"", parents).unwrap();
    root.write(&path("p/a"), b"", WriteOptions { append: true, ..parents }).unwrap();
    for name in ["p", "p/q", "p/q/f", "p/a"] {
        let meta = fs::metadata(desk.workspace.join(name)).unwrap();
        assert_eq!((meta.uid(), meta.gid()), (12345, 54321), "{name}");
    }
    // Without an owner to act for, a replaced file keeps its own.
    desk.root.write(&path("p/q/f"), b"y", WriteOptions::default()).unwrap();
    assert_eq!(fs::metadata(desk.workspace.join("p/q/f")).unwrap().uid(), 12345);
}

#[test]
fn odd_names_are_names() {
    let desk = Desk::new();
    let odd: [&[u8]; 5] = [b"new\nline", b"\xff\xfe", b" ", b"-rf", b"a\x1b[31m"];
    for name in odd {
        desk.root.write(&path(name), name, WriteOptions::default()).unwrap();
    }
    let mut listed: Vec<_> =
        desk.root.list(&path("."), 1, 100, None).unwrap().entries.into_iter().map(|e| e.name.0).collect();
    let mut sorted = odd.map(<[u8]>::to_vec).to_vec();
    sorted.sort();
    assert_eq!(listed, sorted);
    for name in listed.drain(..) {
        assert_eq!(desk.root.read(&path(&name), 0, None).unwrap().data.0, name);
        desk.root.delete(&path(&name), false).unwrap();
    }
}

#[test]
fn a_full_disk_is_no_space() {
    if !is_root() {
        println!("skip a_full_disk_is_no_space: not root");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let flags = rustix::mount::MountFlags::empty();
    if let Err(error) = rustix::mount::mount("tmpfs", dir.path(), "tmpfs", flags, Some(c"size=1m")) {
        println!("skip a_full_disk_is_no_space: cannot mount: {error}");
        return;
    }
    struct Unmount(std::path::PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        }
    }
    let unmount = Unmount(dir.path().to_owned());
    let root = Root::open(dir.path()).unwrap();
    root.write(&path("f"), b"old", WriteOptions::default()).unwrap();
    let much = vec![1; 2 << 20];
    assert_eq!(code(root.write(&path("f"), &much, WriteOptions::default())), "no_space");
    // Nothing was lost, and nothing is left behind.
    assert_eq!(root.read(&path("f"), 0, None).unwrap().data, Content::from("old"));
    assert_eq!(root.list(&path("."), 1, 10, None).unwrap().entries.len(), 1);
    drop((root, unmount));
}
