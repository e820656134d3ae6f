//! A connection to a port inside a box, on a socket that its agent has opened and handed over.
//!
//! The agent is untrusted and may keep a copy of the socket: a copy shares the file's flags and options. So nothing rests on
//! the socket being non-blocking (every call says so for itself), on what it is (its kind is asked for), or on there being
//! exactly one of them (what is too much is closed, and is an error).

use std::{
    io::{self, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use carrel_proto::{
    message::{Event, Request},
    problem::{Code, Problem},
};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, Shutdown, SocketType,
        getpeername, ipproto, recv, recvmsg, send, shutdown,
        sockopt::{
            set_socket_linger, socket_acceptconn, socket_domain, socket_error, socket_protocol, socket_type,
        },
    },
};
use tokio::{
    io::{AsyncRead, AsyncWrite, Interest, ReadBuf},
    net::TcpStream,
    time::timeout,
};

use crate::link::{AgentLink, SHORT, lost};

/// A server in the box that is alive accepts at once; one whose queue is full may get to it.
const CONNECT: Duration = Duration::from_secs(10);
/// Descriptors taken from one message: one is right, a second shows that it is wrong. The kernel drops the rest.
const FILES: usize = 2;

/// A TCP connection into a box.
#[derive(Debug)]
pub struct PortStream(TcpStream);

/// A descriptor of somebody else's making, until it is known to be what it should be.
#[derive(Debug)]
struct Foreign(Option<OwnedFd>);

/// Whoever made a socket may have asked for a close that waits. Not a socket: then there is nothing to wait for.
fn close_at_once(socket: impl AsFd) {
    let _ = set_socket_linger(socket, None);
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.0.iter().for_each(close_at_once);
    }
}
impl Drop for PortStream {
    fn drop(&mut self) {
        close_at_once(&self.0);
    }
}

impl AgentLink {
    /// Connects to a port in the box. The line is used up.
    pub async fn dial(mut self, port: u16) -> Result<PortStream, Problem> {
        let tag = self.send(&Request::Dial { port }).await?;
        let socket =
            timeout(SHORT, self.handed_over(tag)).await.map_err(|_| lost("it does not answer"))??;
        connected(socket, port).await
    }

    async fn handed_over(&mut self, tag: u32) -> Result<OwnedFd, Problem> {
        let mut files = Vec::new();
        let event: Event = loop {
            match self.reader.decoder.peek().map_err(lost)? {
                Some(found) => {
                    let frame =
                        self.reader.decoder.take().map_err(lost)?.ok_or_else(|| lost("a frame vanished"))?;
                    if found == tag {
                        break frame.body.parse().map_err(lost)?;
                    }
                }
                None => self.fill_with_files(&mut files).await?,
            }
        };
        match event {
            Event::Dialed => {}
            Event::Failed(problem) => return Err(problem),
            _ => return Err(lost("it answers something else")),
        }
        match (files.pop(), files.pop()) {
            (Some(file), None) => check(file).map_err(lost),
            _ => Err(lost("it does not hand over one socket")),
        }
    }

    async fn fill_with_files(&mut self, files: &mut Vec<Foreign>) -> Result<(), Problem> {
        let stream = self.reader.half.as_ref();
        let decoder = &mut self.reader.decoder;
        let count = stream
            .async_io(Interest::READABLE, || Ok(receive(stream.as_fd(), decoder.space(), files)?))
            .await
            .map_err(lost)?;
        if count == 0 {
            return Err(lost("it has ended"));
        }
        if files.len() > 1 {
            return Err(lost("it hands over what nobody asked for"));
        }
        decoder.filled(count);
        Ok(())
    }
}

fn receive(stream: BorrowedFd<'_>, space: &mut [u8], files: &mut Vec<Foreign>) -> Result<usize, Errno> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES))];
    let mut beside = RecvAncillaryBuffer::new(&mut room);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let message = recvmsg(stream, &mut [IoSliceMut::new(space)], &mut beside, flags)?;
    for part in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = part {
            files.extend(given.map(|file| Foreign(Some(file))));
        }
    }
    Ok(message.bytes)
}

/// Only a TCP socket that does not listen is taken.
fn check(mut foreign: Foreign) -> Result<OwnedFd, &'static str> {
    let is_right = |file: &OwnedFd| {
        matches!(socket_domain(file), Ok(AddressFamily::INET | AddressFamily::INET6))
            && socket_type(file) == Ok(SocketType::STREAM)
            && socket_protocol(file).is_ok_and(|protocol| protocol == Some(ipproto::TCP))
            && socket_acceptconn(file) == Ok(false)
    };
    foreign.0.take_if(|file| is_right(file)).ok_or("it hands over something that is no TCP socket")
}

async fn connected(file: OwnedFd, port: u16) -> Result<PortStream, Problem> {
    let closed = |why: &dyn std::fmt::Display| {
        Problem::new(Code::PortClosed, format!("nothing answers on port {port} of this sandbox: {why}"))
            .hint("start a server first: `carrel exec -d` starts one and leaves it running")
    };
    let stream = std::net::TcpStream::from(file);
    stream.set_nonblocking(true).map_err(Problem::internal)?;
    let stream = PortStream(TcpStream::from_std(stream).map_err(Problem::internal)?);
    match timeout(CONNECT, stream.0.writable()).await {
        Err(_) => return Err(closed(&"it does not accept the connection")),
        Ok(ready) => ready.map_err(Problem::internal)?,
    }
    socket_error(&stream.0).and_then(|error| error).map_err(|error| closed(&error))?;
    getpeername(&stream.0).map_err(|error| closed(&error))?;
    Ok(stream)
}

impl AsyncRead for PortStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.0.poll_read_ready(cx))?;
            let space = buffer.initialize_unfilled();
            let read = self.0.try_io(Interest::READABLE, || {
                Ok(recv(&self.0, space, RecvFlags::DONTWAIT).map(|(count, _)| count)?)
            });
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read.map(|count| buffer.advance(count))),
            }
        }
    }
}

impl AsyncWrite for PortStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.0.poll_write_ready(cx))?;
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match self.0.try_io(Interest::WRITABLE, || Ok(send(&self.0, bytes, flags)?)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                sent => return Poll::Ready(sent),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(match shutdown(&self.0, Shutdown::Write) {
            // The other end was faster.
            Ok(()) | Err(Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        })
    }
}
