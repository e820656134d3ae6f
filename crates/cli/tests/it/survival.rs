//! `kill -9` at any moment, and processes that race: the next call adopts or cleans, and nothing is left.

use std::{
    collections::BTreeSet,
    fs,
    process::Child,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, pidfd_open},
};

use crate::support::{Place, sandboxes};

/// Moments of death, from the very first to the end.
const ROUNDS: u32 = 24;

/// Ids in every place where a sandbox leaves traces on this host, as far as they belong to this state directory.
fn traces(place: &Place) -> BTreeSet<String> {
    let state = place.path().join("state");
    let mut found = BTreeSet::new();
    for part in ["sandboxes", "locks"] {
        let entries = fs::read_dir(state.join(part)).into_iter().flatten().flatten();
        found.extend(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let marker = format!("{}/sandboxes/", state.display());
    for line in mounts.lines().filter(|line| line.contains(&marker)) {
        let rest = line.split(&marker).nth(1).unwrap();
        found.insert(rest.split(['/', ' ']).next().unwrap().to_owned());
    }
    found
}

/// Processes and cgroups of sandboxes that this test has seen.
fn outside_traces(ids: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let environ = fs::read(entry.path().join("environ")).unwrap_or_default();
        let text = String::from_utf8_lossy(&environ).into_owned();
        if let Some(id) = text.strip_prefix("CARREL_SANDBOX=").map(|rest| rest.trim_end_matches('\0'))
            && ids.contains(id)
        {
            found.push(format!("process {} of {id}", entry.file_name().to_string_lossy()));
        }
    }
    // v2 has one tree, v1 one per controller.
    let controllers = fs::read_dir("/sys/fs/cgroup").into_iter().flatten().flatten();
    for tree in controllers.map(|entry| entry.path()).chain(["/sys/fs/cgroup".into()]) {
        for id in ids {
            let group = tree.join("carrel").join(id);
            if group.exists() {
                found.push(group.display().to_string());
            }
        }
    }
    found
}

fn listed(place: &Place) -> BTreeSet<String> {
    let json = place.run(&["ls", "--json"]).json();
    let all = json["sandboxes"].as_array().unwrap();
    all.iter().map(|sandbox| sandbox["id"].as_str().unwrap().to_owned()).collect()
}

/// The moment of death is what is varied here: waits that long unless the process ends first.
pub(crate) fn kill_after(mut child: Child, delay: Duration) {
    let ended = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).unwrap();
    let delay = Timespec::try_from(delay).unwrap();
    let _ = poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&delay));
    let _ = child.kill();
    let _ = child.wait();
}

/// How long something takes that nobody kills: the moments of death are spread over it. The longest of some, so that a machine
/// that is busy at other times does not leave its end out.
fn length_of(prepared: impl Fn(), something: impl Fn()) -> Duration {
    let once = |_| {
        prepared();
        let begun = Instant::now();
        something();
        begun.elapsed()
    };
    (0..3).map(once).max().unwrap()
}

#[test]
fn a_call_killed_at_any_moment_leaves_nothing_that_the_next_one_does_not_adopt_or_clean() {
    let place = Place::new();
    // Templates and the search for interpreters, so that what follows is the ordinary way.
    assert_eq!(place.run(&["run", "-e", "bash", "echo ready"]).out, "ready\n");
    let mut seen = BTreeSet::new();
    let call = || assert_eq!(place.run(&["run", "-e", "bash", "echo hi"]).out, "hi\n");
    let whole = length_of(|| (), call);
    for round in 0..ROUNDS {
        let named = round % 2 == 0;
        let args: &[&str] = if named {
            &["run", "-s", "victim", "-e", "bash", "echo hi"]
        } else {
            &["run", "-e", "bash", "echo hi"]
        };
        kill_after(place.start(args), whole * round / (ROUNDS - 1));
        seen.extend(traces(&place));
        let alive = listed(&place);
        seen.extend(alive.iter().cloned());
        let left: Vec<_> = traces(&place).difference(&alive).cloned().collect();
        assert!(left.is_empty(), "round {round}: {left:?} is not listed but left behind");
        if named {
            assert_eq!(
                place.run(&["run", "-s", "victim", "-e", "bash", "echo $((40+2))"]).out,
                "42\n",
                "round {round}"
            );
        }
    }
    place.run(&["close", "--all"]).with(0);
    assert_eq!(traces(&place), BTreeSet::new());
    assert_eq!(outside_traces(&seen), Vec::<String>::new());
}

#[test]
fn a_close_killed_at_any_moment_is_finished_by_the_next_call() {
    let place = Place::new();
    let mut seen = BTreeSet::new();
    let open = || assert_eq!(place.run(&["open", "victim"]).code, 0);
    let whole = length_of(open, || assert_eq!(place.run(&["close", "victim"]).code, 0));
    for round in 0..ROUNDS {
        open();
        seen.extend(listed(&place));
        kill_after(place.start(&["close", "victim"]), whole * round / (ROUNDS - 1));
        let alive = listed(&place);
        let left: Vec<_> = traces(&place).difference(&alive).cloned().collect();
        assert!(left.is_empty(), "round {round}: {left:?}");
    }
    place.run(&["close", "--all"]).with(0);
    assert_eq!(outside_traces(&seen), Vec::<String>::new());
}

#[test]
fn processes_that_create_the_same_session_at_once_share_one_sandbox() {
    let place = Place::new();
    let children: Vec<_> = (0..6)
        .map(|i| place.start(&["run", "-s", "same", "-e", "bash", "--json", &format!("echo {i} >> seen")]))
        .collect();
    let mut ids = BTreeSet::new();
    for child in children {
        let output = child.wait_with_output().unwrap();
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["exit_code"], 0, "{json}");
        ids.insert(json["sandbox"].as_str().unwrap().to_owned());
    }
    assert_eq!(ids.len(), 1);
    assert_eq!(place.run(&["run", "-s", "same", "-e", "bash", "wc -l < seen"]).out.trim(), "6");
}

#[test]
fn a_call_goes_on_when_its_caller_is_killed_and_its_output_is_found_later() {
    let place = Place::new();
    place.run(&["run", "-s", "work", "-e", "bash", "mkfifo go"]).with(0);
    let mut child = place.start(&["run", "-s", "work", "-e", "bash", "echo before; cat go; echo after; X=1"]);
    // Its first output says that it runs.
    let mut first = [0; 7];
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
    assert_eq!(&first, b"before\n");
    child.kill().unwrap();
    child.wait().unwrap();
    place.run(&["exec", "work", "--", "sh", "-c", "echo middle > go"]).with(0);
    let execs = place.run(&["inspect", "work", "--json"]).json()["execs"].clone();
    let run = execs.as_array().unwrap().iter().find(|exec| exec["exec"] == "ex_2").unwrap()["exec"]
        .as_str()
        .unwrap()
        .to_owned();
    place.run(&["wait", "work", &run]).with(0);
    assert_eq!(place.run(&["logs", "work", &run]).out, "before\nmiddle\nafter\n");
    assert_eq!(place.run(&["run", "-s", "work", "-e", "bash", "echo $X"]).out, "1\n");
}

#[test]
fn state_is_there_from_another_process() {
    let place = Place::new();
    place.run(&["run", "-e", "bash", "cd /tmp; export A=1", "-s", "work"]).with(0);
    assert_eq!(place.run(&["run", "-e", "bash", "echo $A $PWD", "-s", "work"]).with(0), "1 /tmp\n");
    let python = "import os; x = [1,2,3]; open('/workspace/f','w').write('hi')";
    if place.run(&["run", "-s", "work", python]).code == 0 {
        assert_eq!(place.run(&["run", "-s", "work", "len(x)"]).with(0), "3\n");
    }
    let node = "let y = require('fs').readFileSync('/workspace/f','utf8'); y";
    assert_eq!(place.run(&["run", "-e", "node", node, "-s", "work"]).with(0), "'hi'\n");
}

#[test]
fn the_script_that_looks_for_traces_sees_them_and_sees_none_of_what_was_closed() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let look = || {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/traces");
        let said = std::process::Command::new("bash").arg(script).output().unwrap();
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        String::from_utf8(said.stdout).unwrap()
    };
    place.run(&["open", "victim"]).with(0);
    let inspected = place.run(&["inspect", "victim", "--json"]).json();
    let (id, agent) = (inspected["id"].as_str().unwrap(), &inspected["agent_pid"]);
    let directory = fs::canonicalize(place.path()).unwrap().join("state/sandboxes").join(id);
    let seen = look();
    for line in [
        format!("process {agent}\n"),
        format!("directory {}\n", directory.display()),
        format!("socket {}/agent.sock\n", directory.display()),
    ] {
        assert!(seen.contains(&line), "{line}{seen}");
    }
    place.run(&["close", "victim"]).with(0);
    let left = look();
    assert!(!left.contains(id), "{left}");
}
