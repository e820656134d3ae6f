"""carrel: sandboxes for AI agents whose state persists.

    import carrel

    sandbox = carrel.sandbox("analysis")
    sandbox.run("x = 6 * 7")
    print(sandbox.run("x").text)  # 42, also tomorrow

[Carrel] is the client of a daemon (`carrel serve`), [AsyncCarrel] the same for asyncio.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any, Dict, Mapping, Optional, Tuple, Union

from ._async._client import AsyncCarrel
from ._async._exec import AsyncExec
from ._async._files import AsyncFiles, AsyncWatch
from ._async._ports import AsyncPorts
from ._async._sandbox import AsyncSandbox, AsyncSession
from ._config import Place, find
from ._errors import (
    AgentLost,
    AlreadyExists,
    Busy,
    CarrelError,
    CommandNotFound,
    Conflict,
    ConnectionFailed,
    ConnectionLost,
    DiskFull,
    EnvironmentMismatch,
    ExecEnded,
    ExecNotFound,
    Forbidden,
    InvalidArgument,
    NotFound,
    PortClosed,
    PreconditionFailed,
    ProtocolError,
    QuotaExceeded,
    RateLimited,
    RunFailed,
    SandboxNotFound,
    ServerError,
    SessionExists,
    SessionNotFound,
    SnapshotNotFound,
    StateLost,
    Timeout,
    TooLarge,
    Unauthorized,
    Unavailable,
    UndoUnavailable,
    Unprocessable,
)
from ._models import (
    Brief,
    Change,
    Closed,
    ComparedFile,
    ComparedFiles,
    Diff,
    Entry,
    Environment,
    Event,
    ForkCost,
    Found,
    LeftOut,
    Limits,
    Match,
    Metrics,
    Port,
    Quota,
    Replaced,
    SandboxInfo,
    SessionInfo,
    Share,
    Snapshot,
    Token,
    Transferred,
    Undone,
    Whoami,
)
from ._output import Output
from ._result import Chunk, CodeException, Display, ExecInfo, FileChanges, Image, Outcome, OutputPage, Receipt, Result
from ._sync._client import Carrel
from ._sync._exec import Exec
from ._sync._files import Files, Watch
from ._sync._ports import Ports
from ._sync._sandbox import Sandbox, Session
from ._version import __version__

__all__ = [
    "AgentLost",
    "AlreadyExists",
    "AsyncCarrel",
    "AsyncExec",
    "AsyncFiles",
    "AsyncPorts",
    "AsyncSandbox",
    "AsyncSession",
    "AsyncWatch",
    "Brief",
    "Busy",
    "Carrel",
    "CarrelError",
    "Change",
    "Chunk",
    "Closed",
    "CodeException",
    "CommandNotFound",
    "ComparedFile",
    "ComparedFiles",
    "Conflict",
    "ConnectionFailed",
    "ConnectionLost",
    "Diff",
    "DiskFull",
    "Display",
    "Entry",
    "Environment",
    "EnvironmentMismatch",
    "Event",
    "Exec",
    "ExecEnded",
    "ExecInfo",
    "ExecNotFound",
    "FileChanges",
    "Files",
    "Forbidden",
    "ForkCost",
    "Found",
    "Image",
    "InvalidArgument",
    "LeftOut",
    "Limits",
    "Match",
    "Metrics",
    "NotFound",
    "Outcome",
    "Output",
    "OutputPage",
    "Port",
    "PortClosed",
    "Ports",
    "PreconditionFailed",
    "ProtocolError",
    "Quota",
    "QuotaExceeded",
    "RateLimited",
    "Receipt",
    "Replaced",
    "Result",
    "RunFailed",
    "Sandbox",
    "SandboxInfo",
    "SandboxNotFound",
    "ServerError",
    "Session",
    "SessionExists",
    "SessionInfo",
    "SessionNotFound",
    "Share",
    "Snapshot",
    "SnapshotNotFound",
    "StateLost",
    "Timeout",
    "Token",
    "TooLarge",
    "Transferred",
    "Unauthorized",
    "Unavailable",
    "UndoUnavailable",
    "Undone",
    "Unprocessable",
    "Watch",
    "Whoami",
    "__version__",
    "async_sandbox",
    "client",
    "sandbox",
]

_clients: Dict[Tuple[int, Place], Carrel] = {}
_clients_lock = threading.Lock()


def client() -> Carrel:
    """The client of the daemon that the environment names; one for the whole program."""
    # A child of fork must not share its parent's connections.
    which = (os.getpid(), find())
    with _clients_lock:
        if which not in _clients:
            _clients[which] = Carrel()
        return _clients[which]


@atexit.register
def _close() -> None:
    for (process, _), one in _clients.items():
        if process == os.getpid():
            one.close()


def sandbox(
    name: Optional[str] = None,
    *,
    key: Optional[str] = None,
    workflow_run: Optional[str] = None,
    agent_run: Optional[str] = None,
    session: Optional[str] = None,
    env: Optional[str] = None,
    labels: Optional[Mapping[str, str]] = None,
    limits: Optional[Limits] = None,
    idle_timeout: Optional[float] = None,
    max_lifetime: Optional[float] = None,
    standby_after: Optional[float] = None,
    hibernate_after: Optional[float] = None,
    spec: Optional[Union[str, Mapping[str, Any]]] = None,
) -> Sandbox:
    """[Carrel.sandbox] of the daemon that the environment names."""
    return client().sandbox(
        name,
        key=key,
        workflow_run=workflow_run,
        agent_run=agent_run,
        session=session,
        env=env,
        labels=labels,
        limits=limits,
        idle_timeout=idle_timeout,
        max_lifetime=max_lifetime,
        standby_after=standby_after,
        hibernate_after=hibernate_after,
        spec=spec,
    )


async def async_sandbox(
    name: Optional[str] = None,
    *,
    key: Optional[str] = None,
    workflow_run: Optional[str] = None,
    agent_run: Optional[str] = None,
    session: Optional[str] = None,
    env: Optional[str] = None,
    labels: Optional[Mapping[str, str]] = None,
    limits: Optional[Limits] = None,
    idle_timeout: Optional[float] = None,
    max_lifetime: Optional[float] = None,
    standby_after: Optional[float] = None,
    hibernate_after: Optional[float] = None,
    spec: Optional[Union[str, Mapping[str, Any]]] = None,
) -> AsyncSandbox:
    """The same for asyncio. Its connections are its own, of this event loop, and end with `close`."""
    one = AsyncCarrel(_own_http=True)
    try:
        return await one.sandbox(
            name,
            key=key,
            workflow_run=workflow_run,
            agent_run=agent_run,
            session=session,
            env=env,
            labels=labels,
            limits=limits,
            idle_timeout=idle_timeout,
            max_lifetime=max_lifetime,
            standby_after=standby_after,
            hibernate_after=hibernate_after,
            spec=spec,
        )
    except BaseException:
        await one.aclose()
        raise
