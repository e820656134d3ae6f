//! Names as types: parsed at the edge, trusted afterwards.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// Longest name of a sandbox, session or exec. They become directory, cgroup and socket names.
pub const MAX_NAME: usize = 64;
/// Longest key: three names and two colons.
pub const MAX_KEY: usize = 3 * MAX_NAME + 2;

/// Why a name was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} `{text}` {why}")]
pub struct BadName {
    what: &'static str,
    text: String,
    why: &'static str,
}

fn check(what: &'static str, text: &str, max: usize, extra: &str) -> Result<(), BadName> {
    let bad = |why| Err(BadName { what, text: text.chars().take(80).collect(), why });
    if text.is_empty() {
        return bad("is empty");
    }
    if text.len() > max {
        return bad("is too long");
    }
    if text.starts_with(['.', '-']) {
        return bad("must start with a letter, digit or underscore");
    }
    if !text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c) || extra.contains(c)) {
        return bad("may hold only ASCII letters, digits, `.`, `_` and `-`");
    }
    Ok(())
}

macro_rules! name_type {
    ($(#[$doc:meta])* $name:ident, $what:literal, $max:expr, $extra:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl TryFrom<String> for $name {
            type Error = BadName;
            fn try_from(text: String) -> Result<Self, BadName> {
                check($what, &text, $max, $extra)?;
                Ok(Self(text))
            }
        }
        impl FromStr for $name {
            type Err = BadName;
            fn from_str(text: &str) -> Result<Self, BadName> {
                Self::try_from(text.to_owned())
            }
        }
        impl From<$name> for String {
            fn from(name: $name) -> String {
                name.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name_type!(
    /// `sbx_…`: one isolated box, for its whole life.
    SandboxId, "sandbox id", MAX_NAME, ""
);
name_type!(
    /// `snp_…`: a saved sandbox.
    SnapshotId, "snapshot id", MAX_NAME, ""
);
name_type!(
    /// One line of work inside a sandbox.
    SessionName, "session name", MAX_NAME, ""
);
name_type!(
    /// A run or an exec of one sandbox: `ex_1`, `ex_2`, …
    ExecId, "exec id", MAX_NAME, ""
);
name_type!(
    /// `scope:owner:name`: how a caller names a sandbox without its id.
    Key, "key", MAX_KEY, ":"
);

impl SandboxId {
    /// An id from 80 random bits; the caller brings the randomness.
    pub fn from_random(bytes: [u8; 10]) -> Self {
        Self(random_name("sbx_", bytes))
    }
}

impl Default for SessionName {
    /// The one that every sandbox has.
    fn default() -> Self {
        Self::main()
    }
}

impl SnapshotId {
    /// As of a sandbox.
    pub fn from_random(bytes: [u8; 10]) -> Self {
        Self(random_name("snp_", bytes))
    }
}

fn random_name(prefix: &str, bytes: [u8; 10]) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
    let bits = bytes.iter().fold(0u128, |acc, byte| acc << 8 | u128::from(*byte));
    let tail = (0..16).map(|i| char::from(ALPHABET[(bits >> (i * 5) & 31) as usize]));
    prefix.chars().chain(tail).collect()
}

impl SessionName {
    /// The session every sandbox has.
    pub fn main() -> Self {
        Self("default".to_owned())
    }
}

impl ExecId {
    /// Room for the execs of one life of a sandbox. One that is brought back begins after the next multiple, since nobody
    /// knows how many there were before: an agent that is killed writes nothing down.
    const PER_LIFE: u64 = 1_000_000;

    pub fn numbered(number: u64) -> Self {
        Self(format!("ex_{number}"))
    }

    /// The number of the first exec of a sandbox that has been brought back `life` times.
    pub fn first_number(life: u32) -> u64 {
        u64::from(life) * Self::PER_LIFE + 1
    }

    /// How often a sandbox had been brought back whose next exec has this number.
    pub fn life_of(number: u64) -> u32 {
        u32::try_from(number.saturating_sub(1) / Self::PER_LIFE).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_distinct_and_parse_again() {
        let a = SandboxId::from_random([0; 10]);
        let b = SandboxId::from_random([255; 10]);
        assert_ne!(a, b);
        assert_eq!(a.as_str().len(), 20);
        assert_eq!(b.as_str().parse::<SandboxId>().unwrap(), b);
    }

    #[test]
    fn names_that_could_be_paths_or_options_are_refused() {
        for bad in ["", "..", "a/b", "-x", ".hidden", "a b", "a\n", "ü", &"x".repeat(65)] {
            assert!(bad.parse::<SessionName>().is_err(), "{bad:?}");
        }
        assert!("workflow:run_42:default".parse::<Key>().is_ok());
        assert!("a:b".parse::<SessionName>().is_err());
    }
}
