//! processes: seeing, signalling and outranking processes outside the session.
//!
//! Pid 1 of the session's pid namespace is a stub of carrel's; attacks on it are in [`init`]. The stub around each
//! call is a `carrel-runner`; attacks on those are in [`runner`].

pub(crate) mod init;
pub(crate) mod runner;

use crate::facts::Facts;
use crate::isolate::{all_refused, step};
use crate::look;
use crate::outcome::{
    NO_FILE, NO_WRITE, Outcome, REFUSED, breach, errno_of, expect_errno, held, merge, name, none_found,
    skipped,
};
use crate::sys::{NULL, sys};
use crate::table::Probe;
use rustix::io::Errno;
use std::fs;
use std::io::Write;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("pids-outside", "find carrel's or the host's processes in /proc", pids_outside),
    Probe::light("pid-sweep", "find processes that /proc hides by signalling every number", pid_sweep),
    Probe::light("proc-own-namespace", "have a /proc of another pid namespace", proc_own_namespace),
    Probe::light("kill-all", "signal everything at once with kill(-1)", kill_all),
    Probe::light("kill-host-pid", "signal a process of the host by its number", kill_host_pid)
        .needs(&["host_pid"]),
    Probe::light("pidfd-host-pid", "open a descriptor on a process of the host", pidfd_host_pid)
        .needs(&["host_pid"]),
    Probe::light("host-proc-entry", "read /proc of a host process", host_proc_entry).needs(&["host_pid"]),
    Probe::light(
        "kill-parent-session",
        "signal the process group and session of the parent",
        kill_parent_session,
    ),
    Probe::light("ptrace-parent", "trace the process that started this one", ptrace_parent),
    Probe::light(
        "realtime-scheduling",
        "take the CPU with a real-time scheduling class",
        realtime_scheduling,
    ),
    Probe::light("raise-priority", "raise one's own priority", raise_priority),
    Probe::light("oom-score", "become the last to be killed for memory", oom_score),
    Probe::light("raise-rlimits", "raise one's own hard limits", raise_rlimits),
    Probe::light("sysrq-trigger", "open the magic SysRq trigger", |_| {
        crate::host_files::writes::open_write("/proc/sysrq-trigger")
    }),
    Probe::light("initial-namespaces", "be in a namespace of the host", initial_namespaces),
    Probe::light("setns-any", "enter the namespaces of any visible process", setns_any),
];

/// Whether a process of carrel's belongs into a session besides its init, which is pid 1: a runner, whose parent is
/// the init. A name alone excuses nobody.
fn is_runner(pid: i32, comm: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).map(str::trim);
    comm.trim() == "carrel-runner" && parent == Some("1")
}

/// Whether a command line is of carrel's supervisors (not of this program).
fn is_carrel(cmdline: &str) -> bool {
    let program = cmdline.split(' ').next().unwrap_or_default();
    let base = program.rsplit('/').next().unwrap_or_default();
    base != "carrel-probe" && (cmdline.contains("carrel-agent") || base == "carrel")
}

fn pids_outside(facts: &Facts) -> Outcome {
    let pids = look::pids();
    if pids.is_empty() {
        return skipped("/proc shows no process");
    }
    let own = fs::read_link("/proc/self/exe").ok();
    let found: Vec<String> = pids
        .iter()
        .filter(|pid| **pid > 1)
        .filter(|pid| {
            // A forked copy of this program carries the facts in its arguments and is not a find.
            own.is_none() || fs::read_link(format!("/proc/{pid}/exe")).ok() != own
        })
        .map(|pid| {
            (*pid, look::cmdline(*pid), fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default())
        })
        .filter(|(pid, cmdline, comm)| {
            let kernel_thread = comm.starts_with("kthreadd") || comm.starts_with("ksoftirqd");
            (is_carrel(cmdline) && !is_runner(*pid, comm))
                || kernel_thread
                || facts.get("other_session_marker").is_some_and(|mark| cmdline.contains(mark))
        })
        .map(|(pid, cmdline, comm)| format!("{pid} {} [{}]", comm.trim(), cmdline))
        .collect();
    match none_found("processes from outside the session", &found) {
        outcome if found.is_empty() => held(format!("{} among {} visible", outcome.detail, pids.len())),
        outcome => outcome,
    }
}

/// Numbers up to here are tried; a session is young and small, so its numbers are low.
const SWEEP: i32 = 70_000;

fn pid_sweep(_: &Facts) -> Outcome {
    let reached: Vec<i32> = (1..SWEEP).filter(|pid| sys!(SYS_kill, *pid, 0) != Err(Errno::SRCH)).collect();
    if reached.contains(&1) && sys!(SYS_kill, SWEEP * 50, 0) == Err(Errno::PERM) {
        return held("kill is refused whatever the number");
    }
    let listed = look::pids();
    // A thread answers too, but only /proc/TID (never listed) shows it; a process may have ended meanwhile.
    let hidden: Vec<String> = reached
        .iter()
        .filter(|pid| !listed.contains(pid) && fs::metadata(format!("/proc/{pid}")).is_err())
        .filter(|pid| sys!(SYS_kill, **pid, 0) != Err(Errno::SRCH))
        .map(i32::to_string)
        .collect();
    match none_found("processes that /proc does not show", &hidden) {
        outcome if hidden.is_empty() => {
            held(format!("{} processes answer, all in /proc: {}", reached.len(), outcome.detail))
        }
        outcome => outcome,
    }
}

fn proc_own_namespace(_: &Facts) -> Outcome {
    match fs::read_link("/proc/self") {
        Err(error) => skipped(format!("/proc/self: {}", name(errno_of(&error)))),
        Ok(link) if link.to_str() == Some(&std::process::id().to_string()) => {
            held("/proc/self is our own pid")
        }
        Ok(link) => breach(format!("/proc/self is {}, our pid is {}", link.display(), std::process::id())),
    }
}

/// Signal 0 reaches whom a real one would; who that is, the sweep of readable numbers tells.
fn kill_all(facts: &Facts) -> Outcome {
    match sys!(SYS_kill, -1, 0) {
        Err(errno) => {
            expect_errno::<()>("kill(-1, 0)", Err(errno), &[Errno::SRCH, Errno::PERM, Errno::NOSYS])
        }
        Ok(_) => {
            let outside = pids_outside(facts);
            match outside.verdict {
                crate::outcome::Verdict::Held => {
                    held(format!("kill(-1) reaches only this session: {}", outside.detail))
                }
                _ => outside,
            }
        }
    }
}

/// The host's number may by chance be taken inside, by a process that was started at another time: which says nothing about the host.
fn taken_inside(facts: &Facts, pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name is in brackets, and the manual counts from 1.
    let fields = stat.rsplit_once(')').map(|(_, fields)| fields).unwrap_or_default();
    let started = fields.split_whitespace().nth(22 - 3).and_then(|field| field.parse().ok());
    pid == 1 || (started.is_some() && facts.number("host_start").is_some_and(|host| Some(host) != started))
}

fn kill_host_pid(facts: &Facts) -> Outcome {
    let Some(pid) = host_pid(facts) else { return skipped("host_pid is not a number") };
    if taken_inside(facts, pid) {
        return skipped(format!("{pid} is taken by a process of this session"));
    }
    match sys!(SYS_kill, pid, 0) {
        Err(Errno::PERM) if fs::metadata(format!("/proc/{pid}")).is_ok() => {
            breach(format!("process {pid} is visible (EPERM)"))
        }
        other => expect_errno(&format!("kill({pid}, 0)"), other, &[Errno::SRCH, Errno::PERM, Errno::NOSYS]),
    }
}

fn host_pid(facts: &Facts) -> Option<i32> {
    facts.number("host_pid").and_then(|pid| i32::try_from(pid).ok())
}

fn pidfd_host_pid(facts: &Facts) -> Outcome {
    let Some(pid) = host_pid(facts) else { return skipped("host_pid is not a number") };
    if taken_inside(facts, pid) {
        return skipped(format!("{pid} is taken by a process of this session"));
    }
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    all_refused(&[("pidfd_open", &|| sys!(SYS_pidfd_open, pid, 0))], &allowed)
}

fn host_proc_entry(facts: &Facts) -> Outcome {
    let Some(pid) = host_pid(facts) else { return skipped("host_pid is not a number") };
    if taken_inside(facts, pid) {
        return skipped(format!("{pid} is taken by a process of this session"));
    }
    merge(["cmdline", "environ", "status", "maps"].map(|file| {
        let path = format!("/proc/{pid}/{file}");
        let read = fs::read(&path).map_err(|error| errno_of(&error));
        expect_errno(&path, read, NO_FILE)
    }))
}

/// Group and session 0 belong to whoever started us from outside, when that is outside our namespace.
fn kill_parent_session(_: &Facts) -> Outcome {
    let parent = sys!(SYS_getppid).unwrap_or_default();
    let group = sys!(SYS_getpgid, 1);
    let session = sys!(SYS_getsid, 1);
    let outside = [("getpgid(1)", group), ("getsid(1)", session)];
    merge(outside.map(|(what, result)| match result {
        // 0 says: a group outside this namespace, which has no number here and cannot be addressed.
        Ok(0) => held(format!("{what} = 0: not addressable from here (parent {parent})")),
        Ok(1) => held(format!("{what} = 1: of this namespace")),
        Ok(other) if sys!(SYS_getsid, 0) == Ok(other) || fs::metadata(format!("/proc/{other}")).is_ok() => {
            held(format!("{what} = {other}: of this namespace"))
        }
        Ok(other) => breach(format!("{what} = {other}, which is not a process of this namespace")),
        Err(errno) => held(format!("{what}: {}", name(errno))),
    }))
}

/// The nearest ancestor that is not this program.
fn foreign_ancestor() -> Option<i32> {
    let own = fs::read_link("/proc/self/exe").ok()?;
    let mut pid = i32::try_from(std::process::id()).ok()?;
    for _ in 0..32 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        pid = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()?;
        if pid == 0 || fs::read_link(format!("/proc/{pid}/exe")).ok().as_ref() != Some(&own) {
            return Some(pid);
        }
    }
    None
}

fn ptrace_parent(_: &Facts) -> Outcome {
    let Some(pid) = foreign_ancestor() else { return skipped("cannot tell the parent from /proc") };
    if pid > 1 && !is_carrel(&look::cmdline(pid)) {
        return skipped(format!("the parent ({pid}) is a process of the user's own"));
    }
    // Seizing does not stop the target, and ends when this step's process does.
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    all_refused(&[("ptrace(SEIZE, parent)", &|| sys!(SYS_ptrace, libc::PTRACE_SEIZE, pid, 0, 0))], &allowed)
}

fn realtime_scheduling(_: &Facts) -> Outcome {
    let priority = 1_i32.to_ne_bytes();
    let mut deadline = [0_u8; 48];
    deadline[..4].copy_from_slice(&48_u32.to_ne_bytes());
    deadline[4..8].copy_from_slice(&6_u32.to_ne_bytes()); // SCHED_DEADLINE
    for (field, value) in [(24, 1_000_000_u64), (32, 10_000_000), (40, 10_000_000)] {
        deadline[field..field + 8].copy_from_slice(&value.to_ne_bytes());
    }
    all_refused(
        &[
            ("SCHED_FIFO", &|| sys!(SYS_sched_setscheduler, 0, libc::SCHED_FIFO, &priority)),
            ("SCHED_RR", &|| sys!(SYS_sched_setscheduler, 0, libc::SCHED_RR, &priority)),
            ("SCHED_DEADLINE", &|| sys!(SYS_sched_setattr, 0, &deadline, 0)),
            // IOPRIO_CLASS_RT << 13
            ("ioprio_set(RT)", &|| sys!(SYS_ioprio_set, 1, 0, 1 << 13)),
        ],
        REFUSED,
    )
}

fn raise_priority(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("setpriority(process, -20)", &|| sys!(SYS_setpriority, libc::PRIO_PROCESS, 0, -20)),
            ("setpriority(group, -20)", &|| sys!(SYS_setpriority, libc::PRIO_PGRP, 0, -20)),
            ("setpriority(user, -20)", &|| sys!(SYS_setpriority, libc::PRIO_USER, 0, -20)),
        ],
        REFUSED,
    )
}

fn oom_score(_: &Facts) -> Outcome {
    let path = "/proc/self/oom_score_adj";
    let now: i32 = match fs::read_to_string(path).map(|text| text.trim().parse()) {
        Ok(Ok(now)) => now,
        _ => return skipped(format!("{path} is not readable")),
    };
    merge([-1000, now - 1].map(|wanted| {
        step("oom_score_adj", || {
            let file = fs::OpenOptions::new().write(true).open(path);
            let written = file.and_then(|mut file| file.write_all(wanted.to_string().as_bytes()));
            let what = format!("oom_score_adj {now} to {wanted}");
            expect_errno(&what, written.map_err(|error| errno_of(&error)), NO_WRITE)
        })
    }))
}

fn raise_rlimits(_: &Facts) -> Outcome {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let resources = [
        ("nofile", Resource::Nofile),
        ("nproc", Resource::Nproc),
        ("memlock", Resource::Memlock),
        ("msgqueue", Resource::Msgqueue),
        ("sigpending", Resource::Sigpending),
        ("rtprio", Resource::Rtprio),
        ("nice", Resource::Nice),
        ("core", Resource::Core),
        ("fsize", Resource::Fsize),
    ];
    merge(resources.map(|(what, resource)| {
        let Some(hard) = getrlimit(resource).maximum else { return skipped(format!("{what} has no limit")) };
        let wanted = Rlimit { current: Some(hard), maximum: Some(hard.saturating_add(1)) };
        step(what, || expect_errno(&format!("{what} above {hard}"), setrlimit(resource, wanted), REFUSED))
    }))
}

/// The first namespaces of a machine have fixed numbers (see the kernel's `proc_ns.h`).
fn initial_namespaces(_: &Facts) -> Outcome {
    let first = [
        ("ipc", 4_026_531_839_u64),
        ("uts", 4_026_531_838),
        ("user", 4_026_531_837),
        ("pid", 4_026_531_836),
        ("cgroup", 4_026_531_835),
        ("net", 4_026_531_833),
        ("mnt", 4_026_531_832),
    ];
    merge(first.map(|(kind, number)| match fs::read_link(format!("/proc/self/ns/{kind}")) {
        Err(error) => skipped(format!("{kind}: {}", name(errno_of(&error)))),
        Ok(link) if link.to_string_lossy() == format!("{kind}:[{number}]") => {
            breach(format!("{kind} is the host's"))
        }
        Ok(link) => held(link.to_string_lossy().into_owned()),
    }))
}

fn setns_any(_: &Facts) -> Outcome {
    let kinds = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];
    let mut outcomes = Vec::new();
    for pid in look::pids().into_iter().filter(|pid| *pid > 1).take(12) {
        for kind in kinds {
            let path = format!("/proc/{pid}/ns/{kind}");
            let Ok(file) = fs::File::open(&path) else { continue };
            // One's own user namespace answers EINVAL before any right is asked for.
            let allowed = [REFUSED, &[Errno::INVAL]].concat();
            let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
            outcomes.push(step(&path, || expect_errno(&path, sys!(SYS_setns, fd, 0, NULL), &allowed)));
        }
    }
    if outcomes.iter().all(|o| o.verdict == crate::outcome::Verdict::Held) && !outcomes.is_empty() {
        return held(format!("{} namespace files tried, none could be entered", outcomes.len()));
    }
    merge(outcomes)
}
