//! What is known of a living sandbox: its sessions with their variables, and what it uses.

use std::collections::BTreeMap;

use carrel_proto::{
    brief::Brief,
    id::SessionName,
    message::{Event, Request, SessionInfo, Usage},
    problem::{Code, Problem},
};

use crate::{
    Engine,
    registry::{Record, State, now_ms},
};

impl Engine {
    pub async fn sessions(&self, record: &Record) -> Result<Vec<SessionInfo>, Problem> {
        Ok(self.status(record).await?.sessions)
    }

    /// Changes a session's variables: for what starts from now on, and for interpreters that are up with their next run.
    pub async fn set_env(
        &self,
        record: &Record,
        session: &SessionName,
        set: BTreeMap<String, String>,
        unset: Vec<String>,
    ) -> Result<(), Problem> {
        let request = Request::SetEnv { session: session.clone(), set, unset };
        self.ask(record, &request).await.map(drop)
    }

    /// Where a session stands. Asking changes nothing and waits for no call; see [`Brief`].
    pub async fn brief(&self, record: &Record, session: &SessionName) -> Result<Brief, Problem> {
        match self.ask(record, &Request::Brief { session: session.clone() }).await? {
            Event::Brief(brief) => Ok(brief.bounded()),
            _ => Err(Problem::new(Code::Protocol, "the agent did not say where the session stands")),
        }
    }

    /// What the sandbox uses. Asking does not keep it from being idle.
    pub async fn usage(&self, record: &Record) -> Result<Usage, Problem> {
        if let Some(usage) = record.sleep.usage.clone().filter(|_| record.state.is_asleep()) {
            return Ok(asleep(record, usage));
        }
        match self.ask(record, &Request::Usage).await? {
            Event::Usage(usage) => Ok(usage),
            _ => Err(Problem::new(Code::Protocol, "the agent did not say what it uses")),
        }
    }
}

/// What a sandbox uses that is not asked, because asking would wake it: as it was when it fell asleep.
fn asleep(record: &Record, usage: Usage) -> Usage {
    let idle_ms = now_ms().saturating_sub(record.used_unix_ms);
    let hibernated = record.state == State::Hibernated;
    Usage {
        memory: if hibernated { 0 } else { usage.memory },
        processes: if hibernated { 0 } else { usage.processes },
        uptime_ms: usage.uptime_ms + idle_ms.saturating_sub(usage.idle_ms),
        idle_ms,
        ..usage
    }
}
