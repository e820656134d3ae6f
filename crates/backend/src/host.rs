//! The host's own interpreters: found once, remembered while nothing changes.
//!
//! Interpreters live in odd places: pyenv, nvm, conda, virtualenvs, `/usr/local`, the Nix store. Asking the
//! interpreter itself ([`question`]) is the only way to know its prefix, and what libraries it maps from elsewhere. Whose
//! interpreters are meant is a value ([`Whereabouts`]); what of them a box may see is said in [`shown`].

mod question;
mod shown;
mod whereabouts;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use carrel_proto::guest::{Interpreter, Language};
use serde::{Deserialize, Serialize};

pub use self::whereabouts::Whereabouts;
use self::{
    question::{Answer, Silence},
    shown::Private,
};
use crate::unfinished;

const PYTHON_DRIVER: &str = include!("../../agent/drivers/python.rs");
/// Raised with every change of what is remembered.
const VERSION: u32 = 3;
/// How the files begin in which answers are remembered, one for each caller's whereabouts: callers with different ones (a daemon
/// and a shell with an activated virtualenv) would only overwrite each other's.
const MEMORY: &str = "host-";
/// So many are kept; the oldest goes first.
const MOST_MEMORIES: usize = 32;
/// So long an interpreter that did not answer in time is not asked again: every command would wait for it.
const SULK: Duration = Duration::from_secs(60);

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
    /// One of them did not answer in time: the whole is to be asked again after this, in seconds since 1970.
    again_after: Option<u64>,
}

impl HostInterpreters {
    /// What a caller with these whereabouts means: the answer remembered in `place`, a directory of the state directory, if
    /// nothing has changed; else a new one.
    pub fn find(place: &Path, caller: &Whereabouts) -> Self {
        let known = fs::read(memory(place, caller)).ok();
        let known = known.and_then(|text| serde_json::from_slice::<Self>(&text).ok());
        match known {
            Some(known)
                if known.fingerprint == fingerprint(caller)
                    && known.is_of(place)
                    && known.again_after.is_none_or(|after| now() < after) =>
            {
                known
            }
            _ => Self::look(place, caller),
        }
    }

    /// Whether it was found for this very place: a state directory that was moved remembers its old one.
    fn is_of(&self, place: &Path) -> bool {
        self.compiled_driver.as_ref().is_none_or(|driver| driver.parent() == Some(place))
    }

    /// Asks every interpreter anew.
    pub fn look(place: &Path, caller: &Whereabouts) -> Self {
        // What changes while they are asked shall be seen the next time.
        let fingerprint = fingerprint(caller);
        let private = Private::of(caller.home(), place.parent().unwrap_or(place));
        let mut interpreters = BTreeMap::new();
        let mut prefixes = BTreeSet::new();
        let mut again_after = None;
        for language in Language::ALL {
            let mut refusals = Vec::new();
            let answer = caller.candidates(language).into_iter().find_map(|program| {
                let asked = question::ask(language, &program, caller).and_then(|answer| {
                    let needed = shown::needed(&answer, &private).map_err(Silence::Refused)?;
                    Ok((answer, needed))
                });
                match asked {
                    Ok(found) => Some(found),
                    Err(why) => {
                        if matches!(why, Silence::TooSlow) {
                            again_after = Some(now() + SULK.as_secs());
                        }
                        refusals.push(format!("{} ({why})", program.display()));
                        None
                    }
                }
            });
            let interpreter = match answer {
                Some((answer, needed)) => {
                    prefixes.extend(needed);
                    described(answer)
                }
                None => {
                    Interpreter { missing: missing(language, caller, &refusals), ..Interpreter::default() }
                }
            };
            interpreters.insert(language, interpreter);
        }
        let python = interpreters.get(&Language::Python);
        let compiled_driver = python.and_then(|python| compile(python, place, caller));
        let prefixes = prefixes.into_iter().collect();
        let host = Self { interpreters, prefixes, compiled_driver, fingerprint, again_after };
        // Only a memory: without it the next call asks again.
        let _ = host.remember(place, caller);
        host
    }

    fn remember(&self, place: &Path, caller: &Whereabouts) -> std::io::Result<()> {
        fs::create_dir_all(place)?;
        let memory = memory(place, caller);
        unfinished::remove_stale(&memory);
        let making = unfinished::beside(&memory)?;
        fs::write(&making, serde_json::to_vec(self)?).and_then(|()| fs::rename(&making, memory))?;
        let mut all: Vec<(SystemTime, PathBuf)> = fs::read_dir(place)?
            .flatten()
            .filter(|entry| {
                let name = entry.file_name();
                name.to_string_lossy().starts_with(MEMORY) && name.to_string_lossy().ends_with(".json")
            })
            .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
            .collect();
        all.sort_unstable_by(|one, other| other.cmp(one));
        all.iter().skip(MOST_MEMORIES).try_for_each(|(_, oldest)| fs::remove_file(oldest))
    }
}

fn memory(place: &Path, caller: &Whereabouts) -> PathBuf {
    place.join(format!("{MEMORY}{:016x}.json", caller.digest()))
}

fn now() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

fn fingerprint(caller: &Whereabouts) -> String {
    let mut hasher = DefaultHasher::new();
    PYTHON_DRIVER.hash(&mut hasher);
    format!("v{VERSION};{:x};{}", hasher.finish(), caller.fingerprint())
}

fn described(answer: Answer) -> Interpreter {
    Interpreter {
        program: answer.program.to_string_lossy().into_owned(),
        version: answer.version,
        site: answer.site,
        missing: String::new(),
    }
}

fn missing(language: Language, caller: &Whereabouts, refusals: &[String]) -> String {
    let path = caller.search_path();
    let places = path.iter().map(|place| place.display().to_string()).collect::<Vec<_>>().join(", ");
    let missing = format!("{} in {places}", whereabouts::names(language).join(" or "));
    match refusals {
        [] => missing,
        refusals => format!("{missing}; found but not usable: {}", refusals.join(", ")),
    }
}

/// Compiling the driver takes python longer than starting; so it is done once. `None`: the source does as well.
fn compile(python: &Interpreter, place: &Path, caller: &Whereabouts) -> Option<PathBuf> {
    if python.program.is_empty() {
        return None;
    }
    const COMPILE: &str = "import py_compile as p, sys; p.compile(sys.argv[1], sys.argv[2], sys.argv[3], True, invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)";
    let mut hasher = DefaultHasher::new();
    (&python.program, &python.version, PYTHON_DRIVER).hash(&mut hasher);
    fs::create_dir_all(place).ok()?;
    // The interpreter does not stand where we stand.
    let place = fs::canonicalize(place).ok()?;
    let compiled = place.join(format!("python-{:016x}.pyc", hasher.finish()));
    if compiled.exists() {
        return Some(compiled);
    }
    unfinished::remove_stale(&compiled);
    let source = unfinished::beside(&compiled).ok()?;
    fs::write(&source, PYTHON_DRIVER).ok()?;
    let mut command = Command::new(&python.program);
    command
        .args(["-I", "-S", "-c", COMPILE])
        .args([source.as_os_str(), compiled.as_os_str()])
        .arg("/run/carrel/python.py");
    let done = question::run(&mut command, caller);
    let _ = fs::remove_file(&source);
    done.ok().map(|_| compiled)
}

#[cfg(test)]
mod tests;
