//! The `/etc` of presets: one small directory made once from the host's, so that a box needs one mount for it.
//!
//! Only what programs need to work and nobody minds being read. Copied, not mounted piece by piece: two dozen mounts
//! would cost more than the rest of a box.

use std::{
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
};

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
const FRESH: std::time::Duration = std::time::Duration::from_secs(24 * 3600);

/// Our own account files, for artifacts that bring no `/etc`.
pub(crate) fn own_files() -> impl Iterator<Item = (&'static str, &'static str)> {
    OWN.iter().copied()
}

/// The directory, made if it is missing or old.
pub fn prepared(place: &Path) -> io::Result<PathBuf> {
    let target = place.join("etc");
    let is_fresh = fs::metadata(&target)
        .and_then(|meta| meta.modified())
        .is_ok_and(|made| made.elapsed().is_ok_and(|age| age < FRESH));
    if is_fresh {
        return Ok(target);
    }
    let making = place.join(format!("etc.{}", std::process::id()));
    let _ = fs::remove_dir_all(&making);
    fs::create_dir_all(&making)?;
    let mut left = MOST;
    for name in WANTED {
        // What cannot be read here is not needed in a box either.
        let _ = copy(
            &Path::new("/etc").join(name),
            &making.join(name),
            &mut left,
            *name == "localtime" || *name == "os-release",
        );
    }
    for (name, content) in OWN {
        fs::write(making.join(name), content)?;
    }
    // Boxes that run keep the old one mounted; nobody reads it by name any more.
    let old = place.join(format!("etc.old.{}", std::process::id()));
    let _ = fs::rename(&target, &old);
    fs::rename(&making, &target).or_else(|error| if target.exists() { Ok(()) } else { Err(error) })?;
    let _ = fs::remove_dir_all(&old);
    let _ = fs::remove_dir_all(&making);
    Ok(target)
}

fn copy(from: &Path, to: &Path, left: &mut usize, follow: bool) -> io::Result<()> {
    if *left == 0 {
        return Ok(());
    }
    *left -= 1;
    let meta = if follow { fs::metadata(from)? } else { fs::symlink_metadata(from)? };
    // Private parts, such as keys below /etc/ssl/private, stay where they are even when root makes the copy.
    if !meta.is_symlink() && meta.permissions().mode() & 0o004 == 0 {
        return Ok(());
    }
    if meta.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    if meta.is_file() {
        return if meta.len() <= LARGEST { fs::copy(from, to).map(drop) } else { Ok(()) };
    }
    if meta.is_dir() {
        fs::create_dir(to)?;
        for entry in fs::read_dir(from)? {
            let name = entry?.file_name();
            let _ = copy(&from.join(&name), &to.join(&name), left, false);
        }
    }
    Ok(())
}
