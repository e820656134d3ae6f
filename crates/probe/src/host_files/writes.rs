//! host-files, the write side: changing files that many boxes or the host share.
//!
//! Files are opened for writing and never written; directories are tried with a file that is removed again.

use crate::facts::Facts;
use crate::isolate::step;
use crate::look;
use crate::outcome::{
    NO_WRITE, Outcome, breach, errno_of, expect_errno, held, merge, name, none_found, skipped,
};
use crate::table::Probe;
use rustix::fs::{Access, access};
use rustix::io::Errno;
use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("write-usr", "create or change files in /usr", |_| {
        merge([
            create_in("/usr"),
            create_in("/usr/bin"),
            create_in("/usr/local/bin"),
            create_in("/usr/lib"),
            open_write("/usr/bin/env"),
        ])
    }),
    Probe::light("write-etc", "create or change files in /etc", |_| {
        let files = ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/resolv.conf", "/etc/ld.so.cache"];
        merge(files.map(open_write).into_iter().chain([create_in("/etc"), create_file("/etc/ld.so.preload")]))
    }),
    Probe::light("write-root", "create files in / and in its system directories", |_| {
        merge(
            ["/", "/bin", "/lib", "/sbin", "/lib64", "/opt", "/var", "/var/lib", "/root", "/home"]
                .map(create_in),
        )
    }),
    Probe::light("write-dev", "create files in /dev", |_| create_in("/dev")),
    Probe::light("rename-mountpoints", "rename or remove system directories", rename_mountpoints),
    Probe::light(
        "reopen-writable",
        "reopen a read-only file for writing through /proc/self/fd",
        reopen_writable,
    ),
    Probe::light("overwrite-init-exe", "open the program of pid 1 for writing", overwrite_init_exe),
    Probe::light("write-proc-sys", "change kernel parameters in /proc/sys", write_proc_sys),
    Probe::light("unexpected-writable", "walk the file system for writable places", unexpected_writable),
];

fn create_in(dir: &str) -> Outcome {
    create_file(look::fresh(Path::new(dir), "write"))
}

fn create_file(path: impl AsRef<Path>) -> Outcome {
    let path = path.as_ref();
    let created = OpenOptions::new().write(true).create_new(true).open(path);
    let what = format!("create in {}", path.parent().unwrap_or(path).display());
    match created {
        Ok(_) => {
            let _ = fs::remove_file(path);
            breach(format!("{what}: succeeded"))
        }
        Err(error) => expect_errno::<()>(&what, Err(errno_of(&error)), NO_WRITE),
    }
}

/// Opens without truncating and writes nothing.
///
/// For a program that runs, the kernel says ETXTBSY before it looks at the mount's read-only flag: then
/// `access` tells whether it could be written once it is idle.
pub(crate) fn open_write(path: impl AsRef<Path>) -> Outcome {
    let path = path.as_ref();
    let what = format!("open {} for writing", path.display());
    match OpenOptions::new().write(true).open(path).map_err(|error| errno_of(&error)) {
        Err(Errno::TXTBSY) => {
            expect_errno(&format!("{what} when it does not run"), access(path, Access::WRITE_OK), NO_WRITE)
        }
        opened => expect_errno(&what, opened, NO_WRITE),
    }
}

/// Renames are tried onto a name that cannot take them: a missing right is told before that.
fn rename_mountpoints(_: &Facts) -> Outcome {
    let allowed = [NO_WRITE, &[Errno::BUSY, Errno::XDEV]].concat();
    merge(["/usr", "/etc", "/proc", "/workspace", "/dev/null"].map(|path| {
        let target = format!("{path}.carrel-probe");
        let renamed = fs::rename(path, &target);
        if renamed.is_ok() {
            let _ = fs::rename(&target, path);
        }
        expect_errno(&format!("rename {path}"), renamed.map_err(|error| errno_of(&error)), &allowed)
    }))
}

fn reopen_writable(_: &Facts) -> Outcome {
    let candidates = ["/usr/bin/env", "/etc/passwd", "/usr/bin/python3", "/usr/bin/bash"];
    merge(candidates.map(|path| match File::open(path) {
        Err(error) => skipped(format!("{path}: {}", name(errno_of(&error)))),
        Ok(file) => open_write(format!("/proc/self/fd/{}", file.as_raw_fd())),
    }))
}

/// The runc escape of 2019: the program of a supervisor, replaced from inside.
fn overwrite_init_exe(_: &Facts) -> Outcome {
    step("open /proc/1/exe", || open_write("/proc/1/exe"))
}

fn write_proc_sys(_: &Facts) -> Outcome {
    let files = [
        "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/randomize_va_space",
        "/proc/sys/kernel/yama/ptrace_scope",
        "/proc/sys/kernel/unprivileged_bpf_disabled",
        "/proc/sys/vm/overcommit_memory",
        "/proc/sys/vm/drop_caches",
        "/proc/sys/vm/panic_on_oom",
        "/proc/sys/fs/suid_dumpable",
        "/proc/sys/fs/protected_symlinks",
        "/proc/sys/net/ipv4/ip_forward",
        "/proc/sys/user/max_user_namespaces",
    ];
    let named = merge(files.map(open_write));
    let writable: Vec<String> = look::walk(Path::new("/proc/sys"), 3, 4000, &[])
        .into_iter()
        .filter(|path| path.is_file() && OpenOptions::new().write(true).open(path).is_ok())
        .map(|path| path.display().to_string())
        .collect();
    merge([named, none_found("writable files in /proc/sys", &writable)])
}

fn unexpected_writable(_: &Facts) -> Outcome {
    let skip: Vec<&str> = look::WRITABLE.iter().copied().chain(["/proc", "/sys"]).collect();
    let mut paths = look::walk(Path::new("/"), 3, 60_000, &skip);
    paths.push(PathBuf::from("/"));
    let found: Vec<String> = paths
        .iter()
        .filter(|path| !path.starts_with("/dev") && access(path.as_path(), Access::WRITE_OK).is_ok())
        .filter(|path| {
            let Ok(meta) = fs::symlink_metadata(path) else { return false };
            // What access(2) says is confirmed by doing it.
            (meta.is_dir() && look::can_create_in(path))
                || (meta.is_file() && OpenOptions::new().write(true).open(path).is_ok())
        })
        .map(|path| path.display().to_string())
        .collect();
    match none_found("unexpected writable places", &found) {
        outcome if found.is_empty() => held(format!("{} among {} paths", outcome.detail, paths.len())),
        outcome => outcome,
    }
}
