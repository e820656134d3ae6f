"""A sandbox and its sessions."""

from __future__ import annotations

import posixpath
from types import TracebackType
from typing import List, Mapping, Optional, Sequence, Tuple, Type, Union

from .._build import (
    create,
    delete,
    exec_body,
    get,
    patch,
    post,
    present,
    run_body,
    run_once,
    run_streamed,
    sandbox_path,
    update_body,
)
from .._errors import CarrelError, InvalidArgument, SandboxNotFound, SessionExists, SessionNotFound
from .._models import ForkCost, Limits, Metrics, SandboxInfo, SessionInfo, Snapshot
from .._output import DEFAULT_MAX_OUTPUT
from .._result import Display, ExecInfo, Json, Result
from .._stream import FollowExec
from ._exec import AsyncExec, collect
from ._files import AsyncFiles
from ._http import AsyncHttp
from ._io import Callback
from ._ports import AsyncPorts


async def run_code(
    http: AsyncHttp,
    path: str,
    body: Json,
    on_stdout: Optional[Callback[str]],
    on_stderr: Optional[Callback[str]],
    on_result: Optional[Callback[Display]],
    idempotency_key: Optional[str],
) -> Result:
    """Streamed even if nobody listens: then a broken connection is taken up. With a key it is one reply, asked for again."""
    if idempotency_key is not None:
        if on_stdout is not None or on_stderr is not None or on_result is not None:
            raise InvalidArgument("a run with an idempotency key is not streamed, so it has no callbacks")
        return Result.parse(await http.json(run_once(path, body, idempotency_key)))
    most = body.get("max_output", DEFAULT_MAX_OUTPUT)
    return await collect(http, FollowExec(run_streamed(path, body)), most, on_stdout, on_stderr, on_result)


class AsyncSandbox:
    """A sandbox. As a context manager it is closed, with its workspace, at the end of the block."""

    def __init__(self, http: AsyncHttp, info: SandboxInfo, own_http: bool = False) -> None:
        self._http = http
        self._own_http = own_http
        self.info = info
        self.id = info.id
        self.cost: Optional[ForkCost] = None
        self._path = sandbox_path(info.id)
        self.files = AsyncFiles(http, info.id)
        self.ports = AsyncPorts(http, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} {self.info.key or ''} {self.info.state}>"

    @property
    def key(self) -> Optional[str]:
        return self.info.key

    @property
    def name(self) -> Optional[str]:
        return self.info.name

    @property
    def state(self) -> str:
        """As the daemon said last; see `refresh`."""
        return self.info.state

    async def run(
        self,
        code: str,
        env: Optional[str] = None,
        *,
        session: Optional[str] = None,
        timeout: Optional[float] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        on_result: Optional[Callback[Display]] = None,
        max_output: Optional[int] = None,
        cancel_on_disconnect: bool = False,
        idempotency_key: Optional[str] = None,
    ) -> Result:
        """Runs code in an interpreter whose state stays. What the code does wrong is in the result, not an exception.

        `env`: `python` (the default, but in an artifact its own language), `bash`, `node`, …. `idempotency_key`: run once for this key, whatever
        becomes of connections; the answer is kept for a day, and there are no callbacks.
        """
        body = run_body(
            code,
            env=env,
            session=session,
            timeout=timeout,
            max_output=max_output,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        return await run_code(self._http, self._path + "/run", body, on_stdout, on_stderr, on_result, idempotency_key)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        session: Optional[str] = None,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[float] = None,
        stdin: Union[bool, str, bytes] = False,
        pty: Optional[Tuple[int, int]] = None,
    ) -> AsyncExec:
        """Starts a command and returns at once. `stdin`: its whole input, or True to write it; `pty`: rows and columns."""
        body = exec_body(argv, session=session, cwd=cwd, env=env, timeout=timeout, stdin=stdin, pty=pty)
        value = await self._http.json(create(self._path + "/execs", body))
        return AsyncExec(self._http, self.id, str(value["exec"]))

    def attach(self, exec: str) -> AsyncExec:
        """A run or exec by its id, of this program or of another."""
        return AsyncExec(self._http, self.id, exec)

    async def execs(self) -> List[ExecInfo]:
        """Runs and execs that the sandbox remembers, newest last."""
        return [ExecInfo.parse(one) for one in await self._http.pages(get(self._path + "/execs"))]

    async def session(
        self, name: str, *, env: Optional[Mapping[str, str]] = None, cwd: Optional[str] = None
    ) -> AsyncSession:
        """Opens a session, or finds the one of that name: `env` is set there too, another `cwd` is a conflict."""
        body = present(name=name, cwd=cwd, env=None if env is None else dict(env))
        try:
            # One that was made by a first, lost, request is found below.
            value = await self._http.json(post(self._path + "/sessions", body, repeatable=True))
        except SessionExists:
            session = AsyncSession(self, SessionInfo.parse(await self._http.json(get(self._session_path(name)))))
            if cwd is not None and _workspace(cwd) != _workspace(session.info.cwd or ""):
                raise
            if env:
                await session.set_env(env)
            return session
        return AsyncSession(self, SessionInfo.parse(value))

    async def sessions(self) -> List[AsyncSession]:
        found = await self._http.pages(get(self._path + "/sessions"))
        return [AsyncSession(self, SessionInfo.parse(one)) for one in found]

    async def metrics(self) -> Metrics:
        return Metrics.parse(await self._http.json(get(self._path + "/metrics")))

    async def refresh(self) -> SandboxInfo:
        """Asks the daemon again; does not wake it."""
        return self._told(await self._http.json(get(self._path)))

    async def update(
        self,
        *,
        limits: Optional[Limits] = None,
        labels: Optional[Mapping[str, str]] = None,
        idle_timeout: Optional[float] = None,
        max_lifetime: Optional[float] = None,
        standby_after: Optional[float] = None,
        hibernate_after: Optional[float] = None,
    ) -> SandboxInfo:
        """Changes what is given, in place, or nothing at all. `standby_after`, `hibernate_after`: 0 is never."""
        body = update_body(limits, labels, idle_timeout, max_lifetime, standby_after, hibernate_after)
        return self._told(await self._http.json(patch(self._path, body)))

    async def standby(self) -> SandboxInfo:
        """Frozen when this returns: it keeps its memory, and any call wakes it."""
        return self._told(await self._http.json(post(self._path + "/standby", repeatable=True)))

    async def hibernate(self) -> SandboxInfo:
        """On disk when this returns: it holds no memory, and any call restores it."""
        return self._told(await self._http.json(post(self._path + "/hibernate", repeatable=True)))

    async def wake(self) -> SandboxInfo:
        """Alive when this returns; `note` says what had become of it."""
        return self._told(await self._http.json(post(self._path + "/wake", repeatable=True)))

    async def snapshot(self, *, tags: Sequence[str] = (), files_only: bool = False) -> Snapshot:
        """Saves it: files, and everything that lives in it. It goes on."""
        body = {"tags": list(tags), "files_only": files_only}
        return Snapshot.parse(await self._http.json(create(self._path + "/snapshots", body)))

    async def fork(self, count: int = 1) -> List[AsyncSandbox]:
        """Copies of it with interpreters, variables and files as they are; `cost` of each says what it took."""
        value = await self._http.json(create(self._path + "/fork", {"count": count}))
        forks = []
        for one in value["forks"]:
            fork = AsyncSandbox(self._http, SandboxInfo.parse(one["sandbox"]))
            fork.cost = ForkCost.parse(one)
            forks.append(fork)
        return forks

    async def adopt(self) -> SandboxInfo:
        """This fork takes the key of what it was forked from, which gets this one's."""
        return self._told(await self._http.json(post(self._path + "/adopt")))

    async def close(self, *, delete_workspace: bool = True) -> None:
        """Ends it. With `delete_workspace=False` its files stay, and the next call brings it back over them."""
        try:
            await self._http.reply(delete(self._path, [("delete_workspace", delete_workspace)]))
        except SandboxNotFound:
            # Gone is what was wanted; a first answer may have been lost with its connection.
            pass
        finally:
            if self._own_http:
                await self._http.aclose()

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            await self.close()
        except CarrelError:
            # What the block itself raised says more than that its cleaning up failed.
            if error is None:
                raise

    def _session_path(self, name: str) -> str:
        return sandbox_path(self.id, "sessions", name)

    def _told(self, value: Json) -> SandboxInfo:
        self.info = SandboxInfo.parse(value)
        return self.info


class AsyncSession:
    """One line of work in a sandbox: its own processes, directory, variables and interpreters; files are shared."""

    def __init__(self, sandbox: AsyncSandbox, info: SessionInfo) -> None:
        self.sandbox = sandbox
        self.info = info
        self.name = info.name
        self._path = sandbox._session_path(info.name)
        self._http = sandbox._http

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self.sandbox.id}>"

    async def run(
        self,
        code: str,
        env: Optional[str] = None,
        *,
        timeout: Optional[float] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        on_result: Optional[Callback[Display]] = None,
        max_output: Optional[int] = None,
        cancel_on_disconnect: bool = False,
        idempotency_key: Optional[str] = None,
    ) -> Result:
        """As [AsyncSandbox.run], here."""
        return await self.sandbox.run(
            code,
            env,
            session=self.name,
            timeout=timeout,
            on_stdout=on_stdout,
            on_stderr=on_stderr,
            on_result=on_result,
            max_output=max_output,
            cancel_on_disconnect=cancel_on_disconnect,
            idempotency_key=idempotency_key,
        )

    async def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[float] = None,
        stdin: Union[bool, str, bytes] = False,
        pty: Optional[Tuple[int, int]] = None,
    ) -> AsyncExec:
        """As [AsyncSandbox.exec], here."""
        return await self.sandbox.exec(argv, session=self.name, cwd=cwd, env=env, timeout=timeout, stdin=stdin, pty=pty)

    async def set_env(self, env: Mapping[str, Optional[str]]) -> SessionInfo:
        """Sets variables, and unsets those that are None, also for interpreters that run."""
        self.info = SessionInfo.parse(await self._http.json(patch(self._path, {"env": dict(env)})))
        return self.info

    async def refresh(self) -> SessionInfo:
        self.info = SessionInfo.parse(await self._http.json(get(self._path)))
        return self.info

    async def delete(self) -> None:
        """Ends everything in it."""
        try:
            await self._http.reply(delete(self._path))
        except SessionNotFound:
            pass

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            await self.delete()
        except CarrelError:
            if error is None:
                raise


def _workspace(path: str) -> str:
    return posixpath.normpath(posixpath.join("/workspace", path))
