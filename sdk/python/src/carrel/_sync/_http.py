# Made from _async/_http.py by scripts/unasync: change it there.
"""Requests on their way: sent, sent again where that is safe, and streams that outlive their connection."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Generator, Iterator, Callable, Dict, List, Optional

import httpx

from .. import _errors as errors
from .._build import KEY, Request, page
from .._config import Place, keep_alive
from .._result import Json
from .._sse import Message, Parser
from .._stream import Follow, Patience
from .._version import __version__
from ._io import sleep

# The daemon is on this host or near it; one that does not take a connection in this time does not serve.
CONNECT_TIMEOUT = 10.0
# Pauses between attempts of a request: 0.1 s, 0.2 s, 0.4 s, …
RETRY_PAUSE = 0.1
# Refusals that pass by themselves, once a stream has been under way.
PASSING = (errors.Unavailable, errors.RateLimited, errors.AgentLost)

Body = Callable[[], Iterator[bytes]]


class Http:
    """One daemon's connections. Shared by everything that a client hands out."""

    def __init__(
        self,
        place: Place,
        *,
        timeout: float,
        retries: int,
        resume_for: float,
        transport: Optional[httpx.BaseTransport],
    ) -> None:
        self.place = place
        self._timeout = timeout
        self._retries = retries
        self.resume_for = resume_for
        # Certificates take longer to load than a call; without TLS there is nothing to check with them.
        verify = place.base_url.startswith("https:")
        if transport is None and place.socket is not None:
            transport = httpx.HTTPTransport(uds=place.socket, limits=_LIMITS, verify=verify)
        elif transport is None and place.loopback:
            # Made by hand, it takes no proxy from the environment: none would reach this host's own loopback.
            transport = httpx.HTTPTransport(limits=_LIMITS, verify=verify, socket_options=keep_alive())
        # Nothing is compressed: bytes are counted and taken up in the middle.
        headers = {"User-Agent": f"carrel-python/{__version__}", "Accept-Encoding": "identity"}
        if place.token:
            headers["Authorization"] = f"Bearer {place.token}"
        self._client = httpx.Client(
            base_url=place.base_url, headers=headers, transport=transport, limits=_LIMITS, follow_redirects=False
        )

    def close(self) -> None:
        self._client.close()

    def reply(self, request: Request, body: Optional[Body] = None, patient: bool = False) -> httpx.Response:
        """The whole answer, below 400. `patient`: tried for as long as a stream would be."""
        patience = Patience(self.resume_for)
        attempt = 0
        while True:
            try:
                response = self._client.request(**self._arguments(request, body))
            except httpx.TransportError as error:
                attempt += 1
                if not self._again(request, error, attempt, patient):
                    raise self._failure(error) from error
                sleep(patience.pause(error) if patient else RETRY_PAUSE * 2 ** (attempt - 1))
                continue
            if response.status_code < 400:
                return response
            refusal = errors.from_response(response.status_code, response.headers, response.content)
            # The first one, whose answer was lost, is still being done; this one will be given its answer.
            if not (attempt and KEY in request.headers and refusal.code == "in_progress"):
                raise refusal
            sleep(patience.pause(refusal, refusal.retry_after))

    def json(self, request: Request, patient: bool = False) -> Json:
        response = self.reply(request, patient=patient)
        return parse_json(response)

    def pages(self, request: Request) -> List[Json]:
        """All items of a list."""
        items: List[Json] = []
        after: Optional[str] = None
        while True:
            value = self.json(page(request, after))
            items += value["items"]
            after = value.get("next")
            if after is None:
                return items

    @contextmanager
    def stream(self, request: Request) -> Iterator[httpx.Response]:
        """An answer that is read as it comes. Breaks are httpx's own errors here; refusals are ours."""
        with self._client.stream(**self._arguments(request, None)) as response:
            if response.status_code >= 400:
                content = response.read()
                raise errors.from_response(response.status_code, response.headers, content)
            yield response

    def send(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """As it is, answered by whom it may: for what is passed on to a sandbox's port."""
        try:
            return self._client.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise self._failure(error) from error

    def follow(self, followed: Follow) -> Generator[Message, None, None]:
        """The messages of a stream up to its end, over as many connections as it takes; each comes once."""
        patience = Patience(self.resume_for)
        connected = False
        attempt = 0
        while True:
            at_least: Optional[float] = None
            clean = False
            broke: Exception
            try:
                with self.stream(followed.request) as response:
                    connected = True
                    followed.began(response.headers.get("last-event-id"))
                    parser = Parser()
                    for piece in response.iter_bytes():
                        # Read on by one piece after the end: mostly that is the end of the answer, and the connection can be
                        # used again.
                        if followed.ended:
                            return
                        for message in parser.feed(piece):
                            if followed.take(message):
                                patience.progress()
                                yield message
                if followed.ended:
                    return
                clean, broke = True, errors.ConnectionLost("the daemon ended the stream before its end")
            except httpx.TransportError as error:
                if followed.ended:
                    return
                broke = error
                if not connected and isinstance(error, _NOT_SENT):
                    attempt += 1
                    if attempt > self._retries:
                        raise self._failure(error) from error
                    sleep(RETRY_PAUSE * 2 ** (attempt - 1))
                    continue
            except PASSING as error:
                if not connected:
                    raise
                broke, at_least = error, error.retry_after
            followed.broken(clean, broke)
            sleep(patience.pause(broke, at_least))

    def _arguments(self, request: Request, body: Optional[Body]) -> Dict[str, Any]:
        read = self._timeout if request.read_timeout is None else request.read_timeout
        return {
            "method": request.method,
            "url": request.target,
            "json": request.json,
            "content": None if body is None else body(),
            "headers": request.headers,
            "timeout": httpx.Timeout(read, connect=CONNECT_TIMEOUT),
        }

    def _again(self, request: Request, error: httpx.TransportError, attempt: int, patient: bool) -> bool:
        # What never got a connection was never asked for, so that may always be tried again; a daemon that is silent
        # for the whole timeout would be so again.
        safe = isinstance(error, _NOT_SENT) or (request.repeatable and not isinstance(error, httpx.TimeoutException))
        return safe and (patient or attempt <= self._retries)

    def _failure(self, error: httpx.TransportError) -> errors.CarrelError:
        if isinstance(error, _NOT_SENT):
            return errors.ConnectionFailed(
                f"no daemon answers at {self.place}: {error}",
                hint="start one with `carrel serve`, or say where it is: CARREL_URL or CARREL_SOCKET",
            )
        if isinstance(error, httpx.TimeoutException):
            return errors.Timeout(f"the daemon at {self.place} did not answer in time")
        return errors.ConnectionLost(
            f"the connection to {self.place} broke: {error}", hint="what was asked for may have been done or not"
        )


# As many calls at once as a program cares to make: it is the daemon that limits them, and says so.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0)
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout)


def parse_json(response: httpx.Response) -> Json:
    try:
        value = response.json()
    except ValueError as error:
        raise errors.ProtocolError(f"the answer is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise errors.ProtocolError("the answer is not a JSON object")
    return value
