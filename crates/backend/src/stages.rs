//! Stages from the backend's side: started, given their work, and what their failures mean. What a stage does is in
//! `carrel_jail::stage`.

use std::{
    fs, io,
    io::{BufRead, BufReader, Read},
    os::{
        fd::OwnedFd,
        unix::{
            net::{UnixListener, UnixStream},
            process::CommandExt,
        },
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use carrel_jail::{
    stage::{self, BoxSpec, CgroupSpec, Failure, Held, Report},
    work,
};
use carrel_proto::problem::{Code, Problem};

/// Of what a program that could not start the stage says.
const MAX_SAID: u64 = 400;
/// How often, and how long apart, a program that is being written is tried again.
const BUSY_TRIES: u32 = 50;
const BUSY_PAUSE: Duration = Duration::from_millis(2);

/// Most stages that wait for a sandbox: those of callers who then found theirs, or were refused, are for the next ones.
const MAX_WAITING: usize = 4;

/// Stages of sandboxes that are about to be made: they load while the sandbox is written down. A process that makes many
/// sandboxes keeps one ready.
#[derive(Debug, Default)]
pub(crate) struct Stages(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    stages: Vec<Stage>,
    /// Sandboxes on their way that have not taken theirs.
    expected: usize,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stages {
    pub(crate) fn expect(&self, agent: &Path) {
        {
            let mut waiting = lock(&self.0);
            waiting.expected = (waiting.expected + 1).min(MAX_WAITING);
            if waiting.stages.len() >= waiting.expected {
                return;
            }
        }
        // What goes wrong here goes wrong again where it can be told.
        let started = start(awaiting(agent));
        lock(&self.0).stages.extend(started);
    }

    /// For the next sandbox; called when nobody waits for one.
    pub(crate) fn restock(&self, agent: &Path) {
        let mut waiting = lock(&self.0);
        // Sandboxes that were expected and then refused never took theirs.
        waiting.expected = 0;
        let ended = |stage: &mut Stage| !matches!(stage.child.try_wait(), Ok(None));
        waiting.stages.retain_mut(|stage| !ended(stage));
        if waiting.stages.is_empty() {
            waiting.stages.extend(start(awaiting(agent)));
        }
    }

    pub(crate) fn take(&self, agent: &Path) -> io::Result<Stage> {
        loop {
            let next = {
                let mut waiting = lock(&self.0);
                waiting.expected = waiting.expected.saturating_sub(1);
                // The oldest has had the most time.
                (!waiting.stages.is_empty()).then(|| waiting.stages.remove(0))
            };
            let Some(mut stage) = next else { return start(awaiting(agent)) };
            // One that was not needed at its time may have been ended since.
            if matches!(stage.child.try_wait(), Ok(None)) {
                return Ok(stage);
            }
        }
    }
}

impl Drop for Stages {
    fn drop(&mut self) {
        // Those that were not needed after all: without a description they end by themselves.
        for Stage { mut child, line } in std::mem::take(&mut lock(&self.0).stages) {
            drop(line);
            let _ = child.wait();
        }
    }
}

/// One that may prepare a jail before it knows which, and goes on as its agent.
fn awaiting(agent: &Path) -> Command {
    let mut command = bare(agent);
    command.arg0("carrel").env(stage::AWAITED.0, stage::AWAITED.1);
    command
}

pub(crate) fn bare(agent: &Path) -> Command {
    let mut command = Command::new(agent);
    command.env_clear();
    command
}

/// A stage that waits for its description; it ends by itself when none comes.
#[derive(Debug)]
pub(crate) struct Stage {
    child: Child,
    line: UnixStream,
}

pub(crate) fn start(mut command: Command) -> io::Result<Stage> {
    let (line, theirs) = UnixStream::pair()?;
    // What comes on the error stream is from whoever could not even start it.
    command.arg("stage").stdin(OwnedFd::from(theirs)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut tries = 0;
    loop {
        match command.spawn() {
            // A child that another thread has just forked may still hold the program open for writing.
            Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy && tries < BUSY_TRIES => {
                tries += 1;
                std::thread::sleep(BUSY_PAUSE);
            }
            started => return Ok(Stage { child: started?, line }),
        }
    }
}

/// Gives a stage its work, but for the cgroup: it begins while that is made.
pub(crate) fn begin(stage: &Stage, spec: BoxSpec, listener: Option<&UnixListener>) -> Result<(), Problem> {
    let spec = BoxSpec { bound: listener.is_some(), ..spec };
    let text = serde_json::to_vec(&spec).map_err(|error| broken(&spec.agent, error.into()))?;
    // A stage that has died says why on the other line, or by its exit.
    let _ = work::send(&stage.line, &text, listener);
    Ok(())
}

fn broken(agent: &Path, error: io::Error) -> Problem {
    Problem::internal(format!("starting {}: {error}", agent.display()))
}

/// Gives a stage the rest of its work and reads its answer. `joins`: see [`BoxSpec::joins`].
pub(crate) fn finish(
    mut stage: Stage,
    agent: &Path,
    cgroup: &CgroupSpec,
    joins: bool,
) -> Result<i32, Problem> {
    let broken = |error| broken(agent, error);
    if joins {
        let held = Held::open(cgroup).map_err(broken)?;
        let (text, files) = held.parcel().map_err(broken)?;
        let _ = work::send_rest(stage.line, &text, &files);
    } else {
        let text = serde_json::to_vec(cgroup).map_err(|error| broken(error.into()))?;
        let _ = work::send_rest(stage.line, &text, &[]);
    }
    let mut pid = None;
    if let Some(stdout) = stage.child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            match serde_json::from_str(&line.map_err(broken)?).map_err(|error| broken(error.into()))? {
                Report::Pid(number) => pid = Some(number),
                Report::Failed(failure) => return Err(explain(&failure)),
            }
        }
    }
    stage.child.wait().map_err(broken)?;
    pid.ok_or_else(|| {
        let mut said = String::new();
        let _ = stage.child.stderr.take().map(|stderr| stderr.take(MAX_SAID).read_to_string(&mut said));
        Problem::internal(format!("the stage ended without a word. {}", said.trim()))
    })
}

/// Turns a failed step into what an operator can do about it.
fn explain(failure: &Failure) -> Problem {
    let text = |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let problem = Problem::new(
        Code::IsolationUnavailable,
        format!("this host did not let carrel make a sandbox: {}", failure.what),
    );
    if failure.namespaces {
        let hint = if text("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" {
            "AppArmor forbids user namespaces here: install deploy/apparmor/carrel (see docs/isolation.md), or ask for --isolation=weak"
        } else if text("/proc/sys/kernel/unprivileged_userns_clone") == "0" {
            "user namespaces are switched off: `sysctl kernel.unprivileged_userns_clone=1`, or ask for --isolation=weak"
        } else if text("/proc/sys/user/max_user_namespaces") == "0" {
            "user namespaces are switched off: `sysctl user.max_user_namespaces=10000`, or ask for --isolation=weak"
        } else {
            "user namespaces are not available, as in most containers: allow them (docs/isolation.md), or ask for --isolation=weak"
        };
        return problem.hint(hint);
    }
    if failure.what.contains("proc file system") || failure.what.contains("mounting proc") {
        return problem.hint("/proc is partly hidden here, as in most containers: run the container with an unmasked /proc (docs/isolation.md), or ask for --isolation=weak");
    }
    problem.hint("`carrel doctor` says what this host offers; docs/isolation.md what is needed")
}
