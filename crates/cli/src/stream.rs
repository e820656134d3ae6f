//! A call under way: its output to a [`Sink`], the user's input and signals to the call.
//!
//! Reading and writing go on at the same time, because a command that does not read its input must not keep us from
//! reading its output, nor the other way round.

use std::{io::Read, pin::pin};

use carrel_engine::call::{Call, Output as Piece};
use carrel_proto::{
    frame::Stream,
    id::ExecId,
    message::Display,
    outcome::Outcome,
    problem::{Code, Problem},
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
};

use crate::{signals::Interrupts, terminal};

/// A pipe's own capacity.
const INPUT_CHUNK: usize = 64 << 10;
/// Chunks of input read ahead: enough to keep both sides busy.
const INPUT_AHEAD: usize = 4;

/// Where a call's output goes.
pub(crate) trait Sink {
    fn bytes(&mut self, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Problem>;
    fn display(&mut self, display: Display) -> Result<(), Problem>;
    fn started(&mut self, _exec: &ExecId) {}
    /// Nothing more comes.
    fn ended(&mut self) -> Result<(), Problem> {
        Ok(())
    }
    /// Nobody reads any more.
    fn closed(&self) -> bool {
        false
    }
}

/// What goes to the call.
#[derive(Debug, Default)]
pub(crate) struct Input {
    bytes: Option<mpsc::Receiver<Vec<u8>>>,
    resizes: Option<Signal>,
}

impl Input {
    /// This process's stdin. A thread reads it, since not every kind of stdin can be waited for; it ends with the
    /// process.
    pub(crate) fn stdin(mut self) -> Result<Self, Problem> {
        let (send, receive) = mpsc::channel(INPUT_AHEAD);
        let read = move || {
            let mut stdin = std::io::stdin().lock();
            loop {
                let mut chunk = vec![0; INPUT_CHUNK];
                match stdin.read(&mut chunk) {
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Ok(0) | Err(_) => break,
                    Ok(count) => {
                        chunk.truncate(count);
                        if send.blocking_send(chunk).is_err() {
                            break;
                        }
                    }
                }
            }
        };
        std::thread::Builder::new().name("stdin".into()).spawn(read).map_err(Problem::internal)?;
        self.bytes = Some(receive);
        Ok(self)
    }

    /// Changes of the terminal's size.
    pub(crate) fn resizes(mut self) -> Result<Self, Problem> {
        self.resizes = Some(signal(SignalKind::window_change()).map_err(Problem::internal)?);
        Ok(self)
    }
}

/// What an interrupt means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSignal {
    /// Cancel the call and wait for its end; the second one leaves.
    Cancel,
    /// Leave at once; the call goes on.
    Leave,
}

#[derive(Debug)]
pub(crate) enum End {
    Finished(Box<Outcome>),
    /// More will come from this chunk on.
    Paused(u64),
    /// Left before the end, because of this signal.
    Left(i32),
}

/// Reads a call to its end.
pub(crate) async fn pump(
    mut call: Call,
    sink: &mut impl Sink,
    input: Input,
    interrupts: &mut Interrupts,
    on_signal: OnSignal,
) -> Result<End, Problem> {
    let end = Pumping { call: &mut call, input }.run(sink, interrupts, on_signal).await;
    sink.ended()?;
    end
}

struct Pumping<'a> {
    call: &'a mut Call,
    input: Input,
}

enum Step<'a> {
    Signal(i32),
    Fed(Problem),
    Piece(Piece<'a>),
}

impl Pumping<'_> {
    async fn run(
        &mut self,
        sink: &mut impl Sink,
        interrupts: &mut Interrupts,
        on_signal: OnSignal,
    ) -> Result<End, Problem> {
        // A call takes input and signals once it has a name.
        while !self.call.control.has_begun() {
            let step = tokio::select! {
                biased;
                signal = interrupts.next() => return Ok(End::Left(signal)),
                piece = self.call.next() => piece?,
            };
            if let Some(end) = take(step, sink)? {
                return Ok(end);
            }
        }
        let (mut reader, control) = self.call.split();
        let (cancel, mut cancelled) = mpsc::channel::<()>(1);
        let Input { bytes, resizes } = &mut self.input;
        let feed = async {
            loop {
                tokio::select! {
                    biased;
                    Some(()) = cancelled.recv() => control.cancel().await?,
                    () = resized(resizes) => {
                        let size = terminal::size();
                        control.resize(size.rows, size.cols).await?;
                    }
                    chunk = next_chunk(bytes) => match chunk {
                        Some(chunk) => control.input(&chunk).await?,
                        None => {
                            *bytes = None;
                            control.close_input().await?;
                        }
                    },
                }
            }
        };
        let mut feed = pin!(feed);
        let (mut fed, mut leaving) = (false, false);
        loop {
            let step = tokio::select! {
                biased;
                signal = interrupts.next() => Step::Signal(signal),
                problem = &mut feed, if !fed => match problem {
                    Ok(never) => never,
                    Err(problem) => Step::Fed(problem),
                },
                piece = reader.next() => Step::Piece(piece?),
            };
            match step {
                Step::Signal(signal) if leaving || on_signal == OnSignal::Leave => {
                    return Ok(End::Left(signal));
                }
                Step::Signal(_) => {
                    leaving = true;
                    let _ = cancel.try_send(());
                }
                // The agent or the daemon has hung up; what was said before is still to be read.
                Step::Fed(problem) if matches!(problem.code, Code::AgentLost | Code::Unavailable) => {
                    fed = true
                }
                Step::Fed(problem) => return Err(problem),
                Step::Piece(piece) => {
                    if let Some(end) = take(piece, sink)? {
                        return Ok(end);
                    }
                }
            }
            if sink.closed() && !leaving {
                if on_signal == OnSignal::Leave {
                    return Ok(End::Left(crate::signals::PIPE));
                }
                leaving = true;
                let _ = cancel.try_send(());
            }
        }
    }
}

fn take(piece: Piece<'_>, sink: &mut impl Sink) -> Result<Option<End>, Problem> {
    match piece {
        Piece::Started(exec) => sink.started(&exec),
        Piece::Bytes { stream, offset, bytes, .. } => sink.bytes(stream, offset, bytes)?,
        Piece::Display { display, .. } => sink.display(display)?,
        Piece::Paused { next } => return Ok(Some(End::Paused(next))),
        Piece::Finished(outcome) => return Ok(Some(End::Finished(Box::new(outcome)))),
    }
    Ok(None)
}

async fn next_chunk(bytes: &mut Option<mpsc::Receiver<Vec<u8>>>) -> Option<Vec<u8>> {
    match bytes {
        Some(bytes) => bytes.recv().await,
        None => std::future::pending().await,
    }
}

async fn resized(resizes: &mut Option<Signal>) {
    if let Some(resizes) = resizes
        && resizes.recv().await.is_some()
    {
        return;
    }
    std::future::pending().await
}
