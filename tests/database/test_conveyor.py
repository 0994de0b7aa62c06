"""The conveyor: calls that share a transaction keep what each of them was promised."""

import asyncio

import asyncpg
import pytest

from queen_pg.broker.push import PushItem
from queen_pg.config import Settings
from queen_pg.conveyor import Conveyor
from queen_pg.database import Database


@pytest.mark.parametrize("duplicate", [False, True])
async def test_appends_that_share_a_commit_have_stamps_that_rise_strictly(
    db: Database, database: str, duplicate: bool
) -> None:
    """Data-plane 2.2-7, also where a duplicate makes the shared transaction a careful one."""
    conveyor = Conveyor(db, Settings(pg_url=database, lanes=1))
    deadline = asyncio.get_running_loop().time() + 30
    await conveyor.push(1, [PushItem("q", "p", b"0", "first")], deadline)
    calls = [
        [PushItem("q", "p", b"1", f"{call}-{item}") for item in range(2)] for call in range(20)
    ]
    if duplicate:
        calls[7].append(PushItem("q", "p", b"1", "first"))
    answers = await asyncio.gather(*(conveyor.push(1, call, deadline) for call in calls))

    connection = await asyncpg.connect(database)
    stored = dict(await connection.fetch("select message_offset, created_at from queen.messages"))
    xids = await connection.fetchval(
        "select count(distinct xmin::text) from queen.messages where message_offset > 0"
    )
    last = await connection.fetchval("select last_append_at from queen.partitions")
    await connection.close()
    assert xids < len(calls), "calls share transactions"
    stamps = []
    for answer in sorted(answers, key=lambda each: each[0].offset or 0):
        offsets = [result.offset for result in answer if result.status == "queued"]
        assert offsets == list(range(offsets[0], offsets[0] + 2)), "an append is in one piece"
        assert len({stored[offset] for offset in offsets}) == 1, "and has one stamp"
        stamps.append(stored[offsets[0]])
    assert stamps == sorted(set(stamps))
    assert last == stamps[-1]
    statuses = [result.status for answer in answers for result in answer]
    assert statuses.count("duplicate") == int(duplicate)
