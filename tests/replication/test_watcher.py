"""The watcher promotes when the primary is gone for good, and at no other time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from queen_pg.config import Settings
from queen_pg.log import replica
from queen_pg.log.failover import Watcher, cannot_reach
from tests.replication.conftest import at
from tests.replication.test_failover import followers, leader_name
from tests.support.nodes import DATABASE, PASSWORD, Nodes

AFTER_SECONDS = 2.0
ACT_SECONDS = 30.0


@pytest.fixture
def said() -> list[str]:
    """What the watcher says."""
    return []


@contextlib.asynccontextmanager
async def watching(
    settings: Settings, said: list[str], *, accept_loss: bool = False
) -> AsyncIterator[None]:
    """Run a watcher meanwhile."""
    watcher = Watcher(settings, said.append, after_seconds=AFTER_SECONDS, accept_loss=accept_loss)
    task = asyncio.create_task(watcher.run())
    try:
        async with asyncio.timeout(ACT_SECONDS):
            while not said:
                await asyncio.sleep(0.05)
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def heard(said: list[str], word: str) -> None:
    """Wait until the watcher says something."""
    async with asyncio.timeout(ACT_SECONDS):
        while not any(word in line for line in said):
            await asyncio.sleep(0.05)


async def knows_quorum(url: str, size: int) -> None:
    """Wait until a node has been told how many followers a step waits for."""
    async with at(url) as node, asyncio.timeout(ACT_SECONDS):
        while await node.fetchval("select size from queen.quorum") != size:
            await asyncio.sleep(0.05)


def without(nodes: Nodes, name: str) -> Settings:
    """Return settings that name the other two nodes only."""
    hosts = ",".join(f"127.0.0.1:{nodes[other].port}" for other in followers(name))
    return Settings(
        pg_url=f"postgresql://queen:{PASSWORD}@{hosts}/{DATABASE}",
        pg_admin_url=f"postgresql://postgres:{PASSWORD}@{hosts}/{DATABASE}",
    )


async def test_a_primary_that_died_is_replaced(nodes: Nodes, said: list[str]) -> None:
    old = await leader_name(nodes)
    async with watching(nodes.settings, said):
        nodes[old].kill()
        await heard(said, "leads epoch")
        said.clear()
        await heard(said, "follows")
    assert await leader_name(nodes) in followers(old)


async def test_a_primary_that_only_the_watcher_cannot_reach_stays(
    nodes: Nodes, said: list[str]
) -> None:
    old = await leader_name(nodes)
    async with watching(without(nodes, old), said):
        nodes[old].link.cut(b"queen-pg")
        await heard(said, "nothing is promoted")
    nodes[old].link.mend()
    assert await leader_name(nodes) == old


async def test_a_primary_that_hangs_is_out_of_reach(nodes: Nodes) -> None:
    """A connection is made by the kernel even then; the server never says a word."""
    old = await leader_name(nodes)
    async with nodes.cluster() as cluster:
        assert [await cannot_reach(node) for node in cluster.followers] == [False, False]
        nodes[old].pause()
        try:
            assert [await cannot_reach(node) for node in cluster.followers] == [True, True]
        finally:
            nodes[old].resume()


async def test_asynchronous_replication_is_not_promoted_by_itself(
    nodes: Nodes, said: list[str]
) -> None:
    old = await leader_name(nodes)
    async with nodes.cluster() as cluster:
        await replica.set_quorum(cluster, 0)
    # Nobody has waited for the followers: a primary that dies at once may leave them in the belief
    # that each step waits.
    for name in followers(old):
        await knows_quorum(nodes[name].url, 0)
    async with watching(nodes.settings, said):
        nodes[old].kill()
        await heard(said, "may lose answered steps")
    nodes[old].start()
    assert await leader_name(nodes) == old
