//! Snapshots: taken of sandboxes, listed, compared, given back; and forks.

mod portable;

use std::sync::Arc;

use axum::{
    extract::{Path, State, rejection::PathRejection},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use carrel_engine::{
    keys,
    snapshots::{self, Diff, RestoreWish, SnapshotFilter, SnapshotWish},
    tokens::Scope,
};
use carrel_proto::{
    id::{Key, SandboxId, SnapshotId},
    problem::Problem,
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{Query, SandboxPath},
    guard::Caller,
    idempotency::Once,
    page::{self, Page},
    place,
    problem::{Problems, Refusal, bad},
    sandboxes::Sandbox,
};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(take))
        .routes(routes!(list))
        .routes(routes!(get, delete))
        .routes(routes!(restore))
        .routes(routes!(fork))
        .routes(routes!(adopt))
        .routes(routes!(diff))
        .merge(portable::routes())
}

/// A saved sandbox.
#[derive(Debug, Serialize, ToSchema)]
struct Snapshot {
    id: SnapshotId,
    /// What it is of, which may be gone.
    sandbox: SandboxId,
    /// Its key at that time.
    key: Option<Key>,
    /// The snapshot that the sandbox came from, or that was taken of it before.
    parent: Option<SnapshotId>,
    tags: Vec<String>,
    made_unix_ms: u64,
    /// On disk.
    bytes: u64,
    /// Whether everything that lived in it was saved; else files alone.
    memory: bool,
    /// Why there is no memory.
    reason: Option<String>,
    environment: String,
}

impl Snapshot {
    fn of(snapshot: snapshots::Snapshot) -> Self {
        let snapshots::Snapshot { id, sandbox, key, parent, tags, made_unix_ms, bytes, content, .. } =
            snapshot;
        let snapshots::Content { memory, reason, spec, .. } = content;
        Self {
            id,
            sandbox,
            key,
            parent,
            tags,
            made_unix_ms,
            bytes,
            memory,
            reason,
            environment: spec.environment,
        }
    }
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Take {
    /// To find it again: an id or a tag names a snapshot.
    #[serde(default)]
    tags: Vec<String>,
    /// Without what lives in the sandbox.
    #[serde(default)]
    files_only: bool,
}

/// Saves a sandbox, which goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/snapshots", tag = "snapshots", request_body = Take,
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 201, body = Snapshot), Problems))]
async fn take(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(take, ticket): Once<Take>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let wish = SnapshotWish {
        tags: take.tags,
        files_only: take.files_only,
        caller: Some(Arc::from(caller.name())),
        quota: caller.quota(),
    };
    let (working, visit) = (Arc::clone(&daemon), Arc::clone(&caller.visit));
    ticket
        .once(&daemon, &caller, async move {
            let engine = working.engine.clone();
            let taking = async move {
                let made = engine.snapshot(&record, &wish).await?;
                visit.acts_on_snapshot(&made.id);
                Ok(made)
            };
            let made = working.complete(taking).await?;
            Ok((StatusCode::CREATED, axum::Json(Snapshot::of(made))).into_response())
        })
        .await
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// Of this sandbox.
    sandbox: Option<String>,
    tag: Option<String>,
    after: Option<String>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
}

/// Lists snapshots, oldest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", params(ListQuery),
    responses((status = 200, body = Page<Snapshot>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<Snapshot>>, Refusal> {
    caller.may(Scope::Read)?;
    let limit = page::check(query.limit)?;
    let after = query.after.as_deref().map(str::parse).transpose().map_err(|problem: Problem| problem)?;
    let sandbox = query.sandbox.map(|text| text.parse::<SandboxId>());
    let filter = SnapshotFilter {
        tenant: (!caller.is_operator()).then(|| caller.tenant.clone()),
        sandbox: sandbox.transpose().map_err(|error| bad(error.to_string()))?,
        tag: query.tag,
    };
    let found = daemon.engine.snapshots(&filter, after, limit)?;
    Ok(axum::Json(Page {
        items: found.snapshots.into_iter().map(Snapshot::of).collect(),
        next: found.next.map(|next| next.to_string()),
    }))
}

type Named = Result<Path<String>, PathRejection>;

fn known(daemon: &Daemon, caller: &Caller, path: Named) -> Result<snapshots::Snapshot, Refusal> {
    let Path(name) = path.map_err(|error| bad(error.to_string()))?;
    let snapshot = daemon.engine.snapshot_of(&caller.tenant, &name)?;
    caller.visit.acts_on_snapshot(&snapshot.id);
    Ok(snapshot)
}

/// A snapshot, by its id or the newest with this tag.
#[utoipa::path(get, path = "/v1/snapshots/{snapshot}", tag = "snapshots", params(("snapshot" = String, Path)),
    responses((status = 200, body = Snapshot), Problems))]
async fn get(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    path: Named,
) -> Result<axum::Json<Snapshot>, Refusal> {
    caller.may(Scope::Read)?;
    Ok(axum::Json(Snapshot::of(known(&daemon, &caller, path)?)))
}

/// Removes a snapshot. Sandboxes that came from it stay.
#[utoipa::path(delete, path = "/v1/snapshots/{snapshot}", tag = "snapshots", params(("snapshot" = String, Path)),
    responses((status = 204), Problems))]
async fn delete(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    path: Named,
) -> Result<StatusCode, Refusal> {
    caller.may(Scope::Run)?;
    let snapshot = known(&daemon, &caller, path)?;
    let (engine, name) = (daemon.engine.clone(), Some(Arc::from(caller.name())));
    daemon.complete(async move { engine.delete_snapshot(&snapshot, name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Restore {
    /// As a new sandbox. Else the snapshot's own becomes what it was.
    #[serde(default)]
    new: bool,
    /// Of the new one: `user:TOKEN:NAME`, by its last part.
    name: Option<String>,
    /// Of the new one: `scope:owner:name`.
    key: Option<String>,
    /// Interpreters start anew.
    #[serde(default)]
    files_only: bool,
}

/// Gives a snapshot back: in place, or as a new sandbox.
#[utoipa::path(post, path = "/v1/snapshots/{snapshot}/restore", tag = "snapshots", request_body = Restore,
    params(("snapshot" = String, Path), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 200, description = "in place", body = Sandbox), (status = 201, description = "as a new one", body = Sandbox), Problems))]
async fn restore(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    path: Named,
    Once(restore, ticket): Once<Restore>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let snapshot = known(&daemon, &caller, path)?;
    let key = match (&restore.name, &restore.key) {
        (Some(_), Some(_)) => return Err(bad("`name` and `key` name one sandbox each: give one").into()),
        (Some(name), None) => Some(place::own_key(&caller, name)?),
        (None, Some(key)) => {
            let key = place::parse_key(key)?;
            keys::check(&caller.tenant, &key)?;
            Some(key)
        }
        (None, None) => None,
    };
    let new = restore.new || key.is_some();
    let wish = RestoreWish {
        key,
        files_only: restore.files_only,
        tenant: caller.tenant.clone(),
        quota: caller.quota(),
        caller: Some(Arc::from(caller.name())),
    };
    let (working, visit) = (Arc::clone(&daemon), Arc::clone(&caller.visit));
    ticket
        .once(&daemon, &caller, async move {
            let engine = working.engine.clone();
            let found = working.complete(async move {
                let found = match new {
                    true => engine.restore_as(&snapshot, &wish).await?,
                    false => engine.restore_in_place(&snapshot, &wish).await?,
                };
                visit.acts_on(&found.record.id);
                Ok(found)
            });
            let found = found.await?;
            let status = if found.created { StatusCode::CREATED } else { StatusCode::OK };
            let name = found.record.id.to_string();
            Ok((status, axum::Json(Sandbox::found(&found, &name))).into_response())
        })
        .await
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ForkBody {
    #[serde(default = "one")]
    #[schema(minimum = 1, maximum = 100)]
    count: u32,
}

impl Default for ForkBody {
    fn default() -> Self {
        Self { count: one() }
    }
}

fn one() -> u32 {
    1
}

/// A fork and what it cost.
#[derive(Debug, Serialize, ToSchema)]
struct Fork {
    sandbox: Sandbox,
    /// From the copy to the running sandbox.
    duration_ms: u64,
    /// On disk, of its own.
    disk_bytes: u64,
    /// In memory, with what it shares.
    memory_bytes: u64,
}

#[derive(Debug, Serialize, ToSchema)]
struct Forked {
    forks: Vec<Fork>,
    /// For so long the sandbox stood still.
    copy_ms: u64,
    /// Whether they have everything that lived in it; else files alone.
    memory: bool,
    /// Why they have only the files.
    reason: Option<String>,
}

/// Copies a living sandbox: files, interpreters, variables. All of them or none.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/fork", tag = "snapshots", request_body = ForkBody,
    params(("sandbox" = String, Path), ("Idempotency-Key" = Option<String>, Header)),
    responses((status = 201, body = Forked), Problems))]
async fn fork(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Once(body, ticket): Once<ForkBody>,
) -> Result<Response, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let (quota, name) = (caller.quota(), Some(Arc::from(caller.name())));
    let (working, visit) = (Arc::clone(&daemon), Arc::clone(&caller.visit));
    ticket
        .once(&daemon, &caller, async move {
            let engine = working.engine.clone();
            let forking = async move {
                let done = engine.fork(&record, body.count, quota, name).await?;
                done.forks.iter().for_each(|fork| visit.acts_on(&fork.record.id));
                Ok(done)
            };
            let done = working.complete(forking).await?;
            let forks = done.forks.iter().map(|fork| Fork {
                sandbox: Sandbox::of(&fork.record),
                duration_ms: fork.duration_ms,
                disk_bytes: fork.disk_bytes,
                memory_bytes: fork.memory_bytes,
            });
            let answer = Forked {
                forks: forks.collect(),
                copy_ms: done.copy_ms,
                memory: done.memory,
                reason: done.reason,
            };
            Ok((StatusCode::CREATED, axum::Json(answer)).into_response())
        })
        .await
}

/// A fork takes the key of what it was forked from, which gets the fork's own.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/adopt", tag = "snapshots", params(("sandbox" = String, Path)),
    responses((status = 200, body = Sandbox), Problems))]
async fn adopt(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
) -> Result<axum::Json<Sandbox>, Refusal> {
    caller.may(Scope::Run)?;
    let record = daemon.record(&caller, &id)?;
    let (engine, name) = (daemon.engine.clone(), Some(Arc::from(caller.name())));
    let record = daemon.complete(async move { engine.adopt(&record, name).await }).await?;
    Ok(axum::Json(Sandbox::of(&record)))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DiffQuery {
    /// A snapshot's id or tag, or a sandbox's id.
    from: String,
    /// The same; without it the sandbox of `from` as it is now.
    to: Option<String>,
}

/// One file that differs.
#[derive(ToSchema)]
#[schema(as = ComparedFile)]
#[expect(dead_code, reason = "describes what the engine's own type is written as")]
struct ChangeShape {
    path: String,
    /// `file`, `dir`, `symlink`, `fifo`, `socket` or `device`.
    kind: String,
    size: u64,
}

#[derive(ToSchema)]
#[schema(as = ComparedFiles)]
#[expect(dead_code, reason = "describes what the engine's own type is written as")]
struct ChangesShape {
    /// Of all of them.
    count: u64,
    /// At most 1000, by name.
    files: Vec<ChangeShape>,
}

#[derive(ToSchema)]
#[schema(as = Diff)]
#[expect(dead_code, reason = "describes what the engine's own type is written as")]
struct DiffShape {
    added: ChangesShape,
    changed: ChangesShape,
    removed: ChangesShape,
}

/// What has become of files between two snapshots, or since one.
#[utoipa::path(get, path = "/v1/diff", tag = "snapshots", params(DiffQuery),
    responses((status = 200, body = DiffShape), Problems))]
async fn diff(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    Query(query): Query<DiffQuery>,
) -> Result<axum::Json<Diff>, Refusal> {
    caller.may(Scope::Read)?;
    let (from, to) =
        daemon.engine.sides(&caller.tenant, (&query.from, None), query.to.as_deref().map(|to| (to, None)))?;
    Ok(axum::Json(daemon.engine.diff(from, to).await?))
}
