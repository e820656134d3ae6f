//! What of the host a box has to see of an interpreter, and what no box may see.
//!
//! An interpreter's prefix is mounted whole, because programs beside it (pip, npm) and packages are meant too. Where that would
//! show a home directory, or a place that others keep their things in, only the parts are mounted that the interpreter cannot
//! do without; and if one of those shows too much, the interpreter is refused.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::question::Answer;

/// Public software and nothing else, and its parts refer to each other all over.
const STORE: &str = "/nix/store";
/// Places that everything on a host keeps its things in. Whoever shows one, or what holds it, shows secrets.
const COMMON: [&str; 8] = ["/home", "/root", "/etc", "/var/lib", "/var/tmp", "/run", "/tmp", "/srv"];
/// The same in a home directory.
const COMMON_AT_HOME: [&str; 6] =
    [".local", ".local/share", ".local/state", ".local/lib", ".config", ".cache"];

/// What may not be shown.
#[derive(Debug)]
pub(super) struct Private {
    /// Neither these nor what holds them.
    places: Vec<PathBuf>,
    /// Nothing in it either: files of other sandboxes, carrel's registry.
    state: PathBuf,
}

impl Private {
    /// To a caller with this home directory, on a host whose carrel keeps its state there.
    pub(super) fn of(home: Option<PathBuf>, state: &Path) -> Self {
        let mut homes: Vec<PathBuf> = home.into_iter().chain(["/root".into()]).collect();
        homes.extend(homes.clone().iter().map(|home| real(home)));
        let below = homes.iter().flat_map(|home| COMMON_AT_HOME.map(|name| home.join(name)));
        let mut places: Vec<PathBuf> = below.chain(homes.iter().cloned()).collect();
        places.extend(COMMON.map(PathBuf::from));
        places.extend(COMMON.map(|place| real(Path::new(place))));
        Self { places, state: real(state) }
    }

    /// Whether mounting this would show what is private.
    pub(super) fn shows(&self, path: &Path) -> bool {
        // A link is followed when it is mounted.
        [path.to_path_buf(), real(path)].iter().any(|path| {
            self.places.iter().any(|place| place.starts_with(path))
                || is_in_common_of_a_home(path)
                || self.state.starts_with(path)
                || path.starts_with(&self.state)
        })
    }
}

/// Somebody's home, whoever looks: a daemon of root's sees them all.
fn is_in_common_of_a_home(path: &Path) -> bool {
    let Ok(below) = path.strip_prefix("/home") else { return false };
    let mut parts = below.components();
    let _name = parts.next();
    let rest = parts.as_path();
    rest.as_os_str().is_empty() || COMMON_AT_HOME.iter().any(|common| Path::new(common) == rest)
}

fn real(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf())
}

/// Mounted anyway, or never wanted.
fn is_covered(path: &Path) -> bool {
    ["/usr", "/lib", "/lib32", "/lib64", "/libx32", "/bin", "/sbin", "/proc", "/dev", "/memfd:"]
        .iter()
        .any(|covered| path.starts_with(covered))
}

/// What has to be mounted for an interpreter. The error says what cannot be.
pub(super) fn needed(answer: &Answer, private: &Private) -> Result<BTreeSet<PathBuf>, String> {
    let mut all = wanted(answer, &real(&answer.program), |prefix| private.shows(prefix));
    all.retain(|path| path.exists());
    match all.iter().find(|path| private.shows(path)) {
        Some(path) => Err(format!("{} would show too much of this host", path.display())),
        None => Ok(all),
    }
}

/// The same without looking at the host: `program` is where the answer's program really is, `shows` what is not taken whole.
fn wanted(answer: &Answer, program: &Path, shows: impl Fn(&Path) -> bool) -> BTreeSet<PathBuf> {
    let mut all = BTreeSet::new();
    for prefix in answer.prefixes.iter().filter(|prefix| !is_covered(prefix)) {
        match shows(prefix) {
            false => all.insert(prefix.clone()),
            true => {
                all.extend(answer.parts.iter().filter(|part| part.starts_with(prefix)).cloned());
                continue;
            }
        };
    }
    for path in
        [answer.program.as_path(), program].into_iter().chain(answer.maps.iter().map(PathBuf::as_path))
    {
        if !is_covered(path) && !all.iter().any(|prefix| path.starts_with(prefix)) {
            all.insert(path.to_path_buf());
        }
    }
    if all.iter().any(|path| path.starts_with(STORE)) {
        all.retain(|path| !path.starts_with(STORE));
        all.insert(STORE.into());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(texts: &[&str]) -> Vec<PathBuf> {
        texts.iter().map(PathBuf::from).collect()
    }

    fn answer(program: &str, prefixes: &[&str], parts: &[&str], maps: &[&str]) -> Answer {
        Answer {
            program: program.into(),
            prefixes: paths(prefixes),
            parts: paths(parts),
            maps: paths(maps),
            ..Answer::default()
        }
    }

    fn of_ann() -> Private {
        Private::of(Some("/data/ann".into()), Path::new("/data/ann/.local/state/carrel"))
    }

    fn all_of(answer: &Answer) -> Vec<PathBuf> {
        wanted(answer, &answer.program, |path| of_ann().shows(path)).into_iter().collect()
    }

    #[test]
    fn a_home_and_what_is_common_in_it_are_never_shown() {
        let private = of_ann();
        for place in [
            "/",
            "/data",
            "/data/ann",
            "/data/ann/.local",
            "/data/ann/.local/share",
            "/data/ann/.local/state",
            "/data/ann/.local/state/carrel",
            "/data/ann/.local/state/carrel/sandboxes/sbx_1/workspace",
            "/data/ann/.config",
            "/home",
            "/home/bob",
            "/home/bob/.local",
            "/home/bob/.config",
            "/root",
            "/root/.local",
            "/etc",
            "/var",
            "/var/lib",
            "/tmp",
        ] {
            assert!(private.shows(Path::new(place)), "{place}");
        }
        for place in [
            "/opt/python",
            "/opt",
            "/data/ann/.pyenv/versions/3.12.1",
            "/data/ann/.local/share/mise/installs/node/22",
            "/data/ann/.local/lib/python3.12/site-packages",
            "/home/bob/venv",
            "/root/.nvm/versions/node/v22",
            "/tmp/venv",
        ] {
            assert!(!private.shows(Path::new(place)), "{place}");
        }
    }

    #[test]
    fn a_state_directory_elsewhere_is_as_private() {
        let private = Private::of(None, Path::new("/opt/big/carrel"));
        assert!(private.shows(Path::new("/opt/big")));
        assert!(private.shows(Path::new("/opt/big/carrel/snapshots")));
        assert!(!private.shows(Path::new("/opt/bigger")));
    }

    #[test]
    fn a_link_to_a_home_is_the_home() {
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("home");
        fs::create_dir(&home).unwrap();
        std::os::unix::fs::symlink(&home, place.path().join("python")).unwrap();
        let private = Private::of(Some(home), Path::new("/nowhere/state"));
        assert!(private.shows(&place.path().join("python")));
        // And a home that is itself a link.
        let private = Private::of(Some(place.path().join("python")), Path::new("/nowhere/state"));
        assert!(private.shows(&place.path().join("home")));
    }

    #[test]
    fn conda_and_nvm_and_pyenv_are_taken_whole() {
        for (program, prefix) in [
            ("/data/ann/miniconda3/bin/python3.12", "/data/ann/miniconda3"),
            ("/data/ann/.pyenv/versions/3.12.1/bin/python3.12", "/data/ann/.pyenv/versions/3.12.1"),
            ("/data/ann/.nvm/versions/node/v22.1.0/bin/node", "/data/ann/.nvm/versions/node/v22.1.0"),
        ] {
            let libc = "/usr/lib/x86_64-linux-gnu/libc.so.6";
            let inside = format!("{prefix}/lib/libz.so.1");
            let answer = answer(
                program,
                &[prefix],
                &[&format!("{prefix}/lib/node_modules")],
                &[program, &inside, libc],
            );
            assert_eq!(all_of(&answer), paths(&[prefix]));
        }
    }

    #[test]
    fn a_virtualenv_needs_its_base_and_what_is_mapped_from_elsewhere() {
        let answer = answer(
            "/data/ann/work/venv/bin/python",
            &["/data/ann/work/venv", "/opt/python", "/data/ann/.local/lib/python3.12/site-packages"],
            &[],
            &["/opt/python/lib/libpython3.12.so", "/srv/lib/libz.so.1", "/usr/lib/libc.so.6"],
        );
        let found = wanted(&answer, Path::new("/opt/python/bin/python3.12"), |path| of_ann().shows(path));
        let all = [
            "/data/ann/.local/lib/python3.12/site-packages",
            "/data/ann/work/venv",
            "/opt/python",
            "/srv/lib/libz.so.1",
        ];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), paths(&all));
    }

    #[test]
    fn a_node_or_python_in_a_home_shows_itself_and_its_modules_alone() {
        let node = answer(
            "/data/ann/.local/bin/node",
            &["/data/ann/.local"],
            &["/data/ann/.local/lib/node_modules"],
            &["/data/ann/.local/bin/node"],
        );
        assert_eq!(all_of(&node), paths(&["/data/ann/.local/bin/node", "/data/ann/.local/lib/node_modules"]));
        let python = answer(
            "/data/ann/bin/python3",
            &["/data/ann"],
            &["/data/ann/lib/python3.12", "/data/ann/pyvenv.cfg"],
            &["/data/ann/lib/libpython3.12.so"],
        );
        let all = [
            "/data/ann/bin/python3",
            "/data/ann/lib/libpython3.12.so",
            "/data/ann/lib/python3.12",
            "/data/ann/pyvenv.cfg",
        ];
        assert_eq!(all_of(&python), paths(&all));
    }

    #[test]
    fn parts_that_show_too_much_are_refused() {
        // A link where modules are looked for, to the home that holds them.
        let place = tempfile::tempdir().unwrap();
        let home = place.path().join("home");
        fs::create_dir_all(home.join("lib")).unwrap();
        fs::write(home.join("node"), "").unwrap();
        std::os::unix::fs::symlink(&home, home.join("lib/node_modules")).unwrap();
        let node = answer(
            home.join("node").to_str().unwrap(),
            &[home.to_str().unwrap()],
            &[home.join("lib/node_modules").to_str().unwrap()],
            &[],
        );
        let private = Private::of(Some(home), Path::new("/nowhere/state"));
        assert!(needed(&node, &private).unwrap_err().contains("lib/node_modules would show too much"));
    }

    #[test]
    fn the_nix_store_is_taken_whole() {
        let answer = answer(
            "/data/ann/.nix-profile/bin/python3",
            &["/nix/store/abc-python"],
            &[],
            &["/nix/store/def-glibc/lib/libc.so"],
        );
        let found =
            wanted(&answer, Path::new("/nix/store/abc-python/bin/python3.12"), |path| of_ann().shows(path));
        let all = ["/data/ann/.nix-profile/bin/python3", "/nix/store"];
        assert_eq!(found.into_iter().collect::<Vec<_>>(), paths(&all));
    }
}
