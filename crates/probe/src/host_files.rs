//! host-files: reading what belongs to the host. Mounts and writes are in the files below.

pub(crate) mod mounts;
pub(crate) mod writes;

use crate::facts::Facts;
use crate::isolate::{NamedCall, all_refused, step};
use crate::look;
use crate::outcome::{
    NO_FILE, Outcome, REFUSED, breach, errno_of, expect_errno, held, merge, name, none_found, skipped,
};
use crate::sha256;
use crate::sys::{NULL, sys};
use crate::table::Probe;
use std::ffi::CString;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

const CANARY: &[&str] = &["canary_path"];

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("canary-absolute", "read a host file by its absolute path", |f| {
        read_canary(f.text("canary_path"), f)
    })
    .needs(CANARY),
    Probe::light("canary-dotdot", "read a host file through a long row of ..", canary_dotdot).needs(CANARY),
    Probe::light("canary-proc-root", "read a host file through /proc/PID/root", |f| canary_proc(f, "root"))
        .needs(CANARY),
    Probe::light("canary-proc-cwd", "read a host file through /proc/PID/cwd", |f| canary_proc(f, "cwd"))
        .needs(CANARY),
    Probe::light("canary-proc-fd", "read a host file through descriptors of other processes", canary_proc_fd)
        .needs(CANARY),
    Probe::light("canary-symlink", "read a host file through a symlink of one's own", canary_symlink)
        .needs(CANARY),
    Probe::light("canary-hardlink", "link a host file into the workspace", canary_hardlink).needs(CANARY),
    Probe::light("chroot-escape", "leave the root with the double chroot", chroot_escape),
    Probe::light("open-by-handle", "open the file system's root inode by handle", open_by_handle),
    Probe::light("password-files", "read the host's password hashes and host keys", password_files),
    Probe::light("root-home", "list /root", root_home),
    Probe::light("host-homes", "list the home directories of host users", host_homes),
    Probe::light("host-dirs", "list directories of the host's system state", host_dirs),
    Probe::light("host-services", "find sockets of host services", host_services),
    Probe::light("kernel-log", "read the kernel log", kernel_log),
    Probe::light("kernel-memory", "read kernel memory and symbol addresses", kernel_memory),
    Probe::light("sysfs", "read or change devices through /sys", sysfs),
    Probe::light("proc-secrets", "read host-wide files of /proc that are not per process", proc_secrets),
];

/// Reads `path`; a breach when it is the canary (by digest when the host gave one).
pub(super) fn read_canary(path: impl AsRef<Path>, facts: &Facts) -> Outcome {
    let shown = path.as_ref().display();
    let mut content = Vec::new();
    let read = File::open(&path).and_then(|file| file.take(1 << 20).read_to_end(&mut content));
    match (read, facts.get("canary_sha256")) {
        (Err(error), _) => {
            let errno = errno_of(&error);
            if NO_FILE.contains(&errno) {
                held(format!("{shown}: {}", name(errno)))
            } else {
                skipped(format!("{shown}: {error}"))
            }
        }
        (Ok(_), Some(digest)) if !digest.eq_ignore_ascii_case(&sha256::hex(&content)) => {
            held(format!("{shown}: exists, but is another file"))
        }
        (Ok(bytes), _) => breach(format!("read {bytes} bytes of the host's {shown}")),
    }
}

/// Tries many ways to the canary; says only how many failed, and names those that worked.
fn canary_ways(paths: &[String], facts: &Facts) -> Outcome {
    let outcomes: Vec<Outcome> = paths.iter().map(|path| read_canary(path, facts)).collect();
    let all_held =
        !outcomes.is_empty() && outcomes.iter().all(|o| o.verdict == crate::outcome::Verdict::Held);
    if all_held { held(format!("{} ways tried, none led there", paths.len())) } else { merge(outcomes) }
}

fn canary_dotdot(facts: &Facts) -> Outcome {
    let up = "../".repeat(40);
    let target = facts.text("canary_path").trim_start_matches('/');
    let starts = ["", "/workspace/", "/tmp/", "/usr/", "/proc/self/cwd/", "/proc/self/root/", "/dev/fd/"];
    canary_ways(&starts.map(|start| format!("{start}{up}{target}")), facts)
}

fn canary_proc(facts: &Facts, link: &str) -> Outcome {
    let target = facts.text("canary_path").trim_start_matches('/');
    let mut paths = Vec::new();
    for pid in look::pids() {
        for up in ["", "../../../../../../../../"] {
            paths.push(format!("/proc/{pid}/{link}/{up}{target}"));
            paths.push(format!("/proc/{pid}/task/{pid}/{link}/{up}{target}"));
        }
    }
    if paths.is_empty() { skipped("/proc shows no process") } else { canary_ways(&paths, facts) }
}

/// Descriptors that lead to a directory are a way up, whoever holds them.
fn canary_proc_fd(facts: &Facts) -> Outcome {
    let target = facts.text("canary_path").trim_start_matches('/');
    let mut paths = Vec::new();
    for pid in look::pids() {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            paths.push(format!("{}/../../../../../../../{target}", entry.path().display()));
            paths.push(format!("{}/{target}", entry.path().display()));
        }
    }
    if paths.is_empty() { skipped("/proc shows no descriptors") } else { canary_ways(&paths, facts) }
}

fn canary_symlink(facts: &Facts) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("nowhere to put a symlink") };
    let link = look::fresh(&dir, "link");
    let target = facts.text("canary_path");
    let ways = [target.to_owned(), format!("/proc/self/root{target}"), format!("/proc/1/root{target}")];
    merge(ways.map(|way| {
        if let Err(error) = symlink(&way, &link) {
            return skipped(format!("symlink: {error}"));
        }
        let outcome = read_canary(&link, facts);
        let _ = fs::remove_file(&link);
        outcome
    }))
}

fn canary_hardlink(facts: &Facts) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("nowhere to put a link") };
    let link = look::fresh(&dir, "hardlink");
    let outcome = match fs::hard_link(facts.text("canary_path"), &link) {
        Ok(()) => merge([breach("link(2) to the host's file succeeded"), read_canary(&link, facts)]),
        Err(error) => expect_errno::<()>("link", Err(errno_of(&error)), NO_FILE),
    };
    let _ = fs::remove_file(&link);
    outcome
}

fn chroot_escape(facts: &Facts) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("no directory to chroot to") };
    let jail = look::fresh(&dir, "chroot");
    if let Err(error) = fs::create_dir(&jail) {
        return skipped(format!("mkdir: {error}"));
    }
    let Ok(path) = CString::new(jail.as_os_str().as_encoded_bytes()) else { return skipped("bad path") };
    let outcome = step("chroot", || match sys!(SYS_chroot, path.as_c_str()) {
        Err(errno) => expect_errno::<()>("chroot", Err(errno), REFUSED),
        Ok(_) => {
            for _ in 0..64 {
                let _ = std::env::set_current_dir("..");
            }
            let again = sys!(SYS_chroot, c".").is_ok();
            let canary = facts.get("canary_path").map(|canary| read_canary(canary, facts).detail);
            breach(format!("chroot is permitted; second chroot: {again}; {}", canary.unwrap_or_default()))
        }
    });
    let _ = fs::remove_dir(&jail);
    outcome
}

/// The "shocker" attack: handles name inodes of a whole file system, whatever part of it is mounted.
fn open_by_handle(_: &Facts) -> Outcome {
    let mut guessed = [0_u8; 136];
    guessed[..4].copy_from_slice(&8_u32.to_ne_bytes()); // handle_bytes
    guessed[4..8].copy_from_slice(&1_i32.to_ne_bytes()); // FILEID_INO32_GEN
    guessed[8..12].copy_from_slice(&2_u32.to_ne_bytes()); // the root inode of ext4
    let mut own = [0_u8; 136];
    own[..4].copy_from_slice(&128_u32.to_ne_bytes());
    let mut mount_id = [0_u8; 8];
    let named = sys!(SYS_name_to_handle_at, libc::AT_FDCWD, c"/workspace", &mut own, &mut mount_id, 0);
    let open = |handle: &[u8; 136]| {
        let dir = File::open("/workspace").or_else(|_| File::open("/"));
        let Ok(dir) = dir else { return Err(rustix::io::Errno::NOSYS) };
        sys!(SYS_open_by_handle_at, std::os::fd::AsRawFd::as_raw_fd(&dir), handle, libc::O_RDONLY)
    };
    let mut calls: Vec<NamedCall<'_>> = Vec::new();
    let (guess, real) = (|| open(&guessed), || open(&own));
    calls.push(("open_by_handle_at(inode 2)", &guess));
    if named.is_ok() {
        calls.push(("open_by_handle_at(/workspace)", &real));
    }
    all_refused(&calls, REFUSED)
}

fn password_files(_: &Facts) -> Outcome {
    merge(
        ["/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/sudoers", "/etc/ssh/ssh_host_ed25519_key"].map(
            |path| match fs::read_to_string(path) {
                Err(error) => held(format!("{path}: {}", name(errno_of(&error)))),
                Ok(text) if text.contains(":$") || text.contains("PRIVATE KEY") => {
                    breach(format!("{path}: holds secrets"))
                }
                Ok(_) => held(format!("{path}: readable, without any hash or key")),
            },
        ),
    )
}

/// Names of entries, or the reason why there are none.
fn entries(dir: &str) -> Result<Vec<String>, String> {
    let read = fs::read_dir(dir).map_err(|error| name(errno_of(&error)))?;
    Ok(read.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
}

/// An entry that is only the way to read-only mounts of software below `dir` is how an interpreter's prefix (pyenv, nvm)
/// is shown. A mount of `dir` itself excuses nothing, nor does one of something else, nor a file beside the way.
fn only(dir: &str, expected: &[&str]) -> Outcome {
    let software: Vec<PathBuf> = look::mounts()
        .into_iter()
        .filter(|mount| mount.has("ro"))
        .map(|mount| PathBuf::from(mount.point))
        .filter(|point| is_software(point))
        .collect();
    let leads_to_mount = |name: &str| leads_only_to(&Path::new(dir).join(name), &software);
    match entries(dir) {
        Err(why) => held(format!("{dir}: {why}")),
        Ok(names) => {
            let found: Vec<String> = names
                .into_iter()
                .filter(|n| !expected.contains(&n.as_str()) && !n.starts_with(".carrel-probe-"))
                .filter(|n| !leads_to_mount(n))
                .collect();
            none_found(&format!("unexpected entries in {dir}"), &found)
        }
    }
}

fn leads_only_to(path: &Path, mounts: &[PathBuf]) -> bool {
    if mounts.iter().any(|point| point == path) {
        return true;
    }
    let is_way = mounts.iter().any(|point| point.starts_with(path));
    is_way
        && fs::read_dir(path)
            .is_ok_and(|entries| entries.flatten().all(|entry| leads_only_to(&entry.path(), mounts)))
}

/// Whether a mount is what an interpreter needs: its prefix, packages, itself, a library it has mapped. Not a directory of
/// somebody's files.
fn is_software(mount: &Path) -> bool {
    let named = |name: &str| mount.file_name().is_some_and(|own| own == name);
    let private =
        [".ssh", ".aws", ".gnupg", ".netrc", ".git-credentials", ".docker", ".kube", ".bash_history"];
    if mount.is_file() {
        let text = mount.to_string_lossy();
        let executable = rustix::fs::access(mount, rustix::fs::Access::EXEC_OK).is_ok();
        return text.contains(".so") || (executable && starts_as_program(mount));
    }
    let holds = |names: &[&str]| names.iter().any(|name| mount.join(name).exists());
    let prefix = holds(&["bin/python", "bin/python3", "bin/node", "bin/bash", "pyvenv.cfg"]);
    (prefix || named("site-packages") || named("dist-packages")) && !holds(&private)
}

fn starts_as_program(path: &Path) -> bool {
    let mut start = [0_u8; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok()
        && (start == *b"\x7fELF" || start.starts_with(b"#!"))
}

fn root_home(_: &Facts) -> Outcome {
    only("/root", &[".bashrc", ".profile", ".cache"])
}

fn host_homes(_: &Facts) -> Outcome {
    merge([only("/home", &["user"]), only("/Users", &[]), only("/export/home", &[])])
}

fn host_dirs(_: &Facts) -> Outcome {
    let dirs = ["/boot", "/lost+found", "/mnt", "/media", "/srv", "/var/log/journal", "/var/lib/docker"];
    let more =
        ["/var/lib/kubelet", "/var/lib/containerd", "/var/spool/cron/crontabs", "/etc/kubernetes", "/host"];
    merge(dirs.into_iter().chain(more).map(|dir| only(dir, &[])))
}

fn host_services(_: &Facts) -> Outcome {
    let sockets = [
        "/var/run/docker.sock",
        "/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/run/podman/podman.sock",
        "/run/dbus/system_bus_socket",
        "/run/systemd/private",
        "/run/systemd/journal/socket",
        "/run/snapd.socket",
        "/run/user",
        "/run/udev",
        "/dev/log",
        "/tmp/.X11-unix",
        "/var/run/secrets/kubernetes.io",
    ];
    let found: Vec<String> =
        sockets.iter().filter(|path| Path::new(path).exists()).map(|path| (*path).to_owned()).collect();
    none_found("sockets or state of host services", &found)
}

fn kernel_log(_: &Facts) -> Outcome {
    let kmsg = |path: &str| match rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK,
        rustix::fs::Mode::empty(),
    ) {
        Err(errno) => expect_errno::<()>(path, Err(errno), NO_FILE),
        // Opening is not yet reading: /dev/kmsg may refuse at either.
        Ok(fd) => match rustix::io::read(&fd, &mut [0_u8; 8192][..]) {
            Ok(0) => held(format!("{path}: empty")),
            Ok(n) => breach(format!("{path}: read {n} bytes of the kernel log")),
            Err(errno) => expect_errno::<()>(path, Err(errno), REFUSED),
        },
    };
    let syslog = step("syslog", || {
        let mut buffer = [0_u8; 4096];
        merge([
            expect_errno("syslog(READ_ALL)", sys!(SYS_syslog, 3, &mut buffer, 4096), REFUSED),
            expect_errno("syslog(SIZE_BUFFER)", sys!(SYS_syslog, 10, NULL, 0), REFUSED),
        ])
    });
    merge([kmsg("/dev/kmsg"), kmsg("/proc/kmsg"), syslog])
}

fn kernel_memory(_: &Facts) -> Outcome {
    let core = |path: &str| {
        let mut buffer = [0_u8; 64];
        match File::open(path).and_then(|mut file| file.read(&mut buffer)) {
            Ok(0) => held(format!("{path}: empty")),
            Ok(n) => breach(format!("{path}: read {n} bytes")),
            Err(error) => expect_errno::<()>(path, Err(errno_of(&error)), NO_FILE),
        }
    };
    let symbols = match fs::read_to_string("/proc/kallsyms") {
        Err(error) => held(format!("/proc/kallsyms: {}", name(errno_of(&error)))),
        Ok(text) => {
            let shown = text
                .lines()
                .any(|line| line.split(' ').next().is_some_and(|a| !a.trim_matches('0').is_empty()));
            if shown { breach("/proc/kallsyms shows addresses") } else { held("/proc/kallsyms: only zeros") }
        }
    };
    merge([core("/proc/kcore"), core("/proc/vmcore"), core("/dev/mem"), core("/proc/kpageflags"), symbols])
}

fn sysfs(_: &Facts) -> Outcome {
    let present = only("/sys", &[]);
    if present.verdict == crate::outcome::Verdict::Held {
        return present;
    }
    // A /sys that is there is more than needed, and worse when the firmware or a device can be touched.
    let writable: Vec<String> = look::walk(Path::new("/sys"), 3, 5000, &[])
        .into_iter()
        .filter(|path| rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok())
        .map(|path| path.display().to_string())
        .collect();
    merge([present, none_found("writable entries in /sys", &writable)])
}

fn proc_secrets(_: &Facts) -> Outcome {
    let files = [
        "/proc/timer_list",
        "/proc/sched_debug",
        "/proc/latency_stats",
        "/proc/slabinfo",
        "/proc/vmallocinfo",
        "/proc/iomem",
        "/proc/pagetypeinfo",
        "/proc/kpagecount",
        "/sys/kernel/debug/tracing/trace",
        "/proc/sys/fs/binfmt_misc/register",
    ];
    merge(files.map(|path| {
        let mut content = vec![0_u8; 65536];
        match File::open(path).and_then(|mut file| file.read(&mut content)) {
            Err(error) => held(format!("{path}: {}", name(errno_of(&error)))),
            // Without privilege the kernel prints this file with every address as zero.
            Ok(n) if path == "/proc/iomem" && !shows_addresses(&content[..n]) => {
                held(format!("{path}: only zeros"))
            }
            Ok(0) => held(format!("{path}: empty")),
            Ok(n) => breach(format!("{path}: read {n} bytes")),
        }
    }))
}

fn shows_addresses(iomem: &[u8]) -> bool {
    String::from_utf8_lossy(iomem).lines().any(|line| {
        line.split(':').next().is_some_and(|range| range.chars().any(|c| c.is_ascii_hexdigit() && c != '0'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_software_is_excused_and_nothing_beside_the_way_to_it() {
        let root = std::env::temp_dir().join(format!("carrel-probe-ways-{}", std::process::id()));
        let prefix = root.join(".pyenv/versions/3.12");
        let keys = root.join(".ssh");
        fs::create_dir_all(prefix.join("bin")).unwrap();
        fs::create_dir_all(&keys).unwrap();
        fs::write(prefix.join("bin/python3"), "").unwrap();
        fs::write(keys.join("id_ed25519"), "").unwrap();
        assert!(is_software(&prefix) && !is_software(&keys) && !is_software(&keys.join("id_ed25519")));
        let mounts = [prefix.clone()];
        assert!(leads_only_to(&root.join(".pyenv"), &mounts));
        assert!(!leads_only_to(&keys, &mounts));
        fs::write(root.join(".pyenv/versions/token"), "").unwrap();
        assert!(!leads_only_to(&root.join(".pyenv"), &mounts));
        fs::create_dir(prefix.join(".ssh")).unwrap();
        assert!(!is_software(&prefix));
        fs::remove_dir_all(&root).unwrap();
    }
}
