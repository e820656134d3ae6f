//! The workspace's disk limit, by what the host offers.
//!
//! As root with loop devices: a file system of exactly the size asked for, in a sparse file, mounted on the host,
//! so that files stay reachable while the sandbox sleeps. Otherwise: a plain directory that the agent watches.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use carrel_proto::limits::{ByteSize, Enforcement};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use serde::{Deserialize, Serialize};

use crate::sys;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// An ext4 of its own on a loop device.
    Image,
    /// A directory whose use is watched.
    Directory,
}

/// Below this an ext4 is mostly its own bookkeeping.
const SMALLEST_IMAGE: u64 = 8 << 20;
/// One inode per this many bytes: bounds the number of files with the size.
const BYTES_PER_INODE: &str = "16384";

const TOOLS: [&str; 4] =
    ["/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4", "/usr/bin/mkfs.ext4", "/usr/local/sbin/mkfs.ext4"];

fn mkfs() -> Option<&'static str> {
    TOOLS.into_iter().find(|path| Path::new(path).exists())
}

/// What this host can do, with a word on why not more.
pub fn probe(limit: ByteSize) -> (Kind, Enforcement) {
    let watched = |why: &str| {
        let word = format!("use is measured while code runs and the offender is stopped ({why})");
        (Kind::Directory, Enforcement::Watched(word))
    };
    if !crate::userns::has_many_ids() {
        return watched("an ordinary user cannot mount a file system of its own");
    }
    if limit.0 < SMALLEST_IMAGE {
        return watched("smaller than a file system can be");
    }
    if OpenOptions::new().read(true).write(true).open("/dev/loop-control").is_err() {
        return watched("no /dev/loop-control");
    }
    if mkfs().is_none() {
        return watched("mkfs.ext4 is not installed");
    }
    (Kind::Image, Enforcement::SizedFilesystem)
}

/// Makes a workspace of `limit` bytes at `directory`, which exists and is empty. `templates` keeps one formatted
/// image per size, because formatting takes longer than everything else together.
pub fn create(directory: &Path, image: &Path, templates: &Path, limit: ByteSize) -> io::Result<()> {
    if fs::rename(spare(templates, limit), image).is_err() {
        copy_sparse(&template(templates, limit)?, image)?;
    }
    attach_anew(directory, image)
}

/// A blank image made in advance, taken by the next sandbox of this size.
fn spare(templates: &Path, limit: ByteSize) -> PathBuf {
    templates.join(format!("spare-{}.ext4", limit.0))
}

/// Makes the next spare, off anybody's way: when a sandbox closes.
pub fn restock(templates: &Path, limit: ByteSize) -> io::Result<()> {
    let spare = spare(templates, limit);
    if spare.exists() {
        return Ok(());
    }
    let making = templates.join(format!("spare-{}.{}", limit.0, std::process::id()));
    copy_sparse(&template(templates, limit)?, &making)?;
    fs::rename(&making, &spare)
}

/// Mounts an existing image, unless it is mounted already.
pub fn attach(directory: &Path, image: &Path) -> io::Result<()> {
    if is_mounted(directory) {
        return Ok(());
    }
    // The mount of a box that has just died may still be going away, which the kernel does in its own time. A second
    // device would show the image without what the first has yet to write; the same device is the same file system.
    match device_of(image) {
        Some((path, _held)) if mount_device(&path, directory).is_ok() => Ok(()),
        _ => attach_anew(directory, image),
    }
}

/// The device that an image is on now, and a hold on it: it stays that image's for as long as it is open.
fn device_of(image: &Path) -> Option<(PathBuf, File)> {
    let image = fs::canonicalize(image).ok()?;
    let is_of_image = |name: &str| {
        fs::read_to_string(format!("/sys/block/{name}/loop/backing_file"))
            .is_ok_and(|backing| Path::new(backing.trim_end_matches('\n')) == image)
    };
    for entry in fs::read_dir("/sys/block").ok()?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("loop") && is_of_image(&name) {
            let path = Path::new("/dev").join(&name);
            let held = OpenOptions::new().read(true).open(&path).ok()?;
            // It may have been freed and taken for another image before it was held.
            return is_of_image(&name).then_some((path, held));
        }
    }
    None
}

fn mount_device(device: &Path, directory: &Path) -> io::Result<()> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOATIME;
    // The sandbox's content is not worth a disk's barriers; its life is shorter than a power cut's.
    Ok(mount(device, directory, "ext4", flags, Some(c"discard,nobarrier"))?)
}

fn attach_anew(directory: &Path, image: &Path) -> io::Result<()> {
    let backing = OpenOptions::new().read(true).write(true).open(image)?;
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
    // Another process may take the free device between asking and configuring: then ask again.
    for _ in 0..64 {
        let path = PathBuf::from(format!("/dev/loop{}", sys::loop_free(control.as_fd())?));
        let Ok(device) = OpenOptions::new().read(true).write(true).open(&path) else { continue };
        match sys::loop_configure(device.as_fd(), backing.as_fd()) {
            Ok(()) => return mount_device(&path, directory),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no loop device stays free"))
}

/// Lets go of a mounted workspace. Fine when there is none.
pub fn detach(directory: &Path) -> io::Result<()> {
    while is_mounted(directory) {
        unmount(directory, UnmountFlags::DETACH)?;
    }
    Ok(())
}

/// Whether `directory` is the root of a mount of its own.
fn is_mounted(directory: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let device = |path: &Path| fs::symlink_metadata(path).map(|meta| meta.dev()).ok();
    match (device(directory), directory.parent().and_then(device)) {
        (Some(own), Some(parent)) => own != parent,
        _ => false,
    }
}

fn template(templates: &Path, limit: ByteSize) -> io::Result<PathBuf> {
    let path = templates.join(format!("blank-{}.ext4", limit.0));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(templates)?;
    // Made under a name of its own and moved: two processes may both make it, the last move wins.
    let making = templates.join(format!("blank-{}.{}", limit.0, std::process::id()));
    File::create(&making)?.set_len(limit.0)?;
    let tool = mkfs().ok_or_else(|| io::Error::other("mkfs.ext4 is not installed"))?;
    let options = "lazy_itable_init=1,nodiscard,root_owner=0:0";
    let output = Command::new(tool)
        .args([
            "-q",
            "-F",
            "-m",
            "0",
            "-i",
            BYTES_PER_INODE,
            "-O",
            "^has_journal,^resize_inode",
            "-E",
            options,
        ])
        .arg(&making)
        .stdin(Stdio::null())
        .output()?;
    if !output.status.success() {
        let _ = fs::remove_file(&making);
        let word = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(io::Error::other(format!("mkfs.ext4 failed: {word}")));
    }
    fs::rename(&making, &path)?;
    Ok(path)
}

/// Copies only what a sparse file holds.
fn copy_sparse(from: &Path, to: &Path) -> io::Result<()> {
    use rustix::fs::{SeekFrom, copy_file_range, seek};
    let source = File::open(from)?;
    let target = File::create(to)?;
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at = 0;
    while at < length {
        let data = match seek(&source, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(&source, SeekFrom::Hole(data))?;
        let (mut read, mut write) = (data, data);
        while read < end {
            let size = usize::try_from(end - read).unwrap_or(usize::MAX);
            if copy_file_range(&source, Some(&mut read), &target, Some(&mut write), size)? == 0 {
                return Err(io::Error::other("the template became shorter while it was copied"));
            }
        }
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_whose_last_mount_is_still_going_away_shows_what_was_written() {
        let limit = ByteSize::mb(16);
        if probe(limit).0 != Kind::Image {
            println!("skipped: no images on this host");
            return;
        }
        let root = std::env::temp_dir().join(format!("carrel-workspace-{}", std::process::id()));
        let (directory, image) = (root.join("workspace"), root.join("workspace.ext4"));
        fs::create_dir_all(&directory).expect("a directory");
        create(&directory, &image, &root.join("templates"), limit).expect("a workspace");
        fs::write(directory.join("file"), "written last").expect("a file");
        // As the processes of a dying box do: the mount is out of sight, and still there.
        let held = File::open(directory.join("file")).expect("the file");
        detach(&directory).expect("no mount");
        attach(&directory, &image).expect("the workspace again");
        let text = fs::read_to_string(directory.join("file"));
        detach(&directory).expect("no mount");
        drop(held);
        fs::remove_dir_all(&root).expect("nothing left");
        assert_eq!(text.ok().as_deref(), Some("written last"));
    }
}
