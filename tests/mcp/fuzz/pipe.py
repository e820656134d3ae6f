"""The door on standard input and output, fuzzed."""

import asyncio
import json
import subprocess

import corpus

PATIENCE = 120


class Pipe:
    """A server, its answers by id, and how it ended."""

    @classmethod
    async def open(cls, place, greet=True):
        self = cls()
        self.process = await asyncio.create_subprocess_exec(
            *place.command("--tools", "all"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            limit=64 << 20,
        )
        self.answers, self.count, self.news, self.last = {}, 0, asyncio.Condition(), 10_000
        self.reading = asyncio.create_task(self.read())
        self.noise = asyncio.create_task(self.process.stderr.read())
        if greet:
            await self.ask(corpus.INITIALIZE)
            await self.send(json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode())
        return self

    async def read(self):
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            async with self.news:
                if "method" not in message:
                    self.answers.setdefault(json.dumps(message.get("id")), []).append(message)
                    self.count += 1
                self.news.notify_all()
        async with self.news:
            self.news.notify_all()

    async def send(self, line):
        try:
            self.process.stdin.write(line + b"\n")
            await self.process.stdin.drain()
            return True
        except (BrokenPipeError, ConnectionResetError):
            return False

    def closed(self):
        return self.reading.done()

    async def until(self, true):
        async with self.news:
            await asyncio.wait_for(self.news.wait_for(lambda: true() or self.closed()), PATIENCE)
        return true()

    async def ask(self, message):
        """The answer to a request, or None if the server has closed."""
        self.last += 1
        ident = self.last
        await self.send(json.dumps({"jsonrpc": "2.0", "id": ident, **message}).encode())
        return self.answers[str(ident)][0] if await self.until(lambda: str(ident) in self.answers) else None

    async def end(self, politely=True):
        """Every way of ending but a clean one is a failure."""
        if politely:
            self.process.stdin.close()
        code = await asyncio.wait_for(self.process.wait(), PATIENCE)
        noise = (await self.noise).decode(errors="replace")
        assert code in (0, 1, 125) and "panicked" not in noise, f"ended with {code}: {noise[-2000:]}"
        self.reading.cancel()
        return code


async def works(pipe):
    """A sandbox that was there before answers with its state."""
    call = {
        "method": "tools/call",
        "params": {
            "name": "run",
            "arguments": {"code": "echo $KEPT $((6 * 7))", "env": "bash", "session": "witness", "timeout": 60},
        },
    }
    answer = await pipe.ask(call)
    text = answer["result"]["content"][0]["text"]
    assert "kept 42" in text, text


class Fuzz:
    def __init__(self, place, rng, effort):
        self.place, self.rng, self.effort, self.inputs, self.closes = place, rng, effort, 0, 0

    async def fresh(self, pipe):
        """The connection, or a new one where an input has closed it."""
        if not pipe.closed():
            return pipe
        self.closes += 1
        await pipe.end()
        return await Pipe.open(self.place)

    async def feed(self, pipe, lines):
        """Sends lines one by one; each is followed by a request that must be answered unless the line closed the door."""
        for line in lines:
            self.inputs += 1
            await pipe.send(line)
            if await pipe.ask({"method": "ping"}) is None:
                pipe = await self.fresh(pipe)
        return pipe

    async def run(self):
        pipe = await Pipe.open(self.place)
        keep = {"name": "run", "arguments": {"code": "export KEPT=kept", "env": "bash", "session": "witness"}}
        assert await pipe.ask({"method": "tools/call", "params": keep})
        for part in (self.garbage, self.wrong_types, self.deep, self.huge, self.identifiers, self.floods):
            pipe = await part(pipe)
            await works(pipe)
        assert await pipe.end() == 0
        await self.endings()

    async def garbage(self, pipe):
        return await self.feed(pipe, corpus.garbage(self.rng, 120 * self.effort))

    async def wrong_types(self, pipe):
        """A request that is one by its envelope is answered, whatever is in it. Where the envelope itself is wrong the SDK
        answers without an id, as JSON-RPC has it."""
        for number, message in enumerate(corpus.wrong_types(self.rng, 400 * self.effort)):
            self.inputs += 1
            ident = f"w{number}"
            wanted = isinstance(message.get("method"), str) and not message["method"].startswith("notifications/")
            envelope = (
                {"jsonrpc": "2.0", **message}
                if message in corpus.NOTIFICATIONS
                else {"jsonrpc": "2.0", "id": ident, **message}
            )
            before = len(pipe.answers.get("null", []))
            await pipe.send(json.dumps(envelope).encode())
            answered = await pipe.ask({"method": "ping"}) is not None
            if answered and wanted:
                key = json.dumps(ident)
                heard = lambda: key in pipe.answers or len(pipe.answers.get("null", [])) > before
                assert await pipe.until(heard), f"never answered: {envelope}"
            pipe = await self.fresh(pipe)
        return pipe

    async def deep(self, pipe):
        """Too deep for the parser is no excuse for no answer."""
        lines = list(corpus.deep(7))
        pipe = await self.feed(pipe, lines)
        calls = sum(line.startswith(b'{"jsonrpc"') for line in lines)
        assert await pipe.until(lambda: len(pipe.answers.get("7", [])) == calls), pipe.answers.get("7")
        return pipe

    async def huge(self, pipe):
        self.inputs += 3
        await pipe.send(corpus.huge(71, 17 << 20))
        assert await pipe.until(lambda: "71" in pipe.answers), "a huge line closed the door"
        assert "larger than" in pipe.answers["71"][0]["error"]["message"], pipe.answers["71"]
        await pipe.send(b"x" * (17 << 20))
        await pipe.send(corpus.huge(72, 5 << 20))
        assert await pipe.until(lambda: "72" in pipe.answers), "a line after a huge one was lost"
        return pipe

    async def identifiers(self, pipe):
        """The same id twice, and cancellations of what is not there."""
        call = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": corpus.RUN}
        for _ in range(20):
            self.inputs += 1
            await pipe.send(json.dumps(call).encode())
        assert await pipe.until(lambda: len(pipe.answers.get("5", [])) > 0)
        for ident in (5, 6, "5", None, [], {"a": 1}, -1, 2**70, "x" * 10_000):
            self.inputs += 2
            note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": ident}}
            await pipe.send(json.dumps(note).encode())
            await pipe.send(json.dumps(note).encode())
        assert await pipe.ask({"method": "ping"})
        return pipe

    async def floods(self, pipe):
        count = 4000 * self.effort
        before = pipe.count
        ping = b"".join(
            b'{"jsonrpc":"2.0","id":"p%d","method":"%s"}\n' % (n, b"tools/list" if n % 4 == 0 else b"ping")
            for n in range(count)
        )
        runs = b"".join(
            json.dumps(
                {
                    "jsonrpc": "2.0",
                    "id": f"r{n}",
                    "method": "tools/call",
                    "params": {
                        "name": "run",
                        "arguments": {"code": "echo", "env": "bash", "session": f"flood{n % 3}", "timeout": 100},
                    },
                }
            ).encode()
            + b"\n"
            for n in range(90)
        )
        self.inputs += count + 90
        pipe.process.stdin.write(ping + runs)
        await pipe.process.stdin.drain()
        assert await pipe.until(lambda: pipe.count >= before + count + 90), "a flood closed the door"
        failed = [
            ident
            for ident, (answer, *_) in pipe.answers.items()
            if ident.startswith('"r') and answer["result"].get("isError")
        ]
        assert not failed, f"{len(failed)} calls of the flood failed"
        return pipe

    async def endings(self):
        """Clients that leave in the middle of something."""
        halves = [b"", b'{"jsonrpc":"2.0","id":1,"met', b"x" * (17 << 20), b"\xff", b"\n\n\n"]
        for greet in (False, True):
            for half in halves:
                self.inputs += 1
                pipe = await Pipe.open(self.place, greet)
                pipe.process.stdin.write(half)
                await pipe.end()
        # One that leaves during a call, and one that never reads its answers.
        pipe = await Pipe.open(self.place)
        long = {"code": "sleep 30", "env": "bash", "session": "left", "timeout": 60}
        await pipe.send(
            json.dumps(
                {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "run", "arguments": long}}
            ).encode()
        )
        await pipe.end()
        deaf = await asyncio.create_subprocess_exec(
            *self.place.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        deaf._transport.get_pipe_transport(1).close()
        deaf.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, **corpus.INITIALIZE}).encode() + b"\n")
        deaf.stdin.close()
        _, noise = await asyncio.wait_for(deaf.communicate(), PATIENCE)
        assert b"panicked" not in noise and deaf.returncode >= 0, (deaf.returncode, noise)
        self.inputs += 2
        last = await Pipe.open(self.place)
        await works(last)
        assert await last.end() == 0
