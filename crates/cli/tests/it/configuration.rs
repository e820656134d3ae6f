//! `carrel.toml`, variables and flags, as `config show` tells them.

use crate::support::Place;

#[test]
fn each_value_says_where_it_came_from() {
    let place = Place::new();
    let user = place.path().join("home/.config/carrel/carrel.toml");
    std::fs::create_dir_all(user.parent().unwrap()).unwrap();
    std::fs::write(&user, "[session]\nidle_timeout_seconds = 7\n[environments.js]\npreset = \"node\"\n")
        .unwrap();
    std::fs::write(place.work().join("carrel.toml"), "[limits]\nmemory = \"1GB\"\n").unwrap();
    let output =
        place.command(&["config", "show", "--json"]).env("CARREL_LIMITS_PIDS", "17").output().unwrap();
    let shown: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let settings = &shown["settings"];
    assert_eq!(settings["session.idle_timeout_seconds"]["value"], 7.0);
    assert_eq!(settings["session.idle_timeout_seconds"]["from"], format!("{}:2", user.display()));
    assert_eq!(settings["limits.memory"]["value"], 1u64 << 30);
    assert!(settings["limits.memory"]["from"].as_str().unwrap().ends_with("work/carrel.toml:2"));
    assert_eq!(settings["limits.pids"]["from"], "CARREL_LIMITS_PIDS");
    assert_eq!(settings["limits.disk"]["from"], "default");
    assert_eq!(settings["state"]["from"], "CARREL_STATE");
    assert_eq!(shown["environments"]["js"]["preset"], "node");
}

#[test]
fn a_mistake_stops_every_command_and_names_its_line() {
    let place = Place::new();
    std::fs::write(place.work().join("carrel.toml"), "[limits]\n\nmemry = 5\n").unwrap();
    let ended = place.run(&["ls"]);
    assert_eq!(ended.code, 125);
    assert!(ended.err.contains("carrel.toml:3: there is no setting `limits.memry`"), "{}", ended.err);
    assert!(ended.err.contains("hint: did you mean `limits.memory`?"), "{}", ended.err);
    assert_eq!(place.run(&["ls", "--json"]).json()["error"]["code"], "config");
}

#[test]
fn flags_are_checked_before_anything_is_made() {
    let place = Place::new();
    for (flag, value) in [
        ("--memory", "lots"),
        ("--timeout", "2h"),
        ("--cpus", "0"),
        ("--undo-calls", "17"),
        ("--isolation", "none"),
        ("--project", "/nope"),
    ] {
        let ended = place.run(&["run", flag, value, "1"]);
        assert_eq!(ended.code, 125, "{flag}");
        assert!(ended.err.contains(flag), "{}", ended.err);
    }
    assert!(!place.path().join("state").exists());
}

#[test]
fn an_unknown_environment_names_those_that_are_there() {
    let place = Place::new();
    let ended = place.run(&["run", "-e", "ruby", "1"]);
    assert_eq!(ended.code, 125);
    assert!(ended.err.contains("available: bash, node, python"), "{}", ended.err);
}
