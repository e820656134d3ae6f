//! A running daemon, as the other commands use it: found by its socket, asked over HTTP, with a line to an agent per call.
//!
//! It is used when it serves this state directory and is of this very version; else commands do the work themselves, which
//! gives the same results. Nothing is kept open between two questions: a connection to a unix socket costs next to nothing.

use std::{path::PathBuf, time::Duration};

use carrel_api::rest::desk::{self, About, Answer, Ask, What};
use carrel_engine::{
    Environments, Found, Owner, Record, Snapshot, Wish,
    call::AgentLink,
    pool::PoolStatus,
    snapshots::{Diff, Forked, RestoreWish, SnapshotWish},
};
use carrel_proto::{
    id::Key,
    outcome::SessionState,
    problem::{Code, Problem},
};
use http_body_util::{BodyExt, Full, Limited};
use hyper::{
    Method, Request, Response, StatusCode,
    body::{Bytes, Incoming},
    client::conn::http1,
    header,
};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::net::UnixStream;

use crate::{config::Settings, output::Output};

/// A daemon that does not say at once who it is, is none that a command should wait for.
const GREETING: Duration = Duration::from_secs(2);
/// A list of many thousand sandboxes.
const LARGEST_ANSWER: usize = 256 << 20;

#[derive(Debug)]
pub(crate) struct Client {
    socket: PathBuf,
    environments: Environments,
    pub(crate) about: About,
}

impl Client {
    /// The daemon of this state directory, if there is one to be used.
    pub(crate) async fn find(settings: &Settings, output: &Output) -> Option<Self> {
        // Without a state directory there is nothing that a daemon could serve.
        let state = std::fs::canonicalize(&settings.state).ok()?;
        settings.socket.exists().then_some(())?;
        let socket = settings.socket.clone();
        let greeting = tokio::time::timeout(GREETING, greet(&socket)).await;
        let about = match greeting {
            Ok(Ok(about)) => about,
            Ok(Err(problem)) => {
                output.detail(format_args!("no daemon at {}: {problem}", socket.display()));
                return None;
            }
            Err(_) => {
                output.warning(format_args!(
                    "the daemon at {} does not answer; going on without it",
                    socket.display()
                ));
                return None;
            }
        };
        if let Err(why) = about.fits(&state) {
            output.detail(format_args!("the daemon at {} is not used: {why}", socket.display()));
            return None;
        }
        Some(Self { socket, environments: settings.environments.clone(), about })
    }

    async fn ask(&self, what: What) -> Result<Answer, Problem> {
        let ask = Ask { environments: self.environments.clone(), what };
        let body = serde_json::to_vec(&ask).map_err(Problem::internal)?;
        let request = request(Method::POST, desk::DESK_PATH)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::from(body))
            .map_err(Problem::internal)?;
        let response = send(&self.socket, request).await?;
        read(response).await
    }

    async fn found(&self, what: What) -> Result<Found, Problem> {
        match self.ask(what).await? {
            Answer::Found(found) => Ok(*found),
            _ => Err(strange()),
        }
    }

    pub(crate) async fn sandbox(&self, key: &Key, wish: &Wish) -> Result<Found, Problem> {
        self.found(What::Sandbox { key: key.clone(), wish: wish.clone() }).await
    }

    pub(crate) async fn existing(&self, name: &str, key: Option<&Key>) -> Result<Found, Problem> {
        self.found(What::Existing { name: name.to_owned(), key: key.cloned() }).await
    }

    pub(crate) async fn known(&self, name: &str, key: Option<&Key>) -> Result<Record, Problem> {
        Ok(self.found(What::Known { name: name.to_owned(), key: key.cloned() }).await?.record)
    }

    pub(crate) async fn standby(&self, record: &Record) -> Result<Record, Problem> {
        Ok(self.found(What::Standby { id: record.id.clone() }).await?.record)
    }

    pub(crate) async fn hibernate(&self, record: &Record) -> Result<Record, Problem> {
        Ok(self.found(What::Hibernate { id: record.id.clone() }).await?.record)
    }

    pub(crate) async fn nameless(&self, wish: &Wish) -> Result<Record, Problem> {
        Ok(self.found(What::Nameless { wish: wish.clone() }).await?.record)
    }

    pub(crate) async fn ephemeral(&self, wish: &Wish) -> Result<Record, Problem> {
        let what = What::Ephemeral { wish: wish.clone(), owner: Owner::me() };
        Ok(self.found(what).await?.record)
    }

    pub(crate) async fn close(&self, record: &Record) -> Result<(), Problem> {
        self.ask(What::Close { id: record.id.clone() }).await.map(drop)
    }

    /// What the daemon keeps ready.
    pub(crate) async fn pool(&self) -> Result<PoolStatus, Problem> {
        match self.ask(What::Pool).await? {
            Answer::Pool(pool) => Ok(pool),
            _ => Err(strange()),
        }
    }

    pub(crate) async fn list(&self) -> Result<Vec<Record>, Problem> {
        match self.ask(What::List).await? {
            Answer::All(records) => Ok(records),
            _ => Err(strange()),
        }
    }

    pub(crate) async fn snapshot(&self, record: &Record, wish: &SnapshotWish) -> Result<Snapshot, Problem> {
        match self.ask(What::Snapshot { id: record.id.clone(), wish: wish.clone() }).await? {
            Answer::Snapshot(snapshot) => Ok(*snapshot),
            _ => Err(strange()),
        }
    }

    pub(crate) async fn snapshots(&self) -> Result<Vec<Snapshot>, Problem> {
        match self.ask(What::Snapshots).await? {
            Answer::Snapshots(snapshots) => Ok(snapshots),
            _ => Err(strange()),
        }
    }

    pub(crate) async fn delete_snapshot(&self, name: &str) -> Result<(), Problem> {
        self.ask(What::DeleteSnapshot { name: name.to_owned() }).await.map(drop)
    }

    pub(crate) async fn restore(&self, name: &str, new: bool, wish: &RestoreWish) -> Result<Found, Problem> {
        self.found(What::Restore { name: name.to_owned(), new, wish: wish.clone() }).await
    }

    pub(crate) async fn fork(&self, record: &Record, count: u32) -> Result<Forked, Problem> {
        match self.ask(What::Fork { id: record.id.clone(), count }).await? {
            Answer::Forked(forked) => Ok(*forked),
            _ => Err(strange()),
        }
    }

    pub(crate) async fn adopt(&self, record: &Record) -> Result<Record, Problem> {
        Ok(self.found(What::Adopt { id: record.id.clone() }).await?.record)
    }

    pub(crate) async fn diff(
        &self,
        from: (String, Option<Key>),
        to: Option<(String, Option<Key>)>,
    ) -> Result<Diff, Problem> {
        match self.ask(What::Diff { from, to }).await? {
            Answer::Diff(diff) => Ok(diff),
            _ => Err(strange()),
        }
    }

    /// A line to a sandbox's agent.
    pub(crate) async fn line(&self, record: &Record) -> Result<AgentLink, Problem> {
        let stream = self.upgrade(&desk::line_path(&record.id), desk::LINE_UPGRADE).await?;
        Ok(AgentLink::through_daemon(stream))
    }

    /// The stream of an MCP client.
    pub(crate) async fn mcp(&self) -> Result<UnixStream, Problem> {
        self.upgrade(desk::MCP_PATH, desk::MCP_UPGRADE).await
    }

    async fn upgrade(&self, path: &str, protocol: &'static str) -> Result<UnixStream, Problem> {
        let request = request(Method::GET, path)
            .header(header::CONNECTION, "upgrade")
            .header(header::UPGRADE, protocol)
            .body(Full::default())
            .map_err(Problem::internal)?;
        let response = send(&self.socket, request).await?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refused(response).await);
        }
        let upgraded = hyper::upgrade::on(response).await.map_err(gone)?;
        let parts = upgraded.downcast::<TokioIo<UnixStream>>().map_err(|_| strange())?;
        // Neither protocol lets the daemon speak first.
        if !parts.read_buf.is_empty() {
            return Err(strange());
        }
        Ok(parts.io.into_inner())
    }
}

async fn greet(socket: &std::path::Path) -> Result<About, Problem> {
    let request = request(Method::GET, desk::ABOUT).body(Full::default()).map_err(Problem::internal)?;
    read(send(socket, request).await?).await
}

fn request(method: Method, path: &str) -> hyper::http::request::Builder {
    Request::builder().method(method).uri(path).header(header::HOST, "localhost")
}

fn gone(error: impl std::fmt::Display) -> Problem {
    Problem::new(Code::Unavailable, format!("the daemon is gone: {error}"))
        .hint("try again: without a daemon this command does the work itself")
        .state(SessionState::Preserved)
}

fn strange() -> Problem {
    Problem::new(Code::Protocol, "the daemon answered something else").hint("--no-daemon goes without it")
}

async fn send(
    socket: &std::path::Path,
    request: Request<Full<Bytes>>,
) -> Result<Response<Incoming>, Problem> {
    let stream = carrel_backend::link::connect_any_length(socket).await.map_err(gone)?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(gone)?;
    // Ends with the answer, or hands the stream over.
    tokio::spawn(connection.with_upgrades());
    sender.send_request(request).await.map_err(gone)
}

async fn read<T: for<'de> Deserialize<'de>>(response: Response<Incoming>) -> Result<T, Problem> {
    if !response.status().is_success() {
        return Err(refused(response).await);
    }
    let body = body(response).await?;
    serde_json::from_slice(&body)
        .map_err(|error| Problem::new(Code::Protocol, format!("the daemon's answer: {error}")))
}

/// A problem document, as the engine had said it.
async fn refused(response: Response<Incoming>) -> Problem {
    #[derive(Deserialize)]
    struct Document {
        detail: String,
        code: Code,
        #[serde(default)]
        hint: String,
        session_state: SessionState,
    }
    let body = match body(response).await {
        Ok(body) => body,
        Err(problem) => return problem,
    };
    match serde_json::from_slice::<Document>(&body) {
        Ok(said) => Problem::new(said.code, said.detail).hint(said.hint).state(said.session_state),
        Err(_) => strange(),
    }
}

async fn body(response: Response<Incoming>) -> Result<Bytes, Problem> {
    let collected = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
    Ok(collected.map_err(gone)?.to_bytes())
}
