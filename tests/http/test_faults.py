"""What goes wrong in the broker or its database, as each route tells it.

data-plane 1-5 and 1-6; step 0.1, 1.10 and 2.11. The faults are the database's own: rows that an
application's transaction holds, and errors that a trigger raises for what a test writes.
"""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest_asyncio

from tests.support.broker import Broker
from tests.support.wire import Wire, data

# More than a broker takes in for writing, in two calls.
MANY = 51_000

KEY = {"ns": "faults", "key": "k", "value": 1, "ttlSeconds": 60}


def push_body(queue: str, *payloads: Any, **fields: Any) -> dict[str, Any]:
    return {"items": [{"queue": queue, "payload": payload, **fields} for payload in payloads]}


def schedule(queue: str) -> dict[str, Any]:
    return {
        "op": "schedule",
        "queue": queue,
        "timerKey": "k",
        "delayMs": 3_600_000,
        "txn": "t",
        "payload": base64.b64encode(b"1").decode(),
    }


@pytest_asyncio.fixture
async def own(database: str) -> AsyncIterator[Wire]:
    """The wire of a broker that only this test uses, with a database to break."""
    with Broker(database) as broker:
        async with httpx.AsyncClient(base_url=broker.base_url, timeout=90) as http:
            sql = await asyncpg.connect(database)
            try:
                yield Wire(http, sql)
            finally:
                await sql.close()


@asynccontextmanager
async def failing(sql: asyncpg.Connection, sqlstate: str) -> AsyncIterator[None]:
    """Have every message, key and timer that is written meet an error of the database."""
    tables = ("messages", "kv", "timers")
    triggers = "".join(
        f"create trigger fail before insert on queen.{table}"
        " for each row execute function public.fail();"
        for table in tables
    )
    await sql.execute(
        "create function public.fail() returns trigger language plpgsql as"
        f" $$ begin raise exception using errcode = '{sqlstate}', message = 'planted'; end $$;"
        + triggers
    )
    try:
        yield
    finally:
        await sql.execute(
            "".join(f"drop trigger fail on queen.{table};" for table in tables)
            + "drop function public.fail()"
        )


def told(response: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of an error that is not KV's or the timers'."""
    body = response.json()
    assert body.keys() == {"error", "code"}
    assert body["error"]
    return response.status_code, body["code"]


def declined(response: httpx.Response) -> tuple[int, str, str]:
    """Return the status and both codes of an error of KV, timers or locks."""
    body = response.json()
    assert body.keys() == {"error", "reason", "detail"}
    return response.status_code, body["error"], body["reason"]


async def test_a_call_that_cannot_be_carried_out_ends_after_its_30_seconds(
    own: Wire, database: str
) -> None:
    """data-plane 1-6, step 1.10, 2.11: 503 `timeout`; what was given up is not carried out."""
    for partition in ("p", "lease"):
        await own.push("held", 1, partition=partition)
    messages = await own.take("held", consumerGroup="g")
    message = next(one for one in messages if one["partition"] == "p")
    other = next(one for one in messages if one["partition"] == "lease")
    for path, operation in (
        ("/api/v1/kv", {"op": "put", **KEY}),
        ("/api/v1/timers", schedule("held")),
    ):
        await own.post(path, [operation], 200)
    [lock] = (
        await own.post(
            "/api/v1/locks", [{"op": "acquire", "name": "l", "ttlSeconds": 600, "owner": "me"}]
        )
    )["results"]
    holder = await asyncpg.connect(database)
    try:
        async with holder.transaction():
            await holder.execute("select queen.push('held', '2', 'p')")
            for table in ("cursors", "kv", "timers"):
                await holder.execute(f"select from queen.{table} for update")
            ack = {
                "transactionId": message["transactionId"],
                "partitionId": message["partitionId"],
                "leaseId": message["leaseId"],
            }
            pushed, acked, extended, step, put, scheduled, renewed = await asyncio.gather(
                own.http.post("/api/v1/push", json=push_body("held", 3, partition="p")),
                own.http.post("/api/v1/ack", json={**ack, "consumerGroup": "g"}),
                own.http.post(f"/api/v1/lease/{other['leaseId']}/extend"),
                own.http.post(
                    "/api/v1/transaction",
                    json={
                        "operations": [
                            {"type": "push", **push_body("held", 4, partition="p")},
                            {"type": "push", **push_body("elsewhere", 4)},
                        ]
                    },
                ),
                own.http.post("/api/v1/kv", json=[{"op": "put", **KEY, "value": 2}]),
                own.http.post("/api/v1/timers", json=[{**schedule("held"), "txn": "other"}]),
                own.http.post(
                    "/api/v1/locks",
                    json=[{"op": "renew", "name": "l", "token": lock["token"], "ttlSeconds": 5}],
                ),
            )
            for response in (pushed, acked, extended, step):
                assert told(response) in ((503, "timeout"), (503, "retry"))
            assert told(pushed) == (503, "timeout")
            assert "timeout" in pushed.json()["error"]
            for response, surface in ((put, "kv"), (scheduled, "timers"), (renewed, "kv")):
                status, code, reason = declined(response)
                assert (status, code) == (503, f"{surface}_unavailable")
                assert reason in (f"{surface}_timeout", f"{surface}_retry")
            for response in (pushed, acked, extended, step, put, scheduled, renewed):
                assert response.headers["retry-after"] == "1"
    finally:
        await holder.close()
    [result] = await own.ack(message, group="g")
    assert result["success"] is True
    assert data(await own.take("held", "p", consumerGroup="g")) == [2]
    assert await own.take("elsewhere") == []
    assert (await own.get("/api/v1/kv/faults/k", 200))["value"] == 1
    assert (await own.get("/api/v1/timers/held/k", 200))["txn"] == "t"


async def test_too_much_that_waits_is_refused_until_it_is_written(own: Wire, database: str) -> None:
    """data-plane 1-5, step 1.10: 429 `overloaded` with Retry-After; nothing of it is written."""
    await own.push("full", 0)
    holder = await asyncpg.connect(database)
    try:
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("select queen.push('full', '0')")
        calls = [
            asyncio.create_task(own.http.post("/api/v1/push", json=push_body("full", *range(MANY))))
            for _ in range(2)
        ]
        [done], [waiting] = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        second = done.result()
        assert told(second) == (429, "overloaded")
        assert 1 <= int(second.headers["retry-after"]) <= 5
        await own.push("beside", 1)
        await transaction.rollback()
        assert (await waiting).status_code == 201
    finally:
        await holder.close()
    assert await own.count("messages") == 1 + MANY + 1


async def test_a_full_database_takes_no_more_but_acks(own: Wire) -> None:
    """data-plane 1-5, step 1.10, 2.11: 507 `storage_full`; acks, cancels and deletes are served."""
    await own.push("q", 1)
    await own.post("/api/v1/kv", [{"op": "put", **KEY}], 200)
    await own.post("/api/v1/timers", [schedule("q")], 200)
    [message] = await own.take("q")
    async with failing(own.sql, "53100"):
        full = (507, "storage_full")
        assert told(await own.http.post("/api/v1/push", json=push_body("q", 2))) == full
        body = {"operations": [{"type": "push", **push_body("q", 2)}]}
        assert told(await own.http.post("/api/v1/transaction", json=body)) == full
        for path, operation in (
            ("/api/v1/kv", {"op": "put", **KEY, "key": "new"}),
            ("/api/v1/timers", {**schedule("q"), "timerKey": "new"}),
            ("/api/v1/locks", {"op": "acquire", "name": "l", "ttlSeconds": 5}),
        ):
            response = await own.http.post(path, json=[operation])
            assert declined(response) == (507, "storage_full", "storage_full")
        assert [result["success"] for result in await own.ack(message)] == [True]
        assert (await own.http.delete("/api/v1/kv/faults/k")).json()["applied"] is True
        assert (await own.http.delete("/api/v1/timers/q/k")).json()["status"] == "cancelled"
    await own.push("q", 2)
    assert data(await own.take("q")) == [2]


async def test_a_fault_of_ours_is_an_incident(own: Wire) -> None:
    """data-plane 1-5, step 1.10, 2.11: 500 `internal`, `kv_error`; the log holds the rest."""
    async with failing(own.sql, "P0001"):
        pushed = await own.http.post("/api/v1/push", json=push_body("q", 1))
        body = {"operations": [{"type": "push", **push_body("q", 1)}]}
        step = await own.http.post("/api/v1/transaction", json=body)
        for response in (pushed, step):
            assert told(response) == (500, "internal")
            assert "planted" not in response.text
        for path, operation, code in (
            ("/api/v1/kv", {"op": "put", **KEY}, "kv_error"),
            ("/api/v1/locks", {"op": "acquire", "name": "l", "ttlSeconds": 5}, "kv_error"),
            ("/api/v1/timers", schedule("q"), "timers_error"),
        ):
            response = await own.http.post(path, json=[operation])
            assert declined(response) == (500, code, "internal")
            assert "planted" not in response.text
    await own.push("q", 1)
