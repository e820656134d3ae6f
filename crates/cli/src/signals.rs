//! Signals: by name for `kill`, and those that this process gets.

use std::io;

use carrel_proto::problem::Problem;
use tokio::signal::unix::{Signal, SignalKind, signal};

const NAMES: [(&str, i32); 31] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ILL", 4),
    ("TRAP", 5),
    ("ABRT", 6),
    ("BUS", 7),
    ("FPE", 8),
    ("KILL", 9),
    ("USR1", 10),
    ("SEGV", 11),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("STKFLT", 16),
    ("CHLD", 17),
    ("CONT", 18),
    ("STOP", 19),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("URG", 23),
    ("XCPU", 24),
    ("XFSZ", 25),
    ("VTALRM", 26),
    ("PROF", 27),
    ("WINCH", 28),
    ("IO", 29),
    ("PWR", 30),
    ("SYS", 31),
];
const LAST: i32 = 64;
pub(crate) const PIPE: i32 = 13;

/// `TERM`, `SIGTERM`, `term` or `15`.
pub(crate) fn parse(text: &str) -> Result<i32, String> {
    if let Ok(number) = text.parse::<i32>() {
        return if (1..=LAST).contains(&number) {
            Ok(number)
        } else {
            Err(format!("signals are 1 to {LAST}"))
        };
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let known = NAMES.iter().find(|(known, _)| *known == name);
    known
        .map(|(_, number)| *number)
        .ok_or_else(|| format!("there is no signal `{text}` (try TERM, KILL, INT or a number)"))
}

/// `SIGTERM` for 15.
pub(crate) fn name(number: i32) -> String {
    let known = NAMES.iter().find(|(_, known)| *known == number);
    known.map_or_else(|| format!("signal {number}"), |(name, _)| format!("SIG{name}"))
}

/// The signals that ask this process to stop. While one of these lives they do nothing by themselves.
#[derive(Debug)]
pub(crate) struct Interrupts {
    int: Signal,
    term: Signal,
    hangup: Signal,
}

impl Interrupts {
    pub(crate) fn listen() -> Result<Self, Problem> {
        let listen = |kind| {
            signal(kind)
                .map_err(|error: io::Error| Problem::internal(format!("listening for signals: {error}")))
        };
        Ok(Self {
            int: listen(SignalKind::interrupt())?,
            term: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// The next one's number. Safe to drop while it waits.
    pub(crate) async fn next(&mut self) -> i32 {
        tokio::select! {
            Some(()) = self.int.recv() => 2,
            Some(()) = self.term.recv() => 15,
            Some(()) = self.hangup.recv() => 1,
            else => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_have_names_and_numbers() {
        assert_eq!(parse("TERM"), Ok(15));
        assert_eq!(parse("sigkill"), Ok(9));
        assert_eq!(parse("34"), Ok(34));
        assert_eq!(name(2), "SIGINT");
        for bad in ["", "0", "65", "-9", "SIGNOPE"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
