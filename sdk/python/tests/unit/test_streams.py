"""Streams whose connection breaks: cut at every byte, nothing is lost and nothing comes twice."""

from typing import List

import httpx
import pytest
from fake import END, SANDBOX, START, Answer, Daemon, Output, broken, event, problem

import carrel
from carrel import _stream

# 🦀 is cut in the middle by the daemon, as a pipe would; each half is base64 then.
CRAB = [{"base64": "8A=="}, {"base64": "nw=="}, {"base64": "pg=="}, {"base64": "gA=="}]
RUN = Output(["one\n", *CRAB, "grüße\n", "data: x\n\nid: 9\n"])
TEXT = "one\n🦀grüße\ndata: x\n\nid: 9\n"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stream, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(_stream, "LONGEST_PAUSE", 0.0)
    monkeypatch.setattr("carrel._sync._http.RETRY_PAUSE", 0.0)
    monkeypatch.setattr("carrel._async._http.RETRY_PAUSE", 0.0)


def answering(after: int, breaks: int = 1) -> Daemon:
    """Every one of the first `breaks` connections breaks `after` bytes, or as much later as a start takes."""

    def answer(request: httpx.Request, number: int) -> Answer:
        if request.url.path == "/v1/sandboxes":
            return httpx.Response(201, json=SANDBOX)
        body = RUN.stream(request)
        return broken(body, after if number <= breaks + 1 else len(body))

    return Daemon(answer)


WHOLE = len(RUN.stream(httpx.Request("GET", "http://x")))


def test_run_cut_at_every_byte() -> None:
    for after in range(len(START), WHOLE):
        daemon = answering(after)
        with carrel.Carrel("http://localhost:1", transport=daemon) as client:
            heard: List[str] = []
            shown: List[carrel.Display] = []
            result = client.sandbox("x").run("x", on_stdout=heard.append, on_result=shown.append)
        assert "".join(heard) == TEXT == result.stdout, after
        assert [one.text for one in shown] == ["42"] == [one.text for one in result.results], after
        assert "🦀" in "".join(heard)
        assert [request.method for request in daemon.asked[1:]] == ["POST", "GET"]
        assert daemon.asked[2].url.path == "/v1/sandboxes/sbx_1/execs/ex_1/stream"


@pytest.mark.anyio
async def test_async_run_cut_at_every_byte() -> None:
    for after in range(len(START), WHOLE):
        async with carrel.AsyncCarrel("http://localhost:1", transport=answering(after)) as client:
            heard: List[str] = []

            async def hear(text: str, heard: List[str] = heard) -> None:
                heard.append(text)

            result = await (await client.sandbox("x")).run("x", on_stdout=hear)
        assert "".join(heard) == TEXT == result.stdout, after


def test_exec_iteration_cut_at_every_byte_again_and_again() -> None:
    longest = max(len(chunk) for chunk in RUN.chunks)
    # As long as one chunk fits, there is progress.
    for after in range(len(START) + len(b": keep\n\n") + longest, WHOLE):
        with carrel.Carrel("http://localhost:1", transport=answering(after, breaks=1000)) as client:
            exec = client.sandbox("x").attach("ex_1")
            # The end itself is longer than what is let through: it never comes when all else did.
            chunks: List[carrel.Chunk] = []
            wanted = 7
            for chunk in exec:
                chunks.append(chunk)
                if len(chunks) == wanted:
                    break
        assert "".join(chunk.text for chunk in chunks) == TEXT, after
        assert b"".join(chunk.data for chunk in chunks) == TEXT.encode()
        assert [chunk.number for chunk in chunks] == list(range(wanted))
        assert not any(chunk.missing for chunk in chunks)


@pytest.mark.anyio
async def test_async_exec_iteration() -> None:
    for after in range(0, WHOLE, 13):
        async with carrel.AsyncCarrel("http://localhost:1", transport=answering(after)) as client:
            exec = (await client.sandbox("x")).attach("ex_1")
            assert "".join([chunk.text async for chunk in exec]) == TEXT
            assert exec.outcome is not None
            assert exec.outcome.ok


def test_a_daemon_that_repeats_chunks_is_not_believed() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        body = RUN.stream(httpx.Request("GET", "http://x"))
        return broken(body, 400 if number == 1 else len(body))

    with carrel.Carrel("http://localhost:1", transport=Daemon(answer)) as client:
        heard: List[str] = []
        assert client.run("x", on_stdout=heard.append).stdout == TEXT == "".join(heard)


def test_a_break_before_the_start_is_an_error_that_says_so() -> None:
    for after in range(len(START)):
        daemon = Daemon(lambda request, number, after=after: broken(RUN.stream(request), after))  # type: ignore[misc]
        with carrel.Carrel("http://localhost:1", transport=daemon) as client:
            with pytest.raises(carrel.ConnectionLost, match="may have run or not"):
                client.run("x", on_stdout=print)
        assert len(daemon.asked) == 1


def test_a_run_that_never_got_a_connection_is_sent_again() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        return httpx.ConnectError("refused") if number < 3 else broken(RUN.stream(request), WHOLE)

    with carrel.Carrel("http://localhost:1", transport=Daemon(answer)) as client:
        assert client.run("x", on_stdout=lambda text: None).stdout == TEXT


def test_refusals_while_the_daemon_is_restarted() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        between: List[Answer] = [
            broken(RUN.stream(request), 300),
            httpx.ConnectError("refused"),
            problem(503, "unavailable"),
            problem(429, "rate_limited", retry_after="0"),
            broken(RUN.stream(request), WHOLE),
        ]
        return between[number - 1]

    with carrel.Carrel("http://localhost:1", transport=Daemon(answer)) as client:
        assert client.run("x", on_stdout=lambda text: None).stdout == TEXT


def test_a_refusal_that_stays_is_raised() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        return broken(RUN.stream(request), 300) if number == 1 else problem(404, "exec_not_found")

    with carrel.Carrel("http://localhost:1", transport=Daemon(answer)) as client, pytest.raises(carrel.ExecNotFound):
        client.run("x", on_stdout=lambda text: None)


def test_patience_ends() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        return broken(RUN.stream(request), 300) if number == 1 else httpx.ReadError("again")

    with carrel.Carrel("http://localhost:1", transport=Daemon(answer), resume_for=0.01) as client:
        with pytest.raises(carrel.ConnectionLost, match="could not be taken up"):
            client.run("x", on_stdout=lambda text: None)


def test_an_error_without_an_end_is_raised_and_one_with_it_is_told() -> None:
    trouble = event("error", {"code": "agent_lost", "detail": "gone", "session_state": "lost"})
    alone = Daemon(lambda request, number: broken(START + trouble, 10000))
    with carrel.Carrel("http://localhost:1", transport=alone) as client, pytest.raises(carrel.AgentLost) as caught:
        client.run("x", on_stdout=print)
    assert caught.value.session_state == "lost"
    end = event("end", {**END, "exit_code": 124, "cause": "timeout", "error": {"code": "timeout", "message": "late"}})
    told = Daemon(lambda request, number: broken(START + trouble + end, 10000))
    with carrel.Carrel("http://localhost:1", transport=told) as client:
        result = client.run("x", on_stdout=print)
    assert isinstance(result.error, carrel.Timeout)


def test_a_callback_that_raises_ends_the_stream() -> None:
    def stop(text: str) -> None:
        raise KeyError(text)

    with carrel.Carrel("http://localhost:1", transport=answering(WHOLE)) as client, pytest.raises(KeyError):
        client.sandbox("x").run("x", on_stdout=stop)


def test_a_jump_is_told() -> None:
    jump = event("stdout", {"chunk": 5, "offset": 100, "data": "late"}, "sbx_1/ex_1/5")
    daemon = Daemon(lambda request, number: broken(START + jump + event("end", END), 10000))
    with carrel.Carrel("http://localhost:1", transport=daemon) as client:
        exec = carrel.Exec(client._http, "sbx_1", "ex_1")
        assert [(chunk.missing, chunk.text) for chunk in exec] == [(100, "late")]
        assert [chunk.missing for chunk in exec.stream(since=5)] == [0]
        result = exec.output()
        assert (result.out.omitted, result.out.tail) == (100, b"late")


def test_output_is_bounded() -> None:
    with carrel.Carrel("http://localhost:1", transport=answering(WHOLE)) as client:
        heard: List[str] = []
        result = client.sandbox("x").run("x", max_output=4, on_stdout=heard.append)
    assert "".join(heard) == TEXT
    assert (result.out.head, result.out.tail) == (b"on", b"9\n")
    assert result.out.omitted == len(TEXT.encode()) - 4


def events(request: httpx.Request) -> bytes:
    since = int(request.headers.get("last-event-id", 0))
    return b"".join(event("run.started", {"kind": "run.started", "n": n}, str(n)) for n in range(since + 1, 21))


def test_events_are_taken_up() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        return broken(events(request), 150)

    with carrel.Carrel("http://localhost:1", transport=Daemon(answer)) as client:
        found = []
        for one in client.events(kind="run."):
            found.append(one.data["n"])
            if len(found) == 20:
                break
    assert found == list(range(1, 21))


def test_events_are_taken_up_also_before_the_first() -> None:
    def answer(request: httpx.Request, number: int) -> Answer:
        if number == 1:
            return httpx.Response(
                200, headers={"content-type": "text/event-stream", "last-event-id": "7"}, content=b"id: 7\n\n"
            )
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events(request))

    daemon = Daemon(answer)
    with carrel.Carrel("http://localhost:1", transport=daemon) as client:
        assert next(iter(client.events(kind="run."))).data["n"] == 8
    assert "last-event-id" not in daemon.asked[0].headers
    assert daemon.asked[1].headers["last-event-id"] == "7"


def test_a_watch_that_was_taken_up_says_that_it_may_have_missed_some() -> None:
    body = event("ready", {}) + event("change", {"path": "a", "kind": "created"})
    daemon = Daemon(lambda request, number: broken(body + b" ", len(body)))
    with carrel.Carrel("http://localhost:1", transport=daemon) as client:
        with carrel.Sandbox(client._http, carrel.SandboxInfo.parse(SANDBOX)).files.watch() as changes:
            found = []
            for change in changes:
                found.append((change.kind, change.path))
                if len(found) == 3:
                    break
    assert found == [("created", "a"), ("overflow", ""), ("created", "a")]
