//! The default backend: namespaces of the host's own kernel.

mod ending;
mod making;

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Mutex,
    time::Instant,
};

use carrel_jail::{
    cgroup::{Hierarchy, freezer::FreezeError, update::UpdateError},
    tree,
    userns::{self, Ids},
    workspace::{self, Kind},
};
use carrel_proto::{
    id::SandboxId,
    limits::{ByteSize, Enforced, Enforcement, Limits},
    problem::{Code, Problem},
};
use rustix::process::{PidfdFlags, pidfd_open};

use self::ending::{DYING, end, removing};
use crate::{
    Backend, BoxRequest, IsolationLevel, Memory, Placed,
    checkpoint::{self, Criu, Image, Living},
    environment::Environment,
    grafts::{self, Files, Scion},
    guest_programs,
    light::{Light, MUCH},
    memory_of,
    spares::Spares,
    stages::{self, Stages},
    steps::{Step as At, Watch},
    stored,
    warm::Parents,
};

/// The file system of a workspace, where it has one of its own.
const IMAGE: &str = "workspace.ext4";
/// Of output that is kept, so much is copied through memory.
const MUCH_OUTPUT: u64 = 64 << 20;
/// What is told of an agent's log, in bytes.
const MAX_WORDS: usize = 300;

#[derive(Debug)]
pub struct Jail {
    /// Where programs and templates are kept.
    state: PathBuf,
    hierarchy: Hierarchy,
    spares: Spares,
    stages: Stages,
    criu: Mutex<Option<Criu>>,
    watch: Watch,
    pub(crate) parents: Parents,
}

impl Drop for Jail {
    fn drop(&mut self) {
        self.hierarchy.leave();
    }
}

impl Jail {
    pub fn new(state: &Path) -> Self {
        Self::watched(state, Watch::default())
    }

    /// The same, with somebody who is told of every step.
    pub fn watched(state: &Path, watch: Watch) -> Self {
        Self {
            state: state.to_path_buf(),
            hierarchy: Hierarchy::probe(),
            spares: Spares::new(state.join("templates")),
            stages: Stages::default(),
            criu: Mutex::default(),
            watch,
            parents: Parents::default(),
        }
    }

    /// Where a box puts its root together, in a mount namespace of its own: one empty directory does for all.
    fn mount_point(&self) -> PathBuf {
        self.state.join("root")
    }

    /// Where warm parents have their boxes' directories.
    pub(crate) fn parents_place(&self) -> PathBuf {
        self.state.join("templates")
    }

    fn program(&self) -> io::Result<PathBuf> {
        guest_programs::agent(&self.state.join("bin"))
    }

    fn living(&self, directory: &Path, placed: &Placed) -> Result<Living<'_>, Problem> {
        let failed = |error| Problem::internal(format!("the agent's program: {error}"));
        Ok(Living {
            socket: self.socket(directory),
            spool: directory.join("spool"),
            program: self.program().map_err(failed)?,
            agent: placed.pid,
            watch: &self.watch,
        })
    }

    /// How limits would be held here, without making a box.
    pub fn enforced(&self, limits: &Limits) -> Enforced {
        self.hierarchy.enforced(workspace::probe(limits.disk).1)
    }

    fn ids(number: u32) -> Ids {
        let (uid, gid) = (rustix::process::geteuid(), rustix::process::getegid());
        if userns::has_many_ids() {
            Ids::pair(userns::FIRST_ID + 2 * (number % userns::ID_PAIRS))
        } else {
            Ids::single(uid.as_raw(), gid.as_raw())
        }
    }

    /// The CRIU of this host. One that was found is taken to be there for as long as its file is.
    fn criu(&self) -> Result<Criu, Problem> {
        let mut known = stages::lock(&self.criu);
        if let Some(criu) = known.as_ref().filter(|criu| criu.is_there()) {
            return Ok(criu.clone());
        }
        let found = Criu::find()?;
        *known = Some(found.clone());
        Ok(found)
    }
}

impl Backend for Jail {
    fn name(&self) -> &'static str {
        "jail"
    }

    fn expect(&self) {
        // A stage in a scope of its own is started with the sandbox's name and limits, which nobody knows yet.
        if matches!(self.hierarchy, Hierarchy::Systemd(_)) {
            return;
        }
        // What goes wrong here goes wrong again where it can be told.
        if let Ok(agent) = self.program() {
            self.stages.expect(&agent);
        }
    }

    fn create(&self, request: &BoxRequest) -> Result<Placed, Problem> {
        let created = self.try_create(request);
        if created.is_err() {
            // What was made so far goes; the error that matters is the first one.
            let _ = self.destroy(&request.id, &request.directory, None);
        }
        created
    }

    fn is_alive(&self, placed: &Placed) -> bool {
        tree::start_time(placed.pid) == Some(placed.start_time)
    }

    fn end(&self, placed: &Placed) -> Result<(), Problem> {
        if !self.is_alive(placed) {
            return Ok(());
        }
        if placed.isolation == IsolationLevel::Weak {
            tree::kill_below(placed.pid);
        }
        end(placed.pid, &self.hierarchy).map_err(|error| Problem::internal(format!("ending a box: {error}")))
    }

    fn update(
        &self,
        id: &SandboxId,
        placed: &Placed,
        before: &Limits,
        limits: &Limits,
    ) -> Result<(), Problem> {
        if placed.workspace == Kind::Image && before.disk != limits.disk {
            let word = format!("the workspace is a file system of {}, which keeps its size", before.disk);
            return Err(Problem::new(Code::Unsupported, word)
                .hint("open another sandbox with the disk you need and copy the files"));
        }
        let Enforced { memory, pids, cpu, .. } = &placed.enforced;
        let held = |by: &Enforcement| matches!(by, Enforcement::CgroupV1 | Enforcement::CgroupV2);
        if !self.is_alive(placed) || ![memory, pids, cpu].into_iter().any(held) {
            return Ok(());
        }
        self.hierarchy.update(id.as_str(), limits).map_err(|error| match error {
            UpdateError::InUse(used) => {
                let word =
                    format!("the sandbox uses {used} of memory, more than {} would allow", limits.memory);
                Problem::new(Code::Conflict, word).hint(
                    "free memory in it first (end processes, restart interpreters), or choose a larger limit",
                )
            }
            UpdateError::Io(error) => Problem::internal(format!("changing the limits of {id}: {error}")),
        })
    }

    fn freeze(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
        let unsupported = |why: &str| {
            Problem::new(Code::Unsupported, format!("this sandbox cannot be frozen: {why}"))
                .hint("`carrel doctor` says what this host lacks; the sandbox runs on as it is")
        };
        // A box whose scope systemd did not make has no cgroup, whatever the host offers to others.
        if let Enforcement::Nothing(why) = &placed.enforced.freezer {
            return Err(unsupported(why));
        }
        self.hierarchy.freeze(id.as_str()).map_err(|error| match error {
            FreezeError::Missing(why) => unsupported(&why),
            FreezeError::Late => {
                Problem::new(Code::Conflict, "a process of the sandbox did not stop in time, so it runs on")
                    .hint("it waits for a disk or the like; try again later")
            }
            FreezeError::Io(error) => Problem::internal(format!("freezing {id}: {error}")),
        })
    }

    fn thaw(&self, id: &SandboxId, placed: &Placed) -> Result<(), Problem> {
        // Asked before, while it cannot change: v1 keeps what was killed in its sleep until it is thawed.
        let killed = tree::is_killed(placed.pid);
        self.hierarchy
            .thaw(id.as_str())
            .map_err(|error| Problem::internal(format!("thawing {id}: {error}")))?;
        if killed {
            if let Ok(fd) = pidfd_open(userns::pid(placed.pid), PidfdFlags::empty()) {
                tree::wait_readable(&fd, Instant::now() + DYING);
            }
            return Err(Problem::new(Code::AgentLost, "the sandbox was killed in its sleep"));
        }
        Ok(())
    }

    fn can_hibernate(&self) -> Result<(), Problem> {
        self.criu().map(drop)
    }

    fn hibernate(
        &self,
        id: &SandboxId,
        directory: &Path,
        placed: &Placed,
        image: &Path,
    ) -> Result<(), Problem> {
        let criu = self.criu()?;
        let living = self.living(directory, placed)?;
        checkpoint::write(&criu, &living, image)?;
        // Everything is on disk from here on. The files stay within reach.
        self.end_all(id, directory, Some(placed))?;
        self.watch.reached(At::BoxEnded);
        self.hierarchy.remove(id.as_str()).map_err(|error| removing(id, error))?;
        let _ = fs::remove_file(directory.join("agent.sock"));
        self.watch.reached(At::BoxRemoved);
        Ok(())
    }

    fn restore(&self, request: &BoxRequest, image: &Path, memory: Memory) -> Result<Placed, Problem> {
        let files = WithinReach(request);
        let criu = self.criu()?;
        let view = View::at(request.directory.join("image.view"));
        let image = Image::open(image, &criu, &view.0.join("whole"), memory == Memory::Passed)?;
        let spool = request.directory.join("spool");
        fs::create_dir_all(&spool)
            .map_err(|error| Problem::internal(format!("making the spool: {error}")))?;
        // Perhaps because it is not there.
        let life = image.give_state(&spool).map_err(|problem| image.check().err().unwrap_or(problem))?;
        self.watch.reached(At::StateGiven);
        let resumed =
            BoxRequest { resume: true, first: None, life: life.max(request.life), ..request.clone() };
        // At once: reading a big image takes longer than making the box.
        let (whole, placed) = std::thread::scope(|scope| {
            let reader = std::thread::Builder::new().spawn_scoped(scope, || image.check());
            let placed = self.create(&resumed);
            let whole = match reader {
                Ok(reader) => reader.join().unwrap_or_else(|_| Err(Problem::internal("reading the image"))),
                // No thread to be had.
                Err(_) => image.check(),
            };
            (whole, placed)
        });
        if let Err(problem) = whole {
            if let Ok(placed) = placed {
                let _ = self.destroy(&request.id, &request.directory, Some(&placed));
            }
            return Err(problem);
        }
        let placed = placed?;
        self.watch.reached(At::BoxMade);
        let back = || {
            let living = self.living(&request.directory, &placed)?;
            let cgroups = self.hierarchy.entrances(request.id.as_str());
            checkpoint::bring_back(&criu, &living, &image, &cgroups, &Self::ids(request.number), &view.0)
        };
        if let Err(mut problem) = back() {
            if let Some(said) = last_words(&spool).filter(|_| problem.code == Code::AgentLost) {
                problem.message = format!("{} (it said: {said})", problem.message);
            }
            // What was made so far goes; the error that matters is the first one.
            let _ = self.destroy(&request.id, &request.directory, Some(&placed));
            return Err(problem);
        }
        // The box has them.
        std::mem::forget(files);
        Ok(placed)
    }

    fn is_packed(&self, image: &Path) -> bool {
        checkpoint::is_packed(image)
    }

    fn pack(&self, image: &Path, target: &Path, go_on: &dyn Fn() -> bool) -> Result<Option<()>, Problem> {
        checkpoint::pack_image(image, target, go_on)
    }

    fn snapshot(
        &self,
        directory: &Path,
        placed: &Placed,
        store: &Path,
        memory: Memory,
    ) -> Result<(), Problem> {
        if memory == Memory::Nothing {
            return stored::put_files(directory, placed.workspace, store);
        }
        let criu = self.criu()?;
        let living = self.living(directory, placed)?;
        checkpoint::copy(&criu, &living, &memory_of(store), memory == Memory::Kept, || {
            stored::put_files(directory, placed.workspace, store)?;
            self.watch.reached(At::FilesCopied);
            stored::put_spool(directory, store)?;
            self.watch.reached(At::SpoolCopied);
            Ok(())
        })
    }

    fn cut(
        &self,
        directory: &Path,
        placed: &Placed,
        number: u32,
        limits: &Limits,
        copies: u32,
        store: &mut dyn FnMut() -> Result<PathBuf, Problem>,
    ) -> Result<Scion, Problem> {
        let living = self.living(directory, placed)?;
        grafts::cut(&living, copies, store, || {
            // A new workspace must be of the same kind.
            let same = workspace::probe(limits.disk).0 == placed.workspace;
            let workspace = same.then(|| Light::read(&workspace_of(directory), &[], MUCH)).flatten();
            let workspace = workspace.ok_or_else(|| grafts::too_much("/workspace"))?;
            self.watch.reached(At::FilesCopied);
            let spool = Light::read(&directory.join("spool"), &stored::OWN, MUCH_OUTPUT);
            let spool = spool.ok_or_else(|| grafts::too_much("the output that is kept"))?;
            self.watch.reached(At::SpoolCopied);
            Ok(Files { workspace, spool, ids: Self::ids(number) })
        })
    }

    fn graft(&self, request: &BoxRequest, placed: &Placed, scion: &Scion) -> Result<Placed, Problem> {
        let to = Self::ids(request.number);
        let take = || -> Result<(), Problem> {
            scion.lay_out(&request.directory, &to)?;
            self.watch.reached(At::FilesLaid);
            grafts::bring_to_life(&self.living(&request.directory, placed)?, scion, &to)
        };
        // Whatever goes wrong, there is another way.
        take().map_err(|problem| match problem.code {
            Code::Disk => problem,
            _ => Problem::new(Code::Unsupported, problem.message),
        })?;
        Ok(Placed { life: scion.life().max(placed.life), ..placed.clone() })
    }

    fn snapshot_of_image(
        &self,
        directory: &Path,
        placed: &Placed,
        image: &Path,
        store: &Path,
    ) -> Result<(), Problem> {
        stored::put_files(directory, placed.workspace, store)?;
        stored::put_spool(directory, store)?;
        stored::put_image(image, &memory_of(store))
    }

    fn unpack(&self, store: &Path, number: u32, request: &BoxRequest, memory: bool) -> Result<(), Problem> {
        let (from, to) = (Self::ids(number), Self::ids(request.number));
        stored::take_files(store, &request.directory, &from, &to)?;
        if memory {
            stored::take_spool(store, &request.directory, &to)?;
        }
        Ok(())
    }

    fn fill(
        &self,
        store: &Path,
        disk: ByteSize,
        number: u32,
        fill: &mut dyn FnMut(&carrel_files::Root) -> Result<(), Problem>,
    ) -> Result<Kind, Problem> {
        stored::fill(store, disk, &self.state.join("templates"), &Self::ids(number), fill)
    }

    fn look(&self, store: &Path) -> Result<carrel_files::Root, Problem> {
        stored::look(store)
    }

    fn is_frozen(&self, id: &SandboxId, _placed: &Placed) -> bool {
        self.hierarchy.is_frozen(id.as_str())
    }

    fn destroy(&self, id: &SandboxId, directory: &Path, placed: Option<&Placed>) -> Result<(), Problem> {
        let failed = |error: io::Error| removing(id, error);
        self.end_all(id, directory, placed)?;
        workspace::detach(&directory.join("workspace")).map_err(failed)?;
        self.hierarchy.remove(id.as_str()).map_err(failed)?;
        let _ = fs::remove_file(directory.join("agent.sock"));
        Ok(())
    }

    fn clear_way(&self, id: &SandboxId, directory: &Path) -> Result<(), Problem> {
        // Nothing of a box is at work before it is in its cgroup, which goes after the last process; looking through all processes takes
        // longer.
        if self.hierarchy.has_none(id.as_str()) { Ok(()) } else { self.destroy(id, directory, None) }
    }

    fn sweep(&self) {
        self.remove_stray_parents();
    }

    fn make_directory(&self, directory: &Path) -> io::Result<()> {
        self.spares.directory(directory)
    }

    fn wants_parent(&self) -> bool {
        // For a single sandbox it would take longer to make the parent than its copy saves.
        self.spares.makes_many() && self.parents.is_time()
    }

    fn make_parent(&self, environment: &Environment, learned: &[String]) {
        self.make_warm(environment, learned);
    }

    fn restock(&self, limits: &Limits) {
        self.spares.restock(limits.disk);
        if self.spares.makes_many()
            && !matches!(self.hierarchy, Hierarchy::Systemd(_))
            && let Ok(agent) = self.program()
        {
            self.stages.restock(&agent);
        }
    }

    fn workspace(&self, directory: &Path) -> Option<PathBuf> {
        Some(workspace_of(directory))
    }
}

/// Where an image is laid out for the time that it is brought back; what a killed one has left goes first.
struct View(PathBuf);

impl View {
    fn at(path: PathBuf) -> Self {
        let _ = fs::remove_dir_all(&path);
        Self(path)
    }
}

impl Drop for View {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The files of a sandbox that is not brought back, in the end: whoever cleared the way for it has put them away, and of one
/// that sleeps they are within reach.
struct WithinReach<'a>(&'a BoxRequest);

impl Drop for WithinReach<'_> {
    fn drop(&mut self) {
        if self.0.workspace == Some(Kind::Image) {
            let _ = workspace::attach(&workspace_of(&self.0.directory), &self.0.directory.join(IMAGE));
        }
    }
}

/// The last line of an agent's log; it is not the user's, and short.
fn last_words(spool: &Path) -> Option<String> {
    let log = fs::read(spool.join("agent.log")).ok()?;
    let tail = String::from_utf8_lossy(&log[log.len().saturating_sub(MAX_WORDS)..]).into_owned();
    tail.lines().next_back().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty())
}

/// Where a sandbox's files are on the host.
pub fn workspace_of(directory: &Path) -> PathBuf {
    directory.join("workspace")
}
