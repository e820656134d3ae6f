//! What a node session keeps, shows and survives.

use carrel_proto::{
    outcome::{Cause, SessionState::Lost},
    problem::Code,
};

use crate::world::World;

#[tokio::test]
async fn declarations_persist_and_may_be_made_again() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox
        .node("let a = 1; const b = 2; var c = 3; class D { size = 4 } function f() { return later }")
        .await
        .ok();
    sandbox.node("let later = 5").await.ok();
    assert_eq!(sandbox.node("[a, b, c, new D().size, f()]").await.ok().value(), Some("[ 1, 2, 3, 4, 5 ]"));
    sandbox.node("let a = 10; const b = 20; class D { size = 40 } function f() { return 'new' }").await.ok();
    assert_eq!(sandbox.node("[a, b, new D().size, f()].join()").await.ok().value(), Some("'10,20,40,new'"));
    sandbox.node("const a = 100; let f = 200; function b() { return 300 } var D = 400").await.ok();
    assert_eq!(sandbox.node("[a, f, b(), D].join()").await.ok().value(), Some("'100,200,300,400'"));
    sandbox.node("const {p, q: [r]} = {p: 1, q: [2]}; a2 = () => p + r").await.ok();
    assert_eq!(sandbox.node("a2()").await.ok().value(), Some("3"));
    sandbox.node("let half = 1; throw new Error('after it')").await.kept(1);
    assert_eq!(sandbox.node("half").await.ok().value(), Some("1"));
}

#[tokio::test]
async fn await_require_and_import_work_at_the_top_level() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    assert_eq!(sandbox.node("const v = await Promise.resolve(5); v").await.ok().value(), Some("5"));
    assert_eq!(sandbox.node("await new Promise(r => setTimeout(r, 1, v + 1))").await.ok().value(), Some("6"));
    assert_eq!(
        sandbox.node("for await (const x of [Promise.resolve(1)]) console.log(x)").await.ok().out(),
        "1\n"
    );
    assert_eq!(
        sandbox.node("const fs = require('fs'); typeof fs.readFileSync").await.ok().value(),
        Some("'function'")
    );
    assert_eq!(
        sandbox.node("const { join } = await import('path'); join('a', 'b')").await.ok().value(),
        Some("'a/b'")
    );
    assert_eq!(sandbox.node("import os, { EOL } from 'os'; EOL === os.EOL").await.ok().value(), Some("true"));
    sandbox
        .node("fs.writeFileSync('m.js', 'exports.word = 7'); fs.writeFileSync('n.mjs', 'export default 8')")
        .await
        .ok();
    assert_eq!(sandbox.node("require('./m.js').word").await.ok().value(), Some("7"));
    assert_eq!(sandbox.node("(await import('./n.mjs')).default").await.ok().value(), Some("8"));
    assert_eq!(sandbox.node("process.chdir('/tmp'); process.cwd()").await.ok().value(), Some("'/tmp'"));
    let ran = sandbox.node("require('./m.js')").await.kept(1);
    assert!(ran.exception().unwrap().1.contains("Cannot find module"), "{:?}", ran.exception());
}

#[tokio::test]
async fn the_last_value_is_shown_as_the_repl_would() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for (code, shown) in [
        ("'text'", Some("'text'")),
        ("undefined", None),
        ("null", Some("null")),
        ("({a: [1, {b: 2}]})", Some("{ a: [ 1, { b: 2 } ] }")),
        ("{ a: 1 }", Some("{ a: 1 }")),
        ("new Map([[1, 'x']])", Some("Map(1) { 1 => 'x' }")),
        ("123n", Some("123n")),
        ("-0", Some("-0")),
        ("NaN", Some("NaN")),
        ("Symbol('s')", Some("Symbol(s)")),
        ("let quiet = 1", None),
        ("console.log('hi')", None),
        ("6 * 7", Some("42")),
        ("_", Some("42")),
        ("() => 1", Some("[Function (anonymous)]")),
        ("Promise.resolve(3)", Some("Promise { 3 }")),
        ("", None),
    ] {
        assert_eq!(sandbox.node(code).await.ok().value(), shown, "{code}");
    }
    let bundle =
        "({ [Symbol.for('Jupyter.display')]() { return { 'text/plain': 'p', 'text/html': '<p>' } } })";
    let ran = sandbox.node(bundle).await.ok();
    assert_eq!(ran.displays[0].mime["text/html"], "<p>");
}

#[tokio::test]
async fn an_error_is_the_calls_failure_and_not_the_sessions_end() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.node("let kept = 1").await.ok();
    let forever = "await new Promise(() => {})";
    for (code, name, message) in [
        ("throw new TypeError('thrown')".to_owned(), "TypeError", "thrown"),
        ("await Promise.reject(new RangeError('awaited'))".to_owned(), "RangeError", "awaited"),
        ("Promise.reject(new Error('unhandled'))\n0".to_owned(), "Error", "unhandled"),
        (format!("setTimeout(() => {{ throw new Error('timer') }}, 1); {forever}"), "Error", "timer"),
        (format!("(async () => {{ throw new Error('async') }})(); {forever}"), "Error", "async"),
        (
            format!("new (require('events'))().emit('error', new Error('emitted')); {forever}"),
            "Error",
            "emitted",
        ),
        ("throw 'a string'".to_owned(), "Uncaught", "'a string'"),
        ("no_such_name".to_owned(), "ReferenceError", "no_such_name is not defined"),
    ] {
        let ran = sandbox.node(&code).await.kept(1);
        assert_eq!(ran.exception(), Some((name, message)), "{code}");
        assert!(ran.err().contains(message), "{code}: {}", ran.err());
        assert!(!ran.err().contains("/run/carrel"), "a frame of ours: {}", ran.err());
        assert_eq!(sandbox.node("kept").await.ok().value(), Some("1"), "after {code}");
    }
    let ran = sandbox.node("let y = 1\nlet z = = 2").await.kept(1);
    assert_eq!(ran.exception().unwrap().0, "SyntaxError");
    assert!(ran.err().contains("let z = = 2"), "{}", ran.err());
    let ran = sandbox.node("function deep() {\n  throw new Error('here')\n}\ndeep()").await.kept(1);
    assert!(ran.err().contains("throw new Error('here')") && ran.err().contains(":2"), "{}", ran.err());
    // What fails between two calls is told by the next one and ends nothing.
    sandbox.node("globalThis.fire = null; new Promise((_, no) => { fire = no }); 0").await.ok();
    sandbox.node("setImmediate(() => fire(new Error('between')))").await;
    assert_eq!(
        sandbox.node("await new Promise(r => setTimeout(r, 5)); kept").await.outcome.session_state,
        carrel_proto::outcome::SessionState::Preserved
    );
    assert_eq!(sandbox.node("kept").await.ok().value(), Some("1"));
}

#[tokio::test]
async fn leaving_ends_the_call_and_dying_the_interpreter() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.node("let kept = 1").await.ok();
    for (code, exit) in [
        ("console.log('out'); process.exit(3); console.log('after')", 3),
        ("console.log('out'); try { process.exit(4) } finally { console.log('after') }", 4),
        ("console.log('out'); setTimeout(() => process.exit(5), 1); await new Promise(() => {})", 5),
        ("console.log('out'); process.exit()", 0),
        ("console.log('out'); process.exitCode = 6", 6),
    ] {
        let ran = sandbox.node(code).await.kept(exit);
        assert_eq!((ran.out().as_str(), ran.exception()), ("out\n", None), "{code}");
        assert_eq!(sandbox.node("kept").await.ok().value(), Some("1"), "after {code}");
    }
    for (code, cause, signal) in [
        ("process.kill(process.pid, 'SIGKILL'); await new Promise(() => {})", Cause::Signal, Some(9)),
        ("process.abort()", Cause::Signal, Some(6)),
        ("process.reallyExit(7)", Cause::Exit, None),
    ] {
        sandbox.node("var fresh = false").await.ok();
        let ran = sandbox.node(code).await.died(cause, Code::Crashed, Lost);
        assert_eq!(ran.outcome.signal, signal, "{code}");
        assert_eq!(sandbox.node("typeof fresh").await.ok().value(), Some("'undefined'"));
    }
}

#[tokio::test]
async fn output_is_taken_at_the_descriptors() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    let ran = sandbox.node("console.log('one'); require('child_process').spawnSync('echo', ['two'], { stdio: 'inherit' }); require('fs').writeSync(1, 'three\\n'); process.stdout.write('four\\n'); console.error('oops')").await.ok();
    assert_eq!((ran.out().as_str(), ran.err().as_str()), ("one\ntwo\nthree\nfour\n", "oops\n"));
    let ran = sandbox
        .node("process.stdout.write(Buffer.from([0xff, 0, 0xfe])); process.stderr.write(Buffer.from([0x80]))")
        .await
        .ok();
    assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice()), (&b"\xff\x00\xfe"[..], &b"\x80"[..]));
    let ran = sandbox.node("process.stdout.write('x'.repeat(5 << 20)); 'y'").await.ok();
    assert_eq!((ran.stdout.len(), ran.value()), (5 << 20, Some("'y'")));
    for code in [
        "fs.closeSync(1)",
        "fs.closeSync(1); fs.openSync('/dev/null', 'w')",
        "process.stdout.end(); process.stderr.destroy()",
        "fs.closeSync(0)",
    ] {
        sandbox.node(code).await;
        let ran = sandbox.node("console.log('out'); console.error('err')").await.ok();
        assert_eq!((ran.out().as_str(), ran.err().as_str()), ("out\n", "err\n"), "after {code}");
    }
    // Nothing to read, and no waiting for it.
    assert_eq!(sandbox.node("fs.readFileSync(0, 'utf8')").await.ok().value(), Some("''"));
    let child = "const c = require('child_process').spawn('sh', ['-c', 'echo from a child; cat'], { stdio: 'inherit' }); await new Promise(r => c.on('close', r))";
    assert_eq!(sandbox.node(child).await.ok().out(), "from a child\n");
}
