//! Search and replace.

use std::{fs, os::unix::fs::symlink};

use carrel_proto::files::{Replace, Search};

use crate::{Desk, code, path};

fn search(glob: Option<&str>, text: Option<&str>) -> Search {
    Search {
        path: path("."),
        glob: glob.map(Into::into),
        text: text.map(Into::into),
        regex: false,
        ignore_case: false,
        limit: 100,
        max_file: None,
    }
}

fn replace(at: &str, find: &str, with: &str) -> Replace {
    Replace { path: path(at), glob: None, find: find.into(), with: with.into(), regex: false, expect: None }
}

fn filled() -> Desk {
    let desk = Desk::new();
    fs::create_dir_all(desk.workspace.join("src/sub")).unwrap();
    for (name, text) in [
        ("src/a.py", "import os\nprint('Canary')\n"),
        ("src/sub/b.py", "canary = 1\n"),
        ("src/sub/c.txt", "no birds\ncanary canary\n"),
        ("bin", "canary\0"),
    ] {
        fs::write(desk.workspace.join(name), text).unwrap();
    }
    fs::write(desk.workspace.join("latin"), b"caf\xe9 canary").unwrap();
    fs::File::create(desk.workspace.join("large")).unwrap().set_len(9 << 20).unwrap();
    symlink(desk.outside.join("canary"), desk.workspace.join("link")).unwrap();
    desk
}

#[test]
fn searches_find_names_and_lines() {
    let desk = filled();
    let found = desk.root.search(&search(Some("*.py"), None)).unwrap();
    let names: Vec<_> = found.matches.iter().map(|m| m.path.to_string()).collect();
    assert_eq!(names, ["src/a.py", "src/sub/b.py"]);
    let found = desk.root.search(&search(None, Some("canary"))).unwrap();
    let lines: Vec<_> = found.matches.iter().map(|m| (m.path.to_string(), m.line.unwrap())).collect();
    assert_eq!(lines, [("latin".into(), 1), ("src/sub/b.py".into(), 1), ("src/sub/c.txt".into(), 2)]);
    assert_eq!((found.skipped.binary, found.skipped.too_large, found.complete), (1, 1, true));
    let any_case = Search { ignore_case: true, ..search(Some("src/**/*.py"), Some("canary")) };
    assert_eq!(desk.root.search(&any_case).unwrap().matches.len(), 2);
    let regex = Search { regex: true, ..search(None, Some(r"^canary\b.*\d$")) };
    let found = desk.root.search(&regex).unwrap();
    assert_eq!(found.matches[0].text.as_deref(), Some("canary = 1"));
    let first = Search { limit: 1, ..search(None, Some("canary")) };
    let found = desk.root.search(&first).unwrap();
    assert_eq!((found.matches.len(), found.complete), (1, false));
    let below = Search { path: path("src/sub"), ..search(None, Some("canary")) };
    assert_eq!(desk.root.search(&below).unwrap().matches[0].path.to_string(), "src/sub/b.py");
    assert_eq!(code(desk.root.search(&search(None, None))), "invalid_argument");
    let bad = Search { regex: true, ..search(None, Some("(")) };
    assert_eq!(code(desk.root.search(&bad)), "invalid_argument");
}

#[test]
fn replacements_are_counted_and_keep_the_mode() {
    let desk = filled();
    let script = desk.workspace.join("src/sub/b.py");
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let all = desk
        .root
        .replace(&Replace { glob: Some("*.py".into()), ..replace("src", "canary", "finch") })
        .unwrap();
    assert_eq!((all.files.len(), all.count), (1, 1));
    assert_eq!(fs::read_to_string(&script).unwrap(), "finch = 1\n");
    assert_eq!(std::os::unix::fs::MetadataExt::mode(&fs::metadata(&script).unwrap()) & 0o7777, 0o755);
    let once = Replace { expect: Some(1), ..replace("src/sub/c.txt", "canary", "finch") };
    assert_eq!(code(desk.root.replace(&once)), "invalid_argument");
    assert_eq!(
        fs::read_to_string(desk.workspace.join("src/sub/c.txt")).unwrap(),
        "no birds\ncanary canary\n"
    );
    let regex = Replace { regex: true, ..replace("src/sub/c.txt", r"(\w+) (\w+)$", "$2-$1") };
    assert_eq!(desk.root.replace(&regex).unwrap().count, 2);
    assert_eq!(
        fs::read_to_string(desk.workspace.join("src/sub/c.txt")).unwrap(),
        "birds-no\ncanary-canary\n"
    );
    // Bytes are fine literally; a regular expression needs text.
    assert_eq!(desk.root.replace(&replace("latin", "canary", "finch")).unwrap().count, 1);
    assert_eq!(fs::read(desk.workspace.join("latin")).unwrap(), b"caf\xe9 finch");
    assert_eq!(
        code(desk.root.replace(&Replace { regex: true, ..replace("latin", "x", "y") })),
        "invalid_argument"
    );
    assert_eq!(code(desk.root.replace(&replace("large", "x", "y"))), "too_large");
    assert_eq!(code(desk.root.replace(&replace("link", "canary", "x"))), "path_outside");
    // Over everything: the link and the binary are left alone, and no file is met twice.
    assert_eq!(desk.root.replace(&replace(".", "canary", "canary canary")).unwrap().count, 2);
    desk.assert_outside_untouched();
}
