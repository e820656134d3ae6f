//! Suggestions for arguments while a person types them.

use carrel_proto::{
    files::{GuestPath, Kind},
    id::SandboxId,
    problem::Problem,
};
use rmcp::model::{CompleteRequestParams, CompletionInfo};

use super::{Server, scope::Scope};

/// What begins like the argument's value, by the argument's name.
pub(super) async fn complete(
    server: &Server,
    scope: &Scope,
    request: &CompleteRequestParams,
) -> Result<Vec<String>, Problem> {
    let value = request.argument.value.as_str();
    let context = |name: &str| request.context.as_ref()?.get_argument(name).cloned();
    let mut all = match request.argument.name.as_str() {
        "env" | "name" => server.options.engine.environments.names().map(str::to_owned).collect(),
        "session" | "session_key" => own(server, scope, |name, _| name.to_owned()).await?,
        "id" | "sandbox_id" => own(server, scope, |_, id| id.to_string()).await?,
        "exec" | "exec_id" => execs(server, scope, context("id")).await?,
        "path" => paths(server, scope, context("id"), value).await?,
        _ => Vec::new(),
    };
    all.retain(|candidate| candidate.starts_with(value));
    all.sort();
    all.dedup();
    all.truncate(CompletionInfo::MAX_VALUES);
    Ok(all)
}

async fn own(
    server: &Server,
    scope: &Scope,
    word: impl Fn(&str, &SandboxId) -> String,
) -> Result<Vec<String>, Problem> {
    let records = server.engine().await?.list()?;
    Ok(records.iter().filter_map(|record| Some(word(scope.name(record)?, &record.id))).collect())
}

async fn execs(server: &Server, scope: &Scope, id: Option<String>) -> Result<Vec<String>, Problem> {
    let Some(id) = id.and_then(|id| id.parse::<SandboxId>().ok()) else { return Ok(Vec::new()) };
    let (engine, record) = server.known(scope, &id).await?;
    Ok(engine.execs(&record).await?.into_iter().map(|info| info.exec.to_string()).collect())
}

async fn paths(
    server: &Server,
    scope: &Scope,
    id: Option<String>,
    value: &str,
) -> Result<Vec<String>, Problem> {
    let Some(id) = id.and_then(|id| id.parse::<SandboxId>().ok()) else { return Ok(Vec::new()) };
    let (engine, record) = server.known(scope, &id).await?;
    let (above, _) = value.rsplit_once('/').unwrap_or(("", value));
    let Ok(directory) = GuestPath::parse(if above.is_empty() { "." } else { above }) else {
        return Ok(Vec::new());
    };
    let listing = engine.files(&record)?.list(&directory, 1, 200, None)?;
    let paths = listing.entries.iter().map(|entry| {
        let name = String::from_utf8_lossy(entry.name.as_bytes());
        let slash = if entry.kind == Kind::Dir { "/" } else { "" };
        if above.is_empty() { format!("{name}{slash}") } else { format!("{above}/{name}{slash}") }
    });
    Ok(paths.collect())
}
