# Made from _async/_sandbox.py by scripts/unasync: change it there.
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
from ._exec import Exec, collect
from ._files import Files
from ._http import Http
from ._io import Callback
from ._ports import Ports


def run_code(
    http: Http,
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
        return Result.parse(http.json(run_once(path, body, idempotency_key)))
    most = body.get("max_output", DEFAULT_MAX_OUTPUT)
    return collect(http, FollowExec(run_streamed(path, body)), most, on_stdout, on_stderr, on_result)


class Sandbox:
    """A sandbox. As a context manager it is closed, with its workspace, at the end of the block."""

    def __init__(self, http: Http, info: SandboxInfo, own_http: bool = False) -> None:
        self._http = http
        self._own_http = own_http
        self.info = info
        self.id = info.id
        self.cost: Optional[ForkCost] = None
        self._path = sandbox_path(info.id)
        self.files = Files(http, info.id)
        self.ports = Ports(http, info.id)

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

    def run(
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
        return run_code(self._http, self._path + "/run", body, on_stdout, on_stderr, on_result, idempotency_key)

    def exec(
        self,
        argv: Sequence[str],
        *,
        session: Optional[str] = None,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[float] = None,
        stdin: Union[bool, str, bytes] = False,
        pty: Optional[Tuple[int, int]] = None,
    ) -> Exec:
        """Starts a command and returns at once. `stdin`: its whole input, or True to write it; `pty`: rows and columns."""
        body = exec_body(argv, session=session, cwd=cwd, env=env, timeout=timeout, stdin=stdin, pty=pty)
        value = self._http.json(create(self._path + "/execs", body))
        return Exec(self._http, self.id, str(value["exec"]))

    def attach(self, exec: str) -> Exec:
        """A run or exec by its id, of this program or of another."""
        return Exec(self._http, self.id, exec)

    def execs(self) -> List[ExecInfo]:
        """Runs and execs that the sandbox remembers, newest last."""
        return [ExecInfo.parse(one) for one in self._http.pages(get(self._path + "/execs"))]

    def session(
        self, name: str, *, env: Optional[Mapping[str, str]] = None, cwd: Optional[str] = None
    ) -> Session:
        """Opens a session, or finds the one of that name: `env` is set there too, another `cwd` is a conflict."""
        body = present(name=name, cwd=cwd, env=None if env is None else dict(env))
        try:
            # One that was made by a first, lost, request is found below.
            value = self._http.json(post(self._path + "/sessions", body, repeatable=True))
        except SessionExists:
            session = Session(self, SessionInfo.parse(self._http.json(get(self._session_path(name)))))
            if cwd is not None and _workspace(cwd) != _workspace(session.info.cwd or ""):
                raise
            if env:
                session.set_env(env)
            return session
        return Session(self, SessionInfo.parse(value))

    def sessions(self) -> List[Session]:
        found = self._http.pages(get(self._path + "/sessions"))
        return [Session(self, SessionInfo.parse(one)) for one in found]

    def metrics(self) -> Metrics:
        return Metrics.parse(self._http.json(get(self._path + "/metrics")))

    def refresh(self) -> SandboxInfo:
        """Asks the daemon again; does not wake it."""
        return self._told(self._http.json(get(self._path)))

    def update(
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
        return self._told(self._http.json(patch(self._path, body)))

    def standby(self) -> SandboxInfo:
        """Frozen when this returns: it keeps its memory, and any call wakes it."""
        return self._told(self._http.json(post(self._path + "/standby", repeatable=True)))

    def hibernate(self) -> SandboxInfo:
        """On disk when this returns: it holds no memory, and any call restores it."""
        return self._told(self._http.json(post(self._path + "/hibernate", repeatable=True)))

    def wake(self) -> SandboxInfo:
        """Alive when this returns; `note` says what had become of it."""
        return self._told(self._http.json(post(self._path + "/wake", repeatable=True)))

    def snapshot(self, *, tags: Sequence[str] = (), files_only: bool = False) -> Snapshot:
        """Saves it: files, and everything that lives in it. It goes on."""
        body = {"tags": list(tags), "files_only": files_only}
        return Snapshot.parse(self._http.json(create(self._path + "/snapshots", body)))

    def fork(self, count: int = 1) -> List[Sandbox]:
        """Copies of it with interpreters, variables and files as they are; `cost` of each says what it took."""
        value = self._http.json(create(self._path + "/fork", {"count": count}))
        forks = []
        for one in value["forks"]:
            fork = Sandbox(self._http, SandboxInfo.parse(one["sandbox"]))
            fork.cost = ForkCost.parse(one)
            forks.append(fork)
        return forks

    def adopt(self) -> SandboxInfo:
        """This fork takes the key of what it was forked from, which gets this one's."""
        return self._told(self._http.json(post(self._path + "/adopt")))

    def close(self, *, delete_workspace: bool = True) -> None:
        """Ends it. With `delete_workspace=False` its files stay, and the next call brings it back over them."""
        try:
            self._http.reply(delete(self._path, [("delete_workspace", delete_workspace)]))
        except SandboxNotFound:
            # Gone is what was wanted; a first answer may have been lost with its connection.
            pass
        finally:
            if self._own_http:
                self._http.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            self.close()
        except CarrelError:
            # What the block itself raised says more than that its cleaning up failed.
            if error is None:
                raise

    def _session_path(self, name: str) -> str:
        return sandbox_path(self.id, "sessions", name)

    def _told(self, value: Json) -> SandboxInfo:
        self.info = SandboxInfo.parse(value)
        return self.info


class Session:
    """One line of work in a sandbox: its own processes, directory, variables and interpreters; files are shared."""

    def __init__(self, sandbox: Sandbox, info: SessionInfo) -> None:
        self.sandbox = sandbox
        self.info = info
        self.name = info.name
        self._path = sandbox._session_path(info.name)
        self._http = sandbox._http

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} of {self.sandbox.id}>"

    def run(
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
        """As [Sandbox.run], here."""
        return self.sandbox.run(
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

    def exec(
        self,
        argv: Sequence[str],
        *,
        cwd: Optional[str] = None,
        env: Optional[Mapping[str, str]] = None,
        timeout: Optional[float] = None,
        stdin: Union[bool, str, bytes] = False,
        pty: Optional[Tuple[int, int]] = None,
    ) -> Exec:
        """As [Sandbox.exec], here."""
        return self.sandbox.exec(argv, session=self.name, cwd=cwd, env=env, timeout=timeout, stdin=stdin, pty=pty)

    def set_env(self, env: Mapping[str, Optional[str]]) -> SessionInfo:
        """Sets variables, and unsets those that are None, also for interpreters that run."""
        self.info = SessionInfo.parse(self._http.json(patch(self._path, {"env": dict(env)})))
        return self.info

    def refresh(self) -> SessionInfo:
        self.info = SessionInfo.parse(self._http.json(get(self._path)))
        return self.info

    def delete(self) -> None:
        """Ends everything in it."""
        try:
            self._http.reply(delete(self._path))
        except SessionNotFound:
            pass

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        try:
            self.delete()
        except CarrelError:
            if error is None:
                raise


def _workspace(path: str) -> str:
    return posixpath.normpath(posixpath.join("/workspace", path))
