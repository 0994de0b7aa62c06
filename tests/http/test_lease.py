"""Lease extension over HTTP: data-plane 7."""

from datetime import UTC, datetime
from typing import Any

import pytest

from tests.support.wire import Wire

UNKNOWN = "019a44c3-0000-7111-8222-333344445555"


async def extend(wire: Wire, lease_id: str, body: bytes | None = None) -> dict[str, Any]:
    response = await wire.http.post(f"/api/v1/lease/{lease_id}/extend", content=body)
    assert response.status_code == 200
    answer: dict[str, Any] = response.json()
    return answer


def seconds_left(text: str) -> float:
    return (datetime.fromisoformat(text) - datetime.now(UTC)).total_seconds()


async def test_every_live_lease_of_the_id_is_extended(wire: Wire, queue: str) -> None:
    """data-plane 7-1: over all partitions, at least to now + seconds; 7-2 the answer."""
    await wire.configure(queue, leaseTime=10)
    for partition in "abc":
        await wire.push(queue, 1, partition=partition)
    messages = await wire.take(queue)
    answer = await extend(wire, messages[0]["leaseId"], b'{"seconds": 100}')
    expiry = answer["newExpiresAt"]
    assert answer == {
        "leaseId": messages[0]["leaseId"],
        "success": True,
        "renewed": 3,
        "newExpiresAt": expiry,
        "expiresAt": expiry,
        "lease_expires_at": expiry,
    }
    assert expiry.endswith("Z")
    assert 95 < seconds_left(expiry) <= 100
    for message in messages:
        left = (await wire.cursor(message))["lease_expires_at"] - datetime.now(UTC)
        assert 95 < left.total_seconds() <= 100


async def test_a_lease_never_gets_shorter(wire: Wire, queue: str) -> None:
    """data-plane 7-1."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue, leaseSeconds=500)
    answer = await extend(wire, message["leaseId"], b'{"seconds": 5}')
    assert answer["renewed"] == 1
    assert 490 < seconds_left(answer["expiresAt"]) <= 500


async def test_the_earliest_new_expiry_is_told(wire: Wire, queue: str) -> None:
    """data-plane 7-2."""
    for partition in "ab":
        await wire.push(queue, 1, partition=partition)
    messages = await wire.take(queue, leaseSeconds=10)
    await wire.sql.execute(
        "update queen.cursors set lease_expires_at = lease_expires_at + interval '500 seconds'"
        " where partition_id = $1",
        int(messages[0]["partitionId"]),
    )
    answer = await extend(wire, messages[0]["leaseId"], b'{"seconds": 100}')
    assert answer["renewed"] == 2
    assert 95 < seconds_left(answer["expiresAt"]) <= 100


@pytest.mark.parametrize("body", [None, b"", b"{}", b"not json", b'{"seconds": "9"}', b"[]"])
async def test_without_seconds_it_is_a_minute(wire: Wire, queue: str, body: bytes | None) -> None:
    """data-plane 7, 1-2: an empty body is what the SDK's renew() sends."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue, leaseSeconds=10)
    answer = await extend(wire, message["leaseId"], body)
    assert 55 < seconds_left(answer["expiresAt"]) <= 60


@pytest.mark.parametrize(
    ("seconds", "least", "most"), [("0", 0, 1), ("-5", 0, 1), ("9" * 30, 2**31 - 60, 2**31)]
)
async def test_seconds_out_of_range(
    wire: Wire, queue: str, seconds: str, least: float, most: float
) -> None:
    """data-plane 7: one at least; 1-5: huge numbers are no fault."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue, leaseSeconds=1)
    answer = await extend(wire, message["leaseId"], f'{{"seconds": {seconds}}}'.encode())
    assert answer["renewed"] == 1
    assert least <= seconds_left(answer["expiresAt"]) <= most


async def test_an_expired_lease_is_not_renewed(wire: Wire, queue: str) -> None:
    """data-plane 7-3: even if nobody took the partition; it looks like an unknown id."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    await wire.expire(message)
    for lease_id in (message["leaseId"], UNKNOWN, "no-uuid"):
        answer = await extend(wire, lease_id)
        assert answer == {
            "leaseId": lease_id,
            "success": False,
            "renewed": 0,
            "newExpiresAt": None,
            "expiresAt": None,
            "lease_expires_at": None,
        }


async def test_a_released_lease_is_not_renewed(wire: Wire, queue: str) -> None:
    """data-plane 7-4: `renewed` is 1 while it lives, and 0 after the ack."""
    await wire.push(queue, 1)
    messages = await wire.take(queue)
    assert (await extend(wire, messages[0]["leaseId"]))["renewed"] == 1
    await wire.ack(messages)
    answer = await extend(wire, messages[0]["leaseId"])
    assert (answer["success"], answer["renewed"], answer["newExpiresAt"]) == (False, 0, None)


async def test_an_extended_lease_keeps_others_away(wire: Wire, queue: str) -> None:
    """data-plane 7-1: the partition is not claimable when the old expiry passes."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue, leaseSeconds=1)
    await extend(wire, message["leaseId"])
    assert await wire.pop(queue, wait=True, timeout=1500) is None
    assert (await wire.ack(message))[0]["success"] is True
