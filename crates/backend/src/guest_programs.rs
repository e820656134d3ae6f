//! The static programs that run inside boxes, carried in this one and laid down beside the state.

use std::{
    fs::{self, Permissions},
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::unfinished;

const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/carrel-agent"));
const PROBE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/carrel-probe"));

/// The agent's program as a file below `directory`, written if it is not there yet.
pub fn agent(directory: &Path) -> io::Result<PathBuf> {
    // Named by content: two versions of carrel may share one state directory, and running boxes keep theirs.
    lay_down(directory, concat!("agent-", env!("CARREL_AGENT_HASH")), AGENT)
}

/// The attacker's toolkit of `carrel doctor --prove`.
pub fn probe() -> &'static [u8] {
    PROBE
}

fn lay_down(directory: &Path, name: &str, program: &[u8]) -> io::Result<PathBuf> {
    let path = directory.join(name);
    if fs::metadata(&path).is_ok_and(|meta| meta.len() == program.len() as u64) {
        return Ok(path);
    }
    fs::create_dir_all(directory)?;
    unfinished::remove_stale(&path);
    let making = unfinished::beside(&path)?;
    fs::write(&making, program)?;
    fs::set_permissions(&making, Permissions::from_mode(0o755))?;
    fs::rename(&making, &path)?;
    Ok(path)
}
