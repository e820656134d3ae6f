"""The client: one daemon, its sandboxes, and what there is besides."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any, AsyncIterator, List, Mapping, Optional, Sequence, Type, Union

import httpx

from .._archive import Rewound, open_binary
from .._build import (
    Request,
    create,
    delete,
    get,
    list_sandboxes,
    open_sandbox,
    post,
    present,
    run_body,
    sandbox_body,
    sandbox_path,
    segment,
    token_body,
)
from .._config import find
from .._errors import SandboxNotFound
from .._models import Closed, Diff, Environment, Event, Limits, Quota, SandboxInfo, Snapshot, Token, Whoami
from .._result import Display, Result
from .._stream import follow_events
from ._files import LocalPath, save
from ._http import AsyncHttp, parse_json
from ._io import Callback, blocking, closing, pieces
from ._sandbox import AsyncSandbox, run_code

# What one answer may take that is not a run's: a sandbox that is made, a large search.
DEFAULT_TIMEOUT = 120.0
DEFAULT_RETRIES = 4
DEFAULT_RESUME = 60.0


class AsyncCarrel:
    """A carrel daemon.

    `url` (`http://…`, `https://…`, `unix:PATH`; `$CARREL_URL`) and `token` (`$CARREL_TOKEN`), or its unix `socket`
    (`$CARREL_SOCKET`, else the usual place). `timeout`: seconds for one answer, runs aside, which have their own;
    `retries`: of a request whose connection broke, where that is safe; `resume_for`: how long a broken stream is tried
    to be taken up without a word from the daemon.
    """

    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        *,
        socket: Optional[str] = None,
        timeout: float = DEFAULT_TIMEOUT,
        retries: int = DEFAULT_RETRIES,
        resume_for: float = DEFAULT_RESUME,
        transport: Optional[httpx.AsyncBaseTransport] = None,
        _own_http: bool = False,
    ) -> None:
        place = find(url, token, socket)
        self._http = AsyncHttp(place, timeout=timeout, retries=retries, resume_for=resume_for, transport=transport)
        self._own_http = _own_http
        self.sandboxes = AsyncSandboxes(self._http)
        self.snapshots = AsyncSnapshots(self._http)
        self.scopes = AsyncScopes(self._http)
        self.tokens = AsyncTokens(self._http)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._http.place}>"

    async def sandbox(
        self,
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
        undo_calls: Optional[int] = None,
        spec: Optional[Union[str, Mapping[str, Any]]] = None,
    ) -> AsyncSandbox:
        """Finds or makes a sandbox: by its `name`, its `key`, the run it belongs to; without any of them a new one.

        `session`, with a run: a second sandbox of that name, or `isolated` for a fresh one. `spec`: a sandbox spec, as
        an object, YAML, or an agent file with front matter. `undo_calls`: how many calls can be taken back, 0 for none.
        """
        body = sandbox_body(
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
            undo_calls=undo_calls,
            spec=spec,
        )
        value = await self._http.json(open_sandbox(body))
        return AsyncSandbox(self._http, SandboxInfo.parse(value), self._own_http)

    async def run(
        self,
        code: str,
        env: Optional[str] = None,
        *,
        sandbox: Optional[str] = None,
        session: Optional[str] = None,
        workflow_run: Optional[str] = None,
        agent_run: Optional[str] = None,
        timeout: Optional[float] = None,
        labels: Optional[Mapping[str, str]] = None,
        limits: Optional[Limits] = None,
        idle_timeout: Optional[float] = None,
        max_lifetime: Optional[float] = None,
        on_stdout: Optional[Callback[str]] = None,
        on_stderr: Optional[Callback[str]] = None,
        on_result: Optional[Callback[Display]] = None,
        max_output: Optional[int] = None,
        cancel_on_disconnect: bool = False,
        idempotency_key: Optional[str] = None,
    ) -> Result:
        """Runs code in the `sandbox` of that name or key; without one in a fresh sandbox that is gone afterwards."""
        body = run_body(
            code,
            env=env,
            session=session,
            timeout=timeout,
            max_output=max_output,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        body.update(
            present(
                sandbox=sandbox,
                workflow_run=workflow_run,
                agent_run=agent_run,
                labels=None if labels is None else dict(labels),
                limits=None if limits is None else dict(limits),
                idle_timeout_seconds=idle_timeout,
                max_lifetime_seconds=max_lifetime,
            )
        )
        return await run_code(self._http, "/v1/run", body, on_stdout, on_stderr, on_result, idempotency_key)

    async def environments(self) -> List[Environment]:
        return [Environment.parse(one) for one in await self._http.pages(get("/v1/environments"))]

    async def events(
        self,
        *,
        sandbox: Optional[str] = None,
        key: Optional[str] = None,
        kind: Optional[str] = None,
        since: Optional[int] = None,
    ) -> AsyncIterator[Event]:
        """What happens, from now on or from the number `since`, without end. `kind` is a prefix: `run.`."""
        async with closing(self._http.follow(follow_events(sandbox, key, kind, since))) as messages:
            async for message in messages:
                value = message.json()
                yield Event(message.id, str(value.get("kind") or message.event), value)

    async def whoami(self) -> Whoami:
        """The token this client has (None for the operator) and what it uses."""
        return Whoami.parse(await self._http.json(get("/v1/whoami")))

    async def aclose(self) -> None:
        """Closes the connections; sandboxes stay."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncCarrel:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.aclose()


class AsyncSandboxes:
    """`client.sandboxes`."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def list(
        self,
        *,
        key: Optional[str] = None,
        prefix: Optional[str] = None,
        state: Optional[str] = None,
        labels: Optional[Mapping[str, str]] = None,
    ) -> List[AsyncSandbox]:
        """Those with that key, with keys that begin with `prefix`, in that state, with all of those labels."""
        found = await self._http.pages(list_sandboxes(key, prefix, state, labels))
        return [AsyncSandbox(self._http, SandboxInfo.parse(one)) for one in found]

    async def get(self, sandbox: str) -> AsyncSandbox:
        """By id `sbx_…` or by key. Does not wake it, and makes none."""
        if ":" not in sandbox:
            return AsyncSandbox(self._http, SandboxInfo.parse(await self._http.json(get(sandbox_path(sandbox)))))
        found = await self.list(key=sandbox)
        if not found:
            raise SandboxNotFound(f"there is no sandbox `{sandbox}`", status=404)
        return found[0]


class AsyncSnapshots:
    """`client.snapshots`. A snapshot is named by its id, or by a tag: the newest with it."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def list(self, *, sandbox: Optional[str] = None, tag: Optional[str] = None) -> List[Snapshot]:
        found = await self._http.pages(get("/v1/snapshots", [("sandbox", sandbox), ("tag", tag)]))
        return [Snapshot.parse(one) for one in found]

    async def get(self, snapshot: str) -> Snapshot:
        return Snapshot.parse(await self._http.json(get(f"/v1/snapshots/{segment(snapshot)}")))

    async def delete(self, snapshot: str) -> None:
        """Sandboxes that came from it stay."""
        await self._http.reply(delete(f"/v1/snapshots/{segment(snapshot)}"))

    async def restore(
        self,
        snapshot: str,
        *,
        new: bool = False,
        name: Optional[str] = None,
        key: Optional[str] = None,
        files_only: bool = False,
    ) -> AsyncSandbox:
        """As a new sandbox, if that is asked for or one is named; else its own sandbox becomes what it was."""
        body = present(new=new, name=name, key=key, files_only=files_only)
        value = await self._http.json(create(f"/v1/snapshots/{segment(snapshot)}/restore", body))
        return AsyncSandbox(self._http, SandboxInfo.parse(value))

    async def export(self, snapshot: str, local: LocalPath) -> int:
        """Writes it to a local file, whole or not at all; how many bytes. `import_` takes it, here or at another daemon."""
        request = get(f"/v1/snapshots/{segment(snapshot)}/export")
        # What it holds is as private as the sandbox.
        return await save(self._http, request, Path(local), 0o600)

    async def import_(self, local: LocalPath, *, trust_memory: bool = False) -> Snapshot:
        """Makes a snapshot of an exported file, all of it or nothing. Memory is taken if this daemon's host sealed it.

        `trust_memory`, for the operator: whoever sealed it. It is brought back with root's rights.
        """
        with await blocking(open_binary, Path(local)) as file:
            size = os.fstat(file.fileno()).st_size
            request = Request("POST", "/v1/snapshots", [("trust_memory", trust_memory or None)])
            request = request.with_headers(Content_Type="application/zstd", Content_Length=str(size))
            response = await self._http.reply(request, lambda: pieces(Rewound(file)))
        return Snapshot.parse(parse_json(response))

    async def diff(self, old: str, new: Optional[str] = None) -> Diff:
        """Files between two snapshots, or a snapshot and a sandbox: by default its own, as it is now."""
        return Diff.parse(await self._http.json(get("/v1/diff", [("from", old), ("to", new)])))


class AsyncScopes:
    """`client.scopes`."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def close(self, scope: str, owner: str, *, retention: Optional[float] = None) -> Closed:
        """Closes every sandbox `SCOPE:OWNER:*`, also those being made; with a `retention` so many seconds later."""
        path = f"/v1/scopes/{segment(scope)}/{segment(owner)}"
        return Closed.parse(await self._http.json(delete(path, [("retention_seconds", retention)])))


class AsyncTokens:
    """`client.tokens`: the operator's."""

    def __init__(self, http: AsyncHttp) -> None:
        self._http = http

    async def create(
        self,
        name: Optional[str] = None,
        *,
        scope: Optional[Sequence[str]] = None,
        quota: Optional[Quota] = None,
        expires: Optional[float] = None,
    ) -> Token:
        """The only answer that has the secret, in `token`. `expires`: in so many seconds."""
        # Its secret is kept nowhere, so that no answer can be given again: it is sent once.
        return Token.parse(await self._http.json(post("/v1/tokens", token_body(name, scope, quota, expires))))

    async def list(self) -> List[Token]:
        return [Token.parse(one) for one in await self._http.pages(get("/v1/tokens"))]

    async def revoke(self, token: str) -> None:
        """By its id."""
        await self._http.reply(delete(f"/v1/tokens/{segment(token)}"))
