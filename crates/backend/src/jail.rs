//! The default backend: namespaces of the host's own kernel.

use std::{
    borrow::Cow,
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use carrel_jail::{
    cgroup::{Hierarchy, freezer::FreezeError, update::UpdateError},
    mounts::Step,
    stage::{self, BoxSpec, CgroupSpec, Isolation},
    tree,
    userns::{self, Ids},
    workspace::{self, Kind},
};
use carrel_proto::{
    guest::{AgentConfig, Meters, Places},
    id::SandboxId,
    limits::{ByteSize, Enforced, Enforcement, Limits},
    message::PROTOCOL,
    problem::{Code, Problem},
};
use rustix::process::{PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::{
    Backend, BoxRequest, IsolationLevel, Memory, Placed,
    checkpoint::{self, Criu, Image, Living},
    environment::{self, Environment},
    grafts::{self, Scion},
    guest_programs,
    light::Light,
    memory_of,
    spares::{SPOOLED, Spares},
    stages::{self, Stages},
    steps::{Step as At, Watch},
    stored,
    warm::Parents,
};

/// The file system of a workspace, where it has one of its own.
const IMAGE: &str = "workspace.ext4";
/// What is told of an agent's log, in bytes.
const MAX_WORDS: usize = 300;
/// How long a killed box may take to be gone.
const DYING: Duration = Duration::from_secs(10);

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

    fn make_workspace(&self, request: &BoxRequest, owner: (u32, u32)) -> io::Result<(Kind, Enforcement)> {
        let directory = request.directory.join("workspace");
        let image = request.directory.join(IMAGE);
        fs::create_dir_all(&directory)?;
        let (offered, enforcement) = workspace::probe(request.limits.disk);
        let kind = request.workspace.unwrap_or(offered);
        match (kind, request.workspace.is_some()) {
            (Kind::Image, true) => workspace::attach(&directory, &image)?,
            (Kind::Image, false) => {
                self.spares.workspace(&directory, &image, request.limits.disk)?;
                stage::give(&directory, owner.0, owner.1)?;
            }
            (Kind::Directory, true) => {}
            (Kind::Directory, false) => stage::give(&directory, owner.0, owner.1)?,
        }
        if let Some(scion) = &request.scion {
            scion.lay_out(&directory, &Self::ids(request.number))?;
        }
        Ok((kind, enforcement))
    }

    fn spec(
        &self,
        request: &BoxRequest,
        hierarchy: &Hierarchy,
        agent: PathBuf,
        watch_disk: bool,
    ) -> io::Result<BoxSpec> {
        let ids = Self::ids(request.number);
        let directory = &request.directory;
        let jailed = request.isolation == IsolationLevel::Jail;
        let spool = directory.join("spool");
        let mut variables = request.environment.session_variables();
        let (isolation, places) = if jailed {
            let mut plan = request.environment.plan();
            plan.extend(environment::common_plan(
                &agent,
                &directory.join("workspace"),
                &spool,
                request.limits.memory.0,
            ));
            plan.extend(request.environment.late_plan());
            if let Some(project) = &request.project {
                plan.push(project_step(project));
            }
            (Isolation::Jail { ids, plan }, Places::in_box())
        } else {
            let place = |name: &str| directory.join(name).to_string_lossy().into_owned();
            let (workspace, home, run) = (place("workspace"), place("home"), place("run"));
            for made in [&home, &run] {
                fs::create_dir_all(made)?;
            }
            variables.insert("TMPDIR".into(), home.clone());
            variables.insert("CARREL_WORKSPACE".into(), workspace.clone());
            (Isolation::Weak, Places { workspace, home, run, spool: spool.to_string_lossy().into_owned() })
        };
        let enforced = hierarchy.enforced(Enforcement::SizedFilesystem);
        let no_pids = matches!(enforced.pids, Enforcement::Rlimit(_));
        let config = AgentConfig {
            protocol: PROTOCOL,
            sandbox: request.id.clone(),
            limits: request.limits.clone(),
            interpreters: request.environment.interpreters.clone(),
            variables,
            places,
            listener: 0,
            meters: Meters::default(),
            namespaces: jailed,
            user: (userns::USER, userns::USER),
            watch_disk,
            // With weak isolation the limit would count everything else this user runs.
            nproc: (no_pids && jailed).then_some(u64::from(request.limits.pids)),
            idle_timeout_s: request.idle_timeout_s,
            max_lifetime_s: request.max_lifetime_s,
            resume: request.resume,
            first: request.first,
            life: request.life,
            undo_calls: request.undo_calls,
            image: None,
            parent: request.parent.clone(),
            scion: request.scion.as_ref().map(|scion| scion.described()),
        };
        let copies = jailed && request.parent.is_none();
        Ok(BoxSpec {
            directory: directory.clone(),
            agent,
            mount_point: self.mount_point(),
            hostname: "carrel".into(),
            image: if copies { self.parents.image(&request.environment) } else { None },
            scion: request.scion.as_ref().map(|scion| scion.path()),
            isolation,
            bound: false,
            joins: jailed && matches!(hierarchy, Hierarchy::V1 { .. }),
            config,
        })
    }

    fn try_create(&self, request: &BoxRequest) -> Result<Placed, Problem> {
        let failed = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| Problem::internal(format!("{what}: {error}"))
        };
        let jailed = request.isolation == IsolationLevel::Jail;
        let ids = Self::ids(request.number);
        let own = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let owner = if jailed { ids.user_outside() } else { own };
        let agent = self.program().map_err(failed("writing the agent's program"))?;
        // Loads while the rest is made, and waits for its description.
        let scope = self.hierarchy.scope(request.id.as_str());
        let stage = match &scope {
            Some(scope) => stages::start(scope.command(&request.limits, &agent)),
            None if jailed => self.stages.take(&agent),
            None => stages::start(stages::bare(&agent)),
        };
        let stage = stage.map_err(failed("starting the agent's program"))?;
        for made in [self.mount_point(), request.directory.join("spool")] {
            fs::create_dir_all(made).map_err(failed("making the sandbox's directory"))?;
        }
        if jailed && userns::has_many_ids() {
            let agent_id = ids.agent_outside();
            let spool = request.directory.join("spool");
            stage::give(&spool, agent_id, agent_id).map_err(failed("giving the spool away"))?;
            // There already in a directory that was kept ready; else they are made in the box.
            for name in SPOOLED {
                let _ = stage::give(&spool.join(name), agent_id, agent_id);
            }
        }
        let listener = self.spares.listener(&request.directory);
        if listener.is_none() {
            let _ = fs::remove_file(request.directory.join("agent.sock"));
        }
        let (kind, disk) = self.make_workspace(request, owner).map_err(failed("making the workspace"))?;
        let watch = kind == Kind::Directory;
        let mut hierarchy = Cow::Borrowed(&self.hierarchy);
        let spec =
            self.spec(request, &hierarchy, agent.clone(), watch).map_err(failed("describing the box"))?;
        let joins = spec.joins;
        stages::begin(&stage, spec, listener.as_ref())?;
        let cgroup = match &scope {
            Some(scope) => scope.spec(),
            None => {
                hierarchy.create(request.id.as_str(), &request.limits).map_err(failed("making the cgroup"))?
            }
        };
        let mut pid = stages::finish(stage, &agent, &cgroup, joins);
        if let (Err(problem), Some(_)) = (&pid, &scope)
            && problem.code == Code::Internal
        {
            // systemd was asked and did not start the stage: then as on a host without it, and the box says so.
            let why = format!("systemd did not make a scope ({})", problem.message);
            hierarchy = Cow::Owned(Hierarchy::None { why });
            let stage = self.stages.take(&agent).map_err(failed("starting the agent's program"))?;
            let spec =
                self.spec(request, &hierarchy, agent.clone(), watch).map_err(failed("describing the box"))?;
            stages::begin(&stage, spec, listener.as_ref())?;
            pid = stages::finish(stage, &agent, &CgroupSpec::default(), false);
        } else if let (Ok(pid), Some(scope)) = (&pid, &scope)
            && !scope.holds(*pid)
        {
            return Err(Problem::internal("systemd put the box into another cgroup than it was asked to"));
        }
        let pid = pid?;
        let start_time = tree::start_time(pid).ok_or_else(|| Problem::internal("the agent ended at once"))?;
        let mut enforced = hierarchy.enforced(disk);
        if !jailed {
            enforced.pids = Enforcement::Nothing("weak isolation has no user namespace of its own".into());
        }
        self.spares.count();
        let (isolation, life) = (request.isolation, request.life);
        Ok(Placed { pid, start_time, workspace: kind, isolation, enforced, owner, life })
    }

    /// Ends every process of a sandbox.
    fn end_all(&self, id: &SandboxId, directory: &Path, placed: Option<&Placed>) -> Result<(), Problem> {
        let failed = |error: io::Error| removing(id, error);
        // Of a box that was never made.
        drop(self.spares.listener(directory));
        let mut agents: Vec<i32> =
            placed.filter(|placed| self.is_alive(placed)).map(|placed| placed.pid).into_iter().collect();
        // No namespace ends with a weak agent: runners that could not end their processes are looked for as well.
        if placed.is_none_or(|placed| placed.isolation == IsolationLevel::Weak) {
            agents.extend(find_agents(id));
        }
        for pid in agents {
            // The kernel does this for a jailed box; a weak one has no namespace that ends with its agent. Not for both: whoever is
            // killed half-way leaves processes that stand still, and an agent that waits for them.
            if placed.map_or_else(|| shares_our_pids(pid), |placed| placed.isolation == IsolationLevel::Weak)
            {
                tree::kill_below(pid);
            }
            end(pid, &self.hierarchy).map_err(failed)?;
        }
        // Nothing is left in the cgroup of a jailed box whose first process is gone; a weak one may have leftovers.
        let deadline = Instant::now() + DYING;
        loop {
            let left = self.hierarchy.processes(id.as_str());
            if left.is_empty() || Instant::now() > deadline {
                break;
            }
            self.hierarchy.kill(id.as_str());
            for pid in left {
                if let Ok(fd) = pidfd_open(userns::pid(pid), PidfdFlags::empty()) {
                    let _ = kill_process(userns::pid(pid), Signal::KILL);
                    self.hierarchy.let_die(pid);
                    tree::wait_readable(&fd, deadline);
                }
            }
        }
        Ok(())
    }

    fn try_graft(&self, request: &BoxRequest, store: &Path, scion: &Arc<Scion>) -> Result<Placed, Problem> {
        let spool = request.directory.join("spool");
        let to = Self::ids(request.number);
        let mut request =
            BoxRequest { scion: Some(Arc::clone(scion)), workspace: None, first: None, ..request.clone() };
        stored::take_spool(store, &request.directory, &to)?;
        self.watch.reached(At::FilesLaid);
        request.life = checkpoint::give_state(store, &spool)?.max(request.life);
        self.watch.reached(At::StateGiven);
        let placed = self.create(&request)?;
        self.watch.reached(At::BoxMade);
        let grown = self
            .living(&request.directory, &placed)
            .and_then(|living| grafts::grow(&living, store, scion, &to));
        if let Err(problem) = grown {
            let _ = self.destroy(&request.id, &request.directory, Some(&placed));
            return Err(problem);
        }
        Ok(placed)
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

fn removing(id: &SandboxId, error: io::Error) -> Problem {
    Problem::internal(format!("removing sandbox {id}: {error}"))
}

fn project_step(project: &crate::Project) -> Step {
    let source = project.directory.to_string_lossy().into_owned();
    let (target, writable) = (Places::PROJECT.to_owned(), project.writable);
    if userns::has_many_ids() {
        Step::BindAsUser { source, target, writable }
    } else {
        Step::Bind { source, target, writable, device: false }
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
        store: &Path,
    ) -> Result<Arc<Scion>, Problem> {
        let living = self.living(directory, placed)?;
        grafts::cut(&living, store, || {
            // A new workspace must be of the same kind.
            let same = workspace::probe(limits.disk).0 == placed.workspace;
            let files = same.then(|| Light::read(&workspace_of(directory), &[])).flatten();
            let files = files.ok_or_else(|| grafts::too_much("/workspace"))?;
            self.watch.reached(At::FilesCopied);
            stored::put_spool(directory, store)?;
            self.watch.reached(At::SpoolCopied);
            Ok((files, Self::ids(number)))
        })
    }

    fn graft(&self, request: &BoxRequest, store: &Path, scion: &Arc<Scion>) -> Result<Placed, Problem> {
        // Whatever goes wrong, there is another way.
        self.try_graft(request, store, scion).map_err(|problem| match problem.code {
            Code::Disk => problem,
            _ => Problem::new(Code::Unsupported, problem.message),
        })
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

/// Whether a process is in this process's own pid namespace, as nothing of a jailed box is.
fn shares_our_pids(pid: i32) -> bool {
    let namespace = |whose: &str| fs::read_link(format!("/proc/{whose}/ns/pid")).ok();
    namespace("self").is_some_and(|own| namespace(&pid.to_string()) == Some(own))
}

/// Kills a process and waits until it is gone. With pid 1 of a box goes everything in it.
fn end(pid: i32, hierarchy: &Hierarchy) -> io::Result<()> {
    let fd = match pidfd_open(userns::pid(pid), PidfdFlags::empty()) {
        Ok(fd) => fd,
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    match pidfd_send_signal(&fd, Signal::KILL) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => {}
        Err(error) => return Err(error.into()),
    }
    hierarchy.let_die(pid);
    if tree::wait_readable(&fd, Instant::now() + DYING) {
        Ok(())
    } else {
        Err(io::Error::other(format!("process {pid} does not die")))
    }
}

/// Agents of a sandbox whose maker died before it could write down their pid. Their environment names the sandbox.
/// A session's stubs have the same one; they end with their agent, so ending them too does no harm.
fn find_agents(id: &SandboxId) -> Vec<i32> {
    let wanted = format!("CARREL_SANDBOX={id}\0");
    let is_agent = |pid: &i32| {
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == b"carrel\0agent\0")
            && fs::read(format!("/proc/{pid}/environ")).is_ok_and(|all| all == wanted.as_bytes())
    };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_agent).collect()
}
