//! A sandbox's line: an upgraded connection on which the command line speaks to an agent as if it had connected itself.
//!
//! Bytes are passed on as they are, in both directions and at the slower side's pace. On the way the frames are looked at, so that
//! runs and execs are noted like everybody's, and so that the caller is told which of three things has ended: its call, the agent
//! (the daemon says so for every request that has no answer), or the daemon (silence).

use std::{
    collections::BTreeMap,
    io,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::{Request, State},
    response::Response,
};
use carrel_engine::Record;
use carrel_proto::{
    frame::{Body, Decoder, put_message},
    guest::Language,
    id::{ExecId, SessionName},
    message::Event,
    outcome::SessionState,
    problem::{Code, Problem},
};
use serde::Deserialize;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::UnixStream,
};

use super::{
    Daemon, desk::LINE_UPGRADE, extract::SandboxPath, guard::Caller, problem::Refusal, run::Following,
    turnstile::Room, upgrade,
};

/// A pipe's worth.
const PIECE: usize = 64 << 10;
/// Requests under way on one line: a call and what is done to it meanwhile.
const MOST_OPEN: usize = 1024;
/// An agent that says nothing for this long while something is asked of it is greeted, and ended if it hangs.
const LOOK: Duration = Duration::from_secs(10);
/// A call that ends this soon after the daemon was told to stop is still answered.
const DRAIN: Duration = Duration::from_secs(4);

pub(super) async fn line(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut request: Request,
) -> Result<Response, Refusal> {
    upgrade::local_operator(&caller)?;
    let (upgrade, response) = upgrade::agree(&mut request, LINE_UPGRADE)?;
    let record = daemon.record(&caller, &id)?;
    let agent = daemon.engine.connect(&record).await?.into_stream()?;
    let line = Line { record, caller: caller.name().to_owned(), open: Mutex::default() };
    let passing = Arc::clone(&daemon);
    daemon.tasks.spawn(async move {
        match upgrade::stream(upgrade).await {
            Ok(client) => line.pass(&passing, client, agent).await,
            Err(problem) => tracing::debug!("a line: {problem}"),
        }
    });
    Ok(response)
}

/// Who asked for what on this line, and has no last answer yet.
#[derive(Debug)]
struct Line {
    record: Record,
    caller: String,
    open: Mutex<BTreeMap<u32, Open>>,
}

#[derive(Debug)]
struct Open {
    /// Of a run or exec.
    call: Option<(SessionName, Option<Language>)>,
    exec: Option<ExecId>,
}

/// As much of a request as is looked at; its code is not.
#[derive(Debug, Deserialize)]
struct Head {
    op: String,
    #[serde(default)]
    session: Option<SessionName>,
    #[serde(default)]
    language: Option<Language>,
}

/// The agent has said something, and whether the client has it.
#[derive(Debug, Default)]
struct Heard {
    notify: tokio::sync::Notify,
    passing: AtomicBool,
}

impl Heard {
    fn passed(&self) {
        self.passing.store(false, Ordering::Relaxed);
        self.notify.notify_one();
    }
}

/// What ended a line.
enum End {
    Client,
    Agent(io::Error),
    Stop,
}

fn broken(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

impl Line {
    fn open(&self) -> std::sync::MutexGuard<'_, BTreeMap<u32, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn pass(self, daemon: &Arc<Daemon>, client: impl AsyncRead + AsyncWrite, agent: UnixStream) {
        let (mut from_client, mut to_client) = tokio::io::split(client);
        let (mut from_agent, mut to_agent) = agent.into_split();
        let heard = Heard::default();
        let end = tokio::select! {
            end = async {
                // Whatever breaks on the client's side, it is the client that is gone.
                match forward(&mut from_client, &mut to_agent, |tag, body| self.asked(tag, body), || ()).await {
                    Ok(()) | Err(Broken::Reading(_)) => End::Client,
                    Err(Broken::Writing(error)) => End::Agent(error),
                }
            } => end,
            end = async {
                let look = |tag, body: &Body<'_>| {
                    heard.passing.store(true, Ordering::Relaxed);
                    self.answered(daemon, tag, body)
                };
                match forward(&mut from_agent, &mut to_client, look, || heard.passed()).await {
                    Ok(()) => End::Agent(broken("it has ended")),
                    Err(Broken::Reading(error)) => End::Agent(error),
                    Err(Broken::Writing(_)) => End::Client,
                }
            } => end,
            () = self.watch(daemon, &heard) => End::Stop,
        };
        match end {
            End::Client => self.left(daemon),
            End::Agent(error) => {
                self.lost(daemon);
                // What it still had to say was passed on before its end was seen.
                let _ = self.fail(&mut to_client, &lost(&error)).await;
            }
            End::Stop => {
                let _ = self.fail(&mut to_client, &stopping()).await;
            }
        }
        let _ = to_client.shutdown().await;
    }

    /// Looks after a silent agent. Ends when the daemon does, a little later if a call is under way.
    async fn watch(&self, daemon: &Daemon, heard: &Heard) {
        loop {
            tokio::select! {
                () = daemon.stop.cancelled() => break,
                () = heard.notify.notified() => {}
                () = tokio::time::sleep(LOOK) => {
                    if !self.open().is_empty() {
                        // One that hangs is ended by this, and then its stream ends too.
                        let _ = Box::pin(daemon.engine.look_after(&self.record)).await;
                    }
                }
            }
        }
        let drained = async {
            while heard.passing.load(Ordering::Relaxed) || !self.open().is_empty() {
                heard.notify.notified().await;
            }
        };
        let _ = tokio::time::timeout(DRAIN, drained).await;
    }

    /// A frame of the client's.
    fn asked(&self, tag: u32, body: &Body<'_>) -> io::Result<()> {
        let Body::Message(json) = body else { return Ok(()) };
        let head: Head = serde_json::from_slice(json).map_err(broken)?;
        let mut open = self.open();
        if open.len() >= MOST_OPEN {
            return Err(broken("too many requests are under way"));
        }
        let is_call = matches!(head.op.as_str(), "run" | "exec");
        let call = head.session.filter(|_| is_call).map(|session| (session, head.language));
        open.insert(tag, Open { call, exec: None });
        Ok(())
    }

    /// A frame of the agent's.
    fn answered(&self, daemon: &Arc<Daemon>, tag: u32, body: &Body<'_>) -> io::Result<()> {
        if !matches!(body, Body::Message(_)) {
            return Ok(());
        }
        let event: Event = body.parse().map_err(broken)?;
        let mut open = self.open();
        let Some(asked) = open.get_mut(&tag) else { return Ok(()) };
        match (&event, &asked.call) {
            (Event::Started { exec, .. }, Some((session, language))) => {
                daemon.note_started(&self.record, session, *language, exec, &self.caller);
                asked.exec = Some(exec.clone());
            }
            (Event::Finished(outcome), Some((session, language))) => {
                daemon.note_finished(&self.record, session, *language, outcome, &self.caller);
            }
            _ => {}
        }
        if event.is_last() {
            let asked = open.remove(&tag);
            drop(open);
            // A detached exec goes on, and its end is nobody's answer.
            if let (Event::Started { .. }, Some(asked)) = (&event, asked) {
                self.follow(daemon, asked);
            }
        }
        Ok(())
    }

    /// The client is gone: its calls may go on, and their ends are noted.
    fn left(&self, daemon: &Arc<Daemon>) {
        for (_, asked) in std::mem::take(&mut *self.open()) {
            self.follow(daemon, asked);
        }
    }

    fn follow(&self, daemon: &Arc<Daemon>, asked: Open) {
        let (Some((session, language)), Some(exec)) = (asked.call, asked.exec) else { return };
        let following = Following {
            record: self.record.clone(),
            session,
            language,
            note: None,
            daemon: Arc::clone(daemon),
            caller: self.caller.clone(),
            room: Room::default(),
        };
        // Its end is the sandbox's business, and no reason for the daemon to stay.
        daemon.tasks.spawn(async move { following.watch(&exec).await });
    }

    /// The agent is gone, and so are the calls that it had.
    fn lost(&self, daemon: &Daemon) {
        for asked in self.open().values() {
            if let (Some((session, language)), Some(exec)) = (&asked.call, &asked.exec) {
                daemon.note_lost(&self.record, session, *language, exec, &self.caller, Code::AgentLost);
            }
        }
    }

    /// Says the same to everybody who waits for an answer.
    async fn fail(&self, to: &mut (impl AsyncWrite + Unpin), problem: &Problem) -> io::Result<()> {
        let tags: Vec<u32> = std::mem::take(&mut *self.open()).into_keys().collect();
        let mut frames = Vec::new();
        for tag in tags {
            put_message(&mut frames, tag, &Event::Failed(problem.clone())).map_err(broken)?;
        }
        to.write_all(&frames).await
    }
}

fn lost(error: &io::Error) -> Problem {
    Problem::new(Code::AgentLost, format!("the sandbox's agent is lost: {error}"))
        .hint("`carrel inspect` shows whether the sandbox still lives; its files are kept")
        .state(SessionState::Lost)
}

fn stopping() -> Problem {
    Problem::new(Code::Unavailable, "the daemon is shutting down")
        .hint("the call goes on in its sandbox: `carrel inspect` and `carrel logs` show it")
        .state(SessionState::Preserved)
}

/// Which side of a forwarding broke.
enum Broken {
    Reading(io::Error),
    Writing(io::Error),
}

/// Passes bytes on, and shows every frame before its end goes out: whoever has an answer finds it noted. Ends with the reader.
async fn forward(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
    mut look: impl FnMut(u32, &Body<'_>) -> io::Result<()>,
    passed: impl Fn(),
) -> Result<(), Broken> {
    let mut piece = vec![0; PIECE];
    let mut decoder = Decoder::default();
    loop {
        let count = from.read(&mut piece).await.map_err(Broken::Reading)?;
        if count == 0 {
            return Ok(());
        }
        let mut bytes = &piece[..count];
        while !bytes.is_empty() {
            let space = decoder.space();
            let taken = bytes.len().min(space.len());
            space[..taken].copy_from_slice(&bytes[..taken]);
            decoder.filled(taken);
            bytes = &bytes[taken..];
            while let Some(frame) = decoder.take().map_err(|error| Broken::Reading(broken(error)))? {
                look(frame.tag, &frame.body).map_err(Broken::Reading)?;
            }
        }
        to.write_all(&piece[..count]).await.map_err(Broken::Writing)?;
        passed();
    }
}
