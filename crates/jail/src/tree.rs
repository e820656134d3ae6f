//! Everything below a process, and its end.
//!
//! Why stop before kill: a fork bomb makes children faster than one pass kills them. A stopped process cannot fork
//! and keeps its place in the process count, so passes of SIGSTOP reach a state in which nothing new appears; then
//! everything is killed at once.

use std::{collections::BTreeMap, fs};

use rustix::process::{Signal, kill_process};

use crate::userns;

/// Passes of SIGSTOP that find nothing new are enough; a bound all the same.
const PASSES: usize = 64;

/// Ends everything below `root`, but not `root` itself.
pub fn kill_below(root: i32) {
    let mut seen = 0;
    for _ in 0..PASSES {
        let now = below(root);
        for pid in &now {
            let _ = kill_process(userns::pid(*pid), Signal::STOP);
        }
        if now.len() <= seen {
            break;
        }
        seen = now.len();
    }
    for pid in below(root) {
        let _ = kill_process(userns::pid(pid), Signal::KILL);
    }
}

/// Every living process below `root`, as this process's `/proc` shows them.
pub fn below(root: i32) -> Vec<i32> {
    let mut parents: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(stat) = fs::read(entry.path().join("stat")) else { continue };
        // The name in parentheses may hold anything; what follows its last parenthesis is fixed.
        let Some(end) = stat.iter().rposition(|byte| *byte == b')') else { continue };
        let rest = String::from_utf8_lossy(&stat[end + 1..]);
        let mut fields = rest.split_whitespace();
        let (state, parent) = (fields.next(), fields.next().and_then(|field| field.parse().ok()));
        if let Some(parent) = parent
            && state != Some("Z")
        {
            parents.entry(parent).or_default().push(pid);
        }
    }
    let mut all = Vec::new();
    let mut todo = vec![root];
    while let Some(pid) = todo.pop() {
        let children = parents.remove(&pid).unwrap_or_default();
        all.extend(&children);
        todo.extend(&children);
    }
    all
}
