"""Eight workers on fifty partitions, while leases run out under some of them.

What a worker does for a message is a message of its own, pushed in the transaction that acks it, so
the effects' order is the order of the commits and none can be half done.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator

import asyncpg

from queen_pg.broker.pop import Claim, PopAnswer
from queen_pg.broker.push import PushItem
from queen_pg.broker.transaction import Transaction, TransactionAck, Verdict
from tests.support.process import Process
from tests.support.waits import until

PARTITIONS = 50
EACH = 100
WORKERS = 8
# Of its batches, each worker keeps the second and the ninth beyond its lease.
LATE = (1, 8)
SECONDS = 60.0

EXPIRED = """
select not exists (
    select from queen.cursors where lease_id = '{}' and lease_expires_at >= queen.now())
"""
EFFECTS = """
select p.name, m.message_offset, m.payload::text
from queen.queues q
join queen.partitions p on p.queue_id = q.id
join queen.messages m on m.partition_id = p.id
where q.name = 'effects'
order by p.id, m.message_offset
"""


async def finish(process: Process, answer: PopAnswer, claim: Claim) -> Verdict:
    """Do the work of one claim: its acks and its effects are one step."""
    return await process.commit(
        Transaction(
            acks=[
                TransactionAck(
                    partition_id=claim.partition_id,
                    transaction_id=message.transaction_id,
                    lease_id=str(answer.lease_id),
                    consumer_group=answer.consumer_group,
                )
                for message in claim.messages
            ],
            items=[
                PushItem("effects", claim.partition, message.payload.encode())
                for message in claim.messages
            ],
        )
    )


async def test_eight_workers_do_5000_messages_once_each_and_in_order(
    one: Process, other: Process, database: str
) -> None:
    names = [f"entity {number}" for number in range(PARTITIONS)]
    for numbers in batches(range(EACH), 20):
        await one.push(
            [PushItem("work", name, str(number).encode()) for number in numbers for name in names]
        )
    done = 0
    refused = 0

    async def work(process: Process, number: int) -> None:
        nonlocal done, refused
        chance = random.Random(number)
        for turn in itertools.count():
            if done == PARTITIONS * EACH:
                return
            late = turn in LATE
            answer = await process.pop(
                "work",
                consumer_group="workers",
                batch=chance.randrange(10, 80),
                partitions=chance.randrange(1, 5),
                lease_seconds=1 if late else 60,
                wait=True,
                timeout_ms=500,
            )
            if late and answer.claims:
                await until(sessions, EXPIRED.format(answer.lease_id))
            for claim in answer.claims:
                verdict = await finish(process, answer, claim)
                if verdict.success:
                    done += len(claim.messages)
                else:
                    assert verdict.reason == "rejected_ack"
                    assert late, "only a lease that ran out is refused"
                    refused += 1

    async with (
        asyncpg.create_pool(database, min_size=0, max_size=WORKERS) as sessions,
        asyncio.timeout(SECONDS),
    ):
        await asyncio.gather(*(work((one, other)[number % 2], number) for number in range(WORKERS)))
        rows = await sessions.fetch(EFFECTS)

    effects: dict[str, list[int]] = {name: [] for name in names}
    for row in rows:
        effects[row["name"]].append(int(row["payload"]))
    assert effects == {name: list(range(EACH)) for name in names}
    assert done == PARTITIONS * EACH
    assert refused >= WORKERS, "leases ran out under workers"


def batches(numbers: range, size: int) -> Iterator[range]:
    """Cut a range into ranges of a size."""
    for start in range(0, len(numbers), size):
        yield numbers[start : start + size]
