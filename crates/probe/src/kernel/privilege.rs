//! kernel, privilege: what this process is, and whether it can become more.

use crate::facts::Facts;
use crate::isolate::{all_refused, step};
use crate::look;
use crate::outcome::{Outcome, REFUSED, Verdict, breach, expect_errno, held, merge, skipped};
use crate::sys::{NULL, sys};
use crate::table::Probe;
use rustix::io::Errno;
use std::fs;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("no-new-privs", "run without the no_new_privs flag", |_| flag("NoNewPrivs", "1")),
    Probe::light("seccomp-mode", "run without a system call filter", |_| flag("Seccomp", "2")),
    Probe::light("capabilities", "have any capability", capabilities),
    Probe::light("gain-capabilities", "regain capabilities", gain_capabilities),
    Probe::light("become-root", "become root or take other ids", become_root),
    Probe::light("not-root", "be root", not_root),
    Probe::light("id-maps", "be mapped to the host's root", id_maps),
    Probe::light("change-id-maps", "write one's own id maps", |_| {
        merge(["uid_map", "gid_map", "setgroups", "projid_map"].map(write_self))
    }),
    Probe::light("filter-loosen", "loosen the filter with a second one", filter_loosen),
    Probe::light("null-page", "map the page at address zero", null_page),
    Probe::light("dumpable", "write core files as the system or take back no_new_privs", dumpable),
];

fn flag(field: &str, wanted: &str) -> Outcome {
    match look::status_field(field) {
        None => skipped(format!("/proc/self/status has no {field}")),
        Some(value) if value == wanted => held(format!("{field}: {value}")),
        Some(value) => breach(format!("{field}: {value}, expected {wanted}")),
    }
}

fn capabilities(_: &Facts) -> Outcome {
    merge(["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"].map(|set| flag(set, "0000000000000000")))
}

fn gain_capabilities(_: &Facts) -> Outcome {
    let mut header = [0_u8; 8];
    header[..4].copy_from_slice(&0x2008_0522_u32.to_ne_bytes()); // version 3
    let mut everything = [0_u8; 24];
    for (field, value) in [(0, u32::MAX), (4, u32::MAX), (8, u32::MAX), (12, 0x1ff), (16, 0x1ff), (20, 0x1ff)]
    {
        everything[field..field + 4].copy_from_slice(&value.to_ne_bytes());
    }
    let calls = all_refused(
        &[
            ("capset(all)", &|| sys!(SYS_capset, &header, &everything)),
            ("prctl(CAP_AMBIENT_RAISE, SYS_ADMIN)", &|| {
                sys!(SYS_prctl, libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_RAISE, 21, 0, 0)
            }),
            ("prctl(SET_SECUREBITS)", &|| sys!(SYS_prctl, libc::PR_SET_SECUREBITS, 0, 0, 0, 0)),
        ],
        REFUSED,
    );
    merge([calls, flag("CapEff", "0000000000000000")])
}

/// EINVAL is how the kernel refuses an id that the user namespace does not map.
fn become_root(_: &Facts) -> Outcome {
    let allowed = [REFUSED, &[Errno::INVAL]].concat();
    all_refused(
        &[
            ("setuid(0)", &|| sys!(SYS_setuid, 0)),
            ("setgid(0)", &|| sys!(SYS_setgid, 0)),
            ("setresuid(0)", &|| sys!(SYS_setresuid, 0, 0, 0)),
            ("setresgid(0)", &|| sys!(SYS_setresgid, 0, 0, 0)),
            ("setresuid(65534)", &|| sys!(SYS_setresuid, 65534, 65534, 65534)),
            ("setgroups([0])", &|| sys!(SYS_setgroups, 1, &[0_u8; 4])),
            // These return the old id whatever they did, so what they did is looked up.
            ("setfsuid(0)", &|| {
                let _ = sys!(SYS_setfsuid, 0);
                if sys!(SYS_setfsuid, -1) == Ok(0) && !rustix::process::getuid().is_root() {
                    Ok(0)
                } else {
                    Err(Errno::PERM)
                }
            }),
        ],
        &allowed,
    )
}

fn not_root(_: &Facts) -> Outcome {
    let (uid, euid) = (rustix::process::getuid().as_raw(), rustix::process::geteuid().as_raw());
    let (gid, egid) = (rustix::process::getgid().as_raw(), rustix::process::getegid().as_raw());
    let text = format!("uid {uid}/{euid}, gid {gid}/{egid}");
    if [uid, euid, gid, egid].contains(&0) { breach(text) } else { held(text) }
}

fn id_maps(_: &Facts) -> Outcome {
    merge(["/proc/self/uid_map", "/proc/self/gid_map"].map(|path| match fs::read_to_string(path) {
        Err(error) => skipped(format!("{path}: {error}")),
        Ok(map) => judge_map(path, &map),
    }))
}

/// Each line is `inside outside count`. An id equal to one's own on the host is fine; the host's root is not.
fn judge_map(path: &str, map: &str) -> Outcome {
    let lines: Vec<Vec<u64>> =
        map.lines().map(|line| line.split_whitespace().filter_map(|n| n.parse().ok()).collect()).collect();
    let text: Vec<String> =
        map.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    let text = format!("{path}: {}", text.join(", "));
    if look::maps_everything(map) {
        breach(format!("{text}: the host's own user namespace"))
    } else if lines.iter().any(|line| line.get(1) == Some(&0) && line.get(2) > Some(&0)) {
        breach(format!("{text}: an id in here is the outer root"))
    } else if lines.is_empty() {
        held(format!("{path}: maps nothing"))
    } else {
        held(text)
    }
}

fn write_self(file: &str) -> Outcome {
    let path = format!("/proc/self/{file}");
    step(&path, || {
        let text: &[u8] = if file == "setgroups" { b"allow" } else { b"0 0 1\n" };
        match fs::OpenOptions::new().write(true).open(&path) {
            Err(error) => {
                expect_errno::<()>(&path, Err(crate::outcome::errno_of(&error)), crate::outcome::NO_WRITE)
            }
            Ok(file) => {
                let written = rustix::io::write(&file, text);
                let now = fs::read_to_string(&path).unwrap_or_default();
                match written {
                    // `setgroups` accepts what it already says.
                    Ok(_) if path.ends_with("setgroups") && now.trim() == "allow" => {
                        held(format!("{path}: allow, as before"))
                    }
                    written => expect_errno(&path, written, &[REFUSED, &[Errno::INVAL]].concat()),
                }
            }
        }
    })
}

/// A filter that allows everything, on top: the older one must still refuse.
fn filter_loosen(_: &Facts) -> Outcome {
    let forbidden = || sys!(SYS_unshare, libc::CLONE_NEWUSER);
    step("seccomp", || {
        let mut instruction = [0_u8; 8];
        instruction[..2].copy_from_slice(&6_u16.to_ne_bytes()); // BPF_RET | BPF_K
        instruction[4..].copy_from_slice(&libc::SECCOMP_RET_ALLOW.to_ne_bytes());
        let mut program = [0_u8; 16];
        program[..2].copy_from_slice(&1_u16.to_ne_bytes());
        program[8..].copy_from_slice(&instruction.as_ptr().expose_provenance().to_ne_bytes());
        let installed = sys!(SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &program);
        let after = expect_errno("unshare(NEWUSER) under a second filter", forbidden(), REFUSED);
        let how = installed.map_or_else(crate::outcome::name, |_| "installed".to_owned());
        Outcome { verdict: after.verdict, detail: format!("second filter: {how}; {}", after.detail) }
    })
}

/// A mapped page zero turns kernel null dereferences into code execution.
fn null_page(_: &Facts) -> Outcome {
    step("mmap(0)", || {
        const MMAP_PAGE_ZERO: i32 = 0x0010_0000;
        let personality = sys!(SYS_personality, MMAP_PAGE_ZERO).is_ok();
        let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mapped = sys!(SYS_mmap, 0, 4096, libc::PROT_READ, flags, -1, 0);
        let outcome = expect_errno("mmap at 0", mapped, REFUSED);
        if outcome.verdict == Verdict::Held && personality {
            return held(format!("{} (even with the MMAP_PAGE_ZERO personality)", outcome.detail));
        }
        outcome
    })
}

/// `PR_SET_DUMPABLE` 2 is reserved to the system: it writes core files as root.
fn dumpable(_: &Facts) -> Outcome {
    let allowed = [REFUSED, &[Errno::INVAL]].concat();
    all_refused(
        &[
            ("prctl(SET_DUMPABLE, 2)", &|| sys!(SYS_prctl, libc::PR_SET_DUMPABLE, 2, 0, 0, 0)),
            ("prctl(SET_NO_NEW_PRIVS, 0)", &|| sys!(SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0)),
            ("prctl(SET_MM)", &|| sys!(SYS_prctl, libc::PR_SET_MM, libc::PR_SET_MM_BRK, NULL, 0, 0)),
        ],
        &allowed,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_judged_by_whom_they_reach_outside() {
        assert_eq!(judge_map("m", "0 0 4294967295\n").verdict, Verdict::Breach);
        assert_eq!(judge_map("m", "1000 0 1\n").verdict, Verdict::Breach);
        assert_eq!(judge_map("m", "1000 1000 1\n").verdict, Verdict::Held);
        assert_eq!(judge_map("m", "1000 165536 1\n").verdict, Verdict::Held);
        assert_eq!(judge_map("m", "").verdict, Verdict::Held);
    }
}
