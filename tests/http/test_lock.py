"""Locks and semaphores over HTTP: step 4, and their guards in transactions: step 1.12."""

import asyncio
from datetime import datetime
from typing import Any

import pytest
from queen import Queen

from tests.support.wire import Wire, data


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


# A guard in a transaction.


def push(queue: str, *payloads: Any) -> dict[str, Any]:
    return {"type": "push", "items": [{"queue": queue, "payload": payload} for payload in payloads]}


async def test_a_guard_commits_a_transaction_while_the_permit_is_held(
    wire: Wire, queue: str
) -> None:
    """Step 1.12: the guard is what the grant says; it answers as a check among the others."""
    [granted] = await locks(wire, acquire(queue, "me"))
    assert granted["guard"] == {
        "op": "check",
        "ns": "queen-locks",
        "key": f"{queue}#0",
        "expect": granted["token"],
        "required": True,
    }
    verdict = await wire.transaction(push(queue, 1, 2), kv=[granted["guard"]])
    assert verdict["success"] is True
    assert verdict["results"][2] == {
        "index": 2,
        "opIndex": 0,
        "type": "kv",
        "op": "check",
        "applied": True,
        "key": f"{queue}#0",
        "version": granted["token"],
    }


async def test_a_guard_that_a_renew_overtook_is_told_so_and_sent_again(
    wire: Wire, queue: str
) -> None:
    """Step 1.12: failedIndex is flat, kvReason `version`, and the value names the same owner."""
    await wire.push(f"{queue}-in", 1)
    [message] = await wire.take(f"{queue}-in")
    ack = {"type": "ack", **{k: message[k] for k in ("transactionId", "partitionId", "leaseId")}}
    semaphore, other = await locks(
        wire, acquire(f"{queue}-s", "me", limit=3), acquire(f"{queue}-l", "me")
    )
    [renewed] = await locks(
        wire,
        {
            **{"op": "renew", "name": f"{queue}-l", "owner": "me", "ttlSeconds": 30},
            "token": other["token"],
        },
    )
    guards = [semaphore["guard"], other["guard"]]
    more = {"op": "put", "ns": "n", "key": queue, "value": 1, "ttlSeconds": 60}
    verdict = await wire.transaction(ack, push(queue, 1, 2), kv=[*guards, more])
    # One ack and two items, and the second guard.
    assert (verdict["success"], verdict["reason"]) == (False, "kv_precondition")
    assert (verdict["failedIndex"], verdict["kvReason"]) == (3 + 1, "version")
    assert (verdict["version"], verdict["value"]["owner"]) == (renewed["token"], "me")
    assert await wire.take(queue) == []

    again = await wire.transaction(
        ack, push(queue, 1, 2), kv=[semaphore["guard"], renewed["guard"], more]
    )
    assert again["success"] is True


@pytest.mark.parametrize("then", ["released", "taken"])
async def test_a_guard_of_a_lost_permit_fails(wire: Wire, queue: str, then: str) -> None:
    """Step 1.12, 4.4-9: what is in the way is told, or that nothing is."""
    [granted] = await locks(wire, acquire(queue, "me"))
    await locks(wire, {"op": "release", "name": queue, "token": granted["token"]})
    taken = (await locks(wire, acquire(queue, "you"))) if then == "taken" else []
    verdict = await wire.transaction(push(queue, 1), kv=[granted["guard"]])
    assert (verdict["reason"], verdict["failedIndex"]) == ("kv_precondition", 1)
    if taken:
        assert (verdict["kvReason"], verdict["version"]) == ("version", taken[0]["token"])
        assert verdict["value"] == {"owner": "you"}
    else:
        assert (verdict["kvReason"], verdict["version"], verdict["value"]) == ("absent", 0, None)
    assert await wire.take(queue) == []


async def test_the_sdk_sends_a_guard_again_that_its_own_renew_overtook(
    wire: Wire, queue: str
) -> None:
    """Step 1.12, 6-7: a commit beside a renewal succeeds, with whatever token is the newest."""
    async with Queen(str(wire.http.base_url)) as client:
        lock = client.lock(queue, ttl_seconds=30, auto_renew=False)
        assert await lock.acquire()
        for number in range(20):
            # One for each: the SDK does not send a guard again for ever.
            renewing = asyncio.create_task(lock.renew())
            verdict = await (
                client.transaction().guard(lock).queue(queue).push([{"data": number}]).commit()
            )
            assert verdict["success"] is True
            assert await renewing
        assert not lock.lost.is_set()
    assert data(await wire.take(queue)) == list(range(20))


# Waiting, and lifetimes.


async def test_nobody_stands_in_line_for_a_lock(wire: Wire, queue: str) -> None:
    """Step 4.4-10: an acquire is answered at once and keeps no place; whoever asks next gets it."""
    [granted] = await locks(wire, acquire(queue, "holder"))
    for _ in range(3):
        [refused] = await locks(wire, acquire(queue, "patient"))
        assert (refused["acquired"], refused["reason"]) == (False, "held")
    await locks(wire, {"op": "release", "name": queue, "token": granted["token"]})
    [latecomer] = await locks(wire, acquire(queue, "latecomer"))
    assert latecomer["acquired"] is True
    [refused] = await locks(wire, acquire(queue, "patient"))
    assert refused["holders"] == [{"slot": 0, "owner": "latecomer"}]


async def test_a_lifetime_runs_from_the_brokers_instant_of_the_write(
    wire: Wire, queue: str
) -> None:
    """Step 4.4-11: to the microsecond, of the acquire and of each renew."""

    async def lifetime() -> float:
        seconds = await wire.sql.fetchval(
            "select extract(epoch from expires_at - updated_at) from queen.kv"
            " where namespace = 'queen-locks' and key = $1 || '#0'",
            queue,
        )
        return float(seconds)

    before = await wire.sql.fetchval("select queen.now()")
    [granted] = await locks(wire, acquire(queue, "me", ttlSeconds=30))
    assert await lifetime() == 30
    renew = {"op": "renew", "name": queue, "token": granted["token"], "ttlSeconds": 7}
    assert (await locks(wire, renew))[0]["renewed"] is True
    assert await lifetime() == 7
    after = await wire.sql.fetchval("select queen.now()")
    [looked] = await locks(wire, {"op": "get", "name": queue})
    [holder] = looked["holders"]
    assert before <= datetime.fromisoformat(holder["since"])
    assert datetime.fromisoformat(holder["renewedAt"]) <= after


async def test_closing_the_sdk_gives_its_locks_back(wire: Wire, queue: str) -> None:
    """Step 6-5."""
    async with Queen(str(wire.http.base_url)) as client:
        assert await client.lock(queue, ttl_seconds=600).acquire()
        assert await client.semaphore(f"{queue}-s", 2, ttl_seconds=600).acquire()
    assert [
        result["held"]
        for result in await locks(
            wire, {"op": "get", "name": queue}, {"op": "get", "name": f"{queue}-s"}
        )
    ] == [False, False]
