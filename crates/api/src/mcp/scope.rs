//! Whose session names are meant: names of two clients do not collide unless both ask for the same scope.
//!
//! A client is known by its name and place (its working directory, or its token). Two of the same name and place at the
//! same time are told apart by a lease: each takes the lowest free slot and holds it, by a file lock, as long as it is
//! connected. One that comes back alone takes the same slot and finds its sessions, also if the server has not noticed yet
//! that it was away.

use std::{
    fs::File,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use carrel_engine::Record;
use carrel_proto::{
    id::{Key, SandboxId, SessionName},
    problem::{Code, Problem},
};
use rustix::fs::{FlockOperation, flock};

use super::presence::Presence;

/// Clients of one name and place at the same time.
const MAX_SLOTS: u32 = 1000;
/// Of a client's own name, so that the rest of a key has room.
const MAX_NAME: usize = 40;

#[derive(Debug)]
pub(super) struct Scope {
    /// A key without its last part.
    prefix: String,
    lease: Mutex<Option<File>>,
    /// Of a client without a connection that ends with it.
    presence: Option<Arc<Presence>>,
}

/// Where a call takes place.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) key: Key,
    pub(super) session: SessionName,
    /// As the caller named it.
    pub(super) name: String,
}

impl Scope {
    /// Shared by all who name it.
    pub(super) fn shared(name: &str) -> Result<Self, Problem> {
        // The rules of every name, so that it cannot reach into another scope.
        name.parse::<SessionName>()
            .map_err(|error| bad(error.to_string().replace("session name", "scope")))?;
        Ok(Self::unheld(format!("workflow:{name}:")))
    }

    /// One client's own, with a slot that nobody else has meanwhile.
    pub(super) fn leased(state: &Path, client: &str, place: &str) -> Result<Self, Problem> {
        Self::leased_while(state, client, place, None, |_| None)
    }

    /// As [`Scope::leased`], for a client that may leave without a word. `abandoned` gives the lock of a slot whose holder
    /// did.
    pub(super) fn leased_while(
        state: &Path,
        client: &str,
        place: &str,
        presence: Option<Arc<Presence>>,
        abandoned: impl Fn(&str) -> Option<File>,
    ) -> Result<Self, Problem> {
        let owner = owner(client, place);
        let directory = state.join("mcp");
        std::fs::create_dir_all(&directory).map_err(|error| failed(&directory, error))?;
        for slot in 0..MAX_SLOTS {
            let name = if slot == 0 { owner.clone() } else { format!("{owner}.{slot}") };
            let path = directory.join(&name);
            let file = File::options()
                .create(true)
                .append(true)
                .open(&path)
                .map_err(|error| failed(&path, error))?;
            let prefix = format!("user:{name}:");
            let held = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => Some(file),
                Err(_) => abandoned(&prefix),
            };
            if held.is_some() {
                return Ok(Self { prefix, lease: Mutex::new(held), presence });
            }
        }
        Err(Problem::new(Code::TooMany, "too many clients of this name")
            .hint("give them scopes of their own: `carrel mcp --scope NAME`"))
    }

    /// A client without a connection that could hold a slot: one name and place, one scope.
    pub(super) fn unleased(client: &str, place: &str) -> Self {
        Self::unheld(format!("user:{}:", owner(client, place)))
    }

    fn unheld(prefix: String) -> Self {
        Self { prefix, lease: Mutex::default(), presence: None }
    }

    fn lease(&self) -> MutexGuard<'_, Option<File>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock of this slot, if it is the one that is asked for and its client is not there any more.
    pub(super) fn give_up(&self, prefix: &str) -> Option<File> {
        let gone = self.presence.as_ref().is_some_and(|presence| !presence.is_there());
        if gone && self.prefix == prefix { self.lease().take() } else { None }
    }

    /// One connection's own, not shared with others.
    pub(super) fn is_leased(&self) -> bool {
        self.lease().is_some()
    }

    /// `NAME` or `NAME/SESSION`.
    pub(super) fn place(&self, text: &str) -> Result<Place, Problem> {
        let (name, session) = text.split_once('/').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let hint = "use letters, digits, `.`, `_` and `-`";
        name.parse::<SessionName>().map_err(|error| bad(error.to_string()).hint(hint))?;
        let session = match session {
            Some(session) => session.parse().map_err(|error| bad(format!("{error}")).hint(hint))?,
            None => SessionName::main(),
        };
        let key = format!("{}{name}", self.prefix).parse().map_err(|error| bad(format!("{error}")))?;
        Ok(Place { key, session, name: text.to_owned() })
    }

    /// A sandbox's name in this scope. `None`: it is somebody else's.
    pub(super) fn name<'a>(&self, record: &'a Record) -> Option<&'a str> {
        record.key.as_ref()?.as_str().strip_prefix(&self.prefix)
    }

    /// The sandbox of this id, if it is ours to see.
    pub(super) fn check(&self, id: &SandboxId, record: Option<Record>) -> Result<Record, Problem> {
        record.filter(|record| self.name(record).is_some()).ok_or_else(|| {
            Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{id}`"))
                .hint("ids come from sandbox_open and from the status line of run")
        })
    }
}

fn bad(what: String) -> Problem {
    Problem::new(Code::InvalidArgument, what)
}

fn failed(path: &Path, error: std::io::Error) -> Problem {
    Problem::internal(format!("{}: {error}", path.display()))
}

/// A client as a part of a key.
fn owner(client: &str, place: &str) -> String {
    let name: String = client
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || "_-".contains(c) { c } else { '-' })
        .take(MAX_NAME)
        .collect();
    // FNV-1a: the same in every build, which the standard library's hashes do not promise.
    let hash =
        client.bytes().chain([0]).chain(place.bytes()).fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
    format!("mcp-{name}-{:08x}", hash >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_do_not_meet_and_find_their_own_again() {
        let state = tempfile::tempdir().unwrap();
        let key = |scope: &Scope| scope.place("work").unwrap().key;
        let one = Scope::leased(state.path(), "Claude Code", "/a").unwrap();
        let twin = Scope::leased(state.path(), "Claude Code", "/a").unwrap();
        let elsewhere = Scope::leased(state.path(), "Claude Code", "/b").unwrap();
        let other = Scope::leased(state.path(), "cursor", "/a").unwrap();
        let keys = [key(&one), key(&twin), key(&elsewhere), key(&other)];
        assert_eq!(keys.iter().collect::<std::collections::BTreeSet<_>>().len(), 4, "{keys:?}");
        drop((one, twin));
        assert_eq!(key(&Scope::leased(state.path(), "Claude Code", "/a").unwrap()), keys[0]);
        assert_eq!(key(&Scope::shared("run-1").unwrap()).as_str(), "workflow:run-1:work");
    }

    #[test]
    fn names_cannot_reach_into_other_scopes() {
        let scope = Scope::unleased("x", "y");
        for bad in ["", "a:b", "../a", "a/b/c", "a b", "/x", "x/", &"x".repeat(65)] {
            assert!(scope.place(bad).is_err(), "{bad:?}");
        }
        assert_eq!(scope.place("a/b").unwrap().session.as_str(), "b");
        assert!(Scope::shared("a:b").is_err());
        let long = Scope::unleased(&"ü:/x".repeat(100), "y");
        assert!(long.place(&"x".repeat(64)).is_ok());
    }
}
