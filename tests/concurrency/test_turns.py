"""Turns: a process that has lost a race over a partition lets its competitors finish first."""

import asyncio

import asyncpg
import pytest

from queen_pg import database as door
from queen_pg import turns
from queen_pg.broker.partition import resolve
from queen_pg.broker.transaction import Transaction
from queen_pg.config import Settings
from queen_pg.database import Database
from tests.support.process import TENANT, Process
from tests.support.waits import until, until_blocked

HOLD = "select from queen.partitions where id = $1 for update"
TOUCH = "update queen.partitions set last_append_at = last_append_at where id = $1"
LOCKS = """
select granted, objid::bigint as key from pg_locks
where locktype = 'advisory' and classid = hashtext('queen.turns')::bigint & 4294967295::bigint
"""
TURN = "select pg_advisory_lock(hashtext('queen.turns'), $1)"


async def lose_a_race(process: Process, session: asyncpg.Connection, partition_id: int) -> None:
    """Let a process's push to a partition wait for somebody who changes it."""
    before = process.db._turns.contested([partition_id])
    assert before == []
    transaction = session.transaction()
    await transaction.start()
    await session.execute(TOUCH, partition_id)
    push = asyncio.create_task(process.push_one("mail", "hot"))
    await until_blocked(session)
    await transaction.commit()
    await push
    assert process.db._turns.contested([partition_id]) == [partition_id]


async def hot(process: Process) -> int:
    """Return the id of a partition that exists."""
    await process.push_one("mail", "hot")
    [partition_id] = (await resolve(process.db, TENANT, [("mail", "hot")], 1e9)).values()
    return partition_id


async def test_after_a_lost_race_the_partition_is_locked_before_the_step(
    one: Process, session: asyncpg.Connection
) -> None:
    partition_id = await hot(one)
    assert await session.fetch(LOCKS) == []
    await lose_a_race(one, session, partition_id)

    async with session.transaction():
        await session.execute(HOLD, partition_id)
        push = asyncio.create_task(one.push_one("mail", "hot"))
        await until_blocked(session)
        assert [tuple(row) for row in await session.fetch(LOCKS)] == [(True, partition_id)]
    assert (await push).status == "queued"
    await until(session, f"select not exists ({LOCKS})")


async def test_a_competitor_is_waited_for_before_the_step(
    one: Process, session: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 30)
    partition_id = await hot(one)
    await lose_a_race(one, session, partition_id)
    await session.execute(TURN, partition_id)
    push = asyncio.create_task(one.push_one("mail", "hot"))
    await until_blocked(session)
    async with session.transaction():
        await session.execute(TOUCH, partition_id)
    assert not push.done()
    retries = one.db._turns._lost[partition_id]
    await session.execute("select pg_advisory_unlock_all()")
    assert (await push).status == "queued"
    assert one.db._turns._lost[partition_id] == retries, "it has lost no other race"


async def test_who_keeps_the_lock_is_not_waited_for_long(
    one: Process, session: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 0.05)
    partition_id = await hot(one)
    await lose_a_race(one, session, partition_id)
    await session.execute(TURN, partition_id)
    assert (await one.push_one("mail", "hot")).status == "queued"
    assert (await one.push_one("mail", "hot")).status == "queued"


async def test_steps_of_one_process_do_not_wait_for_each_others_turns(
    one: Process, other: Process, session: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them at once than there are sessions for turns, pushes and transactions mixed."""
    monkeypatch.setattr(turns, "PATIENCE_SECONDS", 10)
    partition_id = await hot(one)
    await lose_a_race(one, session, partition_id)
    other.db._turns.lost([partition_id])
    async with asyncio.timeout(9):
        told = await asyncio.gather(
            *(
                process.push_one("mail", "hot")
                for _ in range(4 * door.TURNS_MAX)
                for process in (one, other)
            ),
            *(
                process.commit(Transaction(items=[process.item("mail", "hot")]))
                for _ in range(2 * door.TURNS_MAX)
                for process in (one, other)
            ),
        )
    assert len(told) == 12 * door.TURNS_MAX


async def test_what_is_long_ago_is_forgotten(
    one: Process, session: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition_id = await hot(one)
    await lose_a_race(one, session, partition_id)
    monkeypatch.setattr(turns, "LOST_SECONDS", 0)
    assert one.db._turns.contested([partition_id]) == []
    monkeypatch.setattr(turns, "REMEMBERED_MAX", 10)
    one.db._turns.lost(range(100, 108))
    one.db._turns.lost(range(200, 208))
    assert len(one.db._turns._lost) <= 10


async def test_behind_a_pooler_nobody_has_a_turn(database: str) -> None:
    db = Database(Settings(pg_url=database, pg_pooler=True))
    await db.start()
    db._turns.lost([1])
    session = await asyncpg.connect(database)
    async with db.turn([1]):
        assert await session.fetch(LOCKS) == []
    await session.close()
    await db.close()
