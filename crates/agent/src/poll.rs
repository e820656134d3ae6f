//! Readiness: what the agent sleeps on.

use std::{os::fd::AsFd, time::Duration};

use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    fd::OwnedFd,
    io,
};

/// Who has become ready. Numbers are never used twice, so an event for something gone is seen as such.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    Listener,
    Connection(u32),
    /// A runner's word about its process.
    Runner(u32),
    Stdout(u32),
    Stderr(u32),
    /// Room in a process's input.
    Stdin(u32),
    /// A driver's replies.
    Replies(u32),
    /// Room for a driver's requests.
    Requests(u32),
}

impl Token {
    fn pack(self) -> u64 {
        let (kind, number) = match self {
            Token::Listener => (0u64, 0),
            Token::Connection(n) => (1, n),
            Token::Runner(n) => (2, n),
            Token::Stdout(n) => (3, n),
            Token::Stderr(n) => (4, n),
            Token::Stdin(n) => (5, n),
            Token::Replies(n) => (6, n),
            Token::Requests(n) => (7, n),
        };
        kind << 32 | u64::from(number)
    }

    fn unpack(packed: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is the number")]
        let number = packed as u32;
        match packed >> 32 {
            1 => Token::Connection(number),
            2 => Token::Runner(number),
            3 => Token::Stdout(number),
            4 => Token::Stderr(number),
            5 => Token::Stdin(number),
            6 => Token::Replies(number),
            7 => Token::Requests(number),
            _ => Token::Listener,
        }
    }
}

pub(crate) struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

/// Events taken at once: more than a busy box has descriptors ready.
const BATCH: usize = 64;

impl Poller {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, events: Vec::with_capacity(BATCH) })
    }

    pub(crate) fn readable(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), epoll::EventFlags::IN)
    }

    /// Waits for room instead of content.
    pub(crate) fn writable(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), epoll::EventFlags::OUT)
    }

    pub(crate) fn change(&self, fd: impl AsFd, token: Token, read: bool, write: bool) -> io::Result<()> {
        let mut flags = epoll::EventFlags::empty();
        flags.set(epoll::EventFlags::IN, read);
        flags.set(epoll::EventFlags::OUT, write);
        epoll::modify(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)
    }

    pub(crate) fn forget(&self, fd: impl AsFd) {
        // Not registered (any more) is as good.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Sleeps until something is ready or `timeout` is over.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<Vec<Token>> {
        self.events.clear();
        let timeout = timeout.map(|time| Timespec {
            tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: time.subsec_nanos().into(),
        });
        match epoll::wait(&self.epoll, spare_capacity(&mut self.events), timeout.as_ref()) {
            Ok(_) | Err(io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        Ok(self.events.iter().map(|event| Token::unpack(event.data.u64())).collect())
    }
}
