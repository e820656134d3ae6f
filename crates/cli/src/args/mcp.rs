//! Arguments of `carrel mcp`.

use std::{net::SocketAddr, path::PathBuf};

use clap::{Args, ValueEnum};

use super::Making;

#[derive(Debug, Args)]
pub(crate) struct Mcp {
    /// Serve HTTP at ADDR/mcp instead of stdio: 127.0.0.1:8765.
    #[arg(long, value_name = "ADDR")]
    pub(crate) http: Option<SocketAddr>,
    /// Which tools are offered.
    #[arg(long, value_name = "SET", value_enum, default_value_t)]
    pub(crate) tools: Tools,
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

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
pub(crate) enum Tools {
    /// One tool: run.
    #[default]
    Run,
    /// The sandbox_… tools.
    Code,
    /// Both.
    All,
}
