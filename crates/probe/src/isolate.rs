//! Runs a piece of an attack in a forked process, so that a kill, crash or hang is a result and not the end.
//!
//! Invariant: when [`isolate`] returns, the child and everything in its process group is dead and reaped.

use crate::outcome::{Outcome, Verdict, breach, clip, held, skipped};
use crate::sys;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process, kill_process_group, set_parent_process_death_signal, setpgid,
    waitpid,
};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

/// How the child ended.
#[derive(Debug)]
pub(crate) enum End {
    Done(Outcome),
    Signal(i32),
    TimedOut,
    /// It could not be started, or ended without saying anything.
    Failed(String),
}

/// Time for one system call of an attack; nothing that is refused takes longer.
const STEP: Duration = Duration::from_secs(3);

/// Runs `body` in a forked process group of its own for at most `limit`.
pub(crate) fn isolate(limit: Duration, body: impl FnOnce() -> Outcome) -> End {
    let (reader, writer) = match rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC) {
        Ok(ends) => ends,
        Err(errno) => return End::Failed(format!("no pipe: {errno}")),
    };
    let mut writer = Some(File::from(writer));
    let started = sys::fork(|| {
        // Best effort: a filter may refuse these, and then the kill below reaches the child alone.
        let _ = setpgid(None, None);
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        let outcome = body();
        let tag = match outcome.verdict {
            Verdict::Held => b'h',
            Verdict::Breach => b'b',
            Verdict::Skipped => b's',
        };
        let mut line = vec![tag];
        line.extend_from_slice(clip(outcome.detail).as_bytes());
        writer.as_mut().map_or(1, |pipe| i32::from(pipe.write_all(&line).is_err()))
    });
    drop(writer.take());
    let child = match started.map(Pid::from_raw) {
        Ok(Some(pid)) => pid,
        Ok(None) => return End::Failed("fork returned no pid".to_owned()),
        Err(errno) => return End::Failed(format!("fork: {errno}")),
    };
    let _ = setpgid(Some(child), Some(child));
    let said = read_until(File::from(reader), Instant::now() + limit);
    // What it said is complete, or it is dead and its status is set: whatever still runs goes now, while the
    // unreaped child keeps its number from being given to anyone else.
    let timed_out = said.is_none();
    let _ = kill_process_group(child, Signal::KILL);
    let _ = kill_process(child, Signal::KILL);
    let status = loop {
        match waitpid(Some(child), WaitOptions::empty()) {
            Ok(Some((_, status))) => break Some(status),
            Err(Errno::INTR) | Ok(None) => {}
            Err(_) => break None,
        }
    };
    if timed_out {
        return End::TimedOut;
    }
    let said = said.unwrap_or_default();
    let detail = String::from_utf8_lossy(said.get(1..).unwrap_or_default()).into_owned();
    match (said.first(), status) {
        (Some(b'h'), _) => End::Done(held(detail)),
        (Some(b'b'), _) => End::Done(breach(detail)),
        (Some(b's'), _) => End::Done(skipped(detail)),
        (_, Some(status)) => match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => End::Signal(signal),
            (None, code) => End::Failed(format!("ended without a result, exit {code:?}")),
        },
        (_, None) => End::Failed("ended without a result".to_owned()),
    }
}

/// Everything up to end of file, or `None` when the deadline came first.
fn read_until(mut pipe: File, deadline: Instant) -> Option<Vec<u8>> {
    let mut said = Vec::new();
    let mut chunk = [0_u8; 4096];
    loop {
        let left = deadline.checked_duration_since(Instant::now())?;
        let timeout =
            Timespec { tv_sec: i64::try_from(left.as_secs()).ok()?, tv_nsec: left.subsec_nanos().into() };
        let ready = poll(&mut [PollFd::from_borrowed_fd(pipe.as_fd(), PollFlags::IN)], Some(&timeout));
        match ready {
            Ok(0) => return None,
            Ok(_) => match pipe.read(&mut chunk) {
                Ok(0) => return Some(said),
                // The first complete write is the result: a stray grandchild may hold the pipe open.
                Ok(n) => {
                    said.extend_from_slice(&chunk[..n]);
                    return Some(said);
                }
                Err(_) => return Some(said),
            },
            Err(Errno::INTR) => {}
            Err(_) => return Some(said),
        }
    }
}

/// Runs one step of an attack on its own: killed by the filter counts as held.
pub(crate) fn step(what: &str, body: impl FnOnce() -> Outcome) -> Outcome {
    match isolate(STEP, body) {
        End::Done(outcome) => outcome,
        End::Signal(libc::SIGSYS) => held(format!("{what}: killed by SIGSYS")),
        End::Signal(signal) => skipped(format!("{what}: died of signal {signal}")),
        End::TimedOut => skipped(format!("{what}: hung")),
        End::Failed(why) => skipped(format!("{what}: {why}")),
    }
}

/// One raw call of an attack, named for the report.
pub(crate) type NamedCall<'a> = (&'a str, &'a dyn Fn() -> Result<u64, Errno>);

/// Every call must be refused, each tried in a process of its own.
pub(crate) fn all_refused(calls: &[NamedCall<'_>], allowed: &[Errno]) -> Outcome {
    crate::outcome::merge(
        calls.iter().map(|(what, call)| step(what, || crate::outcome::expect_errno(what, call(), allowed))),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_a_hang_and_a_result_are_told_apart() {
        let long = Duration::from_secs(5);
        assert!(matches!(isolate(long, || held("x")), End::Done(o) if o == held("x")));
        assert!(matches!(
            isolate(long, || {
                let _ = kill_process(rustix::process::getpid(), Signal::SYS);
                held("no")
            }),
            End::Signal(libc::SIGSYS)
        ));
        assert!(matches!(
            isolate(Duration::from_millis(50), || {
                std::thread::sleep(long);
                held("no")
            }),
            End::TimedOut
        ));
        assert!(matches!(isolate(long, || sys::exit_now(3)), End::Failed(_)));
    }
}
