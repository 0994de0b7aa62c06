"""A group is born while pushes are under way: whether they saw it or not, nothing is lost to it.

A push that began before the group is visible enters no hint for it; the pops of a new group look
for such messages again, and a sweep looks for what even that misses.
"""

import asyncio

import asyncpg
import pytest
from asyncpg.transaction import Transaction

from queen_pg.broker import retention
from queen_pg.broker.retention import Walk
from tests.support.process import Process, messages, offsets
from tests.support.waits import WAIT_SECONDS, until

PUSH = "select message_offset from queen.push('mail', '{}', 'p')"
REGISTER = "select queen._register_group(1, 'mail', 'g', true, 'all', null, false)"
# When the second look for what missed the group may come.
SECOND_LOOK = "select registered_at < queen.now() - interval '1 second' from queen.consumer_groups"


async def push_and_commit(session: asyncpg.Connection, old: Transaction) -> None:
    """Push in a transaction that began long ago; where that is sent back, push again."""
    try:
        await session.execute(PUSH)
        await old.commit()
    except asyncpg.SerializationError:
        await old.rollback()
        await session.execute(PUSH)


async def test_pushes_all_around_the_birth_of_a_group_reach_it(one: Process) -> None:
    await one.push_one("mail", "first")

    async def push(number: int) -> str:
        item = one.item("mail", f"partition {number % 40}")
        await one.push([item])
        return item.payload.decode()

    pushes = [asyncio.create_task(push(number)) for number in range(200)]
    pops = [
        asyncio.create_task(one.pop("mail", consumer_group="g", batch=1, partitions=1))
        for _ in range(3)
    ]
    pushed = {*await asyncio.gather(*pushes), "0"}
    got: list[str] = []
    for pop in pops:
        got += messages(await pop)
        await one.ack(await pop)
    async with asyncio.timeout(WAIT_SECONDS):
        while len(got) < len(pushed):
            answer = await one.pop("mail", consumer_group="g", partitions=64, wait=True)
            await one.ack(answer)
            got += messages(answer)
    assert sorted(got) == sorted(pushed)


@pytest.mark.parametrize("isolation", ["serializable", "repeatable_read"])
async def test_a_push_with_an_older_snapshot_reaches_the_group(
    one: Process, session: asyncpg.Connection, isolation: str
) -> None:
    await one.push_one("mail", "other")
    old = session.transaction(isolation=isolation)
    await old.start()
    await session.fetch("select from queen.consumer_groups")
    await one.ack(await one.pop("mail", consumer_group="g"))
    parked = asyncio.create_task(one.pop("mail", consumer_group="g", wait=True))
    await one.settled()
    await push_and_commit(session, old)
    async with asyncio.timeout(WAIT_SECONDS):
        answer = await parked
    assert [claim.partition for claim in answer.claims] == ["p"]


async def test_a_push_that_ends_long_after_the_birth_of_a_group_reaches_it(
    one: Process, database: str, session: asyncpg.Connection
) -> None:
    """It began to write before the group could be seen, and ends after the second look's time."""
    await one.push_one("mail", "other")
    pushing = await asyncpg.connect(database)
    try:
        late = pushing.transaction()
        async with session.transaction(isolation="serializable"):
            await session.execute(REGISTER)
            await late.start()
            await pushing.execute(PUSH)
        await one.ack(await one.pop("mail", consumer_group="g"))
        await until(session, SECOND_LOOK)
        assert offsets(await one.pop("mail", consumer_group="g")) == []
        await late.commit()
    finally:
        await pushing.close()
    async with asyncio.timeout(WAIT_SECONDS):
        assert offsets(await one.pop("mail", consumer_group="g", wait=True)) == [0]


@pytest.mark.parametrize("isolation", ["serializable", "repeatable_read"])
async def test_the_sweep_finds_a_push_whose_snapshot_was_older_than_anybody_waits_for(
    one: Process, session: asyncpg.Connection, database: str, isolation: str
) -> None:
    await one.push_one("mail", "other")
    pushing = await asyncpg.connect(database)
    try:
        old = pushing.transaction(isolation=isolation)
        await old.start()
        await pushing.fetch("select from queen.consumer_groups")
        await one.ack(await one.pop("mail", consumer_group="g"))
        await until(session, SECOND_LOOK)
        assert offsets(await one.pop("mail", consumer_group="g")) == []
        await push_and_commit(pushing, old)
    finally:
        await pushing.close()
    walk = Walk()
    while await retention.mend_hints(one.db, walk):
        pass
    assert offsets(await one.pop("mail", consumer_group="g")) == [0]
