//! A session's variables, and how a change reaches interpreters that are up.
//!
//! What starts later takes them from the session. An interpreter that is up gets the changes with its next run, before its
//! code: each keeps what it has not been told yet, so that nothing is lost while it is busy, and the last word counts.

use std::collections::BTreeMap;

use carrel_proto::{
    guest::Language,
    id::SessionName,
    message::{MAX_ARGS, MAX_VARIABLE, MAX_VARIABLES},
    problem::{Code, Problem},
};

use crate::serve::Agent;

/// What an interpreter has yet to be told; `None` takes a variable away.
pub(crate) type Changes = BTreeMap<String, Option<String>>;

impl Agent {
    pub(crate) fn set_env(
        &mut self,
        name: &SessionName,
        set: BTreeMap<String, String>,
        unset: Vec<String>,
    ) -> Result<(), Problem> {
        for name in &unset {
            check_name(name)?;
        }
        if let Some(both) = unset.iter().find(|name| set.contains_key(*name)) {
            let word = format!("`{both}` is to be set and unset at once");
            return Err(Problem::new(Code::InvalidArgument, word));
        }
        self.session(name)?;
        let Some(session) = self.sessions.get_mut(name) else { return Ok(()) };
        let mut own = session.own.clone();
        own.retain(|name, _| !unset.contains(name));
        own.extend(set.clone());
        check(&own)?;
        session.own = own;
        session.env.retain(|name, _| !unset.contains(name));
        session.env.extend(set.clone());
        let changes: Changes = set
            .into_iter()
            .map(|(name, value)| (name, Some(value)))
            .chain(unset.into_iter().map(|name| (name, None)))
            .collect();
        for (id, interpreter) in &mut self.interpreters {
            if self.processes.get(id).is_some_and(|process| process.session == *name) {
                interpreter.untold.extend(changes.clone());
            }
        }
        Ok(())
    }
}

/// Whether variables can be handed to a process at all.
pub(crate) fn check(variables: &BTreeMap<String, String>) -> Result<(), Problem> {
    let mut bytes = 0;
    for (name, value) in variables {
        check_name(name)?;
        if value.contains('\0') {
            let word = format!("the value of `{name}` holds a NUL");
            return Err(Problem::new(Code::InvalidArgument, word));
        }
        let length = name.len() + value.len() + 1;
        if length > MAX_VARIABLE {
            let word = format!("`{name}` has {length} bytes; a variable has at most {MAX_VARIABLE}");
            return Err(Problem::new(Code::TooLarge, word).hint("put it into a file"));
        }
        bytes += length;
    }
    if bytes > MAX_VARIABLES || variables.len() > MAX_ARGS {
        let word = format!(
            "{bytes} bytes in {} variables; a session has at most {MAX_VARIABLES} in {MAX_ARGS}",
            variables.len()
        );
        return Err(Problem::new(Code::TooLarge, word).hint("put them into a file"));
    }
    Ok(())
}

fn check_name(name: &str) -> Result<(), Problem> {
    if name.is_empty() || name.contains(['=', '\0']) {
        let word = format!("`{}` is no name of a variable", name.escape_debug());
        return Err(
            Problem::new(Code::InvalidArgument, word).hint("a name is not empty and has no `=` or NUL")
        );
    }
    Ok(())
}

/// Changes as bash's driver reads them: `NAME=value` or `NAME`, each ended by a NUL. Names that no shell variable can have,
/// or that would change the driver's own shell, reach a bash only at its start.
pub(crate) fn for_bash(changes: &Changes) -> Vec<u8> {
    let mut out = Vec::new();
    for (name, value) in changes {
        let shell_name = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            && !name.starts_with(|first: char| first.is_ascii_digit());
        if !shell_name || name == "POSIXLY_CORRECT" || name.starts_with("__carrel") {
            continue;
        }
        out.extend_from_slice(name.as_bytes());
        if let Some(value) = value {
            out.push(b'=');
            out.extend_from_slice(value.as_bytes());
        }
        out.push(0);
    }
    out
}

/// Changes as the other drivers read them, part of a request.
pub(crate) fn for_request(language: Language, changes: &Changes) -> Option<serde_json::Value> {
    (language != Language::Bash && !changes.is_empty()).then(|| serde_json::json!(changes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bash_is_told_what_a_shell_can_have() {
        let change = |name: &str, value: Option<&str>| (name.to_owned(), value.map(str::to_owned));
        let changes = Changes::from([
            change("A", Some("1\n2")),
            change("B_2", None),
            change("2B", None),
            change("a.b", Some("")),
            change("__carrel", None),
            change("POSIXLY_CORRECT", Some("y")),
        ]);
        assert_eq!(for_bash(&changes), b"A=1\n2\0B_2\0");
    }

    #[test]
    fn what_no_process_could_have_is_refused() {
        let one = |name: &str, value: &str| check(&BTreeMap::from([(name.to_owned(), value.to_owned())]));
        assert!(one("A", "").is_ok() && one("a.b", "x=y").is_ok());
        for (name, value) in [("", ""), ("A=B", ""), ("A\0", ""), ("A", "\0")] {
            assert_eq!(one(name, value).unwrap_err().code, Code::InvalidArgument, "{name:?} {value:?}");
        }
        assert!(one("A", &"x".repeat(MAX_VARIABLE - 2)).is_ok());
        assert_eq!(one("A", &"x".repeat(MAX_VARIABLE - 1)).unwrap_err().code, Code::TooLarge);
        let many = (0..10).map(|n| (format!("V{n}"), "x".repeat(MAX_VARIABLE - 3))).collect();
        assert_eq!(check(&many).unwrap_err().code, Code::TooLarge);
    }
}
