"""What the API answers with, as values.

Readers are tolerant: fields may be added by a newer daemon. `raw` keeps the whole object where that is likely to matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Mapping, Optional, TypedDict

from ._output import to_name
from ._result import Json


class Limits(TypedDict, total=False):
    """Limits of a sandbox: sizes in bytes, `cpu_millis` 2000 is two CPUs."""

    cpu_millis: int
    memory: int
    pids: int
    disk: int
    output: int
    execs: int


class Quota(TypedDict, total=False):
    """What a token may use in all; `rate` is calls per second."""

    sandboxes: int
    cpu_millis: int
    memory: int
    disk: int
    rate: float


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox as the daemon described it last."""

    id: str
    key: Optional[str]
    name: Optional[str]
    state: str
    environment: Optional[str]
    isolation: Optional[str]
    labels: Mapping[str, str]
    limits: Limits
    enforced: Mapping[str, Any]
    idle_timeout_seconds: Optional[float]
    max_lifetime_seconds: Optional[float]
    undo_calls: Optional[int]
    created_unix_ms: int
    used_unix_ms: int
    close_at_unix_ms: Optional[int]
    created: Optional[bool]
    note: Optional[str]
    standby_after_seconds: Optional[float] = None
    hibernate_after_seconds: Optional[float] = None
    image_bytes: Optional[int] = None
    standby_reason: Optional[str] = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def parse(value: Json) -> SandboxInfo:
        limits: Limits = value.get("limits") or {}
        return SandboxInfo(
            id=str(value["id"]),
            key=value.get("key"),
            name=value.get("name"),
            state=str(value.get("state", "")),
            environment=value.get("environment"),
            isolation=value.get("isolation"),
            labels=dict(value.get("labels") or {}),
            limits=limits,
            enforced=dict(value.get("enforced") or {}),
            idle_timeout_seconds=value.get("idle_timeout_seconds"),
            max_lifetime_seconds=value.get("max_lifetime_seconds"),
            undo_calls=value.get("undo_calls"),
            created_unix_ms=int(value.get("created_unix_ms") or 0),
            used_unix_ms=int(value.get("used_unix_ms") or 0),
            close_at_unix_ms=value.get("close_at_unix_ms"),
            created=value.get("created"),
            note=value.get("note"),
            standby_after_seconds=value.get("standby_after_seconds"),
            hibernate_after_seconds=value.get("hibernate_after_seconds"),
            image_bytes=value.get("image_bytes"),
            standby_reason=value.get("standby_reason"),
            raw=value,
        )


@dataclass(frozen=True)
class Snapshot:
    """A saved sandbox. Without `memory` it has only files, and `reason` says why."""

    id: str
    sandbox: str
    key: Optional[str]
    parent: Optional[str]
    tags: List[str]
    made_unix_ms: int
    bytes: int
    memory: bool
    reason: Optional[str]
    environment: Optional[str]

    @staticmethod
    def parse(value: Json) -> Snapshot:
        return Snapshot(
            id=str(value["id"]),
            sandbox=str(value["sandbox"]),
            key=value.get("key"),
            parent=value.get("parent"),
            tags=list(value.get("tags") or []),
            made_unix_ms=int(value.get("made_unix_ms") or 0),
            bytes=int(value.get("bytes") or 0),
            memory=bool(value.get("memory")),
            reason=value.get("reason"),
            environment=value.get("environment"),
        )


@dataclass(frozen=True)
class ComparedFile:
    path: str
    kind: str
    size: int


@dataclass(frozen=True)
class ComparedFiles:
    """`count` is of all of them, `files` has the first 1000."""

    count: int
    files: List[ComparedFile]

    @staticmethod
    def parse(value: Json) -> ComparedFiles:
        files = [ComparedFile(str(one["path"]), str(one["kind"]), int(one["size"])) for one in value.get("files") or []]
        return ComparedFiles(int(value.get("count") or 0), files)


@dataclass(frozen=True)
class Diff:
    """What has become of files."""

    added: ComparedFiles
    changed: ComparedFiles
    removed: ComparedFiles

    @staticmethod
    def parse(value: Json) -> Diff:
        return Diff(*(ComparedFiles.parse(value[name]) for name in ("added", "changed", "removed")))


@dataclass(frozen=True)
class ForkCost:
    """What a fork took: its time after the copy, and what it holds of its own on disk and in memory."""

    duration_ms: int
    disk_bytes: int
    memory_bytes: int

    @staticmethod
    def parse(value: Json) -> ForkCost:
        return ForkCost(int(value["duration_ms"]), int(value["disk_bytes"]), int(value["memory_bytes"]))


@dataclass(frozen=True)
class Metrics:
    memory: Optional[int]
    peak_memory: Optional[int]
    cpu_us: Optional[int]
    processes: Optional[int]
    disk_used: Optional[int]
    disk_limit: Optional[int]
    uptime_ms: Optional[int]
    idle_ms: Optional[int]
    running: Optional[int]

    @staticmethod
    def parse(value: Json) -> Metrics:
        return Metrics(**{name: value.get(name) for name in Metrics.__dataclass_fields__})


@dataclass(frozen=True)
class Brief:
    """Where a session stands. `text` is at most 1 KB, for a model; `data` has the same in fields."""

    text: str
    data: Mapping[str, Any]
    note: Optional[str]

    @staticmethod
    def parse(value: Json) -> Brief:
        return Brief(text=str(value.get("text") or ""), data=dict(value.get("brief") or {}), note=value.get("note"))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Undone:
    """What `undo` has brought. `calls` were taken back, `kept` more can be; `closed_handles` were open then and are not."""

    session: str
    language: str
    calls: int
    kept: int
    closed_handles: int
    # "restored": files are as before those calls; "kept": they are as the calls left them, and `files_reason` says why.
    files_state: str = "kept"
    files_reason: Optional[str] = None

    @staticmethod
    def parse(value: Json) -> Undone:
        return Undone(
            session=str(value.get("session", "")),
            language=str(value.get("language", "")),
            calls=int(value.get("calls") or 0),
            kept=int(value.get("kept") or 0),
            closed_handles=int(value.get("closed_handles") or 0),
            files_state=str(value.get("files_state") or "kept"),
            files_reason=value.get("files_reason"),
        )


@dataclass(frozen=True)
class SessionInfo:
    name: str
    cwd: Optional[str]
    env: Mapping[str, str]
    interpreters: List[str]
    opened_unix_ms: int

    @staticmethod
    def parse(value: Json) -> SessionInfo:
        return SessionInfo(
            name=str(value["name"]),
            cwd=value.get("cwd"),
            env=dict(value.get("env") or {}),
            interpreters=list(value.get("interpreters") or []),
            opened_unix_ms=int(value.get("opened_unix_ms") or 0),
        )


@dataclass(frozen=True)
class Port:
    port: int
    address: str

    @staticmethod
    def parse(value: Json) -> Port:
        return Port(int(value["port"]), str(value.get("address", "")))


@dataclass(frozen=True)
class Share:
    """A link that reaches one port and nothing else. `url` is None where the daemon is only to be had by a unix socket."""

    path: str
    url: Optional[str]
    expires_unix_ms: int


@dataclass(frozen=True)
class Environment:
    name: str
    source: str
    language: Optional[str]
    available: bool
    why: Optional[str]

    @staticmethod
    def parse(value: Json) -> Environment:
        return Environment(
            name=str(value["name"]),
            source=str(value.get("source", "")),
            language=value.get("language"),
            available=bool(value.get("available")),
            why=value.get("why"),
        )


@dataclass(frozen=True)
class Event:
    """Something that happened. `kind` is `gap` where some are no longer kept; `id` resumes after it."""

    id: Optional[str]
    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Closed:
    """What closing a scope did, or when it will be done."""

    closed: List[str]
    closing_at_unix_ms: Optional[int]

    @staticmethod
    def parse(value: Json) -> Closed:
        return Closed(list(value.get("closed") or []), value.get("closing_at_unix_ms"))


@dataclass(frozen=True)
class Token:
    """A token of the daemon. `token`, the secret itself, is there only in the answer to `create`."""

    id: str
    name: Optional[str]
    scope: List[str]
    quota: Mapping[str, Any]
    expires_unix_ms: Optional[int]
    token: Optional[str] = field(default=None, repr=False)
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def parse(value: Json) -> Token:
        return Token(
            id=str(value["id"]),
            name=value.get("name"),
            scope=list(value.get("scope") or []),
            quota=dict(value.get("quota") or {}),
            expires_unix_ms=value.get("expires_unix_ms"),
            token=value.get("token"),
            raw={name: one for name, one in value.items() if name != "token"},
        )


@dataclass(frozen=True)
class Whoami:
    """`token` is None for the operator."""

    token: Optional[Token]
    usage: Mapping[str, Any]

    @staticmethod
    def parse(value: Json) -> Whoami:
        token = value.get("token")
        return Whoami(Token.parse(token) if token else None, dict(value.get("usage") or {}))


@dataclass(frozen=True)
class Entry:
    """What is known of a file. `kind`: `file`, `dir`, `symlink`, `fifo`, `socket` or `device`."""

    name: str
    kind: str
    size: int
    mode: int
    mtime_ns: int
    target: Optional[str]
    etag: Optional[str] = None

    @staticmethod
    def parse(value: Json, etag: Optional[str] = None) -> Entry:
        target = value.get("target")
        return Entry(
            name=to_name(value["name"]),
            kind=str(value["kind"]),
            size=int(value.get("size") or 0),
            mode=int(value.get("mode") or 0),
            mtime_ns=int(value.get("mtime_ns") or 0),
            target=None if target is None else to_name(target),
            etag=etag,
        )

    @property
    def is_dir(self) -> bool:
        return self.kind == "dir"


@dataclass(frozen=True)
class Match:
    path: str
    line: Optional[int]
    text: Optional[str]


@dataclass(frozen=True)
class Found:
    """`complete` is False where a limit was reached; `skipped` counts files that were not looked into, by reason."""

    matches: List[Match]
    files_searched: int
    skipped: Mapping[str, int]
    complete: bool

    @staticmethod
    def parse(value: Json) -> Found:
        return Found(
            matches=[Match(to_name(one["path"]), one.get("line"), one.get("text")) for one in value["matches"]],
            files_searched=int(value.get("files_searched") or 0),
            skipped=dict(value.get("skipped") or {}),
            complete=bool(value.get("complete")),
        )


@dataclass(frozen=True)
class Replaced:
    """`files`: occurrences replaced, by path."""

    files: Mapping[str, int]
    count: int
    skipped: Mapping[str, int]
    complete: bool

    @staticmethod
    def parse(value: Json) -> Replaced:
        return Replaced(
            files={to_name(one["path"]): int(one["count"]) for one in value["files"]},
            count=int(value.get("count") or 0),
            skipped=dict(value.get("skipped") or {}),
            complete=bool(value.get("complete")),
        )


@dataclass(frozen=True)
class LeftOut:
    path: str
    why: str


@dataclass(frozen=True)
class Transferred:
    """What an upload or download moved, and what it left out and why."""

    files: int
    directories: int
    links: int
    bytes: int
    left_out: List[LeftOut]
    left_out_count: int

    @staticmethod
    def parse(value: Json) -> Transferred:
        left_out = [LeftOut(to_name(one["path"]), str(one["why"])) for one in value.get("left_out") or []]
        return Transferred(
            files=int(value.get("files") or 0),
            directories=int(value.get("directories") or 0),
            links=int(value.get("links") or 0),
            bytes=int(value.get("bytes") or 0),
            left_out=left_out,
            left_out_count=int(value.get("left_out_count") or len(left_out)),
        )


@dataclass(frozen=True)
class Change:
    """A change below a watched directory. `kind`: `created`, `changed`, `removed`, `moved`, or `overflow` where some were missed."""

    path: str
    kind: str
    origin: Optional[str] = None

    @staticmethod
    def parse(value: Json) -> Change:
        origin = value.get("from")
        return Change(to_name(value["path"]), str(value["kind"]), None if origin is None else to_name(origin))
