//! Prompts that the suite gets.

use rmcp::{
    ErrorData,
    model::{
        GetPromptRequestParams, GetPromptResponse, GetPromptResult, InputRequiredResult, ListPromptsResult,
    },
};
use serde_json::{Value, json};

use super::{complete, resources::PNG, written};

pub(super) fn list() -> Result<ListPromptsResult, ErrorData> {
    let one = |name: &str, arguments: &[&str]| {
        let arguments: Vec<Value> =
            arguments.iter().map(|name| json!({"name": name, "required": true})).collect();
        json!({"name": name, "description": "For the suite", "arguments": arguments})
    };
    let all = [
        one("test_simple_prompt", &[]),
        one("test_prompt_with_arguments", &["arg1", "arg2"]),
        one("test_prompt_with_embedded_resource", &["resourceUri"]),
        one("test_prompt_with_image", &[]),
        one("test_input_required_result_prompt", &[]),
    ];
    complete(json!({"prompts": all, "ttlMs": 0, "cacheScope": "private"}))
}

pub(super) fn get(request: &GetPromptRequestParams) -> Result<GetPromptResponse, ErrorData> {
    let argument = |name: &str| {
        let value = request.arguments.as_ref().and_then(|all| all.get(name)?.as_str());
        value.ok_or_else(|| ErrorData::invalid_params(format!("`{name}` is missing"), None))
    };
    let text = |text: String| json!({"type": "text", "text": text});
    let contents = match request.name.as_str() {
        "test_simple_prompt" => vec![text("This is a simple prompt for testing.".to_owned())],
        "test_prompt_with_arguments" => {
            let (one, two) = (argument("arg1")?, argument("arg2")?);
            vec![text(format!("Prompt with arguments: arg1='{one}', arg2='{two}'"))]
        }
        "test_prompt_with_embedded_resource" => {
            let resource = json!({
                "uri": argument("resourceUri")?, "mimeType": "text/plain",
                "text": "Embedded resource content for testing.",
            });
            vec![
                json!({"type": "resource", "resource": resource}),
                text("Please process the embedded resource above.".to_owned()),
            ]
        }
        "test_prompt_with_image" => vec![
            json!({"type": "image", "data": PNG, "mimeType": "image/png"}),
            text("Please analyze the image above.".to_owned()),
        ],
        "test_input_required_result_prompt" => {
            let context = request.input_responses.as_ref().and_then(|all| all.get("user_context"));
            let Some(context) = context else { return Ok(ask_for_context()?.into()) };
            vec![text(format!("Use this context: {}", context["content"]["context"]))]
        }
        name => return Err(ErrorData::invalid_params(format!("there is no prompt `{name}`"), None)),
    };
    let messages: Vec<Value> =
        contents.into_iter().map(|content| json!({"role": "user", "content": content})).collect();
    Ok(complete::<GetPromptResult>(json!({"messages": messages}))?.into())
}

fn ask_for_context() -> Result<InputRequiredResult, ErrorData> {
    let schema =
        json!({"type": "object", "properties": {"context": {"type": "string"}}, "required": ["context"]});
    let ask = json!({
        "method": "elicitation/create",
        "params": {
            "mode": "form", "message": "What context should the prompt use?", "requestedSchema": schema,
        },
    });
    written(json!({"resultType": "input_required", "inputRequests": {"user_context": ask}}))
}
