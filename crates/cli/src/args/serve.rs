//! Arguments of `carrel serve` and `carrel token`.

use carrel_engine::{
    Quota,
    tokens::{Scopes, TokenId},
};
use clap::{Args, Subcommand};

use crate::config::{Flag, Key};

#[derive(Debug, Args)]
pub(crate) struct Serve {
    /// The unix socket to listen on [env: CARREL_SOCKET].
    #[arg(long, value_name = "PATH")]
    pub(crate) socket: Option<String>,
    /// Listen on TCP too: 127.0.0.1:8700 (repeatable; port 0 takes a free one).
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) listen: Vec<String>,
    /// Ask for no token on TCP. On the loopback only.
    #[arg(long)]
    pub(crate) insecure_no_auth: bool,
    /// Certificates for TLS on TCP, in PEM.
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_cert: Option<String>,
    /// Their key, in PEM.
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<String>,
    /// A name of this server that clients may use in the Host header (repeatable).
    #[arg(long, value_name = "HOST")]
    pub(crate) allow_host: Vec<String>,
    /// A web origin that may call: https://app.example.com (repeatable). All others are refused.
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) allow_origin: Vec<String>,
    /// The URL under which others reach this daemon, for links that it gives out.
    #[arg(long, value_name = "URL")]
    pub(crate) public_url: Option<String>,
}

impl Serve {
    pub(crate) fn flags(&self) -> Vec<Flag> {
        let one = |text: &Option<String>| text.clone();
        let many = |all: &Vec<String>| (!all.is_empty()).then(|| all.join(","));
        let given = [
            (Key::ServeSocket, "--socket", one(&self.socket)),
            (Key::ServeListen, "--listen", many(&self.listen)),
            (Key::ServeTlsCert, "--tls-cert", one(&self.tls_cert)),
            (Key::ServeTlsSecret, "--tls-key", one(&self.tls_key)),
            (Key::ServeAllowHosts, "--allow-host", many(&self.allow_host)),
            (Key::ServeAllowOrigins, "--allow-origin", many(&self.allow_origin)),
            (Key::ServePublicUrl, "--public-url", one(&self.public_url)),
        ];
        given.into_iter().filter_map(|(key, name, text)| Some(Flag { key, name, text: text? })).collect()
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Token {
    /// Make a token and print it: it is shown this once.
    Create(TokenCreate),
    /// List tokens.
    List,
    /// Make a token worthless for good; a running daemon ends what it has open within two seconds.
    Revoke {
        /// As `token list` prints it: tok_…
        id: TokenId,
    },
}

#[derive(Debug, Args)]
pub(crate) struct TokenCreate {
    /// What it is for; shown in lists and in no other place.
    #[arg(long, value_name = "NAME")]
    pub(crate) name: String,
    /// What it may do: all, or some of read, run, metrics, admin, with commas.
    #[arg(long, value_name = "SCOPES", default_value = "run")]
    pub(crate) scope: Scopes,
    /// What it may hold at once, and calls per second: sandboxes=20,cpu=8,memory=16GB,disk=50GB,rate=50.
    #[arg(long, value_name = "QUOTA")]
    pub(crate) quota: Option<Quota>,
    /// When it ends by itself: 12h, 30d. Without it, never.
    #[arg(long, value_name = "TIME", value_parser = expiry)]
    pub(crate) expires: Option<std::time::Duration>,
}

/// A token that outlives ten years was meant to last for ever.
const LONGEST: std::time::Duration = std::time::Duration::from_secs(10 * 366 * 24 * 3600);

fn expiry(text: &str) -> Result<std::time::Duration, String> {
    crate::config::time(text, LONGEST)
}
