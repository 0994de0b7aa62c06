"""The fault campaign's workloads and checkers, with a failover in the middle of each round."""

import asyncio
import random

import asyncpg
import pytest

from tests.faults.api import Api
from tests.faults.checkers import CHECKERS
from tests.faults.history import History
from tests.faults.workloads import WORKLOADS
from tests.replication.conftest import at
from tests.replication.test_failover import (
    FOLLOW_SECONDS,
    ROUNDS,
    followers,
    leader_name,
    promoted,
)
from tests.support.broker import Broker
from tests.support.nodes import Nodes

SECONDS = 4.0
# One round of these with the suite; of all of them, again and again, in the long profile.
SHORT = ("pipeline", "multikey")
LONG = tuple(WORKLOADS)
ROUNDS_TO_PLAY = [
    (workload, seed)
    for seed in range(ROUNDS)
    for workload in (SHORT if ROUNDS == 1 else LONG)
]  # fmt: skip


async def clear(connection: asyncpg.Connection) -> None:
    """Empty the tables: a checker judges all that is there."""
    await connection.execute(
        "truncate queen.messages, queen.cursors, queen.ready, queen.dead_letters, queen.kv,"
        " queen.timers, queen.partitions, queen.consumer_groups, queen.queues"
    )


async def follows(broker: Broker) -> None:
    """Wait until a broker has come to the new primary."""
    async with asyncio.timeout(FOLLOW_SECONDS):
        while not await asyncio.to_thread(broker.healthy):
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(("workload", "seed"), ROUNDS_TO_PLAY)
async def test_a_failover_loses_nothing_that_was_answered(
    nodes: Nodes, brokers: list[Broker], workload: str, seed: int
) -> None:
    """By turns the primary is killed, with both followers there, or hands over."""
    rng = random.Random(seed)
    old = await leader_name(nodes)
    async with at(nodes[old].url) as connection:
        await clear(connection)
    history = History()
    api = Api([broker.base_url for broker in brokers], history, rng)
    work = WORKLOADS[workload](api, rng)
    try:
        await work.prepare()
        running = asyncio.create_task(work.run(SECONDS))
        await asyncio.sleep(rng.uniform(0.5, SECONDS / 2))
        if seed % 4 == 3:
            new = await promoted(nodes, rng.choice(followers(old)))
        else:
            nodes[old].kill()
            new = await promoted(nodes)
        await running
        for broker in brokers:
            await follows(broker)
        async with at(nodes[new].url) as connection:
            await work.finish(connection)
    finally:
        await api.close()
    assert history.of("push", "ok") or history.operations
    assert CHECKERS[workload](history) == []
