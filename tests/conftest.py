"""Fixtures shared by all layers: a server for the run, databases by cloning, a broker process."""

from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from queen_pg.config import Settings
from queen_pg.database import Database
from tests.support import server as servers
from tests.support.broker import Broker
from tests.support.database import Databases
from tests.support.server import Server

# How fast examples are made says something of the machine, and nothing of the code.
settings.register_profile("queen", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("queen")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The PostgreSQL of this run."""
    with servers.find() as found:
        yield found


@pytest_asyncio.fixture(scope="session")
async def databases(server: Server) -> AsyncIterator[Databases]:
    """The maker of databases: `async with databases.clone() as url`."""
    made = Databases(server)
    yield made
    await made.close()


@pytest_asyncio.fixture
async def database(databases: Databases) -> AsyncIterator[str]:
    """The URL of a migrated database that only this test uses."""
    async with databases.clone() as url:
        yield url


@pytest_asyncio.fixture(scope="session")
async def shared_database(databases: Databases) -> AsyncIterator[str]:
    """The URL of the database in which tests leave nothing behind."""
    async with databases.clone() as url:
        yield url


@pytest_asyncio.fixture
async def conn(shared_database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection inside a transaction that is rolled back, with an empty search path."""
    connection = await asyncpg.connect(shared_database, server_settings={"search_path": ""})
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield connection
    finally:
        await transaction.rollback()
        await connection.close()


@pytest_asyncio.fixture
async def db(database: str) -> AsyncIterator[Database]:
    """The broker's own door to a database that only this test uses."""
    opened = Database(Settings(pg_url=database))
    await opened.start()
    yield opened
    await opened.close()


@pytest.fixture
def broker(database: str) -> Iterator[Broker]:
    """A running broker on a database that only this test uses."""
    with Broker(database) as running:
        yield running
