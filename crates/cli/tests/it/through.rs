//! The same commands with a daemon and without one: the same words and the same objects.

use serde_json::Value;

use crate::{
    serving::Daemon,
    support::{Ended, Place, sandboxes},
};

/// What differs between two runs of the same thing, and says nothing of how it went.
const VARYING: &[&str] = &[
    "id",
    "sandbox",
    "number",
    "agent_pid",
    "duration_us",
    "cpu_us",
    "peak_memory",
    "idle_ms",
    "age_ms",
    "mtime_ns",
    "created_unix_ms",
    "used_unix_ms",
    "started_unix_ms",
    "opened_unix_ms",
];

fn mask(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                if VARYING.contains(&name.as_str()) && !field.is_null() {
                    *field = "…".into();
                } else {
                    mask(field);
                }
            }
        }
        Value::Array(all) => all.iter_mut().for_each(mask),
        Value::String(text) if text.starts_with("sbx_") => *text = "…".to_owned(),
        _ => {}
    }
}

/// One command after another, and what each of them said.
struct Story<'a> {
    place: &'a Place,
    alone: bool,
    said: Vec<String>,
}

impl Story<'_> {
    fn command(&self, args: &[&str]) -> std::process::Command {
        let mut command = self.place.command(args);
        if self.alone {
            command.env("CARREL_NO_DAEMON", "1");
        }
        command
    }

    fn json(&mut self, args: &[&str]) {
        let ended = Ended::of(self.command(&[&["--json"], args].concat()).output().unwrap());
        let mut value = ended.json();
        mask(&mut value);
        self.said.push(format!("{args:?}: {} {value:#} {}", ended.code, ended.err));
    }

    fn words(&mut self, args: &[&str]) -> String {
        let ended = Ended::of(self.command(args).output().unwrap());
        self.said.push(format!("{args:?}: {} {:?} {:?}", ended.code, ended.out, ended.err));
        ended.out
    }

    fn tell(mut self) -> Vec<String> {
        std::fs::write(self.place.work().join("up"), "from the host\n").unwrap();
        self.json(&["run", "print('out'); import sys; print('err', file=sys.stderr); 6*7"]);
        self.json(&["run", "1/0"]);
        self.json(&["run", "--timeout", "300ms", "while True: pass"]);
        self.json(&["open", "work", "--label", "team=a"]);
        self.json(&["open", "work", "--memory", "1GB"]);
        self.json(&["run", "-s", "work", "x = 5"]);
        self.json(&["run", "-s", "work/other", "x"]);
        self.json(&["run", "-s", "work", "-e", "bash", "echo $((40+2)); exit 3"]);
        self.json(&["exec", "work", "--", "sh", "-c", "echo $PWD; exit 7"]);
        self.json(&["exec", "work", "--", "no-such-command"]);
        self.json(&["exec", "nope", "--", "ls"]);
        self.words(&["run", "-s", "work", "print('shown'); x"]);
        self.words(&[
            "exec",
            "-C",
            "/tmp",
            "-e",
            "A=1",
            "work",
            "--",
            "sh",
            "-c",
            "echo $A $PWD; kill -9 $$",
        ]);
        let id = self.words(&["exec", "-d", "work", "--", "sh", "-c", "echo one; exec sleep 100"]);
        let id = id.trim().to_owned();
        self.words(&["wait", "work", &id, "--timeout", "100ms"]);
        self.json(&["kill", "work", &id, "--signal", "KILL"]);
        self.json(&["wait", "work", &id]);
        self.json(&["logs", "work", &id]);
        self.words(&["logs", "work", &id, "--follow"]);
        self.json(&["logs", "work", "ex_999"]);
        self.json(&["kill", "work", "ex_999"]);
        self.words(&["cp", "up", "work:there"]);
        self.words(&["cp", "work:there", "-"]);
        self.json(&["cp", "work:missing", "x"]);
        self.json(&["files", "ls", "work"]);
        self.json(&["files", "cat", "work", "there"]);
        self.json(&["files", "search", "work", "host"]);
        self.json(&["inspect", "work"]);
        self.json(&["ls"]);
        self.json(&["close", "work/other"]);
        let kept = if self.alone { "kept-alone" } else { "kept-through" };
        let ended = Ended::of(self.command(&["close", "work", "--keep-workspace", kept]).output().unwrap());
        self.said.push(format!("close: {} {:?}", ended.code, ended.err));
        let text = std::fs::read_to_string(self.place.work().join(kept).join("there"));
        self.said.push(format!("kept: {text:?}"));
        self.json(&["close", "work"]);
        self.json(&["ls"]);
        self.said
    }
}

#[test]
fn a_daemon_changes_nothing_that_a_user_sees() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let alone = Story { place: &place, alone: true, said: Vec::new() }.tell();
    let daemon = Daemon::start(&place, &[]);
    let through = Story { place: &place, alone: false, said: Vec::new() }.tell();
    assert_eq!(alone.len(), through.len());
    for (alone, through) in alone.iter().zip(&through) {
        assert_eq!(alone, through);
    }
    daemon.stop();
    // It did go through the daemon: runs and execs were noted as they happened.
    let events = std::fs::read_to_string(place.path().join("state/events.jsonl")).unwrap();
    let count = |kind: &str| events.lines().filter(|line| line.contains(&format!("\"{kind}\""))).count();
    assert_eq!((count("run.started"), count("run.finished")), (7, 7), "{events}");
    assert_eq!(count("exec.started"), 4, "{events}");
    assert_eq!(count("session.created"), 4, "{events}");
}

#[test]
fn the_callers_own_configuration_holds_with_a_daemon_too() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let daemon = Daemon::start(&place, &[]);
    // Of this project, which the daemon has never heard of.
    std::fs::write(
        place.work().join("carrel.toml"),
        "[limits]\nmemory = \"300MB\"\n[environments.js]\npreset = \"node\"\n",
    )
    .unwrap();
    let opened = place.run(&["open", "work", "--json", "-e", "js"]).json();
    assert_eq!((&opened["environment"], &opened["limits"]["memory"]), (&"js".into(), &(300u64 << 20).into()));
    let spec = "---\nname: helper\nsandbox:\n  mode: code\n  runtime: python\n  session: notes\n  limits:\n    memory_mb: 200\n---\nYou help.\n";
    std::fs::write(place.work().join("agent.md"), spec).unwrap();
    let opened = place.run(&["open", "--spec", "agent.md", "--json", "--label", "a=b"]).json();
    assert_eq!(
        (&opened["name"], &opened["limits"]["memory"]),
        (&"notes".into(), &(200u64 << 20).into()),
        "{opened}"
    );
    let ended = place.run(&["open", "--spec", "agent.md", "--memory", "1GB"]);
    assert_eq!(ended.code, 125);
    assert!(ended.err.contains("--memory and the spec say different things"), "{}", ended.err);
    daemon.stop();
}

#[test]
fn a_caller_that_vanishes_takes_its_own_sandbox_with_it_and_no_other() {
    use std::io::{BufRead, BufReader};
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let daemon = Daemon::start(&place, &[]);
    for session in [&["-s", "work"][..], &[]] {
        let args = [&["run"], session, &["print('up', flush=True)\nimport time\ntime.sleep(100)"]].concat();
        let mut child = place.start(&args);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let listed = place.run(&["ls", "--json"]).json();
    let names: Vec<_> =
        listed["sandboxes"].as_array().unwrap().iter().map(|sandbox| &sandbox["name"]).collect();
    assert_eq!(names, ["work"], "{listed}");
    let execs = place.run(&["inspect", "work", "--json"]).json()["execs"].clone();
    assert_eq!(execs[0]["running"], true, "{execs}");
    daemon.stop();
}
