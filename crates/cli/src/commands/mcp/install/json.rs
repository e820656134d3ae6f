//! JSON and its variant with comments, edited in place.

use jsonc_parser::{
    ParseOptions,
    cst::{CstInputValue, CstNode, CstObject, CstObjectProp, CstRootNode},
};
use serde_json::{Value, json};

use super::{Entry, format::Fault};

fn parse(text: &str, strict: bool) -> Result<CstRootNode, Fault> {
    let options = ParseOptions {
        allow_comments: !strict,
        allow_trailing_commas: !strict,
        allow_loose_object_property_names: false,
        allow_missing_commas: false,
        allow_single_quoted_strings: false,
        allow_hexadecimal_numbers: false,
        allow_unary_plus_numbers: false,
        allow_bare_decimal_point_numbers: false,
        allow_non_finite_numbers: false,
        allow_extended_string_escapes: false,
    };
    CstRootNode::parse(text, &options).map_err(|error| Fault {
        line: Some(error.line_display()),
        what: format!(
            "no JSON: {} (column {})",
            error.kind().to_string().to_lowercase(),
            error.column_display()
        ),
    })
}

/// The whole, which must be an object. None: there is nothing but blanks and comments.
fn whole(root: &CstRootNode) -> Result<Option<CstObject>, Fault> {
    match root.value() {
        None => Ok(None),
        Some(value) => value.as_object().map(Some).ok_or_else(|| Fault::shape("it is no JSON object")),
    }
}

/// The one property of this name. Two of them would leave open which one a client reads.
fn property(object: &CstObject, name: &str) -> Result<Option<CstObjectProp>, Fault> {
    let named = |property: &CstObjectProp| property.decoded_name().is_some_and(|found| found == name);
    let mut found = object.properties().into_iter().filter(named);
    match (found.next(), found.next()) {
        (first, None) => Ok(first),
        _ => Err(Fault::shape(format!("`{name}` is there twice"))),
    }
}

fn object_of(property: &CstObjectProp, name: &str) -> Result<CstObject, Fault> {
    property.object_value().ok_or_else(|| Fault::shape(format!("`{name}` is no object")))
}

/// The object that these keys lead to.
fn find(root: &CstRootNode, section: &[&str]) -> Result<Option<CstObject>, Fault> {
    let mut object = whole(root)?;
    for name in section {
        let Some(outer) = object else { return Ok(None) };
        object = property(&outer, name)?.map(|inner| object_of(&inner, name)).transpose()?;
    }
    Ok(object)
}

/// The same, made where it is missing.
fn make(root: &CstRootNode, section: &[&str]) -> Result<CstObject, Fault> {
    let mut object = match whole(root)? {
        Some(object) => object,
        None => root.object_value_or_set(),
    };
    for name in section {
        object = match property(&object, name)? {
            Some(inner) => object_of(&inner, name)?,
            None => object.object_value_or_set(name),
        };
    }
    Ok(object)
}

fn value_of(property: &CstObjectProp) -> Value {
    property.value().and_then(|value| value.to_serde_value()).unwrap_or_default()
}

pub(super) fn content(text: &str, strict: bool) -> Result<Value, Fault> {
    let root = parse(text, strict)?;
    Ok(whole(&root)?.and_then(|whole| whole.to_serde_value()).unwrap_or_default())
}

pub(super) fn entry(text: &str, section: &[&str], name: &str, strict: bool) -> Result<Option<Entry>, Fault> {
    let root = parse(text, strict)?;
    let Some(servers) = find(&root, section)? else { return Ok(None) };
    let Some(server) = property(&servers, name)? else { return Ok(None) };
    let pair = |property: &CstObjectProp| Some((property.decoded_name()?, value_of(property)));
    Ok(Some(object_of(&server, name)?.properties().iter().filter_map(pair).collect()))
}

pub(super) fn put(
    text: &str,
    section: &[&str],
    name: &str,
    entry: &Entry,
    strict: bool,
) -> Result<String, Fault> {
    let root = parse(text, strict)?;
    let servers = make(&root, section)?;
    match property(&servers, name)? {
        None => {
            servers.append(name, input(&Value::Null, Some(entry)));
        }
        Some(server) => {
            let server = object_of(&server, name)?;
            for old in server.properties() {
                let key = old.decoded_name().unwrap_or_default();
                match entry.iter().find(|(name, _)| *name == key) {
                    None => old.remove(),
                    Some((_, value)) if *value != value_of(&old) => old.set_value(input(value, None)),
                    Some(_) => {}
                }
            }
            for (key, value) in entry {
                if property(&server, key)?.is_none() {
                    server.append(key, input(value, None));
                }
            }
        }
    }
    for id in inputs(entry) {
        ask_for(&root, &id)?;
    }
    Ok(root.to_string())
}

pub(super) fn cut(text: &str, section: &[&str], name: &str, strict: bool) -> Result<String, Fault> {
    let old = entry(text, section, name, strict)?.unwrap_or_default();
    let root = parse(text, strict)?;
    if let Some(servers) = find(&root, section)?
        && let Some(server) = property(&servers, name)?
    {
        server.remove();
    }
    for id in inputs(&old) {
        if !root.to_string().contains(&reference(&id))
            && let Some(element) = asked_for(&root, &id)?
        {
            element.remove();
        }
    }
    Ok(root.to_string())
}

/// `entry`, if given, has an order that a [`Value`] does not keep.
fn input(value: &Value, entry: Option<&Entry>) -> CstInputValue {
    let pair = |(key, value): (&String, &Value)| (key.clone(), input(value, None));
    if let Some(entry) = entry {
        return CstInputValue::Object(entry.iter().map(|(key, value)| pair((key, value))).collect());
    }
    match value {
        Value::Null => CstInputValue::Null,
        Value::Bool(flag) => CstInputValue::Bool(*flag),
        Value::Number(number) => CstInputValue::Number(number.to_string()),
        Value::String(text) => CstInputValue::String(text.clone()),
        Value::Array(all) => CstInputValue::Array(all.iter().map(|value| input(value, None)).collect()),
        Value::Object(all) => CstInputValue::Object(all.iter().map(pair).collect()),
    }
}

fn reference(id: &str) -> String {
    format!("${{input:{id}}}")
}

/// Secrets that VS Code asks the user for, by the names an entry's headers have for them.
fn inputs(entry: &Entry) -> Vec<String> {
    let headers = entry.iter().filter(|(key, _)| key == "headers").filter_map(|(_, value)| value.as_object());
    let texts = headers.flat_map(|headers| headers.values().filter_map(Value::as_str));
    let named = |text: &str| Some(text.split_once("${input:")?.1.split_once('}')?.0.to_owned());
    texts.filter_map(named).collect()
}

/// What VS Code knows of a secret.
fn asked_for(root: &CstRootNode, id: &str) -> Result<Option<CstNode>, Fault> {
    let Some(whole) = whole(root)? else { return Ok(None) };
    let Some(list) = property(&whole, "inputs")?.and_then(|inputs| inputs.array_value()) else {
        return Ok(None);
    };
    let same = |element: &CstNode| element.to_serde_value().is_some_and(|value| value["id"] == id);
    Ok(list.elements().into_iter().find(same))
}

fn ask_for(root: &CstRootNode, id: &str) -> Result<(), Fault> {
    if asked_for(root, id)?.is_some() {
        return Ok(());
    }
    let whole = make(root, &[])?;
    let list = whole.array_value_or_create("inputs").ok_or_else(|| Fault::shape("`inputs` is no list"))?;
    let texts = [("type", "promptString"), ("id", id), ("description", "Token of the carrel server")];
    let mut wanted: Entry = texts.iter().map(|(key, value)| ((*key).to_owned(), json!(value))).collect();
    wanted.push(("password".to_owned(), json!(true)));
    list.append(input(&Value::Null, Some(&wanted)));
    Ok(())
}
