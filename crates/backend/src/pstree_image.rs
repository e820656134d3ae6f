//! The tree of processes in CRIU's images, put so that CRIU can grow it again.
//!
//! CRIU brings a process back by forking it from its parent, and gives it its session (`setsid`) by forking it below the
//! session's leader. A process whose parent has died is a child of its runner, which is the subreaper, and beside the leader: for
//! this CRIU has no way, except below the root of the tree, where it expects such orphans. So they come back as the root's
//! children, which is the session's init: it reaps them, and ends them with the session.
//!
//! ```text
//! 19 43 56 54  30 30 27 50        what CRIU's images begin with, and what this one is
//! length (u32), then of each process (protobuf): 1: pid, 2: parent, 3: group, 4: session, 5: threads …
//! ```

use crate::userns_image::{number, put};

const BEGIN: [u8; 8] = [0x19, 0x43, 0x56, 0x54, 0x30, 0x30, 0x27, 0x50];
pub(crate) const NAME: &str = "pstree.img";

#[derive(Debug, Default)]
struct Task {
    pid: u64,
    parent: u64,
    session: u64,
    /// Everything but the parent, as it was.
    rest: Vec<u8>,
}

/// The same image with orphans below the root. One that is written in another way is left for CRIU to judge.
pub(crate) fn with_orphans_at_root(image: Vec<u8>) -> Vec<u8> {
    let Some(mut tasks) = parse(&image) else { return image };
    let Some(root) = tasks.iter().find(|task| task.parent == 0).map(|task| task.pid) else { return image };
    let orphans: Vec<usize> = (0..tasks.len()).filter(|at| is_orphan(&tasks, *at)).collect();
    if orphans.is_empty() {
        return image;
    }
    for at in orphans {
        tasks[at].parent = root;
    }
    let mut told = BEGIN.to_vec();
    for task in tasks {
        let mut entry = Vec::new();
        put(&mut entry, PARENT);
        put(&mut entry, task.parent);
        entry.extend(task.rest);
        told.extend(u32::try_from(entry.len()).unwrap_or(u32::MAX).to_le_bytes());
        told.extend(entry);
    }
    told
}

const PID: u64 = 1 << 3;
const PARENT: u64 = 2 << 3;
const SESSION: u64 = 4 << 3;

/// Neither the leader of its session nor below it, nor in its parent's.
fn is_orphan(tasks: &[Task], at: usize) -> bool {
    let task = &tasks[at];
    let find = |pid: u64| tasks.iter().find(|task| task.pid == pid);
    if task.parent == 0 || task.session == task.pid {
        return false;
    }
    let mut above = find(task.parent);
    if above.is_some_and(|parent| parent.session == task.session || parent.parent == 0) {
        return false;
    }
    // A tree has no more steps than tasks, whatever is written.
    for _ in 0..tasks.len() {
        match above {
            Some(parent) if parent.pid == task.session => return false,
            Some(parent) => above = find(parent.parent),
            None => return true,
        }
    }
    false
}

fn parse(image: &[u8]) -> Option<Vec<Task>> {
    let mut body = image.strip_prefix(&BEGIN)?;
    let mut tasks = Vec::new();
    while !body.is_empty() {
        let (length, rest) = body.split_first_chunk()?;
        let (mut entry, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        body = rest;
        let mut task = Task::default();
        while !entry.is_empty() {
            let before = entry;
            let field = number(&mut entry)?;
            let value = match field & 7 {
                0 => number(&mut entry)?,
                2 => {
                    let length = usize::try_from(number(&mut entry)?).ok()?;
                    entry = entry.split_at_checked(length)?.1;
                    0
                }
                _ => return None,
            };
            match field {
                PID => task.pid = value,
                PARENT => {
                    task.parent = value;
                    continue;
                }
                SESSION => task.session = value,
                _ => {}
            }
            task.rest.extend(&before[..before.len() - entry.len()]);
        }
        tasks.push(task);
    }
    Some(tasks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image(tasks: &[(u64, u64, u64)]) -> Vec<u8> {
        let mut bytes = BEGIN.to_vec();
        for (pid, parent, session) in tasks {
            let mut entry = Vec::new();
            for (field, value) in
                [(PARENT, parent), (PID, pid), (3 << 3, pid), (SESSION, session), (5 << 3, pid)]
            {
                put(&mut entry, field);
                put(&mut entry, *value);
            }
            bytes.extend(u32::try_from(entry.len()).unwrap().to_le_bytes());
            bytes.extend(entry);
        }
        bytes
    }

    #[test]
    fn orphans_go_to_the_root_and_nobody_else_moves() {
        let whole = [(1, 0, 1), (4, 1, 4), (5, 4, 5), (6, 5, 5), (300, 6, 5), (8, 1, 5)];
        assert_eq!(with_orphans_at_root(image(&whole)), image(&whole));
        let orphaned = [(1, 0, 1), (4, 1, 4), (5, 4, 5), (9, 4, 5), (10, 9, 5), (11, 4, 7000)];
        let mended = [(1, 0, 1), (4, 1, 4), (5, 4, 5), (9, 1, 5), (10, 9, 5), (11, 1, 7000)];
        assert_eq!(with_orphans_at_root(image(&orphaned)), image(&mended));
    }

    #[test]
    fn what_is_not_understood_is_left_alone() {
        let real = image(&[(1, 0, 1), (4, 1, 4), (5, 4, 5), (9, 4, 5)]);
        for length in 0..real.len() {
            let part = real[..length].to_vec();
            // Cut between two entries it is a shorter tree.
            if parse(&part).is_none() {
                assert_eq!(with_orphans_at_root(part.clone()), part);
            }
        }
        // Round and round.
        let round = image(&[(1, 0, 1), (4, 5, 9), (5, 4, 8)]);
        with_orphans_at_root(round);
    }
}
