"""A group's first claim of a partition, and the deletion of its queue at the same moment.

The claim writes a cursor where there was none, so the two meet on the group's row, and one of them
waits: no cursor may outlive its queue.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator

import asyncpg
import pytest
import pytest_asyncio

from queen_pg.broker.push import PushItem, push
from queen_pg.database import Database

CLAIM = """
select * from queen._claim(array[$1::bigint], array[$2::bigint], array[false], array[-1::bigint],
    array[0::bigint], array[0::bigint], array[1::bigint], array[$3::uuid], array[60], array[false],
    array[false])
"""
DELETE = "select queen._delete_queue(1, 'orders')"
LEFT = """
select (select count(*) from queen.cursors) + (select count(*) from queen.ready)
     + (select count(*) from queen.partitions) + (select count(*) from queen.messages)
"""
WAITING = "select exists (select from pg_locks where pid = $1 and not granted)"


@pytest_asyncio.fixture
async def sessions(database: str) -> AsyncIterator[list[asyncpg.Connection]]:
    opened = [await asyncpg.connect(database) for _ in range(3)]
    yield opened
    for session in opened:
        await session.close()


@pytest_asyncio.fixture
async def proposal(db: Database) -> tuple[int, int, uuid.UUID]:
    """A partition with one message, a group that has no cursor on it, and a lease's id."""
    deadline = asyncio.get_running_loop().time() + 30
    await push(db, 1, [PushItem("orders", "order-1", b"{}")], deadline)
    [[group]] = await db.step(
        "_register_group",
        deadline=deadline,
        tenant=1,
        queue="orders",
        consumer_group="billing",
        subscribing=True,
        subscription_mode="all",
        subscription_from=None,
        conflation=False,
    )
    [[_, partition]] = await db.read(
        "_resolve_partitions", tenant=1, group_queue=["orders"], group_partition=["order-1"]
    )
    return partition, group, uuid.uuid4()


async def until_waiting(watcher: asyncpg.Connection, session: asyncpg.Connection) -> None:
    async with asyncio.timeout(10):
        while not await watcher.fetchval(WAITING, session.get_server_pid()):
            await asyncio.sleep(0.005)


async def test_a_deletion_waits_for_a_first_claim_and_takes_its_cursor(
    sessions: list[asyncpg.Connection], proposal: tuple[int, int, uuid.UUID]
) -> None:
    claiming, deleting, watcher = sessions
    async with claiming.transaction(isolation="serializable"):
        assert len(await claiming.fetch(CLAIM, *proposal)) == 1
        deletion = asyncio.create_task(deleting.fetchval(DELETE))
        await until_waiting(watcher, deleting)
    assert await deletion
    assert await watcher.fetchval(LEFT) == 0


async def test_a_first_claim_waits_for_a_deletion_and_loses(
    sessions: list[asyncpg.Connection], proposal: tuple[int, int, uuid.UUID]
) -> None:
    claiming, deleting, watcher = sessions
    transaction = claiming.transaction(isolation="serializable")
    await transaction.start()
    await claiming.execute("select from queen.tenants where id = 1")
    async with deleting.transaction():
        assert await deleting.fetchval(DELETE)
        claim = asyncio.create_task(claiming.fetch(CLAIM, *proposal))
        await until_waiting(watcher, claiming)
    with pytest.raises(asyncpg.SerializationError):
        await claim
    await transaction.rollback()
    assert await watcher.fetchval(LEFT) == 0
