//! A configuration file's text, whatever its format: what it says of a server, and the same text with a server put in or
//! taken out. Everything else in it, comments and layout included, stays as it is.

use std::path::Path;

use carrel_proto::problem::{Code, Problem};
use serde_json::Value;

use super::{Entry, json, toml};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// To the letter: its client reads nothing else.
    Json,
    /// With comments and trailing commas.
    Jsonc,
    Toml,
}

/// Why a text cannot be edited.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) line: Option<usize>,
    pub(super) what: String,
}

impl Fault {
    pub(super) fn shape(what: impl Into<String>) -> Self {
        Self { line: None, what: what.into() }
    }

    pub(super) fn problem(self, file: &Path) -> Problem {
        let at = self.line.map_or(String::new(), |line| format!(":{line}"));
        Problem::new(Code::Config, format!("{}{at}: {}", file.display(), self.what))
            .hint("nothing was changed; mend the file, or use --print and paste the result")
    }
}

/// Some editors begin a file with it.
const BYTE_ORDER_MARK: char = '\u{feff}';

impl Format {
    /// All that the text says.
    pub(super) fn content(self, text: &str) -> Result<Value, Fault> {
        let text = text.trim_start_matches(BYTE_ORDER_MARK);
        match self {
            Format::Json | Format::Jsonc => json::content(text, self == Format::Json),
            Format::Toml => toml::content(text),
        }
    }

    /// What the text says of a server, in its order.
    pub(super) fn entry(self, text: &str, section: &[&str], name: &str) -> Result<Option<Entry>, Fault> {
        let text = text.trim_start_matches(BYTE_ORDER_MARK);
        match self {
            Format::Json | Format::Jsonc => json::entry(text, section, name, self == Format::Json),
            Format::Toml => toml::entry(text, section, name),
        }
    }

    /// The text with the server as given. Keys of it that are not given are taken out.
    pub(super) fn put(
        self,
        text: &str,
        section: &[&str],
        name: &str,
        entry: &Entry,
    ) -> Result<String, Fault> {
        self.edit(text, |text| match self {
            Format::Json | Format::Jsonc => json::put(text, section, name, entry, self == Format::Json),
            Format::Toml => toml::put(text, section, name, entry),
        })
    }

    /// The text without the server.
    pub(super) fn cut(self, text: &str, section: &[&str], name: &str) -> Result<String, Fault> {
        self.edit(text, |text| match self {
            Format::Json | Format::Jsonc => json::cut(text, section, name, self == Format::Json),
            Format::Toml => toml::cut(text, section, name),
        })
    }

    fn edit(self, text: &str, change: impl FnOnce(&str) -> Result<String, Fault>) -> Result<String, Fault> {
        match text.strip_prefix(BYTE_ORDER_MARK) {
            Some(rest) => Ok(format!("{BYTE_ORDER_MARK}{}", change(rest)?)),
            None => change(text),
        }
    }
}
