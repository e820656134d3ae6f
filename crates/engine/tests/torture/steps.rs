//! Thousands of steps, drawn by lot, against the model.

use std::path::{Path, PathBuf};

use carrel_engine::{Engine, Found, Note, Record, State, snapshots::Snapshot};
use carrel_proto::{
    guest::Language::{Bash, Python},
    id::SessionName,
    outcome::SessionState,
    problem::{Code, Problem},
};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::{
    model::{CRASHED, Content, Course, Damage, Life, Model, SHOW, Step},
    world::{Lot, Ran, close_all, exec, in_time, key, number, open, read, run, seed, wish, write},
};

const SANDBOXES: u64 = 3;
/// Giving it back takes whoever ends a while.
const BALLAST: &str = "ballast = bytearray(b'x') * (48 << 20)";

#[tokio::test]
async fn whatever_is_done_to_it_a_sandbox_is_what_it_must_be() {
    torture(Course::Everything).await;
}

#[tokio::test]
async fn whoever_ends_while_another_takes_its_place_is_told_apart() {
    torture(Course::GoingBack).await;
}

async fn torture(course: Course) {
    let (seed, steps) = (seed(), number("CARREL_TORTURE_STEPS", 300));
    let state = tempfile::tempdir().unwrap();
    let mut trials = tokio::task::JoinSet::new();
    for sandbox in 0..SANDBOXES {
        let trial = Trial::begin(state.path(), course, seed, sandbox).await;
        trials.spawn(trial.go(steps));
    }
    let mut failed = None;
    while let Some(done) = trials.join_next().await {
        if let Err(problem) = done.unwrap() {
            failed.get_or_insert(problem);
        }
    }
    close_all(state.path()).await;
    if let Some(problem) = failed {
        panic!("{problem}");
    }
}

pub(crate) struct Trial {
    pub(crate) state: PathBuf,
    pub(crate) name: String,
    course: Course,
    seed: u64,
    lot: Lot,
    pub(crate) engine: Engine,
    /// As it was found last: a caller's may be old.
    pub(crate) record: Record,
    pub(crate) model: Model,
    pub(crate) history: Vec<String>,
    can_standby: bool,
    can_hibernate: bool,
    /// The last snapshot, and what it has.
    pub(crate) saved: Option<(Snapshot, Content)>,
}

impl Trial {
    async fn begin(state: &Path, course: Course, seed: u64, sandbox: u64) -> Self {
        let engine = open(state);
        let name = format!("s{sandbox}");
        let record = engine.sandbox(&key(&name), &wish()).await.unwrap().record;
        let can_standby = match engine.standby(&record).await {
            Ok(_) => true,
            Err(problem) => {
                println!("no standby: {}", problem.message);
                false
            }
        };
        let can_hibernate =
            engine.can_hibernate().map_err(|problem| println!("no hibernation: {}", problem.message));
        let mut model = Model::new();
        if can_standby {
            model.life = Life::Standby;
        }
        Self {
            state: state.to_path_buf(),
            name,
            course,
            seed,
            lot: Lot::new(seed ^ (sandbox << 32)),
            engine,
            record,
            model,
            history: Vec::new(),
            can_standby,
            can_hibernate: can_hibernate.is_ok(),
            saved: None,
        }
    }

    async fn go(mut self, steps: u64) -> Result<(), String> {
        if self.course == Course::GoingBack {
            self.python(BALLAST, |model| model.call(|_| {})).await?;
        }
        for _ in 0..steps {
            let step = Step::draw(self.course, &mut self.lot, &self.model);
            if (step == Step::Standby && !self.can_standby) || (step.needs_disk() && !self.can_hibernate) {
                continue;
            }
            self.history.push(format!("{step:?}"));
            if let Err(what) = self.step(&step).await {
                return Err(self.story(&what));
            }
            let state = self.engine.record(&self.record.id).unwrap().map(|record| record.state);
            let expected = match self.model.life {
                Life::Awake => State::Running,
                Life::Standby => State::Standby,
                Life::Hibernated => State::Hibernated,
            };
            // Of one that was killed, the row is as old as the last look.
            if self.model.doomed.is_none() && state != Some(expected) {
                return Err(self.story(&format!("it is {state:?}, not {expected:?}")));
            }
        }
        self.forget_saved().await;
        Ok(())
    }

    fn story(&self, what: &str) -> String {
        let (name, seed, model) = (&self.name, self.seed, &self.model);
        let history = self.history.join("\n  ");
        let log = self.state.join("sandboxes").join(self.record.id.as_str()).join("spool/agent.log");
        let log = std::fs::read(log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        format!(
            "{name}, CARREL_TORTURE_SEED={seed}: {what}\nthe model: {model:?}\nthe steps:\n  {history}\nthe agent's log:\n  {log}"
        )
    }

    async fn step(&mut self, step: &Step) -> Result<(), String> {
        let told = |problem: Problem| format!("{step:?} failed: {problem:?}");
        match step {
            Step::PythonSet(value) => {
                self.python(&format!("n = {value}"), |model| model.call(|it| Model::set(it, *value))).await
            }
            Step::PythonAppend(value) => {
                let code = format!("l = globals().get('l', [])\nl.append({value})");
                self.python(&code, |model| model.call(|it| Model::append(it, *value))).await
            }
            Step::PythonRead => self.python("pass", |model| model.call(|_| {})).await,
            Step::PythonFile(name, text) => {
                let code = format!(
                    "import os; os.makedirs('d', exist_ok=True); open('{name}', 'w').write('{text}')"
                );
                let change = |model: &mut Model| {
                    model.call(|_| {});
                    model.files.insert(name, text.to_string());
                };
                self.python(&code, change).await
            }
            Step::PythonCrash(how) => {
                self.find().await?;
                let code = format!("n = -1; l = [-1]; open('{CRASHED}', 'w').write('yes')\n{how}");
                let ran = run(&self.engine, &self.record, Python, &code).await.map_err(told)?;
                self.model.life = Life::Awake;
                self.model.crash(Python, &ran)?;
                self.read(CRASHED)
            }
            Step::BashSet(value) => self.model_bash(&format!("b={value}"), Some(*value)).await,
            Step::BashRead => self.model_bash(":", None).await,
            Step::BashCrash => {
                self.find().await?;
                let ran = run(&self.engine, &self.record, Bash, "kill -9 $$").await.map_err(told)?;
                self.model.life = Life::Awake;
                self.model.crash(Bash, &ran)
            }
            // Files are reached without waking it, and also when nothing else is left of it.
            Step::Write(name, text) => {
                match write(&self.engine, &self.record, name, &text.to_string()) {
                    Ok(()) => self.model.change(name, text.to_string()),
                    Err(problem) if self.is_put_away(&problem) => {}
                    Err(problem) => return Err(told(problem)),
                }
                Ok(())
            }
            Step::Read(name) => self.read(name),
            Step::ExecWrite(name, text) => {
                self.find().await?;
                let script = format!("mkdir -p d; printf %s {text} > {name}");
                let ran = exec(&self.engine, &self.record, &script).await.map_err(told)?;
                self.model.life = Life::Awake;
                self.model.change(name, text.to_string());
                expect("the exit code", &ran, &ran.outcome.exit_code, &0)
            }
            Step::ExecRead(name) => {
                self.find().await?;
                let ran = exec(&self.engine, &self.record, &format!("cat {name}")).await.map_err(told)?;
                self.model.life = Life::Awake;
                expect(name, &ran, &ran.out, &self.model.files.get(name).cloned().unwrap_or_default())
            }
            Step::Undo(calls) => self.undo(*calls).await,
            Step::Standby => self.standby().await,
            Step::Hibernate => self.hibernate().await,
            Step::Wake => {
                self.find().await?;
                self.look_for().await.map_err(told)?;
                self.model.life = Life::Awake;
                Ok(())
            }
            Step::Restart => {
                self.engine = open(&self.state);
                self.engine.sweep().map_err(told)
            }
            Step::KillAgent => {
                if self.model.life != Life::Hibernated && self.model.doomed.is_none() {
                    self.kill()?;
                    self.model.doomed = Some(Note::Revived);
                }
                Ok(())
            }
            Step::Damage(damage) => self.damage(*damage).await,
            // Of one that is dead only files could be had: what that is worth is another test's matter.
            Step::Snapshot | Step::RestoreInPlace | Step::Fork { .. } | Step::Killed(..)
                if self.model.doomed.is_some() =>
            {
                Ok(())
            }
            Step::Snapshot => self.snapshot().await,
            Step::RestoreInPlace => self.restore_in_place().await,
            Step::RestoreAsNew => self.restore_as_new().await,
            Step::Fork { adopted } => self.fork(*adopted).await,
            Step::Killed(deed, at) => self.killed(*deed, *at).await,
        }
    }

    fn read(&self, name: &str) -> Result<(), String> {
        match (read(&self.engine, &self.record, name), self.model.files.get(name)) {
            (Ok(text), Some(expected)) if text == *expected => Ok(()),
            (Err(problem), None) if problem.code == Code::NotFound => Ok(()),
            (Err(problem), _) if self.is_put_away(&problem) => Ok(()),
            (found, expected) => Err(format!("{name} is {found:?}, not {expected:?}")),
        }
    }

    /// Files of one that was found to be dead come back with it.
    fn is_put_away(&self, problem: &Problem) -> bool {
        if self.model.doomed.is_none() || problem.code != Code::Unavailable {
            return false;
        }
        // Whoever has found it, a sweep of another's perhaps, may be about to say so.
        let lock = std::fs::File::open(self.state.join("locks").join(self.record.id.as_str())).unwrap();
        rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockShared).unwrap();
        self.engine.record(&self.record.id).unwrap().is_some_and(|record| record.state == State::Lost)
    }

    pub(crate) async fn look_for(&mut self) -> Result<Found, Problem> {
        let found = in_time("finding it", self.engine.sandbox(&key(&self.name), &wish())).await?;
        self.record = found.record.clone();
        Ok(found)
    }

    /// As a caller does it: by the key, or by what it knew before. Whoever comes to one that is lost is told, once.
    async fn find(&mut self) -> Result<(), String> {
        let Some(note) = self.model.doomed else {
            if self.lot.below(2) == 0 {
                self.history.push("  found by its key".into());
                let found = self.look_for().await.map_err(|problem| format!("finding it: {problem:?}"))?;
                self.model.life = Life::Awake;
                if let Some(note) = found.note {
                    return Err(format!("found with {note:?}"));
                }
            }
            return Ok(());
        };
        let by_key = self.lot.below(2) == 0;
        self.history.push(format!("  {note:?}, found by its {}", if by_key { "key" } else { "record" }));
        if by_key {
            let found = self.look_for().await.map_err(|problem| format!("finding it: {problem:?}"))?;
            if found.note != Some(note) || found.created {
                return Err(format!("found with {:?}, not {note:?}", found.note));
            }
        } else {
            match run(&self.engine, &self.record, Python, SHOW).await {
                Err(problem)
                    if problem.code == Code::AgentLost && problem.session_state == SessionState::Lost => {}
                other => return Err(format!("a call to one that is lost: {other:?}")),
            }
            self.look_for().await.map_err(|problem| format!("finding it again: {problem:?}"))?;
        }
        self.model.lose();
        Ok(())
    }

    async fn python(&mut self, code: &str, change: impl FnOnce(&mut Model)) -> Result<(), String> {
        self.find().await?;
        let ran = run(&self.engine, &self.record, Python, &format!("{code}\n{SHOW}")).await;
        let ran = ran.map_err(|problem| format!("python failed: {problem:?}"))?;
        self.model.life = Life::Awake;
        change(&mut self.model);
        expect("python's state", &ran, &ran.out, &self.model.python.shown())?;
        expect("what it keeps", &ran, &ran.outcome.session_state, &SessionState::Preserved)
    }

    async fn model_bash(&mut self, code: &str, value: Option<i64>) -> Result<(), String> {
        self.find().await?;
        let ran = run(&self.engine, &self.record, Bash, &format!("{code}; echo ${{b-unset}}")).await;
        let ran = ran.map_err(|problem| format!("bash failed: {problem:?}"))?;
        self.model.life = Life::Awake;
        self.model.bash = value.or(self.model.bash);
        expect("bash's state", &ran, &ran.out, &self.model.bash_shown())
    }

    async fn undo(&mut self, calls: u32) -> Result<(), String> {
        self.find().await?;
        let session = SessionName::main();
        let undone = in_time("undo", self.engine.undo(&self.record, &session, Some(Python), calls)).await;
        self.model.life = Life::Awake;
        let before = self.model.past.len();
        match (undone, self.model.undo(calls as usize)) {
            (Ok(undone), Some(files)) if undone.calls == calls && undone.kept == self.model.past.len() => {
                self.model.files_went(files, Some(undone.files_state), undone.files_reason.as_deref())
            }
            (Err(problem), None) if problem.code == Code::UndoUnavailable => Ok(()),
            (undone, _) => Err(format!("undo {calls} of {before}: {undone:?}")),
        }
    }

    async fn standby(&mut self) -> Result<(), String> {
        let slept = in_time("standby", self.engine.standby(&self.record)).await;
        match (slept, self.model.life, self.model.doomed) {
            (Ok(_), Life::Awake | Life::Standby, None) => {
                self.model.life = Life::Standby;
                Ok(())
            }
            (Err(problem), Life::Hibernated, _) if problem.code == Code::Conflict => Ok(()),
            // Of one that is dead: it is not told apart from one that sleeps before somebody wants something of it.
            (Ok(_), _, Some(_)) => Ok(()),
            (Err(problem), _, Some(_)) if matches!(problem.code, Code::Conflict | Code::AgentLost) => Ok(()),
            (slept, ..) => Err(format!("{slept:?}")),
        }
    }

    async fn hibernate(&mut self) -> Result<(), String> {
        let slept = in_time("hibernate", self.engine.hibernate(&self.record)).await;
        match (slept, self.model.doomed) {
            (Ok(_), None) => {
                if self.model.life != Life::Hibernated {
                    // Copies of states that are gone are not written.
                    self.model.past.clear();
                }
                self.model.life = Life::Hibernated;
                Ok(())
            }
            (Ok(_), Some(_)) if self.model.life == Life::Hibernated => Ok(()),
            (Err(problem), Some(_)) if matches!(problem.code, Code::Conflict | Code::AgentLost) => Ok(()),
            (slept, _) => Err(format!("{slept:?}")),
        }
    }

    fn kill(&self) -> Result<(), String> {
        let record = self.engine.record(&self.record.id).unwrap().unwrap();
        let pid = Pid::from_raw(record.placed.as_ref().unwrap().pid).unwrap();
        let fd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| format!("its agent: {error}"))?;
        kill_process(pid, Signal::KILL).unwrap();
        // One that is frozen ends when it is thawed.
        if self.model.life == Life::Awake {
            let deadline = rustix::event::Timespec { tv_sec: 30, tv_nsec: 0 };
            let mut ready = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut ready, Some(&deadline)).unwrap();
        }
        Ok(())
    }

    async fn damage(&mut self, damage: Damage) -> Result<(), String> {
        if self.model.doomed.is_some() {
            return Ok(());
        }
        let record = self.engine.record(&self.record.id).unwrap().unwrap();
        let directory = self.state.join("sandboxes").join(record.id.as_str());
        let image = directory.join(&record.sleep.image.as_ref().ok_or("its row names no image")?.name);
        let manifest = image.join("manifest.json");
        match damage {
            Damage::Flipped | Damage::Truncated | Damage::Missing => {
                let path = self.a_file_of(&image);
                self.history.push(format!("  {}", path.display()));
                let mut bytes = std::fs::read(&path).unwrap();
                match damage {
                    Damage::Flipped => {
                        let at = usize::try_from(self.lot.below(bytes.len() as u64)).unwrap();
                        bytes[at] ^= 1 << self.lot.below(8);
                    }
                    Damage::Truncated => bytes.truncate(bytes.len() / 2),
                    _ => return self.gone(std::fs::remove_file(path)),
                }
                self.gone(replace(&path, &bytes))
            }
            Damage::Manifest => self.gone(replace(&manifest, b"{\"version\":1,")),
            Damage::Gone => {
                self.gone(std::fs::remove_dir_all(image))?;
                Ok(())
            }
            Damage::Newer => {
                let before = std::fs::read_to_string(&manifest).unwrap();
                let mut told: serde_json::Value = serde_json::from_str(&before).unwrap();
                told["criu"] = "99.1".into();
                replace(&manifest, told.to_string().as_bytes()).unwrap();
                match self.look_for().await {
                    Err(problem) if problem.code == Code::Unsupported && !problem.hint.is_empty() => {}
                    other => return Err(format!("with a newer image: {other:?}")),
                }
                // Nothing was lost: the right program brings it back.
                std::fs::write(&manifest, before).unwrap();
                Ok(())
            }
        }
    }

    fn gone(&mut self, done: std::io::Result<()>) -> Result<(), String> {
        done.unwrap();
        self.model.doomed = Some(Note::Damaged);
        Ok(())
    }

    /// One with something in it that matters.
    fn a_file_of(&mut self, image: &Path) -> PathBuf {
        let (mut files, mut todo) = (Vec::new(), vec![image.to_path_buf()]);
        while let Some(directory) = todo.pop() {
            for entry in std::fs::read_dir(directory).unwrap().flatten() {
                let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
                let remark = name.ends_with(".log") || name.starts_with("stats-") || name == "manifest.json";
                match entry.metadata().unwrap() {
                    meta if meta.is_dir() => todo.push(path),
                    meta if meta.len() > 0 && !remark => files.push(path),
                    _ => {}
                }
            }
        }
        files.sort();
        self.lot.one(&files).clone()
    }
}

/// With another file of that name: a snapshot may share the first.
fn replace(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    std::fs::remove_file(path)?;
    std::fs::write(path, bytes)
}

fn expect<T: PartialEq + std::fmt::Debug>(
    what: &str,
    ran: &Ran,
    found: &T,
    expected: &T,
) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("{what}: {found:?}, not {expected:?}\nstderr {}\n{:?}", ran.err, ran.outcome))
}
