"""The commands that build and change a log: shown before, repeated after, interrupted anywhere."""

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import msgspec
import pytest

from queen_pg import doctor, leader
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.errors import Unavailable
from queen_pg.log import promote, replica, status
from queen_pg.log.node import Cluster, LogError
from tests.replication.conftest import at, mend
from tests.replication.test_failover import FOLLOW_SECONDS, followers, leader_name, same
from tests.support.broker import Broker
from tests.support.nodes import NAMES, PASSWORD, Nodes

ROOT = Path(__file__).parents[2]


async def run(nodes: Nodes, *arguments: str) -> tuple[int, str]:
    """Run a command as an operator does; return its exit code and what it wrote."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "queen_pg", *arguments,
        cwd=ROOT,
        env={
            "PATH": os.defpath,
            "QUEEN_PG_URL": nodes.settings.pg_url or "",
            "QUEEN_PG_ADMIN_URL": nodes.settings.pg_admin_url or "",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_status_tells_of_every_node(nodes: Nodes) -> None:
    code, text = await run(nodes, "replica", "status", "--json")
    assert code == 0, text
    found = json.loads(text)
    assert found["replication"] == "quorum"
    assert found["quorum"] == 1
    assert found["wouldBeLost"] == "nothing that was answered"
    assert {row["name"] for row in found["followers"]} == set(NAMES) - {found["primary"]}
    for row in found["followers"]:
        assert row["following"]
        assert row["synchronous"]
        assert row["lagBytes"] < 1_000_000
        assert row["lagSeconds"] < 3
        assert row["slot"] == "reserved"
        assert not row["errors"]
    async with nodes.cluster() as cluster:
        text = "\n".join(status.lines(await status.status(cluster)))
    assert "a step is answered when 1 followers have it on disk too" in text


async def test_health_tells_of_the_log(nodes: Nodes, brokers: list[Broker]) -> None:
    """Epoch, role and node, what an answer promises, and how far each follower is."""
    old = await leader_name(nodes)
    late, other = followers(old)
    async with nodes.cluster() as cluster:
        epoch = cluster.require_primary().epoch
    async with httpx.AsyncClient(base_url=brokers[0].base_url, timeout=40) as http:

        async def health(told: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
            async with asyncio.timeout(FOLLOW_SECONDS):
                while not told(found := (await http.get("/health")).json()):
                    await asyncio.sleep(0.1)
            return found

        found = await health(lambda found: found.get("node") == old)
        assert (found["status"], found["role"], found["epoch"]) == ("healthy", "primary", epoch)
        assert (found["replication"], found["quorum"]) == ("quorum", 1)
        assert {row["name"] for row in found["followers"]} == {late, other}
        for row in found["followers"]:
            assert row["connected"]
            assert row["synchronous"]

        def lag(found: dict[str, Any]) -> dict[str, int]:
            return {row["name"]: row["lagBytes"] for row in found["followers"]}

        nodes[old].link.cut(f"queen_{late}".encode())
        body = {"items": [{"queue": "q", "payload": secrets.token_hex(50_000)}]}
        (await http.post("/api/v1/push", json=body)).raise_for_status()
        await health(lambda found: lag(found)[late] > 50_000 > lag(found)[other])
        nodes[old].link.mend()

        async with nodes.cluster() as cluster:
            await promote.promote(cluster, other, accept_loss=False)
        found = await health(lambda found: found.get("node") == other)
        assert (found["role"], found["epoch"]) == ("primary", epoch + 1)


async def test_asynchronous_mode_is_said_everywhere(nodes: Nodes) -> None:
    async with nodes.cluster() as cluster:
        await replica.set_quorum(cluster, 0)
    async with nodes.cluster() as cluster:
        text = "\n".join(status.lines(await status.status(cluster)))
    assert "asynchronous: an answered step may be lost with the primary" in text
    assert "bytes of the log, answered or not" in text
    findings = await doctor.examine(nodes.settings)
    [finding] = [finding for finding in findings if finding.subject == "replication"]
    assert (finding.grade, finding.value) == ("poor", "asynchronous")
    database = Database(nodes.settings)
    await database.start()
    try:
        rows = await database.read("_log_state")
        assert {row["quorum"] for row in rows} == {0}
    finally:
        await database.close()


async def test_where_the_quorum_cannot_be_set_the_right_is_named(nodes: Nodes) -> None:
    """A role that is no superuser, on a server that does not let it."""
    old = await leader_name(nodes)
    async with at(nodes[old].admin_url) as admin:
        await admin.execute("revoke alter system on parameter synchronous_standby_names from queen")
        try:
            settings = msgspec.structs.replace(nodes.settings, pg_admin_url=None)
            async with Cluster(settings, nodes.said.append, dry=False) as cluster:
                with pytest.raises(LogError, match="grant alter system on parameter"):
                    await replica.set_quorum(cluster, 0)
                lines = status.lines(await status.status(cluster))
                assert await _quorum(cluster) == 1
        finally:
            await admin.execute(
                "grant alter system on parameter synchronous_standby_names to queen"
            )
    assert any("quorum" in line for line in lines)


async def _quorum(cluster: Cluster) -> int:
    await cluster.refresh()
    return cluster.quorum


async def test_missing_rights_are_named_before_anything_happens(nodes: Nodes) -> None:
    old = await leader_name(nodes)
    other = followers(old)[0]
    async with nodes.cluster() as cluster:
        await replica.set_quorum(cluster, 0)
        await replica.remove(cluster, other)
    async with at(nodes[other].admin_url) as admin:
        await admin.execute("alter role queen noreplication")
        await admin.execute(
            "revoke execute on function pg_replication_origin_progress(text, boolean) from queen"
        )
        try:
            settings = msgspec.structs.replace(nodes.settings, pg_admin_url=None)
            async with Cluster(settings, nodes.said.append, dry=False) as cluster:
                with pytest.raises(LogError) as refused:
                    await replica.rejoin(cluster, nodes[other].address)
        finally:
            await nodes[other].allow()
    assert "alter role queen replication" in str(refused.value)
    assert "pg_replication_origin_progress" in str(refused.value)


async def test_a_dry_run_shows_the_statements_and_changes_nothing(nodes: Nodes) -> None:
    old = await leader_name(nodes)
    before = await fingerprint(nodes)
    other = followers(old)[0]

    async def dry(command: Callable[[Cluster], Awaitable[None]]) -> str:
        nodes.said.clear()
        async with nodes.cluster(dry=True) as cluster:
            await command(cluster)
        return "\n".join(nodes.said)

    text = await dry(lambda cluster: replica.add(cluster, nodes[other].address))
    assert "refresh publication" in text
    text = await dry(lambda cluster: replica.set_quorum(cluster, 0))
    assert "alter system reset synchronous_standby_names" in text
    text = await dry(lambda cluster: replica.remove(cluster, other))
    # A quorum of one can do without one of two.
    assert "ANY 1" in text
    assert "drop subscription" in text
    code, text = await run(nodes, "replica", "promote", other, "--dry-run")
    assert code == 0, text
    assert "create subscription" in text
    assert PASSWORD not in text
    assert await fingerprint(nodes) == before


async def test_a_dry_run_of_rejoin_leaves_the_old_primary_as_it_is(nodes: Nodes) -> None:
    old = await leader_name(nodes)
    async with at(nodes[old].url) as connection:
        await connection.execute("select queen.push('kept', '1')")
    nodes[old].kill()
    async with nodes.cluster() as cluster:
        await promote.promote(cluster, None, accept_loss=False)
    nodes[old].start()
    kept = (
        "select (select count(*) from pg_namespace where nspname ~ '^queen'),"
        " (select count(*) from pg_subscription), (select count(*) from queen.messages)"
    )
    async with at(nodes[old].admin_url) as connection:
        before = await connection.fetchrow(kept)
        host, port = nodes[old].address
        code, text = await run(nodes, "replica", "rejoin", f"{host}:{port}", "--dry-run")
        assert code == 0, text
        assert "rename to" in text
        assert "create subscription" in text
        assert PASSWORD not in text
        assert await connection.fetchrow(kept) == before


async def fingerprint(nodes: Nodes) -> list[str]:
    """Return what administrators' commands may change on every node, as text."""
    found = []
    for server in nodes:
        async with at(server.admin_url) as connection:
            for query in (
                "select number, role, node from queen.epoch",
                "select name, host, port, synchronous, joined_at is not null from queen.nodes",
                "select size from queen.quorum",
                "select subname, subenabled, subslotname from pg_subscription",
                "select slot_name from pg_replication_slots",
                "select pubname, tablename from pg_publication_tables",
                "select setting from pg_settings where name = 'synchronous_standby_names'",
            ):
                rows = await connection.fetch(f"{query} order by 1")
                found.append(f"{server.name}: {query}: {[tuple(row) for row in rows]}")
    return found


async def test_commands_repeated_change_nothing(nodes: Nodes) -> None:
    before = await fingerprint(nodes)
    old = await leader_name(nodes)
    for other in followers(old):
        async with nodes.cluster() as cluster:
            await replica.add(cluster, nodes[other].address)
        async with nodes.cluster() as cluster:
            await replica.rejoin(cluster, nodes[other].address)
    async with nodes.cluster() as cluster:
        await replica.set_quorum(cluster, 1)
        await replica.set_quorum(cluster, 1)
    async with nodes.cluster() as cluster:
        await promote.promote(cluster, old, accept_loss=False)
    assert await fingerprint(nodes) == before


async def test_remove_and_add_again(nodes: Nodes) -> None:
    old = await leader_name(nodes)
    other, third = followers(old)
    async with at(nodes[old].url) as connection:
        await connection.execute("select queen.push('kept', '1')")
    await same(nodes, old, other)
    async with nodes.cluster() as cluster:
        await replica.remove(cluster, other)
    async with nodes.cluster() as cluster:
        await replica.remove(cluster, other)
    async with at(nodes[other].url) as connection:
        assert await connection.fetchval("select role from queen.epoch") == "fenced"
    for node in (old, third):
        async with at(nodes[node].url) as connection:
            assert not await connection.fetchval(
                "select count(*) from pg_replication_slots where slot_name = $1", f"queen_{other}"
            )
    async with nodes.cluster() as cluster:
        with pytest.raises(LogError, match="rejoin"):
            await replica.add(cluster, nodes[other].address)
    async with nodes.cluster() as cluster:
        await replica.set_quorum(cluster, 1)
        with pytest.raises(LogError, match="lower it first"):
            await replica.remove(cluster, third)
    await mend(nodes)
    await same(nodes, old, other)


async def test_a_log_of_two_nodes(nodes: Nodes) -> None:
    """With one follower a promotion leaves one node, which answers alone and says so."""
    old = await leader_name(nodes)
    other, third = followers(old)
    async with nodes.cluster() as cluster:
        await replica.remove(cluster, third)
    async with at(nodes[old].url) as connection:
        await connection.execute("select queen.push('two', '1')")
    nodes[old].kill()
    async with nodes.cluster() as cluster:
        await promote.promote(cluster, None, accept_loss=False)
        found = await status.status(cluster)
    assert found.primary == other
    assert found.replication == "asynchronous"
    assert any("no of 1 followers can confirm" in line for line in nodes.said)
    async with at(nodes[other].url) as connection:
        await connection.execute("select queen.push('two', '2')", timeout=5)
        count = await connection.fetchval(
            "select p.next_offset from queen.partitions p join queen.queues q on q.id = p.queue_id"
            " where q.name = 'two'"
        )
    assert count == 2


async def test_two_administrators_do_not_meet(nodes: Nodes) -> None:
    async with nodes.cluster() as first, nodes.cluster() as second:
        await first.lock()
        with pytest.raises(LogError, match="somebody else"):
            await second.lock()


async def test_a_broker_on_a_follower_alone_finds_no_leader(nodes: Nodes) -> None:
    other = followers(await leader_name(nodes))[0]
    database = Database(Settings(pg_url=nodes[other].url))
    with pytest.raises(Unavailable) as refused:
        await database.start()
    assert refused.value.code == "no_leader"


async def test_clients_that_choose_by_target_session_attrs_find_the_primary(nodes: Nodes) -> None:
    """libpq and its like, without a word of ours: followers are read-only by default."""
    old = await leader_name(nodes)
    connection = await asyncpg.connect(nodes.url, target_session_attrs="read-write")
    try:
        assert await connection.fetchval("select node from queen.epoch") == old
    finally:
        await connection.close()
    assert await leader.leading_url(nodes.url) in nodes[old].url


async def test_an_ended_wait_for_the_followers_is_no_answer(nodes: Nodes) -> None:
    """Whoever cancels a commit's wait makes PostgreSQL answer as if all were well."""
    old = await leader_name(nodes)
    for other in followers(old):
        nodes[old].link.cut(f"queen_{other}".encode())
    database = Database(Settings(pg_url=nodes[old].url))
    await database.start()
    try:
        loop = asyncio.get_running_loop()
        write = asyncio.create_task(
            database.step(
                "_kv",
                deadline=loop.time() + 30,
                tenant=1,
                operations='[{"op": "put", "ns": "n", "key": "k", "value": 1}]',
                careful=True,
            )
        )
        async with at(nodes[old].admin_url) as admin:
            async with asyncio.timeout(10):
                while not (
                    waiting := await admin.fetchval(
                        "select pid from pg_stat_activity where wait_event = 'SyncRep'"
                    )
                ):
                    await asyncio.sleep(0.02)
            await admin.execute("select pg_cancel_backend($1)", waiting)
        with pytest.raises(Unavailable) as doubted:
            await write
        assert doubted.value.code == "outcome_unknown"
    finally:
        nodes[old].link.mend()
        await database.close()
