//! File systems in memory: what is in them is written beside the processes, and given back to a new box.

use std::{
    ffi::OsStr,
    fs, io,
    path::{Path, PathBuf},
    process::Stdio,
};

use carrel_jail::visit::{self, Way};
use carrel_proto::{guest::Places, problem::Problem};

use super::{Living, criu::run, failed};

/// File systems in memory that all sessions share.
pub(crate) const IN_MEMORY: [(&str, &str); 4] =
    [("tmp.tar", "/tmp"), ("home.tar", Places::HOME), ("shm.tar", "/dev/shm"), ("run.tar", Places::RUN)];
/// Of those places, what every box is made with: in [`Places::RUN`], to which nobody but the agent writes.
const OF_EVERY_BOX: [&str; 3] = ["agent", "python.pyc", "empty"];

/// So does what is in its file systems in memory.
pub(crate) fn pack_all(living: &Living<'_>, image: &Path) -> Result<(), Problem> {
    IN_MEMORY.iter().try_for_each(|(name, place)| pack(living, place, &image.join(name)))
}

pub(crate) fn unpack_all(living: &Living<'_>, image: &Path) -> Result<(), Problem> {
    for (name, place) in IN_MEMORY {
        let archive = image.join(name);
        if archive.exists() {
            unpack(living, &archive, &inside(living.agent, place))?;
        }
    }
    Ok(())
}

/// Unless there is nothing in it that a new box would not have.
fn pack(living: &Living<'_>, place: &str, archive: &Path) -> Result<(), Problem> {
    let what = "keeping files in memory";
    let directory = inside(living.agent, place);
    let known = known_in(place);
    let is_known = |name: &OsStr| known.iter().any(|known| name == *known);
    let mut entries = fs::read_dir(&directory).map_err(failed(what))?;
    if entries.all(|entry| entry.is_ok_and(|entry| is_known(&entry.file_name()))) {
        return Ok(());
    }
    let excluded: Vec<String> = known.iter().map(|name| format!("--exclude=./{name}")).collect();
    let mut words = vec!["--create", "--one-file-system", "--sparse", "--numeric-owner", "--anchored"];
    words.extend(excluded.iter().map(String::as_str));
    words.extend(["--file=-", "."]);
    let files = visit::Files { directory, input: None, output: Some(archive.to_path_buf()) };
    tar(living, &words, files, what)
}

pub(super) fn unpack(living: &Living<'_>, archive: &Path, directory: &Path) -> Result<(), Problem> {
    let words = ["--extract", "--preserve-permissions", "--numeric-owner", "--skip-old-files", "--file=-"];
    let files =
        visit::Files { directory: directory.to_path_buf(), input: Some(archive.to_path_buf()), output: None };
    tar(living, &words, files, "giving back files in memory")
}

pub(super) fn tar(
    living: &Living<'_>,
    words: &[&str],
    files: visit::Files,
    what: &str,
) -> Result<(), Problem> {
    let arguments = words.iter().map(|word| (*word).to_owned()).collect();
    let visit = visit::Visit {
        agent: living.agent,
        program: "tar".into(),
        arguments,
        way: Way::Files(files),
        memory: None,
    };
    run(&living.program, &visit, Stdio::null()).map_err(|said| failed(what)(io::Error::other(said)))
}

/// A place in a box, by way of its agent.
pub(crate) fn inside(agent: i32, place: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{agent}/root{place}"))
}

/// What every box is made with.
pub(crate) fn known_in(place: &str) -> &'static [&'static str] {
    if place == Places::RUN { &OF_EVERY_BOX } else { &[] }
}
