"""The surroundings of the SDK's tests: a pytest plugin for the process that runs them."""

import os
from collections.abc import AsyncIterator

import pytest_asyncio
from queen import Queen


@pytest_asyncio.fixture
async def client() -> AsyncIterator[Queen]:
    """The SDK's client of the broker under test, with its defaults."""
    async with Queen(os.environ["QUEEN_SERVER_URL"]) as connected:
        yield connected
