//! Snapshots as files, by the command line, with a daemon and without.

use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::{
    serving::Daemon,
    support::{Place, sandboxes},
};

#[test]
fn a_snapshot_goes_to_another_place_as_a_file() {
    let (place, other) = (Place::new(), Place::new());
    if !sandboxes(&place) {
        return;
    }
    place.run(&["run", "-s", "work", "x = 5; open('/workspace/file', 'w').write('kept')"]).with(0);
    place.run(&["snapshot", "work", "--tag", "good"]).with(0);
    let target = place.work().join("work.carrel");
    std::fs::write(&target, "what was there").unwrap();
    let exported = place.run(&["snapshots", "export", "good", "work.carrel", "--json"]).json();
    let size = std::fs::metadata(&target).unwrap().len();
    assert_eq!((&exported["file"], &exported["file_bytes"]), (&json!("work.carrel"), &json!(size)));
    assert_eq!(std::fs::metadata(&target).unwrap().permissions().mode() & 0o777, 0o600);
    // By way of a pipe it is the same, and a daemon changes nothing.
    let daemon = Daemon::start(&place, &[]);
    let piped = place.command(&["snapshots", "export", "good", "-"]).output().unwrap();
    assert!(piped.status.success() && piped.stdout.len() > 1000);
    daemon.stop();

    let file = target.to_str().unwrap();
    let imported = other.run(&["snapshots", "import", file]);
    let id = imported.out.trim().to_owned();
    assert!(imported.code == 0 && id.starts_with("snp_"), "{} {}", imported.out, imported.err);
    let has_memory = exported["memory"] == true;
    assert_eq!(imported.err.contains("snapshot.key"), has_memory, "{}", imported.err);
    assert!(other.run(&["restore", &id, "--as", "again"]).with(0).starts_with("again "));
    let look = "open('/workspace/file').read()";
    assert_eq!(other.run(&["run", "-s", "again", look]).with(0), "'kept'\n");
    if has_memory {
        let trusted = other.run(&["snapshots", "import", file, "--trust-memory", "--json"]).json();
        assert_eq!((&trusted["memory"], &trusted["tags"]), (&json!(true), &json!(["good"])));
        other.run(&["restore", trusted["id"].as_str().unwrap(), "--as", "whole"]).with(0);
        assert_eq!(other.run(&["run", "-s", "whole", "x"]).with(0), "5\n");
    }
    let fed = other.feed(&["snapshots", "import", "-", "--json"], &piped.stdout).json();
    assert_eq!(fed["tags"], json!(["good"]));

    // What goes wrong says so and leaves nothing, also of a file that was there.
    let before = other.run(&["snapshots", "--json"]).json();
    for (wrong, word) in [(&b"no snapshot"[..], "snapshot file"), (&piped.stdout[..500], "snapshot file")] {
        let ended = other.feed(&["snapshots", "import", "-"], wrong);
        assert_eq!(ended.code, 125, "{}", ended.err);
        assert!(ended.err.contains(word) && ended.err.contains("hint:"), "{}", ended.err);
    }
    assert_ne!(other.run(&["snapshots", "import", "nowhere.carrel"]).code, 0);
    assert_eq!(other.run(&["snapshots", "--json"]).json(), before);
    assert_ne!(place.run(&["snapshots", "export", "unknown", "work.carrel"]).code, 0);
    assert_eq!(std::fs::metadata(&target).unwrap().len(), size);
    let left: Vec<_> = std::fs::read_dir(place.work()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [target]);
    for place in [&place, &other] {
        let all = place.run(&["snapshots", "--json"]).json();
        let ids = all["snapshots"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap());
        let rm: Vec<&str> = ["snapshots", "rm"].into_iter().chain(ids).collect();
        place.run(&rm).with(0);
    }
}
