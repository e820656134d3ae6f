//! A file in the making: written under a temporary name in its final directory, then renamed into place.
//!
//! Until then it is readable by us alone and not yet given away. The box can rename or remove the temporary
//! name; all it gains is that its own directory entry is renamed in place of ours. A crash of this process leaves
//! the temporary file behind, as `.carrel-….tmp`.

use std::{fs::File, os::fd::OwnedFd};

use rustix::{
    fs::{self, AtFlags, Mode, OFlags, RenameFlags},
    io::Errno,
    process,
};

use crate::root::{Owner, STRICT, open_at};
use std::os::fd::AsFd;

#[derive(Debug)]
pub(crate) struct Stage {
    dir: OwnedFd,
    name: String,
    pub(crate) file: File,
    /// There is a temporary name to be removed.
    named: bool,
}

impl Stage {
    pub(crate) fn create(dir: OwnedFd) -> Result<Self, Errno> {
        let name = temporary_name()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        let file = File::from(open_at(dir.as_fd(), name.as_bytes(), flags, STRICT)?);
        Ok(Self { dir, name, file, named: true })
    }

    /// Gives the file its owner, mode and name. Without `replace` an existing name is left alone (`EEXIST`).
    pub(crate) fn publish(
        mut self,
        name: &[u8],
        mode: u32,
        owner: Option<Owner>,
        replace: bool,
        sync: bool,
    ) -> Result<fs::Stat, Errno> {
        dress(&self.file, mode, owner)?;
        if sync {
            fs::fsync(&self.file)?;
        }
        let stat = fs::fstat(&self.file)?;
        let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
        fs::renameat_with(&self.dir, self.name.as_str(), &self.dir, name, flags)?;
        self.named = false;
        if sync {
            let dir = open_at(self.dir.as_fd(), b".", OFlags::RDONLY | OFlags::DIRECTORY, STRICT)?;
            fs::fsync(dir)?;
        }
        Ok(stat)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.named {
            // Nothing can be done if it is gone already, or the disk fails.
            let _ = fs::unlinkat(&self.dir, self.name.as_str(), AtFlags::empty());
        }
    }
}

/// Owner first: a change of owner may clear bits of the mode.
pub(crate) fn dress(file: impl AsFd, mode: u32, owner: Option<Owner>) -> Result<(), Errno> {
    if let Some(Owner { uid, gid }) = owner {
        let stat = fs::fstat(&file)?;
        if (stat.st_uid, stat.st_gid) != (uid, gid) {
            fs::fchown(&file, Some(process::Uid::from_raw(uid)), Some(process::Gid::from_raw(gid)))?;
        }
    }
    fs::fchmod(&file, Mode::from_raw_mode(mode & 0o777))
}

const BEFORE: &str = ".carrel-";
const BEHIND: &str = ".tmp";

pub(crate) fn temporary_name() -> Result<String, Errno> {
    let mut random = [0_u8; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!("{BEFORE}{:016x}{BEHIND}", u64::from_ne_bytes(random)))
}

/// Whether a name is that of a file in the making.
pub fn is_temporary(name: &[u8]) -> bool {
    let number = name.strip_prefix(BEFORE.as_bytes()).and_then(|rest| rest.strip_suffix(BEHIND.as_bytes()));
    number.is_some_and(|number| number.len() == 16 && number.iter().all(u8::is_ascii_hexdigit))
}
