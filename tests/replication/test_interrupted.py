"""The commands that change a log, interrupted before each of their statements and repeated.

Whatever was done by then, the repetition does the rest, and leaves what one run would have left.
"""

from collections.abc import Awaitable, Callable

import pytest

from queen_pg.log import promote, replica, statement
from queen_pg.log.node import Cluster, LogError, Node
from tests.replication.conftest import at, mend
from tests.replication.test_failover import followers, leader_name, promoted, same
from tests.support.nodes import Nodes
from tests.support.profile import LONG

Command = Callable[[Cluster], Awaitable[None]]


class Interrupted(Exception):
    """What an operator's Ctrl-C is to a command."""


async def interrupted_everywhere(
    nodes: Nodes,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[], Awaitable[None]],
    command: Command,
    check: Callable[[], Awaitable[None]],
    *,
    step: int,
) -> int:
    """Interrupt a command before its n-th statement, then repeat it; return how many it has.

    Every statement is tried in the long profile, and one in `step` otherwise.
    """
    real = Node._execute
    left = 0

    async def execute(self: Node, text: str, right: str) -> None:
        nonlocal left
        left -= 1
        # From there on nothing more happens, as when the process is killed.
        if left <= 0:
            raise Interrupted(text)
        await real(self, text, right)

    for place in range(1, 100, 1 if LONG else step):
        await prepare()
        left = place
        with monkeypatch.context() as patch:
            patch.setattr(Node, "_execute", execute)
            try:
                async with nodes.cluster() as cluster:
                    await command(cluster)
                return place
            except Interrupted:
                pass
        async with nodes.cluster() as cluster:
            await command(cluster)
        await check()
    raise AssertionError("the command never came to its end")


async def check_whole(nodes: Nodes, *, quorum: int) -> None:
    """Whoever is there leads or follows, counts for the quorum, and has the slots it needs."""
    async with nodes.cluster() as cluster:
        primary = cluster.require_primary()
        following = {node.name for node in cluster.followers}
        assert len(following) + 1 == len(cluster.nodes)
        assert cluster.quorum == quorum
        counting = {member.name for member in cluster.members.values() if member.synchronous}
        assert counting == (following if quorum else set())
        assert bool(primary.facts.standby_names) == bool(quorum)
        for node in cluster.nodes:
            others = following if node is primary else following - {node.name}
            assert set(node.facts.slots) == {statement.slot(name) for name in others}, node.name
    for name in following:
        await same(nodes, primary.name, name)


async def test_add(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    other = followers(await leader_name(nodes))[0]

    async def prepare() -> None:
        async with nodes.cluster() as cluster:
            if other in cluster.members:
                await replica.remove(cluster, other)
        async with at(nodes[other].admin_url) as connection:
            await connection.execute("drop schema queen cascade")
            await connection.execute("drop publication if exists queen_log")

    async def add(cluster: Cluster) -> None:
        await replica.add(cluster, nodes[other].address, replica.Naming(other))

    async def check() -> None:
        await check_whole(nodes, quorum=1)

    assert await interrupted_everywhere(nodes, monkeypatch, prepare, add, check, step=6) > 10


async def test_a_hand_over(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ""

    async def prepare() -> None:
        nonlocal wanted
        await mend(nodes)
        wanted = followers(await leader_name(nodes))[0]

    async def hand_over(cluster: Cluster) -> None:
        await promote.promote(cluster, wanted, accept_loss=False)

    async def check() -> None:
        assert await leader_name(nodes) == wanted
        await check_whole(nodes, quorum=1)

    assert await interrupted_everywhere(nodes, monkeypatch, prepare, hand_over, check, step=8) > 15


async def test_a_promotion_without_the_primary(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = ""

    async def prepare() -> None:
        nonlocal old
        await mend(nodes)
        old = await leader_name(nodes)
        nodes[old].kill()

    async def take_over(cluster: Cluster) -> None:
        try:
            await promote.promote(cluster, None, accept_loss=False)
        except LogError as done:
            # Nothing was left to do.
            if "is there" not in str(done):
                raise

    async def check() -> None:
        assert await leader_name(nodes) != old
        await check_whole(nodes, quorum=1)

    assert await interrupted_everywhere(nodes, monkeypatch, prepare, take_over, check, step=5) > 8


async def test_rejoin(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    old = ""

    async def prepare() -> None:
        nonlocal old
        await mend(nodes)
        old = await leader_name(nodes)
        nodes[old].kill()
        await promoted(nodes)
        nodes[old].start()

    async def rejoin(cluster: Cluster) -> None:
        await replica.rejoin(cluster, nodes[old].address, old)

    async def check() -> None:
        await check_whole(nodes, quorum=1)

    assert await interrupted_everywhere(nodes, monkeypatch, prepare, rejoin, check, step=7) > 10


async def test_remove(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ""

    async def prepare() -> None:
        nonlocal gone
        await mend(nodes)
        gone = followers(await leader_name(nodes))[0]

    async def remove(cluster: Cluster) -> None:
        await replica.remove(cluster, gone)

    async def check() -> None:
        async with nodes.cluster() as cluster:
            assert gone not in cluster.members
            assert cluster.quorum == 1
            for node in cluster.nodes:
                assert statement.slot(gone) not in node.facts.slots
        async with at(nodes[gone].url) as connection:
            assert await connection.fetchval("select role from queen.epoch") == "fenced"

    assert await interrupted_everywhere(nodes, monkeypatch, prepare, remove, check, step=3) > 4


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (1, 0), (0, 1)])
async def test_quorum(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, before: int, after: int
) -> None:
    async def prepare() -> None:
        async with nodes.cluster() as cluster:
            await replica.set_quorum(cluster, before)

    async def change(cluster: Cluster) -> None:
        await replica.set_quorum(cluster, after)

    async def check() -> None:
        await check_whole(nodes, quorum=after)

    await interrupted_everywhere(nodes, monkeypatch, prepare, change, check, step=1)
