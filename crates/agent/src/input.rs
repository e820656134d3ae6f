//! Input for an exec from callers that did not start it.
//!
//! A write is taken as a whole: it waits while the process is behind with its input, in the order in which writes came, and
//! is refused if that takes too long. So a caller always knows whether its bytes are on their way.

use std::time::{Duration, Instant};

use carrel_proto::{
    frame::MAX_DATA,
    id::ExecId,
    message::Event,
    problem::{Code, Problem},
};

use crate::serve::Agent;

/// Less than the engine waits for an answer.
const PATIENCE: Duration = Duration::from_secs(20);

/// Input that waits for room.
#[derive(Debug)]
pub(crate) struct Write {
    pub(crate) connection: u32,
    tag: u32,
    exec: u64,
    process: u32,
    bytes: Vec<u8>,
    pub(crate) deadline: Instant,
}

fn ended(exec: &ExecId) -> Problem {
    Problem::new(Code::ExecEnded, format!("`{exec}` has ended"))
}

impl Agent {
    pub(crate) fn write_stdin(
        &mut self,
        caller: u32,
        tag: u32,
        exec: &ExecId,
        bytes: Vec<u8>,
    ) -> Result<Option<Event>, Problem> {
        if bytes.len() > MAX_DATA {
            let word = format!("{} bytes of input at once; the most is {MAX_DATA}", bytes.len());
            return Err(Problem::new(Code::TooLarge, word));
        }
        let number = self.find(exec)?;
        if self.execs[&number].outcome().is_some() {
            return Err(ended(exec));
        }
        let id = self.live(exec)?.0;
        let behind = self.writes.iter().any(|write| write.process == id);
        let (_, process) = self.live(exec)?;
        let Some(input) = process.stdin.as_mut().filter(|input| !input.closing) else {
            let word = format!("`{exec}` takes no input: it was started without, or its input was closed");
            return Err(
                Problem::new(Code::InvalidArgument, word).hint("start it with `stdin` or on a terminal")
            );
        };
        if input.is_full() || behind {
            let deadline = Instant::now() + PATIENCE;
            self.writes.push_back(Write {
                connection: caller,
                tag,
                exec: number,
                process: id,
                bytes,
                deadline,
            });
            return Ok(None);
        }
        input.add(&bytes);
        self.feed(id);
        Ok(Some(Event::Done))
    }

    /// Takes input that has waited, as far as there is room for it now.
    pub(crate) fn take_writes(&mut self, id: u32) {
        let mut taken = false;
        while let Some(at) = self.writes.iter().position(|write| write.process == id) {
            let input = self.processes.get_mut(&id).and_then(|process| process.stdin.as_mut());
            let answer = match input.filter(|input| !input.closing) {
                Some(input) if input.is_full() => break,
                Some(input) => {
                    input.add(&self.writes[at].bytes);
                    taken = true;
                    Event::Done
                }
                None => Event::Failed(ended(&ExecId::numbered(self.writes[at].exec))),
            };
            if let Some(write) = self.writes.remove(at) {
                self.reply(write.connection, write.tag, &answer);
            }
        }
        if taken {
            self.feed(id);
        }
    }

    /// Nobody will read what waits for this exec.
    pub(crate) fn refuse_writes(&mut self, exec: u64) {
        while let Some(at) = self.writes.iter().position(|write| write.exec == exec) {
            if let Some(write) = self.writes.remove(at) {
                let problem = ended(&ExecId::numbered(exec));
                self.reply(write.connection, write.tag, &Event::Failed(problem));
            }
        }
    }

    /// Refuses input that has waited too long.
    pub(crate) fn expire_writes(&mut self, now: Instant) {
        while let Some(at) = self.writes.iter().position(|write| write.deadline <= now) {
            if let Some(write) = self.writes.remove(at) {
                let exec = ExecId::numbered(write.exec);
                let problem = Problem::new(Code::Busy, format!("`{exec}` does not read its input"))
                    .hint("nothing of this input was taken; try again when the command reads on");
                self.reply(write.connection, write.tag, &Event::Failed(problem));
            }
        }
    }
}
