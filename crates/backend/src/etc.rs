//! The `/etc` of presets: one small directory made once from the host's, so that a box needs one mount for it.
//!
//! Only what programs need to work and nobody minds being read. Copied, not mounted piece by piece: two dozen mounts
//! would cost more than the rest of a box.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use crate::unfinished;

/// How these directories begin.
const NAME: &str = "etc-";

const WANTED: &[&str] = &[
    "alternatives",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "magic",
    "mime.types",
    "os-release",
    "pki",
    "protocols",
    "services",
    "ssl",
    "terminfo",
    "timezone",
];

const OWN: &[(&str, &str)] = &[
    (
        "passwd",
        "root:x:0:0:root:/root:/usr/sbin/nologin\nuser:x:1000:1000:user:/home/user:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    ),
    ("group", "root:x:0:\ntty:x:5:\nuser:x:1000:\nnogroup:x:65534:\n"),
    ("hosts", "127.0.0.1 localhost carrel\n::1 localhost\n"),
    ("hostname", "carrel\n"),
    ("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n"),
    ("resolv.conf", ""),
];

/// Larger ones are data that somebody put there.
const LARGEST: u64 = 4 << 20;
/// Files of the whole; certificates are a few hundred.
const MOST: usize = 4000;
/// Older copies are made anew: certificates and zones change.
const FRESH: Duration = Duration::from_secs(24 * 3600);
/// No box is older than this: a year is the longest lifetime that can be asked for.
const KEPT: Duration = Duration::from_secs(400 * 24 * 3600);

/// Our own account files, for artifacts that bring no `/etc`.
pub(crate) fn own_files() -> impl Iterator<Item = (&'static str, &'static str)> {
    OWN.iter().copied()
}

/// The directory, made if it is missing or old.
///
/// Directories are named by what is in them and stay when a newer one takes over: running boxes have them mounted, and would see
/// them become empty. Which one is the newest is said by a link.
pub fn prepared(place: &Path) -> io::Result<PathBuf> {
    let newest = place.join("etc.newest");
    let is_fresh = fs::symlink_metadata(&newest)
        .and_then(|meta| meta.modified())
        .is_ok_and(|made| made.elapsed().is_ok_and(|age| age < FRESH));
    if is_fresh && let Ok(target) = fs::canonicalize(&newest) {
        return Ok(target);
    }
    fs::create_dir_all(place)?;
    unfinished::remove_stale(&place.join(NAME));
    unfinished::remove_stale(&newest);
    let making = unfinished::beside(&place.join(NAME))?;
    let name = fill(&making)?;
    let target = place.join(&name);
    if target.exists() && !is_same(&making, &target) {
        // Damaged when the power was gone: waiting for the disk each time would be on a caller's time. Who has it, keeps it.
        let _ = fs::rename(&target, unfinished::beside(&target)?);
    }
    if fs::rename(&making, &target).is_err() {
        fs::remove_dir_all(&making)?;
        // The same as before, and in use for as long again.
        fs::File::open(&target)?.set_modified(SystemTime::now())?;
    }
    let link = unfinished::beside(&newest)?;
    symlink(name, &link)?;
    fs::rename(&link, &newest)?;
    remove_old(place, &target);
    fs::canonicalize(target)
}

/// Copies the host's files into a new directory; says what it is to be called.
fn fill(directory: &Path) -> io::Result<String> {
    fs::create_dir(directory)?;
    let mut copy = Copy { left: MOST, digest: DefaultHasher::new() };
    for name in WANTED {
        let follow = *name == "localtime" || *name == "os-release";
        copy.take(&Path::new("/etc").join(name), &directory.join(name), follow)?;
    }
    for (name, content) in OWN {
        (name, content).hash(&mut copy.digest);
        fs::write(directory.join(name), content)?;
    }
    Ok(format!("{NAME}{:016x}", copy.digest.finish()))
}

/// Whether two entries have the same names and contents.
fn is_same(one: &Path, other: &Path) -> bool {
    let names = |path: &Path| -> Option<BTreeSet<OsString>> {
        Some(fs::read_dir(path).ok()?.flatten().map(|entry| entry.file_name()).collect())
    };
    match (fs::read_link(one), names(one)) {
        (Ok(link), _) => fs::read_link(other).is_ok_and(|its| its == link),
        (_, Some(all)) => {
            names(other).as_ref() == Some(&all)
                && all.iter().all(|name| is_same(&one.join(name), &other.join(name)))
        }
        _ => fs::read(one).is_ok_and(|content| fs::read(other).is_ok_and(|its| its == content)),
    }
}

fn remove_old(place: &Path, newest: &Path) {
    for entry in fs::read_dir(place).into_iter().flatten().flatten() {
        let made = entry.metadata().and_then(|meta| meta.modified());
        let is_old = made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > KEPT));
        let is_ours = entry.file_name().to_string_lossy().starts_with(NAME);
        if is_old && is_ours && entry.path() != newest {
            // Nothing that is half removed has such a name.
            if let Ok(going) = unfinished::beside(newest)
                && fs::rename(entry.path(), &going).is_ok()
            {
                let _ = fs::remove_dir_all(going);
            }
        }
    }
}

struct Copy {
    left: usize,
    /// Of all that was copied.
    digest: DefaultHasher,
}

impl Copy {
    /// What cannot be read is not needed in a box either; what cannot be written is an error.
    fn take(&mut self, from: &Path, to: &Path, follow: bool) -> io::Result<()> {
        if self.left == 0 {
            return Ok(());
        }
        self.left -= 1;
        let Ok(meta) = (if follow { fs::metadata(from) } else { fs::symlink_metadata(from) }) else {
            return Ok(());
        };
        // Private parts, such as keys below /etc/ssl/private, stay where they are even when root makes the copy.
        if !meta.is_symlink() && meta.permissions().mode() & 0o004 == 0 {
            return Ok(());
        }
        (from, meta.mode()).hash(&mut self.digest);
        if meta.is_symlink() {
            let Ok(link) = fs::read_link(from) else { return Ok(()) };
            link.hash(&mut self.digest);
            return symlink(link, to);
        }
        if meta.is_file() && meta.len() <= LARGEST {
            let Ok(content) = fs::read(from) else { return Ok(()) };
            content.hash(&mut self.digest);
            fs::write(to, content)?;
            return fs::set_permissions(to, meta.permissions());
        }
        if meta.is_dir() {
            fs::create_dir(to)?;
            let entries = fs::read_dir(from).into_iter().flatten().flatten();
            let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
            names.sort_unstable();
            for name in names {
                self.take(&from.join(&name), &to.join(&name), false)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age(path: &Path, by: Duration) {
        let then = SystemTime::now() - by;
        let times = rustix::fs::Timestamps { last_access: stamp(then), last_modification: stamp(then) };
        rustix::fs::utimensat(rustix::fs::CWD, path, &times, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).unwrap();
    }

    fn stamp(time: SystemTime) -> rustix::fs::Timespec {
        let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        rustix::fs::Timespec { tv_sec: since.as_secs().try_into().unwrap(), tv_nsec: 0 }
    }

    #[test]
    fn what_boxes_have_mounted_stays_when_it_is_made_anew() {
        let place = tempfile::tempdir().unwrap();
        let first = prepared(place.path()).unwrap();
        assert!(first.join("passwd").exists());
        let newest = place.path().join("etc.newest");
        age(&newest, 2 * FRESH);
        // The host's own has changed meanwhile, as far as can be told.
        let other = place.path().join("etc-0123456789abcdef");
        fs::rename(&first, &other).unwrap();
        let opened = fs::File::open(&other).unwrap();
        let second = prepared(place.path()).unwrap();
        assert_eq!(second, first);
        assert!(other.join("passwd").exists() && second.join("passwd").exists());
        drop(opened);
        // Nobody can have it any more.
        age(&newest, 2 * FRESH);
        age(&other, 2 * KEPT);
        assert_eq!(prepared(place.path()).unwrap(), second);
        assert!(!other.exists());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_damaged_one_is_replaced_and_left_to_those_who_have_it() {
        let place = tempfile::tempdir().unwrap();
        let first = prepared(place.path()).unwrap();
        let whole = fs::read(first.join("passwd")).unwrap();
        fs::write(first.join("passwd"), "").unwrap();
        age(&place.path().join("etc.newest"), 2 * FRESH);
        let second = prepared(place.path()).unwrap();
        assert_eq!((&second, fs::read(second.join("passwd")).unwrap()), (&first, whole));
        let aside = |path: &PathBuf| path.is_dir() && !path.is_symlink() && *path != second;
        let damaged = fs::read_dir(place.path()).unwrap().flatten().map(|entry| entry.path());
        let damaged: Vec<PathBuf> = damaged.filter(aside).collect();
        assert!(damaged.len() == 1 && damaged[0].join("passwd").exists(), "{damaged:?}");
    }

    #[test]
    fn several_threads_may_make_it_at_once() {
        let place = tempfile::tempdir().unwrap();
        let make = || {
            let made = prepared(place.path()).unwrap();
            assert!(made.join("passwd").exists());
            made
        };
        let made: Vec<PathBuf> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(make)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert!(made.iter().all(|one| *one == made[0]), "{made:?}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 2);
    }
}
