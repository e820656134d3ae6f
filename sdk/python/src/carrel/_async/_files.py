"""The files of a sandbox. Paths are relative to `/workspace`, or absolute inside it."""

from __future__ import annotations

import os
import posixpath
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, AsyncGenerator, AsyncIterator, Iterable, List, Optional, Type, Union

import httpx

from .._archive import PIECE, Packing, Rewound, beside, open_binary, spool, unpack
from .._build import Params, Request, delete, get, post, present, sandbox_path, write_file
from .._errors import ConnectionLost, InvalidArgument
from .._models import Change, Entry, Found, Replaced, Transferred
from .._sse import Message
from .._stream import Patience, follow_changes
from ._http import AsyncHttp, parse_json
from ._io import blocking, pieces, sleep

LocalPath = Union[str, "os.PathLike[str]"]


class AsyncFiles:
    """`sandbox.files`. They work on a sleeping sandbox too, mostly without waking it."""

    def __init__(self, http: AsyncHttp, sandbox: str) -> None:
        self._http = http
        self._sandbox = sandbox
        self._path = sandbox_path(sandbox, "files")

    async def read(self, path: str, *, offset: int = 0, length: Optional[int] = None) -> bytes:
        """Contents, or `length` bytes of them from `offset` on."""
        request = get(self._path + "/content", [("path", path)])
        if length == 0:
            return b""
        if offset or length is not None:
            last = "" if length is None else str(offset + length - 1)
            request = request.with_headers(Range=f"bytes={offset}-{last}")
        return (await self._http.reply(request)).content

    async def read_text(self, path: str, encoding: str = "utf-8") -> str:
        return (await self.read(path)).decode(encoding)

    async def write(
        self,
        path: str,
        data: Union[str, bytes],
        *,
        parents: bool = True,
        overwrite: bool = True,
        append: bool = False,
        mode: Optional[int] = None,
        if_match: Optional[str] = None,
        if_none_match: Optional[str] = None,
    ) -> Entry:
        """Replaces the file in one step. `if_match` (an [Entry]'s `etag`) refuses if somebody else wrote it meanwhile."""
        content = data.encode() if isinstance(data, str) else bytes(data)
        view = memoryview(content)
        cut = [bytes(view[at : at + PIECE]) for at in range(0, len(content), PIECE)] or [b""]
        params, headers, repeatable = write_file(
            path,
            parents=parents,
            overwrite=overwrite,
            append=append,
            mode=mode,
            if_match=if_match,
            if_none_match=if_none_match,
        )
        return await self._put(
            Request("PUT", self._path + "/content", params, None, headers, repeatable), cut, len(content)
        )

    async def list(self, path: str = ".", *, depth: int = 1) -> List[Entry]:
        """What is in a directory, and below it down to `depth`; names are relative to it."""
        found = await self._http.pages(get(self._path, [("path", path), ("depth", depth)]))
        return [Entry.parse(one) for one in found]

    async def stat(self, path: str, *, follow: bool = False) -> Entry:
        """What is known of a file. With `follow`: of what a link leads to."""
        return Entry.parse(await self._http.json(get(self._path + "/stat", [("path", path), ("follow", follow)])))

    async def etag(self, path: str) -> Optional[str]:
        """What `if_match` of a write compares with."""
        request = replace(get(self._path + "/content", [("path", path)]), method="HEAD")
        found: Optional[str] = (await self._http.reply(request)).headers.get("etag")
        return found

    async def move(self, source: str, target: str, *, overwrite: bool = False, parents: bool = False) -> Entry:
        """Renames exactly: `target` is the new path, not a directory to move into."""
        body = {"from": source, "to": target, "overwrite": overwrite, "parents": parents}
        return Entry.parse(await self._http.json(post(self._path + "/move", body)))

    async def delete(self, path: str, *, recursive: bool = False) -> int:
        """How many files, links and directories went."""
        # Sent twice, the second answer would be that there is no such file.
        request = replace(delete(self._path, [("path", path), ("recursive", recursive)]), repeatable=False)
        return int((await self._http.json(request))["removed"])

    async def mkdir(self, path: str, *, parents: bool = True, mode: Optional[int] = None) -> Entry:
        """With `parents`, those above too, and one that is there is fine."""
        body = present(path=path, parents=parents, mode=mode)
        return Entry.parse(await self._http.json(post(self._path + "/mkdir", body, repeatable=parents)))

    async def search(
        self,
        text: Optional[str] = None,
        *,
        path: Optional[str] = None,
        glob: Optional[str] = None,
        regex: bool = False,
        ignore_case: bool = False,
        limit: Optional[int] = None,
    ) -> Found:
        """By content (`text`, a `regex` if asked), by name (`glob`), or both."""
        body = present(
            path=path, glob=glob, text=text, regex=regex or None, ignore_case=ignore_case or None, limit=limit
        )
        return Found.parse(await self._http.json(post(self._path + "/search", body, repeatable=True)))

    async def replace(
        self,
        path: str,
        find: str,
        with_: str,
        *,
        glob: Optional[str] = None,
        regex: bool = False,
        expect: Optional[int] = None,
    ) -> Replaced:
        """Replaces text in a file, or in all below a directory. `expect`: nothing is changed unless it occurs so often."""
        body = {"path": path, "find": find, "with": with_, **present(glob=glob, regex=regex or None, expect=expect)}
        return Replaced.parse(await self._http.json(post(self._path + "/replace", body)))

    async def upload(self, local: LocalPath, path: Optional[str] = None) -> Transferred:
        """A file to `path` (its own name; below `path` if that ends with a slash), or a directory's contents into `path`."""
        source = Path(local)
        if await blocking(source.is_dir):
            packing = await blocking(Packing, source)
            request = Request("PUT", self._path + "/tree", [("path", path or "."), ("format", "tar")], repeatable=True)
            request = request.with_headers(Content_Type="application/x-tar")
            response = await self._http.reply(request, lambda: pieces(packing))
            return packing.done(Transferred.parse(parse_json(response)))
        target = source.name if path is None else posixpath.join(path, source.name) if path.endswith("/") else path
        with await blocking(open_binary, source) as file:
            size = os.fstat(file.fileno()).st_size
            mode = os.fstat(file.fileno()).st_mode & 0o777
            params: Params = [("path", target), ("parents", True), ("overwrite", True), ("mode", mode)]
            request = Request("PUT", self._path + "/content", params, repeatable=True)
            entry = await self._put(request, Rewound(file), size)
        return Transferred(files=1, directories=0, links=0, bytes=entry.size, left_out=[], left_out_count=0)

    async def download(self, path: str, local: Optional[LocalPath] = None) -> Transferred:
        """A file to `local` (a directory takes it by its name), or a directory's contents into the directory `local`.

        Nothing is written outside `local`, whatever the sandbox sent; a download that fails leaves what was there.
        """
        entry = await self.stat(path, follow=True)
        name = posixpath.basename(path.rstrip("/"))
        target = Path(local) if local is not None else Path(name or ".")
        if entry.is_dir:
            with await blocking(spool) as archive:
                await fetch(self._http, get(self._path + "/tree", [("path", path), ("format", "tar")]), archive)
                await blocking(archive.seek, 0)
                return await blocking(unpack, archive, target)
        if await blocking(target.is_dir):
            if name in ("", ".", ".."):
                raise InvalidArgument(f"`{path}` has no name to be saved as", hint="give a file's path to save it to")
            target = target / name
        request = get(self._path + "/content", [("path", path)])
        size = await save(self._http, request, target, entry.mode & 0o777)
        return Transferred(files=1, directories=0, links=0, bytes=size, left_out=[], left_out_count=0)

    async def watch(self, path: str = ".", *, recursive: bool = True) -> AsyncWatch:
        """Changes below `path` from now on. It watches when this returns, so nothing done afterwards is missed."""
        watch = AsyncWatch(self._http, self._sandbox, path, recursive)
        await watch.start()
        return watch

    async def _put(self, request: Request, content: Iterable[bytes], size: int) -> Entry:
        request = request.with_headers(Content_Type="application/octet-stream", Content_Length=str(size))
        response = await self._http.reply(request, lambda: pieces(content))
        return Entry.parse(parse_json(response), response.headers.get("etag"))


async def fetch(http: AsyncHttp, request: Request, file: IO[bytes]) -> None:
    """Contents into a file. A broken connection goes on where it broke while the contents are the same, else from the start."""
    patience = Patience(http.resume_for)
    etag: Optional[str] = None
    furthest = 0
    while True:
        taken = file.tell()
        asked = request
        if etag is not None and taken:
            asked = request.with_headers(Range=f"bytes={taken}-", If_Range=etag)
        try:
            async with http.stream(asked) as response:
                if response.status_code != httpx.codes.PARTIAL_CONTENT:
                    await blocking(file.seek, 0)
                    await blocking(file.truncate)
                etag = response.headers.get("etag")
                async for piece in response.aiter_bytes():
                    await blocking(file.write, piece)
                    # What has to start again each time and never gets further is no progress.
                    if file.tell() > furthest:
                        furthest = file.tell()
                        patience.progress()
            return
        except httpx.TransportError as error:
            await sleep(patience.pause(error))


async def save(http: AsyncHttp, request: Request, target: Path, mode: int) -> int:
    """An answer's contents as a local file, whole or not at all; how many bytes."""
    handle, temporary = await blocking(beside, target)
    try:
        with os.fdopen(handle, "wb") as file:
            await fetch(http, request, file)
            size = file.tell()
        await blocking(os.chmod, temporary, mode)
        await blocking(os.replace, temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    return size


class AsyncWatch:
    """Changes as they happen. A broken connection is taken up again, and said with a change of the kind `overflow`."""

    def __init__(self, http: AsyncHttp, sandbox: str, path: str, recursive: bool) -> None:
        self._messages: AsyncGenerator[Message, None] = http.follow(follow_changes(sandbox, path, recursive))

    async def start(self) -> None:
        """Returns once the daemon watches."""
        async for message in self._messages:
            if message.event == "ready":
                return
        raise ConnectionLost("the daemon ended the stream before its end")

    async def __aiter__(self) -> AsyncIterator[Change]:
        async for message in self._messages:
            if message.event == "change":
                yield Change.parse(message.json())
            elif message.event in ("ready", "overflow"):
                # A second `ready` is a connection taken up again: nobody knows what happened between.
                yield Change("", "overflow")

    async def close(self) -> None:
        await self._messages.aclose()

    async def __aenter__(self) -> AsyncWatch:
        return self

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self.close()
