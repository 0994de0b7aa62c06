"""Exactly-once, precisely: workers are killed at any moment, and every input takes effect once.

Workers are real processes, killed with SIGKILL before, during and after their commit; now and then
one is stopped instead until others have its lease, and goes on then as if nothing had been. Sixty
kills here; for a thousand:

    QUEEN_TEST_KILLS=1000 python -m pytest tests/exactly_once
"""

import asyncio
import contextlib
import itertools
import mmap
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
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
    Burial,
    Input,
    Orders,
    Phase,
)
from tests.support.broker import Broker
from tests.support.isolation import soon

KILLS = int(os.environ.get("QUEEN_TEST_KILLS", "60"))
WORKERS = 4
ENTITIES = 60
# Inputs that wait, at least, for as long as workers are being killed.
BACKLOG = 150
STOPPED = 0.05
MOMENTS = (Phase.STARTING, Phase.POPPING, Phase.BEFORE, Phase.COMMITTING, Phase.AFTER)
STALLED_SECONDS = 30.0

OPEN = """
select coalesce(sum(p.next_offset - coalesce(c.committed_offset, -1) - 1), 0)::bigint
from queen.partitions p
join queen.queues q on q.id = p.queue_id and q.name = $1
left join queen.cursors c on c.partition_id = p.id
"""
# A worker that finds nothing to do is killed at whatever it is at.
LONGEST_WAIT_SECONDS = 1.0


class Nursery:
    """Starts workers, and tells what each is at."""

    def __init__(self, url: str, base_url: str, way: str, *, split: bool) -> None:
        self._orders: dict[str, Any] = {
            "pg_url": url,
            "base_url": base_url,
            "way": way,
            "split": split,
        }
        self._file = tempfile.NamedTemporaryFile(prefix="queen-pg-phases-")  # noqa: SIM115
        self._file.write(bytes(WORKERS))
        self._file.flush()
        self._phases = mmap.mmap(self._file.fileno(), 0)
        self._process: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()

    async def __aenter__(self) -> "Nursery":
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.exactly_once.worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        # At the end of its input it buries who is left, and ends.
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()
        self._phases.close()
        self._file.close()

    @contextlib.asynccontextmanager
    async def worker(self, slot: int) -> AsyncIterator[int]:
        """Start a worker, yield its process id, and kill it at the end with SIGKILL."""
        self._phases[slot] = Phase.STARTING
        orders = Orders(slot=slot, phases=self._file.name, **self._orders)
        pid = int(await self._tell(orders))
        try:
            yield pid
        finally:
            # The process id is the worker's own until the nursery has been told.
            os.kill(pid, signal.SIGKILL)
            await self._tell(Burial(pid))

    async def _tell(self, told: Orders | Burial) -> bytes:
        # Whoever is cancelled meanwhile leaves no answer behind for the next to find.
        return await asyncio.shield(asyncio.ensure_future(self._ask(told)))

    async def _ask(self, told: Orders | Burial) -> bytes:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        async with self._asking:
            process.stdin.write(msgspec.json.encode(told) + b"\n")
            return await process.stdout.readline()

    def phase(self, slot: int) -> Phase:
        """What the worker of a slot is at."""
        return Phase(self._phases[slot])


class Campaign:
    """Kills workers until there were enough kills, and then lets them finish."""

    def __init__(
        self,
        db: Database,
        sql: asyncpg.Connection,
        nursery: Nursery,
        kills: int,
        moments: Sequence[Phase] = MOMENTS,
    ) -> None:
        self.inputs: list[Input] = []
        self.kills: Counter[Phase] = Counter()
        self._db = db
        self._sql = sql
        self._nursery = nursery
        self._left = kills
        self._moments = itertools.cycle(moments)
        self._wanted = set(moments) - {Phase.STARTING, Phase.POPPING}
        self._numbers = itertools.count()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            slots = [group.create_task(self._keep(slot)) for slot in range(WORKERS)]
            await self._feed()
            await self._drained()
            for slot in slots:
                slot.cancel()

    def check_kills(self, number: int) -> None:
        """Make sure that there were so many, and some at each moment that matters."""
        print(f"{len(self.inputs)} inputs; killed {dict(self.kills)}")
        assert sum(self.kills.values()) >= number
        assert not self._missed

    @property
    def _missed(self) -> set[Phase]:
        """The moments that matter and have seen no kill yet: a busy machine may take longer."""
        return self._wanted - set(self.kills)

    @property
    def _killing(self) -> bool:
        return self._left > 0 or bool(self._missed)

    async def _feed(self) -> None:
        while self._killing:
            if await self._sql.fetchval(OPEN, INPUTS) < BACKLOG:
                batch = [self._new() for _ in range(BACKLOG)]
                items = [
                    PushItem(INPUTS, one.entity, msgspec.json.encode(one), one.id) for one in batch
                ]
                await push(self._db, 1, items, soon())
                self.inputs += batch
            await asyncio.sleep(0.02)

    def _new(self) -> Input:
        number = next(self._numbers)
        return Input(f"input-{number}", f"entity-{random.randrange(ENTITIES):02d}", number)

    async def _drained(self) -> None:
        async with asyncio.timeout(STALLED_SECONDS):
            while await self._sql.fetchval(OPEN, INPUTS):
                await asyncio.sleep(0.02)

    async def _keep(self, slot: int) -> None:
        """Have a worker in the slot at all times, and end its life when its moment has come."""
        while True:
            async with self._nursery.worker(slot) as pid:
                await self._live(slot, pid)

    async def _live(self, slot: int, pid: int) -> None:
        moment = next(self._moments)
        if moment is not Phase.STARTING:
            await self._until(lambda: self._nursery.phase(slot) is not Phase.STARTING)
            # Some lives are longer: a moment comes again with each input.
            await asyncio.sleep(random.expovariate(20))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_WAIT_SECONDS):
                    await self._until(lambda: self._nursery.phase(slot) is moment)
        if self._killing and random.random() < STOPPED:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(LEASE_SECONDS + 0.2)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(0.2)
        if self._killing:
            self._left -= 1
            self.kills[self._nursery.phase(slot)] += 1
        else:
            await asyncio.Event().wait()

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached():
            await asyncio.sleep(0.001)


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
    wrong = [
        f"{number} outputs of {one.id}"
        for one in inputs
        if (number := sum(output.id == one.id for output in outputs)) != 1
    ]
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
    async with Nursery(database, broker.base_url, "http", split=False) as nursery:
        campaign = Campaign(db, sql, nursery, KILLS // 2)
        await campaign.run()
    assert await wrongs(sql, campaign.inputs) == []
    campaign.check_kills(KILLS // 2)


async def test_every_input_takes_effect_once_by_the_brokers_own_doors(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    # Here the kill takes the connection to the database with it, wherever the commit is.
    async with Nursery(database, "", "doors", split=False) as nursery:
        campaign = Campaign(db, sql, nursery, KILLS // 2)
        await campaign.run()
    assert await wrongs(sql, campaign.inputs) == []
    campaign.check_kills(KILLS // 2)


async def test_effects_apart_from_their_ack_would_be_seen_to_happen_twice(
    db: Database, sql: asyncpg.Connection, database: str
) -> None:
    async with Nursery(database, "", "doors", split=True) as nursery:
        campaign = Campaign(db, sql, nursery, 12, (Phase.BETWEEN,))
        await campaign.run()
    assert await wrongs(sql, campaign.inputs) != []
