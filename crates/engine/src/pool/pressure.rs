//! Whether memory is so short that boxes which nobody uses should go.
//!
//! Looked at before a box is made ready and every few seconds while some are; a process that keeps none does not look.

use std::{fs, path::Path};

/// Of the host's memory, in percent, and in bytes: what must be left.
const RESERVE_PERCENT: u64 = 5;
const RESERVE: u64 = 256 << 20;
/// Of the last ten seconds, in percent, in which somebody waited for memory.
const STALLED: f64 = 10.0;

/// Why memory is short; `None`: it is not, or the kernel does not say.
pub(super) fn shortage() -> Option<String> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    of_host(&read("/proc/meminfo"))
        .or_else(|| of_stalls(&read("/proc/pressure/memory")))
        .or_else(|| of_group(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup")))
}

fn of_host(meminfo: &str) -> Option<String> {
    let field = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().trim_end_matches(" kB").parse::<u64>().ok().map(|kilobytes| kilobytes << 10)
    };
    let (total, available) = (field("MemTotal:")?, field("MemAvailable:")?);
    // A small host has less to hold back.
    let reserve = (total / 100 * RESERVE_PERCENT).max(RESERVE).min(total / 4);
    (available < reserve).then(|| format!("the host has {} MB of memory left", available >> 20))
}

fn of_stalls(pressure: &str) -> Option<String> {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some avg10="))?;
    let part: f64 = some.split_whitespace().next()?.parse().ok()?;
    (part > STALLED).then(|| format!("somebody waited for memory {part} % of the last ten seconds"))
}

/// The group that this process is in may have a limit of its own, and the boxes with it.
fn of_group(groups: &str, mount: &Path) -> Option<String> {
    let number = |path: std::path::PathBuf| fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    groups.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?.trim_start_matches('/'));
        let (place, most, used) = match controllers {
            "" => (mount.join(path), "memory.max", "memory.current"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                (mount.join("memory").join(path), "memory.limit_in_bytes", "memory.usage_in_bytes")
            }
            _ => return None,
        };
        let (most, used) = (number(place.join(most))?, number(place.join(used))?);
        // Pages of files count as used and can be given up; a box needs what is beyond nine tenths.
        (used > most / 10 * 9).then(|| format!("its cgroup uses {} of {} MB", used >> 20, most >> 20))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_that_has_little_left_is_short() {
        let host = |total: u64, available: u64| {
            of_host(&format!("MemTotal: {total} kB\nMemAvailable: {available} kB\n"))
        };
        assert_eq!(host(16 << 20, 8 << 20), None);
        assert!(host(16 << 20, 700 << 10).unwrap().contains("700 MB"));
        // A quarter of a small one is enough.
        assert_eq!(host(512 << 10, 200 << 10), None);
        assert!(host(512 << 10, 100 << 10).is_some());
        assert_eq!(of_host("nonsense"), None);
    }

    #[test]
    fn waiting_for_memory_is_a_shortage() {
        assert_eq!(of_stalls("some avg10=0.31 avg60=0.00 avg300=0.05 total=5\nfull avg10=0 …"), None);
        assert!(of_stalls("some avg10=31.00 avg60=0.00 avg300=0.05 total=5\n").is_some());
        assert_eq!(of_stalls(""), None);
    }

    #[test]
    fn a_group_near_its_limit_is_short() {
        let place = tempfile::tempdir().unwrap();
        let group = place.path().join("some/where");
        fs::create_dir_all(&group).unwrap();
        let use_of = |most: &str, used: &str| {
            fs::write(group.join("memory.max"), most).unwrap();
            fs::write(group.join("memory.current"), used).unwrap();
            of_group("0::/some/where\n", place.path())
        };
        assert_eq!(use_of("max\n", "1000\n"), None);
        assert_eq!(use_of("1000000000\n", "100000000\n"), None);
        assert!(use_of("1000000000\n", "950000000\n").is_some());
    }
}
