"""Where the daemon is and who is asking: arguments first, then the environment, then the socket's usual place."""

from __future__ import annotations

import os
import socket as sockets
from dataclasses import dataclass
from typing import List, Mapping, Optional, Tuple
from urllib.parse import unquote, urlsplit

from ._errors import InvalidArgument

# How the daemon is called on a unix socket; the Host header needs some name.
_SOCKET_HOST = "http://localhost"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Place:
    """A daemon: over TCP at `base_url`, or behind the unix socket `socket`."""

    base_url: str
    socket: Optional[str]
    token: Optional[str]

    @property
    def loopback(self) -> bool:
        return self.socket is not None or (urlsplit(self.base_url).hostname or "") in _LOOPBACK

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.base_url

    def __repr__(self) -> str:
        # Never the token: this ends up in logs.
        return f"Place({self})"


def default_socket(environ: Mapping[str, str]) -> str:
    if environ.get("CARREL_SOCKET"):
        return environ["CARREL_SOCKET"]
    # Root's daemon is the system's, whatever session root happens to be in.
    if getattr(os, "geteuid", lambda: 1)() == 0:
        return "/run/carrel/carrel.sock"
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "carrel", "carrel.sock")
    # Without a runtime directory it is beside the daemon's state.
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return os.path.join(environ.get("CARREL_STATE") or os.path.join(home, "carrel"), "run", "carrel.sock")


def find(
    url: Optional[str] = None,
    token: Optional[str] = None,
    socket: Optional[str] = None,
    environ: Optional[Mapping[str, str]] = None,
) -> Place:
    environ = os.environ if environ is None else environ
    token = token or environ.get("CARREL_TOKEN") or None
    if url and socket:
        raise InvalidArgument("`url` and `socket` are two places: give one")
    if socket:
        return Place(_SOCKET_HOST, socket, token)
    url = url or environ.get("CARREL_URL") or None
    if url is None:
        return Place(_SOCKET_HOST, default_socket(environ), token)
    parts = urlsplit(url)
    if parts.scheme == "unix":
        path = unquote(parts.path)
        if parts.netloc or not path.startswith("/"):
            raise InvalidArgument(f"not a socket's path: `{url}`", hint="write unix:/run/carrel/carrel.sock")
        return Place(_SOCKET_HOST, path, token)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"not an address of a daemon: `{url}`", hint="write http://127.0.0.1:8700, or unix:PATH")
    return Place(url.rstrip("/"), None, token)


def keep_alive() -> List[Tuple[int, int, int]]:
    """Socket options by which a peer that vanished is noticed within about two minutes, also while nothing is sent."""
    options = [(sockets.SOL_SOCKET, sockets.SO_KEEPALIVE, 1)]
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(sockets, name):
            options.append((sockets.IPPROTO_TCP, getattr(sockets, name), value))
    return options
