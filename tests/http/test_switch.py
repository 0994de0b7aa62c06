"""The kill switches over HTTP: step 5, and who comes first (step 2.2, 1.11-2)."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.support.wire import Wire

PATH = "/api/v1/system/kv-timers"
SCHEDULE = {
    "op": "schedule",
    "queue": "paused",
    "timerKey": "k",
    "delayMs": 600_000,
    "txn": "t",
    "payload": base64.b64encode(b"1").decode(),
}
CANCEL = {"op": "cancel", "queue": "paused", "timerKey": "k"}
GET = {"op": "get", "ns": "n", "key": "k"}


@pytest_asyncio.fixture
async def switched(wire: Wire) -> AsyncIterator[Wire]:
    """The wire; what a test switches off is switched on again."""
    yield wire
    await wire.post(PATH, {"kv": True, "timersSchedule": True, "timersFire": True}, 200)


def disabled(response: httpx.Response, code: str) -> bool:
    body = response.json()
    return (
        response.status_code == 503
        and response.headers["retry-after"] == "1"
        and (body["error"], body["reason"]) == (code, code)
    )


async def test_the_switches_are_read_and_thrown(switched: Wire) -> None:
    """Step 5: omitted ones stay as they are; the answer has all."""
    assert await switched.get(PATH, 200) == {
        "kvEnabled": True,
        "timersScheduleEnabled": True,
        "timersFireEnabled": True,
    }
    thrown = await switched.post(PATH, {"timersFire": False}, 200)
    assert (thrown["kvEnabled"], thrown["timersFireEnabled"]) == (True, False)
    assert {"mirrored", "message"} <= set(thrown)
    for body in ({}, {"other": True}, {"kv": None}, {"kv": "no"}, []):
        await switched.post(PATH, body, 400)
    assert (await switched.get(PATH, 200))["timersFireEnabled"] is False


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/v1/kv", [GET]),
        ("POST", "/api/v1/kv", [{**GET, "op": "nope"}]),
        ("GET", "/api/v1/kv/n/k", None),
        ("PUT", "/api/v1/kv/n/k", {"value": 1, "forever": True}),
        ("DELETE", "/api/v1/kv/n/k", None),
        ("GET", "/api/v1/resources/kv/namespaces", None),
        ("POST", "/api/v1/resources/kv/list", {"namespace": "n"}),
        ("POST", "/api/v1/resources/kv/list", {"namespace": "BAD"}),
        ("POST", "/api/v1/locks", [{"op": "get", "name": "l"}]),
        ("POST", "/api/v1/locks", [{"op": "nope"}]),
    ],
)
async def test_a_paused_kv_refuses_everything_of_kv(
    switched: Wire, method: str, path: str, body: Any
) -> None:
    """Step 5 kv, 2.2: before any validation; sizes come before the switch."""
    await switched.post(PATH, {"kv": False}, 200)
    assert disabled(await switched.http.request(method, path, json=body), "kv_disabled")


async def test_sizes_come_before_the_switch(switched: Wire) -> None:
    """Step 2.2: op count, key sum and value sizes are judged first."""
    await switched.post(PATH, {"kv": False}, 200)
    response = await switched.http.post("/api/v1/kv", json=[GET] * 257)
    assert response.json()["reason"] == "kv_too_many_ops"


async def test_paused_scheduling_refuses_schedules_and_never_a_cancel(switched: Wire) -> None:
    """Step 5 timersSchedule."""
    await switched.post("/api/v1/timers", [SCHEDULE], 200)
    await switched.post(PATH, {"timersSchedule": False}, 200)
    for operations in ([SCHEDULE], [CANCEL, {**SCHEDULE, "timerKey": "x"}], [{"op": "nope"}]):
        response = await switched.http.post("/api/v1/timers", json=operations)
        assert disabled(response, "timers_disabled")
    assert (await switched.get("/api/v1/timers/paused/k", 200))["found"] is True
    assert len((await switched.get("/api/v1/timers/paused", 200))["rows"]) == 1
    answer = await switched.post("/api/v1/timers", [CANCEL], 200)
    assert answer["results"][0]["status"] == "cancelled"
    response = await switched.http.delete("/api/v1/timers/paused/k")
    assert response.json()["status"] == "absent"


@pytest.mark.parametrize(
    ("switch", "riders", "reason"),
    [
        ("kv", {"kv": [GET]}, "kv_disabled"),
        ("kv", {"kv": [{"op": "nope"}]}, "kv_disabled"),
        ("kv", {"kv": [GET], "positions": [5]}, "kv_disabled"),
        ("timersSchedule", {"timers": [CANCEL, {**SCHEDULE, "timerKey": "x"}]}, "timers_disabled"),
        ("timersSchedule", {"timers": [{**SCHEDULE, "_x": 1}]}, "timers_disabled"),
    ],
)
async def test_a_transaction_on_a_paused_surface_is_forbidden(
    switched: Wire, switch: str, riders: Any, reason: str
) -> None:
    """Step 1.10, 1.11-2, 5: 403 in the transaction's envelope, no Retry-After, nothing applied."""
    await switched.post(PATH, {switch: False}, 200)
    push = {"type": "push", "items": [{"queue": "paused", "payload": 1}]}
    before = await switched.count("messages")
    response = await switched.http.post(
        "/api/v1/transaction", json={"operations": [push], **riders}
    )
    body = response.json()
    assert (response.status_code, body["success"], body["reason"]) == (403, False, reason)
    assert body["error"]
    assert body["results"] == []
    assert "retry-after" not in response.headers
    assert await switched.count("messages") == before


async def test_a_transaction_without_what_is_paused_commits(switched: Wire) -> None:
    """Step 5: cancels are never refused, and an empty rider is none."""
    await switched.post(PATH, {"kv": False, "timersSchedule": False}, 200)
    push = {"type": "push", "items": [{"queue": "paused", "payload": 1}]}
    answer = await switched.transaction(push, kv=[], timers=[CANCEL])
    assert answer["success"] is True


async def test_paused_firing_loses_nothing(switched: Wire, queue: str) -> None:
    """Step 5 timersFire: the backlog fires once it is on again, oldest due first."""
    await switched.post(PATH, {"timersFire": False}, 200)
    operations = [
        {**SCHEDULE, "queue": queue, "timerKey": f"k{n}", "txn": f"t{n}", "delayMs": -n}
        for n in range(5)
    ]
    await switched.post("/api/v1/timers", operations, 200)
    assert await switched.take(queue, wait=True, timeout=300) == []
    assert len((await switched.get(f"/api/v1/timers/{queue}", 200))["rows"]) == 5
    await switched.post(PATH, {"timersFire": True}, 200)
    messages: list[Any] = []
    while len(messages) < 5:
        messages += await switched.take(queue, wait=True, timeout=5000)
    assert [message["transactionId"] for message in messages] == ["t4", "t3", "t2", "t1", "t0"]
