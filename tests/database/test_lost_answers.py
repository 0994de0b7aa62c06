"""Answers get lost on the way: what became of a step is found out where its ids tell."""

from collections.abc import AsyncIterator
from typing import Any, Literal

import asyncpg
import pytest
import pytest_asyncio

from queen_pg.broker.ack import AckItem
from queen_pg.broker.pop import PopAnswer, PopRequest
from queen_pg.broker.push import PushItem
from queen_pg.broker.queue import configure
from queen_pg.broker.transaction import Transaction, TransactionAck, Verdict
from queen_pg.config import Settings
from queen_pg.conveyor import Conveyor
from queen_pg.database import Database
from queen_pg.errors import AnswerLost, Unavailable
from queen_pg.wakeup import Waiters
from tests.support.isolation import soon

STEPS = {"_append", "_push", "_complete", "_ack", "_transact", "_transaction"}

Moment = Literal["before", "after"]


class Losing(Database):
    """A door that loses answers: steps never arrived (before), or were committed (after)."""

    losing: Moment | None = None
    others_fail = False

    async def step(
        self, function: str, /, *, deadline: float, **arguments: Any
    ) -> list[asyncpg.Record]:
        losing = self.losing if function in STEPS else None
        if losing is not None:
            self.losing = None
        elif self.others_fail and function in STEPS:
            raise Unavailable("retry", "nobody there")
        if losing == "before":
            raise AnswerLost("lost")
        rows = await super().step(function, deadline=deadline, **arguments)
        if losing == "after":
            raise AnswerLost("lost")
        return rows


@pytest_asyncio.fixture
async def door(database: str) -> AsyncIterator[Losing]:
    opened = Losing(Settings(pg_url=database))
    await opened.start()
    yield opened
    await opened.close()


@pytest.fixture
def conveyor(door: Losing, database: str) -> Conveyor:
    return Conveyor(door, Settings(pg_url=database, lanes=1))


async def pop(door: Losing, database: str) -> PopAnswer:
    """Take two messages of the partition under a lease."""
    await Conveyor(door, Settings(pg_url=database)).push(
        1, [PushItem("in", "p", b"1", f"in-{n}") for n in range(2)], soon()
    )
    waiters = Waiters(door, Settings(pg_url=database))
    request = PopRequest(
        queue="in", partition="p", consumer_group="g", subscription_mode="all", batch=2
    )
    return await waiters.pop(1, request)


async def stored(database: str, queue: str) -> list[str]:
    connection = await asyncpg.connect(database)
    try:
        rows = await connection.fetch(
            "select m.transaction_id from queen.messages m join queen.partitions p"
            " on p.id = m.partition_id join queen.queues q on q.id = p.queue_id"
            " where q.name = $1 order by m.partition_id, m.message_offset",
            queue,
        )
    finally:
        await connection.close()
    return [row[0] for row in rows]


@pytest.mark.parametrize(("moment", "status"), [("before", "queued"), ("after", "duplicate")])
async def test_a_push_with_ids_is_found(
    door: Losing, conveyor: Conveyor, database: str, moment: Moment, status: str
) -> None:
    await conveyor.push(1, [PushItem("q", "p", b"0", "earlier")], soon())
    door.losing = moment
    [result] = await conveyor.push(1, [PushItem("q", "p", b"1", "one")], soon())
    assert (result.status, result.offset) == (status, 1)
    assert await stored(database, "q") == ["earlier", "one"]


async def test_a_push_without_an_id_stays_unknown(
    door: Losing, conveyor: Conveyor, database: str
) -> None:
    door.losing = "after"
    with pytest.raises(AnswerLost):
        await conveyor.push(1, [PushItem("q", "p", b"1")], soon())
    assert len(await stored(database, "q")) == 1


async def test_a_push_to_a_queue_that_forgets_stays_unknown(
    door: Losing, conveyor: Conveyor, database: str
) -> None:
    await configure(door, 1, "q", {"dedupWindowSeconds": 0}, soon(), replace=False)
    door.losing = "after"
    with pytest.raises(AnswerLost):
        await conveyor.push(1, [PushItem("q", "p", b"1", "one")], soon())
    assert await stored(database, "q") == ["one"]


async def test_what_cannot_be_found_out_in_time_stays_unknown(
    door: Losing, conveyor: Conveyor, database: str
) -> None:
    """Never `retry`, which would say that nothing happened."""
    await conveyor.push(1, [PushItem("q", "p", b"0", "earlier")], soon())
    door.losing, door.others_fail = "after", True
    with pytest.raises(AnswerLost):
        await conveyor.push(1, [PushItem("q", "p", b"1", "one")], soon(1))
    assert await stored(database, "q") == ["earlier", "one"]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_completing_acks_are_answered(
    door: Losing, conveyor: Conveyor, database: str, moment: Moment
) -> None:
    answer = await pop(door, database)
    [claim] = answer.claims
    items = [
        AckItem(claim.partition_id, f"in-{n}", "completed", lease_id=str(answer.lease_id))
        for n in range(2)
    ]
    door.losing = moment
    acked = await conveyor.ack(1, "g", items, soon())
    assert [result.success for result in acked.results] == [True, True]
    waiters = Waiters(door, Settings(pg_url=database))
    request = PopRequest(queue="in", partition="p", consumer_group="g", batch=2)
    assert not (await waiters.pop(1, request)).claims


async def test_a_nack_spends_one_retry_at_most(
    door: Losing, conveyor: Conveyor, database: str
) -> None:
    answer = await pop(door, database)
    [claim] = answer.claims
    door.losing = "after"
    with pytest.raises(AnswerLost):
        await conveyor.ack(
            1,
            "g",
            [AckItem(claim.partition_id, "in-0", "failed", lease_id=str(answer.lease_id))],
            soon(),
        )


def step(answer: PopAnswer, *, event: str | None) -> Transaction:
    """Ack the first message, push an event and count."""
    [claim] = answer.claims
    return Transaction(
        acks=[
            TransactionAck(
                claim.partition_id, "in-0", lease_id=str(answer.lease_id), consumer_group="g"
            )
        ],
        items=[PushItem("out", "p", b"1", event)],
        kv=[{"op": "incr", "ns": "n", "key": "k", "delta": 1}],
    )


async def test_a_step_that_never_arrived_is_carried_out(
    door: Losing, conveyor: Conveyor, database: str
) -> None:
    answer = await pop(door, database)
    door.losing = "before"
    verdict: Verdict = await conveyor.commit(1, step(answer, event="event"), soon())
    assert verdict.success
    assert await stored(database, "out") == ["event"]


@pytest.mark.parametrize("event", ["event", None])
async def test_a_step_that_was_committed_is_not_carried_out_again(
    door: Losing, conveyor: Conveyor, database: str, event: str | None
) -> None:
    """An ack alone would not keep it from that: its lease still covers the other message."""
    answer = await pop(door, database)
    door.losing = "after"
    with pytest.raises(AnswerLost):
        await conveyor.commit(1, step(answer, event=event), soon())
    assert len(await stored(database, "out")) == 1
    connection = await asyncpg.connect(database)
    assert await connection.fetchval("select value from queen.kv") == "1"
    await connection.close()


async def test_a_real_refusal_of_a_repeated_step_is_told(
    door: Losing, conveyor: Conveyor, database: str
) -> None:
    """What lost its gate the second time had not been committed the first time."""
    answer = await pop(door, database)
    gate = {"op": "put", "ns": "n", "key": "k", "value": "1", "required": True}
    transaction = Transaction(
        acks=step(answer, event="x").acks,
        items=[PushItem("out", "p", b"1", "x")],
        kv=[{**gate, "expect": 9}],
    )
    door.losing = "before"
    verdict = await conveyor.commit(1, transaction, soon())
    assert verdict.reason == "kv_precondition"
