//! Interpreters that are copies of a warm parent: whoever uses one must not be able to tell, but for the time it took.

use std::collections::BTreeMap;

use carrel_engine::Warmth;

use crate::world::World;

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
    "special": sorted({line[5] for line in maps if len(line) > 5 and line[5].startswith("[")}),
}))
"#;

const IS_COPY: &str = "'/memfd:python' in open('/proc/self/maps').read()";

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_like_one_that_was_started() {
    let warm = World::warm();
    let copied = warm.sandbox().await;
    assert_eq!(copied.python(IS_COPY).await.value(), Some("True"));
    let cold = World::new();
    cold.engine().set_warmth(Warmth { on: false, modules: Vec::new() });
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
