//! What must never happen to a file that is somebody else's.

use std::{os::unix::fs::PermissionsExt, time::Instant};

use serde_json::json;

use super::{beside, home, install, parsed_url_safe, read, write};
use crate::{support::Place, survival::kill_after};

#[test]
fn what_was_there_comes_back_to_the_byte() {
    let odd = [
        "{}",
        "{\"a\":1}",
        "{\r\n\t\"a\": 1\r\n}\r\n",
        "\u{feff}{ \"mcpServers\" : { } }",
        "// nothing yet\n",
        "{\n  \"mcpServers\": {\n    \"x\": {} /* end */\n  }\n}",
        "\n\n",
        "",
    ];
    for before in odd {
        let place = Place::new();
        let path = home(&place, ".cursor/mcp.json");
        write(&path, before);
        install(&place, &["cursor", "--", "--structured"]).with(0);
        install(&place, &["cursor"]).with(0);
        assert_ne!(read(&path), before);
        assert_eq!(beside(&path).len(), 2, "each state has a backup of its own");
        install(&place, &["cursor", "--uninstall"]).with(0);
        assert_eq!(read(&path), before, "{before:?}");
        assert_eq!(beside(&path).len(), 3);
    }
    let place = Place::new();
    let path = home(&place, ".codex/config.toml");
    let before = "a = 1 # one\n\n# the end, without a line end";
    write(&path, before);
    install(&place, &["codex"]).with(0);
    install(&place, &["codex", "--uninstall"]).with(0);
    assert_eq!(read(&path), before);
}

#[test]
fn what_the_user_added_stays() {
    let place = Place::new();
    let path = home(&place, ".cursor/mcp.json");
    write(
        &path,
        "{\n  \"mcpServers\": {\n    \"carrel\": {\n      // mine\n      \"command\": \"/old/carrel\",\n      \"args\": [\"mcp\"],\n      \"env\": {\"A\": \"b\"}\n    }\n  }\n}\n",
    );
    let ended = install(&place, &["cursor"]);
    assert!(ended.err.contains("note: updated `carrel`"), "{}", ended.err);
    let text = read(&path);
    assert!(text.contains("// mine") && text.contains("\"env\": {\"A\": \"b\"}"), "{text}");
    assert!(!text.contains("/old/carrel"));
    // From a program to an address: what is of no use there goes, what is the user's stays.
    install(&place, &["cursor", "--http", "http://127.0.0.1:8765/mcp"]).with(0);
    let url = json!({"url": "http://127.0.0.1:8765/mcp", "env": {"A": "b"},
                     "headers": {"Authorization": "Bearer ${env:CARREL_TOKEN}"}});
    assert_eq!(parsed_url_safe(&path)["mcpServers"]["carrel"], url);
    // A token that was pasted is not replaced by a reference.
    write(&path, &read(&path).replace("${env:CARREL_TOKEN}", "secret"));
    let ended = install(&place, &["cursor", "--http", "http://127.0.0.1:8765/mcp"]);
    assert!(ended.err.contains("nothing to do") && read(&path).contains("Bearer secret"), "{}", ended.err);
}

#[test]
fn a_broken_file_is_not_touched() {
    let cases = [
        ("cursor", ".cursor/mcp.json", "{\n  \"mcpServers\": {\n    oops\n", ".cursor/mcp.json:3: no JSON"),
        ("claude-code", ".claude.json", "{\n  \"a\": 1, // no\n}\n", ".claude.json:2: no JSON"),
        ("codex", ".codex/config.toml", "a = 1\nb = \n", ".codex/config.toml:2: no TOML"),
        ("zed", ".config/zed/settings.json", "[1]\n", "it is no JSON object"),
        ("kiro", ".kiro/settings/mcp.json", "{\"mcpServers\": []}", "`mcpServers` is no object"),
        (
            "cursor",
            ".cursor/mcp.json",
            "{\"mcpServers\": {}, \"mcpServers\": {}}",
            "`mcpServers` is there twice",
        ),
        ("codex", ".codex/config.toml", "mcp_servers = 3\n", "`carrel` is no table"),
    ];
    for (client, file, text, words) in cases {
        let place = Place::new();
        let path = home(&place, file);
        write(&path, text);
        for more in [&[][..], &["--uninstall"]] {
            let ended = install(&place, &[&[client], more].concat());
            assert_eq!(ended.code, 125, "{client}: {}", ended.err);
            assert!(ended.err.contains(words), "{client}: {}", ended.err);
            assert!(ended.err.contains("hint: nothing was changed"), "{client}: {}", ended.err);
        }
        assert_eq!(read(&path), text);
        assert!(beside(&path).is_empty(), "{:?}", beside(&path));
        let listed = install(&place, &["--json"]).json();
        let all = listed["clients"].as_array().unwrap();
        assert_eq!(all.iter().find(|one| one["client"] == client).unwrap()["server"], "unreadable");
    }
    let place = Place::new();
    let path = home(&place, ".cursor/mcp.json");
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, b"{\n\"a\": \"\xff\"}").unwrap();
    assert!(install(&place, &["cursor"]).err.contains("line 2 is not UTF-8"));
}

#[test]
fn a_symlink_stays_and_what_it_leads_to_changes() {
    let place = Place::new();
    let real = place.path().join("dotfiles/cursor.json");
    write(&real, "{}\n");
    let link = home(&place, ".cursor/mcp.json");
    std::fs::create_dir_all(link.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink("../../dotfiles/cursor.json", &link).unwrap();
    install(&place, &["cursor"]).with(0);
    assert!(link.is_symlink());
    assert!(read(&real).contains("carrel"));
    install(&place, &["cursor", "--uninstall"]).with(0);
    assert!(link.is_symlink());
    assert_eq!(read(&real), "{}\n");
    // A link to nothing yet: the file is made where it points.
    std::fs::remove_file(&real).unwrap();
    install(&place, &["cursor"]).with(0);
    assert!(link.is_symlink() && read(&real).contains("carrel"));
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink("mcp.json", &link).unwrap();
    assert!(install(&place, &["cursor"]).err.contains("a circle of symlinks"));
}

#[test]
fn a_read_only_file_is_left_alone_with_a_hint() {
    let place = Place::new();
    let path = home(&place, ".cursor/mcp.json");
    write(&path, "{}\n");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    let ended = install(&place, &["cursor"]);
    assert_eq!(ended.code, 125);
    assert!(ended.err.contains("is read-only\nhint: ") && ended.err.contains("--print"), "{}", ended.err);
    assert_eq!((read(&path).as_str(), beside(&path).len()), ("{}\n", 0));
    assert_eq!(install(&place, &["cursor", "--json"]).json()["error"]["code"], "permission");
}

#[test]
fn mistakes_show_before_anything_is_written() {
    let place = Place::new();
    let cases: [(&[&str], &str); 6] = [
        (&["emacs"], "invalid value 'emacs'"),
        (&["cursor", "--", "--tolls", "all"], "flags after `--`: unexpected argument '--tolls'"),
        (&["cursor", "--", "install"], "after `--` go flags"),
        (&["cursor", "--", "--http", "127.0.0.1:1"], "speaks stdio"),
        (&["cursor", "--name", "a b"], "use letters, digits"),
        (&["--uninstall"], "required"),
    ];
    for (args, words) in cases {
        let ended = install(&place, args);
        assert_eq!(ended.code, 125, "{args:?}");
        assert!(ended.err.contains(words), "{args:?}: {}", ended.err);
    }
    assert!(!home(&place, ".cursor").exists());
}

#[test]
fn killed_at_any_moment_the_file_is_old_or_new() {
    let place = Place::new();
    let path = home(&place, ".claude.json");
    // Large, so that writing it takes a while.
    let history: Vec<String> = (0..5_000).map(|number| format!("line {number} of a long history")).collect();
    let before = serde_json::to_string_pretty(&json!({"history": history})).unwrap();
    write(&path, &before);
    let begun = Instant::now();
    install(&place, &["claude-code"]).with(0);
    let took = begun.elapsed();
    let after = read(&path);
    let (mut old, mut new) = (0, 0);
    for round in 8..32 {
        write(&path, &before);
        let mut command = place.command(&["mcp", "install", "claude-code"]);
        let child = command.env("HOME", place.path().join("home")).spawn().unwrap();
        // From the middle of the usual time, before which nothing is written, to well after its end.
        kill_after(child, took * round / 16);
        match read(&path) {
            text if text == before => old += 1,
            text if text == after => new += 1,
            text => panic!("torn in round {round}: {} bytes", text.len()),
        }
    }
    println!("{old} old, {new} new");
    // What the killed left behind is gone after the next one, and their backups are whole or not there to be restored.
    write(&path, &before);
    install(&place, &["claude-code"]).with(0);
    let left = beside(&path);
    assert!(left.iter().all(|path| path.extension().is_some_and(|end| end == "bak")), "{left:?}");
    install(&place, &["claude-code", "--uninstall"]).with(0);
    assert_eq!(read(&path), before);
}
