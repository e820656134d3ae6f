//! Names for what is made beside its place and put there when it is whole.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

/// What is this old was left by a process that was killed.
const STALE: Duration = Duration::from_secs(3600);

/// A name beside `target` that nobody else has: neither another process nor another thread of this one.
pub(crate) fn beside(target: &Path) -> io::Result<PathBuf> {
    let mut chance = [0; 8];
    rustix::rand::getrandom(&mut chance, rustix::rand::GetRandomFlags::empty())?;
    let mut name = prefix(target);
    name.push_str(&format!("{:016x}", u64::from_le_bytes(chance)));
    Ok(target.with_file_name(name))
}

/// Removes what others have begun to make for `target` and never finished.
pub(crate) fn remove_stale(target: &Path) {
    let (Some(place), prefix) = (target.parent(), prefix(target)) else { return };
    for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
        let made = entry.metadata().and_then(|meta| meta.modified());
        let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > STALE));
        if is_old && entry.file_name().to_string_lossy().starts_with(&prefix) {
            let path = entry.path();
            let _ = std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path));
        }
    }
}

fn prefix(target: &Path) -> String {
    format!("{}.making-", target.file_name().unwrap_or_default().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    #[test]
    fn names_are_nobody_elses_and_only_old_ones_are_removed() {
        let place = tempfile::tempdir().unwrap();
        let target = place.path().join("it");
        let (young, old) = (beside(&target).unwrap(), beside(&target).unwrap());
        assert_ne!(young, old);
        std::fs::write(&young, "").unwrap();
        std::fs::create_dir(&old).unwrap();
        let long_ago = SystemTime::now() - 2 * STALE;
        std::fs::File::open(&old).unwrap().set_modified(long_ago).unwrap();
        std::fs::write(&target, "").unwrap();
        std::fs::File::open(&target).unwrap().set_modified(long_ago).unwrap();
        remove_stale(&target);
        assert_eq!((young.exists(), old.exists(), target.exists()), (true, false, true));
    }
}
