"""Requests of the API, built here once for both kinds of client; nothing in this file does I/O.

Invariant: `repeatable` is set only where the same request sent twice has the effect and the answer of one: a read, a write
of a whole value, or a creation with an Idempotency-Key.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union
from urllib.parse import quote

from ._errors import InvalidArgument
from ._models import Limits, Quota
from ._output import from_bytes
from ._result import Json

# A call takes an hour at the most; the daemon ends it then by itself.
LONGEST_CALL = 3600
# Fewer requests for long lists.
LARGEST_PAGE = 500
# What the reply of a call may take beyond its own time: queue, waking, the grace of a timeout, the way.
MARGIN = 60.0

KEY = "Idempotency-Key"

Params = Sequence[Tuple[str, Union[str, int, float, bool, None]]]


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    params: Params = ()
    json: Optional[Json] = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False
    # Seconds without a byte from the daemon after which the connection counts as dead; None: the client's own.
    read_timeout: Optional[float] = None

    @property
    def target(self) -> str:
        """Path and query. Names of files that are not UTF-8 are passed as the bytes they are."""
        query = "&".join(
            f"{name}={quote(_param(value), safe='', errors='surrogateescape')}"
            for name, value in self.params
            if value is not None
        )
        return f"{self.path}?{query}" if query else self.path

    def with_headers(self, **headers: str) -> Request:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return replace(self, headers={**self.headers, **named})


def _param(value: Union[str, int, float, bool, None]) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def segment(value: Union[str, int]) -> str:
    """One part of a path. Dots alone would be resolved away on the way."""
    text = str(value)
    if text in ("", ".", ".."):
        raise InvalidArgument(f"`{text}` names nothing")
    return quote(text, safe="")


def present(**fields: Any) -> Json:
    """Fields that were given. Whole numbers go as such: some of the daemon's seconds have no fractions."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in fields.items()
        if value is not None
    }


def get(path: str, params: Params = ()) -> Request:
    return Request("GET", path, params, repeatable=True)


def create(path: str, body: Json, key: Optional[str] = None) -> Request:
    """Makes something. The key lets it be sent again when a connection breaks: it is made once."""
    return Request("POST", path, json=body, headers={KEY: key or uuid.uuid4().hex}, repeatable=True)


def open_sandbox(body: Json) -> Request:
    """Finds or makes one. What has a name is found the second time; only what is always new needs a key for that."""
    named = any(name in body for name in ("name", "key")) or (
        any(name in body for name in ("workflow_run", "agent_run")) and body.get("session") != "isolated"
    )
    # A spec may say anything of that kind, too.
    return (
        post("/v1/sandboxes", body, repeatable=True) if named and "spec" not in body else create("/v1/sandboxes", body)
    )


def post(path: str, body: Optional[Json] = None, params: Params = (), repeatable: bool = False) -> Request:
    return Request("POST", path, params, json=body, repeatable=repeatable)


def patch(path: str, body: Json) -> Request:
    # Sets whole values, so that twice is as good as once.
    return Request("PATCH", path, json=body, repeatable=True)


def delete(path: str, params: Params = ()) -> Request:
    return Request("DELETE", path, params, repeatable=True)


def sandbox_path(sandbox: str, *rest: Union[str, int]) -> str:
    return "/".join(["/v1/sandboxes", segment(sandbox), *(segment(part) for part in rest)])


def sandbox_body(
    name: Optional[str],
    *,
    key: Optional[str],
    workflow_run: Optional[str],
    agent_run: Optional[str],
    session: Optional[str],
    env: Optional[str],
    labels: Optional[Mapping[str, str]],
    limits: Optional[Limits],
    idle_timeout: Optional[float],
    max_lifetime: Optional[float],
    spec: Optional[Union[str, Mapping[str, Any]]],
    standby_after: Optional[float] = None,
    hibernate_after: Optional[float] = None,
) -> Json:
    return present(
        name=name,
        key=key,
        workflow_run=workflow_run,
        agent_run=agent_run,
        session=session,
        environment=env,
        labels=None if labels is None else dict(labels),
        limits=None if limits is None else dict(limits),
        idle_timeout_seconds=idle_timeout,
        max_lifetime_seconds=max_lifetime,
        standby_after_seconds=standby_after,
        hibernate_after_seconds=hibernate_after,
        spec=spec,
    )


def run_streamed(path: str, body: Json) -> Request:
    return post(path, {**body, "stream": True}).with_headers(Accept="text/event-stream")


def run_once(path: str, body: Json, key: str) -> Request:
    """A run with one reply, which may be asked for again."""
    return replace(create(path, body, key), read_timeout=(body.get("timeout_seconds") or LONGEST_CALL) + MARGIN)


def run_body(
    code: str,
    *,
    env: Optional[str],
    session: Optional[str],
    timeout: Optional[float],
    max_output: Optional[int],
    cancel_on_disconnect: bool,
) -> Json:
    return present(
        code=code,
        environment=env,
        session=session,
        timeout_seconds=timeout,
        max_output=max_output,
        cancel_on_disconnect=True if cancel_on_disconnect else None,
    )


def exec_body(
    argv: Sequence[str],
    *,
    session: Optional[str],
    cwd: Optional[str],
    env: Optional[Mapping[str, str]],
    timeout: Optional[float],
    stdin: Union[bool, str, bytes],
    pty: Optional[Tuple[int, int]],
) -> Json:
    if isinstance(argv, (str, bytes)):
        raise InvalidArgument(
            "a command is a list of words, not one string",
            hint='write ["ls", "-l"], or ["bash", "-c", "ls | wc -l"] for a shell',
        )
    given: Any = stdin
    if isinstance(stdin, bytes):
        given = from_bytes(stdin)
    return present(
        argv=list(argv),
        session=session,
        cwd=cwd,
        env=None if env is None else dict(env),
        timeout_seconds=timeout,
        stdin=None if stdin is False else given,
        pty=None if pty is None else {"rows": pty[0], "cols": pty[1]},
        stream=True,
    )


def update_body(
    limits: Optional[Limits],
    labels: Optional[Mapping[str, str]],
    idle_timeout: Optional[float],
    max_lifetime: Optional[float],
    standby_after: Optional[float] = None,
    hibernate_after: Optional[float] = None,
) -> Json:
    return present(
        limits=None if limits is None else dict(limits),
        labels=None if labels is None else dict(labels),
        idle_timeout_seconds=idle_timeout,
        max_lifetime_seconds=max_lifetime,
        standby_after_seconds=standby_after,
        hibernate_after_seconds=hibernate_after,
    )


def list_sandboxes(
    key: Optional[str], prefix: Optional[str], state: Optional[str], labels: Optional[Mapping[str, str]]
) -> Request:
    params: List[Tuple[str, Optional[str]]] = [("key", key), ("prefix", prefix), ("state", state)]
    params += [("label", f"{name}={value}") for name, value in (labels or {}).items()]
    return get("/v1/sandboxes", params)


def page(request: Request, after: Optional[str], limit: int = LARGEST_PAGE) -> Request:
    return replace(request, params=[*request.params, ("limit", limit), ("after", after)])


def token_body(
    name: Optional[str], scope: Optional[Sequence[str]], quota: Optional[Quota], expires: Optional[float]
) -> Json:
    return present(
        name=name,
        scope=None if scope is None else list(scope),
        quota=None if quota is None else dict(quota),
        expires_seconds=expires,
    )


def write_file(
    path: str,
    *,
    parents: bool,
    overwrite: bool,
    append: bool,
    mode: Optional[int],
    if_match: Optional[str],
    if_none_match: Optional[str],
) -> Tuple[Params, Dict[str, str], bool]:
    """Query, headers, and whether it may be sent twice: a guarded write would be refused by what it wrote itself."""
    params: Params = [
        ("path", path),
        ("parents", parents),
        ("overwrite", overwrite),
        ("append", append),
        ("mode", mode),
    ]
    headers = present(**{"If-Match": if_match, "If-None-Match": if_none_match})
    return params, headers, overwrite and not append and not headers
