//! Looking around: what several probes read from `/proc` and the file system. Nothing here attacks.

use crate::sys::sys;
use std::fs;
use std::path::{Path, PathBuf};

/// Places where a box may write: its own files and its own devices.
pub(crate) const WRITABLE: &[&str] =
    &["/workspace", "/tmp", "/home/user", "/dev/shm", "/dev/pts", "/dev/mqueue", "/var/tmp"];

/// Descriptors above 2 that are open now. Asks the kernel number by number: `/proc` may be missing, and
/// reading it opens one more.
pub(crate) fn open_descriptors() -> Vec<i32> {
    (3..4096).filter(|fd| sys!(SYS_fcntl, *fd, libc::F_GETFD).is_ok()).collect()
}

/// Whether a uid map is that of the initial user namespace: all ids, unchanged.
pub(crate) fn maps_everything(map: &str) -> bool {
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

/// One line of `/proc/self/status`, without the key.
pub(crate) fn status_field(key: &str) -> Option<String> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))?;
    Some(line.trim().to_owned())
}

/// Every pid that `/proc` shows.
pub(crate) fn pids() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut pids: Vec<i32> =
        entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// The command line of a process, arguments separated by spaces; empty when unreadable.
pub(crate) fn cmdline(pid: i32) -> String {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&bytes).replace('\0', " ").trim().to_owned()
}

/// One mount as `/proc/self/mountinfo` tells it.
#[derive(Debug, Clone)]
pub(crate) struct Mount {
    pub(crate) point: String,
    pub(crate) options: String,
    pub(crate) kind: String,
    pub(crate) super_options: String,
}

impl Mount {
    /// Whether the mount or its file system has the option, such as `ro` or `nosuid`.
    pub(crate) fn has(&self, option: &str) -> bool {
        self.options.split(',').chain(self.super_options.split(',')).any(|set| set == option)
    }

    pub(crate) fn writable(&self) -> bool {
        !self.has("ro")
    }

    /// Whether it hides a file of `/proc` behind `/dev/null`: that needs to be a device, and may be written to.
    pub(crate) fn is_mask(&self) -> bool {
        use std::os::unix::fs::{FileTypeExt, MetadataExt};
        self.point.starts_with("/proc/")
            && fs::symlink_metadata(&self.point)
                .is_ok_and(|meta| meta.file_type().is_char_device() && meta.rdev() == libc::makedev(1, 3))
    }
}

pub(crate) fn mounts() -> Vec<Mount> {
    fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines().filter_map(parse_mount).collect()
}

fn parse_mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let left: Vec<&str> = left.split(' ').collect();
    let right: Vec<&str> = right.split(' ').collect();
    Some(Mount {
        point: (*left.get(4)?).to_owned(),
        options: (*left.get(5)?).to_owned(),
        kind: (*right.first()?).to_owned(),
        super_options: right.get(2).copied().unwrap_or_default().to_owned(),
    })
}

/// Paths below `root`, at most `depth` levels down and `most` in number, not following symlinks, leaving out
/// what `skip` names.
pub(crate) fn walk(root: &Path, depth: usize, most: usize, skip: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut level = vec![root.to_path_buf()];
    for _ in 0..depth {
        let mut next = Vec::new();
        for dir in level {
            for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                let path = entry.path();
                if skip.iter().any(|skipped| path == Path::new(skipped)) {
                    continue;
                }
                if found.len() >= most {
                    return found;
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    next.push(path.clone());
                }
                found.push(path);
            }
        }
        level = next;
    }
    found
}

/// A directory in which the box may create files, if there is one.
pub(crate) fn scratch() -> Option<PathBuf> {
    ["/workspace", "/tmp", "/home/user"].iter().map(PathBuf::from).find(|dir| can_create_in(dir))
}

/// A name that no one else uses, in `dir`.
pub(crate) fn fresh(dir: &Path, what: &str) -> PathBuf {
    dir.join(format!(".carrel-probe-{}-{what}", std::process::id()))
}

/// Whether a file can truly be created in `dir`: creates one and removes it.
pub(crate) fn can_create_in(dir: &Path) -> bool {
    let path = fresh(dir, "writable");
    let created = fs::OpenOptions::new().write(true).create_new(true).open(&path).is_ok();
    if created {
        let _ = fs::remove_file(&path);
    }
    created
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_lines_are_understood() {
        let mount =
            parse_mount("36 35 98:0 /m /usr ro,nosuid master:1 - ext4 /dev/root rw,errors=x").unwrap();
        assert_eq!((mount.point.as_str(), mount.kind.as_str()), ("/usr", "ext4"));
        assert!(mount.has("nosuid") && !mount.writable());
        assert!(parse_mount("nonsense").is_none());
    }

    #[test]
    fn only_the_initial_map_maps_everything() {
        assert!(maps_everything("         0          0 4294967295\n"));
        assert!(!maps_everything("1000 0 1\n"));
    }
}
