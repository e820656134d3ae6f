//! What the box has used, from its cgroup's files where there are any.

use std::{cell::Cell, fs::File, os::unix::fs::FileExt};

use carrel_jail::sys;
use carrel_proto::guest;

/// A reading; `None` where this host does not say.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reading {
    pub(crate) cpu_us: Option<u64>,
    pub(crate) oom_kills: Option<u64>,
    pub(crate) pids_refused: Option<u64>,
}

#[derive(Debug)]
pub(crate) struct Meters {
    oom: Option<File>,
    memory_peak: Option<File>,
    cpu: Option<File>,
    pids: Option<File>,
    memory: Option<File>,
    processes: Option<File>,
    /// The highest peak that was seen before a reset.
    highest: Cell<u64>,
}

impl Meters {
    pub(crate) fn new(given: &guest::Meters) -> Self {
        let open = |fd: Option<i32>| fd.and_then(|fd| sys::inherited(fd).ok()).map(File::from);
        Self {
            oom: open(given.oom),
            memory_peak: open(given.memory_peak),
            cpu: open(given.cpu),
            pids: open(given.pids),
            memory: open(given.memory),
            processes: open(given.processes),
            highest: Cell::new(0),
        }
    }

    pub(crate) fn read(&self) -> Reading {
        Reading {
            cpu_us: self.cpu.as_ref().and_then(|file| {
                let text = text(file)?;
                // v2 has lines in microseconds, v1 one number in nanoseconds.
                line(&text, "usage_usec")
                    .or_else(|| text.trim().parse::<u64>().ok().map(|nanos| nanos / 1000))
            }),
            oom_kills: self.oom.as_ref().and_then(|file| line(&text(file)?, "oom_kill")),
            pids_refused: self.pids.as_ref().and_then(|file| line(&text(file)?, "max")),
        }
    }

    /// Highest memory since the last reset.
    pub(crate) fn peak(&self) -> Option<u64> {
        number(self.memory_peak.as_ref()?)
    }

    /// Highest memory of the box so far.
    pub(crate) fn highest(&self) -> Option<u64> {
        self.peak().map(|peak| peak.max(self.highest.get()))
    }

    /// Memory of the whole box now.
    pub(crate) fn memory(&self) -> Option<u64> {
        number(self.memory.as_ref()?)
    }

    /// Processes of the whole box now.
    pub(crate) fn processes(&self) -> Option<u64> {
        number(self.processes.as_ref()?)
    }

    /// Starts a new peak, where the kernel can.
    pub(crate) fn reset_peak(&self) {
        if let Some(file) = &self.memory_peak {
            self.highest.set(self.highest().unwrap_or_default());
            let _ = file.write_at(b"0", 0);
        }
    }
}

fn text(file: &File) -> Option<String> {
    let mut buffer = [0; 1024];
    let count = file.read_at(&mut buffer, 0).ok()?;
    Some(String::from_utf8_lossy(&buffer[..count]).into_owned())
}

fn number(file: &File) -> Option<u64> {
    text(file)?.trim().parse().ok()
}

fn line(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::line;

    #[test]
    fn lines_are_found_by_their_whole_name() {
        let text = "oom 3\noom_kill 2\noom_group_kill 0\n";
        assert_eq!(line(text, "oom_kill"), Some(2));
        assert_eq!(line(text, "oom"), Some(3));
        assert_eq!(line(text, "kill"), None);
    }
}
