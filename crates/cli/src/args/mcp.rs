//! Arguments of `carrel mcp`.

use std::{net::SocketAddr, path::PathBuf};

use carrel_api::mcp::ToolSet;
use clap::{Args, Subcommand, ValueEnum};

use super::{Making, examples as ex};

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct Mcp {
    #[command(subcommand)]
    pub(crate) command: Option<McpCommand>,
    /// Serve HTTP at ADDR/mcp instead of stdio: 127.0.0.1:8765.
    #[arg(long, value_name = "ADDR")]
    pub(crate) http: Option<SocketAddr>,
    /// Which tools are offered: run, code (the sandbox_… tools) or all. Without it, what the environment's
    /// configuration says, else run.
    #[arg(long, value_name = "SET", value_parser = ToolSet::parse)]
    pub(crate) tools: Option<ToolSet>,
    /// Add structured content and output schemas.
    #[arg(long)]
    pub(crate) structured: bool,
    /// Share session names with all servers of this scope. Without it each client has its own.
    #[arg(long, value_name = "NAME")]
    pub(crate) scope: Option<String>,
    /// Close a client's sandboxes when it disconnects.
    #[arg(long)]
    pub(crate) end_on_disconnect: bool,
    /// Most characters of a text result, up to 40000.
    #[arg(long, value_name = "N", default_value_t = carrel_api::mcp::DEFAULT_CHARS)]
    pub(crate) max_chars: usize,
    /// Interrupt code after this long unless a call says otherwise.
    #[arg(long, short, value_name = "TIME")]
    pub(crate) timeout: Option<String>,
    #[command(flatten)]
    pub(crate) door: Door,
    #[command(flatten)]
    pub(crate) making: Making,
}

/// Who may come in over HTTP.
#[derive(Debug, Args)]
#[command(next_help_heading = "Options for HTTP")]
pub(crate) struct Door {
    /// File with the bearer token [env: CARREL_TOKEN has the token itself]. Without either, one is made and kept.
    #[arg(long, value_name = "FILE", requires = "http")]
    pub(crate) token_file: Option<PathBuf>,
    /// Ask for no token. On the loopback only.
    #[arg(long, requires = "http", conflicts_with = "token_file")]
    pub(crate) insecure_no_auth: bool,
    /// A name of this server that clients may use in the Host header (repeatable).
    #[arg(long, value_name = "HOST", requires = "http")]
    pub(crate) allow_host: Vec<String>,
    /// A web origin that may call: https://app.example.com (repeatable). All others are refused.
    #[arg(long, value_name = "ORIGIN", requires = "http")]
    pub(crate) allow_origin: Vec<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum McpCommand {
    /// Write this program into the configuration of an agent. Without CLIENT: list those that are known.
    #[command(after_help = ex::INSTALL)]
    Install(Install),
}

#[derive(Debug, Args)]
pub(crate) struct Install {
    /// The agent.
    pub(crate) client: Option<Client>,
    /// Into the configuration of the project in the current directory, not the user's.
    #[arg(long, requires = "client")]
    pub(crate) project: bool,
    /// The server's name in the configuration.
    #[arg(long, value_name = "NAME", default_value = "carrel", value_parser = server_name)]
    pub(crate) name: String,
    /// Connect to a server that runs at URL instead of starting one.
    #[arg(long, value_name = "URL", requires = "client", conflicts_with = "server")]
    pub(crate) http: Option<String>,
    /// Print what would be written and change nothing.
    #[arg(long, requires = "client", conflicts_with = "uninstall")]
    pub(crate) print: bool,
    /// Take the server out of the configuration.
    #[arg(long, requires = "client", conflicts_with_all = ["http", "server"])]
    pub(crate) uninstall: bool,
    /// Flags for `carrel mcp`, as the client shall start it.
    #[arg(last = true, value_name = "SERVER FLAGS", requires = "client")]
    pub(crate) server: Vec<String>,
}

/// An agent whose configuration can be written. What is known of each is in `commands/mcp/install/clients.rs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Client {
    ClaudeCode,
    ClaudeDesktop,
    Cursor,
    #[value(name = "vscode")]
    VsCode,
    Codex,
    Windsurf,
    Zed,
    GeminiCli,
    #[value(name = "opencode")]
    OpenCode,
    CopilotCli,
    Kiro,
    QwenCode,
    Amp,
}

/// What every client takes as a name: it becomes part of the names of tools.
fn server_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    if text.is_empty() || text.len() > 64 || !text.chars().all(plain) {
        return Err("use letters, digits, `_` and `-`, 64 at most".to_owned());
    }
    Ok(text.to_owned())
}
