//! processes, runners: the stub around each call is in sight, and must be out of reach all the same.
//!
//! Where the host could give carrel a user id of its own (it ran as root), a runner cannot even be signalled. An ordinary
//! user has one id for everything: there a signal ends the runner and with it that one call, which is no breach.

use super::init::{iovec, unreadable};
use crate::facts::Facts;
use crate::isolate::step;
use crate::look;
use crate::outcome::{
    NO_FILE, Outcome, REFUSED, errno_of, expect_errno, held, merge, name, none_found, skipped,
};
use crate::sys::sys;
use crate::table::Probe;
use rustix::io::Errno;
use std::fs;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("signal-runner", "signal the stub around a call", |_| on_runners(signal)),
    Probe::light("read-runner", "read memory, environment and descriptors of the stub around a call", |_| {
        on_runners(read)
    }),
    Probe::light("trace-runner", "trace the stub around a call, or take its descriptors", |_| {
        on_runners(trace)
    }),
    Probe::light(
        "runner-rights",
        "find capabilities in carrel's stubs beyond ending processes",
        runner_rights,
    ),
];

/// Stubs of this session other than its init.
fn runners() -> Vec<i32> {
    look::pids().into_iter().filter(|pid| *pid > 1 && look::cmdline(*pid) == "carrel agent").collect()
}

fn on_runners(attack: fn(i32) -> Outcome) -> Outcome {
    let found = runners();
    if found.is_empty() {
        return skipped("no runner is visible");
    }
    merge(found.into_iter().map(attack))
}

fn uid(pid: i32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn signal(pid: i32) -> Outcome {
    if uid(pid) == Some(rustix::process::getuid().as_raw()) {
        return held(format!("{pid} shares our user id: a signal would end that call alone"));
    }
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    let info = [0_u8; 128];
    merge([
        expect_errno(&format!("kill({pid})"), sys!(SYS_kill, pid, 0), &allowed),
        expect_errno(&format!("tgkill({pid})"), sys!(SYS_tgkill, pid, pid, 0), &allowed),
        expect_errno(&format!("rt_sigqueueinfo({pid})"), sys!(SYS_rt_sigqueueinfo, pid, 0, &info), &allowed),
    ])
}

fn read(pid: i32) -> Outcome {
    let files = ["environ", "maps", "auxv", "stack", "syscall", "io", "pagemap", "mem"];
    let listed = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Err(error) => expect_errno::<()>(&format!("list /proc/{pid}/fd"), Err(errno_of(&error)), NO_FILE),
        Ok(entries) => {
            let seen: Vec<String> =
                entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
            none_found(&format!("descriptors of {pid} listed"), &seen)
        }
    };
    let outcome =
        merge(files.map(|file| unreadable(&format!("/proc/{pid}/{file}"))).into_iter().chain([listed]));
    match outcome.verdict {
        crate::outcome::Verdict::Held => held(format!("{pid}: nothing of it can be read")),
        _ => outcome,
    }
}

fn trace(pid: i32) -> Outcome {
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    let tried = |what: &str, call: &dyn Fn() -> Result<u64, Errno>| {
        let what = format!("{what} {pid}");
        step(&what, || expect_errno(&what, call(), &allowed))
    };
    merge([
        tried("ptrace(SEIZE)", &|| sys!(SYS_ptrace, libc::PTRACE_SEIZE, pid, 0, 0)),
        tried("process_vm_readv", &|| {
            let (local, remote) = (iovec(0x1000, 1), iovec(0x1000, 1));
            sys!(SYS_process_vm_readv, pid, &local, 1, &remote, 1, 0)
        }),
        step("pidfd_getfd", || match sys!(SYS_pidfd_open, pid, 0) {
            Err(errno) => held(format!("pidfd_open({pid}): {}", name(errno))),
            Ok(fd) => merge((0..8).map(|number| {
                expect_errno(
                    &format!("pidfd_getfd({pid}, {number})"),
                    sys!(SYS_pidfd_getfd, fd, number, 0),
                    &allowed,
                )
            })),
        }),
    ])
}

/// CAP_KILL, by which a stub ends processes of the box's user, and nothing else; the init also has what it starts them with.
fn runner_rights(_: &Facts) -> Outcome {
    const KILL: u64 = 1 << 5;
    const INIT: u64 = KILL | 1 << 6 | 1 << 7 | 1 << 8;
    let mut found = Vec::new();
    let mut seen = 0;
    for pid in look::pids().into_iter().filter(|pid| look::cmdline(*pid) == "carrel agent") {
        let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { continue };
        seen += 1;
        for line in status.lines() {
            let Some((set, bits)) = line.split_once(':').filter(|(set, _)| set.starts_with("Cap")) else {
                continue;
            };
            if u64::from_str_radix(bits.trim(), 16)
                .is_ok_and(|bits| bits & !(if pid == 1 { INIT } else { KILL }) != 0)
            {
                found.push(format!("{pid} {set} {}", bits.trim()));
            }
        }
    }
    match none_found("capabilities too many", &found) {
        _ if seen == 0 => skipped("no stub is visible"),
        outcome if found.is_empty() => held(format!("{} in {seen} stubs", outcome.detail)),
        outcome => outcome,
    }
}
