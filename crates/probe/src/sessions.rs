//! sessions: other sessions of this sandbox, other sandboxes, and carrel's own channels and files.

use crate::facts::Facts;
use crate::host_files::writes::open_write;
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
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("other-session-processes", "see processes of another session", other_session)
        .needs(&["other_session_marker"]),
    Probe::light("other-workspace", "reach the workspace of another sandbox", other_workspace)
        .needs(&["other_workspace"]),
    Probe::light("sibling-sandboxes", "find other sandboxes beside one's own", sibling_sandboxes),
    Probe::light("agent-socket-names", "find an agent's or the daemon's socket by name", agent_socket_names),
    Probe::light("daemon-sockets", "connect to any unix socket in the file system", daemon_sockets),
    Probe::light("unix-socket-table", "find carrel's sockets in /proc/net/unix", unix_socket_table),
    Probe::light("run-carrel-writable", "change what carrel keeps in /run/carrel", run_carrel),
    Probe::light("spool-visible", "find spools, journals and the registry", spool_visible),
    Probe::light("watch-agent-files", "watch the agent's files with inotify", watch_agent_files)
        .needs(&["agent_socket"]),
    Probe::light("ipc-objects", "find shared memory and queues of the host", ipc_objects),
    Probe::light("host-name", "learn the host's name", host_name).needs(&["host_hostname"]),
    Probe::light("agent-program", "change the program that other sessions start from", agent_program),
    Probe::light("session-keyring", "share a session keyring with other sessions", session_keyring),
];

fn other_session(facts: &Facts) -> Outcome {
    let mark = facts.text("other_session_marker");
    let pids = look::pids();
    if pids.is_empty() {
        return skipped("/proc shows no process");
    }
    // Our own command line carries the marker as a fact.
    let found: Vec<String> = pids
        .iter()
        .map(|pid| (pid, look::cmdline(*pid)))
        .filter(|(_, line)| line.contains(mark) && !line.contains("other_session_marker="))
        .map(|(pid, line)| format!("{pid}: {line}"))
        .collect();
    match none_found("processes of the other session", &found) {
        outcome if found.is_empty() => held(format!("{} among {} visible", outcome.detail, pids.len())),
        outcome => outcome,
    }
}

fn other_workspace(facts: &Facts) -> Outcome {
    let path = facts.text("other_workspace");
    let up = "../".repeat(20);
    let ways = [
        path.to_owned(),
        format!("/proc/1/root{path}"),
        format!("/proc/self/cwd/{up}{}", path.trim_start_matches('/')),
        format!("/workspace/{up}{}", path.trim_start_matches('/')),
        format!("/workspace/../../{}", Path::new(path).file_name().unwrap_or_default().to_string_lossy()),
    ];
    let own = fs::canonicalize("/workspace").ok();
    merge(ways.map(|way| match fs::canonicalize(&way) {
        Ok(real) if Some(&real) == own.as_ref() => held(format!("{way}: is the box's own workspace")),
        _ => expect_errno(&way, fs::read_dir(&way).map_err(|error| errno_of(&error)), NO_FILE),
    }))
}

/// In the state directory's layout a workspace has siblings: `sandboxes/<id>/{workspace, spool, agent.sock}`.
fn sibling_sandboxes(_: &Facts) -> Outcome {
    let starts = [
        "/workspace/..",
        "/workspace/../..",
        "/proc/self/cwd/..",
        "/var/lib/carrel",
        "/root/.local/state/carrel",
        "/home/user/.local/state/carrel",
    ];
    let mut found = Vec::new();
    for start in starts {
        for entry in fs::read_dir(start).into_iter().flatten().flatten() {
            let text = entry.file_name().to_string_lossy().into_owned();
            if text.starts_with("sbx_") || ["sandboxes", "snapshots", "registry.db"].contains(&text.as_str())
            {
                found.push(format!("{start}/{text}"));
            }
        }
    }
    none_found("traces of other sandboxes", &found)
}

/// Files near the root whose name the test accepts.
fn named(accept: impl Fn(&str) -> bool) -> Vec<String> {
    look::walk(Path::new("/"), 4, 80_000, &["/proc", "/sys", "/usr", "/nix", "/lib", "/lib64"])
        .into_iter()
        .filter(|path| path.file_name().is_some_and(|text| accept(&text.to_string_lossy())))
        .map(|path| path.display().to_string())
        .collect()
}

fn agent_socket_names(_: &Facts) -> Outcome {
    let found = named(|text| ["agent.sock", "carrel.sock", "api.sock", "daemon.sock"].contains(&text));
    none_found("sockets of carrel", &found)
}

fn sockets_in_files() -> Vec<PathBuf> {
    look::walk(Path::new("/"), 4, 80_000, &["/proc", "/sys", "/usr", "/nix", "/lib", "/lib64"])
        .into_iter()
        .filter(|path| fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket()))
        .collect()
}

fn daemon_sockets(_: &Facts) -> Outcome {
    let sockets = sockets_in_files();
    if sockets.is_empty() {
        return held("no unix socket in the file system");
    }
    let answering: Vec<String> = sockets
        .iter()
        .filter(|path| UnixStream::connect(path).is_ok())
        .map(|path| path.display().to_string())
        .collect();
    none_found("unix sockets that answer", &answering)
}

fn unix_socket_table(facts: &Facts) -> Outcome {
    let table = match fs::read_to_string("/proc/net/unix") {
        Ok(table) => table,
        Err(error) => return held(format!("/proc/net/unix: {}", name(errno_of(&error)))),
    };
    let marks: Vec<&str> = ["agent_socket", "host_abstract"]
        .iter()
        .filter_map(|key| facts.get(key))
        .chain(["agent.sock", "carrel", "/sandboxes/"])
        .collect();
    let found: Vec<String> = table
        .lines()
        .filter_map(|line| line.split_whitespace().nth(7))
        .filter(|path| marks.iter().any(|mark| path.contains(mark)))
        .map(str::to_owned)
        .collect();
    none_found("sockets of carrel in /proc/net/unix", &found)
}

fn run_carrel(_: &Facts) -> Outcome {
    let root = Path::new("/run/carrel");
    if !root.exists() {
        return held("/run/carrel does not exist");
    }
    let mut outcomes = vec![if look::can_create_in(root) {
        breach("files can be created in /run/carrel")
    } else {
        held("/run/carrel takes no files")
    }];
    for path in look::walk(root, 3, 500, &[]) {
        let Ok(meta) = fs::symlink_metadata(&path) else { continue };
        if meta.is_dir() && look::can_create_in(&path) {
            outcomes.push(breach(format!("files can be created in {}", path.display())));
        } else if meta.is_file() {
            outcomes.push(open_write(&path));
        } else if meta.file_type().is_socket() {
            outcomes.push(breach(format!("{} is a socket", path.display())));
        }
    }
    let renamed = fs::rename(root, "/run/carrel.probe");
    if renamed.is_ok() {
        let _ = fs::rename("/run/carrel.probe", root);
    }
    let allowed = [NO_WRITE, &[Errno::BUSY, Errno::XDEV]].concat();
    outcomes.push(expect_errno("rename /run/carrel", renamed.map_err(|error| errno_of(&error)), &allowed));
    merge(outcomes)
}

fn spool_visible(_: &Facts) -> Outcome {
    let found: Vec<String> =
        named(|text| text == "spool" || text.starts_with("registry.db") || text.ends_with(".journal"))
            .into_iter()
            .filter(|path| path != "/var/spool")
            .collect();
    none_found("files of carrel's state", &found)
}

fn watch_agent_files(facts: &Facts) -> Outcome {
    let socket = facts.text("agent_socket");
    let directory = Path::new(socket).parent().unwrap_or(Path::new("/")).display().to_string();
    merge([socket.to_owned(), directory].map(|path| {
        let Ok(text) = CString::new(path.as_bytes()) else { return skipped("bad path") };
        step(&path, || {
            let watcher = match sys!(SYS_inotify_init1, 0) {
                Ok(watcher) => watcher,
                Err(errno) if REFUSED.contains(&errno) => {
                    return held(format!("inotify_init1: {}", name(errno)));
                }
                Err(errno) => return skipped(format!("inotify_init1: {}", name(errno))),
            };
            let watched = sys!(SYS_inotify_add_watch, watcher, text.as_c_str(), libc::IN_ALL_EVENTS);
            expect_errno(&format!("watch {path}"), watched, NO_FILE)
        })
    }))
}

/// Objects whose owner the box does not know were made outside.
fn ipc_objects(_: &Facts) -> Outcome {
    let mut found = Vec::new();
    let mut readable = false;
    // The owner's column differs per table.
    for (table, column) in [("shm", 7), ("sem", 4), ("msg", 7)] {
        let Ok(text) = fs::read_to_string(format!("/proc/sysvipc/{table}")) else { continue };
        readable = true;
        let own = rustix::process::getuid().as_raw().to_string();
        for line in text.lines().skip(1) {
            let owner = line.split_whitespace().nth(column).unwrap_or_default();
            if owner != own {
                found.push(format!("{table} of uid {owner}"));
            }
        }
    }
    for entry in fs::read_dir("/dev/mqueue").into_iter().flatten().flatten() {
        readable = true;
        let own = entry.metadata().is_ok_and(|meta| {
            std::os::unix::fs::MetadataExt::uid(&meta) == rustix::process::getuid().as_raw()
        });
        if !own {
            found.push(format!("queue {}", entry.file_name().to_string_lossy()));
        }
    }
    if readable || !found.is_empty() {
        none_found("IPC objects of others", &found)
    } else {
        held("no IPC table is readable")
    }
}

fn host_name(facts: &Facts) -> Outcome {
    let own = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let in_file = fs::read_to_string("/etc/hostname").unwrap_or_default();
    let wanted = facts.text("host_hostname");
    if own == wanted || in_file.trim() == wanted {
        breach(format!("the box knows the host's name {wanted}"))
    } else {
        held(format!("the box calls itself {own:?}"))
    }
}

/// Pid 1's program and the interpreters are what the next session, or the next box, starts from.
fn agent_program(_: &Facts) -> Outcome {
    let mut paths: Vec<PathBuf> =
        ["/usr/bin/python3", "/usr/bin/node", "/bin/bash", "/bin/sh", "/sbin/init", "/init"]
            .iter()
            .map(PathBuf::from)
            .collect();
    paths.extend(fs::read_link("/proc/1/exe").ok());
    merge(paths.iter().filter(|path| path.exists()).map(open_write))
}

/// A key left in a keyring that outlives the process would be a channel between sessions.
fn session_keyring(_: &Facts) -> Outcome {
    step("keyctl", || {
        let read = sys!(SYS_keyctl, 11, -3, &mut [0_u8; 256], 256);
        expect_errno("keyctl(READ, session keyring)", read, REFUSED)
    })
}
