"""An application's transaction that pushes, and stays open: only its own partitions wait for it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import asyncpg
import pytest
import pytest_asyncio

from queen_pg.broker.transaction import Transaction
from queen_pg.database import LOCK_WAIT_MS
from tests.support.process import Process, messages

T = TypeVar("T")

# Far from any deadline, and from what a lane waits for a held row.
SOON_SECONDS = 8.0


async def soon(awaitable: Awaitable[T]) -> T:
    """Await what must not wait for the application."""
    return await asyncio.wait_for(awaitable, SOON_SECONDS)


@pytest_asyncio.fixture
async def application(database: str) -> AsyncIterator[asyncpg.Connection]:
    """An application's connection, inside a transaction of its own."""
    connection = await asyncpg.connect(database)
    transaction = connection.transaction()
    await transaction.start()
    yield connection
    if connection.is_in_transaction():
        await transaction.rollback()
    await connection.close()


PUSH = "select queen.push('mail', '\"mine\"', 'a')"


async def test_pops_pass_over_a_partition_that_an_application_holds(
    one: Process, application: asyncpg.Connection
) -> None:
    for partition in "ab":
        await one.push_one("mail", partition)
    await one.ack(await one.pop("mail", consumer_group="g", partitions=2))
    await one.push_one("mail", "a")
    await application.execute(PUSH)
    await one.push_one("mail", "b")
    answer = await soon(one.pop("mail", consumer_group="g", partitions=2))
    assert [claim.partition for claim in answer.claims] == ["b"]
    # Nor does a pop of the partition itself wait.
    assert (await soon(one.pop("mail", partition="a", consumer_group="g"))).claims == []
    waiting = asyncio.create_task(one.pop("mail", consumer_group="g", wait=True, timeout_ms=60_000))
    await application.execute("commit")
    assert messages(await soon(waiting))[-1] == '"mine"'


@pytest.mark.parametrize("outcome", ["commit", "rollback"])
async def test_a_savepoint_s_push_holds_as_its_transaction_does(
    one: Process, application: asyncpg.Connection, outcome: str
) -> None:
    await one.push_one("mail", "a")
    await one.pop("mail", consumer_group="g", lease_seconds=1)
    await application.execute("savepoint s")
    await application.execute(PUSH)
    await application.execute("release s")
    await asyncio.sleep(1.1)
    assert (await soon(one.pop("mail", consumer_group="g"))).claims == []
    await application.execute(outcome)
    answer = await soon(one.pop("mail", consumer_group="g"))
    assert len(messages(answer)) == (2 if outcome == "commit" else 1)


async def test_a_lane_goes_on_beside_a_partition_that_an_application_holds(
    one: Process, application: asyncpg.Connection
) -> None:
    # Enough partitions for every lane.
    names = [f"p{number}" for number in range(40)]
    await one.push([one.item("mail", name) for name in ("a", *names)])
    answer = await one.pop("mail", consumer_group="g", partitions=64, batch=1000)
    assert len(answer.claims) == 41
    await application.execute(PUSH)

    held = [asyncio.create_task(one.push_one("mail", "a")) for _ in range(5)]
    [of_a] = [claim for claim in answer.claims if claim.partition == "a"]
    held.append(asyncio.create_task(one.ack(answer, claims=[of_a])))
    for _ in range(3):
        await soon(one.push([one.item("mail", name) for name in names]))
    others = [claim for claim in answer.claims if claim.partition != "a"]
    await soon(one.ack(answer, claims=others))
    assert not any(task.done() for task in held)

    await application.execute("commit")
    *pushed, acked = await soon(asyncio.gather(*held))
    assert sorted(result.offset for result in pushed) == [2, 3, 4, 5, 6]
    assert [result.success for result in acked.results] == [True]


async def test_a_call_that_waits_for_an_application_ends_at_its_deadline(
    one: Process, application: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await one.push_one("mail", "a")
    await application.execute(PUSH)
    monkeypatch.setattr("tests.support.process.DEADLINE_SECONDS", 0.6)
    with pytest.raises(Exception, match="timeout"):
        await one.push_one("mail", "a")
    monkeypatch.undo()
    await application.execute("rollback")
    # What was given up is not carried out later.
    assert (await soon(one.push_one("mail", "a"))).offset == 1


async def test_a_transaction_waits_for_an_application_and_goes_through(
    one: Process, application: asyncpg.Connection
) -> None:
    await one.push_one("mail", "a")
    await application.execute(PUSH)
    step = asyncio.create_task(one.commit(Transaction(items=[one.item("mail", "a")])))
    await asyncio.sleep(0.6)
    assert not step.done()
    await application.execute("commit")
    assert (await soon(step)).success


async def test_a_step_that_waits_for_an_application_lets_others_at_its_other_partitions(
    one: Process, application: asyncpg.Connection
) -> None:
    for partition in "abc":
        await one.push_one("mail", partition)
    await application.execute(PUSH)
    step = asyncio.create_task(
        one.commit(Transaction(items=[one.item("mail", partition) for partition in "ab"]))
    )
    for _ in range(3):
        await soon(one.push_one("mail", "b"))
        assert (await soon(one.commit(Transaction(items=[one.item("mail", "b")])))).success
        assert (await soon(one.commit(Transaction(items=[one.item("mail", "c")])))).success
        await asyncio.sleep(LOCK_WAIT_MS / 1000)
    assert not step.done()
    await application.execute("commit")
    assert (await soon(step)).success
