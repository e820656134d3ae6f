//! Environments: what software a box has, as a plan of mounts.
//!
//! A preset shows the host's own `/usr` and interpreters. An artifact is a directory with `manifest.toml` and a
//! root filesystem in `rootfs/`; its format is in docs/environments.md.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use carrel_jail::mounts::Step;
use carrel_proto::{
    guest::{Interpreter, Language, Places},
    problem::{Code, Problem},
};
use serde::Deserialize;

use crate::{
    etc,
    host::{HostInterpreters, Whereabouts},
    warm::Warmth,
};

/// Software, resolved: what to mount and how to start each interpreter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Environment {
    pub name: String,
    /// The language of a run that names the environment and no language.
    pub language: Language,
    pub interpreters: BTreeMap<Language, Interpreter>,
    pub variables: BTreeMap<String, String>,
    pub software: Software,
    /// Whether its python is copied from a warm parent.
    pub warmth: Warmth,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Software {
    Host(HostSoftware),
    Artifact { rootfs: PathBuf },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSoftware {
    prefixes: Vec<PathBuf>,
    /// See [`etc`].
    etc: PathBuf,
    /// The python driver, compiled by the very interpreter that will run it.
    compiled_driver: Option<PathBuf>,
}

/// `manifest.toml` of an artifact.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Manifest {
    version: u32,
    /// The language that runs when none is named.
    default: Language,
    interpreters: BTreeMap<Language, ManifestInterpreter>,
    #[serde(default)]
    variables: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ManifestInterpreter {
    program: String,
    #[serde(default)]
    version: String,
    #[serde(default)]
    site: Vec<String>,
}

const MANIFEST_VERSION: u32 = 1;

impl Environment {
    /// The host's own software as `caller` means it, with `language` as the default. `place` keeps what is derived from the host.
    pub fn preset(
        name: &str,
        language: Language,
        place: &Path,
        caller: &Whereabouts,
    ) -> Result<Self, Problem> {
        let host = HostInterpreters::find(place, caller);
        let etc = etc::prepared(place)
            .map_err(|error| Problem::internal(format!("preparing /etc for boxes: {error}")))?;
        Ok(Self {
            name: name.to_owned(),
            language,
            interpreters: host.interpreters.clone(),
            variables: BTreeMap::new(),
            software: Software::Host(HostSoftware {
                prefixes: host.prefixes.clone(),
                etc,
                compiled_driver: host.compiled_driver.clone().filter(|path| path.exists()),
            }),
            warmth: Warmth::default(),
        })
    }

    /// A sandbox artifact in `directory`.
    pub fn artifact(name: &str, directory: &Path) -> Result<Self, Problem> {
        let manifest_path = directory.join("manifest.toml");
        let bad = |what: String| {
            Problem::new(Code::Config, format!("environment `{name}`: {what}"))
                .hint("docs/environments.md describes the format of an artifact")
        };
        let text = fs::read_to_string(&manifest_path)
            .map_err(|error| bad(format!("{}: {error}", manifest_path.display())))?;
        let manifest: Manifest = toml::from_str(&text)
            .map_err(|error| bad(format!("{}: {}", manifest_path.display(), error.message())))?;
        if manifest.version != MANIFEST_VERSION {
            return Err(bad(format!(
                "its manifest has version {}, this carrel reads {MANIFEST_VERSION}",
                manifest.version
            )));
        }
        if !manifest.interpreters.contains_key(&manifest.default) {
            return Err(bad(format!(
                "its default language {} has no interpreter",
                manifest.default.as_str()
            )));
        }
        let rootfs = fs::canonicalize(directory.join("rootfs"))
            .map_err(|error| bad(format!("{}: {error}", directory.join("rootfs").display())))?;
        let mut interpreters = BTreeMap::new();
        for (language, given) in manifest.interpreters {
            if !given.program.starts_with('/') {
                return Err(bad(format!(
                    "the program of {} must be an absolute path inside rootfs",
                    language.as_str()
                )));
            }
            let ManifestInterpreter { program, version, site } = given;
            interpreters.insert(language, Interpreter { program, version, site, missing: String::new() });
        }
        for language in Language::ALL {
            let missing = format!("`[interpreters.{}]` in {}", language.as_str(), manifest_path.display());
            interpreters.entry(language).or_insert_with(|| Interpreter { missing, ..Interpreter::default() });
        }
        Ok(Self {
            name: name.to_owned(),
            language: manifest.default,
            interpreters,
            variables: manifest.variables,
            software: Software::Artifact { rootfs },
            warmth: Warmth::default(),
        })
    }

    /// What the interpreters' programs are on disk at the moment. Another one of the same name has another stamp.
    pub fn stamp(&self) -> Vec<Option<(u64, u64, i64, i64)>> {
        let of = |meta: fs::Metadata| (meta.dev(), meta.ino(), meta.ctime(), meta.ctime_nsec());
        let programs = self.interpreters.values().map(|found| found.program.as_str());
        match &self.software {
            Software::Host(_) => programs.map(|path| fs::metadata(path).ok().map(of)).collect(),
            // Links in it lead to other places than on the host.
            Software::Artifact { rootfs } => {
                let inside = programs.map(|path| rootfs.join(path.trim_start_matches('/')));
                let all = std::iter::once(rootfs.clone()).chain(inside);
                all.map(|path| fs::symlink_metadata(path).ok().map(of)).collect()
            }
        }
    }

    /// Variables of every session: a clean set, nothing of the caller's own.
    pub fn session_variables(&self) -> BTreeMap<String, String> {
        let mut path: Vec<String> = Vec::new();
        for interpreter in self.interpreters.values().filter(|interpreter| !interpreter.program.is_empty()) {
            if let Some(directory) = Path::new(&interpreter.program).parent() {
                path.push(directory.to_string_lossy().into_owned());
            }
        }
        path.extend(
            ["/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin"]
                .map(str::to_owned),
        );
        let mut seen = std::collections::BTreeSet::new();
        path.retain(|directory| seen.insert(directory.clone()));
        let mut all: BTreeMap<String, String> = [
            // Not LANG: all that C.UTF-8 changes is what characters are, and every program that looks would load twelve
            // more files to learn it. As python does it for itself (PEP 538).
            ("LC_CTYPE", "C.UTF-8"),
            ("USER", "user"),
            ("LOGNAME", "user"),
            ("SHELL", "/bin/bash"),
            ("TERM", "dumb"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into();
        all.insert("PATH".into(), path.join(":"));
        all.extend(self.variables.clone());
        all
    }

    /// The mounts that bring the software into a box.
    pub(crate) fn plan(&self) -> Vec<Step> {
        match &self.software {
            Software::Host(host) => host_plan(host),
            Software::Artifact { rootfs } => artifact_plan(rootfs),
        }
    }
}

impl Environment {
    /// What goes into places that a box makes itself, once they are there: a virtualenv may lie in /tmp or in a home
    /// directory of the same name, and the compiled driver beside the agent's own files.
    pub(crate) fn late_plan(&self) -> Vec<Step> {
        let Software::Host(host) = &self.software else { return Vec::new() };
        let prefixes = host.prefixes.iter().map(|prefix| bind(prefix, &prefix.to_string_lossy()));
        let driver =
            host.compiled_driver.iter().map(|driver| bind(driver, &format!("{}/python.pyc", Places::RUN)));
        prefixes.chain(driver).collect()
    }
}

fn bind(source: &Path, target: &str) -> Step {
    let source = source.to_string_lossy().into_owned();
    Step::Bind { source, target: target.to_owned(), writable: false, device: false }
}

/// A top-level entry as the root has it: a link stays a link.
fn same(root: &Path, name: &str) -> Option<Step> {
    let source = root.join(name);
    let meta = fs::symlink_metadata(&source).ok()?;
    let target = format!("/{name}");
    if meta.is_symlink() {
        let link = fs::read_link(&source).ok()?.to_string_lossy().into_owned();
        return Some(Step::Symlink { target, link });
    }
    Some(bind(&source, &target))
}

fn host_plan(host: &HostSoftware) -> Vec<Step> {
    let mut plan = Vec::new();
    for name in ["usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"] {
        plan.extend(same(Path::new("/"), name));
    }
    plan.push(bind(&host.etc, "/etc"));
    plan
}

/// Places a box makes itself, whatever a root filesystem has there.
const OWN: &[&str] = &["dev", "proc", "sys", "tmp", "run", "home", "workspace", "project"];

fn artifact_plan(rootfs: &Path) -> Vec<Step> {
    let mut names: Vec<String> = fs::read_dir(rootfs)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| !OWN.contains(&name.as_str()))
        .collect();
    names.sort();
    let mut plan: Vec<Step> = names.iter().filter_map(|name| same(rootfs, name)).collect();
    if !rootfs.join("etc").exists() {
        plan.extend(accounts());
    }
    plan
}

fn accounts() -> Vec<Step> {
    let file = |(name, content): (&str, &str)| Step::File {
        target: format!("/etc/{name}"),
        content: content.to_owned(),
    };
    etc::own_files().map(file).collect()
}

/// What every box has besides its software. `memory` bounds what temporary files may take of it.
pub(crate) fn common_plan(agent: &Path, workspace: &Path, spool: &Path, memory: u64) -> Vec<Step> {
    let tmpfs = |target: &str, size: u64, mode: u32, user: bool| Step::Tmpfs {
        target: target.to_owned(),
        size,
        mode,
        user,
    };
    let writable = |source: &Path, target: &str| Step::Bind {
        source: source.to_string_lossy().into_owned(),
        target: target.to_owned(),
        writable: true,
        device: false,
    };
    let link = |target: &str, link: &str| Step::Symlink { target: target.to_owned(), link: link.to_owned() };
    let mut plan = vec![
        Step::Proc { target: "/proc".into() },
        Step::Dir { target: "/dev".into(), mode: 0o755, user: false },
        tmpfs("/tmp", memory / 4, 0o1777, false),
        tmpfs(Places::HOME, memory / 4, 0o755, true),
        tmpfs("/dev/shm", memory / 4, 0o1777, false),
        Step::Devpts { target: "/dev/pts".into() },
        link("/dev/ptmx", "pts/ptmx"),
        link("/dev/fd", "/proc/self/fd"),
        link("/dev/stdin", "/proc/self/fd/0"),
        link("/dev/stdout", "/proc/self/fd/1"),
        link("/dev/stderr", "/proc/self/fd/2"),
        // Code files of bash are written here, at most one per interpreter.
        Step::Open { target: Places::RUN.into(), mode: 0o755 },
        Step::Dir { target: carrel_jail::mounts::EMPTY.into(), mode: 0o555, user: false },
        bind(agent, Places::AGENT),
        writable(spool, Places::SPOOL),
        writable(workspace, Places::WORKSPACE),
        link("/var/tmp", "/tmp"),
        link("/var/run", "/run"),
    ];
    plan.extend(["null", "zero", "full", "random", "urandom", "tty"].map(|name| Step::Bind {
        source: format!("/dev/{name}"),
        target: format!("/dev/{name}"),
        writable: true,
        device: true,
    }));
    plan
}
