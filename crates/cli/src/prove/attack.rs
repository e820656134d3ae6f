//! Starting the probe program in a box by every way user code can start, and reading what it says.

use std::{collections::BTreeMap, time::Duration};

use carrel_engine::{
    Engine, Record,
    call::{Call, Output},
};
use carrel_proto::{
    frame::Stream,
    guest::Language,
    id::SessionName,
    message::{Exec, PtySize, Run},
    outcome::Outcome,
    problem::Problem,
};
use serde::Deserialize;

use super::report::{Finding, Verdict};

/// Where the probe program lies in a box.
pub(super) const PROGRAM: &str = "/workspace/carrel-probe";
/// Output of one attack that is kept; the longest group prints some 100 kB.
const KEPT: usize = 8 << 20;

/// How a process of user code comes to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Exec,
    Terminal,
    Interpreter(Language),
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Exec => "exec",
            Way::Terminal => "terminal",
            Way::Interpreter(language) => language.as_str(),
        }
    }
}

/// What an attack printed and how it ended.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) stdout: Vec<u8>,
    pub(super) outcome: Outcome,
}

/// Runs the probe program with `args` in the default session.
pub(super) async fn attack(
    engine: &Engine,
    record: &Record,
    way: Way,
    args: &[String],
    time: Duration,
) -> Result<Said, Problem> {
    let mut argv = vec![PROGRAM.to_owned()];
    argv.extend_from_slice(args);
    let call = match way {
        Way::Exec => engine.exec(record, command(argv, time)).await?,
        Way::Terminal => {
            let pty = Some(PtySize { rows: 24, cols: 80 });
            engine.exec(record, Exec { pty, ..command(argv, time) }).await?
        }
        Way::Interpreter(language) => {
            let run = Run {
                session: SessionName::main(),
                language,
                code: code(language, &argv),
                timeout_ms: millis(time),
                cancel_on_disconnect: true,
            };
            engine.run(record, run).await?
        }
    };
    listen(call).await
}

pub(super) fn command(argv: Vec<String>, time: Duration) -> Exec {
    Exec {
        session: SessionName::main(),
        argv,
        cwd: None,
        env: BTreeMap::new(),
        stdin: false,
        pty: None,
        timeout_ms: Some(millis(time)),
        detach: false,
        cancel_on_disconnect: true,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Code that starts `argv` and hands down all it has. A JSON array of strings means the same in both languages.
fn code(language: Language, argv: &[String]) -> String {
    let list = serde_json::to_string(argv).unwrap_or_default();
    match language {
        Language::Python => format!("import subprocess\nsubprocess.run({list}, close_fds=False)\nNone\n"),
        Language::Node => {
            format!(
                "{{ const [program, ...rest] = {list}; require('child_process').spawnSync(program, rest, {{ stdio: 'inherit' }}); }} undefined\n"
            )
        }
        Language::Bash => {
            let quoted: Vec<String> =
                argv.iter().map(|word| format!("'{}'", word.replace('\'', r"'\''"))).collect();
            quoted.join(" ")
        }
    }
}

/// Everything a call prints on standard output (or its terminal), up to [`KEPT`].
pub(super) async fn listen(mut call: Call) -> Result<Said, Problem> {
    let mut stdout = Vec::new();
    loop {
        match call.next().await? {
            Output::Bytes { stream: Stream::Stdout | Stream::Pty, bytes, .. } => {
                let room = KEPT.saturating_sub(stdout.len());
                stdout.extend_from_slice(&bytes[..bytes.len().min(room)]);
            }
            Output::Finished(outcome) => return Ok(Said { stdout, outcome }),
            _ => {}
        }
    }
}

/// One line of the probe program.
#[derive(Debug, Deserialize)]
struct Line {
    name: String,
    verdict: Word,
    detail: String,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Held,
    Breach,
    Skipped,
}

/// The result of each probe by name. What is not a result (a driver's words, a flood) is passed over.
pub(super) fn results(stdout: &[u8]) -> BTreeMap<String, (Verdict, String)> {
    let lines = stdout.split(|byte| *byte == b'\n').filter(|line| line.starts_with(b"{"));
    let parsed = lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok());
    parsed
        .map(|line| {
            let verdict = match line.verdict {
                Word::Held => Verdict::Held,
                Word::Breach => Verdict::Breach,
                Word::Skipped => Verdict::Skipped,
            };
            (line.name, (verdict, line.detail))
        })
        .collect()
}

/// How a call ended, for a report.
pub(super) fn ended(outcome: &Outcome) -> String {
    let problem =
        outcome.problem.as_ref().map(|problem| format!(": {}", problem.message)).unwrap_or_default();
    format!("{:?}, exit {}{problem}", outcome.cause, outcome.exit_code).to_lowercase()
}

pub(super) fn finding(
    probe: &super::Probe,
    way: Way,
    verdict: Verdict,
    detail: impl Into<String>,
) -> Finding {
    Finding {
        name: probe.name.clone(),
        group: probe.group.clone(),
        verdict,
        detail: detail.into(),
        via: way.name().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_result_lines_count() {
        let text = b"hello\r\n{\"name\":\"a\",\"verdict\":\"held\",\"detail\":\"x\"}\r\n{\"name\":1}\n{\"name\":\"b\",\"verdict\":\"breach\",\"detail\":\"\"}";
        let all = results(text);
        assert_eq!(all["a"], (Verdict::Held, "x".to_owned()));
        assert_eq!(all["b"].0, Verdict::Breach);
        assert_eq!(all.len(), 2);
    }

    #[test]
    fn words_survive_the_shell() {
        assert_eq!(code(Language::Bash, &["a b".into(), "it's".into()]), r"'a b' 'it'\''s'");
    }
}
