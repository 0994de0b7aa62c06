"""The rates of KV, locks and timers over HTTP: step 2.12, 0.1."""

import base64
from collections.abc import Iterator

import httpx
import pytest

from tests.support.broker import Broker

PUT = {"op": "put", "ns": "n", "key": "k", "value": 1, "ttlSeconds": 60}
GET = {"op": "get", "ns": "n", "key": "k"}
SCHEDULE = {
    "op": "schedule",
    "queue": "q",
    "timerKey": "k",
    "delayMs": 600_000,
    "txn": "t",
    "payload": base64.b64encode(b"1").decode(),
}


@pytest.fixture
def limited(database: str) -> Iterator[httpx.Client]:
    """A broker that takes two writes and three reads, and little more for a while."""
    with (
        Broker(
            database,
            QUEEN_KV_WRITE_RATE="1",
            QUEEN_KV_WRITE_BURST="2",
            QUEEN_KV_READ_RATE="1",
            QUEEN_KV_READ_BURST="3",
        ) as broker,
        httpx.Client(base_url=broker.base_url, timeout=30) as client,
    ):
        yield client


def test_writes_share_a_bucket_and_reads_another(limited: httpx.Client) -> None:
    """Step 2.12: one token a call, whatever is in it; cancels and transactions pay nothing."""
    first = limited.post("/api/v1/kv", json=[PUT, GET])
    second = limited.post("/api/v1/locks", json=[{"op": "release", "name": "l", "token": 1}])
    assert [first.status_code, second.status_code] == [200, 200]
    for path, body in (
        ("/api/v1/kv", [PUT]),
        ("/api/v1/locks", [{"op": "release", "name": "l", "token": 1}]),
        ("/api/v1/timers", [SCHEDULE]),
        ("/api/v1/kv", [{**PUT, "ns": "BAD"}]),
    ):
        refused = limited.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] == "1"
    reads = [limited.post("/api/v1/kv", json=[GET] * 5).status_code for _ in range(2)]
    reads.append(limited.get("/api/v1/kv/n/k").status_code)
    assert reads == [200, 200, 200]
    assert limited.post("/api/v1/locks", json=[{"op": "get", "name": "l"}]).status_code == 429

    cancelled = limited.delete("/api/v1/timers/q/k")
    body = {"operations": [], "kv": [{**PUT, "key": "other"}], "timers": [SCHEDULE]}
    committed = limited.post("/api/v1/transaction", json=body)
    assert [cancelled.status_code, committed.status_code] == [200, 200]
    assert committed.json()["success"] is True


def test_the_switch_comes_before_the_rate(limited: httpx.Client) -> None:
    """Step 5: a paused surface says so, also to those who have no token left."""
    switches = "/api/v1/system/kv-timers"
    limited.post(switches, json={"kv": False, "timersSchedule": False})
    for path, body, code in (
        ("/api/v1/kv", [PUT], "kv_disabled"),
        ("/api/v1/timers", [SCHEDULE], "timers_disabled"),
    ):
        answers = [limited.post(path, json=body) for _ in range(4)]
        assert {(answer.status_code, answer.json()["error"]) for answer in answers} == {(503, code)}
