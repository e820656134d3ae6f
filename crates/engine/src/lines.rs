//! Lines to agents that are kept between calls, so that a warm call costs neither a connection nor a greeting.
//!
//! A call on such a line sends its request first and looks at the sandbox's row afterwards: see [`crate::sleep`]. A line whose
//! agent has ended is never handed out, as far as that can be known; one whose sandbox was written to disk meanwhile is a line on
//! which nothing has run, and the call goes the whole way.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard, PoisonError},
};

use carrel_backend::link::AgentLink;
use carrel_proto::id::SandboxId;

/// Lines kept in all; beyond, the one that was not used for longest is closed.
const MOST: usize = 128;
/// And to one sandbox: more calls at once than that are rare, and its agent takes only so many.
const MOST_TO_ONE: usize = 4;

#[derive(Debug, Default)]
pub(crate) struct Lines {
    idle: Mutex<VecDeque<(SandboxId, AgentLink)>>,
}

impl Lines {
    fn idle(&self) -> MutexGuard<'_, VecDeque<(SandboxId, AgentLink)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A line to the sandbox's agent, if one was kept and is still there.
    pub(crate) fn take(&self, id: &SandboxId) -> Option<AgentLink> {
        let mut idle = self.idle();
        loop {
            let at = idle.iter().rposition(|(whose, _)| whose == id)?;
            match idle.remove(at) {
                Some((_, link)) if link.is_quiet() => return Some(link),
                _ => {}
            }
        }
    }

    /// Keeps a line on which nothing is awaited any more.
    pub(crate) fn keep(&self, id: SandboxId, mut link: AgentLink) {
        link.slim();
        let mut idle = self.idle();
        if idle.len() == MOST {
            idle.retain(|(_, link)| link.is_quiet());
        }
        if idle.len() == MOST {
            idle.pop_front();
        }
        if idle.iter().filter(|(whose, _)| *whose == id).count() < MOST_TO_ONE {
            idle.push_back((id, link));
        }
    }
}
