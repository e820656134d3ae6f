//! Putting sandboxes to sleep and waking them.
//!
//! *Standby*: every process of the box is frozen where it stands, its agent too. *Hibernated*: all of it is written to an
//! image in the sandbox's directory, and the box is gone. Whoever wants something of a sleeping sandbox wakes it first and
//! sees it as it was; files are reached without waking it.
//!
//! Invariant: **a box is frozen only while its row says `standby`.** The row is written before the freezing and after the
//! thawing, both with the sandbox's lock held, so a process that dies in between leaves a box that runs and a row that says
//! it sleeps: the next caller wakes what is awake, and the sweep puts the row right.
//!
//! *The race with a caller.* A caller who finds a running sandbox takes no lock: it connects, greets, and sends its request.
//! It must not be frozen under its hands, nor wait for a frozen agent. Whoever puts to sleep (K) and the caller (C) each first
//! say what they do and then look at what the other has said:
//!
//! ```text
//! K  row = standby ────────────────> asks the agent: who is there? ──> nobody: freezes
//! C            connects and greets ─────────────────> reads the row ──> still running: sends its request
//! ```
//! If C reads `running`, it was connected before K asked, and the agent says so: one who came in the last seconds and has asked
//! for nothing yet is about to. If the agent does not know of C, then C reads `standby`, waits for the lock and wakes the box. A
//! line that is kept open between calls ([`crate::lines`]) sends its request first and then reads the row; K asks twice,
//! so that the agent has read everything that was sent before K's first question. A greeting that is not answered at once
//! makes C look at the row again: it may have come when the box was frozen already.
//!
//! *What a kill leaves.* Of hibernating, with the row's word first:
//!
//! | killed after | row | on disk | then |
//! |---|---|---|---|
//! | the row names the image | standby, `image-N` | nothing, or a part in `image.new` | the box lives: it is woken, the part is removed |
//! | the image is complete, the box not yet gone | standby, `image-N` | `image.new` with [`COMPLETE`] | as before: the box is the newer one |
//! | the box is gone | standby, `image-N` | `image.new` with [`COMPLETE`] | it gets its name, the row says hibernated |
//! | it has its name | standby, `image-N` | `image-N` | the row says hibernated |
//! | the row says so | hibernated, `image-N` | `image-N` | done |
//!
//! Of waking: before the row says `running`, what was restored is ended and restored again; from then on the row names no
//! image, and one that is still there is nobody's. It is put away under another name and removed when the caller has its answer; of
//! whoever is killed before that, a daemon removes it ([`Engine::tidy`]), or the next hibernation. So there
//! is always one of the two, never none and never both: an image whose row does not name it is never restored.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use carrel_backend::{COMPLETE, Memory, link::AgentLink};
use carrel_proto::{
    guest::EndReason,
    id::SandboxId,
    message::{self, Request, Rest},
    problem::{Code, Problem},
};
use tokio::time::timeout;

use crate::{
    Engine, Found, Note, Record, State, Step,
    events::{Event, Kind},
    lock::Lock,
    registry::{boot_id, now_ms},
    sandboxes::remove_tree,
    snapshots::BEFORE,
};

/// What an image is called until it is complete.
const IN_THE_MAKING: &str = "image.new";
const IMAGE: &str = "image-";
/// What is nobody's any more, and is about to be removed.
const AWAY: &str = "away-";
/// For an agent's answer whether its box may sleep. One that hangs is for callers to find.
const ANSWER: Duration = Duration::from_secs(5);
/// Longer than an agent takes somebody to be arriving.
pub(crate) const ARRIVING: Duration = Duration::from_secs(5);
pub(crate) const PAUSE: Duration = Duration::from_millis(50);

/// Threads that remove what is nobody's any more; an engine does not end before they have.
#[derive(Debug, Default)]
pub(crate) struct Clearing(Mutex<Vec<JoinHandle<()>>>);

/// With more of them, whoever has something to remove does it by itself.
const MOST_CLEARING: usize = 8;

impl Clearing {
    pub(crate) fn run(&self, remove: impl FnOnce() + Send + 'static) {
        let mut threads = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| !thread.is_finished());
        if threads.len() < MOST_CLEARING {
            threads.push(std::thread::spawn(|| {
                // Whoever waits for an answer comes first. Of this thread alone: it has a priority of its own.
                let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), 19);
                remove();
            }));
        } else {
            drop(threads);
            remove();
        }
    }

    /// For those that run now.
    pub(crate) fn wait(&self) {
        let threads = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            let _ = thread.join();
        }
    }
}

impl Drop for Clearing {
    fn drop(&mut self) {
        self.wait();
    }
}

/// What came of waking.
pub(crate) enum Woken {
    Here(Box<Found>),
    /// It is gone, or runs already.
    Gone,
    /// It does not sleep: the lock is given back.
    Not(Lock),
}

impl Record {
    /// Whether its lifetime is over. Of one that runs, its agent sees to that.
    pub(crate) fn is_over(&self, now: u64) -> bool {
        now > self.created_unix_ms.saturating_add(self.spec.max_lifetime_s.saturating_mul(1000))
    }
}

impl Engine {
    /// Whether sandboxes of this host can be written to disk; if not, why.
    pub fn can_hibernate(&self) -> Result<(), Problem> {
        self.backend.can_hibernate()
    }

    /// Freezes a sandbox, whatever it is doing: a call under way goes on when it is woken, while its time passes.
    pub async fn standby(&self, record: &Record) -> Result<Record, Problem> {
        let until = Instant::now() + ARRIVING;
        while Instant::now() < until {
            let lock = self.lock(&record.id).await?;
            if let Some(record) = self.lay_down(self.there(&record.id)?, lock).await? {
                return Ok(record);
            }
            // Without the lock, so that whoever is arriving gets to it.
            tokio::time::sleep(PAUSE).await;
        }
        Err(Problem::new(Code::Conflict, "callers keep coming to the sandbox")
            .hint("try again when they are done"))
    }

    pub(crate) fn is_frozen(&self, record: &Record) -> bool {
        record.placed.as_ref().is_some_and(|placed| self.backend.is_frozen(&record.id, placed))
    }

    /// With the lock held. `None`: somebody is arriving.
    async fn lay_down(&self, record: Record, lock: Lock) -> Result<Option<Record>, Problem> {
        match record.state {
            State::Standby if self.is_alive(&record) && self.is_frozen(&record) => Ok(Some(record)),
            State::Running | State::Standby if self.is_alive(&record) => {
                self.freeze(record, lock, None).await
            }
            State::Hibernated => Err(Problem::new(Code::Conflict, "the sandbox is hibernated")
                .hint("it sleeps more deeply already; wake it first if it shall be in standby")),
            _ => Err(not_running(&record)),
        }
    }

    /// Writes a sandbox to disk and ends its box. Refused while a run, or a caller that reads or waits, is there.
    pub async fn hibernate(&self, record: &Record) -> Result<Record, Problem> {
        self.blocking(|engine| engine.can_hibernate()).await?;
        let until = Instant::now() + ARRIVING;
        loop {
            let lock = self.lock(&record.id).await?;
            let record = self.there(&record.id)?;
            if record.state == State::Hibernated {
                return Ok(record);
            }
            if !matches!(record.state, State::Running | State::Standby) || !self.is_alive(&record) {
                return Err(not_running(&record));
            }
            if record.spec.ephemeral.is_some() {
                return Err(Problem::new(Code::Conflict, "the sandbox of one call is not hibernated")
                    .hint("it is gone when the call is over"));
            }
            match self.write_out(record, lock, true).await {
                // An interpreter that starts is ready in a moment, without anybody's doing.
                Err(problem) if problem.code == Code::Busy && Instant::now() < until => {}
                written => return written,
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// With the lock held: asks the agent, and freezes its box. `None`: it is not idle for so long.
    pub(crate) async fn freeze(
        &self,
        record: Record,
        lock: Lock,
        idle: Option<Duration>,
    ) -> Result<Option<Record>, Problem> {
        let id = record.id.clone();
        let lock = self.blocking(move |engine| engine.registry.set_standby(&id, None).map(|()| lock)).await?;
        self.watch.reached(Step::StandbyWritten);
        let rest = self.lie_down(&record.id, idle).await;
        self.blocking(move |engine| {
            let _lock = lock;
            let awake = || engine.registry.set_awake(&record.id, false);
            let rest = match rest {
                Ok(rest) if rest.rests => rest,
                Ok(_) => return awake().map(|()| None),
                Err(problem) => return awake().and(Err(problem)),
            };
            let frozen = match &record.placed {
                Some(placed) => engine.backend.freeze(&record.id, placed),
                None => Err(not_running(&record)),
            };
            if let Err(problem) = frozen {
                return awake().and(Err(problem));
            }
            engine.watch.reached(Step::BoxFrozen);
            engine.registry.set_resting(&record.id, &rest.usage)?;
            engine.note(Event::of(Kind::SessionStandby, &record));
            engine.there(&record.id).map(Some)
        })
        .await
    }

    /// Asks an agent whether its box may sleep; twice, see the head of this module.
    pub(crate) async fn lie_down(&self, id: &SandboxId, idle: Option<Duration>) -> Result<Rest, Problem> {
        let idle_ms = idle.map(|idle| u64::try_from(idle.as_millis()).unwrap_or(u64::MAX));
        let asking = async {
            let mut link = AgentLink::connect(&self.backend.socket(&self.directory(id))).await?;
            let mut last = None;
            for _ in 0..2 {
                match link.ask(&Request::Rest { idle_ms }).await {
                    Ok(message::Event::Rest(rest)) => last = Some(rest),
                    Err(problem) if problem.code == Code::Protocol => return Err(too_old()),
                    Ok(_) => return Err(too_old()),
                    Err(problem) => return Err(problem),
                }
            }
            last.ok_or_else(too_old)
        };
        let late = || Problem::new(Code::AgentLost, "the sandbox's agent does not answer");
        timeout(ANSWER, asking).await.map_err(|_| late())?
    }

    /// With the lock held, of a living box: writes it to disk. On error it is as it was; what cannot be written says why in
    /// its row.
    pub(crate) async fn write_out(&self, record: Record, lock: Lock, asked: bool) -> Result<Record, Problem> {
        let frozen = record.state == State::Standby;
        let before = record.clone();
        let (lock, image) = self
            .blocking(move |engine| {
                engine.remove_images(&before);
                let image = format!("{IMAGE}{:x}", now_ms());
                engine.registry.set_standby(&before.id, Some(&image))?;
                engine.watch.reached(Step::ImageNamed);
                // What is frozen can neither be asked nor be written.
                if let Some(placed) = before.placed.as_ref().filter(|_| frozen) {
                    engine.backend.thaw(&before.id, placed)?;
                }
                Ok((lock, image))
            })
            .await?;
        let rest = self.lie_down(&record.id, None).await;
        self.blocking(move |engine| {
            let _lock = lock;
            let began = Instant::now();
            let written = rest.and_then(|rest| match rest.calls {
                0 if rest.rests => engine.write_image(&record, &image).map(|bytes| (rest, bytes)),
                _ => Err(Problem::new(Code::Conflict, "a call is under way in the sandbox")
                    .hint("wait for it, or cancel it; standby works in the midst of a call")),
            });
            match written {
                Ok((rest, bytes)) => {
                    if !frozen {
                        engine.registry.set_resting(&record.id, &rest.usage)?;
                    }
                    engine.registry.set_hibernated(&record.id, bytes)?;
                    engine.watch.reached(Step::HibernatedWritten);
                    let mut event = Event::of(Kind::SessionHibernated, &record);
                    event.bytes = Some(bytes);
                    event.duration_ms = u64::try_from(began.elapsed().as_millis()).ok();
                    engine.note(event);
                    engine.there(&record.id)
                }
                Err(problem) => {
                    engine.stay(&record, frozen, asked, &problem)?;
                    Err(problem)
                }
            }
        })
        .await
    }

    /// After a hibernation that came to nothing: frozen again, or running as before.
    fn stay(&self, record: &Record, frozen: bool, asked: bool, problem: &Problem) -> Result<(), Problem> {
        // The image may be all that there is of it: whoever comes next finds out, by the row that names it.
        if !self.is_alive(record) {
            return Ok(());
        }
        self.remove_images(record);
        let again = match record.placed.as_ref().filter(|_| frozen) {
            Some(placed) => self.backend.freeze(&record.id, placed).is_ok(),
            None => false,
        };
        if again {
            self.registry.set_standby(&record.id, None)?;
        } else {
            self.registry.set_awake(&record.id, false)?;
        }
        // Whoever asked is told; of others, the row is all that anybody sees. A caller in the way, or
        // a full disk, may be gone the next time.
        let passes = matches!(problem.code, Code::Conflict | Code::Busy | Code::Disk);
        if again && (!asked || problem.code == Code::Unsupported) && !passes {
            self.registry.set_standby_reason(&record.id, &problem.message)?;
        }
        Ok(())
    }

    /// From a box that lives to an image that has its name. Says how large it is.
    fn write_image(&self, record: &Record, name: &str) -> Result<u64, Problem> {
        let Some(placed) = &record.placed else { return Err(not_running(record)) };
        let directory = self.directory(&record.id);
        let making = directory.join(IN_THE_MAKING);
        self.backend.hibernate(&record.id, &directory, placed, &making)?;
        // The box is gone. What fails from here on is found by the next caller: the row names the image.
        let failed =
            |error: io::Error| Problem::internal(format!("writing the image of {}: {error}", record.id));
        let bytes = seal(&making).map_err(failed)?;
        self.watch.reached(Step::ImageSealed);
        fs::rename(&making, directory.join(name)).map_err(failed)?;
        File::open(&directory).and_then(|directory| directory.sync_all()).map_err(failed)?;
        self.watch.reached(Step::ImagePlaced);
        Ok(bytes)
    }

    /// With the lock held: wakes a sandbox that sleeps.
    pub(crate) fn wake(
        &self,
        id: &SandboxId,
        lock: Lock,
        environment: Option<&str>,
        caller: &Option<Arc<str>>,
    ) -> Result<Woken, Problem> {
        let Some(record) = self.registry.by_id(id)? else {
            lock.discard();
            return Ok(Woken::Gone);
        };
        if record.state == State::Running && self.is_alive(&record) {
            // Not by us; but nobody would get an answer.
            if let Some(placed) = record.placed.as_ref().filter(|placed| self.backend.is_frozen(id, placed)) {
                self.backend.thaw(id, placed)?;
            }
            return Ok(Woken::Gone);
        }
        if !record.state.is_asleep() {
            return Ok(Woken::Not(lock));
        }
        if record.is_over(now_ms()) {
            self.expire(&record, EndReason::Lifetime, lock)?;
            return Ok(Woken::Gone);
        }
        self.check_environment(&record, environment)?;
        let began = Instant::now();
        let woken = match record.state {
            State::Standby => match self.thaw(&record)? {
                // Whoever wrote it to disk and ended it did not come to writing that down.
                None => match self.recover(&record)? {
                    Some(record) => self.restore(&record)?,
                    None => None,
                },
                thawed => thawed,
            },
            _ => self.restore(&record)?,
        };
        let Some(found) = woken else { return Ok(Woken::Not(lock)) };
        let mut event =
            Event::of(Kind::SessionWoken, &record).caller(caller.clone()).detail(record.state.as_str());
        event.duration_ms = u64::try_from(began.elapsed().as_millis()).ok();
        self.note(event);
        drop(lock);
        Ok(Woken::Here(Box::new(found)))
    }

    /// With the lock held: wakes one in standby for a change of what it holds.
    pub(crate) fn unfreeze(&self, record: &mut Record) -> Result<(), Problem> {
        if let Some(found) = self.thaw(record)? {
            self.note(Event::of(Kind::SessionWoken, record).detail("update"));
            *record = found.record;
        }
        Ok(())
    }

    /// `None`: it died in its sleep.
    fn thaw(&self, record: &Record) -> Result<Option<Found>, Problem> {
        let Some(placed) = record.placed.as_ref().filter(|_| self.is_alive(record)) else { return Ok(None) };
        match self.backend.thaw(&record.id, placed) {
            Ok(()) => {}
            Err(problem) if problem.code == Code::AgentLost => return Ok(None),
            Err(problem) => return Err(problem),
        }
        self.watch.reached(Step::BoxThawed);
        self.registry.set_awake(&record.id, true)?;
        self.watch.reached(Step::AwakeWritten);
        Ok(Some(awake(record.clone())))
    }

    /// `None`: its image is no good; then it is lost, and its row says so.
    fn restore(&self, record: &Record) -> Result<Option<Found>, Problem> {
        let (Some(image), Some(before)) = (&record.sleep.image, &record.placed) else { return Ok(None) };
        let directory = self.directory(&record.id);
        let path = directory.join(&image.name);
        self.backend.expect();
        self.put_back(record)?;
        // Of somebody who was killed between restoring it and writing that down.
        self.backend.clear_way(&record.id, &directory)?;
        self.watch.reached(Step::WayCleared);
        let restored = match path.is_dir() {
            true => self.backend.restore(&self.request(record, Some(before), None)?, &path, Memory::Kept),
            false => Err(Problem::new(Code::StateLost, "the image of the hibernated sandbox is gone")),
        };
        match restored {
            Ok(placed) => {
                self.registry.set_placed(&record.id, &placed)?;
                self.watch.reached(Step::RunningWritten);
                self.registry.touch(&record.id)?;
                self.put_images_away(record);
                self.watch.reached(Step::ImagesRemoved);
                let record = Record { placed: Some(placed), boot: boot_id().to_owned(), ..record.clone() };
                Ok(Some(awake(record)))
            }
            Err(problem) if problem.code == Code::StateLost => {
                self.registry.set_state(&record.id, State::Lost, None)?;
                self.registry.set_standby_reason(&record.id, &problem.message)?;
                self.note(Event::of(Kind::SessionLost, record).detail("image"));
                Ok(None)
            }
            Err(problem) => Err(problem),
        }
    }

    /// Finishes what somebody who was killed had all but done: a sandbox whose box is gone and whose image is complete.
    pub(crate) fn recover(&self, record: &Record) -> Result<Option<Record>, Problem> {
        let Some(image) = &record.sleep.image else { return Ok(None) };
        let directory = self.directory(&record.id);
        let (making, path) = (directory.join(IN_THE_MAKING), directory.join(&image.name));
        if !path.is_dir() && making.join(COMPLETE).exists() {
            let failed = |error: io::Error| Problem::internal(format!("the image of {}: {error}", record.id));
            seal(&making).and_then(|_| fs::rename(&making, &path)).map_err(failed)?;
        }
        if !path.is_dir() {
            return Ok(None);
        }
        self.registry.set_hibernated(&record.id, size(&path))?;
        self.note(Event::of(Kind::SessionHibernated, record).detail("recovered"));
        self.there(&record.id).map(Some)
    }

    /// With the lock held: whether a sandbox sleeps as its row says. A row that says so of a box that runs is put right.
    pub(crate) fn sleeps_well(&self, record: &Record) -> Result<bool, Problem> {
        if record.state == State::Hibernated {
            self.put_back(record)?;
            return Ok(self.has_image(record));
        }
        if !self.is_alive(record) {
            return Ok(self.recover(record)?.is_some());
        }
        if !self.is_frozen(record) {
            let thawed = record.placed.as_ref().map(|placed| self.backend.thaw(&record.id, placed));
            // It may be at its very end, at the hands of whoever wrote it to disk.
            if thawed.is_some_and(|thawed| thawed.is_err_and(|problem| problem.code == Code::AgentLost)) {
                return Ok(self.recover(record)?.is_some());
            }
            self.remove_images(record);
            self.registry.set_awake(&record.id, false)?;
        }
        Ok(true)
    }

    /// Of one that is about to be written down as lost: why, if it was asleep.
    pub(crate) fn forget_sleep(&self, record: &Record) -> Result<(), Problem> {
        match record.state {
            State::Standby => self.registry.set_awake(&record.id, false),
            State::Hibernated => self.registry.set_standby_reason(&record.id, "the image is gone"),
            _ => Ok(()),
        }
    }

    pub(crate) fn has_image(&self, record: &Record) -> bool {
        let directory = self.directory(&record.id);
        record.sleep.image.as_ref().is_some_and(|image| directory.join(&image.name).is_dir())
    }

    /// Of a box that lives: images, and files of before a restore in place, are nobody's.
    pub(crate) fn nobodys(&self, record: &Record) -> Vec<PathBuf> {
        let is_nobodys = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name == IN_THE_MAKING || name == BEFORE || [IMAGE, AWAY].iter().any(|of| name.starts_with(of))
        };
        let entries = fs::read_dir(self.directory(&record.id)).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(is_nobodys).collect()
    }

    /// What cannot be removed now is met again.
    pub(crate) fn remove_images(&self, record: &Record) {
        for path in self.nobodys(record) {
            let _ = remove_tree(&path);
        }
    }

    /// As [`Self::remove_images`], by a thread that nobody waits for: on some file systems it takes as long as the waking. Under
    /// other names first, because the next hibernation may begin meanwhile.
    fn put_images_away(&self, record: &Record) {
        let directory = self.directory(&record.id);
        let stamp = now_ms();
        let away = self.nobodys(record).into_iter().enumerate().filter_map(|(number, path)| {
            let away = directory.join(format!("{AWAY}{stamp:x}-{number}"));
            fs::rename(path, &away).is_ok().then_some(away)
        });
        let away: Vec<PathBuf> = away.collect();
        self.clearing.run(move || {
            for path in away {
                let _ = remove_tree(&path);
            }
        });
    }

    pub(crate) fn there(&self, id: &SandboxId) -> Result<Record, Problem> {
        self.record(id)?.ok_or_else(|| {
            Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{id}`"))
                .hint("it was closed meanwhile")
        })
    }
}

fn awake(record: Record) -> Found {
    let record = Record {
        state: State::Running,
        used_unix_ms: now_ms(),
        sleep: crate::registry::Sleep::default(),
        ..record
    };
    Found { record, created: false, note: None }
}

pub(crate) fn not_running(record: &Record) -> Problem {
    Problem::new(Code::Conflict, format!("the sandbox does not run: it is {}", record.state.as_str()))
        .hint("wake it first: any call does")
}

fn too_old() -> Problem {
    Problem::new(
        Code::Unsupported,
        "the sandbox was made by an older carrel, whose agent cannot be put to sleep",
    )
    .hint("close it and open it again, or let it run")
}

/// Puts an image on the disk, whole, and says how large it is.
pub(crate) fn seal(image: &Path) -> io::Result<u64> {
    let complete = image.join(COMPLETE);
    if !complete.exists() {
        File::create(complete)?;
    }
    let mut bytes = 0;
    let mut todo = vec![image.to_path_buf()];
    while let Some(path) = todo.pop() {
        let meta = fs::symlink_metadata(&path)?;
        if meta.is_dir() {
            for entry in fs::read_dir(&path)? {
                todo.push(entry?.path());
            }
        }
        if meta.is_dir() || meta.is_file() {
            File::open(&path)?.sync_all()?;
            bytes += if meta.is_file() { meta.len() } else { 0 };
        }
    }
    Ok(bytes)
}

pub(crate) fn size(image: &Path) -> u64 {
    let mut bytes = 0;
    let mut todo = vec![image.to_path_buf()];
    while let Some(path) = todo.pop() {
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.is_dir() => {
                todo.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()));
            }
            Ok(meta) => bytes += meta.len(),
            Err(_) => {}
        }
    }
    bytes
}

/// What the next caller is told of a sandbox that is lost.
pub(crate) fn damaged(record: &Record) -> Option<Note> {
    record.sleep.standby_reason.is_some().then_some(Note::Damaged)
}

#[cfg(test)]
mod tests;
