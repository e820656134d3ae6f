from typing import AsyncIterator, Iterator

import pytest
from daemon import Daemon

import carrel


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    one = Daemon()
    one.start()
    yield one
    one.stop()


@pytest.fixture(scope="session")
def operator(daemon: Daemon) -> Iterator[carrel.Carrel]:
    with carrel.Carrel(socket=daemon.socket) as client:
        yield client


@pytest.fixture(scope="session")
def token(operator: carrel.Carrel) -> str:
    made = operator.tokens.create("tests")
    assert made.token
    return made.token


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, daemon: Daemon, token: str) -> Iterator[carrel.Carrel]:
    """Both doors: the operator's, and a token's."""
    unix = request.param == "unix"
    with carrel.Carrel(socket=daemon.socket) if unix else carrel.Carrel(daemon.url, token) as one:
        yield one


@pytest.fixture
def sandbox(client: carrel.Carrel) -> Iterator[carrel.Sandbox]:
    with client.sandbox() as one:
        yield one


@pytest.fixture
async def aclient(daemon: Daemon) -> AsyncIterator[carrel.AsyncCarrel]:
    async with carrel.AsyncCarrel(socket=daemon.socket) as one:
        yield one


@pytest.fixture
async def asandbox(aclient: carrel.AsyncCarrel) -> AsyncIterator[carrel.AsyncSandbox]:
    async with await aclient.sandbox() as one:
        yield one
