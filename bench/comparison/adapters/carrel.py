"""carrel, through four doors. The adapter's program is carrel-bench, which has clients for all of them."""

from ..adapter import Adapter


class Carrel(Adapter):
    ours = True
    walls = "namespaces, seccomp, limits"
    languages = ("python", "bash", "node")
    door = ""

    def command(self, place):
        return [place.bench, "adapter", self.door, place.carrel]


class Engine(Carrel):
    title = "carrel, embedded"
    key, door = "carrel-engine", "engine"


class Socket(Carrel):
    title = "carrel, unix socket"
    key, door = "carrel-socket", "socket"
    note = "stdout throughput is a command's, others' is python's"


class McpStdio(Carrel):
    title = "carrel, MCP stdio"
    key, door = "carrel-mcp-stdio", "mcp-stdio"
    note = "the protocol has no word for the end of a session: sessions end after the measure"


class McpHttp(Carrel):
    title = "carrel, MCP HTTP"
    key, door = "carrel-mcp-http", "mcp-http"
    note = McpStdio.note
