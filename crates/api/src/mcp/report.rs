//! A call's result as a model reads it: stdout, stderr under a heading, the value, and one status line when there is
//! something worth saying. Complete in itself, because many clients show nothing but the text.

use carrel_engine::Record;
use carrel_proto::{
    id::ExecId,
    limits::ByteSize,
    message::{Display, DisplayKind},
    outcome::{Cause, FileChanges, FilesState, Outcome, SessionState},
    problem::{Code, Problem},
};
use rmcp::model::{CallToolResult, ContentBlock, MetaObject};
use serde_json::{Value, json};

use super::{
    files::Made,
    follow::Transcript,
    text::{Section, fit},
    uri,
};

/// Pictures of one result, and their size together: what clients take.
const MOST_IMAGES: usize = 8;
const MOST_IMAGE_BYTES: usize = 8 << 20;
/// Kept free in the text for the status line.
const STATUS: usize = 700;
/// Of it for the headings of the parts and what stands between them.
const HEADINGS: usize = 30;
/// Names of removed files in the status line.
const MOST_REMOVED: usize = 3;
const PICTURES: [&str; 4] = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/// What is reported on.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) record: &'a Record,
    /// As the caller named it.
    pub(super) session: &'a str,
    pub(super) exec: &'a ExecId,
    /// None: it still runs.
    pub(super) outcome: Option<&'a Outcome>,
    pub(super) transcript: &'a Transcript,
    pub(super) made: Made,
    pub(super) notes: Vec<String>,
}

impl Report<'_> {
    pub(super) fn result(self, chars: usize, structured: bool) -> CallToolResult {
        let shown = Shown::of(&self.transcript.displays);
        let value = Section::whole(shown.values.join("\n"));
        let (stdout, stderr) = (Section::new(&self.transcript.stdout), Section::new(&self.transcript.stderr));
        let sections = [&stdout, &stderr, &value];
        let room = chars.saturating_sub(STATUS.min(chars / 4));
        let mut fitted = fit(&sections, room);
        let truncated = fitted.iter().any(|(_, cut)| *cut)
            || self.outcome.is_some_and(|outcome| outcome.receipt.output_dropped > 0);
        let notes = self.status(truncated, shown.left_out);
        let mut text = String::new();
        let value_heading = if stderr.is_empty() { "" } else { "value:\n" };
        section(&mut text, "", &fitted[0].0);
        section(&mut text, "stderr:\n", &fitted[1].0);
        section(&mut text, value_heading, &fitted[2].0);
        if !notes.is_empty() {
            // In a room of its own, whatever it has to say.
            let (line, _) = Section::whole(notes.join(" · ")).fit(STATUS.min(chars / 4) - HEADINGS);
            section(&mut text, "", &format!("[{line}]"));
        } else if text.is_empty() && shown.images.is_empty() {
            text.push_str("(no output)");
        }
        let mut content = vec![ContentBlock::text(text)];
        content.extend(shown.images.iter().map(|(mime, data)| ContentBlock::image(*data, *mime)));
        content.extend(self.made.links(&self.record.id));
        let failed = self.outcome.is_some_and(|it| it.exit_code != 0 || it.problem.is_some());
        let mut result =
            if failed { CallToolResult::error(content) } else { CallToolResult::success(content) };
        result.meta = self.outcome.map(receipt);
        if structured {
            let mut parts = fitted.drain(..).map(|(text, _)| text);
            let mut next = || parts.next().unwrap_or_default();
            result.structured_content = Some(self.structured([next(), next(), next()], truncated, &notes));
        }
        result
    }

    /// What is worth saying beyond the output.
    pub(super) fn status(&self, truncated: bool, images_left_out: usize) -> Vec<String> {
        let mut words = match self.outcome {
            Some(outcome) => ended(outcome),
            None => vec!["still running".to_owned()],
        };
        if truncated {
            words.push(format!("output cut; all of it: {}", uri::exec(&self.record.id, self.exec)));
        }
        if images_left_out > 0 {
            words.push(format!("{images_left_out} images left out"));
        }
        if self.made.more > 0 {
            words.push(format!("{} more files changed", self.made.more));
        }
        words.extend(self.notes.iter().cloned());
        words
    }

    fn structured(&self, parts: [String; 3], truncated: bool, notes: &[String]) -> Value {
        let [stdout, stderr, value] = parts;
        let state = self.outcome.map_or(SessionState::None, |outcome| outcome.session_state);
        let mut object = json!({
            "stdout": stdout,
            "stderr": stderr,
            "exit_code": self.outcome.map_or(0, |outcome| outcome.exit_code),
            "session": self.session,
            "sandbox_id": self.record.id,
            "exec_id": self.exec,
            "session_state": state,
            "truncated": truncated,
            "files": self.made.uris(&self.record.id),
            "notes": notes,
        });
        if !value.is_empty() {
            object["value"] = value.into();
        }
        if let Some(outcome) = self.outcome {
            object["duration_ms"] = (outcome.receipt.duration_us / 1000).into();
            object["receipt"] = json!(outcome.receipt);
            if let Some(problem) = &outcome.problem {
                object["error"] =
                    json!({"code": problem.code, "message": problem.message, "hint": problem.hint});
            }
        }
        object
    }
}

/// Adds a part on lines of its own.
fn section(text: &mut String, heading: &str, body: &str) {
    if body.is_empty() {
        return;
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(heading);
    text.push_str(body);
}

/// How a call ended, as far as that is worth saying.
fn ended(outcome: &Outcome) -> Vec<String> {
    let mut words = Vec::new();
    match &outcome.problem {
        Some(problem) => words.push(taught(problem, outcome.cause)),
        None if outcome.exit_code != 0 => words.push(format!("exit {}", outcome.exit_code)),
        None => {}
    }
    let failed = !words.is_empty();
    match outcome.session_state {
        SessionState::Lost => words.push("state lost: the interpreter starts anew, files stay".to_owned()),
        SessionState::RolledBack if outcome.taken_back.is_none_or(|calls| calls == 1) => {
            words.push(went_back(outcome));
        }
        SessionState::Preserved if failed => words.push("state kept".to_owned()),
        // The hint has said how far back.
        SessionState::RolledBack | SessionState::Preserved | SessionState::None => {}
    }
    if outcome.receipt.processes > 0 {
        words.push(format!("{} processes still running", outcome.receipt.processes));
    }
    words.extend(removed(&outcome.receipt.files));
    words
}

/// What a rollback has brought; after a timeout nothing else says what became of files.
fn went_back(outcome: &Outcome) -> String {
    match (outcome.files_state, &outcome.files_reason) {
        (Some(FilesState::Restored), _) => "state and files are as they were before this call".to_owned(),
        (_, Some(reason)) if outcome.cause == Cause::Timeout => {
            format!("state is as it was before this call; files are as it left them: {reason}")
        }
        _ => "state is as it was before this call".to_owned(),
    }
}

/// For programs, where no model has to read it.
pub(super) fn receipt(outcome: &Outcome) -> MetaObject {
    let mut meta = MetaObject::default();
    meta.0.insert("carrel/receipt".to_owned(), json!(outcome.receipt));
    meta
}

/// Files that are gone: those that came or changed are linked. What other calls may have removed is not this one's to say.
fn removed(files: &FileChanges) -> Option<String> {
    let shown = files.removed.iter().take(MOST_REMOVED).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = files.removed_count.saturating_sub(MOST_REMOVED as u64);
    match (files.removed_count, more) {
        (0, _) => None,
        _ if files.shared => None,
        (_, 0) => Some(format!("removed {shown}")),
        (_, more) => Some(format!("removed {shown} and {more} more")),
    }
}

/// A problem in words that say what to do next.
fn taught(problem: &Problem, cause: Cause) -> String {
    let hint = match cause {
        Cause::Timeout => {
            "pass a larger timeout (seconds), or start long work in the background with bash: `cmd > log 2>&1 &`"
        }
        _ => problem.hint.as_str(),
    };
    let message = &problem.message;
    if hint.is_empty() {
        format!("{}: {message}", problem.code.as_str())
    } else {
        format!("{}: {message}; {hint}", problem.code.as_str())
    }
}

/// A failure before any code ran.
pub(super) fn failure(problem: &Problem) -> CallToolResult {
    let mut text = format!("{}: {}", problem.code.as_str(), problem.message);
    if !problem.hint.is_empty() {
        text.push_str(&format!("\nhint: {}", problem.hint));
    }
    match problem.session_state {
        SessionState::Lost => text.push_str("\nstate lost: the interpreter starts anew, files stay"),
        SessionState::Preserved if problem.code != Code::InvalidArgument => text.push_str("\nstate kept"),
        _ => {}
    }
    CallToolResult::error(vec![ContentBlock::text(text)])
}

/// Values as text, pictures as they are.
struct Shown<'a> {
    values: Vec<String>,
    images: Vec<(&'a str, &'a str)>,
    left_out: usize,
}

impl<'a> Shown<'a> {
    fn of(displays: &'a [Display]) -> Self {
        let mut shown = Self { values: Vec::new(), images: Vec::new(), left_out: 0 };
        let mut bytes = 0;
        for display in displays {
            let text_of = |mime: &str| display.mime.get(mime).and_then(Value::as_str);
            let picture = PICTURES.iter().find_map(|mime| Some((*mime, text_of(mime)?)));
            match picture {
                Some((_, data))
                    if shown.images.len() == MOST_IMAGES || bytes + data.len() > MOST_IMAGE_BYTES =>
                {
                    shown.left_out += 1;
                }
                Some((mime, data)) => {
                    bytes += data.len();
                    shown.images.push((mime, data));
                    // `<Figure size 640x480 with 1 Axes>` says nothing that the picture does not.
                    if display.kind == DisplayKind::Display {
                        continue;
                    }
                }
                None => {}
            }
            let readable = ["text/plain", "text/markdown", "text/latex", "text/html"];
            match readable.iter().find_map(|mime| text_of(mime)) {
                Some(text) => shown.values.push(text.to_owned()),
                None if picture.is_none() => {
                    shown.values.extend(display.mime.iter().map(|(mime, data)| {
                        let size = ByteSize(data.as_str().map_or(0, str::len) as u64);
                        format!("[{mime}, {size}]")
                    }));
                }
                None => {}
            }
        }
        shown
    }
}
