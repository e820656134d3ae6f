//! `carrel mcp install`: each client's format, and what must never happen to a file that is somebody else's.

mod formats;
mod safety;

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::{Ended, Place};

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

/// For files whose strings have `//` in them and that have no comments but whole lines.
fn parsed_url_safe(path: &Path) -> Value {
    let text = read(path);
    let plain: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    serde_json::from_str(&plain).unwrap_or_else(|error| panic!("{error}: {text}"))
}
