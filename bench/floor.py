"""A process that does the plainest SQL that could store the same: the floor under the figures.

It works on a database with the broker's tables, and so with its indexes, but without a broker. It
writes with one prepared statement a transaction where that is possible, rows as arrays.
"""

import asyncio
import contextlib
import itertools
import math
import random
import uuid
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import msgspec
import uvloop

from . import window
from .load import Sent, instants, payload, transaction_ids
from .window import Tally, clock

ROWS = """
insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id, payload)
select u.partition_id, u.message_offset, $3, u.id, u.transaction_id, u.payload
from unnest($1::bigint[], $2::bigint[], $4::uuid[], $5::text[], $6::json[])
     u (partition_id, message_offset, id, transaction_id, payload)
"""

ROW = """
insert into queen.messages (partition_id, message_offset, created_at, id, transaction_id, payload)
values ($1, $2, $3, $4, $5, $6)
"""

# Plans are made once, for a table that was empty or full then; by its key they are right for both.
BY_KEY = """
set enable_seqscan = off;
set enable_sort = off;
set enable_hashjoin = off;
set enable_mergejoin = off;
"""

# What a consumer takes is locked until it is settled in the same transaction.
CLAIM = """
select partition_id, message_offset, payload
from queen.messages
order by partition_id, message_offset
limit $1
for update skip locked
"""

CLAIM_BY_KEY = """
select m.partition_id, m.message_offset, m.payload
from queen.messages m
join unnest($1::bigint[], $2::bigint[]) u (partition_id, message_offset)
  using (partition_id, message_offset)
for update of m
"""

SETTLE = """
delete from queen.messages m
using unnest($1::bigint[], $2::bigint[]) u (partition_id, message_offset)
where (m.partition_id, m.message_offset) = (u.partition_id, u.message_offset)
"""

CURSOR = """
update queen.cursors set committed_offset = committed_offset + 1, updated_at = $3
where partition_id = $1 and group_id = $2
"""

PUT = """
insert into queen.kv as k (tenant_id, namespace, key, version, value, created_at, updated_at)
values (1, 'bench', $1, 1, $2, $3, $3)
on conflict (tenant_id, namespace, key) do update
set version = k.version + 1, value = excluded.value, updated_at = excluded.updated_at
"""

TIMER = """
insert into queen.timers (tenant_id, queue, timer_key, partition, transaction_id, message_id,
                          payload, deliver_at, fire_at, created_at, updated_at)
values (1, 'bench', $1, $1, $2, $3, '{}', $4, $4, $5, $5)
on conflict (tenant_id, queue, timer_key) do update
set transaction_id = excluded.transaction_id, message_id = excluded.message_id,
    deliver_at = excluded.deliver_at, fire_at = excluded.fire_at, updated_at = excluded.updated_at
"""

GET = "select value, version from queen.kv where tenant_id = 1 and namespace = 'bench' and key = $1"

# How long a consumer rests that found nothing, as the peers' do.
IDLE_SECONDS = 0.01
# Keys that are claimed at a time.
CLAIMED = 100

_sent = msgspec.json.Decoder(Sent)

Work = Callable[[dict[str, Any], int, asyncpg.Connection, Tally], Coroutine[Any, Any, None]]


class _Places:
    """Where a connection's next row goes: partitions of its own, each with its own offsets.

    Ids start at a random number, so that runs on one database do not meet.
    """

    def __init__(self, partitions: int, place: int) -> None:
        self._first = random.SystemRandom().randrange(2**61)
        self._offsets = [0] * partitions
        self._at = place

    def turn(self) -> None:
        self._at = (self._at + 1) % len(self._offsets)

    def take(self) -> tuple[int, int]:
        offset = self._offsets[self._at]
        self._offsets[self._at] = offset + 1
        return self._first + self._at, offset


async def rows(task: dict[str, Any], place: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Insert `batch` rows a transaction, to one partition or each to another (`spread`)."""
    ids = transaction_ids()
    places = _Places(task["partitions"], place)
    batch, total = task["batch"], task.get("total", math.inf) / task["clients"]
    statement = await db.prepare(ROWS if batch > 1 else ROW)
    written = 0
    for due in instants(task, place):
        if clock() >= tally.until or written >= total:
            return
        if due > clock():
            await asyncio.sleep(due - clock())
        started = due or clock()
        document = payload(started)
        written += batch
        taken = []
        places.turn()
        for _ in range(batch):
            if task["spread"]:
                places.turn()
            taken.append(places.take())
        moment = datetime.now(UTC)
        if batch > 1:
            await statement.fetch(
                [partition for partition, _ in taken],
                [offset for _, offset in taken],
                moment,
                [uuid.uuid4() for _ in taken],
                [next(ids) for _ in taken],
                [document] * len(taken),
            )
        else:
            await statement.fetch(*taken[0], moment, uuid.uuid4(), next(ids), document)
        now = clock()
        tally.add(now, batch, now - started)


async def claims(task: dict[str, Any], _: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Claim up to `batch` rows in their keys' order, and delete them in the same transaction."""
    await db.execute(BY_KEY)
    claim, settle = await db.prepare(CLAIM), await db.prepare(SETTLE)
    while clock() < tally.until:
        async with db.transaction():
            found = await claim.fetch(task["batch"])
            delivered = clock()
            if found:
                await settle.fetch([row[0] for row in found], [row[1] for row in found])
        if not found:
            await asyncio.sleep(IDLE_SECONDS)
        _count(found, delivered, tally)


async def keyed(task: dict[str, Any], place: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Insert single rows into any of so many partitions, and claim and delete them by their keys.

    A table that holds history cannot be walked from its beginning for what is new. What the last
    `consumers` connections look for they are told by the others, within this process.
    """
    handed: deque[tuple[int, int]] = task["handed"]
    if place < task["clients"] - task["consumers"]:
        ids = transaction_ids()
        chosen = random.Random(place)
        row = await db.prepare(ROW)
        for number in itertools.count(random.SystemRandom().randrange(1, 2**61)):
            if clock() >= tally.until:
                return
            key = task["first"] + chosen.randrange(task["partitions"]), number
            document = payload(clock())
            await row.fetch(*key, datetime.now(UTC), uuid.uuid4(), next(ids), document)
            handed.append(key)
    await db.execute(BY_KEY)
    claim, settle = await db.prepare(CLAIM_BY_KEY), await db.prepare(SETTLE)
    while clock() < tally.until:
        if not handed:
            await asyncio.sleep(IDLE_SECONDS)
            continue
        keys = [handed.popleft() for _ in range(min(len(handed), CLAIMED))]
        columns = [partition for partition, _ in keys], [offset for _, offset in keys]
        async with db.transaction():
            found = await claim.fetch(*columns)
            delivered = clock()
            await settle.fetch(*columns)
        _count(found, delivered, tally)


def _count(found: Sequence[asyncpg.Record], delivered: float, tally: Tally) -> None:
    """Count rows that were settled just now; latencies are from the insert to the delivery."""
    now = clock()
    for row in found:
        tally.add(now, 1, delivered - _sent.decode(row["payload"]).at)


async def listen(_task: dict[str, Any], _: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Wait for a notice that never comes."""
    await db.execute("listen nothing")
    await asyncio.sleep(max(tally.until - clock(), 0))


async def steps(_task: dict[str, Any], place: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Write what a step writes, by hand: cursor, message, KV, timer in one transaction."""
    await db.execute("set default_transaction_isolation = serializable")
    ids = transaction_ids()
    places = _Places(100, place)
    partition, _ = places.take()
    await db.execute(
        "insert into queen.cursors (partition_id, group_id, updated_at) values ($1, 1, now())",
        partition,
    )
    cursor, row, put, timer = [await db.prepare(text) for text in (CURSOR, ROW, PUT, TIMER)]
    number = 0
    while clock() < tally.until:
        number += 1
        started = clock()
        key = f"{place}-{number % 10}"
        moment = datetime.now(UTC)
        later = moment + timedelta(hours=1)
        places.turn()
        with contextlib.suppress(asyncpg.SerializationError):
            async with db.transaction():
                await cursor.fetch(partition, 1, moment)
                await row.fetch(*places.take(), moment, uuid.uuid4(), next(ids), payload(started))
                await put.fetch(key, payload(0), moment)
                await timer.fetch(key, next(ids), uuid.uuid4(), later, moment)
            now = clock()
            tally.add(now, 1, now - started)
            continue
        tally.errors["40001"] += 1


async def kv(task: dict[str, Any], place: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Read and write single keys in turn."""
    keys = random.Random(place)
    get, put = await db.prepare(GET), await db.prepare(PUT)
    number = 0
    while clock() < tally.until:
        number += 1
        started = clock()
        key = f"k-{keys.randrange(task['keys'])}"
        if number % 2:
            await get.fetch(key)
        else:
            await put.fetch(key, payload(0), datetime.now(UTC))
        now = clock()
        tally.add(now, 1, now - started)


# The ways of pushing by SQL: the statement, and its arguments for a queue, the messages' partitions
# and transaction ids, and the payload that they share.
CALLS: dict[str, tuple[str, Callable[[str, list[str], list[str], str], tuple[Any, ...]]]] = {
    "push_batch": (
        "select from queen.push_batch($1, $2, $3, $4)",
        lambda queue, names, ids, document: (queue, [document] * len(ids), names[0], ids),
    ),
    "push_batch, partitions": (
        "select from queen.push_batch($1, $2, transaction_ids => $3, partitions => $4)",
        lambda queue, names, ids, document: (queue, [document] * len(ids), ids, names),
    ),
    "push_many": (
        "select from queen.push_many($1)",
        lambda queue, names, ids, document: (
            "["
            + ",".join(
                f'{{"queue":"{queue}","partition":"{name}","transactionId":"{transaction_id}",'
                f'"payload":{document}}}'
                for name, transaction_id in zip(names, ids, strict=True)
            )
            + "]",
        ),
    ),
}


async def calls(task: dict[str, Any], place: int, db: asyncpg.Connection, tally: Tally) -> None:
    """Push by SQL, through the broker's own functions: not a floor, but what SQL users get."""
    ids = transaction_ids()
    queue, count, batch = task["queue"], task["partitions"], task["batch"]
    text, arguments = CALLS[task["call"]]
    statement = await db.prepare(text)
    at = random.Random(place).randrange(count)
    document = payload(0)
    while clock() < tally.until:
        started = clock()
        names = []
        at = (at + 1) % count
        for _ in range(batch):
            at = (at + 1) % count if task["spread"] else at
            names.append(f"p-{at}")
        await statement.fetch(*arguments(queue, names, [next(ids) for _ in names], document))
        now = clock()
        tally.add(now, batch, now - started)


KINDS: dict[str, Work] = {
    "rows": rows, "claims": claims, "keyed": keyed, "listen": listen, "steps": steps, "kv": kv,
    "calls": calls,
}  # fmt: skip


async def run(task: dict[str, Any], tally: Tally) -> None:
    """Run one of the kinds on its connections."""
    connections = [await asyncpg.connect(task["url"]) for _ in range(task["clients"])]
    task["handed"] = deque()
    await asyncio.to_thread(window.opened, tally)
    await asyncio.gather(
        *(
            KINDS[task["kind"]](task, place, connection, tally)
            for place, connection in enumerate(connections)
        )
    )
    for connection in connections:
        await connection.close()


def main() -> None:
    """Run the load that the command line describes."""
    tally = Tally()
    uvloop.run(run(window.task(), tally))
    window.close(tally)


if __name__ == "__main__":
    main()
