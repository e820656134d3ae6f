//! What decides which of the host's interpreters a caller means: a few of its variables, as values.
//!
//! Nothing here, or behind it, reads the process's own environment: a daemon looks for the software of whoever asks, and a
//! sandbox that is brought back has what it was made with, whoever brings it back.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use carrel_proto::guest::Language;
use serde::{Deserialize, Serialize};

/// Where interpreters are looked for, and what the shims of version managers go by. Not those that change what an interpreter
/// loads (PYTHONPATH, LD_LIBRARY_PATH, NODE_OPTIONS, …): they are not in a box either, so that the answer would be another.
const NAMES: [&str; 12] = [
    "PATH",
    "HOME",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYENV_ROOT",
    "PYENV_VERSION",
    "NVM_BIN",
    "ASDF_DIR",
    "ASDF_DATA_DIR",
    "MISE_DATA_DIR",
    "VOLTA_HOME",
    "PYTHONUSERBASE",
];
/// A variable that is longer than this is not taken; paths of some thousand directories are.
const LONGEST: usize = 64 << 10;
/// Behind the caller's PATH.
const USUAL: [&str; 4] = ["/usr/local/bin", "/usr/bin", "/bin", "/run/current-system/sw/bin"];

/// The caller's variables, as far as they matter. Empty: only the usual places.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "BTreeMap<String, String>", into = "BTreeMap<String, String>")]
pub struct Whereabouts(BTreeMap<String, String>);

impl From<BTreeMap<String, String>> for Whereabouts {
    fn from(mut variables: BTreeMap<String, String>) -> Self {
        variables.retain(|name, value| NAMES.contains(&name.as_str()) && value.len() <= LONGEST);
        Self(variables)
    }
}

impl From<Whereabouts> for BTreeMap<String, String> {
    fn from(whereabouts: Whereabouts) -> Self {
        whereabouts.0
    }
}

impl Whereabouts {
    /// Of a process with these variables.
    pub fn of(variables: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let texts = variables
            .into_iter()
            .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        texts.collect::<BTreeMap<_, _>>().into()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn path(&self, name: &str) -> Option<PathBuf> {
        self.0.get(name).map(PathBuf::from).filter(|path| path.is_absolute())
    }

    pub(super) fn home(&self) -> Option<PathBuf> {
        self.path("HOME")
    }

    /// Where to look: the caller's PATH and the usual places behind it. What is relative would mean the current directory,
    /// which is nobody's choice of software.
    pub(super) fn search_path(&self) -> Vec<PathBuf> {
        let path = self.0.get("PATH").map(String::as_str).unwrap_or_default();
        let mut seen = BTreeSet::new();
        std::env::split_paths(path)
            .chain(USUAL.into_iter().map(PathBuf::from))
            .filter(|directory| directory.is_absolute() && seen.insert(directory.clone()))
            .collect()
    }

    /// What an interpreter is asked with: the same as here and nothing else.
    pub(super) fn variables(&self) -> BTreeMap<String, OsString> {
        let mut all: BTreeMap<String, OsString> =
            self.0.iter().map(|(name, value)| (name.clone(), value.into())).collect();
        if let Ok(path) = std::env::join_paths(self.search_path()) {
            all.insert("PATH".into(), path);
        }
        all
    }

    pub(super) fn candidates(&self, language: Language) -> Vec<PathBuf> {
        let path = self.search_path();
        let files = |name: &'static str| path.iter().map(move |directory| directory.join(name));
        names(language).iter().flat_map(|name| files(name)).filter(|file| is_program(file)).collect()
    }

    /// One word for all of it.
    pub(super) fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    /// Changes with anything that could change what is found.
    pub(super) fn fingerprint(&self) -> String {
        let mut print = String::new();
        for (name, value) in &self.0 {
            print.push_str(&format!("{name}={value};"));
        }
        for file in
            self.version_files().into_iter().chain(Language::ALL.iter().flat_map(|&l| self.candidates(l)))
        {
            if let Ok(meta) = fs::metadata(&file) {
                let changed = meta.mtime_nsec() ^ meta.mtime();
                print.push_str(&format!("{}:{}:{}:{changed};", file.display(), meta.ino(), meta.size()));
            }
        }
        print
    }

    /// Where version managers keep the version that holds everywhere. One for a directory does not count here.
    fn version_files(&self) -> Vec<PathBuf> {
        let home = self.home();
        let below = |name: &str| home.as_ref().map(|home| home.join(name));
        let pyenv = self.path("PYENV_ROOT").or_else(|| below(".pyenv")).map(|root| root.join("version"));
        [pyenv, below(".tool-versions"), below(".config/mise/config.toml")].into_iter().flatten().collect()
    }
}

pub(super) fn names(language: Language) -> &'static [&'static str] {
    match language {
        Language::Python => &["python3", "python"],
        Language::Node => &["node", "nodejs"],
        Language::Bash => &["bash"],
    }
}

fn is_program(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0)
}
