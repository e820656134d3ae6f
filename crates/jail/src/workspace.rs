//! The workspace's disk limit, by what the host offers.
//!
//! As root with loop devices: a file system of exactly the size asked for, in a sparse file, mounted on the host,
//! so that files stay reachable while the sandbox sleeps. Otherwise: a plain directory that the agent watches.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicU64, Ordering},
};

use carrel_proto::limits::{ByteSize, Enforcement};
use rustix::{
    fs::{AtFlags, CWD, FlockOperation, Mode, OFlags, flock, linkat, openat, syncfs, unlinkat},
    mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags, fsconfig_create,
        fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, unmount,
    },
};
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
/// Part of the names of images made in advance; changes with how they are made.
const LAYOUT: u32 = 2;
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
        copy_sparse(&File::open(template(templates, limit)?)?, &File::create(image)?)?;
    }
    attach_anew(directory, image)
}

/// A blank image made in advance, taken by the next sandbox of this size.
fn spare(templates: &Path, limit: ByteSize) -> PathBuf {
    templates.join(format!("spare-{LAYOUT}-{}.ext4", limit.0))
}

/// Makes the next spare, off anybody's way: when a sandbox closes.
pub fn restock(templates: &Path, limit: ByteSize) -> io::Result<()> {
    let spare = spare(templates, limit);
    if spare.exists() {
        return Ok(());
    }
    let making = templates.join(format!("spare-{}.{}", limit.0, unique()));
    copy_sparse(&File::open(template(templates, limit)?)?, &File::create(&making)?)?;
    fs::rename(&making, &spare)
}

/// A workspace made in advance by a process that makes many: its file has no name and its mount no place yet. Only
/// descriptors hold it, so that it is gone with the process, however that ends.
#[derive(Debug)]
pub struct Ready {
    limit: ByteSize,
    image: File,
    mount: OwnedFd,
}

impl Ready {
    pub fn make(templates: &Path, limit: ByteSize) -> io::Result<Self> {
        let template = File::open(template(templates, limit)?)?;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let image = File::from(rustix::fs::open(templates, flags, Mode::from_raw_mode(0o600))?);
        copy_sparse(&template, &image)?;
        let mount = mount_nowhere(&image)?;
        Ok(Self { limit, image, mount })
    }

    pub fn limit(&self) -> ByteSize {
        self.limit
    }

    /// The directory itself, to be filled where it is.
    pub fn root(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(&self.mount, ".", flags, Mode::empty())?)
    }

    /// Gives the file its name, with all that was written, and lets go of the mount.
    pub fn keep(self, image: &Path) -> io::Result<()> {
        syncfs(self.root()?)?;
        self.name(image)
    }

    fn name(&self, image: &Path) -> io::Result<()> {
        let file = format!("/proc/self/fd/{}", self.image.as_raw_fd());
        Ok(linkat(CWD, file, CWD, image, AtFlags::SYMLINK_FOLLOW)?)
    }

    /// Gives the file its name and the mount its place.
    pub fn settle(self, directory: &Path, image: &Path) -> io::Result<()> {
        self.name(image)?;
        let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
        Ok(move_mount(&self.mount, "", CWD, directory, flags)?)
    }
}

/// Mounts an existing image, unless it is mounted already.
pub fn attach(directory: &Path, image: &Path) -> io::Result<()> {
    if is_mounted(directory) {
        return Ok(());
    }
    // The mount of a box that has just died may still be going away, which the kernel does in its own time. A second
    // device would show the image without what the first has yet to write; the same device is the same file system.
    match device_of(image).map(|(path, _held)| mount_device(&path, true)) {
        Some(Ok(mount)) => put(&mount, directory),
        _ => attach_anew(directory, image),
    }
}

/// The device that an image is on now, and a hold on it: it stays that image's for as long as it is open.
fn device_of(image: &Path) -> Option<(String, File)> {
    let image = fs::canonicalize(image).ok()?;
    let loops = fs::read_dir("/sys/block").ok()?.flatten().map(|entry| entry.file_name());
    let mut names = loops.filter_map(|name| name.into_string().ok()).filter(|name| name.starts_with("loop"));
    // One that was made ready had no name then, and the kernel goes on calling it that.
    let may_be = |name: &String| {
        fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")).is_ok_and(|backing| {
            let backing = backing.trim_end_matches('\n');
            Path::new(backing) == image || backing.ends_with(" (deleted)")
        })
    };
    names.find_map(|name| may_be(&name).then(|| hold(&name, &image)).flatten())
}

/// The same of an image that is mounted at `directory`, without looking through all devices of the host.
fn device_below(directory: &Path, image: &Path) -> Option<(String, File)> {
    use std::os::unix::fs::MetadataExt;
    let device = fs::symlink_metadata(directory).ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let path = fs::read_link(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    hold(path.file_name()?.to_str()?, image)
}

fn hold(name: &str, image: &Path) -> Option<(String, File)> {
    use std::os::unix::fs::MetadataExt;
    let path = format!("/dev/{name}");
    let held = OpenOptions::new().read(true).open(&path).ok()?;
    // It may have been freed and taken for another image before it was held.
    let meta = fs::metadata(image).ok()?;
    (sys::loop_backing(held.as_fd()).ok()? == (meta.dev(), meta.ino())).then_some((path, held))
}

fn attach_anew(directory: &Path, image: &Path) -> io::Result<()> {
    put(&mount_nowhere(&OpenOptions::new().read(true).write(true).open(image)?)?, directory)
}

fn put(mount: &OwnedFd, directory: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, directory, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// A mount of the file system on a device that is in no directory yet.
fn mount_device(device: &str, writable: bool) -> io::Result<OwnedFd> {
    let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&fs, "source", device)?;
    fsconfig_set_flag(&fs, if writable { "discard" } else { "ro" })?;
    // The sandbox's content is not worth a disk's barriers; its life is shorter than a power cut's.
    fsconfig_set_flag(&fs, "nobarrier")?;
    // A sparse file reads as zeroes: the kernel need not write them in the background.
    fsconfig_set_flag(&fs, "noinit_itable")?;
    fsconfig_create(&fs)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOATIME;
    let attributes = if writable { attributes } else { attributes | MountAttrFlags::MOUNT_ATTR_RDONLY };
    Ok(fsmount(&fs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

/// The same for a file, which gets a device.
fn mount_nowhere(image: &File) -> io::Result<OwnedFd> {
    with_device(image, true)
}

fn with_device(image: &File, writable: bool) -> io::Result<OwnedFd> {
    let control = OpenOptions::new().read(true).write(true).open("/dev/loop-control")?;
    // Everybody is told the same free device, and one gets it: of a hundred at once the last would ask a hundred times. Whoever
    // does not know of this lock may still take it in between: then ask again.
    flock(&control, FlockOperation::LockExclusive)?;
    for _ in 0..64 {
        let path = format!("/dev/loop{}", sys::loop_free(control.as_fd())?);
        let Ok(device) = OpenOptions::new().read(true).write(writable).open(&path) else { continue };
        match sys::loop_configure(device.as_fd(), image.as_fd()) {
            Ok(()) => {
                flock(&control, FlockOperation::Unlock)?;
                return mount_device(&path, writable);
            }
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("no loop device stays free"))
}

/// How often a copy is begun anew because something was written meanwhile.
const TRIES: usize = 5;

/// Copies an image as it is at one moment, though it may be mounted at `directory`. Nothing in its box writes now; somebody
/// outside still may, and then the device has counted it and the copy is made again.
pub fn copy(directory: &Path, image: &Path, target: &Path) -> io::Result<()> {
    let device = device_below(directory, image).or_else(|| device_of(image));
    let source = File::open(image)?;
    let settled = || -> io::Result<Option<String>> {
        if is_mounted(directory) {
            syncfs(File::open(directory)?)?;
        }
        Ok(device.as_ref().and_then(|(path, _)| written(path)))
    };
    for _ in 0..TRIES {
        let before = settled()?;
        copy_sparse(&source, &File::create(target)?)?;
        if settled()? == before {
            return Ok(());
        }
    }
    Err(io::Error::other("files keep changing from outside while they are copied"))
}

/// Mounts a copy of an image that nobody writes to.
pub fn unfold(kept: &Path, directory: &Path, image: &Path) -> io::Result<()> {
    match fs::remove_file(image) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // A new file, so that it is on no device yet.
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(image)?;
    copy_sparse(&File::open(kept)?, &file)?;
    put(&mount_nowhere(&file)?, directory)
}

/// What has been written to a device so far, and taken away from it.
fn written(device: &str) -> Option<String> {
    let name = device.strip_prefix("/dev/")?;
    let text = fs::read_to_string(format!("/sys/block/{name}/stat")).ok()?;
    let numbers: Vec<&str> = text.split_whitespace().collect();
    Some([4, 6, 11, 13].map(|at| numbers.get(at).copied().unwrap_or("")).join(" "))
}

/// An image to look at, in no directory: gone with the last descriptor below it.
pub fn look(image: &Path) -> io::Result<OwnedFd> {
    let mount = with_device(&File::open(image)?, false)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(&mount, ".", flags, Mode::empty())?)
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
    let path = templates.join(format!("blank-{LAYOUT}-{}.ext4", limit.0));
    if path.exists() {
        return Ok(path);
    }
    fs::create_dir_all(templates)?;
    // One at a time, threads and processes alike: it takes long, and the others have use for the result.
    let turn = OpenOptions::new().create(true).append(true).open(templates.join("making.lock"))?;
    flock(&turn, FlockOperation::LockExclusive)?;
    if path.exists() {
        return Ok(path);
    }
    // Made under a name of its own and moved, so that nobody ever sees half of it.
    let making = templates.join(format!("blank-{}.{}", limit.0, unique()));
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
    // A workspace starts empty. Taken away here, once: the first change of a file system costs more than its mount.
    let mount = mount_nowhere(&OpenOptions::new().read(true).write(true).open(&making)?)?;
    unlinkat(&mount, "lost+found", AtFlags::REMOVEDIR)?;
    // The kernel takes the mount away in its own time, and whoever copies the file must see all of it.
    let root = openat(&mount, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    syncfs(&root)?;
    drop(root);
    drop(mount);
    fs::rename(&making, &path)?;
    Ok(path)
}

/// A name that no other thread of any process uses at the same time.
fn unique() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Copies only what a sparse file holds.
fn copy_sparse(source: &File, target: &File) -> io::Result<()> {
    use rustix::fs::{SeekFrom, copy_file_range, seek};
    let length = source.metadata()?.len();
    target.set_len(length)?;
    let mut at = 0;
    while at < length {
        let data = match seek(source, SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        let end = seek(source, SeekFrom::Hole(data))?;
        let (mut read, mut write) = (data, data);
        while read < end {
            let size = usize::try_from(end - read).unwrap_or(usize::MAX);
            if copy_file_range(source, Some(&mut read), target, Some(&mut write), size)? == 0 {
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
        let (directory, templates) = (root.join("workspace"), root.join("templates"));
        fs::create_dir_all(&directory).expect("a directory");
        let make = |image: &Path, ready: bool| match ready {
            true => Ready::make(&templates, limit)?.settle(&directory, image),
            false => create(&directory, image, &templates, limit),
        };
        for ready in [false, true] {
            let image = root.join(if ready { "ready.ext4" } else { "made.ext4" });
            make(&image, ready).expect("a workspace");
            fs::write(directory.join("file"), "written last").expect("a file");
            // As the processes of a dying box do: the mount is out of sight, and still there.
            let held = File::open(directory.join("file")).expect("the file");
            detach(&directory).expect("no mount");
            attach(&directory, &image).expect("the workspace again");
            let text = fs::read_to_string(directory.join("file"));
            detach(&directory).expect("no mount");
            drop(held);
            assert_eq!(text.ok().as_deref(), Some("written last"), "made ready: {ready}");
        }
        fs::remove_dir_all(&root).expect("nothing left");
    }

    #[test]
    fn a_hundred_at_once_get_a_device_each() {
        const MANY: usize = 100;
        let limit = ByteSize::mb(8);
        if probe(limit).0 != Kind::Image {
            println!("skipped: no images on this host");
            return;
        }
        let root = tempfile::tempdir().expect("a directory");
        let images: Vec<File> = (0..MANY)
            .map(|number| {
                let directory = root.path().join(number.to_string());
                fs::create_dir(&directory).expect("a directory");
                create(&directory, &directory.with_extension("ext4"), root.path(), limit)
                    .expect("a workspace");
                detach(&directory).expect("no mount");
                let image = directory.with_extension("ext4");
                OpenOptions::new().read(true).write(true).open(image).expect("an image")
            })
            .collect();
        let together = std::sync::Barrier::new(MANY);
        let attach = |image: &File| {
            together.wait();
            mount_nowhere(image).map_err(|error| error.to_string())
        };
        let mounts: Vec<_> = std::thread::scope(|scope| {
            let attach = &attach;
            let all: Vec<_> = images.iter().map(|image| scope.spawn(move || attach(image))).collect();
            all.into_iter().map(|one| one.join().expect("an answer")).collect()
        });
        let failed: Vec<_> = mounts.iter().filter_map(|mount| mount.as_ref().err()).collect();
        assert!(failed.is_empty(), "{} of {MANY}: {:?}", failed.len(), failed[0]);
    }
}
