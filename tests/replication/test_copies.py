"""Physical standbys, and restores from backups: what a broker does on what comes back."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from queen_pg import migrate
from queen_pg.config import Settings
from queen_pg.log import restore
from queen_pg.log.node import Cluster, LogError
from tests.replication.conftest import at
from tests.support.broker import Broker
from tests.support.nodes import PASSWORD, Server, one
from tests.support.standby import Copy

FOLLOW_SECONDS = 20.0
QUEUE = "orders"


@pytest_asyncio.fixture
async def source() -> AsyncIterator[Server]:
    """A server of its own, with the schema."""
    bin_folder = os.environ.get("QUEEN_PG_TEST_BINDIR")
    with one(Path(bin_folder) if bin_folder else None) as server:
        await server.allow()
        await server.allow_copies()
        await migrate.upgrade(server.url)
        yield server


@contextlib.contextmanager
def copy_of(source: Server) -> Any:
    """Yield a copy, and remove it afterwards."""
    copy = Copy(source)
    try:
        yield copy
    finally:
        copy.stop()


async def settled(http: httpx.AsyncClient, method: str, path: str, **arguments: Any) -> Any:
    """Call until a broker has found a database that takes writes."""
    async with asyncio.timeout(FOLLOW_SECONDS):
        while True:
            response = await http.request(method, path, **arguments)
            if response.status_code != 503:
                response.raise_for_status()
                return None if response.status_code == 204 else response.json()
            await asyncio.sleep(0.1)


def pushing(number: int) -> dict[str, Any]:
    """Return the body of a push of one numbered event."""
    item = {"queue": QUEUE, "partition": "one", "transactionId": f"t{number}", "payload": number}
    return {"items": [item]}


async def test_brokers_follow_a_promoted_physical_standby(source: Server) -> None:
    """What Patroni and managed services do: same data, same epoch, a higher timeline."""
    with copy_of(source) as standby:
        standby.back_up("--write-recovery-conf")
        standby.start()
        async with at(source.admin_url) as admin:
            await admin.execute("alter system set synchronous_standby_names = '*'")
            await admin.execute("select pg_reload_conf()")
        hosts = f"127.0.0.1:{standby.port},127.0.0.1:{source.port}"
        url = f"postgresql://queen:{PASSWORD}@{hosts}/queen?target_session_attrs=read-write"
        with Broker(url) as broker:
            async with httpx.AsyncClient(base_url=broker.base_url, timeout=40) as http:
                for number in range(20):
                    await settled(http, "POST", "/api/v1/push", json=pushing(number))
                source.kill()
                async with at(standby.admin_url) as admin:
                    await admin.execute("select pg_promote()")
                    await admin.execute("alter system reset synchronous_standby_names")
                    await admin.execute("select pg_reload_conf()")
                await settled(http, "POST", "/api/v1/push", json=pushing(20))
                # The old primary comes back with the same epoch: its timeline gives it away.
                source.start()
                for number in range(21, 40):
                    await settled(http, "POST", "/api/v1/push", json=pushing(number))
                    await asyncio.sleep(0.1)
                health = (await http.get("/health")).json()
        assert health["role"] == "primary"
        async with at(standby.url) as connection:
            ids = await connection.fetch(
                "select transaction_id from queen.messages order by message_offset"
            )
        assert [row[0] for row in ids] == [f"t{number}" for number in range(40)]


async def restored(url: str) -> None:
    """Say that a database was restored, as the operator is told to."""
    async with Cluster(Settings(pg_url=url, pg_admin_url=url), print, dry=False) as cluster:
        await restore.restored(cluster, None)


async def prepare(http: httpx.AsyncClient) -> dict[str, Any]:
    """Leave something of each kind behind; return the lease that was taken."""
    for number in range(3):
        await settled(http, "POST", "/api/v1/push", json=pushing(number))
    kv = {"op": "put", "ns": "n", "key": "k", "value": 1, "forever": True}
    timer = {
        "op": "schedule", "queue": "due", "timerKey": "t", "txn": "fired", "delayMs": 300,
        "payload": "bnVsbA==",
    }  # fmt: skip
    body = {"operations": [], "kv": [kv], "timers": [timer]}
    assert (await settled(http, "POST", "/api/v1/transaction", json=body))["success"]
    params = {"consumerGroup": "g", "subscriptionMode": "all", "batch": "1", "leaseSeconds": "60"}
    popped: dict[str, Any] = await settled(http, "GET", f"/api/v1/pop/queue/{QUEUE}", params=params)
    return popped["messages"][0]


async def judge(http: httpx.AsyncClient, leased: dict[str, Any], version: int) -> None:
    """Judge a broker on a database that has `prepare`'s work, and nothing later."""
    # The lease that was live in the backup still keeps others out, and its ack counts.
    params = {"consumerGroup": "g", "subscriptionMode": "all"}
    path = f"/api/v1/pop/queue/{QUEUE}"
    assert await settled(http, "GET", path, params=params) is None
    ack = {
        "transactionId": leased["transactionId"], "partitionId": leased["partitionId"],
        "leaseId": leased["leaseId"], "consumerGroup": "g", "status": "completed",
    }  # fmt: skip
    [acked] = await settled(http, "POST", "/api/v1/ack", json=ack)
    assert acked["success"]
    # Ids inside the window are known still; offsets go on without a gap.
    [again] = await settled(http, "POST", "/api/v1/push", json=pushing(2))
    assert again["status"] == "duplicate"
    [fresh] = await settled(http, "POST", "/api/v1/push", json=pushing(9))
    assert (fresh["status"], fresh["offset"]) == ("queued", 3)
    # Versions are above all that were ever handed out.
    kv = {"op": "put", "ns": "n", "key": "k", "value": 2, "forever": True}
    body = {"operations": [], "kv": [kv]}
    answer = await settled(http, "POST", "/api/v1/transaction", json=body)
    assert answer["success"]
    found = await settled(http, "GET", "/api/v1/kv/n/k")
    assert found["version"] > version + 1_000_000
    # A timer that was due in between fires now.
    async with asyncio.timeout(FOLLOW_SECONDS):
        params = {"consumerGroup": "g", "subscriptionMode": "all", "wait": "true"}
        fired = await settled(http, "GET", "/api/v1/pop/queue/due", params=params)
    assert fired["messages"][0]["transactionId"] == "fired"


async def test_a_dump_restored_into_another_database(source: Server, tmp_path: Path) -> None:
    binaries = source.embedded._binary_folder()
    environment = {"PATH": os.defpath, "PGPASSWORD": PASSWORD}
    dump = tmp_path / "queen.dump"
    with Broker(source.url) as broker:
        async with httpx.AsyncClient(base_url=broker.base_url, timeout=40) as http:
            leased = await prepare(http)
            subprocess.run(
                [binaries / "pg_dump", "--format=custom", "--schema=queen", "--file", dump,
                 "--dbname", source.url],
                check=True, env=environment,
            )  # fmt: skip
            await settled(http, "POST", "/api/v1/push", json=pushing(7))
    async with at(source.url) as connection:
        version = await connection.fetchval("select last_value from queen.kv_version")
    async with at(source.admin_url) as admin:
        await admin.execute("create database restored owner queen")
    url = f"{source.url.rpartition('/')[0]}/restored"
    subprocess.run(
        [binaries / "pg_restore", "--exit-on-error", "--no-owner", "--dbname", url, dump],
        check=True, env=environment,
    )  # fmt: skip
    await restored(url)
    with Broker(url, QUEEN_MIGRATE="off") as broker:
        async with httpx.AsyncClient(base_url=broker.base_url, timeout=40) as http:
            await judge(http, leased, version)


async def test_a_base_backup_recovered_to_a_point_in_time(source: Server) -> None:
    [cluster] = source.embedded.folder.glob("postgres-*")
    with copy_of(source) as copy, Broker(source.url) as broker:
        copy.back_up()
        async with httpx.AsyncClient(base_url=broker.base_url, timeout=40) as http:
            leased = await prepare(http)
            async with at(source.admin_url) as admin:
                await admin.execute("select pg_create_restore_point('here')")
            await settled(http, "POST", "/api/v1/push", json=pushing(7))
        broker.stop()
        async with at(source.admin_url) as admin:
            version = await admin.fetchval("select last_value from queen.kv_version")
            await admin.execute("select pg_switch_wal()")
        archive = cluster.parent / "archive"
        shutil.copytree(cluster / "pg_wal", archive)
        archive.chmod(0o755)
        for file in archive.rglob("*"):
            file.chmod(0o755 if file.is_dir() else 0o644)
        copy.configure(
            f"restore_command = 'cp {archive}/%f \"%p\"'\n"
            "recovery_target_name = 'here'\nrecovery_target_action = 'promote'\n"
        )
        (copy.cluster / "recovery.signal").touch()
        copy.start()
        async with asyncio.timeout(FOLLOW_SECONDS):
            while True:
                async with at(copy.admin_url) as admin:
                    if not await admin.fetchval("select pg_is_in_recovery()"):
                        break
                await asyncio.sleep(0.05)
        await restored(copy.admin_url)
        with Broker(copy.url, QUEEN_MIGRATE="off") as other:
            async with httpx.AsyncClient(base_url=other.base_url, timeout=40) as http:
                await judge(http, leased, version)


async def test_a_backup_of_a_follower_serves_too(source: Server) -> None:
    """Its row says that it follows; a restore makes it a log of its own."""
    async with at(source.url) as connection:
        await connection.execute("select queen.push('orders', '1')")
        await connection.execute("select queen._follow(3, 'b')")
    with copy_of(source) as copy:
        copy.back_up()
        copy.start()
        role = "select role from queen.epoch"
        said: list[str] = []
        settings = Settings(pg_url=copy.admin_url, pg_admin_url=copy.admin_url)
        async with Cluster(settings, said.append, dry=True) as cluster:
            await restore.restored(cluster, None)
        async with at(copy.url) as connection:
            assert any("queen._begin(13)" in line for line in said)
            assert await connection.fetchval(role) == "follower"
            await restored(copy.admin_url)
            await connection.execute("select queen.push('orders', '2')")
            row = await connection.fetchrow("select number, role, node from queen.epoch")
        assert tuple(row) == (13, "primary", None)


async def test_a_standby_is_never_restored(source: Server) -> None:
    with copy_of(source) as standby:
        standby.back_up("--write-recovery-conf")
        standby.start()
        with pytest.raises(LogError, match="recovering"):
            await restored(standby.admin_url)
