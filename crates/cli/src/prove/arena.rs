//! Bait on the host, the two sandboxes, and the quick attacks.

use std::{
    collections::BTreeMap,
    fs, io,
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            fs::{OpenOptionsExt, PermissionsExt},
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_engine::{Engine, Record, Wish};
use carrel_files::WriteOptions;
use carrel_proto::{
    files::GuestPath,
    id::SessionName,
    limits::{ByteSize, Limits},
    message::OpenSession,
    problem::{Code, Problem},
};

use super::{
    Probe,
    attack::{PROGRAM, Way, attack, command, ended, finding, listen, results},
    host, progress,
    report::{Finding, Verdict},
    ring::Ring,
    sha256,
};

/// A group of light attacks; a refused one takes microseconds, so this is a hang.
const GROUP_TIME: Duration = Duration::from_secs(120);
const ONE_TIME: Duration = Duration::from_secs(20);
/// The other session's process outlives every attack.
const MARKER_TIME: Duration = Duration::from_secs(3600);

/// What lies about on the host for an attack to find. Removed when dropped.
#[derive(Debug)]
struct Bait {
    directory: PathBuf,
    canary: PathBuf,
    content: String,
    tcp: TcpListener,
    unix: UnixListener,
    unix_name: String,
}

impl Bait {
    /// The canary is open to everyone on the host: nothing but the box keeps an attack from reading or changing it.
    fn lay() -> io::Result<Self> {
        let mark = random_word()?;
        let directory = std::env::temp_dir().join(format!("carrel-prove-{mark}"));
        fs::create_dir(&directory)?;
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o777))?;
        let canary = directory.join("canary");
        let content = format!("canary {}\n", random_word()?);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o666).open(&canary)?;
        io::Write::write_all(&mut file, content.as_bytes())?;
        fs::set_permissions(&canary, fs::Permissions::from_mode(0o666))?;
        let tcp = TcpListener::bind(("127.0.0.1", 0))?;
        tcp.set_nonblocking(true)?;
        let unix_name = format!("carrel-prove-{mark}");
        let unix = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&unix_name)?)?;
        unix.set_nonblocking(true)?;
        Ok(Self { directory, canary, content, tcp, unix, unix_name })
    }

    fn touched(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        match fs::read_to_string(&self.canary) {
            Ok(content) if content == self.content => {}
            Ok(_) => wrong.push("the canary's content has changed".to_owned()),
            Err(error) => wrong.push(format!("the canary: {error}")),
        }
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        wrong.extend(
            entries
                .filter(|entry| entry.file_name() != "canary")
                .map(|entry| format!("{} is new", entry.path().display())),
        );
        if self.tcp.accept().is_ok() {
            wrong.push("someone connected to the TCP port".to_owned());
        }
        if self.unix.accept().is_ok() {
            wrong.push("someone connected to the abstract socket".to_owned());
        }
        wrong
    }
}

impl Drop for Bait {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn random_word() -> io::Result<String> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!("{:016x}", u64::from_ne_bytes(bytes)))
}

/// Everything that stands while attacks run.
#[derive(Debug)]
pub(super) struct Arena<'a> {
    pub(super) engine: &'a Engine,
    pub(super) ring: Ring<'a>,
    bait: Bait,
    /// Attacked by the light probes.
    a: Record,
    /// Must not notice anything.
    pub(super) b: Record,
    marker: String,
    marker_exec: Option<carrel_proto::id::ExecId>,
    treasure: String,
    facts: BTreeMap<&'static str, String>,
    /// Every box that was made, to see that nothing of it is left.
    traces: Vec<host::Trace>,
}

pub(super) fn small_limits() -> Limits {
    Limits {
        cpu_millis: 1000,
        memory: ByteSize::mb(256),
        pids: 64,
        disk: ByteSize::mb(64),
        output: ByteSize::mb(8),
        execs: 16,
    }
}

pub(super) fn wish(limits: Limits) -> Wish {
    Wish { limits, idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() }
}

fn broken(what: &str) -> impl Fn(io::Error) -> Problem + '_ {
    move |error| Problem::internal(format!("{what}: {error}"))
}

/// The probe program, executable, in a box's workspace.
pub(super) fn arm(engine: &Engine, record: &Record) -> Result<(), Problem> {
    let path = GuestPath::parse(PROGRAM).map_err(Problem::internal)?;
    let options = WriteOptions { mode: Some(0o755), ..WriteOptions::default() };
    engine.files(record)?.write(&path, carrel_backend::guest_programs::probe(), options)?;
    Ok(())
}

const TREASURE: &str = "treasure";

impl<'a> Arena<'a> {
    pub(super) async fn set_up(mut ring: Ring<'a>) -> Result<Self, Problem> {
        progress("making sandboxes");
        let engine = ring.engine;
        let bait = Bait::lay().map_err(broken("laying bait on the host"))?;
        let mut made = Vec::new();
        for _ in 0..2 {
            match ring.sandbox(&wish(small_limits())).await {
                Ok(record) => made.push(record),
                Err(problem) => {
                    for record in &made {
                        let _ = engine.close(record, None).await;
                    }
                    ring.close().await;
                    return Err(problem);
                }
            }
        }
        let (Some(b), Some(a)) = (made.pop(), made.pop()) else {
            return Err(Problem::internal("two sandboxes were made and are not there"));
        };
        let marker =
            format!("carrel-prove-marker-{}", random_word().map_err(broken("asking for randomness"))?);
        let treasure = random_word().map_err(broken("asking for randomness"))?;
        let traces = vec![host::Trace::of(engine, &a), host::Trace::of(engine, &b)];
        let facts = BTreeMap::new();
        let mut arena = Self { engine, ring, bait, a, b, marker, marker_exec: None, treasure, facts, traces };
        match arena.furnish().await {
            Ok(()) => Ok(arena),
            Err(problem) => {
                arena.tear_down().await;
                Err(problem)
            }
        }
    }

    async fn furnish(&mut self) -> Result<(), Problem> {
        arm(self.engine, &self.a)?;
        arm(self.engine, &self.b)?;
        let path = GuestPath::parse(TREASURE).map_err(Problem::internal)?;
        self.engine.files(&self.b)?.write(&path, self.treasure.as_bytes(), WriteOptions::default())?;
        let other: SessionName = "other".parse().map_err(Problem::internal)?;
        let open = OpenSession { name: other.clone(), ..OpenSession::default() };
        self.engine.session(&self.a, open).await?;
        // The program that is there in any box; a name of its own makes it sleep, its arguments are the marker.
        let argv =
            ["/bin/sh", "-c", "while :; do sleep 3600; done", &self.marker].map(str::to_owned).to_vec();
        let mut sleeper = command(argv, MARKER_TIME);
        sleeper.session = other;
        sleeper.cancel_on_disconnect = false;
        self.marker_exec = Some(self.engine.start(&self.a, sleeper).await?);
        // A sandbox of one call ends when nothing happens in it, which on a slow machine would be before its turn comes.
        let busy = ["sleep", "3600"].map(str::to_owned).to_vec();
        let mut busy = command(busy, MARKER_TIME);
        busy.cancel_on_disconnect = false;
        self.engine.start(&self.b, busy).await?;
        self.facts = self.facts_of(&self.a);
        Ok(())
    }

    fn facts_of(&self, record: &Record) -> BTreeMap<&'static str, String> {
        let directory = |record: &Record| host::directory(self.engine, record);
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let mut facts = BTreeMap::from([
            ("confirmed_box", "1".to_owned()),
            ("canary_path", text(&self.bait.canary)),
            ("canary_sha256", sha256::hex(self.bait.content.as_bytes())),
            ("host_abstract", self.bait.unix_name.clone()),
            ("host_pid", std::process::id().to_string()),
            ("other_workspace", text(&directory(&self.b).join("workspace"))),
            ("other_session_marker", self.marker.clone()),
            ("agent_socket", text(&directory(record).join("agent.sock"))),
            ("host_addrs", host::addresses().join(",")),
        ]);
        let started = i32::try_from(std::process::id()).ok().and_then(carrel_jail::tree::start_time);
        if let Some(started) = started {
            facts.insert("host_start", started.to_string());
        }
        if let Ok(address) = self.bait.tcp.local_addr() {
            facts.insert("host_tcp_port", address.port().to_string());
        }
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        // A host that has the very name of every box proves nothing.
        if name != "carrel" {
            facts.insert("host_hostname", name);
        }
        if let Some(variable) = host::private_variable() {
            facts.insert("host_env_name", variable);
        }
        facts
    }

    /// The facts as arguments, with more for an attack on a limit.
    pub(super) fn args(&self, words: &[&str], more: &[(&str, String)]) -> Vec<String> {
        let own = self.facts.iter().map(|(key, value)| (*key, value.as_str()));
        let facts = own.chain(more.iter().map(|(key, value)| (*key, value.as_str())));
        let mut args: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        for (key, value) in facts.filter(|(_, value)| !value.is_empty()) {
            args.extend(["--fact".to_owned(), format!("{key}={value}")]);
        }
        args
    }

    /// What the probe program offers.
    pub(super) async fn probes(&self) -> Result<Vec<Probe>, Problem> {
        let call = self.engine.exec(&self.a, command(vec![PROGRAM.into(), "list".into()], ONE_TIME)).await?;
        let said = listen(call).await?;
        serde_json::from_slice(&said.stdout).map_err(|error| {
            Problem::internal(format!("the list of probes ({}): {error}", ended(&said.outcome)))
        })
    }

    /// Runs light probes by one way, group by group; a probe that took its whole group down is asked once more alone.
    pub(super) async fn light(&self, probes: &[&Probe], way: Way) -> Vec<Finding> {
        let mut found = BTreeMap::new();
        let groups: Vec<&str> = super::report::GROUPS
            .into_iter()
            .filter(|group| probes.iter().filter(|probe| probe.group == *group).count() > 1)
            .collect();
        for group in groups {
            progress(&format!("{group} by {}", way.name()));
            let args = self.args(&["all", "--group", group], &[]);
            match attack(self.engine, &self.a, way, &args, GROUP_TIME).await {
                Ok(said) => found.extend(results(&said.stdout)),
                Err(problem) if problem.code == Code::InterpreterMissing => {
                    return vec![Finding {
                        name: format!("by-{}", way.name()),
                        group: group.to_owned(),
                        verdict: Verdict::Skipped,
                        detail: problem.message,
                        via: way.name().to_owned(),
                    }];
                }
                // Asked again one by one below.
                Err(_) => {}
            }
        }
        let mut findings = Vec::new();
        for probe in probes {
            let result = match found.remove(&probe.name) {
                Some(result) => result,
                None => self.alone(probe, way).await,
            };
            findings.push(finding(probe, way, result.0, result.1));
        }
        findings
    }

    async fn alone(&self, probe: &Probe, way: Way) -> (Verdict, String) {
        progress(&format!("{} by {}", probe.name, way.name()));
        let args = self.args(&["run", &probe.name], &[]);
        match attack(self.engine, &self.a, way, &args, ONE_TIME).await {
            Ok(said) => match results(&said.stdout).remove(&probe.name) {
                Some(result) => result,
                // The one probe that can take its own supervisor down.
                None if probe.name == "signal-init" => {
                    (Verdict::Breach, format!("no answer: pid 1 is gone ({})", ended(&said.outcome)))
                }
                None => (Verdict::Skipped, format!("the probe gave no answer ({})", ended(&said.outcome))),
            },
            Err(problem) if problem.code == Code::InterpreterMissing => (Verdict::Skipped, problem.message),
            Err(problem) => (Verdict::Breach, format!("the sandbox did not survive: {}", problem.message)),
        }
    }

    /// What the outside can see after the light probes.
    pub(super) async fn judge_from_host(&self) -> Vec<Finding> {
        progress("looking from outside");
        let mut findings = host::processes(&self.a);
        findings.extend(host::cgroups(&self.a));
        findings.push(match self.engine.status(&self.a).await {
            Ok(status) => {
                let detail = format!("answers after the light attacks, {} sessions", status.sessions.len());
                Finding::host("sessions", "agent-answers", Verdict::Held, detail)
            }
            Err(problem) => Finding::host("sessions", "agent-answers", Verdict::Breach, problem.message),
        });
        let running = match &self.marker_exec {
            Some(exec) => self.engine.wait(&self.a, exec, Duration::ZERO).await,
            None => Ok(None),
        };
        findings.push(match running {
            Ok(None) => {
                Finding::host("sessions", "other-session-lives", Verdict::Held, "its process still runs")
            }
            Ok(Some(outcome)) => {
                Finding::host("sessions", "other-session-lives", Verdict::Breach, ended(&outcome))
            }
            Err(problem) => {
                Finding::host("sessions", "other-session-lives", Verdict::Breach, problem.message)
            }
        });
        findings
    }

    /// Whether anything outside the attacked boxes was touched. After all attacks.
    pub(super) fn judge_bait(&self) -> Vec<Finding> {
        let bait = Finding::host_judged(
            "host-files",
            "bait-untouched",
            "canary unchanged, nobody connected to the host's listeners",
            &self.bait.touched(),
        );
        let kept = GuestPath::parse(TREASURE)
            .map_err(Problem::internal)
            .and_then(|path| Ok(self.engine.files(&self.b)?.read(&path, 0, None)?));
        let wrong = match kept {
            Ok(read) if read.data.as_bytes() == self.treasure.as_bytes() => Vec::new(),
            Ok(_) => vec!["the file in the other sandbox has changed".to_owned()],
            Err(problem) => vec![problem.message],
        };
        vec![
            bait,
            Finding::host_judged("sessions", "other-sandbox-untouched", "its file is as it was", &wrong),
        ]
    }

    /// Remembers a further box, to look for its traces at the end.
    pub(super) fn remember(&mut self, record: &Record) {
        self.traces.push(host::Trace::of(self.engine, record));
    }

    /// Closes both boxes and looks for what they left.
    pub(super) async fn tear_down(mut self) -> Vec<Finding> {
        progress("closing");
        let mut wrong = Vec::new();
        self.ring.close().await;
        for record in [&self.a, &self.b] {
            if let Err(problem) = self.engine.close(record, None).await {
                wrong.push(format!("closing {}: {}", record.id, problem.message));
            }
        }
        wrong.extend(self.traces.iter().flat_map(host::Trace::left));
        wrong.extend(
            host::processes_with(&self.marker).iter().map(|pid| format!("process {pid} of a session")),
        );
        let fine =
            format!("{} sandboxes closed: no process, mount, cgroup or directory is left", self.traces.len());
        vec![Finding::host_judged("sessions", "left-behind", fine, &wrong)]
    }
}
