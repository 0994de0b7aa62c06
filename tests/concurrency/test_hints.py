"""`ready` is an index of hints: whatever may be claimed is found through it, at once.

None of these pops waits, so nothing but the hint itself can lead them to the partition.
"""

from collections.abc import AsyncIterator
from datetime import timedelta

import pytest_asyncio

from queen_pg.config import Settings
from tests.support.clock import ClockedDatabase
from tests.support.process import Process, offsets

WAITS = "select exists (select from pg_stat_activity where pid = $1 and wait_event_type = 'Lock')"
SOON_SECONDS = 8.0


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
