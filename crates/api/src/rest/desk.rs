//! The command line's own way to a daemon: whole records instead of what the public API shows of them, and streams to agents.
//!
//! Private to carrel: both ends are of the same version ([`About::fits`]), and only the operator on the unix socket is let in. So
//! it is in no OpenAPI document, and may change with every version.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use axum::{
    Extension, Router,
    extract::State,
    routing::{get, post},
};
use carrel_engine::{
    Engine, Environments, Found, Owner, Record, Snapshot, Tenant, Wish,
    pool::PoolStatus,
    snapshots::{Diff, Forked, RestoreWish, SnapshotFilter, SnapshotWish},
};
use carrel_proto::{
    id::{Key, SandboxId},
    message::PROTOCOL,
    problem::Problem,
};
use serde::{Deserialize, Serialize};

use super::{Daemon, extract::Json, guard::Caller, problem::Refusal, server::OwnUser, upgrade, visit::Visit};

/// Raised with every change of what is said here.
const DESK: u32 = 4;

pub const ABOUT: &str = "/v1/daemon";
pub const DESK_PATH: &str = "/v1/daemon/desk";
/// The upgraded connection of `carrel mcp`.
pub const MCP_PATH: &str = "/v1/mcp/stdio";
pub const MCP_UPGRADE: &str = "carrel-mcp";
pub const LINE_UPGRADE: &str = "carrel-line";

/// The path of a sandbox's line.
pub fn line_path(sandbox: &SandboxId) -> String {
    format!("/v1/sandboxes/{sandbox}/line")
}

pub(super) fn routes() -> Router<Arc<Daemon>> {
    Router::new()
        .route(ABOUT, get(about))
        .route(DESK_PATH, post(ask))
        .route("/v1/sandboxes/{sandbox}/line", get(super::line::line))
        .route(MCP_PATH, get(super::mcp::stdio))
}

/// What a daemon says of itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    pub carrel: String,
    pub desk: u32,
    pub protocol: u32,
    pub pid: u32,
    pub state: PathBuf,
}

impl About {
    fn of_this_process(state: &Path) -> Self {
        Self {
            carrel: env!("CARGO_PKG_VERSION").to_owned(),
            desk: DESK,
            protocol: PROTOCOL,
            pid: std::process::id(),
            state: state.to_path_buf(),
        }
    }

    /// Whether this process, with this state directory, can use that daemon. If not: why.
    pub fn fits(&self, state: &Path) -> Result<(), String> {
        let own = Self { pid: self.pid, ..Self::of_this_process(state) };
        if self.state != own.state {
            return Err(format!("it serves {}", self.state.display()));
        }
        if *self != own {
            return Err(format!("it is carrel {}, this one {}", self.carrel, own.carrel));
        }
        Ok(())
    }
}

/// A question, and what the caller's environments are: its configuration may know other ones than the daemon's.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ask {
    pub environments: Environments,
    pub what: What,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum What {
    /// Made if need be. Answered with [`Answer::Found`].
    Sandbox { key: Key, wish: Wish },
    /// Brought back if need be. Answered with [`Answer::Found`].
    Existing { name: String, key: Option<Key> },
    /// As it is, asleep or not. Answered with [`Answer::Found`].
    Known { name: String, key: Option<Key> },
    /// Answered with [`Answer::Found`].
    Standby { id: SandboxId },
    /// Answered with [`Answer::Found`].
    Hibernate { id: SandboxId },
    /// A new one without a key, which stays. Answered with [`Answer::Found`].
    Nameless { wish: Wish },
    /// Of one call of that process. Answered with [`Answer::Found`].
    Ephemeral { wish: Wish, owner: Owner },
    /// Answered with [`Answer::Done`].
    Close { id: SandboxId },
    /// Answered with [`Answer::All`].
    List,
    /// Answered with [`Answer::Pool`].
    Pool,
    /// Answered with [`Answer::Snapshot`].
    Snapshot { id: SandboxId, wish: SnapshotWish },
    /// Answered with [`Answer::Snapshots`].
    Snapshots,
    /// Answered with [`Answer::Done`].
    DeleteSnapshot { name: String },
    /// As a new sandbox, or in place. Answered with [`Answer::Found`].
    Restore { name: String, new: bool, wish: RestoreWish },
    /// Answered with [`Answer::Forked`].
    Fork { id: SandboxId, count: u32 },
    /// Answered with [`Answer::Found`].
    Adopt { id: SandboxId },
    /// Answered with [`Answer::Diff`].
    Diff { from: (String, Option<Key>), to: Option<(String, Option<Key>)> },
}

impl What {
    /// What the audit log shall say: all of these have one path.
    fn tell(&self, visit: &Visit) {
        let (word, id) = match self {
            What::Sandbox { .. } => ("sandbox", None),
            What::Existing { .. } => ("existing", None),
            What::Known { .. } => ("known", None),
            What::Standby { id } => ("standby", Some(id)),
            What::Hibernate { id } => ("hibernate", Some(id)),
            What::Nameless { .. } => ("nameless", None),
            What::Ephemeral { .. } => ("ephemeral", None),
            What::Close { id } => ("close", Some(id)),
            What::List => ("list", None),
            What::Pool => ("pool", None),
            What::Snapshot { id, .. } => ("snapshot", Some(id)),
            What::Snapshots => ("snapshots", None),
            What::DeleteSnapshot { .. } => ("delete_snapshot", None),
            What::Restore { .. } => ("restore", None),
            What::Fork { id, .. } => ("fork", Some(id)),
            What::Adopt { id } => ("adopt", Some(id)),
            What::Diff { .. } => ("diff", None),
        };
        visit.does(word);
        if let Some(id) = id {
            visit.acts_on(id);
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Found(Box<Found>),
    All(Vec<Record>),
    Pool(PoolStatus),
    Snapshot(Box<Snapshot>),
    Snapshots(Vec<Snapshot>),
    Forked(Box<Forked>),
    Diff(Diff),
    Done,
}

impl Answer {
    /// What the question did not name.
    fn tell(&self, visit: &Visit) {
        match self {
            Answer::Found(found) => visit.acts_on(&found.record.id),
            Answer::Snapshot(snapshot) => visit.acts_on_snapshot(&snapshot.id),
            Answer::Forked(forked) => forked.forks.iter().for_each(|fork| visit.acts_on(&fork.record.id)),
            Answer::All(_) | Answer::Pool(_) | Answer::Snapshots(_) | Answer::Diff(_) | Answer::Done => {}
        }
    }
}

async fn about(State(daemon): State<Arc<Daemon>>, caller: Caller) -> Result<axum::Json<About>, Refusal> {
    upgrade::local_operator(&caller)?;
    Ok(axum::Json(About::of_this_process(daemon.engine.state_directory())))
}

async fn ask(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    own: Option<Extension<OwnUser>>,
    Json(ask): Json<Ask>,
) -> Result<axum::Json<Answer>, Refusal> {
    upgrade::local_operator(&caller)?;
    let environments = upgrade::environments(&daemon, own.is_some(), ask.environments);
    let ask = Ask { environments, what: ask.what };
    let (answering, visit) = (Arc::clone(&daemon), Arc::clone(&caller.visit));
    let answering = async move {
        ask.what.tell(&visit);
        let answer = answer(&answering, ask).await?;
        answer.tell(&visit);
        Ok(answer)
    };
    daemon.complete(answering).await.map(axum::Json)
}

async fn answer(daemon: &Daemon, ask: Ask) -> Result<Answer, Problem> {
    let engine = daemon.engine.with_environments(ask.environments);
    let mine = |wish: Wish| Wish { caller: Some(Arc::from("local")), ..wish };
    let found = |record| Found { record, created: true, note: None };
    Ok(match ask.what {
        What::Sandbox { key, wish } => Answer::Found(Box::new(engine.sandbox(&key, &mine(wish)).await?)),
        What::Existing { name, key } => Answer::Found(Box::new(engine.existing(&name, key.as_ref()).await?)),
        What::Known { name, key } => {
            let record = engine.known_of(&Tenant::local(), &name, key.as_ref())?;
            Answer::Found(Box::new(Found { record, created: false, note: None }))
        }
        What::Standby { id } => {
            let record = engine.standby(&engine.known_of(&Tenant::local(), id.as_str(), None)?).await?;
            Answer::Found(Box::new(Found { record, created: false, note: None }))
        }
        What::Hibernate { id } => {
            let record = engine.hibernate(&engine.known_of(&Tenant::local(), id.as_str(), None)?).await?;
            Answer::Found(Box::new(Found { record, created: false, note: None }))
        }
        What::Nameless { wish } => Answer::Found(Box::new(found(engine.nameless(&mine(wish)).await?))),
        What::Ephemeral { wish, owner } => {
            Answer::Found(Box::new(found(engine.ephemeral_of(owner, &mine(wish)).await?)))
        }
        What::Close { id } => {
            if let Some(record) = engine.record(&id)? {
                engine.close(&record, None).await?;
            }
            Answer::Done
        }
        What::List => {
            // As it is now, not as it was at the last sweep.
            if let Err(problem) = engine.tidy().await {
                tracing::warn!("cleaning up: {problem}");
            }
            Answer::All(engine.list()?)
        }
        What::Pool => Answer::Pool(engine.pool()),
        what => return of_snapshots(&engine, what).await,
    })
}

async fn of_snapshots(engine: &Engine, what: What) -> Result<Answer, Problem> {
    let local = Tenant::local();
    let caller: Option<Arc<str>> = Some(Arc::from("local"));
    let known = |id: &SandboxId| engine.known_of(&local, id.as_str(), None);
    Ok(match what {
        What::Snapshot { id, wish } => {
            let wish = SnapshotWish { caller, ..wish };
            Answer::Snapshot(Box::new(engine.snapshot(&known(&id)?, &wish).await?))
        }
        What::Snapshots => Answer::Snapshots(engine.all_snapshots(&SnapshotFilter::default())?),
        What::DeleteSnapshot { name } => {
            engine.delete_snapshot(&engine.snapshot_of(&local, &name)?, caller).await?;
            Answer::Done
        }
        What::Restore { name, new, wish } => {
            let snapshot = engine.snapshot_of(&local, &name)?;
            let wish = RestoreWish { caller, ..wish };
            Answer::Found(Box::new(match new {
                true => engine.restore_as(&snapshot, &wish).await?,
                false => engine.restore_in_place(&snapshot, &wish).await?,
            }))
        }
        What::Fork { id, count } => {
            Answer::Forked(Box::new(engine.fork(&known(&id)?, count, None, caller).await?))
        }
        What::Adopt { id } => {
            let record = engine.adopt(&known(&id)?, caller).await?;
            Answer::Found(Box::new(Found { record, created: false, note: None }))
        }
        What::Diff { from, to } => {
            let to = to.as_ref().map(|(name, key)| (name.as_str(), key.as_ref()));
            let (from, to) = engine.sides(&local, (&from.0, from.1.as_ref()), to)?;
            Answer::Diff(engine.diff(from, to).await?)
        }
        // All others have been answered.
        _ => Answer::Done,
    })
}
