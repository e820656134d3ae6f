//! Files of a sandbox: on the host, without waking it, through the path-safe operations of `carrel_files`.
//!
//! Streams hold neither locks nor memory for their clients: what comes goes to a file without a name ([`content`]) or through a
//! short queue ([`flow`]), and what a client leaves behind when it goes is nothing. Blocking work has threads of its own.
//! Names and contents are the sandbox's business: events and logs tell sizes.

mod conditions;
mod content;
pub(super) mod flow;
pub(in crate::rest) mod tree;
mod watch;

use std::sync::Arc;

use axum::{extract::State, http::Uri};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use carrel_engine::{
    Record,
    events::{Event, Kind as Happened},
    tokens::Scope,
};
use carrel_files::{FileError, Root};
use carrel_proto::{
    files::{
        Deleted, Entry, Found, GuestPath, MAX_DEPTH, MAX_MATCHES, Mkdir, Move, Name, PathError, Replace,
        Replaced, Search,
    },
    id::SandboxId,
    problem::{Code, Problem},
};
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    Daemon,
    extract::{Json, Query, SandboxPath},
    guard::Caller,
    page::{self, Page},
    problem::{Problems, Refusal, bad},
};

pub(crate) use self::{tree::trees, watch::watches};

pub(crate) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new()
        .routes(routes!(list, delete))
        .routes(routes!(stat))
        .routes(routes!(rename))
        .routes(routes!(mkdir))
        .routes(routes!(search))
        .routes(routes!(replace))
        .merge(content::routes())
        .merge(tree::routes())
        .merge(watch::routes())
}

/// Permission bits that can be asked for.
const MOST_MODE: u32 = 0o777;

/// A sandbox's files, in the hands of one caller.
#[derive(Debug)]
struct Desk {
    daemon: Arc<Daemon>,
    record: Record,
    root: Arc<Root>,
    caller: Arc<str>,
}

impl Desk {
    async fn open(
        daemon: &Arc<Daemon>,
        caller: &Caller,
        id: &SandboxId,
        scope: Scope,
    ) -> Result<Self, Refusal> {
        caller.may(scope)?;
        let mut record = daemon.record(caller, id)?;
        let root = match daemon.engine.files(&record) {
            // Its image is mounted with its box. Reading wakes it too: there is no other way to what is in it.
            Err(problem) if problem.code == Code::Unavailable => {
                record = daemon.living(caller, id).await?.record;
                daemon.engine.files(&record)?
            }
            other => other?,
        };
        Ok(Self { daemon: Arc::clone(daemon), record, root: Arc::new(root), caller: caller.name().into() })
    }

    /// Does something that blocks. It goes on to its end when the client does not wait for it.
    async fn work<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Root) -> Result<T, FileError> + Send + 'static,
    ) -> Result<T, Refusal> {
        let root = Arc::clone(&self.root);
        Ok(blocking(move || work(&root)).await??)
    }

    fn note(&self, what: Happened, bytes: Option<u64>) {
        let mut event = Event::of(what, &self.record).caller(Some(Arc::clone(&self.caller)));
        event.bytes = bytes;
        self.daemon.engine.note(event);
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, Problem> {
    tokio::task::spawn_blocking(work).await.map_err(Problem::internal)
}

/// `path` of a query, byte for byte: a name need not be UTF-8, and what a form's decoder makes of such a one is another name.
/// Not given, it is the workspace.
fn path_of(uri: &Uri) -> Result<GuestPath, Refusal> {
    let mut pairs =
        uri.query().unwrap_or_default().split('&').map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    match pairs.find(|(key, _)| decoded(key) == b"path") {
        Some((_, value)) => guest_path(&decoded(value)),
        None => Ok(GuestPath::root()),
    }
}

fn guest_path(bytes: &[u8]) -> Result<GuestPath, Refusal> {
    GuestPath::parse(bytes).map_err(|error: PathError| FileError::from_path(bytes, error).into())
}

/// A part of a query as it was meant.
fn decoded(text: &str) -> Vec<u8> {
    let hex = |byte: Option<&u8>| byte.and_then(|byte| char::from(*byte).to_digit(16));
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(byte) = bytes.get(at) {
        at += 1;
        match (byte, hex(bytes.get(at)), hex(bytes.get(at + 1))) {
            (b'+', _, _) => out.push(b' '),
            (b'%', Some(high), Some(low)) => {
                out.push(u8::try_from(high << 4 | low).unwrap_or(0));
                at += 2;
            }
            _ => out.push(*byte),
        }
    }
    out
}

fn check_mode(mode: Option<u32>) -> Result<Option<u32>, Refusal> {
    match mode {
        Some(mode) if mode > MOST_MODE => {
            Err(bad(format!("mode is at most {MOST_MODE}: the nine bits of permissions, as a number")).into())
        }
        other => Ok(other),
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    /// The workspace itself, unless given.
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: Option<String>,
    /// Levels below `path`; 1 is the directory alone.
    #[param(minimum = 1, maximum = 128)]
    depth: Option<u32>,
    #[param(minimum = 1, maximum = 500)]
    limit: Option<u32>,
    after: Option<String>,
}

/// Lists a directory, by name; what is in a directory follows it.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files", operation_id = "list_files", tag = "files",
    params(("sandbox" = String, Path), ListQuery),
    responses((status = 200, description = "a page", body = Page<Entry>), Problems))]
async fn list(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<ListQuery>,
) -> Result<axum::Json<Page<Entry>>, Refusal> {
    let path = path_of(&uri)?;
    let limit = page::check(query.limit)?;
    let depth = match query.depth.unwrap_or(1) {
        depth @ 1..=MAX_DEPTH => depth,
        _ => return Err(bad(format!("depth is between 1 and {MAX_DEPTH}")).into()),
    };
    let after = query.after.as_deref().map(cursor).transpose()?;
    let desk = Desk::open(&daemon, &caller, &id, Scope::Read).await?;
    let listing = desk.work(move |root| root.list(&path, depth, limit, after.as_ref())).await?;
    desk.note(Happened::FileList, None);
    let next = listing.next.map(|name| URL_SAFE_NO_PAD.encode(name.as_bytes()));
    Ok(axum::Json(Page { items: listing.entries, next }))
}

/// A name of any bytes, as text that needs no escaping.
fn cursor(text: &str) -> Result<Name, Refusal> {
    let name = URL_SAFE_NO_PAD.decode(text).map_err(|_| page::bad_cursor(text))?;
    let usable = name.split(|byte| *byte == b'/').all(|part| !matches!(part, b"" | b"." | b".."));
    if usable && !name.contains(&0) { Ok(Name(name)) } else { Err(page::bad_cursor(text)) }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct StatQuery {
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: Option<String>,
    /// What a symlink leads to, instead of the link.
    follow: Option<bool>,
}

/// What is known of a file without opening it.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/stat", operation_id = "stat_file", tag = "files",
    params(("sandbox" = String, Path), StatQuery),
    responses((status = 200, description = "the file, link or directory", body = Entry), Problems))]
async fn stat(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<StatQuery>,
) -> Result<axum::Json<Entry>, Refusal> {
    let path = path_of(&uri)?;
    let desk = Desk::open(&daemon, &caller, &id, Scope::Read).await?;
    let follow = query.follow.unwrap_or(false);
    let entry = desk.work(move |root| root.stat(&path, follow)).await?;
    desk.note(Happened::FileList, None);
    Ok(axum::Json(entry))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct DeleteQuery {
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: String,
    /// Directories with all that is in them.
    recursive: Option<bool>,
}

/// Deletes a file, a link or a directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/files", operation_id = "delete_file", tag = "files",
    params(("sandbox" = String, Path), DeleteQuery),
    responses((status = 200, description = "how many went", body = Deleted), Problems))]
async fn delete(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<DeleteQuery>,
) -> Result<axum::Json<Deleted>, Refusal> {
    let path = path_of(&uri)?;
    let recursive = query.recursive.unwrap_or(false);
    let desk = Desk::open(&daemon, &caller, &id, Scope::Run).await?;
    let deleted = desk
        .work(move |root| {
            // A tree may take long, and nobody else's file waits for it.
            let _alone = (!recursive).then(|| content::alone(&id));
            root.delete(&path, recursive)
        })
        .await?;
    desk.note(Happened::FileDelete, None);
    Ok(axum::Json(deleted))
}

/// Moves a file, a link or a directory to exactly `to`.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/move", operation_id = "move_file", tag = "files",
    params(("sandbox" = String, Path)), request_body = Move,
    responses((status = 200, description = "as it is now", body = Entry), Problems))]
async fn rename(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(ask): Json<Move>,
) -> Result<axum::Json<Entry>, Refusal> {
    let desk = Desk::open(&daemon, &caller, &id, Scope::Run).await?;
    let entry = desk
        .work(move |root| {
            let _alone = content::alone(&id);
            root.rename(&ask.from, &ask.to, ask.overwrite, ask.parents)
        })
        .await?;
    desk.note(Happened::FileWrite, None);
    Ok(axum::Json(entry))
}

/// Makes a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/mkdir", operation_id = "make_directory", tag = "files",
    params(("sandbox" = String, Path)), request_body = Mkdir,
    responses((status = 200, description = "the directory", body = Entry), Problems))]
async fn mkdir(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(ask): Json<Mkdir>,
) -> Result<axum::Json<Entry>, Refusal> {
    let mode = check_mode(ask.mode)?;
    let desk = Desk::open(&daemon, &caller, &id, Scope::Run).await?;
    let entry = desk.work(move |root| root.mkdir(&ask.path, ask.parents, mode)).await?;
    desk.note(Happened::FileWrite, None);
    Ok(axum::Json(entry))
}

/// Searches names, contents or both.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/search", operation_id = "search_files", tag = "files",
    params(("sandbox" = String, Path)), request_body = Search,
    responses((status = 200, description = "what was found", body = Found), Problems))]
async fn search(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(ask): Json<Search>,
) -> Result<axum::Json<Found>, Refusal> {
    if ask.limit == 0 || ask.limit > MAX_MATCHES {
        return Err(bad(format!("limit is between 1 and {MAX_MATCHES}")).into());
    }
    let desk = Desk::open(&daemon, &caller, &id, Scope::Read).await?;
    let found = desk.work(move |root| root.search(&ask)).await?;
    desk.note(Happened::FileRead, None);
    Ok(axum::Json(found))
}

/// Replaces text in one file, or in all files below a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/replace", operation_id = "replace_in_files", tag = "files",
    params(("sandbox" = String, Path)), request_body = Replace,
    responses((status = 200, description = "where, and how often", body = Replaced), Problems))]
async fn replace(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    Json(ask): Json<Replace>,
) -> Result<axum::Json<Replaced>, Refusal> {
    let desk = Desk::open(&daemon, &caller, &id, Scope::Run).await?;
    let replaced = desk.work(move |root| root.replace(&ask)).await?;
    desk.note(Happened::FileWrite, None);
    Ok(axum::Json(replaced))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_taken_byte_for_byte() {
        for (query, meant) in [
            ("path=a%20b%2Fc", &b"a b/c"[..]),
            ("depth=1&path=a+b", b"a b"),
            ("p%61th=x%FFy%0a", b"x\xffy\n"),
            ("path=50%25&x", b"50%"),
            ("path=%zz%4", b"%zz%4"),
            ("other=1", b"."),
            ("path=/workspace/", b"."),
        ] {
            let uri: Uri = format!("/x?{query}").parse().unwrap();
            assert_eq!(path_of(&uri).unwrap().as_bytes(), meant, "{query}");
        }
        for query in ["path=", "path", "path=/etc", "path=a%00b"] {
            let uri: Uri = format!("/x?{query}").parse().unwrap();
            assert!(path_of(&uri).is_err(), "{query}");
        }
    }

    #[test]
    fn cursors_are_names_and_nothing_else() {
        let name = Name(b"dir/\xff".to_vec());
        assert_eq!(cursor(&URL_SAFE_NO_PAD.encode(name.as_bytes())).unwrap(), name);
        for bad in ["!", "a", &URL_SAFE_NO_PAD.encode("../x"), &URL_SAFE_NO_PAD.encode("a\0"), ""] {
            assert!(cursor(bad).is_err(), "{bad}");
        }
    }
}
