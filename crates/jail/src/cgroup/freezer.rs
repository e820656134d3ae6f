//! Stops every process of a cgroup where it stands, and lets them go on.
//!
//! v2 has a file to write and one that says when it is done, and its frozen processes can be killed. v1 takes back its word
//! by itself: `FREEZING` becomes `FROZEN` only when somebody reads it, and a frozen process that is killed dies when it is
//! thawed, so whoever ends a box [thaws](Hierarchy::thaw) it after the signal. Processes that are forked meanwhile are born
//! frozen in both.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Hierarchy, own_path};

/// A process in the middle of something that the kernel does not interrupt keeps its cgroup from being frozen. So long is
/// waited for it: reads and writes of a disk that is not broken take less.
const PATIENCE: Duration = Duration::from_secs(2);
/// v1 tells only those who ask: first this soon, then less often.
const FIRST_LOOK: Duration = Duration::from_micros(30);
const LAST_LOOK: Duration = Duration::from_millis(5);

/// Why a cgroup was not frozen. It is thawed then.
#[derive(Debug)]
pub enum FreezeError {
    /// This host has no freezer for it.
    Missing(String),
    /// A process did not stop in time.
    Late,
    Io(io::Error),
}

impl From<io::Error> for FreezeError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The freezer of one cgroup.
#[derive(Debug)]
enum Freezer {
    V1(PathBuf),
    V2(PathBuf),
}

impl Hierarchy {
    fn freezers(&self, name: &str) -> Vec<Freezer> {
        match self {
            Self::V1 { .. } => self.v1("freezer", name).into_iter().map(Freezer::V1).collect(),
            Self::V2 { .. } | Self::Systemd(_) => {
                self.directories(name).into_iter().map(Freezer::V2).collect()
            }
            Self::None { .. } => Vec::new(),
        }
    }

    /// Stops every process of a sandbox and waits until they stand. On error they all go on.
    pub fn freeze(&self, name: &str) -> Result<(), FreezeError> {
        let freezers = self.freezers(name);
        if freezers.is_empty() {
            return Err(FreezeError::Missing(match self {
                Self::None { why } => why.clone(),
                _ => "the freezer controller is not available".into(),
            }));
        }
        let deadline = Instant::now() + PATIENCE;
        for freezer in &freezers {
            if let Err(error) = freezer.freeze(deadline) {
                for freezer in &freezers {
                    // The error that matters is the first one.
                    let _ = freezer.thaw();
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Lets every process of a sandbox go on. Nothing to do is no error.
    pub fn thaw(&self, name: &str) -> io::Result<()> {
        self.freezers(name).iter().try_for_each(Freezer::thaw)
    }

    /// Whether a sandbox's processes stand, or were told to.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.freezers(name).iter().any(Freezer::is_frozen)
    }

    /// After a frozen process was killed: lets it die. Its cgroup is found by the process, and left alone if it is not one
    /// of ours.
    pub fn let_die(&self, pid: i32) {
        let Self::V1 { bases } = self else { return };
        let membership = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let Some(path) = own_path(&membership, Some("freezer")).map(PathBuf::from) else { return };
        let (Some(name), Some(parent)) = (path.file_name().and_then(|name| name.to_str()), path.parent())
        else {
            return;
        };
        let ours = bases
            .iter()
            .any(|(controller, base)| controller == "freezer" && base.file_name() == parent.file_name());
        if ours {
            // Gone meanwhile: so is the process.
            let _ = self.thaw(name);
        }
    }
}

impl Freezer {
    fn freeze(&self, deadline: Instant) -> Result<(), FreezeError> {
        match self {
            Self::V1(directory) => {
                let file = directory.join("freezer.state");
                fs::write(&file, "FROZEN")?;
                let mut pause = FIRST_LOOK;
                // Reading is what makes the kernel look again.
                while fs::read_to_string(&file)?.trim() != "FROZEN" {
                    if Instant::now() > deadline {
                        return Err(FreezeError::Late);
                    }
                    thread::sleep(pause);
                    pause = (pause * 2).min(LAST_LOOK);
                }
                Ok(())
            }
            Self::V2(directory) => {
                let file = directory.join("cgroup.events");
                // Opened first, so that no change between reading and waiting is missed.
                let events = File::open(&file)?;
                fs::write(directory.join("cgroup.freeze"), "1")?;
                while !says_frozen(&file)? {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Err(FreezeError::Late);
                    }
                    let timeout = Timespec {
                        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
                        tv_nsec: left.subsec_nanos().into(),
                    };
                    poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(&timeout))
                        .map_err(io::Error::from)?;
                }
                Ok(())
            }
        }
    }

    fn thaw(&self) -> io::Result<()> {
        let (file, word) = match self {
            Self::V1(directory) => (directory.join("freezer.state"), "THAWED"),
            Self::V2(directory) => (directory.join("cgroup.freeze"), "0"),
        };
        match fs::write(file, word) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            // The cgroup was removed while its file was open.
            Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => Ok(()),
            other => other,
        }
    }

    fn is_frozen(&self) -> bool {
        let (file, free) = match self {
            Self::V1(directory) => (directory.join("freezer.state"), "THAWED"),
            Self::V2(directory) => (directory.join("cgroup.freeze"), "0"),
        };
        fs::read_to_string(file).is_ok_and(|word| word.trim() != free)
    }
}

fn says_frozen(events: &Path) -> io::Result<bool> {
    Ok(fs::read_to_string(events)?.lines().any(|line| line == "frozen 1"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn v1(place: &Path) -> Hierarchy {
        Hierarchy::V1 { bases: vec![("freezer".into(), place.to_path_buf())] }
    }

    #[test]
    fn what_is_not_there_is_thawed_and_cannot_be_frozen() {
        let place = tempfile::tempdir().unwrap();
        let hierarchy = v1(place.path());
        hierarchy.thaw("sbx_a").unwrap();
        assert!(!hierarchy.is_frozen("sbx_a"));
        assert!(matches!(hierarchy.freeze("sbx_a"), Err(FreezeError::Io(_))));
        let none = Hierarchy::None { why: "no cgroups".into() };
        assert!(matches!(none.freeze("sbx_a"), Err(FreezeError::Missing(why)) if why == "no cgroups"));
        let without = Hierarchy::V1 { bases: vec![("memory".into(), place.path().to_path_buf())] };
        assert!(matches!(without.freeze("sbx_a"), Err(FreezeError::Missing(_))));
    }

    #[test]
    fn both_versions_are_written_as_the_kernel_wants_them() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("sbx_a");
        fs::create_dir(&directory).unwrap();
        let read = |name: &str| fs::read_to_string(directory.join(name)).unwrap();
        fs::write(directory.join("freezer.state"), "THAWED\n").unwrap();
        v1(place.path()).freeze("sbx_a").unwrap();
        assert_eq!(read("freezer.state"), "FROZEN");
        assert!(v1(place.path()).is_frozen("sbx_a"));
        v1(place.path()).thaw("sbx_a").unwrap();
        assert_eq!(read("freezer.state"), "THAWED");

        let v2 = Hierarchy::V2 { base: place.path().to_path_buf(), controllers: vec![] };
        fs::write(directory.join("cgroup.freeze"), "0\n").unwrap();
        fs::write(directory.join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        v2.freeze("sbx_a").unwrap();
        assert!(v2.is_frozen("sbx_a"));
        v2.thaw("sbx_a").unwrap();
        assert_eq!(read("cgroup.freeze"), "0");
        assert!(!v2.is_frozen("sbx_a"));
    }

    #[test]
    fn one_that_does_not_stop_goes_on() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("sbx_a");
        fs::create_dir(&directory).unwrap();
        // What is written is not what is read, as with a cgroup that stays FREEZING.
        symlink("/dev/null", directory.join("freezer.state")).unwrap();
        let began = Instant::now();
        let late = v1(place.path()).freeze("sbx_a");
        assert!(matches!(late, Err(FreezeError::Late)));
        assert!(began.elapsed() >= PATIENCE);
    }
}
