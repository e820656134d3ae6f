"""Output: bytes as the API writes them, text out of pieces, and a bounded memory of a stream."""

from __future__ import annotations

import base64
import binascii
import codecs
import os
from collections import deque
from dataclasses import dataclass
from typing import Any, Deque, Dict, List

from ._errors import ProtocolError

# What is kept of a stream unless asked otherwise; the daemon's own default for replies.
DEFAULT_MAX_OUTPUT = 1024 * 1024


def to_bytes(value: Any) -> bytes:
    """BYTES of the API: a string where they are UTF-8, else `{"base64": …}`."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    if isinstance(value, dict) and isinstance(value.get("base64"), str):
        try:
            return base64.b64decode(value["base64"], validate=True)
        except binascii.Error as error:
            raise ProtocolError(f"bytes that are not base64: {error}") from error
    raise ProtocolError(f"bytes are a string or base64, not {type(value).__name__}")


def from_bytes(data: bytes) -> Any:
    """The reverse: what a request carries."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode("ascii")}


def to_name(value: Any) -> str:
    """A file's name; one that is not UTF-8 comes as Python's own functions would give it."""
    return value if isinstance(value, str) else os.fsdecode(to_bytes(value))


class TextDecoder:
    """UTF-8 in pieces: a character that is cut in two arrives whole, with the second piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        return self._decoder.decode(data)

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


@dataclass(frozen=True)
class Output:
    """One stream of a call. `omitted` bytes are missing between `head` and `tail`; most often that is none."""

    head: bytes = b""
    tail: bytes = b""
    omitted: int = 0

    @property
    def data(self) -> bytes:
        """All of it; what was left out is named in its place."""
        if not self.omitted:
            return self.head + self.tail
        return self.head + f"\n[… {self.omitted} bytes left out …]\n".encode() + self.tail

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")

    @staticmethod
    def parse(value: Any) -> Output:
        if isinstance(value, dict) and "omitted_bytes" in value:
            return Output(to_bytes(value["head"]), to_bytes(value["tail"]), int(value["omitted_bytes"]))
        return Output(to_bytes(value))


class Collector:
    """Keeps at most `limit` bytes of a stream, half from its start and half from its end, and counts the rest.

    Pieces come with their offset; where it jumps, the daemon itself had not kept what is between.
    """

    def __init__(self, limit: int = DEFAULT_MAX_OUTPUT) -> None:
        self._head_room = limit - limit // 2
        self._tail_room = limit // 2
        self._head: List[bytes] = []
        self._tail: Deque[bytes] = deque()
        self._tail_size = 0
        self._omitted = 0
        self._next = 0

    def add(self, data: bytes, offset: int) -> int:
        """Returns how many bytes are missing before `data`."""
        missing = max(0, offset - self._next)
        self._next = offset + len(data)
        if missing:
            # Bytes on both sides of a hole cannot be one head: what comes now is tail.
            self._head_room = 0
            self._omitted += missing + self._tail_size
            self._tail.clear()
            self._tail_size = 0
        if self._head_room:
            kept = data[: self._head_room]
            self._head.append(kept)
            self._head_room -= len(kept)
            data = data[len(kept) :]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
        while self._tail_size > self._tail_room:
            first = self._tail.popleft()
            cut = min(len(first), self._tail_size - self._tail_room)
            self._tail_size -= cut
            self._omitted += cut
            if cut < len(first):
                self._tail.appendleft(first[cut:])
        return missing

    def output(self) -> Output:
        return Output(b"".join(self._head), b"".join(self._tail), self._omitted)


class Streams:
    """The collectors and decoders of one call's stdout and stderr."""

    def __init__(self, limit: int) -> None:
        self._collectors: Dict[str, Collector] = {"stdout": Collector(limit), "stderr": Collector(limit)}
        self._decoders: Dict[str, TextDecoder] = {"stdout": TextDecoder(), "stderr": TextDecoder()}

    def add(self, stream: str, data: bytes, offset: int) -> str:
        """Text that is complete now."""
        self._collectors[stream].add(data, offset)
        return self._decoders[stream].feed(data)

    def finish(self, stream: str) -> str:
        return self._decoders[stream].finish()

    def output(self, stream: str) -> Output:
        return self._collectors[stream].output()
