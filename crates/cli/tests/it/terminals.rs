//! With a terminal on both ends.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

use crate::support::{Place, sandboxes};

struct Terminal {
    ours: File,
    theirs: OwnedFd,
    /// What nobody has waited for yet.
    seen: String,
    all: String,
}

impl Terminal {
    fn new(rows: u16, cols: u16) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&ours).unwrap();
        unlockpt(&ours).unwrap();
        let name = ptsname(&ours, Vec::new()).unwrap();
        let theirs = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY, Mode::empty()).unwrap();
        let terminal = Self { ours: ours.into(), theirs, seen: String::new(), all: String::new() };
        terminal.resize(rows, cols);
        terminal
    }

    fn resize(&self, rows: u16, cols: u16) {
        tcsetwinsize(self.theirs.as_fd(), Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 })
            .unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.theirs).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    fn wait_for(&mut self, text: &str) {
        let mut buffer = [0; 4096];
        while !self.seen.contains(text) {
            let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
            let ready = poll(&mut [PollFd::new(&self.ours, PollFlags::IN)], Some(&patience)).unwrap();
            assert!(ready > 0, "waited for {text:?}, saw {:?}", self.seen);
            let count = self.ours.read(&mut buffer).unwrap();
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
            self.all.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
        let end = self.seen.find(text).unwrap() + text.len();
        self.seen.drain(..end);
    }

    fn stdio(&self) -> std::process::Stdio {
        self.theirs.try_clone().unwrap().into()
    }
}

#[test]
fn a_shell_has_a_real_terminal_and_gives_ours_back() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    place.run(&["open", "work"]).with(0);
    let mut terminal = Terminal::new(31, 101);
    let mut command = place.command(&["shell", "work"]);
    let mut child =
        command.stdin(terminal.stdio()).stdout(terminal.stdio()).stderr(terminal.stdio()).spawn().unwrap();
    terminal.wait_for("$ ");
    assert!(terminal.is_raw());
    terminal.ours.write_all(b"stty size\n").unwrap();
    terminal.wait_for("31 101");
    terminal.resize(42, 77);
    kill_process(Pid::from_child(&child), Signal::WINCH).unwrap();
    // The new size travels beside the keys, so ask until it is there.
    terminal.ours.write_all(b"until [ \"$(stty size)\" = '42 77' ]; do :; done; echo re''sized\n").unwrap();
    terminal.wait_for("resized");
    terminal.ours.write_all(b"sed -u s/b/B/\nabc\n").unwrap();
    terminal.wait_for("aBc");
    terminal.ours.write_all(b"\x03").unwrap();
    terminal.wait_for("$ ");
    terminal.ours.write_all(b"exit 9\n").unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(9));
    assert!(!terminal.is_raw());
}

#[test]
fn a_killed_shell_gives_the_terminal_back() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    place.run(&["open", "work"]).with(0);
    let mut terminal = Terminal::new(24, 80);
    let mut command = place.command(&["exec", "-it", "work", "--", "sh", "-c", "echo rea''dy; sleep 100"]);
    let mut child =
        command.stdin(terminal.stdio()).stdout(terminal.stdio()).stderr(terminal.stdio()).spawn().unwrap();
    terminal.wait_for("ready");
    assert!(terminal.is_raw());
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait().unwrap();
    assert!(!terminal.is_raw());
}

#[test]
fn errors_are_in_colour_on_a_terminal_and_nowhere_else() {
    let place = Place::new();
    let complain = |terminal: &Terminal, name: &str, value: &str| {
        let mut command = place.command(&["run", "--timeout", "never", "1"]);
        command.env("TERM", "xterm").env_remove("NO_COLOR").env(name, value);
        command.stderr(terminal.stdio()).status().unwrap();
    };
    let mut terminal = Terminal::new(24, 80);
    complain(&terminal, "TERM", "xterm");
    terminal.wait_for("\x1b[31merror:\x1b[0m ");
    // A reader who wants none, and a terminal that has none.
    for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let mut terminal = Terminal::new(24, 80);
        complain(&terminal, name, value);
        terminal.wait_for("error: ");
        terminal.wait_for("hint: ");
        assert!(!terminal.all.contains('\x1b'), "{name}: {:?}", terminal.all);
    }
    let piped = place.command(&["run", "--timeout", "never", "1"]).env("TERM", "xterm").output().unwrap();
    let said = String::from_utf8(piped.stderr).unwrap();
    assert!(said.starts_with("error: ") && !said.contains('\x1b'), "{said}");
}

#[test]
fn what_takes_longer_than_a_second_says_so_on_a_terminal_and_takes_the_line_away() {
    let place = Place::new();
    // An interpreter that takes its time.
    let slow = place.work().join("slow");
    std::fs::create_dir(&slow).unwrap();
    std::fs::write(slow.join("python3"), "#!/bin/sh\nsleep 2.5\nexit 1\n").unwrap();
    std::fs::set_permissions(slow.join("python3"), std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .unwrap();
    let command = |args: &[&str]| {
        let mut command = place.command(args);
        let path = std::env::var_os("PATH").unwrap();
        let places = [slow.clone()].into_iter().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(places).unwrap()).env("TERM", "xterm");
        command
    };
    let mut terminal = Terminal::new(24, 80);
    command(&["doctor", "--refresh"]).stderr(terminal.stdio()).output().unwrap();
    terminal.wait_for("\r\x1b[Klooking around… ");
    terminal.wait_for("\r\x1b[K");
    // Programs read neither a line nor its removal.
    let mut terminal = Terminal::new(24, 80);
    command(&["doctor", "--refresh", "--json"]).stderr(terminal.stdio()).output().unwrap();
    terminal.ours.write_all(b"end\n").unwrap();
    terminal.wait_for("end");
    assert!(!terminal.all.contains("looking around"), "{:?}", terminal.all);
    let piped = command(&["doctor", "--refresh"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&piped.stderr).contains("looking around"));
}
