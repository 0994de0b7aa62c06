"""The passes over all partitions: missing hints are mended, retention does what is due."""

import asyncio

import asyncpg

from queen_pg.broker.pop import PopRequest
from queen_pg.broker.push import PushItem, push
from queen_pg.broker.retention import Walk, clean_up, mend_hints, retain
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.wakeup import Waiters

POP = PopRequest(queue="q", consumer_group="g", subscription_mode="all", batch=10)


def deadline() -> float:
    return asyncio.get_running_loop().time() + 30


async def test_a_lost_hint_is_mended_and_the_message_is_delivered(
    db: Database, database: str
) -> None:
    waiters = Waiters(db, Settings(pg_url=database))
    await push(db, 1, [PushItem("q", "a", b"1")], deadline())
    first = await waiters.pop(1, POP)
    assert [claim.partition for claim in first.claims] == ["a"]
    await push(db, 1, [PushItem("q", "b", b"2")], deadline())
    connection = await asyncpg.connect(database)
    await connection.execute(
        "delete from queen.ready r using queen.partitions p"
        " where p.id = r.partition_id and p.name = 'b'"
    )
    await connection.execute("update queen.consumer_groups set registered_xid = null")
    assert (await waiters.pop(1, POP)).claims == []

    walk = Walk()
    assert await mend_hints(db, walk) == 2
    assert [claim.partition for claim in (await waiters.pop(1, POP)).claims] == ["b"]
    assert await mend_hints(db, walk) == 0, "after the last group the walk begins anew"
    assert walk == Walk()
    await waiters.close()
    await connection.close()


async def test_retention_and_clean_up_go_over_all_partitions(db: Database, database: str) -> None:
    for name in ("a", "b"):
        await push(db, 1, [PushItem("q", name, b"1")], deadline())
    connection = await asyncpg.connect(database)
    await connection.execute("update queen.queues set max_wait_time_seconds = 1")
    await connection.execute("update queen.messages set created_at = '2020-01-01'")
    await connection.execute("update queen.partitions set last_append_at = '2020-01-01'")
    walk = Walk()
    while await retain(db, walk, 30):
        pass
    assert await connection.fetchval("select count(*) from queen.messages") == 0
    assert await connection.fetch("select log_start_offset from queen.partitions") == [(1,), (1,)]
    await clean_up(db, Walk(), 30)
    assert await connection.fetchval("select count(*) from queen.partitions") == 0
    await connection.close()
