//! Where a session stands, in a few words: for a model that comes back to it, and for people.
//!
//! A brief is gathered by the agent and by drivers that share a process with user code, so nothing in it is trusted:
//! [`Brief::bounded`] clips every string and list before anyone sees them. Its JSON form has at most [`MAX_JSON`] bytes, its
//! text at most [`MAX_TEXT`]; what does not fit is counted exactly.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use crate::{
    guest::Language,
    id::{ExecId, SessionName},
    limits::ByteSize,
    message::PortInfo,
    outcome::{FileChanges, ProcessInfo},
};

/// Bytes of the text.
pub const MAX_TEXT: usize = 1024;
/// Bytes of the JSON form, the text not counted.
pub const MAX_JSON: usize = 4096;
/// Variables of one interpreter that a driver names.
pub const MAX_VARIABLES: usize = 40;
/// Names of one list, other than variables.
const MAX_LIST: usize = 20;
/// Failed calls that a brief names.
pub const MAX_ERRORS: usize = 3;
/// Characters of a name, and of a line of words.
pub const MAX_WORD: usize = 60;
pub const MAX_LINE: usize = 120;

/// Where a session stands. Nothing in it was asked of user code: no `repr`, no getter, no `len` of a class of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Brief {
    pub session: SessionName,
    /// Where its commands start.
    pub cwd: String,
    /// Since it was opened.
    pub age_ms: u64,
    pub interpreters: Vec<InterpreterBrief>,
    pub environment: Environment,
    /// Commands and background processes of the session.
    pub jobs: Vec<Job>,
    pub jobs_total: u64,
    pub ports: Vec<PortInfo>,
    pub ports_total: u64,
    /// Of the whole sandbox, since it was started, whoever changed them.
    pub files: FileChanges,
    /// The last calls of the session that failed, newest first.
    pub errors: Vec<Failure>,
    pub left: Left,
}

/// What an interpreter holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct InterpreterBrief {
    pub language: Language,
    pub state: InterpreterState,
    /// The call that it is at.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub exec: Option<ExecId>,
    /// How long it has been at it.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub busy_ms: Option<u64>,
    /// Calls that wait for it.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub waiting: u32,
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub cwd: Option<String>,
    /// The most telling first: data before functions and modules, newest first.
    pub variables: Vec<Variable>,
    pub variables_total: u64,
    /// There are more than were counted: counting them would take too long.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub partial: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum InterpreterState {
    /// Its variables are known.
    Idle,
    /// A call runs: what is known is what can be seen from outside.
    Busy,
    Starting,
    /// At no call, and it does not answer.
    Silent,
}

impl InterpreterState {
    pub fn as_str(self) -> &'static str {
        match self {
            InterpreterState::Idle => "idle",
            InterpreterState::Busy => "busy",
            InterpreterState::Starting => "starting",
            InterpreterState::Silent => "silent",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Variable {
    pub name: String,
    /// The class, as the language calls it.
    #[serde(rename = "type")]
    pub kind: String,
    /// A length (`3`) or the sizes of the dimensions (`1000x5`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub shape: Option<String>,
    /// Bytes, without what it refers to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub size: Option<u64>,
    /// Of plain numbers and truth values only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "schema", schema(nullable = false))]
    pub value: Option<String>,
}

/// Names of environment variables that differ from what a session starts with, in any interpreter. No values: they may be
/// secrets.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Environment {
    /// New or with another value.
    pub set: Vec<String>,
    pub unset: Vec<String>,
    pub set_total: u64,
    pub unset_total: u64,
}

/// Something that runs by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Job {
    /// A command's, by which it can be waited for.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub exec: Option<ExecId>,
    /// A background process's.
    #[serde(default)]
    #[cfg_attr(feature = "schema", schema(required))]
    pub pid: Option<i32>,
    pub command: String,
}

impl From<ProcessInfo> for Job {
    fn from(process: ProcessInfo) -> Self {
        Self { exec: None, pid: Some(process.pid), command: process.command }
    }
}

/// A call that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Failure {
    pub exec: ExecId,
    /// The exception's name, a problem's code, or `exit`.
    pub name: String,
    /// The first line.
    pub message: String,
}

/// What may still be used, of all that is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Left {
    pub memory: u64,
    pub memory_limit: u64,
    pub disk: u64,
    pub disk_limit: u64,
    pub pids: u64,
    pub pids_limit: u64,
    pub lifetime_ms: u64,
    /// Kept of one call.
    pub output: u64,
}

/// Without control characters, and at most so many characters: one that was cut ends with `…`.
pub fn clip(text: &str, most: usize) -> String {
    let cut = text.chars().nth(most).is_some();
    let kept = if cut { most.saturating_sub(1) } else { most };
    // A control character would be in the way of a line, or of a terminal.
    let mut out: String =
        text.chars().take(kept).map(|char| if char.is_control() { '\u{fffd}' } else { char }).collect();
    if cut {
        out.push('…');
    }
    out
}

fn clip_in_place(text: &mut String, most: usize) {
    if text.len() > most || text.chars().any(char::is_control) {
        *text = clip(text, most);
    }
}

impl Brief {
    /// With every string clipped and every list cut, so that its JSON form has at most [`MAX_JSON`] bytes. Totals stay.
    #[must_use]
    pub fn bounded(mut self) -> Self {
        clip_in_place(&mut self.cwd, MAX_LINE);
        self.interpreters.truncate(Language::ALL.len());
        for interpreter in &mut self.interpreters {
            interpreter.variables.truncate(MAX_VARIABLES);
            if let Some(cwd) = &mut interpreter.cwd {
                clip_in_place(cwd, MAX_LINE);
            }
            for variable in &mut interpreter.variables {
                clip_in_place(&mut variable.name, MAX_WORD);
                clip_in_place(&mut variable.kind, MAX_WORD);
                for text in [&mut variable.shape, &mut variable.value].into_iter().flatten() {
                    clip_in_place(text, MAX_WORD);
                }
            }
            interpreter.variables_total = interpreter.variables_total.max(count(&interpreter.variables));
        }
        for names in [&mut self.environment.set, &mut self.environment.unset] {
            names.truncate(MAX_LIST);
            names.iter_mut().for_each(|name| clip_in_place(name, MAX_WORD));
        }
        self.jobs.truncate(MAX_LIST);
        self.jobs.iter_mut().for_each(|job| clip_in_place(&mut job.command, MAX_WORD));
        self.ports.truncate(MAX_LIST);
        self.ports.iter_mut().for_each(|port| clip_in_place(&mut port.address, MAX_WORD));
        for names in [&mut self.files.added, &mut self.files.changed, &mut self.files.removed] {
            names.truncate(MAX_LIST);
            names.iter_mut().for_each(|name| clip_in_place(name, MAX_LINE));
        }
        if let Some(reason) = &mut self.files.reason {
            clip_in_place(reason, MAX_LINE);
        }
        self.errors.truncate(MAX_ERRORS);
        for error in &mut self.errors {
            clip_in_place(&mut error.name, MAX_WORD);
            clip_in_place(&mut error.message, MAX_LINE);
        }
        while serde_json::to_string(&self).map_or(0, |text| text.len()) > MAX_JSON && self.drop_one() {}
        self
    }

    /// Takes the last of the longest list away. `false`: there is nothing left to take.
    fn drop_one(&mut self) -> bool {
        let variables =
            self.interpreters.iter_mut().map(|it| &mut it.variables).max_by_key(|list| list.len());
        let names = [
            &mut self.environment.set,
            &mut self.environment.unset,
            &mut self.files.added,
            &mut self.files.changed,
            &mut self.files.removed,
        ];
        let longest = names.into_iter().max_by_key(|list| list.len());
        let (jobs, ports) = (self.jobs.len(), self.ports.len());
        let named = longest.as_ref().map_or(0, |list| list.len());
        let known = variables.as_ref().map_or(0, |list| list.len());
        // A variable says most: it goes when nothing else is nearly as long.
        let most = (known / 2).max(named).max(jobs).max(ports);
        if most == 0 {
            return variables.and_then(Vec::pop).is_some();
        }
        if named == most {
            longest.and_then(Vec::pop).is_some()
        } else if jobs == most {
            self.jobs.pop().is_some()
        } else if ports == most {
            self.ports.pop().is_some()
        } else {
            variables.and_then(Vec::pop).is_some()
        }
    }

    /// The same as text of at most [`MAX_TEXT`] bytes. What was left out is counted: `+3 more`.
    pub fn text(&self) -> String {
        let mut lines = self.lines();
        loop {
            let text: String = lines.iter().filter_map(Line::text).collect::<Vec<_>>().join("\n");
            if text.len() <= MAX_TEXT {
                return text;
            }
            // From the line that has most to give, its least important word.
            let longest =
                lines.iter_mut().filter(|line| !line.words.is_empty()).max_by_key(|line| line.len());
            match longest {
                Some(line) => drop(line.words.pop()),
                None => return text.chars().take(MAX_TEXT / 4).collect(),
            }
        }
    }

    fn lines(&self) -> Vec<Line> {
        let mut lines = vec![Line::new(format!("session {}, {} old", self.session, time(self.age_ms)))];
        if self.interpreters.is_empty() {
            lines.push(Line::new("no interpreter is up".to_owned()));
        }
        for interpreter in &self.interpreters {
            lines.push(interpreter.line(&self.cwd));
        }
        let environment = &self.environment;
        let set = environment.set.iter().cloned();
        let unset = environment.unset.iter().map(|name| format!("-{name}"));
        lines.push(Line::list(
            "environment:",
            set.chain(unset).collect(),
            environment.set_total.saturating_add(environment.unset_total),
        ));
        let jobs = self.jobs.iter().map(|job| match (&job.exec, job.pid) {
            (Some(exec), _) => format!("{exec} `{}`", job.command),
            (None, Some(pid)) => format!("pid {pid} `{}`", job.command),
            (None, None) => format!("`{}`", job.command),
        });
        lines.push(Line::list("jobs:", jobs.collect(), self.jobs_total));
        let ports = self.ports.iter().map(|port| port.port.to_string());
        lines.push(Line::list("ports:", ports.collect(), self.ports_total));
        for (heading, names, total) in [
            ("files added:", &self.files.added, self.files.added_count),
            ("files changed:", &self.files.changed, self.files.changed_count),
            ("files removed:", &self.files.removed, self.files.removed_count),
        ] {
            lines.push(Line::list(heading, names.clone(), total));
        }
        if let Some(reason) = &self.files.reason {
            lines.push(Line::new(format!("files: {reason}")));
        }
        let errors = self.errors.iter().map(|it| format!("{} {}: {}", it.exec, it.name, it.message));
        lines.push(Line { separator: " | ", ..Line::list("failed:", errors.collect(), count(&self.errors)) });
        lines.push(Line::new(self.left.text()));
        lines
    }
}

impl InterpreterBrief {
    fn line(&self, session_cwd: &str) -> Line {
        let mut head = format!("{} {}", self.language.as_str(), self.state.as_str());
        if let Some(busy) = self.busy_ms {
            let _ = write!(head, " for {}", time(busy));
        }
        if let Some(exec) = &self.exec {
            let _ = write!(head, " ({exec})");
        }
        if self.waiting > 0 {
            let _ = write!(head, ", {} waiting", self.waiting);
        }
        if let Some(cwd) = self.cwd.as_deref().filter(|cwd| *cwd != session_cwd) {
            let _ = write!(head, " in {cwd}");
        }
        let words: Vec<String> = self.variables.iter().map(Variable::text).collect();
        if self.partial {
            head.push_str(", of its many variables");
        }
        if !words.is_empty() {
            head.push(':');
        }
        Line { heading: head, words, total: self.variables_total, separator: ", ", always: true }
    }
}

impl Variable {
    fn text(&self) -> String {
        let mut text = format!("{} {}", self.name, self.kind);
        if let Some(shape) = &self.shape {
            let _ = write!(text, "[{shape}]");
        }
        if let Some(value) = &self.value {
            let _ = write!(text, "={value}");
        }
        // What fits into a line says enough by its kind.
        if let Some(size) = self.size.filter(|size| *size >= 4096) {
            let _ = write!(text, " {}", ByteSize(size));
        }
        text
    }
}

impl Left {
    fn text(&self) -> String {
        format!(
            "left: memory {} of {}, disk {} of {}, {} of {} processes, {}, output {} a call",
            ByteSize(self.memory),
            ByteSize(self.memory_limit),
            ByteSize(self.disk),
            ByteSize(self.disk_limit),
            self.pids,
            self.pids_limit,
            time(self.lifetime_ms),
            ByteSize(self.output),
        )
    }
}

/// A line of the text: words that can be left out one by one.
#[derive(Debug)]
struct Line {
    heading: String,
    words: Vec<String>,
    total: u64,
    separator: &'static str,
    /// Said also without words.
    always: bool,
}

impl Line {
    fn new(heading: String) -> Self {
        Self { heading, words: Vec::new(), total: 0, separator: ", ", always: true }
    }

    fn list(heading: &str, words: Vec<String>, total: u64) -> Self {
        Self { heading: heading.to_owned(), words, total, separator: ", ", always: false }
    }

    fn len(&self) -> usize {
        self.heading.len() + self.words.iter().map(|word| word.len() + 2).sum::<usize>()
    }

    fn text(&self) -> Option<String> {
        let more = self.total.saturating_sub(count(&self.words));
        if !self.always && self.words.is_empty() && more == 0 {
            return None;
        }
        let mut words = self.words.clone();
        if more > 0 {
            words.push(format!("+{more} more"));
        }
        if words.is_empty() {
            return Some(self.heading.clone());
        }
        Some(format!("{} {}", self.heading, words.join(self.separator)))
    }
}

fn count<T>(list: &[T]) -> u64 {
    u64::try_from(list.len()).unwrap_or(u64::MAX)
}

/// As people say it, in one unit.
fn time(millis: u64) -> String {
    match millis / 1000 {
        0 => format!("{millis} ms"),
        seconds @ 1..60 => format!("{seconds} s"),
        seconds @ 60..3600 => format!("{} min", seconds / 60),
        seconds @ 3600..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} d", seconds / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn brief() -> Brief {
        Brief {
            session: SessionName::main(),
            cwd: "/workspace".into(),
            age_ms: 61_000,
            interpreters: Vec::new(),
            environment: Environment::default(),
            jobs: Vec::new(),
            jobs_total: 0,
            ports: Vec::new(),
            ports_total: 0,
            files: FileChanges::default(),
            errors: Vec::new(),
            left: Left::default(),
        }
    }

    fn variable(name: &str) -> Variable {
        Variable { name: name.into(), kind: "list".into(), shape: Some("3".into()), ..Variable::default() }
    }

    fn python(variables: Vec<Variable>, total: u64) -> InterpreterBrief {
        InterpreterBrief {
            language: Language::Python,
            state: InterpreterState::Idle,
            exec: None,
            busy_ms: None,
            waiting: 0,
            cwd: Some("/workspace".into()),
            variables,
            variables_total: total,
            partial: false,
        }
    }

    #[test]
    fn a_new_session_is_told_in_three_lines() {
        let text = brief().text();
        assert_eq!(text.lines().count(), 3, "{text}");
        assert!(text.starts_with("session default, 1 min old\nno interpreter is up\nleft: "), "{text}");
    }

    #[test]
    fn what_is_left_out_is_counted_exactly() {
        let mut told = brief();
        let variables: Vec<Variable> =
            (0..40).map(|n| variable(&format!("variable_number_{n:04}"))).collect();
        told.interpreters.push(python(variables, 1234));
        told.files.added = (0..20).map(|n| format!("some/deep/directory/file-{n}.txt")).collect();
        told.files.added_count = 777;
        let text = told.bounded().text();
        assert!(text.len() <= MAX_TEXT, "{}", text.len());
        for (heading, total) in [("python idle:", 1234), ("files added:", 777)] {
            let line =
                text.lines().find(|line| line.starts_with(heading)).unwrap_or_else(|| panic!("{text}"));
            let words: Vec<&str> = line[heading.len()..].split(", ").collect();
            let more: usize = words
                .last()
                .and_then(|word| word.strip_prefix('+')?.strip_suffix(" more")?.parse().ok())
                .unwrap();
            assert!(words.len() > 2, "{line}");
            assert_eq!(words.len() - 1 + more, total, "{line}");
        }
    }

    #[test]
    fn nothing_an_agent_says_passes_the_bounds() {
        let long = "ä\n\u{1b}[31m".repeat(200);
        let mut told = brief();
        told.cwd = long.clone();
        let one = Variable {
            name: long.clone(),
            kind: long.clone(),
            shape: Some(long.clone()),
            size: Some(u64::MAX),
            value: Some(long.clone()),
        };
        told.interpreters = vec![python(vec![one; 60], 0); 5];
        told.environment.set = vec![long.clone(); 50];
        told.environment.unset = vec![long.clone(); 50];
        told.jobs = vec![Job { exec: None, pid: None, command: long.clone() }; 50];
        told.ports = vec![PortInfo { port: 1, address: long.clone() }; 50];
        told.files = FileChanges::unknown(&long);
        told.files.added = vec![long.clone(); 50];
        told.errors =
            vec![Failure { exec: ExecId::numbered(1), name: long.clone(), message: long.clone() }; 50];
        let bounded = told.bounded();
        let json = serde_json::to_string(&bounded).unwrap();
        assert!(json.len() <= MAX_JSON, "{}", json.len());
        let text = bounded.text();
        assert!(text.len() <= MAX_TEXT, "{}", text.len());
        assert!(!text.contains('\u{1b}') && text.lines().count() < 20, "{text}");
    }

    #[test]
    fn words_are_cut_with_a_sign() {
        assert_eq!(clip("abc", 3), "abc");
        assert_eq!(clip("abcd", 3), "ab…");
        assert_eq!(clip("a\nb", 9), "a\u{fffd}b");
        assert_eq!(clip("", 3), "");
    }
}
