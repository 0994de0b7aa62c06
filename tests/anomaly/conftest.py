"""Doors for tests of anomalies, and a place where two transactions meet before either commits."""

import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import asyncpg
import pytest
import pytest_asyncio

from queen_pg import database
from queen_pg.config import Settings
from tests.support.isolation import Counting, Lowered

CONNECTIONS = 8

Opener = Callable[..., AbstractAsyncContextManager[Counting]]

# Who writes a key of this name waits until a second one does. It gives up where the other cannot
# come because it waits itself, and nobody waits who comes later, as a repeated step does.
MEETING = """
create sequence queen.arrivals;
create function queen.meet() returns trigger language plpgsql as $$
declare
    v_until timestamptz := clock_timestamp() + interval '500 milliseconds';
begin
    perform nextval('queen.arrivals');
    while (select last_value from queen.arrivals) < 2 and clock_timestamp() < v_until loop
        perform pg_sleep(0.001);
    end loop;
    return new;
end $$;
create trigger meet before insert on queen.kv
for each row when (new.key like '~meeting-%') execute function queen.meet();
"""


@pytest.fixture(autouse=True)
def wait_for_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for locks as long as it takes, so that a wrong order of them shows as a deadlock."""
    monkeypatch.setattr(database, "LOCK_WAIT_MS", 0)


@pytest_asyncio.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection beside the doors."""
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest_asyncio.fixture
async def meeting(sql: asyncpg.Connection) -> asyncpg.Connection:
    """The place of meeting; the connection watches it."""
    await sql.execute(MEETING)
    return sql


@pytest.fixture
def open_door(database: str) -> Opener:
    """Open a door to the test's database: `async with open_door(lowered=False) as db`."""

    @contextlib.asynccontextmanager
    async def opened(
        *, lowered: bool = False, connections: int = CONNECTIONS
    ) -> AsyncIterator[Counting]:
        settings = Settings(pg_url=database, pg_pool_size=connections)
        db = Lowered(settings) if lowered else Counting(settings)
        await db.start()
        yield db
        await db.close()

    return opened
