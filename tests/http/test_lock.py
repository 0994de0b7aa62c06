"""Locks and semaphores over HTTP: step 4."""

import asyncio
from typing import Any

import pytest

from tests.support.wire import Wire


async def locks(wire: Wire, *operations: Any) -> list[dict[str, Any]]:
    answer = await wire.post("/api/v1/locks", {"operations": operations}, 200)
    results: list[dict[str, Any]] = answer["results"]
    assert [result["index"] for result in results] == list(range(len(operations)))
    return results


def acquire(name: str, owner: str, **more: Any) -> dict[str, Any]:
    return {"op": "acquire", "name": name, "owner": owner, "ttlSeconds": 30, **more}


async def test_results_come_at_their_place(wire: Wire, queue: str) -> None:
    """Step 4, 4.3: as many as operations, each with what the SDK reads without a default."""
    name = queue
    granted, looked = await locks(wire, acquire(name, "me"), {"op": "get", "name": f"{name}-2"})
    assert list(granted)[:2] == ["index", "op"]
    assert {"token", "slot", "guard"} <= set(granted)
    assert looked["held"] is False
    token = granted["token"]
    [renewed] = await locks(
        wire, {"op": "renew", "name": name, "token": token, "owner": "me", "ttlSeconds": 5}
    )
    assert {"token", "guard"} <= set(renewed)
    [released] = await locks(wire, {"op": "release", "name": name, "token": renewed["token"]})
    assert released == {"index": 0, "op": "release", "name": name, "released": True, "slot": 0}
    for body in ([], {"operations": []}):
        assert await wire.post("/api/v1/locks", body, 200) == {"results": []}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "locks_bad_body"),
        (b'{"operations":{}}', "locks_bad_body"),
        (b"[5]", "locks_bad_request"),
        (b'[{"op":"get","name":"a#b"}]', "locks_bad_name"),
        (b'[{"op":"acquire","name":"a"}]', "locks_ttl_required"),
    ],
)
async def test_a_refusal_has_two_codes(wire: Wire, body: bytes, reason: str) -> None:
    """Step 4.2."""
    response = await wire.http.post("/api/v1/locks", content=body)
    answer = response.json()
    assert (response.status_code, answer["error"], answer["reason"]) == (
        400,
        "locks_bad_request",
        reason,
    )


async def test_a_crowd_gets_one_lock(wire: Wire, queue: str) -> None:
    """Step 4.4-2: whoever comes at once, one is granted."""
    calls = [locks(wire, acquire(queue, f"w{number}")) for number in range(20)]
    results = [result for [result] in await asyncio.gather(*calls)]
    assert sum(result["acquired"] for result in results) == 1


async def test_a_crowd_never_gets_more_permits_than_there_are(wire: Wire, queue: str) -> None:
    """Step 4.4-3: and each in a slot of its own."""
    calls = [locks(wire, acquire(queue, f"w{number}", limit=3)) for number in range(15)]
    results = [result for [result] in await asyncio.gather(*calls)]
    granted = [result for result in results if result["acquired"]]
    assert sorted(result["slot"] for result in granted) == [0, 1, 2]
    [looked] = await locks(wire, {"op": "get", "name": queue})
    assert [holder["owner"] for holder in looked["holders"]] == [
        result["owner"] for result in sorted(granted, key=lambda result: result["slot"])
    ]


async def test_one_owner_that_calls_twice_at_once_has_one_permit(wire: Wire, queue: str) -> None:
    """Step 4.4-1: re-sending with the same owner converges."""
    calls = [locks(wire, acquire(queue, "me", limit=5)) for _ in range(8)]
    results = [result for [result] in await asyncio.gather(*calls)]
    assert len({(result["slot"], result["token"]) for result in results}) == 1


async def test_tokens_only_rise_from_holder_to_holder(wire: Wire, queue: str) -> None:
    """Step 4.4-9: also when many take turns at once."""
    tokens: list[int] = []

    async def worker(owner: str) -> None:
        for _ in range(4):
            async with asyncio.timeout(20):
                while True:
                    [result] = await locks(wire, acquire(queue, owner))
                    if result["acquired"]:
                        break
                    await asyncio.sleep(0.02)
            tokens.append(result["token"])
            await locks(wire, {"op": "release", "name": queue, "token": result["token"]})

    await asyncio.gather(*[worker(f"w{number}") for number in range(4)])
    assert tokens == sorted(tokens)
    assert len(set(tokens)) == 16
