//! Tools of the newest protocol that answer with a question: the client calls again with its answers.

use std::{
    collections::BTreeSet,
    sync::{Mutex, PoisonError},
};

use rmcp::{
    ErrorData, RoleServer,
    model::{CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, InputRequiredResult},
    service::RequestContext,
};
use serde_json::{Value, json};

use super::written;

/// Handles given to clients. One that is not among them was made up or changed on the way.
#[derive(Debug, Default)]
pub(super) struct States {
    given: Mutex<BTreeSet<String>>,
}

impl States {
    fn give(&self, what: &str) -> String {
        let mut given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        let state = format!("{what}-{}", given.len());
        given.insert(state.clone());
        state
    }

    fn check(&self, state: &str) -> Result<(), ErrorData> {
        let given = self.given.lock().unwrap_or_else(PoisonError::into_inner);
        if given.contains(state) {
            return Ok(());
        }
        Err(ErrorData::invalid_params("this state was not given by the server", None))
    }
}

fn form(message: &str, field: &str, kind: &str) -> Value {
    let schema = json!({"type": "object", "properties": {field: {"type": kind}}, "required": [field]});
    let params = json!({"mode": "form", "message": message, "requestedSchema": schema});
    json!({"method": "elicitation/create", "params": params})
}

fn sample(question: &str) -> Value {
    let message = json!({"role": "user", "content": {"type": "text", "text": question}});
    json!({"method": "sampling/createMessage", "params": {"messages": [message], "maxTokens": 100}})
}

fn roots() -> Value {
    json!({"method": "roots/list", "params": {}})
}

/// The questions of a tool's round, and whether its answer needs a state.
fn questions(tool: &str, round: usize, context: &RequestContext<RoleServer>) -> Option<(Value, bool)> {
    Some(match (tool, round) {
        ("elicitation", 0) => (json!({"user_name": form("What is your name?", "name", "string")}), false),
        ("sampling", 0) => (json!({"capital_question": sample("What is the capital of France?")}), false),
        ("list_roots", 0) => (json!({"client_roots": roots()}), false),
        ("request_state" | "tampered_state", 0) => {
            (json!({"confirm": form("Please confirm", "ok", "boolean")}), true)
        }
        ("multiple_inputs", 0) => {
            let all = json!({
                "user_name": form("What is your name?", "name", "string"),
                "greeting": sample("Generate a greeting"),
                "client_roots": roots(),
            });
            (all, true)
        }
        ("multi_round", 0) => (json!({"step1": form("Step 1: What is your name?", "name", "string")}), true),
        ("multi_round", 1) => {
            (json!({"step2": form("Step 2: What is your favorite color?", "color", "string")}), true)
        }
        ("capabilities", 0) => {
            let can = context.client_capabilities().unwrap_or_default();
            let mut all = json!({});
            if can.elicitation.is_some() {
                all["asked"] = form("What is your name?", "name", "string");
            }
            if can.sampling.is_some() {
                all["sampled"] = sample("What is the capital of France?");
            }
            (all, false)
        }
        _ => return None,
    })
}

/// Whether an answer has the form that its question asked for.
fn fits(question: &Value, answer: &Value) -> bool {
    match question["method"].as_str() {
        Some("elicitation/create") => {
            let required = question["params"]["requestedSchema"]["required"][0].as_str().unwrap_or_default();
            match answer["action"].as_str() {
                Some("accept") => !answer["content"][required].is_null(),
                action => action.is_some(),
            }
        }
        Some("sampling/createMessage") => answer["content"].is_object() || answer["content"].is_array(),
        _ => answer["roots"].is_array(),
    }
}

fn ask(
    states: &States,
    tool: &str,
    questions: Value,
    needs_state: bool,
) -> Result<CallToolResponse, ErrorData> {
    let mut result = json!({"resultType": "input_required", "inputRequests": questions});
    if needs_state {
        result["requestState"] = states.give(tool).into();
    }
    Ok(written::<InputRequiredResult>(result)?.into())
}

/// `None`: the tool is no such one.
pub(super) fn call(
    states: &States,
    request: &CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<Option<CallToolResponse>, ErrorData> {
    let tool = match request.name.as_ref() {
        "test_streaming_elicitation" => "elicitation",
        name => match name.strip_prefix("test_input_required_result_") {
            Some(tool) => tool,
            None => return Ok(None),
        },
    };
    if let Some(state) = &request.request_state {
        states.check(state)?;
    }
    let answers = request.input_responses.clone().unwrap_or_default();
    // The last round whose questions were answered.
    let (mut round, mut answered) = (0, None);
    while let Some((asked, needs_state)) = questions(tool, round, context) {
        let all = asked.as_object().into_iter().flatten();
        let complete = all.clone().count() > 0
            && all
                .into_iter()
                .all(|(name, question)| answers.get(name).is_some_and(|answer| fits(question, answer)));
        if complete && (!needs_state || request.request_state.is_some()) {
            answered = Some(round);
        }
        round += 1;
    }
    let next = answered.map_or(0, |round| round + 1);
    if let Some((asked, needs_state)) = questions(tool, next, context) {
        return ask(states, tool, asked, needs_state).map(Some);
    }
    let text = match tool {
        "elicitation" => {
            let name = answers.get("user_name").and_then(|answer| answer["content"]["name"].as_str());
            format!("Hello, {}!", name.unwrap_or("stranger"))
        }
        _ => format!("state-ok: {}", json!(answers)),
    };
    Ok(Some(CallToolResult::success(vec![ContentBlock::text(text)]).into()))
}
