//! Where commands turn to: the engine in this process, or the daemon that runs. They cannot tell which.

use std::{path::Path, time::Duration};

use carrel_engine::{
    Engine, Found, Record, Snapshot, Tenant, Wish,
    call::{Call, Undone, begin_on},
    files,
    snapshots::{Diff, Forked, RestoreWish, SnapshotFilter, SnapshotWish},
};
use carrel_files::Root;
use carrel_proto::{
    brief::Brief,
    files::{FileReply, FileRequest},
    guest::Language,
    id::{ExecId, Key, SessionName},
    message::{Event, Exec, ExecInfo, OpenSession, Request, Run, Status},
    outcome::Outcome,
    problem::{Code, Problem},
};

use crate::daemon::Client;

/// For requests that do no user's work; the daemon sees to agents that hang.
const ANSWER: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) enum Desk {
    Own(Engine),
    Daemon(Client),
}

impl Desk {
    pub(crate) async fn sandbox(&self, key: &Key, wish: &Wish) -> Result<Found, Problem> {
        match self {
            Desk::Own(engine) => engine.sandbox(key, wish).await,
            Desk::Daemon(client) => client.sandbox(key, wish).await,
        }
    }

    pub(crate) async fn existing(&self, name: &str, key: Option<&Key>) -> Result<Found, Problem> {
        match self {
            Desk::Own(engine) => engine.existing(name, key).await,
            Desk::Daemon(client) => client.existing(name, key).await,
        }
    }

    /// As it is, asleep or not.
    pub(crate) async fn known(&self, name: &str, key: Option<&Key>) -> Result<Record, Problem> {
        match self {
            Desk::Own(engine) => engine.known_of(&Tenant::local(), name, key),
            Desk::Daemon(client) => client.known(name, key).await,
        }
    }

    pub(crate) async fn standby(&self, record: &Record) -> Result<Record, Problem> {
        match self {
            Desk::Own(engine) => engine.standby(record).await,
            Desk::Daemon(client) => client.standby(record).await,
        }
    }

    pub(crate) async fn hibernate(&self, record: &Record) -> Result<Record, Problem> {
        match self {
            Desk::Own(engine) => engine.hibernate(record).await,
            Desk::Daemon(client) => client.hibernate(record).await,
        }
    }

    /// A new one without a name, which stays.
    pub(crate) async fn nameless(&self, wish: &Wish) -> Result<Record, Problem> {
        match self {
            Desk::Own(engine) => engine.nameless(wish).await,
            Desk::Daemon(client) => client.nameless(wish).await,
        }
    }

    pub(crate) async fn ephemeral(&self, wish: &Wish) -> Result<Record, Problem> {
        match self {
            Desk::Own(engine) => engine.ephemeral(wish).await,
            Desk::Daemon(client) => client.ephemeral(wish).await,
        }
    }

    pub(crate) async fn close(&self, record: &Record, keep: Option<&Path>) -> Result<(), Problem> {
        match self {
            Desk::Own(engine) => engine.close(record, keep).await,
            Desk::Daemon(client) => {
                // Here, with this user's rights and view of the host, which a daemon need not have.
                if let Some(target) = keep {
                    files::copy_out(self.files(record)?, target)?;
                }
                client.close(record).await
            }
        }
    }

    pub(crate) async fn snapshot(&self, record: &Record, wish: &SnapshotWish) -> Result<Snapshot, Problem> {
        match self {
            Desk::Own(engine) => engine.snapshot(record, wish).await,
            Desk::Daemon(client) => client.snapshot(record, wish).await,
        }
    }

    /// An engine of this process's own, for what reads and writes files of this host: they meet in the registry.
    pub(crate) fn own(&self) -> Result<Engine, Problem> {
        match self {
            Desk::Own(engine) => Ok(Engine::clone(engine)),
            Desk::Daemon(client) => Engine::open(carrel_engine::Settings {
                state: client.about.state.clone(),
                environments: carrel_engine::Environments::default(),
            }),
        }
    }

    pub(crate) async fn snapshots(&self) -> Result<Vec<Snapshot>, Problem> {
        match self {
            Desk::Own(engine) => engine.all_snapshots(&SnapshotFilter::default()),
            Desk::Daemon(client) => client.snapshots().await,
        }
    }

    pub(crate) async fn delete_snapshot(&self, name: &str) -> Result<(), Problem> {
        match self {
            Desk::Own(engine) => {
                engine.delete_snapshot(&engine.snapshot_of(&Tenant::local(), name)?, None).await
            }
            Desk::Daemon(client) => client.delete_snapshot(name).await,
        }
    }

    /// As a new sandbox, or in place.
    pub(crate) async fn restore(&self, name: &str, new: bool, wish: &RestoreWish) -> Result<Found, Problem> {
        match self {
            Desk::Own(engine) => {
                let snapshot = engine.snapshot_of(&Tenant::local(), name)?;
                match new {
                    true => engine.restore_as(&snapshot, wish).await,
                    false => engine.restore_in_place(&snapshot, wish).await,
                }
            }
            Desk::Daemon(client) => client.restore(name, new, wish).await,
        }
    }

    pub(crate) async fn fork(&self, record: &Record, count: u32) -> Result<Forked, Problem> {
        match self {
            Desk::Own(engine) => engine.fork(record, count, None, None).await,
            Desk::Daemon(client) => client.fork(record, count).await,
        }
    }

    pub(crate) async fn adopt(&self, record: &Record) -> Result<Record, Problem> {
        match self {
            Desk::Own(engine) => engine.adopt(record, None).await,
            Desk::Daemon(client) => client.adopt(record).await,
        }
    }

    /// Each by its name and the key that this would be.
    pub(crate) async fn diff(
        &self,
        from: (String, Option<Key>),
        to: Option<(String, Option<Key>)>,
    ) -> Result<Diff, Problem> {
        match self {
            Desk::Own(engine) => {
                let to = to.as_ref().map(|(name, key)| (name.as_str(), key.as_ref()));
                let (from, to) = engine.sides(&Tenant::local(), (&from.0, from.1.as_ref()), to)?;
                engine.diff(from, to).await
            }
            Desk::Daemon(client) => client.diff(from, to).await,
        }
    }

    pub(crate) async fn list(&self) -> Result<Vec<Record>, Problem> {
        match self {
            Desk::Own(engine) => engine.list(),
            Desk::Daemon(client) => client.list().await,
        }
    }

    /// The workspace of a sandbox. The files are on this host and their owner is this user, whoever serves the sandbox.
    pub(crate) fn files(&self, record: &Record) -> Result<Root, Problem> {
        match self {
            Desk::Own(engine) => engine.files(record),
            Desk::Daemon(client) => files::of_state(&client.about.state, record),
        }
    }

    pub(crate) fn file(&self, record: &Record, request: FileRequest) -> Result<FileReply, Problem> {
        carrel_files::serve(&self.files(record)?, request).map_err(Into::into)
    }

    pub(crate) async fn ensure_session(&self, record: &Record, name: &SessionName) -> Result<(), Problem> {
        match self {
            Desk::Own(engine) => engine.ensure_session(record, name).await,
            Desk::Daemon(_) if *name == SessionName::main() => Ok(()),
            Desk::Daemon(client) => {
                let open = OpenSession { name: name.clone(), ..OpenSession::default() };
                match ask(client, record, &Request::OpenSession(open), Duration::ZERO).await {
                    Err(problem) if problem.code == Code::SessionExists => Ok(()),
                    other => other.map(drop),
                }
            }
        }
    }

    pub(crate) async fn close_session(&self, record: &Record, name: &SessionName) -> Result<(), Problem> {
        match self {
            Desk::Own(engine) => engine.close_session(record, name).await,
            Desk::Daemon(client) => {
                let request = Request::CloseSession { name: name.clone() };
                ask(client, record, &request, Duration::ZERO).await.map(drop)
            }
        }
    }

    pub(crate) async fn run(&self, record: &Record, run: Run) -> Result<Call, Problem> {
        match self {
            Desk::Own(engine) => engine.run(record, run).await,
            Desk::Daemon(client) => begin_on(client.line(record).await?, Request::Run(run)).await,
        }
    }

    pub(crate) async fn exec(&self, record: &Record, exec: Exec) -> Result<Call, Problem> {
        match self {
            Desk::Own(engine) => engine.exec(record, exec).await,
            Desk::Daemon(client) => {
                let exec = Exec { detach: false, ..exec };
                begin_on(client.line(record).await?, Request::Exec(exec)).await
            }
        }
    }

    /// Starts a command and leaves it alone.
    pub(crate) async fn start(&self, record: &Record, exec: Exec) -> Result<ExecId, Problem> {
        match self {
            Desk::Own(engine) => engine.start(record, exec).await,
            Desk::Daemon(client) => {
                let request = Request::Exec(Exec { detach: true, ..exec });
                match ask(client, record, &request, Duration::ZERO).await? {
                    Event::Started { exec, .. } => Ok(exec),
                    _ => Err(strange()),
                }
            }
        }
    }

    pub(crate) async fn attach(
        &self,
        record: &Record,
        exec: &ExecId,
        since: u64,
        follow: bool,
    ) -> Result<Call, Problem> {
        match self {
            Desk::Own(engine) => engine.attach(record, exec, since, follow).await,
            Desk::Daemon(client) => {
                let request = Request::Attach { exec: exec.clone(), since, follow };
                begin_on(client.line(record).await?, request).await
            }
        }
    }

    pub(crate) async fn wait(
        &self,
        record: &Record,
        exec: &ExecId,
        time: Duration,
    ) -> Result<Option<Outcome>, Problem> {
        match self {
            Desk::Own(engine) => engine.wait(record, exec, time).await,
            Desk::Daemon(client) => {
                let timeout_ms = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
                let request = Request::Wait { exec: exec.clone(), timeout_ms };
                match ask(client, record, &request, time).await? {
                    Event::Waited { outcome } => Ok(outcome),
                    _ => Err(strange()),
                }
            }
        }
    }

    pub(crate) async fn signal(&self, record: &Record, exec: &ExecId, signal: i32) -> Result<(), Problem> {
        match self {
            Desk::Own(engine) => engine.signal(record, exec, signal).await,
            Desk::Daemon(client) => {
                let request = Request::Signal { exec: exec.clone(), signal };
                ask(client, record, &request, Duration::ZERO).await.map(drop)
            }
        }
    }

    pub(crate) async fn undo(
        &self,
        record: &Record,
        session: &SessionName,
        language: Option<Language>,
        calls: u32,
    ) -> Result<Undone, Problem> {
        match self {
            Desk::Own(engine) => engine.undo(record, session, language, calls).await,
            Desk::Daemon(client) => {
                let request = Request::Undo { session: session.clone(), language, calls };
                match ask(client, record, &request, Duration::ZERO).await? {
                    Event::Undone { language, calls, kept, closed_handles, files_state, files_reason } => {
                        Ok(Undone { language, calls, kept, closed_handles, files_state, files_reason })
                    }
                    _ => Err(strange()),
                }
            }
        }
    }

    pub(crate) async fn execs(&self, record: &Record) -> Result<Vec<ExecInfo>, Problem> {
        match self {
            Desk::Own(engine) => engine.execs(record).await,
            Desk::Daemon(client) => match ask(client, record, &Request::Execs, Duration::ZERO).await? {
                Event::Execs { execs } => Ok(execs),
                _ => Err(strange()),
            },
        }
    }

    pub(crate) async fn brief(&self, record: &Record, session: &SessionName) -> Result<Brief, Problem> {
        match self {
            Desk::Own(engine) => engine.brief(record, session).await,
            Desk::Daemon(client) => {
                let request = Request::Brief { session: session.clone() };
                match ask(client, record, &request, Duration::ZERO).await? {
                    Event::Brief(brief) => Ok(brief.bounded()),
                    _ => Err(strange()),
                }
            }
        }
    }

    pub(crate) async fn status(&self, record: &Record) -> Result<Status, Problem> {
        match self {
            Desk::Own(engine) => engine.status(record).await,
            Desk::Daemon(client) => match ask(client, record, &Request::Status, Duration::ZERO).await? {
                Event::Status(status) => Ok(status),
                _ => Err(strange()),
            },
        }
    }
}

/// A request with one answer, which may take `more` than such a request does.
async fn ask(client: &Client, record: &Record, request: &Request, more: Duration) -> Result<Event, Problem> {
    client.line(record).await?.ask_within(request, ANSWER + more).await
}

fn strange() -> Problem {
    Problem::new(Code::Protocol, "the agent answered something else")
}
