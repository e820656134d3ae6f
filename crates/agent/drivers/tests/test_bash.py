"""Stories about the bash driver, told the way the agent talks to it (docs/drivers.md).

Run: python3 crates/agent/drivers/tests/test_bash.py
"""

import fcntl
import json
import os
import re
import select
import shutil
import signal
import tempfile
import time
import unittest

DRIVER = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "bash.sh"))
BASH = shutil.which("bash")
DEADLINE = 10.0
LINE = '\n__carrel_begin %d %s "$@";\\. "$__carrel";{ __carrel_done;} 2>&-;__carrel_end\n'


class Lost(Exception):
    """The shell ended: the agent would report a lost session and start a new one."""


class Result:
    def __init__(self, exit, out, err):
        self.exit, self.out, self.err = exit, out, err

    def __repr__(self):
        return f"exit={self.exit} out={self.out!r} err={self.err!r}"


class Shell:
    """One bash under the driver; plays the agent, including its rule to hold interrupts during a renewal."""

    def __init__(self, driver=DRIVER, before=None):
        self.dir = tempfile.mkdtemp(prefix="carrel-bash-")
        self.home = os.path.join(self.dir, "home")
        os.mkdir(self.home)
        self.number = 0
        self.renewing = False
        pipes = {name: os.pipe() for name in ("out", "err", "request", "reply")}
        null = os.open("/dev/null", os.O_RDONLY)
        theirs = [null, pipes["out"][1], pipes["err"][1], pipes["request"][0], pipes["reply"][1]]
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            # Also what a shell ignores in what it runs in the background.
            for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self.home)
            for target, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in theirs]):
                os.dup2(fd, target)
            os.closerange(5, 65536)  # whatever the machine left open in us
            env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": self.home, "LANG": "C.UTF-8"}
            if before:
                with open("before", "w") as file:
                    file.write(before)
                env["BASH_ENV"] = os.path.join(self.home, "before")
            os.execve(BASH, ["bash", "--noprofile", "--norc", "/proc/self/fd/3"], env)
        for fd in theirs:
            os.close(fd)
        self.out, self.err, self.reply = pipes["out"][0], pipes["err"][0], pipes["reply"][0]
        self.request = pipes["request"][1]
        self.pending = {self.out: b"", self.err: b"", self.reply: b""}
        self.write(f". {driver}\n")
        self.ready = self.read_reply()

    def write(self, text):
        try:
            os.write(self.request, text.encode())
        except BrokenPipeError:
            raise Lost() from None

    def pump(self, deadline):
        left = deadline - time.monotonic()
        ready = select.select(list(self.pending), [], [], max(left, 0))[0]
        if not ready:
            raise TimeoutError(f"no reply; pending {self.pending}")
        for fd in ready:
            data = os.read(fd, 1 << 16)
            if not data and fd == self.reply:
                raise Lost()
            if not data:
                raise Lost()
            self.pending[fd] += data

    def read_reply(self, deadline=None):
        deadline = deadline or time.monotonic() + DEADLINE
        while b"\n" not in self.pending[self.reply]:
            self.pump(deadline)
        line, self.pending[self.reply] = self.pending[self.reply].split(b"\n", 1)
        return json.loads(line)

    def drain(self):
        while ready := select.select([self.out, self.err], [], [], 0)[0]:
            got = False
            for fd in ready:
                data = os.read(fd, 1 << 16)
                self.pending[fd] += data
                got = got or data
            if not got:
                break

    def send(self, code, env=None):
        self.number += 1
        path = os.path.join(self.dir, "code")
        with open(path, "wb") as file:
            file.write(code if isinstance(code, bytes) else code.encode())
        line = LINE % (self.number, path)
        if env is not None:
            changes = os.path.join(self.dir, "env")
            with open(changes, "wb") as file:
                file.write(b"".join(entry.encode() + b"\0" for entry in env))
            line = f"\n__carrel_load;__carrel_env {changes}\n" + line.lstrip("\n")
        self.write(line)

    def finish(self):
        while True:
            reply = self.read_reply()
            if reply == {"renewed": True}:
                self.renewing = False
                continue
            assert reply["id"] == self.number, reply
            self.renewing = reply["done"].get("renew", False)
            self.drain()
            out, self.pending[self.out] = self.pending[self.out], b""
            err, self.pending[self.err] = self.pending[self.err], b""
            return Result(reply["done"]["exit"], out.decode(), err.decode())

    def run(self, code, env=None):
        self.send(code, env)
        return self.finish()

    def brief(self, *given):
        """What the shell holds, as the agent asks for it between calls."""
        self.number += 1
        path = os.path.join(self.dir, "given")
        with open(path, "wb") as file:
            file.write(b"".join(entry.encode() + b"\0" for entry in given))
        self.write(f"__carrel_load;__carrel_brief {self.number} {path}\n")
        reply = self.read_reply()
        assert reply["id"] == self.number, reply
        return reply["brief"]

    def until(self, text):
        """Waits until the running call has printed the text."""
        deadline = time.monotonic() + DEADLINE
        while text not in self.pending[self.out]:
            self.pump(deadline)

    def interrupt(self):
        if self.renewing:
            assert self.read_reply() == {"renewed": True}
            self.renewing = False
        os.killpg(self.pid, signal.SIGINT)

    def insist(self):
        """Interrupts as the agent does, until there is a reply: what comes before the request is read is between calls."""
        while b"\n" not in self.pending[self.reply]:
            self.interrupt()
            try:
                self.pump(time.monotonic() + 0.05)
            except TimeoutError:
                pass
        return self.finish()

    def close(self):
        os.close(self.request)
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(self.pid, 0)
        for fd in (self.out, self.err, self.reply):
            os.close(fd)
        shutil.rmtree(self.dir, ignore_errors=True)


class Case(unittest.TestCase):
    def setUp(self):
        self.sh = Shell()
        self.addCleanup(lambda: self.sh.close())

    def check(self, code, out=None, exit=0, err=""):
        result = self.sh.run(code)
        self.assertEqual(result.exit, exit, result)
        if out is not None:
            self.assertEqual(result.out, out, result)
        if err is not None:
            self.assertEqual(result.err, err, result)
        return result


class Persists(Case):
    def test_ready_names_the_version(self):
        self.assertRegex(self.sh.ready["ready"]["version"], r"^\d+\.\d+\.\d+$")

    def test_variables_functions_aliases_options_and_cwd(self):
        self.check("x=1; declare -i n=4; declare -A m=([a]=b); f() { echo f$x; }; alias hi='echo hello'; cd /; set -- a 'b c'")
        self.check("n=n+1; echo $n ${m[a]} $#$2; f; hi; pwd; set -o pipefail; shopt -s nullglob", "5 b 2b c\nf1\nhello\n/\n")
        self.check("shopt -q nullglob && echo yes /nope*; false | true; echo $?", "yes\n1\n")

    def test_options_are_the_users_alone(self):
        before = self.check("shopt; set -o").out
        self.check("f() { :; }; set -o posix; set +o posix")
        self.check("shopt -s expand_aliases; shopt; set -o", before)
        self.check("set -eux; shopt -s nullglob extdebug", err=None)
        self.check("set +eux; shopt -u nullglob extdebug", err=None)
        self.check("set +ET; shopt; set -o", before)
        self.check("exit 1", exit=1)
        self.check("shopt; set -o", before)

    def test_status_of_the_call_before(self):
        self.check("( exit 7 )", exit=7)
        self.check("echo $?", "7\n")
        self.check("")
        self.check("echo $?; return 3; echo no", "0\n", exit=3)
        self.check("set -e; true")
        self.check("false", exit=1)
        self.check("echo $?", "1\n")

    def test_jobs_umask_and_descriptors(self):
        self.check("sleep 100 & p=$!; umask 027; exec 7>log 3<&- 4>&- 255<&-")
        self.check("[[ $! == $p ]]; jobs | wc -l; kill %1; wait $!; echo $?; umask; echo x >&7; cat log", "1\n143\n0027\nx\n", err=None)
        self.check("exec >/dev/null 2>&1 0</etc/passwd; echo no")
        self.check("echo yes; echo err >&2; cat", "yes\n", err="err\n")
        self.check("exec 1>&- 2>&-; echo no", exit=1)
        self.check("echo yes", "yes\n")

    def test_traps_persist(self):
        self.check("trap 'echo usr1' USR1; trap 'echo err $?' ERR; f() { trap 'echo ret' RETURN; echo in; }")
        self.check("kill -USR1 $$; (exit 3); f; trap - ERR RETURN; false; f2() { :; }; f2", "usr1\nerr 3\nin\nret\n")
        self.check("trap 'echo \"D $BASH_COMMAND\"' DEBUG; : a", "D : a\n")
        self.check("echo b", "D echo b\nb\n")
        self.check("trap - DEBUG", None)
        self.check("echo c; trap 'x' TERM; trap", "c\ntrap -- 'echo usr1' SIGUSR1\ntrap -- 'x' SIGTERM\n")


class Start(unittest.TestCase):
    def test_what_runs_before_may_open_descriptors(self):
        sh = Shell(before="exec {log}>>kept 11</dev/null 12>&1")
        self.addCleanup(sh.close)
        self.assertEqual(sh.run("echo one; echo two >&12; echo $log").out, "one\ntwo\n10\n")
        self.assertEqual(sh.run("echo in >&$log; cat kept; exit 3").out, "in\n")
        self.assertEqual(sh.run("echo on; cat kept").out, "on\nin\n")


class Environment(Case):
    """Changes of the session's variables come with a call and leave no other trace."""

    def told(self, env, code, out, exit=0):
        result = self.sh.run(code, env)
        self.assertEqual((result.out, result.err, result.exit), (out, "", exit))

    def test_set_change_and_unset_before_the_first_call_and_later(self):
        self.told(["A=1", "B=x y", "n=7", "name=8"], "echo $A $B $n; env | grep -c '^[AB]='", "1 x y 7\n2\n")
        self.told(["A=2", "B"], "env | grep '^[AB]='; echo ${B-none}", "A=2\nnone\n")
        self.told([], "echo $A $name $#; declare -p __carrel_args >/dev/null", "2 8 0\n")
        self.told(["A=line 1\nline 2 'q' \"q\" $HOME `id` \\\\", "E="], 'echo "$A"; echo "${E-none}"',
                  "line 1\nline 2 'q' \"q\" $HOME `id` \\\\\n\n")

    def test_status_arguments_options_and_traps_stay(self):
        self.check("set -- a b; set -euo pipefail; shopt -s nullglob; trap 'echo err' ERR; trap 'echo dbg >/dev/null' DEBUG; (exit 0)")
        self.told(["X=1"], 'echo $? $# $2 $X; [[ $- == *e*u* ]] && shopt -q nullglob && echo on', "0 2 b 1\non\n")
        self.check("set +e; trap - ERR DEBUG; false", exit=1)
        self.told(["X=2"], "echo $? $X", "1 2\n")
        self.check("set -x; :", err=None)
        result = self.sh.run("echo $X", ["X=3"])
        self.assertEqual((result.out, result.err), ("3\n", "+++ echo 3\n"))

    def test_a_shell_that_is_renewed_gets_them_too(self):
        self.check("keep=1; exit 3", exit=3)
        self.told(["A=1"], "echo $keep $A; exit 4", "1 1\n", exit=4)
        self.told(["A", "C=2"], "echo $keep ${A-none} $C; env | grep ^C=", "1 none 2\nC=2\n")

    def test_what_cannot_be_set_harms_nothing(self):
        self.check("readonly R=1; declare -i I=1; A=(1 2); export() { echo mine; }; declare() { echo mine; }; builtin() { echo mine; }")
        self.told(["R=2", "UID=5", "I=x+2", "x=1", "A=3", "PATH=/bin:/usr/bin", "IFS=:"], "echo $R $I; printf '%s\\n' $A; ls -d /", "1 2\n3\n/\n")
        self.told(["IFS", "R"], "echo $R", "1\n")

    def test_an_interrupt_between_calls_loses_nothing(self):
        for number in range(20):
            self.sh.interrupt()
            self.told([f"A={number}"], "echo $A", f"{number}\n")


class Leaves(Case):
    """Whatever would end the shell ends the call; the state stays."""

    STATE = r"""
cd /usr; v='a b'; export e=E; declare -ir r=7; declare -a arr=(1 'two 2' [5]=x); declare -A map=([k]='v "q"' ['s p']=1)
declare -n ref=v; f() { echo "f:$1"; }; export -f f; alias hi='echo hello'; shopt -s nullglob; set -o pipefail
trap 'echo term' TERM; trap '' USR2; set -- p1 'p 2'; umask 027; exec 8>/dev/null; pushd -n /tmp >/dev/null
g=glob; big=$(printf '%0100000d' 7); nl=$'a\nb'; unset OLDPWD; declare -i unsetint; sleep 100 & bg=$!"""
    SHOW = r"""
echo $?; pwd; echo "$v $ref ${!ref} $r ${arr[1]} ${!arr[*]} ${map[k]} ${map[s p]} $# $2 ${#big} ${nl@Q} $g"
f x; bash -c 'f "$e"'; hi; shopt -q nullglob && echo ng; [[ $SHELLOPTS == *pipefail* ]] && echo pf; umask
trap -p TERM USR2; [[ -e /proc/$$/fd/8 ]] && echo fd8; echo ${DIRSTACK[1]}; (r=8) 2>/dev/null || echo ro; kill -0 $bg && echo alive; declare -p unsetint
kill -TERM $$"""

    def shown(self, status):
        return (
            f"{status}\n/usr\na b a b v 7 two 2 0 1 5 v \"q\" 1 2 p 2 100000 $'a\\nb' glob\nf:x\nf:E\nhello\nng\npf\n0027\n"
            "trap -- 'echo term' SIGTERM\ntrap -- '' SIGUSR2\nfd8\n/tmp\nro\nalive\ndeclare -i unsetint\nterm\n"
        )

    def leaves(self, code, exit, err=None):
        self.check(self.STATE)
        self.check(code, exit=exit, err=err)
        self.check(self.SHOW, self.shown(exit))

    def test_exit(self):
        self.leaves("exit 3; echo no", 3, "")

    def test_exit_in_a_function_with_locals(self):
        self.leaves("h() { local g=loc v=loc2; local -a arr=(no); i; }; i() { local g=deep fresh=1; exit 4; }; h", 4, "")
        self.check("echo ${fresh-none}; declare -p g", 'none\ndeclare -- g="glob"\n')

    def test_errexit(self):
        self.leaves("set +e; (set -e; false; echo no); set -e; (exit 9); echo no", 9, "")
        self.check("[[ $- == *e* ]] && echo still", "still\n")

    def test_nounset(self):
        self.leaves("set -u; echo $nope; echo no", 1)

    def test_parameter_error(self):
        self.leaves(": ${nope:?message}; echo no", 1)

    def test_interrupt_of_itself(self):
        self.leaves("kill -INT $$; echo no", 130, "")

    def test_exec_of_a_command(self):
        self.leaves("exec bash -c 'echo gone >/dev/null; exit 6'; echo no", 6, "")

    def test_exit_in_sourced_file_eval_and_trap(self):
        self.check("echo 'exit 5' >s; . ./s", exit=5)
        self.check("x=1; eval 'exit 6'", exit=6)
        self.check("trap 'exit 8' USR1; kill -USR1 $$; echo no", "", exit=8)
        self.check("echo $x; (exit 2); echo $?; y=$(exit 4); echo $?; exit 2 | true; echo $?", "1\n2\n4\n0\n")

    def test_exit_trap_of_the_same_call_and_of_an_earlier_one(self):
        self.check("v=1; trap 'echo bye $? $v' EXIT; exit 3", "bye 3 1\n", exit=3)
        self.check("exit 4", "", exit=4)
        self.check("trap 'echo later' EXIT; trap -p EXIT", "trap -- 'echo later' EXIT\n")
        self.check("echo $v; (trap 'echo sub' EXIT); set -eu; v=2; false", "1\nsub\nlater\n", exit=1)
        self.check("set +e; trap 'echo a; exit 9; echo no' EXIT; exit 1", "a\n", exit=9)
        self.check("echo $v", "2\n")

    def test_a_hundred_exits(self):
        # Counted by the shell itself: a pipeline would hold an end of its pipe for a moment.
        count = "open=(/proc/$$/fd/*); echo $n ${#open[@]}"
        self.check("n=1; exit 0")
        once = self.sh.run(count).out.split()[1]
        for n in range(99):
            self.check(f"n=$((n+1)); exit {n}", exit=n)
        self.check(count, f"100 {once}\n")


class Interrupts(Case):
    def test_foreground_child_is_abandoned(self):
        self.sh.send("x=5; sleep 100 & b=$!; echo go; sleep 100; echo no")
        self.sh.until(b"go")
        self.sh.interrupt()
        self.assertEqual(self.sh.finish().exit, 130)
        self.check("echo $x; sleep 0; kill -0 $$ && echo on", "5\non\n")

    def test_busy_loop_and_storm(self):
        for _ in range(5):
            self.sh.send("x=6; f() { local x=7; while :; do :; done; }; echo go; f")
            self.sh.until(b"go")
            for _ in range(100):
                self.sh.interrupt()
            self.assertEqual(self.sh.finish().exit, 130)
            for _ in range(20):
                os.killpg(self.sh.pid, signal.SIGINT)
            self.sh.send("echo $x; sleep 100")
            self.assertEqual(self.sh.insist().exit, 130)

    def test_between_calls_nothing_happens(self):
        self.check("x=1")
        for _ in range(100):
            self.sh.interrupt()
        self.check("echo $x", "1\n")
        self.assertNotIn(b"id", self.sh.pending[self.sh.reply])

    def test_storm_over_short_calls(self):
        self.check("x=1")
        for _ in range(200):
            self.sh.send("echo a >/dev/null")
            self.sh.interrupt()
            self.assertIn(self.sh.finish().exit, (0, 130))
        self.check("echo $x", "1\n")

    def test_user_traps_of_int(self):
        self.check("trap 'echo got' INT; kill -INT $$; echo on; trap -p INT", "got\non\ntrap -- 'echo got' SIGINT\n")
        self.check("trap - INT; trap -p INT; kill -INT $$; echo no", "", exit=130)
        self.check("trap '' INT; kill -INT $$; echo on; trap - INT", "on\n")
        self.check("kill -INT $$; echo no", "", exit=130)


class Errors(Case):
    def test_syntax_errors_end_the_call_only(self):
        for code in ("echo 'a", 'echo "a', "if true; then", "{ echo", ")", "}", "for", "echo $(", "a=(1", "case x in", "echo \\", "f() {"):
            result = self.sh.run(code)
            if code != "echo \\":
                self.assertNotEqual(result.exit, 0, code)
                self.assertIn("line 1", re.sub(r"line 2", "line 1", result.err), code)
            self.check("echo fine", "fine\n")

    def test_heredoc_without_end(self):
        self.check("cat <<X\nhi", "hi\n", err=None)

    def test_lines_count_from_one(self):
        self.check(":\n:")
        self.assertIn("line 3: nosuch: command not found", self.check("\n\nnosuch\n", exit=127, err=None).err)
        self.assertIn("line 2: syntax error", self.check("echo a\n)\n", "a\n", exit=2, err=None).err)
        self.assertNotIn("__carrel", self.check("set -x; set +x; )", exit=2, err=None).err)

    def test_discarded_line(self):
        self.check("echo $((1/0)); echo no\necho yes", "yes\n", err=None)
        self.check("x=$((1/0))", "", exit=1, err=None)

    def test_posix_mode_errors(self):
        self.check("set -o posix; readonly q=1; q=2; echo no", "", exit=1, err=None)
        self.check("shopt -qo posix && echo posix; set +o posix; echo $q", "posix\n1\n")
        self.check("set -o posix; eval ')'; echo no", exit=2, err=None)
        self.check("set +o posix; alias al='echo al'")
        self.check("al", "al\n")


class Poison(Case):
    def test_stdin_is_empty(self):
        self.check("cat; read x; echo $?; python3 -; head -c1", "1\n")

    def test_trace_shows_the_users_commands_only(self):
        self.assertEqual(self.check("set -x; echo a", "a\n", err=None).err, "+++ echo a\n")
        self.assertEqual(self.check("echo b\n(exit 3)", "b\n", exit=3, err=None).err, "+++ echo b\n+++ exit 3\n")
        self.assertEqual(self.check("echo c; trap 'x' USR1; exit 2", "c\n", exit=2, err=None).err, "+++ echo c\n+++ trap x USR1\n+++ exit 2\n")
        self.assertEqual(self.check("echo d; kill -INT $$", "d\n", exit=130, err=None).err, "+++ echo d\n+++ kill -INT $$\n".replace("$$", str(self.sh.pid)))
        self.assertEqual(self.check("set +x", err=None).err, "+++ set +x\n")
        self.assertEqual(self.check("set -v\necho e", "e\n", err=None).err, "echo e\n")
        self.assertEqual(self.check("\necho f", "f\n", err=None).err, "echo f\n")
        self.assertEqual(self.check("set +v\n", err=None).err, "")

    def test_nothing_hangs_or_leaks_into_the_next_call(self):
        for code in (
            "set -f", "set -u", "set -k", "set -C", "set -a", "set -T", "set -E", "set -m", "set -t", "set -b", "set -h", "set -n", "set -o noexec",
            "set -P", "set +B", "shopt -s extdebug", "shopt -s failglob", "shopt -s nullglob", "shopt -s nocasematch", "shopt -s lastpipe",
            "shopt -s compat31", "shopt -s compat44", "shopt -u expand_aliases", "shopt -s xpg_echo", "shopt -s assoc_expand_once",
            "IFS=a", "IFS=_c", "unset IFS", "PATH=", "unset PATH", "enable -n printf", "enable -n read eval trap",
            "printf() { echo mine; }", "read() { echo mine; }", "eval() { echo mine; }", "exec() { echo mine; }", "builtin() { echo mine; }",
            "trap() { echo mine; }", "echo() { :; }", "exit() { :; }", "set() { :; }", "unset() { :; }", "return() { :; }", "shopt() { :; }",
            "alias printf=false builtin=false eval=false .=false set=false unset=false", "unalias -a", "LC_ALL=C", "LC_ALL=xx_YY", "readonly -p",
            "POSIXLY_CORRECT=1", "export BASH_ENV=/nope", "PS4='$(echo x >&2)'", "RANDOM=3", "break 5", "continue", "return 3", "shift 9",
            "exec 255<&-", "exec 3<&-", "exec 4>&-", "exec 10</dev/null 11</dev/null", "exec >/dev/null", "exec 1>&-", "exec 2>&-", "(exit 5)", "x=$(exit 4)", "wait",
            "trap '' INT", "trap '' TERM", "trap - EXIT", "trap 'echo d' DEBUG", "trap 'echo e' ERR", "trap 'echo r' RETURN", "hash -r", "export SHELLOPTS",
            "export SHELLOPTS; set -x", "exec nosuchcommand", "( while :; do echo tick; sleep 0.01; done ) & t=$!", "coproc cat", "BASH_COMPAT=4.2",
            "unset BASH_SOURCE FUNCNAME", "f() { f2; }; f2() { return 7; }; f", "declare -r POSIX_X=1", "set -eu -o pipefail", "mapfile -t a < /etc/passwd",
            "ulimit -n 300", "cd /; rmdir nope", "mkdir d; cd d; rmdir ../d", "exec 9<<<hi", "enable -n builtin", "declare -x __x=1; set -- ; shift",
            "disown -a", "umask 777", "LANG=C", "time :", "kill -CONT $$", "set -o history", "set -H",
        ):
            for leave in ("", "\nexit 5"):
                with self.subTest(code=code, leave=leave):
                    shell = Shell()
                    try:
                        shell.run("keep=kept")
                        shell.run(code + leave)
                        for _ in range(2):
                            result = shell.run("IFS=; [[ $keep == kept ]] && /bin/echo \"<ok>\"")
                            self.assertIn("<ok>", result.out, result)
                            shell.run("exit 3")
                    finally:
                        shell.close()

    def test_kill_term_ends_the_call(self):
        self.sh.run("x=1; kill $$; echo no")
        self.check("echo $x", "1\n")

    def test_killed_shell_is_lost(self):
        with self.assertRaises(Lost):
            self.sh.run("kill -9 $$")

    def test_children_get_no_control_descriptors(self):
        self.check("exec 7>/dev/null; readlink /proc/self/fd/{0,1,2} | wc -l; echo /proc/self/fd/*; ls /proc/self/fd", None)
        self.check("python3 -c 'import os; print(sorted(map(int, os.listdir(\"/proc/self/fd\"))))'", "[0, 1, 2, 3, 7]\n")
        self.check("exit 1", exit=1)
        self.check("python3 -c 'import os; print(sorted(map(int, os.listdir(\"/proc/self/fd\"))))'", "[0, 1, 2, 3, 7]\n")

    def test_session_end_runs_the_exit_trap(self):
        self.check("trap 'echo bye >end' EXIT")
        os.close(self.sh.request)
        self.sh.request = os.open("/dev/null", os.O_WRONLY)
        with self.assertRaises(Lost):
            self.sh.read_reply()
        with open(os.path.join(self.sh.home, "end")) as file:
            self.assertEqual(file.read(), "bye\n")


class Text(Case):
    def test_odd_texts(self):
        self.check("echo a\\\nb", "ab\n")
        self.check("echo ünï → 🙂", "ünï → 🙂\n")
        self.check("echo a # c", "a\n")
        self.check("  \n\n")
        self.check(b"echo a\r\n", "a\r\n")

    def test_a_megabyte(self):
        begin = time.monotonic()
        self.check("x='" + "y" * (1 << 20) + "'; echo ${#x}", "1048576\n")
        self.check(": comment line of a program\n" * 40000 + "echo end", "end\n")
        self.assertLess(time.monotonic() - begin, 5)


class Briefs(Case):
    def held(self, *given):
        return {it.pop("name"): it for it in self.sh.brief(*given)["variables"]}

    def test_a_new_shell_holds_nothing(self):
        brief = self.sh.brief("PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + self.sh.home, "LANG=C.UTF-8")
        self.assertEqual(brief, {"variables": [], "total": 0, "partial": False, "set": [], "unset": []})

    def test_variables_have_a_type_and_a_length(self):
        self.sh.run("x=hello; declare -i n=7; a=(1 2 3); declare -A m=([k]=v); declare -a s=([9]=1); declare -n r=x; readonly ro=1; declare u")
        held = self.held()
        self.assertEqual(held["x"], {"type": "string", "shape": "5"})
        self.assertEqual(held["n"], {"type": "integer", "value": "7"})
        self.assertEqual(held["a"], {"type": "array", "shape": "3"})
        self.assertEqual(held["m"], {"type": "map", "shape": "1"})
        self.assertEqual(held["s"], {"type": "array", "shape": "1"})
        self.assertEqual(held["r"], {"type": "nameref"})
        self.assertEqual(held["ro"], {"type": "string", "shape": "1"})
        self.assertNotIn("u", held)

    def test_the_environment_is_told_by_name(self):
        self.sh.run("export SECRET=hush PATH=/else; unset LANG; mine=1")
        brief = self.sh.brief("PATH=/usr/bin", "HOME=" + self.sh.home, "LANG=C.UTF-8")
        self.assertEqual((brief["set"], brief["unset"]), (["PATH", "SECRET"], ["LANG"]))
        self.assertNotIn("hush", json.dumps(brief))

    def test_odd_values_stay_out_of_the_reply(self):
        self.sh.run("x='a\"b'; declare -i x; y=$'\\n\\\\'; IFS=abc; long=$(printf '%070d' 1); printf -v \"n$long\" 1; z=1; declare -n loop=loop 2>/dev/null")
        held = self.held()
        self.assertEqual(held["x"], {"type": "integer", "value": ""})
        self.assertEqual(held["y"], {"type": "string", "shape": "2"})
        self.assertIn(("n" + "%070d" % 1)[:60], held)
        self.assertEqual(self.sh.run("echo ${#IFS}").out, "3\n")

    def test_many_are_counted(self):
        self.sh.run("for ((i = 0; i < 500; i++)); do printf -v v$i 1; done; unset i")
        brief = self.sh.brief("PATH=/usr/local/bin:/usr/bin:/bin", "HOME=" + self.sh.home, "LANG=C.UTF-8")
        self.assertEqual(len(brief["variables"]), 40)
        self.assertTrue(brief["total"] == 500 or brief["partial"], brief)

    def test_so_many_that_listing_takes_long(self):
        self.sh.run("for ((i = 0; i < 9000; i++)); do printf -v a$i 1; done; unset i")
        brief = self.sh.brief()
        self.assertTrue(brief["partial"] and len(brief["variables"]) == 40 and brief["total"] <= 9100, brief["total"])
        self.assertEqual(self.sh.run("echo $a1").out, "1\n")

    def test_nothing_changes(self):
        self.sh.run("RANDOM=1; x=1; sleep 100 & job=$!; trap 'echo child' CHLD; trap 'echo err' ERR; false")
        before = self.sh.run('echo "$?" "$!" "$_" "$x" "$-"; set -- a "b c"; RANDOM=5')
        self.sh.brief()
        self.sh.run("(exit 3)")
        self.sh.brief()
        after = self.sh.run('echo $?; [[ $! == "$job" ]] && echo same; echo "$#:$2"; echo $RANDOM')
        self.assertEqual(after.err, "")
        status, same, arguments, random = after.out.split("\n")[:4]
        self.assertEqual((status, same, arguments), ("3", "same", "2:b c"))
        self.assertEqual(random, self.sh.run("RANDOM=5; echo $RANDOM").out.strip())
        self.assertIn("1", before.out)
        self.sh.run("kill $job")

    def test_a_shell_that_is_about_to_be_renewed_tells_too(self):
        self.sh.run("x=1; exit 3")
        self.assertEqual(self.held()["x"], {"type": "string", "shape": "1"})
        self.assertEqual(self.sh.run("echo $x $?").out, "1 3\n")
        self.assertIn("x", self.held())

    def test_functions_in_the_place_of_builtins(self):
        self.sh.run("local() { echo no; }; printf() { echo no; }; mapfile() { echo no; }; x=1")
        self.assertIn("x", self.held())

    def test_an_interrupt_meanwhile_does_nothing(self):
        self.sh.run("x=1")
        os.kill(self.sh.pid, signal.SIGINT)
        self.assertIn("x", self.held())
        self.assertEqual(self.sh.run("echo $x").out, "1\n")


class Speed(Case):
    def test_a_warm_call_costs_little(self):
        self.check(":")
        rounds = []
        for _ in range(2000):
            begin = time.perf_counter()
            self.sh.number += 1
            self.sh.write(LINE % (self.sh.number, os.path.join(self.sh.dir, "code")))
            self.sh.read_reply()
            rounds.append(time.perf_counter() - begin)
        rounds.sort()
        print(f"\nwarm call: best {rounds[0] * 1e6:.0f} µs, median {rounds[1000] * 1e6:.0f} µs", flush=True)
        self.assertLess(rounds[0], 0.002)


if __name__ == "__main__":
    unittest.main()
