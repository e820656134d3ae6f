//! Changing what a sandbox was made with, while it lives.

use carrel_proto::{
    limits::Limits,
    problem::{Code, Problem},
};

use crate::{
    Engine, Labels, Quota, Record,
    events::{Event, Kind},
    registry::{Spec, State},
};

/// What shall be different. What is not said stays.
#[derive(Debug, Clone, Default)]
pub struct Update {
    pub limits: Option<Limits>,
    /// All of them: those that are not here go.
    pub labels: Option<Labels>,
    pub idle_timeout_s: Option<u64>,
    pub max_lifetime_s: Option<u64>,
    /// 0: never.
    pub standby_after_s: Option<u64>,
    pub hibernate_after_s: Option<u64>,
    /// What the tenant may hold in all.
    pub quota: Option<Quota>,
}

impl Engine {
    /// Changes a sandbox: in its row, which the next box is made of, and in the box that lives.
    pub async fn update(&self, record: &Record, update: Update) -> Result<Record, Problem> {
        check(&update)?;
        let lock = self.lock(&record.id).await?;
        let (id, name) = (record.id.clone(), record.id.clone());
        let changed = self
            .blocking(move |engine| {
                let Some(mut before) = engine.registry.by_id(&id)? else {
                    lock.discard();
                    return Ok(None);
                };
                if !is_there(&before) {
                    return Ok(None);
                }
                // Its agent has to be told, and cannot be while it is frozen.
                if before.state == State::Standby && touches_box(&before, &update) {
                    engine.unfreeze(&mut before)?;
                }
                let mut after = before.clone();
                after.spec.limits = update.limits.unwrap_or(after.spec.limits);
                after.spec.idle_timeout_s = update.idle_timeout_s.unwrap_or(after.spec.idle_timeout_s);
                after.spec.max_lifetime_s = update.max_lifetime_s.unwrap_or(after.spec.max_lifetime_s);
                after.spec.standby_after_s = update.standby_after_s.unwrap_or(after.spec.standby_after_s);
                after.spec.hibernate_after_s =
                    update.hibernate_after_s.unwrap_or(after.spec.hibernate_after_s);
                after.labels = update.labels.unwrap_or(after.labels);
                let quota = update.quota.as_ref();
                engine.registry.set_spec(&after.tenant, &id, &after.spec, &after.labels, quota)?;
                Ok(Some((before, after, lock)))
            })
            .await?;
        let Some((before, after, lock)) = changed else {
            return Err(Problem::new(Code::SandboxNotFound, format!("there is no sandbox `{name}`"))
                .hint("it was closed meanwhile"));
        };
        if let Err(problem) = self.change_box(&before, &after).await {
            // What the box did not take is not written down either.
            let engine = self.clone();
            engine
                .blocking(move |engine| {
                    let _lock = lock;
                    engine.registry.set_spec(&before.tenant, &before.id, &before.spec, &before.labels, None)
                })
                .await?;
            return Err(problem);
        }
        self.note(Event::of(Kind::SessionUpdated, &after));
        Ok(after)
    }

    /// Brings the box in line with its row. Labels are the registry's alone.
    async fn change_box(&self, before: &Record, after: &Record) -> Result<(), Problem> {
        let of_box = |spec: &Spec| (spec.limits.clone(), spec.idle_timeout_s, spec.max_lifetime_s);
        if of_box(&before.spec) == of_box(&after.spec) {
            return Ok(());
        }
        let spec = &after.spec;
        self.apply_limits(before, &spec.limits, spec.idle_timeout_s, spec.max_lifetime_s).await
    }
}

fn is_there(record: &Record) -> bool {
    matches!(record.state, State::Running | State::Standby | State::Hibernated | State::Lost)
}

/// Whether there is something that the box itself holds.
fn touches_box(record: &Record, update: &Update) -> bool {
    let spec = &record.spec;
    update.limits.as_ref().is_some_and(|limits| *limits != spec.limits)
        || update.idle_timeout_s.is_some_and(|time| time != spec.idle_timeout_s)
        || update.max_lifetime_s.is_some_and(|time| time != spec.max_lifetime_s)
}

fn check(update: &Update) -> Result<(), Problem> {
    let limits = update.limits.as_ref();
    let zero = [
        ("cpu", limits.is_some_and(|limits| limits.cpu_millis == 0)),
        ("memory", limits.is_some_and(|limits| limits.memory.0 == 0)),
        ("pids", limits.is_some_and(|limits| limits.pids == 0)),
        ("disk", limits.is_some_and(|limits| limits.disk.0 == 0)),
        ("output", limits.is_some_and(|limits| limits.output.0 == 0)),
        ("execs", limits.is_some_and(|limits| limits.execs == 0)),
        ("the idle timeout", update.idle_timeout_s == Some(0)),
        ("the lifetime", update.max_lifetime_s == Some(0)),
    ];
    match zero.into_iter().find(|(_, zero)| *zero) {
        Some((what, _)) => Err(Problem::new(Code::InvalidArgument, format!("{what} must be more than 0"))),
        None => Ok(()),
    }
}
