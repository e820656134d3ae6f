//! Paths as callers write them.
//!
//! Parsing only decides what a path *says*: it maps `/workspace/…` to its relative form and refuses what can
//! name nothing inside. It does not decide where the path *leads*: `..` is kept as it is, because only the
//! kernel knows what stands before it (`carrel-files` resolves with `openat2(RESOLVE_BENEATH)`).

use std::{fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::bytes;

/// Where the workspace is mounted in every box.
pub const WORKSPACE: &str = "/workspace";
/// The kernel takes paths of 4096 bytes with their final zero.
pub const MAX_PATH: usize = 4095;

/// A path relative to [`WORKSPACE`]: not empty, not absolute, without NUL, `.` components and doubled or trailing
/// slashes. The workspace itself is `.`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestPath(Vec<u8>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PathError {
    #[error("path is empty")]
    Empty,
    #[error("path contains a zero byte")]
    Nul,
    #[error("path is longer than {MAX_PATH} bytes")]
    TooLong,
    #[error("absolute path outside {WORKSPACE}")]
    Outside,
}

impl GuestPath {
    pub fn root() -> Self {
        Self(b".".to_vec())
    }

    /// From any bytes a caller may send.
    pub fn parse(path: impl AsRef<[u8]>) -> Result<Self, PathError> {
        let path = path.as_ref();
        if path.is_empty() {
            return Err(PathError::Empty);
        }
        if path.len() > MAX_PATH + WORKSPACE.len() {
            return Err(PathError::TooLong);
        }
        if path.contains(&0) {
            return Err(PathError::Nul);
        }
        let mut parts = path.split(|b| *b == b'/').filter(|part| !matches!(*part, b"" | b"."));
        if path[0] == b'/' && parts.next() != Some(&WORKSPACE.as_bytes()[1..]) {
            return Err(PathError::Outside);
        }
        let mut kept = parts.collect::<Vec<_>>().join(&b'/');
        if kept.is_empty() {
            kept.push(b'.');
        }
        if kept.len() > MAX_PATH {
            return Err(PathError::TooLong);
        }
        Ok(Self(kept))
    }

    /// Relative to the workspace, `.` for the workspace itself.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn is_root(&self) -> bool {
        self.0 == b"."
    }

    /// This path and then another below it, as a listing of this directory names it.
    pub fn join(&self, below: impl AsRef<[u8]>) -> Result<Self, PathError> {
        let below = below.as_ref();
        if below.starts_with(b"/") {
            return Err(PathError::Outside);
        }
        Self::parse([&self.0, &b"/"[..], below].concat())
    }

    /// Parent and last component; none for the workspace itself. The last component may be `..`.
    pub fn split(&self) -> Option<(Self, &[u8])> {
        if self.is_root() {
            return None;
        }
        Some(match self.0.iter().rposition(|b| *b == b'/') {
            Some(at) => (Self(self.0[..at].to_vec()), &self.0[at + 1..]),
            None => (Self::root(), &self.0),
        })
    }
}

impl FromStr for GuestPath {
    type Err = PathError;
    fn from_str(text: &str) -> Result<Self, PathError> {
        Self::parse(text)
    }
}
impl fmt::Display for GuestPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        bytes::show(&self.0, f)
    }
}
impl fmt::Debug for GuestPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GuestPath({self})")
    }
}
impl Serialize for GuestPath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        bytes::serialize(&self.0, serializer)
    }
}
impl<'de> Deserialize<'de> for GuestPath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(bytes::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn said(path: &str) -> Result<String, PathError> {
        path.parse::<GuestPath>().map(|p| String::from_utf8(p.as_bytes().to_vec()).unwrap())
    }

    #[test]
    fn both_spellings_meet() {
        for (path, meant) in [
            ("a/b", "a/b"),
            ("/workspace/a/b", "a/b"),
            ("//workspace//./a/", "a"),
            ("/workspace", "."),
            ("./", "."),
            ("a/../b", "a/../b"),
            ("/workspace/../etc", "../etc"),
            ("workspace", "workspace"),
        ] {
            assert_eq!(said(path).as_deref(), Ok(meant), "{path}");
        }
    }

    #[test]
    fn what_names_nothing_inside_is_refused() {
        assert_eq!(said(""), Err(PathError::Empty));
        assert_eq!(said("a\0b"), Err(PathError::Nul));
        for outside in ["/", "/etc/passwd", "/workspaces/a", "/workspace2", "/../workspace/a"] {
            assert_eq!(said(outside), Err(PathError::Outside), "{outside}");
        }
        assert_eq!(said(&"a".repeat(MAX_PATH + 1)), Err(PathError::TooLong));
        assert!(said(&"a".repeat(MAX_PATH)).is_ok());
        assert_eq!(GuestPath::root().join("/etc"), Err(PathError::Outside));
    }

    proptest! {
        #[test]
        fn parsing_is_a_fixed_point(bytes in proptest::collection::vec(
            prop_oneof![Just(b'/'), Just(b'.'), Just(b'a'), Just(0xff_u8), Just(b'\n'), any::<u8>()], 0..40)
        ) {
            if let Ok(path) = GuestPath::parse(&bytes) {
                let kept = path.as_bytes();
                prop_assert!(!kept.is_empty() && kept[0] != b'/' && !kept.contains(&0));
                prop_assert!(path.is_root() || kept.split(|b| *b == b'/').all(|p| !p.is_empty() && p != b"."));
                prop_assert_eq!(&GuestPath::parse(kept).unwrap(), &path);
                let json = serde_json::to_string(&path).unwrap();
                prop_assert_eq!(&serde_json::from_str::<GuestPath>(&json).unwrap(), &path);
                let absolute = [b"/workspace/", kept].concat();
                prop_assert_eq!(&GuestPath::parse(absolute).unwrap(), &path);
                if let Some((parent, name)) = path.split() {
                    prop_assert_eq!(&parent.join(name).unwrap(), &path);
                }
            }
        }
    }
}
