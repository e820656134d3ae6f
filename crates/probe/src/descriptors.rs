//! descriptors: what a process is handed at its start: open files, variables, ids, terminal, directory.

use crate::facts::Facts;
use crate::isolate::step;
use crate::look;
use crate::outcome::{Outcome, breach, errno_of, held, merge, name, none_found, skipped};
use crate::sys::sys;
use crate::table::Probe;
use rustix::io::Errno;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("inherited-descriptors", "find descriptors beyond the standard three", inherited),
    Probe::light(
        "inherited-directories",
        "leave the box through an inherited directory",
        inherited_directories,
    ),
    Probe::light("inherited-sockets", "talk to the outside through an inherited socket", inherited_sockets),
    Probe::light(
        "standard-streams",
        "have standard streams that are terminals or files of the host",
        standard_streams,
    ),
    Probe::light("host-variable", "see a variable of the host's environment", host_variable)
        .needs(&["host_env_name"]),
    Probe::light("environment", "find variables beyond the expected", environment),
    Probe::light(
        "environment-of-others",
        "find secrets in the environment of visible processes",
        environment_of_others,
    ),
    Probe::light("argument-leaks", "find host paths and tokens in command lines", argument_leaks),
    Probe::light("controlling-terminal", "have a controlling terminal of the host", controlling_terminal),
    Probe::light("groups", "keep supplementary groups of the host", groups),
    Probe::light("keys-listing", "see keys of the host in /proc/keys", keys_listing),
    Probe::light("working-directory", "start in a directory outside the box", working_directory),
    Probe::light("umask", "create files that everyone may change", umask),
    Probe::light("signal-state", "start with signals blocked or ignored", signal_state),
];

fn target(fd: i32) -> String {
    fs::read_link(format!("/proc/self/fd/{fd}"))
        .map_or_else(|_| "?".to_owned(), |to| to.display().to_string())
}

fn inherited(facts: &Facts) -> Outcome {
    let found: Vec<String> = facts.inherited.iter().map(|fd| format!("{fd}→{}", target(*fd))).collect();
    none_found("inherited descriptors", &found)
}

fn inherited_directories(facts: &Facts) -> Outcome {
    let all = [0, 1, 2].into_iter().chain(facts.inherited.iter().copied());
    let found: Vec<String> = all
        .filter(|fd| {
            step("fchdir", || {
                let entered = sys!(SYS_fchdir, *fd);
                let outside = entered.is_ok();
                if outside { breach("") } else { held("") }
            })
            .verdict
                == crate::outcome::Verdict::Breach
        })
        .map(|fd| format!("{fd}→{}", target(fd)))
        .collect();
    none_found("directories among the inherited descriptors", &found)
}

fn inherited_sockets(facts: &Facts) -> Outcome {
    let mut found = Vec::new();
    for fd in facts.inherited.iter().copied() {
        // struct ucred of the peer: pid 0 is one outside our namespace.
        let mut peer = [0_u8; 12];
        let mut length = 12_u32.to_ne_bytes();
        match sys!(SYS_getsockopt, fd, libc::SOL_SOCKET, libc::SO_PEERCRED, &mut peer, &mut length) {
            Err(_) => {}
            Ok(_) => {
                let pid = i32::from_ne_bytes([peer[0], peer[1], peer[2], peer[3]]);
                found.push(format!("{fd}→{} with peer pid {pid}", target(fd)));
            }
        }
    }
    none_found("inherited sockets", &found)
}

/// Pipes, sockets, /dev/null and files of the box are right; a terminal must be one of the box's own.
fn standard_streams(_: &Facts) -> Outcome {
    merge([0, 1, 2].map(|fd| {
        let to = target(fd);
        let terminal = sys!(SYS_ioctl, fd, libc::TCGETS, &mut [0_u8; 64]).is_ok();
        if terminal && !own_terminal(&to) {
            breach(format!("{fd} is the terminal {to}, which is not in the box's /dev/pts"))
        } else if to.starts_with('/') && fs::metadata(&to).is_err() {
            breach(format!("{fd} is the file {to}, which the box does not have"))
        } else {
            held(format!("{fd}→{to}"))
        }
    }))
}

fn own_terminal(path: &str) -> bool {
    path.starts_with("/dev/pts/") && fs::metadata(path).is_ok()
}

fn own_environ() -> Vec<(String, String)> {
    // /proc/self/environ shows what was there at exec, even if the program has since removed it.
    let raw = fs::read("/proc/self/environ").unwrap_or_default();
    let at_exec = raw.split(|byte| *byte == 0).filter(|entry| !entry.is_empty()).map(|entry| {
        let text = String::from_utf8_lossy(entry).into_owned();
        text.split_once('=')
            .map_or((text.clone(), String::new()), |(key, value)| (key.to_owned(), value.to_owned()))
    });
    let now = std::env::vars_os().map(|(key, value)| {
        (key.to_string_lossy().into_owned(), String::from_utf8_lossy(value.as_bytes()).into_owned())
    });
    at_exec.chain(now).collect()
}

fn host_variable(facts: &Facts) -> Outcome {
    let wanted = facts.text("host_env_name");
    if own_environ().iter().any(|(key, _)| key == wanted) {
        breach(format!("{wanted} is in the environment"))
    } else {
        held(format!("{wanted} is not in the environment"))
    }
}

const EXPECTED: &[&str] = &[
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_CTYPE",
    "LANGUAGE",
    "TERM",
    "COLORTERM",
    "NO_COLOR",
    "TZ",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "_",
    "TMPDIR",
    "TEMP",
    "TMP",
    "HOSTNAME",
    "COLUMNS",
    "LINES",
    "EDITOR",
    "PAGER",
    "DEBIAN_FRONTEND",
    "MPLBACKEND",
    "MPLCONFIGDIR",
    "PS1",
    "ENV",
    "LD_LIBRARY_PATH",
    "SOURCE_DATE_EPOCH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "VIRTUAL_ENV",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MALLOC_ARENA_MAX",
];
const EXPECTED_PREFIXES: &[&str] =
    &["LC_", "PYTHON", "NODE_", "NPM_CONFIG_", "npm_config_", "PIP_", "XDG_", "CARREL_"];

/// Names are shown, values never.
fn environment(facts: &Facts) -> Outcome {
    let extra: Vec<&str> = facts.parts("env_allow").collect();
    let mut found: Vec<String> = own_environ()
        .into_iter()
        .map(|(key, _)| key)
        .filter(|key| {
            let known = EXPECTED.contains(&key.as_str())
                || extra.contains(&key.as_str())
                || EXPECTED_PREFIXES.iter().any(|prefix| key.starts_with(prefix));
            !known || sounds_secret(key)
        })
        .collect();
    found.sort_unstable();
    found.dedup();
    none_found("unexpected variables", &found)
}

fn sounds_secret(key: &str) -> bool {
    let key = key.to_ascii_uppercase();
    ["TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "API_KEY", "PRIVATE", "_KEY"]
        .iter()
        .any(|word| key.contains(word))
}

fn environment_of_others(facts: &Facts) -> Outcome {
    let wanted = facts.get("host_env_name");
    let mut read = 0;
    let mut found = Vec::new();
    for pid in look::pids() {
        let Ok(raw) = fs::read(format!("/proc/{pid}/environ")) else { continue };
        read += 1;
        for entry in raw.split(|byte| *byte == 0) {
            let text = String::from_utf8_lossy(entry);
            let key = text.split('=').next().unwrap_or_default();
            if Some(key) == wanted || sounds_secret(key) {
                found.push(format!("{key} in {pid}"));
            }
        }
    }
    match none_found("secrets in environments", &found) {
        outcome if found.is_empty() => held(format!("{} in {read} readable processes", outcome.detail)),
        outcome => outcome,
    }
}

/// This program's own arguments carry the facts and are left out.
fn argument_leaks(facts: &Facts) -> Outcome {
    let marks: Vec<&str> = ["agent_socket", "other_workspace", "canary_path"]
        .iter()
        .filter_map(|key| facts.get(key))
        .chain(["--token", "/agent.sock", "/registry.db", "/sandboxes/sbx_"])
        .collect();
    let found: Vec<String> = look::pids()
        .into_iter()
        .map(|pid| (pid, look::cmdline(pid)))
        .filter(|(_, line)| !line.contains("carrel-probe") && marks.iter().any(|mark| line.contains(mark)))
        .map(|(pid, line)| format!("{pid}: {line}"))
        .collect();
    none_found("command lines that tell about the host", &found)
}

fn controlling_terminal(_: &Facts) -> Outcome {
    match rustix::fs::open(
        "/dev/tty",
        rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY,
        rustix::fs::Mode::empty(),
    ) {
        Err(errno) => held(format!("/dev/tty: {}", name(errno))),
        Ok(_) => {
            // Field 7 of stat is the terminal's device number; the box's own are in its /dev/pts.
            let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
            let number: u64 = stat
                .rsplit(')')
                .next()
                .and_then(|rest| rest.split_whitespace().nth(4)?.parse().ok())
                .unwrap_or_default();
            let own = fs::read_dir("/dev/pts").into_iter().flatten().flatten().any(|entry| {
                entry.metadata().is_ok_and(|meta| {
                    let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
                    u64::from((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)) == number
                })
            });
            if own {
                held("the controlling terminal is a pty of the box")
            } else {
                breach(format!("controlling terminal {number:#x} is not of the box"))
            }
        }
    }
}

/// An unprivileged user namespace cannot drop groups, it can only leave them unmapped.
fn groups(_: &Facts) -> Outcome {
    let groups = match rustix::process::getgroups() {
        Ok(groups) => groups,
        Err(errno) => return skipped(format!("getgroups: {}", name(errno))),
    };
    let own = [rustix::process::getgid(), rustix::process::getegid()];
    let foreign: Vec<u32> = groups.iter().filter(|gid| !own.contains(gid)).map(|gid| gid.as_raw()).collect();
    let mapped: Vec<String> = foreign.iter().filter(|gid| **gid != 65534).map(u32::to_string).collect();
    if !mapped.is_empty() {
        return none_found("supplementary groups", &mapped);
    }
    if foreign.is_empty() {
        held("no supplementary groups")
    } else {
        held(format!("{} unmapped host groups remain; no file in the box can be made theirs", foreign.len()))
    }
}

fn keys_listing(_: &Facts) -> Outcome {
    match fs::read_to_string("/proc/keys") {
        Err(error) => held(format!("/proc/keys: {}", name(errno_of(&error)))),
        Ok(text) => {
            let own = rustix::process::getuid().as_raw().to_string();
            // Columns: id flags usage expiry permissions uid gid type description.
            let found: Vec<String> = text
                .lines()
                .filter(|line| line.split_whitespace().nth(5).is_some_and(|uid| uid != own))
                .map(|line| line.split_whitespace().skip(5).collect::<Vec<_>>().join(" "))
                .collect();
            none_found("keys of other users", &found)
        }
    }
}

fn working_directory(_: &Facts) -> Outcome {
    match std::env::current_dir() {
        // The kernel says "(unreachable)" for a directory outside the root.
        Ok(dir) if dir.to_string_lossy().starts_with('/') => {
            let same = fs::metadata(".").and_then(|here| Ok((here, fs::metadata(&dir)?)));
            match same {
                Ok((here, there)) if (here.dev(), here.ino()) == (there.dev(), there.ino()) => {
                    held(format!("cwd is {}", dir.display()))
                }
                _ => breach(format!("cwd says {} but is another directory", dir.display())),
            }
        }
        Ok(dir) => breach(format!("cwd is {}", dir.display())),
        Err(error) if errno_of(&error) == Errno::NOENT => breach("cwd is outside the box or deleted"),
        Err(error) => skipped(format!("cwd: {error}")),
    }
}

fn umask(_: &Facts) -> Outcome {
    match look::status_field("Umask").and_then(|text| u32::from_str_radix(&text, 8).ok()) {
        None => skipped("/proc/self/status has no Umask"),
        Some(mask) if mask & 0o002 != 0 => held(format!("umask {mask:03o}")),
        Some(mask) => breach(format!("umask {mask:03o} leaves files writable to everyone")),
    }
}

/// SIGPIPE is ignored by this program's own runtime. Signals 32 and 33 are the C library's own: its `posix_spawn`
/// leaves them ignored in everything it starts, and a program that uses them sets a handler first.
fn signal_state(_: &Facts) -> Outcome {
    let read = |key: &str| look::status_field(key).and_then(|text| u64::from_str_radix(&text, 16).ok());
    let (Some(blocked), Some(ignored)) = (read("SigBlk"), read("SigIgn")) else {
        return skipped("/proc/self/status has no signal masks");
    };
    let ignored = ignored & !(1 << (libc::SIGPIPE - 1) | 1 << 31 | 1 << 32);
    if blocked == 0 && ignored == 0 {
        held("no signal is blocked or ignored")
    } else {
        breach(format!("blocked {blocked:#x}, ignored {ignored:#x}: a time limit may not reach this process"))
    }
}
