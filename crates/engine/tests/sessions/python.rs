//! What a python session keeps, shows and survives.

use carrel_proto::{
    message::DisplayKind,
    outcome::{Cause, SessionState::Lost},
    problem::Code,
};

use crate::world::World;

#[tokio::test]
async fn one_namespace_lives_from_call_to_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("import os\nx = [1, 2]\ndef f(): return later, x\nclass C: size = 3").await.ok();
    sandbox.python("later = 42; x.append(3)").await.ok();
    assert_eq!(
        sandbox.python("f()").await.ok().value(),
        Some("(42, [1, 2, 3])"),
        "functions see later globals"
    );
    assert_eq!(sandbox.python("os.chdir('/tmp'); C.size").await.ok().value(), Some("3"));
    assert_eq!(sandbox.python("os.getcwd()").await.ok().value(), Some("'/tmp'"));

    // The last value as a notebook shows it.
    for (code, shown) in [
        ("'text'", Some("'text'")),
        ("None", None),
        ("print('hi')", None),
        ("y = 5", None),
        ("6 * 7", Some("42")),
        ("6 * 7;", None),
        ("if True:\n    1", None),
        ("_", Some("42")),
        ("# nothing", None),
        ("", None),
    ] {
        assert_eq!(sandbox.python(code).await.ok().value(), shown, "{code}");
    }
    // What lives in `__main__` can be pickled, and a module in the workspace imported.
    sandbox.python("import pickle; assert pickle.loads(pickle.dumps(C())).size == 3").await.ok();
    sandbox.python("os.chdir('/workspace'); open('own.py', 'w').write('word = 7')").await.ok();
    assert_eq!(sandbox.python("import own; own.word").await.ok().value(), Some("7"));
}

#[tokio::test]
async fn a_traceback_shows_the_users_lines_and_none_of_ours() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("def inner(n):\n    # a comment\n    raise ValueError(f'no {n}')").await.ok();
    let ran = sandbox.python("def outer():\n    inner(3)\n\nouter()").await.kept(1);
    assert_eq!(ran.exception(), Some(("ValueError", "no 3")));
    let text = ran.err();
    for line in ["raise ValueError(f'no {n}')", "inner(3)", "outer()", "line 4", "ValueError: no 3"] {
        assert!(text.contains(line), "{line:?} is missing in {text}");
    }
    assert!(!text.contains("carrel") && !text.contains("python.py"), "frames of ours in {text}");

    let ran = sandbox.python("x = 1\ny = = 2").await.kept(1);
    assert_eq!(ran.exception().unwrap().0, "SyntaxError");
    assert!(ran.err().contains("y = = 2") && ran.err().contains('^'), "{}", ran.err());

    let chained = "try:\n    inner(1)\nexcept ValueError as e:\n    raise RuntimeError('again') from e";
    let ran = sandbox.python(chained).await.kept(1);
    let text = ran.err();
    assert!(text.contains("direct cause") && text.contains("no 1") && text.contains("again"), "{text}");
    assert!(!text.contains("carrel"), "{text}");

    // Neither through a callback, an await, nor a generator does a frame of ours show.
    let ran = sandbox.python("async def a():\n    return 1 / 0\nawait a()").await.kept(1);
    assert!(ran.err().contains("return 1 / 0") && !ran.err().contains("carrel"), "{}", ran.err());
    assert!(!ran.err().contains("asyncio/"), "the event loop's frames in {}", ran.err());
    assert_eq!(ran.exception(), Some(("ZeroDivisionError", "division by zero")));
    // An error does not undo what ran before it.
    sandbox.python("z = 9\n1 / 0").await.kept(1);
    assert_eq!(sandbox.python("z").await.ok().value(), Some("9"));
}

#[tokio::test]
async fn await_works_at_the_top_level() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("import asyncio\nx = await asyncio.sleep(0, 'slept')\nx").await.ok();
    assert_eq!(ran.value(), Some("'slept'"));
    // A task of one call goes on in the next one: one event loop for all.
    sandbox.python("gate = asyncio.Event()\nasync def later():\n    await gate.wait()\n    return 5\ntask = asyncio.ensure_future(later())\nawait asyncio.sleep(0)").await.ok();
    assert_eq!(sandbox.python("gate.set()\nawait task").await.ok().value(), Some("5"));
    let many = "await asyncio.gather(later(), asyncio.sleep(0, 6))";
    assert_eq!(sandbox.python(many).await.ok().value(), Some("[5, 6]"));
}

#[tokio::test]
async fn there_is_nothing_to_read_and_it_says_so() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("input('name? ')").await.kept(1);
    let (name, message) = ran.exception().unwrap();
    assert_eq!(name, "EOFError");
    assert!(message.contains("input()"), "{message}");
    assert!(!ran.err().contains("read_input"), "a frame of ours in {}", ran.err());
    assert_eq!(sandbox.python("import sys; sys.stdin.read()").await.ok().value(), Some("''"));
    let child = "import subprocess; subprocess.run(['cat'], timeout=30).returncode";
    assert_eq!(sandbox.python(child).await.ok().value(), Some("0"));
    // What the code itself puts there is read.
    let own = "import io; sys.stdin = io.StringIO('Ada\\n'); input()";
    assert_eq!(sandbox.python(own).await.ok().value(), Some("'Ada'"));
}

#[tokio::test]
async fn leaving_on_purpose_ends_the_call_and_not_the_session() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("import sys; x = 'here'").await.ok();
    for (code, exit) in [
        ("sys.exit(3)", 3),
        ("exit()", 0),
        ("quit(7)", 7),
        ("raise SystemExit(256 + 5)", 5),
        ("sys.exit(None)", 0),
        ("import asyncio\nasync def f(): sys.exit(4)\nawait f()", 4),
    ] {
        let ran = sandbox.python(code).await.kept(exit);
        assert_eq!((ran.exception(), ran.err().as_str()), (None, ""), "{code}");
    }
    let ran = sandbox.python("sys.exit('a last word')").await.kept(1);
    assert_eq!(ran.err(), "a last word\n");
    assert_eq!(sandbox.python("x").await.ok().value(), Some("'here'"));
}

#[tokio::test]
async fn values_come_in_every_form_they_offer() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("class R:\n    def _repr_html_(self): return '<b>r</b>'\n    def _repr_png_(self): return b'\\x89PNG'\n    def __repr__(self): return 'R!'").await.ok();
    let ran = sandbox.python("display(R())\nprint('between')\nR()").await.ok();
    assert_eq!(
        ran.displays.iter().map(|it| it.kind).collect::<Vec<_>>(),
        [DisplayKind::Display, DisplayKind::Result]
    );
    for display in &ran.displays {
        assert_eq!(display.mime["text/html"], "<b>r</b>");
        assert_eq!(display.mime["image/png"], "iVBORw==");
        assert_eq!(display.mime["text/plain"], "R!");
    }
    // A representation that fails is left out and said, and the value still shown.
    let broken = "class B:\n    def _repr_html_(self): raise ValueError('broken')\n    def __repr__(self): return 'B!'\nB()";
    let ran = sandbox.python(broken).await.ok();
    assert_eq!(ran.value(), Some("B!"));
    assert!(ran.err().contains("broken"), "{}", ran.err());
    // So is a value whose repr fails, as an error of the call.
    let ran = sandbox.python("class W:\n    def __repr__(self): return 1 / 0\nW()").await.kept(1);
    assert_eq!(ran.exception().unwrap().0, "ZeroDivisionError");
}

#[tokio::test]
async fn figures_images_and_tables_come_back_as_such() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let png = |display: &carrel_proto::message::Display| {
        display.mime.get("image/png").is_some_and(|it| it.as_str().unwrap().starts_with("iVBOR"))
    };
    if has(&sandbox, "matplotlib").await {
        sandbox.python("import matplotlib.pyplot as plt").await.ok();
        let ran = sandbox.python("plt.plot([1, 2]); plt.show()\nprint('shown')").await.ok();
        assert_eq!(ran.displays.iter().filter(|it| png(it)).count(), 1, "shown: {:?}", ran.outcome);
        let ran = sandbox.python("_ = plt.figure(); _ = plt.plot([3, 4])").await.ok();
        assert_eq!(ran.displays.iter().filter(|it| png(it)).count(), 1, "left open");
        assert!(sandbox.python("1").await.ok().displays.iter().all(|it| !png(it)), "shown twice");
        let ran = sandbox.python("fig, ax = plt.subplots(); fig").await.ok();
        assert_eq!(ran.displays.iter().filter(|it| png(it)).count(), 1, "as a value, once");
    }
    if has(&sandbox, "PIL").await {
        let ran = sandbox.python("from PIL import Image; Image.new('RGB', (4, 4), 'red')").await.ok();
        assert!(png(&ran.displays[0]));
    }
    if has(&sandbox, "pandas").await {
        let ran = sandbox.python("import pandas; pandas.DataFrame({'a': [1, 2]})").await.ok();
        let mime = &ran.displays[0].mime;
        assert!(mime["text/html"].as_str().unwrap().contains("<table"));
        assert!(mime["text/plain"].as_str().unwrap().contains('a'));
    }
}

async fn has(sandbox: &crate::world::Sandbox, module: &str) -> bool {
    let found = sandbox
        .python(&format!("import importlib.util; importlib.util.find_spec('{module}') is not None"))
        .await;
    let found = found.ok().value() == Some("True");
    if !found {
        assert!(std::env::var_os("CI").is_none(), "CI allows no skip of {module}: ./test installs it");
        println!("skipped: the host's python has no {module}");
    }
    found
}

#[tokio::test]
async fn breaking_the_descriptors_breaks_only_its_own_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.python("import os, sys; x = 1").await.ok();
    for code in [
        "os.close(1); os.close(2)",
        "os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
        "os.dup2(os.open('/workspace/log', os.O_WRONLY | os.O_CREAT), 1); print('to the file')",
        "sys.stdout.close(); sys.stderr.close()",
        "sys.stdout = sys.stderr = None",
        "sys.stdout.detach()",
        "os.set_blocking(1, False)",
        "os.closerange(0, 256)",
        "sys.stdin.close(); os.close(0)",
    ] {
        let ran = sandbox.python(code).await;
        assert_eq!(
            ran.outcome.session_state,
            carrel_proto::outcome::SessionState::Preserved,
            "{code}: {ran:?}"
        );
        let ran = sandbox
            .python("print('out'); print('err', file=sys.stderr); os.system('echo child'); x")
            .await
            .ok();
        assert_eq!(
            (ran.out().as_str(), ran.err().as_str(), ran.value()),
            ("out\nchild\n", "err\n", Some("1")),
            "after {code}"
        );
    }
    assert_eq!(sandbox.python("open('/workspace/log').read()").await.ok().value(), Some("'to the file\\n'"));
}

#[tokio::test]
async fn a_forked_child_that_falls_out_of_the_code_ends_there() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let before = sandbox.python("import os; os.getpid()").await.ok();
    let ran =
        sandbox.python("pid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint(pid > 0)\npid > 0").await.ok();
    assert_eq!(ran.value(), Some("True"), "the child has no voice");
    assert_eq!(ran.out(), "False\nFalse\nTrue\n", "the child prints its value instead");
    // One that raises, one that exits, one that outlives its call.
    let ran = sandbox.python("pid = os.fork()\nif not pid: 1 / 0\nos.waitpid(pid, 0)[1]").await.ok();
    assert_eq!(ran.value(), Some("256"));
    assert!(ran.err().contains("ZeroDivisionError"));
    sandbox
        .python("r, w = os.pipe()\npid = os.fork()\nif not pid: os.close(w); os.read(r, 1); print('late')")
        .await
        .ok();
    let ran = sandbox.python("os.close(w); os.waitpid(pid, 0)[1]").await.ok();
    assert_eq!((ran.value(), ran.out().as_str()), (Some("0"), "late\n"));
    assert_eq!(sandbox.python("os.getpid()").await.ok().value(), before.value());
    let ran = sandbox.python("import multiprocessing as m\nq = m.Queue()\np = m.Process(target=q.put, args=(3,))\np.start(); n = q.get(); p.join(); n").await.ok();
    assert_eq!(ran.value(), Some("3"));
}

#[tokio::test]
async fn threads_children_and_c_code_are_heard() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.python("import threading\ndef say(n):\n    for i in range(200): print(n, i)\nall = [threading.Thread(target=say, args=(n,)) for n in range(4)]\n[t.start() for t in all]; [t.join() for t in all];").await.ok();
    let text = ran.out();
    for n in 0..4 {
        let own = text.lines().filter_map(|line| line.strip_prefix(&format!("{n} ")));
        assert!(
            own.eq((0..200).map(|i| i.to_string()).collect::<Vec<_>>().iter().map(String::as_str)),
            "thread {n}"
        );
    }
    // A thread that outlives its call is heard in the call that waits for it.
    sandbox.python("go = threading.Event()\nt = threading.Thread(target=lambda: (go.wait(), print('late')))\nt.start()").await.ok();
    assert_eq!(sandbox.python("go.set(); t.join()").await.ok().out(), "late\n");

    let ran = sandbox.python("import subprocess, os, sys, ctypes\nprint('one')\nsubprocess.run(['echo', 'two'])\nos.system('echo three; echo oops >&2')\nlibc = ctypes.CDLL(None)\nlibc.puts(b'four'); libc.fflush(None)\nos.write(1, b'five\\n')\nprint('six')\nlibc.puts(b'seven');").await.ok();
    assert_eq!(ran.out(), "one\ntwo\nthree\nfour\nfive\nsix\nseven\n");
    assert_eq!(ran.err(), "oops\n");

    // Bytes that are no text survive, in any order and on both streams.
    let ran = sandbox.python("sys.stdout.buffer.write(bytes(range(256))); os.write(2, b'\\xff\\x00\\xfe'); print('\\udc80\\udcff', end='')").await.ok();
    let expected: Vec<u8> = (0..=255).chain([0x80, 0xff]).collect();
    assert_eq!(ran.stdout, expected);
    assert_eq!(ran.stderr, b"\xff\x00\xfe");
}

#[tokio::test]
async fn an_interpreter_that_dies_is_told_and_replaced() {
    let world = World::new();
    let sandbox = world.without_undo().await;
    let segfault = "import ctypes; ctypes.string_at(0)";
    let itself = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)";
    for (death, cause, exit, signal) in [
        ("import os; os._exit(5)", Cause::Exit, 5, None),
        ("import os; os._exit(0)", Cause::Exit, 0, None),
        (segfault, Cause::Signal, 139, Some(11)),
        (itself, Cause::Signal, 137, Some(9)),
        ("import os; os.abort()", Cause::Signal, 134, Some(6)),
    ] {
        sandbox.python("x = 1; open('/workspace/f', 'w').write('kept')").await.ok();
        let ran = sandbox.python(&format!("print('before')\n{death}")).await.died(cause, Code::Crashed, Lost);
        assert_eq!((ran.outcome.exit_code, ran.outcome.signal), (exit, signal), "{death}");
        assert_eq!(ran.out(), "before\n", "{death}");
        assert!(!ran.outcome.problem.unwrap().hint.is_empty());
        let ran = sandbox.python("x").await.kept(1);
        assert_eq!(ran.exception().unwrap().0, "NameError", "a fresh interpreter after {death}");
        assert_eq!(sandbox.python("open('/workspace/f').read()").await.ok().value(), Some("'kept'"));
    }
}

#[tokio::test]
async fn an_interpreter_that_dies_between_calls_is_not_replaced_silently() {
    let world = World::new();
    let sandbox = world.without_undo().await;
    let pid = sandbox.python("import os; x = 1; os.getpid()").await.ok();
    sandbox.exec(&["kill", "-9", pid.value().unwrap()]).await.ok();
    // The death is known once nothing of it is left to see.
    sandbox.script(&format!("while kill -0 {}; do :; done 2>&-", pid.value().unwrap())).await.ok();
    let ran = sandbox.python("x = x + 1 if 'x' in globals() else 'silently fresh'; x").await;
    let ran = ran.died(Cause::Exit, Code::StateLost, Lost);
    assert_eq!(ran.value(), None, "nothing of it ran");
    assert_eq!(sandbox.python("'x' in globals()").await.ok().value(), Some("False"));
}
