//! Memory of a sandbox's processes, as the host sees it: proportional set size, shared pages counted once.

use std::fs;

use carrel_engine::Record;

#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    /// Agent, session init, runners.
    pub(crate) own: u64,
    pub(crate) agent: u64,
}

fn pss(pid: i32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// Everything below the agent, and the agent itself.
pub(crate) fn of_sandbox(record: &Record) -> Memory {
    let Some(placed) = &record.placed else { return Memory::default() };
    let mut memory = Memory { agent: pss(placed.pid), ..Memory::default() };
    for pid in std::iter::once(placed.pid).chain(carrel_jail::tree::below(placed.pid)) {
        let size = pss(pid);
        memory.total += size;
        if fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"carrel\0")) {
            memory.own += size;
        }
    }
    memory
}

/// Resident memory of one process.
pub(crate) fn resident(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) * 1024
}

/// CPU time of one process so far, in hundredths of a second.
pub(crate) fn cpu_ticks(pid: u32) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().skip(11).take(2);
    fields.filter_map(|field| field.parse::<u64>().ok()).sum()
}

/// Memory of one kind of process.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) proportional: u64,
    pub(crate) private: u64,
}

impl Part {
    pub(crate) fn add(&mut self, other: &Part) {
        self.proportional += other.proportional;
        self.private += other.private;
    }
}

/// A sandbox's processes by what they are.
pub(crate) fn parts(record: &Record) -> Vec<(&'static str, Part)> {
    let Some(placed) = &record.placed else { return Vec::new() };
    let below = below(placed.pid);
    let named = |pid: i32| {
        if pid == placed.pid {
            return "the agent";
        }
        let parent = parent(pid);
        match fs::read(format!("/proc/{pid}/cmdline")) {
            Ok(line) if !line.starts_with(b"carrel\0") => "the interpreter",
            _ if parent == Some(placed.pid) => "the session's init",
            _ => "the runner",
        }
    };
    std::iter::once(placed.pid).chain(below).map(|pid| (named(pid), part(pid))).collect()
}

/// Of a box in which nothing begins or ends: no look at all processes of the host for each of thousands.
fn below(root: i32) -> Vec<i32> {
    let mut all = carrel_jail::tree::children(root);
    let mut at = 0;
    while let Some(pid) = all.get(at) {
        all.extend(carrel_jail::tree::children(*pid));
        at += 1;
    }
    all
}

fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn part(pid: i32) -> Part {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.trim().trim_end_matches(" kB").trim().parse::<u64>().ok()).unwrap_or(0)
            << 10
    };
    Part { proportional: field("Pss:"), private: field("Private_Clean:") + field("Private_Dirty:") }
}
