"""Every system there is an adapter for, in the order they are measured and shown."""

from .bare import Bare
from .bubblewrap import Bubblewrap
from .carrel import Engine, McpHttp, McpStdio, Socket
from .docker import Docker
from .floors import CFloor, Floor
from .ipykernel import Ipykernel
from .swe_rex import SweRex
from .wasmtime import Wasmtime

ALL = (Floor, CFloor, Bare, Engine, Socket, McpStdio, McpHttp, Bubblewrap, Docker, Ipykernel, SweRex, Wasmtime)


def by_key(key):
    return next(adapter for adapter in ALL if adapter.key == key)()
