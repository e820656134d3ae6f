//! The program itself: which one, how it is called, and what it says when it fails.

use std::{
    fs,
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use carrel_jail::{userns, visit};
use carrel_proto::problem::{Code, Problem};

use super::full;

/// Where CRIU is looked for. 4.1 is the first that works on kernels of today.
const PLACES: [&str; 4] = ["/usr/local/sbin/criu", "/usr/local/bin/criu", "/usr/sbin/criu", "/usr/bin/criu"];
const OLDEST: (u32, u32) = (4, 1);

/// A CRIU that can be used.
#[derive(Debug, Clone)]
pub(crate) struct Criu {
    pub(super) program: PathBuf,
    pub(super) version: String,
}

impl Criu {
    pub(crate) fn is_there(&self) -> bool {
        self.program.exists()
    }

    /// Looks for one; says what is missing.
    pub(crate) fn find() -> Result<Self, Problem> {
        let missing = |word: String| {
            Problem::new(Code::Unsupported, format!("sandboxes cannot be written to disk here: {word}"))
                .hint("install CRIU 4.1 or newer (`scripts/criu` does); standby works without it")
        };
        if !userns::has_many_ids() {
            return Err(missing("that takes root, of the host itself".into())
                .hint("run the daemon as root to hibernate sandboxes; standby works without it"));
        }
        let mut old = None;
        for program in PLACES.map(PathBuf::from).into_iter().filter(|program| program.exists()) {
            let told = Command::new(&program).arg("--version").stdin(Stdio::null()).output();
            let text =
                told.map(|told| String::from_utf8_lossy(&told.stdout).into_owned()).unwrap_or_default();
            let version = text.lines().find_map(|line| line.strip_prefix("Version:")).unwrap_or("").trim();
            if parse(version).is_some_and(|found| found >= OLDEST) {
                return Ok(Self { program, version: version.to_owned() });
            }
            old.get_or_insert(format!("{} is version {version}, which is too old", program.display()));
        }
        Err(missing(old.unwrap_or_else(|| "there is no CRIU".into())))
    }
}

pub(super) fn parse(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// What both ways have in common.
pub(super) fn common(verb: &str, directory: &Path) -> Vec<String> {
    let path = directory.to_string_lossy().into_owned();
    let mut words: Vec<String> =
        [verb, "--images-dir", &path, "--work-dir", &path, "-o"].map(str::to_owned).into();
    words.push(format!("{verb}.log"));
    // Connections of the box to itself end with it; nobody outside is at the other end of one.
    let rest = [
        "-v1",
        "--manage-cgroups=ignore",
        "--network-lock",
        "skip",
        "--file-locks",
        "--tcp-close",
        "--ext-unix-sk",
    ];
    words.extend(rest.map(str::to_owned));
    words
}

/// What CRIU would not write keeps the sandbox in memory, with its reason.
pub(super) fn refused(log: &Path, said: &str) -> Problem {
    let why = last_error(log).unwrap_or_else(|| said.to_owned());
    if let Some(problem) = full(&why) {
        return problem;
    }
    Problem::new(Code::Unsupported, format!("the sandbox cannot be written to disk: {why}"))
        .hint("it stays in memory; what it holds (io_uring, userfaultfd, a device) is not for CRIU")
}

/// The first error of a log is the cause, what follows are its consequences.
pub(super) fn last_error(log: &Path) -> Option<String> {
    let text = fs::read_to_string(log).ok()?;
    let error = text.lines().filter(|line| line.contains("Error (")).find(|line| !line.contains("rlimit"))?;
    Some(error.split_once("): ").map_or(error, |(_, word)| word).trim().to_owned())
}

/// Runs a visit to its end; what went wrong in words.
pub(super) fn run(agent: &Path, visit: &visit::Visit, output: Stdio) -> Result<(), String> {
    let text = serde_json::to_vec(visit).map_err(|error| error.to_string())?;
    let mut child = Command::new(agent)
        .arg("visit")
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(output)
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
        .map_err(|error| error.to_string())?;
    if let Some(mut stdin) = child.stdin.take() {
        // One that has died says why on its error stream.
        let _ = stdin.write_all(&text);
    }
    let told = child.wait_with_output().map_err(|error| error.to_string())?;
    if told.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&told.stderr);
    Err(said.lines().next().unwrap_or("CRIU failed without a word").to_owned())
}

/// For [`visit::Visit::memory`]: one for all, ours alone. None where there is no such place.
pub(super) fn memory() -> Option<PathBuf> {
    use std::os::unix::fs::{DirBuilderExt, MetadataExt};
    let place = PathBuf::from("/dev/shm/carrel-criu");
    let _ = fs::DirBuilder::new().mode(0o700).create(&place);
    // Whoever else made it would tell CRIU lies about the kernel.
    let own = |meta: &fs::Metadata| meta.is_dir() && meta.uid() == 0 && meta.mode() & 0o777 == 0o700;
    fs::symlink_metadata(&place).is_ok_and(|meta| own(&meta)).then_some(place)
}
