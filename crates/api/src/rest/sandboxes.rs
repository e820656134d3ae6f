//! Sandboxes: make or find, look, change, close.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use carrel_engine::{Found, Labels, ListFilter, Record, Update, tokens::Scope};
use carrel_proto::{
    id::{Key, SandboxId},
    limits::{ByteSize, Enforced, Limits},
    message::Usage,
    problem::Problem,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{Json, Query, SandboxPath},
    guard::Caller,
    idempotency::Once,
    page::{self, Page},
    place::Place,
    problem::{Problems, Refusal, bad},
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, update, close))
        .routes(routes!(wake))
        .routes(routes!(standby))
        .routes(routes!(hibernate))
        .routes(routes!(metrics))
        .routes(routes!(super::undo::undo))
}

/// What a caller may say of a sandbox that may have to be made.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Create {
    /// `user:TOKEN:NAME`, by its last part.
    pub(crate) name: Option<String>,
    /// `scope:owner:name`.
    pub(crate) key: Option<String>,
    /// The run of a workflow, whose steps share sandboxes.
    pub(crate) workflow_run: Option<String>,
    /// A standalone run of an agent.
    pub(crate) agent_run: Option<String>,
    /// In a run: `default`, `isolated` or a name.
    pub(crate) session: Option<String>,
    pub(crate) environment: Option<String>,
    pub(crate) labels: Option<BTreeMap<String, String>>,
    pub(crate) limits: Option<LimitsPatch>,
    #[schema(minimum = 1, maximum = 31_536_000)]
    pub(crate) idle_timeout_seconds: Option<u64>,
    #[schema(minimum = 1, maximum = 31_536_000)]
    pub(crate) max_lifetime_seconds: Option<u64>,
    /// Into standby when idle for so long; 0: never.
    #[schema(maximum = 31_536_000)]
    pub(crate) standby_after_seconds: Option<u64>,
    /// Hibernated when idle for so long; 0: never.
    #[schema(maximum = 31_536_000)]
    pub(crate) hibernate_after_seconds: Option<u64>,
    /// How many calls can be taken back; 0 turns it off.
    #[schema(maximum = 16)]
    pub(crate) undo_calls: Option<u32>,
    /// A sandbox spec: an object, or text in YAML or with the front matter of an agent file.
    #[schema(value_type = Option<Object>)]
    pub(crate) spec: Option<serde_json::Value>,
}

/// Limits that differ from what is set.
#[derive(Debug, Default, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitsPatch {
    #[schema(minimum = 10, maximum = 1_024_000)]
    pub(crate) cpu_millis: Option<u32>,
    #[schema(minimum = 16_777_216_u64)]
    pub(crate) memory: Option<u64>,
    #[schema(minimum = 8, maximum = 1_000_000)]
    pub(crate) pids: Option<u32>,
    #[schema(minimum = 1_048_576_u64)]
    pub(crate) disk: Option<u64>,
    #[schema(minimum = 4096_u64)]
    pub(crate) output: Option<u64>,
    #[schema(minimum = 1, maximum = 10_000)]
    pub(crate) execs: Option<u32>,
}

impl LimitsPatch {
    /// With bounds that keep a sandbox able to start at all, and numbers within what the kernel takes.
    pub(crate) fn over(&self, mut limits: Limits) -> Result<Limits, Refusal> {
        fn within<T: PartialOrd + std::fmt::Display>(
            what: &str,
            given: Option<T>,
            least: T,
            most: T,
        ) -> Result<Option<T>, Refusal> {
            match given {
                Some(value) if value < least || value > most => {
                    Err(bad(format!("limits.{what} is between {least} and {most}")).into())
                }
                other => Ok(other),
            }
        }
        const LARGEST: u64 = 1 << 50;
        if let Some(value) = within("cpu_millis", self.cpu_millis, 10, 1_024_000)? {
            limits.cpu_millis = value;
        }
        if let Some(value) = within("memory", self.memory, 16 << 20, LARGEST)? {
            limits.memory = ByteSize(value);
        }
        if let Some(value) = within("pids", self.pids, 8, 1_000_000)? {
            limits.pids = value;
        }
        if let Some(value) = within("disk", self.disk, 1 << 20, LARGEST)? {
            limits.disk = ByteSize(value);
        }
        if let Some(value) = within("output", self.output, 4096, LARGEST)? {
            limits.output = ByteSize(value);
        }
        if let Some(value) = within("execs", self.execs, 1, 10_000)? {
            limits.execs = value;
        }
        Ok(limits)
    }
}

/// The states a caller can see.
#[derive(ToSchema)]
#[schema(as = State, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes what the engine's own type is written as")]
enum StateName {
    Creating,
    Running,
    Standby,
    Hibernated,
    Lost,
    Closing,
}

fn isolation(level: carrel_engine::IsolationLevel) -> &'static str {
    match level {
        carrel_engine::IsolationLevel::Jail => "jail",
        carrel_engine::IsolationLevel::Weak => "weak",
    }
}

/// A sandbox as callers see it.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Sandbox {
    id: SandboxId,
    key: Option<Key>,
    /// The last part of a `user:` key.
    name: Option<String>,
    #[schema(value_type = StateName)]
    state: carrel_engine::State,
    environment: String,
    isolation: &'static str,
    labels: BTreeMap<String, String>,
    limits: Limits,
    /// How this host holds the limits; null before it was ever started.
    enforced: Option<Enforced>,
    idle_timeout_seconds: u64,
    max_lifetime_seconds: u64,
    /// 0: never.
    standby_after_seconds: u64,
    hibernate_after_seconds: u64,
    /// Of a hibernated one: bytes on disk.
    image_bytes: Option<u64>,
    /// Why it stays in standby though it is idle for long enough to be hibernated.
    standby_reason: Option<String>,
    /// How many calls can be taken back.
    undo_calls: u32,
    created_unix_ms: u64,
    used_unix_ms: u64,
    close_at_unix_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false)]
    created: Option<bool>,
    /// What had become of it before this call.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(required = false)]
    note: Option<Option<String>>,
}

impl Sandbox {
    pub(crate) fn of(record: &Record) -> Self {
        let name = record.key.as_ref().and_then(|key| {
            let mut parts = key.as_str().splitn(3, ':');
            (parts.next() == Some("user")).then(|| parts.nth(1).unwrap_or_default().to_owned())
        });
        Self {
            id: record.id.clone(),
            key: record.key.clone(),
            name,
            state: record.state,
            environment: record.spec.environment.clone(),
            isolation: isolation(record.spec.isolation),
            labels: record.labels.iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            limits: record.spec.limits.clone(),
            enforced: record.placed.as_ref().map(|placed| placed.enforced.clone()),
            idle_timeout_seconds: record.spec.idle_timeout_s,
            max_lifetime_seconds: record.spec.max_lifetime_s,
            standby_after_seconds: record.spec.standby_after_s,
            hibernate_after_seconds: record.spec.hibernate_after_s,
            image_bytes: record.image().map(|image| image.bytes),
            standby_reason: record.standby_reason().map(str::to_owned),
            undo_calls: record.spec.undo_calls,
            created_unix_ms: record.created_unix_ms,
            used_unix_ms: record.used_unix_ms,
            close_at_unix_ms: record.close_at_unix_ms,
            created: None,
            note: None,
        }
    }

    pub(crate) fn found(found: &Found, name: &str) -> Self {
        let note = found.note.map(|note| note.text(name));
        Self { created: Some(found.created), note: Some(note), ..Self::of(&found.record) }
    }
}

/// Makes or finds a sandbox.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = Create,
    params(("Idempotency-Key" = Option<String>, Header)),
    responses((status = 201, description = "made", body = Sandbox), (status = 200, description = "found", body = Sandbox), Problems))]
async fn create(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Once(create, ticket): Once<Create>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let place = Place::of_create(&daemon, &caller, create)?;
    let making = Arc::clone(&daemon);
    ticket
        .once(&daemon, &caller, async move {
            let name = place.name().to_owned();
            let found = making.find_or_make(place).await?;
            let status = if found.created { StatusCode::CREATED } else { StatusCode::OK };
            Ok((status, axum::Json(Sandbox::found(&found, &name))).into_response())
        })
        .await
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Exactly this key.
    key: Option<String>,
    /// Keys that begin so.
    prefix: Option<String>,
    #[param(value_type = Option<StateName>)]
    state: Option<carrel_engine::State>,
    /// `NAME=VALUE`; several must all hold.
    #[serde(default)]
    label: Vec<String>,
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// Lists sandboxes, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", params(ListQuery),
    responses((status = 200, body = Page<Sandbox>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<Sandbox>>, Refusal> {
    caller.may(Scope::Read)?;
    let limit = page::check(query.limit)?;
    let labels = query
        .label
        .iter()
        .map(|text| {
            let (name, value) =
                text.split_once('=').ok_or_else(|| bad(format!("label `{text}` is not NAME=VALUE")))?;
            Ok((name.to_owned(), value.to_owned()))
        })
        .collect::<Result<_, Refusal>>()?;
    let after = query.after.as_deref().map(str::parse).transpose().map_err(|problem: Problem| problem)?;
    let filter = ListFilter {
        tenant: (!caller.is_operator()).then(|| caller.tenant.clone()),
        key: query.key.as_deref().map(super::place::parse_key).transpose()?,
        key_prefix: query.prefix,
        state: query.state,
        labels,
    };
    let found = daemon.engine.list_page(&filter, after, limit)?;
    Ok(axum::Json(Page {
        items: found.records.iter().map(Sandbox::of).collect(),
        next: found.next.map(|next| next.to_string()),
    }))
}

/// A sandbox, without waking it.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes", params(("sandbox" = String, Path)),
    responses((status = 200, body = Sandbox), Problems))]
async fn get(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<Sandbox>, Refusal> {
    caller.may(Scope::Read)?;
    let record = daemon.record(&caller, &id)?;
    Ok(axum::Json(Sandbox::of(&record)))
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Patch {
    limits: Option<LimitsPatch>,
    /// All labels, instead of those it had.
    labels: Option<BTreeMap<String, String>>,
    #[schema(minimum = 1, maximum = 31_536_000)]
    idle_timeout_seconds: Option<u64>,
    #[schema(minimum = 1, maximum = 31_536_000)]
    max_lifetime_seconds: Option<u64>,
    /// 0: never.
    #[schema(maximum = 31_536_000)]
    standby_after_seconds: Option<u64>,
    #[schema(maximum = 31_536_000)]
    hibernate_after_seconds: Option<u64>,
}

/// Changes limits, labels and times.
#[utoipa::path(patch, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes", params(("sandbox" = String, Path)), request_body = Patch,
    responses((status = 200, body = Sandbox), Problems))]
async fn update(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(patch): Json<Patch>,
) -> Result<axum::Json<Sandbox>, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let limits = patch.limits.map(|limits| limits.over(record.spec.limits.clone())).transpose()?;
    let update = Update {
        limits,
        labels: patch.labels.map(Labels::new).transpose()?,
        idle_timeout_s: patch
            .idle_timeout_seconds
            .map(|seconds| seconds_within("idle_timeout_seconds", seconds))
            .transpose()?,
        max_lifetime_s: patch
            .max_lifetime_seconds
            .map(|seconds| seconds_within("max_lifetime_seconds", seconds))
            .transpose()?,
        standby_after_s: or_never("standby_after_seconds", patch.standby_after_seconds)?,
        hibernate_after_s: or_never("hibernate_after_seconds", patch.hibernate_after_seconds)?,
        quota: caller.quota(),
    };
    let record = daemon.engine.update(&record, update).await?;
    Ok(axum::Json(Sandbox::of(&record)))
}

/// A year: longer than any sandbox is meant to live, and far from where sums of times overflow.
const LONGEST_S: u64 = 365 * 24 * 3600;

pub(crate) fn seconds_within(what: &str, seconds: u64) -> Result<u64, Refusal> {
    if (1..=LONGEST_S).contains(&seconds) {
        return Ok(seconds);
    }
    Err(bad(format!("{what} is between 1 and {LONGEST_S}")).into())
}

/// As [`seconds_within`], where 0 means never.
pub(crate) fn or_never(what: &str, seconds: Option<u64>) -> Result<Option<u64>, Refusal> {
    match seconds {
        Some(seconds) if seconds > LONGEST_S => {
            Err(bad(format!("{what} is between 0 and {LONGEST_S}")).into())
        }
        other => Ok(other),
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct CloseQuery {
    /// `false`: its processes end and its files stay.
    delete_workspace: Option<bool>,
}

/// Closes a sandbox.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes", params(("sandbox" = String, Path), CloseQuery),
    responses((status = 204, description = "closed"), Problems))]
async fn close(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Query(query): Query<CloseQuery>,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    if query.delete_workspace.unwrap_or(true) {
        daemon.engine.retire(&record).await?;
    } else {
        daemon.engine.stop(&record).await?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Brings a sandbox to life.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/wake", tag = "sandboxes", params(("sandbox" = String, Path)),
    responses((status = 200, body = Sandbox), Problems))]
async fn wake(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<Sandbox>, Refusal> {
    caller.may(Scope::Run)?;
    let found = daemon.living(&caller, &id).await?;
    Ok(axum::Json(Sandbox::found(&found, id.as_str())))
}

/// Freezes a sandbox: memory is kept, nothing runs, and any call wakes it.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/standby", tag = "sandboxes", params(("sandbox" = String, Path)),
    responses((status = 200, body = Sandbox), Problems))]
async fn standby(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<Sandbox>, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let engine = daemon.engine.clone();
    let record = daemon.complete(async move { engine.standby(&record).await }).await?;
    Ok(axum::Json(Sandbox::of(&record)))
}

/// Writes a sandbox to disk: it holds no memory, and any call restores it.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/hibernate", tag = "sandboxes", params(("sandbox" = String, Path)),
    responses((status = 200, body = Sandbox), Problems))]
async fn hibernate(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<Sandbox>, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let engine = daemon.engine.clone();
    let record = daemon.complete(async move { engine.hibernate(&record).await }).await?;
    Ok(axum::Json(Sandbox::of(&record)))
}

/// What a sandbox uses; of one that sleeps, what it used when it fell asleep.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/metrics", tag = "sandboxes", params(("sandbox" = String, Path)),
    responses((status = 200, body = Usage), Problems))]
async fn metrics(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<Usage>, Refusal> {
    caller.may(Scope::Read)?;
    let record = daemon.record(&caller, &id)?;
    Ok(axum::Json(daemon.engine.usage(&record).await?))
}
