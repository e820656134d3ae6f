//! The host's own interpreters: found once, remembered while nothing changes.
//!
//! Interpreters live in odd places: pyenv, nvm, conda, virtualenvs, `/usr/local`, the Nix store. Asking the
//! interpreter itself is the only way to know its prefix, and what libraries it maps from elsewhere.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use carrel_proto::guest::{Interpreter, Language};
use serde::{Deserialize, Serialize};

const PYTHON_DRIVER: &str = include_str!("../../agent/drivers/python.py");
/// Where the answer is remembered.
const MEMORY: &str = "host.json";

/// What the host offers to presets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostInterpreters {
    pub interpreters: BTreeMap<Language, Interpreter>,
    /// Directories and files outside `/usr` that they need.
    pub prefixes: Vec<PathBuf>,
    /// The python driver as bytecode of the interpreter that was found.
    pub compiled_driver: Option<PathBuf>,
    /// Changes with anything that could change the answer.
    fingerprint: String,
}

const PYTHON: &str = r#"
import json, os, site, sys
dirs = list(site.getsitepackages()) if hasattr(site, "getsitepackages") else []
if site.ENABLE_USER_SITE: dirs.append(site.getusersitepackages())
maps = sorted({l.split(None, 5)[5].strip() for l in open("/proc/self/maps") if len(l.split(None, 5)) == 6})
print(json.dumps({"program": sys.executable, "version": sys.version.split()[0], "site": [d for d in dirs if os.path.isdir(d)],
  "prefixes": sorted({sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix} | {d for d in dirs if os.path.isdir(d)}),
  "maps": [m for m in maps if m.startswith("/")]}))
"#;

const NODE: &str = r#"
const fs = require("fs"), path = require("path");
const maps = new Set(fs.readFileSync("/proc/self/maps", "utf8").split("\n").map(l => l.split(/\s+/)[5]).filter(p => p && p.startsWith("/")));
console.log(JSON.stringify({program: process.execPath, version: process.versions.node, site: [],
  prefixes: [path.dirname(path.dirname(process.execPath))], maps: [...maps]}));
"#;

const BASH: &str = r#"
printf '{"program":"%s","version":"%s","site":[],"prefixes":[],"maps":[' "$BASH" "${BASH_VERSINFO[0]}.${BASH_VERSINFO[1]}.${BASH_VERSINFO[2]}"
s=; while read -r _ _ _ _ _ path; do case $path in /*) printf '%s"%s"' "$s" "$path"; s=,;; esac; done < /proc/self/maps
printf ']}\n'
"#;

#[derive(Debug, Deserialize)]
struct Answer {
    program: PathBuf,
    version: String,
    site: Vec<String>,
    prefixes: Vec<PathBuf>,
    maps: Vec<PathBuf>,
}

fn names(language: Language) -> &'static [&'static str] {
    match language {
        Language::Python => &["python3", "python"],
        Language::Node => &["node", "nodejs"],
        Language::Bash => &["bash"],
    }
}

fn script(language: Language) -> [&'static str; 2] {
    match language {
        Language::Python => ["-c", PYTHON],
        Language::Node => ["-e", NODE],
        Language::Bash => ["-c", BASH],
    }
}

/// Where to look: the caller's PATH and the usual places behind it.
fn search_path() -> Vec<PathBuf> {
    let usual = ["/usr/local/bin", "/usr/bin", "/bin", "/run/current-system/sw/bin"];
    let path = env::var_os("PATH").unwrap_or_default();
    let mut seen = BTreeSet::new();
    env::split_paths(&path)
        .chain(usual.into_iter().map(PathBuf::from))
        .filter(|directory| directory.is_absolute() && seen.insert(directory.clone()))
        .collect()
}

fn candidates(language: Language, path: &[PathBuf]) -> Vec<PathBuf> {
    let files = |name: &'static str| path.iter().map(move |directory| directory.join(name));
    names(language).iter().flat_map(|name| files(name)).filter(|file| is_program(file)).collect()
}

fn is_program(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.mode() & 0o111 != 0)
}

impl HostInterpreters {
    /// The answer remembered in `place` if nothing has changed, else a new one.
    pub fn find(place: &Path) -> Self {
        let fingerprint = fingerprint();
        let known =
            fs::read(place.join(MEMORY)).ok().and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        match known {
            Some(known) if known.fingerprint == fingerprint && known.is_of(place) => known,
            _ => Self::look(place),
        }
    }

    /// Whether it was found for this very place: a state directory that was moved remembers its old one.
    fn is_of(&self, place: &Path) -> bool {
        self.compiled_driver.as_ref().is_none_or(|driver| driver.parent() == Some(place))
    }

    /// Asks every interpreter anew.
    pub fn look(place: &Path) -> Self {
        let path = search_path();
        let mut interpreters = BTreeMap::new();
        let mut prefixes = BTreeSet::new();
        for language in Language::ALL {
            let found = candidates(language, &path);
            let mut refusals = Vec::new();
            let answer = found.iter().find_map(|program| match ask(language, program) {
                Ok(answer) => Some(answer),
                Err(why) => {
                    refusals.push(format!("{} ({why})", program.display()));
                    None
                }
            });
            let interpreter = match answer {
                Some(answer) => {
                    prefixes.extend(needed(&answer));
                    Interpreter {
                        program: answer.program.to_string_lossy().into_owned(),
                        version: answer.version,
                        site: answer.site,
                        missing: String::new(),
                    }
                }
                None => {
                    let places =
                        path.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ");
                    let mut missing = format!("{} in {places}", names(language).join(" or "));
                    if !refusals.is_empty() {
                        missing = format!("{missing}; found but not usable: {}", refusals.join(", "));
                    }
                    Interpreter { program: String::new(), version: String::new(), site: Vec::new(), missing }
                }
            };
            interpreters.insert(language, interpreter);
        }
        let compiled_driver = interpreters.get(&Language::Python).and_then(|python| compile(python, place));
        let prefixes = prefixes.into_iter().collect();
        let host = Self { interpreters, prefixes, compiled_driver, fingerprint: fingerprint() };
        if let Ok(text) = serde_json::to_vec(&host) {
            // Only a memory: without it the next call asks again.
            let _ = fs::create_dir_all(place);
            let making = place.join(format!("host.{}", std::process::id()));
            let _ = fs::write(&making, text).and_then(|()| fs::rename(&making, place.join(MEMORY)));
        }
        host
    }
}

/// Compiling the driver takes python longer than starting; so it is done once. `None`: the source does as well.
fn compile(python: &Interpreter, place: &Path) -> Option<PathBuf> {
    if python.program.is_empty() {
        return None;
    }
    const COMPILE: &str = "import py_compile as p, sys; p.compile(sys.argv[1], sys.argv[2], sys.argv[3], True, invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)";
    let mut hasher = DefaultHasher::new();
    (&python.program, &python.version, PYTHON_DRIVER).hash(&mut hasher);
    let compiled = place.join(format!("python-{:016x}.pyc", hasher.finish()));
    if compiled.exists() {
        return Some(compiled);
    }
    fs::create_dir_all(place).ok()?;
    let source = place.join(format!("python.{}.py", std::process::id()));
    fs::write(&source, PYTHON_DRIVER).ok()?;
    let status = Command::new(&python.program)
        .args(["-I", "-S", "-c", COMPILE])
        .args([source.as_os_str(), compiled.as_os_str()])
        .arg("/run/carrel/python.py")
        .stdin(Stdio::null())
        .output();
    let _ = fs::remove_file(&source);
    status.ok().filter(|output| output.status.success()).map(|_| compiled)
}

fn ask(language: Language, program: &Path) -> Result<Answer, String> {
    let output = Command::new(program)
        .args(script(language))
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if !output.status.success() {
        let word = String::from_utf8_lossy(&output.stderr);
        return Err(word.lines().last().unwrap_or("it failed").to_owned());
    }
    let answer: Answer = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    for prefix in needed(&answer) {
        if reveals_too_much(&prefix) {
            return Err(format!("its prefix {} would show too much of this host", prefix.display()));
        }
    }
    Ok(answer)
}

/// Mounted anyway, or never wanted.
fn is_covered(path: &Path) -> bool {
    ["/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/proc", "/dev", "/memfd:"]
        .iter()
        .any(|covered| path.starts_with(covered))
}

/// What has to be mounted for an interpreter.
fn needed(answer: &Answer) -> BTreeSet<PathBuf> {
    let store = Path::new("/nix/store");
    let mut all = BTreeSet::new();
    let program = fs::canonicalize(&answer.program).unwrap_or_else(|_| answer.program.clone());
    for prefix in &answer.prefixes {
        all.insert(prefix.clone());
    }
    for path in [&answer.program, &program].into_iter().chain(&answer.maps) {
        if !all.iter().any(|prefix| path.starts_with(prefix)) {
            all.insert(path.clone());
        }
    }
    if all.iter().any(|path| path.starts_with(store)) {
        // Closures refer to each other all over the store; it holds nothing but public software.
        all.retain(|path| !path.starts_with(store));
        all.insert(store.to_path_buf());
    }
    all.retain(|path| !is_covered(path) && path.exists());
    all
}

/// A prefix that is a home directory, or holds one, would put private files into every box.
fn reveals_too_much(prefix: &Path) -> bool {
    let homes = [
        env::var_os("HOME").map(PathBuf::from),
        Some("/root".into()),
        Some("/home".into()),
        Some("/etc".into()),
    ];
    homes.iter().flatten().any(|home| home.starts_with(prefix))
}

fn fingerprint() -> String {
    let path = search_path();
    let mut hasher = DefaultHasher::new();
    PYTHON_DRIVER.hash(&mut hasher);
    let mut print = format!("v2;{:x};", hasher.finish());
    for name in [
        "PATH",
        "VIRTUAL_ENV",
        "CONDA_PREFIX",
        "PYENV_VERSION",
        "PYENV_ROOT",
        "PYTHONHOME",
        "NVM_BIN",
        "HOME",
    ] {
        print.push_str(&format!("{name}={};", env::var(name).unwrap_or_default()));
    }
    let pyenv = env::var_os("PYENV_ROOT")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".pyenv")));
    let mut watched: Vec<PathBuf> = pyenv.map(|root| root.join("version")).into_iter().collect();
    for language in Language::ALL {
        watched.extend(candidates(language, &path));
    }
    for file in watched {
        if let Ok(meta) = fs::metadata(&file) {
            print.push_str(&format!(
                "{}:{}:{}:{};",
                file.display(),
                meta.ino(),
                meta.size(),
                meta.mtime_nsec() ^ meta.mtime()
            ));
        }
    }
    print
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_home_directory_is_never_a_prefix() {
        assert!(reveals_too_much(Path::new("/")));
        assert!(reveals_too_much(Path::new("/home")));
        assert!(!reveals_too_much(Path::new("/opt/python")));
    }

    #[test]
    fn the_nix_store_is_taken_whole() {
        let answer = Answer {
            program: "/nix/store/abc-python/bin/python3".into(),
            version: "3".into(),
            site: vec![],
            prefixes: vec!["/nix/store/abc-python".into()],
            maps: vec!["/nix/store/def-glibc/lib/libc.so".into()],
        };
        // Not there on this host, so it is left out again; what matters is that nothing below it is named.
        assert!(needed(&answer).iter().all(|path| !path.starts_with("/nix/store/abc-python")));
    }
}
