//! The unix socket, and the lock beside it.
//!
//! Whoever holds the lock owns the path: it removes what a dead daemon left there and binds its own. The lock goes with its
//! holder, however that dies; its file stays, because a lock on a removed file is one that somebody else does not see. A
//! socket without a lock may still be alive (systemd made it, say), so it is knocked at before it is removed.

use std::{
    fs::{DirBuilder, File},
    io,
    os::{
        fd::AsRawFd,
        unix::{
            ffi::OsStrExt,
            fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt},
            net::{SocketAddr, UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_proto::problem::{Code, Problem};
use rustix::fs::{FlockOperation, Mode, flock};

/// A socket that is ours until this is dropped.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    _lock: File,
}

impl Drop for Socket {
    fn drop(&mut self) {
        // While the lock is held nobody else has put another one there.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A daemon that was killed while it started a process may have left its descriptors to it for a moment.
const TRIES: u32 = 20;
const BETWEEN: Duration = Duration::from_millis(50);

/// Binds the socket for its user alone.
pub(super) fn bind(path: &Path) -> Result<(UnixListener, Socket), Problem> {
    for _ in 1..TRIES {
        match try_bind(path) {
            Err(problem) if problem.code == Code::Conflict => std::thread::sleep(BETWEEN),
            other => return other,
        }
    }
    try_bind(path)
}

fn try_bind(path: &Path) -> Result<(UnixListener, Socket), Problem> {
    let failed = |what: &str, error: io::Error| {
        Problem::new(Code::InvalidArgument, format!("{what} {}: {error}", path.display()))
            .hint("name another socket with --socket or CARREL_SOCKET")
    };
    let taken = || {
        Problem::new(Code::Conflict, format!("a daemon listens on {} already", path.display()))
            .hint("stop it first, or give this one another socket with --socket")
    };
    if let Some(directory) = path.parent() {
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| failed("making the directory of", error))?;
    }
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let lock = File::options()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(&name)
        .map_err(|error| failed("locking", error))?;
    match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(taken()),
        Err(error) => return Err(failed("locking", error.into())),
    }
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed("looking at", error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(failed("there is something else at", io::Error::other("not a socket")));
        }
        Ok(_) if at_any_length(path, |short| UnixStream::connect(short)).is_ok() => return Err(taken()),
        Ok(_) => std::fs::remove_file(path).map_err(|error| failed("removing the old", error))?,
    }
    // Never open to others, not even between its making and a change of its mode.
    let before = rustix::process::umask(Mode::from_raw_mode(0o177));
    let bound = at_any_length(path, |short| UnixListener::bind(short));
    rustix::process::umask(before);
    let listener = bound.map_err(|error| failed("listening on", error))?;
    Ok((listener, Socket { path: path.to_path_buf(), _lock: lock }))
}

/// A socket's name is at most 108 bytes, a path may be longer: then by way of the descriptor of its directory.
fn at_any_length<T>(path: &Path, act: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    if SocketAddr::from_pathname(path).is_ok() || path.as_os_str().as_bytes().contains(&0) {
        return act(path);
    }
    let directory = File::open(path.parent().unwrap_or(Path::new("/")))?;
    let name = path.file_name().unwrap_or_default();
    act(&Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_dead_daemons_socket_is_replaced_and_a_living_ones_is_not() {
        let place = tempfile::tempdir().unwrap();
        // Longer than a socket's name may be.
        let path = place.path().join("d".repeat(120)).join("carrel.sock");
        let (listener, socket) = bind(&path).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(bind(&path).unwrap_err().code, Code::Conflict);
        drop((listener, socket));
        assert!(!path.exists(), "a daemon that ends takes its socket away");
        let (listener, killed) = bind(&path).unwrap();
        drop(listener);
        flock(&killed._lock, FlockOperation::Unlock).unwrap();
        let (_listener, _next) = bind(&path).unwrap();
        // What is killed removes nothing.
        std::mem::forget(killed);
    }

    #[test]
    fn a_living_socket_without_a_lock_and_other_files_are_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("a.sock");
        let _living = UnixListener::bind(&path).unwrap();
        assert_eq!(bind(&path).unwrap_err().code, Code::Conflict);
        let file = place.path().join("file");
        std::fs::write(&file, "precious").unwrap();
        assert_eq!(bind(&file).unwrap_err().code, Code::InvalidArgument);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    }
}
