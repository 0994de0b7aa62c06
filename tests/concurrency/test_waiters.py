"""Pops that wait: who is served, when, and who is not."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import asyncpg
import pytest

from queen_pg.broker import pop
from queen_pg.broker.pop import PopAnswer, Served
from queen_pg.errors import Conflict, Internal
from queen_pg.wakeup import ROUND_MAX
from tests.support.process import Process, messages, offsets

T = TypeVar("T")

LONG_MS = 30_000
# Far from the end of a long pop, and from the beginning of the next poll but one.
SOON_SECONDS = 8.0

SEEDED = "update queen.consumer_groups set seed_after = null, registered_xid = null"
LEASES = "select count(*) from queen.cursors where lease_id is not null"


async def soon(awaitable: Awaitable[T]) -> T:
    """Await what must come long before a pop's own time is over."""
    return await asyncio.wait_for(awaitable, SOON_SECONDS)


def wait(process: Process, queue: str, **parameters: Any) -> asyncio.Task[PopAnswer]:
    """Start a pop that waits long."""
    return asyncio.create_task(process.pop(queue, wait=True, timeout_ms=LONG_MS, **parameters))


async def parked(process: Process, queue: str, **parameters: Any) -> asyncio.Task[PopAnswer]:
    """Start a pop that waits long, and return when it has found nothing and waits."""
    task = wait(process, queue, **parameters)
    await process.settled()
    assert not task.done()
    return task


async def test_a_pop_that_does_not_wait_is_answered_behind_any_number_that_do(
    one: Process,
) -> None:
    waiting = [wait(one, "mail", consumer_group="g") for _ in range(ROUND_MAX + 6)]
    await one.settled()
    answer = await soon(one.pop("mail", consumer_group="g"))
    assert answer.claims == []
    assert not any(task.done() for task in waiting)


async def test_pops_that_come_together_share_the_partitions_out(one: Process) -> None:
    """Each has room for less than the first partition holds; none may leave with nothing."""
    for partition in "abcde":
        await one.push([one.item("mail", partition) for _ in range(30)])
    answers = await asyncio.gather(*(one.pop("mail", batch=10) for _ in range(5)))
    assert [offsets(answer) for answer in answers] == [list(range(10))] * 5
    assert {answer.claims[0].partition for answer in answers} == set("abcde")


async def test_what_one_pop_cannot_use_of_a_partition_is_made_up_for_to_the_next(
    one: Process,
) -> None:
    """A partition goes to one pop: each of these takes one whole and a third of another."""
    for number in range(6):
        await one.push([one.item("mail", f"p{number}") for _ in range(3)])
    answers = await asyncio.gather(*(one.pop("mail", batch=4, partitions=6) for _ in range(3)))
    assert [sorted(len(claim.messages) for claim in answer.claims) for answer in answers] == [
        [1, 3]
    ] * 3


async def test_what_stands_behind_wrong_hints_is_looked_for_at_once(
    one: Process, session: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that met wrong hints may have ended before it met the rest."""
    monkeypatch.setattr("queen_pg.wakeup.POLL_SECONDS", 3600.0)
    read = [one.item("mail", f"read {number}") for number in range(30)]
    await one.push(read)
    await one.ack(await one.pop("mail", batch=30, partitions=30))
    await session.execute(SEEDED)
    await one.push([one.item("mail", "first"), one.item("mail", "last")])
    await session.execute(
        "update queen.ready r set ready_at = queen.now() - interval '1 minute' * case"
        " when p.name = 'first' then 3 when p.name = 'last' then 1 else 2 end"
        " from queen.partitions p where p.id = r.partition_id"
    )
    answers = await soon(asyncio.gather(*(wait(one, "mail", batch=1) for _ in range(2))))
    assert [answer.claims[0].partition for answer in answers] == ["first", "last"]


async def test_waiters_are_served_oldest_first(one: Process) -> None:
    waiting = [await parked(one, "mail", consumer_group="g") for _ in range(4)]
    for task in waiting:
        pushed = await one.push_one("mail", f"partition {id(task)}")
        answer = await soon(task)
        assert [message.id for message in answer.claims[0].messages] == [pushed.message_id]
        await one.settled()
        assert [each.done() for each in waiting] == [
            waiting.index(each) <= waiting.index(task) for each in waiting
        ]


async def test_a_push_of_another_process_wakes(one: Process, other: Process) -> None:
    on_queue = await parked(one, "mail", consumer_group="g")
    on_partition = await parked(one, "mail", consumer_group="g", partition="p")
    await other.push([other.item("mail", "o"), other.item("mail", "p")])
    # Either may take p; whoever waits for the queue has o at least.
    answer = await soon(on_queue)
    if answer.claims[0].partition == "o":
        answer = await soon(on_partition)
    assert [claim.partition for claim in answer.claims] == ["p"]


async def test_a_pop_of_a_partition_is_woken_when_another_process_creates_it(
    one: Process, other: Process
) -> None:
    task = await parked(one, "mail", partition="p")
    await other.push([other.item("mail", "p") for _ in range(100)])
    assert offsets(await soon(task)) == list(range(100))


async def test_a_lease_that_runs_out_wakes(one: Process) -> None:
    await one.push_one("mail", "p")
    first = await one.pop("mail", lease_seconds=1)
    on_queue = await parked(one, "mail")
    answer = await soon(on_queue)
    assert messages(answer) == messages(first)
    assert answer.claims[0].delivery_attempt == 2


async def test_a_lease_that_runs_out_wakes_a_pop_of_its_partition(one: Process) -> None:
    await one.push_one("mail", "p")
    first = await one.pop("mail", lease_seconds=1)
    answer = await soon(await parked(one, "mail", partition="p"))
    assert messages(answer) == messages(first)


async def test_a_wake_that_comes_late_leaves_those_alone_who_came_after(
    one: Process, other: Process
) -> None:
    """The end of a delay wakes the line that the poll saw, and its pops may have left meanwhile."""
    first = await parked(one, "mail", consumer_group="g")
    [line] = one.waiters._lines
    first.cancel()
    await asyncio.wait([first])
    second = await parked(one, "mail", consumer_group="g")
    one.waiters._wake(line)
    await one.settled()
    await other.push([other.item("mail", "p")])
    assert offsets(await soon(second)) == [0]


async def test_an_ack_of_another_process_wakes(one: Process, other: Process) -> None:
    await other.push([other.item("mail", "p") for _ in range(3)])
    answer = await other.pop("mail", batch=1)
    task = await parked(one, "mail")
    await other.ack(answer)
    assert offsets(await soon(task)) == [1, 2]


async def test_the_end_of_a_delay_wakes(one: Process) -> None:
    await one.configure("mail", delayedProcessing=1)
    task = await parked(one, "mail")
    pushed = await one.push_one("mail")
    answer = await soon(task)
    assert answer.claims[0].messages[0].id == pushed.message_id


async def test_a_pop_of_one_partition_is_new_from_its_own_beginning(one: Process) -> None:
    """data-plane 4.8-2: a group without a subscription starts at the tail, once."""
    await one.push_one("mail", "p")
    new = {"consumer_group": "g", "partition": "p", "subscription_mode": "new"}
    assert offsets(await one.pop("mail", **new)) == []
    await one.push_one("mail", "p")
    assert offsets(await one.pop("mail", **new)) == [1]


async def test_what_is_pushed_while_a_pop_of_one_partition_waits_is_new(one: Process) -> None:
    """data-plane 4.3-2, 4.4: also where the push creates the partition."""
    await one.push_one("mail", "old")
    new = {"consumer_group": "g", "subscription_mode": "new"}
    on_old = await parked(one, "mail", partition="old", **new)
    on_unborn = await parked(one, "mail", partition="unborn", **new)
    await one.push([one.item("mail", "old"), one.item("mail", "unborn")])
    assert offsets(await soon(on_old)) == [1]
    assert offsets(await soon(on_unborn)) == [0]


async def test_a_group_begins_on_every_queue_that_a_discovery_pop_matches(one: Process) -> None:
    """data-plane 4.8-1: also on those that the pop's budget does not reach."""
    for name in ("shop.a", "shop.b"):
        await one.push_one(name)
    new = {"namespace": "shop", "consumer_group": "g", "subscription_mode": "new"}
    # The first queue has something for the group, and one message is all that the pop asks for.
    await one.pop("shop.a", consumer_group="g", subscription_mode="new")
    await one.push_one("shop.a")
    assert offsets(await one.pop(None, batch=1, **new)) == [1]
    await one.push_one("shop.b")
    assert offsets(await one.pop(None, **new)) == [1], "what came after the first pop is new"


@pytest.mark.parametrize("parameters", [{}, {"partition": "p"}, {"partition": "unborn"}])
async def test_parked_pops_of_a_deleted_queue_answer_empty(
    one: Process, session: asyncpg.Connection, parameters: dict[str, str]
) -> None:
    """data-plane 9.6: and none of them creates the queue again."""
    await one.push_one("mail", "p")
    taken = await one.pop("mail", consumer_group="g")
    task = await parked(one, "mail", consumer_group="g", **parameters)
    await one.delete("mail")
    assert (await soon(task)).claims == []
    assert taken.claims
    assert await session.fetchval("select count(*) from queen.queues") == 0


@pytest.mark.parametrize("parameters", [{}, {"partition": "p"}])
async def test_parked_pops_hear_of_a_queue_that_another_process_deletes(
    one: Process, other: Process, session: asyncpg.Connection, parameters: dict[str, str]
) -> None:
    await one.push_one("mail", "p")
    await one.ack(await one.pop("mail", consumer_group="g"))
    task = await parked(one, "mail", consumer_group="g", **parameters)
    await other.delete("mail")
    assert (await soon(task)).claims == []
    assert await session.fetchval("select count(*) from queen.queues") == 0


async def test_a_client_that_is_gone_gets_no_lease(
    one: Process, session: asyncpg.Connection
) -> None:
    gone = False
    task = await parked(one, "mail", consumer_group="g", gone=lambda: gone)
    gone = True
    await one.push_one("mail")
    assert (await soon(task)).claims == []
    assert await session.fetchval(LEASES) == 0


async def test_a_client_that_goes_while_it_is_served_leaves_nothing_behind(
    one: Process, session: asyncpg.Connection
) -> None:
    """data-plane 4.3-12: neither its lease nor its delivery."""
    await one.push_one("mail")
    answers = iter([False, True])
    answer = await soon(one.pop("mail", consumer_group="g", gone=lambda: next(answers, True)))
    assert answer.claims == []
    await one.settled()
    assert await session.fetchval(LEASES) == 0
    again = await one.pop("mail", consumer_group="g")
    assert [claim.delivery_attempt for claim in again.claims] == [1]


async def test_the_next_in_line_gets_what_a_client_that_goes_was_given(one: Process) -> None:
    served = asyncio.Event()

    def gone() -> bool:
        # First asked when it joins, then before a round, then when the round has claimed for it.
        return served.is_set()

    first = await parked(one, "mail", consumer_group="g", gone=gone)
    second = await parked(one, "mail", consumer_group="g")
    served.set()
    await one.push_one("mail")
    assert (await soon(first)).claims == []
    assert offsets(await soon(second)) == [0]


async def test_a_pop_that_is_cancelled_as_it_is_answered_gives_its_lease_back(
    one: Process, session: asyncpg.Connection
) -> None:
    await one.push_one("mail")
    asked = 0

    def gone() -> bool:
        # The second question comes right before the answer: cancel between that and its hearing.
        nonlocal asked
        asked += 1
        if asked == 2:
            asyncio.get_running_loop().call_soon(task.cancel)
        return False

    task = wait(one, "mail", consumer_group="g", gone=gone)
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    assert asked == 2
    async with asyncio.timeout(SOON_SECONDS):
        while await session.fetchval(LEASES) > 0:
            await asyncio.sleep(0.01)
    again = await one.pop("mail", consumer_group="g")
    assert [claim.delivery_attempt for claim in again.claims] == [1]


async def test_closing_answers_every_parked_pop(one: Process) -> None:
    tasks = [
        await parked(one, "mail", **parameters)
        for parameters in ({}, {"consumer_group": "g"}, {"partition": "p"})
    ]
    await one.waiters.close()
    assert [(await soon(task)).claims for task in tasks] == [[], [], []]


async def test_a_partition_that_somebody_is_pushing_to_does_not_look_unborn(
    one: Process, session: asyncpg.Connection
) -> None:
    """data-plane 4.8-2: a group that starts with what is new is not given the old."""
    await one.push([one.item("mail", "other"), one.item("mail", "p")])
    new = {"consumer_group": "g", "subscription_mode": "new"}
    await one.pop("mail", partition="other", **new)
    await one.push_one("mail", "p")
    async with session.transaction():
        await session.execute("select queen.push('mail', '{}', 'p')")
        task = await parked(one, "mail", partition="p", **new)
    assert offsets(await soon(task)) == [2]


@pytest.mark.parametrize("function", ["_candidates", "_place_cursor"])
async def test_a_pop_whose_look_loses_a_race_looks_again(
    one: Process, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    await one.push_one("mail", "p")
    lost: list[str] = []

    def losing(call: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
        async def once(name: str, /, **arguments: Any) -> T:
            if name == function and not lost:
                lost.append(name)
                raise Conflict("somebody was faster", sqlstate="40001")
            return await call(name, **arguments)

        return once

    monkeypatch.setattr(one.db, "read", losing(one.db.read))
    monkeypatch.setattr(one.db, "step", losing(one.db.step))
    new = {"consumer_group": "g", "partition": "p", "subscription_mode": "new"}
    assert (await soon(one.pop("mail", **new))).claims == []
    assert lost == [function]


async def test_a_pop_is_told_when_it_fails_for_a_reason_that_nobody_thought_of(
    one: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(one.db, "read", broken)
    with pytest.raises(Internal):
        await soon(one.pop("mail"))


@pytest.mark.parametrize("woken_by", ["push", "another process's push", "ack"])
async def test_only_the_pop_whose_partition_got_something_is_served(
    one: Process, monkeypatch: pytest.MonkeyPatch, woken_by: str
) -> None:
    """However many wait for single partitions of the queue, a message costs one of them a round."""
    partitions = [f"p-{number}" for number in range(100)]
    await one.push([one.item("mail", partition) for partition in partitions])
    answers = [
        await one.pop("mail", partition=partition, consumer_group="g") for partition in partitions
    ]
    for answer in answers[1:]:
        await one.ack(answer)
    waiting = {
        partition: await parked(one, "mail", partition=partition, consumer_group="g")
        for partition in partitions
    }
    served: list[str | None] = []
    serve = pop.serve

    async def noting(*arguments: Any, **more: Any) -> Served:
        served.append(arguments[1].partition)
        return await serve(*arguments, **more)

    monkeypatch.setattr(pop, "serve", noting)
    item = one.item("mail", "p-0")
    if woken_by == "push":
        await one.ack(answers[0])
        await one.settled()
        served.clear()
        await one.push([item])
    elif woken_by == "ack":
        await one.push([item])
        await one.settled()
        served.clear()
        await one.ack(answers[0])
    else:
        await one.ack(answers[0])
        await one.settled()
        served.clear()
        await one.conveyor.push(1, [item], one.deadline())
        one.waiters.pushed(1, ["mail"], heard=True)
    assert offsets(await soon(waiting.pop("p-0"))) == [1]
    assert set(served) == {"p-0"}
    assert not any(task.done() for task in waiting.values())
