"""What a call leaves behind goes at once: the collector, which runs rarely, finds no cycles.

A payload in a cycle would stay in memory for as long as the collector pleases.
"""

import gc
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import pytest

from queen_pg.broker.transaction import Transaction, TransactionAck
from queen_pg.errors import Conflict, QueenError
from tests.support.process import Process

CALLS = 20
numbers = itertools.count()


async def _push(one: Process) -> None:
    await one.push([one.item("mail", "a"), one.item("mail", "b")])


async def _push_to_new(one: Process) -> None:
    await one.push_one("mail", f"new {next(numbers)}")


async def _push_again(one: Process) -> None:
    await one.push_one("mail", "a", "the same")


async def _pop_and_ack(one: Process) -> None:
    await one.push_one("mail", "a")
    await one.ack(await one.pop("mail", consumer_group="g"))


async def _pop_nothing(one: Process) -> None:
    await one.pop("empty", consumer_group="g")


async def _commit(one: Process) -> None:
    await one.push_one("mail", "a")
    answer = await one.pop("mail", consumer_group="h")
    acks = [
        TransactionAck(
            claim.partition_id,
            message.transaction_id,
            lease_id=str(answer.lease_id),
            consumer_group="h",
        )
        for claim in answer.claims
        for message in claim.messages
    ]
    assert (await one.commit(Transaction(acks=acks, items=[one.item("mail", "b")]))).success


async def _commit_a_push(one: Process) -> None:
    await one.commit(Transaction(items=[one.item("mail", "a")]))


@contextmanager
def collected() -> Iterator[Counter[str]]:
    """Yield what will have been found in cycles at the end, by type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(type(each).__name__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


@pytest.mark.parametrize(
    "call", [_push, _push_to_new, _push_again, _pop_and_ack, _pop_nothing, _commit]
)
async def test_a_call_leaves_no_cycle(
    one: Process, call: Callable[[Process], Awaitable[None]]
) -> None:
    await call(one)
    with collected() as found:
        for _ in range(CALLS):
            await call(one)
    assert not any(found[name] for name in ("PushItem", "Batch", "Part", "Message")), found


@pytest.mark.parametrize("call", [_push, _push_to_new, _commit_a_push])
async def test_a_call_that_fails_leaves_no_cycle(
    one: Process, call: Callable[[Process], Awaitable[None]]
) -> None:
    await call(one)
    assert one.db._reign is not None
    one.db._reign.terminate()
    with collected() as found:
        for _ in range(CALLS):
            with pytest.raises(QueenError):
                await call(one)
    assert not any(found[name] for name in ("PushItem", "Batch", "Part", "Unavailable")), found


async def test_a_lost_race_leaves_no_cycle(one: Process) -> None:
    class Cargo(list[int]):
        pass

    async def lose_once(cargo: Cargo) -> None:
        async def attempt() -> None:
            cargo.append(1)
            if len(cargo) == 1:
                raise Conflict("lost", sqlstate="40001")

        await one.db.retry("test", one.deadline(), attempt)

    with collected() as found:
        for _ in range(CALLS):
            await lose_once(Cargo())
    assert not found["Cargo"], found
