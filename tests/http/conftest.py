"""One broker for all tests over HTTP: each names its own queues."""

import hashlib
import re
from collections.abc import AsyncIterator

import asyncpg
import httpx
import pytest
import pytest_asyncio

from tests.support.broker import Broker
from tests.support.database import Databases
from tests.support.wire import Wire


@pytest_asyncio.fixture(scope="session")
async def wire(databases: Databases) -> AsyncIterator[Wire]:
    """The wire of the shared broker."""
    async with databases.clone() as url:
        with Broker(url, RETENTION_INTERVAL="200") as broker:
            async with httpx.AsyncClient(base_url=broker.base_url, timeout=60) as http:
                sql = await asyncpg.connect(url)
                try:
                    yield Wire(http, sql)
                finally:
                    await sql.close()


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    """A queue's name that only this test uses."""
    name = f"{request.module.__name__.rpartition('.')[2]} {request.node.name}"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
    return f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
