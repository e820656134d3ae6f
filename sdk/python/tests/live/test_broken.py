"""Connections that break at random bytes, and a daemon that is killed: nothing is lost, nothing comes twice."""

import hashlib
import os
from pathlib import Path
from typing import Iterator, List

import pytest
from daemon import BreakingProxy, Daemon

import carrel

# Written in pieces of about a kB, and not text. A stream is taken up after a whole chunk, and a chunk is what the daemon read at
# once: up to 256 kB, a third more in base64. So connections bring at most MOST bytes, and most often more than one chunk.
SIZE = 2_000_000
MOST = 600_000
PRODUCER = """
import os, random
chance = random.Random(7)
left = {size}
while left:
    piece = chance.randbytes(min(left, chance.randrange(1, 2000)))
    left -= len(piece)
    while piece:
        piece = piece[os.write(1, piece):]
"""


@pytest.fixture
def wanted(operator: carrel.Carrel) -> bytes:
    result = operator.run(PRODUCER.format(size=SIZE), env="python", max_output=2 * SIZE).check()
    assert len(result.stdout_bytes) == SIZE
    return result.stdout_bytes


@pytest.mark.parametrize("seed", range(3))
def test_an_exec_through_a_breaking_proxy(daemon: Daemon, token: str, wanted: bytes, seed: int) -> None:
    with BreakingProxy(daemon.url, seed, 1, MOST) as proxy, carrel.Carrel(daemon.url, token) as straight:
        with straight.sandbox() as sandbox, carrel.Carrel(proxy.url, token) as client:
            started = sandbox.exec(["python3", "-c", PRODUCER.format(size=SIZE)])
            exec = carrel.Exec(client._http, sandbox.id, started.id)
            taken = bytearray()
            for chunk in exec:
                assert (chunk.offset, chunk.missing) == (len(taken), 0)
                taken += chunk.data
            assert bytes(taken) == wanted
            assert exec.wait().ok
        assert proxy.cuts > 2


@pytest.mark.anyio
async def test_an_exec_through_a_breaking_proxy_async(daemon: Daemon, token: str, wanted: bytes) -> None:
    with BreakingProxy(daemon.url, 11, 1, MOST) as proxy:
        async with carrel.AsyncCarrel(daemon.url, token) as straight, await straight.sandbox() as sandbox:
            started = await sandbox.exec(["python3", "-c", PRODUCER.format(size=SIZE)])
            async with carrel.AsyncCarrel(proxy.url, token) as client:
                exec = carrel.AsyncExec(client._http, sandbox.id, started.id)
                assert b"".join([chunk.data async for chunk in exec]) == wanted
        assert proxy.cuts > 2


def test_a_run_through_a_breaking_proxy(daemon: Daemon, token: str, wanted: bytes) -> None:
    # The first bytes come through: before the daemon has said that it took a run there is nothing to take up.
    with BreakingProxy(daemon.url, 5, 4096, MOST) as proxy, carrel.Carrel(proxy.url, token) as client:
        heard: List[str] = []
        code = PRODUCER.format(size=SIZE) + "\n42"
        result = client.run(code, env="python", sandbox="breaking", on_stdout=heard.append, max_output=2 * SIZE)
        assert result.stdout_bytes == wanted
        assert "".join(heard) == result.stdout
        assert result.text == "42"
        assert proxy.cuts > 2
    with carrel.Carrel(daemon.url, token) as straight:
        straight.sandbox("breaking").close()


def test_creations_happen_once(daemon: Daemon, token: str) -> None:
    # Few answers come through whole; every sandbox is made all the same, and only once.
    with BreakingProxy(daemon.url, 3, 1, 2000) as proxy, carrel.Carrel(proxy.url, token, retries=30) as client:
        made = [client.sandbox(labels={"made": "once"}).id for _ in range(8)]
        assert proxy.cuts > 2
    with carrel.Carrel(daemon.url, token) as straight:
        there = straight.sandboxes.list(labels={"made": "once"})
        for sandbox in there:
            sandbox.close()
    assert sorted(made) == sorted(sandbox.id for sandbox in there)


def test_runs_happen_once(daemon: Daemon, token: str) -> None:
    with carrel.Carrel(daemon.url, token) as straight, straight.sandbox() as sandbox:
        sandbox.run("n = 0", env="python").check()
        with BreakingProxy(daemon.url, 9, 1, 1500) as proxy, carrel.Carrel(proxy.url, token, retries=30) as client:
            through = carrel.Sandbox(client._http, sandbox.info)
            for wanted in range(1, 9):
                assert through.run("n += 1; n", env="python", idempotency_key=f"{sandbox.id}-{wanted}").text == str(
                    wanted
                )
            assert proxy.cuts > 2


def test_a_download_through_a_breaking_proxy(daemon: Daemon, token: str, tmp_path: Path) -> None:
    content = os.urandom(2_000_000)
    with carrel.Carrel(daemon.url, token) as straight, straight.sandbox() as sandbox:
        sandbox.files.write("large", content)
        with BreakingProxy(daemon.url, 2, 1000, 300_000) as proxy, carrel.Carrel(proxy.url, token) as client:
            files = carrel.Files(client._http, sandbox.id)
            files.download("large", tmp_path / "large")
            assert proxy.cuts > 2
    assert hashlib.sha256((tmp_path / "large").read_bytes()).digest() == hashlib.sha256(content).digest()


@pytest.fixture
def mortal() -> Iterator[Daemon]:
    one = Daemon(tcp=False)
    one.start()
    yield one
    one.stop()


def test_a_daemon_that_is_killed_while_it_streams(mortal: Daemon) -> None:
    with carrel.Carrel(socket=mortal.socket) as client:
        sandbox = client.sandbox("survivor")
        exec = sandbox.exec(["bash", "-c", "for n in {1..20}; do echo $n; read; done"], stdin=True)
        seen: List[str] = []
        for chunk in exec:
            seen += chunk.text.split()
            if len(seen) in (5, 10):
                mortal.kill()
                mortal.start()
            exec.stdin.write("\n")
        assert seen == [str(n) for n in range(1, 21)]
        assert exec.wait().ok
        sandbox.run("x = 1", env="python").check()
        mortal.kill()
        mortal.start()
        assert sandbox.run("x", env="python").text == "1"
