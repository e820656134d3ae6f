//! The brief: where a session stands, whatever its code does to be in the way.

use carrel_proto::{
    brief::{Brief, InterpreterBrief, InterpreterState, MAX_JSON, MAX_TEXT, Variable},
    guest::Language,
    id::SessionName,
    problem::Code,
};

use crate::world::{Sandbox, World, a_run, an_exec, in_time, named};

impl Sandbox {
    async fn brief(&self) -> Brief {
        self.brief_of(&SessionName::main()).await
    }

    async fn brief_of(&self, session: &SessionName) -> Brief {
        let brief = in_time("a brief", self.engine.brief(&self.record, session)).await.unwrap();
        assert!(brief.text().len() <= MAX_TEXT, "{}", brief.text());
        assert!(serde_json::to_string(&brief).unwrap().len() <= MAX_JSON);
        brief
    }
}

fn of(brief: &Brief, language: Language) -> &InterpreterBrief {
    let found = brief.interpreters.iter().find(|interpreter| interpreter.language == language);
    found.unwrap_or_else(|| panic!("no {}: {brief:?}", language.as_str()))
}

fn variable<'a>(brief: &'a InterpreterBrief, name: &str) -> &'a Variable {
    let found = brief.variables.iter().find(|variable| variable.name == name);
    found.unwrap_or_else(|| panic!("no {name}: {brief:?}"))
}

#[tokio::test]
async fn a_session_is_told_with_all_its_interpreters() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox
        .python("xs = [1, 2, 3]; import os; os.makedirs('sub'); os.chdir('sub'); open('made', 'w').close()")
        .await
        .ok();
    sandbox.bash("name=carrel; export SECRET=hush; cd /tmp; sleep 1234 >/dev/null 2>&1 &").await.ok();
    sandbox.node("let n = 42; undefined").await.ok();
    sandbox.python("undefined_name").await;
    let brief = sandbox.brief().await;
    let python = of(&brief, Language::Python);
    assert_eq!(python.state, InterpreterState::Idle);
    assert_eq!(variable(python, "xs").shape.as_deref(), Some("3"));
    assert_eq!(python.cwd.as_deref(), Some("/workspace/sub"));
    let bash = of(&brief, Language::Bash);
    assert_eq!(variable(bash, "name").shape.as_deref(), Some("6"));
    assert_eq!(bash.cwd.as_deref(), Some("/tmp"));
    assert_eq!(variable(of(&brief, Language::Node), "n").value.as_deref(), Some("42"));
    assert_eq!(brief.environment.set, ["SECRET"]);
    assert_eq!((brief.environment.unset.len(), brief.environment.set_total), (0, 1));
    assert_eq!((brief.jobs_total, brief.jobs[0].command.as_str()), (1, "sleep 1234"));
    assert_eq!(brief.files.added, ["sub/", "sub/made"]);
    assert_eq!((brief.errors[0].name.as_str(), brief.errors.len()), ("NameError", 1));
    assert!(brief.left.memory > 0 && brief.left.memory < brief.left.memory_limit, "{:?}", brief.left);
    assert!(brief.left.lifetime_ms > 0 && brief.left.pids < brief.left.pids_limit, "{:?}", brief.left);
    let text = brief.text();
    for word in [
        "xs list[3]",
        "in /workspace/sub",
        "name string[6]",
        "SECRET",
        "`sleep 1234`",
        "NameError",
        "left: memory",
    ] {
        assert!(text.contains(word), "{word} in {text}");
    }
    assert!(!text.contains("hush"), "{text}");
}

#[tokio::test]
async fn a_busy_interpreter_is_not_waited_for() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("kept = 1").await.ok();
    let mut live =
        sandbox.begin(a_run(Language::Python, "import time; print('on', flush=True); time.sleep(50)")).await;
    live.until("on").await;
    let waiting = sandbox.begin(a_run(Language::Python, "kept")).await;
    let brief = sandbox.brief().await;
    let python = of(&brief, Language::Python);
    assert_eq!(
        (python.state, python.exec.as_ref(), python.waiting),
        (InterpreterState::Busy, Some(&live.id), 1)
    );
    assert!(python.busy_ms.is_some() && python.variables.is_empty());
    assert_eq!(python.cwd.as_deref(), Some("/workspace"));
    assert!(brief.text().contains("python busy for"), "{}", brief.text());
    sandbox.cancel(&live.id.clone()).await;
    live.end().await;
    assert_eq!(waiting.end().await.value(), Some("1"));
}

#[tokio::test]
async fn one_that_does_not_answer_is_said_to_be_silent_and_left_alone() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("kept = 1; import os; os.getpid()").await;
    let pid = ran.value().unwrap();
    sandbox.script(&format!("kill -STOP {pid}")).await.ok();
    for _ in 0..2 {
        let brief = sandbox.brief().await;
        assert_eq!(of(&brief, Language::Python).state, InterpreterState::Silent);
        assert!(brief.text().contains("python silent"), "{}", brief.text());
    }
    sandbox.script(&format!("kill -CONT {pid}")).await.ok();
    assert_eq!(sandbox.python("kept").await.value(), Some("1"), "its late answer is no answer to a call");
    let brief = sandbox.brief().await;
    assert_eq!(variable(of(&brief, Language::Python), "kept").value.as_deref(), Some("1"));
}

#[tokio::test]
async fn evil_objects_can_neither_hang_nor_be_changed() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let code = "
ran = []
class Evil:
    def __repr__(self):
        ran.append(1)
        while True: pass
    __str__ = __len__ = __sizeof__ = __getattribute__ = __repr__
    __class__ = property(__repr__)
evil = Evil()
";
    sandbox.python(code).await.ok();
    let brief = sandbox.brief().await;
    let evil = variable(of(&brief, Language::Python), "evil");
    assert_eq!((evil.kind.as_str(), &evil.shape, &evil.size), ("Evil", &None, &None));
    assert_eq!(sandbox.python("len(ran)").await.value(), Some("0"));
}

#[tokio::test]
async fn forged_answers_are_bounded() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    // User code shares the driver's process, knows its descriptor, and answers before the driver does.
    let code = r#"
import json, os, threading
fd = min(os.sysconf('SC_OPEN_MAX'), 1024) - 8 + 4
held = {"variables": [{"name": "forged" + "n" * 2000, "type": "\x1b[31m\n"}], "total": 3, "set": ["s" * 1000]}
def forge():
    while going:
        for n in range(1, 8):
            os.write(fd, json.dumps({"id": n, "brief": held}).encode() + b"\n")
going = True
threading.Thread(target=forge, daemon=True).start()
"#;
    sandbox.python(code).await.ok();
    for _ in 0..5 {
        let brief = sandbox.brief().await;
        assert!(!brief.text().contains('\u{1b}'), "{}", brief.text());
        assert!(brief.interpreters[0].variables.iter().all(|variable| variable.name.chars().count() <= 60));
    }
    assert_eq!(sandbox.python("going = False; 1 + 1").await.value(), Some("2"), "a call's answer is its own");
}

#[tokio::test]
async fn sessions_are_told_apart() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.open("other", None, &[("MINE", "1")]).await;
    sandbox.python("here = 1").await.ok();
    sandbox.run_in("other", Language::Python, "there = 2").await.ok();
    let live = sandbox.launch(an_exec(&["sleep", "777"])).await;
    let other = sandbox.brief_of(&named("other")).await;
    assert_eq!(of(&other, Language::Python).variables_total, 1);
    assert_eq!((other.jobs_total, other.environment.set.clone()), (0, vec!["MINE".to_owned()]));
    let main = sandbox.brief().await;
    assert_eq!(variable(of(&main, Language::Python), "here").kind, "int");
    assert_eq!(main.jobs[0].exec.as_ref(), Some(&live.id));
    assert_eq!(main.jobs[0].command, "sleep 777");
    let none = sandbox.engine.brief(&sandbox.record, &named("none")).await.unwrap_err();
    assert_eq!(none.code, Code::SessionNotFound);
}

#[tokio::test]
async fn a_shell_that_has_left_still_tells_what_it_holds() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("x=1; exit 3").await;
    let brief = sandbox.brief().await;
    assert_eq!(variable(of(&brief, Language::Bash), "x").kind, "string");
    assert_eq!((brief.errors[0].name.as_str(), brief.errors[0].message.as_str()), ("exit", "3"));
    assert_eq!(sandbox.bash("echo $x").await.ok().out(), "1\n");
}
