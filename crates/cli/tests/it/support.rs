//! A place to run `carrel` in.

use std::{
    io::Write,
    path::Path,
    process::{Child, Command, Output, Stdio},
};

use serde_json::Value;
use tempfile::TempDir;

/// A state directory, a home and a working directory that nothing else uses. Dropping it closes every sandbox.
pub(crate) struct Place {
    directory: TempDir,
}

pub(crate) struct Ended {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Ended {
    pub(crate) fn of(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Self { code: output.status.code().unwrap_or(-1), out: text(output.stdout), err: text(output.stderr) }
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {} {}", self.out, self.err))
    }

    /// Expects an exit code and gives stdout.
    #[track_caller]
    pub(crate) fn with(self, code: i32) -> String {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.out, self.err);
        self.out
    }
}

impl Place {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for name in ["home", "work"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        Self { directory }
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn work(&self) -> std::path::PathBuf {
        self.path().join("work")
    }

    /// Where a daemon of this place would listen.
    pub(crate) fn socket(&self) -> std::path::PathBuf {
        self.path().join("run/carrel.sock")
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_carrel"));
        command
            .args(args)
            .current_dir(self.work())
            .env("CARREL_STATE", self.path().join("state"))
            .env("CARREL_SOCKET", self.socket())
            .env("XDG_CONFIG_HOME", self.path().join("home/.config"))
            .env_remove("CARREL_NO_DAEMON")
            .env_remove("PROJECT_DIR")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub(crate) fn run(&self, args: &[&str]) -> Ended {
        Ended::of(self.command(args).output().unwrap())
    }

    pub(crate) fn start(&self, args: &[&str]) -> Child {
        self.command(args).spawn().unwrap()
    }

    pub(crate) fn feed(&self, args: &[&str], input: &[u8]) -> Ended {
        let mut child = self.command(args).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        Ended::of(child.wait_with_output().unwrap())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.path().join("state").exists() {
            let ended = self.run(&["close", "--all"]);
            if !std::thread::panicking() {
                assert_eq!(ended.code, 0, "{}", ended.err);
            }
        }
    }
}

/// Whether sandboxes can be made here; if not, the reason is printed and the test has nothing to say.
pub(crate) fn sandboxes(place: &Place) -> bool {
    let ended = place.run(&["doctor", "--json"]);
    if ended.code == 0 {
        return true;
    }
    assert!(std::env::var_os("CI").is_none(), "CI allows no skip of sandboxes: {}", ended.out);
    println!("skipped: no sandboxes on this host: {}", ended.json()["sandbox"]["error"]["message"]);
    false
}
