//! A box is made.

use std::{borrow::Cow, fs, io, path::PathBuf};

use carrel_jail::{
    cgroup::Hierarchy,
    mounts::Step,
    stage::{self, BoxSpec, CgroupSpec, Isolation},
    tree, userns,
    workspace::{self, Kind},
};
use carrel_proto::{
    guest::{AgentConfig, Meters, Places},
    limits::Enforcement,
    message::PROTOCOL,
    problem::{Code, Problem},
};

use super::{IMAGE, Jail};
use crate::{BoxRequest, IsolationLevel, Placed, environment, spares::SPOOLED, stages};

impl Jail {
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
        };
        let copies = jailed && request.parent.is_none();
        Ok(BoxSpec {
            directory: directory.clone(),
            agent,
            mount_point: self.mount_point(),
            hostname: "carrel".into(),
            image: if copies { self.parents.image(&request.environment) } else { None },
            isolation,
            bound: false,
            joins: jailed && matches!(hierarchy, Hierarchy::V1 { .. }),
            config,
        })
    }

    pub(super) fn try_create(&self, request: &BoxRequest) -> Result<Placed, Problem> {
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
