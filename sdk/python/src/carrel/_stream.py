"""The thread of a stream through broken connections: what has been seen, and how the rest is asked for.

Nothing here does I/O. A [Follow] is told every message and every break; it says what is new, and gives the request that
goes on after the last message that was handed out. So no byte is lost, and none comes twice.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any, Callable, Optional, Tuple

from ._build import Params, Request, get, sandbox_path
from ._errors import CarrelError, ConnectionLost, from_problem
from ._sse import Message

# The daemon sends a comment every 15 s; four that did not come mean that nobody is there.
STREAM_SILENCE = 60.0
FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0


class Patience:
    """How long to go on trying without a new message; a daemon that is restarted is back well within it."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since: Optional[float] = None
        self._pause = FIRST_PAUSE

    def progress(self) -> None:
        self._since = None
        self._pause = FIRST_PAUSE

    def pause(self, broke: BaseException, at_least: Optional[float] = None) -> float:
        """Seconds to wait before the next attempt; raises once it has been too long."""
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since > self._seconds:
            if isinstance(broke, CarrelError):
                raise broke
            raise ConnectionLost(
                f"the stream broke and could not be taken up again within {self._seconds:g} s: {broke}",
                hint="what runs goes on in the daemon; sandbox.attach(EXEC) follows it once that can be reached again",
            ) from broke
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        return max(pause, at_least or 0.0)


class Follow:
    """A stream that can be taken up again. `ended` once nothing more comes."""

    def __init__(self, first: Request) -> None:
        self.request = replace(first, read_timeout=STREAM_SILENCE)
        self.ended = False
        self.last_id: Optional[str] = None

    def began(self, at: Optional[str]) -> None:
        """The daemon answers, from there on: what a stream that breaks before its first event is taken up with."""
        if self.last_id is None:
            self.last_id = at

    def take(self, message: Message) -> bool:
        """Whether the message is new to the caller."""
        if message.id is not None:
            self.last_id = message.id
        return True

    def broken(self, clean: bool, by: BaseException) -> None:
        """The connection ended before the stream did; `clean`: by the daemon, in order."""
        if self.last_id is not None:
            self.request = self.request.with_headers(Last_Event_ID=self.last_id)


class FollowExec(Follow):
    """The events of one run or exec. Begins with the POST of a run, or with a GET of an exec's stream."""

    def __init__(self, first: Request) -> None:
        super().__init__(first)
        self._where: Optional[Tuple[str, str]] = None
        self._last_chunk = -1
        self._problem: Optional[Any] = None

    @staticmethod
    def of(sandbox: str, exec: str, since: Optional[int] = None) -> FollowExec:
        request = get(sandbox_path(sandbox, "execs", exec, "stream"), [("since", since)])
        followed = FollowExec(request.with_headers(Accept="text/event-stream"))
        followed._where = (sandbox, exec)
        return followed

    def take(self, message: Message) -> bool:
        super().take(message)
        if message.event == "start":
            value = message.json()
            # A stream that was taken up starts anew; the caller has heard that already.
            known, self._where = self._where is not None, (str(value["sandbox"]), str(value["exec"]))
            return not known
        if message.event in ("stdout", "stderr", "result"):
            chunk = message.json().get("chunk")
            if isinstance(chunk, int):
                if chunk <= self._last_chunk:
                    return False
                self._last_chunk = chunk
        elif message.event == "error":
            # Told again by the stream that is taken up; the caller hears of it through the end, or as an exception.
            self._problem = message.json()
            return False
        elif message.event == "end":
            self.ended = True
        return True

    def broken(self, clean: bool, by: BaseException) -> None:
        if self._problem is not None and clean:
            raise from_problem(self._problem)
        if self._where is None:
            raise ConnectionLost(
                "the connection broke before the daemon said that it took the call: it may have run or not",
                hint="sandbox.execs() lists what ran",
            ) from by
        sandbox, exec = self._where
        if self.request.method != "GET":
            request = get(sandbox_path(sandbox, "execs", exec, "stream"))
            self.request = replace(request, headers={"Accept": "text/event-stream"}, read_timeout=STREAM_SILENCE)
        self._problem = None
        super().broken(clean, by)


def follow_events(sandbox: Optional[str], key: Optional[str], kind: Optional[str], since: Optional[int]) -> Follow:
    params = [("sandbox", sandbox), ("key", key), ("kind", kind), ("since", since)]
    return Follow(get("/v1/events", params).with_headers(Accept="text/event-stream"))


def follow_changes(sandbox: str, path: str, recursive: bool) -> Follow:
    params: Params = [("path", path), ("recursive", recursive)]
    request = get(sandbox_path(sandbox, "files", "watch"), params)
    return Follow(request.with_headers(Accept="text/event-stream"))
