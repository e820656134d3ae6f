"""Who is let in over HTTP and who is not: Host, Origin and bearer token, on a real server."""

import asyncio
import http.client
import json
import sys
from urllib.parse import urlsplit

from place import Place

GREETING = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "door", "version": "1"}}
BODY = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": GREETING})
SHAPE = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


def status(port, headers, method="POST"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.putrequest(method, "/mcp", skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{port}", **SHAPE, "Content-Length": str(len(BODY)), **headers}.items():
        connection.putheader(name, value)
    connection.endheaders(BODY.encode())
    response = connection.getresponse()
    return response.status, response.headers


async def main():
    place = Place("http")
    app = "https://app.example.com"
    options = (
        "--allow-origin",
        app,
        "--allow-origin",
        "http://dev.example.com:3000",
        "--allow-host",
        "box.example.com",
    )
    try:
        port = urlsplit(await place.address(*options)).port
        plain = urlsplit(await place.address()).port
        right = {"Authorization": f"Bearer {place.token}"}
        own = f"http://127.0.0.1:{port}"
        cases = [
            # (what, port, headers, expected)
            ("the token", port, right, 200),
            ("the token in another case of its scheme", port, {"Authorization": f"bearer {place.token}"}, 200),
            ("no token", port, {}, 401),
            ("an empty token", port, {"Authorization": "Bearer "}, 401),
            ("a wrong token", port, {"Authorization": "Bearer " + "0" * 32}, 401),
            ("a beginning of the token", port, {"Authorization": f"Bearer {place.token[:-1]}"}, 401),
            ("more than the token", port, {"Authorization": f"Bearer {place.token}0"}, 401),
            ("another scheme", port, {"Authorization": f"Basic {place.token}"}, 401),
            ("the token as a cookie", port, {"Cookie": f"token={place.token}"}, 401),
            ("localhost", port, {**right, "Host": f"localhost:{port}"}, 200),
            ("the IPv6 loopback", port, {**right, "Host": f"[::1]:{port}"}, 200),
            ("an allowed host", port, {**right, "Host": "box.example.com"}, 200),
            ("a foreign host", port, {**right, "Host": "evil.example.com"}, 403),
            ("a foreign host that begins like ours", port, {**right, "Host": "127.0.0.1.evil.example.com"}, 403),
            ("an allowed host on a server that does not allow it", plain, {**right, "Host": "box.example.com"}, 403),
            ("an allowed origin", port, {**right, "Origin": app}, 200),
            ("an allowed origin with its port", port, {**right, "Origin": "http://dev.example.com:3000"}, 200),
            ("our own origin", port, {**right, "Origin": own}, 200),
            ("a foreign origin", port, {**right, "Origin": "https://evil.example.com"}, 403),
            ("an allowed origin's other port", port, {**right, "Origin": f"{app}:8443"}, 403),
            ("an allowed origin without its port", port, {**right, "Origin": "http://dev.example.com"}, 403),
            ("an allowed origin's other scheme", port, {**right, "Origin": "http://app.example.com"}, 403),
            ("a host below an allowed origin", port, {**right, "Origin": "https://evil.app.example.com"}, 403),
            ("another port of this machine", port, {**right, "Origin": "http://127.0.0.1:1"}, 403),
            ("no origin at all", port, {**right, "Origin": "null"}, 403),
            ("a foreign origin without a token", port, {"Origin": "https://evil.example.com"}, 401),
            ("an origin on a server that allows none", plain, {**right, "Origin": app}, 403),
        ]
        for what, door, headers, expected in cases:
            got, _ = status(door, headers)
            assert got == expected, f"{what}: {got} instead of {expected}"
        # A browser asks first, without the token; only pages that may call are told so.
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        for origin, allowed in ((app, app), ("https://evil.example.com", None)):
            _, headers = status(port, {"Origin": origin, **ask}, "OPTIONS")
            assert headers.get("Access-Control-Allow-Origin") == allowed, f"preflight of {origin}: {headers}"
    finally:
        await place.leave()
    print(f"python door: {len(cases) + 2} visitors, each let in or refused as it should be")


sys.exit(asyncio.run(main()))
