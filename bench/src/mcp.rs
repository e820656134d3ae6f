//! The MCP door as a client meets it: a raw client over the program's own pipes, and one over HTTP.

use std::{
    collections::HashMap,
    io::{BufRead, BufReader, Read, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use carrel_proto::problem::{Code, Problem};
use serde_json::{Value, json};

/// The newest protocol, which needs no handshake.
const VERSION: &str = "2026-07-28";

fn failed(what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::Internal, format!("the MCP server: {what}"))
}

/// The program beside this one, built if need be.
pub(crate) fn program() -> Result<PathBuf, Problem> {
    let own = std::env::current_exe().map_err(failed)?;
    let path = own.with_file_name("carrel");
    let built = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--release", "--package", "carrel"])
        .status();
    match built {
        Ok(status) if status.success() && path.exists() => Ok(path),
        _ => Err(failed("cannot be built")),
    }
}

/// Warm calls are measured without copies of the interpreter; what those cost has rows of its own.
const UNDO: (&str, &str) = ("CARREL_SESSION_UNDO_CALLS", "0");

/// A server on pipes.
pub(crate) struct Pipes {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    id: u64,
}

impl Pipes {
    /// Starts it; the time is until `initialize` is answered.
    pub(crate) fn start(program: &Path, state: &Path) -> Result<(Self, Duration), Problem> {
        let begun = Instant::now();
        let mut child = Command::new(program)
            .arg("--state")
            .arg(state)
            .arg("mcp")
            .env(UNDO.0, UNDO.1)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let input = child.stdin.take().ok_or_else(|| failed("has no stdin"))?;
        let output = BufReader::new(child.stdout.take().ok_or_else(|| failed("has no stdout"))?);
        let mut server = Self { child, input, output, id: 0 };
        let client = json!({"name": "bench", "version": "1"});
        server.ask(
            "initialize",
            &json!({"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}),
        )?;
        let time = begun.elapsed();
        let ready = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
        writeln!(server.input, "{ready}").map_err(failed)?;
        Ok((server, time))
    }

    fn send(&mut self, method: &str, params: &Value) -> Result<(), Problem> {
        self.id += 1;
        let request = json!({"jsonrpc": "2.0", "id": self.id, "method": method, "params": params});
        self.input.write_all(format!("{request}\n").as_bytes()).map_err(failed)
    }

    fn receive(&mut self) -> Result<Value, Problem> {
        let mut line = String::new();
        if self.output.read_line(&mut line).map_err(failed)? == 0 {
            return Err(failed("has ended"));
        }
        serde_json::from_str(&line).map_err(failed)
    }

    fn ask(&mut self, method: &str, params: &Value) -> Result<Value, Problem> {
        self.send(method, params)?;
        loop {
            let answer = self.receive()?;
            if answer["id"] == self.id {
                return Ok(answer);
            }
        }
    }

    /// One python call; the time is the client's.
    pub(crate) fn run(&mut self, session: &str) -> Result<Duration, Problem> {
        self.run_in(session, "python", "6*7")
    }

    pub(crate) fn run_in(
        &mut self,
        session: &str,
        environment: &str,
        code: &str,
    ) -> Result<Duration, Problem> {
        let begun = Instant::now();
        let answer = self.ask("tools/call", &call(session, environment, code))?;
        check(&answer)?;
        Ok(begun.elapsed())
    }

    /// One python call in each of these sessions, so many under way at a time; each one's time.
    pub(crate) fn together(
        &mut self,
        sessions: &[String],
        ways: usize,
        code: &str,
    ) -> Result<Vec<Duration>, Problem> {
        let mut waiting = sessions.iter();
        let (mut begun, mut times) = (HashMap::new(), Vec::new());
        while times.len() < sessions.len() {
            while begun.len() < ways.max(1)
                && let Some(session) = waiting.next()
            {
                begun.insert(self.id + 1, Instant::now());
                self.send("tools/call", &call(session, "python", code))?;
            }
            let answer = self.receive()?;
            if let Some(start) = answer["id"].as_u64().and_then(|id| begun.remove(&id)) {
                check(&answer)?;
                times.push(start.elapsed());
            }
        }
        Ok(times)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Pipes {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn call(session: &str, environment: &str, code: &str) -> Value {
    json!({"name": "run", "arguments": {"code": code, "env": environment, "session": session}})
}

fn check(answer: &Value) -> Result<(), Problem> {
    match answer["result"]["content"][0]["text"].as_str() {
        // A shell's output ends with its line.
        Some(text) if text.trim_end() == "42" => Ok(()),
        _ => Err(failed(format!("answered {answer}"))),
    }
}

/// A server on a port, and a connection to it that stays open.
pub(crate) struct Http {
    /// None: another connection's.
    child: Option<Child>,
    stream: BufReader<TcpStream>,
    used: Instant,
    host: String,
}

/// A server may close a connection that nobody uses.
const FRESH: Duration = Duration::from_secs(2);

impl Http {
    pub(crate) fn start(program: &Path, state: &Path) -> Result<Self, Problem> {
        let mut child = Command::new(program)
            .arg("--state")
            .arg(state)
            .args(["mcp", "--http", "127.0.0.1:0", "--insecure-no-auth"])
            .env(UNDO.0, UNDO.1)
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let mut words = BufReader::new(child.stderr.take().ok_or_else(|| failed("has no stderr"))?);
        let host = loop {
            let mut line = String::new();
            if words.read_line(&mut line).map_err(failed)? == 0 {
                return Err(failed("did not begin to listen"));
            }
            if let Some((_, rest)) = line.split_once("http://") {
                break rest.split('/').next().unwrap_or_default().to_owned();
            }
        };
        // What it has to say later must go somewhere: a server that cannot write to its stderr answers nobody.
        std::thread::spawn(move || drop(std::io::copy(&mut words, &mut std::io::sink())));
        Self::connect(host, Some(child))
    }

    fn connect(host: String, child: Option<Child>) -> Result<Self, Problem> {
        let stream = TcpStream::connect(&host).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(Self { child, stream: BufReader::new(stream), used: Instant::now(), host })
    }

    /// Another connection to the same server, which must not outlive this one.
    pub(crate) fn another(&self) -> Result<Self, Problem> {
        Self::connect(self.host.clone(), None)
    }

    /// Another connection in place of this one, if it has not been used for a while.
    pub(crate) fn renew(&mut self) -> Result<(), Problem> {
        if self.used.elapsed() > FRESH {
            // Swapped, because what is left of the other has an end of its own; no server ends with it.
            let mut other = self.another()?;
            std::mem::swap(&mut self.stream, &mut other.stream);
        }
        self.used = Instant::now();
        Ok(())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().map_or(0, Child::id)
    }

    pub(crate) fn run(&mut self, session: &str) -> Result<Duration, Problem> {
        self.run_in(session, "python", "6*7")
    }

    pub(crate) fn run_in(
        &mut self,
        session: &str,
        environment: &str,
        code: &str,
    ) -> Result<Duration, Problem> {
        let begun = Instant::now();
        let mut params = call(session, environment, code);
        params["_meta"] = json!({
            "io.modelcontextprotocol/protocolVersion": VERSION,
            "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        });
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}).to_string();
        let request = format!(
            "POST /mcp HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\n\
             Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: {VERSION}\r\n\
             Mcp-Method: tools/call\r\nMcp-Name: run\r\nContent-Length: {}\r\n\r\n{body}",
            self.host,
            body.len()
        );
        self.stream.get_mut().write_all(request.as_bytes()).map_err(failed)?;
        let text = self.body()?;
        // JSON as it is, or the data line of the last event.
        let json = text.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap_or(&text);
        check(&serde_json::from_str(json).map_err(|error| failed(format!("{error}: {text}")))?)?;
        Ok(begun.elapsed())
    }

    fn line(&mut self) -> Result<String, Problem> {
        let mut line = String::new();
        self.stream.read_line(&mut line).map_err(failed)?;
        Ok(line.trim_end().to_owned())
    }

    fn body(&mut self) -> Result<String, Problem> {
        let mut length = None;
        loop {
            let line = self.line()?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            if let Some(text) = line.strip_prefix("content-length: ") {
                length = text.parse::<usize>().ok();
            }
        }
        let mut body = Vec::new();
        if let Some(length) = length {
            body.resize(length, 0);
            self.stream.read_exact(&mut body).map_err(failed)?;
        } else {
            loop {
                let size = usize::from_str_radix(&self.line()?, 16).map_err(failed)?;
                let mut chunk = vec![0; size];
                self.stream.read_exact(&mut chunk).map_err(failed)?;
                self.line()?;
                if size == 0 {
                    break;
                }
                body.extend(chunk);
            }
        }
        String::from_utf8(body).map_err(failed)
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
