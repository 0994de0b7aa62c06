"""Exactly-once, precisely: workers are killed at any moment, and every input takes effect once.

Workers are real processes, killed with SIGKILL before, during and after their commit; now and then
one stands still instead until others have its lease, and goes on then as if nothing had been. Sixty
kills here; for a thousand:

    QUEEN_TEST_KILLS=1000 python -m pytest tests/exactly_once
"""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest

from queen_pg.broker.push import PushItem, push
from queen_pg.database import Database
from tests.exactly_once.worker import (
    COUNTS,
    INPUTS,
    LEASE_SECONDS,
    MARKERS,
    OUTPUTS,
    Fate,
    Input,
    Moment,
    Orders,
)
from tests.support.broker import Broker
from tests.support.isolation import soon

KILLS = int(os.environ.get("QUEEN_TEST_KILLS", "60"))
WORKERS = 4
ENTITIES = 40
# Inputs that wait, at least, for as long as workers are being killed.
BACKLOG = 80
MOMENTS = (Moment.BEFORE, Moment.COMMIT, Moment.AFTER, Moment.COMMIT, Moment.POP, Moment.START)
# How long after a moment it may be, so that the kill falls anywhere into what is done then.
SECONDS_MAX = {Moment.START: 0.4, Moment.POP: 0.03, Moment.COMMIT: 0.03}
STALLED = 0.05
PATIENCE_SECONDS = 60.0

OPEN = """
select coalesce(sum(p.next_offset - coalesce(c.committed_offset, -1) - 1), 0)::bigint
from queen.partitions p
join queen.queues q on q.id = p.queue_id and q.name = $1
left join queen.cursors c on c.partition_id = p.id
"""


class Campaign:
    """Has workers killed until there were enough kills, and then lets them finish."""

    def __init__(
        self,
        db: Database,
        sql: asyncpg.Connection,
        kills: int,
        *,
        moments: Sequence[Moment] = MOMENTS,
        **orders: Any,
    ) -> None:
        self.inputs: list[Input] = []
        self.killed: Counter[Moment] = Counter()
        self._db = db
        self._sql = sql
        self._kills = kills
        self._moments = itertools.cycle(moments)
        self._orders = {"base_url": "", "split": False, **orders}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            slots = [group.create_task(self._keep_a_worker()) for _ in range(WORKERS)]
            await self._feed()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self._sql.fetchval(OPEN, INPUTS):
                    await asyncio.sleep(0.02)
            for slot in slots:
                slot.cancel()

    @property
    def _killing(self) -> bool:
        return self.killed.total() < self._kills

    async def _feed(self) -> None:
        while self._killing:
            if await self._sql.fetchval(OPEN, INPUTS) < BACKLOG:
                first = len(self.inputs)
                batch = [self._input(number) for number in range(first, first + BACKLOG)]
                items = [
                    PushItem(INPUTS, one.entity, msgspec.json.encode(one), one.id) for one in batch
                ]
                await push(self._db, 1, items, soon())
                self.inputs += batch
            await asyncio.sleep(0.02)

    def _input(self, number: int) -> Input:
        return Input(f"input-{number}", f"entity-{random.randrange(ENTITIES):02d}", number)

    async def _keep_a_worker(self) -> None:
        """Start a worker, and another one whenever it has died."""
        nursery = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.exactly_once.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        try:
            while True:
                fate = self._fate() if self._killing else None
                orders = msgspec.convert({**self._orders, "fate": fate}, Orders)
                nursery.stdin.write(msgspec.json.encode(orders) + b"\n")
                code = int(await nursery.stdout.readline())
                assert fate is not None
                assert code == -signal.SIGKILL, "a worker ended by itself"
                self.killed[fate.moment] += 1
        finally:
            nursery.terminate()
            await nursery.wait()

    def _fate(self) -> Fate:
        moment = next(self._moments)
        if moment is Moment.BEFORE and random.random() < STALLED * len(MOMENTS):
            return Fate(moment, random.randint(1, 3), 0.2, stalled=LEASE_SECONDS + 0.3)
        seconds = random.uniform(0, SECONDS_MAX.get(moment, 0))
        return Fate(moment, 1 if moment is Moment.START else random.randint(1, 4), seconds)


async def wrongs(sql: asyncpg.Connection, inputs: list[Input]) -> list[str]:
    """Return what is wrong with the effects of the inputs; nothing, if each took effect once."""
    rows = await sql.fetch(
        "select m.payload::text from queen.messages m"
        " join queen.partitions p on p.id = m.partition_id"
        " join queen.queues q on q.id = p.queue_id and q.name = $1"
        " order by p.id, m.message_offset",
        OUTPUTS,
    )
    outputs = [msgspec.json.decode(payload, type=Input) for (payload,) in rows]
    times = Counter(output.id for output in outputs)
    wrong = [f"{times[one.id]} outputs of {one.id}" for one in inputs if times[one.id] != 1]
    counts = dict(
        await sql.fetch("select key, value::text from queen.kv where namespace = $1", COUNTS)
    )
    for entity in sorted({one.entity for one in inputs}):
        mine = [one.id for one in inputs if one.entity == entity]
        if counts.get(entity) != str(len(mine)):
            wrong.append(f"{entity} counts {counts.get(entity)} of {len(mine)}")
        done = [output.id for output in outputs if output.entity == entity]
        if sorted(done) == sorted(mine) and done != mine:
            wrong.append(f"{entity} was not done in order")
    marked = await sql.fetchval("select count(*) from queen.kv where namespace = $1", MARKERS)
    if marked != sum(one.number % 2 for one in inputs):
        wrong.append(f"{marked} markers")
    return wrong


@pytest.fixture
async def sql(database: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


async def test_every_input_takes_effect_once_by_the_wire(
    db: Database, sql: asyncpg.Connection, database: str, broker: Broker
) -> None:
    campaign = Campaign(db, sql, KILLS // 2, way="http", pg_url=database, base_url=broker.base_url)
    await campaign.run()
    print(f"{len(campaign.inputs)} inputs; killed {dict(campaign.killed)}")
    assert await wrongs(sql, campaign.inputs) == []


async def test_every_input_takes_effect_once_by_the_brokers_own_doors(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    # Here the kill takes the connection to the database with it, wherever the commit is.
    campaign = Campaign(db, sql, KILLS // 2, way="doors", pg_url=database)
    await campaign.run()
    print(f"{len(campaign.inputs)} inputs; killed {dict(campaign.killed)}")
    assert await wrongs(sql, campaign.inputs) == []


async def test_effects_apart_from_their_ack_would_be_seen_to_happen_twice(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    campaign = Campaign(
        db, sql, 8, moments=(Moment.BETWEEN,), way="doors", pg_url=database, split=True
    )
    await campaign.run()
    assert await wrongs(sql, campaign.inputs) != []
