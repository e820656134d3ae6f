//! What a client can read without calling a tool: files and outputs of its own sandboxes, and the environments.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use carrel_engine::{Record, Source};
use carrel_proto::{
    files::{GuestPath, Kind, MAX_PAGE},
    id::SessionName,
    problem::{Code, Problem},
};
use rmcp::model::{
    ContentBlock, ListResourcesResult, ReadResourceResult, Resource, ResourceContents, ResourceTemplate,
};
use serde_json::json;

use super::{
    Server,
    files::mime,
    run::result_of,
    scope::Scope,
    uri::{self, Address},
};

/// Sandboxes of one page of the list.
const PAGE: usize = 100;
/// Characters of an exec's output: far more than a tool's result, and still one message.
const EXEC_CHARS: usize = 1_000_000;

pub(super) fn templates() -> Vec<ResourceTemplate> {
    vec![
        ResourceTemplate::new(uri::FILES, "files")
            .with_description("A file of a sandbox, or the listing of a directory"),
        ResourceTemplate::new(uri::EXECS, "execs")
            .with_description("All that a run or exec has printed, also of one that still runs")
            .with_mime_type("text/plain"),
        ResourceTemplate::new(uri::BRIEF, "brief")
            .with_description("Where a session stands: variables, jobs, files, errors, limits")
            .with_mime_type("text/plain"),
    ]
}

/// The environments, and the workspace of each sandbox of the client's.
pub(super) async fn list(
    server: &Server,
    scope: &Scope,
    cursor: Option<&str>,
) -> Result<ListResourcesResult, Problem> {
    let engine = server.engine().await?;
    let mut own: Vec<Record> =
        engine.list()?.into_iter().filter(|record| scope.name(record).is_some()).collect();
    own.sort_by(|a, b| a.id.as_str().cmp(b.id.as_str()));
    let rest = match cursor {
        Some(cursor) => own.partition_point(|record| record.id.as_str() <= cursor),
        None => 0,
    };
    let page = &own[rest..own.len().min(rest + PAGE)];
    let mut resources = Vec::new();
    if cursor.is_none() {
        resources.push(
            Resource::new(uri::ENVIRONMENTS, "environments")
                .with_description("What `env` can be")
                .with_mime_type("application/json"),
        );
    }
    resources.extend(page.iter().flat_map(|record| {
        let name = scope.name(record).unwrap_or_default();
        let files = Resource::new(uri::file(&record.id, b""), name)
            .with_description(format!("Files of session `{name}`"))
            .with_mime_type("application/json");
        let brief = Resource::new(uri::brief(&record.id, &SessionName::main()), format!("{name} (brief)"))
            .with_description(format!("Where session `{name}` stands"))
            .with_mime_type("text/plain");
        [files, brief]
    }));
    let mut result = ListResourcesResult::with_all_items(resources);
    if rest + PAGE < own.len() {
        result.next_cursor = page.last().map(|record| record.id.to_string());
    }
    Ok(result)
}

pub(super) async fn read(server: &Server, scope: &Scope, text: &str) -> Result<ReadResourceResult, Problem> {
    let contents = match Address::parse(text)? {
        Address::Environments => vec![environments(server, text)],
        Address::File { sandbox, path } => {
            let (engine, record) = server.living(scope, &sandbox).await?;
            let root = engine.files(&record)?;
            let text = text.to_owned();
            let reading = tokio::task::spawn_blocking(move || file(&root, &record, &path, text));
            vec![reading.await.map_err(Problem::internal)??]
        }
        Address::Brief { sandbox, session } => {
            let (engine, record) = server.living(scope, &sandbox).await?;
            let brief = engine.brief(&record, &session).await?;
            vec![ResourceContents::text(brief.text(), text).with_mime_type("text/plain")]
        }
        Address::Exec { sandbox, exec } => {
            let (result, _) = result_of(server, scope, &sandbox, &exec, EXEC_CHARS).await?;
            result.content.into_iter().filter_map(|block| content(block, text)).collect()
        }
    };
    Ok(ReadResourceResult::new(contents))
}

fn environments(server: &Server, text: &str) -> ResourceContents {
    let all: Vec<_> = server
        .options
        .engine
        .environments
        .iter()
        .map(|(name, source)| {
            let source = match source {
                Source::Preset(language) => json!({"preset": language}),
                Source::Artifact(_) => json!({"artifact": true}),
            };
            json!({"name": name, "source": source})
        })
        .collect();
    ResourceContents::text(json!(all).to_string(), text).with_mime_type("application/json")
}

fn file(
    root: &carrel_files::Root,
    record: &Record,
    path: &GuestPath,
    text: String,
) -> Result<ResourceContents, Problem> {
    if root.stat(path, true)?.kind == Kind::Dir {
        let listing = root.list(path, 1, MAX_PAGE, None)?;
        let entries: Vec<_> = listing
            .entries
            .iter()
            .filter_map(|entry| {
                let below = path.join(entry.name.as_bytes()).ok()?;
                Some(json!({
                    "name": String::from_utf8_lossy(entry.name.as_bytes()),
                    "kind": entry.kind,
                    "size": entry.size,
                    "uri": uri::file(&record.id, below.as_bytes()),
                }))
            })
            .collect();
        let object = json!({"entries": entries, "complete": listing.next.is_none()});
        return Ok(ResourceContents::text(object.to_string(), text).with_mime_type("application/json"));
    }
    let data = root.read(path, 0, None).map_err(Problem::from).map_err(|problem| match problem.code {
        Code::TooLarge => problem.hint("read a part of it with `run`"),
        _ => problem,
    })?;
    let mime = mime(path.as_bytes());
    Ok(match String::from_utf8(data.data.0) {
        Ok(contents) => ResourceContents::text(contents, text).with_mime_type(mime.unwrap_or("text/plain")),
        Err(bytes) => ResourceContents::blob(STANDARD.encode(bytes.as_bytes()), text)
            .with_mime_type(mime.unwrap_or("application/octet-stream")),
    })
}

/// A part of a tool's result as a part of a resource.
fn content(block: ContentBlock, text: &str) -> Option<ResourceContents> {
    match block {
        ContentBlock::Text(part) => {
            Some(ResourceContents::text(part.text, text).with_mime_type("text/plain"))
        }
        ContentBlock::Image(image) => {
            Some(ResourceContents::blob(image.data, text).with_mime_type(image.mime_type))
        }
        _ => None,
    }
}
