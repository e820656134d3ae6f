//! Tells a client when a resource it subscribed to has changed.
//!
//! Files are watched by the kernel through the directory they are in, because most writers replace a file instead of
//! writing into it. Only a watch is held, no descriptor: that would keep a closed sandbox's file system from going away.

use std::{ffi::OsStr, os::unix::ffi::OsStrExt, time::Duration};

use carrel_engine::{Engine, Record, call::Output};
use carrel_proto::{
    files::GuestPath,
    problem::{Code, Problem},
};
use inotify::{Event, EventMask, EventStream, Inotify, WatchMask};
use tokio_stream::StreamExt;

use super::{Server, scope::Scope, uri::Address};

/// Changes closer together than this are told as one.
const SETTLED: Duration = Duration::from_millis(100);
/// Room for a few dozen events; the kernel queues the rest.
const BUFFER: usize = 4096;
/// Words about an exec's output, at most.
const BEAT: Duration = Duration::from_secs(1);

/// A subscription: [`Watch::changed`] returns each time there is something new to read.
pub(super) enum Watch {
    Never,
    File(Box<FileWatch>),
    Exec(Box<carrel_engine::call::Call>),
}

pub(super) struct FileWatch {
    events: EventStream<[u8; BUFFER]>,
    /// None: anything in the directory.
    name: Option<Vec<u8>>,
    /// It changed before the watch began.
    missed: bool,
}

impl Watch {
    /// A file that was written at or after `since` (by [`super::files::mark`]) counts as changed.
    pub(super) async fn begin(
        server: &Server,
        scope: &Scope,
        text: &str,
        since: Option<i64>,
    ) -> Result<Self, Problem> {
        let (sandbox, path, exec) = match Address::parse(text)? {
            Address::Environments | Address::Brief { .. } => return Ok(Watch::Never),
            Address::File { sandbox, path } => (sandbox, Some(path), None),
            Address::Exec { sandbox, exec } => (sandbox, None, Some(exec)),
        };
        let (engine, record) = server.living(scope, &sandbox).await?;
        match (path, exec) {
            (Some(path), _) => {
                FileWatch::begin(engine, &record, &path, since).map(|watch| Watch::File(Box::new(watch)))
            }
            (None, Some(exec)) => Ok(Watch::Exec(Box::new(engine.attach(&record, &exec, 0, true).await?))),
            (None, None) => Ok(Watch::Never),
        }
    }

    /// `false`: nothing will change any more.
    pub(super) async fn changed(&mut self) -> bool {
        match self {
            Watch::Never => std::future::pending().await,
            Watch::File(watch) => watch.changed().await,
            Watch::Exec(call) => {
                let printed = async {
                    loop {
                        match call.next().await {
                            Ok(Output::Bytes { .. } | Output::Display { .. }) => return true,
                            Ok(Output::Finished(_) | Output::Paused { .. }) | Err(_) => return false,
                            Ok(Output::Started(_)) => {}
                        }
                    }
                };
                if !printed.await {
                    *self = Watch::Never;
                    // Its end is a change too.
                    return true;
                }
                let more = async { while matches!(call.next().await, Ok(Output::Bytes { .. })) {} };
                let _ = tokio::time::timeout(BEAT, more).await;
                true
            }
        }
    }
}

impl FileWatch {
    fn begin(
        engine: &Engine,
        record: &Record,
        path: &GuestPath,
        since: Option<i64>,
    ) -> Result<Self, Problem> {
        let failed = |error: std::io::Error| {
            Problem::new(Code::Unsupported, format!("this host cannot watch files: {error}"))
        };
        let root = engine.files(record)?;
        let (directory, name) = match (root.open_directory(path), path.split()) {
            (Ok(directory), _) => (directory, None),
            (Err(_), Some((parent, name))) => (root.open_directory(&parent)?, Some(name.to_vec())),
            (Err(error), None) => return Err(error.into()),
        };
        let mask = WatchMask::CLOSE_WRITE
            | WatchMask::CREATE
            | WatchMask::DELETE
            | WatchMask::MOVE
            | WatchMask::MODIFY
            | WatchMask::DELETE_SELF;
        let inotify = Inotify::init().map_err(failed)?;
        let held = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&directory));
        inotify.watches().add(held, mask).map_err(failed)?;
        // Looked at only now, so that nothing falls between this and the watch.
        let missed =
            since.is_some_and(|since| root.stat(path, true).is_ok_and(|entry| entry.mtime_ns >= since));
        Ok(Self { events: inotify.into_event_stream([0; BUFFER]).map_err(failed)?, name, missed })
    }

    async fn changed(&mut self) -> bool {
        if std::mem::take(&mut self.missed) {
            return true;
        }
        loop {
            match self.events.next().await {
                Some(Ok(event)) if gone(event.mask) => return false,
                Some(Ok(event)) if !self.concerns(&event) => {}
                Some(Ok(_)) => {
                    let more = async { while let Some(Ok(_)) = self.events.next().await {} };
                    let _ = tokio::time::timeout(SETTLED, more).await;
                    return true;
                }
                Some(Err(_)) | None => return false,
            }
        }
    }

    fn concerns(&self, event: &Event<impl AsRef<OsStr>>) -> bool {
        let name = event.name.as_ref().map(|name| name.as_ref().as_bytes());
        self.name.is_none() || name == self.name.as_deref()
    }
}

/// The directory is not there any more, or its file system.
fn gone(mask: EventMask) -> bool {
    mask.intersects(EventMask::IGNORED | EventMask::UNMOUNT)
}
