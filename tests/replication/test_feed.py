"""The log as a feed: each committed step once, in order, whole, and again from any entry on."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from queen_pg import doctor
from queen_pg.broker import epoch
from queen_pg.config import Settings
from queen_pg.database import Database
from queen_pg.log import feed, slot
from queen_pg.log.node import LogError
from queen_pg.log.statement import parse_lsn
from tests.support.database import Databases
from tests.support.server import Server

SLOT = "test_feed"


@pytest_asyncio.fixture
async def reader(databases: Databases, server: Server) -> AsyncIterator[asyncpg.Connection]:
    """A connection with the right to replicate, to a database that only this test uses."""
    if server.embedded is None:
        pytest.skip("a slot needs a role that may replicate")
    async with databases.clone() as url:
        name = url.partition("?")[0].rpartition("/")[2]
        admin = server.embedded.superuser_url.replace("/postgres?", f"/{name}?")
        connection = await asyncpg.connect(admin)
        try:
            yield connection
        finally:
            for row in await connection.fetch(
                "select slot_name from pg_replication_slots where database = current_database()"
            ):
                await connection.execute("select pg_drop_replication_slot($1)", row[0])
            await connection.close()


async def entries(reader: asyncpg.Connection, after: str | None = None) -> list[dict[str, Any]]:
    """Return what a tail prints from the slot's place, or from an entry on."""
    lines: list[str] = []
    tail = feed.Tail(reader, SLOT, 1)
    await tail.begin(None if after is None else parse_lsn(after))
    await tail.run(lines.append, follow=False)
    return [json.loads(line) for line in lines]


STEP = """select queen.transaction($json$
{
  "operations": [
    {"type": "ack", "transactionId": "t1", "partitionId": "%s", "consumerGroup": "billing",
     "leaseId": "%s", "status": "completed"},
    {"type": "push", "items": [{"queue": "receipts", "partition": "customer-42",
     "transactionId": "receipt-9137", "payload": {"b":  [2]}}]}
  ],
  "kv": [{"op": "put", "ns": "orders", "key": "9137", "value": {"s": "paid"}, "ttlSeconds": 60}],
  "timers": [{"op": "schedule", "queue": "reminders", "timerKey": "9137", "delayMs": 86400000,
     "txn": "remind-9137", "payload": "e30="}]
}
$json$)"""


async def take_a_step(reader: asyncpg.Connection) -> None:
    """Push an event, lease it and commit a step for it."""
    await reader.execute("""select queen.push('orders', '{"a": 1.0}', 'order-9137', 't1')""")
    popped = await reader.fetchrow(
        "select * from queen.pop('orders', consumer_group => 'billing', subscription_mode => 'all')"
    )
    verdict = await reader.fetchval(STEP % (popped["partition_id"], popped["lease_id"]))
    assert json.loads(verdict)["success"], verdict


async def test_a_step_is_one_entry(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    await take_a_step(reader)
    pushed, step = await entries(reader)
    assert pushed["pushes"] == [
        {
            "queue": "orders",
            "partition": "order-9137",
            "partitionId": pushed["pushes"][0]["partitionId"],
            "offset": 0,
            "id": pushed["pushes"][0]["id"],
            "transactionId": "t1",
            "payload": {"a": 1.0},
        }
    ]
    assert not pushed["acks"]
    assert step["acks"] == [
        {
            "queue": "orders",
            "partition": "order-9137",
            "partitionId": pushed["pushes"][0]["partitionId"],
            "consumerGroup": "billing",
            "committedOffset": 0,
        }
    ]
    [push] = step["pushes"]
    assert (push["queue"], push["partition"]) == ("receipts", "customer-42")
    [put] = step["kv"]
    assert (put["op"], put["ns"], put["key"]) == ("put", "orders", "9137")
    assert put["value"] == {"s": "paid"}
    assert put["version"] > 0
    [timer] = step["timers"]
    assert (timer["op"], timer["queue"], timer["timerKey"]) == ("schedule", "reminders", "9137")
    assert timer["payload"] == {}
    assert parse_lsn(pushed["lsn"]) < parse_lsn(step["lsn"])
    assert pushed["time"] <= step["time"]
    assert step["epoch"] == 1


async def test_payloads_are_printed_as_they_were_sent(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    payload = '{"b":  1e2, "a": "\\u0000", "b": 2.50}'
    await reader.execute("select queen.push('q', $1)", payload)
    lines: list[str] = []
    tail = feed.Tail(reader, SLOT, 1)
    await tail.begin(None)
    await tail.run(lines.append, follow=False)
    assert payload in lines[0]


async def test_a_reader_goes_on_after_any_entry(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    for number in range(5):
        await reader.execute("select queen.push('q', $1)", str(number))
    first = await entries(reader)
    assert [entry["pushes"][0]["payload"] for entry in first] == [0, 1, 2, 3, 4]
    assert await entries(reader, first[1]["lsn"]) == first[2:]
    assert await entries(reader, first[4]["lsn"]) == []
    # Without a place, what the slot still keeps comes again.
    assert await entries(reader) == first


async def test_a_place_that_is_gone_is_refused(
    reader: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "KEPT_ENTRIES", 1)
    await feed.create(reader, SLOT)
    for number in range(4):
        await reader.execute("select queen.push('q', $1)", str(number))
    first = await entries(reader)
    assert [entry["pushes"][0]["payload"] for entry in first] == [0, 1, 2, 3]
    assert await entries(reader, first[2]["lsn"]) == first[3:]
    with pytest.raises(LogError, match="is gone"):
        await entries(reader, first[0]["lsn"])


async def test_more_changes_than_one_look_takes(
    reader: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MESSAGES_MAX", 3)
    await feed.create(reader, SLOT)
    for number in range(20):
        await reader.execute("select queen.push('q', $1)", str(number))
    found = await entries(reader)
    assert [entry["pushes"][0]["payload"] for entry in found] == list(range(20))


async def test_names_of_what_was_deleted_since(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    await reader.execute("select queen.push('gone', '1', 'p')")
    await reader.execute("select queen.delete_queue('gone')")
    found = await entries(reader)
    assert (found[0]["pushes"][0]["queue"], found[0]["pushes"][0]["partition"]) == ("gone", "p")


async def test_a_rolled_back_step_is_no_entry(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    transaction = reader.transaction()
    await transaction.start()
    await reader.execute("select queen.push('q', '1')")
    await transaction.rollback()
    await reader.execute("select queen.push('q', '2')")
    assert [entry["pushes"][0]["payload"] for entry in await entries(reader)] == [2]


async def test_slots_are_listed_and_dropped(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    [found] = await slot.slots(reader)
    assert (found.name, found.purpose, found.active) == (SLOT, "feed", False)
    assert found.kept_bytes is not None
    await slot.drop(reader, SLOT)
    assert await slot.slots(reader) == []
    with pytest.raises(LogError, match="no slot"):
        await slot.drop(reader, SLOT)
    with pytest.raises(LogError, match="--create"):
        await entries(reader)


async def test_a_forgotten_slot_is_told_of(
    reader: asyncpg.Connection, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "KEPT_BYTES_POOR", 100_000)
    await feed.create(reader, SLOT)
    await reader.execute("create table other as select generate_series(1, 10000)")
    settings = Settings(pg_url=await url_of(reader, server))
    findings = {finding.subject: finding for finding in await doctor.examine(settings)}
    assert findings[f"slot {SLOT}"].grade == "bad"
    assert "queen-pg log drop" in findings[f"slot {SLOT}"].advice
    database = Database(settings)
    await database.start()
    await epoch.measure(database, "home")
    await database.close()
    labels = {"group": "home", "slot": SLOT, "active": "0"}
    kept = REGISTRY.get_sample_value("queen_log_slot_kept_bytes", labels)
    assert kept is not None
    assert kept > 100_000


async def url_of(reader: asyncpg.Connection, server: Server) -> str:
    """Return the URL of the reader's database, for a role that may replicate."""
    assert server.embedded is not None
    name = await reader.fetchval("select current_database()")
    return server.embedded.superuser_url.replace("/postgres?", f"/{name}?")


async def test_an_idle_feed_keeps_nothing_of_what_others_write(reader: asyncpg.Connection) -> None:
    await feed.create(reader, SLOT)
    await reader.execute("create table other as select generate_series(1, 10000)")
    before = (await slot.slots(reader))[0].lsn
    assert await entries(reader) == []
    after = (await slot.slots(reader))[0].lsn
    assert before is not None
    assert after is not None
    assert after > before + 100_000


async def test_tail_as_a_command(reader: asyncpg.Connection, server: Server) -> None:
    await feed.create(reader, SLOT)
    await reader.execute("select queen.push('q', '1')")
    url = await url_of(reader, server)

    async def log(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "queen_pg", "log", *arguments,
            cwd=Path(__file__).parents[2],
            env={"QUEEN_PG_URL": url, "PATH": ""},
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0
        return output.decode()

    printed = await log("tail", "--slot", SLOT, "--no-follow")
    assert json.loads(printed)["pushes"][0]["payload"] == 1
    assert "read by nobody" in await log("slots")
    await log("drop", SLOT)
    assert await log("slots") == ""
