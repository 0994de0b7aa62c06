"""Beside a reader that keeps an old snapshot, a look does not walk over what it has walked over."""

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from queen_pg.wakeup import OVERLAP_SECONDS, POLL_SECONDS
from tests.concurrency.test_waiters import SEEDED, parked, soon
from tests.support.process import TENANT, Process, offsets

DEAD = 200
LOOK = (
    "select from queen.consumer_groups g,"
    " queen._candidates(g.queue_id, g.id, null, 'all', null, false, array[100], array[10], $1)"
)
WALKED = "select pg_stat_get_xact_tuples_returned('queen.ready_group_id_ready_at_idx'::regclass)"


@pytest_asyncio.fixture
async def reader(database: str) -> AsyncIterator[asyncpg.Connection]:
    """A session that reads for long."""
    connection = await asyncpg.connect(database)
    await connection.execute("begin isolation level repeatable read; select from queen.ready")
    yield connection
    await connection.close()


@pytest.fixture
def looks(one: Process, monkeypatch: pytest.MonkeyPatch) -> list[float | None]:
    """How far back each look of a process goes."""
    recent: list[float | None] = []
    read = one.db.read

    async def noted(name: str, /, **arguments: Any) -> list[asyncpg.Record]:
        if name == "_candidates":
            recent.append(arguments["recent_seconds"])
        return await read(name, **arguments)

    monkeypatch.setattr(one.db, "read", noted)
    return recent


async def test_a_recent_look_begins_behind_what_is_dead(
    one: Process, session: asyncpg.Connection, reader: asyncpg.Connection
) -> None:
    await one.push_one("mail", "p")
    await one.ack(await one.pop("mail", consumer_group="g"))
    for number in range(DEAD):
        await session.execute(
            "update queen.ready set ready_at = queen.now() - interval '1 minute'"
            " + $1 * interval '1 millisecond'",
            number,
        )
    await session.execute("update queen.ready set ready_at = 'infinity'")
    await one.push_one("mail", "p")

    async def walked(recent_seconds: float | None) -> int:
        async with session.transaction():
            before: int = await session.fetchval(WALKED)
            assert len(await session.fetch(LOOK, recent_seconds)) == 1
            after: int = await session.fetchval(WALKED)
            return after - before

    assert await walked(None) > DEAD
    assert await walked(30.0) < 10


async def test_looks_between_two_polls_go_back_to_the_last_walk(
    one: Process, session: asyncpg.Connection, looks: list[float | None]
) -> None:
    await one.push_one("mail", "p")
    await one.ack(await one.pop("mail", consumer_group="g"))
    await session.execute(SEEDED)
    waiting = await parked(one, "mail", consumer_group="g")
    looks.clear()
    for _ in range(3):
        one.waiters.pushed(TENANT, ["mail"], heard=True)
        await one.settled()
    assert len(looks) == 3
    for recent in looks:
        assert recent is not None
        assert OVERLAP_SECONDS <= recent <= OVERLAP_SECONDS + POLL_SECONDS
    looks.clear()
    await one.pop("mail", consumer_group="g")
    assert None in looks, "who does not wait is told what there is"
    assert not waiting.done()


async def test_a_hint_from_before_the_last_walk_is_found_by_the_poll(
    one: Process, other: Process, session: asyncpg.Connection, looks: list[float | None]
) -> None:
    await one.push_one("mail", "p")
    await one.ack(await one.pop("mail", consumer_group="g"))
    await session.execute(SEEDED)
    waiting = await parked(one, "mail", consumer_group="g")
    async with session.transaction():
        await other.push([other.item("mail", "o")])
        await session.execute(
            "update queen.ready set ready_at = queen.now() - interval '1 hour'"
            " where ready_at < 'infinity'"
        )
    assert offsets(await soon(waiting)) == [0]
    assert looks[-1] is None
