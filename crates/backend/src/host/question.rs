//! Asks a program of the host's: from a place that nobody can prepare, with the caller's whereabouts for its environment, and
//! bounded in time and size. It may be a shim that hangs, or one that never stops talking.

use std::{
    fmt,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use carrel_proto::guest::Language;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open},
};
use serde::Deserialize;

use super::whereabouts::Whereabouts;

/// An interpreter answers in a fraction of a second; a machine can stand still for some.
const PATIENCE: Duration = Duration::from_secs(20);
/// Of its output. Answers have some ten kilobytes: the files that it maps.
const LONGEST_ANSWER: usize = 1 << 20;
/// Of what it complains about, in what a user reads.
const LONGEST_COMPLAINT: usize = 300;

/// `-c` puts the current directory first on `sys.path`, and python before 3.11 has no switch against it that leaves the user's
/// own packages alone. So that goes before anything is imported that is not built in.
const PYTHON: &str = r#"
import sys
sys.path[:] = [p for p in sys.path if p]
import json, os, site
dirs = list(site.getsitepackages()) if hasattr(site, "getsitepackages") else []
if site.ENABLE_USER_SITE: dirs.append(site.getusersitepackages())
dirs = [d for d in dirs if os.path.isdir(d)]
maps = sorted({l.split(None, 5)[5].strip() for l in open("/proc/self/maps") if len(l.split(None, 5)) == 6})
print(json.dumps({"program": sys.executable, "version": sys.version.split()[0], "site": dirs,
  "prefixes": sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix} | set(dirs)),
  "parts": [os.path.dirname(os.path.dirname(json.__file__)), os.path.join(sys.prefix, "pyvenv.cfg")],
  "maps": [m for m in maps if m.startswith("/")]}))
"#;

const NODE: &str = r#"
const fs = require("fs"), path = require("path");
const maps = new Set(fs.readFileSync("/proc/self/maps", "utf8").split("\n").map(l => l.split(/\s+/)[5]).filter(p => p && p.startsWith("/")));
const prefix = path.dirname(path.dirname(process.execPath));
console.log(JSON.stringify({program: process.execPath, version: process.versions.node, site: [],
  prefixes: [prefix], parts: [path.join(prefix, "lib", "node_modules")], maps: [...maps]}));
"#;

const BASH: &str = r#"
printf '{"program":"%s","version":"%s","site":[],"prefixes":[],"parts":[],"maps":[' "$BASH" "${BASH_VERSINFO[0]}.${BASH_VERSINFO[1]}.${BASH_VERSINFO[2]}"
s=; while read -r _ _ _ _ _ path; do case $path in /*) printf '%s"%s"' "$s" "$path"; s=,;; esac; done < /proc/self/maps
printf ']}\n'
"#;

/// What an interpreter says of itself.
#[derive(Debug, Clone, Default, Deserialize)]
pub(super) struct Answer {
    pub(super) program: PathBuf,
    pub(super) version: String,
    pub(super) site: Vec<String>,
    /// What it needs as a whole, for itself and for the programs beside it.
    pub(super) prefixes: Vec<PathBuf>,
    /// What does, of a prefix that may not be shown as a whole; its program is meant anyway.
    pub(super) parts: Vec<PathBuf>,
    pub(super) maps: Vec<PathBuf>,
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Silence {
    /// It says so itself, or what it says is none.
    Refused(String),
    /// It may have, at another time.
    TooSlow,
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Silence::Refused(why) => f.write_str(why),
            Silence::TooSlow => write!(f, "it did not answer within {} s", PATIENCE.as_secs()),
        }
    }
}

impl From<io::Error> for Silence {
    fn from(error: io::Error) -> Self {
        Silence::Refused(error.to_string())
    }
}

impl From<rustix::io::Errno> for Silence {
    fn from(error: rustix::io::Errno) -> Self {
        io::Error::from(error).into()
    }
}

fn script(language: Language) -> [&'static str; 2] {
    match language {
        Language::Python => ["-c", PYTHON],
        Language::Node => ["-e", NODE],
        Language::Bash => ["-c", BASH],
    }
}

pub(super) fn ask(language: Language, program: &Path, caller: &Whereabouts) -> Result<Answer, Silence> {
    let said = run(Command::new(program).args(script(language)), caller)?;
    serde_json::from_slice(&said).map_err(|error| Silence::Refused(format!("its answer: {error}")))
}

/// Runs a program to its end and gives what it printed.
pub(super) fn run(command: &mut Command, caller: &Whereabouts) -> Result<Vec<u8>, Silence> {
    run_within(command, caller, PATIENCE)
}

fn run_within(command: &mut Command, caller: &Whereabouts, patience: Duration) -> Result<Vec<u8>, Silence> {
    let mut child = command
        .env_clear()
        .envs(caller.variables())
        // Whatever lies in the caller's directory is not asked: not its modules, and not its version files, for what is found
        // here is remembered for every directory.
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // So that what a shim has started ends with it.
        .process_group(0)
        .spawn()?;
    let heard = listen(&mut child, Instant::now() + patience);
    // Before it is reaped, so that the group is still its own.
    let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    let status = child.wait()?;
    let (said, complaint) = heard?;
    match complained(status, &complaint) {
        None => Ok(said),
        Some(why) => Err(Silence::Refused(why)),
    }
}

fn complained(status: ExitStatus, complaint: &[u8]) -> Option<String> {
    if status.success() {
        return None;
    }
    let text = String::from_utf8_lossy(complaint);
    let last = text.lines().rev().find(|line| !line.trim().is_empty());
    Some(last.map_or_else(|| status.to_string(), |line| line.chars().take(LONGEST_COMPLAINT).collect()))
}

/// One of a child's outputs, as far as it was read.
struct Heard<R> {
    from: Option<R>,
    bytes: Vec<u8>,
}

impl<R: Read + AsFd> Heard<R> {
    fn of(from: Option<R>) -> Result<Self, Silence> {
        if let Some(from) = &from {
            rustix::io::ioctl_fionbio(from, true)?;
        }
        Ok(Self { from, bytes: Vec::new() })
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.from.as_ref().map(AsFd::as_fd)
    }

    /// Reads what is there.
    fn listen(&mut self) -> Result<(), Silence> {
        let mut piece = [0; 16 << 10];
        while let Some(from) = &mut self.from {
            match from.read(&mut piece) {
                Ok(0) => self.from = None,
                Ok(count) => self.bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
            if self.bytes.len() > LONGEST_ANSWER {
                return Err(Silence::Refused(format!("it said more than {LONGEST_ANSWER} bytes")));
            }
        }
        Ok(())
    }
}

/// Until the child has ended. What others hold its outputs open for is not waited for.
fn listen(child: &mut Child, deadline: Instant) -> Result<(Vec<u8>, Vec<u8>), Silence> {
    let ended = pidfd_open(Pid::from_child(child), PidfdFlags::empty())?;
    let mut out = Heard::of(child.stdout.take())?;
    let mut err = Heard::of(child.stderr.take())?;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Silence::TooSlow);
        }
        let is_over = {
            let mut fds = vec![PollFd::new(&ended, PollFlags::IN)];
            fds.extend(
                [out.fd(), err.fd()]
                    .into_iter()
                    .flatten()
                    .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
            );
            match poll(&mut fds, Timespec::try_from(left).ok().as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            !fds[0].revents().is_empty()
        };
        out.listen()?;
        err.listen()?;
        if is_over {
            return Ok((out.bytes, err.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(code: &str, patience: Duration) -> Result<Vec<u8>, Silence> {
        run_within(Command::new("/bin/sh").args(["-c", code]), &Whereabouts::default(), patience)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_shim_that_hangs_is_ended_with_what_it_started() {
        // Its child holds the pipe at which this test sees that it is gone.
        let place = tempfile::tempdir().unwrap();
        let fifo = place.path().join("alive");
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let reader = std::thread::spawn({
            let fifo = fifo.clone();
            move || std::fs::read(fifo).unwrap()
        });
        let code = format!("{{ echo here; sleep 3600; }} > '{}' & wait", fifo.display());
        assert!(matches!(shell(&code, Duration::from_secs(2)), Err(Silence::TooSlow)));
        assert_eq!(reader.join().unwrap(), b"here\n");
    }

    #[test]
    fn one_that_never_stops_talking_is_not_listened_to() {
        let said = shell("while :; do echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa; done", LONG);
        assert!(matches!(said, Err(Silence::Refused(why)) if why.contains("said more than")));
    }

    #[test]
    fn what_a_background_process_holds_open_is_not_waited_for() {
        assert_eq!(shell("sleep 3600 & echo answer", LONG).unwrap(), b"answer\n");
    }

    #[test]
    fn a_complaint_is_its_last_line() {
        let said = shell("echo one >&2; echo two >&2; echo >&2; exit 3", LONG);
        assert!(matches!(said, Err(Silence::Refused(why)) if why == "two"));
    }

    #[test]
    fn it_is_asked_from_the_root_with_nothing_but_the_whereabouts() {
        let caller = Whereabouts::of(
            [("HOME", "/h"), ("PATH", "/x:rel:/y"), ("SECRET", "s")].map(|(n, v)| (n.into(), v.into())),
        );
        let said = run(Command::new("/usr/bin/env").arg("-0"), &caller).unwrap();
        let text = String::from_utf8(said).unwrap();
        let mut all: Vec<&str> = text.split_terminator('\0').collect();
        all.sort_unstable();
        assert_eq!(all, ["HOME=/h", "PATH=/x:/y:/usr/local/bin:/usr/bin:/bin:/run/current-system/sw/bin"]);
        assert_eq!(run(Command::new("/bin/pwd").arg("-P"), &caller).unwrap(), b"/\n");
    }
}
