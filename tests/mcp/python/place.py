"""Servers under test: `carrel mcp` on HTTP, and the command line of one on stdio."""

import asyncio
import os
import secrets
import shutil
import subprocess
import tempfile

CARREL = os.environ.get("CARREL_BIN", "target/debug/carrel")


class Place:
    """One state directory and the servers that work in it; all of it is gone afterwards."""

    def __init__(self, transport):
        self.transport = transport
        self.state = tempfile.mkdtemp(prefix="carrel-mcp-")
        self.token = secrets.token_hex(16)
        self.environment = {**os.environ, "CARREL_TOKEN": self.token}
        self.servers = {}

    def command(self, *arguments):
        return [CARREL, "--state", self.state, "mcp", *arguments]

    async def address(self, *arguments):
        """Of an HTTP server with these arguments, started when first asked for."""
        if arguments not in self.servers:
            process = await asyncio.create_subprocess_exec(
                *self.command("--http", "127.0.0.1:0", *arguments),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            lines = []
            while line := await process.stderr.readline():
                lines.append(line.decode())
                if "serving MCP at " in lines[-1]:
                    break
            else:
                raise RuntimeError("the server did not start: " + "".join(lines))
            self.servers[arguments] = (process, lines[-1].split()[-1])
            # A full pipe would stop the server.
            process.drain = asyncio.create_task(process.stderr.read())
        return self.servers[arguments][1]

    async def leave(self):
        for process, _ in self.servers.values():
            if process.returncode is None:
                process.terminate()
            code = await asyncio.wait_for(process.wait(), 30)
            assert code == 0, f"the server ended with {code}"
        close = await asyncio.create_subprocess_exec(
            CARREL, "--state", self.state, "close", "--all", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        await close.wait()
        shutil.rmtree(self.state, ignore_errors=True)
