//! Closing everything of a run at once.
//!
//! The mark is written first. A claim is one transaction and looks for it: so a sandbox is either there when the mark is
//! written, and is closed, or comes after it, and is refused. One that is in the making holds its lock and is waited for.

use std::time::Duration;

use carrel_proto::{
    id::{SandboxId, SessionName},
    problem::{Code, Problem},
};
use tokio::task::JoinSet;

use crate::{
    Engine, Tenant,
    events::{Event, Kind},
    registry::{Record, now_ms},
};

/// Sandboxes that are closed at the same time: closing waits for processes more than it works.
const AT_ONCE: usize = 8;

/// What closing a scope came to.
#[derive(Debug, Clone, Default)]
pub struct ScopeClosed {
    /// Gone now.
    pub closed: Vec<SandboxId>,
    /// With a retention time: gone at `at_unix_ms`, and what is made until then with them.
    pub later: Vec<SandboxId>,
    pub at_unix_ms: u64,
}

impl Engine {
    /// Closes every sandbox of a tenant with a key `scope:owner:…`, also those that are being made, and makes no more of
    /// them for a day. With `retention` all of this happens so much later, by [`Engine::tidy`].
    pub async fn close_scope(
        &self,
        tenant: &Tenant,
        scope: &str,
        owner: &str,
        retention: Option<Duration>,
    ) -> Result<ScopeClosed, Problem> {
        for part in [scope, owner] {
            part.parse::<SessionName>().map_err(|error| {
                Problem::new(Code::InvalidArgument, error.to_string())
                    .hint("a scope is two names, such as `workflow` and `run_42`")
            })?;
        }
        let now = now_ms();
        let wait = retention.map_or(0, |time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
        let at = now.saturating_add(wait);
        let names = (tenant.clone(), scope.to_owned(), owner.to_owned());
        let marked =
            self.blocking(move |engine| engine.registry.mark_scope(&names.0, &names.1, &names.2, at)).await?;
        let mut done = ScopeClosed { at_unix_ms: at, ..ScopeClosed::default() };
        if wait > 0 {
            done.later = marked;
        } else {
            done.closed = self.close_marked(tenant, scope, owner).await?;
            let names = (tenant.clone(), scope.to_owned(), owner.to_owned());
            self.blocking(move |engine| engine.registry.forget_ended(&names.0, &names.1, &names.2)).await?;
        }
        self.note(Event::new(Kind::ScopeClosed, tenant).detail(format!("{scope}:{owner}")));
        Ok(done)
    }

    async fn close_marked(
        &self,
        tenant: &Tenant,
        scope: &str,
        owner: &str,
    ) -> Result<Vec<SandboxId>, Problem> {
        let mut closed = Vec::new();
        let mut left = self.registry.in_scope(tenant, scope, owner)?.into_iter();
        let mut closing: JoinSet<(SandboxId, Result<(), Problem>)> = JoinSet::new();
        let mut first = Ok(());
        let start = |closing: &mut JoinSet<_>, record: Record| {
            let engine = self.clone();
            closing.spawn(async move {
                let result = engine.close(&record, None).await;
                (record.id, result)
            });
        };
        for record in left.by_ref().take(AT_ONCE) {
            start(&mut closing, record);
        }
        while let Some(ended) = closing.join_next().await {
            match ended.map_err(Problem::internal)? {
                (id, Ok(())) => closed.push(id),
                // The others are closed all the same; what is left is closed by the next sweep.
                (_, Err(problem)) => first = first.and(Err(problem)),
            }
            if let Some(record) = left.next() {
                start(&mut closing, record);
            }
        }
        first.map(|()| closed)
    }
}
