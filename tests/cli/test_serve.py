"""`queen-pg serve` as a process: it gets ready, answers, ends in order, and says why it cannot."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.support.broker import Broker
from tests.support.database import Databases
from tests.support.server import temporary_folder

PUSH = {"items": [{"queue": "orders", "partition": "order-1", "payload": {"number": 1}}]}
ENDED = 20.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """A data folder for the bundled server, which a system user can reach."""
    with temporary_folder() as place:
        yield place / "data"


def refused(broker: Broker) -> str:
    """Start a broker that must end by itself with exit code 1, and return what it said."""
    broker.launch()
    assert broker.process is not None
    assert broker.process.wait(ENDED) == 1
    return broker.log()


async def parked(connection: asyncpg.Connection, group: str) -> None:
    """Wait until a pop of a group has registered it, and so is waiting."""
    while not await connection.fetchval(
        "select count(*) from queen.consumer_groups where name = $1", group
    ):
        await asyncio.sleep(0.02)


async def stop(broker: Broker) -> int:
    return await asyncio.to_thread(broker.stop)


def test_it_says_once_that_it_is_ready_and_where(broker: Broker, database: str) -> None:
    lines = [line for line in broker.log().splitlines() if "ready" in line]
    assert len(lines) == 1
    assert broker.base_url in lines[0]
    assert "embedded=False" in lines[0]
    assert broker.stop() == 0


def test_it_never_shows_the_databases_password(database: str) -> None:
    with Broker(database.replace("://queen@", "://queen:tell-nobody@")) as broker:
        assert broker.healthy()
        assert "tell-nobody" not in broker.log()


async def test_sigterm_answers_a_parked_pop_with_nothing(broker: Broker, database: str) -> None:
    connection = await asyncpg.connect(database)
    async with httpx.AsyncClient(base_url=broker.base_url, timeout=40) as client:
        await client.post("/api/v1/push", json=PUSH)
        waiting = asyncio.create_task(
            client.get(
                "/api/v1/pop/queue/orders",
                params={"wait": "true", "timeout": 30_000, "consumerGroup": "late"},
            )
        )
        await parked(connection, "late")
        started = time.monotonic()
        assert await stop(broker) == 0
        assert (await waiting).status_code == 204
        assert time.monotonic() - started < 10
    await connection.close()


async def test_sigterm_lets_a_push_under_way_finish(broker: Broker, database: str) -> None:
    connection = await asyncpg.connect(database)
    async with httpx.AsyncClient(base_url=broker.base_url, timeout=40) as client:
        await client.post("/api/v1/push", json=PUSH)
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("select from queen.partitions for update")
        pushing = asyncio.create_task(client.post("/api/v1/push", json=PUSH))
        while not await connection.fetchval(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and wait_event_type = 'Lock'"
        ):
            await asyncio.sleep(0.02)
        stopping = asyncio.create_task(stop(broker))
        while "stopping" not in broker.log():
            await asyncio.sleep(0.02)
        await transaction.rollback()
        assert await stopping == 0
        answer = await pushing
        assert (answer.status_code, answer.json()[0]["status"]) == (201, "queued")
    assert await connection.fetchval("select count(*) from queen.messages") == 2
    await connection.close()


async def test_health_is_503_while_the_database_is_gone(databases: Databases) -> None:
    name = await databases.create()
    with Broker(databases.url(name)) as broker:
        await databases.drop(name)
        answer = httpx.get(f"{broker.base_url}/health", timeout=10)
        assert answer.status_code == 503
        assert httpx.get(f"{broker.base_url}/status", timeout=10).status_code == 200
        assert broker.process is not None
        assert broker.process.poll() is None


def test_several_workers_share_the_port_and_end_together(database: str) -> None:
    with Broker(database, QUEEN_WORKERS="2") as broker:
        assert broker.process is not None
        assert "workers=2" in broker.log()
        assert httpx.post(f"{broker.base_url}/api/v1/push", json=PUSH).status_code == 201
        assert broker.stop() == 0
        assert not broker.healthy()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for the workers in /proc")
def test_a_worker_that_dies_ends_the_broker(database: str) -> None:
    with Broker(database, QUEEN_WORKERS="2") as broker:
        assert broker.process is not None
        os.kill(_workers(broker.process.pid)[0], signal.SIGKILL)
        assert broker.process.wait(ENDED) == 1
        assert "a worker process ended by itself" in broker.log()


def _workers(parent: int) -> list[int]:
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [
        int(child)
        for child in children
        if b"--multiprocessing-fork" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def test_a_port_in_use_is_refused_though_it_could_be_shared(broker: Broker, database: str) -> None:
    second = Broker(database, PORT=str(broker.port))
    assert f"cannot listen on 127.0.0.1 port {broker.port}" in refused(second)


def test_a_value_that_cannot_be_is_refused_by_name() -> None:
    assert "QUEEN_WORKERS" in refused(Broker(None, QUEEN_WORKERS="many"))


async def test_without_migration_an_empty_database_is_refused(databases: Databases) -> None:
    async with databases.clone(migrated=False) as url:
        said = await asyncio.to_thread(refused, Broker(url, QUEEN_MIGRATE="off"))
        assert "queen-pg migrate" in said


async def test_without_migration_a_current_database_is_served(database: str) -> None:
    with Broker(database, QUEEN_MIGRATE="off") as broker:
        assert broker.healthy()


async def test_a_newer_database_is_refused(database: str) -> None:
    connection = await asyncpg.connect(database)
    await connection.execute("update queen.alembic_version set version_num = '9999'")
    await connection.close()
    for migrate in ("on", "off"):
        said = await asyncio.to_thread(refused, Broker(database, QUEEN_MIGRATE=migrate))
        assert "9999" in said


def test_the_bundled_server_keeps_what_was_answered_before_a_kill(folder: Path) -> None:
    with Broker(None, QUEEN_DATA_DIR=str(folder)) as broker:
        assert "embedded=True" in broker.log()
        pushed = httpx.post(f"{broker.base_url}/api/v1/push", json=PUSH).json()
        broker.kill()
        broker.start()
        popped = httpx.get(
            f"{broker.base_url}/api/v1/pop/queue/orders", params={"subscriptionMode": "all"}
        ).json()
        assert [message["id"] for message in popped["messages"]] == [pushed[0]["message_id"]]
        assert broker.stop() == 0
        assert not list(folder.glob("postgres-*/postmaster.pid"))


def test_two_brokers_on_one_data_folder_do_not_start(folder: Path) -> None:
    with Broker(None, QUEEN_DATA_DIR=str(folder)) as broker:
        assert broker.process is not None
        said = refused(Broker(None, QUEEN_DATA_DIR=str(folder)))
        assert f"is already in use by process {broker.process.pid}" in said
        assert broker.healthy()


def test_a_bundled_server_that_dies_comes_back(folder: Path) -> None:
    with Broker(None, QUEEN_DATA_DIR=str(folder)) as broker:
        assert httpx.post(f"{broker.base_url}/api/v1/push", json=PUSH).status_code == 201
        (file,) = folder.glob("postgres-*/postmaster.pid")
        os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
        deadline = time.monotonic() + ENDED
        while "embedded.revived" not in broker.log():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        while not broker.healthy():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        answer = httpx.post(f"{broker.base_url}/api/v1/push", json=PUSH)
        assert answer.json()[0]["offset"] == 1
