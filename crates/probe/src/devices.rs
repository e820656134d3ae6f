//! devices: reaching hardware through nodes, and root through files that carry privilege.

use crate::facts::Facts;
use crate::isolate::step;
use crate::look;
use crate::outcome::{
    NO_FILE, NO_WRITE, Outcome, REFUSED, breach, errno_of, expect_errno, held, merge, name, none_found,
    skipped,
};
use crate::sys::sys;
use crate::table::Probe;
use rustix::io::Errno;
use std::ffi::CString;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("mknod-block", "make a node for a disk", |_| {
        merge([make_node("disk 8:0", libc::S_IFBLK, 8, 0), make_node("disk 254:0", libc::S_IFBLK, 254, 0)])
    }),
    Probe::light("mknod-char", "make a node for memory or the console", |_| {
        merge([
            make_node("mem 1:1", libc::S_IFCHR, 1, 1),
            make_node("kmsg 1:11", libc::S_IFCHR, 1, 11),
            make_node("tun 10:200", libc::S_IFCHR, 10, 200),
        ])
    }),
    Probe::light("dev-listing", "find nodes in /dev beyond the expected", dev_listing),
    Probe::light("dev-memory", "open the machine's memory and ports", |_| {
        open_any(&["/dev/mem", "/dev/kmem", "/dev/port", "/dev/nvram", "/dev/cpu/0/msr"])
    }),
    Probe::light("dev-disks", "open disks", dev_disks),
    Probe::light("dev-kvm", "open virtualization devices", |_| {
        open_any(&[
            "/dev/kvm",
            "/dev/vhost-net",
            "/dev/vhost-vsock",
            "/dev/vsock",
            "/dev/vfio/vfio",
            "/dev/sev",
        ])
    }),
    Probe::light("dev-fuse", "open FUSE, loop and device-mapper control", |_| {
        open_any(&[
            "/dev/fuse",
            "/dev/cuse",
            "/dev/loop-control",
            "/dev/mapper/control",
            "/dev/btrfs-control",
            "/dev/userfaultfd",
        ])
    }),
    Probe::light("dev-tun", "open network tunnels", |_| {
        open_any(&["/dev/net/tun", "/dev/ppp", "/dev/rfkill"])
    }),
    Probe::light("dev-console", "open consoles, input, sound and graphics", |_| {
        open_any(&[
            "/dev/tty0",
            "/dev/tty1",
            "/dev/vcs",
            "/dev/vcsa",
            "/dev/uinput",
            "/dev/input/event0",
            "/dev/snd/timer",
            "/dev/dri/card0",
            "/dev/fb0",
            "/dev/uhid",
            "/dev/bus/usb/001/001",
        ])
    }),
    Probe::light("device-nodes-anywhere", "find device nodes outside /dev", device_nodes),
    Probe::light("setuid-programs", "gain root through a setuid program", setuid_programs),
    Probe::light("nosuid-mounts", "have mounts that honour setuid bits or device nodes", nosuid_mounts),
    Probe::light("file-capabilities", "find or make programs with file capabilities", file_capabilities),
    Probe::light("own-setuid-file", "make a setuid-root program", own_setuid_file),
];

fn make_node(what: &str, kind: u32, major: u32, minor: u32) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("nowhere to make a node") };
    let path = look::fresh(&dir, "node");
    let Ok(text) = CString::new(path.as_os_str().as_encoded_bytes()) else { return skipped("bad path") };
    let device = libc::makedev(major, minor);
    let outcome = step(what, || {
        expect_errno(what, sys!(SYS_mknodat, libc::AT_FDCWD, text.as_c_str(), kind | 0o600, device), REFUSED)
    });
    let _ = fs::remove_file(&path);
    outcome
}

fn open_any(paths: &[&str]) -> Outcome {
    merge(paths.iter().map(|path| open_device(Path::new(path))))
}

fn open_device(path: &Path) -> Outcome {
    use rustix::fs::{Mode, OFlags, open};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    expect_errno(&path.display().to_string(), open(path, flags, Mode::empty()), NO_FILE)
}

const EXPECTED: &[&str] = &[
    "null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx", "shm", "mqueue", "fd", "stdin",
    "stdout", "stderr", "core", "console",
];

fn dev_listing(_: &Facts) -> Outcome {
    let entries = match fs::read_dir("/dev") {
        Ok(entries) => entries,
        Err(error) => return held(format!("/dev: {}", name(errno_of(&error)))),
    };
    let names: Vec<String> =
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    let found: Vec<String> = names.iter().filter(|n| !EXPECTED.contains(&n.as_str())).cloned().collect();
    match none_found("unexpected entries in /dev", &found) {
        outcome if found.is_empty() => held(format!("{}: {}", outcome.detail, names.join(" "))),
        outcome => outcome,
    }
}

fn dev_disks(_: &Facts) -> Outcome {
    let fixed = [
        "/dev/sda",
        "/dev/vda",
        "/dev/vdb",
        "/dev/nvme0n1",
        "/dev/xvda",
        "/dev/dm-0",
        "/dev/loop0",
        "/dev/md0",
        "/dev/sr0",
        "/dev/root",
    ];
    let present = look::walk(Path::new("/dev"), 2, 5000, &["/dev/pts", "/dev/shm"]);
    let blocks = present
        .into_iter()
        .filter(|path| fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device()));
    merge(fixed.iter().map(PathBuf::from).chain(blocks).map(|path| open_device(&path)))
}

/// Outside /dev, and pseudo-terminals and the six harmless nodes aside, there should be none.
fn device_nodes(_: &Facts) -> Outcome {
    let found: Vec<String> = look::walk(Path::new("/"), 3, 60_000, &["/proc", "/dev", "/sys"])
        .into_iter()
        .filter(|path| {
            fs::symlink_metadata(path).is_ok_and(|meta| {
                let kind = meta.file_type();
                // 0:0 is a whiteout of an overlay, not a device.
                (kind.is_block_device() || kind.is_char_device()) && meta.rdev() != 0
            })
        })
        .filter(|path| {
            rustix::fs::open(
                path.as_path(),
                rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK,
                rustix::fs::Mode::empty(),
            )
            .is_ok()
        })
        .map(|path| path.display().to_string())
        .collect();
    none_found("device nodes outside /dev that open", &found)
}

fn setuid_files() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in [
        "/usr/bin",
        "/usr/sbin",
        "/bin",
        "/sbin",
        "/usr/local/bin",
        "/usr/lib/openssh",
        "/usr/libexec",
        "/usr/lib/dbus-1.0",
    ] {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            let set = fs::symlink_metadata(entry.path())
                .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o6000 != 0);
            if set && found.len() < 200 {
                found.push(entry.path());
            }
        }
    }
    found
}

/// A setuid program is started with nothing to do, and its effective ids are read from /proc meanwhile.
fn setuid_programs(_: &Facts) -> Outcome {
    let files = setuid_files();
    if files.is_empty() {
        return held("no setuid or setgid program in the box");
    }
    let honest = look::status_field("Uid").unwrap_or_default();
    let honest_groups = look::status_field("Gid").unwrap_or_default();
    let mut tried = 0;
    for file in files.iter().filter(|path| {
        ["su", "mount", "passwd", "newgrp", "chsh", "gpasswd", "sudo"].iter().any(|n| path.ends_with(n))
    }) {
        // It waits for input or ends quickly; either way the ids are those set at exec.
        let child = Command::new(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env_clear()
            .spawn();
        let Ok(mut child) = child else { continue };
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let field = |key: &str| {
            status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim().to_owned()
        };
        let ids = (field("Uid:"), field("Gid:"));
        let _ = child.kill();
        let _ = child.wait();
        if ids.0.is_empty() {
            continue;
        }
        tried += 1;
        if ids.0 != honest || ids.1 != honest_groups {
            return breach(format!("{} runs as {ids:?}", file.display()));
        }
    }
    let flag = look::status_field("NoNewPrivs").unwrap_or_default();
    if tried > 0 {
        held(format!("{} setuid programs in the box; {tried} started, none gained an id", files.len()))
    } else if flag == "1" {
        held(format!(
            "{} setuid programs in the box, inert under no_new_privs; none could be started",
            files.len()
        ))
    } else {
        skipped(format!("{} setuid programs in the box, none could be started", files.len()))
    }
}

fn nosuid_mounts(_: &Facts) -> Outcome {
    let mounts = look::mounts();
    if mounts.is_empty() {
        return skipped("/proc/self/mountinfo is not readable");
    }
    let found: Vec<String> = mounts
        .iter()
        .filter_map(|mount| {
            let pseudo_devices = mount.point.starts_with("/dev") || mount.is_mask();
            let missing: Vec<&str> = [("nosuid", true), ("nodev", !pseudo_devices)]
                .into_iter()
                .filter(|(option, wanted)| *wanted && !mount.has(option))
                .map(|(option, _)| option)
                .collect();
            (!missing.is_empty()).then(|| format!("{} lacks {}", mount.point, missing.join("+")))
        })
        .collect();
    none_found("mounts without nosuid or nodev", &found)
}

fn capability_xattr(path: &Path) -> Result<u64, Errno> {
    let text = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|_| Errno::INVAL)?;
    sys!(SYS_getxattr, text.as_c_str(), c"security.capability", &mut [0_u8; 64], 64)
}

/// Found ones are inert under no_new_privs; making one must be refused.
fn file_capabilities(_: &Facts) -> Outcome {
    let names = ["ping", "newuidmap", "newgidmap", "dumpcap", "mtr-packet", "gst-ptp-helper"];
    let carried: Vec<&str> =
        names.into_iter().filter(|n| capability_xattr(&Path::new("/usr/bin").join(n)).is_ok()).collect();
    let privileged = look::status_field("NoNewPrivs").as_deref() != Some("1");
    let found = if carried.is_empty() {
        held("no usual program carries capabilities")
    } else if privileged {
        breach(format!("{carried:?} carry capabilities and no_new_privs is off"))
    } else {
        held(format!("{carried:?} carry capabilities, inert under no_new_privs"))
    };
    let Some(dir) = look::scratch() else { return found };
    let path = look::fresh(&dir, "caps");
    let Ok(text) = CString::new(path.as_os_str().as_encoded_bytes()) else { return found };
    let _ = fs::write(&path, b"x");
    let mut value = [0_u8; 20];
    value[..4].copy_from_slice(&0x0200_0001_u32.to_ne_bytes()); // revision 2, effective
    value[4..8].copy_from_slice(&(1_u32 << 21).to_ne_bytes()); // CAP_SYS_ADMIN
    let made = step("setxattr", || {
        let allowed = [REFUSED, &[Errno::OPNOTSUPP, Errno::INVAL]].concat();
        let set = sys!(SYS_setxattr, text.as_c_str(), c"security.capability", &value, 20, 0);
        expect_errno("set security.capability", set, &allowed)
    });
    let _ = fs::remove_file(&path);
    merge([found, made])
}

/// Setting the bit on one's own file is harmless; giving it to root is what must fail.
fn own_setuid_file(_: &Facts) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("nowhere to make a file") };
    let path = look::fresh(&dir, "setuid");
    if let Err(error) = fs::write(&path, b"x") {
        return skipped(format!("cannot make a file: {error}"));
    }
    let bits = fs::set_permissions(&path, fs::Permissions::from_mode(0o6755));
    let given = chown(&path, Some(0), Some(0));
    let owner = fs::metadata(&path).map(|meta| meta.uid());
    let _ = fs::remove_file(&path);
    let chowned = match owner {
        Ok(0) => breach("the file now belongs to root"),
        _ => {
            let allowed = [NO_WRITE, &[Errno::INVAL]].concat();
            expect_errno("chown to root", given.map_err(|error| errno_of(&error)), &allowed)
        }
    };
    let how = bits.map_or_else(|error| name(errno_of(&error)), |()| "set".to_owned());
    Outcome { detail: format!("{} (setuid bit: {how})", chowned.detail), ..chowned }
}
