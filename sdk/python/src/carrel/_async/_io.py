"""All that the two kinds of client do differently, besides httpx itself; the other is in `_sync/_io.py`, by hand as well."""

from __future__ import annotations

import asyncio
import inspect
from types import TracebackType
from typing import Any, AsyncGenerator, AsyncIterator, Callable, Generic, Iterable, Optional, Type, TypeVar

T = TypeVar("T")
# May be a coroutine function; it is awaited before the next piece is read.
Callback = Callable[[T], object]


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def call(callback: Callback[T], value: T) -> None:
    result = callback(value)
    if inspect.isawaitable(result):
        await result


async def blocking(function: Callable[..., T], *arguments: Any) -> T:
    """Disk work, away from the event loop."""
    return await asyncio.to_thread(function, *arguments)


_DONE: Any = object()


async def pieces(source: Iterable[bytes]) -> AsyncIterator[bytes]:
    """A body that is read from the disk while it is sent."""
    iterator = iter(source)
    while True:
        piece = await asyncio.to_thread(next, iterator, _DONE)
        if piece is _DONE:
            return
        yield piece


class closing(Generic[T]):
    """Ends a generator with its block, rather than whenever it is collected."""

    def __init__(self, generator: AsyncGenerator[T, None]) -> None:
        self._generator = generator

    async def __aenter__(self) -> AsyncGenerator[T, None]:
        return self._generator

    async def __aexit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        await self._generator.aclose()
