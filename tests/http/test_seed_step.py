"""One whole step as the concept page shows it, and the SDK's own quick start, word by word."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.support.broker import Broker
from tests.support.wire import Wire, data

STEP = """{
  "operations": [
    { "type": "ack", "transactionId": "payment-9137-succeeded", "partitionId": "5",
      "consumerGroup": "billing", "leaseId": "01a0fcd7-e9bc-7001-8866-1685bf9d4343",
      "status": "completed" },
    { "type": "push", "items": [{ "queue": "receipts", "partition": "customer-42",
      "transactionId": "receipt-9137", "payload": { "orderId": 9137 } }] }
  ],
  "kv": [
    { "op": "put", "ns": "orders", "key": "9137", "value": { "status": "paid" },
      "ttlSeconds": 2592000 },
    { "op": "putIfAbsent", "ns": "paid", "key": "payment-9137-succeeded", "value": true,
      "ttlSeconds": 86400, "required": true }
  ],
  "timers": [
    { "op": "schedule", "queue": "reminders", "timerKey": "9137", "delayMs": 86400000,
      "txn": "remind-9137", "payload": "eyJvcmRlcklkIjo5MTM3fQ==" }
  ]
}"""
DAY_SECONDS = 86_400
QUICK_START_PORT = 6632


async def take_the_payment(wire: Wire) -> str:
    """Push the event, lease it as billing does, and return the step's body with its addresses."""
    await wire.push(
        "payments", {"orderId": 9137}, partition="order-9137", ids=["payment-9137-succeeded"]
    )
    [message] = await wire.take("payments", consumerGroup="billing")
    return STEP.replace('"partitionId": "5"', f'"partitionId": "{message["partitionId"]}"').replace(
        "01a0fcd7-e9bc-7001-8866-1685bf9d4343", message["leaseId"]
    )


async def send(wire: Wire, body: str) -> Any:
    """Post a step as it stands."""
    response = await wire.http.post(
        "/api/v1/transaction", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
    return response.json()


def is_minted(text: str) -> bool:
    return uuid.UUID(text).version == 7


async def test_the_step_is_written_once_and_survives(database: str) -> None:
    """Every part of the example, a broker killed after its answer, and the same bytes again."""
    with Broker(database) as broker:
        sql = await asyncpg.connect(database)
        try:
            async with httpx.AsyncClient(base_url=broker.base_url, timeout=30) as http:
                wire = Wire(http, sql)
                body = await take_the_payment(wire)
                answer = await send(wire, body)
                broker.kill()
                assert_every_part(answer)
            broker.start()
            async with httpx.AsyncClient(base_url=broker.base_url, timeout=30) as http:
                wire = Wire(http, sql)
                before = await wire.fingerprint()
                again = await send(wire, body)
                assert (again["success"], again["reason"]) == (False, "rejected_ack")
                assert again["results"] == []
                assert await wire.fingerprint() == before
                await assert_every_effect(wire, answer)
        finally:
            await sql.close()


def assert_every_part(answer: dict[str, Any]) -> None:
    assert answer["success"] is True
    assert is_minted(answer["transactionId"])
    ack, push, put, gate, timer = answer["results"]
    assert ack == {
        "index": 0,
        "type": "ack",
        "success": True,
        "transactionId": "payment-9137-succeeded",
        "error": None,
        "dlq": False,
    }
    assert is_minted(push.pop("messageId"))
    assert push == {
        "index": 1,
        "type": "push",
        "success": True,
        "transactionId": "receipt-9137",
        "queueName": "receipts",
    }
    assert put.pop("version") != gate.pop("version")
    assert put == {
        "index": 2,
        "opIndex": 0,
        "type": "kv",
        "op": "put",
        "applied": True,
        "key": "9137",
        "value": {"status": "paid"},
    }
    assert gate == {
        "index": 3,
        "opIndex": 1,
        "type": "kv",
        "op": "putIfAbsent",
        "applied": True,
        "key": "payment-9137-succeeded",
        "value": True,
    }
    assert is_minted(timer.pop("messageId"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", timer.pop("deliverAt"))
    assert timer == {
        "index": 4,
        "opIndex": 0,
        "type": "timer",
        "ok": True,
        "status": "scheduled",
        "queue": "reminders",
        "timerKey": "9137",
        "txn": "remind-9137",
    }


async def assert_every_effect(wire: Wire, answer: dict[str, Any]) -> None:
    assert await wire.take("payments", consumerGroup="billing") == []
    [receipt] = await wire.take("receipts")
    assert (receipt["partition"], receipt["transactionId"], receipt["data"]) == (
        "customer-42",
        "receipt-9137",
        {"orderId": 9137},
    )
    rows = await wire.sql.fetch(
        "select namespace, key, value, extract(epoch from expires_at - created_at)::int as ttl"
        " from queen.kv order by namespace"
    )
    assert [
        (row["namespace"], row["key"], json.loads(row["value"]), row["ttl"]) for row in rows
    ] == [
        ("orders", "9137", {"status": "paid"}, 30 * DAY_SECONDS),
        ("paid", "payment-9137-succeeded", True, DAY_SECONDS),
    ]
    [timer] = await wire.sql.fetch(
        "select queue, timer_key, partition, transaction_id, payload,"
        " extract(epoch from deliver_at - created_at)::int as delay from queen.timers"
    )
    assert tuple(timer) == (
        "reminders",
        "9137",
        "Default",
        "remind-9137",
        '{"orderId":9137}',
        DAY_SECONDS,
    )
    assert data(await wire.take("reminders")) == []


def quick_start() -> str:
    """Return the first program under the heading in the README that the SDK is published with."""
    readme = metadata("queen-mq")["Description"]
    section = readme.partition("## Quick Start")[2]
    program = section.partition("```python\n")[2].partition("```")[0]
    assert "consume(process)" in program
    return program


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextlib.contextmanager
def running(program: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program that never ends by itself, and its output."""
    file = folder / "quick_start.py"
    file.write_text(program)
    process = subprocess.Popen([sys.executable, "-u", file], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.asynccontextmanager
async def broker_of_the_quick_start(database: str) -> AsyncIterator[Wire]:
    """A broker on the one port that the program knows."""
    if not is_free(QUICK_START_PORT):
        pytest.skip(f"something else listens on port {QUICK_START_PORT}")
    broker = Broker(database, PORT=str(QUICK_START_PORT))
    broker.base_url = f"http://127.0.0.1:{QUICK_START_PORT}"
    sql = await asyncpg.connect(database)
    try:
        with broker:
            async with httpx.AsyncClient(base_url=broker.base_url) as http:
                yield Wire(http, sql)
    finally:
        await sql.close()


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that another process brings about."""
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def test_the_sdks_quick_start_runs_unmodified(database: str, tmp_path: Path) -> None:
    """Create, push, consume, as printed.

    This release of the SDK hands the program's handler a list of messages where it reads one, so
    the handler fails; what follows is the broker's part: four deliveries, then a dead letter.
    """
    async with broker_of_the_quick_start(database) as wire:
        with running(quick_start(), tmp_path):

            async def buried() -> bool:
                return bool(await wire.dead_letters("tasks"))

            await eventually(buried)
        [letter] = await wire.dead_letters("tasks")
        assert letter["data"] == {"task": "send-email", "to": "alice@example.com"}
        assert "list indices must be integers" in letter["errorMessage"]
        assert letter["retryCount"] == 3
        assert (await wire.configure("tasks"))["options"]["leaseTime"] == 300


async def test_the_sdks_quick_start_message_by_message(database: str, tmp_path: Path) -> None:
    """The same program with `each()`, by which the SDK hands over one message at a time."""
    program = quick_start().replace(".consume(process)", ".each().consume(process)")
    async with broker_of_the_quick_start(database) as wire:
        with running(program, tmp_path) as process:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            assert line == "Processing: {'task': 'send-email', 'to': 'alice@example.com'}\n"

            async def settled() -> bool:
                query = "select committed_offset from queen.cursors"
                return bool(await wire.sql.fetchval(query) == 0)

            await eventually(settled)
        assert await wire.dead_letters("tasks") == []
