//! A daemon of the test's own.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use tempfile::TempDir;

use crate::client::Client;

/// A state directory and the daemon that serves it. Dropping it closes every sandbox.
pub(crate) struct Server {
    directory: TempDir,
    child: Child,
}

impl Server {
    pub(crate) fn start() -> Self {
        Self::configured("")
    }

    /// With this text as its configuration.
    pub(crate) fn configured(text: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path().join("home/.config/carrel");
        std::fs::create_dir_all(&place).unwrap();
        std::fs::write(place.join("carrel.toml"), text).unwrap();
        let child = start(directory.path());
        Self { directory, child }
    }

    /// Tells it to end, and waits.
    pub(crate) fn end(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    pub(crate) fn socket(&self) -> PathBuf {
        socket(self.directory.path())
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    pub(crate) fn client(&self) -> Client {
        Client::connect(&self.socket()).unwrap()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `kill -9`, and a new one in its place.
    pub(crate) fn crash(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.child = start(self.directory.path());
    }

    pub(crate) fn cli(&self, args: &[&str]) -> std::process::Output {
        command(self.directory.path()).args(args).output().unwrap()
    }

    /// Resident memory of the daemon, in bytes.
    pub(crate) fn resident(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let ended = self.cli(&["close", "--all"]);
        if !std::thread::panicking() {
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
        }
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("carrel.sock")
}

fn command(directory: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_carrel"));
    command
        .env("CARREL_STATE", directory.join("state"))
        .env("CARREL_SOCKET", socket(directory))
        .env("XDG_CONFIG_HOME", directory.join("home/.config"))
        .env_remove("PROJECT_DIR")
        .current_dir(directory)
        .stdin(Stdio::null());
    command
}

/// Starts a daemon and waits until it listens.
fn start(directory: &Path) -> Child {
    let mut child =
        command(directory).arg("serve").stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut words = BufReader::new(child.stderr.take().unwrap());
    let mut said = String::new();
    loop {
        let mut line = String::new();
        assert_ne!(words.read_line(&mut line).unwrap(), 0, "the daemon ended: {said}");
        said += &line;
        if line.contains("listening on unix:") {
            break;
        }
    }
    // Nobody may block it by not reading what it says.
    std::thread::spawn(move || drop(std::io::copy(&mut words, &mut std::io::sink())));
    child
}
