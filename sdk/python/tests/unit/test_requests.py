"""What is sent, and what is sent again."""

import json
from pathlib import Path
from typing import Callable, List

import httpx
import pytest
from fake import SANDBOX, Answer, Breaking, Daemon, problem

import carrel

END = {"exec": "ex_1", "exit_code": 0, "cause": "exit", "session_state": "preserved", "stdout": "", "stderr": ""}
ENTRY = {"name": "a", "kind": "file", "size": 1, "mode": 420, "mtime_ns": 0}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carrel._stream.FIRST_PAUSE", 0.0)
    monkeypatch.setattr("carrel._sync._http.RETRY_PAUSE", 0.0)
    monkeypatch.setattr("carrel._async._http.RETRY_PAUSE", 0.0)


def client_of(daemon: Daemon) -> carrel.Carrel:
    return carrel.Carrel("http://localhost:1", "tok", transport=daemon)


def sandbox_of(daemon: Daemon) -> carrel.Sandbox:
    return carrel.Sandbox(client_of(daemon)._http, carrel.SandboxInfo.parse(SANDBOX))


def once_broken(value: object) -> Daemon:
    return Daemon(
        lambda _, number: httpx.RemoteProtocolError("cut") if number == 1 else httpx.Response(200, json=value)
    )


REPEATED: List[Callable[[Daemon], object]] = [
    lambda daemon: client_of(daemon).sandbox("x"),
    lambda daemon: client_of(daemon).sandbox(),
    lambda daemon: client_of(daemon).sandbox(workflow_run="r"),
    lambda daemon: client_of(daemon).sandbox(workflow_run="r", session="isolated"),
    lambda daemon: client_of(daemon).run("1", idempotency_key="k"),
    lambda daemon: sandbox_of(daemon).run("1", idempotency_key="k"),
    lambda daemon: sandbox_of(daemon).exec(["true"]),
    lambda daemon: sandbox_of(daemon).session("s"),
    lambda daemon: sandbox_of(daemon).update(labels={}),
    lambda daemon: sandbox_of(daemon).metrics(),
    lambda daemon: sandbox_of(daemon).close(),
    lambda daemon: sandbox_of(daemon).files.write("a", "b"),
    lambda daemon: sandbox_of(daemon).files.mkdir("a"),
    lambda daemon: sandbox_of(daemon).files.read("a"),
    lambda daemon: sandbox_of(daemon).attach("ex_1").cancel(),
]
ANYTHING = {**SANDBOX, **END, **ENTRY, "name": "x"}


@pytest.mark.parametrize("call", REPEATED)
def test_what_may_be_repeated_is(call: Callable[[Daemon], object]) -> None:
    daemon = once_broken(ANYTHING)
    call(daemon)
    first, second = daemon.asked
    assert first.content == second.content
    assert first.url == second.url
    key = first.headers.get("idempotency-key")
    assert key == second.headers.get("idempotency-key")
    made = first.url.path.endswith(("/execs", "/run")) or first.content in (
        b"{}",
        b'{"workflow_run":"r","session":"isolated"}',
    )
    assert bool(key) == made


ONCE: List[Callable[[Daemon], object]] = [
    lambda daemon: sandbox_of(daemon).files.write("a", "b", append=True),
    lambda daemon: sandbox_of(daemon).files.write("a", "b", overwrite=False),
    lambda daemon: sandbox_of(daemon).files.write("a", "b", if_match='"1"'),
    lambda daemon: sandbox_of(daemon).files.move("a", "b"),
    lambda daemon: sandbox_of(daemon).files.delete("a"),
    lambda daemon: sandbox_of(daemon).files.replace("a", "b", "c"),
    lambda daemon: sandbox_of(daemon).attach("ex_1").signal("TERM"),
    lambda daemon: sandbox_of(daemon).attach("ex_1").stdin.write("x"),
]


@pytest.mark.parametrize("call", ONCE)
def test_what_must_not_be_repeated_is_not(call: Callable[[Daemon], object]) -> None:
    daemon = once_broken(ANYTHING)
    with pytest.raises(carrel.ConnectionLost):
        call(daemon)
    assert len(daemon.asked) == 1


@pytest.mark.parametrize("call", ONCE)
def test_what_never_got_a_connection_may_always_be_tried_again(call: Callable[[Daemon], object]) -> None:
    value = {**ANYTHING, "removed": 1, "files": [], "count": 0}
    daemon = Daemon(lambda _, n: httpx.ConnectError("no") if n < 4 else httpx.Response(200, json=value))
    call(daemon)
    assert len(daemon.asked) == 4


def test_retries_end() -> None:
    daemon = Daemon(lambda request, number: httpx.ReadError("cut"))
    with pytest.raises(carrel.ConnectionLost):
        sandbox_of(daemon).metrics()
    assert len(daemon.asked) == 5


def test_a_first_request_that_is_still_under_way_is_waited_for() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        busy = {"code": "in_progress", "detail": "this very request is still under way"}
        between: List[Answer] = [httpx.ReadError("cut"), httpx.Response(409, json=busy), httpx.Response(409, json=busy)]
        return between[number - 1] if number <= 3 else httpx.Response(201, json=SANDBOX)

    daemon = Daemon(answer)
    assert client_of(daemon).sandbox().id == "sbx_1"
    assert len({request.headers["idempotency-key"] for request in daemon.asked}) == 1


def test_a_conflict_of_its_own_is_raised() -> None:
    daemon = Daemon(lambda request, number: problem(409, "conflict"))
    with pytest.raises(carrel.Conflict):
        client_of(daemon).sandbox()
    assert len(daemon.asked) == 1


def test_a_key_and_callbacks_exclude_each_other() -> None:
    with pytest.raises(carrel.InvalidArgument):
        client_of(once_broken({})).run("1", idempotency_key="k", on_stdout=print)


def test_whole_seconds_are_whole() -> None:
    daemon = Daemon(lambda request, number: httpx.Response(201, json=SANDBOX))
    client_of(daemon).sandbox(idle_timeout=900.0)
    assert daemon.asked[0].content == b'{"idle_timeout_seconds":900}'


def test_silence_is_a_timeout_and_not_tried_again() -> None:
    daemon = Daemon(lambda request, number: httpx.ReadTimeout("silence"))
    with pytest.raises(carrel.Timeout):
        sandbox_of(daemon).metrics()
    assert len(daemon.asked) == 1


def test_refusals_are_not_repeated() -> None:
    daemon = Daemon(lambda request, number: problem(429, "rate_limited", retry_after="7"))
    with pytest.raises(carrel.RateLimited) as caught:
        client_of(daemon).sandbox("x")
    assert caught.value.retry_after == 7.0
    assert len(daemon.asked) == 1


def test_only_what_was_given_is_sent() -> None:
    daemon = Daemon(lambda request, number: httpx.Response(201, json=SANDBOX))
    client = client_of(daemon)
    client.sandbox("a", limits={"memory": 1}, idle_timeout=0)
    client.sandbox(key="workflow:r:n")
    client.sandbox(workflow_run="r", session="isolated")
    client.sandbox(spec={"mode": "code"})
    client.sandbox()
    assert [json.loads(request.content) for request in daemon.asked] == [
        {"name": "a", "limits": {"memory": 1}, "idle_timeout_seconds": 0},
        {"key": "workflow:r:n"},
        {"workflow_run": "r", "session": "isolated"},
        {"spec": {"mode": "code"}},
        {},
    ]
    keys = [request.headers.get("idempotency-key") for request in daemon.asked]
    assert keys[:2] == [None, None]
    assert len(set(keys[2:])) == 3
    assert daemon.asked[0].headers["authorization"] == "Bearer tok"


def test_paths_cannot_leave_their_place() -> None:
    daemon = Daemon(lambda request, number: httpx.Response(200, json=ANYTHING))
    sandbox = sandbox_of(daemon)
    sandbox.attach("../../sbx_2").info()
    assert daemon.asked[0].url.raw_path == b"/v1/sandboxes/sbx_1/execs/..%2F..%2Fsbx_2"
    sandbox.files.stat("a b/ü&path=/etc?#\udcff")
    assert b"path=a%20b%2F%C3%BC%26path%3D%2Fetc%3F%23%FF&" in daemon.asked[1].url.raw_path
    with pytest.raises(carrel.InvalidArgument):
        sandbox.attach("..")
    for path in ("/../../files", "a/./b", ".."):
        with pytest.raises(carrel.InvalidArgument):
            sandbox.ports.request(80, path)
    with pytest.raises(carrel.InvalidArgument):
        sandbox.ports.request(0)


def test_a_command_is_no_string() -> None:
    with pytest.raises(carrel.InvalidArgument, match="list of words"):
        sandbox_of(once_broken({})).exec("ls -l")


def test_lists_are_read_to_their_end() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        after = request.url.params.get("after")
        start = int(after or 0)
        items = [{**SANDBOX, "id": f"sbx_{n}"} for n in range(start, start + 2)]
        return httpx.Response(200, json={"items": items, "next": str(start + 2) if start < 4 else None})

    daemon = Daemon(answer)
    found = client_of(daemon).sandboxes.list(prefix="user:", labels={"a": "1", "b": "x y"})
    assert [sandbox.id for sandbox in found] == [f"sbx_{n}" for n in range(6)]
    assert daemon.asked[0].url.params.get_list("label") == ["a=1", "b=x y"]


def test_a_closed_sandbox_may_be_closed_again() -> None:
    sandbox_of(Daemon(lambda request, number: problem(404, "sandbox_not_found"))).close()


def test_what_the_block_raised_is_what_is_raised() -> None:
    with pytest.raises(KeyError), sandbox_of(Daemon(lambda request, number: problem(500, "internal"))):
        raise KeyError
    with pytest.raises(carrel.ServerError), sandbox_of(Daemon(lambda request, number: problem(500, "internal"))):
        pass


def test_a_download_goes_on_where_it_broke(tmp_path: Path) -> None:
    content = bytes(range(256)) * 40

    def answer(request: httpx.Request, number: int) -> Answer:
        if request.url.path.endswith("/stat"):
            return httpx.Response(200, json={**ENTRY, "size": len(content)})
        first = int(request.headers.get("range", "bytes=0-")[6:-1])
        assert (request.headers.get("if-range") == '"v1"') == bool(first)
        rest = content[first:]
        part, error = (rest[:1000], httpx.ReadError("cut")) if len(rest) > 1000 else (rest, None)
        headers = {"etag": '"v1"'}
        return httpx.Response(206 if first else 200, headers=headers, stream=Breaking([part], error))

    daemon = Daemon(answer)
    target = tmp_path / "copy"
    assert sandbox_of(daemon).files.download("a", target).bytes == len(content)
    assert target.read_bytes() == content
    assert list(tmp_path.iterdir()) == [target]


def test_a_download_of_a_file_that_changed_starts_again(tmp_path: Path) -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        if request.url.path.endswith("/stat"):
            return httpx.Response(200, json=ENTRY)
        if number == 2:
            return httpx.Response(200, headers={"etag": "1"}, stream=Breaking([b"old" * 99], httpx.ReadError("cut")))
        return httpx.Response(200, headers={"etag": "2"}, content=b"new")

    sandbox_of(Daemon(answer)).files.download("a", tmp_path)
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_download_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")

    def answer(request: httpx.Request, number: int) -> Answer:
        return httpx.Response(200, json=ENTRY) if number == 1 else problem(404, "not_found")

    with pytest.raises(carrel.NotFound):
        sandbox_of(Daemon(answer)).files.download("a", tmp_path / "a")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_port_answers_for_itself() -> None:
    own = {"content-type": "application/problem+json"}
    app = sandbox_of(Daemon(lambda request, number: httpx.Response(404, headers=own, content=b'{"title": "mine"}')))
    assert app.ports.request(80, "/missing").status_code == 404
    closed = sandbox_of(Daemon(lambda request, number: problem(502, "port_closed")))
    with pytest.raises(carrel.PortClosed):
        closed.ports.request(80)


def test_an_answer_that_is_no_daemons() -> None:
    for body in (b"<html>", b"[]"):
        daemon = Daemon(lambda request, number, body=body: httpx.Response(200, content=body))  # type: ignore[misc]
        with pytest.raises(carrel.ProtocolError):
            client_of(daemon).whoami()
