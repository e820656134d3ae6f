//! Engines, calls and numbers drawn by lot, for all tests in here.

use std::{future::Future, path::Path, time::Duration};

use carrel_engine::{
    Engine, Environments, Record, Settings, Whereabouts, Wish,
    call::{Call, Output},
};
use carrel_proto::{
    files::{Content, FileReply, FileRequest, GuestPath, Read, Write},
    frame::Stream,
    guest::Language,
    id::{Key, SandboxId, SessionName},
    message::{Exec, Run},
    outcome::Outcome,
    problem::Problem,
};

/// Nothing here takes this long on a machine that works; it only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(100);

pub(crate) fn open(state: &Path) -> Engine {
    Engine::open(Settings {
        state: state.to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    })
    .unwrap()
}

pub(crate) fn wish() -> Wish {
    // Should a test be killed, its sandboxes end by themselves.
    Wish { idle_timeout_s: 600, max_lifetime_s: 7200, ..Wish::default() }
}

pub(crate) fn key(name: &str) -> Key {
    format!("user:torture:{name}").parse().unwrap()
}

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

/// A number from the environment.
pub(crate) fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |text| text.parse().unwrap())
}

pub(crate) fn seed() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = number("CARREL_TORTURE_SEED", now.as_secs() ^ u64::from(now.subsec_nanos()));
    println!("CARREL_TORTURE_SEED={seed}");
    seed
}

pub(crate) fn rounds() -> u64 {
    number("CARREL_TORTURE_ROUNDS", 12)
}

/// SplitMix64: the same numbers for the same seed, here and everywhere.
#[derive(Debug)]
pub(crate) struct Lot(u64);

impl Lot {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit
    }

    pub(crate) fn one<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }
}

/// A call that is over.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) out: String,
    pub(crate) err: String,
    pub(crate) outcome: Outcome,
}

async fn finish(mut call: Call) -> Result<Ran, Problem> {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    loop {
        match call.next().await? {
            Output::Bytes { stream: Stream::Stdout, bytes, .. } => out.extend_from_slice(bytes),
            Output::Bytes { bytes, .. } => err.extend_from_slice(bytes),
            Output::Finished(outcome) => {
                let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_owned();
                // The next call finds its line, whatever has become of the sandbox by then.
                call.end();
                return Ok(Ran { out: text(&out), err: text(&err), outcome });
            }
            _ => {}
        }
    }
}

pub(crate) async fn run(
    engine: &Engine,
    record: &Record,
    language: Language,
    code: &str,
) -> Result<Ran, Problem> {
    let run = Run {
        session: SessionName::main(),
        language,
        code: code.to_owned(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    };
    in_time(code, async { finish(engine.run(record, run).await?).await }).await
}

pub(crate) async fn exec(engine: &Engine, record: &Record, script: &str) -> Result<Ran, Problem> {
    let exec = Exec {
        session: SessionName::main(),
        argv: ["sh", "-c", script].map(str::to_owned).into(),
        cwd: None,
        env: Default::default(),
        stdin: false,
        pty: None,
        timeout_ms: None,
        detach: false,
        cancel_on_disconnect: false,
    };
    in_time(script, async { finish(engine.exec(record, exec).await?).await }).await
}

pub(crate) fn write(engine: &Engine, record: &Record, name: &str, text: &str) -> Result<(), Problem> {
    let write = Write {
        path: GuestPath::parse(name.as_bytes()).unwrap(),
        data: Content(text.as_bytes().to_vec()),
        append: false,
        overwrite: true,
        mode: None,
        parents: true,
        sync: false,
    };
    engine.file(record, FileRequest::Write(write)).map(drop)
}

pub(crate) fn read(engine: &Engine, record: &Record, name: &str) -> Result<String, Problem> {
    let path = GuestPath::parse(name.as_bytes()).unwrap();
    match engine.file(record, FileRequest::Read(Read { path, offset: 0, len: None }))? {
        FileReply::Read(reply) => Ok(String::from_utf8_lossy(reply.data.as_bytes()).into_owned()),
        other => panic!("{other:?}"),
    }
}

/// Processes, mounts, cgroups and files of a sandbox that is closed.
pub(crate) fn leftovers(state: &Path, id: &SandboxId) -> Vec<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mut left: Vec<String> = mounts
        .lines()
        .filter(|line| line.contains(id.as_str()))
        .map(|line| format!("mount {line}"))
        .collect();
    let trees = std::fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    for tree in trees.map(|entry| entry.path()).chain(["/sys/fs/cgroup".into()]) {
        let group = tree.join("carrel").join(id.as_str());
        left.extend(group.exists().then(|| group.display().to_string()));
    }
    for place in ["sandboxes", "locks"] {
        let path = state.join(place).join(id.as_str());
        left.extend(path.exists().then(|| path.display().to_string()));
    }
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        let said =
            ["environ", "cmdline"].map(|file| std::fs::read(process.path().join(file)).unwrap_or_default());
        if said.iter().any(|text| String::from_utf8_lossy(text).contains(id.as_str())) {
            left.push(format!("process {}", process.path().display()));
        }
    }
    left
}

/// Closes what is there, and looks whether it is gone.
pub(crate) async fn close_all(state: &Path) {
    let engine = open(state);
    for record in engine.list().unwrap() {
        in_time("closing", engine.close(&record, None)).await.unwrap();
        assert_eq!(leftovers(state, &record.id), Vec::<String>::new());
    }
}
