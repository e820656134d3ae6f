//! How long the engine waits for an agent, and what becomes of one that hangs.
//!
//! An agent is one loop that never blocks: it answers a greeting in well under a millisecond, also while calls run. One
//! that does not answer three of them hangs, and its box is ended: then it is true that the state is lost, every other
//! caller of that sandbox is told, and the next call finds a new box over the same files instead of waiting again.
//!
//! A box that sleeps does not answer either. Whoever wants something of it wakes it; whoever only waits lets it sleep; nobody
//! takes it for one that hangs.

use std::{path::PathBuf, time::Duration};

use carrel_backend::{
    Placed,
    link::{AgentLink, Reader},
};
use carrel_proto::{
    id::{ExecId, SandboxId},
    limits::INTERRUPT_GRACE,
    message::{Event, Request, What},
    outcome::SessionState,
    problem::{Code, Problem},
};
use tokio::time::{Instant, timeout};

use crate::Engine;

/// For each of these greetings: a host that is drowning is not a hung agent. Less than the link gives itself, which would
/// only say that there was no answer.
const GREETING: Duration = Duration::from_secs(9);
const GREETINGS: usize = 3;
/// After this long without an answer it is worth a look whether the box sleeps.
const SOON: Duration = Duration::from_millis(20);
/// A box is put to sleep when nobody wants anything of it: twice in a row under a caller's hands is bad luck.
const WAKES: usize = 10;
/// For requests that do no user's work.
const ANSWER: Duration = Duration::from_secs(25);
/// How often a call that waits looks whether its agent still answers.
const LOOK: Duration = Duration::from_secs(10);
/// An agent may be this late with an end it has promised.
const LATE: Duration = Duration::from_secs(15);
/// The clock of a run starts when its interpreter is up, which may take so long.
const STARTING: Duration = Duration::from_secs(30);

/// What is needed to ask an agent for a sign of life, to wake its box, and to end it.
#[derive(Debug, Clone)]
pub(crate) struct Lifeline {
    pub(crate) engine: Engine,
    pub(crate) id: SandboxId,
    pub(crate) placed: Option<Placed>,
    pub(crate) socket: PathBuf,
}

/// What came of a greeting.
enum Greeted {
    Link(AgentLink),
    /// The box sleeps, or is about to. The line, if there is one, is of use only if nobody else has restored the box.
    Asleep(Option<AgentLink>),
    Silence,
}

impl Lifeline {
    /// A line to the agent, woken if it sleeps. An agent that does not greet back is ended.
    pub(crate) async fn connect(&self) -> Result<AgentLink, Problem> {
        let (mut silent, mut woken) = (0, 0);
        // Held so that the agent knows of somebody who is about to want something, and is not put to sleep again.
        let mut _held = None;
        while silent < GREETINGS {
            // Boxed: a line in the making is large, and whoever waits for it is part of every call.
            match Box::pin(self.greet(true)).await? {
                Greeted::Link(link) => return Ok(link),
                Greeted::Silence => silent += 1,
                Greeted::Asleep(_) if woken == WAKES => {
                    return Err(Problem::new(
                        Code::Busy,
                        "the sandbox is put to sleep faster than it is woken",
                    )
                    .hint("try again"));
                }
                Greeted::Asleep(link) => {
                    woken += 1;
                    _held = link;
                    Box::pin(self.wake()).await?;
                }
            }
        }
        Err(self.end("the sandbox's agent does not answer").await)
    }

    /// As [`Self::connect`], for whoever waits already: a box that sleeps is left alone.
    pub(crate) async fn look(&self) -> Result<Option<AgentLink>, Problem> {
        for _ in 0..GREETINGS {
            match Box::pin(self.greet(false)).await? {
                Greeted::Link(link) => return Ok(Some(link)),
                Greeted::Asleep(_) => return Ok(None),
                Greeted::Silence => {}
            }
        }
        Err(self.end("the sandbox's agent does not answer").await)
    }

    /// Whoever puts a box to sleep writes that down first, and then asks the agent who is there. So whoever has greeted, and
    /// then finds that it does not sleep, is seen: see [`crate::sleep`].
    async fn greet(&self, waking: bool) -> Result<Greeted, Problem> {
        let mut connecting = std::pin::pin!(AgentLink::connect(&self.socket));
        let mut answer = timeout(SOON, &mut connecting).await.ok();
        if answer.is_none() && self.sleeps()? {
            if !waking {
                return Ok(Greeted::Asleep(None));
            }
            Box::pin(self.wake()).await?;
        }
        if answer.is_none() {
            answer = timeout(GREETING, connecting).await.ok();
        }
        match answer {
            None if self.sleeps()? => Ok(Greeted::Asleep(None)),
            None => Ok(Greeted::Silence),
            Some(answer) if self.engine.registry.sleeps(&self.id)? => Ok(Greeted::Asleep(answer.ok())),
            Some(answer) => answer.map(Greeted::Link),
        }
    }

    /// By its row, and by its freezer: somebody else may have one.
    fn sleeps(&self) -> Result<bool, Problem> {
        let frozen =
            || self.placed.as_ref().is_some_and(|placed| self.engine.backend.is_frozen(&self.id, placed));
        Ok(self.engine.registry.sleeps(&self.id)? || frozen())
    }

    pub(crate) async fn wake(&self) -> Result<(), Problem> {
        let found = self.engine.bring_back(&self.id, None, None, None).await?;
        match found.and_then(|found| found.note) {
            // What the caller knew of it is not true any more.
            Some(note) => Err(Problem::new(Code::AgentLost, note.text(self.id.as_str()))
                .hint("the next call finds a new box over the same files")
                .state(SessionState::Lost)),
            None => Ok(()),
        }
    }

    /// A request with one answer, which may take `more` than such a request does.
    pub(crate) async fn ask(&self, request: &Request, more: Duration) -> Result<Event, Problem> {
        let mut link = self.connect().await?;
        let time = ANSWER + more;
        match timeout(time, link.ask_within(request, 2 * time)).await {
            Ok(answer) => answer,
            Err(_) => {
                self.look().await?;
                Err(Problem::new(Code::AgentLost, "the sandbox's agent is late with its answer")
                    .hint("try again; `carrel inspect` shows what the sandbox is doing"))
            }
        }
    }

    async fn end(&self, why: &str) -> Problem {
        let (engine, placed) = (self.engine.clone(), self.placed.clone());
        let ended =
            tokio::task::spawn_blocking(move || placed.map_or(Ok(()), |placed| engine.backend.end(&placed)))
                .await;
        match ended {
            Ok(Ok(())) => Problem::new(Code::AgentLost, format!("{why}; its box was ended"))
                .hint("the next call makes a new box over the same files")
                .state(SessionState::Lost),
            Ok(Err(problem)) => Problem::new(Code::AgentLost, format!("{why}, and {}", problem.message))
                .hint("close the sandbox; its files can be copied out first")
                .state(SessionState::Lost),
            Err(error) => Problem::internal(error),
        }
    }
}

/// The waiting of one call.
#[derive(Debug)]
pub(crate) struct Patience {
    /// Without one, the call waits for as long as its line lives.
    lifeline: Option<Lifeline>,
    look: Instant,
    /// The next look is only whether the box sleeps.
    early: bool,
    /// The time of a run whose clock may not have started: others can be before it in its interpreter's queue.
    queued: Option<Duration>,
    deadline: Option<Instant>,
    pub(crate) exec: Option<ExecId>,
}

impl Patience {
    /// The engine that looks after the call, and the call's sandbox.
    pub(crate) fn of(&self) -> Option<(Engine, SandboxId)> {
        self.lifeline.as_ref().map(|lifeline| (lifeline.engine.clone(), lifeline.id.clone()))
    }

    pub(crate) fn new(request: &Request, lifeline: Option<Lifeline>) -> Self {
        let now = Instant::now();
        let (queued, deadline, exec) = match request {
            Request::Run(run) => (Some(Duration::from_millis(run.timeout_ms)), None, None),
            Request::Exec(exec) => {
                let end = |millis| now + Duration::from_millis(millis) + INTERRUPT_GRACE + LATE;
                (None, exec.timeout_ms.map(end), None)
            }
            Request::Attach { exec, .. } => (None, None, Some(exec.clone())),
            _ => (None, None, None),
        };
        Self { lifeline, look: now + LOOK, early: false, queued, deadline, exec }
    }

    /// For a call whose agent has not greeted: it may be frozen, whatever its row says.
    pub(crate) fn look_soon(&mut self) {
        self.look = Instant::now() + SOON;
        self.early = true;
    }

    /// Waits until there is something for `tag`.
    pub(crate) async fn wait(&mut self, reader: &mut Reader, tag: u32) -> Result<(), Problem> {
        while self.lifeline.is_some() {
            let until = self.deadline.map_or(self.look, |deadline| deadline.min(self.look));
            if let Ok(result) = tokio::time::timeout_at(until, reader.ready(tag)).await {
                if std::mem::take(&mut self.early) {
                    self.look = Instant::now() + LOOK;
                }
                return result;
            }
            // Rare, and large: not part of every call's own state.
            Box::pin(self.look()).await?;
        }
        reader.ready(tag).await
    }

    /// The time for a look, or for the end, has come.
    async fn look(&mut self) -> Result<(), Problem> {
        let Some(lifeline) = self.lifeline.clone() else { return Ok(()) };
        let early = std::mem::take(&mut self.early);
        if lifeline.sleeps()? {
            if early || self.exec.is_none() {
                // Nothing was heard of the call: whoever put the box to sleep did not know of it.
                lifeline.wake().await?;
            }
            // Somebody has put it into standby in the midst of this call, which goes on when it is woken.
            self.look = Instant::now() + LOOK;
            self.deadline = self.deadline.map(|deadline| deadline.max(self.look + LATE));
            return Ok(());
        }
        if early {
            self.look = Instant::now() + LOOK;
            return Ok(());
        }
        if self.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return Err(lifeline.end("the sandbox's agent does not keep the call's time").await);
        }
        self.start_clock(&lifeline).await?;
        self.look = Instant::now() + LOOK;
        Ok(())
    }

    /// Greets the agent, and finds out whether the clock of a run has started.
    async fn start_clock(&mut self, lifeline: &Lifeline) -> Result<(), Problem> {
        let Some(mut link) = lifeline.look().await? else { return Ok(()) };
        let (Some(time), Some(exec)) = (self.queued, &self.exec) else { return Ok(()) };
        if let Ok(Ok(Event::Execs { execs })) = timeout(ANSWER, link.ask(&Request::Execs)).await
            && let Some(at) = execs.iter().position(|info| info.exec == *exec)
        {
            let mine = &execs[at];
            let is_before = |other: &carrel_proto::message::ExecInfo| {
                other.running && other.session == mine.session && other.what == mine.what
            };
            if matches!(mine.what, What::Run { .. }) && !execs[..at].iter().any(is_before) {
                self.queued = None;
                self.deadline = Some(Instant::now() + STARTING + time + INTERRUPT_GRACE + LATE);
            }
        }
        Ok(())
    }
}
