//! processes, pid 1: carrel's stub is the nearest piece of carrel, and none of it may be read or steered.

use crate::facts::Facts;
use crate::isolate::{all_refused, step};
use crate::outcome::{NO_FILE, Outcome, REFUSED, breach, errno_of, expect_errno, held, merge, name, skipped};
use crate::sys::{NULL, sys};
use crate::table::Probe;
use rustix::io::Errno;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::time::Duration;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("signal-init", "kill or stop pid 1", |f| on_init(f, signal_init)),
    Probe::light(
        "forge-signal-init",
        "send pid 1 a signal that claims to come from the kernel",
        forge_signal,
    ),
    Probe::light("ptrace-init", "trace pid 1", |f| on_init(f, ptrace_init)),
    Probe::light("vm-read-init", "read the memory of pid 1 with process_vm_readv", |_| {
        process_vm(libc::SYS_process_vm_readv)
    }),
    Probe::light("vm-write-init", "write the memory of pid 1 with process_vm_writev", |_| {
        process_vm(libc::SYS_process_vm_writev)
    }),
    Probe::light("init-mem", "open the memory of pid 1 in /proc", |f| on_init(f, init_mem)),
    Probe::light("init-environ", "read the environment of pid 1", |f| on_init(f, init_environ)),
    Probe::light("init-fds", "list and open the descriptors of pid 1", |f| on_init(f, init_fds)),
    Probe::light("init-maps", "read the address map of pid 1", |f| on_init(f, init_maps)),
    Probe::light("pidfd-getfd-init", "take a descriptor out of pid 1", |f| on_init(f, pidfd_getfd)),
    Probe::light("kcmp-init", "compare kernel objects with pid 1", |f| on_init(f, kcmp)),
    Probe::light("setns-init", "enter the namespaces of pid 1", |f| on_init(f, setns_init)),
    Probe::light("prlimit-init", "change the resource limits of pid 1", |f| on_init(f, prlimit_init)),
    Probe::light("reschedule-init", "change priority, scheduler or CPUs of pid 1", |f| {
        on_init(f, reschedule_init)
    }),
    Probe::light("move-pages-init", "move or drop the pages of pid 1", |f| on_init(f, move_pages)),
    Probe::light("oom-init", "make pid 1 the first to be killed for memory", |f| on_init(f, oom_init)),
];

/// Nothing to attack when this program itself is pid 1, as under a bare `unshare`.
fn on_init(facts: &Facts, attack: fn(&Facts) -> Outcome) -> Outcome {
    let exe = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
    if exe("1").is_some() && exe("1") == exe("self") {
        return skipped("pid 1 is this program");
    }
    attack(facts)
}

/// The kernel ignores signals to a namespace's init that it has no handler for, and SIGKILL and SIGSTOP always.
/// When it dies, so does this process, and the host sees no answer at all.
fn signal_init(_: &Facts) -> Outcome {
    let state = || {
        let stat = fs::read_to_string("/proc/1/stat").unwrap_or_default();
        stat.rsplit(')')
            .next()
            .and_then(|rest| rest.split_whitespace().next().map(str::to_owned))
            .unwrap_or_default()
    };
    let signals = [libc::SIGKILL, libc::SIGSTOP, libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
    let more = [libc::SIGSEGV, libc::SIGUSR1, libc::SIGPIPE, libc::SIGTSTP];
    let mut said = Vec::new();
    for signal in signals.into_iter().chain(more) {
        let killed = sys!(SYS_kill, 1, signal);
        let tgkilled = sys!(SYS_tgkill, 1, 1, signal);
        for errno in [killed.err(), tgkilled.err()].into_iter().flatten() {
            said.push(name(errno));
        }
    }
    std::thread::sleep(Duration::from_millis(100));
    if sys!(SYS_kill, 1, 0) == Err(Errno::SRCH) || ["T", "t", "Z", "X"].contains(&state().as_str()) {
        return breach(format!("pid 1 is stopped or gone, state {:?}", state()));
    }
    said.sort_unstable();
    said.dedup();
    held(format!("pid 1 lives on in state {:?}; refusals: {said:?}", state()))
}

fn forge_signal(_: &Facts) -> Outcome {
    let mut info = [0_u8; 128];
    info[..4].copy_from_slice(&libc::SIGCHLD.to_ne_bytes());
    info[8..12].copy_from_slice(&0x80_i32.to_ne_bytes()); // SI_KERNEL
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    all_refused(
        &[
            ("rt_sigqueueinfo(1, SI_KERNEL)", &|| sys!(SYS_rt_sigqueueinfo, 1, libc::SIGCHLD, &info)),
            ("rt_tgsigqueueinfo(1, SI_KERNEL)", &|| sys!(SYS_rt_tgsigqueueinfo, 1, 1, libc::SIGCHLD, &info)),
        ],
        &allowed,
    )
}

fn ptrace_init(_: &Facts) -> Outcome {
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    // Seizing needs the same right as attaching and does not stop the target; the kernel lets go when the
    // step's process ends. Attaching would leave pid 1 stopped.
    all_refused(&[("ptrace(SEIZE, 1)", &|| sys!(SYS_ptrace, libc::PTRACE_SEIZE, 1, 0, 0))], &allowed)
}

/// One byte at an address that is mapped in almost no program: the right is checked before the address, so
/// EFAULT means that the memory was within reach.
fn process_vm(nr: i64) -> Outcome {
    let what = if nr == libc::SYS_process_vm_readv { "process_vm_readv(1)" } else { "process_vm_writev(1)" };
    step(what, || {
        let mut byte = [0_u8; 1];
        let local = iovec(byte.as_mut_ptr().expose_provenance(), 1);
        let remote = iovec(0x1000, 1);
        let args = [1.into(), (&local).into(), 1.into(), (&remote).into(), 1.into(), 0.into()];
        let allowed = [REFUSED, &[Errno::SRCH]].concat();
        expect_errno(what, crate::sys::call(nr, args), &allowed)
    })
}

pub(super) fn iovec(base: usize, length: usize) -> [u8; 16] {
    let mut bytes = [0_u8; 16];
    bytes[..8].copy_from_slice(&base.to_ne_bytes());
    bytes[8..].copy_from_slice(&length.to_ne_bytes());
    bytes
}

fn init_mem(_: &Facts) -> Outcome {
    let opened = |write: bool| {
        let what = if write { "open /proc/1/mem for writing" } else { "open /proc/1/mem" };
        let file = fs::OpenOptions::new().read(!write).write(write).open("/proc/1/mem");
        match file {
            // A read-only /proc says no to writing before anyone is asked about the memory; reading asks for the same right.
            Err(error) if write => {
                expect_errno::<()>(what, Err(errno_of(&error)), &[NO_FILE, &[Errno::ROFS]].concat())
            }
            Err(error) => expect_errno::<()>(what, Err(errno_of(&error)), NO_FILE),
            // Opening works in some kernels where every access then fails.
            Ok(mut file) if !write => {
                let _ = file.seek(SeekFrom::Start(0x1000));
                match file.read(&mut [0_u8; 8]) {
                    Ok(0) => held(format!("{what}: opened, but has no memory behind it")),
                    _ => breach(format!("{what}: opened")),
                }
            }
            Ok(_) => breach(format!("{what}: opened")),
        }
    };
    merge([opened(false), opened(true)])
}

/// What may be read must at least be empty.
pub(super) fn unreadable(path: &str) -> Outcome {
    let mut content = Vec::new();
    match File::open(path).and_then(|file| file.take(65536).read_to_end(&mut content)) {
        Err(error) => expect_errno::<()>(path, Err(errno_of(&error)), NO_FILE),
        Ok(0) => held(format!("{path}: empty")),
        Ok(n) => breach(format!("{path}: read {n} bytes")),
    }
}

fn init_environ(_: &Facts) -> Outcome {
    unreadable("/proc/1/environ")
}

fn init_maps(_: &Facts) -> Outcome {
    merge(
        ["maps", "smaps", "auxv", "stack", "syscall", "io", "pagemap"]
            .map(|file| unreadable(&format!("/proc/1/{file}"))),
    )
}

fn init_fds(_: &Facts) -> Outcome {
    let listed = match fs::read_dir("/proc/1/fd") {
        Err(error) => expect_errno::<()>("list /proc/1/fd", Err(errno_of(&error)), NO_FILE),
        Ok(entries) => {
            let seen: Vec<String> = entries
                .flatten()
                .map(|entry| {
                    let to = fs::read_link(entry.path())
                        .map_or_else(|_| "?".to_owned(), |to| to.display().to_string());
                    format!("{}→{to}", entry.file_name().to_string_lossy())
                })
                .collect();
            breach(format!("/proc/1/fd is listed: {}", seen.join(" ")))
        }
    };
    let opened = (0..32).find(|fd| File::open(format!("/proc/1/fd/{fd}")).is_ok());
    let opened = match opened {
        Some(fd) => breach(format!("/proc/1/fd/{fd} can be opened")),
        None => held("none of /proc/1/fd/0..31 opens"),
    };
    merge([listed, opened])
}

fn pidfd_getfd(_: &Facts) -> Outcome {
    step("pidfd_getfd", || {
        let pidfd = match sys!(SYS_pidfd_open, 1, 0) {
            Ok(fd) => fd,
            Err(errno) => return expect_errno::<()>("pidfd_open(1)", Err(errno), REFUSED),
        };
        // EBADF would mean: allowed, only that descriptor is not open.
        merge((0..12).map(|fd| {
            expect_errno(&format!("pidfd_getfd(1, {fd})"), sys!(SYS_pidfd_getfd, pidfd, fd, 0), REFUSED)
        }))
    })
}

fn kcmp(_: &Facts) -> Outcome {
    let own = std::process::id();
    all_refused(
        &[
            ("kcmp(VM)", &|| sys!(SYS_kcmp, own, 1, 1, 0, 0)),
            ("kcmp(FILES)", &|| sys!(SYS_kcmp, own, 1, 2, 0, 0)),
        ],
        REFUSED,
    )
}

fn setns_init(_: &Facts) -> Outcome {
    let kinds = ["user", "mnt", "pid", "pid_for_children", "net", "ipc", "uts", "cgroup", "time"];
    let files = kinds.map(|kind| {
        let path = format!("/proc/1/ns/{kind}");
        step(&path, || match File::open(&path) {
            Err(error) => expect_errno::<()>(&path, Err(errno_of(&error)), NO_FILE),
            // EINVAL: one's own user namespace, which is nothing gained.
            Ok(file) => {
                let entered = sys!(SYS_setns, file.as_raw_fd(), 0, NULL);
                let allowed = [REFUSED, &[Errno::INVAL]].concat();
                expect_errno(&format!("setns {path}"), entered, &allowed)
            }
        })
    });
    let by_pidfd = step("setns(pidfd)", || match sys!(SYS_pidfd_open, 1, 0) {
        Err(errno) => expect_errno::<()>("pidfd_open(1)", Err(errno), REFUSED),
        Ok(fd) => {
            let all = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET;
            expect_errno("setns(pidfd of 1)", sys!(SYS_setns, fd, all), REFUSED)
        }
    });
    merge(files.into_iter().chain([by_pidfd]))
}

/// Sets what was read: a success changes nothing and still shows the right.
fn prlimit_init(_: &Facts) -> Outcome {
    step("prlimit64(1)", || {
        let mut limits = [0_u8; 16];
        let read = sys!(SYS_prlimit64, 1, libc::RLIMIT_NOFILE, NULL, &mut limits);
        let allowed = [REFUSED, &[Errno::SRCH]].concat();
        match read {
            Err(errno) => expect_errno::<()>("prlimit64(1, get)", Err(errno), &allowed),
            Ok(_) => {
                let set = sys!(SYS_prlimit64, 1, libc::RLIMIT_NOFILE, &limits, NULL);
                expect_errno("prlimit64(1, set)", set, &allowed)
            }
        }
    })
}

fn reschedule_init(_: &Facts) -> Outcome {
    let batch = 0_i32.to_ne_bytes();
    let allowed = [REFUSED, &[Errno::SRCH]].concat();
    all_refused(
        &[
            // getpriority answers 20 - nice; the same value is set back.
            ("setpriority(1)", &|| {
                let nice = sys!(SYS_getpriority, libc::PRIO_PROCESS, 1).unwrap_or(20);
                sys!(SYS_setpriority, libc::PRIO_PROCESS, 1, 20 - nice.cast_signed())
            }),
            ("sched_setscheduler(1)", &|| sys!(SYS_sched_setscheduler, 1, libc::SCHED_OTHER, &batch)),
            ("sched_setaffinity(1)", &|| {
                let mut mask = [0_u8; 128];
                let _ = sys!(SYS_sched_getaffinity, 1, 128, &mut mask);
                sys!(SYS_sched_setaffinity, 1, 128, &mask)
            }),
            ("ioprio_set(1)", &|| {
                let priority = sys!(SYS_ioprio_get, 1, 1).unwrap_or_default();
                sys!(SYS_ioprio_set, 1, 1, priority)
            }),
        ],
        &allowed,
    )
}

fn move_pages(_: &Facts) -> Outcome {
    let allowed = [REFUSED, &[Errno::SRCH, Errno::NODEV]].concat();
    all_refused(
        &[
            ("move_pages(1)", &|| sys!(SYS_move_pages, 1, 0, NULL, NULL, NULL, 0)),
            ("migrate_pages(1)", &|| {
                let node = 1_u64.to_ne_bytes();
                sys!(SYS_migrate_pages, 1, 64, &node, &node)
            }),
            ("process_madvise(1)", &|| {
                let fd = sys!(SYS_pidfd_open, 1, 0)?;
                let range = iovec(0x1000, 0x1000);
                sys!(SYS_process_madvise, fd, &range, 1, 20, 0) // MADV_COLD
            }),
        ],
        &allowed,
    )
}

/// Opened and not written.
fn oom_init(_: &Facts) -> Outcome {
    let opened =
        fs::OpenOptions::new().write(true).open("/proc/1/oom_score_adj").map_err(|error| errno_of(&error));
    expect_errno("open /proc/1/oom_score_adj for writing", opened, crate::outcome::NO_WRITE)
}
