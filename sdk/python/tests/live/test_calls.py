"""Runs, execs and sessions, by the blocking client, through both doors."""

import base64
from typing import List

import pytest

import carrel

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


def test_state_stays_between_calls(sandbox: carrel.Sandbox) -> None:
    sandbox.run("x = 6 * 7", env="python").check()
    result = sandbox.run("print('so'); x", env="python")
    assert (result.text, result.stdout, result.stderr, result.ok) == ("42", "so\n", "", True)
    assert (result.sandbox, result.session, result.session_state) == (sandbox.id, "default", "preserved")
    assert result.receipt.duration_us > 0
    assert sandbox.run("echo $((6 * 7))", env="bash").stdout == "42\n"


def test_without_env_it_is_python(sandbox: carrel.Sandbox) -> None:
    assert sandbox.run("6 * 7").text == "42"


def test_what_the_code_does_wrong_is_in_the_result(sandbox: carrel.Sandbox) -> None:
    result = sandbox.run("1 / 0", env="python")
    assert not result.ok
    assert result.exit_code == 1
    assert result.exception is not None
    assert result.exception.name == "ZeroDivisionError"
    assert "Traceback" in result.stderr
    with pytest.raises(carrel.RunFailed, match="ZeroDivisionError"):
        result.check()


def test_a_timeout_keeps_the_state_and_says_so(sandbox: carrel.Sandbox) -> None:
    sandbox.run("kept = 1", env="python").check()
    result = sandbox.run("print('before', flush=True)\nwhile True: pass", env="python", timeout=1)
    assert (result.cause, result.exit_code, result.stdout) == ("timeout", 124, "before\n")
    assert result.session_state == "preserved"
    assert isinstance(result.error, carrel.Timeout)
    assert sandbox.run("kept", env="python").text == "1"


def test_streaming_callbacks(sandbox: carrel.Sandbox) -> None:
    out: List[str] = []
    err: List[str] = []
    shown: List[carrel.Display] = []
    code = f"""
import sys, os
for n in range(3):
    print(n, flush=True)
print("oops", file=sys.stderr, flush=True)
for byte in "🦀ü\\n".encode():
    os.write(1, bytes([byte]))
class Picture:
    def _repr_png_(self):
        import base64
        return base64.b64decode({PNG!r})
Picture()
"""
    result = sandbox.run(code, env="python", on_stdout=out.append, on_stderr=err.append, on_result=shown.append).check()
    assert "".join(out) == result.stdout == "0\n1\n2\n🦀ü\n"
    assert not any("\ufffd" in text for text in out)
    assert "".join(err) == result.stderr == "oops\n"
    assert result.png == base64.b64decode(PNG)
    assert [one.images[0].data for one in shown] == [result.png]
    assert result.exec


def test_a_streamed_run_that_fails(sandbox: carrel.Sandbox) -> None:
    result = sandbox.run("raise ValueError('no')", env="python", on_stderr=lambda text: None)
    assert result.exception == carrel.CodeException("ValueError", "no")
    late = sandbox.run("while True: pass", env="python", timeout=1, on_stdout=lambda text: None)
    assert late.cause == "timeout"


def test_bytes_that_are_no_text(sandbox: carrel.Sandbox) -> None:
    result = sandbox.run("import os; _ = os.write(1, bytes(range(256)))", env="python")
    assert result.stdout_bytes == bytes(range(256))
    heard: List[str] = []
    streamed = sandbox.run("_ = os.write(1, bytes(range(256)))", env="python", on_stdout=heard.append)
    assert streamed.stdout_bytes == bytes(range(256))
    assert "".join(heard) == streamed.stdout


def test_long_output_is_cut_in_the_middle_and_counted(sandbox: carrel.Sandbox) -> None:
    code = "print('a' * 5000 + 'z' * 5000)"
    for options in ({}, {"on_stdout": lambda text: None}):
        result = sandbox.run(code, env="python", max_output=100, **options)  # type: ignore[arg-type]
        assert len(result.out.head) + len(result.out.tail) + result.out.omitted == 10001
        assert result.out.head.startswith(b"aaa")
        assert result.out.tail.endswith(b"z\n")
        assert "left out" in result.stdout


def test_one_off(client: carrel.Carrel) -> None:
    result = client.run("6 * 7", env="python")
    assert result.text == "42"
    heard: List[str] = []
    client.run("print('x')", env="python", on_stdout=heard.append).check()
    assert heard == ["x\n"]
    with pytest.raises(carrel.SandboxNotFound):
        client.sandboxes.get(result.sandbox)


def test_run_by_name(client: carrel.Carrel) -> None:
    first = client.run("x = 1", env="python", sandbox="by-name")
    assert client.run("x", env="python", sandbox="by-name").text == "1"
    client.sandboxes.get(first.sandbox).close()


def test_exec_streams(sandbox: carrel.Sandbox) -> None:
    exec = sandbox.exec(["bash", "-c", "echo out; echo err >&2; exit 3"])
    chunks = list(exec)
    assert {chunk.stream for chunk in chunks} == {"stdout", "stderr"}
    assert b"".join(chunk.data for chunk in chunks if chunk.stream == "stdout") == b"out\n"
    assert exec.outcome is not None
    assert exec.outcome.exit_code == 3
    # All of it again, from the start and as a whole.
    assert list(exec) == chunks
    result = exec.output()
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert exec.wait().exit_code == 3
    page = exec.read()
    assert not page.running
    assert [chunk.data for chunk in page.chunks] == [chunk.data for chunk in chunks]
    assert exec.read(since=page.next).chunks == []


def test_exec_with_input(sandbox: carrel.Sandbox) -> None:
    with sandbox.exec(["cat"], stdin=True) as exec:
        exec.stdin.write("grüße\n")
        for chunk in exec:
            assert chunk.text == "grüße\n"
            break
        exec.stdin.write(b"\xff\x00")
        exec.stdin.close()
        assert exec.output().stdout_bytes == "grüße\n".encode() + b"\xff\x00"
    assert sandbox.exec(["cat"], stdin="given").output().stdout == "given"
    assert sandbox.exec(["cat"], stdin=b"\xfe").output().stdout_bytes == b"\xfe"


def test_exec_env_and_cwd(sandbox: carrel.Sandbox) -> None:
    sandbox.files.mkdir("sub")
    result = sandbox.exec(["bash", "-c", "echo $WHO; pwd"], env={"WHO": "me"}, cwd="sub").output()
    assert result.stdout == "me\n/workspace/sub\n"


def test_wait_signal_kill_cancel(sandbox: carrel.Sandbox) -> None:
    sleeping = sandbox.exec(["sleep", "600"])
    with pytest.raises(carrel.Timeout):
        sleeping.wait(timeout=0.2)
    sleeping.signal("TERM")
    outcome = sleeping.wait()
    assert (outcome.cause, outcome.exit_code, outcome.signal) == ("signal", 143, 15)
    with pytest.raises(carrel.ExecEnded):
        sleeping.signal(15)
    sleeping.kill()
    killed = sandbox.exec(["sleep", "600"])
    killed.kill()
    assert killed.wait().exit_code == 137
    cancelled = sandbox.exec(["sleep", "600"])
    cancelled.cancel()
    assert cancelled.wait().cause == "cancelled"


def test_a_block_does_not_leave_its_command_behind(sandbox: carrel.Sandbox) -> None:
    with sandbox.exec(["sleep", "600"]) as exec:
        pass
    assert exec.wait().cause == "cancelled"


def test_exec_timeout(sandbox: carrel.Sandbox) -> None:
    assert sandbox.exec(["sleep", "600"], timeout=1).wait().cause == "timeout"


def test_a_terminal(sandbox: carrel.Sandbox) -> None:
    with sandbox.exec(["bash", "-c", "read line; stty size; echo $line"], pty=(24, 80)) as exec:
        exec.resize(30, 100)
        exec.stdin.write("typed\n")
        text = exec.output().stdout
    assert "30 100" in text
    assert "typed" in text


def test_no_such_command(sandbox: carrel.Sandbox) -> None:
    result = sandbox.exec(["no-such-command"]).output()
    assert isinstance(result.error, carrel.CommandNotFound)
    assert result.exit_code == 127
    with pytest.raises(carrel.RunFailed) as caught:
        result.check()
    assert caught.value.code == "command_not_found"


def test_execs_are_listed_and_found(sandbox: carrel.Sandbox) -> None:
    sandbox.run("1", env="python")
    exec = sandbox.exec(["true"])
    exec.wait()
    listed = sandbox.execs()
    assert [one.language for one in listed][:1] == ["python"]
    assert listed[-1].argv == ["true"]
    assert sandbox.attach(exec.id).info().outcome is not None
    with pytest.raises(carrel.ExecNotFound):
        sandbox.attach("ex_999").info()


def test_sessions(sandbox: carrel.Sandbox) -> None:
    sandbox.files.mkdir("src")
    build = sandbox.session("build", env={"MODE": "release"}, cwd="/workspace/src")
    assert build.run("echo $MODE; pwd", env="bash").stdout == "release\n/workspace/src\n"
    build.run("x = 1", env="python").check()
    assert sandbox.run("x", env="python").exception is not None
    build.set_env({"MODE": None, "OTHER": "1"})
    assert build.exec(["bash", "-c", "echo [$MODE] $OTHER"]).output().stdout == "[] 1\n"
    assert build.run("echo [$MODE] $OTHER", env="bash").stdout == "[] 1\n"
    again = sandbox.session("build", env={"THIRD": "3"})
    assert again.info.env["THIRD"] == "3"
    assert again.run("x", env="python").text == "1"
    with pytest.raises(carrel.SessionExists):
        sandbox.session("build", cwd="elsewhere")
    assert "build" in {session.name for session in sandbox.sessions()}
    build.delete()
    build.delete()
    with pytest.raises(carrel.SessionNotFound):
        build.refresh()
    with sandbox.session("short") as short:
        short.exec(["sleep", "600"])
    assert "short" not in {session.name for session in sandbox.sessions()}
