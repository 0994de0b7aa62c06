"""What a process pushes is handed to the pops that wait in it, without a look.

A proposal from memory may be wrong in every way; the claim judges it, and then somebody looks.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import asyncpg
import pytest

from queen_pg.broker.append import appends
from queen_pg.broker.claim import Span
from queen_pg.broker.pop import PopAnswer
from queen_pg.broker.transaction import Transaction
from tests.concurrency.test_waiters import SEEDED, SOON_SECONDS, parked, soon, wait
from tests.support.process import TENANT, Process, messages, offsets

T = TypeVar("T")
Known = Callable[..., Awaitable[None]]

LOOK, CLAIM, READ, SUBSCRIPTION = "_candidates", "_claim", "_read_messages", "_subscription"
POLLS = {"_next_ready", "_claimable"}


@pytest.fixture
def calls(one: Process, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that a process calls, but for its polls."""
    called: list[str] = []

    def noting(call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def noted(name: str, /, **arguments: Any) -> T:
            if name not in POLLS:
                called.append(name)
            return await call(name, **arguments)

        return noted

    monkeypatch.setattr(one.db, "read", noting(one.db.read))
    monkeypatch.setattr(one.db, "step", noting(one.db.step))
    return called


@pytest.fixture
def known(session: asyncpg.Connection) -> Known:
    """Give a group a cursor at the end of each of these partitions, and let its seeding be over."""

    async def begin(
        process: Process, *partitions: str, group: str = "g", queue: str = "mail"
    ) -> None:
        await process.push([process.item(queue, partition) for partition in partitions])
        answer = await process.pop(queue, consumer_group=group, partitions=64)
        assert {claim.partition for claim in answer.claims} >= set(partitions)
        await process.ack(answer)
        await session.execute(SEEDED)

    return begin


def held_claims(process: Process) -> asyncio.Event:
    """Hold the claims of a process back until the event is set."""
    go = asyncio.Event()
    claim = process.conveyor.claim

    async def later(spans: Sequence[Span], deadline: float) -> Sequence[int | None]:
        await go.wait()
        return await claim(spans, deadline)

    process.waiters.claimer = later
    return go


async def test_a_push_is_handed_over_without_a_look(
    one: Process, known: Known, calls: list[str]
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    calls.clear()
    pushed = await one.push_one("mail", "p")
    answer = await soon(task)
    assert answer.claims[0].messages[0].id == pushed.message_id
    assert sorted(calls) == sorted(["_append", CLAIM, READ])


async def test_a_pop_of_one_partition_is_handed_its_own_alone(
    one: Process, known: Known, calls: list[str]
) -> None:
    await known(one, "p", "o")
    task = await parked(one, "mail", consumer_group="g", partition="p")
    calls.clear()
    await one.push_one("mail", "o")
    await one.settled()
    assert not task.done()
    await one.push_one("mail", "p")
    assert offsets(await soon(task)) == [1]
    assert LOOK not in calls


async def test_what_a_transaction_pushes_is_handed_over(
    one: Process, known: Known, calls: list[str]
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    calls.clear()
    verdict = await one.commit(Transaction(items=[one.item("mail", "p")]))
    assert verdict.success
    assert offsets(await soon(task)) == [1]
    assert LOOK not in calls


async def test_every_group_is_handed_what_is_pushed(
    one: Process, known: Known, calls: list[str]
) -> None:
    for group in ("g", "h"):
        await known(one, "p", group=group)
    await one.ack(await one.pop("mail", consumer_group="g"))
    tasks = [await parked(one, "mail", consumer_group=group) for group in ("g", "h")]
    calls.clear()
    await one.push_one("mail", "p")
    assert [offsets(await soon(task)) for task in tasks] == [[2], [2]]
    assert LOOK not in calls


async def test_the_oldest_are_served_first_and_each_by_one_partition(
    one: Process, known: Known
) -> None:
    await known(one, *"abc")
    waiting = [await parked(one, "mail", consumer_group="g") for _ in range(4)]
    await one.push([one.item("mail", partition) for partition in "abc"])
    answers = [await soon(task) for task in waiting[:3]]
    assert [[claim.partition for claim in answer.claims] for answer in answers] == [
        ["a"],
        ["b"],
        ["c"],
    ]
    await one.settled()
    assert not waiting[3].done()


async def test_a_pop_is_handed_no_more_than_it_asks_for(one: Process, known: Known) -> None:
    await known(one, *"abc")
    first = await parked(one, "mail", consumer_group="g", batch=2, partitions=2)
    await one.push([one.item("mail", partition) for partition in "abbc"])
    answer = await soon(first)
    assert [(claim.partition, len(claim.messages)) for claim in answer.claims] == [
        ("a", 1),
        ("b", 1),
    ]
    # What was beyond its width is there for the next, and what was beyond its batch after the ack.
    assert [claim.partition for claim in (await one.pop("mail", consumer_group="g")).claims] == [
        "c"
    ]
    second = await parked(one, "mail", consumer_group="g")
    await one.ack(answer)
    assert offsets(await soon(second)) == [2]


async def test_what_is_committed_on_delivery_is_handed_on_to_the_next(
    one: Process, known: Known, session: asyncpg.Connection
) -> None:
    await known(one, "p")
    once: dict[str, Any] = {"consumer_group": "g", "batch": 1, "commit_on_delivery": True}
    tasks = [await parked(one, "mail", **once) for _ in range(3)]
    await one.push([one.item("mail", "p") for _ in range(3)])
    assert [offsets(await soon(task)) for task in tasks] == [[1], [2], [3]]
    [hint] = await session.fetch(
        "select next_offset, ready_at = 'infinity' as idle from queen.ready"
    )
    assert (hint["next_offset"], hint["idle"]) == (4, True)


async def test_a_hand_off_leaves_the_hint_of_a_lease(
    one: Process, known: Known, session: asyncpg.Connection
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g", lease_seconds=33)
    await one.push([one.item("mail", "p") for _ in range(2)])
    answer = await soon(task)
    [row] = await session.fetch(
        "select r.next_offset, r.lease_id, r.ready_at = c.lease_expires_at as hinted,"
        " extract(epoch from c.lease_expires_at - c.updated_at)::int as seconds"
        " from queen.ready r join queen.cursors c using (partition_id, group_id)"
    )
    assert (row["next_offset"], row["lease_id"]) == (3, answer.lease_id)
    assert (row["hinted"], row["seconds"]) == (True, 33)


async def test_pushes_that_come_during_a_round_are_one_span(
    one: Process, known: Known, calls: list[str]
) -> None:
    await known(one, *"pq")
    tasks = [await parked(one, "mail", consumer_group="g") for _ in range(2)]
    go = held_claims(one)
    calls.clear()
    await one.push_one("mail", "p")
    await asyncio.sleep(0)
    for _ in range(3):
        await one.push_one("mail", "q")
    go.set()
    assert [offsets(await soon(task)) for task in tasks] == [[1], [1, 2, 3]]
    assert Counter(calls) == {"_append": 4, CLAIM: 2, READ: 2}


async def test_what_follows_something_leased_comes_after_its_ack(
    one: Process, known: Known, calls: list[str]
) -> None:
    await known(one, "p")
    first, second = [await parked(one, "mail", consumer_group="g") for _ in range(2)]
    await one.push_one("mail", "p")
    answer = await soon(first)
    calls.clear()
    await one.push_one("mail", "p")
    await one.settled()
    assert CLAIM not in calls
    assert not second.done()
    await one.ack(answer)
    assert offsets(await soon(second)) == [2]


async def test_a_gap_that_another_process_has_filled_is_looked_for(
    one: Process, known: Known, other: Process, calls: list[str]
) -> None:
    """Nothing is delivered before what precedes it, and nothing is left out."""
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    await other.push([other.item("mail", "p")])
    calls.clear()
    await one.push_one("mail", "p")
    assert offsets(await soon(task)) == [1, 2]
    assert calls.index(CLAIM) < calls.index(LOOK)


async def test_what_an_application_has_pushed_in_between_is_looked_for(
    one: Process, known: Known, session: asyncpg.Connection
) -> None:
    await known(one, "p")
    tasks = [await parked(one, "mail", consumer_group="g") for _ in range(2)]
    go = held_claims(one)
    await one.push_one("mail", "p")
    await asyncio.sleep(0)
    await session.execute("select from queen.push('mail', '{}', 'p')")
    await one.push_one("mail", "p")
    go.set()
    answer = await soon(tasks[0])
    assert offsets(answer) == [1]
    await one.ack(answer)
    assert offsets(await soon(tasks[1])) == [2, 3]


async def test_a_proposal_that_another_process_has_taken_is_lost(
    one: Process, known: Known, other: Process
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    go = held_claims(one)
    await one.push_one("mail", "p")
    taken = await other.pop("mail", consumer_group="g")
    assert offsets(taken) == [1]
    go.set()
    await one.settled()
    assert not task.done()
    await other.ack(taken)
    await one.push_one("mail", "p")
    assert offsets(await soon(task)) == [2]


async def test_where_a_group_begins_is_looked_for(
    one: Process, known: Known, calls: list[str], session: asyncpg.Connection
) -> None:
    """It has no cursor in a partition that is new, or that it has not read yet."""
    await known(one, "p")
    await one.push_one("mail", "old")
    await one.pop("mail", consumer_group="late", subscription_mode="new")
    await session.execute(SEEDED)
    tasks = [await parked(one, "mail", consumer_group="late") for _ in range(2)]
    await one.push_one("mail", "old")
    await one.push_one("mail", "new")
    claims = [claim for task in tasks for claim in (await soon(task)).claims]
    assert {claim.partition: [m.offset for m in claim.messages] for claim in claims} == {
        "old": [1],
        "new": [0],
    }


@pytest.mark.parametrize("option", ["delayedProcessing", "windowBuffer"])
async def test_a_delay_counts_from_the_moment_when_another_process_has_set_it(
    one: Process, known: Known, other: Process, calls: list[str], option: str
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    await other.configure("mail", **{option: 3600})
    calls.clear()
    await one.push_one("mail", "p")
    await one.settled()
    assert not task.done()
    assert CLAIM in calls
    calls.clear()
    await one.push_one("mail", "p")
    await one.settled()
    assert not task.done()
    assert CLAIM not in calls, "a line that has lost asks for the queue anew"


async def test_a_lease_lasts_as_another_process_has_set_it(
    one: Process, known: Known, other: Process, session: asyncpg.Connection
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    await other.configure("mail", leaseTime=77)
    await one.push_one("mail", "p")
    assert offsets(await soon(task)) == [1]
    seconds = await session.fetchval(
        "select extract(epoch from lease_expires_at - updated_at)::int from queen.cursors"
    )
    assert seconds == 77


async def test_a_queue_that_another_process_has_made_anew_is_read_from_its_beginning(
    one: Process, known: Known, other: Process
) -> None:
    await known(one, "p")
    task = await parked(one, "mail", consumer_group="g")
    await other.delete("mail")
    await one.push([one.item("mail", "p") for _ in range(2)])
    await soon(task)
    assert offsets(await one.pop("mail", consumer_group="g")) == [0, 1]


async def test_a_group_that_conflates_looks(one: Process) -> None:
    await one.push_one("mail", "p")
    conflating: dict[str, Any] = {"consumer_group": "g", "conflation": True}
    await one.ack(await one.pop("mail", **conflating))
    task = await parked(one, "mail", **conflating)
    await one.push([one.item("mail", "p") for _ in range(3)])
    assert offsets(await soon(task)) == [3]


async def test_a_pop_that_joins_where_nothing_is_left_waits_without_a_look(
    one: Process, known: Known, other: Process, calls: list[str]
) -> None:
    """And yet it gets what nobody has told of: the poll finds that."""
    await known(one, "p")
    first = await parked(one, "mail", consumer_group="g")
    calls.clear()
    second = wait(one, "mail", consumer_group="g")
    await asyncio.sleep(0)
    await one.settled()
    assert calls == []
    for expected, task in enumerate((first, second), 1):
        await other.push([other.item("mail", "p")])
        answer = await soon(task)
        assert offsets(answer) == [expected]
        await one.ack(answer)


async def test_a_pop_that_joins_during_a_look_that_leaves_nothing_needs_no_other(
    one: Process, known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    await known(one, "p")
    first = await parked(one, "mail", consumer_group="g")
    go = asyncio.Event()
    looks = 0
    read = one.db.read

    async def later(name: str, /, **arguments: Any) -> list[asyncpg.Record]:
        nonlocal looks
        if name == LOOK:
            looks += 1
            await go.wait()
        return await read(name, **arguments)

    monkeypatch.setattr(one.db, "read", later)
    one.waiters.pushed(TENANT, ["mail"], heard=True)
    await asyncio.sleep(0)
    second = wait(one, "mail", consumer_group="g")
    await asyncio.sleep(0)
    go.set()
    await one.settled()
    assert looks == 1
    assert not first.done()
    assert not second.done()


async def test_a_look_that_is_due_finds_what_was_pushed_too(
    one: Process, known: Known, other: Process, calls: list[str]
) -> None:
    await known(one, *"pq")
    tasks = [await parked(one, "mail", consumer_group="g") for _ in range(2)]
    await other.push([other.item("mail", "q")])
    calls.clear()
    items = [one.item("mail", "p")]
    results = await one.conveyor.push(TENANT, items, one.deadline())
    one.waiters.pushed_to(TENANT, appends(items, results))
    one.waiters.pushed(TENANT, ["mail"], heard=True)
    assert [offsets(await soon(task)) for task in tasks] == [[1], [1]]
    assert calls.count(CLAIM) == 1


async def test_a_pop_that_does_not_wait_looks_even_where_nothing_was_left(
    one: Process, known: Known, other: Process
) -> None:
    await known(one, "p")
    waiting = [await parked(one, "mail", consumer_group="g")]
    await other.push([other.item("mail", "p"), other.item("mail", "q")])
    answer = await soon(one.pop("mail", consumer_group="g"))
    assert len(offsets(await soon(waiting[0]))) + len(offsets(answer)) == 2


async def test_a_line_that_always_has_something_to_hand_over_finds_the_rest(
    one: Process, known: Known, other: Process
) -> None:
    """The poll asks for busy lines too."""
    await known(one, "busy", "quiet")
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def consume() -> None:
        while True:
            answer = await one.pop("mail", consumer_group="g", wait=True, timeout_ms=30_000)
            for claim in answer.claims:
                await seen.put(claim.partition)
            await one.ack(answer)

    async def feed() -> None:
        while True:
            await one.push_one("mail", "busy")

    tasks = [asyncio.create_task(each()) for each in (consume, consume, feed)]
    try:
        await seen.get()
        await other.push([other.item("mail", "quiet")])
        async with asyncio.timeout(SOON_SECONDS):
            while await seen.get() != "quiet":
                pass
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_nothing_is_missed_or_out_of_order_whoever_pushes(
    one: Process, known: Known, other: Process, session: asyncpg.Connection
) -> None:
    partitions = [f"p-{number}" for number in range(4)]
    await known(one, *partitions)
    total = 0
    delivered: defaultdict[str, list[int]] = defaultdict(list)

    async def push(process: Process) -> None:
        nonlocal total
        for number in range(40):
            chosen = partitions[number % 4 :][: 1 + number % 2]
            total += len(chosen)
            await process.push([process.item("mail", partition) for partition in chosen])

    async def apply() -> None:
        nonlocal total
        for number in range(20):
            total += 1
            await session.execute(
                "select from queen.push('mail', '{}', $1)", partitions[number % 4]
            )

    def count() -> int:
        return sum(map(len, delivered.values()))

    async def consume(process: Process) -> None:
        while True:
            answer: PopAnswer = await process.pop(
                "mail", consumer_group="g", batch=5, partitions=2, wait=True, timeout_ms=30_000
            )
            for claim in answer.claims:
                delivered[claim.partition] += [message.offset for message in claim.messages]
            await process.ack(answer)

    consumers = [asyncio.create_task(consume(process)) for process in (one, one, one, other)]
    try:
        await asyncio.gather(push(one), push(one), push(other), apply())
        async with asyncio.timeout(4 * SOON_SECONDS):
            while count() < total:
                await asyncio.sleep(0.01)
    finally:
        for task in consumers:
            task.cancel()
        await asyncio.gather(*consumers, return_exceptions=True)
    assert dict(delivered) == {
        name: list(range(1, len(delivered[name]) + 1)) for name in partitions
    }


async def test_a_client_that_goes_while_it_is_handed_something_leaves_nothing_behind(
    one: Process, known: Known
) -> None:
    await known(one, "p")
    gone = False
    first = await parked(one, "mail", consumer_group="g", gone=lambda: gone)
    second = await parked(one, "mail", consumer_group="g")
    go = held_claims(one)
    await one.push_one("mail", "p")
    await asyncio.sleep(0)
    gone = True
    go.set()
    assert (await soon(first)).claims == []
    answer = await soon(second)
    assert offsets(answer) == [1]
    assert messages(answer)
    assert answer.claims[0].delivery_attempt == 1
