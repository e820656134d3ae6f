use carrel_engine::*;
use carrel_engine::call::Output;
use carrel_proto::{guest::Language, id::SessionName, message::Run};

async fn go(engine: &Engine, record: &Record, language: Language, code: &str) {
    let run = Run { session: SessionName::main(), language, code: code.into(), timeout_ms: 5000, cancel_on_disconnect: false };
    let start = std::time::Instant::now();
    let mut call = engine.run(record, run).await.unwrap();
    loop {
        match call.next().await.unwrap() {
            Output::Bytes { stream, bytes, .. } => println!("{stream:?}: {}", String::from_utf8_lossy(bytes)),
            Output::Finished(outcome) => { println!("{:?} {outcome:?}", start.elapsed()); break; }
            other => println!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn smoke() {
    let state = tempfile::tempdir().unwrap();
    let engine = Engine::open(Settings { state: state.path().into(), environments: Environments::default() }).unwrap();
    let wish = Wish { idle_timeout_s: 60, max_lifetime_s: 600, ..Default::default() };
    let t = std::time::Instant::now();
    let found = engine.sandbox(&"user:local:work".parse().unwrap(), &wish).await.unwrap();
    println!("created in {:?}", t.elapsed());
    for _ in 0..2 {
    go(&engine, &found.record, Language::Bash, "cd /tmp; export A=1; id; ls -la /; ls /proc | head -5; cat /proc/mounts | wc -l").await;
    go(&engine, &found.record, Language::Bash, "echo $A $PWD; ps aux").await;
    go(&engine, &found.record, Language::Python, "import os\nprint(os.getpid())\n6*7").await;
    go(&engine, &found.record, Language::Node, "let y = 5; console.log(process.pid); y").await;
    }
    for _ in 0..5 { go(&engine, &found.record, Language::Python, "1").await; }
    engine.close(&found.record, None).await.unwrap();
}
