//! `carrel mcp install`: each client's format, and what must never happen to a file that is somebody else's.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Instant,
};

use serde_json::{Value, json};

use crate::{
    support::{Ended, Place},
    survival::kill_after,
};

/// A client: its file below the home, below a project, and the keys that lead to its servers.
struct Known(&'static str, &'static str, Option<&'static str>, &'static [&'static str]);

const CLIENTS: [Known; 13] = [
    Known("claude-code", ".claude.json", Some(".mcp.json"), &["mcpServers"]),
    Known("claude-desktop", ".config/Claude/claude_desktop_config.json", None, &["mcpServers"]),
    Known("cursor", ".cursor/mcp.json", Some(".cursor/mcp.json"), &["mcpServers"]),
    Known("vscode", ".config/Code/User/mcp.json", Some(".vscode/mcp.json"), &["servers"]),
    Known("codex", ".codex/config.toml", Some(".codex/config.toml"), &["mcp_servers"]),
    Known("windsurf", ".codeium/windsurf/mcp_config.json", None, &["mcpServers"]),
    Known("zed", ".config/zed/settings.json", Some(".zed/settings.json"), &["context_servers"]),
    Known("gemini-cli", ".gemini/settings.json", Some(".gemini/settings.json"), &["mcpServers"]),
    Known("opencode", ".config/opencode/opencode.json", Some("opencode.json"), &["mcp"]),
    Known("copilot-cli", ".copilot/mcp-config.json", Some(".github/mcp.json"), &["mcpServers"]),
    Known("kiro", ".kiro/settings/mcp.json", Some(".kiro/settings/mcp.json"), &["mcpServers"]),
    Known("qwen-code", ".qwen/settings.json", Some(".qwen/settings.json"), &["mcpServers"]),
    Known("amp", ".config/amp/settings.json", Some(".amp/settings.json"), &["amp.mcpServers"]),
];

fn install(place: &Place, args: &[&str]) -> Ended {
    let mut command = place.command(&[&["mcp", "install"], args].concat());
    for variable in ["CLAUDE_CONFIG_DIR", "CODEX_HOME", "COPILOT_HOME", "CARREL_CONFIG"] {
        command.env_remove(variable);
    }
    command.env("HOME", place.path().join("home"));
    Ended::of(command.output().unwrap())
}

fn home(place: &Place, file: &str) -> PathBuf {
    place.path().join("home").join(file)
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

/// Backups of a file, and anything else that was left beside it.
fn beside(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().unwrap().to_str().unwrap();
    let all = std::fs::read_dir(path.parent().unwrap()).unwrap().map(|entry| entry.unwrap().path());
    let mut left: Vec<PathBuf> = all
        .filter(|other| other != path && other.file_name().unwrap().to_str().unwrap().contains(name))
        .collect();
    left.sort();
    left
}

/// What a file says, comments aside. Its own way of reading, as a second opinion.
fn parsed(path: &Path) -> Value {
    let text = read(path);
    if path.extension().is_some_and(|extension| extension == "toml") {
        return serde_json::to_value(text.parse::<toml::Table>().unwrap()).unwrap();
    }
    let lines = text.lines().map(|line| line.split("// ").next().unwrap());
    let mut plain: String = lines.collect();
    for closing in ['}', ']'] {
        while let Some(end) =
            plain.match_indices(closing).map(|(at, _)| at).find(|&at| plain[..at].trim_end().ends_with(','))
        {
            let comma = plain[..end].rfind(',').unwrap();
            plain.remove(comma);
        }
    }
    serde_json::from_str(&plain).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn entry<'a>(content: &'a Value, section: &[&str], name: &str) -> &'a Value {
    section.iter().chain([&name]).fold(content, |value, key| &value[*key])
}

/// How each client shall start the program.
fn wanted(client: &str, args: &[&str]) -> Value {
    let program = env!("CARGO_BIN_EXE_carrel");
    match client {
        "claude-code" | "vscode" => json!({"type": "stdio", "command": program, "args": args}),
        "copilot-cli" => json!({"type": "stdio", "command": program, "args": args, "tools": ["*"]}),
        "opencode" => json!({"type": "local", "command": ([&[program], args].concat())}),
        _ => json!({"command": program, "args": args}),
    }
}

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

/// For files whose strings have `//` in them and that have no comments but whole lines.
fn parsed_url_safe(path: &Path) -> Value {
    let text = read(path);
    let plain: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    serde_json::from_str(&plain).unwrap_or_else(|error| panic!("{error}: {text}"))
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
