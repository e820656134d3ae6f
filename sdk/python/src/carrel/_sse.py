"""Server-sent events out of bytes.

Knows nothing of connections: it is fed pieces as they arrive, cut anywhere (inside a character, between CR and LF), and
gives whole messages. What is not closed by an empty line when a connection ends is dropped, as the standard wants it:
the next connection brings it again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, List, Optional

from ._errors import ProtocolError

# One message is at most one chunk of output (the daemon's are far smaller) in base64; more than this is not our server.
MAX_MESSAGE = 64 * 1024 * 1024


@dataclass(frozen=True)
class Message:
    """One event: its name, its data as text, and the id that resumes after it (None: it has none of its own)."""

    event: str
    data: str
    id: Optional[str] = None

    def json(self) -> Any:
        try:
            return json.loads(self.data)
        except ValueError as error:
            raise ProtocolError(f"event `{self.event}` is not JSON: {error}") from error


class Parser:
    """Feed it bytes; it keeps what is not complete."""

    def __init__(self) -> None:
        # Pieces of the line that is not finished, joined once: a long line in small pieces stays linear.
        self._partial: List[bytes] = []
        self._size = 0
        self._after_cr = False
        self._first_line = True
        self._event = ""
        self._data: List[str] = []
        self._id: Optional[str] = None

    def feed(self, piece: bytes) -> List[Message]:
        if self._after_cr and piece:
            # The LF of a CRLF that was cut in two belongs to the line that ended.
            if piece[:1] == b"\n":
                piece = piece[1:]
            self._after_cr = False
        messages: List[Message] = []
        start = 0
        length = len(piece)
        # Looked up once per kind of line end: a stream without CR never searches for one twice.
        cr = piece.find(b"\r")
        lf = piece.find(b"\n")
        while cr >= 0 or lf >= 0:
            if cr < 0 or 0 <= lf < cr:
                end, following = lf, lf + 1
            else:
                end, following = cr, cr + 1
                if following == length:
                    self._after_cr = True
                elif piece[following : following + 1] == b"\n":
                    following += 1
            self._partial.append(piece[start:end])
            self._line(b"".join(self._partial), messages)
            self._partial.clear()
            start = following
            if 0 <= cr < start:
                cr = piece.find(b"\r", start)
            if 0 <= lf < start:
                lf = piece.find(b"\n", start)
        if start < length:
            self._partial.append(piece[start:])
            self._grow(length - start)
        return messages

    def _grow(self, by: int) -> None:
        self._size += by
        if self._size > MAX_MESSAGE:
            raise ProtocolError(f"an event of more than {MAX_MESSAGE} bytes")

    def _line(self, line: bytes, messages: List[Message]) -> None:
        if self._first_line:
            self._first_line = False
            line = line[3:] if line.startswith(b"\xef\xbb\xbf") else line
        if not line:
            if self._data:
                messages.append(Message(self._event or "message", "\n".join(self._data), self._id))
            self._event, self._data, self._id, self._size = "", [], None, 0
            return
        if line.startswith(b":"):
            return
        name, _, value = line.partition(b":")
        # Lines are whole here, so no character is cut.
        text = (value[1:] if value.startswith(b" ") else value).decode("utf-8", "replace")
        if name == b"data":
            self._grow(len(line))
            self._data.append(text)
        elif name == b"event":
            self._event = text
        elif name == b"id" and "\0" not in text:
            self._id = text
