//! What is known of each client: where its configuration is, and how a server is written there. All of it is from the
//! clients' own documentation; docs/clients.md shows the results.

use std::path::PathBuf;

use carrel_proto::problem::{Code, Problem};
use serde_json::{Value, json};

use super::{Entry, format::Format};
use crate::{args::Client, config::Surroundings};

/// The variable that holds a server's token.
pub(super) const TOKEN: &str = "CARREL_TOKEN";
/// Stands where a client can only keep the token itself.
pub(super) const PASTE: &str = "PASTE-THE-TOKEN-HERE";

/// How a client is to start or find the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Server {
    Program { command: String, args: Vec<String> },
    Remote { url: String },
}

/// Where a client keeps what is the user's.
#[derive(Debug, Clone, Copy)]
enum Base {
    /// Below HOME.
    Home(&'static str),
    /// Below XDG_CONFIG_HOME.
    Config(&'static str),
    /// In the directory that a variable names, or else below HOME.
    Named(&'static str, &'static str),
}

/// How a client shows the token of a server elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    /// A header that refers to something outside the file.
    Reference(&'static str),
    /// A key that has the variable's name.
    Variable(&'static str),
    /// A header with the token itself.
    Pasted,
}

#[derive(Debug)]
pub(super) struct Facts {
    pub(super) title: &'static str,
    base: Base,
    /// Below the base.
    file: &'static str,
    /// Below a project's directory.
    project: Option<&'static str>,
    /// Its program, to see whether it is there.
    program: &'static str,
    pub(super) format: Format,
    /// The key under which servers are.
    section: &'static str,
    /// What `type` says of a program and of a server elsewhere.
    kinds: Option<(&'static str, &'static str)>,
    /// The program and its arguments are one list.
    joined: bool,
    /// The key of a server's address. None: a file cannot name one.
    address: Option<&'static str>,
    pub(super) token: Token,
    /// Tools must be let in by name.
    tools: bool,
}

/// Most clients write a server so.
const COMMON: Facts = Facts {
    title: "",
    base: Base::Home(""),
    file: "mcp.json",
    project: None,
    program: "",
    format: Format::Jsonc,
    section: "mcpServers",
    kinds: None,
    joined: false,
    address: Some("url"),
    token: Token::Pasted,
    tools: false,
};

pub(super) fn facts(client: Client) -> Facts {
    match client {
        Client::ClaudeCode => Facts {
            title: "Claude Code",
            base: Base::Named("CLAUDE_CONFIG_DIR", ".claude"),
            file: ".claude.json",
            project: Some(".mcp.json"),
            program: "claude",
            format: Format::Json,
            kinds: Some(("stdio", "http")),
            token: Token::Reference("${CARREL_TOKEN}"),
            ..COMMON
        },
        Client::ClaudeDesktop => Facts {
            title: "Claude Desktop",
            base: Base::Config("Claude"),
            file: "claude_desktop_config.json",
            program: "claude-desktop",
            format: Format::Json,
            // Servers elsewhere are connectors, which its settings keep and no file.
            address: None,
            ..COMMON
        },
        Client::Cursor => Facts {
            title: "Cursor",
            base: Base::Home(".cursor"),
            project: Some(".cursor/mcp.json"),
            program: "cursor",
            token: Token::Reference("${env:CARREL_TOKEN}"),
            ..COMMON
        },
        Client::VsCode => Facts {
            title: "VS Code",
            base: Base::Config("Code"),
            file: "User/mcp.json",
            project: Some(".vscode/mcp.json"),
            program: "code",
            section: "servers",
            kinds: Some(("stdio", "http")),
            // Headers take inputs for certain; variables of the environment did not work in all versions.
            token: Token::Reference("${input:carrel-token}"),
            ..COMMON
        },
        Client::Codex => Facts {
            title: "Codex",
            base: Base::Named("CODEX_HOME", ".codex"),
            file: "config.toml",
            project: Some(".codex/config.toml"),
            program: "codex",
            format: Format::Toml,
            section: "mcp_servers",
            token: Token::Variable("bearer_token_env_var"),
            ..COMMON
        },
        Client::Windsurf => Facts {
            title: "Windsurf",
            base: Base::Home(".codeium/windsurf"),
            file: "mcp_config.json",
            program: "windsurf",
            address: Some("serverUrl"),
            token: Token::Reference("${env:CARREL_TOKEN}"),
            ..COMMON
        },
        Client::Zed => Facts {
            title: "Zed",
            base: Base::Config("zed"),
            file: "settings.json",
            project: Some(".zed/settings.json"),
            program: "zed",
            section: "context_servers",
            ..COMMON
        },
        Client::GeminiCli => Facts {
            title: "Gemini CLI",
            base: Base::Home(".gemini"),
            file: "settings.json",
            project: Some(".gemini/settings.json"),
            program: "gemini",
            address: Some("httpUrl"),
            token: Token::Reference("${CARREL_TOKEN}"),
            ..COMMON
        },
        Client::OpenCode => Facts {
            title: "opencode",
            base: Base::Config("opencode"),
            file: "opencode.json",
            project: Some("opencode.json"),
            program: "opencode",
            section: "mcp",
            kinds: Some(("local", "remote")),
            joined: true,
            token: Token::Reference("{env:CARREL_TOKEN}"),
            ..COMMON
        },
        Client::CopilotCli => Facts {
            title: "GitHub Copilot CLI",
            base: Base::Named("COPILOT_HOME", ".copilot"),
            file: "mcp-config.json",
            project: Some(".github/mcp.json"),
            program: "copilot",
            kinds: Some(("stdio", "http")),
            token: Token::Reference("${CARREL_TOKEN}"),
            tools: true,
            ..COMMON
        },
        Client::Kiro => Facts {
            title: "Kiro",
            base: Base::Home(".kiro"),
            file: "settings/mcp.json",
            project: Some(".kiro/settings/mcp.json"),
            program: "kiro",
            token: Token::Reference("${CARREL_TOKEN}"),
            ..COMMON
        },
        Client::QwenCode => Facts {
            title: "Qwen Code",
            base: Base::Home(".qwen"),
            file: "settings.json",
            project: Some(".qwen/settings.json"),
            program: "qwen",
            address: Some("httpUrl"),
            token: Token::Reference("${CARREL_TOKEN}"),
            ..COMMON
        },
        Client::Amp => Facts {
            title: "Amp",
            base: Base::Config("amp"),
            file: "settings.json",
            project: Some(".amp/settings.json"),
            program: "amp",
            // One key with a dot in it.
            section: "amp.mcpServers",
            ..COMMON
        },
    }
}

impl Facts {
    fn base(&self, around: &Surroundings) -> Result<PathBuf, Problem> {
        let found = match self.base {
            Base::Home(below) => around.path("HOME").map(|home| home.join(below)),
            Base::Config(below) => around.home("XDG_CONFIG_HOME", ".config").map(|home| home.join(below)),
            Base::Named(variable, below) => around.home(variable, below),
        };
        found.ok_or_else(|| {
            Problem::new(
                Code::InvalidArgument,
                format!("where {} keeps its configuration is unknown: HOME is not set", self.title),
            )
            .hint("set HOME, or use --print and paste the result")
        })
    }

    pub(super) fn user_file(&self, around: &Surroundings) -> Result<PathBuf, Problem> {
        let base = self.base(around)?;
        // Claude Code's file is beside its directory, and inside only where a variable names one.
        if let Base::Named(variable @ "CLAUDE_CONFIG_DIR", _) = self.base
            && around.path(variable).is_none()
        {
            return Ok(base.with_file_name(self.file));
        }
        Ok(with_comments(base.join(self.file)))
    }

    pub(super) fn project_file(&self, around: &Surroundings) -> Option<PathBuf> {
        self.project.map(|file| with_comments(around.directory.join(file)))
    }

    /// Whether the client seems to be on this machine.
    pub(super) fn found(&self, around: &Surroundings) -> bool {
        let path = around.variables.get(std::ffi::OsStr::new("PATH"));
        let program =
            path.is_some_and(|path| std::env::split_paths(path).any(|dir| dir.join(self.program).is_file()));
        program
            || self.base(around).is_ok_and(|base| base.is_dir())
            || self.user_file(around).is_ok_and(|file| file.is_file())
    }

    /// The keys that lead to the servers, in a file of this content.
    pub(super) fn section(&self, content: &Value) -> Vec<&'static str> {
        // The second version of opencode reads both its own form and the first one's. A server that happens to be called
        // `servers` has a type.
        let newer = &content["mcp"]["servers"];
        if self.section == "mcp" && newer.is_object() && newer["type"].is_null() {
            return vec!["mcp", "servers"];
        }
        vec![self.section]
    }

    /// The server as this client has it in its file.
    pub(super) fn entry(&self, server: &Server) -> Result<Entry, Problem> {
        let mut entry: Vec<(&str, Value)> = Vec::new();
        match server {
            Server::Program { command, args } => {
                entry.extend(self.kinds.map(|(kind, _)| ("type", kind.into())));
                if self.joined {
                    let all: Vec<&String> = std::iter::once(command).chain(args).collect();
                    entry.push(("command", json!(all)));
                } else {
                    entry.extend([("command", json!(command)), ("args", json!(args))]);
                }
            }
            Server::Remote { url } => {
                let address = self.address.ok_or_else(|| {
                    Problem::new(
                        Code::Unsupported,
                        format!("the configuration file of {} takes no URL", self.title),
                    )
                    .hint("add it in the client's own settings (Connectors), or install without --http")
                })?;
                entry.extend(self.kinds.map(|(_, kind)| ("type", kind.into())));
                entry.push((address, json!(url)));
                let bearer = |token: &str| ("headers", json!({"Authorization": format!("Bearer {token}")}));
                entry.push(match self.token {
                    Token::Reference(reference) => bearer(reference),
                    Token::Variable(key) => (key, TOKEN.into()),
                    Token::Pasted => bearer(PASTE),
                });
            }
        }
        if self.tools {
            entry.push(("tools", json!(["*"])));
        }
        Ok(entry.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }
}

/// opencode takes `.jsonc` too, and the user's choice stands.
fn with_comments(file: PathBuf) -> PathBuf {
    let longer = file.with_extension("jsonc");
    if file.ends_with("opencode.json") && longer.is_file() { longer } else { file }
}
