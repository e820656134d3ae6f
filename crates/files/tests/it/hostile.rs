//! Paths that try to leave, links, and things that are not files.

use std::{
    fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        net::UnixListener,
    },
};

use carrel_files::{TreeLimits, WriteOptions, write_tar};
use carrel_proto::files::{Content, GuestPath, Kind, PathError};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::{Desk, SECRET, alone, code, is_root, path};

#[test]
fn dots_and_absolute_paths_do_not_lead_out() {
    let desk = Desk::new();
    desk.root.mkdir(&path("a/b"), true, None).unwrap();
    assert_eq!(GuestPath::parse("/etc/passwd"), Err(PathError::Outside));
    for out in
        ["..", "../outside/canary", "a/../../outside/canary", "/workspace/../outside/canary", "a/b/../../.."]
    {
        assert_eq!(code(desk.root.stat(&path(out), true)), "path_outside", "{out}");
        assert_eq!(code(desk.root.read(&path(out), 0, None)), "path_outside", "{out}");
        assert_eq!(code(desk.root.list(&path(out), 1, 9, None)), "path_outside", "{out}");
    }
    for out in ["../outside/new", "a/../../outside/canary", "../outside/sub"] {
        assert_eq!(code(desk.root.write(&path(out), b"!", WriteOptions::default())), "path_outside", "{out}");
        assert_eq!(code(desk.root.mkdir(&path(out), false, None)), "path_outside", "{out}");
        assert_eq!(code(desk.root.mkdir(&path(out), true, None)), "path_outside", "{out}");
        assert_eq!(code(desk.root.delete(&path(out), true)), "path_outside", "{out}");
        assert_eq!(code(desk.root.rename(&path("a"), &path(out), true, false)), "path_outside", "{out}");
        assert_eq!(code(desk.root.rename(&path(out), &path("x"), true, false)), "path_outside", "{out}");
    }
    // Inside they are what they are anywhere else.
    desk.root.write(&path("a/b/../f"), b"f", WriteOptions::default()).unwrap();
    assert_eq!(desk.root.read(&path("a/f"), 0, None).unwrap().data, Content::from("f"));
    desk.assert_outside_untouched();
}

#[test]
fn links_inside_are_followed_and_links_out_refused() {
    let desk = Desk::new();
    let ws = &desk.workspace;
    fs::create_dir_all(ws.join("d/e")).unwrap();
    fs::write(ws.join("d/e/f"), "in").unwrap();
    symlink("d/e", ws.join("relative")).unwrap();
    symlink("/workspace/d/e", ws.join("absolute")).unwrap();
    symlink("../absolute/../../relative", ws.join("d/chain")).unwrap();
    for inside in ["relative/f", "absolute/f", "d/chain/f", "/workspace/absolute/../e/f"] {
        let got = desk.root.read(&path(inside), 0, None).map(|reply| reply.data);
        assert_eq!(got.unwrap(), Content::from("in"), "{inside}");
    }
    symlink("../outside", ws.join("out")).unwrap();
    symlink(&desk.outside, ws.join("out_absolute")).unwrap();
    symlink("/workspace/../outside", ws.join("out_sly")).unwrap();
    symlink("/proc/self/root", ws.join("magic")).unwrap();
    symlink("../outside/canary", ws.join("canary")).unwrap();
    symlink("out", ws.join("out_twice")).unwrap();
    for out in ["out", "out_absolute", "out_sly", "magic", "out_twice"] {
        let below = |name: &str| path(format!("{out}/{name}"));
        assert_eq!(code(desk.root.read(&below("canary"), 0, None)), "path_outside", "{out}");
        assert_eq!(code(desk.root.list(&path(out), 1, 9, None)), "path_outside", "{out}");
        assert_eq!(code(desk.root.write(&below("x"), b"!", WriteOptions::default())), "path_outside");
        assert_eq!(code(desk.root.mkdir(&below("x"), true, None)), "path_outside", "{out}");
        assert_eq!(code(desk.root.delete(&below("sub"), true)), "path_outside", "{out}");
        assert_eq!(code(desk.root.rename(&below("canary"), &path("x"), true, false)), "path_outside");
        assert_eq!(code(desk.root.rename(&path("d"), &below("x"), true, false)), "path_outside");
    }
    assert_eq!(code(desk.root.write(&path("canary"), b"!", WriteOptions::default())), "path_outside");
    let append = WriteOptions { append: true, ..WriteOptions::default() };
    assert_eq!(code(desk.root.write(&path("canary"), b"!", append)), "path_outside");
    // A link is deleted, never what it leads to.
    assert_eq!(desk.root.stat(&path("canary"), false).unwrap().kind, Kind::Symlink);
    for link in ["canary", "out", "out_absolute", "magic"] {
        desk.root.delete(&path(link), true).unwrap();
    }
    desk.assert_outside_untouched();
}

#[test]
fn writing_goes_through_links_inside() {
    let desk = Desk::new();
    fs::create_dir(desk.workspace.join("d")).unwrap();
    symlink("/workspace/d/new", desk.workspace.join("link")).unwrap();
    desk.root.write(&path("link"), b"1", WriteOptions::default()).unwrap();
    assert_eq!(fs::read(desk.workspace.join("d/new")).unwrap(), b"1");
    assert!(desk.workspace.join("link").is_symlink());
    let new = WriteOptions { create_new: true, ..WriteOptions::default() };
    assert_eq!(code(desk.root.write(&path("link"), b"2", new)), "exists");
    symlink("loop2", desk.workspace.join("loop1")).unwrap();
    symlink("/workspace/loop1", desk.workspace.join("loop2")).unwrap();
    assert_eq!(code(desk.root.read(&path("loop1"), 0, None)), "invalid_path");
    assert_eq!(code(desk.root.write(&path("loop1/x"), b"", WriteOptions::default())), "invalid_path");
    assert_eq!(code(desk.root.write(&path("loop1"), b"", WriteOptions::default())), "invalid_path");
}

#[test]
fn other_names_of_a_file_keep_their_content() {
    let desk = Desk::new();
    let (canary, append) = (desk.outside.join("canary"), WriteOptions { append: true, ..Default::default() });
    for (name, options) in [("replaced", WriteOptions::default()), ("appended", append)] {
        fs::hard_link(&canary, desk.workspace.join(name)).unwrap();
        desk.root.write(&path(name), b"!", options).unwrap();
    }
    assert_eq!(fs::read(desk.workspace.join("replaced")).unwrap(), b"!");
    assert_eq!(fs::read(desk.workspace.join("appended")).unwrap(), [SECRET, b"!"].concat());
    desk.assert_outside_untouched();
}

#[test]
fn fifos_sockets_and_devices_are_never_opened() {
    let desk = Desk::new();
    let ws = &desk.workspace;
    mknodat(CWD, ws.join("fifo"), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    let _socket = UnixListener::bind(ws.join("socket")).unwrap();
    symlink("fifo", ws.join("link")).unwrap();
    let mut names = vec!["fifo", "socket", "link"];
    let device =
        mknodat(CWD, ws.join("device"), FileType::CharacterDevice, Mode::from_raw_mode(0o666), makedev(1, 5));
    match device {
        Ok(()) => names.push("device"),
        Err(error) => println!("skip devices: mknod: {error}"),
    }
    let append = WriteOptions { append: true, ..WriteOptions::default() };
    for name in &names {
        assert_eq!(code(desk.root.read(&path(name), 0, None)), "not_a_regular_file", "{name}");
        assert_eq!(code(desk.root.write(&path(name), b"!", WriteOptions::default())), "not_a_regular_file");
        assert_eq!(code(desk.root.write(&path(name), b"!", append)), "not_a_regular_file", "{name}");
        assert_eq!(
            code(write_tar(&desk.root, &path(name), Vec::new(), &TreeLimits::default())),
            "not_a_regular_file"
        );
    }
    let kinds: Vec<_> =
        desk.root.list(&path("."), 1, 9, None).unwrap().entries.into_iter().map(|entry| entry.kind).collect();
    let device = (names.len() == 4).then_some(Kind::Device);
    assert_eq!(
        kinds,
        device.into_iter().chain([Kind::Fifo, Kind::Symlink, Kind::Socket]).collect::<Vec<_>>()
    );
    let report = write_tar(&desk.root, &path("."), Vec::new(), &TreeLimits::default()).unwrap();
    assert_eq!((report.links, report.left_out_count), (1, names.len() as u64 - 1));
    for name in names {
        desk.root.delete(&path(name), false).unwrap();
    }
}

#[test]
fn locked_directories_are_deleted_by_their_owner() {
    let name = "hostile::locked_directories_are_deleted_by_their_owner";
    if !alone(name, is_root().then_some(65534)) {
        return;
    }
    let desk = Desk::new();
    for (mode, dir) in [(0o000, "t/none"), (0o500, "t/read"), (0o300, "t/write"), (0o000, "t/none2/inner")] {
        fs::create_dir_all(desk.workspace.join(dir).join("x")).unwrap();
        fs::write(desk.workspace.join(dir).join("f"), "f").unwrap();
        fs::set_permissions(desk.workspace.join(dir), PermissionsExt::from_mode(mode)).unwrap();
    }
    fs::set_permissions(desk.workspace.join("t/none2"), PermissionsExt::from_mode(0o000)).unwrap();
    symlink(&desk.outside, desk.workspace.join("t/out")).unwrap();
    assert_eq!(code(desk.root.read(&path("t/none/f"), 0, None)), "permission");
    desk.root.delete(&path("t"), true).unwrap();
    assert!(desk.names().is_empty());
    desk.assert_outside_untouched();
}
