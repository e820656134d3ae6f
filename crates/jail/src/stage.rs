//! From a description to a running box.
//!
//! ```text
//! backend ── spawns ──> stage (host namespaces, one thread)
//!                         │ ahead of its work, as root: network, IPC and host name
//!                         │ binds the socket, opens the binds, knows the cgroup (v2)
//!                         ├─ clone3 ──> child (all namespaces new)
//!                         │ writes the id maps    │ waits for the maps
//!                         │ says the child's pid  │ assembles the root, joins the cgroups (v1), drops capabilities
//!                         └ exits                 └ becomes the agent: pid 1 of the box
//! ```
//! Its standard input is a socket, on which its work comes and, where it was bound in advance, the agent's own socket.
//! The stage answers on its standard output: one [`Report`] per line. End of file without an error is success,
//! because the child's copy closes when it becomes the agent.
//!
//! A stage that was started to wait for a jail ([`AWAITED`]) makes of the box what takes longest and depends on nothing, the
//! network, before it is told more; and its child goes on as the agent in the same program, because starting that again takes as
//! long as `/bin/true`. Others (systemd's scopes, weak isolation) start the agent's program anew.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{net::UnixListener, process::CommandExt},
    },
    path::PathBuf,
    process::Command,
};

use carrel_proto::guest::{AgentConfig, Meters, Places};
use rustix::{
    fs::{Gid, MemfdFlags, Mode, OFlags, SealFlags, Uid, fcntl_get_seals, memfd_create},
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with},
    pipe::{PipeFlags, pipe_with},
    process::{DumpableBehavior, set_dumpable_behavior, setsid},
    system::sethostname,
    thread::{sched_getaffinity, sched_getcpu, sched_setaffinity, sched_yield},
};
use serde::{Deserialize, Serialize};

use crate::{
    caps, mounts, net,
    sys::{self, Forked, SingleThread},
    userns::{self, Ids},
    work,
};

/// Everything a stage needs but for the [`CgroupSpec`], which follows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BoxSpec {
    /// The sandbox's own directory on the host: `agent.sock` is made there.
    pub directory: PathBuf,
    /// An empty directory of the host's.
    pub mount_point: PathBuf,
    /// The agent's program on the host.
    pub agent: PathBuf,
    pub hostname: String,
    /// Where the image of a warm interpreter can be opened; one that is gone by then is none.
    #[serde(default)]
    pub image: Option<PathBuf>,
    pub isolation: Isolation,
    /// The agent's socket comes along.
    pub bound: bool,
    /// The box itself joins its cgroups, when they come, as [`Held`]; otherwise a [`CgroupSpec`] comes before it is made.
    pub joins: bool,
    pub config: AgentConfig,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Isolation {
    /// Namespaces, as promised.
    Jail { ids: Ids, plan: Vec<mounts::Step> },
    /// Asked for by name: no namespaces, only what a plain process can be denied.
    Weak,
}

/// Cgroups that the box belongs to, and files its agent reads.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct CgroupSpec {
    /// `tasks` files that are joined by writing `0` (v1), by the box itself. One thread moving itself is the only move that does not
    /// wait for every CPU of the host: `cgroup.procs`, or somebody else's pid, takes 10 ms and more after an idle spell.
    pub join: Vec<PathBuf>,
    /// The directory of a v2 cgroup that the box is born in.
    pub born_in: Option<PathBuf>,
    pub oom: Option<PathBuf>,
    pub memory_peak: Option<PathBuf>,
    pub cpu: Option<PathBuf>,
    pub pids: Option<PathBuf>,
    pub memory: Option<PathBuf>,
    pub processes: Option<PathBuf>,
}

/// A line of the stage's answer.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Report {
    /// The agent's pid on the host.
    Pid(i32),
    Failed(Failure),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Failure {
    pub what: String,
    pub errno: Option<i32>,
    /// At the making of the namespaces: the one step that a host may forbid on principle.
    pub namespaces: bool,
}

impl Failure {
    fn new(what: impl Into<String>, error: &io::Error) -> Self {
        Self { what: format!("{}: {error}", what.into()), errno: error.raw_os_error(), namespaces: false }
    }
}

trait OrFail<T> {
    fn or_fail(self, what: &str) -> Result<T, Failure>;
}

impl<T, E: Into<io::Error>> OrFail<T> for Result<T, E> {
    fn or_fail(self, what: &str) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(what, &error.into()))
    }
}

const NAMESPACES: i32 = libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID;
/// Those that a stage can make before it knows which box they are for.
const NETWORK: i32 = libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;

/// The one variable of a stage that waits for a jail: as long as the agent's own, which takes its place.
pub const AWAITED: (&str, &str) = ("CARREL_AWAITED", "--------------------");
/// The one variable of an agent. The host's owner can read it and user code cannot: the stubs of a session share this
/// command line.
const SANDBOX: &str = "CARREL_SANDBOX";

/// Callers that wait for the agent to hear them: as many as the host allows.
const BACKLOG: i32 = -1;

/// The agent, from its configuration to its end; its value is the exit code.
pub type Serve = fn(SingleThread, AgentConfig) -> i32;

/// The stage's whole life. Reads a [`BoxSpec`] from standard input.
pub fn run(serve: Serve) -> i32 {
    match try_run(serve) {
        Ok(()) => 0,
        Err(failure) => {
            say(&Report::Failed(failure));
            1
        }
    }
}

fn say(report: &Report) {
    let mut line = serde_json::to_vec(report).unwrap_or_default();
    line.push(b'\n');
    // Nobody to tell when the backend is gone; the next call cleans up.
    let _ = io::stdout().write_all(&line);
}

fn try_run(serve: Serve) -> Result<(), Failure> {
    let thread = SingleThread::witness().or_fail("starting the stage")?;
    let awaits_jail = std::env::var_os(AWAITED.0).is_some();
    let networked = awaits_jail && userns::has_many_ids();
    // Of the host's network: in the box's, user code would find its name in the list of sockets.
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .or_fail("making the agent's socket")?;
    if networked {
        sys::unshare_network(&thread).or_fail("making the box's network")?;
        net::loopback_up().or_fail("bringing up the loopback interface")?;
    }
    let reading = "reading the description of the box";
    let mut work = work::receive(rustix::stdio::stdin()).or_fail(reading)?;
    let mut spec: BoxSpec = serde_json::from_slice(&work.text).map_err(io::Error::from).or_fail(reading)?;
    // Away from the caller's terminal: its ctrl-C and hang-up are not the box's.
    let _ = setsid();
    std::env::set_current_dir(&spec.directory).or_fail("entering the sandbox's directory")?;

    let listener = match work.listener(spec.bound).or_fail(reading)? {
        Some(listener) => UnixListener::from(listener),
        // Relative, so that a deep state directory does not pass the length of a socket's name.
        None => bind_here(socket).or_fail("binding the agent's socket")?,
    };

    match spec.isolation.clone() {
        Isolation::Weak => {
            let (born_in, meters) = join_cgroup(&mut work)?;
            match sys::fork(&thread, 0, born_in.as_ref().map(AsFd::as_fd)).or_fail("starting the agent")? {
                Forked::Parent { pid, .. } => {
                    say(&Report::Pid(pid));
                    Ok(())
                }
                Forked::Child => Err(become_agent(&mut spec, &listener, meters, None)),
            }
        }
        Isolation::Jail { ids, plan } => {
            let privileged = userns::has_many_ids();
            if networked {
                sethostname(spec.hostname.as_bytes()).or_fail("naming the box")?;
            }
            let mut trees = Vec::new();
            if privileged {
                for step in &plan {
                    let idmap = match step {
                        mounts::Step::BindAsUser { source, .. } => Some(owner_map(&thread, source, &ids)?),
                        _ => None,
                    };
                    let tree = mounts::open_bind(step, idmap.as_ref().map(AsFd::as_fd))
                        .map_err(|error| Failure::new("preparing the root", &io::Error::other(error)))?;
                    trees.push(tree);
                }
            }
            // The working directory is the one place of the host's that comes along into the box's own view of mounts, and
            // the way to any other may be closed to the ids it will have.
            std::env::set_current_dir(&spec.mount_point).or_fail("entering the mount point")?;
            let (mapped, go) = pipe_with(PipeFlags::CLOEXEC).or_fail("making a pipe")?;
            let (born_in, meters) = match spec.joins {
                true => (None, Held::default()),
                false => join_cgroup(&mut work)?,
            };
            let image = open_image(&spec);
            let (made, said) = pipe_with(PipeFlags::CLOEXEC).or_fail("making a pipe")?;
            // Sessions that come back from disk bring a user namespace of their own, a sibling of the box's: their pid
            // namespaces can only be made below one that both descend from.
            let resume = privileged && spec.config.resume;
            let all = if networked { NAMESPACES } else { NAMESPACES | NETWORK };
            let namespaces = if resume { libc::CLONE_NEWPID } else { all };
            let forked =
                sys::fork(&thread, namespaces.unsigned_abs().into(), born_in.as_ref().map(AsFd::as_fd));
            match forked.map_err(|error| Failure {
                namespaces: true,
                ..Failure::new("making the namespaces", &error)
            })? {
                Forked::Parent { pid, .. } => {
                    drop(said);
                    if resume && rustix::io::read(&made, &mut [0]).or_fail("waiting for the namespaces")? == 0
                    {
                        // The child has said why.
                        return Ok(());
                    }
                    userns::write_maps(pid, &ids, privileged).map_err(|error| Failure {
                        namespaces: true,
                        ..Failure::new("mapping user ids", &error)
                    })?;
                    say(&Report::Pid(pid));
                    rustix::io::write(&go, b"g").or_fail("waking the box")?;
                    // All that is left to do here is to end, which takes a while: not where the box is at work.
                    leave_cpu();
                    Ok(())
                }
                Forked::Child => {
                    drop(go);
                    if resume {
                        let proc = mounts::open_proc().or_fail("making a proc file system")?;
                        let at = plan.iter().position(|step| matches!(step, mounts::Step::Proc { .. }));
                        if let Some(slot) = at.and_then(|at| trees.get_mut(at)) {
                            *slot = Some(proc);
                        }
                        sys::unshare_box(&thread).or_fail("making the namespaces")?;
                        if !networked {
                            sys::unshare_network(&thread).or_fail("making the namespaces")?;
                        }
                        rustix::io::write(&said, b"m").or_fail("waking the stage")?;
                    }
                    let mut byte = [0];
                    if rustix::io::read(&mapped, &mut byte).or_fail("waiting for the id maps")? == 0 {
                        // The stage died or gave up; it has said why.
                        sys::exit_now(1);
                    }
                    let work = spec.joins.then_some(work);
                    let inside = Inside { ids, plan, trees, privileged, networked, work, image };
                    if awaits_jail && spec.config.sandbox.as_str().len() == AWAITED.1.len() {
                        go_on_as_agent(thread, spec, &listener, meters, inside, serve)
                    } else {
                        Err(become_agent(&mut spec, &listener, meters, Some(inside)))
                    }
                }
            }
        }
    }
}

/// To another CPU, where there is one; else the next in line comes first.
fn leave_cpu() {
    let here = sched_getcpu();
    match sched_getaffinity(None) {
        Ok(mut allowed) if allowed.count() > 1 => {
            allowed.unset(here);
            let _ = sched_setaffinity(None, &allowed);
        }
        _ => sched_yield(),
    }
}

fn bind_here(socket: OwnedFd) -> io::Result<UnixListener> {
    rustix::net::bind(&socket, &SocketAddrUnix::new("agent.sock")?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(UnixListener::from(socket))
}

/// Waits for the cgroup and enters it. What a v2 box is born in is opened instead.
fn join_cgroup(work: &mut work::Received) -> Result<(Option<File>, Held), Failure> {
    let reading = "reading the cgroup of the box";
    let (text, _) = work.rest(rustix::stdio::stdin()).or_fail(reading)?;
    let spec: CgroupSpec = serde_json::from_slice(&text).map_err(io::Error::from).or_fail(reading)?;
    let born_in = match &spec.born_in {
        Some(directory) => Some(File::open(directory).or_fail("opening the cgroup")?),
        None => None,
    };
    let mut held = Held::open(&spec).or_fail("opening the cgroup's files")?;
    held.enter()?;
    Ok((born_in, held))
}

/// The image of which interpreters of the box can be copies; without it they are started. By its seals it is known that nothing else
/// has the name of one by now.
fn open_image(spec: &BoxSpec) -> Option<File> {
    let is_image = |file: &File| fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::WRITE));
    spec.image.as_ref().and_then(|path| File::open(path).ok()).filter(is_image)
}

/// Files of a box's cgroups: those that it joins them by, and the meters that its agent inherits.
#[derive(Debug, Default)]
pub struct Held {
    join: Vec<File>,
    oom: Option<File>,
    memory_peak: Option<File>,
    cpu: Option<File>,
    pids: Option<File>,
    memory: Option<File>,
    processes: Option<File>,
}

/// The configuration of an agent that is started anew; the rest, small numbers as well, is named in it.
pub const CONFIG: i32 = 3;

impl Held {
    pub fn open(spec: &CgroupSpec) -> io::Result<Self> {
        // Older kernels do not have every meter.
        let open = |path: &Option<PathBuf>, write: bool| match path {
            None => Ok(None),
            Some(path) => match OpenOptions::new().read(true).write(write).open(path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                opened => opened.map(Some),
            },
        };
        let join = spec.join.iter().map(|tasks| OpenOptions::new().write(true).open(tasks));
        Ok(Self {
            join: join.collect::<io::Result<_>>()?,
            oom: open(&spec.oom, false)?,
            // Writing resets the peak where the kernel can do that; reading alone is enough elsewhere.
            memory_peak: open(&spec.memory_peak, true).or_else(|_| open(&spec.memory_peak, false))?,
            cpu: open(&spec.cpu, false)?,
            pids: open(&spec.pids, false)?,
            memory: open(&spec.memory, false)?,
            processes: open(&spec.processes, false)?,
        })
    }

    fn enter(&mut self) -> Result<(), Failure> {
        for mut tasks in self.join.drain(..) {
            tasks.write_all(b"0").or_fail("joining a cgroup")?;
        }
        Ok(())
    }

    /// What is there, as it is sent to a box that joins by itself: a word on each, and the files.
    pub fn parcel(&self) -> io::Result<(Vec<u8>, Vec<BorrowedFd<'_>>)> {
        let Self { join, oom, memory_peak, cpu, pids, memory, processes } = self;
        let meters = [oom, memory_peak, cpu, pids, memory, processes];
        let there: Vec<bool> = meters.iter().map(|meter| meter.is_some()).collect();
        let files = join.iter().chain(meters.into_iter().flatten()).map(AsFd::as_fd).collect();
        Ok((serde_json::to_vec(&(join.len(), there))?, files))
    }

    /// The other side of [`Self::parcel`].
    fn unpack(text: &[u8], files: Vec<OwnedFd>) -> io::Result<Self> {
        let (joins, there): (usize, Vec<bool>) = serde_json::from_slice(text)?;
        let count = joins + there.iter().filter(|there| **there).count();
        let (6, true) = (there.len(), files.len() == count) else {
            return Err(io::ErrorKind::InvalidData.into());
        };
        let mut files = files.into_iter().map(File::from);
        let join = files.by_ref().take(joins).collect();
        let mut meters = there.into_iter().map(|there| if there { files.next() } else { None });
        let mut next = || meters.next().flatten();
        Ok(Self {
            join,
            oom: next(),
            memory_peak: next(),
            cpu: next(),
            pids: next(),
            memory: next(),
            processes: next(),
        })
    }
}

struct Inside {
    ids: Ids,
    plan: Vec<mounts::Step>,
    trees: Vec<Option<mounts::Tree>>,
    privileged: bool,
    /// Its network is there already, with all that belongs to it.
    networked: bool,
    /// Where its cgroups come from, if it joins them by itself.
    work: Option<work::Received>,
    image: Option<File>,
}

/// In the child of a stage that waited for a jail: the agent, in this very process. Comes back only with what went wrong.
fn go_on_as_agent(
    thread: SingleThread,
    mut spec: BoxSpec,
    listener: &UnixListener,
    held: Held,
    inside: Inside,
    serve: Serve,
) -> Result<(), Failure> {
    let what = "going on as the agent";
    let (held, image) = enter_box(&spec, inside, held)?;
    let handed = hand_over(&mut spec, listener, &held, image.as_ref(), false)?;
    caps::reduce(caps::agent()).or_fail("dropping capabilities")?;
    // As after `exec`: its own files in /proc are its own.
    set_dumpable_behavior(DumpableBehavior::Dumpable).or_fail(what)?;
    let _ = rustix::thread::set_name(c"agent");
    sys::appear_as(
        &format!("{}={}", AWAITED.0, AWAITED.1),
        &format!("{SANDBOX}={}", spec.config.sandbox.as_str()),
    )
    .or_fail(what)?;
    // From here on there is nobody to tell: the report closes, which is success.
    sys::place(rustix::stdio::stdin(), 1).or_fail(what)?;
    sys::close_from(handed.unsigned_abs()).or_fail(what)?;
    sys::exit_now(serve(thread, spec.config))
}

/// In the child: everything up to `exec`. Comes back only with what went wrong.
fn become_agent(spec: &mut BoxSpec, listener: &UnixListener, held: Held, inside: Option<Inside>) -> Failure {
    match prepare(spec, listener, held, inside) {
        Err(failure) => failure,
        // Kept open until then: a number of theirs may be one of the agent's by now.
        Ok((program, _held, _image)) => {
            let error = Command::new(&program)
                .arg0("carrel")
                .arg("agent")
                .env_clear()
                .env(SANDBOX, spec.config.sandbox.as_str())
                .exec();
            Failure::new(format!("starting the agent {}", program.display()), &error)
        }
    }
}

fn prepare(
    spec: &mut BoxSpec,
    listener: &UnixListener,
    held: Held,
    inside: Option<Inside>,
) -> Result<(PathBuf, Held, Option<File>), Failure> {
    let (program, held, image) = match inside {
        None => (spec.agent.clone(), held, open_image(spec)),
        Some(inside) => {
            let (held, image) = enter_box(spec, inside, held)?;
            (PathBuf::from(Places::AGENT), held, image)
        }
    };
    hand_over(spec, listener, &held, image.as_ref(), true)?;
    if matches!(spec.isolation, Isolation::Jail { .. }) {
        caps::reduce(caps::agent()).or_fail("dropping capabilities")?;
    }
    Ok((program, held, image))
}

/// Makes the box around this process. Gives back what its agent inherits.
fn enter_box(spec: &BoxSpec, inside: Inside, mut held: Held) -> Result<(Held, Option<File>), Failure> {
    let Inside { ids, plan, trees, privileged, networked, work, image } = inside;
    if privileged {
        userns::become_ids(ids.agent, ids.agent, true).or_fail("changing to the box's ids")?;
    }
    if work.is_none() {
        own_cgroup_namespace()?;
    }
    if !networked {
        sethostname(spec.hostname.as_bytes()).or_fail("naming the box")?;
        net::loopback_up().or_fail("bringing up the loopback interface")?;
    }
    let user = (userns::USER, userns::USER);
    let step = |error: mounts::MountError| Failure::new("assembling the root", &io::Error::other(error));
    let root = mounts::assemble(&plan, trees, user).map_err(step)?;
    if let Some(mut work) = work {
        let reading = "reading the cgroup of the box";
        let (text, files) = work.rest(rustix::stdio::stdin()).or_fail(reading)?;
        held = Held::unpack(&text, files).or_fail(reading)?;
        held.enter()?;
        own_cgroup_namespace()?;
    }
    mounts::enter(&root).map_err(step)?;
    Ok((held, image))
}

/// Made only in the cgroup of the box, so that this is its root. For an ordinary user it is also the first step that needs the
/// rights of a user namespace: AppArmor lets one be made and then denies them.
fn own_cgroup_namespace() -> Result<(), Failure> {
    sys::unshare_cgroup().map_err(|error| Failure {
        namespaces: true,
        ..Failure::new("making the cgroup namespace", &error.into())
    })
}

/// Puts what the agent is given at fixed numbers, and says where they end. With `anew` the configuration is among them, for a
/// program that is started anew.
fn hand_over(
    spec: &mut BoxSpec,
    listener: &UnixListener,
    held: &Held,
    image: Option<&File>,
    anew: bool,
) -> Result<i32, Failure> {
    let what = "handing descriptors to the agent";
    // Out of the way of the fixed numbers first: a source could otherwise be overwritten by an earlier one.
    let high = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 64).or_fail(what);
    let mut next = if anew { CONFIG + 1 } else { CONFIG };
    let mut placed: Vec<(OwnedFd, i32)> = Vec::new();
    let mut give = |file: Option<BorrowedFd<'_>>| -> Result<Option<i32>, Failure> {
        let Some(file) = file else { return Ok(None) };
        let number = next;
        next += 1;
        placed.push((high(file)?, number));
        Ok(Some(number))
    };
    spec.config.listener = give(Some(listener.as_fd()))?.unwrap_or_default();
    spec.config.meters = Meters {
        oom: give(held.oom.as_ref().map(AsFd::as_fd))?,
        memory_peak: give(held.memory_peak.as_ref().map(AsFd::as_fd))?,
        cpu: give(held.cpu.as_ref().map(AsFd::as_fd))?,
        pids: give(held.pids.as_ref().map(AsFd::as_fd))?,
        memory: give(held.memory.as_ref().map(AsFd::as_fd))?,
        processes: give(held.processes.as_ref().map(AsFd::as_fd))?,
    };
    spec.config.image = give(image.map(AsFd::as_fd))?;
    if anew {
        let mut config = File::from(memfd_create("config", MemfdFlags::CLOEXEC).or_fail(what)?);
        let text = serde_json::to_vec(&spec.config).map_err(io::Error::from).or_fail(what)?;
        config.write_all(&text).or_fail(what)?;
        io::Seek::rewind(&mut config).or_fail(what)?;
        placed.push((high(config.as_fd())?, CONFIG));
    }
    let null =
        high(File::options().read(true).write(true).open("/dev/null").or_fail("opening /dev/null")?.as_fd())?;
    let log = rustix::fs::open(
        format!("{}/agent.log", spec.config.places.spool),
        OFlags::CREATE | OFlags::WRONLY | OFlags::APPEND | OFlags::CLOEXEC,
        Mode::from_raw_mode(0o600),
    );
    let log = high(log.or_fail("opening the agent's log")?.as_fd())?;
    sys::close_on_exec_from(0).or_fail(what)?;
    for (fd, number) in &placed {
        sys::place(fd, *number).or_fail(what)?;
    }
    sys::place(&null, 0).or_fail(what)?;
    sys::place(&log, 2).or_fail(what)?;
    // Standard output is the report: it closes when the agent starts (see the module's head), and the agent's
    // runtime opens /dev/null in its place.
    Ok(next)
}

/// A user namespace that shows the owner of `source` as the box's user: for an id-mapped mount.
fn owner_map(thread: &SingleThread, source: &str, ids: &Ids) -> Result<OwnedFd, Failure> {
    let what = "preparing the project's mount";
    let stat = rustix::fs::stat(source).or_fail(what)?;
    let (uid, gid) = ids.user_outside();
    let (hold, done) = pipe_with(PipeFlags::CLOEXEC).or_fail(what)?;
    match sys::fork(thread, libc::CLONE_NEWUSER as u64, None).or_fail(what)? {
        Forked::Child => {
            drop(done);
            let _ = rustix::io::read(&hold, &mut [0]);
            sys::exit_now(0)
        }
        Forked::Parent { pid, .. } => {
            let map = |inside, outside| userns::Mapping { inside, outside };
            let shown = Ids {
                uid: vec![map(stat.st_uid, uid)],
                gid: vec![map(stat.st_gid, gid)],
                agent: stat.st_uid,
            };
            userns::write_maps(pid, &shown, true).or_fail(what)?;
            let namespace = File::open(format!("/proc/{pid}/ns/user")).or_fail(what)?;
            drop(done);
            Ok(namespace.into())
        }
    }
}

/// Gives a host path to ids of the box; used by the backend for what it makes. A link is not followed: some of it is in a
/// directory that was a box's before.
pub fn give(path: &std::path::Path, uid: u32, gid: u32) -> io::Result<()> {
    let (uid, gid) = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
    Ok(rustix::fs::chownat(rustix::fs::CWD, path, uid, gid, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?)
}
