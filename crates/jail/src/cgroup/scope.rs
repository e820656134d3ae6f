//! A cgroup of systemd's making, for an ordinary user: one *scope* per box below the user's service manager.
//!
//! Why not a cgroup of our own in the user's tree: a process may only be put into a cgroup by whoever may write to
//! what is above both its old and its new one, and above a login session that is root alone. systemd asks root for us.
//! It also takes controllers away from groups it has not been told of, and removes a scope with its last process.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use carrel_proto::limits::Limits;

use crate::stage::CgroupSpec;

const PROGRAM: &str = "/usr/bin/systemd-run";
const CONTROL: &str = "/usr/bin/systemctl";
/// Where systemd keeps what its users start; named, so that a host with another default does not surprise us.
const SLICE: &str = "app.slice";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scopes {
    /// The cgroup of the user's service manager.
    manager: PathBuf,
    /// The user's runtime directory: where the manager's sockets are.
    runtime: PathBuf,
    pub(super) controllers: Vec<String>,
}

/// One scope that systemd is asked for.
#[derive(Debug, Clone)]
pub struct Scope {
    unit: String,
    directory: PathBuf,
    /// Of the user whose manager is asked.
    runtime: PathBuf,
}

impl Scopes {
    /// The scopes that user `uid` can have, if its manager runs and holds the memory controller.
    pub(super) fn find(mount: &Path, uid: u32) -> Result<Self, String> {
        let manager = mount.join(format!("user.slice/user-{uid}.slice/user@{uid}.service"));
        let runtime = PathBuf::from(format!("/run/user/{uid}"));
        if !runtime.join("systemd/private").exists() || !Path::new(PROGRAM).exists() {
            return Err("this user has no systemd manager to ask for one".into());
        }
        let offered = fs::read_to_string(manager.join("cgroup.controllers")).unwrap_or_default();
        let controllers: Vec<String> = offered.split_whitespace().map(str::to_owned).collect();
        match controllers.iter().any(|name| name == "memory") {
            true => Ok(Self { manager, runtime, controllers }),
            false => Err("systemd has not given this user's manager the memory controller".into()),
        }
    }

    /// A scope for a box. The moment is part of its name: the scope of a box that has just died may still be known.
    pub(super) fn scope(&self, name: &str) -> Scope {
        let moment = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let unit = format!("carrel-{name}-{:x}.scope", moment.as_nanos());
        Scope { directory: self.manager.join(SLICE).join(&unit), unit, runtime: self.runtime.clone() }
    }

    /// Asks systemd for other limits of a scope: what it does not know of, it would write over one day.
    pub(super) fn change(&self, directory: &Path, limits: &Limits) -> Command {
        let mut command = Command::new(CONTROL);
        command
            .env_clear()
            .env("XDG_RUNTIME_DIR", &self.runtime)
            .args(["--user", "set-property", "--runtime"])
            .arg(directory.file_name().unwrap_or_default())
            .args(properties(limits));
        command
    }

    /// The cgroups of a box: one, and perhaps that of a life before.
    pub(super) fn directories(&self, name: &str) -> Vec<PathBuf> {
        let prefix = format!("carrel-{name}-");
        let entries = fs::read_dir(self.manager.join(SLICE)).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
            .map(|entry| entry.path())
            .collect()
    }
}

/// Limits as systemd names them.
fn properties(limits: &Limits) -> [String; 3] {
    [
        format!("MemoryMax={}", limits.memory.0),
        format!("TasksMax={}", limits.pids),
        format!("CPUQuota={}.{}%", limits.cpu_millis / 10, limits.cpu_millis % 10),
    ]
}

impl Scope {
    /// Runs `program` in it with these limits. It keeps the standard descriptors; systemd-run becomes it.
    pub fn command(&self, limits: &Limits, program: &Path) -> Command {
        let mut command = Command::new(PROGRAM);
        command
            .env_clear()
            .env("XDG_RUNTIME_DIR", &self.runtime)
            .args(["--user", "--scope", "--quiet", "--collect"])
            .arg(format!("--slice={SLICE}"))
            .arg(format!("--unit={}", self.unit))
            // Also keeps systemd from ending the whole scope when the kernel has chosen one process of it for memory.
            .args(["-p", "Delegate=yes"])
            .args(["-p", "MemorySwapMax=0"])
            .args(properties(limits).iter().flat_map(|property| ["-p", property]))
            .arg("--")
            .arg(program);
        command
    }

    /// The meters of a scope. The stage is in it before it opens them.
    pub fn spec(&self) -> CgroupSpec {
        let file = |name: &str| Some(self.directory.join(name));
        CgroupSpec {
            oom: file("memory.events"),
            memory_peak: file("memory.peak"),
            cpu: file("cpu.stat"),
            pids: file("pids.events"),
            memory: file("memory.current"),
            processes: file("pids.current"),
            ..CgroupSpec::default()
        }
    }

    /// Whether a process is where systemd was asked to put it.
    pub fn holds(&self, pid: i32) -> bool {
        fs::read_to_string(format!("/proc/{pid}/cgroup"))
            .is_ok_and(|text| text.lines().any(|line| line.ends_with(&self.unit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_asked_for_with_every_limit() {
        let scopes = Scopes {
            manager: "/sys/fs/cgroup/user.slice/user-7.slice/user@7.service".into(),
            runtime: "/run/user/7".into(),
            controllers: vec![],
        };
        let scope = scopes.scope("sbx_a");
        let limits = Limits { cpu_millis: 1255, pids: 9, ..Limits::default() };
        let command = scope.command(&limits, Path::new("/agent"));
        let line: Vec<String> = command.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect();
        for wanted in ["MemoryMax=536870912", "MemorySwapMax=0", "TasksMax=9", "CPUQuota=125.5%", "/agent"] {
            assert!(line.iter().any(|arg| arg == wanted), "{wanted} is not in {line:?}");
        }
        assert!(scope.spec().oom.is_some_and(|path| path.starts_with("/sys/fs/cgroup/user.slice")));
        let change = scopes.change(&scope.directory, &limits);
        let line: Vec<String> = change.get_args().map(|arg| arg.to_string_lossy().into_owned()).collect();
        let wanted = ["MemoryMax=536870912", "TasksMax=9", "CPUQuota=125.5%"];
        assert_eq!(line[3..], [&[scope.unit.as_str()], &wanted[..]].concat());
        assert_ne!(scope.unit, scopes.scope("sbx_a").unit, "a new life has a name of its own");
    }
}
