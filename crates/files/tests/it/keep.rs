//! What whoever keeps a copy relies on: changes are announced, and entries are taken down and put back through no link.

use std::{
    fs::{self, File},
    io::Write,
    os::unix::fs::{PermissionsExt, symlink},
    time::{Duration, Instant, SystemTime},
};

use carrel_files::{OutsideLinks, Piece, Root, TreeLimits, WriteOptions, read_tar, write_tar};
use carrel_proto::files::{Kind, Replace};

use crate::{Desk, code, path};

#[test]
fn a_witness_sees_every_change_and_nothing_else() {
    let desk = Desk::new();
    let witness = desk.outside.join("witness");
    let held = File::create(&witness).unwrap();
    let root = Root::open(&desk.workspace).unwrap().with_witness(held.into());
    let time = || -> SystemTime { fs::metadata(&witness).unwrap().modified().unwrap() };
    let mut archive = Vec::new();
    let changed = |what: &str, change: &mut dyn FnMut()| {
        let before = time();
        change();
        assert_ne!(time(), before, "{what}");
    };
    changed("write", &mut || drop(root.write(&path("a"), b"one", WriteOptions::default()).unwrap()));
    let append = WriteOptions { append: true, ..WriteOptions::default() };
    changed("append", &mut || drop(root.write(&path("a"), b"two", append).unwrap()));
    changed("mkdir", &mut || drop(root.mkdir(&path("d/e"), true, None).unwrap()));
    changed("move", &mut || drop(root.rename(&path("a"), &path("d/a"), false, false).unwrap()));
    changed("place", &mut || {
        let mut scratch = root.scratch().unwrap();
        scratch.write_all(b"slow").unwrap();
        root.place(scratch, &path("b"), WriteOptions::default(), || (), |_| true).unwrap();
    });
    changed("replace", &mut || {
        let query = Replace {
            path: path("b"),
            find: "slow".into(),
            with: "fast".into(),
            regex: false,
            glob: None,
            expect: None,
        };
        assert_eq!(root.replace(&query).unwrap().count, 1);
    });
    write_tar(&root, &path("."), &mut archive, &TreeLimits::default()).unwrap();
    changed("unpack", &mut || {
        let limits = TreeLimits::default();
        read_tar(&root, &path("copy"), archive.as_slice(), &limits, OutsideLinks::Refuse).unwrap();
    });
    changed("delete", &mut || assert_eq!(root.delete(&path("b"), false).unwrap().removed, 1));
    changed("delete all", &mut || assert!(root.delete(&path("copy"), true).unwrap().removed > 1));
    // A content that comes slowly is announced when it takes its place, not only when it began to come.
    let mut writer = root.writer(&path("c"), WriteOptions::default()).unwrap();
    writer.write_all(b"1").unwrap();
    let mut writer = Some(writer);
    changed("commit", &mut || drop(writer.take().unwrap().commit().unwrap()));
    let before = time();
    root.read(&path("d/a"), 0, None).unwrap();
    root.list(&path("."), 3, 10, None).unwrap();
    root.stat(&path("c"), false).unwrap();
    assert_eq!(time(), before, "looking is no change");
}

#[test]
fn entries_are_taken_down_and_put_back_through_no_link() {
    let desk = Desk::new();
    let (root, at) = (&desk.root, |name: &str| desk.workspace.join(name));
    fs::create_dir(at("d")).unwrap();
    fs::write(at("d/a"), "content").unwrap();
    fs::set_permissions(at("d/a"), fs::Permissions::from_mode(0o640)).unwrap();
    let store = tempfile::tempfile().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let sight = root.sight(b"d/a").unwrap();
    assert_eq!((sight.kind, sight.mode, sight.size, sight.links), (Kind::File, 0o640, 7, 1));
    let piece = Piece { file: &store, at: 4096, size: 7 };
    root.copy_out(b"d/a", &sight, piece, until).unwrap();
    assert!(root.has_content(b"d/a", piece, until).unwrap());
    fs::write(at("d/a"), "CONTENT").unwrap();
    assert!(!root.has_content(b"d/a", piece, until).unwrap());
    assert_eq!(code(root.copy_out(b"d/a", &sight, piece, until)), "precondition_failed");
    assert_eq!(code(root.copy_out(b"d/a", &root.sight(b"d/a").unwrap(), piece, Instant::now())), "too_large");
    root.put_content(b"d/a", piece, 0o600, sight.written).unwrap();
    assert_eq!(fs::read(at("d/a")).unwrap(), b"content");
    assert_eq!(root.sight(b"d/a").unwrap().written, sight.written);
    // The directory becomes a link out, the file one to the canary, a fifo that nobody writes to.
    fs::rename(at("d"), at("moved")).unwrap();
    symlink(&desk.outside, at("d")).unwrap();
    symlink(desk.outside.join("canary"), at("link")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, at("fifo"), rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    for name in [&b"d/canary"[..], b"d/new"] {
        assert!(root.sight(name).is_err());
        assert!(root.put_file(name, piece, 0o777, sight.written).is_err());
        assert!(root.put_link(name, b"x", sight.written).is_err());
        assert!(root.put_empty(name, Kind::Dir, 0o777).is_err());
        assert!(root.dress_as(name, 0o777, None).is_err());
        assert!(root.take_away(name, false).is_err());
    }
    for name in [&b"link"[..], b"fifo", b"moved"] {
        assert!(root.copy_out(name, &sight, piece, until).is_err());
        assert!(root.has_content(name, piece, until).is_err());
        assert!(root.put_content(name, piece, 0o777, sight.written).is_err());
    }
    root.dress_as(b"link", 0o777, Some(sight.written)).unwrap();
    assert_eq!(root.link_text(b"link").unwrap(), desk.outside.join("canary").as_os_str().as_encoded_bytes());
    root.take_away(b"link", false).unwrap();
    assert_eq!(code(root.take_away(b"moved", true)), "not_empty");
    assert!(root.take_away(b"", true).is_err());
    desk.assert_outside_untouched();
}
