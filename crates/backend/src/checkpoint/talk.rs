//! A line to the agent of a box that is written, copied or brought back.

use std::{
    fs::File,
    io::{ErrorKind, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::UnixStream,
    },
    path::Path,
    time::Duration,
};

use carrel_jail::work::send_along;
use carrel_proto::{
    frame::{self, Decoder},
    message::{Event, PROTOCOL, Request},
    problem::Problem,
};

use crate::link::lost;

/// An agent that prepares starts its stubs anew; each takes a few milliseconds.
const ANSWER: Duration = Duration::from_secs(60);

/// A conversation with an agent, from a thread that may wait.
pub(crate) struct Talk {
    pub(super) stream: UnixStream,
    decoder: Decoder,
    tag: u32,
}

impl Talk {
    pub(crate) fn open(socket: &Path) -> Result<Self, Problem> {
        use std::os::fd::AsRawFd;
        // A unix socket's name is short, a state directory's may not be.
        let directory = File::open(socket.parent().unwrap_or(Path::new("/"))).map_err(lost)?;
        let name = socket.file_name().unwrap_or_default();
        let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
        let stream = UnixStream::connect(short).map_err(lost)?;
        stream.set_read_timeout(Some(ANSWER)).map_err(lost)?;
        let mut talk = Self { stream, decoder: Decoder::default(), tag: 0 };
        talk.ask(&Request::Hello { protocol: PROTOCOL })?;
        Ok(talk)
    }

    /// The line once more, for whoever holds on to it.
    pub(crate) fn hold(&self) -> Result<UnixStream, Problem> {
        self.stream.try_clone().map_err(lost)
    }

    pub(crate) fn ask(&mut self, request: &Request) -> Result<Event, Problem> {
        self.ask_with(request, &[])
    }

    /// With descriptors beside it.
    pub(crate) fn ask_with(&mut self, request: &Request, files: &[BorrowedFd<'_>]) -> Result<Event, Problem> {
        self.tag += 1;
        let mut bytes = Vec::new();
        frame::put_message(&mut bytes, self.tag, request).map_err(Problem::internal)?;
        send_along(self.stream.as_fd(), &bytes, files).map_err(lost)?;
        loop {
            if let Some(frame) = self.decoder.take().map_err(lost)? {
                if frame.tag != self.tag {
                    continue;
                }
                return match frame.body.parse().map_err(lost)? {
                    Event::Failed(problem) => Err(problem),
                    event => Ok(event),
                };
            }
            let count = match self.stream.read(self.decoder.space()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                read => read.map_err(lost)?,
            };
            if count == 0 {
                return Err(lost("it has ended"));
            }
            self.decoder.filled(count);
        }
    }
}
