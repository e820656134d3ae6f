//! What changes in a workspace, as the kernel tells it.
//!
//! Every directory has a watch of its own, named to the kernel by a descriptor that was opened path-safely, so that no link can
//! turn the eye elsewhere. A directory that appears is watched first and looked through afterwards: what was made in it before
//! the watch is told from the look, and what the look and the kernel both saw is told once. Between two looks no descriptor is
//! kept: a workspace that is closed can go, and the kernel then says so here.
//!
//! Deliberately absent: following links, and telling apart a file that was replaced from one that is new (`created` is both).

mod eye;

use std::sync::Arc;

use axum::{extract::State, http::Uri, response::Response};
use carrel_engine::{events::Kind as Happened, tokens::Scope};
use carrel_files::FileError;
use carrel_proto::{
    files::{GuestPath, Name},
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    super::{
        Daemon,
        extract::{Query, SandboxPath},
        guard::Caller,
        problem::{Problems, Refusal},
        shares::Shares,
        sse::{self, Events, Gone, ServerSentEvent},
    },
    Desk, path_of,
};
use eye::{Eye, Seen};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(watch))
}

/// Watches under way in all: each is an inotify instance, of which a user has 128 on most hosts, and others need some too.
const MOST_WATCHES: usize = 96;
const MOST_WATCHES_OF_ONE: usize = 24;

pub(crate) fn watches() -> Arc<Shares> {
    Shares::new("watches", MOST_WATCHES, MOST_WATCHES_OF_ONE)
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WatchQuery {
    /// A directory; the workspace itself, unless given.
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: Option<String>,
    /// With all directories below, also those to come; so it is unless told otherwise.
    recursive: Option<bool>,
}

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Change {
    Created,
    Changed,
    Removed,
    Moved,
}

/// The data of an event `change`.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct ChangeEvent {
    /// Relative to the workspace.
    pub(super) path: Name,
    pub(super) kind: Change,
    /// Of `moved`: where it was.
    pub(super) from: Option<Name>,
}

#[derive(Debug, Serialize)]
struct Nothing {}

/// Tells what changes in a directory, until the client goes or the directory does.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/watch", operation_id = "watch_files", tag = "files",
    params(("sandbox" = String, Path), WatchQuery),
    responses((status = 200, description = "events: `ready` once it watches, `change` with a ChangeEvent, `overflow` where some were missed",
        body = ServerSentEvent, content_type = "text/event-stream"), Problems))]
async fn watch(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<WatchQuery>,
) -> Result<Response, Refusal> {
    let path = path_of(&uri)?;
    let desk = Desk::open(&daemon, &caller, &id, Scope::Read).await?;
    let watched = Watched { daemon: Arc::clone(&daemon), record: desk.record.clone(), path };
    let share = daemon.watches.take(&caller.tenant)?;
    let eye = Eye::open(watched, query.recursive.unwrap_or(true)).await?;
    desk.note(Happened::FileList, None);
    // It holds a descriptor of the workspace.
    drop(desk);
    Ok(sse::stream(daemon.stop.clone(), move |events| async move {
        // The client that is gone is told nothing more.
        let _ = tell(eye, events).await;
        drop(share);
    }))
}

async fn tell(mut eye: Eye, events: Events) -> Result<(), Gone> {
    if eye.is_short_sighted() {
        events.send("overflow", None, &Nothing {}).await?;
    }
    events.send("ready", None, &Nothing {}).await?;
    loop {
        let seen = tokio::select! {
            biased;
            () = events.closed() => return Err(Gone),
            seen = eye.next() => seen,
        };
        match seen {
            Some(Seen::Change(change)) => events.send("change", None, &change).await?,
            Some(Seen::Overflow) => events.send("overflow", None, &Nothing {}).await?,
            None => return Ok(()),
        }
    }
}

/// Which directory is watched, without holding it.
#[derive(Debug, Clone)]
pub(super) struct Watched {
    daemon: Arc<Daemon>,
    record: carrel_engine::Record,
    path: GuestPath,
}

impl Watched {
    /// The directory as it is now, for a look.
    fn root(&self) -> Result<carrel_files::Root, Problem> {
        let workspace = self.daemon.engine.files(&self.record)?;
        Ok(carrel_files::Root::from_fd(workspace.open_directory(&self.path)?)?)
    }

    /// How the workspace names what is at `below` here.
    fn name(&self, below: &[u8]) -> Name {
        match (self.path.is_root(), below) {
            (true, below) => Name::from(below),
            (false, b"") => Name::from(self.path.as_bytes()),
            (false, below) => Name([self.path.as_bytes(), b"/", below].concat()),
        }
    }
}

fn too_many(error: &std::io::Error) -> Problem {
    match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE | rustix::io::Errno::NOSPC) => {
            Problem::new(Code::TooMany, "this host watches as much as it can")
                .hint("end other watches, or raise fs.inotify.max_user_instances and max_user_watches")
        }
        _ => FileError::from_io(&GuestPath::root(), error.kind().into()).into(),
    }
}
