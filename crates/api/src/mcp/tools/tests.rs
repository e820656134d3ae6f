//! What the tools cost a model, and that every client can take them.

use serde_json::Value;

use super::*;

/// Tokens of a text, as a large model counts them.
fn tokens(text: &str) -> usize {
    tiktoken_rs::o200k_base_singleton().encode_ordinary(text).len()
}

/// What a client passes on to its model.
fn shown(tool: &Tool) -> String {
    let schema = Value::Object(tool.input_schema.as_ref().clone());
    serde_json::json!({"name": tool.name, "description": tool.description, "input_schema": schema})
        .to_string()
}

#[test]
fn the_tools_are_cheap() {
    let cost = |set: ToolSet| set.tools(false).iter().map(|tool| tokens(&shown(tool))).sum::<usize>();
    let (run, code) = (cost(ToolSet::Run), cost(ToolSet::Code));
    // Also as a client gets it, with annotations and all.
    let whole = tokens(&serde_json::to_string(&ToolSet::Run.tools(false)).unwrap());
    assert!(whole <= 150, "run with its annotations costs {whole}");
    assert!(run <= 150, "run costs {run}");
    assert!(code <= 750, "the code tools cost {code}");
    let undo = cost(ToolSet::All) - run - code;
    assert!(undo <= 70, "undo costs {undo}");
    for set in [ToolSet::Run, ToolSet::Code, ToolSet::All] {
        let cost = tokens(set.instructions());
        assert!(cost <= 80, "the instructions of {set:?} cost {cost}");
    }
}

/// Keywords and types that some client or model provider refuses.
fn lint(at: &str, schema: &Value) {
    let Value::Object(map) = schema else { return };
    for refused in ["anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "nullable", "default", "format"] {
        assert!(!map.contains_key(refused), "{at} has {refused}");
    }
    if at.ends_with("/properties") {
        map.iter().for_each(|(name, property)| lint(&format!("{at}/{name}"), property));
        return;
    }
    let kind = map.get("type");
    assert!(kind.is_some_and(Value::is_string), "{at} has the type {kind:?}");
    assert_ne!(kind.and_then(Value::as_str), Some("null"), "{at}");
    if kind.and_then(Value::as_str) == Some("array") {
        assert!(map.contains_key("items"), "{at} has no items");
    }
    for (name, below) in map.iter().filter(|(_, below)| below.is_object()) {
        lint(&format!("{at}/{name}"), below);
    }
}

#[test]
fn schemas_are_plain() {
    for tool in ToolSet::All.tools(true) {
        let input = Value::Object(tool.input_schema.as_ref().clone());
        lint(&format!("{}/input", tool.name), &input);
        let properties = input["properties"].as_object().unwrap();
        for required in input["required"].as_array().unwrap() {
            assert!(properties.contains_key(required.as_str().unwrap()), "{}: {required}", tool.name);
        }
        let output = tool.output_schema.as_ref().unwrap();
        lint(&format!("{}/output", tool.name), &Value::Object(output.as_ref().clone()));
    }
}

#[test]
fn the_tools_are_as_checked_in() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/mcp-tools.json");
    let tools = ToolSet::All.tools(true);
    let text = format!("{}\n", serde_json::to_string_pretty(&tools).unwrap());
    if std::env::var_os("CARREL_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(std::fs::read_to_string(path).unwrap_or_default(), text, "CARREL_BLESS=1 writes it anew");
}
