//! Interpreters that are copies of a warm parent: whoever uses one must not be able to tell, but for the time it took.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use carrel_engine::{Environments, Source, Warmth, Whereabouts, Wish};
use carrel_proto::guest::Language::Python;

use crate::world::{Ran, World, a_run, in_time};

/// Everything that a process can learn of itself and that must not depend on how it came to life, as JSON.
const LOOK: &str = r#"
import json, locale, os, resource, signal, sys
def text(name): return open("/proc/self/" + name).read()
status = dict(line.split(":\t", 1) for line in text("status").splitlines() if ":\t" in line)
wanted = ("Name Umask State Tgid Ngid Pid PPid TracerPid Uid Gid FDSize Groups NStgid NSpid NSpgid NSsid Threads SigPnd ShdPnd SigBlk SigIgn "
          "SigCgt CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp Seccomp_filters Speculation_Store_Bypass CoreDumping THP_enabled")
files = sorted(os.listdir("/proc/self/fd"), key=int)
def shown(fd):
    try: return os.readlink("/proc/self/fd/" + fd).split(":")[0], os.get_inheritable(int(fd)), open("/proc/self/fdinfo/" + fd).read().split("flags:")[1].split()[0]
    except OSError: return None
maps = [line.split(None, 5) for line in text("maps").splitlines()]
print(json.dumps({
    "status": {name: status.get(name) for name in wanted.split()},
    "limits": text("limits"), "cgroup": text("cgroup"), "oom": text("oom_score_adj"), "cmdline": text("cmdline"),
    "files": {fd: shown(fd) for fd in files}, "cwd": os.getcwd(), "environment": dict(os.environ),
    "variables": sorted(os.popen("env").read().splitlines()),
    "path": sys.path, "flags": str(sys.flags), "executable": sys.executable, "modules": sorted(sys.modules),
    "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)],
    "locale": locale.setlocale(locale.LC_ALL), "recursion": sys.getrecursionlimit(), "group": [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()],
    "names": sorted(globals()), "priority": os.getpriority(os.PRIO_PROCESS, 0), "scheduling": os.sched_getscheduler(0),
    "writable code": [line for line in maps if "w" in line[1] and "x" in line[1]],
    "shared": sorted({(line[1], line[5]) for line in maps if line[1][3] == "s"}),
    "mapped": sorted({line[5] for line in maps if len(line) > 5 and line[5].startswith("/") and "memfd" not in line[5]}),
    # The heap is called so where it has grown beyond the image.
    "special": sorted({line[5] for line in maps if len(line) > 5 and line[5].startswith("[")} - {"[heap]"}),
}))
"#;

const IS_COPY: &str = "'/memfd:python' in open('/proc/self/maps').read()";

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_like_one_that_was_started() {
    let warm = World::warm();
    let copied = warm.sandbox().await;
    assert_eq!(copied.python(IS_COPY).await.value(), Some("True"));
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    environments.set_warmth(Warmth { on: false, ..Warmth::default() });
    let cold = World::with(environments);
    assert_eq!(cold.engine().parent("python").unwrap(), None);
    let started = cold.sandbox().await;
    assert_eq!(started.python(IS_COPY).await.value(), Some("False"));
    let copied = copied.python(LOOK).await.ok().out();
    let started = started.python(LOOK).await.ok().out();
    let read = |text: &str| -> BTreeMap<String, serde_json::Value> { serde_json::from_str(text).unwrap() };
    let (copied, started) = (read(&copied), read(&started));
    for (name, value) in &started {
        assert_eq!(copied[name], *value, "{name}");
    }
}

fn warm_with(modules: &[&str]) -> World {
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    let modules = modules.iter().map(|&name| name.to_owned()).collect();
    environments.set_warmth(Warmth { modules, ..Warmth::default() });
    let world = World::with(environments);
    world.engine().parent("python").unwrap().unwrap().unwrap();
    world
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_have_no_random_numbers_in_common() {
    let world = warm_with(&["random", "uuid", "a_module_that_is_nowhere"]);
    let mut seen = BTreeSet::new();
    for _ in 0..4 {
        let sandbox = world.sandbox().await;
        let ran = sandbox
            .python("import sys; print('random' in sys.modules, 'a_module_that_is_nowhere' in sys.modules)")
            .await;
        assert_eq!(ran.ok().out(), "True False\n");
        let ran = sandbox
            .python("import os, random, uuid; print(random.random(), random.SystemRandom().random(), os.urandom(8), uuid.uuid4(), sep='\\n')")
            .await;
        for number in ran.ok().out().lines() {
            assert!(seen.insert(number.to_owned()), "{number} came twice");
        }
        // What an interpreter that is up gives a new one with the same state must not be given by another.
        assert_eq!(sandbox.python(IS_COPY).await.value(), Some("True"));
    }
    assert_eq!(seen.len(), 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_runs_what_any_interpreter_does() {
    let world = World::warm();
    let sandbox = world.sandbox().await;
    assert_eq!(sandbox.python(IS_COPY).await.value(), Some("True"));
    sandbox.python("import threading, subprocess, sys, os\nheld = threading.Lock(); seen = []\ndef note(n):\n  with held: seen.append(n)").await.ok();
    sandbox
        .python("threads = [threading.Thread(target=note, args=(n,)) for n in range(40)]\nfor t in threads: t.start()\nfor t in threads: t.join()")
        .await
        .ok();
    assert_eq!(sandbox.python("sorted(seen) == list(range(40))").await.value(), Some("True"));
    assert_eq!(
        sandbox
            .python("threading.main_thread().native_id == os.getpid() == threading.get_native_id()")
            .await
            .value(),
        Some("True")
    );
    let child = "subprocess.run([sys.executable, '-c', 'print(6*7)'], capture_output=True, text=True).stdout";
    assert_eq!(sandbox.python(child).await.value(), Some("'42\\n'"));
    let pool = "import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as pool: r = pool.map(abs, [-1, -2])\nr";
    assert_eq!(sandbox.python(pool).await.value(), Some("[1, 2]"));
    // A stack that grows, and a heap that does.
    let deep = "sys.setrecursionlimit(60000)\ndef down(n): return 0 if n == 0 else 1 + down(n - 1)\ndown(3000), sum(len(x) for x in [bytes(1000)] * 100000)";
    assert_eq!(sandbox.python(deep).await.value(), Some("(3000, 100000000)"));
    assert_eq!(sandbox.python("len([object() for _ in range(2_000_000)])").await.value(), Some("2000000"));
    assert_eq!(sandbox.python("len(seen)").await.value(), Some("40"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_holds_nothing_of_its_parent() {
    let world = World::warm();
    let sandbox = world.sandbox().await;
    assert_eq!(sandbox.python(IS_COPY).await.value(), Some("True"));
    let reach = r#"
import os
held = []
for name in [line.split()[0] for line in open("/proc/self/maps") if "memfd" in line]:
    for flags in (os.O_RDONLY, os.O_RDWR):
        try: held.append(os.open("/proc/self/map_files/" + "-".join(part.lstrip("0") for part in name.split("-")), flags))
        except OSError: pass
for fd in os.listdir("/proc/self/fd"):
    try: held += ["memfd"] if "memfd" in os.readlink("/proc/self/fd/" + fd) else []
    except OSError: pass
held
"#;
    assert_eq!(sandbox.python(reach).await.value(), Some("[]"));
    let kept = "[line for line in open('/proc/self/maps') if 'memfd' in line and ('s' in line.split()[1] or 'x' in line.split()[1])]";
    assert_eq!(sandbox.python(kept).await.value(), Some("[]"));
}

#[tokio::test(flavor = "multi_thread")]
async fn variables_that_count_at_the_start_are_not_copied() {
    let world = World::warm();
    let sandbox = world.sandbox().await;
    sandbox.open("plain", None, &[("API_KEY", "k=1 \u{e9}\n"), ("HOME", "/tmp")]).await;
    sandbox.open("zoned", None, &[("TZ", "Asia/Tokyo")]).await;
    let look =
        format!("import os; {IS_COPY}, os.environ.get('API_KEY'), os.environ['HOME'], os.environ.get('TZ')");
    assert_eq!(
        sandbox.run_in("plain", Python, &look).await.value(),
        Some("(True, 'k=1 \u{e9}\\n', '/tmp', None)")
    );
    assert_eq!(
        sandbox.run_in("zoned", Python, &look).await.value(),
        Some("(False, None, '/home/user', 'Asia/Tokyo')")
    );
    // What a program that it starts is given is what the interpreter was given.
    let child = "import subprocess; subprocess.run('echo $API_KEY$HOME', shell=True, capture_output=True, text=True).stdout.split()";
    assert_eq!(sandbox.run_in("plain", Python, child).await.value(), Some("['k=1', '\u{e9}', '/tmp']"));
    let long = "x".repeat(100_000);
    sandbox.open("long", None, &[("LONG", &long)]).await;
    assert_eq!(
        sandbox.run_in("long", Python, "import os; len(os.environ['LONG'])").await.value(),
        Some("100000")
    );
}

/// A root filesystem with the host's python, which can be changed without harm. Gives the path of its program.
fn make_python(directory: &Path) -> PathBuf {
    let ask = "import sys, os, sysconfig as c; print(os.path.realpath(sys.executable), c.get_path('stdlib'), '%d.%d' % sys.version_info[:2])";
    let told = Command::new("python3").args(["-I", "-c", ask]).output().unwrap();
    let told = String::from_utf8(told.stdout).unwrap();
    let [program, library, version] = told.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{told}")
    };
    let rootfs = directory.join("rootfs");
    let prefix = rootfs.join("opt/python");
    let stdlib = prefix.join("lib").join(format!("python{version}"));
    for made in [&stdlib, &prefix.join("bin")] {
        fs::create_dir_all(made).unwrap();
    }
    fs::copy(program, prefix.join("bin/python3")).unwrap();
    for entry in fs::read_dir(library).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let wanted = ["encodings", "collections", "importlib", "re", "json", "lib-dynload"];
        if path.is_file() || wanted.contains(&name.as_str()) {
            let copied = Command::new("cp").arg("-r").args([&path, &stdlib.join(name)]).status().unwrap();
            assert!(copied.success());
        }
    }
    let listed = Command::new("ldd").arg(program).output().unwrap();
    let text = String::from_utf8(listed.stdout).unwrap();
    for library in text.split_whitespace().filter(|word| word.starts_with('/')) {
        let target = rootfs.join(&library[1..]);
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(library, target).unwrap();
    }
    let manifest =
        "version = 1\ndefault = \"python\"\n[interpreters.python]\nprogram = \"/opt/python/bin/python3\"\n";
    fs::write(directory.join("manifest.toml"), manifest).unwrap();
    prefix.join("bin/python3")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_python_that_was_replaced_on_disk_is_started_and_then_copied_anew() {
    let artifact = tempfile::tempdir().unwrap();
    let program = make_python(artifact.path());
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    environments.add("own".into(), Source::Artifact(artifact.path().into()));
    let world = World::with(environments);
    let wish = || Wish { environment: Some("own".into()), ..Wish::default() };
    let told = world.engine().parent("own").unwrap().unwrap().unwrap();
    assert!(told.bytes > 1 << 20, "{told:?}");
    let first = world.sandbox_with(wish()).await;
    assert_eq!(first.python(IS_COPY).await.value(), Some("True"));

    let newer = program.with_extension("newer");
    fs::copy(&program, &newer).unwrap();
    fs::rename(&newer, &program).unwrap();
    let second = world.sandbox_with(wish()).await;
    // The call is there before the copy has failed, or comes afterwards: nobody notices either way.
    let ran = second.begin(a_run(Python, "x = 1")).await.end().await;
    assert_eq!((ran.outcome.exit_code, ran.err()), (0, String::new()));
    assert_eq!(second.python(&format!("{IS_COPY}, x")).await.value(), Some("(False, 1)"));
    assert_eq!(first.python("1 + 1").await.value(), Some("2"), "what was copied before goes on");

    // Somebody may be at it since the second sandbox was made.
    let renewed = async {
        while world.engine().parent("own").unwrap().unwrap().unwrap().copies > 0 {
            tokio::task::yield_now().await;
        }
    };
    in_time("a new parent", renewed).await;
    let third = world.sandbox_with(wish()).await;
    assert_eq!(third.python(IS_COPY).await.value(), Some("True"));
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_that_no_image_can_hold_are_left_out() {
    let artifact = tempfile::tempdir().unwrap();
    let program = make_python(artifact.path());
    let library = fs::read_dir(program.with_file_name("../lib")).unwrap().next().unwrap().unwrap().path();
    fs::write(library.join("handles.py"), "import signal; signal.signal(signal.SIGUSR1, print)\n").unwrap();
    let modules = ["json", "csv", "handles", "decimal"].map(str::to_owned);
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    environments.add("own".into(), Source::Artifact(artifact.path().into()));
    environments.set_warmth(Warmth { modules: modules.into(), ..Warmth::default() });
    let world = World::with(environments);
    let told = world.engine().parent("own").unwrap().unwrap().unwrap();
    assert_eq!(told.modules, ["json", "csv", "decimal"]);
    let [(name, why)] = &told.refused[..] else { panic!("{told:?}") };
    assert!(name == "handles" && why.contains("signals"), "{told:?}");
    let sandbox = world.sandbox_with(Wish { environment: Some("own".into()), ..Wish::default() }).await;
    let look = format!("import sys; {IS_COPY}, 'handles' in sys.modules, 'decimal' in sys.modules");
    assert_eq!(sandbox.python(&look).await.value(), Some("(True, False, True)"));
}

#[tokio::test(flavor = "multi_thread")]
async fn modules_that_sandboxes_ask_for_are_there_before_they_do() {
    async fn ask(world: &World, code: &str) -> Ran {
        let sandbox = world.sandbox().await;
        let ran = sandbox.python(code).await;
        world.engine().close(&sandbox.record, None).await.unwrap();
        ran
    }
    let mut environments = Environments::default().at(Whereabouts::of(std::env::vars_os()));
    environments.set_warmth(Warmth { on: false, ..Warmth::default() });
    let mut world = World::with(environments);
    let odd = "import sys; sys.modules['a b'] = sys.modules['a/b'] = sys\n\"\"\"\nimport a/b\n\"\"\"";
    for code in [
        "import decimal as d, csv",
        "x = 1\nfrom decimal import Decimal",
        // One of the two is not asked for by name.
        "if True:\n  import decimal; __import__('fractions')",
        "import nowhere",
        // Nor is what has no name that a module could have.
        odd,
        odd,
        odd,
    ] {
        ask(&world, code).await;
    }
    world.set_warmth(Warmth::default());
    let told = world.engine().parent("python").unwrap().unwrap().unwrap();
    assert_eq!((told.modules, told.refused), (vec!["decimal".to_owned()], Vec::new()));
    // Whoever has it already asks for it all the same, and it stays.
    let look = format!("import sys; print({IS_COPY}, 'decimal' in sys.modules)\nimport decimal");
    for _ in 0..8 {
        assert_eq!(ask(&world, &look).await.ok().out(), "True True\n");
    }
    world.set_warmth(Warmth::default());
    assert_eq!(world.engine().parent("python").unwrap().unwrap().unwrap().modules, ["decimal"]);
    world.set_warmth(Warmth { learn: false, ..Warmth::default() });
    assert_eq!(world.engine().parent("python").unwrap().unwrap().unwrap().modules, Vec::<String>::new());
}
