//! Other limits for a cgroup that is in use: all of them, or none.
//!
//! v2 lets a limit fall below what is in use and then kills; v1 refuses. Both are asked first what is in use, so that
//! changing a limit never ends a process.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use carrel_proto::limits::{ByteSize, Limits};

use super::{CPU_PERIOD_US, Hierarchy};

/// Why limits were not changed. Then they are as they were.
#[derive(Debug)]
pub enum UpdateError {
    /// So much memory is in use and cannot be given back.
    InUse(ByteSize),
    Io(io::Error),
}

impl From<io::Error> for UpdateError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// A limit's file and what is to be in it.
type Write = (PathBuf, String);

impl Hierarchy {
    /// Gives a sandbox's cgroup other limits.
    pub fn update(&self, name: &str, limits: &Limits) -> Result<(), UpdateError> {
        match self {
            Self::None { .. } => Ok(()),
            Self::V2 { base, controllers } => {
                let directory = base.join(name);
                let has = |name: &str| controllers.iter().any(|other| other == name);
                let mut writes = Vec::new();
                if has("memory") {
                    room(&directory, "memory.current", limits.memory)?;
                    writes.push((directory.join("memory.max"), limits.memory.0.to_string()));
                }
                if has("pids") {
                    writes.push((directory.join("pids.max"), limits.pids.to_string()));
                }
                if has("cpu") {
                    let text = format!("{} {CPU_PERIOD_US}", quota(limits));
                    writes.push((directory.join("cpu.max"), text));
                }
                apply(writes, limits)
            }
            Self::V1 { .. } => {
                let mut writes = Vec::new();
                if let Some(memory) = self.v1("memory", name) {
                    room(&memory, "memory.usage_in_bytes", limits.memory)?;
                    writes.extend(memory_v1(&memory, limits.memory)?);
                }
                if let Some(pids) = self.v1("pids", name) {
                    writes.push((pids.join("pids.max"), limits.pids.to_string()));
                }
                if let Some(cpu) = self.v1("cpu", name) {
                    writes.push((cpu.join("cpu.cfs_quota_us"), quota(limits).to_string()));
                }
                apply(writes, limits)
            }
            Self::Systemd(scopes) => {
                for directory in scopes.directories(name) {
                    room(&directory, "memory.current", limits.memory)?;
                    let output = scopes.change(&directory, limits).output()?;
                    if !output.status.success() {
                        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
                        return Err(
                            io::Error::other(format!("systemd did not change the scope: {why}")).into()
                        );
                    }
                }
                Ok(())
            }
        }
    }
}

fn quota(limits: &Limits) -> u64 {
    u64::from(limits.cpu_millis) * CPU_PERIOD_US / 1000
}

/// Memory plus swap may never be below memory alone, so a larger one goes first and a smaller one last.
fn memory_v1(directory: &Path, wanted: ByteSize) -> io::Result<Vec<Write>> {
    let memory = directory.join("memory.limit_in_bytes");
    let both = directory.join("memory.memsw.limit_in_bytes");
    let now: u64 = fs::read_to_string(&memory)?.trim().parse().unwrap_or(u64::MAX);
    let text = wanted.0.to_string();
    let mut writes = vec![(memory, text.clone())];
    if both.exists() {
        let at = if wanted.0 > now { 0 } else { 1 };
        writes.insert(at, (both, text));
    }
    Ok(writes)
}

/// Whether what is in use, but for what the kernel keeps of files, fits.
fn room(directory: &Path, used: &str, limit: ByteSize) -> Result<(), UpdateError> {
    let used: u64 = fs::read_to_string(directory.join(used))?.trim().parse().unwrap_or(0);
    let stat = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
    let held = used.saturating_sub(cached(&stat));
    if held > limit.0 { Err(UpdateError::InUse(ByteSize(held))) } else { Ok(()) }
}

fn cached(stat: &str) -> u64 {
    let fields = stat.lines().filter_map(|line| line.split_once(' '));
    fields
        .filter(|(name, _)| matches!(*name, "active_file" | "inactive_file"))
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .sum()
}

fn apply(writes: Vec<Write>, limits: &Limits) -> Result<(), UpdateError> {
    let mut before: Vec<Write> = Vec::new();
    for (path, text) in writes {
        let old = fs::read_to_string(&path);
        match old.and_then(|old| fs::write(&path, &text).map(|()| old)) {
            Ok(old) => before.push((path, old.trim().to_owned())),
            Err(error) => {
                for (path, old) in before.into_iter().rev() {
                    // It was so a moment ago.
                    let _ = fs::write(path, old);
                }
                return Err(match error.kind() {
                    io::ErrorKind::ResourceBusy => UpdateError::InUse(limits.memory),
                    _ => error.into(),
                });
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(directory: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            fs::write(directory.join(name), text).unwrap();
        }
    }

    #[test]
    fn files_in_memory_are_no_reason_to_refuse() {
        let directory = tempfile::tempdir().unwrap();
        let stat = "cache 9\nactive_file 300\ninactive_file 600\ntotal_active_file 300\n";
        files(directory.path(), &[("memory.current", "1000\n"), ("memory.stat", stat)]);
        assert!(room(directory.path(), "memory.current", ByteSize(100)).is_ok());
        let refused = room(directory.path(), "memory.current", ByteSize(99));
        assert!(matches!(refused, Err(UpdateError::InUse(ByteSize(100)))));
    }

    #[test]
    fn memory_and_swap_change_in_the_order_that_the_kernel_takes() {
        let directory = tempfile::tempdir().unwrap();
        files(
            directory.path(),
            &[("memory.limit_in_bytes", "500\n"), ("memory.memsw.limit_in_bytes", "500\n")],
        );
        let order = |wanted| {
            let writes = memory_v1(directory.path(), ByteSize(wanted)).unwrap();
            writes.iter().map(|(path, _)| path.ends_with("memory.limit_in_bytes")).collect::<Vec<_>>()
        };
        assert_eq!(order(400), [true, false]);
        assert_eq!(order(600), [false, true]);
    }

    #[test]
    fn what_fails_in_the_middle_changes_nothing() {
        let directory = tempfile::tempdir().unwrap();
        files(directory.path(), &[("a", "1\n"), ("b", "2\n")]);
        let at = |name: &str| directory.path().join(name);
        let writes = vec![(at("a"), "7".into()), (at("b"), "8".into()), (at("missing/c"), "9".into())];
        assert!(apply(writes, &Limits::default()).is_err());
        let now = |name: &str| fs::read_to_string(at(name)).unwrap().trim().to_owned();
        assert_eq!((now("a"), now("b")), ("1".into(), "2".into()));
    }
}
