"""What all tests share: async ones run on asyncio, which is what the package promises."""

import pytest


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
