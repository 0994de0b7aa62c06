"""What the SDK takes for granted about a broker: step 6. Its locks are in test_lock."""

import asyncio
import base64
from datetime import datetime, timedelta
from typing import Any

import pytest
from queen import Queen

from tests.support.wire import Wire, data


def push(queue: str, payload: Any = 1, **fields: Any) -> dict[str, Any]:
    return {"type": "push", "items": [{"queue": queue, "payload": payload, **fields}]}


@pytest.mark.parametrize(
    ("parts", "success"),
    [
        ({"operations": [push("habits-out")]}, True),
        ({"operations": []}, False),
        ({"operations": [push("habits-out", transactionId="stored")]}, False),
        ({"operations": [{"type": "ack", "transactionId": "t", "partitionId": "1"}]}, False),
        ({"kv": [{"op": "check", "ns": "n", "key": "none", "expect": 1, "required": True}]}, False),
        ({"positions": [{"queue": "none", "consumerGroup": "g", "offset": 0}]}, False),
    ],
)
async def test_a_transaction_is_answered_by_an_object_with_its_success(
    wire: Wire, parts: dict[str, Any], success: bool
) -> None:
    """Step 6-1, 6-2: and by an error that is a text, whenever it has none."""
    await wire.push("habits-out", 1, ids=["stored"])
    response = await wire.http.post("/api/v1/transaction", json=parts)
    assert response.status_code == 200
    verdict = response.json()
    assert verdict["success"] is success
    assert success or (isinstance(verdict["error"], str) and verdict["error"])


async def test_the_sdk_raises_what_a_refusal_says(wire: Wire, queue: str) -> None:
    """Step 6-2."""
    async with Queen(str(wire.http.base_url)) as client:
        await wire.push(queue, 1, ids=["t"])
        step = client.transaction().queue(queue).push([{"data": 1, "transactionId": "t"}])
        with pytest.raises(Exception, match="rolled back"):
            await step.commit()


async def test_the_sdks_lifetimes_are_whole_seconds(wire: Wire, queue: str) -> None:
    """Step 6-3: rounded up by the SDK; kept as sent."""
    async with Queen(str(wire.http.base_url)) as client:
        await client.kv.put("habits", queue, 1, ttl=timedelta(milliseconds=1500))
        row = await client.kv.get("habits", queue)
    lifetime = datetime.fromisoformat(row["expiresAt"]) - datetime.fromisoformat(row["updatedAt"])
    assert lifetime == timedelta(seconds=2)


async def test_the_sdks_schedules_are_complete(wire: Wire, queue: str) -> None:
    """Step 6-4: a negative delay is due at once, a txn is minted, the payload is JSON in base64."""
    async with Queen(str(wire.http.base_url)) as client:
        scheduled = await client.timers.schedule(queue, "k", {"n": "é"}, delay_ms=-60_000)
    messages: list[Any] = []
    async with asyncio.timeout(20):
        while not messages:
            messages = await wire.take(queue, wait=True, timeout=5000)
    assert data(messages) == [{"n": "é"}]
    assert messages[0]["transactionId"] == scheduled["txn"] != ""


async def test_the_sdks_supervision_fits_into_the_values(wire: Wire, queue: str) -> None:
    """Step 6-6, 2.1: two puts a call, of which one holds up to 45,000 bytes in base64."""
    for write in ("first", "second"):
        operations = [
            {
                "op": "put",
                "ns": "queen-supervisor",
                "key": f"group/{queue}/{key}",
                "ttlSeconds": 60,
                "value": {"write": write, **value},
            }
            for key, value in (
                ("head", {"chunks": 1, "bytes": 45_000}),
                ("chunk/0000", {"index": 0, "data": base64.b64encode(b"x" * 45_000).decode()}),
            )
        ]
        answer = await wire.post("/api/v1/kv", {"operations": operations}, 200)
        assert [result["applied"] for result in answer["results"]] == [True, True]
