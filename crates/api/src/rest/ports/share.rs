//! Share links: a path that carries its own permission.
//!
//! `/shared/LINK/`, where LINK is base64url of version, port, time of expiry, sandbox id and an HMAC-SHA256 over all of it. Nothing is
//! kept per link: it is over when its time is, or its sandbox is gone. The key is made once, for its owner alone, and never leaves the
//! state directory; removing the file ends every link at the daemon's next start.

use std::{
    path::Path,
    time::{SystemTime, UNIX_EPOCH},
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use carrel_engine::secret::{self, KEY};
use carrel_proto::{id::SandboxId, problem::Problem};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// In the state directory.
const FILE: &str = "share.key";
const TAG: usize = 32;
const VERSION: u8 = 1;
/// Version, port and time.
const HEAD: usize = 1 + 2 + 8;
/// Longest link that is looked at; ours have some ninety letters.
const LONGEST: usize = 256;
/// So that no other use of the key can ever stand for a link.
const DOMAIN: &[u8] = b"carrel share link\0";

/// What a link opens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) sandbox: SandboxId,
    pub(super) port: u16,
}

/// Signs links and reads them.
pub(super) struct Links {
    keyed: Hmac<Sha256>,
}

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Links")
    }
}

pub(super) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

impl Links {
    /// With the key of this state directory, made if it is not there.
    pub(super) fn open(state: &Path) -> Result<Self, Problem> {
        let key = secret::key(state, FILE).map_err(|error| {
            Problem::internal(format!("the key of share links, {}: {error}", state.join(FILE).display()))
        })?;
        Self::with(&key)
    }

    fn with(key: &[u8; KEY]) -> Result<Self, Problem> {
        Hmac::new_from_slice(key).map(|keyed| Self { keyed }).map_err(Problem::internal)
    }

    fn mac(&self, said: &[u8]) -> Hmac<Sha256> {
        let mut mac = self.keyed.clone();
        mac.update(DOMAIN);
        mac.update(said);
        mac
    }

    pub(super) fn sign(&self, sandbox: &SandboxId, port: u16, expires_unix_ms: u64) -> String {
        let mut bytes = vec![VERSION];
        bytes.extend_from_slice(&port.to_be_bytes());
        bytes.extend_from_slice(&expires_unix_ms.to_be_bytes());
        bytes.extend_from_slice(sandbox.as_str().as_bytes());
        let tag = self.mac(&bytes).finalize().into_bytes();
        bytes.extend_from_slice(&tag);
        URL_SAFE_NO_PAD.encode(bytes)
    }

    /// What a link opens, if it is ours and not over.
    pub(super) fn read(&self, text: &str, now_unix_ms: u64) -> Option<Link> {
        let bytes = URL_SAFE_NO_PAD.decode(Some(text).filter(|text| text.len() <= LONGEST)?).ok()?;
        let (said, tag) = bytes.split_at_checked(bytes.len().checked_sub(TAG)?)?;
        self.mac(said).verify_slice(tag).ok()?;
        let (head, sandbox) = said.split_at_checked(HEAD)?;
        let (&[version], rest) = head.split_first_chunk()?;
        let (&port, expires) = rest.split_first_chunk()?;
        let expires = u64::from_be_bytes(expires.try_into().ok()?);
        if version != VERSION || expires <= now_unix_ms {
            return None;
        }
        let sandbox = std::str::from_utf8(sandbox).ok()?.parse().ok()?;
        Some(Link { sandbox, port: u16::from_be_bytes(port) })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn links() -> (tempfile::TempDir, Links) {
        let state = tempfile::tempdir().unwrap();
        let links = Links::open(state.path()).unwrap();
        (state, links)
    }

    #[test]
    fn a_link_opens_what_it_was_signed_for_until_it_is_over() {
        let (_state, links) = links();
        let sandbox = SandboxId::from_random([1; 10]);
        let text = links.sign(&sandbox, 8080, 1000);
        assert_eq!(links.read(&text, 999), Some(Link { sandbox, port: 8080 }));
        assert_eq!(links.read(&text, 1000), None);
        assert_eq!(links.read(&text, u64::MAX), None);
    }

    #[test]
    fn no_changed_foreign_or_cut_link_is_taken() {
        let (_state, links) = links();
        let (_other_state, other) = self::links();
        let sandbox = SandboxId::from_random([1; 10]);
        let text = links.sign(&sandbox, 80, 1000);
        assert_eq!(other.read(&text, 0), None);
        let bytes = URL_SAFE_NO_PAD.decode(&text).unwrap();
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1;
            assert_eq!(links.read(&URL_SAFE_NO_PAD.encode(changed), 0), None, "byte {at}");
            assert_eq!(links.read(&URL_SAFE_NO_PAD.encode(&bytes[..at]), 0), None, "cut at {at}");
        }
        for wrong in ["", "a", "%", "ä", &"A".repeat(10_000), &format!("{text}="), &format!("{text}A")] {
            assert_eq!(links.read(wrong, 0), None);
        }
    }

    #[test]
    fn the_key_is_made_once_and_for_its_owner_alone() {
        let state = tempfile::tempdir().unwrap();
        let sandbox = SandboxId::from_random([1; 10]);
        let opened: Vec<Links> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| Links::open(state.path()).unwrap())).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let signed: Vec<String> = opened.iter().map(|links| links.sign(&sandbox, 1, 1)).collect();
        assert!(signed.iter().all(|text| *text == signed[0]));
        assert_ne!(secret::key(state.path(), FILE).unwrap(), [0; KEY]);
        let files: Vec<_> = std::fs::read_dir(state.path()).unwrap().map(|file| file.unwrap()).collect();
        assert_eq!(files.len(), 1, "no draft is left: {files:?}");
        assert_eq!(files[0].metadata().unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(state.path().join(FILE), b"short").unwrap();
        assert!(Links::open(state.path()).is_err());
    }
}
