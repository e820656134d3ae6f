//! What every command that touches sandboxes needs: where to turn to, the settings, and the notes it owes the user.

use carrel_engine::{Engine, Found, Record, Wish};
use carrel_proto::problem::Problem;

use crate::{
    config::Settings, daemon::Client, desk::Desk, output::Output, progress::Progress, target::Target,
};

#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) output: &'a Output,
    pub(crate) settings: Settings,
    pub(crate) desk: Desk,
}

impl<'a> Context<'a> {
    /// Turns to the daemon if one runs, unless the user wants none. Else opens the engine and cleans up after processes that
    /// died.
    pub(crate) async fn open(output: &'a Output, settings: Settings, alone: bool) -> Result<Self, Problem> {
        let daemon = if alone { None } else { Client::find(&settings, output).await };
        if let Some(client) = daemon {
            output.detail(format_args!("through the daemon, pid {}", client.about.pid));
            return Ok(Self { output, settings, desk: Desk::Daemon(client) });
        }
        let engine = embedded(output, &settings)?;
        Ok(Self { output, settings, desk: Desk::Own(engine) })
    }

    /// The sandbox of this name, which must exist. A dead one is brought back over its files, and the user told.
    pub(crate) async fn existing(&self, target: &Target) -> Result<Record, Problem> {
        let progress = Progress::start(self.output, "starting the sandbox");
        let found = self.desk.existing(&target.name, Some(&target.key)).await?;
        drop(progress);
        if let Some(note) = found.note {
            self.output.note(note.text(&target.name));
        }
        Ok(found.record)
    }

    /// The sandbox of this name as it is, asleep or not.
    pub(crate) async fn known(&self, target: &Target) -> Result<Record, Problem> {
        self.desk.known(&target.name, Some(&target.key)).await
    }

    /// The sandbox of this name for its files: one that sleeps is not woken where they are at hand.
    pub(crate) async fn for_files(&self, target: &Target) -> Result<Record, Problem> {
        let record = self.known(target).await?;
        if record.state.is_asleep() && self.desk.files(&record).is_ok() {
            return Ok(record);
        }
        self.existing(target).await
    }

    /// The sandbox of this name, made if there is none.
    pub(crate) async fn sandbox(&self, target: &Target, wish: &Wish) -> Result<Found, Problem> {
        let _progress = Progress::start(self.output, "starting the sandbox");
        if target.is_id() {
            return self.desk.existing(&target.name, None).await;
        }
        self.desk.sandbox(&target.key, wish).await
    }
}

/// The engine in this process.
pub(crate) fn embedded(output: &Output, settings: &Settings) -> Result<Engine, Problem> {
    let (state, environments) = (settings.state.clone(), settings.environments.clone());
    let engine = Engine::open(carrel_engine::Settings { state, environments })?;
    if let Err(problem) = engine.sweep() {
        output.detail(format_args!("cleaning up: {problem}"));
    }
    Ok(engine)
}

/// As a shell says it.
pub(crate) fn signal_code(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(125)
}
