//! Warm parents: of which python's interpreters in new boxes are copies.
//!
//! A parent lives in a box of its own, made like any other, in which no code but python's own, the driver's and that of
//! configured modules ever runs: no call reaches it, it has no network and no files. Its python loads everything, and sleeps;
//! its image is taken ([`carrel_jail::image`]), and the box is gone again. What is kept is the image, in memory, for as long as
//! this process lives. Boxes are given it read-only, and their agents decide whether they use it.
//!
//! Copies of one parent share the layout of their memory and python's secret for hashing texts. So a parent serves a number of
//! copies and a while, and the next one takes its place; and of course when a file that it had mapped is another by now, which
//! every copy notices by itself in any case.
//!
//! Nobody waits for a parent: until there is an image, interpreters are started.

use std::{
    fs, io,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use carrel_jail::{
    image::{self, Image},
    tree, userns,
    workspace::Kind,
};
use carrel_proto::{guest::Language, id::SandboxId, limits::Limits, problem::Problem};
use serde::{Deserialize, Serialize};

use crate::{
    Backend, BoxRequest, IsolationLevel,
    environment::{Environment, Software},
    jail::Jail,
    stages::lock,
};

/// Copies of one parent.
const MAX_COPIES: u32 = 1000;
/// Age of a parent.
const MAX_AGE: Duration = Duration::from_secs(30 * 60);
/// Environments whose parents are kept at once; of more, the one that was used least recently goes.
const MAX_PARENTS: usize = 4;
/// How long a parent may take to load what it is told to.
const LOADING: Duration = Duration::from_secs(30);
/// How often it is looked at meanwhile.
const LOOK: Duration = Duration::from_millis(2);
/// How often it is looked whether another is due.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// One that could not be made is not tried again at once.
const REST: Duration = Duration::from_secs(60);
/// Its user ids are those of this number; nothing of another sandbox's is within its reach, or the other way round.
const NUMBER: u32 = userns::ID_PAIRS - 1;
/// Directories of parents are named by the process that makes them, and their box.
const PREFIX: &str = "parent-of-";

/// Whether and how an environment's parents are made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Warmth {
    pub on: bool,
    /// Modules that a parent imports before its image is taken.
    pub modules: Vec<String>,
    /// Whether it also imports what sandboxes before have asked for.
    pub learn: bool,
}

impl Default for Warmth {
    fn default() -> Self {
        Self { on: true, modules: Vec::new(), learn: true }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Parents {
    known: Mutex<Vec<Parent>>,
    /// Held while one is made: a second one would be for nothing.
    making: Mutex<()>,
    /// When somebody last looked whether one is due.
    looked: Mutex<Option<Instant>>,
}

/// A parent of one environment, or why there is none.
#[derive(Debug)]
struct Parent {
    environment: String,
    /// What it was to load besides.
    learned: Vec<String>,
    taken: Instant,
    image: Result<Served, String>,
}

#[derive(Debug)]
struct Served {
    image: Image,
    copies: u32,
    /// What it has loaded, and why it has not loaded the rest.
    modules: Vec<String>,
    refused: Vec<(String, String)>,
    /// The files that copies map, as they are on the host, and what they were when the image was taken.
    files: Vec<(PathBuf, Option<Identity>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok()?;
        Some(Self { inode: meta.ino(), size: meta.size(), modified: (meta.mtime(), meta.mtime_nsec()) })
    }
}

impl Parent {
    /// Whether another one is due.
    fn is_worn(&self, learned: &[String]) -> bool {
        if self.learned != learned && self.taken.elapsed() > REST {
            return true;
        }
        match &self.image {
            Ok(served) => {
                served.copies >= MAX_COPIES
                    || self.taken.elapsed() > MAX_AGE
                    || served.files.iter().any(|(path, was)| Identity::of(path) != *was)
            }
            Err(_) => self.taken.elapsed() > REST,
        }
    }
}

/// What `carrel doctor` tells of a parent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Told {
    pub bytes: u64,
    pub copies: u32,
    /// What it has loaded, and why it has not loaded the rest.
    pub modules: Vec<String>,
    pub refused: Vec<(String, String)>,
}

/// Everything that an image depends on but the files' content.
fn name(environment: &Environment) -> String {
    format!("{environment:?}")
}

impl Parents {
    /// Where a stage can open the image for a box of this environment.
    pub(crate) fn image(&self, environment: &Environment) -> Option<PathBuf> {
        if !environment.warmth.on {
            return None;
        }
        let name = name(environment);
        let mut known = lock(&self.known);
        let at = known.iter().position(|parent| parent.environment == name)?;
        // Those that were used last are last.
        let parent = known.remove(at);
        known.push(parent);
        let served = known.last_mut()?.image.as_mut().ok()?;
        if served.copies >= MAX_COPIES {
            return None;
        }
        served.copies += 1;
        // A stage is a child of this process, and of the same user.
        Some(format!("/proc/{}/fd/{}", std::process::id(), served.image.file().as_raw_fd()).into())
    }

    /// Whether nobody has looked for a while.
    pub(crate) fn is_time(&self) -> bool {
        let mut looked = lock(&self.looked);
        let is_time = looked.is_none_or(|looked| looked.elapsed() > LOOK_AGAIN);
        if is_time {
            *looked = Some(Instant::now());
        }
        is_time
    }

    /// Whether a parent for this environment should be made now.
    fn wants(&self, environment: &Environment, learned: &[String]) -> bool {
        let python = environment.interpreters.get(&Language::Python);
        if !environment.warmth.on || python.is_none_or(|python| python.program.is_empty()) {
            return false;
        }
        let name = name(environment);
        let known = lock(&self.known);
        let parent = known.iter().find(|parent| parent.environment == name);
        parent.is_none_or(|parent| parent.is_worn(learned))
    }

    fn keep(&self, parent: Parent) {
        let mut known = lock(&self.known);
        known.retain(|other| other.environment != parent.environment);
        if known.len() >= MAX_PARENTS {
            known.remove(0);
        }
        known.push(parent);
    }

    pub(crate) fn told(&self, environment: &Environment) -> Option<Result<Told, String>> {
        let name = name(environment);
        let known = lock(&self.known);
        let parent = known.iter().find(|parent| parent.environment == name)?;
        let told = |served: &Served| Told {
            bytes: served.image.bytes,
            copies: served.copies,
            modules: served.modules.clone(),
            refused: served.refused.clone(),
        };
        Some(parent.image.as_ref().map(told).map_err(Clone::clone))
    }
}

impl Jail {
    /// What there is of a parent for this environment: `None` if nobody has asked for one yet.
    pub fn parent(&self, environment: &Environment) -> Option<Result<Told, String>> {
        self.parents.told(environment)
    }

    /// Makes a parent for this environment if one is due. Takes as long as python takes to load.
    pub(crate) fn make_warm(&self, environment: &Environment, learned: &[String]) {
        // Somebody is at it.
        let Ok(_making) = self.parents.making.try_lock() else { return };
        if !self.parents.wants(environment, learned) {
            return;
        }
        let mut modules = environment.warmth.modules.clone();
        modules.extend(learned.iter().filter(|name| !environment.warmth.modules.contains(name)).cloned());
        let image = self.take_image(environment, &modules).or_else(|problem| {
            if modules.is_empty() {
                return Err(problem);
            }
            let bare = self.take_image(environment, &[])?;
            Ok(self.with_good_ones(environment, bare, &modules, problem))
        });
        let image = image.map_err(|problem| problem.message);
        let environment = name(environment);
        self.parents.keep(Parent { environment, learned: learned.to_vec(), taken: Instant::now(), image });
    }

    /// Not every module lets an image be taken: those that keep threads or handle signals do not. Adds to `base` those of `modules`
    /// that do; all of them together do not, because of `problem`.
    fn with_good_ones(
        &self,
        environment: &Environment,
        mut base: Served,
        modules: &[String],
        problem: Problem,
    ) -> Served {
        if let [module] = modules {
            base.refused.push((module.clone(), problem.message));
            return base;
        }
        let (first, second) = modules.split_at(modules.len() / 2);
        for half in [first, second] {
            let all = [&base.modules[..], half].concat();
            base = match self.take_image(environment, &all) {
                Ok(served) => Served { refused: base.refused, ..served },
                Err(problem) => self.with_good_ones(environment, base, half, problem),
            };
        }
        base
    }

    fn take_image(&self, environment: &Environment, modules: &[String]) -> Result<Served, Problem> {
        let failed = |error: io::Error| Problem::internal(format!("making a warm parent: {error}"));
        self.remove_stray_parents();
        let mut random = [0; 10];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
            .map_err(|error| failed(error.into()))?;
        let id = SandboxId::from_random(random);
        let directory = self.parents_place().join(format!("{PREFIX}{}-{id}", std::process::id()));
        fs::create_dir_all(directory.join("workspace")).map_err(failed)?;
        let request = BoxRequest {
            id,
            number: NUMBER,
            directory,
            environment: environment.clone(),
            limits: Limits::default(),
            isolation: IsolationLevel::Jail,
            project: None,
            // Should this process be killed in between, the box ends by itself.
            idle_timeout_s: 2 * LOADING.as_secs(),
            max_lifetime_s: 2 * LOADING.as_secs(),
            workspace: Some(Kind::Directory),
            resume: false,
            first: Some(Language::Python),
            life: 0,
            undo_calls: 0,
            parent: Some(modules.to_vec()),
        };
        let placed = self.create(&request);
        let taken = placed.as_ref().map_err(Clone::clone).and_then(|placed| {
            let image = await_sleeper(placed.pid).and_then(image::take).map_err(failed)?;
            let files = image.files.iter().map(|path| on_host(environment, path));
            let files = files.map(|path| (path.clone(), Identity::of(&path))).collect();
            Ok(Served { image, copies: 0, modules: modules.to_vec(), refused: Vec::new(), files })
        });
        // A box that could not be made is gone already.
        let ended =
            placed.map_or(Ok(()), |placed| self.destroy(&request.id, &request.directory, Some(&placed)));
        let _ = fs::remove_dir_all(&request.directory);
        ended.and(taken)
    }

    /// What processes left that were killed while they made a parent.
    pub(crate) fn remove_stray_parents(&self) {
        for entry in fs::read_dir(self.parents_place()).into_iter().flatten().flatten() {
            let file_name = entry.file_name();
            let parts = file_name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-'));
            let Some((pid, id)) = parts else { continue };
            let alive = pid.parse::<u32>().is_ok_and(|pid| Path::new("/proc").join(pid.to_string()).exists());
            if let (false, Ok(id)) = (alive, id.parse::<SandboxId>()) {
                let _ = self.destroy(&id, &entry.path(), None);
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

/// A file of a box as the host knows it.
fn on_host(environment: &Environment, path: &str) -> PathBuf {
    match &environment.software {
        Software::Host(_) => PathBuf::from(path),
        Software::Artifact { rootfs } => rootfs.join(path.trim_start_matches('/')),
    }
}

/// The process below an agent that sleeps: a parent, and nothing else in its box does.
fn await_sleeper(agent: i32) -> io::Result<i32> {
    let deadline = Instant::now() + LOADING;
    loop {
        if let Some(pid) = tree::below(agent).into_iter().find(|pid| image::sleeps(*pid)) {
            return Ok(pid);
        }
        if tree::start_time(agent).is_none() {
            return Err(io::Error::other("its box has ended"));
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("it was not ready in time"));
        }
        thread::sleep(LOOK);
    }
}
