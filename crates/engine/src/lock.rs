//! One lock per sandbox, held by whoever makes, revives or removes it. The kernel lets go of it when its holder
//! dies, however it dies: that is how a half-made sandbox is told from one in the making.
//!
//! Tasks of one process first queue among themselves: at the kernel's lock, where a thread has to wait, is one of them at
//! most. Else a few hundred callers of one sandbox would hold every thread that its maker needs to get on.

use std::{
    collections::HashMap,
    fs::File,
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use carrel_proto::{
    id::{Key, SandboxId},
    problem::{Code, Problem},
};
use rustix::fs::{FlockOperation, flock};
use tokio::sync::{Mutex as Turn, OwnedMutexGuard, Semaphore};

use crate::tenant::Tenant;

/// Longest wait for somebody else's making or removing: both take well under a second on a healthy host.
const PATIENCE: Duration = Duration::from_secs(60);
/// Threads that wait for other processes, each for one sandbox. The rest of the runtime's threads are for work.
const WAITING: usize = 32;

#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
    path: PathBuf,
    /// This process's own queue moves on after the kernel's lock is free: fields are dropped in order.
    _turn: Option<OwnedMutexGuard<()>>,
}

/// The queues of one process.
#[derive(Debug)]
pub(crate) struct Locks {
    queues: Mutex<Queues>,
    waiting: Semaphore,
}

#[derive(Debug, Default)]
struct Queues {
    all: HashMap<String, Weak<Turn<()>>>,
    /// Those that nobody stands in are dropped when there are this many.
    tidy_at: usize,
}

impl Default for Locks {
    fn default() -> Self {
        Self { queues: Mutex::default(), waiting: Semaphore::new(WAITING) }
    }
}

impl Locks {
    fn queue(&self, name: &str) -> Arc<Turn<()>> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(queue) = queues.all.get(name).and_then(Weak::upgrade) {
            return queue;
        }
        if queues.all.len() >= queues.tidy_at {
            queues.all.retain(|_, queue| queue.strong_count() > 0);
            queues.tidy_at = 64 + 2 * queues.all.len();
        }
        let queue = Arc::new(Turn::new(()));
        queues.all.insert(name.to_owned(), Arc::downgrade(&queue));
        queue
    }

    /// A turn at making the sandbox of a key, in the order of asking: whoever comes first has the first call of it too.
    pub(crate) async fn turn(&self, tenant: &Tenant, key: &Key) -> OwnedMutexGuard<()> {
        self.queue(&format!("{tenant}:{key}")).lock_owned().await
    }

    /// Waits for a sandbox's lock.
    pub(crate) async fn take(&self, state: &Path, id: &SandboxId) -> Result<Lock, Problem> {
        match tokio::time::timeout(PATIENCE, self.wait(state, id)).await {
            Ok(taken) => taken.map_err(|error| Problem::internal(format!("locking sandbox {id}: {error}"))),
            Err(_) => Err(Problem::new(
                Code::Internal,
                format!("sandbox {id} has been in the making for {PATIENCE:?}"),
            )
            .hint("another carrel process holds it; end that process")),
        }
    }

    async fn wait(&self, state: &Path, id: &SandboxId) -> io::Result<Lock> {
        let turn = self.queue(id.as_str()).lock_owned().await;
        if let Some(lock) = Lock::try_take(state, id)? {
            return Ok(Lock { _turn: Some(turn), ..lock });
        }
        let _permit = self.waiting.acquire().await.map_err(io::Error::other)?;
        let path = path(state, id);
        let lock =
            tokio::task::spawn_blocking(move || Lock::wait(path)).await.map_err(io::Error::other)??;
        Ok(Lock { _turn: Some(turn), ..lock })
    }
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
                Ok(()) if is_current(&file, &path) => {
                    return Ok(Some(Self { _file: file, path, _turn: None }));
                }
                Ok(()) => {}
                Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The lock of a sandbox that nobody knows yet. The file of one that is gone serves again: on some file systems a new
    /// one takes a millisecond. Whoever still waits at it for the old sandbox looks at its name next, and goes.
    pub(crate) fn take_new(state: &Path, id: &SandboxId) -> Result<Self, Problem> {
        let path = path(state, id);
        let _ = std::fs::rename(free(state), &path);
        Self::wait(path).map_err(|error| Problem::internal(format!("locking sandbox {id}: {error}")))
    }

    /// Waits as a thread.
    fn wait(path: PathBuf) -> io::Result<Self> {
        loop {
            let file = open(&path)?;
            flock(&file, FlockOperation::LockExclusive)?;
            if is_current(&file, &path) {
                return Ok(Self { _file: file, path, _turn: None });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thousand_waiters_leave_threads_for_the_one_who_works() {
        let state = tempfile::tempdir().unwrap();
        std::fs::create_dir(state.path().join("locks")).unwrap();
        let id: SandboxId = "sbx_one".parse().unwrap();
        let locks = Arc::new(Locks::default());
        // Held as by another process: nobody of ours stands in the queue.
        let held = Lock::try_take(state.path(), &id).unwrap().unwrap();
        let mut waiters = tokio::task::JoinSet::new();
        for _ in 0..1000 {
            let (locks, state, id) = (Arc::clone(&locks), state.path().to_path_buf(), id.clone());
            waiters.spawn(async move { drop(locks.take(&state, &id).await.unwrap()) });
        }
        tokio::task::yield_now().await;
        // Would never run if every waiter had a thread.
        tokio::task::spawn_blocking(move || drop(held)).await.unwrap();
        while let Some(done) = waiters.join_next().await {
            done.unwrap();
        }
        assert!(locks.queue(id.as_str()).try_lock().is_ok());
    }

    #[tokio::test]
    async fn queues_that_nobody_stands_in_are_forgotten() {
        let state = tempfile::tempdir().unwrap();
        std::fs::create_dir(state.path().join("locks")).unwrap();
        let locks = Locks::default();
        for number in 0..1000 {
            let id: SandboxId = format!("sbx_{number}").parse().unwrap();
            locks.take(state.path(), &id).await.unwrap().discard();
        }
        assert!(locks.queues.lock().unwrap().all.len() < 200);
    }
}
