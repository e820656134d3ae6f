//! A box is written to disk and comes back, by the backend alone.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test stops at what it did not expect, and says why it did not run"
)]

use std::{os::unix::fs::PermissionsExt, path::Path};

use carrel_backend::{
    Backend, BoxRequest, IsolationLevel, Memory, Placed, environment::Environment, host::Whereabouts,
    jail::Jail, link::AgentLink,
};
use carrel_proto::{
    guest::Language,
    id::{SandboxId, SessionName},
    limits::Limits,
    message::{Event, Exec, OpenSession, Request, Run},
    outcome::Outcome,
    problem::Code,
};

struct World {
    state: tempfile::TempDir,
    jail: Jail,
}

impl World {
    /// None, with the reason in the test's output, where this host cannot do it.
    fn new() -> Option<Self> {
        let state = tempfile::tempdir().unwrap();
        std::fs::set_permissions(state.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        std::fs::create_dir_all(state.path().join("sandboxes")).unwrap();
        let jail = Jail::new(state.path());
        if let Err(problem) = jail.can_hibernate() {
            eprintln!("skipped: {problem}");
            return None;
        }
        Some(Self { state, jail })
    }

    fn request(&self, name: &str) -> BoxRequest {
        let directory = self.state.path().join("sandboxes").join(name);
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o711)).unwrap();
        let place = self.state.path().join("environments");
        let here = Whereabouts::of(std::env::vars_os());
        BoxRequest {
            id: name.parse::<SandboxId>().unwrap(),
            number: std::process::id(),
            directory,
            environment: Environment::preset("python", Language::Python, &place, &here).unwrap(),
            limits: Limits::default(),
            isolation: IsolationLevel::Jail,
            project: None,
            idle_timeout_s: 600,
            max_lifetime_s: 600,
            workspace: None,
            resume: false,
            first: None,
            life: 0,
            undo_calls: 3,
            parent: None,
        }
    }

    async fn line(&self, request: &BoxRequest) -> AgentLink {
        AgentLink::connect(&self.jail.socket(&request.directory)).await.unwrap()
    }

    fn again(&self, request: &BoxRequest, before: &Placed, image: &Path) -> Placed {
        let request = BoxRequest { workspace: Some(before.workspace), ..request.clone() };
        self.jail.restore(&request, image, Memory::Kept).unwrap()
    }
}

async fn result(link: &mut AgentLink, request: &Request) -> (String, Outcome) {
    let tag = link.send(request).await.unwrap();
    let mut text = String::new();
    loop {
        match link.reader.next(tag).await.unwrap() {
            carrel_backend::link::Piece::Chunk { bytes, .. } => {
                text.push_str(&String::from_utf8_lossy(bytes))
            }
            carrel_backend::link::Piece::Event(Event::Finished(outcome)) => return (text, outcome),
            carrel_backend::link::Piece::Event(Event::Failed(problem)) => panic!("{problem}"),
            carrel_backend::link::Piece::Event(_) => {}
        }
    }
}

async fn run(link: &mut AgentLink, session: &str, language: Language, code: &str) -> String {
    let run = Run {
        session: session.parse::<SessionName>().unwrap(),
        language,
        code: code.to_owned(),
        timeout_ms: 30_000,
        cancel_on_disconnect: false,
    };
    let (text, outcome) = result(link, &Request::Run(run)).await;
    assert_eq!(outcome.exit_code, 0, "{text} {outcome:?}");
    text
}

/// Mounts by place, flags and kind, without the numbers that the kernel gives them anew; other lines as they are.
fn shape(text: &str) -> Vec<String> {
    let mount = |line: &str| -> Option<String> {
        let (left, right) = line.split_once(" - ")?;
        let mut left = left.split(' ').skip(4);
        Some(format!("{} {} {}", left.next()?, left.next()?, right.split(' ').next()?))
    };
    let mut lines: Vec<String> =
        text.lines().map(|line| mount(line).unwrap_or_else(|| line.to_owned())).collect();
    lines.sort();
    lines
}

#[tokio::test]
async fn everything_in_a_box_comes_back_from_disk() {
    let Some(world) = World::new() else { return };
    let request = world.request("sbx_sleeper");
    let before = world.jail.create(&request).unwrap();
    let mut link = world.line(&request).await;
    run(&mut link, "default", Language::Python, "x = 41; import threading, time, socket, random\nf = open('/tmp/kept', 'w+'); f.write('abc'); f.flush()\ns = socket.socket(); s.bind(('127.0.0.1', 8080)); s.listen()\nt = threading.Thread(target=lambda: time.sleep(600), daemon=True); t.start()").await;
    run(&mut link, "default", Language::Bash, "A=bash; sleep 500 & cd /tmp").await;
    run(&mut link, "default", Language::Node, "let n = 7; setInterval(() => {}, 1000).unref(); 0").await;
    let open =
        OpenSession { name: "second".parse().unwrap(), cwd: None, env: Default::default(), undo_calls: None };
    link.ask(&Request::OpenSession(open)).await.unwrap();
    run(&mut link, "second", Language::Python, "y = 'other'").await;
    let exec = Exec {
        session: SessionName::main(),
        argv: ["sh", "-c", "echo begin; read line; echo got $line"].map(str::to_owned).into(),
        cwd: None,
        env: Default::default(),
        stdin: true,
        pty: None,
        timeout_ms: None,
        detach: true,
        cancel_on_disconnect: false,
    };
    let Event::Started { exec, .. } = link.ask(&Request::Exec(exec)).await.unwrap() else {
        panic!("not started")
    };
    let confined = "print(open('/proc/self/mountinfo').read().replace('master:', ''), [line for line in open('/proc/self/status') if line.startswith(('Cap', 'NoNew', 'Seccomp', 'Uid', 'Gid', 'Groups'))], open('/proc/self/oom_score_adj').read())";
    let before_sleep = shape(&run(&mut link, "default", Language::Python, confined).await);
    drop(link);
    let image = world.state.path().join("image");
    world.jail.hibernate(&request.id, &request.directory, &before, &image).unwrap();
    assert!(!world.jail.is_alive(&before));

    for round in 0..2 {
        let placed = world.again(&request, &before, &image);
        let mut link = world.line(&request).await;
        assert_eq!(
            run(
                &mut link,
                "default",
                Language::Python,
                "f.seek(0); print(x + 1, t.is_alive(), f.read(), s.getsockname()[1])"
            )
            .await,
            "42 True abc 8080\n"
        );
        let after = shape(&run(&mut link, "default", Language::Python, confined).await);
        assert_eq!(before_sleep, after, "as confined as before");
        assert_eq!(
            run(&mut link, "default", Language::Bash, "echo $A $PWD; jobs | wc -l").await,
            "bash /tmp\n1\n"
        );
        assert_eq!(run(&mut link, "default", Language::Node, "console.log(n + 1)").await, "8\n");
        assert_eq!(run(&mut link, "second", Language::Python, "print(y)").await, "other\n");
        link.ask(&Request::WriteStdin {
            exec: exec.clone(),
            data: carrel_proto::files::Content(b"it\n".to_vec()),
        })
        .await
        .unwrap();
        let attach = Request::Attach { exec: exec.clone(), since: 0, follow: true };
        let (text, outcome) = result(&mut link, &attach).await;
        assert_eq!((text.as_str(), outcome.exit_code), ("begin\ngot it\n", 0), "round {round}");
        // New processes start in a session that has come back, and end with their calls.
        assert_eq!(run(&mut link, "default", Language::Bash, "(exit 0); echo $(id -u)").await, "1000\n");
        drop(link);
        world.jail.destroy(&request.id, &request.directory, Some(&placed)).unwrap();
    }
}

#[tokio::test]
async fn a_box_is_copied_while_it_lives_and_the_copies_are_others() {
    let Some(world) = World::new() else { return };
    let request = world.request("sbx_source");
    let placed = world.jail.create(&request).unwrap();
    let mut link = world.line(&request).await;
    run(&mut link, "default", Language::Python, "x = 41; open('/workspace/file', 'w').write('old')").await;
    run(&mut link, "default", Language::Bash, "A=bash; sleep 500 & echo in memory > /tmp/kept").await;
    drop(link);
    let store = world.state.path().join("store");
    std::fs::create_dir(&store).unwrap();
    let began = std::time::Instant::now();
    world.jail.snapshot(&request.directory, &placed, &store, Memory::Kept).unwrap();
    eprintln!("copied in {:?}", began.elapsed());
    // It goes on, and what it does from now on is its own.
    let mut link = world.line(&request).await;
    let on = "x += 1; open('/workspace/file', 'w').write('new'); print(x)";
    assert_eq!(run(&mut link, "default", Language::Python, on).await, "42\n");
    assert_eq!(run(&mut link, "default", Language::Bash, "echo $A; jobs | wc -l").await, "bash\n1\n");
    let mut numbers = Vec::new();
    for (number, name) in ["sbx_first", "sbx_second"].into_iter().enumerate() {
        let other = world.request(name);
        let other = BoxRequest {
            number: request.number + 1 + u32::try_from(number).unwrap(),
            workspace: Some(placed.workspace),
            ..other
        };
        let began = std::time::Instant::now();
        world.jail.unpack(&store, request.number, &other, true).unwrap();
        let unpacked = began.elapsed();
        let copy = world.jail.restore(&other, &carrel_backend::memory_of(&store), Memory::Kept).unwrap();
        eprintln!("brought back in {unpacked:?}, {:?}", began.elapsed());
        assert_ne!(copy.owner, placed.owner);
        let mut link = world.line(&other).await;
        let look = "import os, random; print(x, open('/workspace/file').read(), os.stat('/workspace/file').st_uid)\n\
                    open('/workspace/file', 'w').write('mine'); x = 0";
        assert_eq!(run(&mut link, "default", Language::Python, look).await, "41 old 1000\n");
        let shell = "echo $A $(cat /tmp/kept) $(jobs | wc -l) $(cat /workspace/file)";
        assert_eq!(run(&mut link, "default", Language::Bash, shell).await, "bash in memory 1 mine\n");
        let random = "print(random.random())";
        numbers.push(run(&mut link, "default", Language::Python, random).await);
        numbers.push(run(&mut link, "default", Language::Bash, "echo $RANDOM $RANDOM").await);
        drop(link);
        world.jail.destroy(&other.id, &other.directory, Some(&copy)).unwrap();
    }
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), 4, "generators repeat: {numbers:?}");
    assert_eq!(
        run(&mut link, "default", Language::Python, "print(open('/workspace/file').read())").await,
        "new\n"
    );
    drop(link);
    // What was written to be passed on at once is not there to be kept, and what was not written is not part of an image.
    let passed = world.state.path().join("passed");
    std::fs::create_dir(&passed).unwrap();
    world.jail.snapshot(&request.directory, &placed, &passed, Memory::Passed).unwrap();
    std::fs::write(carrel_backend::memory_of(&store).join("0/stray.img"), "stray").unwrap();
    for (store, name) in [(&passed, "sbx_passed"), (&store, "sbx_stray")] {
        let other = BoxRequest { workspace: Some(placed.workspace), ..world.request(name) };
        world.jail.unpack(store, request.number, &other, true).unwrap();
        let problem =
            world.jail.restore(&other, &carrel_backend::memory_of(store), Memory::Kept).unwrap_err();
        assert_eq!(problem.code, Code::StateLost, "{problem}");
        world.jail.destroy(&other.id, &other.directory, None).unwrap();
    }
    world.jail.destroy(&request.id, &request.directory, Some(&placed)).unwrap();
}
