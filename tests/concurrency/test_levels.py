"""The public functions at each isolation level, called by rivals who retry what they are told to.

Each rival has a snapshot before it calls, so that above READ COMMITTED it may lose to what it
cannot see. A lost race is a serialization failure or a deadlock; there is no other error.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import asyncpg
import pytest

from tests.support.sessions import sessions

T = TypeVar("T")

RIVALS = 5
LOST = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError)

levels = pytest.mark.parametrize("level", ["read_committed", "repeatable_read", "serializable"])


async def committed(
    connection: asyncpg.Connection, level: str, work: Callable[[asyncpg.Connection], Awaitable[T]]
) -> T:
    """Do the work in a transaction, again until it commits; return what it returned."""
    while True:
        try:
            async with connection.transaction(isolation=level):
                await connection.fetch("select from queen.tenants")
                return await work(connection)
        except LOST:
            await asyncio.sleep(random.random() / 100)


class Prize(NamedTuple):
    """A call that one of its rivals alone is so answered; {} is what the last of `before` found."""

    call: str
    answer: Any
    before: tuple[str, ...] = ()


PUSHED = "select queen.push('q', '1', 'p', 't')"
POPPED = (
    PUSHED,
    "select format('%s, ''t'', %L, ''g''', partition_id, lease_id)"
    " from queen.pop('q', 'g', subscription_mode => 'all')",
)
GIVEN_UP = (
    PUSHED,
    "select queen.nack(partition_id, 't', lease_id, 'g', status => 'dlq')"
    " from queen.pop('q', 'g', subscription_mode => 'all')",
    "select id from queen.dead_letter",
)
PRIZES = {
    "push": Prize("select status from queen.push('q', '1', 'p', 't')", "queued"),
    "push_many": Prize(
        'select status from queen.push_many(\'[{"queue": "q", "payload": 1, "transactionId": "t"},'
        ' {"queue": "q", "partition": "p", "payload": 1}]\') where place = 1',
        "queued",
    ),
    "push_batch": Prize(
        "select status from queen.push_batch('q', '{1,2}', transaction_ids => '{t,null}')"
        " where place = 1",
        "queued",
    ),
    "push_batch to many": Prize(
        "select status from queen.push_batch('q', '{1,2}', transaction_ids => '{t,null}',"
        " partitions => '{b,a}') where place = 1",
        "queued",
    ),
    "pop": Prize(
        "select count(*) from queen.pop('q', 'g', subscription_mode => 'all')", 1, (PUSHED,)
    ),
    "ack": Prize("select success and not noop from queen.ack({})", True, POPPED),
    "nack": Prize("select success and not noop from queen.nack({}, status => 'dlq')", True, POPPED),
    "transaction": Prize(
        'select queen.transaction(\'{"kv": [{"op": "putIfAbsent", "ns": "n", "key": "k",'
        ' "value": 1, "forever": true, "required": true}],'
        ' "operations": [{"type": "push", "queue": "q", "payload": 1}]}\') ->> \'success\'',
        "true",
    ),
    "kv_once": Prize("select queen.kv_once('n', 'k')", True),
    "kv_put": Prize("select applied from queen.kv_put('n', 'k', '1', expect => 0)", True),
    "kv_incr": Prize("select applied from queen.kv_incr('n', 'k', maximum => 1)", True),
    "kv_delete": Prize(
        "select applied from queen.kv_delete('n', 'k')",
        True,
        ("select queen.kv_put('n', 'k', '1')",),
    ),
    "lock_acquire": Prize("select acquired from queen.lock_acquire('l', '1 minute')", True),
    "lock_renew": Prize(
        "select renewed from queen.lock_renew('l', {}, '1 minute')",
        True,
        ("select token from queen.lock_acquire('l', '1 minute')",),
    ),
    "lock_release": Prize(
        "select queen.lock_release('l', {})",
        True,
        ("select token from queen.lock_acquire('l', '1 minute')",),
    ),
    "timer_schedule": Prize(
        "select status from queen.timer_schedule('q', 'k', '1', delay => '1 hour')", "scheduled"
    ),
    "timer_cancel": Prize(
        "select queen.timer_cancel('q', 'k')",
        True,
        ("select queen.timer_schedule('q', 'k', '1', delay => '1 hour')",),
    ),
    "dlq_replay": Prize("select result from queen.dlq_replay('{}')", "moved", GIVEN_UP),
    "delete_queue": Prize("select queen.delete_queue('q')", True, (PUSHED,)),
}


@levels
@pytest.mark.parametrize("function", PRIZES)
async def test_one_of_the_rivals_gets_it(database: str, level: str, function: str) -> None:
    prize = PRIZES[function]
    async with sessions(database, RIVALS) as rivals:
        found = None
        for statement in prize.before:
            found = await rivals[0].fetchval(statement)
        call = prize.call.replace("{}", str(found))
        answers = await asyncio.gather(
            *(committed(rival, level, lambda session: session.fetchval(call)) for rival in rivals)
        )
    assert answers.count(prize.answer) == 1, answers


TRANSACTIONS = 20
SENT = """
create table sent (number bigint generated always as identity primary key);
create table handled (number bigint primary key);
"""
PUSHES = (
    "select queen.push('q', $1::text::json, $2, $1)",
    "select queen.push_many(json_build_array(json_build_object('queue', 'q', 'payload', $1::bigint,"
    " 'partition', $2::text)))",
    "select queen.push_batch('q', array[$1::text::json], $2)",
    "select queen.push_batch('q', array[$1::text::json], partitions => array[$2::text])",
    "select queen.transaction(json_build_object('operations', json_build_array(json_build_object("
    "'type', 'push', 'queue', 'q', 'payload', $1::text::json, 'partition', $2::text))))",
)


@levels
async def test_rows_messages_and_counts_agree(database: str, level: str) -> None:
    """Producers push with their rows; workers handle each message once, some only after a nack."""
    async with sessions(database, 2 * RIVALS) as connections:
        await connections[0].execute(SENT)
        producers = [produce(each, level) for each in connections[:RIVALS]]
        working = asyncio.Event()
        workers = [
            asyncio.create_task(handle(each, level, working)) for each in connections[RIVALS:]
        ]
        await asyncio.gather(*producers)
        working.set()
        failed = sum(await asyncio.gather(*workers), Counter())
        looking = connections[0]
        rows = await looking.fetch("select number from sent order by 1")
        pushed = await looking.fetch(
            "select payload::text::bigint as number from queen.message where queue = 'q' order by 1"
        )
        handled = await looking.fetch("select number from handled order by 1")
        assert len(rows) == RIVALS * TRANSACTIONS
        assert rows == pushed == handled
        assert await looking.fetchval("select count(*) from queen.lag") == 0
        counted = await looking.fetchval("select value from queen.kv_get('n', 'sent')")
        assert int(counted) == len(rows)
        holes = "select from queen.partitions p where p.next_offset <> (select count(*) from"
        holes += " queen.messages m where m.partition_id = p.id)"
        assert await looking.fetch(holes) == []
    assert failed["nacked"] > 0


async def produce(connection: asyncpg.Connection, level: str) -> None:
    """Commit rows, each with its message and a count."""

    async def work(session: asyncpg.Connection) -> None:
        number = await session.fetchval("insert into sent default values returning number")
        push = random.choice(PUSHES)
        first = number if "$1::bigint" in push else str(number)
        await session.execute(push, first, f"p{number % 3}")
        await session.execute("select queen.kv_incr('n', 'sent')")

    for _ in range(TRANSACTIONS):
        await committed(connection, level, work)


async def handle(
    connection: asyncpg.Connection, level: str, produced: asyncio.Event
) -> Counter[str]:
    """Work until all is produced and nothing is left; nack now and then."""
    done: Counter[str] = Counter()
    pop = (
        "select * from queen.pop('q', 'g', batch => 4, partitions => 2, subscription_mode => 'all')"
    )

    async def settle(session: asyncpg.Connection) -> bool:
        arguments = (row["partition_id"], row["transaction_id"], row["lease_id"])
        await session.fetch("select queen.extend_lease($1)", row["lease_id"])
        if random.random() < 0.2:
            nack = "select success from queen.nack($1, $2, $3, 'g', status => 'retry')"
            done["nacked"] += await session.fetchval(nack, *arguments)
            return False
        await session.execute("insert into handled values ($1)", int(row["payload"]))
        acked: bool = await session.fetchval(
            "select success from queen.ack($1, $2, $3, 'g')", *arguments
        )
        assert acked
        return True

    while True:
        last = produced.is_set()
        rows = await committed(connection, level, lambda session: session.fetch(pop))
        given_back = set()
        for row in rows:
            if row["partition_id"] not in given_back and not await committed(
                connection, level, settle
            ):
                given_back.add(row["partition_id"])
        if last and not rows and not await connection.fetch("select from queen.lag"):
            return done
