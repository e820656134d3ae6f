//! One daemon per state directory.
//!
//! Engines of other processes may be at work beside it, and meet it in the registry; but there is one that puts idle sandboxes to
//! sleep and cleans up, one whose rates and quotas count, one that a client of this directory means. Whoever holds the lock is it,
//! and the kernel lets go of the lock when its holder dies, however it dies. The file stays: a lock on a removed file is one that
//! somebody else does not see.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};

use carrel_proto::problem::{Code, Problem};
use rustix::fs::{FlockOperation, flock};

/// Below the state directory; holds the pid of the last daemon, for people.
const NAME: &str = "daemon.lock";
/// A daemon that was killed while it started a process may have left its descriptors to it for a moment.
const TRIES: u32 = 20;
const BETWEEN: Duration = Duration::from_millis(50);
/// More than any pid has digits.
const MAX_PID: u64 = 32;

/// A state directory that is ours until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    _lock: File,
}

impl Claim {
    pub(super) fn take(state: &Path) -> Result<Self, Problem> {
        let failed =
            |error: io::Error| Problem::internal(format!("locking {}: {error}", state.join(NAME).display()));
        std::fs::create_dir_all(state).map_err(failed)?;
        let options = || {
            let mut options = File::options();
            options.create(true).truncate(false).read(true).write(true).mode(0o600);
            options
        };
        let mut lock = options().open(state.join(NAME)).map_err(failed)?;
        for left in (0..TRIES).rev() {
            match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {
                    lock.set_len(0).map_err(failed)?;
                    writeln!(lock, "{}", std::process::id()).map_err(failed)?;
                    return Ok(Self { _lock: lock });
                }
                Err(rustix::io::Errno::WOULDBLOCK) if left > 0 => std::thread::sleep(BETWEEN),
                Err(rustix::io::Errno::WOULDBLOCK) => break,
                Err(error) => return Err(failed(error.into())),
            }
        }
        let mut pid = String::new();
        // The word is for people: without a pid it is still true.
        let _ = lock.take(MAX_PID).read_to_string(&mut pid);
        let word = format!("a daemon (pid {}) serves {} already", pid.trim(), state.display());
        Err(Problem::new(Code::Conflict, word)
            .hint("stop it first, or give this one another state directory with --state"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_comes_second_is_told_who_was_first() {
        let place = tempfile::tempdir().unwrap();
        let state = place.path().join("new");
        let first = Claim::take(&state).unwrap();
        let problem = Claim::take(&state).unwrap_err();
        assert_eq!(problem.code, Code::Conflict);
        assert!(problem.message.contains(&format!("pid {})", std::process::id())), "{}", problem.message);
        drop(first);
        Claim::take(&state).unwrap();
    }
}
