//! Each client's words for a server.

use std::{os::unix::fs::PermissionsExt, path::Path};

use serde_json::{Value, json};

use super::{CLIENTS, Known, beside, entry, home, install, parsed, parsed_url_safe, read, wanted, write};
use crate::support::Place;

#[test]
fn every_client_from_nothing_and_back() {
    for Known(client, file, _, section) in CLIENTS {
        let place = Place::new();
        let path = home(&place, file);
        let ended = install(&place, &[client, "--", "--tools", "all"]);
        assert_eq!((ended.code, ended.out.as_str()), (0, ""), "{client}: {}", ended.err);
        assert!(
            ended.err.contains("+++ ") && ended.err.contains("note: installed `carrel`"),
            "{}",
            ended.err
        );
        let content = parsed(&path);
        assert_eq!(
            entry(&content, section, "carrel"),
            &wanted(client, &["mcp", "--tools", "all"]),
            "{client}"
        );
        let text = read(&path);
        let again = install(&place, &[client, "--", "--tools", "all"]);
        assert!(again.err.contains("note: nothing to do"), "{client}: {}", again.err);
        assert_eq!((again.code, read(&path)), (0, text), "{client}");
        assert!(beside(&path).is_empty(), "{client}: {:?}", beside(&path));
        install(&place, &[client, "--uninstall"]).with(0);
        assert!(!path.exists(), "{client}: a file with nothing in it is left");
        let nothing = install(&place, &[client, "--uninstall"]);
        assert!(nothing.code == 0 && nothing.err.contains("nothing to do"), "{}", nothing.err);
    }
}

/// A file of a user who has other servers, and comments where the client allows them.
fn lived_in(client: &str, section: &str) -> String {
    match client {
        "codex" => {
            "# my settings\nmodel = \"gpt\" # the good one\n\n[mcp_servers.other] # keep\ncommand = \"x\"\n\n\
                    [profiles.fast]\nmodel = \"small\"\n"
                .to_owned()
        }
        "claude-code" | "claude-desktop" => format!(
            "{{\n  \"zebra\": 1,\n  \"{section}\": {{\n    \"other\": {{\"command\": \"x\",   \"args\": []}}\n  }},\n  \"apple\": [1,2]\n}}\n"
        ),
        _ => format!(
            "// my settings\n{{\n\t\"zebra\": 1, // first\n\t\"{section}\": {{\n\t\t// of the team\n\t\t\"other\": {{\"command\": \"x\"}}, // keep\n\t}},\n\t\"apple\": [1,2],\n}}\n"
        ),
    }
}

#[test]
fn every_client_among_other_servers_and_comments() {
    for Known(client, file, _, section) in CLIENTS {
        let place = Place::new();
        let path = home(&place, file);
        let before = lived_in(client, section[0]);
        write(&path, &before);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let ended = install(&place, &[client]);
        assert_eq!(ended.code, 0, "{client}: {}", ended.err);
        let after = read(&path);
        for line in before.lines() {
            assert!(after.contains(line.trim_end_matches(',')), "{client} lost {line:?}:\n{after}");
        }
        let content = parsed(&path);
        assert_eq!(entry(&content, section, "carrel"), &wanted(client, &["mcp"]), "{client}");
        assert_eq!(entry(&content, section, "other")["command"], "x", "{client}");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o640, "{client}");
        let [backup] = &beside(&path)[..] else { panic!("{client}: {:?}", beside(&path)) };
        assert_eq!(read(backup), before, "{client}");
        assert_eq!(std::fs::metadata(backup).unwrap().permissions().mode() & 0o777, 0o640, "{client}");
        assert!(install(&place, &[client]).err.contains("nothing to do"), "{client}");
        // Without the backup the server is cut out of the text, which comes to the same here.
        std::fs::remove_file(backup).unwrap();
        install(&place, &[client, "--uninstall"]).with(0);
        assert_eq!(read(&path), before, "{client}");
    }
}

#[test]
fn a_server_elsewhere_in_each_clients_words() {
    let url = "https://sandbox.example.com/mcp?scope=team";
    let bearer = |token: &str| json!({"Authorization": format!("Bearer {token}")});
    let cases = [
        ("claude-code", json!({"type": "http", "url": url, "headers": bearer("${CARREL_TOKEN}")})),
        ("cursor", json!({"url": url, "headers": bearer("${env:CARREL_TOKEN}")})),
        ("vscode", json!({"type": "http", "url": url, "headers": bearer("${input:carrel-token}")})),
        ("codex", json!({"url": url, "bearer_token_env_var": "CARREL_TOKEN"})),
        ("windsurf", json!({"serverUrl": url, "headers": bearer("${env:CARREL_TOKEN}")})),
        ("zed", json!({"url": url, "headers": bearer("PASTE-THE-TOKEN-HERE")})),
        ("gemini-cli", json!({"httpUrl": url, "headers": bearer("${CARREL_TOKEN}")})),
        ("opencode", json!({"type": "remote", "url": url, "headers": bearer("{env:CARREL_TOKEN}")})),
        (
            "copilot-cli",
            json!({"type": "http", "url": url, "headers": bearer("${CARREL_TOKEN}"), "tools": ["*"]}),
        ),
        ("kiro", json!({"url": url, "headers": bearer("${CARREL_TOKEN}")})),
        ("qwen-code", json!({"httpUrl": url, "headers": bearer("${CARREL_TOKEN}")})),
        ("amp", json!({"url": url, "headers": bearer("PASTE-THE-TOKEN-HERE")})),
    ];
    for (client, wanted) in cases {
        let place = Place::new();
        let shown = install(&place, &[client, "--http", url, "--print", "--json"]).json();
        assert_eq!(shown["entry"], wanted, "{client}");
        let done = install(&place, &[client, "--http", url, "--name", "elsewhere", "--json"]).json();
        assert_eq!((&done["entry"], &done["action"]), (&wanted, &json!("installed")), "{client}");
        install(&place, &[client, "--uninstall", "--name", "elsewhere"]).with(0);
        assert!(!Path::new(done["file"].as_str().unwrap()).exists(), "{client}");
    }
    let place = Place::new();
    let refused = install(&place, &["claude-desktop", "--http", url, "--json"]).json();
    assert_eq!(refused["error"]["code"], "unsupported");
    for bad in ["sandbox.example.com/mcp", "http://127.0.0.1:8765", "https:///mcp", "http://a b/mcp"] {
        assert_eq!(install(&place, &["cursor", "--http", bad]).code, 125, "{bad}");
    }
    let ended = install(&place, &["cursor", "--http", "http://sandbox.example.com/mcp"]);
    assert!(ended.err.contains("warning: the token travels"), "{}", ended.err);
}

#[test]
fn secrets_that_vs_code_asks_for_come_and_go_with_the_server() {
    let place = Place::new();
    let path = home(&place, ".config/Code/User/mcp.json");
    write(
        &path,
        "{\n  \"inputs\": [\n    {\"id\": \"mine\"}\n  ],\n  \"servers\": {\n    \"x\": {}\n  }\n}\n",
    );
    let before = read(&path);
    install(&place, &["vscode", "--http", "http://127.0.0.1:8765/mcp"]).with(0);
    let inputs = &parsed_url_safe(&path)["inputs"];
    assert_eq!((&inputs[0]["id"], &inputs[1]["id"]), (&json!("mine"), &json!("carrel-token")));
    assert_eq!(inputs[1]["password"], true);
    for backup in beside(&path) {
        std::fs::remove_file(backup).unwrap();
    }
    install(&place, &["vscode", "--uninstall"]).with(0);
    assert_eq!(read(&path), before);
}

#[test]
fn a_project_has_its_own_file_where_the_client_has_one() {
    for Known(client, file, project, section) in CLIENTS {
        let place = Place::new();
        let ended = install(&place, &[client, "--project"]);
        match project {
            Some(project) => {
                assert_eq!(ended.code, 0, "{client}: {}", ended.err);
                let content = parsed(&place.work().join(project));
                assert_eq!(entry(&content, section, "carrel"), &wanted(client, &["mcp"]), "{client}");
                assert!(!home(&place, file).exists(), "{client}");
            }
            None => assert!(ended.code == 125 && ended.err.contains("hint: leave out --project"), "{client}"),
        }
    }
}

#[test]
fn printing_changes_nothing_and_is_the_whole_file() {
    for Known(client, file, _, _) in CLIENTS {
        let place = Place::new();
        let printed = install(&place, &[client, "--print"]);
        assert!(printed.err.contains(file), "{client}: {}", printed.err);
        assert!(!home(&place, file).exists(), "{client}");
        install(&place, &[client]).with(0);
        assert_eq!(printed.with(0), read(&home(&place, file)), "{client}");
    }
}

#[test]
fn clients_are_listed_with_what_is_known_of_them() {
    let place = Place::new();
    std::fs::create_dir_all(home(&place, ".gemini")).unwrap();
    install(&place, &["cursor"]).with(0);
    let listed = install(&place, &["--json"]).json();
    let find = |name: &str| {
        let all = listed["clients"].as_array().unwrap();
        all.iter().find(|one| one["client"] == name).unwrap().clone()
    };
    assert_eq!(listed["clients"].as_array().unwrap().len(), CLIENTS.len());
    assert_eq!((&find("cursor")["server"], &find("cursor")["found"]), (&json!("installed"), &json!(true)));
    assert_eq!(
        (&find("gemini-cli")["server"], &find("gemini-cli")["found"]),
        (&json!("absent"), &json!(true))
    );
    assert_eq!(find("claude-desktop")["project_file"], Value::Null);
    assert!(install(&place, &[]).with(0).contains("cursor\tinstalled\t"));
}

#[test]
fn variables_move_a_clients_file() {
    let place = Place::new();
    let elsewhere = place.path().join("elsewhere");
    for (client, variable, file) in [
        ("claude-code", "CLAUDE_CONFIG_DIR", ".claude.json"),
        ("codex", "CODEX_HOME", "config.toml"),
        ("copilot-cli", "COPILOT_HOME", "mcp-config.json"),
        ("zed", "XDG_CONFIG_HOME", "zed/settings.json"),
    ] {
        let mut command = place.command(&["mcp", "install", client]);
        let output =
            command.env("HOME", place.path().join("home")).env(variable, &elsewhere).output().unwrap();
        assert!(output.status.success(), "{client}");
        assert!(elsewhere.join(file).is_file(), "{client}");
    }
    let output = place.command(&["mcp", "install", "cursor"]).env_remove("HOME").output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("HOME is not set"));
}

#[test]
fn opencode_keeps_its_file_and_its_version() {
    let place = Place::new();
    let path = home(&place, ".config/opencode/opencode.jsonc");
    write(&path, "{\n  // newer form\n  \"mcp\": {\"servers\": {}}\n}\n");
    install(&place, &["opencode"]).with(0);
    let content = parsed(&path);
    assert_eq!(content["mcp"]["servers"]["carrel"], wanted("opencode", &["mcp"]));
    assert!(!path.with_extension("json").exists());
}
