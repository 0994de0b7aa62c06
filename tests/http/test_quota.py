"""The quotas of KV and timers over HTTP: step 2.12, 5 and 1.10."""

import base64
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.support.broker import Broker
from tests.support.database import Databases

GET = {"op": "get", "ns": "n", "key": "k"}
DELETE = {"op": "delete", "ns": "n", "key": "k"}
CHECK = {"op": "check", "ns": "n", "key": "none", "expect": 0}
CANCEL = {"op": "cancel", "queue": "q", "timerKey": "k"}
PUSH = {"type": "push", "items": [{"queue": "q", "payload": 1}]}

TOO_MANY_KEYS = (403, "kv_quota_exceeded")
TOO_MANY_TIMERS = (403, "timers_quota_exceeded")


def put(key: str = "k", value: Any = 1, **more: Any) -> dict[str, Any]:
    return {"op": "put", "ns": "n", "key": key, "value": value, "forever": True, **more}


def schedule(key: str = "k") -> dict[str, Any]:
    return {
        "op": "schedule",
        "queue": "q",
        "timerKey": key,
        "delayMs": 600_000,
        "txn": f"t-{key}",
        "payload": base64.b64encode(b"1").decode(),
    }


@pytest.fixture
def limited(database: str) -> Iterator[httpx.Client]:
    """A broker whose tenants may keep three keys and two timers."""
    with (
        Broker(
            database,
            QUEEN_KV_MAX_ROWS="3",
            QUEEN_TIMERS_MAX="2",
            QUEEN_TENANCY_HEADER="on",
        ) as broker,
        httpx.Client(base_url=broker.base_url, timeout=30) as client,
    ):
        yield client


def until(condition: Callable[[], bool]) -> None:
    """Wait for the broker to have counted."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def told(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]


def fill(client: httpx.Client) -> None:
    """Use the quotas up, and wait until the broker knows."""
    kept = client.post("/api/v1/kv", json=[put(f"k{number}") for number in range(3)])
    pending = client.post("/api/v1/timers", json=[schedule("a"), schedule("b")])
    assert (kept.status_code, pending.status_code) == (200, 200)
    until(lambda: client.post("/api/v1/kv", json=[put("k0")]).status_code == 403)
    until(lambda: client.post("/api/v1/timers", json=[schedule("a")]).status_code == 403)


def test_at_the_quota_nothing_that_grows_is_taken(limited: httpx.Client) -> None:
    """Step 2.12, 2.11: whole calls, on every surface; there is nothing to wait for."""
    fill(limited)
    incr = {"op": "incr", "ns": "n", "key": "c", "delta": 1, "forever": True}
    for path, operations, expected in (
        ("kv", [put()], TOO_MANY_KEYS),
        ("kv", [put(op="putIfAbsent")], TOO_MANY_KEYS),
        ("kv", [DELETE, incr], TOO_MANY_KEYS),
        ("locks", [{"op": "acquire", "name": "l", "ttlSeconds": 5}], TOO_MANY_KEYS),
        ("timers", [schedule("c")], TOO_MANY_TIMERS),
        ("timers", [CANCEL, {**schedule("a"), "op": "reschedule"}], TOO_MANY_TIMERS),
    ):
        refused = limited.post(f"/api/v1/{path}", json=operations)
        assert told(refused) == expected
        assert refused.json().keys() == {"error", "reason", "detail"}
        assert "retry-after" not in refused.headers
    refused = limited.put("/api/v1/kv/n/k", json={"value": 1, "forever": True})
    assert told(refused) == TOO_MANY_KEYS
    other = {"x-queen-tenant": "00000000-0000-0000-0000-000000000002"}
    for path, operations in (("kv", [put()]), ("timers", [schedule()])):
        taken = limited.post(f"/api/v1/{path}", json=operations, headers=other)
        assert taken.status_code == 200


def test_at_the_quota_reads_deletes_and_cancels_are_served(limited: httpx.Client) -> None:
    """Step 2.12: and make room, which is seen after a while."""
    fill(limited)
    for path, operations in (
        ("kv", [GET, CHECK]),
        ("kv", [{"op": "delete", "ns": "n", "key": "k0"}, CHECK]),
        ("locks", [{"op": "get", "name": "l"}]),
        ("locks", [{"op": "release", "name": "l", "token": 1}]),
        ("locks", [{"op": "renew", "name": "l", "token": 1, "ttlSeconds": 5}]),
        ("timers", [{"op": "cancel", "queue": "q", "timerKey": "a"}]),
    ):
        assert limited.post(f"/api/v1/{path}", json=operations).status_code == 200
    assert limited.get("/api/v1/kv/n/k1").status_code == 200
    assert limited.post("/api/v1/resources/kv/list", json={"namespace": "n"}).status_code == 200
    assert limited.delete("/api/v1/timers/q/a").status_code == 200
    assert limited.get("/api/v1/timers/q/b").status_code == 200
    until(lambda: limited.post("/api/v1/kv", json=[put("k0")]).status_code == 200)
    until(lambda: limited.post("/api/v1/timers", json=[schedule("a")]).status_code == 200)


def test_a_transaction_over_a_quota_writes_nothing(limited: httpx.Client) -> None:
    """Step 2.12, 1.10: 403 in the transaction's envelope, as on a paused surface."""
    fill(limited)
    for riders, (status, reason) in (
        ({"kv": [CHECK, put()]}, TOO_MANY_KEYS),
        ({"timers": [schedule("c")]}, TOO_MANY_TIMERS),
        ({"kv": [put()], "timers": [schedule("c")]}, TOO_MANY_KEYS),
    ):
        refused = limited.post("/api/v1/transaction", json={"operations": [PUSH], **riders})
        verdict = refused.json()
        assert (refused.status_code, verdict["success"], verdict["reason"]) == (
            status,
            False,
            reason,
        )
        assert verdict["error"]
        assert verdict["results"] == []
        assert "retry-after" not in refused.headers
    assert limited.get("/api/v1/pop/queue/q").status_code == 204
    committed = limited.post(
        "/api/v1/transaction",
        json={"operations": [PUSH], "kv": [GET, CHECK, DELETE], "timers": [CANCEL]},
    )
    assert committed.json()["success"] is True


def test_the_switch_comes_first_then_the_quota(limited: httpx.Client) -> None:
    """Step 5, 2.2: a paused surface says so; a quota is told also to one without a token."""
    fill(limited)
    refusals = {told(limited.post("/api/v1/kv", json=[put()])) for _ in range(300)}
    assert refusals == {TOO_MANY_KEYS}
    limited.post("/api/v1/system/kv-timers", json={"kv": False, "timersSchedule": False})
    assert told(limited.post("/api/v1/kv", json=[put()])) == (503, "kv_disabled")
    assert told(limited.post("/api/v1/timers", json=[schedule("c")])) == (503, "timers_disabled")
    for riders, reason in (
        ({"kv": [put()]}, "kv_disabled"),
        ({"timers": [schedule("c")]}, "timers_disabled"),
    ):
        paused = limited.post("/api/v1/transaction", json=riders)
        assert (paused.status_code, paused.json()["reason"]) == (403, reason)


async def test_bytes_have_a_quota_of_their_own(databases: Databases) -> None:
    """Step 2.12: of keys and values as they are stored; what is deleted makes room."""
    async with databases.clone() as url:
        with (
            Broker(url, QUEEN_KV_MAX_BYTES="10000") as broker,
            httpx.Client(base_url=broker.base_url, timeout=30) as client,
        ):
            for number in range(20):
                client.post("/api/v1/kv", json=[put(f"small-{number}")])
            large = bytes(range(256)).hex() * 20
            assert client.post("/api/v1/kv", json=[put("large", large)]).status_code == 200
            wide = [put(f"w{number}", f"{number}" * 400) for number in range(30)]
            assert client.post("/api/v1/kv", json=wide).status_code == 200
            until(lambda: client.post("/api/v1/kv", json=[put("k")]).status_code == 403)
            assert client.post("/api/v1/timers", json=[schedule()]).status_code == 200
            gone = [{"op": "delete", "ns": "n", "key": f"w{number}"} for number in range(30)]
            assert client.post("/api/v1/kv", json=gone).status_code == 200
            until(lambda: client.post("/api/v1/kv", json=[put("k")]).status_code == 200)
