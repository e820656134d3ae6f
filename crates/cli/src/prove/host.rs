//! What only the outside can see of a box: rights, namespaces and cgroups of its processes, and what it leaves behind.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use carrel_engine::{Engine, Record};
use carrel_proto::limits::Enforcement;

use super::report::{Finding, Verdict};

pub(super) fn directory(engine: &Engine, record: &Record) -> PathBuf {
    engine.state_directory().join("sandboxes").join(record.id.as_str())
}

/// This host's own addresses beyond loopback, as the kernel's routing table has them.
pub(super) fn addresses() -> Vec<String> {
    let table = fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    let mut last = "";
    let mut found = BTreeSet::new();
    for line in table.lines() {
        match line.trim().strip_prefix("|-- ") {
            Some(address) => last = address,
            None if line.contains("host LOCAL") && !last.starts_with("127.") => {
                found.insert(last.to_owned());
            }
            None => {}
        }
    }
    found.into_iter().collect()
}

/// A variable of this process that no box has reason to have.
pub(super) fn private_variable() -> Option<String> {
    const ORDINARY: [&str; 14] = [
        "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TERM", "PWD", "OLDPWD", "SHLVL",
        "_", "TMPDIR", "TZ",
    ];
    let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    let private = names.filter(|name| !ORDINARY.contains(&name.as_str()) && !name.starts_with("LC_"));
    // The most telling first: what sounds like a secret, then whatever there is.
    private
        .max_by_key(|name| (["TOKEN", "SECRET", "KEY"].iter().any(|word| name.contains(word)), name.clone()))
}

fn pids() -> Vec<i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Processes of the host whose command line has `text`, except this one.
pub(super) fn processes_with(text: &str) -> Vec<i32> {
    let has = |pid: &i32| {
        fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.windows(text.len()).any(|part| part == text.as_bytes()))
    };
    pids().into_iter().filter(has).collect()
}

/// `/proc/PID/status` by key.
fn status(pid: i32) -> Option<BTreeMap<String, String>> {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pair =
        |line: &str| line.split_once(':').map(|(key, value)| (key.to_owned(), value.trim().to_owned()));
    Some(text.lines().filter_map(pair).collect())
}

/// A process and everything below it.
fn tree(root: i32) -> Vec<i32> {
    let parent = |pid: i32| status(pid)?.get("PPid")?.parse::<i32>().ok();
    let parents: Vec<(i32, i32)> = pids().into_iter().filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut found = vec![root];
    let mut next = 0;
    while let Some(above) = found.get(next).copied() {
        found.extend(parents.iter().filter(|(_, parent)| *parent == above).map(|(pid, _)| *pid));
        next += 1;
    }
    found
}

/// Capabilities, as bits of the kernel's numbers.
const KILL: u64 = 1 << 5;
/// What an init starts processes of the box's user with: their ids, and the loss of everything else.
const INIT: u64 = KILL | 1 << 6 | 1 << 7 | 1 << 8;
/// CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, SETPCAP, SYS_CHROOT, SYS_PTRACE, SYS_ADMIN: what the agent needs to
/// make sessions, all of it only inside the box's user namespace.
const AGENT: u64 = 1 | 1 << 1 | 1 << 3 | KILL | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 18 | 1 << 19 | 1 << 21;

/// What a process has that it should not.
fn too_much(pid: i32, status: &BTreeMap<String, String>, allowed: u64) -> Vec<String> {
    let name = status.get("Name").map_or("?", String::as_str);
    let mut wrong = Vec::new();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        let bits = status.get(set).and_then(|text| u64::from_str_radix(text, 16).ok());
        match bits {
            Some(bits) if bits & !allowed == 0 => {}
            Some(bits) => wrong.push(format!("{name} ({pid}) has {set} {bits:x}")),
            None => wrong.push(format!("{name} ({pid}): {set} is not readable")),
        }
    }
    if status.get("NoNewPrivs").map(String::as_str) != Some("1") {
        wrong.push(format!("{name} ({pid}) may gain privileges by exec"));
    }
    wrong
}

const NAMESPACES: [&str; 7] = ["user", "pid", "mnt", "net", "ipc", "uts", "cgroup"];

fn namespace(pid: &str, kind: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()
}

/// Rights and namespaces of every process of a box.
pub(super) fn processes(record: &Record) -> Vec<Finding> {
    let Some(placed) = &record.placed else { return Vec::new() };
    let (mut user_wrong, mut own_wrong, mut space_wrong) = (Vec::new(), Vec::new(), Vec::new());
    let (mut users, mut own, mut spaces) = (0, 0, 0);
    for pid in tree(placed.pid) {
        // Gone meanwhile is no finding.
        let Some(status) = status(pid) else { continue };
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        if line.is_empty() {
            continue;
        }
        if line == b"carrel\0agent\0" {
            own += 1;
            let is_init = status.get("Name").is_some_and(|name| name == "carrel-init");
            let allowed = match pid {
                _ if pid == placed.pid => AGENT,
                _ if is_init => INIT,
                _ => KILL,
            };
            own_wrong.extend(too_much(pid, &status, allowed));
        } else {
            users += 1;
            user_wrong.extend(too_much(pid, &status, 0));
            if status.get("Seccomp").map(String::as_str) != Some("2") {
                user_wrong.push(format!("process {pid} has no system call filter"));
            }
            let uid = placed.owner.0.to_string();
            if status.get("Uid").is_none_or(|ids| ids.split_whitespace().any(|id| id != uid)) {
                user_wrong.push(format!("process {pid} is not the box's user {uid}"));
            }
        }
        for kind in NAMESPACES {
            // Closed to an ordinary user where the process is closed to inspection.
            let Some(theirs) = namespace(&pid.to_string(), kind) else { continue };
            spaces += 1;
            if Some(&theirs) == namespace("self", kind).as_ref() {
                space_wrong.push(format!("process {pid} is in the host's {kind} namespace"));
            }
        }
    }
    let judged = |name: &str, fine: String, wrong: &[String], seen: usize| match seen {
        0 => Finding::host("processes", name, Verdict::Skipped, "nothing to see"),
        _ => Finding::host_judged("processes", name, fine, wrong),
    };
    vec![
        judged(
            "rights-of-user-code",
            format!("{users} processes: no capability, filtered, own user"),
            &user_wrong,
            users,
        ),
        judged(
            "rights-of-supervisors",
            format!("{own} processes of carrel have only what they need"),
            &own_wrong,
            own,
        ),
        judged(
            "namespaces-from-outside",
            format!("{spaces} looked at, none is the host's"),
            &space_wrong,
            spaces,
        ),
    ]
}

/// A cgroup directory of a process for one controller, by the mounts of this host.
fn cgroup(pid: i32, controller: Option<&str>) -> Option<PathBuf> {
    let membership = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    let path = membership.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let here = controller
            .map_or(controllers.is_empty(), |name| controllers.split(',').any(|other| other == name));
        here.then_some(path)
    })?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    mounts.lines().find_map(|line| {
        let (left, right) = line.split_once(" - ")?;
        let (left, right): (Vec<&str>, Vec<&str>) = (left.split(' ').collect(), right.split(' ').collect());
        let fits = match controller {
            None => *right.first()? == "cgroup2",
            Some(name) => {
                *right.first()? == "cgroup" && right.get(2)?.split(',').any(|option| option == name)
            }
        };
        let (root, at) = (left.get(3)?, left.get(4)?);
        let below = path.strip_prefix(root.trim_end_matches('/')).unwrap_or(path);
        fits.then(|| Path::new(at).join(below.trim_start_matches('/')))
    })
}

/// Whether the limits that are said to be held by cgroups stand there, with every process of the box under them.
pub(super) fn cgroups(record: &Record) -> Vec<Finding> {
    let Some(placed) = &record.placed else { return Vec::new() };
    let limits = &record.spec.limits;
    let read = |directory: &Path, file: &str| {
        fs::read_to_string(directory.join(file))
            .map(|text| text.trim().to_owned())
            .unwrap_or_else(|error| error.to_string())
    };
    let quota = |text: &str| text.parse::<u64>().ok();
    let (mut wrong, mut outside, mut seen) = (Vec::new(), Vec::new(), Vec::new());
    let enforced =
        [("memory", &placed.enforced.memory), ("pids", &placed.enforced.pids), ("cpu", &placed.enforced.cpu)];
    for (controller, enforcement) in enforced {
        let v1 = match enforcement {
            Enforcement::CgroupV1 => true,
            Enforcement::CgroupV2 => false,
            _ => continue,
        };
        let own = |pid: i32| cgroup(pid, v1.then_some(controller));
        let Some(directory) = own(placed.pid) else {
            wrong.push(format!("the {controller} cgroup is not to be found"));
            continue;
        };
        let (said, right) = match (controller, v1) {
            ("memory", _) => {
                let said = read(&directory, if v1 { "memory.limit_in_bytes" } else { "memory.max" });
                let right = quota(&said) == Some(limits.memory.0);
                (said, right)
            }
            ("pids", _) => {
                let said = read(&directory, "pids.max");
                let right = quota(&said) == Some(limits.pids.into());
                (said, right)
            }
            (_, true) => {
                let (said, period) =
                    (read(&directory, "cpu.cfs_quota_us"), read(&directory, "cpu.cfs_period_us"));
                let right = quota(&said)
                    .zip(quota(&period))
                    .is_some_and(|(q, p)| q * 1000 == p * u64::from(limits.cpu_millis));
                (format!("{said}/{period}"), right)
            }
            (_, false) => {
                let said = read(&directory, "cpu.max");
                let pair = said.split_once(' ').and_then(|(q, p)| quota(q).zip(quota(p)));
                let right = pair.is_some_and(|(q, p)| q * 1000 == p * u64::from(limits.cpu_millis));
                (said, right)
            }
        };
        seen.push(format!("{controller} {said}"));
        if !right {
            wrong.push(format!("{controller} is {said} in {}", directory.display()));
        }
        // A dead process that nobody has collected yet is in no cgroup any more.
        let dead = |pid: i32| {
            status(pid).is_none_or(|all| all.get("State").is_some_and(|state| state.starts_with(['Z', 'X'])))
        };
        let stray = |pid: &i32| own(*pid).is_some_and(|other| !other.starts_with(&directory)) && !dead(*pid);
        outside.extend(
            tree(placed.pid)
                .into_iter()
                .filter(stray)
                .map(|pid| format!("process {pid} is outside {controller}")),
        );
    }
    let judged = |name: &str, fine: String, wrong: &[String]| match seen.is_empty() {
        true => {
            Finding::host("exhaustion", name, Verdict::Skipped, "no limit is held by a cgroup on this host")
        }
        false => Finding::host_judged("exhaustion", name, fine, wrong),
    };
    vec![
        judged("cgroup-limits", seen.join(", "), &wrong),
        judged("cgroup-membership", "every process of the box is in its cgroups".to_owned(), &outside),
    ]
}

/// Where a box is on the host, noted while it lives.
#[derive(Debug)]
pub(super) struct Trace {
    id: String,
    directory: PathBuf,
    pid: Option<i32>,
    cgroups: BTreeSet<PathBuf>,
}

impl Trace {
    pub(super) fn of(engine: &Engine, record: &Record) -> Self {
        let pid = record.placed.as_ref().map(|placed| placed.pid);
        let id = record.id.as_str().to_owned();
        let controllers = [None, Some("memory"), Some("pids"), Some("cpu"), Some("freezer")];
        let cgroups = controllers.into_iter().filter_map(|name| cgroup(pid?, name));
        // A cgroup that systemd made has more in its name.
        let named = cgroups.filter(|path| path.to_string_lossy().contains(&id)).collect();
        Self { directory: directory(engine, record), pid, cgroups: named, id }
    }

    /// What is still there of a closed box.
    pub(super) fn left(&self) -> Vec<String> {
        let mut left = Vec::new();
        if self.directory.exists() {
            left.push(format!("directory {}", self.directory.display()));
        }
        let is_agent =
            |pid: &i32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == b"carrel\0agent\0");
        let same = |pid: &i32| {
            // As far as we may look: another sandbox's agent can have got the same number since.
            fs::read(format!("/proc/{pid}/environ"))
                .map_or(true, |all| String::from_utf8_lossy(&all).contains(&self.id))
        };
        if let Some(pid) = self.pid.filter(is_agent).filter(same) {
            left.push(format!("process {pid} of {}", self.id));
        }
        if fs::read_to_string("/proc/self/mountinfo").is_ok_and(|mounts| mounts.contains(&self.id)) {
            left.push(format!("a mount of {}", self.id));
        }
        left.extend(
            self.cgroups.iter().filter(|path| path.exists()).map(|path| format!("cgroup {}", path.display())),
        );
        left
    }
}
