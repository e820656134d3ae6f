//! `cling WAY`: not an attack with a verdict of its own, but a process that will not end. The host gives it a time
//! limit and sees whether that holds.
//!
//! It ignores every signal that can be ignored, leaves a second copy behind in a session of its own, and attacks the
//! stub that would have to end it, by one of [`WAYS`].

use crate::sys::{NULL, fork, sys};
use std::io::Write;
use std::time::Duration;

pub(crate) const WAYS: &[&str] = &["plain", "stop-runner", "limit-runner", "kill-runner", "limit-init"];

/// Longer than any time limit that a test sets; an end all the same.
const STAY: Duration = Duration::from_secs(120);

pub(crate) fn cling(way: &str) {
    for signal in (1..32).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal)) {
        let mut ignore = [0_u8; 32];
        ignore[..8].copy_from_slice(&1_u64.to_ne_bytes()); // SIG_IGN
        let _ = sys!(SYS_rt_sigaction, signal, &ignore, NULL, 8);
    }
    let runner = sys!(SYS_getppid).unwrap_or_default();
    // Twice: the copy's parent is gone, so it belongs to whoever reaps here.
    let _ = fork(|| {
        let _ = sys!(SYS_setsid);
        let _ = fork(|| {
            std::thread::sleep(STAY);
            0
        });
        0
    });
    let nothing = [0_u8; 16];
    let said = match way {
        "stop-runner" => sys!(SYS_kill, runner, libc::SIGSTOP),
        "limit-runner" => sys!(SYS_prlimit64, runner, libc::RLIMIT_NOFILE, &nothing, NULL),
        "kill-runner" => sys!(SYS_kill, runner, libc::SIGKILL),
        "limit-init" => {
            let limited = sys!(SYS_prlimit64, 1, libc::RLIMIT_NOFILE, &nothing, NULL);
            let _ = sys!(SYS_kill, runner, libc::SIGKILL);
            limited
        }
        _ => Ok(0),
    };
    let _ = writeln!(std::io::stdout(), "{}", if said.is_ok() { "done" } else { "refused" });
    std::thread::sleep(STAY);
}
