//! A call's output for `--json`.

use carrel_api::kept::Kept;
use carrel_proto::{frame::Stream, id::ExecId, message::Display, problem::Problem};

use crate::stream::Sink;

#[derive(Debug)]
pub(crate) struct Transcript {
    pub(crate) exec: Option<ExecId>,
    pub(crate) stdout: Kept,
    pub(crate) stderr: Kept,
    pub(crate) results: Vec<Display>,
}

impl Transcript {
    pub(crate) fn new(most: u64) -> Self {
        Self { exec: None, stdout: Kept::new(most), stderr: Kept::new(most), results: Vec::new() }
    }
}

impl Sink for Transcript {
    fn bytes(&mut self, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        match stream {
            Stream::Stderr => self.stderr.add(offset, bytes),
            _ => self.stdout.add(offset, bytes),
        }
        Ok(())
    }

    fn display(&mut self, display: Display) -> Result<(), Problem> {
        self.results.push(display);
        Ok(())
    }

    fn started(&mut self, exec: &ExecId) {
        self.exec = Some(exec.clone());
    }
}
