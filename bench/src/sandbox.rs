//! What is measured, through the engine as any front door uses it.

use std::time::{Duration, Instant};

use carrel_engine::{
    Engine, Environments, Record, Settings, Warmth, Whereabouts, Wish,
    call::{Call, Output},
    pool::{PoolSize, ReadyKind},
};
use carrel_proto::{
    guest::Language,
    id::SessionName,
    message::{Exec, Run, Status},
    problem::{Code, Problem},
};

/// Between two looks at a pool.
const LOOK: Duration = Duration::from_millis(2);

pub(crate) struct World {
    engine: Engine,
    status: Status,
    state: tempfile::TempDir,
}

fn run(language: Language, code: &str) -> Run {
    let timeout_ms = 120_000;
    Run {
        session: SessionName::main(),
        language,
        code: code.to_owned(),
        timeout_ms,
        cancel_on_disconnect: true,
    }
}

fn wish() -> Wish {
    Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() }
}

/// To its end; its line is left to the next call, as every door does it.
async fn finish(mut call: Call) -> Result<u64, Problem> {
    let mut bytes_seen = 0;
    loop {
        match call.next().await? {
            Output::Bytes { bytes, .. } => bytes_seen += bytes.len() as u64,
            Output::Finished(outcome) if outcome.exit_code == 0 => {
                call.end();
                return Ok(bytes_seen);
            }
            Output::Finished(outcome) => {
                return Err(Problem::internal(format!("a measured call failed: {outcome:?}")));
            }
            _ => {}
        }
    }
}

impl World {
    pub(crate) fn open() -> Result<Self, Problem> {
        Self::with(Environments::default())
    }

    /// In which every python is a copy of a warm parent.
    pub(crate) fn warm() -> Result<Self, Problem> {
        let world = Self::open()?;
        match world.engine.parent(Language::Python.as_str())? {
            Some(Ok(_)) => Ok(world),
            Some(Err(why)) => Err(Problem::new(Code::Unsupported, why)),
            None => Err(Problem::new(Code::Unsupported, "this host has no python")),
        }
    }

    /// In which every python is started.
    pub(crate) fn cold_only() -> Result<Self, Problem> {
        let mut environments = Environments::default();
        environments.set_warmth(Warmth { on: false, ..Warmth::default() });
        Self::with(environments)
    }

    fn with(environments: Environments) -> Result<Self, Problem> {
        let state = tempfile::tempdir().map_err(Problem::internal)?;
        let environments = environments.at(Whereabouts::of(std::env::vars_os()));
        let settings = Settings { state: state.path().to_path_buf(), environments };
        let engine = Engine::open(settings)?;
        let empty = Status {
            sessions: Vec::new(),
            interpreters: Default::default(),
            running: 0,
            idle_ms: 0,
            age_ms: 0,
        };
        let interpreters = engine.host_interpreters();
        Ok(Self { engine, status: Status { interpreters, ..empty }, state })
    }

    pub(crate) fn state(&self) -> &std::path::Path {
        self.state.path()
    }

    pub(crate) async fn close_all(&self) -> Result<(), Problem> {
        for record in self.engine.list()? {
            self.engine.close(&record, None).await?;
        }
        // What a daemon that was killed had kept ready.
        self.engine.sweep()
    }

    pub(crate) fn living(&self) -> Result<Vec<Record>, Problem> {
        self.engine.list()
    }

    pub(crate) fn program(&self, language: Language) -> &str {
        self.status.interpreters.get(&language).map_or("", |interpreter| &interpreter.program)
    }

    pub(crate) fn has(&self, language: Language) -> bool {
        !self.program(language).is_empty()
    }

    /// From nothing to the first result of a new sandbox. Its end is not counted.
    pub(crate) async fn cold(&self, language: Language, code: &str) -> Result<Duration, Problem> {
        let start = Instant::now();
        let record = self.engine.ephemeral(&Wish { first: Some(language), ..wish() }).await?;
        let call = self.engine.run(&record, run(language, code)).await?;
        finish(call).await?;
        let time = start.elapsed();
        self.engine.close(&record, None).await?;
        Ok(time)
    }

    /// Keeps sandboxes ready, as a daemon does.
    pub(crate) fn keep_pool(&self, size: PoolSize) {
        self.engine.set_pool(size, &Wish { first: Some(Language::Python), ..wish() });
        let engine = self.engine.clone();
        tokio::spawn(async move { engine.keep_pool().await });
    }

    /// Everything that stands ready goes.
    pub(crate) async fn end_pool(&self) {
        self.engine.set_pool(PoolSize { floor: 0, ceiling: 0 }, &wish());
        while self.engine.pool().ready.iter().any(|kind| kind.count > 0) {
            tokio::time::sleep(LOOK).await;
        }
        self.engine.finish_retiring().await;
    }

    /// From a key to the first result of a sandbox that stood ready, and how long it takes to close it. `None`: none stood
    /// ready, as before the first of its kind.
    pub(crate) async fn claim(
        &self,
        language: Language,
        code: &str,
    ) -> Result<Option<(Duration, Duration)>, Problem> {
        let before = self.engine.pool().claimed;
        let key = "user:bench:claimed".parse().map_err(Problem::internal)?;
        let wish = Wish { first: Some(language), undo_calls: Some(0), ..wish() };
        let start = Instant::now();
        let record = self.engine.sandbox(&key, &wish).await?.record;
        let call = self.engine.run(&record, run(language, code)).await?;
        finish(call).await?;
        let first = start.elapsed();
        let start = Instant::now();
        self.engine.retire(&record).await?;
        let last = start.elapsed();
        self.engine.finish_retiring().await;
        let claimed = self.engine.pool().claimed > before;
        // The next one finds the shelf filled and nothing else under way.
        self.await_ready(language, 1).await;
        Ok(claimed.then_some((first, last)))
    }

    /// Until so many boxes with this interpreter stand ready.
    pub(crate) async fn await_ready(&self, language: Language, count: u32) {
        let is_full = |kind: &ReadyKind| kind.language == Some(language) && kind.count >= count;
        while !self.engine.pool().ready.iter().any(is_full) {
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Until nothing is being removed any more.
    pub(crate) async fn cleared(&self) -> Result<(), Problem> {
        self.engine.cleared().await
    }

    /// So many sandboxes one after another, by several callers at once: made, called once, closed.
    pub(crate) async fn in_a_row(&self, count: usize, callers: usize) -> Result<Duration, Problem> {
        let start = Instant::now();
        let mut all = tokio::task::JoinSet::new();
        for caller in 0..callers {
            let engine = self.engine.clone();
            all.spawn(async move {
                let wish = Wish { first: Some(Language::Python), undo_calls: Some(0), ..wish() };
                for number in (caller..count).step_by(callers) {
                    let key = format!("user:bench:row-{number}").parse().map_err(Problem::internal)?;
                    let record = engine.sandbox(&key, &wish).await?.record;
                    let call = engine.run(&record, run(Language::Python, "1")).await?;
                    finish(call).await?;
                    engine.retire(&record).await?;
                }
                Ok::<(), Problem>(())
            });
        }
        for ended in all.join_all().await {
            ended?;
        }
        self.engine.finish_retiring().await;
        Ok(start.elapsed())
    }

    /// A command that goes on until its sandbox ends.
    pub(crate) async fn start(&self, record: &Record, argv: &[&str]) -> Result<(), Problem> {
        let exec = Exec {
            session: SessionName::main(),
            argv: argv.iter().map(|&word| word.to_owned()).collect(),
            cwd: None,
            env: Default::default(),
            stdin: false,
            pty: None,
            timeout_ms: None,
            detach: true,
            cancel_on_disconnect: false,
        };
        self.engine.start(record, exec).await.map(drop)
    }

    /// A sandbox whose agent answers; no interpreter yet.
    pub(crate) async fn create(&self) -> Result<Duration, Problem> {
        let start = Instant::now();
        let record = self.engine.ephemeral(&wish()).await?;
        self.engine.connect(&record).await?;
        let time = start.elapsed();
        self.engine.close(&record, None).await?;
        Ok(time)
    }

    /// One that stays, with so many calls that can be taken back.
    pub(crate) async fn session(&self, name: &str, undo_calls: u32) -> Result<Record, Problem> {
        let key = format!("user:bench:{name}").parse().map_err(Problem::internal)?;
        let wish = Wish { undo_calls: Some(undo_calls), ..wish() };
        Ok(self.engine.sandbox(&key, &wish).await?.record)
    }

    /// A new one of this name to its first result; it stays.
    pub(crate) async fn first(&self, name: &str, language: Language) -> Result<(Record, Duration), Problem> {
        let key = format!("user:bench:{name}").parse().map_err(Problem::internal)?;
        let start = Instant::now();
        let wish = Wish { first: Some(language), undo_calls: Some(0), ..wish() };
        let record = self.engine.sandbox(&key, &wish).await?.record;
        let call = self.engine.run(&record, run(language, "1")).await?;
        finish(call).await?;
        Ok((record, start.elapsed()))
    }

    /// Takes back the last call.
    pub(crate) async fn undo(&self, record: &Record) -> Result<Duration, Problem> {
        let start = Instant::now();
        self.engine.undo(record, &SessionName::main(), Some(Language::Python), 1).await?;
        Ok(start.elapsed())
    }

    /// A caller that keeps its line open between calls, as a server does.
    pub(crate) async fn caller(&self, record: &Record) -> Result<Caller, Problem> {
        let mut caller = Caller { engine: self.engine.clone(), record: record.clone() };
        for _ in 0..3 {
            if self.has(Language::Python) {
                caller.call(Language::Python, "1").await?;
            }
        }
        Ok(caller)
    }

    /// Output of python through to us.
    pub(crate) async fn flood(&self, record: &Record, bytes: u64) -> Result<(u64, Duration), Problem> {
        let code =
            format!("import os\nb = b'x' * (1 << 20)\nfor _ in range({}):\n  os.write(1, b)", bytes >> 20);
        let start = Instant::now();
        let call = self.engine.run(record, run(Language::Python, &code)).await?;
        let seen = finish(call).await?;
        if seen != bytes {
            return Err(Problem::new(Code::Internal, format!("{seen} of {bytes} bytes came through")));
        }
        Ok((seen, start.elapsed()))
    }

    /// From a sandbox in standby to the first result of a call, as a caller that knows its key makes it. `None`: this host has
    /// no freezer.
    pub(crate) async fn wake(&self, language: Language) -> Result<Option<Duration>, Problem> {
        let record = self.session("warm", 0).await?;
        match self.standby(&record).await {
            Ok(()) => {}
            Err(problem) if problem.code == Code::Unsupported => return Ok(None),
            Err(problem) => return Err(problem),
        }
        self.awake(language).await.map(Some)
    }

    pub(crate) async fn standby(&self, record: &Record) -> Result<(), Problem> {
        self.engine.standby(record).await.map(drop)
    }

    pub(crate) async fn run(&self, record: &Record, code: &str) -> Result<(), Problem> {
        self.run_in(record, Language::Python, code).await
    }

    pub(crate) async fn run_in(
        &self,
        record: &Record,
        language: Language,
        code: &str,
    ) -> Result<(), Problem> {
        let call = self.engine.run(record, run(language, code)).await?;
        finish(call).await.map(drop)
    }

    pub(crate) async fn hibernate(&self, record: &Record) -> Result<(), Problem> {
        self.engine.hibernate(record).await.map(drop)
    }

    /// One copy of a living sandbox.
    pub(crate) async fn fork(&self, record: &Record) -> Result<Record, Problem> {
        let mut forked = self.engine.fork(record, 1, None, None).await?;
        forked.forks.pop().map(|fork| fork.record).ok_or_else(|| Problem::internal("no fork came of it"))
    }

    /// The call of a caller that knows its sandbox's key and nothing else.
    pub(crate) async fn awake(&self, language: Language) -> Result<Duration, Problem> {
        self.awake_by_name("warm", language).await
    }

    pub(crate) async fn awake_by_name(&self, name: &str, language: Language) -> Result<Duration, Problem> {
        let key = format!("user:bench:{name}").parse().map_err(Problem::internal)?;
        let start = Instant::now();
        let found = self.engine.sandbox(&key, &wish()).await?;
        let call = self.engine.run(&found.record, run(language, "1")).await?;
        finish(call).await?;
        Ok(start.elapsed())
    }

    pub(crate) async fn close(&self, record: Record) -> Result<(), Problem> {
        self.engine.close(&record, None).await
    }
}

pub(crate) struct Caller {
    engine: Engine,
    record: Record,
}

impl Caller {
    pub(crate) async fn call(&mut self, language: Language, code: &str) -> Result<Duration, Problem> {
        let start = Instant::now();
        finish(self.engine.run(&self.record, run(language, code)).await?).await?;
        Ok(start.elapsed())
    }
}
