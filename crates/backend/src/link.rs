//! The engine's end of the wire: a byte stream to an agent, its own or one that a daemon passes on.
//!
//! Everything read here is untrusted. A frame that does not parse, or an agent that does not answer in time, ends this
//! link and says [`Code::AgentLost`]; nothing else is touched.

use std::{os::unix::net::SocketAddr, path::Path, time::Duration};

use carrel_proto::{
    frame::{self, Body, Decoder, Stream},
    message::{Event, PROTOCOL, Request},
    outcome::SessionState,
    problem::{Code, Problem},
};
use rustix::net::{RecvFlags, recv};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::timeout,
};

/// An agent answers a greeting at once, unless its host is drowning.
const GREETING: Duration = Duration::from_secs(10);
/// Requests that do no user's work.
pub(crate) const SHORT: Duration = Duration::from_secs(30);

/// Input in one frame.
pub const MAX_INPUT: usize = frame::MAX_DATA;

#[derive(Debug)]
pub struct AgentLink {
    pub reader: Reader,
    pub writer: Writer,
    tag: u32,
}

#[derive(Debug)]
pub struct Reader {
    pub(crate) half: OwnedReadHalf,
    pub(crate) decoder: Decoder,
    peer: Peer,
}

#[derive(Debug)]
pub struct Writer {
    half: OwnedWriteHalf,
    buffer: Vec<u8>,
    peer: Peer,
}

/// Who is at the other end, and so what it means when there is nobody any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Peer {
    Agent,
    /// It says itself when an agent is lost.
    Daemon,
}

impl Peer {
    fn lost(self, what: impl std::fmt::Display) -> Problem {
        match self {
            Peer::Agent => lost(what),
            Peer::Daemon => Problem::new(Code::Unavailable, format!("the daemon is gone: {what}"))
                .hint("the sandbox lives on, and so does what runs in a session: `carrel inspect` and `carrel logs` show it")
                .state(SessionState::Preserved),
        }
    }
}

/// One piece of an answer.
#[derive(Debug)]
pub enum Piece<'a> {
    Chunk { stream: Stream, number: u64, offset: u64, bytes: &'a [u8] },
    Event(Event),
}

pub(crate) fn lost(what: impl std::fmt::Display) -> Problem {
    Problem::new(Code::AgentLost, format!("the sandbox's agent is lost: {what}"))
        .hint("`carrel inspect` shows whether the sandbox still lives; its files are kept")
        .state(SessionState::Lost)
}

impl AgentLink {
    fn new(stream: UnixStream, peer: Peer) -> Self {
        let (reader, writer) = stream.into_split();
        Self {
            reader: Reader { half: reader, decoder: Decoder::default(), peer },
            writer: Writer { half: writer, buffer: Vec::new(), peer },
            tag: 0,
        }
    }

    /// A line that a daemon passes on to an agent it has greeted.
    pub fn through_daemon(stream: UnixStream) -> Self {
        Self::new(stream, Peer::Daemon)
    }

    /// The bare stream to an agent that has greeted back: it speaks only when it is asked, so nothing of it is lost.
    pub fn into_stream(self) -> Result<UnixStream, Problem> {
        self.reader.half.reunite(self.writer.half).map_err(Problem::internal)
    }

    /// Connects to an agent's socket and greets it.
    pub async fn connect(socket: &Path) -> Result<Self, Problem> {
        let stream = connect_any_length(socket).await.map_err(lost)?;
        let mut link = Self::new(stream, Peer::Agent);
        match timeout(GREETING, link.ask(&Request::Hello { protocol: PROTOCOL })).await {
            Ok(Ok(Event::Welcome { .. })) => Ok(link),
            Ok(Ok(_)) => Err(lost("it does not greet back")),
            Ok(Err(problem)) => Err(problem),
            Err(_) => Err(lost("it does not answer")),
        }
    }

    /// Whether the agent is there and has nothing to say.
    pub fn is_quiet(&self) -> bool {
        self.reader.peek() == Err(rustix::io::Errno::AGAIN)
    }

    /// Gives back what it holds beyond a small answer: for a line that waits for its next use.
    pub fn slim(&mut self) {
        if self.reader.decoder.is_empty() {
            self.reader.decoder = Decoder::default();
        }
        self.writer.buffer = Vec::new();
    }

    /// A request with one answer.
    pub async fn ask(&mut self, request: &Request) -> Result<Event, Problem> {
        self.ask_within(request, SHORT).await
    }

    pub async fn ask_within(&mut self, request: &Request, time: Duration) -> Result<Event, Problem> {
        let tag = self.send(request).await?;
        let answer = async {
            loop {
                if let Piece::Event(event) = self.reader.next(tag).await? {
                    return Ok(event);
                }
            }
        };
        match timeout(time, answer).await {
            Ok(Ok(Event::Failed(problem))) => Err(problem),
            Ok(answer) => answer,
            Err(_) => Err(lost("it does not answer")),
        }
    }

    /// Sends a request; its answer is read with [`Reader::next`].
    pub async fn send(&mut self, request: &Request) -> Result<u32, Problem> {
        self.tag += 1;
        self.writer.message(self.tag, request).await?;
        Ok(self.tag)
    }
}

impl AgentLink {
    /// As [`Self::send_at_once`]; the answer is passed over by whoever reads the next one.
    pub fn tell(&mut self, request: &Request) -> Result<(), Problem> {
        self.send_at_once(request).map(drop)
    }

    /// Sends a request at once, or not at all: then the line is of no use any more. Not to an agent that owes something, whose
    /// socket may be full.
    pub fn send_at_once(&mut self, request: &Request) -> Result<u32, Problem> {
        self.tag += 1;
        let Writer { half, buffer, .. } = &mut self.writer;
        buffer.clear();
        frame::put_message(buffer, self.tag, request)
            .map_err(|error| Problem::new(Code::TooLarge, error.to_string()))?;
        match half.try_write(buffer) {
            Ok(sent) if sent == buffer.len() => Ok(self.tag),
            Ok(_) => Err(lost("it does not listen")),
            Err(error) => Err(lost(error)),
        }
    }
}

impl Writer {
    pub async fn message(&mut self, tag: u32, request: &Request) -> Result<(), Problem> {
        self.buffer.clear();
        frame::put_message(&mut self.buffer, tag, request)
            .map_err(|error| Problem::new(Code::TooLarge, error.to_string()))?;
        self.half.write_all(&self.buffer).await.map_err(|error| self.peer.lost(error))
    }

    /// Input for the exec that `tag` started or attached to.
    pub async fn input(&mut self, tag: u32, bytes: &[u8]) -> Result<(), Problem> {
        self.buffer.clear();
        frame::put_data(&mut self.buffer, tag, Stream::Stdin, 0, 0, bytes)
            .map_err(|error| Problem::new(Code::TooLarge, error.to_string()))?;
        self.half.write_all(&self.buffer).await.map_err(|error| self.peer.lost(error))
    }
}

impl Reader {
    /// Of the socket itself: what the runtime knows of it may be older.
    fn peek(&self) -> rustix::io::Result<usize> {
        let socket: &UnixStream = self.half.as_ref();
        recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT).map(|(count, _)| count)
    }

    /// Whether nothing will come any more.
    pub fn is_cut(&self) -> bool {
        !matches!(self.peek(), Ok(1..) | Err(rustix::io::Errno::AGAIN))
    }

    /// Waits for the next piece for `tag`; what belongs to other tags is passed over. Safe to drop while it waits.
    pub async fn ready(&mut self, tag: u32) -> Result<(), Problem> {
        loop {
            match self.decoder.peek().map_err(lost)? {
                Some(found) if found == tag => return Ok(()),
                Some(_) => {
                    self.decoder.take().map_err(lost)?;
                }
                None => {
                    let count =
                        self.half.read(self.decoder.space()).await.map_err(|error| self.peer.lost(error))?;
                    if count == 0 {
                        return Err(self.peer.lost("it has ended"));
                    }
                    self.decoder.filled(count);
                }
            }
        }
    }

    /// The next piece for `tag`. Safe to drop while it waits.
    pub async fn next(&mut self, tag: u32) -> Result<Piece<'_>, Problem> {
        // Two steps because a frame borrows the buffer that the next read would fill.
        self.ready(tag).await?;
        let frame = self.decoder.take().map_err(lost)?.ok_or_else(|| lost("a frame vanished"))?;
        match frame.body {
            Body::Data { stream, chunk, offset, bytes } => {
                Ok(Piece::Chunk { stream, number: chunk, offset, bytes })
            }
            body @ Body::Message(_) => Ok(Piece::Event(body.parse().map_err(lost)?)),
        }
    }
}

/// A unix socket's name is at most 108 bytes, a state directory's may be longer: then by way of the descriptor of
/// its directory.
pub async fn connect_any_length(socket: &Path) -> std::io::Result<UnixStream> {
    if SocketAddr::from_pathname(socket).is_ok() {
        return UnixStream::connect(socket).await;
    }
    use std::os::fd::AsRawFd;
    let directory = std::fs::File::open(socket.parent().unwrap_or(Path::new("/")))?;
    let name = socket.file_name().unwrap_or_default();
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    UnixStream::connect(short).await
}

impl AgentLink {
    /// Puts a line together again whose halves were used apart; `tag` is the last one that was used.
    pub fn reuse(reader: Reader, writer: Writer, tag: u32) -> Self {
        Self { reader, writer, tag }
    }
}
