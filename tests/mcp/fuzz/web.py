"""The door on HTTP, fuzzed."""

import asyncio
import json
from urllib.parse import urlsplit

import corpus

PATIENCE = 120
ACCEPT = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


class Fuzz:
    def __init__(self, place, rng, effort):
        self.place, self.rng, self.effort, self.inputs, self.closes = place, rng, effort, 0, 0

    async def run(self):
        where = urlsplit(await self.place.address("--tools", "all"))
        self.host, self.port, self.path = where.hostname, where.port, where.path
        self.session, self.last = None, 10_000
        await self.greet()
        assert "kept" not in await self.shell("export KEPT=kept")
        for part in (self.bodies, self.headers, self.wire, self.huge, self.identifiers, self.crowd):
            await part()
            text = await self.shell("echo $KEPT $((6 * 7))")
            assert "kept 42" in text, f"after {part.__name__}: {text}"

    async def exchange(self, request, read=True):
        """What the server answers to these bytes until it or we close."""
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=64 << 20)
        try:
            writer.write(request)
            await writer.drain()
            if not read:
                return b""
            if writer.can_write_eof():
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), PATIENCE)
        except TimeoutError:
            # Which is an OSError, and the one that tells of a door that is stuck.
            raise
        except OSError:
            self.closes += 1
            return b""
        finally:
            writer.close()

    def request(self, body, method="POST", headers=None, token=True):
        lines = {"Host": f"{self.host}:{self.port}", "Connection": "close", **ACCEPT, "Content-Length": len(body)}
        if token:
            lines["Authorization"] = f"Bearer {self.place.token}"
        if self.session:
            lines["Mcp-Session-Id"] = self.session
        lines.update(headers or {})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
        return f"{method} {self.path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + body

    async def post(self, body, **rest):
        """Status and body; the server is never the one to blame."""
        self.inputs += 1
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=64 << 20)
        try:
            writer.write(self.request(body, **rest))
            await writer.drain()
            answer = await asyncio.wait_for(reader.read(), PATIENCE)
        except TimeoutError:
            # Which is an OSError, and the one that tells of a door that is stuck.
            raise
        except OSError:
            self.closes += 1
            return 0, b""
        finally:
            writer.close()
        status = int(answer.split(None, 2)[1])
        assert status < 500, f"{status} to {body[:300]!r} {rest}: {answer[:500]!r}"
        return status, answer

    async def greet(self):
        self.session = None
        _, answer = await self.post(json.dumps({"jsonrpc": "2.0", "id": 1, **corpus.INITIALIZE}).encode())
        head = answer.split(b"\r\n\r\n")[0].decode()
        self.session = next(
            line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("mcp-session-id")
        )
        await self.post(b'{"jsonrpc":"2.0","method":"notifications/initialized"}')

    async def shell(self, code, session="witness"):
        arguments = {"code": code, "env": "bash", "session": session, "timeout": 60}
        self.last += 1
        call = {
            "jsonrpc": "2.0",
            "id": self.last,
            "method": "tools/call",
            "params": {"name": "run", "arguments": arguments},
        }
        status, answer = await self.post(json.dumps(call).encode())
        assert status == 200, answer[:500]
        return answer.decode()

    async def bodies(self):
        """The same bodies in a session, and as the newest protocol sends them."""
        messages = [
            {"jsonrpc": "2.0", "id": 3, **message} for message in corpus.wrong_types(self.rng, 250 * self.effort)
        ]
        lines = [json.dumps(message).encode() for message in messages]
        lines += corpus.garbage(self.rng, 80 * self.effort)
        lines += corpus.deep(7)
        for line in lines:
            await self.post(line)
        for message in messages[: 80 * self.effort]:
            method = message.get("method")
            word = method if isinstance(method, str) and method.isprintable() else "ping"
            headers = {"Mcp-Session-Id": None, "MCP-Protocol-Version": "2026-07-28", "Mcp-Method": word or "x"}
            if isinstance(message.get("params"), dict):
                message["params"] = {"_meta": corpus.META, **message["params"]}
            await self.post(json.dumps(message).encode(), headers=headers)

    async def headers(self):
        ping = b'{"jsonrpc":"2.0","id":4,"method":"ping"}'
        for headers in (
            {"Mcp-Session-Id": "no-such-session"},
            {"Mcp-Session-Id": "\udcff\udcfe"},
            {"Mcp-Session-Id": "x" * 4000},
            {"MCP-Protocol-Version": "1999-01-01"},
            {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call"},
            {"Accept": "text/html"},
            {"Accept": None},
            {"Content-Type": "text/plain"},
            {"Content-Type": None},
            {"Content-Type": "application/json; charset=utf-16"},
            {"Content-Length": None, "Transfer-Encoding": "chunked"},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic eDp5"},
            {"Authorization": f"Bearer {self.place.token}x"},
            {"Authorization": f"bearer  {self.place.token}"},
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
        ):
            await self.exchange(self.request(ping, headers=headers))
            self.inputs += 1
        for method in ("PUT", "PATCH", "OPTIONS", "HEAD", "TRACE", "BREW"):
            await self.post(ping, method=method)
        gone = {"Mcp-Session-Id": "no-such-session"}
        for method, headers in (
            ("GET", gone),
            ("DELETE", gone),
            ("GET", {"Mcp-Session-Id": None}),
            ("DELETE", {"Mcp-Session-Id": None}),
        ):
            await self.post(b"", method=method, headers=headers)
        # A stream that was never there is not resumed, and does not hold the session up.
        for event in ("0/0", "999/999", "garbage", "-1", "x" * 4000):
            request = self.request(b"", method="GET", headers={"Last-Event-ID": event})
            self.inputs += 1
            await self.exchange(request, read=False)

    async def wire(self):
        """Bytes that are hardly HTTP, and clients that leave in the middle of it."""
        whole = self.request(corpus.huge(9, 1000))
        for raw in (
            b"",
            b"\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET\r\n\r\n",
            b"POST /mcp HTTP/9.9\r\n\r\n",
            b"POST " + b"/" * 100_000 + b" HTTP/1.1\r\n\r\n",
            b"POST /mcp HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
            b"POST /mcp HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /mcp HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\n",
            whole[: len(whole) // 3],
            whole[:-1],
            *(self.rng.randbytes(self.rng.randrange(1, 400)) for _ in range(40 * self.effort)),
        ):
            self.inputs += 1
            await self.exchange(raw)
        # The call goes on in the sandbox; the door stays open.
        arguments = {"code": "sleep 20", "env": "bash", "session": "left", "timeout": 30}
        call = {"jsonrpc": "2.0", "id": 8, "method": "tools/call", "params": {"name": "run", "arguments": arguments}}
        self.inputs += 1
        await self.exchange(self.request(json.dumps(call).encode()), read=False)

    async def huge(self):
        status, answer = await self.post(corpus.huge(71, 17 << 20))
        assert status in (0, 413) or b'"id":71' in answer, (status, answer[:500])
        status, answer = await self.post(corpus.huge(72, 5 << 20))
        assert status == 200 and b'"id":72' in answer, (status, answer[:500])

    async def identifiers(self):
        """The same id many times at once. The SDK sends answers by id, so only one of them need arrive."""
        call = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": corpus.RUN}
        same = [asyncio.create_task(self.post(json.dumps(call).encode())) for _ in range(10)]
        done, waiting = await asyncio.wait(same, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED)
        assert all(task.result()[0] < 500 for task in done)
        for task in waiting:
            task.cancel()
        for ident in (5, "5", None, -1, 2**70, [], "x" * 10_000):
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
            await self.post(json.dumps(note).encode())

    async def crowd(self):
        """Many at once, with and without an end."""
        gate = asyncio.Semaphore(64)

        async def one(number):
            async with gate:
                body = json.dumps({"jsonrpc": "2.0", "id": number, "method": "tools/list"}).encode()
                status, answer = await self.post(body)
                assert status == 200 and b'"id":%d' % number in answer, (status, answer[:300])

        await asyncio.gather(*(one(number) for number in range(1000 * self.effort)))
        calls = [self.shell("echo crowd", session=f"crowd{number % 3}") for number in range(30)]
        for text in await asyncio.gather(*calls):
            assert "crowd" in text, text
        idle = [await asyncio.open_connection(self.host, self.port) for _ in range(200)]
        self.inputs += 200
        assert "crowd" in await self.shell("echo crowd")
        for _, writer in idle:
            writer.close()
