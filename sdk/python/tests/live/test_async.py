"""The same by the async client; its logic is the blocking one's source, so here it is breadth and concurrency."""

import asyncio
import os
from pathlib import Path
from typing import List

import pytest
from daemon import Daemon

import carrel

pytestmark = pytest.mark.anyio


async def test_runs(asandbox: carrel.AsyncSandbox) -> None:
    await asandbox.run("x = 6 * 7", env="python")
    heard: List[str] = []

    async def hear(text: str) -> None:
        await asyncio.sleep(0)
        heard.append(text)

    result = await asandbox.run("print('so', flush=True); x", env="python", on_stdout=hear)
    assert (result.text, heard) == ("42", ["so\n"])
    failed = await asandbox.run("1 / 0", env="python")
    with pytest.raises(carrel.RunFailed):
        failed.check()


async def test_execs(asandbox: carrel.AsyncSandbox) -> None:
    exec = await asandbox.exec(["cat"], stdin=True)
    await exec.stdin.write("one\n")
    async for chunk in exec:
        assert chunk.text == "one\n"
        break
    await exec.stdin.close()
    assert (await exec.wait()).ok
    assert [chunk.data async for chunk in exec] == [b"one\n"]
    async with await asandbox.exec(["sleep", "600"]) as sleeping:
        await sleeping.signal("TERM")
        assert (await sleeping.wait()).exit_code == 143
    assert (await (await asandbox.exec(["echo", "x"])).output()).stdout == "x\n"


async def test_many_at_once(asandbox: carrel.AsyncSandbox) -> None:
    async def echo(n: int) -> str:
        return (await (await asandbox.exec(["echo", str(n)])).output()).stdout

    assert await asyncio.gather(*(echo(n) for n in range(12))) == [f"{n}\n" for n in range(12)]


async def test_sessions(asandbox: carrel.AsyncSandbox) -> None:
    async with await asandbox.session("build", env={"A": "1"}) as build:
        await build.set_env({"B": "2"})
        assert (await build.run("echo $A$B", env="bash")).stdout == "12\n"


async def test_files(asandbox: carrel.AsyncSandbox, tmp_path: Path) -> None:
    await asandbox.files.write("a/b.txt", "x")
    assert await asandbox.files.read_text("a/b.txt") == "x"
    assert [entry.name for entry in await asandbox.files.list("a")] == ["b.txt"]
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "large").write_bytes(os.urandom(2_000_000))
    assert (await asandbox.files.upload(tmp_path / "up", "up")).files == 1
    await asandbox.files.upload(tmp_path / "up" / "large", "single")
    await asandbox.files.download("up", tmp_path / "down")
    await asandbox.files.download("single", tmp_path / "single")
    wanted = (tmp_path / "up" / "large").read_bytes()
    assert (tmp_path / "down" / "large").read_bytes() == wanted == (tmp_path / "single").read_bytes()


async def test_watch(asandbox: carrel.AsyncSandbox) -> None:
    async with await asandbox.files.watch() as changes:
        writing = asyncio.ensure_future(asandbox.files.write("new", "x"))
        async for change in changes:
            if change.path.endswith("new"):
                break
        await writing


async def test_ports(asandbox: carrel.AsyncSandbox) -> None:
    async with await asandbox.exec(["python3", "-m", "http.server", "8000"]):
        await asandbox.ports.wait(8000)
        assert (await asandbox.ports.request(8000, "/")).status_code == 200


async def test_the_rest(aclient: carrel.AsyncCarrel, asandbox: carrel.AsyncSandbox) -> None:
    assert {one.id for one in await aclient.sandboxes.list()} >= {asandbox.id}
    assert any(environment.name == "python" for environment in await aclient.environments())
    assert (await aclient.run("6 * 7", env="python")).text == "42"
    assert (await aclient.whoami()).token is None
    async for event in aclient.events(since=0):
        assert event.id
        break


async def test_module_level(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CARREL_URL", raising=False)
    monkeypatch.setenv("CARREL_SOCKET", daemon.socket)
    async with await carrel.async_sandbox() as sandbox:
        assert (await sandbox.run("1 + 1", env="python")).text == "2"


async def test_cancelling_a_task_does_not_end_the_run(asandbox: carrel.AsyncSandbox) -> None:
    started = asyncio.Event()

    def note(text: str) -> None:
        started.set()

    code = "import time\nprint('go', flush=True)\ntime.sleep(1)\ndone = True"
    task = asyncio.ensure_future(asandbox.run(code, env="python", on_stdout=note))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await asandbox.run("done", env="python")).text == "True"
