//! Boxes that are copied while they live, without CRIU.
//!
//! Where all that lives in a box is one python between two calls, its agent names a process that has all of its state and only
//! waits (a *spare*). That is held where it is, and another box, in which nobody's code has run, has a python come to life as a graft
//! of it, as others are of a warm parent ([`crate::warm`]). That leaves files, which go through memory ([`crate::light`]), and what the
//! agent knows. [`crate::checkpoint`] is the way for everything else.
//!
//! A few copies are filled from the spare itself, so it stands still until the last of them is there; what the python has from a warm
//! parent they share with it. For many an image is taken, which they all map: what none of them changes is there once. That is in
//! memory and belongs to nobody's limits, so it may not be large.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use carrel_jail::{
    image::{Original, Sharing},
    tree,
    userns::{self, Ids},
};
use carrel_proto::{
    guest::{self, Manner},
    message::{Event, Request},
    problem::{Code, Problem},
};

use crate::{
    checkpoint::{self, IN_MEMORY, Living, Talk, inside, known_in},
    jail::workspace_of,
    light::{Light, MUCH},
    link::lost,
    stages::lock,
    steps::{Step, Watch},
};

/// So many copies are filled one by one.
const FEW: u32 = 3;
/// The most that a copy of a python may have of its own memory.
const MOST: u64 = 64 << 20;
/// Nobody is heard in the box meanwhile, and whoever calls takes it for dead in the end.
const HELD: Duration = Duration::from_secs(8);
/// A spare that was just made takes a moment to wait.
const SOON: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_micros(200);

/// A python that lives, as others can become.
#[derive(Debug)]
pub struct Scion {
    cwd: String,
    manner: Manner,
    /// What its agent knows, and how often its sandbox had been brought back.
    state: String,
    life: u32,
    files: Files,
    /// The box's places in memory.
    places: Vec<(&'static str, Light)>,
    /// Where those are instead, if this process cannot write to another box's.
    store: Option<PathBuf>,
    held: Held,
}

/// Files of a box, and its ids.
#[derive(Debug)]
pub(crate) struct Files {
    pub(crate) workspace: Light,
    pub(crate) spool: Light,
    pub(crate) ids: Ids,
}

/// The spare, and the thread that holds it.
#[derive(Debug)]
struct Held {
    image: Mutex<Image>,
    /// Nobody, where the image has everything.
    fills: Option<Sender<Fill>>,
    thread: Option<JoinHandle<()>>,
}

/// Files that a graft needs, or why there are none.
type Taken = Result<Vec<File>, String>;

#[derive(Debug)]
enum Image {
    Awaited(Receiver<Taken>),
    There(Taken),
}

/// A copy that waits for its memory.
#[derive(Debug)]
struct Fill {
    copy: (i32, u64),
    done: Sender<io::Result<()>>,
}

impl Held {
    /// `line`: for as long as anybody has it, the agent starts nothing.
    fn begin(spare: (i32, u64), copies: u32, line: UnixStream) -> io::Result<Self> {
        let sharing = if copies > FEW { Sharing::Everything } else { Sharing::Nothing };
        let ((tell, told), (fills, orders)) = (channel(), channel::<Fill>());
        let thread = thread::Builder::new().spawn(move || {
            let _line = line;
            let original = hold(spare, sharing);
            let taken = original.as_ref().map_err(ToString::to_string).and_then(|original| {
                let files = original.files().iter().map(File::try_clone).collect::<io::Result<_>>();
                files.map_err(|error| error.to_string())
            });
            // Nobody wants it any more.
            let _ = tell.send(taken);
            if let (Ok(original), Sharing::Nothing) = (original, sharing) {
                let until = Instant::now() + HELD;
                let left = || until.saturating_duration_since(Instant::now());
                while let Ok(Fill { copy: (copy, born), done }) = orders.recv_timeout(left()) {
                    let _ = done.send(original.fill(copy, born));
                }
            }
        })?;
        let fills = (sharing == Sharing::Nothing).then_some(fills);
        Ok(Self { image: Mutex::new(Image::Awaited(told)), fills, thread: Some(thread) })
    }

    fn files(&self, watch: &Watch) -> Result<Vec<File>, Problem> {
        let mut image = lock(&self.image);
        if let Image::Awaited(told) = &*image {
            let taken = told.recv().unwrap_or_else(|_| Err("looking at it failed".into()));
            if taken.is_ok() {
                watch.reached(Step::ImageTaken);
            }
            *image = Image::There(taken);
        }
        let Image::There(taken) = &*image else { return Ok(Vec::new()) };
        let files = taken.as_ref().map_err(|why| refused(io::Error::other(why.clone())))?;
        files.iter().map(File::try_clone).collect::<io::Result<_>>().map_err(refused)
    }

    fn fill(&self, copy: (i32, u64)) -> Result<(), Problem> {
        let Some(fills) = &self.fills else { return Ok(()) };
        let gone = || refused(io::Error::other("nobody holds it any more"));
        let (done, told) = channel();
        fills.send(Fill { copy, done }).map_err(|_| gone())?;
        told.recv().map_err(|_| gone())?.map_err(refused)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        drop(self.fills.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Scion {
    pub(crate) fn life(&self) -> u32 {
        self.life
    }

    /// Whether what it is of stands still for as long as this is there.
    pub fn is_held(&self) -> bool {
        self.held.fills.is_some()
    }

    fn described(&self) -> guest::Scion {
        let (cwd, manner, state) = (self.cwd.clone(), self.manner.clone(), self.state.clone());
        guest::Scion { cwd, manner, state }
    }

    /// Files of the workspace, and what calls have printed: their agent goes on writing to it.
    pub(crate) fn lay_out(&self, directory: &Path, ids: &Ids) -> Result<(), Problem> {
        let Files { workspace, spool, ids: from } = &self.files;
        let laid = workspace
            .write(&workspace_of(directory), from, ids)
            .and_then(|()| spool.write(&directory.join("spool"), from, ids));
        laid.map_err(|error| match error.kind() {
            io::ErrorKind::StorageFull => Problem::new(Code::Disk, "the host's disk is full")
                .hint("remove snapshots or sandboxes; nothing of this one was lost"),
            _ => Problem::internal(format!("laying out the copy's files: {error}")),
        })
    }
}

fn refused(error: io::Error) -> Problem {
    Problem::new(Code::Unsupported, format!("its interpreter cannot be copied as it lives: {error}"))
}

/// Too much of something to be copied through memory.
pub(crate) fn too_much(place: &str) -> Problem {
    Problem::new(Code::Unsupported, format!("there is more in {place} than is copied through memory"))
}

/// Holds what lives in a box for so many copies, and does `meanwhile`, which gives back its files. Its agent starts nothing until all
/// of that is there. `store` makes an empty directory, if there is need of one.
pub(crate) fn cut(
    living: &Living<'_>,
    copies: u32,
    store: &mut dyn FnMut() -> Result<PathBuf, Problem>,
    meanwhile: impl FnOnce() -> Result<Files, Problem>,
) -> Result<Scion, Problem> {
    let mut talk = Talk::open(&living.socket)?;
    let Event::Forkable { spare, cwd, manner, state } = talk.ask(&Request::PrepareFork)? else {
        return Err(lost("it answers something else"));
    };
    let life = checkpoint::life_in(state.as_bytes()).map_err(lost)?;
    let spare = on_host(living.agent, spare).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
    living.watch.reached(Step::AgentPrepared);
    // Nothing is made for what would be refused in the end.
    if tree::own_memory(spare.0).is_none_or(|bytes| bytes > MOST) {
        return Err(too_much("its memory"));
    }
    let held = Held::begin(spare, copies, talk.hold()?).map_err(refused)?;
    let files = meanwhile()?;
    let places = read_places(living.agent)?;
    let mut pack = || -> Result<PathBuf, Problem> {
        let store = store()?;
        checkpoint::pack_all(living, &store)?;
        Ok(store)
    };
    // Where boxes have ids of their own, only somebody who has taken them on can write to these places.
    let store = if userns::has_many_ids() && !places.is_empty() { Some(pack()?) } else { None };
    living.watch.reached(Step::MemoryPacked);
    Ok(Scion { cwd, manner, state, life, files, places, store, held })
}

/// What is in them, but for those that are empty.
fn read_places(agent: i32) -> Result<Vec<(&'static str, Light)>, Problem> {
    let mut places = Vec::new();
    for (_, place) in IN_MEMORY {
        let light = Light::read(&inside(agent, place), known_in(place), MUCH);
        let light = light.ok_or_else(|| too_much(place))?;
        if !light.is_empty() {
            places.push((place, light));
        }
    }
    Ok(places)
}

/// A process of a box by its pid there, and when it was born.
fn on_host(agent: i32, pid: i32) -> Option<(i32, u64)> {
    let mut todo = vec![agent];
    while let Some(parent) = todo.pop() {
        for child in tree::children(parent) {
            let born = tree::start_time(child);
            if tree::pids(child).get(1) == Some(&pid) && tree::start_time(child) == born {
                return born.map(|born| (child, born));
            }
            todo.push(child);
        }
    }
    None
}

fn hold((spare, born): (i32, u64), sharing: Sharing) -> io::Result<Original> {
    let deadline = Instant::now() + SOON;
    loop {
        match Original::hold(spare, born, MOST, sharing) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(LOOK);
            }
            held => return held,
        }
    }
}

/// The box becomes what the python lives in, with what was in the first one's other places.
pub(crate) fn bring_to_life(living: &Living<'_>, scion: &Scion, ids: &Ids) -> Result<(), Problem> {
    let mut talk = Talk::open(&living.socket)?;
    // While it is looked at what is to be copied. Its directory may be in one of the places.
    talk.ask(&Request::MakeWay)?;
    if let Some(store) = &scion.store {
        checkpoint::unpack_all(living, store)?;
    } else {
        for (place, light) in &scion.places {
            let written = light.write(&inside(living.agent, place), &scion.files.ids, ids);
            written.map_err(|error| Problem::internal(format!("giving back files in {place}: {error}")))?;
        }
    }
    living.watch.reached(Step::MemoryUnpacked);
    let files = scion.held.files(living.watch)?;
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let Event::LaidOut { python } = talk.ask_with(&Request::Become(scion.described()), &files)? else {
        return Err(lost("it answers something else"));
    };
    let copy = on_host(living.agent, python).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
    scion.held.fill(copy)?;
    living.watch.reached(Step::MemoryFilled);
    talk.ask(&Request::Resumed)?;
    living.watch.reached(Step::BoxBack);
    Ok(())
}
