//! A configuration file of somebody else's program: read, kept as a backup, and replaced as a whole or not at all.
//!
//! A symlink is followed, so that what it leads to changes and the link stays. Whoever reads the file meanwhile, or is left
//! with it after a `kill -9` or a loss of power, has the old text or the new one.

use std::{
    ffi::OsString,
    fs::{File, Metadata},
    io::{ErrorKind, Read, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use carrel_proto::problem::{Code, Problem};
use rustix::fs::{Access, Gid, Uid, access, fchown};

/// Larger than any configuration; Claude Code keeps a history in its own.
const MAX_SIZE: u64 = 64 << 20;
/// As the kernel has it for one path.
const MAX_LINKS: usize = 40;
const MAX_BACKUPS: u32 = 9999;
/// Others have no business in a file that may hold tokens.
const PRIVATE: u32 = 0o600;

#[derive(Debug)]
pub(super) struct ConfigFile {
    /// Without symlinks at its end.
    pub(super) path: PathBuf,
    /// None: it does not exist.
    pub(super) text: Option<String>,
}

impl ConfigFile {
    pub(super) fn read(named: &Path) -> Result<Self, Problem> {
        let path = followed(named)?;
        let text = read(&path)?;
        Ok(Self { path, text })
    }

    /// Whether the user means this file to change.
    pub(super) fn check_writable(&self) -> Result<(), Problem> {
        if self.text.is_none() {
            return Ok(());
        }
        let known = self.metadata()?;
        // Root may write anything; the mode still says what its owner wants.
        if known.permissions().mode() & 0o222 == 0 || access(&self.path, Access::WRITE_OK).is_err() {
            return Err(Problem::new(Code::Permission, format!("{} is read-only", self.path.display()))
                .hint("if another program makes this file, tell that one: --print shows what to add"));
        }
        Ok(())
    }

    fn metadata(&self) -> Result<Metadata, Problem> {
        std::fs::metadata(&self.path).map_err(|error| failed(&self.path, &error))
    }

    fn beside(&self, change: impl FnOnce(OsString) -> OsString) -> PathBuf {
        self.path.with_file_name(change(self.path.file_name().unwrap_or_default().to_owned()))
    }

    fn backup_path(&self, number: u32) -> PathBuf {
        self.beside(|mut name| {
            name.push(format!(".carrel-{number}.bak"));
            name
        })
    }

    /// Texts of earlier backups, the newest first.
    pub(super) fn backups(&self) -> Vec<String> {
        let known = (1..=MAX_BACKUPS).map(|number| self.backup_path(number)).take_while(|path| path.exists());
        let mut texts: Vec<String> = known.filter_map(|path| read(&path).ok().flatten()).collect();
        texts.reverse();
        texts
    }

    /// Keeps the text as it is now under a name that nothing had before.
    pub(super) fn back_up(&self) -> Result<Option<PathBuf>, Problem> {
        let Some(text) = &self.text else { return Ok(None) };
        let unfinished = self.unfinished(text)?;
        let done =
            (1..=MAX_BACKUPS).map(|number| self.backup_path(number)).find_map(
                |path| match std::fs::hard_link(&unfinished, &path) {
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => None,
                    Err(error) => Some(Err(failed(&path, &error))),
                    Ok(()) => Some(Ok(Some(path))),
                },
            );
        let _ = std::fs::remove_file(&unfinished);
        done.unwrap_or_else(|| {
            let what = format!("{} has {MAX_BACKUPS} backups", self.path.display());
            Err(Problem::new(Code::TooMany, what).hint("delete some of them"))
        })
    }

    /// A new file beside the old one, whole and on the disk, under a name that nobody reads.
    fn unfinished(&self, text: &str) -> Result<PathBuf, Problem> {
        let path = self.beside(|name| {
            let mut hidden = OsString::from(".");
            hidden.push(name);
            hidden.push(format!(".carrel-{}.new", std::process::id()));
            hidden
        });
        let written = (|| {
            let mut file = File::options().write(true).create_new(true).mode(PRIVATE).open(&path)?;
            file.write_all(text.as_bytes())?;
            self.inherit(&file)?;
            file.sync_all()
        })();
        written.map_err(|error| {
            let _ = std::fs::remove_file(&path);
            failed(&path, &error)
        })?;
        Ok(path)
    }

    /// Gives a new file the old one's mode and, where that is allowed, its owner.
    fn inherit(&self, file: &File) -> std::io::Result<()> {
        match std::fs::metadata(&self.path) {
            Ok(known) => {
                let _ = fchown(file, Some(Uid::from_raw(known.uid())), Some(Gid::from_raw(known.gid())));
                file.set_permissions(known.permissions())
            }
            // A new file may get a token later.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Puts the new text in the place of the old one.
    pub(super) fn replace(&self, text: &str) -> Result<(), Problem> {
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(directory).map_err(|error| failed(directory, &error))?;
        self.sweep(directory);
        let unfinished = self.unfinished(text)?;
        let done = self.check_unchanged().and_then(|()| {
            std::fs::rename(&unfinished, &self.path).map_err(|error| failed(&self.path, &error))
        });
        if done.is_err() {
            let _ = std::fs::remove_file(&unfinished);
            return done;
        }
        // The text is in place; a directory that cannot be synced costs at most the change, not the file.
        let _ = File::open(directory).and_then(|directory| directory.sync_all());
        Ok(())
    }

    pub(super) fn delete(&self) -> Result<(), Problem> {
        self.check_unchanged()?;
        std::fs::remove_file(&self.path).map_err(|error| failed(&self.path, &error))
    }

    /// Clients write their files too, some of them often.
    fn check_unchanged(&self) -> Result<(), Problem> {
        if read(&self.path)? == self.text {
            return Ok(());
        }
        Err(Problem::new(
            Code::Config,
            format!("{} has just been changed by another program", self.path.display()),
        )
        .hint("nothing was changed; try again, if need be with the client closed"))
    }

    /// Removes what processes left that were killed in the middle of a change.
    fn sweep(&self, directory: &Path) {
        let Some(name) = self.path.file_name().and_then(|name| name.to_str()) else { return };
        let prefix = format!(".{name}.carrel-");
        for found in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            let left = found.file_name();
            let owner = left
                .to_str()
                .and_then(|left| left.strip_prefix(&prefix)?.strip_suffix(".new")?.parse::<u32>().ok());
            if owner.is_some_and(|owner| !Path::new(&format!("/proc/{owner}")).exists()) {
                let _ = std::fs::remove_file(found.path());
            }
        }
    }
}

/// What a path leads to, be it there or not.
fn followed(named: &Path) -> Result<PathBuf, Problem> {
    let mut path = named.to_path_buf();
    for _ in 0..MAX_LINKS {
        match std::fs::read_link(&path) {
            Ok(target) => path = path.parent().unwrap_or(Path::new("/")).join(target),
            // No link, or nothing there.
            Err(_) => return Ok(path),
        }
    }
    Err(Problem::new(Code::InvalidArgument, format!("{} is a circle of symlinks", named.display()))
        .hint("remove the link"))
}

fn read(path: &Path) -> Result<Option<String>, Problem> {
    let bad = |what: String| {
        Problem::new(Code::Config, format!("{}: {what}", path.display()))
            .hint("nothing was changed; use --print and paste the result")
    };
    let file = match File::open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => other.map_err(|error| failed(path, &error))?,
    };
    if !file.metadata().map_err(|error| failed(path, &error))?.is_file() {
        return Err(bad("it is no file".to_owned()));
    }
    let mut bytes = Vec::new();
    file.take(MAX_SIZE + 1).read_to_end(&mut bytes).map_err(|error| failed(path, &error))?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(bad("it is larger than any configuration".to_owned()));
    }
    String::from_utf8(bytes).map(Some).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()]
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count()
            + 1;
        bad(format!("line {line} is not UTF-8"))
    })
}

fn failed(path: &Path, error: &std::io::Error) -> Problem {
    let what = format!("{}: {error}", path.display());
    match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            Problem::new(Code::Permission, what).hint("--print shows what to add, and needs no file")
        }
        _ => Problem::new(Code::Config, what),
    }
}
