//! A run, exec or attach under way, as a front door sees it.

use std::time::Duration;

pub use carrel_backend::link::AgentLink;
use carrel_backend::link::{Piece, Reader, Writer};
use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::{ExecId, SessionName},
    message::{Display, Event, Exec, ExecInfo, OpenSession, Request, Run},
    outcome::{FilesState, Outcome},
    problem::{Code, Problem},
};

use crate::{
    Engine,
    patience::{Lifeline, Patience},
    registry::Record,
};

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
    /// A value, in its place among the chunks of output.
    Display {
        chunk: u64,
        display: Display,
    },
    /// The last one of an attach without follow; more will come from this chunk on.
    Paused {
        next: u64,
    },
    Finished(Outcome),
}

/// What taking back has brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Undone {
    pub language: Language,
    /// So many calls were taken back.
    pub calls: u32,
    /// So many more can be.
    pub kept: usize,
    /// Sockets, pipes and the like that were open then and are not.
    pub closed_handles: u32,
    pub files_state: FilesState,
    /// Why files did not go back.
    pub files_reason: Option<String>,
}

/// Reads what a call brings. Ends with [`Output::Finished`] or an error.
#[derive(Debug)]
pub struct Call {
    reader: Reader,
    tag: u32,
    patience: Patience,
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
        let reader = CallReader { reader: &mut self.reader, tag: self.tag, patience: &mut self.patience };
        (reader, &mut self.control)
    }
}

/// One half of [`Call::split`].
#[derive(Debug)]
pub struct CallReader<'a> {
    reader: &'a mut Reader,
    tag: u32,
    patience: &'a mut Patience,
}

impl<'a> CallReader<'a> {
    /// As [`Call::next`].
    pub async fn next(&mut self) -> Result<Output<'_>, Problem> {
        CallReader { reader: self.reader, tag: self.tag, patience: self.patience }.read().await
    }

    async fn read(self) -> Result<Output<'a>, Problem> {
        self.patience.wait(self.reader, self.tag).await?;
        let piece = self.reader.next(self.tag).await?;
        Ok(match piece {
            Piece::Chunk { stream: Stream::Display, number, bytes, .. } => {
                let display = serde_json::from_slice(bytes).map_err(|error| {
                    Problem::new(Code::Protocol, format!("a value that does not parse: {error}"))
                })?;
                Output::Display { chunk: number, display }
            }
            Piece::Chunk { stream, number, offset, bytes } => {
                Output::Bytes { stream, chunk: number, offset, bytes }
            }
            Piece::Event(Event::Started { exec, .. }) => {
                self.patience.exec = Some(exec.clone());
                Output::Started(exec)
            }
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

    /// The call's name, once it has one.
    pub fn name(&self) -> Option<&ExecId> {
        self.exec.as_ref()
    }

    /// For whoever reads by way of [`Call::split`]: the call has a name now.
    pub fn begun(&mut self, exec: ExecId) {
        self.exec = Some(exec);
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
        self.lifeline(record).connect().await
    }

    /// Looks whether an agent that owes an answer still lives, and ends it if it hangs. One that sleeps is left alone.
    pub async fn look_after(&self, record: &Record) -> Result<(), Problem> {
        self.lifeline(record).look().await.map(drop)
    }

    fn lifeline(&self, record: &Record) -> Lifeline {
        let socket = self.backend.socket(&self.directory(&record.id));
        Lifeline { engine: self.clone(), id: record.id.clone(), placed: record.placed.clone(), socket }
    }

    /// A request with one answer.
    pub(crate) async fn ask(&self, record: &Record, request: &Request) -> Result<Event, Problem> {
        self.lifeline(record).ask(request, Duration::ZERO).await
    }

    async fn begin(&self, record: &Record, request: Request) -> Result<Call, Problem> {
        let lifeline = self.lifeline(record);
        // At once, because its agent may be frozen; what does not fit is not run.
        if let Some(mut link) = self.lines.take(&record.id)
            && let Ok(tag) = link.send_at_once(&request)
        {
            let mut call = begun(link, tag, &request, Some(lifeline.clone()));
            call.patience.look_soon();
            // Nobody has looked since its last call whether the sandbox still runs.
            if !self.registry.sleeps(&record.id)? {
                return Ok(call);
            }
            let woken = Box::pin(lifeline.wake()).await;
            // Unless it was written to disk: whoever did that saw to it that no call was there.
            if !call.reader.is_cut() {
                return Ok(call);
            }
            woken?;
        }
        // Boxed: large, and part of every call.
        let link = Box::pin(lifeline.connect()).await?;
        begin(link, &request, Some(lifeline)).await
    }

    /// Opens a session unless it is open. The default one opens by itself.
    pub async fn session(&self, record: &Record, open: OpenSession) -> Result<bool, Problem> {
        match self.ask(record, &Request::OpenSession(open)).await {
            Ok(_) => Ok(true),
            Err(problem) if problem.code == Code::SessionExists => Ok(false),
            Err(problem) => Err(problem),
        }
    }

    /// Makes sure that a session is open which nothing is asked of but its name.
    pub async fn ensure_session(&self, record: &Record, name: &SessionName) -> Result<(), Problem> {
        if *name != SessionName::main() {
            let open = OpenSession { name: name.clone(), ..OpenSession::default() };
            self.session(record, open).await?;
        }
        Ok(())
    }

    pub async fn close_session(&self, record: &Record, name: &SessionName) -> Result<(), Problem> {
        self.ask(record, &Request::CloseSession { name: name.clone() }).await.map(drop)
    }

    /// Code for an interpreter.
    pub async fn run(&self, record: &Record, run: Run) -> Result<Call, Problem> {
        self.begin(record, Request::Run(run)).await
    }

    /// A command. A detached one is answered with its id alone: see [`Engine::start`].
    pub async fn exec(&self, record: &Record, exec: Exec) -> Result<Call, Problem> {
        self.begin(record, Request::Exec(Exec { detach: false, ..exec })).await
    }

    /// Starts a command and leaves it alone.
    pub async fn start(&self, record: &Record, exec: Exec) -> Result<ExecId, Problem> {
        let exec = Exec { detach: true, ..exec };
        match self.ask(record, &Request::Exec(exec)).await? {
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
        self.begin(record, Request::Attach { exec: exec.clone(), since, follow }).await
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
        match self.lifeline(record).ask(&request, time).await? {
            Event::Waited { outcome } => Ok(outcome),
            _ => Err(Problem::new(Code::Protocol, "the agent did not wait")),
        }
    }

    /// Takes back the last calls of a session's interpreter: of the one that ran last, unless a language is named.
    pub async fn undo(
        &self,
        record: &Record,
        session: &SessionName,
        language: Option<Language>,
        calls: u32,
    ) -> Result<Undone, Problem> {
        let request = Request::Undo { session: session.clone(), language, calls };
        match self.ask(record, &request).await? {
            Event::Undone { language, calls, kept, closed_handles, files_state, files_reason } => {
                Ok(Undone { language, calls, kept, closed_handles, files_state, files_reason })
            }
            _ => Err(Problem::new(Code::Protocol, "the agent did not take anything back")),
        }
    }

    pub async fn signal(&self, record: &Record, exec: &ExecId, signal: i32) -> Result<(), Problem> {
        let request = Request::Signal { exec: exec.clone(), signal };
        self.ask(record, &request).await.map(drop)
    }

    pub async fn cancel(&self, record: &Record, exec: &ExecId) -> Result<(), Problem> {
        self.ask(record, &Request::Cancel { exec: exec.clone() }).await.map(drop)
    }

    pub async fn execs(&self, record: &Record) -> Result<Vec<ExecInfo>, Problem> {
        match self.ask(record, &Request::Execs).await? {
            Event::Execs { execs } => Ok(execs),
            _ => Err(Problem::new(Code::Protocol, "the agent did not list its execs")),
        }
    }
}

/// Begins a call on a line of the caller's own. It waits for as long as the line lives.
pub async fn begin_on(link: AgentLink, request: Request) -> Result<Call, Problem> {
    begin(link, &request, None).await
}

async fn begin(mut link: AgentLink, request: &Request, lifeline: Option<Lifeline>) -> Result<Call, Problem> {
    let tag = link.send(request).await?;
    Ok(begun(link, tag, request, lifeline))
}

fn begun(link: AgentLink, tag: u32, request: &Request, lifeline: Option<Lifeline>) -> Call {
    let patience = Patience::new(request, lifeline);
    let AgentLink { reader, writer, .. } = link;
    let exec = patience.exec.clone();
    Call { reader, tag, patience, control: Control { writer, tag, next: tag, exec } }
}

impl Call {
    /// Leaves the line to the next call in this sandbox. Only after [`Output::Finished`], and of a call without input of its own:
    /// what was not taken would be in the next one's way.
    pub fn end(self) {
        if let Some((engine, id)) = self.patience.of() {
            engine.lines.keep(id, AgentLink::reuse(self.reader, self.control.writer, self.control.next));
        }
    }
}
