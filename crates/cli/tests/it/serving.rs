//! A daemon of a [`Place`], and the plainest HTTP client there is.

use std::{
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    process::{Child, Command},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::Place;

/// What a loaded machine may take for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Daemon {
    pub(crate) child: Child,
    lines: Receiver<String>,
    said: Vec<String>,
}

impl Daemon {
    pub(crate) fn start(place: &Place, args: &[&str]) -> Self {
        let mut daemon = Self::spawn(place.command(&[&["serve", "-v"], args].concat()));
        daemon.hear("listening on unix:");
        daemon
    }

    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let (sender, lines) = channel();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self { child, lines, said: Vec::new() }
    }

    /// Whether it listens, or has ended instead.
    pub(crate) fn listens(&mut self) -> bool {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) => self.said.push(line),
                Err(RecvTimeoutError::Disconnected) => return false,
                Err(RecvTimeoutError::Timeout) => panic!("it neither listens nor ends: {:?}", self.said),
            }
            if self.said.last().is_some_and(|line| line.contains("listening on unix:")) {
                return true;
            }
        }
    }

    pub(crate) fn said(&self) -> String {
        self.said.join("\n")
    }

    /// Waits until it says so on stderr.
    #[track_caller]
    pub(crate) fn hear(&mut self, word: &str) -> String {
        if let Some(line) = self.said.iter().find(|line| line.contains(word)) {
            return line.clone();
        }
        loop {
            let line = self
                .lines
                .recv_timeout(PATIENCE)
                .unwrap_or_else(|_| panic!("it never said `{word}`: {:?}", self.said));
            self.said.push(line.clone());
            if line.contains(word) {
                return line;
            }
        }
    }

    /// The address after `http://` or `https://`.
    pub(crate) fn tcp(&mut self) -> String {
        let line = self.hear("listening on http");
        line.rsplit("//").next().unwrap().to_owned()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Its exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    pub(crate) fn stop(mut self) {
        self.signal(Signal::TERM);
        assert_eq!(self.wait(), Some(0), "{:?}", self.said);
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One request and its answer, head and body.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

pub(crate) fn ask(mut stream: impl Read + Write, request: &str, headers: &str, body: &str) -> Answer {
    let host = if headers.contains("Host:") { "" } else { "Host: localhost\r\n" };
    write!(
        stream,
        "{request} HTTP/1.1\r\n{host}Connection: close\r\nContent-Length: {}\r\n{headers}\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut text = Vec::new();
    // A peer that closes TLS without a word has still answered.
    let _ = stream.read_to_end(&mut text);
    let text = String::from_utf8_lossy(&text).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, body: body.to_owned() }
}

pub(crate) fn unix(place: &Place, request: &str, body: &str) -> Answer {
    ask(UnixStream::connect(place.socket()).unwrap(), request, "", body)
}
