//! User ids inside and outside a box.

use std::{fs, io, sync::OnceLock};

use rustix::{
    process::Pid,
    thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid},
};
use serde::{Deserialize, Serialize};

/// Whom user code is inside every box.
pub const USER: u32 = 1000;

/// One run of ids: `count` ids from `inside` on are `outside` on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mapping {
    pub inside: u32,
    pub outside: u32,
}

/// The ids of a box. An ordinary user can map one id, so agent and user code share it; root maps two.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ids {
    pub uid: Vec<Mapping>,
    pub gid: Vec<Mapping>,
    /// The agent's id inside.
    pub agent: u32,
}

impl Ids {
    /// For an ordinary user: user code is that user, seen as [`USER`].
    pub fn single(uid: u32, gid: u32) -> Self {
        Self {
            uid: vec![Mapping { inside: USER, outside: uid }],
            gid: vec![Mapping { inside: USER, outside: gid }],
            agent: USER,
        }
    }

    /// For root: two ids of the box's own, used by nothing else on the host.
    pub fn pair(base: u32) -> Self {
        let pair = vec![Mapping { inside: 0, outside: base }, Mapping { inside: USER, outside: base + 1 }];
        Self { uid: pair.clone(), gid: pair, agent: 0 }
    }

    /// The host's view of user code.
    pub fn user_outside(&self) -> (u32, u32) {
        let find = |maps: &[Mapping]| maps.iter().find(|map| map.inside == USER).map_or(0, |map| map.outside);
        (find(&self.uid), find(&self.gid))
    }

    pub fn agent_outside(&self) -> u32 {
        self.uid.iter().find(|map| map.inside == self.agent).map_or(0, |map| map.outside)
    }
}

/// First user id of boxes that root makes: far from people, services and the ranges of other tools.
pub const FIRST_ID: u32 = 1_610_612_736;
/// Boxes that root can tell apart by user id; then numbers come round again.
pub const ID_PAIRS: u32 = 200_000_000;

/// Whether this process may hand out user ids of the host: root, and not merely called so inside a container.
pub fn has_many_ids() -> bool {
    // Asked several times per box; nobody here changes to another user namespace and then asks.
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(look_for_ids)
}

fn look_for_ids() -> bool {
    let covers = |line: &str| {
        let mut numbers = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            return false;
        };
        first <= u64::from(FIRST_ID) && first + count >= u64::from(FIRST_ID + 2 * ID_PAIRS)
    };
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    rustix::process::geteuid().is_root() && map.lines().any(covers)
}

fn table(maps: &[Mapping]) -> String {
    maps.iter().map(|map| format!("{} {} 1\n", map.inside, map.outside)).collect()
}

/// Writes the maps of the user namespace that `pid` is in. Done by the parent, once.
pub fn write_maps(pid: i32, ids: &Ids, privileged: bool) -> io::Result<()> {
    if !privileged {
        // Without this the kernel lets nobody but root write a group map: groups could otherwise be dropped to
        // get around a file's "not for this group".
        fs::write(format!("/proc/{pid}/setgroups"), "deny")?;
    }
    fs::write(format!("/proc/{pid}/gid_map"), table(&ids.gid))?;
    fs::write(format!("/proc/{pid}/uid_map"), table(&ids.uid))
}

/// Becomes `uid` and `gid`, real, effective and saved.
pub fn become_ids(uid: u32, gid: u32, drop_groups: bool) -> rustix::io::Result<()> {
    use rustix::process::{Gid, Uid};
    if drop_groups {
        set_thread_groups(&[])?;
    }
    let gid = Gid::from_raw(gid);
    set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(uid);
    set_thread_res_uid(uid, uid, uid)
}

/// A process id, or 1 where a positive one was promised.
pub fn pid(raw: i32) -> Pid {
    Pid::from_raw(raw).unwrap_or(Pid::INIT)
}
