//! Forks of a sandbox as it lives, with real boxes: by a copy of its python where nothing else lives in it, and else by way of the
//! disk.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on fails here")]

use std::{future::Future, path::Path, time::Duration};

use carrel_engine::{
    Engine, Environments, Record, Settings, Whereabouts, Wish, call::Output, snapshots::Forked,
};
use carrel_proto::{
    guest::Language::{self, Bash, Python},
    id::{Key, SessionName},
    limits::Enforcement::{CgroupV1, CgroupV2},
    message::Run,
    outcome::{Outcome, SessionState},
};
use rustix::{
    event::{PollFd, PollFlags, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

struct World {
    state: tempfile::TempDir,
    engine: Engine,
}

fn key() -> Key {
    "user:local:work".parse().unwrap()
}

async fn in_time<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(Duration::from_secs(120), future).await {
        Ok(value) => value,
        Err(_) => panic!("{what}: it hangs"),
    }
}

impl World {
    fn new() -> Self {
        let state = tempfile::tempdir().unwrap();
        let environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
        let engine = Engine::open(Settings { state: state.path().to_path_buf(), environments }).unwrap();
        if std::env::var_os("CARREL_TEST_COPIES").is_some() {
            engine.parent("python").unwrap().unwrap().unwrap();
        }
        Self { state, engine }
    }

    async fn sandbox(&self) -> Record {
        let wish = Wish { idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() };
        self.engine.sandbox(&key(), &wish).await.unwrap().record
    }

    async fn end(&self, record: &Record, language: Language, code: &str) -> (String, Outcome) {
        let run = Run {
            session: SessionName::main(),
            language,
            code: code.to_owned(),
            timeout_ms: 60_000,
            cancel_on_disconnect: false,
        };
        in_time(code, async {
            let mut call = self.engine.run(record, run).await.unwrap();
            let mut out = Vec::new();
            loop {
                match call.next().await.unwrap() {
                    Output::Bytes { bytes, .. } => out.extend_from_slice(bytes),
                    Output::Finished(outcome) => {
                        return (String::from_utf8_lossy(&out).into_owned(), outcome);
                    }
                    _ => {}
                }
            }
        })
        .await
    }

    async fn python(&self, record: &Record, code: &str) -> String {
        self.end(record, Python, code).await.0
    }

    async fn bash(&self, record: &Record, code: &str) -> String {
        self.end(record, Bash, code).await.0
    }

    async fn fork(&self, record: &Record, count: u32) -> Forked {
        in_time("forking", self.engine.fork(record, count, None, None)).await.unwrap()
    }

    /// Forks a sandbox as it lives: with nothing written down.
    async fn fork_living(&self, record: &Record) -> Record {
        let mut forked = self.fork(record, 1).await;
        assert!(forked.living && forked.memory, "{forked:?}");
        forked.forks.remove(0).record
    }

    /// The other way; `None` where this host cannot.
    async fn fork_written(&self, record: &Record) -> Option<Record> {
        let mut forked = self.fork(record, 1).await;
        assert!(!forked.living, "{forked:?}");
        assert_eq!(forked.memory, self.engine.can_hibernate().is_ok(), "{forked:?}");
        forked.memory.then(|| forked.forks.remove(0).record)
    }

    async fn close(self) {
        for record in self.engine.list().unwrap() {
            self.engine.close(&record, None).await.unwrap();
        }
        self.engine.cleared().await.unwrap();
        let entries = |place: &str| {
            let entries = std::fs::read_dir(self.state.path().join(place)).unwrap();
            entries.map(|entry| entry.unwrap().path()).collect::<Vec<_>>()
        };
        assert_eq!((entries("snapshots"), entries("sandboxes")), (Vec::new(), Vec::new()));
        assert!(!is_mounted(self.state.path()));
    }
}

fn is_mounted(state: &Path) -> bool {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(state.to_str().unwrap())
}

#[tokio::test]
async fn a_python_that_waits_is_copied_as_it_lives() {
    let world = World::new();
    let record = world.sandbox().await;
    let code = "import os, random, sys, decimal\n\
                x = [1, 2]; x.append(x); f = lambda n: n * len(x); text = 'ä' * 100_000\n\
                class C: y = 5\n\
                c = C(); os.environ['A'] = 'b'; os.makedirs('sub'); os.chdir('sub')\n\
                print('said before', flush=True)\n\
                open('/workspace/file', 'w').write('then'); open('/tmp/kept', 'w').write('in memory')";
    assert_eq!(world.python(&record, code).await, "said before\n");
    let fork = world.fork_living(&record).await;
    let look = "print(x[:2], x[2] is x, f(2), len(text), c.y, isinstance(c, C), os.environ['A'], os.getcwd(), \
                open('/workspace/file').read(), open('/tmp/kept').read())";
    let seen = "[1, 2] True 6 100000 5 True b /workspace/sub then in memory\n";
    assert_eq!(world.python(&fork, look).await, seen);
    assert_eq!(world.python(&record, look).await, seen);
    // Each goes its own way.
    world
        .python(
            &fork,
            "x[0] = 9; open('/workspace/file', 'w').write('fork'); open('/tmp/kept', 'w').write('')",
        )
        .await;
    assert_eq!(world.python(&record, look).await, seen);
    world.python(&record, "x[0] = 7").await;
    assert_eq!(world.python(&fork, "print(x[0], open('/workspace/file').read())").await, "9 fork\n");
    let random = "print(random.random(), os.urandom(4).hex())";
    assert_ne!(world.python(&fork, random).await, world.python(&record, random).await);
    // Other interpreters, processes and sessions start in it as in any other.
    assert_eq!(world.bash(&fork, "cat file; echo; (sleep 1000 & echo $!) >/dev/null").await, "fork\n");
    let program = "import subprocess; print(subprocess.run(['echo', 'out'], capture_output=True).stdout)";
    assert_eq!(world.python(&fork, program).await, "b'out\\n'\n");
    let error = world.end(&fork, Python, "1/0").await;
    assert!(error.0.contains("ZeroDivisionError"), "{error:?}");
    world.close().await;
}

#[tokio::test]
async fn copies_of_copies_live_sleep_and_go_back() {
    let world = World::new();
    let record = world.sandbox().await;
    world.python(&record, "n = 0").await;
    let mut last = record.clone();
    for generation in 1..=3 {
        last = world.fork_living(&last).await;
        assert_eq!(world.python(&last, "n += 1; print(n)").await, format!("{generation}\n"));
    }
    // Undo: back to what it was born with, and not beyond.
    world.python(&last, "n = 100").await;
    let undone = world.engine.undo(&last, &SessionName::main(), Some(Python), 2).await.unwrap();
    assert_eq!(undone.calls, 2);
    assert_eq!(world.python(&last, "print(n)").await, "2\n");
    let beyond = world.engine.undo(&last, &SessionName::main(), Some(Python), 2).await;
    assert!(beyond.is_err(), "{beyond:?}");
    // A crash in the first call.
    let fork = world.fork_living(&last).await;
    let (_, outcome) = world.end(&fork, Python, "n = 5; import os; os.kill(os.getpid(), 11)").await;
    assert_eq!(outcome.session_state, SessionState::RolledBack);
    assert_eq!(world.python(&fork, "print(n)").await, "2\n");
    let fork = world.fork_living(&fork).await;
    if world.engine.can_hibernate().is_ok() {
        in_time("hibernating", world.engine.hibernate(&fork)).await.unwrap();
    }
    // The one that all come from is gone.
    world.engine.close(&record, None).await.unwrap();
    let fork = world.engine.existing(fork.id.as_str(), None).await.unwrap().record;
    assert_eq!(world.python(&fork, "n += 1; print(n)").await, "3\n");
    world.close().await;
}

/// Where calls are not kept for undoing there is no copy of the state: one is made for this, and gone again.
#[tokio::test]
async fn without_undo_it_is_copied_all_the_same() {
    let world = World::new();
    let wish = Wish { undo_calls: Some(0), idle_timeout_s: 600, max_lifetime_s: 3600, ..Wish::default() };
    let record = world.engine.sandbox(&key(), &wish).await.unwrap().record;
    world.python(&record, "import os; n = 1; own = os.getpid()").await;
    for round in 1..=3 {
        let fork = world.fork_living(&record).await;
        assert_eq!(world.python(&fork, "n += 1; print(n)").await, format!("{}\n", round + 1));
        let again = world.fork_living(&fork).await;
        assert_eq!(world.python(&again, "print(n)").await, format!("{}\n", round + 1));
        // Nobody but itself is there, its children included.
        let look = "n += 1; print(os.getpid() == own, open(f'/proc/{own}/task/{own}/children').read() == '')";
        assert_eq!(world.python(&record, look).await, "True True\n");
    }
    world.close().await;
}

/// A fork goes on with the execs of its parent, and both may have been brought back: no id means two.
#[tokio::test]
async fn ids_of_execs_are_never_given_twice() {
    let world = World::new();
    let record = world.sandbox().await;
    let revive = async |record: &Record| {
        let placed = world.engine.record(&record.id).unwrap().unwrap().placed.unwrap();
        let agent = pidfd_open(Pid::from_raw(placed.pid).unwrap(), PidfdFlags::empty()).unwrap();
        pidfd_send_signal(&agent, Signal::KILL).unwrap();
        poll(&mut [PollFd::new(&agent, PollFlags::IN)], None).unwrap();
        in_time("reviving", world.engine.existing(record.id.as_str(), None)).await.unwrap().record
    };
    let ids = async |record: &Record| {
        world.python(record, "print(1)").await;
        let execs = world.engine.execs(record).await.unwrap();
        execs.into_iter().map(|exec| exec.exec.to_string()).collect::<Vec<_>>()
    };
    let record = revive(&record).await;
    let first = ids(&record).await;

    for written in [false, true] {
        let fork = if written {
            world.bash(&record, "A=1").await;
            let Some(fork) = world.fork_written(&record).await else { break };
            fork
        } else {
            world.fork_living(&record).await
        };
        let seen = ids(&fork).await;
        assert!(first.iter().all(|id| seen.contains(id)), "{first:?} {seen:?}");
        let fork = revive(&fork).await;
        let after = ids(&fork).await;
        assert!(after.iter().all(|id| !seen.contains(id)), "{seen:?} {after:?}");
    }
    world.close().await;
}

#[tokio::test]
async fn many_come_from_one_copy() {
    let world = World::new();
    let record = world.sandbox().await;
    world.python(&record, "import os; data = os.urandom(8 << 20); total = sum(data)").await;
    let forked = world.fork(&record, 4).await;
    assert!(forked.living, "{forked:?}");
    for fork in &forked.forks {
        assert_eq!(world.python(&fork.record, "print(sum(data) == total)").await, "True\n");
        // What none of them has changed is there once for all.
        let counted = matches!(fork.record.placed.as_ref().unwrap().enforced.memory, CgroupV1 | CgroupV2);
        assert!(!counted || fork.memory_bytes < 8 << 20, "{fork:?}");
    }
    // As any sandbox does, one outlives whoever made it.
    let other = Engine::open(Settings {
        state: world.state.path().to_path_buf(),
        environments: Environments::default().at(Whereabouts::of(std::env::vars_os())),
    })
    .unwrap();
    let again = World { engine: other, ..world };
    assert_eq!(again.python(&forked.forks[2].record, "print(len(data))").await, format!("{}\n", 8 << 20));
    again.close().await;
}

/// Whatever a copy of python's memory would not have goes by way of the disk, where that has it all.
#[tokio::test]
async fn what_a_copy_would_not_have_is_written_down() {
    for (make, look, seen) in [
        (
            "f = open('/workspace/file', 'w+'); f.write('abc'); f.flush(); f.seek(1)",
            "print(f.read())",
            "bc\n",
        ),
        ("import os; r, w = os.pipe(); os.write(w, b'in it')", "print(os.read(r, 5))", "b'in it'\n"),
        (
            "import subprocess; p = subprocess.Popen(['sleep', '1000'])",
            "print(p.poll()); p.kill(); print(p.wait())",
            "None\n-9\n",
        ),
        (
            "import threading; e = threading.Event(); t = threading.Thread(target=e.wait, daemon=True); t.start()",
            "print(t.is_alive()); e.set(); t.join(); print(t.is_alive())",
            "True\nFalse\n",
        ),
        (
            "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('handled'))",
            "signal.raise_signal(signal.SIGUSR1)",
            "handled\n",
        ),
        (
            "import subprocess; p = subprocess.Popen(['false']); import os; os.waitid(os.P_PID, p.pid, os.WEXITED | os.WNOWAIT)",
            "print(p.wait())",
            "1\n",
        ),
        ("import os; was = os.nice(0); os.nice(3)", "print(os.nice(0) - was)", "3\n"),
        ("import os; os.umask(0o77)", "print(oct(os.umask(0o77)))", "0o77\n"),
        (
            "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); resource.setrlimit(resource.RLIMIT_NOFILE, (90, 90))",
            "print(resource.getrlimit(resource.RLIMIT_NOFILE))",
            "(90, 90)\n",
        ),
        ("import mmap; m = mmap.mmap(-1, 4096); m[0] = 7", "print(m[0])", "7\n"),
    ] {
        let world = World::new();
        let record = world.sandbox().await;
        world.python(&record, make).await;
        if let Some(fork) = world.fork_written(&record).await {
            assert_eq!(world.python(&fork, look).await, seen, "{make}");
        }
        assert_eq!(world.python(&record, look).await, seen, "{make}");
        world.close().await;
    }
}

#[tokio::test]
async fn other_interpreters_and_big_ones_are_written_down() {
    let world = World::new();
    let record = world.sandbox().await;
    world.python(&record, "big = b'x' * (100 << 20)").await;
    if let Some(fork) = world.fork_written(&record).await {
        assert_eq!(world.python(&fork, "print(len(big))").await, format!("{}\n", 100 << 20));
        world.engine.close(&fork, None).await.unwrap();
    }
    world.python(&record, "del big").await;
    world.bash(&record, "A=5").await;
    if let Some(fork) = world.fork_written(&record).await {
        assert_eq!(world.bash(&fork, "echo $A").await, "5\n");
    }
    world.close().await;
}

/// User code shares its process with the driver: what it may do to the spare harms itself alone.
#[tokio::test]
async fn a_directory_in_memory_is_there_before_its_python() {
    let world = World::new();
    for place in ["/tmp", "/dev/shm", "/home/user"] {
        let record = world.sandbox().await;
        let code = format!(
            "import os, tempfile; x = 1; d = tempfile.mkdtemp(dir={place:?}); os.chdir(d); open('f', 'w').write('f')"
        );
        world.python(&record, &code).await;
        let fork = world.fork_living(&record).await;
        assert_eq!(world.python(&fork, "print(x, os.getcwd() == d, open('f').read())").await, "1 True f\n");
        world.engine.close(&record, None).await.unwrap();
    }
    world.close().await;
}

/// A page of code that was written is compared with its file, whose name user code can give to something else.
#[tokio::test]
async fn what_has_the_name_of_mapped_code_is_not_opened() {
    let world = World::new();
    for make in ["os.mkfifo(name)", "os.symlink('/dev/watchdog', name)", "os.symlink('/proc/self/mem', name)"]
    {
        let record = world.sandbox().await;
        let code = format!(
            "import ctypes, os\n\
             x = 1\n\
             c = ctypes.CDLL(None, use_errno=True)\n\
             c.mmap.restype = ctypes.c_void_p\n\
             c.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]\n\
             c.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]\n\
             open('code', 'wb').write(bytes(4096))\n\
             f = os.open('code', os.O_RDWR)\n\
             at = c.mmap(None, 4096, 3, 2, f, 0)\n\
             ctypes.memset(at, 1, 1)\n\
             print(c.mprotect(at, 4096, 5))\n\
             os.close(f); os.unlink('code'); name = 'code (deleted)'\n\
             {make}"
        );
        assert_eq!(world.python(&record, &code).await, "0\n", "{make}");
        // However it comes to be, and whatever it has: it is there, and so is its parent.
        let forked = world.fork(&record, 1).await;
        assert!(!forked.living, "{make}: {forked:?}");
        assert_eq!(world.python(&record, "print(x)").await, "1\n");
        world.engine.close(&record, None).await.unwrap();
    }
    world.close().await;
}

/// Few pages of much: they do not become more in a copy.
#[tokio::test]
async fn memory_that_was_hardly_touched_stays_small_in_a_copy() {
    let world = World::new();
    let record = world.sandbox().await;
    let code = "import mmap\n\
                m = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE)\n\
                for at in range(0, 256 << 20, 1 << 20): m[at] = 7\n\
                own = lambda: int(next(l for l in open('/proc/self/status') if l.startswith('RssAnon')).split()[1])";
    world.python(&record, code).await;
    let fork = world.fork_living(&record).await;
    let look = "print(sum(m[at] for at in range(0, 256 << 20, 1 << 20)), own() < 32 << 10)";
    assert_eq!(world.python(&fork, look).await, "1792 True\n");
    world.close().await;
}

#[tokio::test]
async fn a_hostile_python_forks_into_its_like_or_not_at_all() {
    for code in [
        // A mapping of more addresses than anybody can ask for.
        "import ctypes; m = ctypes.CDLL(None).mmap; m.restype = ctypes.c_void_p; \
         print(m(None, ctypes.c_size_t(1 << 45), 0, 0x4022, -1, ctypes.c_long(0)) is not None)",
        // Many mappings, and one where a graft has its own program.
        "import mmap; all = [mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=1 + 2 * (n % 2)) \
         for n in range(9000)]; print(True)",
        "import ctypes; m = ctypes.CDLL(None).mmap; m.restype = ctypes.c_void_p; \
         print(m(ctypes.c_void_p(0x400000), ctypes.c_size_t(1 << 22), 3, 0x100022, -1, ctypes.c_long(0)) is not None)",
    ] {
        let world = World::new();
        let record = world.sandbox().await;
        if world.python(&record, &format!("x = 5; {code}")).await != "True\n" {
            // Where memory is limited per process there is no way to ask for so much.
            assert!(world.engine.can_hibernate().is_err(), "{code}");
        }
        let forked = world.fork(&record, 1).await;
        if forked.memory {
            assert_eq!(world.python(&forked.forks[0].record, "print(x)").await, "5\n", "{code}");
        }
        assert_eq!(world.python(&record, "print(x)").await, "5\n", "{code}");
        world.close().await;
    }
}
