//! Boxes that are copied while they live, without CRIU.
//!
//! Where all that lives in a box is one python between two calls, its agent names a process that has all of its state and only
//! waits (a *spare*). Its image is taken as that of a warm parent is ([`crate::warm`]), and a new box has its first interpreter
//! come to life as a graft of it. That leaves files, and what the agent knows. [`crate::checkpoint`] is the way for everything else.
//!
//! The image is in memory, and every copy maps it: what none of them changes is there once. It belongs to nobody's limits,
//! so it may not be large.

use std::{
    fs, io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use carrel_jail::{
    image::{self, Image},
    tree,
};
use carrel_proto::{
    guest::{self, Manner},
    message::{Event, Request},
    problem::{Code, Problem},
};

use crate::{
    checkpoint::{self, Living, Talk},
    link::lost,
    steps::Step,
};

/// The most that a copy of a python may have of its own memory.
const MOST: u64 = 64 << 20;
/// A spare that was just made takes a moment to wait.
const SOON: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_micros(200);

/// A python that lives, as others can become.
#[derive(Debug)]
pub struct Scion {
    image: Image,
    cwd: String,
    manner: Manner,
}

impl Scion {
    /// Where a stage can open the image: it is a child of this process, and of the same user.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.image.file().as_raw_fd()).into()
    }

    pub(crate) fn described(&self) -> guest::Scion {
        guest::Scion { image: None, cwd: self.cwd.clone(), manner: self.manner.clone() }
    }
}

fn refused(error: io::Error) -> Problem {
    Problem::new(Code::Unsupported, format!("its interpreter cannot be copied as it lives: {error}"))
}

/// Takes the image of what lives in a box, and does `meanwhile`. Its agent starts nothing until this is over.
pub(crate) fn cut(
    living: &Living<'_>,
    store: &Path,
    meanwhile: impl FnOnce() -> Result<(), Problem> + Send,
) -> Result<Arc<Scion>, Problem> {
    let mut talk = Talk::open(living.socket)?;
    let (spare, cwd, manner) = match talk.ask(&Request::PrepareFork) {
        Ok(Event::Forkable { spare, cwd, manner }) => (spare, cwd, manner),
        Ok(_) => return Err(lost("it answers something else")),
        // An agent of before this was invented.
        Err(problem) if problem.code == Code::Protocol => {
            return Err(Problem::new(Code::Unsupported, problem.message));
        }
        Err(problem) => return Err(problem),
    };
    let spare = on_host(living.agent, spare).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
    living.watch.reached(Step::AgentPrepared);
    talk.ask(&Request::Save)?;
    checkpoint::keep_state(living, store)?;
    living.watch.reached(Step::AgentSaved);
    let (image, files) = thread::scope(|scope| {
        let copier = thread::Builder::new().spawn_scoped(scope, || take(spare));
        let files = meanwhile().and_then(|()| checkpoint::pack_all(living, store));
        let image = match copier {
            Ok(copier) => copier.join().unwrap_or_else(|_| Err(io::Error::other("taking its image failed"))),
            // No thread to be had.
            Err(_) => take(spare),
        };
        (image, files)
    });
    files?;
    living.watch.reached(Step::MemoryPacked);
    let scion = Scion { image: image.map_err(refused)?, cwd, manner };
    living.watch.reached(Step::ImageTaken);
    Ok(Arc::new(scion))
}

/// A process of a box by its pid there.
fn on_host(agent: i32, pid: i32) -> Option<i32> {
    let mut todo = vec![agent];
    while let Some(parent) = todo.pop() {
        for child in tree::children(parent) {
            if tree::pids(child).get(1) == Some(&pid) {
                return Some(child);
            }
            todo.push(child);
        }
    }
    None
}

fn take(spare: i32) -> io::Result<Image> {
    let deadline = Instant::now() + SOON;
    loop {
        match image::take_reader(spare, MOST) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(LOOK);
            }
            taken => return taken,
        }
    }
}

/// Where the agent of a copy finds what the other knew.
pub(crate) fn give_state(store: &Path, spool: &Path) -> Result<(), Problem> {
    fs::copy(store.join(checkpoint::AGENT), spool.join(checkpoint::AGENT))
        .map(drop)
        .map_err(|error| Problem::internal(format!("giving the agent its state: {error}")))
}

/// A new box, whose interpreter comes to life, gets what was in its other places.
pub(crate) fn grow(living: &Living<'_>, store: &Path) -> Result<(), Problem> {
    checkpoint::unpack_all(living, store)?;
    living.watch.reached(Step::MemoryUnpacked);
    Talk::open(living.socket)?.ask(&Request::Resumed)?;
    living.watch.reached(Step::BoxBack);
    Ok(())
}
