"""Processes of a broker, side by side on one database."""

from collections.abc import AsyncIterator

import asyncpg
import pytest_asyncio

from tests.support.process import Process


@pytest_asyncio.fixture
async def one(database: str) -> AsyncIterator[Process]:
    """A process of a broker."""
    async with Process(database) as process:
        yield process


@pytest_asyncio.fixture
async def other(database: str) -> AsyncIterator[Process]:
    """Another process on the same database."""
    async with Process(database) as process:
        yield process


@pytest_asyncio.fixture
async def session(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A session beside them, for looks at the tables and transactions by hand."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()
