//! Searches in made-up homes, with scripts for interpreters: what version managers lay out, without one of them.

use std::{ffi::OsString, os::unix::fs::PermissionsExt};

use super::*;

struct Home {
    directory: tempfile::TempDir,
}

impl Home {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        // As the kernel names it, for the answers below are compared with it.
        let home = Self { directory };
        fs::create_dir_all(home.at("home/.local/state/carrel")).unwrap();
        home
    }

    fn at(&self, path: &str) -> PathBuf {
        fs::canonicalize(self.directory.path()).unwrap().join(path)
    }

    fn write(&self, path: &str, text: &str) {
        let file = self.at(path);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, text).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// An "interpreter" that says this of itself.
    fn program(&self, path: &str, version: &str, prefix: &str, parts: &[&str]) {
        let parts: Vec<PathBuf> = parts.iter().map(|part| self.at(part)).collect();
        let answer = serde_json::json!({
            "program": self.at(path), "version": version, "site": [], "prefixes": [self.at(prefix)], "parts": parts, "maps": [],
        });
        self.write(path, &format!("#!/bin/sh\necho '{answer}'\n"));
    }

    fn whereabouts(&self, path: &[&str], more: &[(&str, &str)]) -> Whereabouts {
        let path = std::env::join_paths(path.iter().map(|place| self.at(place))).unwrap();
        let own = [("PATH".into(), path), ("HOME".into(), self.at("home").into_os_string())];
        let more = more.iter().map(|(name, value)| (OsString::from(name), self.at(value).into_os_string()));
        Whereabouts::of(own.into_iter().chain(more))
    }

    fn place(&self) -> PathBuf {
        self.at("home/.local/state/carrel/environments")
    }

    fn find(&self, caller: &Whereabouts) -> HostInterpreters {
        HostInterpreters::find(&self.place(), caller)
    }
}

fn program(found: &HostInterpreters, language: Language) -> PathBuf {
    found.interpreters[&language].program.clone().into()
}

/// What is mounted of this home.
fn shown(found: &HostInterpreters, home: &Home) -> Vec<PathBuf> {
    found.prefixes.iter().filter(|prefix| prefix.starts_with(home.at(""))).cloned().collect()
}

#[test]
fn conda_and_nvm_are_found_by_their_path_and_shown_whole() {
    let home = Home::new();
    home.program("home/miniconda3/envs/data/bin/python3", "3.12.4", "home/miniconda3/envs/data", &[]);
    home.program(
        "home/.nvm/versions/node/v22.1.0/bin/node",
        "22.1.0",
        "home/.nvm/versions/node/v22.1.0",
        &[],
    );
    let caller = home.whereabouts(
        &["home/miniconda3/envs/data/bin", "home/.nvm/versions/node/v22.1.0/bin"],
        &[("CONDA_PREFIX", "home/miniconda3/envs/data")],
    );
    let found = home.find(&caller);
    assert_eq!(program(&found, Language::Python), home.at("home/miniconda3/envs/data/bin/python3"));
    assert_eq!(found.interpreters[&Language::Node].version, "22.1.0");
    let whole = [home.at("home/.nvm/versions/node/v22.1.0"), home.at("home/miniconda3/envs/data")];
    assert_eq!(shown(&found, &home), whole);
}

#[test]
fn a_pyenv_shim_gives_the_version_that_holds_everywhere_and_is_asked_again_when_that_changes() {
    let home = Home::new();
    for version in ["3.11.9", "3.12.4"] {
        let prefix = format!("home/.pyenv/versions/{version}");
        home.program(&format!("{prefix}/bin/python3"), version, &prefix, &[]);
    }
    // As pyenv does it: the current directory's version before the one for everywhere.
    home.write(
        "home/.pyenv/shims/python3",
        "#!/bin/sh\nv=$(cat .python-version 2>/dev/null || cat \"$PYENV_ROOT/version\")\n\
         exec \"$PYENV_ROOT/versions/$v/bin/python3\" \"$@\"\n",
    );
    home.write("home/.pyenv/version", "3.11.9\n");
    let caller = home.whereabouts(&["home/.pyenv/shims"], &[("PYENV_ROOT", "home/.pyenv")]);
    let found = home.find(&caller);
    assert_eq!(program(&found, Language::Python), home.at("home/.pyenv/versions/3.11.9/bin/python3"));
    assert_eq!(shown(&found, &home), [home.at("home/.pyenv/versions/3.11.9")]);
    home.write("home/.pyenv/version", "3.12.4\n\n");
    assert_eq!(home.find(&caller).interpreters[&Language::Python].version, "3.12.4");
}

#[test]
fn a_node_in_dot_local_shows_neither_secrets_nor_state() {
    let home = Home::new();
    home.write("home/.local/share/keyrings/login.keyring", "secret");
    home.write("home/.local/lib/node_modules/npm/package.json", "{}");
    home.program("home/.local/bin/node", "22.1.0", "home/.local", &["home/.local/lib/node_modules"]);
    let found = home.find(&home.whereabouts(&["home/.local/bin"], &[]));
    assert_eq!(program(&found, Language::Node), home.at("home/.local/bin/node"));
    assert_eq!(
        shown(&found, &home),
        [home.at("home/.local/bin/node"), home.at("home/.local/lib/node_modules")]
    );
}

#[test]
fn who_would_show_too_much_is_passed_over_for_the_next() {
    let home = Home::new();
    // It says that it cannot do without the whole of it.
    home.program("home/bin/python3", "3.9.0", "home", &["home"]);
    home.program("opt/python/bin/python3", "3.12.4", "opt/python", &[]);
    let found = home.find(&home.whereabouts(&["home/bin", "opt/python/bin"], &[]));
    assert_eq!(found.interpreters[&Language::Python].version, "3.12.4");
    assert_eq!(shown(&found, &home), [home.at("opt/python")]);
}

#[test]
fn callers_with_other_whereabouts_do_not_forget_each_others_answers() {
    let home = Home::new();
    for (path, version) in [("one", "3.11.0"), ("two", "3.12.0")] {
        // It counts how often it is asked; compiling the driver is not asking.
        home.program(&format!("{path}/bin/python3"), version, path, &[]);
        let said = fs::read_to_string(home.at(path).join("bin/python3")).unwrap();
        let counting = said.replace(
            "#!/bin/sh\n",
            &format!("#!/bin/sh\n[ \"$1\" = -I ] || echo >> {}\n", home.at(path).join("asked").display()),
        );
        home.write(&format!("{path}/bin/python3"), &counting);
    }
    let (one, two) = (home.whereabouts(&["one/bin"], &[]), home.whereabouts(&["two/bin"], &[]));
    for _ in 0..3 {
        assert_eq!(home.find(&one).interpreters[&Language::Python].version, "3.11.0");
        assert_eq!(home.find(&two).interpreters[&Language::Python].version, "3.12.0");
    }
    for path in ["one", "two"] {
        assert_eq!(fs::read_to_string(home.at(path).join("asked")).unwrap(), "\n");
    }
}

#[test]
fn memories_do_not_pile_up() {
    let home = Home::new();
    let empty = HostInterpreters {
        interpreters: BTreeMap::new(),
        prefixes: Vec::new(),
        compiled_driver: None,
        fingerprint: String::new(),
        again_after: None,
    };
    for number in 0..MOST_MEMORIES + 5 {
        empty.remember(&home.place(), &home.whereabouts(&[&number.to_string()], &[])).unwrap();
    }
    assert_eq!(fs::read_dir(home.place()).unwrap().count(), MOST_MEMORIES);
}

#[test]
fn one_that_was_too_slow_is_asked_again_after_a_while_and_not_before() {
    let home = Home::new();
    home.program("opt/bin/python3", "3.12.0", "opt", &[]);
    let caller = home.whereabouts(&["opt/bin"], &[]);
    let mut known = home.find(&caller);
    known.interpreters.get_mut(&Language::Python).unwrap().version = "remembered".into();
    for (again_after, version) in
        [(None, "remembered"), (Some(now() + 3600), "remembered"), (Some(now()), "3.12.0")]
    {
        known.again_after = again_after;
        known.remember(&home.place(), &caller).unwrap();
        assert_eq!(home.find(&caller).interpreters[&Language::Python].version, version);
    }
}

#[test]
fn whereabouts_carry_what_matters_and_nothing_else() {
    let all = [("PATH", "/a"), ("API_TOKEN", "secret"), ("PYTHONPATH", "/b"), ("HOME", "/h")];
    let caller = Whereabouts::of(all.map(|(name, value)| (name.into(), value.into())));
    let text = serde_json::to_string(&caller).unwrap();
    assert_eq!(text, r#"{"HOME":"/h","PATH":"/a"}"#);
    // Who reads them does not take more either.
    let read: Whereabouts =
        serde_json::from_str(r#"{"HOME":"/h","PATH":"/a","LD_PRELOAD":"/evil.so"}"#).unwrap();
    assert_eq!(read, caller);
}
