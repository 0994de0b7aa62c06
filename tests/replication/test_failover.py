"""Nodes die, hang, and come back under load: nothing answered is lost, doubled or out of order.

Each round runs load through two brokers that know all nodes, does something to the nodes, and
judges what the leader holds afterwards. One round of each kind runs with the suite, and twenty in
the long profile.
"""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator

import asyncpg
import httpx
import pytest
import pytest_asyncio

from queen_pg.log import promote, replica
from queen_pg.log.node import LogError
from tests.replication.conftest import at
from tests.replication.load import Load
from tests.support.broker import Broker
from tests.support.nodes import NAMES, Nodes
from tests.support.profile import LONG

ROUNDS = int(os.environ.get("QUEEN_PG_TEST_ROUNDS", "20" if LONG else "1"))
FOLLOW_SECONDS = 20.0

numbers = itertools.count(1)
rounds = pytest.mark.parametrize("round_", range(1, ROUNDS + 1))


async def leader_name(nodes: Nodes) -> str:
    """Return the name of the node that leads."""
    async with nodes.cluster() as cluster:
        return cluster.require_primary().name


async def promoted(nodes: Nodes, name: str | None = None) -> str:
    """Promote, and return who leads now."""
    async with nodes.cluster() as cluster:
        await promote.promote(cluster, name, accept_loss=False)
    return await leader_name(nodes)


def followers(old: str) -> list[str]:
    """Return the nodes beside one."""
    return [name for name in NAMES if name != old]


@pytest_asyncio.fixture
async def load(nodes: Nodes, brokers: list[Broker]) -> AsyncIterator[Load]:
    """Load that flows."""
    running = Load([broker.base_url for broker in brokers], str(next(numbers)))
    await running.start()
    yield running
    await running.stop()


async def judged(load: Load, nodes: Nodes, name: str) -> None:
    """Let the load come to its end, and judge what a node and its followers hold."""
    await load.flow()
    await load.finish()
    async with at(nodes[name].url) as connection:
        await load.check(connection)


@rounds
async def test_kill_the_primary(nodes: Nodes, load: Load, round_: int) -> None:
    old = await leader_name(nodes)
    nodes[old].kill()
    new = await promoted(nodes)
    assert new != old
    await judged(load, nodes, new)


@rounds
async def test_hand_over(nodes: Nodes, load: Load, round_: int) -> None:
    old = await leader_name(nodes)
    new = await promoted(nodes, followers(old)[0])
    assert new == followers(old)[0]
    async with nodes.cluster() as cluster:
        assert {node.name for node in cluster.followers} == set(NAMES) - {new}
        assert cluster.quorum == 1
    await judged(load, nodes, new)


@rounds
async def test_a_killed_follower_holds_nobody_up(nodes: Nodes, load: Load, round_: int) -> None:
    old = await leader_name(nodes)
    nodes[followers(old)[0]].kill()
    await load.flow()
    nodes[followers(old)[0]].start()
    await load.flow()
    await judged(load, nodes, old)


@rounds
async def test_promote_with_a_follower_paused_until_then(
    nodes: Nodes, load: Load, round_: int
) -> None:
    """The paused one has less than the other, which therefore leads; it goes on from there."""
    old = await leader_name(nodes)
    late, other = followers(old)
    nodes[late].pause()
    await load.flow(100)
    nodes[old].kill()
    nodes[late].resume()
    assert await promoted(nodes) == other
    async with at(nodes[late].url) as connection:
        assert await connection.fetchval("select role from queen.epoch") == "follower"
    await judged(load, nodes, other)
    await same(nodes, other, late)


@rounds
async def test_promote_with_a_follower_cut_off_and_far_behind(
    nodes: Nodes, load: Load, round_: int
) -> None:
    old = await leader_name(nodes)
    late, other = followers(old)
    nodes[old].link.cut(f"queen_{late}".encode())
    await load.flow(300)
    nodes[old].kill()
    assert await promoted(nodes) == other
    await judged(load, nodes, other)
    await same(nodes, other, late)


@rounds
async def test_without_enough_followers_nothing_is_promoted(
    nodes: Nodes, load: Load, round_: int
) -> None:
    """A quorum of one of two: either may have the last answered step, so both must be there."""
    old = await leader_name(nodes)
    late = followers(old)[0]
    nodes[late].kill()
    await load.flow()
    nodes[old].kill()
    with pytest.raises(LogError, match="cannot be reached"):
        await promoted(nodes)
    nodes[late].start()
    new = await promoted(nodes)
    await judged(load, nodes, new)


@rounds
async def test_an_old_primary_that_comes_back_is_refused(
    nodes: Nodes, load: Load, brokers: list[Broker], round_: int
) -> None:
    old = await leader_name(nodes)
    nodes[old].kill()
    new = await promoted(nodes)
    nodes[old].start()
    async with at(nodes[old].url) as connection:
        # Nobody confirms to it any more, or a broker that sees both nodes has fenced it already.
        with pytest.raises((asyncpg.PostgresError, TimeoutError)):
            await connection.execute("select queen.push('stray', '1')", timeout=3)
    async with at(nodes[old].url) as connection:
        async with asyncio.timeout(FOLLOW_SECONDS):
            while await connection.fetchval("select role from queen.epoch") != "fenced":
                await asyncio.sleep(0.05)
        with pytest.raises(asyncpg.PostgresError) as refused:
            await connection.execute("set synchronous_commit = local; select queen.push('q', '1')")
        assert refused.value.sqlstate == "QU910"
    # A broker that knows of no other node waits for it in vain.
    stray = Broker(nodes[old].url, QUEEN_MIGRATE="off")
    with contextlib.ExitStack() as stack:
        stack.push(stray)
        stray.launch()
        async with asyncio.timeout(FOLLOW_SECONDS):
            while "no writes" not in stray.log():
                await asyncio.sleep(0.05)
        assert not stray.healthy()
    await judged(load, nodes, new)


async def test_a_lease_holds_through_a_promotion(nodes: Nodes, brokers: list[Broker]) -> None:
    """An answered lease is on a majority: nobody else gets it, and its step still counts once."""
    http = httpx.AsyncClient(timeout=40)
    first, second = (broker.base_url for broker in brokers)
    queue = f"leased-{next(numbers)}"
    item = {"queue": queue, "partition": "one", "payload": 1, "transactionId": "t"}
    (await http.post(f"{first}/api/v1/push", json={"items": [item]})).raise_for_status()
    path = f"/api/v1/pop/queue/{queue}"
    params = {"consumerGroup": "g", "subscriptionMode": "all", "leaseSeconds": "60"}
    popped = (await http.get(f"{first}{path}", params=params)).json()
    old = await leader_name(nodes)
    nodes[old].kill()
    await promoted(nodes)
    assert (await answered(http, "GET", f"{second}{path}", params=params)).status_code == 204
    [message] = popped["messages"]
    ack = {
        "type": "ack", "transactionId": "t", "partitionId": message["partitionId"],
        "consumerGroup": "g", "leaseId": message["leaseId"], "status": "completed",
    }  # fmt: skip
    url = f"{second}/api/v1/transaction"
    stranger = {"operations": [{**ack, "leaseId": "01a0fcd7-e9bc-7001-8866-1685bf9d4343"}]}
    assert not (await answered(http, "POST", url, json=stranger)).json()["success"]
    assert (await answered(http, "POST", url, json={"operations": [ack]})).json()["success"]
    assert not (await answered(http, "POST", url, json={"operations": [ack]})).json()["success"]
    await http.aclose()


async def answered(
    http: httpx.AsyncClient, method: str, url: str, **arguments: object
) -> httpx.Response:
    """Call until a broker has found the leader."""
    async with asyncio.timeout(FOLLOW_SECONDS):
        while True:
            response = await http.request(method, url, **arguments)  # type: ignore[arg-type]
            if response.status_code != 503:
                return response
            await asyncio.sleep(0.1)


async def same(nodes: Nodes, primary: str, follower: str) -> None:
    """Wait until a follower holds what its primary holds, row by row."""
    async with nodes.cluster() as cluster:
        node = cluster.node(follower)
        assert node is not None
        tables = node.facts.tables
        await replica.touch(cluster, cluster.require_primary(), [follower])
    deadline = asyncio.get_running_loop().time() + FOLLOW_SECONDS
    while True:
        async with at(nodes[primary].url) as one, at(nodes[follower].url) as other:
            differing = [
                table for table in tables if await digest(one, table) != await digest(other, table)
            ]
        if not differing:
            return
        assert asyncio.get_running_loop().time() < deadline, f"{differing} differ"
        await asyncio.sleep(0.1)


async def digest(connection: asyncpg.Connection, table: str) -> str:
    """Return a digest of a table's rows."""
    found: str = await connection.fetchval(
        "select md5(coalesce(string_agg(t::text, chr(10) order by t::text), ''))"
        f" from queen.{table} t"
    )
    return found
