//! Acting on an exec from any connection, not only the one that started it.

use carrel_backend::link::MAX_INPUT;
use carrel_proto::{files::Content, id::ExecId, message::Request, problem::Problem};

use crate::{Engine, registry::Record};

impl Engine {
    /// Gives an exec input. Comes back when all of it is on its way; a command that does not read makes it wait, and at
    /// last fail with `busy`. The message of a failure says how much was taken, if anything was.
    pub async fn write_stdin(&self, record: &Record, exec: &ExecId, bytes: &[u8]) -> Result<(), Problem> {
        // Nothing is a question, too: whether input would be taken.
        let pieces: Vec<&[u8]> =
            if bytes.is_empty() { vec![bytes] } else { bytes.chunks(MAX_INPUT).collect() };
        for (at, piece) in pieces.into_iter().enumerate() {
            let request = Request::WriteStdin { exec: exec.clone(), data: Content(piece.to_vec()) };
            self.ask(record, &request).await.map_err(|mut problem| {
                if at > 0 {
                    let (taken, all) = (at * MAX_INPUT, bytes.len());
                    problem.message = format!("{}; {taken} of {all} bytes were taken", problem.message);
                }
                problem
            })?;
        }
        Ok(())
    }

    /// The end of an exec's input.
    pub async fn close_stdin(&self, record: &Record, exec: &ExecId) -> Result<(), Problem> {
        self.ask(record, &Request::CloseStdin { exec: exec.clone() }).await.map(drop)
    }

    /// Another size for an exec's terminal.
    pub async fn resize(&self, record: &Record, exec: &ExecId, rows: u16, cols: u16) -> Result<(), Problem> {
        self.ask(record, &Request::Resize { exec: exec.clone(), rows, cols }).await.map(drop)
    }
}
