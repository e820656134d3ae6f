//! `carrel ls`: all sandboxes of a state directory.

use std::{
    process::ExitCode,
    time::{SystemTime, UNIX_EPOCH},
};

use carrel_engine::Record;
use carrel_proto::problem::Problem;
use serde_json::{Value, json};

use crate::{context::Context, output::short_time, target};

pub(crate) async fn run(context: &Context<'_>) -> Result<ExitCode, Problem> {
    let records = context.desk.list().await?;
    if context.output.json {
        let sandboxes: Vec<Value> = records.iter().map(object).collect();
        context.output.object(&json!({ "sandboxes": sandboxes }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let now = now_ms();
    let rows: Vec<Vec<String>> = records
        .iter()
        .map(|record| {
            vec![
                name(record),
                record.id.to_string(),
                state(record),
                record.spec.environment.clone(),
                short_time(now.saturating_sub(record.created_unix_ms)),
                short_time(now.saturating_sub(record.used_unix_ms)),
            ]
        })
        .collect();
    if rows.is_empty() && context.output.aligned {
        context.output.note("there are no sandboxes");
        return Ok(ExitCode::SUCCESS);
    }
    context.output.table(&["NAME", "ID", "STATE", "ENVIRONMENT", "AGE", "IDLE"], &rows)?;
    Ok(ExitCode::SUCCESS)
}

/// As the user would type it; a sandbox of one call has none.
pub(crate) fn name(record: &Record) -> String {
    record.key.as_ref().map_or("-", target::shown).to_owned()
}

pub(crate) fn state(record: &Record) -> String {
    match serde_json::to_value(record.state) {
        Ok(Value::String(word)) => word,
        _ => String::new(),
    }
}

/// A sandbox in JSON, as `ls`, `inspect` and `open` show it.
pub(crate) fn object(record: &Record) -> Value {
    json!({
        "id": record.id,
        "name": record.key.as_ref().map(target::shown),
        "key": record.key,
        "state": record.state,
        "environment": record.spec.environment,
        "isolation": record.spec.isolation,
        "project": record.spec.project,
        "labels": record.labels,
        "limits": record.spec.limits,
        "idle_timeout_seconds": record.spec.idle_timeout_s,
        "max_lifetime_seconds": record.spec.max_lifetime_s,
        "standby_after_seconds": record.spec.standby_after_s,
        "hibernate_after_seconds": record.spec.hibernate_after_s,
        "image_bytes": record.image().map(|image| image.bytes),
        "standby_reason": record.standby_reason(),
        "ephemeral": record.spec.ephemeral.is_some(),
        "created_unix_ms": record.created_unix_ms,
        "used_unix_ms": record.used_unix_ms,
    })
}

pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}
