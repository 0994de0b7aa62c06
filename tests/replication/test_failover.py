"""A primary dies under load, and another node takes over: nothing answered is lost or doubled."""

import time

from queen_pg.log import promote
from tests.replication.conftest import at
from tests.replication.load import Load
from tests.support.broker import Broker
from tests.support.nodes import Nodes


async def leader(nodes: Nodes) -> str:
    """Return the name of the node that leads."""
    async with nodes.cluster() as cluster:
        return cluster.require_primary().name


async def promoted(nodes: Nodes, name: str | None = None) -> str:
    """Promote, and return who leads now."""
    async with nodes.cluster() as cluster:
        await promote.promote(cluster, name, accept_loss=False)
    return await leader(nodes)


async def test_kill_the_primary(nodes: Nodes, brokers: list[Broker]) -> None:
    load = Load([broker.base_url for broker in brokers], "kill")
    await load.start()
    old = await leader(nodes)
    nodes[old].kill()
    killed = time.monotonic()
    new = await promoted(nodes)
    assert new != old
    first = await load.flow()
    await load.finish()
    async with at(nodes[new].url) as connection:
        await load.check(connection)
    print(f"answered again {first - killed:.2f} s after the kill", load.refusals, nodes.said)
