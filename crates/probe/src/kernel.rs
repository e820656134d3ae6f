//! kernel: system calls that a box has no business with. Each must be refused before it does anything.
//!
//! Arguments are chosen so that the right is asked for first and a success does the least: the current time
//! is set again, the name kept, modules are garbage, images have no segments, reboot only masks Ctrl-Alt-Del.

pub(crate) mod privilege;
pub(crate) mod state;

use crate::facts::Facts;
use crate::isolate::{all_refused, step};
use crate::outcome::{Outcome, REFUSED, expect_errno, merge, skipped};
use crate::sys::{NULL, exit_now, sys};
use crate::table::Probe;
use rustix::io::Errno;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("bpf", "load BPF programs and maps", bpf),
    Probe::light("keyrings", "use the kernel's keyrings", keyrings),
    Probe::light("io-uring", "set up io_uring, which works around system call filters", io_uring),
    Probe::light("userfaultfd", "stall the kernel with userfaultfd", |_| {
        // 1 asks for user-mode faults only, which needs no privilege.
        all_refused(
            &[
                ("userfaultfd(0)", &|| sys!(SYS_userfaultfd, 0)),
                ("userfaultfd(USER_MODE_ONLY)", &|| sys!(SYS_userfaultfd, 1)),
            ],
            REFUSED,
        )
    }),
    Probe::light("perf-events", "watch the machine with perf", perf_events),
    Probe::light("kexec", "load another kernel", kexec),
    Probe::light("modules", "load or remove kernel modules", modules),
    Probe::light("userns-unshare", "become root of a new user namespace with unshare", |_| {
        all_refused(
            &[
                ("unshare(NEWUSER)", &|| sys!(SYS_unshare, libc::CLONE_NEWUSER)),
                ("unshare(NEWUSER|NEWNS)", &|| sys!(SYS_unshare, libc::CLONE_NEWUSER | libc::CLONE_NEWNS)),
            ],
            REFUSED,
        )
    }),
    Probe::light("userns-clone", "become root of a new user namespace with clone", userns_clone),
    Probe::light("userns-clone3", "become root of a new user namespace with clone3", userns_clone3),
    Probe::light("namespaces", "make other new namespaces", namespaces),
    Probe::light("swap", "turn swap on or off", |_| {
        let path = c"/nonexistent/carrel-probe";
        all_refused(
            &[("swapon", &|| sys!(SYS_swapon, path, 0)), ("swapoff", &|| sys!(SYS_swapoff, path))],
            REFUSED,
        )
    }),
    Probe::light("reboot", "reboot the machine or the box", reboot),
    Probe::light("clocks", "set the clock", clocks),
    Probe::light("hostname", "set host and domain name", hostname),
    Probe::light("quota-and-accounting", "change quotas and process accounting", |_| {
        let q_sync_all = 0x0080_0001_u32 << 8;
        all_refused(
            &[
                ("quotactl(Q_GETFMT)", &|| {
                    let mut format = [0_u8; 256];
                    sys!(SYS_quotactl, 0x0080_0004_u32 << 8, c"/dev/sda", 0, &mut format)
                }),
                ("quotactl_fd", &|| sys!(SYS_quotactl_fd, -1, q_sync_all, 0, NULL)),
                ("acct", &|| sys!(SYS_acct, c"/nonexistent/carrel-probe")),
            ],
            REFUSED,
        )
    }),
    Probe::light("io-ports", "reach I/O ports and the descriptor table", io_ports),
    Probe::light("obsolete-calls", "use system calls that nothing needs any more", obsolete_calls),
    Probe::light("vhangup", "hang up the terminal", |_| {
        all_refused(&[("vhangup", &|| sys!(SYS_vhangup))], REFUSED)
    }),
    Probe::light("fanotify", "watch whole file systems with fanotify", |_| {
        all_refused(
            &[
                ("fanotify_init(CONTENT)", &|| sys!(SYS_fanotify_init, 4, 0)),
                ("fanotify_init(NOTIF|FID)", &|| sys!(SYS_fanotify_init, 0x200, 0)),
            ],
            REFUSED,
        )
    }),
    Probe::light("recent-calls", "use recent system calls that the policy does not name", |_| {
        all_refused(
            &[
                ("statmount", &|| crate::sys::call(457, [NULL, NULL, 0.into(), 0.into()])),
                ("listmount", &|| crate::sys::call(458, [NULL, NULL, 0.into(), 0.into()])),
                ("lsm_set_self_attr", &|| crate::sys::call(460, [100.into(), NULL, 0.into(), 0.into()])),
            ],
            REFUSED,
        )
    }),
    Probe::light("unknown-syscalls", "call numbers that no policy names", |_| {
        merge([480, 511, 600, 1000, 65535].map(|nr: i64| {
            let what = format!("system call {nr}");
            step(&what, || expect_errno(&what, crate::sys::call(nr, []), REFUSED))
        }))
    }),
    Probe::light("x32-calls", "get past the filter through the x32 table", x32_calls),
    Probe::light("ia32-calls", "get past the filter through int 0x80", ia32_calls),
];

fn bpf(_: &Facts) -> Outcome {
    let mut map = [0_u8; 128];
    for (field, value) in [(0, 2_u32), (4, 4), (8, 8), (12, 1)] {
        map[field..field + 4].copy_from_slice(&value.to_ne_bytes()); // an array map of one entry
    }
    all_refused(
        &[
            ("bpf(MAP_CREATE)", &|| sys!(SYS_bpf, 0, &map, 128)),
            ("bpf(PROG_LOAD)", &|| sys!(SYS_bpf, 5, &[0_u8; 128], 128)),
            ("bpf(PROG_GET_NEXT_ID)", &|| sys!(SYS_bpf, 11, &[0_u8; 128], 128)),
        ],
        REFUSED,
    )
}

fn keyrings(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("add_key", &|| sys!(SYS_add_key, c"user", c"carrel-probe", b"x", 1, -1)), // the thread's own
            ("request_key", &|| sys!(SYS_request_key, c"user", c"carrel-probe", NULL, 0)),
            ("keyctl(GET_KEYRING_ID, session)", &|| sys!(SYS_keyctl, 0, -3, 0)),
            ("keyctl(GET_KEYRING_ID, user)", &|| sys!(SYS_keyctl, 0, -4, 0)),
            ("keyctl(JOIN_SESSION_KEYRING)", &|| sys!(SYS_keyctl, 1, NULL)),
        ],
        REFUSED,
    )
}

fn io_uring(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("io_uring_setup", &|| sys!(SYS_io_uring_setup, 8, &mut [0_u8; 128])),
            ("io_uring_enter", &|| sys!(SYS_io_uring_enter, -1, 0, 0, 0, NULL, 0)),
            ("io_uring_register", &|| sys!(SYS_io_uring_register, -1, 0, NULL, 0)),
        ],
        REFUSED,
    )
}

/// A software clock of our own, and every event of the machine.
fn perf_events(_: &Facts) -> Outcome {
    let mut attr = [0_u8; 128];
    attr[..4].copy_from_slice(&1_u32.to_ne_bytes()); // PERF_TYPE_SOFTWARE, config 0: cpu clock
    attr[4..8].copy_from_slice(&128_u32.to_ne_bytes());
    all_refused(
        &[
            ("perf_event_open(self)", &|| sys!(SYS_perf_event_open, &attr, 0, -1, -1, 0)),
            ("perf_event_open(cpu 0)", &|| sys!(SYS_perf_event_open, &attr, -1, 0, -1, 0)),
        ],
        REFUSED,
    )
}

fn kexec(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("kexec_load", &|| sys!(SYS_kexec_load, 0, 0, NULL, 0)),
            ("kexec_file_load", &|| sys!(SYS_kexec_file_load, -1, -1, 0, NULL, 0)),
        ],
        REFUSED,
    )
}

fn modules(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("init_module", &|| sys!(SYS_init_module, b"not a module", 12, c"")),
            ("finit_module", &|| sys!(SYS_finit_module, -1, c"", 0)),
            ("delete_module", &|| sys!(SYS_delete_module, c"carrel_probe_no_such", libc::O_NONBLOCK)),
        ],
        REFUSED,
    )
}

/// A raw clone returns twice; the copy ends at once.
fn ended_if_child(result: Result<u64, Errno>) -> Result<u64, Errno> {
    if result == Ok(0) { exit_now(0) } else { result }
}

fn userns_clone(_: &Facts) -> Outcome {
    let flags = libc::CLONE_NEWUSER | libc::SIGCHLD;
    all_refused(
        &[
            ("clone(NEWUSER)", &|| ended_if_child(sys!(SYS_clone, flags, 0, 0, 0, 0))),
            ("clone(NEWUSER|NEWNET)", &|| {
                ended_if_child(sys!(SYS_clone, flags | libc::CLONE_NEWNET, 0, 0, 0, 0))
            }),
        ],
        REFUSED,
    )
}

fn userns_clone3(_: &Facts) -> Outcome {
    let args = |flags: i32| {
        let mut args = [0_u8; 88];
        args[..8].copy_from_slice(&i64::from(flags).to_ne_bytes());
        args[32..40].copy_from_slice(&i64::from(libc::SIGCHLD).to_ne_bytes());
        args
    };
    let plain = args(libc::CLONE_NEWUSER);
    let more = args(libc::CLONE_NEWUSER | libc::CLONE_NEWNS | libc::CLONE_NEWPID);
    all_refused(
        &[
            ("clone3(NEWUSER)", &|| ended_if_child(sys!(SYS_clone3, &plain, 88))),
            ("clone3(NEWUSER|NEWNS|NEWPID)", &|| ended_if_child(sys!(SYS_clone3, &more, 88))),
        ],
        REFUSED,
    )
}

fn namespaces(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("unshare(NEWNS)", &|| sys!(SYS_unshare, libc::CLONE_NEWNS)),
            ("unshare(NEWNET)", &|| sys!(SYS_unshare, libc::CLONE_NEWNET)),
            ("unshare(NEWPID)", &|| sys!(SYS_unshare, libc::CLONE_NEWPID)),
            ("unshare(NEWIPC)", &|| sys!(SYS_unshare, libc::CLONE_NEWIPC)),
            ("unshare(NEWUTS)", &|| sys!(SYS_unshare, libc::CLONE_NEWUTS)),
            ("unshare(NEWCGROUP)", &|| sys!(SYS_unshare, libc::CLONE_NEWCGROUP)),
            ("unshare(NEWTIME)", &|| sys!(SYS_unshare, 0x80)),
        ],
        REFUSED,
    )
}

/// `CAD_OFF` only turns off Ctrl-Alt-Del; in a pid namespace it is EINVAL for those who may.
fn reboot(_: &Facts) -> Outcome {
    let command = libc::LINUX_REBOOT_CMD_CAD_OFF;
    all_refused(
        &[("reboot(CAD_OFF)", &|| {
            sys!(SYS_reboot, libc::LINUX_REBOOT_MAGIC1, libc::LINUX_REBOOT_MAGIC2, command, NULL)
        })],
        REFUSED,
    )
}

fn clocks(_: &Facts) -> Outcome {
    let mut now = [0_u8; 16];
    if sys!(SYS_clock_gettime, libc::CLOCK_REALTIME, &mut now).is_err() {
        return skipped("cannot read the clock");
    }
    let mut micros = now;
    let nanos = i64::from_ne_bytes([now[8], now[9], now[10], now[11], now[12], now[13], now[14], now[15]]);
    micros[8..].copy_from_slice(&(nanos / 1000).to_ne_bytes());
    // ADJ_TICK with the tick as it is would be a change; an offset of zero is the least.
    let mut timex = [0_u8; 208];
    timex[..4].copy_from_slice(&0x0001_u32.to_ne_bytes()); // ADJ_OFFSET
    all_refused(
        &[
            ("clock_settime(now)", &|| sys!(SYS_clock_settime, libc::CLOCK_REALTIME, &now)),
            ("settimeofday(now)", &|| sys!(SYS_settimeofday, &micros, NULL)),
            ("adjtimex(offset 0)", &|| sys!(SYS_adjtimex, &mut timex.clone())),
            ("clock_adjtime(offset 0)", &|| {
                sys!(SYS_clock_adjtime, libc::CLOCK_REALTIME, &mut timex.clone())
            }),
        ],
        REFUSED,
    )
}

fn hostname(_: &Facts) -> Outcome {
    let names = rustix::system::uname();
    let (host, domain) = (names.nodename().to_bytes(), names.domainname().to_bytes());
    all_refused(
        &[
            ("sethostname(same)", &|| sys!(SYS_sethostname, host, host.len())),
            ("setdomainname(same)", &|| sys!(SYS_setdomainname, domain, domain.len())),
        ],
        REFUSED,
    )
}

#[cfg(target_arch = "x86_64")]
fn io_ports(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("iopl(3)", &|| sys!(SYS_iopl, 3)),
            ("ioperm(0x80)", &|| sys!(SYS_ioperm, 0x80, 1, 1)),
            ("modify_ldt(read)", &|| sys!(SYS_modify_ldt, 0, &mut [0_u8; 64], 64)),
        ],
        REFUSED,
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn io_ports(_: &Facts) -> Outcome {
    skipped("this machine has no I/O ports")
}

#[cfg(target_arch = "x86_64")]
fn obsolete_calls(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("uselib", &|| sys!(SYS_uselib, c"/nonexistent")),
            ("ustat", &|| sys!(SYS_ustat, 0, &mut [0_u8; 64])),
            ("sysfs", &|| sys!(SYS_sysfs, 3, NULL, NULL)),
            ("_sysctl", &|| sys!(SYS__sysctl, NULL)),
            ("nfsservctl", &|| sys!(SYS_nfsservctl, 0, NULL, NULL)),
            ("lookup_dcookie", &|| sys!(SYS_lookup_dcookie, 0, NULL, 0)),
        ],
        REFUSED,
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn obsolete_calls(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("nfsservctl", &|| sys!(SYS_nfsservctl, 0, NULL, NULL)),
            ("lookup_dcookie", &|| sys!(SYS_lookup_dcookie, 0, NULL, 0)),
        ],
        REFUSED,
    )
}

/// The x32 table shares the 64-bit architecture number, so a filter that compares numbers alone misses it.
fn x32_calls(_: &Facts) -> Outcome {
    if cfg!(not(target_arch = "x86_64")) {
        return skipped("only on x86-64");
    }
    const X32: i64 = 0x4000_0000;
    merge([("getpid", libc::SYS_getpid), ("unshare(NEWUSER)", libc::SYS_unshare)].map(|(what, nr)| {
        let what = format!("x32 {what}");
        step(&what, || expect_errno(&what, crate::sys::call(nr | X32, [libc::CLONE_NEWUSER.into()]), REFUSED))
    }))
}

#[cfg(target_arch = "x86_64")]
fn ia32_calls(_: &Facts) -> Outcome {
    use crate::isolate::{End, isolate};
    use crate::outcome::{breach, held};
    let attempt = isolate(std::time::Duration::from_secs(3), || {
        let answer = crate::sys::getpid_int80();
        if answer > 0 {
            return breach(format!("int 0x80: getpid answered {answer}"));
        }
        // The gate returns the errno negated, like every system call.
        match i32::try_from(-answer) {
            Ok(code @ 1..4096) => {
                expect_errno::<()>("int 0x80", Err(Errno::from_raw_os_error(code)), REFUSED)
            }
            _ => skipped(format!("int 0x80 answered {answer}")),
        }
    });
    match attempt {
        End::Done(outcome) => outcome,
        End::Signal(libc::SIGSYS) => held("int 0x80: killed by SIGSYS"),
        End::Signal(libc::SIGSEGV) => held("int 0x80: this kernel has no 32-bit calls (SIGSEGV)"),
        other => skipped(format!("int 0x80: {other:?}")),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn ia32_calls(_: &Facts) -> Outcome {
    skipped("only on x86-64")
}
