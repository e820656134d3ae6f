//! Between clients, who are slow, and files, which block: short queues, and threads only where one is kept busy.

use std::{
    io::{self, Read, Write},
    time::{Duration, Instant},
};

use axum::body::{Body, Bytes};
use carrel_files::Scratch;
use carrel_proto::problem::{Code, Problem};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{super::problem::Refusal, blocking};
pub(super) use crate::rest::extract::piece as next;

/// Bytes that go to or from a file at once: large beside the cost of a thread's turn, small beside memory.
pub(super) const PIECE: usize = 256 << 10;
/// Pieces on their way to a client or from one.
const AHEAD: usize = 2;
/// Pieces of an archive, which are small.
const ARCHIVE_PIECE: usize = 64 << 10;
const ARCHIVE_AHEAD: usize = 4;
/// A body as a whole in a file without a name, and its length. Holds no thread while its client takes its time.
pub(super) async fn spool(
    mut body: Body,
    mut scratch: Scratch,
    most: u64,
) -> Result<(Scratch, u64), Refusal> {
    let mut total = 0;
    let mut ended = false;
    while !ended {
        let (mut pieces, mut gathered) = (Vec::new(), 0);
        while gathered < PIECE {
            let Some(bytes) = next(&mut body).await? else {
                ended = true;
                break;
            };
            gathered += bytes.len();
            pieces.push(bytes);
        }
        total += gathered as u64;
        if total > most {
            return Err(too_large(most).into());
        }
        scratch =
            blocking(move || pieces.iter().try_for_each(|bytes| scratch.write_all(bytes)).map(|()| scratch))
                .await?
                .map_err(|error| {
                    carrel_files::FileError::from_io(&carrel_proto::files::GuestPath::root(), error)
                })?;
    }
    Ok((scratch, total))
}

pub(super) fn too_large(most: u64) -> Problem {
    Problem::new(Code::TooLarge, format!("the body has more than {most} bytes"))
        .hint("the sandbox's disk limit is the bound: raise it, or send less")
}

/// `length` bytes of a file from where it stands. A file that ends before breaks the answer off: its head promised more.
pub(super) fn file(mut file: std::fs::File, length: u64) -> Body {
    let (sender, receiver) = mpsc::channel::<io::Result<Bytes>>(AHEAD);
    tokio::spawn(async move {
        let mut left = length;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
            // A place in the queue first: nothing is read for a client that is not there to take it.
            let Ok(place) = sender.reserve().await else { return };
            let read = blocking(move || {
                let mut buffer = vec![0; wanted];
                file.read_exact(&mut buffer).map(|()| (file, buffer))
            });
            match read.await {
                Ok(Ok((same, buffer))) => {
                    file = same;
                    left -= wanted as u64;
                    place.send(Ok(buffer.into()));
                }
                Ok(Err(error)) => return place.send(Err(error)),
                Err(problem) => return place.send(Err(io::Error::other(problem.message))),
            }
        }
    });
    Body::from_stream(ReceiverStream::new(receiver))
}

/// Where a thread writes what a client reads.
#[derive(Debug)]
pub(in crate::rest) struct Outlet {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buffer: Vec<u8>,
    until: Instant,
}

/// For so long at most: the thread waits for the client.
pub(in crate::rest) fn outlet(longest: Duration) -> (Outlet, Body) {
    let (sender, receiver) = mpsc::channel(ARCHIVE_AHEAD);
    let outlet =
        Outlet { sender, buffer: Vec::with_capacity(ARCHIVE_PIECE), until: Instant::now() + longest };
    (outlet, Body::from_stream(ReceiverStream::new(receiver)))
}

impl Outlet {
    /// Ends the answer as broken.
    pub(in crate::rest) fn fail(&self, why: String) {
        // A client that is gone does not mind.
        let _ = self.sender.blocking_send(Err(io::Error::other(why)));
    }
}

impl Write for Outlet {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(ARCHIVE_PIECE - self.buffer.len());
        self.buffer.extend_from_slice(&bytes[..taken]);
        if self.buffer.len() == ARCHIVE_PIECE {
            self.flush()?;
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        if Instant::now() > self.until {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long to be taken"));
        }
        let full = std::mem::replace(&mut self.buffer, Vec::with_capacity(ARCHIVE_PIECE));
        self.sender.blocking_send(Ok(full.into())).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

/// Has a thread read a body as it comes; gives back what came of it, and what is left of the body.
pub(in crate::rest) async fn feed<T: Send + 'static>(
    mut body: Body,
    work: impl FnOnce(Inlet) -> T + Send + 'static,
) -> Result<(T, Body), Refusal> {
    let (sender, inlet) = inlet();
    let mut working = std::pin::pin!(blocking(move || work(inlet)));
    loop {
        let piece = tokio::select! {
            biased;
            done = &mut working => return Ok((done?, body)),
            piece = next(&mut body) => piece,
        };
        // Its own end of the line is dropped with the error: what is half there is nothing to work with.
        let piece = piece?;
        let ended = piece.is_none();
        if sender.send(piece).await.is_err() || ended {
            return Ok((working.await?, body));
        }
    }
}

/// Where a thread reads what a client sends.
#[derive(Debug)]
pub(in crate::rest) struct Inlet {
    receiver: mpsc::Receiver<Option<Bytes>>,
    current: Bytes,
    ended: bool,
}

/// The other end: `None` is the end of the body. An end that never comes is none.
fn inlet() -> (mpsc::Sender<Option<Bytes>>, Inlet) {
    let (sender, receiver) = mpsc::channel(ARCHIVE_AHEAD);
    (sender, Inlet { receiver, current: Bytes::new(), ended: false })
}

impl Read for Inlet {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.current.is_empty() && !self.ended {
            match self.receiver.blocking_recv() {
                Some(Some(bytes)) => self.current = bytes,
                Some(None) => self.ended = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let taken = buffer.len().min(self.current.len());
        buffer[..taken].copy_from_slice(&self.current.split_to(taken));
        Ok(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_that_nobody_takes_in_time_breaks_off() {
        let (mut outlet, _body) = outlet(Duration::ZERO);
        let error = outlet.write_all(&vec![0; ARCHIVE_PIECE]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
