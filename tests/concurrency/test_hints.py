"""`ready` is an index of hints: whatever may be claimed is found through it, at once.

None of these pops waits, so nothing but the hint itself can lead them to the partition.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import msgspec
import pytest
import pytest_asyncio

from queen_pg.broker.ack import AckItem
from queen_pg.broker.pop import PopAnswer
from queen_pg.config import Settings
from tests.support.clock import ClockedDatabase
from tests.support.process import Process, offsets
from tests.support.waits import until_blocked

PUSH = "select message_offset from queen.push('mail', '{}', 'p')"
ACK = "select results from queen._ack(1, $1)"
POP = "select message_offset from queen.pop('mail', 'g', partition => $1, subscription_mode => $2)"


@pytest_asyncio.fixture
async def clock(database: str) -> ClockedDatabase:
    """The clock of a process."""
    return ClockedDatabase(Settings(pg_url=database, pg_pool_size=4))


@pytest_asyncio.fixture
async def clocked(database: str, clock: ClockedDatabase) -> AsyncIterator[Process]:
    """A process of a broker whose clock the test moves."""
    async with Process(database, database=clock) as process:
        yield process


async def test_a_new_group_finds_the_old_beside_what_is_pushed_all_the_time(one: Process) -> None:
    """data-plane 4.3-6: a busy partition does not keep the rest of the queue from the group."""
    await one.push_one("shop.a", "old")
    await one.push([one.item("shop.b", "old"), one.item("shop.b", "older")])
    # This pop begins the group on both queues, and has no room for the second.
    await one.pop(None, namespace="shop", consumer_group="g", batch=1)
    await one.push_one("shop.b", "busy")
    answer = await one.pop("shop.b", consumer_group="g", partitions=64)
    assert {claim.partition for claim in answer.claims} == {"busy", "old", "older"}


async def test_a_group_finds_where_it_has_been_before_it_subscribed(
    clocked: Process, clock: ClockedDatabase
) -> None:
    """data-plane 4.8-2, 4.8-6: a cursor stays, also where the subscription would skip."""
    await clocked.configure("mail", windowBuffer=60)
    await clocked.push_one("mail", "p")
    clock.moment += timedelta(seconds=10)
    since = clock.moment
    await clocked.push_one("mail", "p")
    placed = await clocked.pop(
        "mail", partition="p", consumer_group="g", subscription_from=since.isoformat()
    )
    assert offsets(placed) == [], "the window holds it back"
    clock.moment += timedelta(seconds=60)
    answer = await clocked.pop("mail", consumer_group="g", subscription_mode="new")
    assert offsets(answer) == [1]


async def test_what_is_pushed_after_the_clock_was_set_back_is_found_at_once(
    clocked: Process, clock: ClockedDatabase
) -> None:
    await clocked.push_one("mail", "p")
    await clocked.ack(await clocked.pop("mail"))
    clock.moment -= timedelta(hours=1)
    await clocked.push_one("mail", "p")
    assert offsets(await clocked.pop("mail")) == [1]


async def test_a_pop_by_sql_looks_behind_hints_that_are_wrong(
    one: Process, session: asyncpg.Connection
) -> None:
    await session.execute(POP, None, "all")
    for partition in "abc":
        await one.push_one("mail", partition)
    await one.configure("mail", delayedProcessing=3600)
    assert await session.fetch(POP, None, "all") == []
    await one.configure("mail", delayedProcessing=0)
    assert [row[0] for row in await session.fetch(POP, None, "all")] == [0]


async def test_a_pop_by_sql_of_one_partition_keeps_its_place(
    one: Process, session: asyncpg.Connection
) -> None:
    """data-plane 4.8-2: as by HTTP, "new" is what comes after the group's first pop."""
    await one.push_one("mail", "p")
    assert await session.fetch(POP, "p", "new") == []
    await one.push_one("mail", "p")
    assert [row[0] for row in await session.fetch(POP, "p", "new")] == [1]


# An ack that finds its partition drained, and a push to it, at the same time: the hint then says
# "nothing more" or "now", and must not say the older of the two.


async def leased(process: Process) -> tuple[PopAnswer, str]:
    """Deliver the one message there is; return the delivery, and its ack as SQL takes it."""
    await process.push_one("mail", "p")
    answer = await process.pop("mail", consumer_group="g")
    [claim] = answer.claims
    ack = AckItem(
        claim.partition_id, claim.messages[0].transaction_id, lease_id=str(answer.lease_id)
    )
    return answer, msgspec.json.encode([ack.document("g")]).decode()


async def found(process: Process) -> list[int]:
    """Return what the next pop gets, which does not wait."""
    return offsets(await process.pop("mail", consumer_group="g"))


async def test_a_push_that_commits_after_the_snapshot_of_an_ack_is_found(
    one: Process, session: asyncpg.Connection
) -> None:
    """The ack meets the hint changed: it is sent back, and judges again."""
    _, ack = await leased(one)
    transaction = session.transaction(isolation="serializable")
    await transaction.start()
    await session.fetch("select from queen.queues")
    await one.push_one("mail", "p")
    with pytest.raises(asyncpg.SerializationError):
        await session.execute(ACK, ack)
    await transaction.rollback()
    async with session.transaction(isolation="serializable"):
        await session.execute(ACK, ack)
    assert await found(one) == [1]


async def test_a_push_that_waits_for_an_ack_is_found(
    one: Process, session: asyncpg.Connection
) -> None:
    _, ack = await leased(one)
    async with session.transaction(isolation="serializable"):
        await session.execute(ACK, ack)
        push = asyncio.create_task(one.push_one("mail", "p"))
        await until_blocked(session)
    await push
    assert await found(one) == [1]


async def test_a_push_by_sql_that_waits_for_an_ack_is_found(
    one: Process, database: str, session: asyncpg.Connection
) -> None:
    """At READ COMMITTED the push is not sent back: it reads the hint as the ack has left it."""
    _, ack = await leased(one)
    pushing = await asyncpg.connect(database)
    try:
        async with session.transaction(isolation="serializable"):
            await session.execute(ACK, ack)
            push = asyncio.create_task(pushing.execute(PUSH))
            await until_blocked(session)
        await push
    finally:
        await pushing.close()
    assert await found(one) == [1]


async def test_a_push_by_sql_that_an_ack_waits_for_is_found(
    one: Process, session: asyncpg.Connection
) -> None:
    answer, _ = await leased(one)
    async with session.transaction():
        await session.execute(PUSH)
        ack = asyncio.create_task(one.ack(answer))
        await until_blocked(session)
    assert [result.success for result in (await ack).results] == [True]
    assert await found(one) == [1]


async def test_a_push_that_commits_while_a_claim_is_on_its_way_is_found_after_it(
    one: Process, session: asyncpg.Connection
) -> None:
    """The claim knows of one message; its ack must find that there are two."""
    await one.push_one("mail", "p")
    await one.pop("mail", consumer_group="g", partition="p", batch=1, lease_seconds=1)
    [group] = await session.fetch("select id from queen.consumer_groups")
    [ready] = await session.fetch("select * from queen.ready")
    assert (group["id"], ready["next_offset"]) == (ready["group_id"], 1)
    await one.push_one("mail", "p")
    lease_id = await session.fetchval("select gen_random_uuid()")
    await session.execute(
        "update queen.cursors set lease_expires_at = queen.now() - interval '1 second'"
    )
    # A claim whose proposal is from before the push.
    await session.execute(
        "select from queen._claim(array[$1::bigint], array[$2::bigint], array[true],"
        " array[-1::bigint], array[0::bigint], array[0::bigint], array[1::bigint],"
        " array[$3::uuid], array[60], array[false], array[false])",
        ready["partition_id"],
        ready["group_id"],
        lease_id,
    )
    [row] = await session.fetch(
        "select transaction_id from queen.messages where message_offset = 0"
    )
    acked = await one.ack_items(
        "g", [AckItem(ready["partition_id"], row["transaction_id"], lease_id=str(lease_id))]
    )
    assert [result.lease_released for result in acked.results] == [True]
    assert await found(one) == [1]


async def test_a_hint_is_not_corrected_by_a_look_from_before_it_was_set_right(
    one: Process, session: asyncpg.Connection
) -> None:
    """A pop that found the partition drained, and a seek that set the group back meanwhile."""
    answer, _ = await leased(one)
    await one.ack(answer)
    await session.execute("update queen.ready set ready_at = queen.now()")
    [seen] = await session.fetch("select * from queen.ready")
    await session.execute("update queen.cursors set committed_offset = -1")
    await session.execute("update queen.ready set ready_at = queen.now()")
    await session.execute(
        "select queen._rearm($1, array[$2::bigint], array[$3::bigint], array[$4::timestamptz],"
        " array['infinity'::timestamptz], array[null::uuid])",
        *(seen[name] for name in ("group_id", "partition_id", "next_offset", "ready_at")),
    )
    assert await found(one) == [0]


async def test_a_group_finds_the_old_under_a_delay_that_hides_the_new(
    clocked: Process, clock: ClockedDatabase
) -> None:
    """A push between a group's birth and its first look enters a hint for what it pushed."""
    await clocked.configure("shop.b", delayedProcessing=60, namespace="shop")
    await clocked.push([clocked.item("shop.a", "p"), clocked.item("shop.b", "p")])
    clock.moment += timedelta(seconds=60)
    # This pop begins the group on both queues, and has no room for the second.
    await clocked.pop(None, namespace="shop", consumer_group="g", batch=1)
    await clocked.push_one("shop.b", "p")
    assert offsets(await clocked.pop("shop.b", consumer_group="g")) == [0]
