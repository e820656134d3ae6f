"""All that the two kinds of client do differently, besides httpx itself; the other is in `_async/_io.py`, by hand as well."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Callable, Generator, Generic, Iterable, Iterator, Optional, Type, TypeVar

T = TypeVar("T")
Callback = Callable[[T], object]


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def call(callback: Callback[T], value: T) -> None:
    callback(value)


def blocking(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def pieces(source: Iterable[bytes]) -> Iterator[bytes]:
    yield from source


class closing(Generic[T]):
    """Ends a generator with its block, rather than whenever it is collected."""

    def __init__(self, generator: Generator[T, None, None]) -> None:
        self._generator = generator

    def __enter__(self) -> Generator[T, None, None]:
        return self._generator

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self._generator.close()
