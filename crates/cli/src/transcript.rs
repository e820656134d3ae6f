//! A call's output for `--json`.

use carrel_api::reply::Transcript;
use carrel_proto::{frame::Stream, id::ExecId, message::Display, problem::Problem};

use crate::stream::Sink;

impl Sink for Transcript {
    fn bytes(&mut self, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Problem> {
        self.bytes(stream, offset, bytes);
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
