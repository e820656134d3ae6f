//! Which sandbox a request means, and what it shall be if it has to be made.

use std::{collections::BTreeMap, sync::Arc};

use carrel_engine::{
    Engine, Found, Labels, Wish,
    keys::{self, RunContext, Session},
};
use carrel_proto::{
    guest::Language,
    id::{Key, SandboxId},
    problem::Problem,
};

use super::{
    Daemon,
    guard::Caller,
    problem::{Refusal, bad},
    sandboxes::{Create, LimitsPatch, or_never, seconds_within},
    visit::Visit,
};

/// A sandbox as a request means it.
#[derive(Debug)]
pub(crate) struct Place {
    which: Which,
    /// As the caller said it, for notes.
    name: String,
    wish: Wish,
    /// Of the request, which may be gone before the sandbox is there.
    visit: Arc<Visit>,
}

#[derive(Debug)]
enum Which {
    Key(Key),
    Id(SandboxId),
    /// A new one without a key that stays.
    Nameless,
    /// A new one for one call.
    Ephemeral,
}

/// What a sandbox shall be if it has to be made.
#[derive(Debug, Default)]
pub(crate) struct Make {
    pub(crate) environment: Option<String>,
    pub(crate) labels: Option<BTreeMap<String, String>>,
    pub(crate) limits: Option<LimitsPatch>,
    pub(crate) idle_timeout_seconds: Option<u64>,
    pub(crate) max_lifetime_seconds: Option<u64>,
    pub(crate) standby_after_seconds: Option<u64>,
    pub(crate) hibernate_after_seconds: Option<u64>,
    pub(crate) undo_calls: Option<u32>,
    /// The language of the call it is for.
    pub(crate) first: Option<Language>,
}

impl Make {
    fn wish(self, daemon: &Daemon, caller: &Caller) -> Result<Wish, Refusal> {
        let mut wish = daemon.defaults().wish.clone();
        if let Some(environment) = self.environment {
            daemon.engine.environments().source(&environment)?;
            wish.environment = Some(environment);
        }
        if let Some(limits) = self.limits {
            wish.limits = limits.over(wish.limits)?;
        }
        if let Some(seconds) = self.idle_timeout_seconds {
            wish.idle_timeout_s = seconds_within("idle_timeout_seconds", seconds)?;
        }
        if let Some(seconds) = self.max_lifetime_seconds {
            wish.max_lifetime_s = seconds_within("max_lifetime_seconds", seconds)?;
        }
        if let Some(seconds) = or_never("standby_after_seconds", self.standby_after_seconds)? {
            wish.standby_after_s = seconds;
        }
        if let Some(seconds) = or_never("hibernate_after_seconds", self.hibernate_after_seconds)? {
            wish.hibernate_after_s = seconds;
        }
        if let Some(calls) = self.undo_calls {
            wish.undo_calls = Some(super::undo::calls_within(calls)?);
        }
        wish.labels = Labels::new(self.labels.unwrap_or_default())?;
        wish.first = self.first;
        wish.tenant = caller.tenant.clone();
        wish.quota = caller.quota();
        wish.caller = Some(Arc::from(caller.name()));
        Ok(wish)
    }
}

/// A key as a caller writes it.
pub(crate) fn parse_key(text: &str) -> Result<Key, Refusal> {
    text.parse().map_err(|error: carrel_proto::id::BadName| bad(error.to_string()).into())
}

impl Place {
    /// Of `POST /v1/sandboxes`.
    pub(crate) fn of_create(daemon: &Daemon, caller: &Caller, mut create: Create) -> Result<Self, Refusal> {
        if let Some(spec) = create.spec.take() {
            super::spec::apply(daemon, spec, &mut create)?;
        }
        let ways = [
            create.name.is_some(),
            create.key.is_some(),
            create.workflow_run.is_some() || create.agent_run.is_some(),
        ];
        if ways.iter().filter(|given| **given).count() > 1 {
            return Err(bad(
                "`name`, `key` and `workflow_run` or `agent_run` name one sandbox each: give one of them",
            )
            .into());
        }
        let in_run = create.workflow_run.is_some() || create.agent_run.is_some();
        if create.session.is_some() && !in_run {
            return Err(bad(
                "`session` names a sandbox of a run: give `workflow_run` or `agent_run` too, or `name` alone",
            )
            .into());
        }
        let (which, name) = if let Some(key) = &create.key {
            let key = parse_key(key)?;
            keys::check(&caller.tenant, &key)?;
            (Which::Key(key.clone()), key.to_string())
        } else if let Some(name) = &create.name {
            (Which::Key(own_key(caller, name)?), name.clone())
        } else if in_run {
            let session = create.session.as_deref().map_or(Ok(Session::Default), Session::parse)?;
            let key = run_key(caller, create.workflow_run.as_deref(), create.agent_run.as_deref(), &session)?;
            let name = key.to_string();
            (Which::Key(key), name)
        } else {
            (Which::Nameless, "sandbox".to_owned())
        };
        let make = Make {
            environment: create.environment,
            labels: create.labels,
            limits: create.limits,
            idle_timeout_seconds: create.idle_timeout_seconds,
            max_lifetime_seconds: create.max_lifetime_seconds,
            standby_after_seconds: create.standby_after_seconds,
            hibernate_after_seconds: create.hibernate_after_seconds,
            undo_calls: create.undo_calls,
            first: None,
        };
        Ok(Self { which, name, wish: make.wish(daemon, caller)?, visit: Arc::clone(&caller.visit) })
    }

    /// Of `POST /v1/run`: a name, key or id, the default sandbox of a run, or a fresh one.
    pub(crate) fn of_run(
        daemon: &Daemon,
        caller: &Caller,
        sandbox: Option<&str>,
        (workflow, agent): (Option<&str>, Option<&str>),
        make: Make,
    ) -> Result<Self, Refusal> {
        let in_run = workflow.is_some() || agent.is_some();
        let which = match sandbox {
            Some(text) if in_run => Which::Key(run_key(caller, workflow, agent, &Session::parse(text)?)?),
            Some(text) if text.contains(':') => {
                let key = parse_key(text)?;
                keys::check(&caller.tenant, &key)?;
                Which::Key(key)
            }
            Some(text) if text.starts_with("sbx_") => {
                Which::Id(text.parse().map_err(|_| super::extract::no_sandbox(text))?)
            }
            Some(text) => Which::Key(own_key(caller, text)?),
            None if in_run => Which::Key(run_key(caller, workflow, agent, &Session::Default)?),
            None => Which::Ephemeral,
        };
        let name = sandbox.unwrap_or("default").to_owned();
        Ok(Self { which, name, wish: make.wish(daemon, caller)?, visit: Arc::clone(&caller.visit) })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn is_ephemeral(&self) -> bool {
        matches!(self.which, Which::Ephemeral)
    }

    pub(crate) async fn find_or_make(&self, engine: &Engine) -> Result<Found, Problem> {
        let found = self.look_for_or_make(engine).await?;
        self.visit.acts_on(&found.record.id);
        Ok(found)
    }

    async fn look_for_or_make(&self, engine: &Engine) -> Result<Found, Problem> {
        match &self.which {
            Which::Key(key) => engine.sandbox(key, &self.wish).await,
            Which::Id(id) => {
                let found = engine.existing_of(&self.wish.tenant, id.as_str(), None).await?;
                engine.check_environment(&found.record, self.wish.environment.as_deref())?;
                Ok(found)
            }
            Which::Nameless => {
                let record = engine.nameless(&self.wish).await?;
                Ok(Found { record, created: true, note: None })
            }
            Which::Ephemeral => {
                let record = engine.ephemeral(&self.wish).await?;
                Ok(Found { record, created: true, note: None })
            }
        }
    }
}

/// `user:OWNER:NAME` of the caller.
pub(crate) fn own_key(caller: &Caller, name: &str) -> Result<Key, Refusal> {
    let name = name.parse().map_err(|error: carrel_proto::id::BadName| {
        bad(error.to_string().replace("session name", "sandbox name"))
    })?;
    let context = RunContext { tenant: caller.tenant.clone(), ..RunContext::default() };
    Ok(keys::resolve(&context, &Session::Named(name))?)
}

fn run_key(
    caller: &Caller,
    workflow: Option<&str>,
    agent: Option<&str>,
    session: &Session,
) -> Result<Key, Refusal> {
    let context = RunContext {
        workflow_run: workflow.map(str::to_owned),
        agent_run: agent.map(str::to_owned),
        tenant: caller.tenant.clone(),
    };
    Ok(keys::resolve(&context, session)?)
}
