//! TOML, edited in place.

use serde_json::Value;
use toml_edit::{Array, DocumentMut, InlineTable, Item, Table, TableLike};

use super::{Entry, format::Fault};

fn parse(text: &str) -> Result<DocumentMut, Fault> {
    text.parse::<DocumentMut>().map_err(|error| Fault {
        line: error.span().map(|span| text[..span.start.min(text.len())].matches('\n').count() + 1),
        what: format!("no TOML: {}", error.message().lines().next().unwrap_or_default()),
    })
}

fn table<'a>(item: &'a mut Item, name: &str) -> Result<&'a mut dyn TableLike, Fault> {
    item.as_table_like_mut().ok_or_else(|| Fault::shape(format!("`{name}` is no table")))
}

pub(super) fn content(text: &str) -> Result<Value, Fault> {
    parse(text)?;
    let read = ::toml::from_str::<::toml::Table>(text).map_err(|error| Fault::shape(error.message()))?;
    serde_json::to_value(read).map_err(|error| Fault::shape(error.to_string()))
}

pub(super) fn entry(text: &str, section: &[&str], name: &str) -> Result<Option<Entry>, Fault> {
    let mut document = parse(text)?;
    let mut item = document.as_item_mut();
    let mut value = &content(text)?;
    for key in section.iter().chain([&name]) {
        match table(item, key)?.get_mut(key) {
            Some(inner) => (item, value) = (inner, &value[key]),
            None => return Ok(None),
        }
    }
    let keys: Vec<String> = table(item, name)?.iter().map(|(key, _)| key.to_owned()).collect();
    Ok(Some(keys.into_iter().map(|key| (key.clone(), value[&key].clone())).collect()))
}

pub(super) fn put(text: &str, section: &[&str], name: &str, entry: &Entry) -> Result<String, Fault> {
    let known = self::entry(text, section, name)?;
    let mut document = parse(text)?;
    let mut servers = document.as_item_mut();
    for key in section {
        let outer = table(servers, key)?;
        if outer.get(key).is_none() {
            // A table of tables alone has no line of its own.
            let mut inner = Table::new();
            inner.set_implicit(true);
            outer.insert(key, Item::Table(inner));
        }
        servers = outer.get_mut(key).ok_or_else(|| Fault::shape(format!("`{key}` is no table")))?;
    }
    let servers = table(servers, name)?;
    let Some(known) = known else {
        let mut server = Table::new();
        for (key, value) in entry {
            server.insert(key, item(value));
        }
        servers.insert(name, Item::Table(server));
        return Ok(document.to_string());
    };
    let server = servers.get_mut(name).ok_or_else(|| Fault::shape(format!("`{name}` is no table")))?;
    let server = table(server, name)?;
    for (key, old) in &known {
        match entry.iter().find(|(name, _)| name == key) {
            None => {
                server.remove(key);
            }
            Some((_, value)) if value != old => {
                server.insert(key, item(value));
            }
            Some(_) => {}
        }
    }
    for (key, value) in entry {
        if server.get(key).is_none() {
            server.insert(key, item(value));
        }
    }
    Ok(document.to_string())
}

pub(super) fn cut(text: &str, section: &[&str], name: &str) -> Result<String, Fault> {
    let mut document = parse(text)?;
    let mut servers = document.as_item_mut();
    for key in section {
        match table(servers, key)?.get_mut(key) {
            Some(inner) => servers = inner,
            None => return Ok(text.to_owned()),
        }
    }
    table(servers, name)?.remove(name);
    Ok(document.to_string())
}

fn item(value: &Value) -> Item {
    Item::Value(toml_value(value))
}

/// There is no null in TOML, and none in an entry.
fn toml_value(value: &Value) -> toml_edit::Value {
    match value {
        Value::Null => "".into(),
        Value::Bool(flag) => (*flag).into(),
        Value::Number(number) => match number.as_i64() {
            Some(whole) => whole.into(),
            None => number.as_f64().unwrap_or_default().into(),
        },
        Value::String(text) => text.as_str().into(),
        Value::Array(all) => all.iter().map(toml_value).collect::<Array>().into(),
        Value::Object(all) => {
            all.iter().map(|(key, value)| (key, toml_value(value))).collect::<InlineTable>().into()
        }
    }
}
