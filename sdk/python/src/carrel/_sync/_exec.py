# Made from _async/_exec.py by scripts/unasync: change it there.
"""A command that runs in a sandbox: its output as it comes, its input, its end."""

from __future__ import annotations

from types import TracebackType
from typing import Generator, Iterator, Dict, List, Optional, Type, Union

from .._build import get, post, sandbox_path
from .._errors import CarrelError, ExecEnded, NotFound, Timeout
from .._output import DEFAULT_MAX_OUTPUT, Collector, Streams, TextDecoder, to_bytes
from .._result import Chunk, Display, ExecInfo, Outcome, OutputPage, Result
from .._stream import FollowExec
from ._http import Http
from ._io import Callback, call, closing

# One question to the daemon; a wait is as many of them as it takes.
WAIT_STEP = 30.0


class Stdin:
    """The input of an exec that was started with `stdin=True` or with a terminal."""

    def __init__(self, http: Http, path: str) -> None:
        self._http = http
        self._path = path

    def write(self, data: Union[str, bytes]) -> None:
        """Returns once the command's input took all of it."""
        self._send(data.encode() if isinstance(data, str) else bytes(data), False)

    def close(self) -> None:
        """The command reads the end of its input; one that has ended already does not mind."""
        try:
            self._send(b"", True)
        except ExecEnded:
            pass

    def _send(self, data: bytes, close: bool) -> None:
        def body() -> Iterator[bytes]:
            yield data

        request = post(self._path, params=[("close", close)])
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(len(data))}
        self._http.reply(request.with_headers(**headers), body)


class Exec:
    """A running (or ended) command. Iterating gives its output from the start, also a second time, until it ends.

    As a context manager it does not leave the command behind: what still runs at the end of the block is cancelled.
    """

    def __init__(self, http: Http, sandbox: str, exec: str) -> None:
        self._http = http
        self.sandbox_id = sandbox
        self.id = exec
        self._path = sandbox_path(sandbox, "execs", exec)
        self.stdin = Stdin(http, self._path + "/stdin")
        self._outcome: Optional[Outcome] = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self.sandbox_id}>"

    @property
    def outcome(self) -> Optional[Outcome]:
        """How it ended, as far as this object has heard."""
        return self._outcome

    def __iter__(self) -> Iterator[Chunk]:
        with closing(self.stream()) as chunks:
            for chunk in chunks:
                yield chunk

    def stream(self, since: Optional[int] = None) -> Generator[Chunk, None, None]:
        """Output from chunk `since` on (the start), live until the command ends. A broken connection is taken up again."""
        collectors: Dict[str, Collector] = {"stdout": Collector(0), "stderr": Collector(0)}
        decoders: Dict[str, TextDecoder] = {"stdout": TextDecoder(), "stderr": TextDecoder()}
        fresh = set() if since is None else {"stdout", "stderr"}
        with closing(self._http.follow(FollowExec.of(self.sandbox_id, self.id, since))) as messages:
            for message in messages:
                if message.event in collectors:
                    value = message.json()
                    data, offset = to_bytes(value["data"]), int(value["offset"])
                    missing = collectors[message.event].add(data, offset)
                    if message.event in fresh:
                        # Where one begins in the middle, what came before is not missing.
                        fresh.discard(message.event)
                        missing = 0
                    text = decoders[message.event].feed(data)
                    yield Chunk(message.event, data, text, offset, int(value["chunk"]), missing)
                elif message.event == "end":
                    self._outcome = Outcome.parse(message.json())

    def wait(self, timeout: Optional[float] = None) -> Outcome:
        """Waits for the end. With a `timeout`, [Timeout] after so many seconds; the command goes on."""
        left = timeout
        while self._outcome is None:
            step = WAIT_STEP if left is None else max(0.0, min(left, WAIT_STEP))
            request = get(self._path + "/wait", [("timeout_seconds", step)])
            value = self._http.json(request, patient=True)
            if value.get("outcome") is not None:
                self._outcome = Outcome.parse(value["outcome"])
            elif left is not None:
                left -= step
                if left <= 0:
                    raise Timeout(f"{self.id} still runs after {timeout:g} s", session_state="preserved")
        return self._outcome

    def output(
        self,
        *,
        max_output: int = DEFAULT_MAX_OUTPUT,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
    ) -> Result:
        """Waits for the end and gives all of the output, at most `max_output` bytes of each stream."""
        result = collect(
            self._http, FollowExec.of(self.sandbox_id, self.id), max_output, on_stdout, on_stderr, None
        )
        self._outcome = Outcome.parse(dict(result.raw))
        return result

    def read(self, since: int = 0, max: Optional[int] = None, wait: Optional[float] = None) -> OutputPage:
        """Output that is there now, from chunk `since` on; `wait`: for so many seconds if there is none yet."""
        params = [("since", since), ("max", max), ("wait_seconds", wait)]
        value = self._http.json(get(self._path + "/output", params))
        decoders: Dict[str, TextDecoder] = {}
        chunks: List[Chunk] = []
        for one in value["chunks"]:
            data, stream = to_bytes(one["data"]), str(one["stream"])
            text = decoders.setdefault(stream, TextDecoder()).feed(data)
            chunks.append(Chunk(stream, data, text, int(one["offset"]), int(one["chunk"])))
        outcome = value.get("outcome")
        if outcome is not None:
            self._outcome = Outcome.parse(outcome)
        return OutputPage(chunks, int(value["next"]), bool(value["running"]), self._outcome)

    def info(self) -> ExecInfo:
        return ExecInfo.parse(self._http.json(get(self._path)))

    def signal(self, signal: Union[int, str]) -> None:
        """Sends a signal, by number or by name: `15`, `"TERM"`."""
        self._http.reply(post(self._path + "/signal", {"signal": signal}))

    def kill(self) -> None:
        """SIGKILL; one that has ended already does not mind."""
        try:
            self.signal("KILL")
        except ExecEnded:
            pass

    def cancel(self) -> None:
        """Interrupted, and killed if that does not help; one that has ended already does not mind."""
        try:
            self._http.reply(post(self._path + "/cancel", repeatable=True))
        except ExecEnded:
            pass

    def resize(self, rows: int, cols: int) -> None:
        """The size of its terminal."""
        self._http.reply(post(self._path + "/resize", {"rows": rows, "cols": cols}, repeatable=True))

    def __enter__(self) -> Exec:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        if self._outcome is not None:
            return
        try:
            self.cancel()
        except NotFound:
            pass
        except CarrelError:
            # What the block itself raised says more than that its cleaning up failed.
            if error is None:
                raise


def collect(
    http: Http,
    followed: FollowExec,
    max_output: int,
    on_stdout: Optional[Callback[str]],
    on_stderr: Optional[Callback[str]],
    on_result: Optional[Callback[Display]],
) -> Result:
    """Follows a run or exec to its end, telling of everything as it comes."""
    streams = Streams(max_output)
    told = {"stdout": on_stdout, "stderr": on_stderr}
    results: List[Display] = []
    end: Optional[Result] = None
    with closing(http.follow(followed)) as messages:
        for message in messages:
            if message.event in told:
                value = message.json()
                text = streams.add(message.event, to_bytes(value["data"]), int(value["offset"]))
                callback = told[message.event]
                if callback is not None and text:
                    call(callback, text)
            elif message.event == "result":
                shown = Display.parse(message.json())
                results.append(shown)
                if on_result is not None:
                    call(on_result, shown)
            elif message.event == "end":
                value = message.json()
                end = Result.parse(value, streams.output("stdout"), streams.output("stderr"), results)
    for stream, callback in told.items():
        rest = streams.finish(stream)
        if callback is not None and rest:
            call(callback, rest)
    # The stream ends with `end` or with an exception.
    assert end is not None
    return end
