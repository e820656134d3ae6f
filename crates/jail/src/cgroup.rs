//! Cgroups on any host: v2, v1, both at once, or none that we may use. Used by the host side only.
//!
//! Every sandbox has a cgroup named after its id below a parent `carrel`, so what a crash leaves behind is found
//! by name. The agent and user code share it; the agent is the last to be chosen when memory runs out.
//! An ordinary user of a systemd host gets it from systemd: see [`scope`].

mod delegated;
pub mod freezer;
pub mod scope;
pub mod update;

use std::{fs, io, path::PathBuf};

use carrel_proto::limits::{Enforced, Enforcement, Limits};

use crate::stage::CgroupSpec;
use delegated::{enable, is_slice, make, step_aside, writable};
use scope::{Scope, Scopes};

const PARENT: &str = "carrel";
/// One period of CPU accounting, the kernel's own default.
const CPU_PERIOD_US: u64 = 100_000;

/// What this host offers to this user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hierarchy {
    /// The directory below which we may make cgroups, and the controllers usable there.
    V2 {
        base: PathBuf,
        controllers: Vec<String>,
    },
    /// One directory per controller.
    V1 {
        bases: Vec<(String, PathBuf)>,
    },
    /// v2 cgroups that systemd makes for us, box by box.
    Systemd(Scopes),
    None {
        why: String,
    },
}

const WANTED_V1: [&str; 5] = ["memory", "pids", "cpu", "cpuacct", "freezer"];

/// A mounted cgroup file system, from `/proc/self/mountinfo`.
#[derive(Debug)]
struct Mount {
    root: String,
    at: PathBuf,
    v2: bool,
    controllers: Vec<String>,
}

fn mounts(mountinfo: &str) -> Vec<Mount> {
    let parse = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (root, at) = (left.next()?, left.next()?);
        let mut right = right.split(' ');
        let kind = right.next()?;
        let options = right.nth(1)?;
        matches!(kind, "cgroup" | "cgroup2").then(|| Mount {
            root: root.to_owned(),
            at: PathBuf::from(at),
            v2: kind == "cgroup2",
            controllers: options.split(',').map(str::to_owned).collect(),
        })
    };
    mountinfo.lines().filter_map(parse).collect()
}

/// Where this process is in a hierarchy, from `/proc/self/cgroup`.
fn own_path(membership: &str, controller: Option<&str>) -> Option<String> {
    membership.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let here = match controller {
            None => controllers.is_empty(),
            Some(name) => controllers.split(',').any(|other| other == name),
        };
        here.then(|| path.to_owned())
    })
}

fn below(mount: &Mount, path: &str) -> PathBuf {
    let path = path.strip_prefix(mount.root.trim_end_matches('/')).unwrap_or(path);
    mount.at.join(path.trim_start_matches('/'))
}

impl Hierarchy {
    /// Looks at the host as it is now.
    pub fn probe() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self::find(&read("/proc/self/mountinfo"), &read("/proc/self/cgroup"))
    }

    fn find(mountinfo: &str, membership: &str) -> Self {
        let mounts = mounts(mountinfo);
        let v2 = Self::find_v2(&mounts, membership);
        let v1 = Self::find_v1(&mounts, membership);
        match (v2, v1) {
            (Ok(found), _) | (Err(_), Ok(found)) => found,
            (Err(why2), Err(why1)) => Self::None { why: format!("{why2}; {why1}") },
        }
    }

    fn find_v2(mounts: &[Mount], membership: &str) -> Result<Self, String> {
        let mount = mounts.iter().find(|mount| mount.v2).ok_or("no cgroup v2 is mounted")?;
        let own = own_path(membership, None).ok_or("this process is in no v2 cgroup")?;
        let offered = fs::read_to_string(mount.at.join("cgroup.controllers")).unwrap_or_default();
        if !offered.split_whitespace().any(|name| name == "memory") {
            return Err("cgroup v2 has no memory controller here".into());
        }
        // Root may use the top; others need a subtree that was given to them: their own cgroup or, as systemd does
        // it, the one above when they sit in a leaf of a delegated tree.
        let own = below(mount, &own);
        let candidates = [mount.at.clone(), own.clone(), own.parent().unwrap_or(&own).to_path_buf()];
        let mut why = String::from("no cgroup v2 subtree is writable for this user");
        let usable = |base: &&PathBuf| base.starts_with(&mount.at) && writable(base) && !is_slice(base);
        for base in candidates.iter().filter(usable) {
            match enable(base).or_else(|error| if *base == own { step_aside(base) } else { Err(error) }) {
                Ok(controllers) => return Ok(Self::V2 { base: base.join(PARENT), controllers }),
                Err(error) => why = format!("cgroup v2 below {}: {error}", base.display()),
            }
        }
        Scopes::find(&mount.at, rustix::process::geteuid().as_raw())
            .map(Self::Systemd)
            .map_err(|no_scope| format!("{why}; {no_scope}"))
    }

    fn find_v1(mounts: &[Mount], membership: &str) -> Result<Self, String> {
        let mut bases = Vec::new();
        for controller in WANTED_V1 {
            let found = mounts
                .iter()
                .find(|mount| !mount.v2 && mount.controllers.iter().any(|name| name == controller));
            let Some(mount) = found else { continue };
            let own = own_path(membership, Some(controller)).map(|path| below(mount, &path));
            let base = [Some(mount.at.clone()), own].into_iter().flatten().find(|base| writable(base));
            if let Some(base) = base {
                bases.push((controller.to_owned(), base.join(PARENT)));
            }
        }
        if bases.iter().any(|(name, _)| name == "memory" || name == "pids") {
            Ok(Self::V1 { bases })
        } else {
            Err("no cgroup v1 controller is writable for this user".into())
        }
    }

    fn directories(&self, name: &str) -> Vec<PathBuf> {
        match self {
            Self::V2 { base, .. } => vec![base.join(name)],
            Self::V1 { bases } => {
                let mut all: Vec<PathBuf> = bases.iter().map(|(_, base)| base.join(name)).collect();
                // Two controllers may share one mount.
                all.dedup();
                all
            }
            Self::Systemd(scopes) => scopes.directories(name),
            Self::None { .. } => Vec::new(),
        }
    }

    /// The scope that a box will be in, where systemd has to be asked for one.
    pub fn scope(&self, name: &str) -> Option<Scope> {
        match self {
            Self::Systemd(scopes) => Some(scopes.scope(name)),
            _ => None,
        }
    }

    fn v1(&self, controller: &str, name: &str) -> Option<PathBuf> {
        match self {
            Self::V1 { bases } => {
                bases.iter().find(|(other, _)| other == controller).map(|(_, base)| base.join(name))
            }
            _ => None,
        }
    }

    /// How the limits of a sandbox are held on this host. The disk is not a matter of cgroups.
    pub fn enforced(&self, disk: Enforcement) -> Enforced {
        let by = |controller: &str| match self {
            Self::V2 { controllers, .. } | Self::Systemd(Scopes { controllers, .. })
                if controllers.iter().any(|name| name == controller) =>
            {
                Enforcement::CgroupV2
            }
            Self::V1 { bases } if bases.iter().any(|(name, _)| name == controller) => Enforcement::CgroupV1,
            Self::None { why } => Enforcement::Nothing(why.clone()),
            _ => Enforcement::Nothing(format!("the {controller} controller is not available")),
        };
        let or_rlimit = |enforcement, word: &str| match enforcement {
            Enforcement::Nothing(why) => Enforcement::Rlimit(format!("{word}, because {why}")),
            held => held,
        };
        Enforced {
            memory: or_rlimit(by("memory"), "per process (RLIMIT_DATA)"),
            pids: or_rlimit(by("pids"), "RLIMIT_NPROC in the box's user namespace"),
            cpu: by("cpu"),
            disk,
            freezer: match self {
                Self::V2 { .. } | Self::Systemd(_) => Enforcement::CgroupV2,
                _ => by("freezer"),
            },
        }
    }

    /// Makes the cgroup of a sandbox with its limits; a scope is made by systemd instead.
    pub fn create(&self, name: &str, limits: &Limits) -> io::Result<CgroupSpec> {
        match self {
            Self::None { .. } | Self::Systemd(_) => return Ok(CgroupSpec::default()),
            Self::V2 { .. } | Self::V1 { .. } => {}
        }
        for directory in self.directories(name) {
            make(&directory)?;
        }
        match self {
            Self::None { .. } | Self::Systemd(_) => Ok(CgroupSpec::default()),
            Self::V2 { base, controllers } => {
                if let Some(above) = base.parent() {
                    // Whoever else manages this tree may have turned off what no cgroup of theirs needs.
                    enable(above)?;
                }
                enable(base)?;
                let directory = base.join(name);
                let has = |name: &str| controllers.iter().any(|other| other == name);
                if has("memory") {
                    fs::write(directory.join("memory.max"), limits.memory.0.to_string())?;
                    // Without this a box would get twice its memory where the host has swap. Not there: no swap.
                    let _ = fs::write(directory.join("memory.swap.max"), "0");
                    // The kernel's choice of one victim keeps the interpreter's neighbours alive.
                    let _ = fs::write(directory.join("memory.oom.group"), "0");
                }
                if has("pids") {
                    fs::write(directory.join("pids.max"), limits.pids.to_string())?;
                }
                if has("cpu") {
                    let quota = u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000;
                    fs::write(directory.join("cpu.max"), format!("{quota} {CPU_PERIOD_US}"))?;
                }
                let file = |name: &str| Some(directory.join(name)).filter(|path| path.exists());
                Ok(CgroupSpec {
                    join: Vec::new(),
                    oom: file("memory.events"),
                    memory_peak: file("memory.peak"),
                    cpu: file("cpu.stat"),
                    pids: file("pids.events"),
                    memory: file("memory.current"),
                    processes: file("pids.current"),
                    born_in: Some(directory),
                })
            }
            Self::V1 { .. } => self.create_v1(name, limits),
        }
    }

    fn create_v1(&self, name: &str, limits: &Limits) -> io::Result<CgroupSpec> {
        let memory = self.v1("memory", name);
        if let Some(memory) = &memory {
            let bytes = limits.memory.0.to_string();
            fs::write(memory.join("memory.limit_in_bytes"), &bytes)?;
            // Memory plus swap; absent where swap is not accounted.
            let _ = fs::write(memory.join("memory.memsw.limit_in_bytes"), &bytes);
        }
        let pids = self.v1("pids", name);
        if let Some(pids) = &pids {
            fs::write(pids.join("pids.max"), limits.pids.to_string())?;
        }
        if let Some(cpu) = self.v1("cpu", name) {
            let quota = u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000;
            fs::write(cpu.join("cpu.cfs_period_us"), CPU_PERIOD_US.to_string())?;
            fs::write(cpu.join("cpu.cfs_quota_us"), quota.to_string())?;
        }
        let file = |directory: &Option<PathBuf>, name: &str| {
            directory.as_ref().map(|directory| directory.join(name)).filter(|path| path.exists())
        };
        Ok(CgroupSpec {
            join: self.directories(name).into_iter().map(|directory| directory.join("tasks")).collect(),
            born_in: None,
            oom: file(&memory, "memory.oom_control"),
            memory_peak: file(&memory, "memory.max_usage_in_bytes"),
            cpu: file(&self.v1("cpuacct", name), "cpuacct.usage"),
            pids: file(&pids, "pids.events"),
            memory: file(&memory, "memory.usage_in_bytes"),
            processes: file(&pids, "pids.current"),
        })
    }

    /// Files that a process joins a sandbox's cgroup by, writing `0`.
    pub fn entrances(&self, name: &str) -> Vec<PathBuf> {
        let file = if matches!(self, Self::V1 { .. }) { "tasks" } else { "cgroup.procs" };
        self.directories(name).into_iter().map(|directory| directory.join(file)).collect()
    }

    /// Whether it is certain that there is no cgroup of a sandbox, and so no process of it that is at work.
    pub fn has_none(&self, name: &str) -> bool {
        !matches!(self, Self::None { .. })
            && self.directories(name).iter().all(|directory| !directory.exists())
    }

    /// Every process in a sandbox's cgroup.
    pub fn processes(&self, name: &str) -> Vec<i32> {
        let mut pids: Vec<i32> = self
            .directories(name)
            .iter()
            .filter_map(|directory| fs::read_to_string(directory.join("cgroup.procs")).ok())
            .flat_map(|text| text.lines().filter_map(|line| line.parse().ok()).collect::<Vec<i32>>())
            .collect();
        pids.sort_unstable();
        pids.dedup();
        pids
    }

    /// Ends every process of a sandbox at once, where the kernel can: one that forks as fast as it is killed is caught too.
    pub fn kill(&self, name: &str) {
        if !matches!(self, Self::V1 { .. }) {
            for directory in self.directories(name) {
                let _ = fs::write(directory.join("cgroup.kill"), "1");
            }
        }
    }

    /// Removes a sandbox's cgroup. Its processes must be gone; says so when they are not.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        for directory in self.directories(name) {
            match fs::remove_dir(&directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Removes the parents, unless somebody's sandboxes are in them. For the end of a process: made anew for every sandbox they
    /// would cost as much as its own.
    pub fn leave(&self) {
        for directory in self.directories("-") {
            if let Some(parent) = directory.parent().filter(|parent| parent.ends_with(PARENT)) {
                let _ = fs::remove_dir(parent);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const HYBRID: &str = "25 30 0:22 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
        26 30 0:23 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
        27 30 0:24 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn mounts_of_both_versions_are_told_apart() {
        let found = mounts(HYBRID);
        assert_eq!(found.len(), 3);
        assert!(found[2].v2 && !found[0].v2);
        assert!(found[1].controllers.iter().any(|name| name == "cpuacct"));
    }

    #[test]
    fn membership_names_our_place_in_each_hierarchy() {
        let text = "5:memory:/a/b\n3:cpu,cpuacct:/c\n0::/user.slice/x.scope\n";
        assert_eq!(own_path(text, Some("memory")).as_deref(), Some("/a/b"));
        assert_eq!(own_path(text, Some("cpuacct")).as_deref(), Some("/c"));
        assert_eq!(own_path(text, None).as_deref(), Some("/user.slice/x.scope"));
        assert_eq!(own_path(text, Some("pids")), None);
    }

    #[test]
    fn a_mount_of_a_subtree_shows_paths_below_it() {
        let mount =
            Mount { root: "/docker/x".into(), at: "/sys/fs/cgroup".into(), v2: true, controllers: vec![] };
        assert_eq!(below(&mount, "/docker/x/inner"), Path::new("/sys/fs/cgroup/inner"));
        assert_eq!(below(&mount, "/"), Path::new("/sys/fs/cgroup"));
    }

    #[test]
    fn a_host_without_cgroups_says_why() {
        let Hierarchy::None { why } = Hierarchy::find("", "") else { panic!("found cgroups in nothing") };
        assert!(why.contains("no cgroup v2 is mounted"));
    }
}
