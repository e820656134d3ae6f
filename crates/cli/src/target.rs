//! How a user names a sandbox: `NAME`, `NAME/SESSION`, an id, or a whole key.

use std::str::FromStr;

use carrel_proto::id::{Key, SandboxId, SessionName};

/// Whose sandboxes the command line makes.
const SCOPE: &str = "user:local:";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// As typed, without the session.
    pub(crate) name: String,
    pub(crate) key: Key,
    pub(crate) session: Option<SessionName>,
}

impl Target {
    /// Whether this is an id: such a sandbox is found, never made.
    pub(crate) fn is_id(&self) -> bool {
        self.name.starts_with("sbx_") && self.name.parse::<SandboxId>().is_ok()
    }

    pub(crate) fn session(&self) -> SessionName {
        self.session.clone().unwrap_or_else(SessionName::main)
    }
}

impl FromStr for Target {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, session) = match text.split_once('/') {
            Some((name, session)) => (name, Some(session.parse().map_err(|error| format!("{error}"))?)),
            None => (text, None),
        };
        let key = if name.contains(':') {
            name.parse().map_err(|error| format!("{error}"))?
        } else {
            // A name alone has the rules of every name; the key's own would let more through.
            name.parse::<SessionName>()
                .map_err(|error| error.to_string().replace("session name", "sandbox name"))?;
            format!("{SCOPE}{name}").parse().map_err(|error| format!("{error}"))?
        };
        Ok(Self { name: name.to_owned(), key, session })
    }
}

/// A key as the user would type it.
pub(crate) fn shown(key: &Key) -> &str {
    key.as_str().strip_prefix(SCOPE).unwrap_or(key.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_keys() {
        let target: Target = "work/tests".parse().unwrap();
        assert_eq!(target.key.as_str(), "user:local:work");
        assert_eq!(target.session().as_str(), "tests");
        assert_eq!(shown(&target.key), "work");
        let target: Target = "workflow:run_42:default".parse().unwrap();
        assert_eq!(target.key.as_str(), "workflow:run_42:default");
        assert_eq!(target.session().as_str(), "default");
        assert!("sbx_abcdefghijkmnpqr".parse::<Target>().unwrap().is_id());
        for bad in ["", "/x", "a/", "a b", "-x", "a/b/c", ".."] {
            assert!(bad.parse::<Target>().is_err(), "{bad}");
        }
    }
}
