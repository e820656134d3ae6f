//! A sandbox spec inside a request: fills in what the request leaves open, and may not contradict it.

use carrel_engine::{
    keys::Session,
    spec::{Mode, SandboxSpec},
};

use super::{
    Daemon,
    problem::{Refusal, bad},
    sandboxes::Create,
};

/// Takes over what a spec says.
pub(crate) fn apply(daemon: &Daemon, spec: serde_json::Value, create: &mut Create) -> Result<(), Refusal> {
    let environments = daemon.engine.environments();
    let spec = match &spec {
        serde_json::Value::String(text) => SandboxSpec::from_text(text, &environments)?,
        value => SandboxSpec::from_value(value, &environments)?,
    };
    let in_run = create.workflow_run.is_some() || create.agent_run.is_some();
    match spec.mode {
        Mode::Compute if create.name.is_some() || create.key.is_some() || create.session.is_some() => {
            return Err(bad("the spec's `mode: compute` means a fresh sandbox, and the request names one")
                .hint("use `mode: code`, or leave the name out")
                .into());
        }
        // Fresh, and the run's all the same: closing the run closes it.
        Mode::Compute if in_run => create.session = Some("isolated".to_owned()),
        Mode::Compute => {}
        Mode::Code => {
            let session = match &spec.session {
                Session::Default => "default",
                Session::Isolated => "isolated",
                Session::Named(name) => name.as_str(),
            };
            if in_run {
                fill("session", &mut create.session, Some(session.to_owned()))?;
            } else if create.name.is_none() && create.key.is_none() && session != "isolated" {
                create.name = Some(session.to_owned());
            }
        }
    }
    fill("environment", &mut create.environment, spec.environment)?;
    let limits = create.limits.get_or_insert_default();
    fill("limits.cpu_millis", &mut limits.cpu_millis, spec.cpu_millis)?;
    fill("limits.memory", &mut limits.memory, spec.memory.map(|size| size.0))?;
    fill("limits.disk", &mut limits.disk, spec.disk.map(|size| size.0))?;
    fill("idle_timeout_seconds", &mut create.idle_timeout_seconds, spec.idle_timeout_s)
}

fn fill<T: PartialEq + std::fmt::Display>(
    what: &str,
    field: &mut Option<T>,
    value: Option<T>,
) -> Result<(), Refusal> {
    let Some(value) = value else { return Ok(()) };
    match field {
        Some(said) if *said != value => {
            Err(bad(format!("the request says {what} {said}, its spec {value}")).hint("say it once").into())
        }
        _ => {
            *field = Some(value);
            Ok(())
        }
    }
}
