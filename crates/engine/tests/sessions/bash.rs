//! One long-lived shell, whatever the code does to it.

use carrel_proto::{
    guest::Language::Bash,
    outcome::{Cause, SessionState::Lost},
    problem::Code,
};

use crate::world::World;

#[tokio::test]
async fn the_shell_remembers() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("cd /tmp; x='a  b'; export Y=2; arr=(p 'q r'); declare -A map=([k]=v)").await.ok();
    sandbox
        .bash("f() { echo \"f $1\"; }; alias hi='echo alias'; shopt -s extglob; set -o pipefail; umask 027")
        .await
        .ok();
    let ran = sandbox.bash("echo \"$PWD|$x|$Y|${arr[1]}|${map[k]}\"; f 3; hi; umask").await.ok();
    assert_eq!(ran.out(), "/tmp|a  b|2|q r|v\nf 3\nalias\n0027\n");
    assert_eq!(
        sandbox.bash("[[ aab == +(a)b ]] && echo glob; printenv Y; false | true").await.kept(1).out(),
        "glob\n2\n"
    );
    assert_eq!(sandbox.bash("echo $?; set +o pipefail; (exit 7)").await.kept(7).out(), "1\n");
    assert_eq!(sandbox.bash("echo $?").await.ok().out(), "7\n", "the last status is the next call's first");
    assert_eq!(sandbox.bash("set -- one two").await.ok().out(), "");
    assert_eq!(sandbox.bash("echo $# $2; pushd / >/dev/null").await.ok().out(), "2 two\n");
    assert_eq!(sandbox.bash("popd; dirs").await.ok().out(), "/tmp\n/tmp\n");
}

#[tokio::test]
async fn jobs_and_traps_outlive_their_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("mkfifo /tmp/gate; (read < /tmp/gate; echo done; exit 4) & job=$!").await.ok();
    assert_eq!(sandbox.bash("jobs -r | wc -l").await.ok().out(), "1\n");
    assert_eq!(sandbox.bash("echo > /tmp/gate; wait $job").await.kept(4).out(), "done\n");

    sandbox.bash("trap 'echo usr1' USR1; trap 'echo err $?' ERR").await.ok();
    assert_eq!(sandbox.bash("kill -USR1 $$; false; true").await.ok().out(), "usr1\nerr 1\n");
    let ran = sandbox.bash("trap -p USR1; trap - ERR USR1; trap -p").await.ok();
    assert_eq!(ran.out(), "trap -- 'echo usr1' SIGUSR1\n", "none of the driver's own");
    sandbox.bash("trap 'echo bye $x' EXIT; x=1").await.ok();
    assert_eq!(sandbox.bash("x=2; exit 5").await.kept(5).out(), "bye 2\n");
    assert_eq!(sandbox.bash("echo $x").await.ok().out(), "2\n", "the session goes on");

    // Processes in the background live on when the shell is renewed.
    sandbox.bash("(read < /tmp/gate; echo still there > /tmp/word) & exit 3").await.kept(3);
    sandbox.bash("echo > /tmp/gate; until [[ -s /tmp/word ]]; do :; done").await.ok();
}

#[tokio::test]
async fn code_that_would_end_a_shell_ends_its_call() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("cd /tmp; x=1; f() { echo f; }; alias a='echo a'; set -- p q; export E=e").await.ok();
    for (code, exit, out) in [
        ("echo before; exit 3; echo after", 3, "before\n"),
        ("exit", 0, ""),
        ("f2() { exit 4; }; f2; echo after", 4, ""),
        ("set -e; echo on; false; echo after", 1, "on\n"),
        ("set +e; exec echo replaced", 0, "replaced\n"),
        ("exec bash -c 'exit 6'", 6, ""),
        ("exec /no/such/program", 127, ""),
        ("set -u; echo $undefined; echo after", 1, ""),
        ("set +u; : ${nothing:?is missing}; echo after", 1, ""),
        ("kill $$; echo after", 143, ""),
        ("f3() { kill -HUP $$; }; f3; echo after", 143, ""),
        ("x=1; eval 'exit 0'; echo after", 0, ""),
        ("return 9; echo after", 9, ""),
        ("( exit 8 )", 8, ""),
        ("readonly r=1; r=2; echo after", 1, ""),
    ] {
        let ran = sandbox.bash(code).await.kept(exit);
        assert_eq!(ran.out(), out, "{code}");
        let ran = sandbox.bash("echo $PWD $x $1 $E; f; a").await.ok();
        assert_eq!(ran.out(), "/tmp 1 p e\nf\na\n", "after {code}");
    }
}

#[tokio::test]
async fn code_that_does_not_parse_hurts_nobody() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    sandbox.bash("x=1").await.ok();
    for code in [
        "if then",
        "echo \"unterminated",
        "echo 'unterminated",
        "echo `unterminated",
        "echo $(unterminated",
        "echo ${unterminated",
        "}",
        ")",
        "for i in 1 2",
        "f() {",
        "case x in",
        "[[ a =",
        "((",
        "&&",
        "; ;",
    ] {
        let ran = sandbox.bash(code).await;
        assert!([1, 2].contains(&ran.outcome.exit_code), "{code}: {:?}", ran.outcome);
        assert!(!ran.stderr.is_empty(), "{code}");
        assert!(!ran.err().contains("__carrel"), "{code}: {}", ran.err());
        assert_eq!(sandbox.bash("echo $x").await.ok().out(), "1\n", "after {code}");
    }
    let ran = sandbox.bash("true\n\nif then").await.kept(2);
    assert!(ran.err().contains("line 3"), "the user's own line: {}", ran.err());
    let heredoc = "cat <<EOF\nx is $x\nEOF\ncat <<'EOF'\nx is $x\nEOF\ncat <<-EOF\n\ttab\n\tEOF";
    assert_eq!(sandbox.bash(heredoc).await.ok().out(), "x is 1\nx is $x\ntab\n");
    let ran = sandbox.bash("cat <<EOF\nno end").await.ok();
    assert_eq!(ran.out(), "no end\n");
    assert_eq!(sandbox.bash("echo a \\").await.ok().out(), "a \\\n", "as `bash -c` has it");
    assert_eq!(sandbox.bash("cat <<< $x; echo 'two\nlines'; # comment").await.ok().out(), "1\ntwo\nlines\n");
    assert_eq!(sandbox.bash("").await.ok().out(), "");
    assert_eq!(
        sandbox.bash("echo ü\u{1F600}; printf '\\xff\\x00\\xfe'").await.ok().stdout,
        "ü😀\n".as_bytes().iter().chain(b"\xff\x00\xfe").copied().collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn readers_find_an_end_and_writers_a_place() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    assert_eq!(sandbox.bash("cat; echo $?").await.ok().out(), "0\n");
    assert_eq!(sandbox.bash("read x; echo $?; head -c 1; wc -c").await.ok().out(), "1\n0\n");
    assert_eq!(sandbox.bash("while read line; do echo $line; done; echo end").await.ok().out(), "end\n");
    sandbox.bash("python3 -c 'input()'").await.kept(1);
    sandbox.bash("exec 0<&-; cat").await;
    assert_eq!(sandbox.bash("cat; echo $?").await.ok().out(), "0\n", "standard input is back");

    let ran = sandbox.bash("echo a > /dev/stdout; echo b > /dev/stderr; echo c >> /proc/self/fd/1; echo d | tee /dev/stderr; echo e > /dev/fd/2").await.ok();
    assert_eq!((ran.out().as_str(), ran.err().as_str()), ("a\nc\nd\n", "b\nd\ne\n"));
    for code in [
        "exec >&-",
        "exec > /tmp/log 2>&1; echo logged",
        "exec 1>&2",
        "exec 2>&-; exec 1>&-",
        "fd=5; eval \"exec $fd>/tmp/five\"",
    ] {
        sandbox.bash(code).await.ok();
        let ran = sandbox.bash("echo out; echo err >&2; bash -c 'echo child'").await.ok();
        assert_eq!((ran.out().as_str(), ran.err().as_str()), ("out\nchild\n", "err\n"), "after {code}");
    }
    assert_eq!(sandbox.bash("cat /tmp/log; echo kept >&5; cat /tmp/five").await.ok().out(), "logged\nkept\n");
}

#[tokio::test]
async fn a_shell_that_is_killed_is_told_and_replaced() {
    let world = World::new();
    let sandbox = world.sandbox().await;
    for (code, signal) in [("kill -9 $$", 9), ("kill -9 -1; kill -9 $$", 9)] {
        sandbox.bash("x=1").await.ok();
        let ran =
            sandbox.bash(&format!("echo before; {code}")).await.died(Cause::Signal, Code::Crashed, Lost);
        assert_eq!(ran.out(), "before\n");
        // Where user code shares the runner's id, `kill -1` takes the runner too, and nobody is left to say the signal.
        assert!(
            ran.outcome.signal == Some(signal) || !rustix::process::geteuid().is_root(),
            "{:?}",
            ran.outcome
        );
        assert_eq!(sandbox.bash("echo ${x-fresh}").await.ok().out(), "fresh\n");
    }
    sandbox.hurried(Bash, "kill -STOP $$").await.died(Cause::Timeout, Code::Timeout, Lost);
    assert_eq!(sandbox.bash("echo ${x-fresh}").await.ok().out(), "fresh\n");
    // A shell that cannot answer any more is not waited for.
    sandbox.bash("exec 252<&- 253>&-").await.died(Cause::Signal, Code::Crashed, Lost);
    assert_eq!(sandbox.bash("echo works").await.ok().out(), "works\n");
}
