//! Resources that the suite reads.

use rmcp::{
    ErrorData,
    model::{ListResourceTemplatesResult, ListResourcesResult, ReadResourceResponse, ReadResourceResult},
};
use serde_json::json;

use super::complete;

/// One red pixel.
pub(super) const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";

pub(super) fn list() -> Result<ListResourcesResult, ErrorData> {
    let one = |name: &str, mime: &str| json!({"uri": format!("test://{name}"), "name": name, "description": "For the suite", "mimeType": mime});
    let all = [
        one("static-text", "text/plain"),
        one("static-binary", "image/png"),
        one("watched-resource", "text/plain"),
    ];
    complete(json!({"resources": all, "ttlMs": 0, "cacheScope": "private"}))
}

pub(super) fn templates() -> Result<ListResourceTemplatesResult, ErrorData> {
    let one = json!({
        "uriTemplate": "test://template/{id}/data", "name": "template", "description": "For the suite",
        "mimeType": "application/json",
    });
    complete(json!({"resourceTemplates": [one], "ttlMs": 0, "cacheScope": "private"}))
}

pub(super) fn read(uri: &str) -> Result<ReadResourceResponse, ErrorData> {
    let id = uri.strip_prefix("test://template/").and_then(|rest| rest.strip_suffix("/data"));
    let content = match (uri, id) {
        ("test://static-text", _) => {
            json!({"uri": uri, "mimeType": "text/plain", "text": "This is the content of the static text resource."})
        }
        ("test://watched-resource", _) => json!({"uri": uri, "mimeType": "text/plain", "text": "watched"}),
        ("test://static-binary", _) => json!({"uri": uri, "mimeType": "image/png", "blob": PNG}),
        (_, Some(id)) => {
            let text = json!({"id": id, "templateTest": true, "data": format!("Data for ID: {id}")});
            json!({"uri": uri, "mimeType": "application/json", "text": text.to_string()})
        }
        _ => return Err(ErrorData::resource_not_found("no such resource", Some(json!({"uri": uri})))),
    };
    let result: ReadResourceResult =
        complete(json!({"contents": [content], "ttlMs": 0, "cacheScope": "private"}))?;
    Ok(result.into())
}
