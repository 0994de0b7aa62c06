"""One log of three servers for all tests of this folder, and two brokers that see it all."""

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from queen_pg import migrate
from queen_pg.log import promote, replica
from queen_pg.log.node import Cluster, Member
from tests.support.broker import Broker
from tests.support.nodes import NAMES, Nodes, three


@pytest_asyncio.fixture(scope="session")
async def servers() -> AsyncIterator[Nodes]:
    """Three servers, on the binaries of this run."""
    bin_folder = os.environ.get("QUEEN_PG_TEST_BINDIR")
    with three(Path(bin_folder) if bin_folder else None) as nodes:
        await nodes.allow()
        yield nodes


@pytest_asyncio.fixture(scope="session")
async def built(servers: Nodes) -> Nodes:
    """The three as a log: a leads, b and c follow, and each step waits for one of them."""
    await migrate.upgrade(servers["a"].url)
    for name in ("b", "c"):
        async with servers.cluster() as cluster:
            naming = replica.Naming(name, "a", servers["a"].address)
            await replica.add(cluster, servers[name].address, naming)
    return servers


@pytest_asyncio.fixture
async def nodes(built: Nodes) -> AsyncIterator[Nodes]:
    """The log, whole again after whatever the last test did to it."""
    await mend(built)
    yield built
    for server in built:
        server.start()


@pytest.fixture(scope="session")
def brokers(built: Nodes) -> Iterator[list[Broker]]:
    """Two brokers that know every node."""
    with contextlib.ExitStack() as stack:
        limits = {
            "QUEEN_KV_READ_RATE": "0",
            "QUEEN_KV_WRITE_RATE": "0",
            "RETENTION_INTERVAL": "200",
        }
        yield [stack.enter_context(Broker(built.url, **limits)) for _ in range(2)]


async def mend(nodes: Nodes) -> None:
    """Have all three up, one leading, two following, and a quorum of one."""
    for server in nodes:
        server.link.mend()
        server.start()
    async with nodes.cluster() as cluster:
        if cluster.primary is None or any(
            node.epoch < cluster.primary.epoch for node in cluster.followers
        ):
            await promote.promote(cluster, None, accept_loss=True)
    for name in NAMES:
        async with nodes.cluster() as cluster:
            if not _fine(cluster, name):
                await replica.rejoin(cluster, nodes[name].address, name)
    async with nodes.cluster() as cluster:
        if cluster.quorum != 1 or not all(
            member.synchronous for member in cluster.members.values() if _follows(cluster, member)
        ):
            await replica.set_quorum(cluster, 1)


def _follows(cluster: Cluster, member: Member) -> bool:
    return member.name != cluster.require_primary().name


def _fine(cluster: Cluster, name: str) -> bool:
    """Whether a node leads, or follows with everything."""
    node = cluster.node(name)
    if node is None or node is cluster.primary:
        return node is not None
    return bool(
        node.sight.role == "follower" and node.facts.enabled and cluster.members[name].joined
    )


@contextlib.asynccontextmanager
async def at(url: str) -> AsyncIterator[asyncpg.Connection]:
    """Yield a connection for looking, to whatever the node is."""
    connection = await asyncpg.connect(
        url, server_settings={"default_transaction_read_only": "off"}
    )
    try:
        yield connection
    finally:
        await connection.close()
