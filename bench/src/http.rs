//! The HTTP door as a client meets it: one connection that stays open, through the unix socket and through TCP.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use carrel_proto::problem::{Code, Problem};
use serde_json::{Value, json};

fn failed(what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::Internal, format!("the daemon: {what}"))
}

/// A byte stream to the daemon, whichever door.
trait Stream: Read + Write + Send {}
impl<T: Read + Write + Send> Stream for T {}

/// A daemon of the bench's own.
pub(crate) struct Daemon {
    child: Child,
    socket: std::path::PathBuf,
    address: String,
}

impl Daemon {
    pub(crate) fn start(program: &Path, state: &Path) -> Result<Self, Problem> {
        let socket = state.join("bench.sock");
        let mut child = Command::new(program)
            .arg("--state")
            .arg(state)
            .args(["serve", "--listen", "127.0.0.1:0", "--insecure-no-auth", "--socket"])
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let mut words = BufReader::new(child.stderr.take().ok_or_else(|| failed("has no stderr"))?);
        let mut address = None;
        let mut listening = false;
        while address.is_none() || !listening {
            let mut line = String::new();
            if words.read_line(&mut line).map_err(failed)? == 0 {
                return Err(failed("did not begin to listen"));
            }
            listening |= line.contains("listening on unix:");
            if let Some((_, rest)) = line.split_once("listening on http://") {
                address = Some(rest.trim().to_owned());
            }
        }
        std::thread::spawn(move || drop(std::io::copy(&mut words, &mut std::io::sink())));
        Ok(Self { child, socket, address: address.unwrap_or_default() })
    }

    pub(crate) fn unix(&self) -> Result<Client, Problem> {
        Ok(Client::over(UnixStream::connect(&self.socket).map_err(failed)?))
    }

    pub(crate) fn tcp(&self) -> Result<Client, Problem> {
        let stream = TcpStream::connect(&self.address).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(Client::over(stream))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One connection that stays open.
pub(crate) struct Client {
    stream: BufReader<Box<dyn Stream>>,
}

impl Client {
    fn over(stream: impl Stream + 'static) -> Self {
        Self { stream: BufReader::with_capacity(1 << 20, Box::new(stream)) }
    }

    /// A sandbox of this name, so many calls of which can be taken back; its id.
    pub(crate) fn sandbox(&mut self, name: &str, undo_calls: u32) -> Result<String, Problem> {
        let body = json!({"name": name, "undo_calls": undo_calls, "limits": {"disk": 16 << 20, "output": 256 << 20}});
        let made: Value =
            serde_json::from_slice(&self.ask("POST", "/v1/sandboxes", &body.to_string())?).map_err(failed)?;
        made["id"].as_str().map(str::to_owned).ok_or_else(|| failed(made))
    }

    /// From nothing to the first result of a sandbox of this name, in one request; and its id.
    pub(crate) fn first(
        &mut self,
        name: &str,
        environment: &str,
        code: &str,
    ) -> Result<(Duration, String), Problem> {
        let body = json!({"code": code, "sandbox": name, "environment": environment, "undo_calls": 0});
        let (time, reply) = self.answered("/v1/run", &body)?;
        let id = reply["sandbox"].as_str().ok_or_else(|| failed(&reply))?;
        Ok((time, id.to_owned()))
    }

    /// One copy of a living sandbox; its id.
    pub(crate) fn fork(&mut self, id: &str) -> Result<String, Problem> {
        let forked = self.ask("POST", &format!("/v1/sandboxes/{id}/fork"), r#"{"count":1}"#)?;
        let forked: Value = serde_json::from_slice(&forked).map_err(failed)?;
        forked["forks"][0]["sandbox"]["id"].as_str().map(str::to_owned).ok_or_else(|| failed(&forked))
    }

    pub(crate) fn end(&mut self, id: &str) -> Result<(), Problem> {
        self.send("DELETE", &format!("/v1/sandboxes/{id}"), "")?;
        self.head().map(drop)
    }

    /// One python call; the time is the client's.
    pub(crate) fn run(&mut self, id: &str) -> Result<Duration, Problem> {
        self.run_in(id, "python", "6*7")
    }

    pub(crate) fn run_in(&mut self, id: &str, environment: &str, code: &str) -> Result<Duration, Problem> {
        let body = json!({"code": code, "environment": environment});
        self.answered(&format!("/v1/sandboxes/{id}/run"), &body).map(|(time, _)| time)
    }

    /// The time until code has been answered with 42, and the answer.
    fn answered(&mut self, path: &str, body: &Value) -> Result<(Duration, Value), Problem> {
        let begun = Instant::now();
        let reply = self.ask("POST", path, &body.to_string())?;
        let time = begun.elapsed();
        let reply: Value = serde_json::from_slice(&reply).map_err(failed)?;
        // A shell prints what others return.
        let shown = reply["results"][0]["mime"]["text/plain"].as_str().or(reply["stdout"].as_str());
        match shown.map(str::trim_end) {
            Some("42") => Ok((time, reply)),
            _ => Err(failed(format!("answered {reply}"))),
        }
    }

    /// Bytes of a command's output, and how long they took.
    pub(crate) fn flood(&mut self, id: &str, bytes: u64) -> Result<Duration, Problem> {
        let begun = Instant::now();
        let argv = json!({"argv": ["head", "-c", bytes.to_string(), "/dev/zero"], "stream": true});
        let started = self.ask("POST", &format!("/v1/sandboxes/{id}/execs"), &argv.to_string())?;
        let started: Value = serde_json::from_slice(&started).map_err(failed)?;
        let exec = started["exec"].as_str().ok_or_else(|| failed(&started))?;
        let path = format!("/v1/sandboxes/{id}/execs/{exec}/raw?stream=stdout&follow=true");
        let got = self.count(&path)?;
        if got != bytes {
            return Err(failed(format!("{got} of {bytes} bytes came through")));
        }
        Ok(begun.elapsed())
    }

    fn send(&mut self, method: &str, path: &str, body: &str) -> Result<(), Problem> {
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes()).map_err(failed)
    }

    fn line(&mut self) -> Result<String, Problem> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map_err(failed)?;
        Ok(line.trim_end().to_owned())
    }

    /// The length of the body, if the head says it.
    fn head(&mut self) -> Result<Option<usize>, Problem> {
        let status = self.line()?;
        if !status.contains(" 20") {
            return Err(failed(status));
        }
        let mut length = None;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line.is_empty() {
                return Ok(length);
            }
            if let Some(text) = line.strip_prefix("content-length:") {
                length = text.trim().parse().ok();
            }
        }
    }

    fn ask(&mut self, method: &str, path: &str, body: &str) -> Result<Vec<u8>, Problem> {
        self.send(method, path, body)?;
        let length = self.head()?.ok_or_else(|| failed("an answer without a length"))?;
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).map_err(failed)?;
        Ok(bytes)
    }

    fn count(&mut self, path: &str) -> Result<u64, Problem> {
        self.send("GET", path, "")?;
        self.head()?;
        let (mut total, mut buffer) = (0, Vec::new());
        loop {
            let size = usize::from_str_radix(&self.line()?, 16).map_err(failed)?;
            buffer.resize(size, 0);
            self.stream.read_exact(&mut buffer).map_err(failed)?;
            self.line()?;
            if size == 0 {
                return Ok(total);
            }
            total += size as u64;
        }
    }
}
