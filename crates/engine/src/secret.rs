//! Keys of a state directory: made once, for their owner alone, and shared by everybody who uses the directory.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

pub const KEY: usize = 32;

/// The key in this file of the state directory, made if it is not there.
pub fn key(state: &Path, name: &str) -> io::Result<[u8; KEY]> {
    let path = state.join(name);
    match read(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        found => return found,
    }
    make(state, name, &path)?;
    // Not what was just made: another process may have been faster.
    read(&path)
}

fn read(path: &Path) -> io::Result<[u8; KEY]> {
    let mut key = Vec::with_capacity(KEY);
    File::open(path)?.take(KEY as u64 + 1).read_to_end(&mut key)?;
    key.try_into().map_err(|_| io::Error::other("it is not 32 bytes long; remove it, and a new one is made"))
}

/// A key is there as a whole or not at all, and the first one stays.
fn make(state: &Path, name: &str, path: &Path) -> io::Result<()> {
    let mut key = [0; KEY];
    let mut filled = 0;
    while filled < KEY {
        filled += rustix::rand::getrandom(&mut key[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    // Threads of one process may be at it too; nothing of the key itself goes into a name.
    static DRAFTS: AtomicU64 = AtomicU64::new(0);
    let draft =
        state.join(format!("{name}.{}.{}", std::process::id(), DRAFTS.fetch_add(1, Ordering::Relaxed)));
    // Left by a process of the same number that was killed here.
    let _ = fs::remove_file(&draft);
    let written = (|| {
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
        file.write_all(&key)?;
        file.sync_all()?;
        match fs::hard_link(&draft, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    })();
    let _ = fs::remove_file(&draft);
    written
}
