//! The stories of this crate: a workspace whose contents are hostile, and a directory beside it that must never be
//! read, changed or deleted.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "clippy's leave for tests ends at their helpers"
)]

mod hostile;
mod keep;
mod large;
mod ops;
mod race;
mod text;
mod trees;
#[cfg(feature = "zip")]
mod zips;

use std::{
    collections::BTreeMap,
    fs,
    os::unix::{ffi::OsStrExt, fs::MetadataExt, process::CommandExt},
    path::{Path, PathBuf},
    process::Command,
};

use carrel_files::{FileError, Root};
use carrel_proto::files::GuestPath;

const SECRET: &[u8] = b"the canary sings outside";

/// A workspace and, beside it, an `outside` with a canary. Gone when dropped.
struct Desk {
    root: Root,
    workspace: PathBuf,
    outside: PathBuf,
    before: BTreeMap<Vec<u8>, (u32, u32, Vec<u8>)>,
    _dir: tempfile::TempDir,
}

impl Desk {
    fn new() -> Self {
        Self::below(tempfile::tempdir().unwrap())
    }

    fn below(dir: tempfile::TempDir) -> Self {
        let (workspace, outside) = (dir.path().join("workspace"), dir.path().join("outside"));
        fs::create_dir(&workspace).unwrap();
        fs::create_dir_all(outside.join("sub/deep")).unwrap();
        fs::write(outside.join("canary"), SECRET).unwrap();
        fs::write(outside.join("sub/deep/canary"), SECRET).unwrap();
        let before = snapshot(&outside);
        Self { root: Root::open(&workspace).unwrap(), workspace, outside, before, _dir: dir }
    }

    /// The outside is what it was: names, modes, owners and contents.
    fn assert_outside_untouched(&self) {
        assert_eq!(snapshot(&self.outside), self.before);
    }

    /// What is in the workspace, one level deep.
    fn names(&self) -> Vec<String> {
        let entry = |e: std::io::Result<fs::DirEntry>| e.unwrap().file_name().to_string_lossy().into_owned();
        let mut names: Vec<_> = fs::read_dir(&self.workspace).unwrap().map(entry).collect();
        names.sort();
        names
    }
}

impl Drop for Desk {
    /// Locked directories would keep their parent from being removed by its own guard.
    fn drop(&mut self) {
        for entry in fs::read_dir(&self.workspace).into_iter().flatten().flatten() {
            let _ = self.root.delete(&path(entry.file_name().as_bytes()), true);
        }
    }
}

fn snapshot(dir: &Path) -> BTreeMap<Vec<u8>, (u32, u32, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut left = vec![dir.to_owned()];
    while let Some(path) = left.pop() {
        let meta = fs::symlink_metadata(&path).unwrap();
        let data = if meta.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
        if meta.is_dir() {
            left.extend(fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        }
        all.insert(path.as_os_str().as_bytes().to_vec(), (meta.mode(), meta.uid(), data));
    }
    all
}

fn path(text: impl AsRef<[u8]>) -> GuestPath {
    GuestPath::parse(text).unwrap()
}

fn code<T: std::fmt::Debug>(result: Result<T, FileError>) -> &'static str {
    result.unwrap_err().code()
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Runs the test `name` alone in a process of its own, as `uid` if given: for what concerns a whole process.
/// Returns true in that process; false in the parent, once the child has succeeded.
fn alone(name: &str, uid: Option<u32>) -> bool {
    const MARK: &str = "CARREL_FILES_TEST_ALONE";
    if std::env::var_os(MARK).is_some_and(|mark| mark.to_str() == Some(name)) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).env(MARK, name).current_dir("/");
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    match command.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
            assert!(said.contains("1 passed"), "{said}");
        }
        Err(error) => println!("skip {name}: cannot run the test binary as another user: {error}"),
    }
    false
}
