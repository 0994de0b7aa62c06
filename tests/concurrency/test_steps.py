"""Steps beside the pushes and acks of their process: on one partition they take turns."""

import asyncio

import pytest

from queen_pg.broker.partition import resolve
from queen_pg.broker.transaction import Transaction, TransactionAck
from queen_pg.errors import Unavailable
from queen_pg.telemetry import STEP_RETRIES
from tests.support.process import TENANT, Process


def retries() -> float:
    """Return how many steps of this process have been run again so far."""
    return sum(
        sample.value
        for metric in STEP_RETRIES.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    )


async def test_steps_pushes_and_acks_of_a_process_lose_no_race_among_themselves(
    one: Process,
) -> None:
    names = ["a", "b", "c"]
    await one.push([one.item("mail", name) for name in names for _ in range(20)])
    answer = await one.pop("mail", consumer_group="g", partitions=3, batch=60)
    before = retries()
    calls: list[asyncio.Task[object]] = []
    for claim in answer.claims:
        acks = [
            TransactionAck(
                claim.partition_id,
                message.transaction_id,
                lease_id=str(answer.lease_id),
                consumer_group="g",
            )
            for message in claim.messages
        ]
        for ack in acks[:10]:
            step = Transaction(acks=[ack], items=[one.item("mail", name) for name in names[:2]])
            calls.append(asyncio.create_task(one.commit(step)))
            calls.append(asyncio.create_task(one.push_one("mail", claim.partition)))
        calls.append(asyncio.create_task(one.ack_items("g", acks[10:])))
    await asyncio.gather(*calls)
    assert retries() == before


async def test_a_step_that_does_not_get_its_turn_in_time_says_so(
    one: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one.push_one("mail", "a")
    known = await resolve(one.db, TENANT, [("mail", "a")], one.deadline())
    [partition_id] = known.values()
    async with one.conveyor._lanes.cross([partition_id], one.deadline()):
        monkeypatch.setattr("tests.support.process.DEADLINE_SECONDS", 0.05)
        with pytest.raises(Unavailable, match="timeout"):
            await one.commit(Transaction(items=[one.item("mail", "a")]))
        monkeypatch.undo()
    assert (await one.commit(Transaction(items=[one.item("mail", "a")]))).success
    [result] = await one.push([one.item("mail", "a")])
    assert result.offset == 2
