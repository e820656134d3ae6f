//! Signals for a daemon with work under way: what was promised is answered, sandboxes live on, and the next one finds them.

use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
    thread,
};

use rustix::process::Signal;

use crate::{
    mcp::{Client, text},
    serving::{Daemon, unix},
    support::{Place, sandboxes},
};

/// A sandbox `work` with a fifo in its workspace: who opens one end waits for the other.
fn with_fifo(place: &Place) {
    place.run(&["open", "work"]).with(0);
    place.run(&["exec", "work", "--", "mkfifo", "-m", "666", "/workspace/fifo"]).with(0);
}

#[test]
fn a_daemon_that_is_told_to_stop_answers_what_is_under_way() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut daemon = Daemon::start(&place, &[]);
    with_fifo(&place);
    let (asked, writer) = thread::scope(|scope| {
        let body = r#"{"sandbox": "work", "code": "x = open('/workspace/fifo').read(); x"}"#;
        let asked = scope.spawn(|| unix(&place, "POST /v1/run", body));
        let script = "exec 3>/workspace/fifo; echo open; read line; echo $line >&3";
        let mut writer = place
            .command(&["exec", "-i", "work", "--", "sh", "-c", script])
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "open\n");
        // Both calls are under way.
        daemon.signal(Signal::TERM);
        daemon.hear("shutting down");
        writer.stdin.take().unwrap().write_all(b"answered\n").unwrap();
        (asked.join().unwrap(), writer.wait_with_output().unwrap())
    });
    assert_eq!(asked.status, 200, "{}", asked.body);
    assert_eq!(asked.json()["results"][0]["mime"]["text/plain"], "'answered\\n'");
    assert_eq!(writer.status.code(), Some(0), "{}", String::from_utf8_lossy(&writer.stderr));
    assert_eq!(daemon.wait(), Some(0));
    assert!(!place.socket().exists());
    // The state is there without a daemon, and with the next one.
    assert_eq!(place.run(&["run", "-s", "work", "len(x)"]).with(0), "9\n");
    let next = Daemon::start(&place, &[]);
    assert_eq!(place.run(&["run", "-s", "work", "x.strip()"]).with(0), "'answered'\n");
    next.stop();
}

#[test]
fn a_call_says_that_the_daemon_was_killed_and_the_next_one_goes_without_it() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut daemon = Daemon::start(&place, &[]);
    with_fifo(&place);
    let code = "print('up', flush=True); y = open('/workspace/fifo').read()";
    let mut run = place.start(&["run", "-s", "work", code]);
    let mut line = String::new();
    let mut out = BufReader::new(run.stdout.take().unwrap());
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "up\n");
    daemon.signal(Signal::KILL);
    daemon.wait();
    let ended = run.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(125), "{said}");
    assert!(said.contains("the daemon is gone"), "{said}");
    // The run has gone on: it takes what it waits for, and its state is there.
    place.run(&["exec", "work", "--", "sh", "-c", "echo more > /workspace/fifo"]).with(0);
    assert_eq!(place.run(&["run", "-s", "work", "y"]).with(0), "'more\\n'\n");
    let next = Daemon::start(&place, &[]);
    assert_eq!(place.run(&["run", "-s", "work", "len(y)"]).with(0), "5\n");
    next.stop();
}

#[test]
fn a_hangup_reads_the_configuration_again_and_a_mistake_changes_nothing() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let file = place.path().join("home/.config/carrel/carrel.toml");
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(&file, "[limits]\nmemory = \"128MB\"\n").unwrap();
    let mut daemon = Daemon::start(&place, &[]);
    let memory = |name: &str| {
        let made = unix(&place, "POST /v1/sandboxes", &format!("{{\"name\": \"{name}\"}}"));
        assert_eq!(made.status, 201, "{}", made.body);
        made.json()["limits"]["memory"].as_u64().unwrap() >> 20
    };
    assert_eq!(memory("a"), 128);
    std::fs::write(&file, "[limits]\nmemory = \"256MB\"\n[environments.py]\npreset = \"python\"\n").unwrap();
    daemon.signal(Signal::HUP);
    daemon.hear("the configuration was read again");
    assert_eq!(memory("b"), 256);
    let made = unix(&place, "POST /v1/sandboxes", r#"{"name": "c", "environment": "py"}"#);
    assert_eq!(made.status, 201, "{}", made.body);
    std::fs::write(&file, "[limits]\nmemry = 1\n").unwrap();
    daemon.signal(Signal::HUP);
    assert!(daemon.hear("the configuration stays as it was").contains("limits.memry"));
    assert_eq!(memory("d"), 256);
    std::fs::remove_file(&file).unwrap();
    daemon.stop();
}

#[test]
fn mcp_is_served_by_the_daemon_and_its_end_is_said() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut daemon = Daemon::start(&place, &[]);
    let in_session = || serde_json::json!({"session": "work"});
    let mut client = Client::greeted(&place, &[], "tester");
    client.run("x = 41", in_session());
    assert!(text(&client.run("x + 1", in_session())).contains("42"));
    client.leave();
    // The same client finds its session again, and two at once do not meet.
    let mut client = Client::greeted(&place, &[], "tester");
    assert!(text(&client.run("x", in_session())).contains("41"));
    let mut twin = Client::greeted(&place, &[], "tester");
    assert!(text(&twin.run("x", in_session())).contains("NameError"));
    twin.leave();
    daemon.signal(Signal::KILL);
    daemon.wait();
    assert_eq!(client.child.wait().unwrap().code(), Some(125));
    drop(client);
    let audit = std::fs::read_to_string(place.path().join("state/audit.jsonl")).unwrap();
    assert!(audit.contains("/v1/mcp/stdio"), "{audit}");
    let mut client = Client::greeted(&place, &[], "tester");
    assert!(text(&client.run("x", in_session())).contains("41"), "embedded, over the same sessions");
    client.leave();
}
