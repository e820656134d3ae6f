//! How messages become bytes.
//!
//! ```text
//! u32 LE  length of what follows      at most MAX_FRAME
//! u8      kind                        0 message (JSON), 1 data
//! u32 LE  tag                         the request this belongs to
//! …       payload
//! ```
//! The payload of a data frame is `u8 stream, u64 LE chunk number, u64 LE offset in the stream, bytes`.

use serde::{Serialize, de::DeserializeOwned};

/// Largest frame: a message with the biggest picture (32 MiB as base64) and its wrapping.
pub const MAX_FRAME: usize = 48 << 20;
/// Largest piece of output or input in one data frame: fits a pipe's buffer after `F_SETPIPE_SZ`.
pub const MAX_DATA: usize = 256 << 10;

const HEADER: usize = 4;
const PREFIX: usize = 5;
const DATA_PREFIX: usize = 17;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    Stdin,
    Stdout,
    Stderr,
    /// Both outputs of a terminal.
    Pty,
    /// A value or a picture, as JSON: [`crate::message::Display`].
    Display,
}

impl Stream {
    pub fn code(self) -> u8 {
        match self {
            Stream::Stdin => 0,
            Stream::Stdout => 1,
            Stream::Stderr => 2,
            Stream::Pty => 3,
            Stream::Display => 4,
        }
    }
    pub fn from_code(code: u8) -> Option<Self> {
        [Stream::Stdin, Stream::Stdout, Stream::Stderr, Stream::Pty, Stream::Display]
            .into_iter()
            .find(|stream| stream.code() == code)
    }
}

/// One frame, borrowed from the decoder's buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    pub tag: u32,
    pub body: Body<'a>,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Body<'a> {
    Message(&'a [u8]),
    Data { stream: Stream, chunk: u64, offset: u64, bytes: &'a [u8] },
}

impl Body<'_> {
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, FrameError> {
        match self {
            Body::Message(json) => {
                serde_json::from_slice(json).map_err(|error| FrameError::Json(error.to_string()))
            }
            Body::Data { .. } => Err(FrameError::Json("a data frame where a message was due".into())),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame of {0} bytes is larger than allowed")]
    TooLarge(usize),
    #[error("a frame of {0} bytes is too short")]
    TooShort(usize),
    #[error("unknown frame kind {0}")]
    Kind(u8),
    #[error("unknown stream {0}")]
    Stream(u8),
    #[error("message does not parse: {0}")]
    Json(String),
}

/// Appends a message frame.
pub fn put_message<T: Serialize>(out: &mut Vec<u8>, tag: u32, message: &T) -> Result<(), FrameError> {
    let start = out.len();
    out.extend_from_slice(&[0; HEADER]);
    out.push(0);
    out.extend_from_slice(&tag.to_le_bytes());
    serde_json::to_writer(&mut *out, message).map_err(|error| FrameError::Json(error.to_string()))?;
    close(out, start)
}

/// Appends a data frame.
pub fn put_data(
    out: &mut Vec<u8>,
    tag: u32,
    stream: Stream,
    chunk: u64,
    offset: u64,
    bytes: &[u8],
) -> Result<(), FrameError> {
    let start = out.len();
    out.reserve(HEADER + PREFIX + DATA_PREFIX + bytes.len());
    out.extend_from_slice(&[0; HEADER]);
    out.push(1);
    out.extend_from_slice(&tag.to_le_bytes());
    out.push(stream.code());
    out.extend_from_slice(&chunk.to_le_bytes());
    out.extend_from_slice(&offset.to_le_bytes());
    out.extend_from_slice(bytes);
    close(out, start)
}

/// Writes the length into the header, or takes the frame back when it is too large.
fn close(out: &mut Vec<u8>, start: usize) -> Result<(), FrameError> {
    let length = out.len() - start - HEADER;
    match u32::try_from(length) {
        Ok(short) if length <= MAX_FRAME => {
            out[start..start + HEADER].copy_from_slice(&short.to_le_bytes());
            Ok(())
        }
        _ => {
            out.truncate(start);
            Err(FrameError::TooLarge(length))
        }
    }
}

/// Cuts a byte stream into frames. Feed it with [`Decoder::space`] and [`Decoder::filled`].
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// More has come at once than a few short lines.
    busy: bool,
}

/// What one read asks for: a pipe's worth.
const READ: usize = 64 << 10;
/// What the first reads ask for: most connections only ever say a few short lines, and fresh memory is dear.
const FIRST_READ: usize = 4 << 10;

impl Decoder {
    /// Room for the next read. Grows only to the size of a frame whose header was checked.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            // A large frame's buffer is given back once it is used up.
            if self.buffer.len() > 4 * READ {
                self.buffer = Vec::new();
            }
        }
        let pending = self.pending_length();
        self.busy |= pending.is_some_and(|length| HEADER + length > FIRST_READ);
        if !self.busy {
            self.buffer.resize(FIRST_READ, 0);
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            return &mut self.buffer[self.end..];
        }
        let want = pending.map_or(READ, |length| (HEADER + length).max(READ));
        if self.buffer.len() < self.start + want || self.buffer.len() - self.end < READ / 2 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            if self.buffer.len() < want + READ / 2 {
                self.buffer.resize(want + READ / 2, 0);
            }
        }
        &mut self.buffer[self.end..]
    }

    /// Whether nothing waits in it.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// `count` bytes were written to [`Decoder::space`].
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.buffer.len());
        self.busy |= self.end == self.buffer.len();
    }

    fn pending_length(&self) -> Option<usize> {
        let header = self.buffer[self.start..self.end].first_chunk::<HEADER>()?;
        let length = u32::from_le_bytes(*header) as usize;
        (length <= MAX_FRAME).then_some(length)
    }

    /// The tag of the next frame, once all of it is there.
    pub fn peek(&self) -> Result<Option<u32>, FrameError> {
        let waiting = &self.buffer[self.start..self.end];
        let Some(header) = waiting.first_chunk::<HEADER>() else { return Ok(None) };
        let length = u32::from_le_bytes(*header) as usize;
        if length > MAX_FRAME {
            return Err(FrameError::TooLarge(length));
        }
        if length < PREFIX {
            return Err(FrameError::TooShort(length));
        }
        match waiting.get(HEADER..HEADER + length) {
            Some([_, a, b, c, d, ..]) => Ok(Some(u32::from_le_bytes([*a, *b, *c, *d]))),
            _ => Ok(None),
        }
    }

    /// The next whole frame, if there is one.
    pub fn take(&mut self) -> Result<Option<Frame<'_>>, FrameError> {
        if self.peek()?.is_none() {
            return Ok(None);
        }
        let length = self.pending_length().unwrap_or_default();
        let frame = &self.buffer[self.start + HEADER..self.start + HEADER + length];
        self.start += HEADER + length;
        parse(frame).map(Some)
    }
}

fn parse(frame: &[u8]) -> Result<Frame<'_>, FrameError> {
    let too_short = || FrameError::TooShort(frame.len());
    let (prefix, payload) = frame.split_first_chunk::<PREFIX>().ok_or_else(too_short)?;
    let [kind, tag @ ..] = *prefix;
    let body = match kind {
        0 => Body::Message(payload),
        1 => {
            let (head, bytes) = payload.split_first_chunk::<DATA_PREFIX>().ok_or_else(too_short)?;
            let [stream, numbers @ ..] = head;
            let mut words = numbers.chunks_exact(8).map(|word| {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(word);
                u64::from_le_bytes(bytes)
            });
            Body::Data {
                stream: Stream::from_code(*stream).ok_or(FrameError::Stream(*stream))?,
                chunk: words.next().ok_or_else(too_short)?,
                offset: words.next().ok_or_else(too_short)?,
                bytes,
            }
        }
        other => return Err(FrameError::Kind(other)),
    };
    Ok(Frame { tag: u32::from_le_bytes(tag), body })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::message::{Event, Request};

    fn feed(decoder: &mut Decoder, mut bytes: &[u8], step: usize) -> Result<Vec<(u32, Vec<u8>)>, FrameError> {
        let mut frames = Vec::new();
        while !bytes.is_empty() {
            let space = decoder.space();
            let count = step.min(bytes.len()).min(space.len());
            space[..count].copy_from_slice(&bytes[..count]);
            decoder.filled(count);
            bytes = &bytes[count..];
            while let Some(frame) = decoder.take()? {
                let body = match frame.body {
                    Body::Message(json) => json.to_vec(),
                    Body::Data { bytes, .. } => bytes.to_vec(),
                };
                frames.push((frame.tag, body));
            }
        }
        Ok(frames)
    }

    proptest! {
        #[test]
        fn any_cut_of_the_stream_gives_the_same_frames(
            parts in proptest::collection::vec((any::<u32>(), proptest::collection::vec(any::<u8>(), 0..100_000)), 1..6),
            step in 1usize..200_000,
        ) {
            let mut wire = Vec::new();
            for (tag, bytes) in &parts {
                put_data(&mut wire, *tag, Stream::Stdout, 1, 2, bytes).unwrap();
            }
            let frames = feed(&mut Decoder::default(), &wire, step).unwrap();
            prop_assert_eq!(frames, parts);
        }

        #[test]
        fn garbage_never_panics_and_never_allocates_what_it_claims(
            bytes in proptest::collection::vec(any::<u8>(), 0..4096), step in 1usize..64,
        ) {
            let mut decoder = Decoder::default();
            let _ = feed(&mut decoder, &bytes, step);
            prop_assert!(decoder.buffer.len() <= MAX_FRAME + 2 * READ);
        }

        #[test]
        fn garbage_messages_are_errors(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let body = Body::Message(&bytes);
            let _ = body.parse::<Request>();
            let _ = body.parse::<Event>();
        }
    }

    #[test]
    fn a_huge_length_is_refused_before_anything_is_allocated() {
        let mut decoder = Decoder::default();
        assert_eq!(
            feed(&mut decoder, &u32::MAX.to_le_bytes(), 4),
            Err(FrameError::TooLarge(u32::MAX as usize))
        );
        assert!(decoder.buffer.len() <= 4 * READ);
    }

    #[test]
    fn messages_round_trip() {
        let mut wire = Vec::new();
        let request = Request::Hello { protocol: 1 };
        put_message(&mut wire, 9, &request).unwrap();
        let mut decoder = Decoder::default();
        decoder.space()[..wire.len()].copy_from_slice(&wire);
        decoder.filled(wire.len());
        let frame = decoder.take().unwrap().unwrap();
        assert_eq!(frame.tag, 9);
        assert_eq!(frame.body.parse::<Request>().unwrap(), request);
    }
}
