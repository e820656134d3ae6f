//! One caller on the agent's socket: frames in, frames out, and what it follows.

use std::{io::ErrorKind, os::fd::AsFd, os::unix::net::UnixStream};

use carrel_proto::{
    frame::{self, Decoder, Stream},
    id::ExecId,
    message::Event,
    problem::{Code, Problem},
};
use rustix::io::{Errno, read, write};

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
    pub(crate) followers: Vec<Follower>,
    /// Whether readiness to write is being watched.
    pub(crate) waiting: bool,
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
            followers: Vec::new(),
            waiting: false,
            stalled: None,
        }
    }

    /// Reads once. `false`: the caller is gone.
    pub(crate) fn fill(&mut self) -> bool {
        match read(&self.socket, self.decoder.space()) {
            Ok(0) => false,
            Ok(count) => {
                self.decoder.filled(count);
                true
            }
            Err(Errno::AGAIN | Errno::INTR) => true,
            Err(_) => false,
        }
    }

    pub(crate) fn send(&mut self, tag: u32, event: &Event) {
        if let Err(error) = frame::put_message(&mut self.out, tag, event) {
            let problem = Problem::new(Code::TooLarge, format!("the answer does not fit a frame: {error}"));
            // A problem is small: it always fits.
            let _ = frame::put_message(&mut self.out, tag, &Event::Failed(problem));
        }
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
            match write(self.socket.as_fd(), &self.out[self.sent..]) {
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
            self.sent = 0;
        }
        true
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
