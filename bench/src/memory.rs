//! Memory of a sandbox's processes, as the host sees it: proportional set size, shared pages counted once.

use std::{collections::BTreeMap, fs};

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
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        children.entry(parent.unwrap_or(0)).or_default().push(pid);
    }
    let mut memory = Memory { agent: pss(placed.pid), ..Memory::default() };
    let mut todo = vec![placed.pid];
    while let Some(pid) = todo.pop() {
        let size = pss(pid);
        memory.total += size;
        if fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line.starts_with(b"carrel\0")) {
            memory.own += size;
        }
        todo.extend(children.remove(&pid).unwrap_or_default());
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
