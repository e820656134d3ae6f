# Made from _async/_ports.py by scripts/unasync: change it there.
"""The ports of a sandbox: what listens there, and the way in."""

from __future__ import annotations

import time
from typing import Any, List, Mapping, Optional, Union
from urllib.parse import quote

import httpx

from .._build import create, get, present, sandbox_path
from .._errors import InvalidArgument, Timeout, Unavailable, from_response, is_problem
from .._models import Port, Share
from ._http import Http
from ._io import sleep

# There is no event for a port that opens; a server takes longer than this to start.
POLL = 0.1


class Ports:
    """`sandbox.ports`."""

    def __init__(self, http: Http, sandbox: str) -> None:
        self._http = http
        self._path = sandbox_path(sandbox, "ports")
        self._shares = sandbox_path(sandbox, "shares")

    def list(self) -> List[Port]:
        """What listens in the sandbox."""
        answer = self._http.json(get(self._path, [("limit", 500)]))
        return [Port.parse(one) for one in answer["items"]]

    def wait(self, port: int, timeout: float = 30.0) -> Port:
        """Waits until something listens on `port`."""
        deadline = time.monotonic() + timeout
        while True:
            for found in self.list():
                if found.port == port:
                    return found
            if time.monotonic() >= deadline:
                raise Timeout(f"nothing listens on port {port} after {timeout:g} s", session_state="preserved")
            sleep(POLL)

    def url(self, port: int, path: str = "/") -> str:
        """The address of a port for others' HTTP clients. They need the token too, as `Authorization: Bearer …`."""
        if self._http.place.socket is not None:
            raise Unavailable(
                "a daemon behind a unix socket has no address",
                hint="use ports.request, or start the daemon with --listen",
            )
        return self._http.place.base_url + self._target(port, path)

    def request(
        self,
        port: int,
        path: str = "/",
        method: str = "GET",
        *,
        params: Optional[Mapping[str, Union[str, int]]] = None,
        headers: Optional[Mapping[str, str]] = None,
        content: Optional[Union[str, bytes]] = None,
        json: Optional[Any] = None,
        timeout: float = 60.0,
    ) -> httpx.Response:
        """An HTTP request to what listens there. Its answer is given as it is, whatever the status."""
        arguments = present(params=params, headers=headers, content=content, json=json)
        response = self._http.send(method, self._target(port, path), timeout=timeout, **arguments)
        if response.status_code >= 400 and is_problem(response.headers):
            error = from_response(response.status_code, response.headers, response.content)
            # A server in the sandbox may write problem documents of its own; those have no state of a session.
            if b'"session_state"' in response.content:
                raise error
        return response

    def share(self, port: int, expires: float = 3600.0) -> Share:
        """A link that reaches this port and nothing else, for so many seconds or until the sandbox is closed."""
        body = present(port=_number(port), expires_seconds=expires)
        value = self._http.json(create(self._shares, body))
        place = self._http.place
        url = value.get("url") or (None if place.socket is not None else place.base_url + str(value["path"]))
        return Share(str(value["path"]), url, int(value["expires_unix_ms"]))

    def _target(self, port: int, path: str) -> str:
        # Dots would be resolved away by the client, and lead to another port or out of the sandbox's part.
        if any(part in (".", "..") for part in path.partition("?")[0].split("/")):
            raise InvalidArgument(f"dots in the path of a port: `{path}`")
        return f"{self._path}/{_number(port)}/" + quote(path.lstrip("/"), safe="/?&=%:@!$'()*+,;~-._")


def _number(port: int) -> int:
    if not 0 < port < 65536:
        raise InvalidArgument(f"no port: {port}")
    return port
