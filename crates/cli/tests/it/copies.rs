//! `cp` and `files`.

use std::os::unix::fs::{PermissionsExt, symlink};

use crate::support::{Place, sandboxes};

#[test]
fn trees_go_in_and_come_back() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let source = place.work().join("src");
    std::fs::create_dir_all(source.join("sub")).unwrap();
    std::fs::write(source.join("run.sh"), "#!/bin/sh\necho hi\n").unwrap();
    std::fs::set_permissions(source.join("run.sh"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(source.join("sub/b"), "b").unwrap();
    symlink("run.sh", source.join("link")).unwrap();
    symlink("/etc/passwd", source.join("out")).unwrap();
    place.run(&["open", "work"]).with(0);
    assert_eq!(place.run(&["cp", "src", "work:"]).code, 125, "a directory needs -r");
    let ended = place.run(&["cp", "-r", "src", "work:"]);
    assert!(ended.err.contains("left out out: a link that leads out"), "{}", ended.err);
    ended.with(0);
    assert_eq!(place.run(&["exec", "work", "--", "./src/link"]).with(0), "hi\n");
    assert_eq!(place.run(&["files", "ls", "work", "src"]).with(0), "link@\nrun.sh\nsub/\n");
    place.run(&["cp", "-r", "work:src", "back"]).with(0);
    assert_eq!(std::fs::read_to_string(place.work().join("back/sub/b")).unwrap(), "b");
    let mode = std::fs::metadata(place.work().join("back/run.sh")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o755);
    place.run(&["close", "work", "--keep-workspace", "kept"]).with(0);
    assert!(place.work().join("kept/src/run.sh").exists());
}

#[test]
fn files_and_streams() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    place.run(&["open", "work"]).with(0);
    place.feed(&["cp", "-", "work:deep/in.txt"], b"some text\n").with(0);
    assert_eq!(place.run(&["cp", "work:deep/in.txt", "-"]).with(0), "some text\n");
    assert_eq!(place.run(&["files", "cat", "work", "/workspace/deep/in.txt"]).with(0), "some text\n");
    assert_eq!(place.run(&["files", "search", "work", "text"]).with(0), "deep/in.txt:1: some text\n");
    assert_eq!(place.run(&["files", "search", "work", "absent"]).code, 1);
    let entry = place.run(&["files", "stat", "work", "deep/in.txt", "--json"]).json();
    assert_eq!((&entry["kind"], &entry["size"]), (&"file".into(), &10.into()));
    place.run(&["files", "mv", "work", "deep/in.txt", "moved"]).with(0);
    place.run(&["cp", "work:moved", "."]).with(0);
    assert_eq!(std::fs::read_to_string(place.work().join("moved")).unwrap(), "some text\n");
    let ended = place.run(&["files", "rm", "work", "missing"]);
    assert_eq!(ended.code, 125);
    place.run(&["files", "rm", "-r", "work", "deep", "moved"]).with(0);
    assert_eq!(place.run(&["files", "ls", "work"]).with(0), "");
    for outside in ["work:../../etc/passwd", "work:/etc/passwd"] {
        let ended = place.run(&["cp", "--json", outside, "x"]);
        assert_eq!((ended.code, &ended.json()["error"]["code"]), (125, &"path_outside".into()), "{outside}");
    }
    assert_eq!(place.run(&["cp", "a", "b"]).code, 125);
}
