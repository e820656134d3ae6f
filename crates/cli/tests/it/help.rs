//! Help is a promise: it is checked in, and a change shows in the diff. `CARREL_BLESS=1` writes it anew.

use crate::support::Place;

const COMMANDS: &[&[&str]] = &[
    &[],
    &["run"],
    &["exec"],
    &["logs"],
    &["wait"],
    &["kill"],
    &["undo"],
    &["ls"],
    &["inspect"],
    &["open"],
    &["close"],
    &["shell"],
    &["cp"],
    &["files"],
    &["files", "ls"],
    &["files", "cat"],
    &["files", "rm"],
    &["files", "stat"],
    &["files", "mkdir"],
    &["files", "mv"],
    &["files", "search"],
    &["mcp"],
    &["mcp", "install"],
    &["serve"],
    &["token"],
    &["token", "create"],
    &["token", "list"],
    &["token", "revoke"],
    &["doctor"],
    &["config"],
    &["config", "show"],
    &["completions"],
];

#[test]
fn help_is_as_checked_in() {
    let place = Place::new();
    let mut all = String::new();
    for command in COMMANDS {
        let args = [command, &["--help"][..]].concat();
        let ended = Command::output(&place, &args);
        all.push_str(&format!("$ carrel {}\n{ended}\n", args.join(" ")));
    }
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/help.txt");
    if std::env::var_os("CARREL_BLESS").is_some() {
        std::fs::write(path, &all).unwrap();
    }
    let known = std::fs::read_to_string(path).unwrap_or_default();
    assert!(known == all, "help has changed: look at it and run with CARREL_BLESS=1");
}

struct Command;

impl Command {
    fn output(place: &Place, args: &[&str]) -> String {
        let output = place.command(args).env("COLUMNS", "100").env_remove("CARREL_CONFIG").output().unwrap();
        assert!(output.status.success(), "{args:?}");
        String::from_utf8(output.stdout).unwrap()
    }
}

#[test]
fn every_shell_gets_completions() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish"] {
        assert!(place.run(&["completions", shell]).with(0).contains("carrel"), "{shell}");
    }
}

#[test]
fn a_wrong_command_line_is_told_in_words_and_in_json() {
    let place = Place::new();
    let ended = place.run(&["rnu", "1"]);
    assert_eq!(ended.code, 125);
    assert!(ended.err.contains("unrecognized subcommand 'rnu'"), "{}", ended.err);
    let ended = place.run(&["run", "--json"]);
    assert_eq!((ended.code, ended.json()["error"]["code"].as_str()), (125, Some("invalid_argument")));
}
