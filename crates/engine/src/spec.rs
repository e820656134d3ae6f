//! Sandbox specs: what an agent's author writes of the sandbox that the agent wants.
//!
//! As JSON, as YAML, or in the front matter of a Markdown file (between two `---` lines, under `sandbox:`, beside whatever
//! else stands there). All three become one JSON value, which one strict reader turns into a [`SandboxSpec`]: unknown
//! fields, wrong types and contradictions are named, and nothing is guessed. `sandbox: python` is the short form.

use carrel_backend::environment::Environment;
use carrel_proto::{
    guest::Language,
    limits::{ByteSize, Limits},
    problem::{Code, Problem},
};
use serde_json::{Map, Value};

use crate::{
    environments::{Environments, Source},
    keys::Session,
    nearest::nearest,
    sandboxes::Wish,
};

/// Longest spec; as YAML it may not expand to much more either.
const MAX_SPEC: usize = 64 << 10;
/// Longest file of which the front matter is read.
pub const MAX_FILE: usize = 1 << 20;
/// Most nodes of a YAML document, aliases expanded: front matter holds more than the sandbox.
const MAX_NODES: usize = 10_000;
const MAX_ALIASES: usize = 100;
const MAX_DEPTH: usize = 32;
/// 1024 CPUs, and a petabyte in MB: far beyond any host, far from overflow.
const MOST_MILLICORES: u64 = 1024 * 1000;
const MOST_MB: u64 = 1 << 30;
/// A year.
const MOST_SECONDS: u64 = 366 * 24 * 3600;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    /// A fresh sandbox for every call.
    #[default]
    Compute,
    /// One that stays: the session says which.
    Code,
}

/// A spec, checked.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SandboxSpec {
    pub mode: Mode,
    /// The sandbox's software; `None`: any.
    pub environment: Option<String>,
    /// The language of code that names none.
    pub language: Option<Language>,
    /// Of [`Mode::Code`].
    pub session: Session,
    pub cpu_millis: Option<u32>,
    pub memory: Option<ByteSize>,
    pub disk: Option<ByteSize>,
    pub idle_timeout_s: Option<u64>,
}

const FIELDS: [&str; 6] = ["mode", "runtime", "image", "session", "limits", "network"];
const LIMITS: [&str; 4] = ["cpu_millicores", "memory_mb", "timeout_seconds", "workspace_mb"];
const NETWORK: [&str; 1] = ["enabled"];

fn bad(why: impl Into<String>) -> Problem {
    Problem::new(Code::InvalidArgument, why)
}

impl SandboxSpec {
    /// From text in any of the three forms.
    pub fn from_text(text: &str, environments: &Environments) -> Result<Self, Problem> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        if text.len() > MAX_FILE {
            return Err(Problem::new(Code::TooLarge, format!("a spec's file may have {MAX_FILE} bytes")));
        }
        if let Some(front) = front_matter(text) {
            let block = yaml(front)?;
            let spec = block.get("sandbox").ok_or_else(|| {
                let near =
                    block.as_object().and_then(|map| nearest("sandbox", map.keys().map(String::as_str)));
                let problem = bad("the front matter says nothing of a `sandbox`");
                match near {
                    Some(near) => problem.hint(format!("is `{near}` meant?")),
                    None => problem.hint("write `sandbox: python`, or the fields of docs/http.md below it"),
                }
            })?;
            return Self::read(spec, environments);
        }
        let value = match text.trim_start().starts_with('{') {
            true if text.len() > MAX_SPEC => return Err(too_large()),
            true => {
                serde_json::from_str(text).map_err(|error| bad(format!("the spec is not JSON: {error}")))?
            }
            false => yaml(text)?,
        };
        Self::from_value(&value, environments)
    }

    /// From a document that is read already: the spec itself, or `{"sandbox": SPEC}` and nothing else.
    pub fn from_value(value: &Value, environments: &Environments) -> Result<Self, Problem> {
        match value.as_object() {
            Some(map) if map.len() == 1 && map.contains_key("sandbox") => {
                Self::read(&map["sandbox"], environments)
            }
            _ => Self::read(value, environments),
        }
    }

    fn read(value: &Value, environments: &Environments) -> Result<Self, Problem> {
        if let Value::String(word) = value {
            return Self::short(word, environments);
        }
        let map = object(value, "a sandbox spec")?;
        known(map, "", &FIELDS)?;
        let text = |name: &str| map.get(name).map(|value| string(value, name)).transpose();
        let mode = match text("mode")? {
            None => None,
            Some("compute") => Some(Mode::Compute),
            Some("code") => Some(Mode::Code),
            Some(other) => return Err(choice("mode", other, &["compute", "code"])),
        };
        let session = text("session")?.map(Session::parse).transpose()?;
        if mode == Some(Mode::Compute) && session.is_some() {
            return Err(bad(
                "`mode: compute` and `session` contradict each other: such a sandbox is gone after its call",
            )
            .hint("leave `session` out, or use `mode: code`"));
        }
        let mut spec = Self { session: session.clone().unwrap_or_default(), ..Self::default() };
        // Who names a session wants one that stays.
        spec.mode = mode.unwrap_or(if session.is_some() { Mode::Code } else { Mode::Compute });
        spec.language = text("runtime")?.map(language).transpose()?;
        spec.software(text("image")?, environments)?;
        if let Some(limits) = map.get("limits") {
            spec.limits(object(limits, "`limits`")?)?;
        }
        if let Some(network) = map.get("network") {
            let network = object(network, "`network`")?;
            known(network, "network.", &NETWORK)?;
            match network.get("enabled") {
                None | Some(Value::Bool(false)) => {}
                Some(Value::Bool(true)) => {
                    return Err(Problem::new(
                        Code::Unsupported,
                        "`network.enabled`: no environment offers a network",
                    )
                    .hint("leave it out, and have what is needed in the environment"));
                }
                Some(_) => return Err(bad("`network.enabled` is neither true nor false")),
            }
        }
        Ok(spec)
    }

    /// `sandbox: python`: a language, or the name of an environment.
    fn short(word: &str, environments: &Environments) -> Result<Self, Problem> {
        let mut spec = Self { language: Language::parse(word), ..Self::default() };
        let image = spec.language.is_none().then_some(word);
        spec.software(image, environments)?;
        Ok(spec)
    }

    fn software(&mut self, image: Option<&str>, environments: &Environments) -> Result<(), Problem> {
        let Some(image) = image else {
            self.environment = self.language.map(|language| language.as_str().to_owned());
            return Ok(());
        };
        let contradiction = |runtime: Language, has: &str| {
            bad(format!(
                "`runtime: {}` and `image: {image}` contradict each other: that environment has {has}",
                runtime.as_str()
            ))
            .hint("leave one of them out")
        };
        match (environments.source(image)?, self.language) {
            (Source::Preset(own), Some(runtime)) if *own != runtime => {
                return Err(contradiction(runtime, own.as_str()));
            }
            (Source::Artifact(directory), Some(runtime)) => {
                let found = Environment::artifact(image, directory)?;
                // Every language has an entry; one that the manifest does not name has no program.
                let there = found.interpreters.iter().filter(|(_, own)| !own.program.is_empty());
                let has: Vec<&str> = there.map(|(language, _)| language.as_str()).collect();
                if !has.contains(&runtime.as_str()) {
                    return Err(contradiction(runtime, &has.join(", ")));
                }
            }
            _ => {}
        }
        self.environment = Some(image.to_owned());
        Ok(())
    }

    fn limits(&mut self, limits: &Map<String, Value>) -> Result<(), Problem> {
        known(limits, "limits.", &LIMITS)?;
        let number =
            |name: &str, most: u64| limits.get(name).map(|value| above_zero(value, name, most)).transpose();
        let size = |name: &str| Ok::<_, Problem>(number(name, MOST_MB)?.map(ByteSize::mb));
        self.cpu_millis =
            number("cpu_millicores", MOST_MILLICORES)?.and_then(|millis| u32::try_from(millis).ok());
        self.memory = size("memory_mb")?;
        self.disk = size("workspace_mb")?;
        self.idle_timeout_s = number("timeout_seconds", MOST_SECONDS)?;
        Ok(())
    }

    /// The wish of a caller who has this spec; what it does not say is as in `base`.
    pub fn wish(&self, base: &Wish) -> Wish {
        let limits = &base.limits;
        Wish {
            environment: self.environment.clone().or_else(|| base.environment.clone()),
            limits: Limits {
                cpu_millis: self.cpu_millis.unwrap_or(limits.cpu_millis),
                memory: self.memory.unwrap_or(limits.memory),
                disk: self.disk.unwrap_or(limits.disk),
                ..limits.clone()
            },
            idle_timeout_s: self.idle_timeout_s.unwrap_or(base.idle_timeout_s),
            first: self.language.or(base.first),
            ..base.clone()
        }
    }
}

fn too_large() -> Problem {
    Problem::new(Code::TooLarge, format!("a sandbox spec may have {MAX_SPEC} bytes"))
}

/// What stands between a first line `---` and the next such line.
fn front_matter(text: &str) -> Option<&str> {
    let is_rule = |line: &str| line.trim_end() == "---";
    let mut lines = text.split_inclusive('\n');
    let first = lines.next().filter(|line| is_rule(line))?;
    let mut end = first.len();
    for line in lines {
        if is_rule(line) {
            return Some(&text[first.len()..end]);
        }
        end += line.len();
    }
    None
}

fn yaml(text: &str) -> Result<Value, Problem> {
    if text.len() > MAX_SPEC {
        return Err(too_large());
    }
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 4 * MAX_NODES,
            max_nodes: MAX_NODES,
            max_aliases: MAX_ALIASES,
            max_anchors: MAX_ALIASES,
            max_depth: MAX_DEPTH,
            max_documents: 1,
            max_total_scalar_bytes: 4 * MAX_SPEC,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: MAX_NODES,
            max_replay_stack_depth: MAX_DEPTH,
            max_alias_expansions_per_anchor: MAX_ALIASES,
        },
        strict_booleans: true,
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| bad(format!("the spec is not YAML that can be used: {error}")))
}

fn object<'a>(value: &'a Value, what: &str) -> Result<&'a Map<String, Value>, Problem> {
    value.as_object().ok_or_else(|| {
        bad(format!("{what} is a mapping of fields, not {}", kind(value)))
            .hint(format!("its fields: {}", FIELDS.join(", ")))
    })
}

fn string<'a>(value: &'a Value, name: &str) -> Result<&'a str, Problem> {
    value.as_str().ok_or_else(|| bad(format!("`{name}` is text, not {}", kind(value))))
}

fn above_zero(value: &Value, name: &str, most: u64) -> Result<u64, Problem> {
    match value.as_u64() {
        Some(number) if (1..=most).contains(&number) => Ok(number),
        Some(number) if number > most => Err(bad(format!("`limits.{name}` is more than the most, {most}"))),
        _ => Err(bad(format!("`limits.{name}` is a whole number above 0, not {}", shown(value)))),
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "text",
        Value::Array(_) => "a list",
        Value::Object(_) => "a mapping",
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Number(number) => number.to_string(),
        other => kind(other).to_owned(),
    }
}

/// Refuses what is not among the fields. The nearest is looked for everywhere: a limit may stand outside of `limits`.
fn known(map: &Map<String, Value>, prefix: &str, fields: &[&str]) -> Result<(), Problem> {
    let Some(unknown) = map.keys().find(|name| !fields.contains(&name.as_str())) else { return Ok(()) };
    let limits = LIMITS.map(|name| format!("limits.{name}"));
    let all = FIELDS.into_iter().chain(limits.iter().map(String::as_str)).chain(["network.enabled"]);
    let short: String = unknown.chars().take(80).collect();
    let problem = bad(format!("a sandbox spec has no field `{prefix}{short}`"));
    Err(match nearest(&format!("{prefix}{short}"), all) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem.hint(format!("its fields: {}", FIELDS.join(", "))),
    })
}

fn choice(name: &str, typed: &str, words: &[&str]) -> Problem {
    let short: String = typed.chars().take(80).collect();
    let problem = bad(format!("`{name}: {short}` is not one of: {}", words.join(", ")));
    match nearest(&short, words.iter().copied()) {
        Some(near) => problem.hint(format!("did you mean `{near}`?")),
        None => problem,
    }
}

fn language(word: &str) -> Result<Language, Problem> {
    Language::parse(word).ok_or_else(|| choice("runtime", word, &Language::ALL.map(Language::as_str)))
}

#[cfg(test)]
mod tests;
