//! One caller on the agent's socket: frames in, frames out, and what it follows.

use std::{
    collections::VecDeque,
    io::{ErrorKind, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    time::Instant,
};

use carrel_graft::format::MOST_FILES;
use carrel_jail::work::receive_along;
use carrel_proto::{
    frame::{self, Decoder, Stream},
    id::ExecId,
    message::Event,
    problem::{Code, Problem},
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::{Errno, write},
    net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg},
};

/// Above this much unsent output a follower has to wait: one pipe's worth is in flight, the rest stays kept.
const HIGH_WATER: usize = 1 << 20;

/// A view on the output of one run or exec.
#[derive(Debug)]
pub(crate) struct Follower {
    pub(crate) tag: u32,
    pub(crate) exec: ExecId,
    /// Next chunk to send.
    pub(crate) next: u64,
    /// Ends at this chunk instead of with the exec.
    pub(crate) until: Option<u64>,
    /// The caller that started it: its pace is the code's pace, as with a pipe.
    pub(crate) primary: bool,
    pub(crate) cancel_on_disconnect: bool,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: UnixStream,
    pub(crate) decoder: Decoder,
    out: Vec<u8>,
    sent: usize,
    /// Has said hello.
    pub(crate) greeted: bool,
    /// When it came, until it has asked for something.
    pub(crate) arriving: Option<Instant>,
    pub(crate) followers: Vec<Follower>,
    /// Whether readiness to write is being watched.
    pub(crate) waiting: bool,
    /// Descriptors to go with the byte at that place of `out`, in order.
    files: VecDeque<(usize, OwnedFd)>,
    /// Descriptors that came from the caller, for its next request that takes some.
    pub(crate) given: Vec<OwnedFd>,
    /// Not read from at present, because this process does not take its input.
    pub(crate) stalled: Option<u32>,
}

impl Connection {
    pub(crate) fn new(socket: UnixStream) -> Self {
        Self {
            socket,
            decoder: Decoder::default(),
            out: Vec::new(),
            sent: 0,
            greeted: false,
            arriving: Some(Instant::now()),
            followers: Vec::new(),
            waiting: false,
            files: VecDeque::new(),
            given: Vec::new(),
            stalled: None,
        }
    }

    /// Reads once. `false`: the caller is gone.
    pub(crate) fn fill(&mut self) -> bool {
        match receive_along(self.socket.as_fd(), self.decoder.space(), &mut self.given) {
            Ok(0) => false,
            Ok(count) => {
                self.decoder.filled(count);
                self.given.truncate(MOST_FILES);
                true
            }
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        }
    }

    pub(crate) fn send(&mut self, tag: u32, event: &Event) {
        if let Err(error) = frame::put_message(&mut self.out, tag, event) {
            let problem = Problem::new(Code::TooLarge, format!("the answer does not fit a frame: {error}"));
            // A problem is small: it always fits.
            let _ = frame::put_message(&mut self.out, tag, &Event::Failed(problem));
        }
    }

    /// An event with a descriptor beside it.
    pub(crate) fn send_with(&mut self, tag: u32, event: &Event, file: OwnedFd) {
        self.files.push_back((self.out.len(), file));
        self.send(tag, event);
    }

    /// Whether the other end is closed, asked without reading.
    pub(crate) fn is_gone(&self) -> bool {
        let mut look = [PollFd::new(&self.socket, PollFlags::empty())];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut look, Some(&now)).is_ok() && look[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    pub(crate) fn send_chunk(&mut self, tag: u32, stream: Stream, chunk: u64, offset: u64, bytes: &[u8]) {
        // Chunks are cut to fit a frame where they are read.
        let _ = frame::put_data(&mut self.out, tag, stream, chunk, offset, bytes);
    }

    pub(crate) fn unsent(&self) -> usize {
        self.out.len() - self.sent
    }

    pub(crate) fn has_room(&self) -> bool {
        self.unsent() < HIGH_WATER
    }

    /// Writes what the socket takes. `false`: the caller is gone.
    pub(crate) fn flush(&mut self) -> bool {
        while self.sent < self.out.len() {
            match self.write_some() {
                Ok(count) => self.sent += count,
                Err(Errno::AGAIN) => break,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
            self.out.shrink_to(HIGH_WATER / 8);
        } else if self.sent > HIGH_WATER {
            self.out.drain(..self.sent);
            for (at, _) in &mut self.files {
                *at -= self.sent;
            }
            self.sent = 0;
        }
        true
    }

    /// Writes up to the next byte that has a descriptor beside it, or that byte and on with its descriptor.
    fn write_some(&mut self) -> Result<usize, Errno> {
        let Some((at, file)) = self.files.front() else {
            return write(self.socket.as_fd(), &self.out[self.sent..]);
        };
        if self.sent < *at {
            return write(self.socket.as_fd(), &self.out[self.sent..*at]);
        }
        let end = self.files.get(1).map_or(self.out.len(), |(next, _)| *next);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let files = [file.as_fd()];
        beside.push(SendAncillaryMessage::ScmRights(&files));
        let count = sendmsg(
            &self.socket,
            &[IoSlice::new(&self.out[self.sent..end])],
            &mut beside,
            SendFlags::empty(),
        )?;
        self.files.pop_front();
        Ok(count)
    }
}

/// Takes the next caller from the listening socket, if there is one.
pub(crate) fn accept(listener: &std::os::unix::net::UnixListener) -> Option<UnixStream> {
    match listener.accept() {
        Ok((socket, _)) => socket.set_nonblocking(true).is_ok().then_some(socket),
        Err(error) if error.kind() == ErrorKind::WouldBlock => None,
        Err(_) => None,
    }
}
