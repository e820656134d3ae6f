//! `carrel mcp` as a raw client meets it: what the SDKs' clients hide or cannot do. Theirs are in `tests/mcp`.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::support::{Place, sandboxes};

pub(crate) struct Client {
    pub(crate) child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    id: u64,
    /// What came that was no answer.
    notifications: Vec<Value>,
}

impl Client {
    fn start(place: &Place, arguments: &[&str]) -> Self {
        let mut child = place
            .command(&[&["mcp"], arguments].concat())
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, input, output, id: 0, notifications: Vec::new() }
    }

    pub(crate) fn greeted(place: &Place, arguments: &[&str], name: &str) -> Self {
        let mut client = Self::start(place, arguments);
        let about = json!({"name": name, "version": "1"});
        let params = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": about});
        let answer = client.ask("initialize", params);
        assert_eq!(answer["result"]["serverInfo"]["name"], "carrel");
        client.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"}));
        client
    }

    fn say(&mut self, message: &Value) {
        writeln!(self.input.as_mut().unwrap(), "{message}").unwrap();
    }

    fn begin(&mut self, method: &str, params: Value) -> u64 {
        self.id += 1;
        let id = self.id;
        self.say(&json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params}));
        id
    }

    fn next(&mut self) -> Value {
        let mut line = String::new();
        assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the server has ended");
        // Whatever is not the protocol does not parse.
        serde_json::from_str(&line).unwrap()
    }

    fn answer(&mut self, id: u64) -> Value {
        loop {
            let message = self.next();
            if message["id"] == id {
                return message;
            }
            self.notifications.push(message);
        }
    }

    fn ask(&mut self, method: &str, params: Value) -> Value {
        let id = self.begin(method, params);
        self.answer(id)
    }

    pub(crate) fn call(&mut self, tool: &str, arguments: Value) -> Value {
        self.ask("tools/call", json!({"name": tool, "arguments": arguments}))["result"].clone()
    }

    pub(crate) fn run(&mut self, code: &str, more: Value) -> Value {
        let mut arguments = json!({"code": code, "env": "python"});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.call("run", arguments)
    }

    /// Waits for a notification that satisfies.
    fn hear(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        if let Some(at) = self.notifications.iter().position(&wanted) {
            return self.notifications.remove(at);
        }
        loop {
            let message = self.next();
            if wanted(&message) {
                return message;
            }
            self.notifications.push(message);
        }
    }

    /// Hangs up and waits for the server's end.
    pub(crate) fn leave(mut self) {
        self.input = None;
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn text(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[test]
fn state_outlives_the_server_and_names_do_not_collide() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut one = Client::greeted(&place, &[], "one");
    assert_eq!(text(&one.run("x = 'of one'", json!({}))), "(no output)");
    let mut twin = Client::greeted(&place, &[], "one");
    let mut two = Client::greeted(&place, &[], "two");
    for other in [&mut twin, &mut two] {
        assert!(text(&other.run("x", json!({}))).contains("NameError"));
    }
    one.leave();
    let mut again = Client::greeted(&place, &[], "one");
    assert_eq!(text(&again.run("x", json!({}))), "'of one'");
    let mut shared = Client::greeted(&place, &["--scope", "flow"], "one");
    shared.run("y = 'shared'", json!({"session": "s"}));
    let mut shared_too = Client::greeted(&place, &["--scope", "flow"], "two");
    assert_eq!(text(&shared_too.run("y", json!({"session": "s"}))), "'shared'");
    // Nobody sees another's files, not even by their address.
    let listed = two.ask("resources/list", json!({}));
    let own = listed["result"]["resources"][1]["uri"].as_str().unwrap().to_owned();
    assert!(two.ask("resources/read", json!({"uri": own}))["result"].is_object());
    assert!(again.ask("resources/read", json!({"uri": own}))["error"].is_object());
}

#[test]
fn sandboxes_end_with_their_client_if_asked_to() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &["--end-on-disconnect"], "brief");
    client.run("1", json!({}));
    client.leave();
    assert_eq!(place.run(&["ls", "--json"]).json()["sandboxes"], json!([]));
}

#[test]
fn a_message_too_large_is_answered() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &[], "large");
    let id = client.begin(
        "tools/call",
        json!({"name": "run", "arguments": {"code": "#".repeat(17 << 20), "env": "python"}}),
    );
    let answer = client.answer(id);
    assert!(answer["error"]["message"].as_str().unwrap().contains("16 MiB"), "{answer}");
    assert_eq!(text(&client.run("6*7", json!({}))), "42");
}

#[test]
fn a_cancelled_call_is_interrupted_and_the_state_kept() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &[], "cancels");
    client.run("x = 41", json!({}));
    let code = "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.05)";
    let params = json!({
        "name": "run", "arguments": {"code": code, "env": "python"}, "_meta": {"progressToken": "p"},
    });
    let id = client.begin("tools/call", params);
    client.hear(|message| message["params"]["message"] == "begun");
    client.say(&json!({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": id}}));
    assert_eq!(text(&client.run("x + 1", json!({}))), "42");
}

#[test]
fn a_busy_session_says_what_it_is_busy_with() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &[], "busy");
    client.begin(
        "tools/call",
        json!({"name": "run", "arguments": {"code": "import time; time.sleep(600)", "env": "python"}}),
    );
    let params = json!({
        "name": "run", "arguments": {"code": "1", "env": "python", "timeout": 2}, "_meta": {"progressToken": "p"},
    });
    let id = client.begin("tools/call", params);
    client.hear(|message| {
        message["params"]["message"].as_str().is_some_and(|it| it.contains("waiting for ex_1"))
    });
    let answer = client.answer(id);
    let said = text(&answer["result"]);
    assert!(said.contains("busy: the session is busy with ex_1 (python, running for"), "{said}");
    // Other sessions and other interpreters are free.
    assert_eq!(text(&client.run("7", json!({"session": "other"}))), "7");
    assert_eq!(text(&client.call("run", json!({"code": "echo free", "env": "bash"}))), "free\n");
}

#[test]
fn a_call_outlives_a_client_that_gives_up() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &[], "leaves");
    let code = "import time\nprint('begun', flush=True)\nwhile not __import__('os').path.exists('/workspace/go'): time.sleep(0.02)\nprint('ended')";
    let params = json!({
        "name": "run", "arguments": {"code": code, "env": "python"}, "_meta": {"progressToken": "p"},
    });
    client.begin("tools/call", params);
    client.hear(|message| message["params"]["message"] == "begun");
    client.leave();
    let mut client = Client::greeted(&place, &[], "leaves");
    let found = client.call("run", json!({"code": "touch /workspace/go", "env": "bash"}));
    let said = text(&found);
    assert!(said.contains("found ex_1 (python, running for"), "{said}");
    let uri = said.split("at work: ").nth(1).unwrap().trim_end().trim_end_matches(']').to_owned();
    client.ask("resources/subscribe", json!({"uri": uri}));
    client.hear(|message| message["method"] == "notifications/resources/updated");
    // The same interpreter answers after the call it was busy with.
    assert_eq!(text(&client.run("8", json!({}))), "8");
    let kept = client.ask("resources/read", json!({"uri": uri}));
    assert_eq!(kept["result"]["contents"][0]["text"], "begun\nended\n");
}

#[test]
fn the_newest_protocol_needs_no_greeting_and_has_tasks() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::start(&place, &[]);
    let meta = |capabilities: Value| {
        json!({
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientInfo": {"name": "new", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": capabilities,
        })
    };
    let plain = meta(json!({}));
    let tasks = meta(json!({"extensions": {"io.modelcontextprotocol/tasks": {}}}));
    let discovered = client.ask("server/discover", json!({"_meta": plain}));
    assert!(
        discovered["result"]["supportedVersions"].as_array().unwrap().contains(&json!("2026-07-28")),
        "{discovered}"
    );
    let run = |code: &str, meta: &Value| json!({"name": "run", "arguments": {"code": code, "env": "python"}, "_meta": meta});
    let answer = client.ask("tools/call", run("6*7", &plain));
    assert_eq!(text(&answer["result"]), "42");
    let code = "import time, os\nwhile not os.path.exists('/workspace/go'): time.sleep(0.02)\nprint('late')";
    let task = client.ask("tools/call", run(code, &tasks));
    assert_eq!(task["result"]["resultType"], "task", "{task}");
    let id = task["result"]["taskId"].as_str().unwrap().to_owned();
    let get = json!({"taskId": id, "_meta": tasks});
    assert_eq!(client.ask("tasks/get", get.clone())["result"]["status"], "working");
    client.ask(
        "tools/call",
        json!({"name": "run", "arguments": {"code": "touch /workspace/go", "env": "bash"}, "_meta": plain}),
    );
    let done = loop {
        let answer = client.ask("tasks/get", get.clone());
        if answer["result"]["status"] != "working" {
            break answer;
        }
    };
    assert_eq!(done["result"]["status"], "completed");
    assert_eq!(text(&done["result"]["result"]), "late\n");
    let unknown = json!({"taskId": "sbx_aaaaaaaaaaaaaaaa.ex_1", "_meta": tasks});
    assert!(client.ask("tasks/get", unknown)["error"].is_object());
}

#[test]
fn the_sandbox_tools_keep_their_contract() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &["--tools", "code"], "code");
    let mut call = |tool: &str, arguments: Value| client.call(tool, arguments)["structuredContent"].clone();
    let opened = call("sandbox_open", json!({}));
    assert_eq!((&opened["created"], &opened["workdir"]), (&json!(true), &json!("/workspace")));
    let id = opened["sandbox_id"].clone();
    assert_eq!(call("sandbox_open", json!({}))["created"], false);
    let write = json!({"sandbox_id": id, "path": "d/a.sh", "contents": "echo hi $1; echo e >&2; exit 3", "mode": "0755"});
    assert_eq!(call("sandbox_fs_write", write.clone()), json!({"ok": true, "path": "/workspace/d/a.sh"}));
    let ran =
        call("sandbox_exec", json!({"sandbox_id": id, "cmd": ["bash", "d/a.sh", "you"], "env": {"A": "1"}}));
    assert_eq!(
        ran,
        json!({"exec_id": "ex_1", "exit_code": 3, "stdout": "hi you\n", "stderr": "e\n", "status": "completed"})
    );
    let read = call("sandbox_fs_read", json!({"sandbox_id": id, "path": "d/a.sh", "max_bytes": 4}));
    assert_eq!(read, json!({"contents": "echo", "truncated": true, "size_bytes": 30}));
    let binary = json!({"sandbox_id": id, "path": "b", "contents_b64": "/wA="});
    call("sandbox_fs_write", binary);
    assert_eq!(call("sandbox_fs_read", json!({"sandbox_id": id, "path": "b"}))["contents_b64"], "/wA=");
    let listed = call("sandbox_fs_list", json!({"sandbox_id": id, "recursive": true}));
    let paths: Vec<_> = listed["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["path"].clone(), entry["type"].clone(), entry["mode"].clone()))
        .collect();
    assert_eq!(
        json!(paths),
        json!([["b", "file", "0644"], ["d", "dir", "0755"], ["d/a.sh", "file", "0755"]])
    );
    let waiting = "mkfifo go; echo 1; read line < go; echo 2";
    let arguments =
        json!({"sandbox_id": id, "cmd": ["bash", "-c", waiting], "stream": true, "cwd": "/workspace"});
    let started = call("sandbox_exec", arguments);
    assert_eq!(started["status"], "running");
    let exec = started["exec_id"].clone();
    let first = loop {
        let chunks = call("sandbox_exec_read", json!({"sandbox_id": id, "exec_id": exec, "max_chunks": 1}));
        if chunks["chunks"] != json!([]) {
            break chunks;
        }
    };
    let chunk = json!({"seq": 1, "stream": "stdout", "text": "1\n"});
    assert_eq!(first, json!({"chunks": [chunk], "done": false}));
    call("sandbox_exec", json!({"sandbox_id": id, "cmd": ["bash", "-c", "echo > go; rm go"]}));
    let waited = call("sandbox_exec_wait", json!({"sandbox_id": id, "exec_id": exec, "timeout_seconds": 20}));
    assert_eq!(waited, json!({"done": true, "exit_code": 0}));
    let rest = call("sandbox_exec_read", json!({"sandbox_id": id, "exec_id": exec, "since_seq": 1}));
    assert_eq!((rest["done"].clone(), rest["chunks"][0]["seq"].clone()), (json!(true), json!(2)));
    assert_eq!(
        call("sandbox_fs_delete", json!({"sandbox_id": id, "path": "d", "recursive": true})),
        json!({"ok": true, "deleted": "/workspace/d"})
    );
    // Files stay unless they shall not.
    assert_eq!(call("sandbox_close", json!({"sandbox_id": id})), json!({"ok": true}));
    assert_eq!(
        call("sandbox_open", json!({})),
        json!({"sandbox_id": id, "image": "python", "workdir": "/workspace", "created": false})
    );
    assert_eq!(call("sandbox_fs_read", json!({"sandbox_id": id, "path": "b"}))["size_bytes"], 2);
    call("sandbox_close", json!({"sandbox_id": id, "delete_workspace": true}));
    assert_eq!(call("sandbox_open", json!({}))["created"], true);
    let run = json!({"runtime": "python", "code": "import sys; print(sys.argv[1:], open('in.txt').read())", "args": ["x"], "files": {"in.txt": "data"}});
    let ran = call("sandbox_run", run);
    assert_eq!((&ran["ok"], &ran["stdout"]), (&json!(true), &json!("['x'] data\n")), "{ran}");
    // What is refused is refused in words.
    let refused = client.call("sandbox_fs_write", write);
    assert!(text(&refused).starts_with("sandbox_not_found"), "{refused}");
    let refused =
        client.call("sandbox_fs_write", json!({"sandbox_id": "sbx_x", "path": "a", "content": "typo"}));
    assert!(text(&refused).contains("unknown field `content`, expected one of"), "{refused}");
}

#[test]
fn a_result_never_passes_its_limit() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    for limit in [500, 40_000] {
        let most = limit.to_string();
        let mut client = Client::greeted(&place, &["--max-chars", &most], &format!("limit-{limit}"));
        let code =
            "import sys\nprint('é' * 300000)\nprint('e' * 300000, file=sys.stderr)\nsys.exit('x' * 100000)";
        let result = client.run(code, json!({}));
        let chars = text(&result).chars().count();
        assert!(chars <= limit && chars > limit / 2, "{chars} of {limit}");
        assert!(text(&result).contains("output cut; all of it: carrel://"), "{}", text(&result));
        let long = client.run("1", json!({"session": "x".repeat(9000)}));
        assert!(text(&long).chars().count() <= limit, "{}", text(&long).chars().count());
    }
}

#[test]
fn a_receipt_costs_no_token_and_a_brief_is_a_resource() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &["--tools", "all"], "teller");
    let made = client.run("told = [1]; open('made', 'w').close()", json!({}));
    let receipt = &made["_meta"]["carrel/receipt"];
    assert_eq!(receipt["files"]["added"], json!(["made"]), "{made}");
    assert_eq!(made["content"][0]["text"], "(no output)", "nothing of it is a model's to read");
    let gone = client.run("import os; os.remove('made')", json!({}));
    assert_eq!(gone["content"][0]["text"], "[removed made]");
    let listed = client.ask("resources/list", json!({}));
    let all = listed["result"]["resources"].as_array().unwrap().clone();
    let brief = all.iter().find(|it| it["uri"].as_str().unwrap().ends_with("/brief/default")).unwrap();
    let read = client.ask("resources/read", json!({"uri": brief["uri"]}));
    let text = read["result"]["contents"][0]["text"].as_str().unwrap().to_owned();
    assert!(text.len() <= 1024 && text.contains("told list[1]"), "{text}");
    let id = brief["uri"].as_str().unwrap().split('/').nth(3).unwrap().to_owned();
    let told = client.call("sandbox_brief", json!({"sandbox_id": id}));
    assert!(told["structuredContent"]["brief"].as_str().unwrap().contains("told list[1]"), "{told}");
    let none = client.ask("resources/read", json!({"uri": format!("carrel://sandboxes/{id}/brief/none")}));
    assert!(none["error"].is_object(), "{none}");
    client.leave();
}

#[test]
fn a_call_is_taken_back_by_a_tool() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut client = Client::greeted(&place, &["--tools", "all"], "undoer");
    client.run("x = 1", json!({}));
    client.run("x = 2", json!({}));
    let opened = client.call("sandbox_open", json!({}));
    let id = opened["structuredContent"]["sandbox_id"].as_str().unwrap().to_owned();
    let undone = client.call("sandbox_undo", json!({"sandbox_id": id}));
    let said = &undone["structuredContent"];
    assert_eq!((&said["calls"], &said["language"]), (&json!(1), &json!("python")), "{undone}");
    assert_eq!(text(&client.run("x", json!({}))), "1");
    for calls in [json!(99), json!(-1), json!("all")] {
        let refused = client.call("sandbox_undo", json!({"sandbox_id": id, "calls": calls}));
        assert_eq!(refused["isError"], true, "{refused}");
    }
    assert_eq!(text(&client.run("x", json!({}))), "1");
    let foreign = client.call("sandbox_undo", json!({"sandbox_id": "sbx_none"}));
    assert_eq!(foreign["isError"], true, "{foreign}");
    client.leave();
    // Where there are no interpreters there is nothing to take back, and no tool for it.
    let mut client = Client::greeted(&place, &["--tools", "code"], "coder");
    let listed = client.ask("tools/list", json!({}));
    let names =
        listed["result"]["tools"].as_array().unwrap().iter().map(|tool| tool["name"].as_str().unwrap());
    assert!(!names.into_iter().any(|name| name == "sandbox_undo"), "{listed}");
    let unknown = client.ask("tools/call", json!({"name": "sandbox_undo", "arguments": {"sandbox_id": id}}));
    assert!(unknown["error"].is_object(), "{unknown}");
    client.leave();
}

#[test]
fn over_http_sandboxes_stand_ready_as_long_as_it_serves() {
    let place = Place::new();
    if !sandboxes(&place) {
        return;
    }
    let mut server = place
        .command(&["mcp", "--http", "127.0.0.1:0", "--insecure-no-auth"])
        .env("CARREL_POOL_FLOOR", "1")
        .env("CARREL_POOL_CEILING", "1")
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let ready = || std::fs::read_dir(place.path().join("state/sandboxes")).map_or(0, Iterator::count);
    let deadline = Instant::now() + Duration::from_secs(90);
    while ready() == 0 {
        assert!(Instant::now() < deadline && server.try_wait().unwrap().is_none(), "none is made ready");
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(place.run(&["ls", "--json"]).json(), json!({"sandboxes": []}), "it is nobody's");
    kill_process(Pid::from_child(&server), Signal::INT).unwrap();
    assert!(server.wait().unwrap().success());
    assert_eq!(ready(), 0);
}
