"""How a call ended: what the API answers to a run or an exec, as values.

Readers are tolerant: fields may be added by a newer daemon. `raw` keeps the whole object where that is likely to matter.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from ._errors import CarrelError, RunFailed, from_problem
from ._output import Output, to_bytes

Json = Dict[str, Any]


@dataclass(frozen=True)
class FileChanges:
    """What changed below /workspace during a call. Names are capped, counts are exact."""

    added: List[str] = field(default_factory=list)
    changed: List[str] = field(default_factory=list)
    removed: List[str] = field(default_factory=list)
    added_count: int = 0
    changed_count: int = 0
    removed_count: int = 0
    complete: bool = False
    reason: Optional[str] = None
    shared: bool = False

    @staticmethod
    def parse(value: Optional[Json]) -> FileChanges:
        known = {name: it for name, it in (value or {}).items() if name in FileChanges.__dataclass_fields__}
        return FileChanges(**known)


@dataclass(frozen=True)
class Receipt:
    """What a call used and did."""

    duration_us: int = 0
    cpu_us: int = 0
    peak_memory: int = 0
    processes: int = 0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    output_dropped: int = 0
    exit_code: int = 0
    cause: Optional[str] = None
    files: FileChanges = field(default_factory=FileChanges)
    running: List[Mapping[str, Any]] = field(default_factory=list)
    ports: List[Mapping[str, Any]] = field(default_factory=list)
    hosts: Mapping[str, List[str]] = field(default_factory=dict)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def parse(value: Optional[Json]) -> Receipt:
        value = value or {}
        figures = {
            name: int(value.get(name) or 0) for name, it in Receipt.__dataclass_fields__.items() if it.type == "int"
        }
        return Receipt(
            **figures,
            cause=value.get("cause"),
            files=FileChanges.parse(value.get("files")),
            running=list(value.get("running") or []),
            ports=list(value.get("ports") or []),
            hosts=dict(value.get("hosts") or {}),
            raw=value,
        )


@dataclass(frozen=True)
class CodeException:
    """An exception of the code that ran, in short; the traceback is in `stderr`."""

    name: str
    message: str

    @staticmethod
    def parse(value: Optional[Json]) -> Optional[CodeException]:
        return CodeException(str(value.get("name", "")), str(value.get("message", ""))) if value else None

    def __str__(self) -> str:
        return f"{self.name}: {self.message}" if self.message else self.name


@dataclass(frozen=True)
class Image:
    mime: str
    data: bytes = field(repr=False)

    def save(self, path: Union[str, os.PathLike[str]]) -> Path:
        target = Path(path)
        target.write_bytes(self.data)
        return target


@dataclass(frozen=True)
class Display:
    """A value that was shown, in every form it offers. `kind`: `result` (the last expression's) or `display`."""

    kind: str
    mime: Mapping[str, Any]

    @staticmethod
    def parse(value: Json) -> Display:
        return Display(str(value.get("kind", "result")), dict(value.get("mime") or {}))

    @property
    def text(self) -> Optional[str]:
        text = self.mime.get("text/plain")
        return text if isinstance(text, str) else None

    @property
    def images(self) -> List[Image]:
        return [Image(mime, _image(mime, value)) for mime, value in self.mime.items() if mime.startswith("image/")]


def _image(mime: str, value: Any) -> bytes:
    # Binary forms are base64, as in Jupyter; SVG is text.
    if isinstance(value, str) and "svg" in mime:
        return value.encode()
    return base64.b64decode(value) if isinstance(value, str) else to_bytes(value)


@dataclass(frozen=True)
class Outcome:
    """How a run or exec ended."""

    exec: str
    exit_code: int
    cause: str
    session_state: str
    signal: Optional[int]
    exception: Optional[CodeException]
    error: Optional[CarrelError]
    receipt: Receipt
    transactional: Optional[bool] = None
    transactional_reason: Optional[str] = None
    taken_back: Optional[int] = None
    # With `rolled_back`: whether files went back too ("restored") or not ("kept"), and why not.
    files_state: Optional[str] = None
    files_reason: Optional[str] = None

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.cause == "exit" and self.error is None

    @staticmethod
    def parse(value: Json) -> Outcome:
        problem = value.get("problem") or value.get("error")
        return Outcome(
            exec=str(value.get("exec", "")),
            exit_code=int(value["exit_code"]),
            cause=str(value.get("cause", "exit")),
            session_state=str(value.get("session_state", "none")),
            signal=value.get("signal"),
            exception=CodeException.parse(value.get("exception")),
            error=from_problem(problem) if problem else None,
            receipt=Receipt.parse(value.get("receipt")),
            transactional=value.get("transactional"),
            transactional_reason=value.get("transactional_reason"),
            taken_back=value.get("taken_back"),
            files_state=value.get("files_state"),
            files_reason=value.get("files_reason"),
        )


@dataclass(frozen=True)
class Result:
    """A run or exec that has ended, with its output."""

    sandbox: str
    session: str
    exec: str
    environment: Optional[str]
    language: Optional[str]
    exit_code: int
    cause: str
    session_state: str
    out: Output
    err: Output
    results: Tuple[Display, ...]
    exception: Optional[CodeException]
    error: Optional[CarrelError]
    receipt: Receipt
    note: Optional[str]
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # Whether a call that takes the interpreter down leaves the session as before; None where undo is off.
    transactional: Optional[bool] = None
    transactional_reason: Optional[str] = None
    # With `rolled_back`: how many calls were taken back, this one included.
    taken_back: Optional[int] = None
    # With `rolled_back`: whether files went back too ("restored") or not ("kept"), and why not.
    files_state: Optional[str] = None
    files_reason: Optional[str] = None

    @staticmethod
    def parse(
        value: Json,
        out: Optional[Output] = None,
        err: Optional[Output] = None,
        results: Optional[List[Display]] = None,
    ) -> Result:
        """Of a reply; of the `end` of a stream, which comes without the output, with what was collected."""
        problem = value.get("error") or value.get("problem")
        if results is None:
            results = [Display.parse(one) for one in value.get("results") or []]
        return Result(
            sandbox=str(value.get("sandbox", "")),
            session=str(value.get("session", "")),
            exec=str(value.get("exec", "")),
            environment=value.get("environment"),
            language=value.get("language"),
            exit_code=int(value["exit_code"]),
            cause=str(value.get("cause", "exit")),
            session_state=str(value.get("session_state", "none")),
            out=Output.parse(value.get("stdout", "")) if out is None else out,
            err=Output.parse(value.get("stderr", "")) if err is None else err,
            results=tuple(results),
            exception=CodeException.parse(value.get("exception")),
            error=from_problem(problem) if problem else None,
            receipt=Receipt.parse(value.get("receipt")),
            note=value.get("note"),
            raw=value,
            transactional=value.get("transactional"),
            transactional_reason=value.get("transactional_reason"),
            taken_back=value.get("taken_back"),
            files_state=value.get("files_state"),
            files_reason=value.get("files_reason"),
        )

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.cause == "exit" and self.error is None

    @property
    def stdout(self) -> str:
        """As text; bytes that are not UTF-8 become U+FFFD. What was left out is named in its place."""
        return self.out.text

    @property
    def stderr(self) -> str:
        return self.err.text

    @property
    def stdout_bytes(self) -> bytes:
        return self.out.data

    @property
    def stderr_bytes(self) -> bytes:
        return self.err.data

    @property
    def text(self) -> Optional[str]:
        """The value of the last expression as text; None if there was none."""
        for shown in reversed(self.results):
            if shown.kind == "result" and shown.text is not None:
                return shown.text
        return None

    @property
    def images(self) -> List[Image]:
        return [image for shown in self.results for image in shown.images]

    @property
    def png(self) -> Optional[bytes]:
        """The last PNG that was shown; None if there was none."""
        found = [image.data for image in self.images if image.mime == "image/png"]
        return found[-1] if found else None

    def check(self) -> Result:
        """Itself if all went well, else [RunFailed]."""
        if self.ok:
            return self
        if self.error is not None:
            raise RunFailed(self.error.message, self, code=self.error.code, hint=self.error.hint) from self.error
        if self.exception is not None:
            raise RunFailed(str(self.exception), self)
        what = f"exit code {self.exit_code}" if self.cause == "exit" else f"ended by {self.cause}"
        last = self.stderr.rstrip().rpartition("\n")[2]
        raise RunFailed(f"{what}: {last}" if last else what, self)


@dataclass(frozen=True)
class Chunk:
    """A piece of output. `missing` bytes before it were not kept by the daemon; `text` is what is complete of it as UTF-8."""

    stream: str
    data: bytes
    text: str
    offset: int
    number: int
    missing: int = 0


@dataclass(frozen=True)
class OutputPage:
    """Output of an exec from some chunk on; go on with `read(since=page.next)`."""

    chunks: List[Chunk]
    next: int
    running: bool
    outcome: Optional[Outcome]


@dataclass(frozen=True)
class ExecInfo:
    exec: str
    session: str
    argv: Optional[List[str]]
    language: Optional[str]
    running: bool
    started_unix_ms: int
    outcome: Optional[Outcome]

    @staticmethod
    def parse(value: Json) -> ExecInfo:
        what = value.get("what") or {}
        outcome = value.get("outcome")
        return ExecInfo(
            exec=str(value["exec"]),
            session=str(value.get("session", "")),
            argv=what["exec"].get("argv") if "exec" in what else None,
            language=what["run"].get("language") if "run" in what else None,
            running=bool(value.get("running")),
            started_unix_ms=int(value.get("started_unix_ms") or 0),
            outcome=Outcome.parse(outcome) if outcome else None,
        )
