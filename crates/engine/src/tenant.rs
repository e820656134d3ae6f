//! Whose a sandbox is, and what its owner has written on it.

use std::{collections::BTreeMap, fmt};

use carrel_proto::problem::{Code, Problem};
use serde::{Deserialize, Serialize};

use crate::tokens::TokenId;

/// Whose a sandbox is: the local user's, or a token's. Two tenants never meet: not by key, and a token not by id either.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tenant(String);

impl Tenant {
    /// Whoever may open the state directory: there is nothing to hide from them.
    pub const fn local() -> Self {
        Self(String::new())
    }

    pub fn token(id: &TokenId) -> Self {
        Self(id.as_str().to_owned())
    }

    pub fn is_local(&self) -> bool {
        self.0.is_empty()
    }

    /// Empty for the local user.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As the owner in a key: `user:OWNER:NAME`.
    pub fn owner(&self) -> &str {
        if self.is_local() { "local" } else { &self.0 }
    }

    /// Whether what belongs to `other` is there for this tenant.
    pub fn sees(&self, other: &Tenant) -> bool {
        self.is_local() || self == other
    }

    pub(crate) fn stored(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.owner())
    }
}

/// Most labels of one sandbox, and the longest names and values: a row stays a few kilobytes.
pub const MAX_LABELS: usize = 64;
pub const MAX_LABEL_NAME: usize = 63;
pub const MAX_LABEL_VALUE: usize = 255;

/// What the owner of a sandbox has written on it, to find it again.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Labels(BTreeMap<String, String>);

impl Labels {
    pub fn new(labels: BTreeMap<String, String>) -> Result<Self, Problem> {
        let bad = |why: String| Err(Problem::new(Code::InvalidArgument, why));
        if labels.len() > MAX_LABELS {
            return bad(format!("{} labels are more than the most, {MAX_LABELS}", labels.len()));
        }
        for (name, value) in &labels {
            Self::check_name(name)?;
            if value.len() > MAX_LABEL_VALUE || value.chars().any(char::is_control) {
                return bad(format!(
                    "the value of label `{name}` may have {MAX_LABEL_VALUE} bytes and no control characters"
                ));
            }
        }
        Ok(Self(labels))
    }

    /// Names are safe in a query string and in a JSON path.
    pub(crate) fn check_name(name: &str) -> Result<(), Problem> {
        let good = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
        if (1..=MAX_LABEL_NAME).contains(&name.len()) && name.chars().all(good) {
            return Ok(());
        }
        let shown: String = name.chars().take(MAX_LABEL_NAME).collect();
        Err(Problem::new(Code::InvalidArgument, format!("`{shown}` is not a label's name"))
            .hint(format!("1 to {MAX_LABEL_NAME} ASCII letters, digits, `.`, `_`, `-` and `/`")))
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> Result<Labels, Problem> {
        Labels::new(pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect())
    }

    #[test]
    fn labels_are_bounded() {
        assert!(labels(&[("team", "blau"), ("app.io/run-id", ""), ("x", "ü ö")]).is_ok());
        let long = "x".repeat(256);
        for bad in
            [("", "x"), ("a b", "x"), ("a\"b", "x"), ("ä", "x"), ("a", "x\ny"), (&long, "x"), ("a", &long)]
        {
            assert_eq!(labels(&[bad]).unwrap_err().code, Code::InvalidArgument, "{bad:?}");
        }
        let many: BTreeMap<_, _> = (0..65).map(|i| (format!("l{i}"), String::new())).collect();
        assert!(Labels::new(many).is_err());
    }

    #[test]
    fn only_the_local_user_sees_others() {
        let [a, b] = ["tok_a", "tok_b"].map(|name| Tenant::stored(name.to_owned()));
        assert!(Tenant::local().sees(&a) && a.sees(&a));
        assert!(!a.sees(&b) && !a.sees(&Tenant::local()));
    }
}
