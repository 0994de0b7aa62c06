"""A broker outlives the absence of its database: nobody waits in vain, and nobody restarts it."""

import asyncio
import base64
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest_asyncio

from tests.faults.stage import Stage, stage

CLIENTS = 20
CALLS_EACH = 50
PAYLOAD_BYTES = 512 * 1024
# What came in meanwhile is nearly twice as much; the allocator keeps some for the next call.
GROWTH_BYTES_MAX = 300 * 1024**2
DELAY_MS = 1500
GONE_SECONDS = 2.0


@pytest_asyncio.fixture
async def standing() -> AsyncIterator[Stage]:
    async with stage() as made:
        yield made


def memory(pid: int) -> int:
    """Return what a process occupies, in bytes."""
    [kilobytes] = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(kilobytes) * 1024


async def push(http: httpx.AsyncClient, queue: str, payload: object) -> httpx.Response:
    items = [{"queue": queue, "payload": payload}]
    return await http.post("/api/v1/push", json={"items": items})


async def flood(http: httpx.AsyncClient) -> Counter[int]:
    """Push a good deal, one call after the other, and return how often each status came."""
    statuses: Counter[int] = Counter()
    for _ in range(CALLS_EACH):
        response = await push(http, "flood", "x" * PAYLOAD_BYTES)
        statuses[response.status_code] += 1
        assert int(response.headers["retry-after"]) >= 1
    return statuses


async def pop(http: httpx.AsyncClient, queue: str) -> list[object]:
    """Wait for what comes to a queue."""
    path = f"/api/v1/pop/queue/{queue}"
    response = await http.get(path, params={"wait": "true", "timeout": 60_000, "autoAck": "true"})
    assert response.status_code == 200, response.text
    return [message["data"] for message in response.json()["messages"]]


async def test_a_broker_outlives_the_absence_of_its_database(standing: Stage) -> None:
    pid = standing.broker_pid(0)
    async with httpx.AsyncClient(base_url=standing.urls[0], timeout=90) as http:
        # Everything is warm: routes, pools, and the queue that the flood is for.
        for queue in ("flood", "late", "timed"):
            assert (await push(http, queue, "first")).status_code == 201
            assert await pop(http, queue) == ["first"]
        waiting = asyncio.create_task(pop(http, "late"))
        operation = {
            "op": "schedule",
            "queue": "timed",
            "timerKey": "k",
            "txn": "t",
            "delayMs": DELAY_MS,
            "partition": "p",
            "payload": base64.b64encode(b'"due"').decode(),
        }
        scheduled = await http.post("/api/v1/timers", json={"operations": [operation]})
        assert scheduled.status_code == 200, scheduled.text

        standing.proxy.refuse(True)
        assert (await push(http, "flood", "x")).status_code == 503
        before = memory(pid)
        async with asyncio.timeout(60):
            floods = await asyncio.gather(*(flood(http) for _ in range(CLIENTS)))
        assert sum(floods, Counter()) == {503: CLIENTS * CALLS_EACH}
        assert memory(pid) - before < GROWTH_BYTES_MAX
        await asyncio.sleep(GONE_SECONDS)
        assert not waiting.done()

        standing.proxy.refuse(False)
        async with asyncio.timeout(30):
            while (await push(http, "late", "second")).status_code != 201:
                await asyncio.sleep(0.1)
            # A push whose answer was lost may be there as well.
            assert await waiting == ["second"]
            assert await pop(http, "timed") == ["due"]
    assert standing.broker_pid(0) == pid
