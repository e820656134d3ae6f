"""What can go wrong, as exceptions.

Every one is a [CarrelError] with the daemon's stable `code`, its `hint`, the HTTP `status` and what became of the session
(`session_state`). Classes follow codes; a code this version does not know falls back to the class of its status.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, Type

if TYPE_CHECKING:
    from ._result import Result


class CarrelError(Exception):
    """Base of all errors of this package.

    `status` is the HTTP status, None where no reply came; `session_state` is `preserved`, `rolled_back`, `lost` or `none`.
    """

    default_code = "internal"

    def __init__(
        self,
        message: str,
        *,
        code: Optional[str] = None,
        hint: Optional[str] = None,
        session_state: str = "none",
        status: Optional[int] = None,
        request_id: Optional[str] = None,
        retry_after: Optional[float] = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint or None
        self.session_state = session_state
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after

    def __str__(self) -> str:
        text = f"{self.message} [{self.code}]"
        return f"{text}\nhint: {self.hint}" if self.hint else text


class InvalidArgument(CarrelError, ValueError):
    """400: the request is wrong as it stands."""

    default_code = "invalid_argument"


class Unauthorized(CarrelError):
    """401: no token, or one that is not known (any more)."""

    default_code = "unauthorized"


class Forbidden(CarrelError):
    """403: the token may not do this."""

    default_code = "forbidden"


class NotFound(CarrelError):
    """404."""

    default_code = "not_found"


class SandboxNotFound(NotFound):
    default_code = "sandbox_not_found"


class SnapshotNotFound(NotFound):
    default_code = "snapshot_not_found"


class SessionNotFound(NotFound):
    default_code = "session_not_found"


class ExecNotFound(NotFound):
    default_code = "exec_not_found"


class Conflict(CarrelError):
    """409: not as things stand now."""

    default_code = "conflict"


class AlreadyExists(Conflict):
    default_code = "exists"


class SessionExists(AlreadyExists):
    default_code = "session_exists"


class ExecEnded(Conflict):
    """The exec has ended, so it takes no input or signal."""

    default_code = "exec_ended"


class EnvironmentMismatch(Conflict):
    """The sandbox has another environment than the one asked for."""

    default_code = "environment_mismatch"


class Busy(Conflict):
    """Another call kept the interpreter until the time was over."""

    default_code = "busy"


class UndoUnavailable(Conflict):
    """These calls cannot be taken back; the message says why, and how many can."""

    default_code = "undo_unavailable"


class StateLost(Conflict):
    """An earlier call took the interpreter down while this one was waiting."""

    default_code = "state_lost"


class PreconditionFailed(CarrelError):
    """412: the file is not the one that `if_match` names."""

    default_code = "precondition_failed"


class TooLarge(CarrelError):
    """413."""

    default_code = "too_large"


class Unprocessable(CarrelError):
    """422: understood, but not possible here: no such command or interpreter, an operation the box does not have."""

    default_code = "unsupported"


class CommandNotFound(Unprocessable):
    default_code = "command_not_found"


class QuotaExceeded(CarrelError):
    """429: a quota of the token is used up; the message says which and by what."""

    default_code = "quota"


class RateLimited(CarrelError):
    """429: too many calls; `retry_after` seconds from now there is room again."""

    default_code = "rate_limited"


class ServerError(CarrelError):
    """5xx."""


class AgentLost(ServerError):
    """502: the sandbox's agent does not answer."""

    default_code = "agent_lost"


class PortClosed(ServerError):
    """502: nothing listens on that port of the sandbox."""

    default_code = "port_closed"


class Unavailable(ServerError):
    """503: the daemon shuts down, or this host cannot isolate as asked."""

    default_code = "unavailable"


class Timeout(ServerError, TimeoutError):
    """504, or this side waited as long as it was told to."""

    default_code = "timeout"


class DiskFull(ServerError):
    """507: the sandbox's workspace is full."""

    default_code = "disk"


class ProtocolError(CarrelError):
    """The answer was not one of a carrel daemon."""

    default_code = "protocol"


class ConnectionFailed(CarrelError, ConnectionError):
    """No daemon could be reached; nothing was asked of it."""

    default_code = "connection_failed"


class ConnectionLost(CarrelError, ConnectionError):
    """The connection broke, and the call is not one that may be made twice or taken up again."""

    default_code = "connection_lost"


class RunFailed(CarrelError):
    """[Result.check] of a call that did not end well; the whole result is in `result`."""

    default_code = "run_failed"

    def __init__(self, message: str, result: Result, *, code: Optional[str] = None, hint: Optional[str] = None) -> None:
        super().__init__(message, code=code, hint=hint, session_state=result.session_state)
        self.result = result


_BY_CODE: Dict[str, Type[CarrelError]] = {
    kind.default_code: kind
    for kind in (
        InvalidArgument,
        Unauthorized,
        Forbidden,
        NotFound,
        SandboxNotFound,
        SessionNotFound,
        SnapshotNotFound,
        ExecNotFound,
        Conflict,
        AlreadyExists,
        SessionExists,
        ExecEnded,
        EnvironmentMismatch,
        Busy,
        UndoUnavailable,
        StateLost,
        PreconditionFailed,
        TooLarge,
        CommandNotFound,
        QuotaExceeded,
        RateLimited,
        AgentLost,
        PortClosed,
        Unavailable,
        Timeout,
        DiskFull,
    )
}

_BY_STATUS: Dict[int, Type[CarrelError]] = {
    400: InvalidArgument,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    412: PreconditionFailed,
    413: TooLarge,
    422: Unprocessable,
    429: RateLimited,
    503: Unavailable,
    504: Timeout,
    507: DiskFull,
}


def error_class(code: Optional[str], status: Optional[int]) -> Type[CarrelError]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return ServerError if status is not None and status >= 500 else CarrelError


def from_problem(
    problem: Mapping[str, Any],
    status: Optional[int] = None,
    headers: Optional[Mapping[str, str]] = None,
) -> CarrelError:
    """The exception of a problem document (or of an `error` in a reply, which has `message` for `detail`)."""
    headers = headers or {}
    if status is None and isinstance(problem.get("status"), int):
        status = problem["status"]
    code = problem.get("code")
    code = code if isinstance(code, str) else None
    message = problem.get("detail") or problem.get("message") or problem.get("title") or f"HTTP status {status}"
    return error_class(code, status)(
        str(message),
        code=code,
        hint=_text(problem.get("hint")),
        session_state=_text(problem.get("session_state")) or "none",
        status=status,
        request_id=headers.get("x-request-id"),
        retry_after=_seconds(headers.get("retry-after")),
    )


def from_response(status: int, headers: Mapping[str, str], body: bytes) -> CarrelError:
    """The exception of an HTTP error, also of one that no carrel daemon wrote (a proxy on the way, say)."""
    if "json" in headers.get("content-type", ""):
        try:
            problem = json.loads(body)
        except ValueError:
            problem = None
        if isinstance(problem, dict):
            return from_problem(problem, status, headers)
    start = body[:200].decode("utf-8", "replace").strip()
    return from_problem({"detail": f"HTTP status {status}" + (f": {start}" if start else "")}, status, headers)


def is_problem(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").split(";")[0].strip() == "application/problem+json"


def _text(value: Any) -> Optional[str]:
    return value if isinstance(value, str) and value else None


def _seconds(value: Optional[str]) -> Optional[float]:
    # A date is allowed by HTTP and never sent by the daemon.
    try:
        return max(0.0, float(value)) if value is not None else None
    except ValueError:
        return None
