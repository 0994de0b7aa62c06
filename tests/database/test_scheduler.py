"""Schedulers on a real database: many at once, an outage, the KV sweep."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable

import asyncpg
import pytest
import pytest_asyncio

from queen_pg.broker import kv, timer, timer_fire
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import Held
from queen_pg.scheduler import KV_SWEEP_KEYS, KvSweep, Scheduler


def soon() -> float:
    return asyncio.get_running_loop().time() + 60


async def schedule(db: Database, queue: str, keys: range, partition: str = "Default") -> None:
    """Schedule timers that are due already, in the order of their numbers."""
    operations = [
        {
            "op": "schedule",
            "queue": queue,
            "timerKey": f"{partition}-{number}",
            "partition": partition,
            "delayMs": number - 1_000_000,
            "txn": f"{partition}-{number}",
            "payload": str(number),
        }
        for number in keys
    ]
    await timer.run(db, 1, operations, soon())


@pytest_asyncio.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


class Crowd:
    """Several brokers' schedulers on one database."""

    def __init__(self, url: str, size: int) -> None:
        self.databases = [Database(Settings(pg_url=url)) for _ in range(size)]
        self.pushed: list[tuple[int, set[str]]] = []
        self.schedulers = [
            Scheduler(db, lambda tenant, queues: self.pushed.append((tenant, queues)))
            for db in self.databases
        ]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Crowd":
        for db in self.databases:
            await db.start()
        self._tasks = [asyncio.create_task(one.run()) for one in self.schedulers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for scheduler in self.schedulers:
            await scheduler.stop()
        await asyncio.gather(*self._tasks)
        for db in self.databases:
            await db.close()


async def until(sql: asyncpg.Connection, query: str, wanted: Callable[[int], bool]) -> None:
    async with asyncio.timeout(60):
        while not wanted(await sql.fetchval(query)):
            await asyncio.sleep(0.02)


WAITING = """
select count(*) from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock'
"""
PENDING = "select count(*) from queen.timers"
DELIVERED = """
select p.name as partition, m.payload::text::integer as number
from queen.messages m join queen.partitions p on p.id = m.partition_id
order by p.name, m.message_offset
"""


async def test_many_brokers_fire_each_timer_once_and_in_order(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """Step 3.4-5, 3.4-10: whoever fires, a partition's timers enter it in due order."""
    partitions = ("a", "b", "c")
    for partition in partitions:
        await schedule(db, "q", range(400), partition)
    async with Crowd(database, 4) as crowd:
        await until(sql, PENDING, lambda count: count == 0)
    delivered = [tuple(row) for row in await sql.fetch(DELIVERED)]
    assert delivered == [(partition, number) for partition in partitions for number in range(400)]
    assert crowd.pushed
    assert all(pushed == (1, {"q"}) for pushed in crowd.pushed)


async def test_timers_fire_while_their_partitions_are_busy(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """A scheduler and steps that push to its partition and cancel its timers do not deadlock."""
    await schedule(db, "q", range(200))
    before = await sql.fetchval(
        "select deadlocks from pg_stat_database where datname = $1", database.rpartition("/")[2]
    )
    push = "select * from queen.push('q', '-1')"

    async def work(connection: asyncpg.Connection, keys: range) -> list[int]:
        cancelled = []
        for number in keys:
            operation = json.dumps(
                [{"op": "cancel", "queue": "q", "timerKey": f"Default-{number}"}]
            )
            async with connection.transaction():
                await connection.execute(push)
                result = await connection.fetchval(
                    "select result from queen._timers_apply(1, $1, queen.now())", operation
                )
            if json.loads(result)["ok"]:
                cancelled.append(number)
        return cancelled

    workers = [await asyncpg.connect(database) for _ in range(2)]
    async with Crowd(database, 2):
        results = await asyncio.gather(
            work(workers[0], range(0, 200, 3)), work(workers[1], range(199, 0, -3))
        )
        await until(sql, PENDING, lambda count: count == 0)
    for worker in workers:
        await worker.close()
    cancelled = {number for numbers in results for number in numbers}
    delivered = [row["number"] for row in await sql.fetch(DELIVERED) if row["number"] >= 0]
    assert delivered == sorted(set(range(200)) - cancelled)
    after = await sql.fetchval(
        "select deadlocks from pg_stat_database where datname = $1", database.rpartition("/")[2]
    )
    assert after == before


async def test_a_partition_that_is_held_holds_up_no_other(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """Somebody's open transaction has pushed to a partition: its timers wait, the others fire."""
    await sql.execute("select queen.push('q', '-1', 'held')")
    holder = await asyncpg.connect(database)
    async with Crowd(database, 1):
        async with holder.transaction():
            await holder.execute("select queen.push('q', '-2', 'held')")
            await schedule(db, "q", range(3), "held")
            await schedule(db, "q", range(10, 13), "free")
            await until(sql, PENDING, lambda count: count == 3)
            await schedule(db, "q", range(20, 23), "free")
            await until(sql, PENDING, lambda count: count == 3)
        await until(sql, PENDING, lambda count: count == 0)
    await holder.close()
    delivered = [tuple(row) for row in await sql.fetch(DELIVERED)]
    assert delivered == [
        *[("free", number) for number in (10, 11, 12, 20, 21, 22)],
        *[("held", number) for number in (-1, -2, 0, 1, 2)],
    ]


async def test_more_than_a_batch_of_held_timers_holds_up_no_younger_one(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """Step 3.4-5: a pass goes on behind them, and they keep their order when they are free."""
    size = 2 * timer_fire.BATCH_MAX + 50
    await sql.execute("select queen.push('q', '-1', 'held')")
    holder = await asyncpg.connect(database)
    async with Crowd(database, 2):
        async with holder.transaction():
            # Scheduled in here, so that none of them fires before.
            await holder.execute("select queen.push('q', '-2', 'held')")
            await schedule(db, "q", range(size), "held")
            await schedule(db, "q", range(size, size + 5), "free")
            await until(sql, PENDING, lambda count: count == size)
            await schedule(db, "q", range(size + 5, size + 10), "free")
            await until(sql, PENDING, lambda count: count == size)
        await until(sql, PENDING, lambda count: count == 0)
    await holder.close()
    delivered = [tuple(row) for row in await sql.fetch(DELIVERED)]
    assert delivered == [
        *[("free", number) for number in range(size, size + 10)],
        *[("held", number) for number in (-1, -2, *range(size))],
    ]


async def again_and_again(db: Database, timers: list[asyncpg.Record]) -> timer_fire.Fired:
    """Fire timers with patience, until it has paid."""
    while True:
        with contextlib.suppress(Held):
            return await timer_fire.fire(db, 1, timers, 5, soon(), patient=True)


async def test_who_is_patient_waits_a_moment_for_a_held_partition(
    database: str, db: Database, sql: asyncpg.Connection
) -> None:
    """Step 3.4-5: or the timers of one that is never free for long would never fire."""
    await sql.execute("select queen.push('q', '-1', 'held')")
    await schedule(db, "q", range(3), "held")
    [*found], _ = await timer_fire.due(db)
    holder = await asyncpg.connect(database)
    async with holder.transaction():
        await holder.execute("select queen.push('q', '-2', 'held')")
        fired = await timer_fire.fire(db, 1, found, 5, soon())
        assert fired == ({}, {(1, "q", "held")})
        with pytest.raises(Held):
            await timer_fire.fire(db, 1, found, 5, soon(), patient=True)
        # Also where the session sets no limit, as behind a pooler.
        with pytest.raises(asyncpg.LockNotAvailableError):
            await sql.execute(
                "select queen._timers_fire(1, '{q}', $1, '{held}', $2, false, 50)",
                [found[0]["timer_key"]],
                [found[0]["partition_id"]],
            )
        waiting = asyncio.create_task(again_and_again(db, found))
        await until(sql, WAITING, lambda count: count == 1)
    await holder.close()
    assert await waiting == ({"q": 3}, set())


async def test_it_outlives_its_connections(
    database: str, db: Database, sql: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("queen_pg.scheduler.TROUBLE_SECONDS", 0.05)
    async with Crowd(database, 2):
        for start in range(0, 50, 10):
            await schedule(db, "q", range(start, start + 10))
            await sql.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
                " and query ~ '_timers_(due|fire)'"
            )
        await until(sql, PENDING, lambda count: count == 0)
    delivered = [row["number"] for row in await sql.fetch(DELIVERED)]
    assert sorted(delivered) == list(range(50))


async def test_the_kv_sweep_walks_round_and_round(db: Database, sql: asyncpg.Connection) -> None:
    """Step 2.8: it goes on at once where there is much to do, and starts over at the end."""
    await sql.execute(
        "insert into queen.kv"
        " (tenant_id, namespace, key, version, value, expires_at, created_at, updated_at)"
        " select 1, 'n', n::text, n, '1', case when n % 5 > 0 then now() end, now(), now()"
        " from generate_series(1, $1::integer) n",
        3 * KV_SWEEP_KEYS,
    )
    sweep = KvSweep(db)
    await sweep.run()
    left = "select count(*) from queen.kv"
    assert await sql.fetchval(left) == 3 * KV_SWEEP_KEYS // 5
    operation = {"op": "put", "ns": "a", "key": "k", "value": "1", "ttlSeconds": 1}
    await kv.run(db, 1, [operation], soon())
    await sql.execute("update queen.kv set expires_at = now() where namespace = 'a'")
    for _ in range(2):
        await sweep.run()
    assert await sql.fetchval(left) == 3 * KV_SWEEP_KEYS // 5
