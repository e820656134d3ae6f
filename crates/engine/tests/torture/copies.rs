//! The steps of a trial that copy its sandbox, or put a copy in its place.

use carrel_engine::{
    Record,
    snapshots::{RestoreWish, SnapshotFilter, SnapshotWish},
};
use carrel_proto::{
    guest::Language::{Bash, Python},
    problem::{Code, Problem},
};

use crate::{
    faults::{self, Deed},
    model::{Content, Life, SHOW, SHOW_BASH},
    steps::Trial,
    world::{in_time, read, run},
};

fn told(what: &'static str) -> impl Fn(Problem) -> String {
    move |problem| format!("{what}: {problem:?}")
}

impl Trial {
    /// What was taken, with what the sandbox held then. It goes on as it was, without what could be taken back: copies of
    /// states that are gone are not written.
    pub(crate) async fn snapshot(&mut self) -> Result<(), String> {
        let taken = in_time("snapshot", self.engine.snapshot(&self.record, &SnapshotWish::default())).await;
        let taken = taken.map_err(told("a snapshot"))?;
        self.forget_saved().await;
        self.saved = Some((taken, self.model.content()));
        self.copied();
        Ok(())
    }

    fn copied(&mut self) {
        if self.model.life != Life::Hibernated {
            self.model.past.clear();
        }
    }

    pub(crate) async fn forget_saved(&mut self) {
        if let Some((snapshot, _)) = self.saved.take() {
            self.engine.delete_snapshot(&snapshot, None).await.unwrap();
        }
    }

    pub(crate) async fn restore_in_place(&mut self) -> Result<(), String> {
        let Some((snapshot, content)) = self.saved.clone() else { return Ok(()) };
        // An adopted fork is another sandbox than the one that was saved, which is closed.
        let known = snapshot.sandbox == self.record.id;
        let wish = RestoreWish::default();
        let restored = in_time("restore", self.engine.restore_in_place(&snapshot, &wish)).await;
        match (restored, known) {
            (Ok(found), true) if found.note.is_none() => {
                self.record = found.record;
                self.model.become_content(content);
                Ok(())
            }
            (Err(problem), false) if problem.code == Code::SandboxNotFound => Ok(()),
            (other, _) => Err(format!("restored in place: {other:?}")),
        }
    }

    pub(crate) async fn restore_as_new(&mut self) -> Result<(), String> {
        let Some((snapshot, content)) = self.saved.clone() else { return Ok(()) };
        let wish = RestoreWish::default();
        let restored = in_time("restore", self.engine.restore_as(&snapshot, &wish)).await;
        let record = restored.map_err(told("restored as new"))?.record;
        self.holds(&record, &content).await?;
        self.engine.close(&record, None).await.map_err(told("closing it"))
    }

    pub(crate) async fn fork(&mut self, adopted: bool) -> Result<(), String> {
        let forked = in_time("fork", self.engine.fork(&self.record, 1, None, None)).await;
        let mut forked = forked.map_err(told("a fork"))?;
        let child = forked.forks.remove(0).record;
        if !forked.living {
            self.copied();
        }
        let content = self.model.content();
        self.holds(&child, &content).await?;
        if !adopted {
            return self.engine.close(&child, None).await.map_err(told("closing the fork"));
        }
        let winner = self.engine.adopt(&child, None).await.map_err(told("adopting it"))?;
        self.engine.close(&self.record, None).await.map_err(told("closing what it was made of"))?;
        self.record = winner;
        self.model.become_content(content);
        // It has been looked at.
        self.model.call(|_| {});
        Ok(())
    }

    /// Whether a copy is what it is a copy of.
    async fn holds(&self, record: &Record, content: &Content) -> Result<(), String> {
        let python = run(&self.engine, record, Python, SHOW).await.map_err(told("python of a copy"))?;
        let bash = run(&self.engine, record, Bash, SHOW_BASH).await.map_err(told("bash of a copy"))?;
        let found = (python.out, bash.out);
        if found != content.shown() {
            return Err(format!("a copy has {found:?}, not {:?}", content.shown()));
        }
        for (name, expected) in content.files() {
            let found = read(&self.engine, record, name);
            match (&found, expected) {
                (Ok(text), Some(expected)) if text == expected => {}
                (Err(problem), None) if problem.code == Code::NotFound => {}
                _ => return Err(format!("{name} of a copy is {found:?}, not {expected:?}")),
            }
        }
        Ok(())
    }

    /// Whoever comes next finds it as it was; what could be taken back is gone if it had come so far.
    pub(crate) async fn killed(&mut self, deed: Deed, at: usize) -> Result<(), String> {
        let (came, killed) = faults::act(&self.state, &self.name, deed, Some(at)).await;
        self.history.push(format!("  it came to {came:?}, killed: {killed}"));
        let found = self.look_for().await.map_err(told("finding it"))?;
        if found.note.is_some() || found.created {
            return Err(format!("found with {:?}", found.note));
        }
        if came.contains(&carrel_engine::Step::AgentPrepared) {
            self.model.past.clear();
        }
        self.model.life = Life::Awake;
        // One that it has finished, or all but.
        for taken in self.engine.all_snapshots(&SnapshotFilter::default()).map_err(told("listing"))? {
            let is_kept = self.saved.as_ref().is_some_and(|(saved, _)| saved.id == taken.id);
            if taken.sandbox == self.record.id && !is_kept {
                self.engine.delete_snapshot(&taken, None).await.map_err(told("removing a snapshot"))?;
            }
        }
        self.engine.tidy().await.map_err(told("cleaning up"))
    }
}
