//! All printing. stdout is data, stderr is for people; colours and alignment only where a terminal shows them.

use std::{
    fmt::Display,
    io::{self, IsTerminal, Write},
};

use carrel_proto::{
    outcome::SessionState,
    problem::{Code, Problem},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::BorrowedFd,
    io::Errno,
};
use serde::Serialize;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    pub(crate) json: bool,
    pub(crate) verbose: bool,
    /// stdout is a terminal.
    pub(crate) aligned: bool,
    /// stderr is a terminal.
    pub(crate) lively: bool,
    colour: bool,
}

impl Output {
    pub(crate) fn new(json: bool, verbose: bool) -> Self {
        let lively = io::stderr().is_terminal();
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Self { json, verbose, aligned: io::stdout().is_terminal(), lively, colour: lively && wanted }
    }

    /// A line of data.
    pub(crate) fn line(&self, text: impl Display) -> Result<(), Problem> {
        self.data(format!("{text}\n").as_bytes())
    }

    /// Data as it is. A reader that has gone away wants no more, which is no failure.
    pub(crate) fn data(&self, bytes: &[u8]) -> Result<(), Problem> {
        match write_all(rustix::stdio::stdout(), bytes) {
            Err(Errno::PIPE) => Ok(()),
            other => other.map_err(|error| Problem::internal(format!("writing to stdout: {error}"))),
        }
    }

    /// The one object of `--json`.
    pub(crate) fn object(&self, value: &impl Serialize) -> Result<(), Problem> {
        let mut text = serde_json::to_vec(value).map_err(Problem::internal)?;
        text.push(b'\n');
        self.data(&text)
    }

    fn say(&self, colour: &str, word: &str, text: impl Display) {
        let line = if self.colour {
            format!("\x1b[{colour}m{word}:\x1b[0m {text}\n")
        } else {
            format!("{word}: {text}\n")
        };
        // Nobody is left to tell when stderr is gone.
        let _ = io::stderr().write_all(line.as_bytes());
    }

    /// What a person should know. In JSON it is part of the object.
    pub(crate) fn note(&self, text: impl Display) {
        if !self.json {
            self.say("36", "note", text);
        }
    }

    /// A line on stderr as it is, also with `--json`: for who starts a server and waits for it.
    pub(crate) fn say_line(&self, text: impl Display) {
        let _ = io::stderr().write_all(format!("{text}\n").as_bytes());
    }

    pub(crate) fn warning(&self, text: impl Display) {
        self.say("33", "warning", text);
    }

    /// With `-v` only.
    pub(crate) fn detail(&self, text: impl Display) {
        if self.verbose {
            self.say("2", "detail", text);
        }
    }

    pub(crate) fn hint(&self, text: impl Display) {
        self.say("36", "hint", text);
    }

    /// A problem, for people on stderr.
    pub(crate) fn complain(&self, problem: &Problem) {
        self.say("31", "error", &problem.message);
        if !problem.hint.is_empty() {
            self.hint(&problem.hint);
        }
        self.state(problem.session_state);
    }

    pub(crate) fn state(&self, state: SessionState) {
        match state {
            SessionState::Lost => {
                self.say("33", "session state", "lost (the next call starts anew; files are kept)")
            }
            SessionState::RolledBack => self.say("33", "session state", "rolled back"),
            SessionState::Preserved | SessionState::None => {}
        }
    }

    /// A command that could not be carried out: an object in JSON, else words.
    pub(crate) fn fail(&self, problem: &Problem) {
        if self.json {
            let _ = self.object(&serde_json::json!({ "error": problem }));
        } else {
            self.complain(problem);
        }
    }

    /// Rows: aligned under a header on a terminal, else separated by tabs.
    pub(crate) fn table(&self, header: &[&str], rows: &[Vec<String>]) -> Result<(), Problem> {
        let mut text = String::new();
        if !self.aligned {
            for row in rows {
                text.push_str(&row.join("\t"));
                text.push('\n');
            }
            return self.data(text.as_bytes());
        }
        let header: Vec<String> = header.iter().map(|&name| name.to_owned()).collect();
        let all = || std::iter::once(&header).chain(rows);
        let width = |column: usize| all().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..header.len()).map(width).collect();
        for row in all() {
            let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
            text.push('\n');
        }
        self.data(text.as_bytes())
    }

    /// Names and values under each other.
    pub(crate) fn pairs(&self, rows: &[(&str, String)]) -> Result<(), Problem> {
        let width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let lines = rows.iter().map(|(name, value)| match self.aligned {
            true => format!("{name:<width$}  {value}\n"),
            false => format!("{name}\t{value}\n"),
        });
        self.data(lines.collect::<String>().as_bytes())
    }
}

/// Straight to the descriptor: nothing of Rust's line buffering between a sandbox and its reader.
pub(crate) fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::INTR) => {}
            // Somebody who shares the descriptor has made it non-blocking.
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// `12s`, `3m`, `2h`, `5d`.
pub(crate) fn short_time(millis: u64) -> String {
    match millis / 1000 {
        seconds @ 0..60 => format!("{seconds}s"),
        seconds @ 60..3600 => format!("{}m", seconds / 60),
        seconds @ 3600..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86_400),
    }
}

/// The exit code of a command that failed by itself, as `env` and `timeout` have it.
pub(crate) fn exit_code(problem: &Problem) -> u8 {
    match problem.code {
        Code::Timeout => 124,
        Code::CommandNotFound => 127,
        Code::Cancelled => 130,
        _ => 125,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        let shown = [0, 59_999, 60_000, 3_600_000, 172_800_000].map(short_time);
        assert_eq!(shown, ["0s", "59s", "1m", "1h", "2d"]);
    }

    #[test]
    fn own_failures_keep_clear_of_user_codes() {
        assert_eq!(exit_code(&Problem::internal("x")), 125);
        assert_eq!(exit_code(&Problem::new(Code::Timeout, "x")), 124);
    }
}
