"""Inputs that no client should send."""

import copy
import json
import random

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientInfo": {"name": "fuzz", "version": "1"},
    "io.modelcontextprotocol/clientCapabilities": {},
}
INITIALIZE = {
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "fuzz", "version": "1"}},
}
RUN = {"name": "run", "arguments": {"code": "1", "env": "bash", "session": "fuzz", "timeout": 5}}
REQUESTS = [
    INITIALIZE,
    {"method": "ping", "params": {}},
    {"method": "server/discover", "params": {"_meta": META}},
    {"method": "tools/list", "params": {"cursor": "x"}},
    {"method": "tools/call", "params": RUN},
    {
        "method": "tools/call",
        "params": {"name": "run", "_meta": {"progressToken": 7, **META}, "arguments": {"code": "2", "env": "bash"}},
    },
    {
        "method": "tools/call",
        "params": {
            "name": "sandbox_exec",
            "arguments": {
                "sandbox_id": "sbx_x",
                "cmd": ["ls"],
                "env": {"A": "b"},
                "timeout_seconds": 1,
                "stream": True,
            },
        },
    },
    {
        "method": "tools/call",
        "params": {
            "name": "sandbox_fs_write",
            "arguments": {"sandbox_id": "sbx_x", "path": "../x", "contents_b64": "!", "mode": "9"},
        },
    },
    {"method": "resources/list", "params": {"cursor": "sbx_zzz"}},
    {"method": "resources/read", "params": {"uri": "carrel://sandboxes/sbx_x/files/%2e%2e/x"}},
    {"method": "resources/subscribe", "params": {"uri": "carrel://environments"}},
    {
        "method": "completion/complete",
        "params": {
            "ref": {"type": "ref/prompt", "name": "x"},
            "argument": {"name": "env", "value": "p"},
            "context": {"arguments": {"id": "x"}},
        },
    },
    {"method": "logging/setLevel", "params": {"level": "info"}},
    {"method": "tasks/get", "params": {"taskId": "sbx_x.ex_y", "_meta": META}},
    {"method": "no/such/method", "params": {"deep": [[{}]]}},
]
NOTIFICATIONS = [
    {"method": "notifications/cancelled", "params": {"requestId": 123456789, "reason": "none"}},
    {"method": "notifications/cancelled", "params": {"requestId": "never sent"}},
    {"method": "notifications/progress", "params": {"progressToken": 1, "progress": 2}},
    {"method": "notifications/roots/list_changed", "params": {}},
    {"method": "notifications/unheard/of", "params": {}},
]
WRONG = [None, True, 0, -1, 1.5, 2**63, "", "x" * 300, "\u0000", [], [1, "a"], {}, {"a": {"b": []}}]


def places(value, above=()):
    """Where something can be replaced."""
    if above:
        yield above
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from places(child, (*above, key))


def mutations(message):
    for place in places(message):
        for wrong in WRONG:
            changed = copy.deepcopy(message)
            target = changed
            for key in place[:-1]:
                target = target[key]
            target[place[-1]] = wrong
            yield changed
        changed = copy.deepcopy(message)
        target = changed
        for key in place[:-1]:
            target = target[key]
        if isinstance(target, dict):
            del target[place[-1]]
            yield changed


def wrong_types(rng, most):
    """Messages with one part replaced or missing; all of them, or a sample."""
    every = [mutation for message in REQUESTS + NOTIFICATIONS for mutation in mutations(message)]
    rng.shuffle(every)
    return every[:most]


def garbage(rng, count):
    """Lines that are no messages."""
    fixed = [
        b"",
        b"\r",
        b" ",
        b"null",
        b"true",
        b"42",
        b'"text"',
        b"[]",
        b"{}",
        b"[{}]",
        b"\xef\xbb\xbf{}",
        b"{",
        b"}",
        b'{"jsonrpc":',
        b"\x00\x01\xff\xfe",
        b"NaN",
        b'{"jsonrpc":"1.0","id":1,"method":"ping"}',
        b'{"jsonrpc":"2.0","id":1}',
        b'{"jsonrpc":"2.0","id":99,"result":{}}',
        b'{"jsonrpc":"2.0","id":98,"error":{"code":1,"message":"x"}}',
        b'[{"jsonrpc":"2.0","id":97,"method":"ping"}]',
        b'{"jsonrpc":"2.0","method":"ping","id":null}',
        b"GET / HTTP/1.1",
    ]
    yield from fixed
    sample = json.dumps({"jsonrpc": "2.0", "id": 96, **REQUESTS[4]}).encode()
    for _ in range(count - len(fixed)):
        if rng.random() < 0.5:
            line = rng.randbytes(rng.randrange(200))
        else:
            line = bytearray(sample)
            for _ in range(rng.randrange(1, 6)):
                line[rng.randrange(len(line))] = rng.randrange(256)
        yield bytes(line).replace(b"\n", b" ")


def deep(ident):
    """Nesting far beyond what a parser's stack should be asked for."""
    for depth in (100, 200, 5_000, 200_000):
        nested = b"[" * depth + b"]" * depth
        yield b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"run","arguments":{"code":%s}}}' % (
            ident,
            nested,
        )
        yield b'{"jsonrpc":"2.0","id":%d,"method":"ping","params":%s1%s}' % (ident, b'{"a":' * depth, b"}" * depth)
        yield b"[" * depth
        yield b'{"a":' * depth


def huge(ident, size):
    return (
        b'{"jsonrpc":"2.0","id":%d,"method":"tools/call","params":{"name":"run","arguments":{"env":"bash","code":"%s"}}}'
        % (ident, b"x" * size)
    )


def rng(seed):
    return random.Random(seed)
