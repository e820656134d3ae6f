"""The official client, 1.x and 2.x, behind the few words that the tasks need."""

import asyncio
import base64
import contextlib
import sys
from importlib.metadata import version

from mcp import ClientSession, StdioServerParameters, types
from mcp.client.stdio import stdio_client

VERSION = version("mcp")
NEW = VERSION.startswith("2.")
if NEW:
    import httpx2 as httpx
    from mcp.client import Client
    from mcp.client.streamable_http import streamable_http_client
else:
    import httpx
    from mcp.client.streamable_http import streamable_http_client


class Outcome:
    """A tool's result, as it came over the wire."""

    def __init__(self, result):
        self.wire = result.model_dump(by_alias=True, mode="json", exclude_none=True)
        blocks = self.wire["content"]
        self.failed = self.wire.get("isError", False)
        self.text = "\n".join(block["text"] for block in blocks if block["type"] == "text")
        self.images = [
            (block["mimeType"], base64.b64decode(block["data"])) for block in blocks if block["type"] == "image"
        ]
        self.links = {block["name"]: block["uri"] for block in blocks if block["type"] == "resource_link"}
        self.structured = self.wire.get("structuredContent")


class Connection:
    """One client, connected."""

    def __init__(self, client, session, updates):
        self.client, self.session, self.updates = client, session, updates

    async def call(self, tool, arguments, progress=None):
        async def told(done, total, message):
            progress(done, message)

        callback = told if progress else None
        return Outcome(await self.client.call_tool(tool, arguments, progress_callback=callback))

    async def run(self, code, env="python", progress=None, **arguments):
        return await self.call("run", {"code": code, "env": env, **arguments}, progress)

    def start(self, tool, arguments, progress=None):
        """A call under way, which `cancel` can end."""
        task = asyncio.create_task(self.call(tool, arguments, progress))
        # Client 1.x leaves it to its user to say that a request is cancelled, and keeps its ids to itself.
        task.request = None if NEW else self.session._request_id
        return task

    async def cancel(self, task):
        if not NEW:
            params = types.CancelledNotificationParams(requestId=task.request, reason="enough")
            note = types.CancelledNotification(method="notifications/cancelled", params=params)
            await self.session.send_notification(types.ClientNotification(note))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task

    async def tools(self):
        return [tool.model_dump(by_alias=True, mode="json") for tool in (await self.client.list_tools()).tools]

    async def resources(self):
        listed = (await self.client.list_resources()).model_dump(by_alias=True, mode="json")
        return {resource["uri"]: resource["name"] for resource in listed["resources"]}

    async def templates(self):
        listed = (await self.client.list_resource_templates()).model_dump(by_alias=True, mode="json")
        return [template["uriTemplate"] for template in listed["resourceTemplates"]]

    async def read(self, uri):
        """Text as text, everything else as bytes."""
        contents = (await self.client.read_resource(uri)).model_dump(by_alias=True, mode="json")["contents"]
        parts = [part.get("text") or base64.b64decode(part.get("blob") or "") for part in contents]
        return parts[0] if len(parts) == 1 else parts

    async def complete(self, template, name, value, context=None):
        ref = types.ResourceTemplateReference(type="ref/resource", uri=template)
        answer = await self.client.complete(ref, {"name": name, "value": value}, context)
        return answer.completion.values

    @contextlib.asynccontextmanager
    async def watching(self, uri):
        """Gives a function that returns when the resource has changed."""
        if NEW:
            async with self.client.listen(resource_subscriptions=[uri]) as subscription:
                yield subscription.__anext__
            return
        await self.session.subscribe_resource(uri)
        yield self.updates.get
        await self.session.unsubscribe_resource(uri)


@contextlib.asynccontextmanager
async def connect(place, *arguments, name="tasks", query=""):
    info = types.Implementation(name=name, version="1")
    updates = asyncio.Queue()

    async def heard(message):
        note = getattr(message, "root", message)
        if isinstance(note, types.ResourceUpdatedNotification):
            updates.put_nowait(note)

    async with contextlib.AsyncExitStack() as stack:
        if place.transport == "stdio":
            command = place.command(*arguments)
            server = StdioServerParameters(command=command[0], args=command[1:], env=place.environment)
            transport = stdio_client(server, errlog=sys.stderr)
        else:
            url = await place.address(*arguments) + query
            headers = {"Authorization": f"Bearer {place.token}"}
            patience = httpx.Timeout(30, read=300)
            http = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=patience))
            transport = streamable_http_client(url, http_client=http)
        if NEW:
            client = await stack.enter_async_context(Client(transport, client_info=info, message_handler=heard))
            session = client.session
        else:
            streams = await stack.enter_async_context(transport)
            session = ClientSession(*streams[:2], client_info=info, message_handler=heard)
            client = await stack.enter_async_context(session)
            await session.initialize()
        yield Connection(client, session, updates)
