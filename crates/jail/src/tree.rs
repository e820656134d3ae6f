//! What the kernel says of a process; everything below one, and its end.
//!
//! Why stop before kill: a fork bomb makes children faster than one pass kills them. A stopped process cannot fork
//! and keeps its place in the process count, so passes of SIGSTOP reach a state in which nothing new appears; then
//! everything is killed at once.

use std::{collections::BTreeMap, fs, io::Read, os::fd::AsFd, time::Instant};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    process::{Signal, kill_process},
};

use crate::userns;

/// Of a file that says of itself that it has no size: more than all processes of a host have to say.
const MOST_SAID: u64 = 64 << 20;

/// Passes of SIGSTOP that find nothing new are enough; a bound all the same.
const PASSES: usize = 64;

/// Ends everything below `root`, but not `root` itself.
pub fn kill_below(root: i32) {
    kill_chosen(
        || below(root),
        |pids, signal| {
            for pid in pids {
                let _ = kill_process(userns::pid(*pid), signal);
            }
        },
    );
}

/// Ends those that `choose` finds. It is asked several times, because what is to be ended may be making more of its kind.
pub fn kill_chosen(choose: impl Fn() -> Vec<i32>, send: impl Fn(&[i32], Signal)) {
    let mut seen = 0;
    for _ in 0..PASSES {
        let now = choose();
        send(&now, Signal::STOP);
        if now.len() <= seen {
            break;
        }
        seen = now.len();
    }
    send(&choose(), Signal::KILL);
}

/// A flag of the kernel's in field 9 of `/proc/PID/stat`.
const PF_EXITING: u64 = 4;

/// What `/proc/PID/stat` says of a process, as far as we ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat {
    /// Ended, and nobody has taken note: as good as gone.
    pub zombie: bool,
    /// On its way out: the first process of a pid namespace waits there for all others.
    pub exiting: bool,
    pub parent: i32,
    /// Its own and its reaped children's, in hundredths of a second.
    pub cpu_ticks: u64,
    /// Of all its threads; those that are on their way out count.
    pub threads: u64,
    /// In the kernel's ticks since boot.
    pub start_time: u64,
}

impl Stat {
    /// `None`: there is no such process.
    pub fn of(pid: i32) -> Option<Self> {
        // In one go: it says that it has no size, and is asked for before every call.
        let mut stat = [0; 1024];
        let length =
            fs::File::open(format!("/proc/{pid}/stat")).and_then(|mut file| file.read(&mut stat)).ok()?;
        Self::parse(&stat[..length])
    }

    fn parse(stat: &[u8]) -> Option<Self> {
        // The name in parentheses may hold anything; what follows its last parenthesis is fixed.
        let end = stat.iter().rposition(|byte| *byte == b')')?;
        let rest = std::str::from_utf8(&stat[end + 1..]).ok()?;
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        // The manual counts from 1, and the pid and the name come before these.
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        Some(Self {
            zombie: matches!(*fields.first()?, "Z" | "X"),
            exiting: number(9)? & PF_EXITING != 0,
            parent: fields.get(1)?.parse().ok()?,
            cpu_ticks: (14..=17).filter_map(number).sum(),
            threads: number(20)?,
            start_time: number(22)?,
        })
    }
}

/// What `/proc/PID/…` says, nearly always in one go.
fn said(pid: i32, what: &str) -> Option<String> {
    let mut text = Vec::with_capacity(4096);
    // `take`, because otherwise it is asked for its size, which it says is none.
    fs::File::open(format!("/proc/{pid}/{what}")).ok()?.take(MOST_SAID).read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

fn status(pid: i32) -> Option<String> {
    said(pid, "status")
}

/// A process's pid in every namespace that it is in, from this process's own on.
pub fn pids(pid: i32) -> Vec<i32> {
    let status = status(pid).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    line.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// A process's pid in the innermost namespace it is in.
pub fn innermost(pid: i32) -> Option<i32> {
    pids(pid).pop()
}

/// When a process was started: with its pid, its name for good. `None` if it has ended, or is about to.
pub fn start_time(pid: i32) -> Option<u64> {
    Stat::of(pid).filter(|stat| !stat.zombie && !stat.exiting).map(|stat| stat.start_time)
}

/// What a process has in memory that is no file's, in bytes.
pub fn own_memory(pid: i32) -> Option<u64> {
    let text = status(pid)?;
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? << 10)
}

/// Whether a process has been killed, and does not know yet because it is frozen, or is just ending.
pub fn is_killed(pid: i32) -> bool {
    status(pid)
        .unwrap_or_default()
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")))
        .filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .any(|mask| mask & (1 << (Signal::KILL.as_raw() - 1)) != 0)
        // In this order: a signal that was taken between the two is seen here.
        || Stat::of(pid).is_some_and(|stat| stat.exiting)
}

/// Waits until something can be read; of a pidfd, until its process has ended. False: not in time.
pub fn wait_readable(fd: impl AsFd, deadline: Instant) -> bool {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            ready => return ready.is_ok_and(|count| count > 0),
        }
    }
}

/// What a process has started, oldest first. One may be missing if another ends meanwhile: the kernel goes on by the place in its
/// list.
pub fn children(pid: i32) -> Vec<i32> {
    let text = said(pid, &format!("task/{pid}/children")).unwrap_or_default();
    text.split_whitespace().filter_map(|child| child.parse().ok()).collect()
}

/// Every living process below `root`, as this process's `/proc` shows them.
pub fn below(root: i32) -> Vec<i32> {
    let mut parents: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        if let Some(stat) = Stat::of(pid)
            && !stat.zombie
        {
            parents.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut all = Vec::new();
    let mut todo = vec![root];
    while let Some(pid) = todo.pop() {
        let children = parents.remove(&pid).unwrap_or_default();
        all.extend(&children);
        todo.extend(&children);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_past_its_name() {
        let line = b"7 (a) Z 1 (b) S 4 7 7 0 -1 4194560 11 0 0 0 3 5 7 9 20 0 1 0 1234 1 2\n";
        let stat =
            Stat { zombie: false, exiting: false, parent: 4, cpu_ticks: 24, threads: 1, start_time: 1234 };
        assert_eq!(Stat::parse(line), Some(stat));
        assert!(
            Stat::parse(b"7 (x) Z 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 5").is_some_and(|stat| stat.zombie)
        );
        assert!(
            Stat::parse(b"7 (x) S 1 7 7 0 -1 4194564 0 0 0 0 0 0 0 0 0 0 0 0 5")
                .is_some_and(|stat| stat.exiting)
        );
        for broken in [&b""[..], b"7 (x", b"7 (x)", b"7 (x) S", b"7 (x) S 1 2"] {
            assert_eq!(Stat::parse(broken), None);
        }
    }

    #[test]
    fn this_process_has_a_parent_and_a_start() {
        let me = i32::try_from(std::process::id()).expect("a pid");
        let stat = Stat::of(me).expect("this process");
        assert_eq!(stat.parent, i32::try_from(std::os::unix::process::parent_id()).expect("a pid"));
        assert_eq!(start_time(me), Some(stat.start_time));
        assert_eq!(start_time(i32::MAX), None);
    }
}
