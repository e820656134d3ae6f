//! One lock per sandbox, held by whoever makes, revives or removes it. The kernel lets go of it when its holder
//! dies, however it dies: that is how a half-made sandbox is told from one in the making.

use std::{
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_proto::{id::SandboxId, problem::Problem};
use rustix::fs::{FlockOperation, flock};

/// Longest wait for somebody else's making or removing: both take well under a second on a healthy host.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
    path: PathBuf,
}

fn path(state: &Path, id: &SandboxId) -> PathBuf {
    state.join("locks").join(id.as_str())
}

/// A lock file that is nobody's, for the next sandbox. Not among the others: there every file is a sandbox's.
fn free(state: &Path) -> PathBuf {
    state.join("free.lock")
}

fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create(true).truncate(false).open(path)
}

/// Whether the locked file is still the one that others find by name: whoever removes a sandbox removes its lock file, and
/// may do so between our opening and our locking of it.
fn is_current(file: &File, path: &Path) -> bool {
    let identity = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(held), Ok(named)) => identity(held) == identity(named),
        _ => false,
    }
}

impl Lock {
    /// Takes it if nobody has it.
    pub(crate) fn try_take(state: &Path, id: &SandboxId) -> io::Result<Option<Self>> {
        let path = path(state, id);
        loop {
            let file = open(&path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) if is_current(&file, &path) => return Ok(Some(Self { _file: file, path })),
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The lock of a sandbox that nobody knows yet. The file of one that is gone serves again: on some file systems a new
    /// one takes a millisecond. Whoever still waits at it for the old sandbox looks at its name next, and goes.
    pub(crate) async fn take_new(state: &Path, id: &SandboxId) -> Result<Self, Problem> {
        let _ = std::fs::rename(free(state), path(state, id));
        Self::take(state, id).await
    }

    /// Waits for it.
    pub(crate) async fn take(state: &Path, id: &SandboxId) -> Result<Self, Problem> {
        if let Ok(Some(lock)) = Self::try_take(state, id) {
            return Ok(lock);
        }
        let path = path(state, id);
        let name = id.clone();
        let waiting = tokio::task::spawn_blocking(move || -> io::Result<Self> {
            loop {
                let file = open(&path)?;
                flock(&file, FlockOperation::LockExclusive)?;
                if is_current(&file, &path) {
                    return Ok(Self { _file: file, path });
                }
            }
        });
        match tokio::time::timeout(PATIENCE, waiting).await {
            Ok(Ok(Ok(lock))) => Ok(lock),
            Ok(Ok(Err(error))) => Err(Problem::internal(format!("locking sandbox {name}: {error}"))),
            Ok(Err(error)) => Err(Problem::internal(error)),
            Err(_) => {
                Err(Problem::internal(format!("sandbox {name} has been in the making for {PATIENCE:?}"))
                    .hint("another carrel process holds it; end that process"))
            }
        }
    }

    /// The sandbox is gone: so is its lock. Whoever waits for it looks into the registry next.
    pub(crate) fn discard(self) {
        let state = self.path.parent().and_then(Path::parent).unwrap_or(&self.path);
        if std::fs::rename(&self.path, free(state)).is_err() {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
