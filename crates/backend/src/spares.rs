//! What a process that makes many sandboxes keeps ready for the next one: a workspace and an empty directory.
//!
//! A command line that makes one sandbox and ends keeps nothing but the image that [`workspace::restock`] leaves for whoever
//! comes next. What is kept here ends with the process; an empty directory of one that was killed is removed by the next.

use std::{
    fs, io,
    os::unix::{
        fs::{DirBuilderExt, PermissionsExt},
        net::UnixListener,
    },
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use carrel_jail::workspace::{self, Kind, Ready};
use carrel_proto::{guest::Places, limits::ByteSize};

use crate::stages::lock;

/// A process that has made so many sandboxes will make more.
const MAKES_MANY: u32 = 2;
/// Directories kept ready are named by the process that keeps them, and by chance: it may have several engines.
const PREFIX: &str = "sandbox-of-";
/// What every agent opens at its start.
pub(crate) const SPOOLED: [&str; 2] = ["agent.log", Places::OUTSIDE];

#[derive(Debug)]
pub(crate) struct Spares {
    /// Where images and directories are kept.
    place: PathBuf,
    made: AtomicU32,
    workspace: Mutex<Option<Ready>>,
    directory: Mutex<Option<Directory>>,
    /// Of directories that have become a sandbox's, until its box is made.
    listeners: Mutex<Vec<(PathBuf, UnixListener)>>,
}

#[derive(Debug)]
struct Directory {
    path: PathBuf,
    /// Bound in it; missing where the name would be too long.
    listener: Option<UnixListener>,
}

impl Spares {
    pub(crate) fn new(place: PathBuf) -> Self {
        Self {
            place,
            made: AtomicU32::new(0),
            workspace: Mutex::new(None),
            directory: Mutex::new(None),
            listeners: Mutex::default(),
        }
    }

    /// Whether this process will make more sandboxes.
    pub(crate) fn makes_many(&self) -> bool {
        self.made.load(Ordering::Relaxed) >= MAKES_MANY
    }

    /// One more sandbox was made.
    pub(crate) fn count(&self) {
        self.made.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes a workspace of its own size at `directory`, kept in the file `image`.
    pub(crate) fn workspace(&self, directory: &Path, image: &Path, limit: ByteSize) -> io::Result<()> {
        let ready = lock(&self.workspace).take_if(|ready| ready.limit() == limit);
        // One that cannot be used after all is no worse than none.
        if ready.is_some_and(|ready| ready.settle(directory, image).is_ok()) {
            return Ok(());
        }
        workspace::create(directory, image, &self.place, limit)
    }

    /// Makes the directory of a sandbox, unless it is there.
    pub(crate) fn directory(&self, wanted: &Path) -> io::Result<()> {
        if let Some(ready) = lock(&self.directory).take() {
            // Fails where there is something already: a sandbox that comes back over its files.
            if fs::rename(&ready.path, wanted).is_ok() {
                let listener = ready.listener.map(|listener| (wanted.to_owned(), listener));
                lock(&self.listeners).extend(listener);
                return Ok(());
            }
            let _ = fs::remove_dir_all(&ready.path);
        }
        fs::create_dir_all(wanted)
    }

    /// The agent's socket in this directory, if it is bound already.
    pub(crate) fn listener(&self, directory: &Path) -> Option<UnixListener> {
        let mut all = lock(&self.listeners);
        let at = all.iter().position(|(path, _)| path == directory)?;
        Some(all.swap_remove(at).1)
    }

    /// Prepares for the next sandbox; called when nobody waits.
    pub(crate) fn restock(&self, limit: ByteSize) {
        let images = workspace::probe(limit).0 == Kind::Image;
        if self.makes_many() {
            let mut directory = lock(&self.directory);
            if directory.is_none() {
                *directory = self.make_directory().ok();
            }
            let mut workspace = lock(&self.workspace);
            if images && workspace.as_ref().is_none_or(|ready| ready.limit() != limit) {
                *workspace = Ready::make(&self.place, limit).ok();
            }
            if workspace.is_some() {
                return;
            }
        }
        if images {
            // Without a spare the next sandbox makes its own image.
            let _ = workspace::restock(&self.place, limit);
        }
    }

    /// With what every sandbox has in it: on some file systems a new file takes as long as a namespace.
    fn make_directory(&self) -> io::Result<Directory> {
        self.remove_strays();
        let mut chance = [0; 4];
        rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty())?;
        let name = format!("{PREFIX}{}-{:x}", std::process::id(), u32::from_le_bytes(chance));
        let path = self.place.join(name);
        fs::create_dir_all(&self.place)?;
        fs::DirBuilder::new().mode(0o700).create(&path)?;
        for name in ["spool", "workspace"] {
            fs::create_dir(path.join(name))?;
        }
        for name in SPOOLED {
            let file = fs::File::create(path.join("spool").join(name))?;
            file.set_permissions(fs::Permissions::from_mode(0o600))?;
        }
        let listener = UnixListener::bind(path.join("agent.sock")).ok();
        Ok(Directory { path, listener })
    }

    /// Directories of processes that are gone.
    fn remove_strays(&self) {
        for entry in fs::read_dir(&self.place).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(PREFIX)) else { continue };
            let pid = rest.split('-').next().unwrap_or_default();
            if !Path::new("/proc").join(pid).exists() {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

impl Drop for Spares {
    fn drop(&mut self) {
        if let Some(directory) = lock(&self.directory).take() {
            let _ = fs::remove_dir_all(directory.path);
        }
    }
}
