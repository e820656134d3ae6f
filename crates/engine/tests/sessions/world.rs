//! A world of its own for each test: state directory, engine, sandboxes. All of it ends with the test, also when
//! the test fails.

use std::{collections::BTreeMap, future::Future, sync::Arc, time::Duration};

use carrel_engine::{
    Engine, Environments, Record, Settings, Warmth, Whereabouts, Wish,
    call::{Call, Control, Output},
};
use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::{ExecId, SessionName},
    limits::Limits,
    message::{Display, DisplayKind, Exec, OpenSession, Run},
    outcome::{Cause, Outcome, SessionState},
    problem::{Code, Problem},
};

/// Nothing here takes this long on a machine that works; it only turns a hang into a failure.
const DEADLINE: Duration = Duration::from_secs(120);
/// For calls that are meant to run into it: long enough that their code has surely begun.
pub(crate) const SHORT_MS: u64 = 700;

pub(crate) async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(DEADLINE, future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: not within {DEADLINE:?}"),
    }
}

#[derive(Debug)]
pub(crate) struct World {
    engine: Arc<Engine>,
    environments: Environments,
    state: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::with(Environments::default().at(Whereabouts::of(std::env::vars_os())))
    }

    pub(crate) fn with(environments: Environments) -> Self {
        let state = tempfile::tempdir().unwrap();
        let settings = Settings { state: state.path().into(), environments: environments.clone() };
        let engine = Arc::new(Engine::open(settings).unwrap());
        if std::env::var_os("CARREL_TEST_COPIES").is_some() {
            // None where a test has turned them off.
            engine.parent("python").unwrap().map(Result::unwrap);
        }
        Self { engine, environments, state }
    }

    /// In which every python is a copy of a warm parent.
    pub(crate) fn warm() -> Self {
        let world = Self::new();
        world.engine.parent("python").unwrap().unwrap().unwrap();
        world
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.engine
    }

    /// As another process would see the same state.
    pub(crate) fn another_engine(&self) -> Engine {
        let settings = Settings { state: self.state.path().into(), environments: self.environments.clone() };
        Engine::open(settings).unwrap()
    }

    /// From now on it is another process.
    pub(crate) fn set_warmth(&mut self, warmth: Warmth) {
        self.environments.set_warmth(warmth);
        self.engine = Arc::new(self.another_engine());
    }

    pub(crate) async fn sandbox(&self) -> Sandbox {
        self.sandbox_with(Wish::default()).await
    }

    /// In which nothing is taken back: what a crash means then.
    pub(crate) async fn without_undo(&self) -> Sandbox {
        self.sandbox_with(Wish { undo_calls: Some(0), ..Wish::default() }).await
    }

    pub(crate) async fn limited(&self, limits: Limits) -> Sandbox {
        self.sandbox_with(Wish { limits, ..Wish::default() }).await
    }

    pub(crate) async fn sandbox_with(&self, wish: Wish) -> Sandbox {
        // Should a test be killed, its sandboxes end by themselves.
        let wish = Wish { idle_timeout_s: 120, max_lifetime_s: 900, ..wish };
        let key = format!("user:test:{}", self.engine.list().unwrap().len()).parse().unwrap();
        let found = self.engine.sandbox(&key, &wish).await.unwrap();
        Sandbox { engine: Arc::clone(&self.engine), record: found.record }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let engine = Arc::clone(&self.engine);
        // A thread and a runtime of its own: the test's may be unwinding.
        let closing = std::thread::spawn(move || -> Result<(), Problem> {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            engine.list()?.iter().try_for_each(|record| runtime.block_on(engine.close(record, None)))
        });
        let closed = closing.join();
        if !std::thread::panicking() {
            closed.unwrap().unwrap();
        }
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Sandbox {
    pub(crate) engine: Arc<Engine>,
    pub(crate) record: Record,
}

/// A run in the default session that may take as long as it likes.
pub(crate) fn a_run(language: Language, code: &str) -> Run {
    Run {
        session: SessionName::main(),
        language,
        code: code.to_owned(),
        timeout_ms: 60_000,
        cancel_on_disconnect: false,
    }
}

/// A command in the default session, without input or time limit.
pub(crate) fn an_exec(argv: &[&str]) -> Exec {
    Exec {
        session: SessionName::main(),
        argv: argv.iter().map(|&word| word.to_owned()).collect(),
        cwd: None,
        env: BTreeMap::new(),
        stdin: false,
        pty: None,
        timeout_ms: None,
        detach: false,
        cancel_on_disconnect: false,
    }
}

pub(crate) fn named(name: &str) -> SessionName {
    name.parse().unwrap()
}

impl Sandbox {
    /// Starts a run. Its id is known, so it has its place in the queue.
    pub(crate) async fn begin(&self, run: Run) -> Live {
        Live::started(self.engine.run(&self.record, run).await.unwrap()).await.unwrap()
    }

    /// A run that is refused before it begins.
    pub(crate) async fn refused(&self, run: Run) -> Problem {
        let call = self.engine.run(&self.record, run).await.unwrap();
        Live::started(call).await.expect_err("the run was accepted")
    }

    pub(crate) async fn run(&self, language: Language, code: &str) -> Ran {
        self.begin(a_run(language, code)).await.end().await
    }

    pub(crate) async fn run_in(&self, session: &str, language: Language, code: &str) -> Ran {
        self.begin(Run { session: named(session), ..a_run(language, code) }).await.end().await
    }

    /// A run that is given little time.
    pub(crate) async fn hurried(&self, language: Language, code: &str) -> Ran {
        self.begin(Run { timeout_ms: SHORT_MS, ..a_run(language, code) }).await.end().await
    }

    pub(crate) async fn python(&self, code: &str) -> Ran {
        self.run(Language::Python, code).await
    }

    pub(crate) async fn bash(&self, code: &str) -> Ran {
        self.run(Language::Bash, code).await
    }

    pub(crate) async fn node(&self, code: &str) -> Ran {
        self.run(Language::Node, code).await
    }

    pub(crate) async fn launch(&self, exec: Exec) -> Live {
        Live::started(self.engine.exec(&self.record, exec).await.unwrap()).await.unwrap()
    }

    pub(crate) async fn exec(&self, argv: &[&str]) -> Ran {
        self.launch(an_exec(argv)).await.end().await
    }

    /// A script of a shell of its own.
    pub(crate) async fn script(&self, text: &str) -> Ran {
        self.exec(&["bash", "-c", text]).await
    }

    /// Everything a run or exec printed, once it has ended.
    pub(crate) async fn follow(&self, exec: &ExecId) -> Ran {
        self.attach(exec, 0, true).await.end().await
    }

    pub(crate) async fn attach(&self, exec: &ExecId, since: u64, follow: bool) -> Live {
        Live::attached(self.engine.attach(&self.record, exec, since, follow).await.unwrap(), exec.clone())
    }

    pub(crate) async fn cancel(&self, exec: &ExecId) {
        self.engine.cancel(&self.record, exec).await.unwrap();
    }

    pub(crate) async fn open(&self, name: &str, cwd: Option<&str>, env: &[(&str, &str)]) {
        let env = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        let open =
            OpenSession { name: named(name), cwd: cwd.map(str::to_owned), env, ..OpenSession::default() };
        assert!(self.engine.session(&self.record, open).await.unwrap(), "session {name} was open already");
    }

    /// The command lines of all processes that the default session can see.
    pub(crate) async fn processes(&self) -> String {
        self.exec(&["ps", "-e", "-o", "args="]).await.ok().out()
    }
}

/// One piece of output as it came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    pub(crate) stream: Stream,
    pub(crate) number: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A call under way. Dropping it hangs up.
#[derive(Debug)]
pub(crate) struct Live {
    call: Call,
    pub(crate) id: ExecId,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// What a terminal showed.
    pub(crate) screen: Vec<u8>,
    pub(crate) displays: Vec<Display>,
    pub(crate) chunks: Vec<Chunk>,
}

/// What reading one more piece brought, besides output.
#[derive(Debug)]
pub(crate) enum Step {
    More,
    Paused(u64),
    Finished(Outcome),
}

impl Live {
    pub(crate) fn attached(call: Call, id: ExecId) -> Self {
        let (stdout, stderr, screen) = (Vec::new(), Vec::new(), Vec::new());
        Self { call, id, stdout, stderr, screen, displays: Vec::new(), chunks: Vec::new() }
    }

    async fn started(mut call: Call) -> Result<Self, Problem> {
        let id = match in_time("the start of a call", call.next()).await? {
            Output::Started(id) => id,
            other => panic!("a call that begins with {other:?}"),
        };
        Ok(Self::attached(call, id))
    }

    pub(crate) fn control(&mut self) -> &mut Control {
        &mut self.call.control
    }

    pub(crate) fn call(&mut self) -> &mut Call {
        &mut self.call
    }

    pub(crate) async fn step(&mut self) -> Step {
        let Ok(next) = tokio::time::timeout(DEADLINE, self.call.next()).await else {
            let tail = |bytes: &[u8]| lossy(&bytes[bytes.len().saturating_sub(1000)..]);
            let so_far = (tail(&self.stdout), tail(&self.stderr), tail(&self.screen));
            panic!("{}: nothing more within {DEADLINE:?}; so far {so_far:?}", self.id);
        };
        match next.unwrap() {
            Output::Started(id) => panic!("{id} started again"),
            Output::Bytes { stream, chunk, offset, bytes } => {
                let length = bytes.len() as u64;
                self.chunks.push(Chunk { stream, number: chunk, offset, length });
                match stream {
                    Stream::Stdout => self.stdout.extend_from_slice(bytes),
                    Stream::Stderr => self.stderr.extend_from_slice(bytes),
                    _ => self.screen.extend_from_slice(bytes),
                }
                Step::More
            }
            Output::Display { chunk, display } => {
                self.chunks.push(Chunk { stream: Stream::Display, number: chunk, offset: 0, length: 0 });
                self.displays.push(display);
                Step::More
            }
            Output::Paused { next } => Step::Paused(next),
            Output::Finished(outcome) => Step::Finished(outcome),
        }
    }

    /// Reads until the text was printed, on whichever stream.
    pub(crate) async fn until(&mut self, text: &str) {
        let has = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(text);
        while !has(&self.stdout) && !has(&self.screen) {
            if let Step::Finished(outcome) = self.step().await {
                panic!("ended before it said {text:?}: {outcome:?}, stderr {}", lossy(&self.stderr));
            }
        }
    }

    pub(crate) async fn end(mut self) -> Ran {
        loop {
            if let Step::Finished(outcome) = self.step().await {
                let Self { id, stdout, stderr, screen, displays, chunks, .. } = self;
                assert_eq!(outcome.exec, id);
                return Ran { id, stdout, stderr, screen, displays, chunks, outcome };
            }
        }
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A call that is over.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) id: ExecId,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) screen: Vec<u8>,
    pub(crate) displays: Vec<Display>,
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) outcome: Outcome,
}

impl Ran {
    /// What it did and said, for the message of a failed assertion.
    fn story(&self) -> String {
        let clip = |bytes: &[u8]| lossy(&bytes[..bytes.len().min(2000)]);
        format!(
            "stdout: {}\nstderr: {}\nvalues: {:?}\n{:?}",
            clip(&self.stdout),
            clip(&self.stderr),
            self.displays,
            self.outcome
        )
    }

    /// It succeeded and says so.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        self.kept(0)
    }

    /// It ended by itself with this code, and nothing was lost.
    #[track_caller]
    pub(crate) fn kept(self, exit: i32) -> Self {
        let Outcome { cause, exit_code, signal, session_state, problem, .. } = &self.outcome;
        let expected = (Cause::Exit, exit, None, SessionState::Preserved, &None);
        assert_eq!((*cause, *exit_code, *signal, *session_state, problem), expected, "{}", self.story());
        self
    }

    /// Something else ended it: with this cause, this error code, and this left of the state.
    #[track_caller]
    pub(crate) fn died(self, cause: Cause, code: Code, state: SessionState) -> Self {
        let Some(problem) = &self.outcome.problem else { panic!("no problem told: {}", self.story()) };
        let told = (self.outcome.cause, problem.code, self.outcome.session_state, problem.session_state);
        assert_eq!(told, (cause, code, state, state), "{}", self.story());
        self
    }

    pub(crate) fn out(&self) -> String {
        lossy(&self.stdout)
    }

    pub(crate) fn err(&self) -> String {
        lossy(&self.stderr)
    }

    pub(crate) fn screen(&self) -> String {
        lossy(&self.screen)
    }

    /// The value of the last expression as text.
    #[track_caller]
    pub(crate) fn value(&self) -> Option<&str> {
        let mut results = self.displays.iter().filter(|display| display.kind == DisplayKind::Result);
        let first = results.next();
        assert!(results.next().is_none(), "two results: {}", self.story());
        first.map(|display| display.mime["text/plain"].as_str().unwrap())
    }

    /// The exception's name and message.
    pub(crate) fn exception(&self) -> Option<(&str, &str)> {
        self.outcome.exception.as_ref().map(|it| (it.name.as_str(), it.message.as_str()))
    }

    /// Bytes of a stream that lie between what came.
    pub(crate) fn omitted(&self, stream: Stream) -> u64 {
        let mut end = 0;
        let mut omitted = 0;
        for chunk in self.chunks.iter().filter(|chunk| chunk.stream == stream) {
            assert!(chunk.offset >= end, "chunk {} overlaps what came before", chunk.number);
            omitted += chunk.offset - end;
            end = chunk.offset + chunk.length;
        }
        omitted
    }
}
