//! kernel, state: files and terminals through which the kernel itself is steered.

use crate::facts::Facts;
use crate::host_files::writes::open_write;
use crate::isolate::step;
use crate::look;
use crate::outcome::{
    NO_WRITE, Outcome, REFUSED, breach, errno_of, expect_errno, held, merge, name, none_found, skipped,
};
use crate::sys::sys;
use crate::table::Probe;
use rustix::io::Errno;
use std::ffi::CString;
use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("core-pattern", "have the host's kernel start a program on a crash", |_| {
        open_write("/proc/sys/kernel/core_pattern")
    }),
    Probe::light("modprobe-path", "have the host's kernel start a program to load a module", |_| {
        merge(
            ["/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/sys/kernel/uevent_helper"]
                .map(open_write),
        )
    }),
    Probe::light("binfmt-misc", "register an interpreter with the host's kernel", binfmt_misc),
    Probe::light("tiocsti", "type into a terminal with TIOCSTI", |_| {
        terminal_ioctl("TIOCSTI", libc::TIOCSTI, b"x\0\0\0")
    }),
    // 0x12 asks for the foreground console's mode and changes nothing.
    Probe::light("tioclinux", "reach the console with TIOCLINUX", |_| {
        terminal_ioctl("TIOCLINUX", libc::TIOCLINUX, &[0x12, 0, 0, 0])
    }),
    Probe::light("cgroup-mount", "mount the cgroup file systems", cgroup_mount),
    Probe::light("cgroup-write", "leave the cgroup or lift its limits", cgroup_write),
    Probe::light(
        "cgroup-release-agent",
        "have the host's kernel start a program when a cgroup empties",
        release_agent,
    ),
    Probe::light("cgroup-namespace", "see where in the host's cgroup tree the box is", cgroup_namespace),
    Probe::light("security-modules", "change the kernel's security policy", |_| {
        let files = [
            "/sys/fs/selinux/enforce",
            "/sys/kernel/security/apparmor/.load",
            "/proc/self/attr/exec",
            "/sys/kernel/debug",
        ];
        merge(files.map(|path| if path.ends_with("exec") { attr_exec(path) } else { open_write(path) }))
    }),
    Probe::light("proc-timens", "shift the clocks of a time namespace", |_| {
        open_write_value("/proc/self/timens_offsets", "monotonic 1 0\n")
    }),
];

fn binfmt_misc(_: &Facts) -> Outcome {
    let dir = "/proc/sys/fs/binfmt_misc";
    let mounted = match fs::read_dir(dir) {
        Ok(entries) => {
            let writable: Vec<String> = entries
                .flatten()
                .filter(|entry| fs::OpenOptions::new().write(true).open(entry.path()).is_ok())
                .map(|entry| entry.path().display().to_string())
                .collect();
            none_found("writable binfmt_misc entries", &writable)
        }
        Err(error) => held(format!("{dir}: {}", name(errno_of(&error)))),
    };
    let mount = step("mount(binfmt_misc)", || {
        expect_errno("mount(binfmt_misc)", sys!(SYS_mount, c"none", c"/tmp", c"binfmt_misc", 0, 0), REFUSED)
    });
    merge([mounted, open_write(format!("{dir}/register")), mount])
}

/// On a pty pair of this process's own, made its controlling terminal, so that a success types to no one.
fn terminal_ioctl(what: &str, request: libc::Ioctl, argument: &[u8; 4]) -> Outcome {
    step(what, || {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let opened = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).and_then(|main| {
            grantpt(&main)?;
            unlockpt(&main)?;
            let path = ptsname(&main, Vec::new())?;
            Ok((main, path))
        });
        let (_main, path) = match opened {
            Ok(pair) => pair,
            Err(errno) => return skipped(format!("no pty: {}", name(errno))),
        };
        let _ = rustix::process::setsid();
        let side = match rustix::fs::open(&path, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()) {
            Ok(side) => side,
            Err(errno) => return skipped(format!("no pty: {}", name(errno))),
        };
        let _ = sys!(SYS_ioctl, side.as_raw_fd(), libc::TIOCSCTTY, 0);
        let result = sys!(SYS_ioctl, side.as_raw_fd(), request, argument);
        // The high half of the request is ignored by the kernel and must not fool a filter.
        let disguised = sys!(SYS_ioctl, side.as_raw_fd(), request | (1 << 32), argument);
        // EIO: the kernel has legacy TIOCSTI turned off. ENOTTY: not a console.
        let allowed = [REFUSED, &[Errno::IO, Errno::NOTTY]].concat();
        merge([
            expect_errno(what, result, &allowed),
            expect_errno(&format!("{what} | 1<<32"), disguised, &allowed),
        ])
    })
}

fn cgroup_mount(_: &Facts) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("no directory to mount on") };
    let point = look::fresh(&dir, "cgroup");
    if fs::create_dir(&point).is_err() {
        return skipped("cannot make a mount point");
    }
    let Ok(at) = CString::new(point.as_os_str().as_encoded_bytes()) else { return skipped("bad path") };
    let outcome =
        merge([(c"cgroup2", c""), (c"cgroup", c"memory"), (c"cgroup", c"rdma")].map(|(kind, options)| {
            let what = format!("mount({} {})", kind.to_string_lossy(), options.to_string_lossy());
            step(&what, || {
                let mounted = sys!(SYS_mount, c"none", at.as_c_str(), kind, 0, options);
                if mounted.is_ok() {
                    let _ = sys!(SYS_umount2, at.as_c_str(), libc::MNT_DETACH);
                }
                expect_errno(&what, mounted, REFUSED)
            })
        }));
    let _ = fs::remove_dir(&point);
    outcome
}

/// Every control file of the mounted hierarchies, opened and not written; and a move of this process.
fn cgroup_write(_: &Facts) -> Outcome {
    let roots: Vec<String> =
        look::mounts().into_iter().filter(|m| m.kind.starts_with("cgroup")).map(|m| m.point).collect();
    if roots.is_empty() && !Path::new("/sys/fs/cgroup").exists() {
        return held("no cgroup file system in the box");
    }
    let mut found = Vec::new();
    for root in roots.iter().map(String::as_str).chain(["/sys/fs/cgroup"]) {
        for path in look::walk(Path::new(root), 4, 20_000, &[]) {
            if path.is_file() && fs::OpenOptions::new().write(true).open(&path).is_ok() {
                found.push(path.display().to_string());
            }
        }
        if look::can_create_in(Path::new(root)) || fs::create_dir(format!("{root}/carrel-probe")).is_ok() {
            let _ = fs::remove_dir(format!("{root}/carrel-probe"));
            found.push(format!("{root} itself"));
        }
    }
    none_found("writable cgroup files", &found)
}

fn release_agent(_: &Facts) -> Outcome {
    let mut paths =
        vec!["/sys/fs/cgroup/release_agent".to_owned(), "/sys/fs/cgroup/notify_on_release".to_owned()];
    for mount in look::mounts().into_iter().filter(|mount| mount.kind == "cgroup") {
        paths.push(format!("{}/release_agent", mount.point));
    }
    merge(paths.iter().map(open_write))
}

/// In a cgroup namespace of its own a box sees itself at `/`.
fn cgroup_namespace(_: &Facts) -> Outcome {
    match fs::read_to_string("/proc/self/cgroup") {
        Err(error) => held(format!("/proc/self/cgroup: {}", name(errno_of(&error)))),
        Ok(text) => {
            // `/..` would be a place above the namespace's root.
            let shown: Vec<String> = text
                .lines()
                .filter(|line| {
                    line.splitn(3, ':').nth(2).is_some_and(|path| {
                        path.contains("..") || path.contains("/sbx_") || path.contains(".slice")
                    })
                })
                .map(str::to_owned)
                .collect();
            none_found("host cgroup paths", &shown)
        }
    }
}

fn open_write_value(path: &str, value: &str) -> Outcome {
    step(path, || {
        let written = fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|file| rustix::io::write(&file, value.as_bytes()).map_err(std::io::Error::from));
        expect_errno(path, written.map_err(|error| errno_of(&error)), &[NO_WRITE, &[Errno::INVAL]].concat())
    })
}

/// Anyone may open this file of one's own; only a policy that accepts the change would be a breach.
fn attr_exec(path: &str) -> Outcome {
    step(path, || {
        let written = fs::write(path, b"unconfined").map_err(|error| errno_of(&error));
        match written {
            Ok(()) => breach(format!("{path}: accepted a change of the security label")),
            Err(errno) => held(format!("{path}: {}", name(errno))),
        }
    })
}
