//! The host's own interpreters, as commands find them: whose they are, and what an untrusted directory can do about it.

use std::{fs, path::PathBuf, process::Command};

use carrel_api::rest::desk::{Ask, What};
use carrel_engine::{Environments, Whereabouts, Wish};
use serde_json::Value;

use crate::{
    serving::Daemon,
    support::{Ended, Place, sandboxes},
};

#[test]
fn a_directory_with_traps_runs_nothing_on_the_host_and_changes_no_answer() {
    let place = Place::new();
    let plain = place.run(&["doctor", "--json"]).json()["interpreters"].clone();
    let sprung = place.path().join("sprung");
    let python =
        format!("open({:?}, 'a').write(__file__)\nraise SystemExit(7)\n", sprung.display().to_string());
    for module in ["json", "os", "site", "sitecustomize", "encodings", "py_compile"] {
        fs::write(place.work().join(format!("{module}.py")), &python).unwrap();
    }
    fs::write(place.work().join(".python-version"), "0.0.0-of-this-directory\n").unwrap();
    let node = format!("require('fs').appendFileSync({:?}, __filename)", sprung.display().to_string());
    fs::write(place.work().join("trap.js"), &node).unwrap();
    fs::write(place.work().join("trap.sh"), format!("echo trap >> '{}'", sprung.display())).unwrap();
    let trapped = place
        .command(&["doctor", "--json", "--refresh"])
        // Variables with which a directory's settings (direnv, a .env file) would get in.
        .env("PYTHONPATH", place.work())
        .env("NODE_OPTIONS", format!("--require {}", place.work().join("trap.js").display()))
        .env("BASH_ENV", place.work().join("trap.sh"))
        .output()
        .unwrap();
    let trapped = Ended::of(trapped).json()["interpreters"].clone();
    assert!(!sprung.exists(), "{}", fs::read_to_string(&sprung).unwrap());
    assert_eq!(trapped["interpreters"], plain["interpreters"]);
    assert_eq!(trapped["prefixes"], plain["prefixes"]);
}

#[test]
fn doctor_tells_versions_and_what_is_shown_of_each_interpreter() {
    let place = Place::new();
    let ended = place.run(&["doctor", "--json"]);
    let told = ended.json()["interpreters"].clone();
    let asked = |program: &str, args: &[&str]| {
        // From a place without version files, as carrel asks.
        let said = Command::new(program).args(args).current_dir("/").output().ok()?;
        Some(String::from_utf8(said.stdout).unwrap().trim().to_owned())
    };
    for (language, program, args) in [
        ("python", "python3", &["-c", "import sys; print(sys.version.split()[0])"][..]),
        ("node", "node", &["-p", "process.versions.node"]),
        ("bash", "bash", &["-c", "echo ${BASH_VERSINFO[0]}.${BASH_VERSINFO[1]}.${BASH_VERSINFO[2]}"]),
    ] {
        let Some(version) = asked(program, args) else { continue };
        let found = &told["interpreters"][language];
        assert_eq!(found["version"], version, "{told}");
        let program = PathBuf::from(found["program"].as_str().unwrap());
        let prefixes = told["prefixes"].as_array().unwrap();
        let mut shown = prefixes.iter().map(|prefix| prefix.as_str().unwrap());
        let beside = program.starts_with("/usr") || program.starts_with("/bin");
        assert!(beside || shown.any(|prefix| program.starts_with(prefix)), "{told}");
    }
    let words = place.run(&["doctor"]).out;
    let python = &told["interpreters"]["python"];
    let line = format!("{} at {}", python["version"].as_str().unwrap(), python["program"].as_str().unwrap());
    assert!(words.contains(&line), "{words}");
    assert!(words.contains("prefixes"), "{words}");
}

#[test]
fn an_activated_virtualenv_is_meant_with_a_daemon_too_and_stays_the_sandboxes_own() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let venv = place.work().join("venv");
    let made = Command::new("python3").args(["-m", "venv", "--without-pip"]).arg(&venv).output();
    if !made.is_ok_and(|made| made.status.success()) {
        println!("skipped: python3 makes no virtualenvs here");
        return;
    }
    // The daemon knows nothing of it.
    let daemon = Daemon::start(&place, &[]);
    let activated = |args: &[&str]| {
        let path = std::env::var_os("PATH").unwrap();
        let places = [venv.join("bin")].into_iter().chain(std::env::split_paths(&path));
        let mut command = place.command(args);
        command.env("PATH", std::env::join_paths(places).unwrap()).env("VIRTUAL_ENV", &venv);
        Ended::of(command.output().unwrap())
    };
    let prefix = "import sys; print(sys.prefix)";
    let own = format!("{}\n", venv.display());
    assert_eq!(activated(&["--no-daemon", "run", prefix]).with(0), own);
    assert_eq!(activated(&["run", prefix]).with(0), own);
    assert_eq!(activated(&["run", "-s", "work", prefix]).with(0), own);
    assert_ne!(place.run(&["run", prefix]).with(0), own);
    // Whoever brings a sandbox back: it has the software that it was made with.
    let inspected: Value = place.run(&["inspect", "work", "--json"]).json();
    let agent = i32::try_from(inspected["agent_pid"].as_i64().unwrap()).unwrap();
    let agent = rustix::process::Pid::from_raw(agent).unwrap();
    rustix::process::kill_process(agent, rustix::process::Signal::KILL).unwrap();
    let revived = place.run(&["run", "-s", "work", prefix]);
    assert!(!revived.err.is_empty(), "nobody was told that it had died");
    assert_eq!(revived.with(0), own);
    daemon.stop();
}

#[test]
fn who_may_open_the_socket_but_is_another_user_has_nothing_run_on_the_host() {
    use std::{io::Write, os::unix::fs::PermissionsExt, process::Stdio};
    let tools = ["setpriv", "curl"].map(|tool| Command::new(tool).arg("--version").output().is_ok());
    if !rustix::process::geteuid().is_root() || tools.contains(&false) {
        println!("skipped: needs root, setpriv and curl");
        return;
    }
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let daemon = Daemon::start(&place, &[]);
    // As an operator would who lets a group in.
    for (path, mode) in
        [(place.path().to_path_buf(), 0o755), (place.path().join("run"), 0o755), (place.socket(), 0o666)]
    {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let own = place.path().join("own");
    fs::create_dir(&own).unwrap();
    let ran = place.path().join("ran");
    fs::write(own.join("python3"), format!("#!/bin/sh\necho $(id -u) >> '{}'\nexit 1\n", ran.display()))
        .unwrap();
    fs::set_permissions(own.join("python3"), fs::Permissions::from_mode(0o755)).unwrap();
    let whereabouts = Whereabouts::of([("PATH".into(), own.into_os_string())]);
    let ask = Ask {
        environments: Environments::default().at(whereabouts),
        what: What::Nameless { wish: Wish { idle_timeout_s: 600, max_lifetime_s: 600, ..Wish::default() } },
    };
    let ask = serde_json::to_vec(&ask).unwrap();
    for (user, is_run) in [("65534", false), ("0", true)] {
        let mut curl = Command::new("setpriv")
            .args([
                &format!("--reuid={user}"),
                "--clear-groups",
                "curl",
                "--silent",
                "--show-error",
                "--unix-socket",
            ])
            .arg(place.socket())
            .args([
                "-H",
                "content-type: application/json",
                "--data-binary",
                "@-",
                "http://localhost/v1/daemon/desk",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        curl.stdin.take().unwrap().write_all(&ask).unwrap();
        let made = Ended::of(curl.wait_with_output().unwrap()).json();
        assert_eq!(made["found"]["record"]["state"], "running", "{made}");
        assert_eq!(ran.exists(), is_run, "user {user}");
    }
    daemon.stop();
}
