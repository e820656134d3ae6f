//! A plain HTTP/1.1 client on one connection, with no mind of its own: what it sends and gets is what is on the wire.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

use serde_json::Value;

/// A daemon that is silent for this long is stuck.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(crate) struct Client {
    stream: BufReader<UnixStream>,
    token: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

/// One server-sent event.
#[derive(Debug, Clone)]
pub(crate) struct Event {
    pub(crate) name: String,
    pub(crate) data: Value,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// Expects a status and gives the body.
    #[track_caller]
    pub(crate) fn with(self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", String::from_utf8_lossy(&self.body));
        if self.body.is_empty() { Value::Null } else { self.json() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl Client {
    pub(crate) fn connect(socket: &Path) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Self { stream: BufReader::new(stream), token: None })
    }

    pub(crate) fn with_token(mut self, token: &str) -> Self {
        self.token = Some(token.to_owned());
        self
    }

    pub(crate) fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<()> {
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n", body.len());
        if let Some(token) = &self.token {
            head += &format!("authorization: Bearer {token}\r\n");
        }
        for (name, value) in headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "\r\n";
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(body);
        self.stream.get_mut().write_all(&bytes)
    }

    pub(crate) fn send_raw(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes)
    }

    /// A request with a whole answer.
    pub(crate) fn ask(&mut self, method: &str, path: &str, body: &[u8]) -> io::Result<Answer> {
        self.ask_with(method, path, &[], body)
    }

    pub(crate) fn ask_with(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Answer> {
        self.send(method, path, headers, body)?;
        if method != "HEAD" {
            return self.answer();
        }
        // It says how long a body would be, and has none.
        let (status, headers) = self.head()?;
        Ok(Answer { status, headers, body: Vec::new() })
    }

    /// The whole answer to what was sent.
    pub(crate) fn answer(&mut self) -> io::Result<Answer> {
        let (status, headers) = self.head()?;
        let mut body = Vec::new();
        self.body(status, &headers, |piece| body.extend_from_slice(piece))?;
        Ok(Answer { status, headers, body })
    }

    /// Whether the daemon closes the connection before it says anything, and before that time is over.
    pub(crate) fn hangs_up_within(&mut self, time: Duration) -> io::Result<bool> {
        self.stream.get_ref().set_read_timeout(Some(time))?;
        let ended = match self.stream.fill_buf() {
            Ok(said) => Ok(said.is_empty()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        };
        self.stream.get_ref().set_read_timeout(Some(PATIENCE))?;
        ended
    }

    pub(crate) fn get(&mut self, path: &str) -> io::Result<Answer> {
        self.ask("GET", path, b"")
    }

    pub(crate) fn post(&mut self, path: &str, body: &Value) -> io::Result<Answer> {
        self.ask("POST", path, body.to_string().as_bytes())
    }

    /// A request answered with events, all of them.
    pub(crate) fn events(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> io::Result<Vec<Event>> {
        self.send(method, path, headers, body)?;
        let (status, headers) = self.head()?;
        let mut text = Vec::new();
        self.body(status, &headers, |piece| text.extend_from_slice(piece))?;
        if status != 200 {
            return Err(io::Error::other(format!("{status}: {}", String::from_utf8_lossy(&text))));
        }
        Ok(parse(&String::from_utf8(text).map_err(io::Error::other)?))
    }

    pub(crate) fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    }

    pub(crate) fn head(&mut self) -> io::Result<(u16, Vec<(String, String)>)> {
        let line = self.line()?;
        let status = line.split(' ').nth(1).and_then(|word| word.parse().ok());
        let status = status.ok_or_else(|| io::Error::other(format!("no status: {line}")))?;
        let mut headers = Vec::new();
        loop {
            let line = self.line()?;
            if line.is_empty() {
                return Ok((status, headers));
            }
            if let Some((name, value)) = line.split_once(':') {
                headers.push((name.to_ascii_lowercase(), value.trim().to_owned()));
            }
        }
    }

    fn body(
        &mut self,
        status: u16,
        headers: &[(String, String)],
        mut take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let value = |name: &str| headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str());
        if status == 204 || status == 304 {
            return Ok(());
        }
        if let Some(length) = value("content-length") {
            let mut body = vec![0; length.parse().map_err(io::Error::other)?];
            self.stream.read_exact(&mut body)?;
            take(&body);
            return Ok(());
        }
        while let Some(piece) = self.piece()? {
            take(&piece);
        }
        Ok(())
    }

    /// The next piece of a chunked body; `None` at its end.
    pub(crate) fn piece(&mut self) -> io::Result<Option<Vec<u8>>> {
        let size = usize::from_str_radix(&self.line()?, 16).map_err(io::Error::other)?;
        let mut chunk = vec![0; size];
        self.stream.read_exact(&mut chunk)?;
        self.line()?;
        Ok((size > 0).then_some(chunk))
    }
}

pub(crate) fn parse(text: &str) -> Vec<Event> {
    let mut events = Vec::new();
    for block in text.split("\n\n").filter(|block| block.contains("data: ")) {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let data = field("data: ").unwrap_or_default();
        events.push(Event {
            name: field("event: ").unwrap_or_default(),
            data: serde_json::from_str(&data).unwrap_or_else(|error| panic!("{error}: {block}")),
        });
    }
    events
}
