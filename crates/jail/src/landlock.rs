//! Landlock as a second fence around the file system, where the kernel has it.
//!
//! Nothing rests on it: the mount namespace already shows only what the box may see, and a restored checkpoint
//! comes back without Landlock. Scopes (signals, abstract sockets) are not used, because a scoped process
//! cannot be checkpointed.

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, RestrictionStatus, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError, RulesetStatus,
};

/// Lets this process and its children read and execute everything they see, and write below `writable` only.
/// Says whether the kernel took it.
pub fn confine(writable: &[&str]) -> Result<bool, RulesetError> {
    let abi = ABI::V5;
    let all = AccessFs::from_all(abi);
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(all)?
        .create()?
        .no_new_privs(true);
    let looking = AccessFs::from_read(abi) | AccessFs::IoctlDev;
    if let Ok(root) = PathFd::new("/") {
        ruleset = ruleset.add_rule(PathBeneath::new(root, looking))?;
    }
    for path in writable {
        if let Ok(fd) = PathFd::new(path) {
            ruleset = ruleset.add_rule(PathBeneath::new(fd, all))?;
        }
    }
    let RestrictionStatus { ruleset, .. } = ruleset.restrict_self()?;
    Ok(ruleset != RulesetStatus::NotEnforced)
}
