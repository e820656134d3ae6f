//! Capabilities: what the agent keeps inside its user namespace, and nothing for user code.

use rustix::{
    io,
    thread::{
        CapabilitySet, CapabilitySets, capability_is_in_bounding_set, clear_ambient_capability_set,
        configure_capability_in_ambient_set, remove_capability_from_bounding_set, set_capabilities,
        set_no_new_privs,
    },
};

/// What the agent needs to make sessions: their namespaces, their user, their end. All of it counts only inside
/// the box's own user namespace.
pub fn agent() -> CapabilitySet {
    CapabilitySet::SYS_ADMIN
        | CapabilitySet::SYS_CHROOT
        | CapabilitySet::SETUID
        | CapabilitySet::SETGID
        | CapabilitySet::SETPCAP
        // To enter the namespaces of a session's init, which is closed to inspection.
        | CapabilitySet::SYS_PTRACE
        | CapabilitySet::KILL
        | CapabilitySet::CHOWN
        | CapabilitySet::FOWNER
        | CapabilitySet::DAC_OVERRIDE
}

/// What a session's init needs to start processes as the box's user, and to end them.
pub fn init() -> CapabilitySet {
    CapabilitySet::SETUID | CapabilitySet::SETGID | CapabilitySet::SETPCAP | CapabilitySet::KILL
}

/// What a session's reapers keep: ending processes of the box's user.
pub fn reaper() -> CapabilitySet {
    CapabilitySet::KILL
}

/// Reduces this process to `keep`, for itself and across `exec`, and forbids ever gaining more.
pub fn reduce(keep: CapabilitySet) -> io::Result<()> {
    set_no_new_privs(true)?;
    clear_ambient_capability_set()?;
    for capability in CapabilitySet::all().iter().filter(|capability| !keep.contains(*capability)) {
        // Asking costs a tenth of removing what a parent has removed.
        if capability_is_in_bounding_set(capability) == Ok(false) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // Unknown to this kernel, or not ours to drop (then it is not ours to use either).
            Err(io::Errno::INVAL | io::Errno::PERM) | Ok(()) => {}
            Err(error) => return Err(error),
        }
    }
    set_capabilities(None, CapabilitySets { effective: keep, permitted: keep, inheritable: keep })?;
    for capability in keep.iter() {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}
