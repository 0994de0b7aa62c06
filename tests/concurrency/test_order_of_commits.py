"""Pushes overlap and commit in another order than they came: a consumer skips none of them.

Offsets come from the partition's row, which a push holds until it ends. Numbers drawn from a
sequence, or taken from the moment at which a push began, are given out before the commit: a
consumer then steps over the one that commits late, for good. The same test is run over both, and
must see it.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

import asyncpg
import pytest
from asyncpg.transaction import Transaction

from tests.support.process import Process, messages, offsets
from tests.support.waits import LOOK_SECONDS, WAIT_SECONDS

PUSHES = 6

WAITING = "select pid from pg_locks where not granted"


class Numbering(Protocol):
    """How messages get their offsets."""

    WRITE: str

    async def publish(self, session: asyncpg.Connection) -> None:
        """Do what makes a committed push visible to consumers."""


class FromTheRow:
    """The broker's own."""

    WRITE = "select from queen.push('mail', $1::text::json, 'p')"

    async def publish(self, session: asyncpg.Connection) -> None:
        """Nothing: the commit does it."""


class Planted:
    """A faulty one: the number is drawn before the commit, and nobody waits for anybody."""

    WRITE = """
    insert into queen.messages
        (partition_id, message_offset, created_at, id, transaction_id, payload)
    select p.id, {number}, clock_timestamp(), gen_random_uuid(), 't' || $1::text, $1::text::json
    from queen.partitions p
    """

    async def publish(self, session: asyncpg.Connection) -> None:
        """Move the tail behind what can be seen, in a transaction of its own."""
        await session.execute(
            "update queen.partitions set next_offset ="
            " (select max(message_offset) + 1 from queen.messages)"
        )
        await session.execute(
            "update queen.ready set ready_at = queen.now(), next_offset = 1000000000"
        )


class FromASequence(Planted):
    WRITE = Planted.WRITE.format(number="nextval('numbers')")


class FromTheStart(Planted):
    """Microseconds since the test began, at the start of the pushing transaction."""

    WRITE = Planted.WRITE.format(
        number="(extract(epoch from now()) * 1000000)::bigint - (select last_value from numbers)"
    )


NUMBERS = """
create sequence numbers;
select setval('numbers', {first});
"""
NOW = "(extract(epoch from clock_timestamp()) * 1000000)::bigint"


class Push:
    """A push whose commit is up to the test."""

    def __init__(self, session: asyncpg.Connection, write: str, payload: int) -> None:
        self.pid: int = session.get_server_pid()
        self.payload = str(payload)
        self.written: asyncio.Task[str] | None = None
        self._session = session
        self._write = write
        self._transaction: Transaction = session.transaction()

    async def start(self) -> None:
        """Begin: here the transaction takes its moment."""
        await self._transaction.start()
        await self._session.fetchval("select now()")

    def write(self) -> None:
        """Write the message, or wait for whoever is before it."""
        self.written = asyncio.create_task(self._session.execute(self._write, self.payload))

    @property
    def ready(self) -> bool:
        """Whether nothing is left but the commit."""
        return self.written is not None and self.written.done()

    async def commit(self) -> None:
        await self._transaction.commit()


class Consumer:
    """Takes and acks whatever there is, whenever it is told to."""

    def __init__(self, process: Process) -> None:
        self.got: list[str] = []
        self._process = process
        self._task: asyncio.Task[None] | None = None

    def consume(self) -> asyncio.Task[None]:
        """Go on, if it is not under way."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._consume())
        return self._task

    async def _consume(self) -> None:
        while (answer := await self._process.pop("mail", consumer_group="g")).claims:
            self.got += messages(answer)
            await self._process.ack(answer)


async def last_comes_first(
    process: Process, database: str, watcher: asyncpg.Connection, numbering: Numbering
) -> tuple[list[str], list[str]]:
    """Overlap pushes, and commit those that came last as early as they allow.

    The consumer goes as far as it can after each. Returns what was pushed and what was consumed.
    """
    await process.push_one("mail", "p")
    await process.ack(await process.pop("mail", consumer_group="g"))
    sessions = [await asyncpg.connect(database) for _ in range(PUSHES)]
    consumer = Consumer(process)

    async def blocked(*pids: int) -> bool:
        return not {row["pid"] for row in await watcher.fetch(WAITING)}.isdisjoint(pids)

    try:
        pushes = [Push(each, numbering.WRITE, place) for place, each in enumerate(sessions)]
        for push in pushes:
            await push.start()
        for push in pushes:
            push.write()
            while not push.ready and not await blocked(push.pid):
                await asyncio.sleep(LOOK_SECONDS)
        left = list(pushes)
        while left:
            while not (ready := [push for push in left if push.ready]):
                await asyncio.sleep(LOOK_SECONDS)
            await ready[-1].commit()
            left.remove(ready[-1])
            await numbering.publish(watcher)
            consuming = consumer.consume()
            # It may have to wait for the next push, as that holds the partition.
            pids = {row["pid"] for row in await watcher.fetch("select pid from pg_stat_activity")}
            others = pids - {push.pid for push in pushes}
            while not consuming.done() and not await blocked(*others):
                await asyncio.sleep(LOOK_SECONDS)
        await consumer.consume()
        await consumer.consume()
    finally:
        for session in sessions:
            session.terminate()
    return [push.payload for push in pushes], consumer.got


async def test_a_push_that_commits_late_is_not_skipped(
    one: Process, database: str, session: asyncpg.Connection
) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        pushed, got = await last_comes_first(one, database, session, FromTheRow())
    assert sorted(got) == sorted(pushed)


@pytest.mark.parametrize(
    ("numbering", "first"),
    [(FromASequence, "1"), (FromTheStart, NOW)],
    ids=["from a sequence", "from the start"],
)
async def test_numbers_given_out_before_the_commit_would_be_seen_to_skip(
    one: Process,
    database: str,
    session: asyncpg.Connection,
    numbering: Callable[[], Numbering],
    first: str,
) -> None:
    await session.execute(NUMBERS.format(first=first))
    async with asyncio.timeout(WAIT_SECONDS):
        pushed, got = await last_comes_first(one, database, session, numbering())
    assert set(got) < set(pushed)


async def test_offsets_follow_the_order_of_commits_under_load(
    one: Process, other: Process, session: asyncpg.Connection
) -> None:
    """A consumer that acks whatever it gets ends with everything, in the order of the offsets."""
    writers = 4
    each = 60

    async def write(process: Process) -> None:
        for _ in range(each // 2):
            await process.push([process.item("mail", "p"), process.item("mail", "p")])

    async def read() -> list[int]:
        got: list[int] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while len(got) < writers * each:
                answer = await one.pop("mail", consumer_group="g", wait=True, batch=9)
                got += offsets(answer)
                await one.ack(answer)
        return got

    reading = asyncio.create_task(read())
    await asyncio.gather(*(write(process) for process in (one, other) for _ in range(writers // 2)))
    assert await reading == list(range(writers * each))
    rows = await session.fetch("select created_at, id from queen.messages order by message_offset")
    stamps = [row["created_at"] for row in rows]
    assert stamps == sorted(stamps)
    assert len(set(stamps)) == writers * each // 2, "one stamp an append"
    assert [row["id"] for row in rows] == sorted(row["id"] for row in rows)
