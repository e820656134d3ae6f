//! Whole trees as archives. A tar is packed and unpacked as it flows; a zip that comes in is kept whole first, in a file without a
//! name on the sandbox's own disk, because its list of contents is at its end.

use std::{sync::Arc, time::Duration};

use axum::{
    body::Body,
    extract::State,
    http::{HeaderValue, Uri, header},
    response::{IntoResponse, Response},
};
use carrel_engine::{events::Kind as Happened, tokens::Scope};
use carrel_files::{OutsideLinks, Root, TreeLimits, TreeReport, read_tar, read_zip, write_tar, write_zip};
use carrel_proto::{
    files::{GuestPath, Name},
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::{router::OpenApiRouter, routes};

use super::{
    super::{
        Daemon,
        extract::{Query, SandboxPath},
        guard::Caller,
        problem::{Problems, Refusal},
        shares::{Share, Shares},
    },
    Desk,
    content::Raw,
    flow, path_of,
};

pub(super) fn routes() -> OpenApiRouter<Arc<Daemon>> {
    OpenApiRouter::new().routes(routes!(download, upload))
}

/// Archives under way in all: each holds a thread for as long as its client takes.
const MOST_TREES: usize = 32;
/// Of one token: so that no single one can take all threads.
const MOST_TREES_OF_ONE: usize = 8;
/// For one archive, from its first byte to its last: a client that takes or sends a little now and then holds a thread, too.
pub(in crate::rest) const LONGEST: Duration = Duration::from_secs(3600);
/// Contents of an archive beside the disk that they go to: holes count here and take nothing there.
const SPARSE: u64 = 4;
/// What may follow an archive's end in its body: tar fills up the last block, and some writers more.
const MOST_BEHIND: usize = 1 << 20;

pub(crate) fn trees() -> Arc<Shares> {
    Shares::new("archives", MOST_TREES, MOST_TREES_OF_ONE)
}

#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum Format {
    #[default]
    Tar,
    Zip,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TreeQuery {
    /// The workspace itself, unless given.
    #[expect(dead_code, reason = "read from the query itself, byte for byte")]
    path: Option<String>,
    #[param(inline)]
    format: Option<Format>,
}

/// A directory, or a file, as an archive.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/tree", operation_id = "download_tree", tag = "files",
    params(("sandbox" = String, Path), TreeQuery),
    responses((status = 200, description = "the archive; one that breaks off ends without its last chunk",
        content((Raw = "application/x-tar"), (Raw = "application/zip"))), Problems))]
async fn download(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<TreeQuery>,
) -> Result<Response, Refusal> {
    let path = path_of(&uri)?;
    let desk = Desk::open(&daemon, &caller, &id, Scope::Read).await?;
    let place = daemon.trees.take(&caller.tenant)?;
    let looked = path.clone();
    // What can be refused is refused before the answer begins.
    desk.work(move |root| match root.stat(&looked, true)?.kind {
        carrel_proto::files::Kind::Dir => root.open_directory(&looked).map(drop),
        _ => root.reader(&looked).map(drop),
    })
    .await?;
    let format = query.format.unwrap_or_default();
    let (mut outlet, body) = flow::outlet(LONGEST);
    tokio::task::spawn_blocking(move || {
        let _place = place;
        let limits = TreeLimits::default();
        let packed = match format {
            Format::Tar => write_tar(&desk.root, &path, &mut outlet, &limits),
            Format::Zip => write_zip(&desk.root, &path, &mut outlet, &limits),
        };
        match packed {
            Ok(report) => desk.note(Happened::FileRead, Some(report.bytes)),
            Err(error) => outlet.fail(error.to_string()),
        }
    });
    let mut response = body.into_response();
    let kind = match format {
        Format::Tar => "application/x-tar",
        Format::Zip => "application/zip",
    };
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CONTENT_DISPOSITION, HeaderValue::from_static("attachment"));
    Ok(response)
}

/// What was unpacked, and what was not.
#[derive(Debug, Serialize, ToSchema)]
struct Unpacked {
    files: u64,
    directories: u64,
    links: u64,
    bytes: u64,
    /// The first hundred.
    left_out: Vec<Left>,
    left_out_count: u64,
}

#[derive(Debug, Serialize, ToSchema)]
struct Left {
    path: Name,
    why: &'static str,
}

impl From<TreeReport> for Unpacked {
    fn from(report: TreeReport) -> Self {
        let left_out =
            report.left_out.into_iter().map(|left| Left { path: left.path, why: left.why }).collect();
        Self {
            files: report.files,
            directories: report.dirs,
            links: report.links,
            bytes: report.bytes,
            left_out,
            left_out_count: report.left_out_count,
        }
    }
}

/// Unpacks an archive into a directory, which is made if missing. What came before an error stays.
#[utoipa::path(put, path = "/v1/sandboxes/{sandbox}/files/tree", operation_id = "upload_tree", tag = "files",
    params(("sandbox" = String, Path), TreeQuery),
    request_body(content((Raw = "application/x-tar"), (Raw = "application/zip"))),
    responses((status = 200, description = "what was unpacked", body = Unpacked), Problems))]
async fn upload(
    State(daemon): State<Arc<Daemon>>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    uri: Uri,
    Query(query): Query<TreeQuery>,
    body: Body,
) -> Result<axum::Json<Unpacked>, Refusal> {
    let path = path_of(&uri)?;
    let desk = Desk::open(&daemon, &caller, &id, Scope::Run).await?;
    let disk = desk.record.spec.limits.disk.0;
    let limits = TreeLimits { bytes: disk.saturating_mul(SPARSE), ..TreeLimits::default() };
    let report = match query.format.unwrap_or_default() {
        Format::Tar => {
            let place = daemon.trees.take(&caller.tenant)?;
            let unpacking = untar(Arc::clone(&desk.root), path, body, limits, place);
            tokio::time::timeout(LONGEST, unpacking).await.map_err(|_| {
                let word = format!("the archive took more than {} seconds", LONGEST.as_secs());
                Problem::new(Code::Timeout, word).hint("what came before stays: send the rest, in parts")
            })??
        }
        Format::Zip => {
            let scratch = desk.work(Root::scratch).await?;
            let (mut scratch, _) = flow::spool(body, scratch, disk).await?;
            let _place = daemon.trees.take(&caller.tenant)?;
            desk.work(move |root| read_zip(root, &path, scratch.file(), &limits, OutsideLinks::LeaveOut))
                .await?
        }
    };
    desk.note(Happened::FileWrite, Some(report.bytes));
    Ok(axum::Json(report.into()))
}

async fn untar(
    root: Arc<Root>,
    path: GuestPath,
    body: Body,
    limits: TreeLimits,
    place: Share,
) -> Result<TreeReport, Refusal> {
    let (done, body) = flow::feed(body, move |inlet| {
        let _place = place;
        read_tar(&root, &path, inlet, &limits, OutsideLinks::LeaveOut)
    })
    .await?;
    let report = done?;
    drain(body).await;
    Ok(report)
}

/// Takes what follows an archive, so that the client is done sending when it is answered.
async fn drain(mut body: Body) {
    let mut taken = 0;
    while taken < MOST_BEHIND
        && let Ok(Some(bytes)) = flow::next(&mut body).await
    {
        taken += bytes.len();
    }
}
