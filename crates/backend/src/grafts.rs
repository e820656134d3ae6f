//! Boxes that are copied while they live, without CRIU.
//!
//! Where all that lives in a box is one python between two calls, its agent names a process that has all of its state and only
//! waits (a *spare*). Its image is taken as that of a warm parent is ([`crate::warm`]), and a new box has its first interpreter
//! come to life as a graft of it. That leaves files, which go through memory ([`crate::light`]), and what the agent knows. [`crate::checkpoint`] is the way for everything else.
//!
//! The image is in memory, and every copy maps it: what none of them changes is there once. It belongs to nobody's limits,
//! so it may not be large.

use std::{
    io, mem,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use carrel_jail::{
    image::{self, Blank},
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
    light::Light,
    link::lost,
    stages::lock,
    steps::{Step, Watch},
};

/// The most that a copy of a python may have of its own memory.
const MOST: u64 = 64 << 20;
/// A spare that was just made takes a moment to wait.
const SOON: Duration = Duration::from_millis(200);
const LOOK: Duration = Duration::from_micros(200);

/// A python that lives, as others can become.
#[derive(Debug)]
pub struct Scion {
    image: Arc<Blank>,
    cwd: String,
    manner: Manner,
    /// The ids of its box.
    ids: Ids,
    workspace: Light,
    /// Its other places.
    places: Vec<(&'static str, Light)>,
    taking: Mutex<Taking>,
}

/// What is becoming of the image.
#[derive(Debug)]
enum Taking {
    Begun(JoinHandle<io::Result<()>>),
    Ended(Result<(), String>),
}

impl Scion {
    /// Where a stage can open the image: it is a child of this process, and of the same user.
    pub(crate) fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.image.file().as_raw_fd()).into()
    }

    pub(crate) fn described(&self) -> guest::Scion {
        guest::Scion { image: None, cwd: self.cwd.clone(), manner: self.manner.clone() }
    }

    pub(crate) fn lay_out(&self, workspace: &Path, ids: &Ids) -> io::Result<()> {
        self.workspace.write(workspace, &self.ids, ids)
    }

    /// Waits for the image.
    fn await_image(&self, watch: &Watch) -> Result<(), Problem> {
        let mut taking = lock(&self.taking);
        let ended = match mem::replace(&mut *taking, Taking::Ended(Ok(()))) {
            Taking::Ended(ended) => ended,
            Taking::Begun(thread) => {
                let ended =
                    thread.join().unwrap_or_else(|_| Err(io::Error::other("taking its image failed")));
                if ended.is_ok() {
                    watch.reached(Step::ImageTaken);
                }
                ended.map_err(|error| error.to_string())
            }
        };
        *taking = Taking::Ended(ended.clone());
        ended.map_err(|why| refused(io::Error::other(why)))
    }
}

fn refused(error: io::Error) -> Problem {
    Problem::new(Code::Unsupported, format!("its interpreter cannot be copied as it lives: {error}"))
}

/// Too much of something to be copied through memory.
pub(crate) fn too_much(place: &str) -> Problem {
    Problem::new(Code::Unsupported, format!("there is more in {place} than is copied through memory"))
}

/// Begins to take the image of what lives in a box, and does `meanwhile`, which gives back its files and its ids. Its agent starts
/// nothing until all of that is there.
pub(crate) fn cut(
    living: &Living<'_>,
    store: &Path,
    meanwhile: impl FnOnce() -> Result<(Light, Ids), Problem>,
) -> Result<Arc<Scion>, Problem> {
    let mut talk = Talk::open(&living.socket)?;
    let Event::Forkable { spare, cwd, manner } = talk.ask(&Request::PrepareFork)? else {
        return Err(lost("it answers something else"));
    };
    let spare = on_host(living.agent, spare).ok_or_else(|| refused(io::ErrorKind::NotFound.into()))?;
    living.watch.reached(Step::AgentPrepared);
    talk.ask(&Request::Save)?;
    checkpoint::keep_state(living, store)?;
    living.watch.reached(Step::AgentSaved);
    // For as long as anybody holds it, the agent starts nothing.
    let line = Arc::new(talk);
    let image = Arc::new(Blank::new().map_err(refused)?);
    let ((workspace, ids), taking) = {
        let (image, line) = (Arc::clone(&image), Arc::clone(&line));
        let taking = thread::Builder::new().spawn(move || {
            let _line = line;
            take(spare, &image)
        });
        (meanwhile()?, taking.map_err(refused)?)
    };
    let places = read_places(living.agent)?;
    if is_in_store(&places) {
        checkpoint::pack_all(living, store)?;
    }
    drop(line);
    living.watch.reached(Step::MemoryPacked);
    let taking = Mutex::new(Taking::Begun(taking));
    Ok(Arc::new(Scion { image, cwd, manner, ids, workspace, places, taking }))
}

/// What is in them, but for those that are empty.
fn read_places(agent: i32) -> Result<Vec<(&'static str, Light)>, Problem> {
    let mut places = Vec::new();
    for (_, place) in IN_MEMORY {
        let light = Light::read(&inside(agent, place), known_in(place)).ok_or_else(|| too_much(place))?;
        if !light.is_empty() {
            places.push((place, light));
        }
    }
    Ok(places)
}

/// Where boxes have ids of their own, only somebody who has taken them on can write to these places.
fn is_in_store(places: &[(&str, Light)]) -> bool {
    userns::has_many_ids() && !places.is_empty()
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

fn take((spare, born): (i32, u64), blank: &Blank) -> io::Result<()> {
    let deadline = Instant::now() + SOON;
    loop {
        match image::take_reader(spare, born, MOST, blank) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(LOOK);
            }
            taken => return taken,
        }
    }
}

/// A new box, whose interpreter comes to life, gets what was in its other places.
pub(crate) fn grow(living: &Living<'_>, store: &Path, scion: &Scion, ids: &Ids) -> Result<(), Problem> {
    let in_store = is_in_store(&scion.places);
    if in_store {
        checkpoint::unpack_all(living, store)?;
    }
    for (place, light) in scion.places.iter().filter(|_| !in_store) {
        let written = light.write(&inside(living.agent, place), &scion.ids, ids);
        written.map_err(|error| Problem::internal(format!("giving back files in {place}: {error}")))?;
    }
    living.watch.reached(Step::MemoryUnpacked);
    scion.await_image(living.watch)?;
    Talk::open(&living.socket)?.ask(&Request::Resumed)?;
    living.watch.reached(Step::BoxBack);
    Ok(())
}
