//! A file's bytes, to and fro.
//!
//! A write is two steps. First the body goes to a file without a name, however long its client takes; then it takes its place,
//! with the sandbox's lock held for as long as a rename takes. Under that lock `If-Match` is judged, so of many writers who saw
//! the same content one wins. Code in the sandbox writes without that lock: it can come between, as it can between any two calls.

use std::{
    hash::{BuildHasher, RandomState},
    io::{Seek, SeekFrom},
    sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError},
};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use carrel_engine::{events::Kind as Happened, tokens::Scope};
use carrel_files::{FileError, FileReader, Stamp, WriteOptions};
use carrel_proto::{
    files::{Entry, Kind},
    id::SandboxId,
    problem::Problem,
};
use serde::Deserialize;
use utoipa::{IntoParams, PartialSchema, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    super::{
        Daemon,
        extract::{Query, SandboxPath},
        guard::Caller,
        problem::{ProblemDocument, Problems, Refusal, bad},
    },
    Desk, check_mode,
    conditions::{Conditions, Part, etag, part},
    flow, path_of,
};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(read, head, write))
}

/// Locks for sandboxes, which share them: enough that two seldom meet, and a fixed number however many there are.
static LOCKS: LazyLock<(RandomState, [Mutex<()>; 64])> =
    LazyLock::new(|| (RandomState::new(), [const { Mutex::new(()) }; 64]));

/// The right to change a file of this sandbox. Only for threads that may block, and only for moments.
pub(super) fn alone(id: &SandboxId) -> MutexGuard<'static, ()> {
    let (hasher, locks) = &*LOCKS;
    let number = usize::try_from(hasher.hash_one(id.as_str()) % 64).unwrap_or(0);
    locks[number].lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes, in a document that has no better word for them.
pub(super) struct Raw;

impl PartialSchema for Raw {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        use utoipa::openapi::{ObjectBuilder, schema::Type};
        ObjectBuilder::new().schema_type(Type::String).content_media_type("application/octet-stream").into()
    }
}
impl ToSchema for Raw {
    fn name() -> std::borrow::Cow<'static, str> {
        "Raw".into()
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ReadQuery {
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: String,
}

/// Reads a file, or a part of it.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/content", operation_id = "read_file", tag = "files",
    params(("sandbox" = String, Path), ReadQuery, ("Range" = Option<String>, Header), ("If-Range" = Option<String>, Header),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header)),
    responses(
        (status = 200, description = "all of it", body = Raw, content_type = "application/octet-stream", headers(("etag" = String))),
        (status = 206, description = "the part", body = Raw, content_type = "application/octet-stream", headers(("etag" = String), ("content-range" = String))),
        (status = 304, description = "the content that the client has"),
        (status = 416, description = "there is no such part", body = ProblemDocument, content_type = "application/problem+json", headers(("content-range" = String))),
        Problems))]
async fn read(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(ReadQuery { .. }): Query<ReadQuery>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let opened = open(&daemon, &caller, &id, &uri).await?;
    let (mut response, range) = opened.answer(&headers)?;
    if let Some((first, length)) = range {
        let Opened { desk, reader } = opened;
        let mut file = reader.into_file();
        file.seek(SeekFrom::Start(first)).map_err(Problem::internal)?;
        desk.note(Happened::FileRead, Some(length));
        *response.body_mut() = flow::file(file, length);
    }
    Ok(response)
}

/// The head of what reading would answer.
#[utoipa::path(head, path = "/v1/sandboxes/{sandbox}/files/content", operation_id = "head_file", tag = "files",
    params(("sandbox" = String, Path), ReadQuery, ("Range" = Option<String>, Header), ("If-Range" = Option<String>, Header),
        ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header)),
    responses((status = 200, description = "its size and tag", headers(("etag" = String))),
        (status = 206, description = "those of the part"), (status = 304, description = "the content that the client has"),
        (status = 416, description = "there is no such part"),
        (status = "default", description = "a problem, whose document HEAD does not carry")))]
async fn head(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(ReadQuery { .. }): Query<ReadQuery>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let opened = open(&daemon, &caller, &id, &uri).await?;
    opened.desk.note(Happened::FileList, None);
    opened.answer(&headers).map(|(response, _)| response)
}

/// A file that is open for a caller.
struct Opened {
    desk: Desk,
    reader: FileReader,
}

async fn open(daemon: &Arc<Daemon>, caller: &Caller, id: &SandboxId, uri: &Uri) -> Result<Opened, Refusal> {
    let path = path_of(uri)?;
    let desk = Desk::open(daemon, caller, id, Scope::Read).await?;
    let reader = desk.work(move |root| root.reader(&path)).await?;
    Ok(Opened { desk, reader })
}

impl Opened {
    /// The answer without its body, and which bytes go into it: offset and length.
    fn answer(&self, headers: &HeaderMap) -> Result<(Response, Option<(u64, u64)>), Refusal> {
        let stamp = self.reader.stamp();
        let conditions = Conditions::of(headers);
        if !conditions.matches(Some(&stamp)) {
            return Err(changed().into());
        }
        let size = stamp.size;
        let (status, range, said) = if !conditions.differs(Some(&stamp)) {
            (StatusCode::NOT_MODIFIED, None, None)
        } else {
            match part(headers, &stamp) {
                Part::Whole => (StatusCode::OK, Some((0, size)), None),
                Part::Range(first, last) => {
                    let said = format!("bytes {first}-{last}/{size}");
                    (StatusCode::PARTIAL_CONTENT, Some((first, last - first + 1)), Some(said))
                }
                Part::Nowhere => return Ok((nowhere(size), None)),
            }
        };
        let mut response = status.into_response();
        let out = response.headers_mut();
        out.insert(header::ETAG, tag(&stamp)?);
        if let Some((_, length)) = range {
            out.insert(header::CONTENT_LENGTH, length.into());
            out.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
            out.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
            // What a sandbox wrote is for no browser to show as a page of ours.
            out.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
            out.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
        }
        if let Some(said) = said {
            out.insert(header::CONTENT_RANGE, said.parse().map_err(Problem::internal)?);
        }
        Ok((response, range))
    }
}

fn tag(stamp: &Stamp) -> Result<HeaderValue, Problem> {
    etag(stamp).parse().map_err(Problem::internal)
}

fn changed() -> FileError {
    FileError::Changed { path: "the file".into() }
}

/// 416: of all statuses the only one that no code of a problem stands for.
fn nowhere(size: u64) -> Response {
    let problem = bad(format!("the file has {size} bytes, and none of them are in this range"));
    let mut document = serde_json::to_value(ProblemDocument::from(problem)).unwrap_or_default();
    document["status"] = 416.into();
    document["title"] = "Range Not Satisfiable".into();
    let mut response = (StatusCode::RANGE_NOT_SATISFIABLE, document.to_string()).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if let Ok(said) = format!("bytes */{size}").parse() {
        headers.insert(header::CONTENT_RANGE, said);
    }
    response
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct WriteQuery {
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: String,
    /// Make missing directories above; so it is unless told otherwise.
    parents: Option<bool>,
    /// `false`: fail if there is anything of that name.
    overwrite: Option<bool>,
    /// Add to the end of what is there.
    append: Option<bool>,
    /// The nine bits of permissions, as a decimal number.
    #[param(maximum = 511)]
    mode: Option<u32>,
    /// Answer only when it is on the disk.
    sync: Option<bool>,
}

/// A body that is read before it is judged.
const SHORT: u64 = 64 << 10;

/// Writes a file: all of the body, or nothing.
#[utoipa::path(put, path = "/v1/sandboxes/{sandbox}/files/content", operation_id = "write_file", tag = "files",
    params(("sandbox" = String, Path), WriteQuery, ("If-Match" = Option<String>, Header), ("If-None-Match" = Option<String>, Header)),
    request_body(content = Raw, content_type = "application/octet-stream"),
    responses((status = 200, description = "replaced, or added to", body = Entry, headers(("etag" = String))),
        (status = 201, description = "made", body = Entry, headers(("etag" = String))), Problems))]
async fn write(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<WriteQuery>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refusal> {
    let path = path_of(&uri)?;
    let conditions = Conditions::of(&headers);
    let append = query.append.unwrap_or(false);
    let options = WriteOptions {
        append,
        create_new: !query.overwrite.unwrap_or(true),
        mode: check_mode(query.mode)?,
        parents: query.parents.unwrap_or(true),
        sync: query.sync.unwrap_or(false),
    };
    if append && options.create_new {
        return Err(bad("append and overwrite=false exclude each other").into());
    }
    let desk = Desk::open(&daemon, &caller, &id, Scope::Run).await?;
    let most = desk.record.spec.limits.disk.0;
    let size = hyper::body::Body::size_hint(&body);
    if size.lower() > most {
        return Err(flow::too_large(most).into());
    }
    let early = path.clone();
    // Of a short body that is not worth a connection: whoever is answered before all of it was read finds it closed.
    let is_long = size.upper().is_none_or(|most| most > SHORT);
    let given = is_long && (conditions.given() || options.create_new);
    let (scratch, conditions) = desk
        .work(move |root| {
            if given {
                // Before anything is sent in vain; what decides is how it is at the end.
                let old = match root.reader(&early) {
                    Ok(reader) => Some(reader.stamp()),
                    Err(FileError::NotFound { .. }) => None,
                    Err(other) => return Err(other),
                };
                if !conditions.matches(old.as_ref()) || !conditions.differs(old.as_ref()) {
                    return Err(FileError::Changed { path: early.to_string() });
                }
                if options.create_new && root.stat(&early, false).is_ok() {
                    return Err(FileError::Exists { path: early.to_string() });
                }
            }
            Ok((root.scratch()?, conditions))
        })
        .await?;
    let (scratch, bytes) = flow::spool(body, scratch, most).await?;
    let placed = desk
        .work(move |root| {
            let options = WriteOptions {
                create_new: options.create_new || (conditions.wants_new() && !append),
                ..options
            };
            let placed = root.place(
                scratch,
                &path,
                options,
                || alone(&id),
                |old| conditions.matches(old) && conditions.differs(old),
            );
            match placed {
                Err(FileError::Exists { path }) if conditions.wants_new() => Err(FileError::Changed { path }),
                other => other,
            }
        })
        .await?;
    desk.note(Happened::FileWrite, Some(bytes));
    debug_assert_eq!(placed.entry.kind, Kind::File);
    let status = if placed.created { StatusCode::CREATED } else { StatusCode::OK };
    let mut response = (status, axum::Json(placed.entry)).into_response();
    response.headers_mut().insert(header::ETAG, tag(&placed.stamp)?);
    Ok(response)
}
