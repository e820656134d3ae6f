//! An interpreter: a process with a driver, its queue of calls, and the talk on its control pipes.

use std::{
    collections::VecDeque,
    io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use carrel_proto::{files::Content, guest::Language, outcome::Exception};
use rustix::io::{Errno, read, write};
use serde::{Deserialize, Serialize};

use crate::{
    sleep::inode,
    undo::{History, Spared, Unspared},
    variables::Changes,
};

/// How long an interpreter may take to say that it is ready.
const START: Duration = Duration::from_secs(30);
/// How long a process may live without its end of the control pipe: an ordinary end is over by then.
const MUTE: Duration = Duration::from_secs(2);
/// Longest line of a driver: the biggest picture. Beyond it the driver is not ours any more.
const MAX_LINE: usize = 33 << 20;
/// Output between calls that waits for the next one.
const MAX_BACKGROUND: usize = 64 << 10;

#[derive(Debug)]
pub(crate) struct Interpreter {
    pub(crate) language: Language,
    pub(crate) ready: bool,
    /// Not started, but copied from a warm parent, and never ready so far: see [`crate::copies`].
    pub(crate) unproven: bool,
    started: Instant,
    /// The driver's end of the control pipe is closed since then.
    pub(crate) mute: Option<Instant>,
    /// Its runner was told to kill it.
    pub(crate) given_up: bool,
    /// Calls that wait, by exec number.
    pub(crate) queue: VecDeque<u64>,
    /// Between two shells: a signal now would end both.
    pub(crate) renewing: bool,
    /// An interrupt was sent since the last request: the next one says so, see docs/drivers.md.
    pub(crate) interrupted: bool,
    /// It has come back from disk, perhaps not for the first time: the next request has it start its generators of random
    /// numbers anew.
    pub(crate) reseed: bool,
    pub(crate) current: Option<u64>,
    /// Started ahead of any call, and none has come: nobody knows of it. See [`crate::ready`].
    pub(crate) unasked: bool,
    /// At a call that is nobody's, by its number.
    pub(crate) warming: Option<u64>,
    /// A question for the brief that it has not answered yet.
    pub(crate) asked: Option<u64>,
    /// Changes of the session's variables that go with its next request.
    pub(crate) untold: Changes,
    pub(crate) requests: OwnedFd,
    pub(crate) unsent: Vec<u8>,
    pub(crate) replies: OwnedFd,
    line: Vec<u8>,
    /// So much of the line is known to hold no end.
    scanned: usize,
    /// Standard output and error that came while no call was under way.
    pub(crate) background: [Background; 2],
    /// The states that it can be taken back to.
    pub(crate) history: History,
}

/// An interpreter between two calls, as it is written down; see [`crate::sleep`].
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Saved {
    pub(crate) id: u32,
    language: Language,
    interrupted: bool,
    untold: Changes,
    unsent: Content,
    /// Its pipes, by their inodes.
    pub(crate) requests: u64,
    pub(crate) replies: u64,
    line: Content,
    background: [(Content, usize); 2],
    present: Option<u64>,
}

/// The newest of what came between calls, and how much was too much.
#[derive(Debug, Default)]
pub(crate) struct Background {
    bytes: Vec<u8>,
    lost: usize,
}

impl Background {
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() > MAX_BACKGROUND {
            let excess = self.bytes.len() - MAX_BACKGROUND;
            self.bytes.drain(..excess);
            self.lost += excess;
        }
    }

    pub(crate) fn take(&mut self) -> Option<Vec<u8>> {
        let Background { bytes, lost } = std::mem::take(self);
        if bytes.is_empty() {
            return None;
        }
        if lost == 0 {
            return Some(bytes);
        }
        let mut all = format!("[carrel: {lost} bytes of output between calls were not kept]\n").into_bytes();
        all.extend_from_slice(&bytes);
        Some(all)
    }
}

/// A line of a driver. User code shares the driver's process, so nothing in it is trusted.
#[derive(Debug, Deserialize)]
pub(crate) struct Reply {
    #[serde(default)]
    pub(crate) id: u64,
    #[serde(default)]
    pub(crate) ready: Option<serde::de::IgnoredAny>,
    /// bash: a fresh shell has taken over the state; see `renew`.
    #[serde(default)]
    pub(crate) renewed: Option<serde::de::IgnoredAny>,
    /// python: a spare has the state after this call.
    #[serde(default)]
    pub(crate) spare: Option<Spared>,
    /// python: no spare could be made.
    #[serde(default)]
    pub(crate) unspared: Option<Unspared>,
    /// python: a spare has taken over.
    #[serde(default)]
    pub(crate) restored: Option<Spared>,
    /// python: modules that user code has asked for.
    #[serde(default)]
    pub(crate) imports: Vec<String>,
    #[serde(default)]
    pub(crate) display: Option<Box<serde_json::value::RawValue>>,
    #[serde(default)]
    pub(crate) done: Option<Done>,
    /// What it holds: see [`crate::brief`].
    #[serde(default)]
    pub(crate) brief: Option<Box<serde_json::value::RawValue>>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Done {
    pub(crate) exit: i32,
    #[serde(default)]
    pub(crate) error: Option<Exception>,
    /// bash: the shell would have ended; a fresh one takes over when the next call comes, and must not be interrupted
    /// until it has said so.
    #[serde(default)]
    pub(crate) renew: bool,
    /// python: why the state as it is now cannot be kept by a copy.
    #[serde(default)]
    pub(crate) unspared: Option<String>,
}

/// What a read of the reply pipe brought.
#[derive(Debug)]
pub(crate) enum Heard {
    Replies(Vec<Reply>),
    /// The driver does not keep to its contract.
    Nonsense(&'static str),
    End,
}

/// What a spare that has taken over waits for.
pub(crate) fn resume(call: u64) -> Vec<u8> {
    format!("\n{{\"resume\":{call}}}\n").into_bytes()
}

impl Interpreter {
    /// Between two calls.
    pub(crate) fn saved(&self, id: u32) -> io::Result<Saved> {
        Ok(Saved {
            id,
            language: self.language,
            interrupted: self.interrupted,
            untold: self.untold.clone(),
            unsent: Content(self.unsent.clone()),
            requests: inode(&self.requests)?,
            replies: inode(&self.replies)?,
            line: Content(self.line.clone()),
            background: [0, 1].map(|stream: usize| {
                let Background { bytes, lost } = &self.background[stream];
                (Content(bytes.clone()), *lost)
            }),
            present: self.history.present(),
        })
    }

    pub(crate) fn load(saved: Saved, requests: OwnedFd, replies: OwnedFd) -> Self {
        Self {
            ready: true,
            reseed: true,
            interrupted: saved.interrupted,
            untold: saved.untold,
            line: saved.line.0,
            background: saved.background.map(|(bytes, lost)| Background { bytes: bytes.0, lost }),
            history: History::with_present(saved.present),
            ..Self::new(saved.language, requests, replies, saved.unsent.0)
        }
    }

    /// Of a copy that has come to life in a box of its own, and whether it makes a spare at once.
    pub(crate) fn grown(saved: Saved, new: Self, keeps: bool) -> Self {
        let present = saved.present.unwrap_or(0);
        let loaded = Self::load(saved, new.requests, new.replies);
        Self {
            ready: false,
            unsent: resume(present),
            line: Vec::new(),
            history: loaded.history.awaiting(keeps),
            ..loaded
        }
    }

    /// Whether its next call can begin, and there is one.
    pub(crate) fn can_begin(&self) -> bool {
        self.ready && self.current.is_none() && self.warming.is_none() && !self.queue.is_empty()
    }

    /// Whether anything is under way, or waits.
    pub(crate) fn is_at_rest(&self) -> bool {
        let silent = self.unsent.is_empty() && self.line.is_empty() && self.mute.is_none();
        let unasked = self.current.is_none() && self.warming.is_none() && self.asked.is_none();
        let awake = self.ready && !self.renewing && !self.given_up && !self.history.is_returning();
        silent && unasked && awake && self.queue.is_empty()
    }

    pub(crate) fn new(language: Language, requests: OwnedFd, replies: OwnedFd, greeting: Vec<u8>) -> Self {
        Self {
            language,
            ready: false,
            unproven: false,
            started: Instant::now(),
            mute: None,
            given_up: false,
            queue: VecDeque::new(),
            renewing: false,
            interrupted: false,
            reseed: false,
            current: None,
            unasked: false,
            warming: None,
            asked: None,
            untold: Changes::new(),
            requests,
            unsent: greeting,
            replies,
            line: Vec::new(),
            scanned: 0,
            background: Default::default(),
            history: History::default(),
        }
    }

    /// Another process has taken over: it has as long as a new one to say that it is ready.
    pub(crate) fn taken_over(&mut self) {
        self.ready = false;
        self.started = Instant::now();
        self.interrupted = false;
    }

    /// When to stop waiting for a word of it, if nothing comes.
    pub(crate) fn overdue(&self) -> Option<Instant> {
        match self.mute {
            _ if self.given_up => None,
            Some(since) => Some(since + MUTE),
            None if self.ready => None,
            None => Some(self.started + START),
        }
    }

    /// Sends what fits. `false`: there is more to send.
    pub(crate) fn flush(&mut self) -> bool {
        let mut done = 0;
        while done < self.unsent.len() {
            match write(&self.requests, &self.unsent[done..]) {
                Ok(count) => done += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // The process is ending; its runner says the rest.
                Err(_) => done = self.unsent.len(),
            }
        }
        self.unsent.drain(..done);
        self.unsent.is_empty()
    }

    pub(crate) fn hear(&mut self, scratch: &mut Vec<u8>) -> Heard {
        // Most replies are short, and fresh memory is dear.
        scratch.resize(if self.line.is_empty() { 4 << 10 } else { 64 << 10 }, 0);
        match read(&self.replies, scratch.as_mut_slice()) {
            Ok(0) => return Heard::End,
            Ok(count) => self.line.extend_from_slice(&scratch[..count]),
            Err(Errno::AGAIN | Errno::INTR) => return Heard::Replies(Vec::new()),
            Err(_) => return Heard::End,
        }
        let mut replies = Vec::new();
        let mut start = 0;
        while let Some(end) = self.line[self.scanned..].iter().position(|byte| *byte == b'\n') {
            let end = self.scanned + end;
            match serde_json::from_slice(&self.line[start..end]) {
                Ok(reply) => replies.push(reply),
                Err(_) => return Heard::Nonsense("a line that is not a reply"),
            }
            start = end + 1;
            self.scanned = start;
        }
        self.line.drain(..start);
        self.scanned = self.line.len();
        if self.line.is_empty() {
            self.line.shrink_to(64 << 10);
        }
        if self.line.len() > MAX_LINE {
            return Heard::Nonsense("a line that does not end");
        }
        Heard::Replies(replies)
    }
}
