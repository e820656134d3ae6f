//! Schemas of the types whose wire form is written by hand. All others derive theirs.
//!
//! Invariant: a schema says exactly what serde writes and takes. A fuzzer holds the running server to it.

use std::borrow::Cow;

use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        RefOr, Schema,
        schema::{AdditionalProperties, ObjectBuilder, OneOfBuilder, Type},
    },
};

use crate::{
    files::{Content, GuestPath, MAX_PATH, Name, WORKSPACE},
    id::{ExecId, Key, MAX_KEY, MAX_NAME, SandboxId, SessionName, SnapshotId},
    problem::Code,
};

/// Names of sandboxes, sessions and execs.
const NAME: &str = "^[A-Za-z0-9_][A-Za-z0-9._-]*$";
/// Keys are names with colons.
const KEY: &str = "^[A-Za-z0-9_:][A-Za-z0-9._:-]*$";
/// Exactly what decodes: padded, and no bits set that would fall away.
const BASE64: &str = "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$";

fn name(description: &str, pattern: &str, longest: usize) -> RefOr<Schema> {
    ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some(description))
        .pattern(Some(pattern))
        .min_length(Some(1))
        .max_length(Some(longest))
        .into()
}

/// A string where that is exact, else base64.
fn bytes(description: &str, text: ObjectBuilder) -> RefOr<Schema> {
    let base64 = ObjectBuilder::new()
        .property("base64", ObjectBuilder::new().schema_type(Type::String).pattern(Some(BASE64)))
        .required("base64")
        .additional_properties(Some(AdditionalProperties::<Schema>::FreeForm(false)));
    OneOfBuilder::new()
        .description(Some(description))
        .item(text.schema_type(Type::String))
        .item(base64)
        .into()
}

macro_rules! schemas {
    ($($type:ident => $schema:expr,)*) => {
        $(
            impl PartialSchema for $type {
                fn schema() -> RefOr<Schema> {
                    $schema
                }
            }
            impl ToSchema for $type {
                fn name() -> Cow<'static, str> {
                    Cow::Borrowed(stringify!($type))
                }
            }
        )*
    };
}

schemas! {
    SnapshotId => name("A saved sandbox.", NAME, MAX_NAME),
    SandboxId => name("One isolated box, for its whole life.", NAME, MAX_NAME),
    SessionName => name("One line of work inside a sandbox.", NAME, MAX_NAME),
    ExecId => name("A run or an exec of one sandbox.", NAME, MAX_NAME),
    Key => name("`scope:owner:name`: how a caller names a sandbox without its id.", KEY, MAX_KEY),
    Code => ObjectBuilder::new()
        .schema_type(Type::String)
        .description(Some("A stable name of what went wrong. New ones may come; none changes its meaning."))
        .enum_values(Some(Code::ALL.iter().map(|code| code.as_str())))
        .into(),
    Name => bytes(
        "A file's name or path: a string, or base64 where it is not text.",
        ObjectBuilder::new(),
    ),
    Content => bytes(
        "What is in a file: a string, or base64 where it is not text.",
        ObjectBuilder::new(),
    ),
    GuestPath => bytes(
        "A path relative to `/workspace`, or absolute inside it.",
        ObjectBuilder::new().min_length(Some(1)).max_length(Some(MAX_PATH + WORKSPACE.len())),
    ),
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};

    use super::*;
    use crate::{
        files::{Entry, Found, Kind, List, Listing, Read, Search},
        guest::Language,
        limits::{Enforced, Enforcement, Limits},
        message::{Display, DisplayKind, ExecInfo, PortInfo, PtySize, SessionInfo, Usage, What},
        outcome::{Cause, Exception, Outcome, SessionState},
        problem::Problem,
    };

    type Schemas = BTreeMap<String, Value>;

    fn schemas_of<T: ToSchema>() -> (Value, Schemas) {
        let mut parts = Vec::new();
        T::schemas(&mut parts);
        let parts = parts.into_iter().map(|(name, schema)| (name, serde_json::to_value(schema).unwrap()));
        (serde_json::to_value(T::schema()).unwrap(), parts.collect())
    }

    /// As strict as a reader of the document would be: what is not described is a fault.
    fn fault(value: &Value, schema: &Value, all: &Schemas) -> Option<String> {
        if let Some(name) = schema["$ref"].as_str() {
            let name = name.rsplit('/').next().unwrap();
            return match all.get(name) {
                Some(schema) => fault(value, schema, all),
                None => Some(format!("{name} is described nowhere")),
            };
        }
        if let Some(ways) = schema["oneOf"].as_array() {
            let faults: Vec<_> = ways.iter().filter_map(|way| fault(value, way, all)).collect();
            return (faults.len() + 1 != ways.len()).then(|| format!("{value}: not one of: {faults:?}"));
        }
        if let Some(values) = schema["enum"].as_array() {
            return (!values.contains(value)).then(|| format!("{value} is not in {values:?}"));
        }
        let types = match &schema["type"] {
            Value::String(one) => vec![one.clone()],
            Value::Array(several) => several.iter().map(|t| t.as_str().unwrap().to_owned()).collect(),
            _ => return None,
        };
        let found = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "integer",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        if !types.iter().any(|wanted| wanted == found) {
            return Some(format!("{value} is no {types:?}"));
        }
        match value {
            Value::Array(items) => items.iter().find_map(|item| fault(item, &schema["items"], all)),
            Value::Object(fields) => {
                let missing = schema["required"].as_array().and_then(|names| {
                    names.iter().find(|name| !fields.contains_key(name.as_str().unwrap())).cloned()
                });
                if let Some(name) = missing {
                    return Some(format!("{name} is missing in {value}"));
                }
                fields.iter().find_map(|(name, value)| match schema["properties"].get(name) {
                    Some(schema) => fault(value, schema, all),
                    None if schema["additionalProperties"].is_object() => {
                        fault(value, &schema["additionalProperties"], all)
                    }
                    None => Some(format!("{name} is not described")),
                })
            }
            _ => None,
        }
    }

    #[track_caller]
    fn described<T: ToSchema + serde::Serialize>(value: T) {
        let (schema, all) = schemas_of::<T>();
        let written = serde_json::to_value(value).unwrap();
        assert_eq!(fault(&written, &schema, &all), None, "{schema:#}");
    }

    fn outcome() -> Outcome {
        Outcome {
            exec: ExecId::numbered(1),
            cause: Cause::Oom,
            exit_code: 137,
            signal: Some(9),
            session_state: SessionState::RolledBack,
            exception: Some(Exception { name: "ValueError".into(), message: String::new() }),
            problem: Some(Problem::new(Code::Oom, "gone").hint("less")),
            receipt: Box::default(),
            transactional: Some(false),
            transactional_reason: Some("threads".into()),
            taken_back: Some(2),
            files_state: Some(crate::outcome::FilesState::Kept),
            files_reason: Some("too large".into()),
        }
    }

    #[test]
    fn what_is_written_is_described() {
        described(Problem::new(Code::Disk, "full"));
        described(outcome());
        described(Outcome { signal: None, exception: None, problem: None, ..outcome() });
        let info = |what| ExecInfo {
            exec: ExecId::numbered(2),
            session: SessionName::main(),
            what,
            running: false,
            started_unix_ms: 5,
            outcome: Some(outcome()),
        };
        described(info(What::Run { language: Language::Python }));
        described(info(What::Exec { argv: vec!["ls".into()] }));
        described(Display {
            kind: DisplayKind::Result,
            mime: BTreeMap::from([("text/plain".into(), json!("1")), ("a/json".into(), json!({"a": [1]}))]),
        });
        described(PtySize { rows: 24, cols: 80 });
        described(SessionInfo {
            name: SessionName::main(),
            interpreters: vec![Language::Bash],
            cwd: "/workspace".into(),
            env: BTreeMap::from([("A".into(), "b".into())]),
            opened_unix_ms: 1,
        });
        described(PortInfo { port: 80, address: "::".into() });
        let usage = Usage {
            memory: 1,
            peak_memory: None,
            cpu_us: 2,
            processes: 3,
            disk_used: 4,
            disk_limit: 5,
            uptime_ms: 6,
            idle_ms: 7,
            running: 8,
        };
        described(Usage { peak_memory: Some(1), ..usage.clone() });
        described(usage);
        described(Limits::default());
        described(Enforced {
            memory: Enforcement::CgroupV2,
            pids: Enforcement::Rlimit("per user".into()),
            cpu: Enforcement::Nothing("no cgroup".into()),
            disk: Enforcement::SizedFilesystem,
            freezer: Enforcement::Watched("each second".into()),
        });
    }

    #[test]
    fn files_are_described() {
        let entry = |name: &[u8]| Entry {
            name: Name::from(name),
            kind: Kind::Symlink,
            size: 1,
            mode: 0o644,
            mtime_ns: -1,
            target: Some(Name::from("there")),
        };
        described(entry(b"a"));
        described(entry(b"\xff"));
        described(Listing { entries: vec![Entry { target: None, ..entry(b"b") }], next: None });
        described(Found::default());
        let path = GuestPath::root();
        described(Read { path: path.clone(), offset: 0, len: Some(1) });
        described(List { path, depth: 1, limit: 1, after: None });
    }

    #[test]
    fn requests_may_leave_out_what_has_a_default() {
        let (schema, _) = schemas_of::<List>();
        assert_eq!(schema.get("required"), None);
        assert_eq!(schema["additionalProperties"], json!(false));
        let (schema, _) = schemas_of::<Search>();
        assert_eq!(schema["properties"]["limit"]["maximum"], json!(crate::files::MAX_MATCHES));
        let (schema, _) = schemas_of::<SessionName>();
        assert_eq!((&schema["minLength"], &schema["maxLength"]), (&json!(1), &json!(MAX_NAME)));
        let (schema, _) = schemas_of::<Code>();
        assert_eq!(schema["enum"].as_array().unwrap().len(), Code::ALL.len());
    }
}
