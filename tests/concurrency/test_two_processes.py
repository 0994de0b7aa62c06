"""Two processes of a broker on one database: who races is told the truth, and shares nothing."""

import asyncio
import itertools
import random
from collections import Counter

import asyncpg

from queen_pg.broker.ack import AckItem, AckStatus
from queen_pg.broker.push import PushResult
from tests.support.isolation import weaken
from tests.support.process import Process, messages, offsets
from tests.support.waits import WAIT_SECONDS

COUNTS = """
select (select count(*) from queen.queues), (select count(*) from queen.partitions),
       (select count(*) from queen.consumer_groups), (select count(*) from queen.messages)
"""


IDS = [f"id {number}" for number in range(20)]


async def push_the_same(one: Process, other: Process) -> list[tuple[str, PushResult]]:
    """Push every id eight times at once, in calls of one and of several; return what was told."""

    async def push(process: Process, shuffled: int) -> list[tuple[str, PushResult]]:
        order = random.Random(shuffled).sample(IDS, len(IDS))
        results = []
        for some in (order[:7], order[7:8], order[8:]):
            items = [process.item("mail", f"p{each[-1]}", each) for each in some]
            results += list(zip(some, await process.push(items), strict=True))
        return results

    pushes = (push(process, number) for number in range(4) for process in (one, other))
    return [result for results in await asyncio.gather(*pushes) for result in results]


def queued(told: list[tuple[str, PushResult]]) -> Counter[str]:
    return Counter(each for each, result in told if result.status == "queued")


async def test_of_every_id_one_push_is_queued(
    one: Process, other: Process, session: asyncpg.Connection
) -> None:
    """data-plane 10.1-4; those that are not are told which message they repeat (10.1-3)."""
    told = await push_the_same(one, other)
    assert queued(told) == dict.fromkeys(IDS, 1)
    assert {result.status for _, result in told} == {"queued", "duplicate"}
    for each in IDS:
        answers = {(r.message_id, r.offset) for name, r in told if name == each}
        assert len(answers) == 1, "a duplicate names the original"
    stored = await session.fetch("select transaction_id from queen.messages")
    assert sorted(row["transaction_id"] for row in stored) == sorted(IDS)


async def test_without_its_index_an_id_would_be_seen_to_be_queued_again(
    one: Process, other: Process, session: asyncpg.Connection
) -> None:
    await session.execute("drop index queen.messages_transaction_id_key")
    assert max(queued(await push_the_same(one, other)).values()) > 1


async def test_a_queue_a_partition_and_a_group_are_born_once(
    one: Process, other: Process, session: asyncpg.Connection
) -> None:
    for number in range(1, 4):
        queue = f"mail {number}"
        race = [
            work
            for process in (one, other)
            for work in (
                *(process.push_one(queue, "p") for _ in range(6)),
                *(process.pop(queue, consumer_group="g") for _ in range(3)),
            )
        ]
        random.Random(number).shuffle(race)
        results = await asyncio.gather(*race)
        pushed = [result.offset for result in results if isinstance(result, PushResult)]
        assert sorted(pushed) == list(range(12))
        assert tuple(await session.fetchrow(COUNTS)) == (number, number, number, 12 * number)


async def take_all(one: Process, other: Process, partitions: list[str]) -> list[str]:
    """Have pops of many kinds take partitions at once; return all that they got."""

    async def take(process: Process, number: int) -> list[str]:
        taken = []
        while True:
            narrow = {"partition": random.Random(number).choice(partitions)} if not taken else {}
            answer = await process.pop(
                "mail", consumer_group="g", batch=1 + number, partitions=1 + number % 3, **narrow
            )
            if not answer.claims and not narrow:
                return taken
            taken += [claim.partition for claim in answer.claims] or [""]

    workers = (take(process, number) for number in range(4) for process in (one, other))
    return [name for names in await asyncio.gather(*workers) for name in names if name]


PARTITIONS = [f"p{number}" for number in range(24)]


async def test_two_pops_of_a_group_never_share_a_partition(
    one: Process, other: Process, session: asyncpg.Connection
) -> None:
    """data-plane 4.3-7: whatever they ask for, and wherever they are asked."""
    await one.push([one.item("mail", name) for name in PARTITIONS * 4])
    taken = await take_all(one, other, PARTITIONS)
    assert sorted(taken) == sorted(PARTITIONS), "each is claimed, and once"
    leases = await session.fetchval(
        "select count(*) from queen.cursors where lease_expires_at > queen.now()"
    )
    assert leases == len(PARTITIONS)


async def test_a_claim_that_believes_what_it_was_told_would_be_seen_to_share(
    one: Process, other: Process, session: asyncpg.Connection
) -> None:
    # Pops look for what they may claim before they do, and others may have claimed it since.
    await weaken(
        session,
        "_claim",
        "and (v_row.lease_id is null or v_row.lease_expires_at <= v_now)",
        "and true",
    )
    for turn in itertools.count():
        names = [f"{turn} {name}" for name in PARTITIONS]
        await one.push([one.item("mail", name) for name in names * 4])
        # A first claim makes the cursor, and there can be but one.
        await one.ack(await one.pop("mail", consumer_group="g", partitions=64), "retry")
        if max(Counter(await take_all(one, other, names)).values()) > 1:
            return


async def test_a_partition_stays_in_order_through_redeliveries(
    one: Process, other: Process
) -> None:
    """data-plane 12-2: whatever becomes of a batch, the next begins where it was left."""
    await one.configure("mail", retryLimit=1000)
    await one.push([one.item("mail", "p") for _ in range(40)])
    chance = random.Random(7)
    done: list[int] = []

    async def consume(process: Process) -> None:
        while len(done) < 40:
            answer = await process.pop(
                "mail", consumer_group="g", wait=True, batch=7, timeout_ms=1_000
            )
            if not answer.claims:
                continue
            # Nobody else has the partition, so nobody else changes this meanwhile.
            assert offsets(answer) == list(range(len(done), min(len(done) + 7, 40)))
            [claim] = answer.claims
            good = chance.randrange(len(claim.messages) + 1)
            bad: AckStatus = chance.choice(["failed", "retry"])
            items = [
                AckItem(
                    claim.partition_id,
                    message.transaction_id,
                    "completed" if place < good else bad,
                    lease_id=str(answer.lease_id),
                )
                for place, message in enumerate(claim.messages)
            ]
            done.extend(message.offset for message in claim.messages[:good])
            acked = await process.ack_items("g", items)
            assert all(result.success for result in acked.results)

    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.gather(*(consume(process) for process in (one, other) for _ in range(2)))
    assert done == list(range(40))
    assert messages(await one.pop("mail", consumer_group="g")) == []
