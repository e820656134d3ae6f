//! Tools that the suite calls in every version of the protocol.

use std::time::Duration;

use rmcp::{
    ErrorData, RoleServer,
    model::*,
    service::{RequestContext, ServiceError},
};
use serde_json::{Value, json};

use super::{complete, resources::PNG, written};

/// Silence, in the shortest form that has a header.
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQAAAAA=";
/// What the suite calls "about 50 ms": between two notifications.
const PAUSE: Duration = Duration::from_millis(50);

/// Tools, and the one argument that some take.
const TOOLS: [(&str, Option<&str>); 24] = [
    ("test_simple_text", None),
    ("test_image_content", None),
    ("test_audio_content", None),
    ("test_embedded_resource", None),
    ("test_multiple_content_types", None),
    ("test_tool_with_logging", None),
    ("test_logging_tool", None),
    ("test_error_handling", None),
    ("test_tool_with_progress", None),
    ("test_sampling", Some("prompt")),
    ("test_elicitation", Some("message")),
    ("test_elicitation_sep1034_defaults", None),
    ("test_elicitation_sep1330_enums", None),
    ("test_missing_capability", None),
    ("test_streaming_elicitation", None),
    ("test_input_required_result_elicitation", None),
    ("test_input_required_result_sampling", None),
    ("test_input_required_result_list_roots", None),
    ("test_input_required_result_request_state", None),
    ("test_input_required_result_multiple_inputs", None),
    ("test_input_required_result_multi_round", None),
    ("test_input_required_result_tampered_state", None),
    ("test_input_required_result_capabilities", None),
    ("json_schema_2020_12_tool", None),
];

pub(super) fn list() -> Result<ListToolsResult, ErrorData> {
    let all: Vec<Value> = TOOLS
        .iter()
        .map(|(name, argument)| {
            let schema = match argument {
                _ if *name == "json_schema_2020_12_tool" => every_keyword(),
                Some(argument) => json!({
                    "type": "object", "properties": {*argument: {"type": "string"}}, "required": [argument],
                }),
                None => json!({"type": "object", "properties": {}}),
            };
            json!({"name": name, "description": "For the suite", "inputSchema": schema})
        })
        .collect();
    complete(json!({"tools": all, "ttlMs": 0, "cacheScope": "private"}))
}

/// A schema whose every keyword must reach the client.
fn every_keyword() -> Value {
    let text = || json!({"type": "string"});
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "$defs": {"address": {
            "$anchor": "addressDef", "type": "object", "properties": {"street": text(), "city": text()},
        }},
        "properties": {
            "name": text(), "address": {"$ref": "#/$defs/address"}, "phone": text(), "email": text(),
            "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        },
        "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
        "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
        "then": {"required": ["phone"]},
        "else": {"required": ["email"]},
        "additionalProperties": false,
    })
}

fn embedded(uri: &str, mime: &str, text: &str) -> Value {
    json!({"type": "resource", "resource": {"uri": uri, "mimeType": mime, "text": text}})
}

pub(super) async fn call(
    request: &CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let argument = |name: &str| {
        let value = request.arguments.as_ref().and_then(|all| all.get(name)?.as_str());
        value.unwrap_or_default().to_owned()
    };
    let text = |text: &str| json!({"type": "text", "text": text});
    let image = || json!({"type": "image", "data": PNG, "mimeType": "image/png"});
    let content = match request.name.as_ref() {
        "test_simple_text" => json!([text("This is a simple text response for testing.")]),
        "test_image_content" => json!([image()]),
        "test_audio_content" => json!([{"type": "audio", "data": WAV, "mimeType": "audio/wav"}]),
        "test_embedded_resource" => json!([embedded(
            "test://embedded-resource",
            "text/plain",
            "This is an embedded resource content."
        )]),
        "test_multiple_content_types" => {
            let data = json!({"test": "data", "value": 123}).to_string();
            let resource = embedded("test://mixed-content-resource", "application/json", &data);
            json!([text("Multiple content types test:"), image(), resource])
        }
        "test_tool_with_logging" | "test_logging_tool" => json!([text(&log(context).await?)]),
        "test_tool_with_progress" => json!([text(&progress(context).await?)]),
        "test_sampling" => json!([text(&sampled(context, &argument("prompt")).await?)]),
        "test_elicitation" => {
            let properties = json!({
                "username": {"type": "string", "description": "User's response"},
                "email": {"type": "string", "description": "User's email address"},
            });
            let schema =
                json!({"type": "object", "properties": properties, "required": ["username", "email"]});
            let answer = elicited(context, &argument("message"), schema).await?;
            json!([text(&format!("User response: {answer}"))])
        }
        "test_elicitation_sep1034_defaults" => {
            let answer = elicited(context, "Please review", defaults()).await?;
            json!([text(&format!("Elicitation completed: {answer}"))])
        }
        "test_elicitation_sep1330_enums" => {
            let answer = elicited(context, "Please choose", enums()).await?;
            json!([text(&format!("Elicitation completed: {answer}"))])
        }
        "test_missing_capability" => {
            let needed = json!({"requiredCapabilities": {"sampling": {}}});
            let code = ErrorCode::MISSING_REQUIRED_CLIENT_CAPABILITY;
            if context.client_capabilities().unwrap_or_default().sampling.is_none() {
                return Err(ErrorData::new(code, "this tool needs sampling", Some(needed)));
            }
            json!([text("sampling is there")])
        }
        "test_error_handling" => {
            let content = json!([text("This tool intentionally returns an error for testing")]);
            return Ok(complete::<CallToolResult>(json!({"content": content, "isError": true}))?.into());
        }
        "json_schema_2020_12_tool" => json!([text("ok")]),
        name => return Err(ErrorData::invalid_params(format!("there is no tool `{name}`"), None)),
    };
    Ok(complete::<CallToolResult>(json!({"content": content, "isError": false}))?.into())
}

fn gone(error: ServiceError) -> ErrorData {
    ErrorData::internal_error(error.to_string(), None)
}

async fn log(context: &RequestContext<RoleServer>) -> Result<String, ErrorData> {
    // The newest protocol logs only to requests that ask for it.
    let modern = context.meta.protocol_version().is_some();
    let wanted = !modern || context.meta.log_level().is_some();
    for (count, word) in
        ["Tool execution started", "Tool processing data", "Tool execution completed"].iter().enumerate()
    {
        if count > 0 {
            tokio::time::sleep(PAUSE).await;
        }
        if wanted {
            let message = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(word));
            context.peer.notify_logging_message(message).await.map_err(gone)?;
        }
    }
    Ok("logged".to_owned())
}

async fn progress(context: &RequestContext<RoleServer>) -> Result<String, ErrorData> {
    for done in [0.0, 50.0, 100.0] {
        if done > 0.0 {
            tokio::time::sleep(PAUSE).await;
        }
        if let Some(token) = context.meta.get_progress_token() {
            let word = ProgressNotificationParam::new(token, done).with_total(100.0);
            context.peer.notify_progress(word).await.map_err(gone)?;
        }
    }
    Ok("done".to_owned())
}

async fn sampled(context: &RequestContext<RoleServer>, prompt: &str) -> Result<String, ErrorData> {
    let message = json!({"role": "user", "content": {"type": "text", "text": prompt}});
    let params: CreateMessageRequestParams = written(json!({"messages": [message], "maxTokens": 100}))?;
    let answer = context.peer.create_message(params).await.map_err(gone)?;
    let answer = serde_json::to_value(answer).unwrap_or_default();
    Ok(format!("LLM response: {}", answer["content"]["text"].as_str().unwrap_or_default()))
}

async fn elicited(
    context: &RequestContext<RoleServer>,
    message: &str,
    schema: Value,
) -> Result<String, ErrorData> {
    let params = json!({"mode": "form", "message": message, "requestedSchema": schema});
    let request: ElicitRequest = written(json!({"method": "elicitation/create", "params": params}))?;
    let answer = context.peer.send_request(request.into()).await.map_err(gone)?;
    let answer = serde_json::to_value(answer).unwrap_or_default();
    let action = answer["action"].as_str().unwrap_or_default();
    Ok(format!("action={action}, content={}", answer["content"]))
}

fn defaults() -> Value {
    json!({"type": "object", "required": [], "properties": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": true},
    }})
}

fn enums() -> Value {
    let options = || json!(["option1", "option2", "option3"]);
    let titled = |word: &str| -> Vec<Value> {
        let titles = ["First", "Second", "Third"].iter().zip(["value1", "value2", "value3"]);
        titles.map(|(title, value)| json!({"const": value, "title": format!("{title} {word}")})).collect()
    };
    json!({"type": "object", "required": [], "properties": {
        "untitledSingle": {"type": "string", "enum": options()},
        "titledSingle": {"type": "string", "oneOf": titled("Option")},
        "legacyEnum": {
            "type": "string", "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options()}},
        "titledMulti": {"type": "array", "items": {"anyOf": titled("Choice")}},
    }})
}
