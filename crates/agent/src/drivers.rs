//! The drivers, embedded, and how each language is started and asked. See docs/drivers.md.

use std::{collections::BTreeMap, ffi::OsString, fs, io, path::Path};

use carrel_proto::guest::{Interpreter, Language};
use serde_json::json;

use crate::variables::{self, Changes};

const PYTHON: &str = include!("../drivers/python.rs");
const NODE: &str = include_str!("../drivers/node.js");
const BASH: &str = include_str!("../drivers/bash.sh");

fn file(language: Language) -> &'static str {
    match language {
        Language::Python => "python.py",
        Language::Node => "node.js",
        // Part of bash's error messages: without an ending it reads as the shell's own name.
        Language::Bash => "bash",
    }
}

/// Writes a driver where user code can read it and nobody but the agent can write, unless it is there.
fn install(language: Language, path: &str) -> io::Result<()> {
    if Path::new(path).exists() {
        return Ok(());
    }
    let text = match language {
        Language::Python => PYTHON,
        Language::Node => NODE,
        Language::Bash => BASH,
    };
    fs::write(path, text)
}

/// Command line and additional variables of one interpreter.
pub(crate) fn command(
    language: Language,
    interpreter: &Interpreter,
    run: &str,
    env: &mut BTreeMap<String, String>,
) -> io::Result<Vec<OsString>> {
    let mut driver = format!("{run}/{}", file(language));
    let compiled = format!("{run}/python.pyc");
    if language == Language::Python && Path::new(&compiled).exists() {
        driver = compiled;
    }
    install(language, &driver)?;
    let program = interpreter.program.clone();
    let words = match language {
        Language::Python => {
            env.insert("CARREL_SITE".into(), interpreter.site.join(":"));
            vec![program, "-I".into(), "-S".into(), "-X".into(), "utf8".into(), driver]
        }
        Language::Node => vec![program, driver],
        Language::Bash => vec![program, "--noprofile".into(), "--norc".into(), "/proc/self/fd/3".into()],
    };
    Ok(words.into_iter().map(OsString::from).collect())
}

/// What is sent once, before the first call.
pub(crate) fn greeting(language: Language, run: &str) -> Vec<u8> {
    match language {
        Language::Bash => format!(". {run}/bash\n").into_bytes(),
        _ => Vec::new(),
    }
}

/// What an interpreter has to know before its next call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct News {
    pub(crate) after_interrupt: bool,
    pub(crate) reseed: bool,
    /// Not a call of anybody's: nothing of it stays.
    pub(crate) warm: bool,
}

/// The order to keep the state that a call has left; see docs/drivers.md.
pub(crate) const KEEP: &[u8] = b"{\"keep\":true}\n";
/// The same, whether or not states are kept.
pub(crate) const COPY: &[u8] = b"{\"copy\":true}\n";

/// How many calls a driver keeps so that they can be taken back, and the sandbox's memory, in which copies of it must have room.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Undo {
    pub(crate) calls: u32,
    pub(crate) memory: u64,
}

/// One call. For bash the code goes to a file of this interpreter's own.
#[expect(clippy::too_many_arguments, reason = "each is a field of the request")]
pub(crate) fn request(
    language: Language,
    run: &str,
    interpreter: u32,
    id: u64,
    code: &str,
    news: News,
    changes: &Changes,
    undo: Undo,
) -> io::Result<Vec<u8>> {
    if language != Language::Bash {
        let mut request = json!({ "id": id, "code": code });
        if news.after_interrupt && language == Language::Node {
            request["after_interrupt"] = true.into();
        }
        if undo.calls > 0 && language == Language::Python {
            request["undo"] = undo.calls.into();
            request["memory"] = undo.memory.into();
        }
        if news.reseed {
            request["reseed"] = true.into();
        }
        if news.warm && language == Language::Python {
            request["warm"] = true.into();
        }
        if let Some(changes) = variables::for_request(language, changes) {
            request["env"] = changes;
        }
        let mut line = request.to_string();
        line.push('\n');
        return Ok(line.into_bytes());
    }
    let path = format!("{run}/code-{interpreter}");
    fs::write(&path, code)?;
    let mut before = String::new();
    if !changes.is_empty() {
        let path = format!("{run}/env-{interpreter}");
        fs::write(&path, variables::for_bash(changes))?;
        // A line of its own, before the call begins: an interrupt does nothing there.
        before = format!("__carrel_load;__carrel_env {path}\n");
    }
    if news.reseed {
        let mut seed = [0; 4];
        rustix::rand::getrandom(&mut seed, rustix::rand::GetRandomFlags::empty())?;
        before.push_str(&format!("__carrel_load;{{ RANDOM={};}} 2>/dev/null\n", u32::from_le_bytes(seed)));
    }
    // The empty line wakes a shell that is about to be renewed.
    Ok(format!(
        "\n{before}__carrel_begin {id} {path} \"$@\";\\. \"$__carrel\";{{ __carrel_done;}} 2>&-;__carrel_end\n"
    )
    .into_bytes())
}

/// A question for the brief: what the interpreter holds, and which of its environment's variables are not as `given`.
pub(crate) fn question(
    language: Language,
    run: &str,
    interpreter: u32,
    id: u64,
    given: &BTreeMap<String, String>,
) -> io::Result<Vec<u8>> {
    if language != Language::Bash {
        return Ok(format!("{}\n", json!({ "id": id, "brief": given })).into_bytes());
    }
    let path = format!("{run}/brief-{interpreter}");
    let all = given.iter().map(|(name, value)| (name.clone(), Some(value.clone()))).collect();
    fs::write(&path, variables::for_bash(&all))?;
    Ok(format!("__carrel_load;__carrel_brief {id} {path}\n").into_bytes())
}
