//! Runs and execs in real sandboxes.

use std::{
    io::{BufRead, BufReader, Read},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::{Place, sandboxes};

#[test]
fn a_run_without_a_session_leaves_nothing() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    assert_eq!(place.run(&["run", "print(6*7)"]).with(0), "42\n");
    assert_eq!(place.run(&["run", "import sys; sys.stdout.write('x'); 5"]).with(0), "x\n5\n");
    assert_eq!(place.run(&["run", "-e", "bash", "echo out; echo err >&2; exit 3"]).with(3), "out\n");
    assert_eq!(place.run(&["ls"]).with(0), "");
    assert_eq!(std::fs::read_dir(place.path().join("state/sandboxes")).unwrap().count(), 0);
}

#[test]
fn a_session_is_there_for_the_next_process() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    place.run(&["run", "-e", "bash", "cd /tmp; export A=1", "-s", "work"]).with(0);
    assert_eq!(place.run(&["run", "-e", "bash", "echo $A $PWD", "-s", "work"]).with(0), "1 /tmp\n");
    let code = "x = [1,2,3]; _ = open('/workspace/f','w').write('hi')";
    assert_eq!(place.run(&["run", "-s", "work", code]).with(0), "");
    assert_eq!(place.feed(&["run", "-s", "work", "-"], b"len(x)").with(0), "3\n");
    std::fs::write(place.work().join("a.py"), "print(sum(x))").unwrap();
    assert_eq!(place.run(&["run", "-s", "work", "--file", "a.py", "--timeout", "5m"]).with(0), "6\n");
    let ended = place.run(&["run", "-s", "work/other", "x"]);
    assert_eq!(ended.code, 1, "another session has its own variables");
    let listed = place.run(&["ls", "--json"]).json();
    assert_eq!(listed["sandboxes"].as_array().unwrap().len(), 1);
    assert_eq!(listed["sandboxes"][0]["name"], "work");
    place.run(&["close", "work"]).with(0);
    assert_eq!(place.run(&["close", "work"]).code, 125);
}

#[test]
fn json_has_the_documented_shape() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let reply = place.run(&[
        "run",
        "--json",
        "import sys; sys.stdout.buffer.write(b'\\xff'); sys.stdout.flush(); 1/0",
    ]);
    assert_eq!(reply.code, 1);
    let reply = reply.json();
    assert_eq!(reply["stdout"]["base64"], "/w==");
    assert_eq!(reply["exception"]["name"], "ZeroDivisionError");
    assert_eq!((&reply["cause"], &reply["session_state"]), (&"exit".into(), &"preserved".into()));
    assert!(reply["receipt"]["duration_us"].as_u64().unwrap() > 0);
    let reply = place.run(&["run", "--json", "--max-output", "100", "print('a'*1000); 7"]).json();
    assert_eq!(reply["stdout"]["omitted_bytes"], 901);
    assert_eq!(reply["results"][0]["kind"], "result");
    assert_eq!(reply["results"][0]["mime"]["text/plain"], "7");
    let reply = place.run(&["run", "--json", "--timeout", "300ms", "while True: pass"]);
    assert_eq!((reply.code, &reply.json()["error"]["code"]), (124, &"timeout".into()));
    let reply = place.run(&["exec", "--json", "nope", "--", "ls"]);
    assert_eq!((reply.code, &reply.json()["error"]["code"]), (125, &"sandbox_not_found".into()));
}

#[test]
fn execs_can_be_left_and_found_again() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    place.run(&["open", "work"]).with(0);
    assert!(place.run(&["open", "work"]).with(0).starts_with("existing"));
    let script = "echo $X; pwd; cat; exit 7";
    let args = ["exec", "-i", "-e", "X=5", "-C", "/tmp", "work", "--", "sh", "-c", script];
    assert_eq!(place.feed(&args, b"fed").with(7), "5\n/tmp\nfed");
    assert_eq!(place.run(&["exec", "work", "--", "no-such-command"]).code, 127);

    let id = place.run(&["exec", "-d", "work", "--", "sh", "-c", "echo one; sleep 100"]).with(0);
    let id = id.trim();
    let mut follower = place.start(&["logs", "work", id, "--follow"]);
    let mut line = String::new();
    BufReader::new(follower.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "one\n");
    assert_eq!(place.run(&["wait", "work", id, "--timeout", "100ms"]).code, 124);
    place.run(&["kill", "work", id, "--signal", "KILL"]).with(0);
    assert_eq!(place.run(&["wait", "work", id]).code, 137);
    assert_eq!(follower.wait().unwrap().code(), Some(0));
    assert_eq!(place.run(&["logs", "work", id]).with(0), "one\n");
    let inspected = place.run(&["inspect", "work", "--json"]).json();
    assert_eq!(inspected["execs"].as_array().unwrap().last().unwrap()["exec"], id);
    assert!(inspected["enforced"]["memory"]["by"].is_string());
}

#[test]
fn an_interrupt_cancels_and_cleans_up() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    for signal in [Signal::INT, Signal::TERM] {
        let mut child = place.start(&["run", "print('up', flush=True)\nimport time\ntime.sleep(60)"]);
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "up\n");
        let begun = Instant::now();
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert!(begun.elapsed() < Duration::from_secs(20));
        assert_eq!(place.run(&["ls"]).with(0), "");
    }
}

#[test]
fn a_reader_that_leaves_ends_the_run() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut child = place.start(&["run", "while True: print('y' * 1000)"]);
    let mut some = [0; 10];
    let mut out = child.stdout.take().unwrap();
    out.read_exact(&mut some).unwrap();
    drop(out);
    assert_eq!(child.wait().unwrap().code(), Some(141));
}

#[test]
fn the_project_is_shown_read_only_unless_asked() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    // Passable for the sandbox's own user.
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(place.work().join("hello"), "from the host").unwrap();
    assert_eq!(
        place.run(&["run", "--project", ".", "-e", "bash", "cat /project/hello"]).with(0),
        "from the host"
    );
    let ended = place.run(&["run", "--project", ".", "-e", "bash", "echo x > /project/new"]);
    assert_ne!(ended.code, 0);
    assert!(!place.work().join("new").exists());
    place
        .run(&["run", "--project", ".", "--project-writable", "-e", "bash", "echo x > /project/new"])
        .with(0);
    assert_eq!(std::fs::read_to_string(place.work().join("new")).unwrap(), "x\n");
}

#[test]
fn receipts_and_briefs_are_for_people_too() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let ended = place.run(&["run", "-s", "work", "--receipt", "told = 7; open('made', 'w').close(); 1"]);
    assert!(ended.err.starts_with("receipt: exit 0, "), "{}", ended.err);
    assert!(ended.err.contains("\nadded: made\n"), "{}", ended.err);
    assert_eq!(ended.with(0), "1\n", "stdout is the call's own");
    let ended = place.run(&["exec", "--receipt", "work", "sh", "-c", "rm made; exit 3"]);
    assert!(ended.err.contains("receipt: exit 3, ") && ended.err.contains("removed: made"), "{}", ended.err);
    assert_eq!(ended.code, 3);
    let quiet = place.run(&["run", "-s", "work", "undefined"]);
    assert!(!quiet.err.contains("receipt:"), "{}", quiet.err);
    let text = place.run(&["brief", "work"]).with(0);
    assert!(text.len() <= 1025 && text.contains("told int=7") && text.contains("NameError"), "{text}");
    let object = place.run(&["brief", "work", "--json"]).json();
    assert_eq!(object["brief"]["interpreters"][0]["variables"][0]["name"], "told");
    assert_eq!(place.run(&["brief", "work/none"]).code, 125);
    assert_eq!(place.run(&["brief", "nobody"]).code, 125);
}

#[test]
fn a_crash_is_taken_back_and_so_are_calls() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    for n in 0..3 {
        place.run(&["run", "-s", "work", &format!("x = {n}")]).with(0);
    }
    let crashed = place.run(&["run", "-s", "work", "open('f', 'w').write('x'); import os; os._exit(3)"]);
    assert_eq!(crashed.code, 3);
    assert!(crashed.err.contains("session state: rolled back"), "{}", crashed.err);
    assert!(crashed.err.contains("variables and files are as before this call"), "{}", crashed.err);
    assert_eq!(place.run(&["files", "ls", "work"]).with(0), "");
    let undone = place.run(&["undo", "work", "-k", "1"]).with(0);
    assert_eq!(undone, "took back 1 call of python, with its files; 2 more can be taken back\n");
    let reply = place.run(&["run", "-s", "work", "--json", "import os; os._exit(3)"]).json();
    assert_eq!((&reply["files_state"], reply.get("files_reason")), (&"restored".into(), None), "{reply}");
    place.run(&["exec", "work", "--", "touch", "theirs"]).with(0);
    let undone = place.run(&["undo", "work", "--json"]).json();
    assert_eq!((&undone["calls"], &undone["kept"]), (&1.into(), &1.into()), "{undone}");
    assert_eq!(undone["files_state"], "kept", "{undone}");
    assert!(undone["files_reason"].as_str().is_some_and(|why| why.contains("another call")), "{undone}");
    assert_eq!(place.run(&["run", "-s", "work", "x"]).with(0), "0\n");
    let far = place.run(&["undo", "work", "-k", "9", "--json"]);
    assert_eq!((far.code, &far.json()["error"]["code"]), (125, &"undo_unavailable".into()));
    place.run(&["open", "plain", "--undo-calls", "0"]).with(0);
    assert_eq!(place.run(&["ls", "--json"]).json()["sandboxes"][1]["undo_calls"], 0);
    let reply = place.run(&["run", "-s", "plain", "--json", "1"]).json();
    assert!(reply.get("transactional").is_none(), "{reply}");
    assert!(place.run(&["undo", "plain"]).err.contains("off"));
}
