"""A daemon without sockets: answers from a function, and breaks its answers where it is told to."""

from __future__ import annotations

import json
from typing import Any, AsyncIterator, Callable, Iterator, List, Optional, Union

import httpx


class Breaking(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Pieces, and then an error in place of the end (None: none)."""

    def __init__(self, pieces: List[bytes], error: Optional[Exception]) -> None:
        self._pieces = pieces
        self._error = error

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


def broken(body: bytes, after: int, size: int = 7) -> httpx.Response:
    """An event stream that breaks after so many bytes, in pieces of `size`."""
    sent = body[:after]
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
    error = httpx.ReadError("cut") if after < len(body) else None
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Breaking(pieces, error))


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    content = json.dumps({"status": status, "code": code, "detail": code, "session_state": "none"}).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers={"content-type": "application/problem+json", **named}, content=content)


Answer = Union[httpx.Response, Exception]


class Daemon(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Remembers what it was asked."""

    def __init__(self, answer: Callable[[httpx.Request, int], Answer]) -> None:
        self._answer = answer
        self.asked: List[httpx.Request] = []

    def _reply(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        answer = self._answer(request, len(self.asked))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._reply(request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self._reply(request)


def event(name: str, data: Any, id: Optional[str] = None) -> bytes:
    head = f"id: {id}\n" if id else ""
    return f"{head}event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


SANDBOX = {"id": "sbx_1", "key": "user:local:x", "name": "x", "state": "running"}
END = {
    "sandbox": "sbx_1",
    "session": "default",
    "exec": "ex_1",
    "exit_code": 0,
    "cause": "exit",
    "session_state": "preserved",
}
START = event("start", {"sandbox": "sbx_1", "session": "default", "exec": "ex_1"})


class Output:
    """A run's events; taken up after any chunk as the contract says."""

    def __init__(self, pieces: List[Any]) -> None:
        offset = 0
        self.chunks: List[bytes] = []
        for number, piece in enumerate(pieces):
            value = {"chunk": number, "offset": offset, "data": piece}
            self.chunks.append(event("stdout", value, f"sbx_1/ex_1/{number}"))
            offset += len(piece.encode()) if isinstance(piece, str) else 1
        number = len(pieces)
        shown = {"chunk": number, "kind": "result", "mime": {"text/plain": "42"}}
        self.chunks.append(event("result", shown, f"sbx_1/ex_1/{number}"))

    def stream(self, request: httpx.Request) -> bytes:
        last = request.headers.get("last-event-id")
        since = 0 if last is None else int(last.rpartition("/")[2]) + 1
        return START + b": keep\n\n" + b"".join(self.chunks[since:]) + event("receipt", {}) + event("end", END)
