//! A run, exec or attach under way, as a front door sees it.

use std::time::Duration;

pub use carrel_backend::link::AgentLink;
use carrel_backend::link::{Piece, Reader, Writer};
use carrel_proto::{
    frame::Stream,
    id::{ExecId, SessionName},
    limits::INTERRUPT_GRACE,
    message::{Display, Event, Exec, ExecInfo, OpenSession, Request, Run},
    outcome::Outcome,
    problem::{Code, Problem},
};
use tokio::time::{Instant, timeout_at};

use crate::{Engine, registry::Record};

/// An agent may be this late with an end it has promised.
const LATE: Duration = Duration::from_secs(15);

/// What a call brings, in order.
#[derive(Debug)]
pub enum Output<'a> {
    Started(ExecId),
    /// Bytes of a stream. `offset` counts from the call's start: a jump is what was not kept.
    Bytes {
        stream: Stream,
        chunk: u64,
        offset: u64,
        bytes: &'a [u8],
    },
    Display(Display),
    /// The last one of an attach without follow; more will come from this chunk on.
    Paused {
        next: u64,
    },
    Finished(Outcome),
}

/// Reads what a call brings. Ends with [`Output::Finished`] or an error.
#[derive(Debug)]
pub struct Call {
    reader: Reader,
    tag: u32,
    deadline: Option<Instant>,
    pub control: Control,
}

/// Acts on a call while it is read.
#[derive(Debug)]
pub struct Control {
    writer: Writer,
    tag: u32,
    next: u32,
    exec: Option<ExecId>,
}

impl Call {
    pub async fn next(&mut self) -> Result<Output<'_>, Problem> {
        let (reader, control) = self.split();
        let output = reader.read().await?;
        if let Output::Started(exec) = &output {
            control.exec = Some(exec.clone());
        }
        Ok(output)
    }

    /// Reading and acting at the same time. The control acts on calls that have [begun](Control::has_begun) only.
    pub fn split(&mut self) -> (CallReader<'_>, &mut Control) {
        (CallReader { reader: &mut self.reader, tag: self.tag, deadline: self.deadline }, &mut self.control)
    }
}

/// One half of [`Call::split`].
#[derive(Debug)]
pub struct CallReader<'a> {
    reader: &'a mut Reader,
    tag: u32,
    deadline: Option<Instant>,
}

impl<'a> CallReader<'a> {
    /// As [`Call::next`].
    pub async fn next(&mut self) -> Result<Output<'_>, Problem> {
        CallReader { reader: self.reader, tag: self.tag, deadline: self.deadline }.read().await
    }

    async fn read(self) -> Result<Output<'a>, Problem> {
        let piece = match self.deadline {
            None => self.reader.next(self.tag).await?,
            Some(deadline) => timeout_at(deadline, self.reader.next(self.tag)).await.map_err(|_| {
                Problem::new(Code::AgentLost, "the sandbox's agent does not keep the call's time")
                    .hint("close the sandbox; its files can be copied out first")
                    .state(carrel_proto::outcome::SessionState::Lost)
            })??,
        };
        Ok(match piece {
            Piece::Chunk { stream: Stream::Display, bytes, .. } => {
                Output::Display(serde_json::from_slice(bytes).map_err(|error| {
                    Problem::new(Code::Protocol, format!("a value that does not parse: {error}"))
                })?)
            }
            Piece::Chunk { stream, number, offset, bytes } => {
                Output::Bytes { stream, chunk: number, offset, bytes }
            }
            Piece::Event(Event::Started { exec, .. }) => Output::Started(exec),
            Piece::Event(Event::Finished(outcome)) => Output::Finished(outcome),
            Piece::Event(Event::Attached { next }) => Output::Paused { next },
            Piece::Event(Event::Failed(problem)) => return Err(problem),
            Piece::Event(_) => return Err(Problem::new(Code::Protocol, "the agent answered something else")),
        })
    }
}

impl Control {
    async fn send(&mut self, request: &Request) -> Result<(), Problem> {
        self.next += 1;
        self.writer.message(self.next, request).await
    }

    fn exec(&self) -> Result<ExecId, Problem> {
        self.exec.clone().ok_or_else(|| Problem::new(Code::InvalidArgument, "the call has not begun"))
    }

    /// Whether the call has a name, so that it can be acted upon.
    pub fn has_begun(&self) -> bool {
        self.exec.is_some()
    }

    /// Interrupts; the call then ends by itself.
    pub async fn cancel(&mut self) -> Result<(), Problem> {
        let exec = self.exec()?;
        self.send(&Request::Cancel { exec }).await
    }

    pub async fn input(&mut self, bytes: &[u8]) -> Result<(), Problem> {
        self.writer.input(self.tag, bytes).await
    }

    pub async fn close_input(&mut self) -> Result<(), Problem> {
        let exec = self.exec()?;
        self.send(&Request::CloseStdin { exec }).await
    }

    pub async fn resize(&mut self, rows: u16, cols: u16) -> Result<(), Problem> {
        let exec = self.exec()?;
        self.send(&Request::Resize { exec, rows, cols }).await
    }
}

impl Engine {
    /// A line to the sandbox's agent.
    pub async fn connect(&self, record: &Record) -> Result<AgentLink, Problem> {
        AgentLink::connect(&self.backend.socket(&self.directory(&record.id))).await
    }

    /// Opens a session unless it is open. The default one opens by itself.
    pub async fn session(&self, record: &Record, open: OpenSession) -> Result<bool, Problem> {
        match self.connect(record).await?.ask(&Request::OpenSession(open)).await {
            Ok(_) => Ok(true),
            Err(problem) if problem.code == Code::SessionExists => Ok(false),
            Err(problem) => Err(problem),
        }
    }

    pub async fn close_session(&self, record: &Record, name: &SessionName) -> Result<(), Problem> {
        self.connect(record).await?.ask(&Request::CloseSession { name: name.clone() }).await.map(drop)
    }

    /// Code for an interpreter.
    pub async fn run(&self, record: &Record, run: Run) -> Result<Call, Problem> {
        let link = self.connect(record).await?;
        start_run(link, run).await
    }

    /// A command. A detached one is answered with its id alone: see [`Engine::start`].
    pub async fn exec(&self, record: &Record, exec: Exec) -> Result<Call, Problem> {
        let exec = Exec { detach: false, ..exec };
        let time = exec.timeout_ms;
        begin(self.connect(record).await?, Request::Exec(exec), time, None).await
    }

    /// Starts a command and leaves it alone.
    pub async fn start(&self, record: &Record, exec: Exec) -> Result<ExecId, Problem> {
        let exec = Exec { detach: true, ..exec };
        match self.connect(record).await?.ask(&Request::Exec(exec)).await? {
            Event::Started { exec, .. } => Ok(exec),
            _ => Err(Problem::new(Code::Protocol, "the agent did not start the command")),
        }
    }

    /// What a run or exec printed, from chunk `since` on.
    pub async fn attach(
        &self,
        record: &Record,
        exec: &ExecId,
        since: u64,
        follow: bool,
    ) -> Result<Call, Problem> {
        let request = Request::Attach { exec: exec.clone(), since, follow };
        begin(self.connect(record).await?, request, None, Some(exec.clone())).await
    }

    /// The outcome, once there is one, or `None` when the time is over.
    pub async fn wait(
        &self,
        record: &Record,
        exec: &ExecId,
        time: Duration,
    ) -> Result<Option<Outcome>, Problem> {
        let timeout_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let request = Request::Wait { exec: exec.clone(), timeout_ms };
        match self.connect(record).await?.ask_within(&request, time + LATE).await? {
            Event::Waited { outcome } => Ok(outcome),
            _ => Err(Problem::new(Code::Protocol, "the agent did not wait")),
        }
    }

    pub async fn signal(&self, record: &Record, exec: &ExecId, signal: i32) -> Result<(), Problem> {
        let request = Request::Signal { exec: exec.clone(), signal };
        self.connect(record).await?.ask(&request).await.map(drop)
    }

    pub async fn cancel(&self, record: &Record, exec: &ExecId) -> Result<(), Problem> {
        self.connect(record).await?.ask(&Request::Cancel { exec: exec.clone() }).await.map(drop)
    }

    pub async fn execs(&self, record: &Record) -> Result<Vec<ExecInfo>, Problem> {
        match self.connect(record).await?.ask(&Request::Execs).await? {
            Event::Execs { execs } => Ok(execs),
            _ => Err(Problem::new(Code::Protocol, "the agent did not list its execs")),
        }
    }
}

/// Starts a run on a line that is already there: what a caller with many calls does.
pub async fn start_run(link: AgentLink, run: Run) -> Result<Call, Problem> {
    let time = run.timeout_ms;
    begin(link, Request::Run(run), Some(time), None).await
}

async fn begin(
    mut link: AgentLink,
    request: Request,
    time_ms: Option<u64>,
    exec: Option<ExecId>,
) -> Result<Call, Problem> {
    let tag = link.send(&request).await?;
    // Queues of an interpreter are the agent's business, so only what nothing waits before can have a hard end here.
    let deadline = match &request {
        Request::Exec(_) => {
            time_ms.map(|millis| Instant::now() + Duration::from_millis(millis) + INTERRUPT_GRACE + LATE)
        }
        _ => None,
    };
    let AgentLink { reader, writer, .. } = link;
    Ok(Call { reader, tag, deadline, control: Control { writer, tag, next: tag, exec } })
}

impl Call {
    /// The line, for the next call. Only after [`Output::Finished`].
    pub fn into_link(self) -> AgentLink {
        AgentLink::reuse(self.reader, self.control.writer, self.control.next)
    }
}
