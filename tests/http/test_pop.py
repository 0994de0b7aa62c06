"""Pop over HTTP: data-plane 4, 5 and 10."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
from queen.http.pop_frames import decode_pop_frames, is_pop_frames

from tests.support.wire import QUEUE_MODE, Wire, data


def iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def now() -> float:
    return asyncio.get_running_loop().time()


# The answer.


async def test_the_answer_has_the_fields_of_the_page(wire: Wire, queue: str) -> None:
    """data-plane 4.2."""
    [pushed] = await wire.push(queue, {"to": "a"}, partition="user-7", ids=["signup-7"])
    answer = await wire.pop(queue, consumerGroup="senders", subscriptionMode="all")
    assert answer is not None
    [message] = answer["messages"]
    assert uuid.UUID(answer["leaseId"]).version == 7
    stamp = await wire.sql.fetchval(
        "select created_at from queen.messages where id = $1", pushed["message_id"]
    )
    assert message["createdAt"] == f"{stamp:%Y-%m-%dT%H:%M:%S}.{stamp.microsecond // 1000:03d}Z"
    assert answer == {
        "success": True,
        "queue": queue,
        "partition": "user-7",
        "partitionId": message["partitionId"],
        "leaseId": message["leaseId"],
        "consumerGroup": "senders",
        "messages": [
            {
                "id": pushed["message_id"],
                "transactionId": "signup-7",
                "traceId": None,
                "data": {"to": "a"},
                "producerSub": None,
                "createdAt": message["createdAt"],
                "partitionId": message["partitionId"],
                "partition": "user-7",
                "leaseId": answer["leaseId"],
                "consumerGroup": "senders",
                "deliveryAttempt": 1,
                "offset": 0,
            }
        ],
        "partitionsClaimed": 1,
    }
    assert message["partitionId"].isdigit()


async def test_an_empty_pop_is_a_204_without_a_body(wire: Wire, queue: str) -> None:
    """data-plane 1-1, 4.2: the autopilot echo does not turn it into a 200."""
    response = await wire.http.get(f"/api/v1/pop/queue/{queue}?autopilot=true")
    assert response.status_code == 204
    assert response.content == b""
    assert "content-length" not in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/api/v1/pop",
        "/api/v1/pop?namespace=&task=",
        "/api/v1/pop/queue/q?conflation=true",
        "/api/v1/pop/queue/q?conflation=true&consumerGroup=",
        "/api/v1/pop/queue/q?conflation=true&consumerGroup=g&autoAck=true",
        "/api/v1/pop/queue/q?conflation=true&consumerGroup=g&commitOnDelivery=true",
    ],
)
async def test_contradicting_parameters_have_a_body_of_their_own(wire: Wire, path: str) -> None:
    """data-plane 1-5, 4.2: the 400 cases."""
    answer = await wire.get(path, 400)
    assert answer.pop("error")
    assert answer == {"success": False, "messages": []}


async def test_both_spellings_of_commit_on_delivery_are_named(wire: Wire) -> None:
    """data-plane 4.2."""
    answer = await wire.get("/api/v1/pop/queue/q?conflation=true&consumerGroup=g&autoAck=true", 400)
    assert "commitOnDelivery" in answer["error"]
    assert "autoAck" in answer["error"]


# Parameters.


async def test_batch_is_the_budget_of_the_whole_call(wire: Wire, queue: str) -> None:
    """data-plane 4.1: all claims together; zero and less act as 1; 200 by default."""
    for partition in "abc":
        await wire.push(queue, *range(100), partition=partition)
    answer = await wire.pop(queue, batch=150, partitions=3)
    assert answer is not None
    assert len(answer["messages"]) == 150
    for batch, expected in ((0, 1), (-5, 1), (10**12, 100), (None, 100)):
        group = f"batch-{batch}"
        taken = await wire.pop(queue, batch=batch, consumerGroup=group, subscriptionMode="all")
        assert len(data(taken)) == expected


async def test_partitions_is_clamped_to_1_and_64(wire: Wire, queue: str) -> None:
    """data-plane 4.1, question 7: 1 by default, 0 means 1."""
    items = [{"queue": queue, "partition": str(n), "payload": n} for n in range(70)]
    await wire.post("/api/v1/push", {"items": items}, 201)
    for partitions, expected in ((None, 1), (0, 1), (3, 3), (1000, 64)):
        answer = await wire.pop(
            queue,
            batch=1000,
            partitions=partitions,
            consumerGroup=f"partitions-{partitions}",
            subscriptionMode="all",
        )
        assert answer is not None
        assert answer["partitionsClaimed"] == expected


async def test_lease_seconds_replaces_the_queues_lease_time(wire: Wire, queue: str) -> None:
    """data-plane 4.1: zero and less are as absent."""
    await wire.configure(queue, leaseTime=500)
    await wire.push(queue, 1)
    for seconds, expected in ((7, 7), (0, 500), (-3, 500), (None, 500)):
        [message] = await wire.take(queue, consumerGroup=f"g{seconds}", leaseSeconds=seconds)
        cursor = await wire.cursor(message)
        left = cursor["lease_expires_at"] - datetime.now(UTC)
        assert expected - 5 < left.total_seconds() <= expected


@pytest.mark.parametrize("lease_time", [0, -10])
async def test_a_lease_lasts_a_second_at_least(wire: Wire, queue: str, lease_time: int) -> None:
    """data-plane 4.1, 9.2: a leaseTime below 1 acts as 1."""
    await wire.configure(queue, leaseTime=lease_time)
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    left = (await wire.cursor(message))["lease_expires_at"] - datetime.now(UTC)
    assert 0 < left.total_seconds() <= 1


@pytest.mark.parametrize("name", ["autoAck", "commitOnDelivery"])
async def test_either_name_commits_on_delivery(wire: Wire, queue: str, name: str) -> None:
    """data-plane 4.1; both may be sent."""
    await wire.push(queue, 1, 2)
    answer = await wire.pop(
        queue, **dict[str, Any]({"autoAck": False, "commitOnDelivery": False, name: True})
    )
    assert answer is not None
    assert answer["leaseId"] == ""
    assert await wire.pop(queue) is None


@pytest.mark.parametrize("mode", ["new", " NEW ", "new-only", "new_only", "NewOnly"])
async def test_modes_that_mean_new(wire: Wire, queue: str, mode: str) -> None:
    """data-plane 4.1: trimmed, case-folded."""
    await wire.push(queue, "old")
    params = {"consumerGroup": "g", "subscriptionMode": mode}
    assert await wire.pop(queue, **params) is None
    await wire.push(queue, "new")
    assert data(await wire.pop(queue, **params)) == ["new"]


@pytest.mark.parametrize("mode", ["all", "from_beginning", "whatever"])
async def test_any_other_mode_means_all(wire: Wire, queue: str, mode: str) -> None:
    """data-plane 4.1."""
    await wire.push(queue, "old")
    assert data(await wire.pop(queue, consumerGroup="g", subscriptionMode=mode)) == ["old"]


async def test_the_default_mode_is_new(wire: Wire, queue: str) -> None:
    """data-plane 4.1, question 1."""
    await wire.push(queue, "old")
    assert await wire.pop(queue, consumerGroup="g") is None


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("now", []),
        ("NOW", []),
        ("2020-01-01T00:00:00Z", ["old"]),
        ("2020-01-01T00:00:00.123456Z", ["old"]),
        ("2020-01-01T00:00:00", ["old"]),
        ("tomorrow", []),
    ],
)
async def test_subscription_from(wire: Wire, queue: str, since: str, expected: list[str]) -> None:
    """data-plane 4.1: `now`, an ISO time, and what cannot be read, which is ignored."""
    await wire.push(queue, "old")
    assert data(await wire.pop(queue, consumerGroup="g", subscriptionFrom=since)) == expected


async def test_names_are_decoded_after_the_path_is_split(wire: Wire, queue: str) -> None:
    """data-plane 0.1: an escaped slash stays inside a name."""
    names = (f"{queue}/a b?c#d", "p/ä%2F+&partition/x")
    await wire.push(names[0], 1, partition=names[1])
    answer = await wire.pop(*names)
    assert answer is not None
    assert (answer["queue"], answer["partition"]) == names


async def test_a_group_named_by_an_empty_string_is_queue_mode(wire: Wire, queue: str) -> None:
    """data-plane question 12."""
    await wire.push(queue, 1)
    answer = await wire.pop(queue, consumerGroup="")
    assert answer is not None
    assert answer["consumerGroup"] == QUEUE_MODE


# Which partitions and messages.


async def test_a_pop_creates_its_queue_but_no_partition(wire: Wire, queue: str) -> None:
    """data-plane 4.3-1."""
    partitions = await wire.count("partitions")
    assert await wire.pop(queue, consumerGroup="g") is None
    assert await wire.count("partitions") == partitions
    row = await wire.sql.fetchrow("select * from queen.queues where name = $1", queue)
    assert row["lease_time_seconds"] == 60


async def test_a_partition_pop_creates_nothing(wire: Wire, queue: str) -> None:
    """data-plane 4.3-2: neither queue nor partition."""
    before = await wire.fingerprint()
    assert await wire.pop(queue, "p") is None
    await wire.configure(queue)
    assert await wire.pop(queue, "p") is None
    after = await wire.fingerprint()
    assert after.pop("queues") != before.pop("queues")
    assert after == before


async def test_a_partition_pop_waits_for_its_partition_to_be_born(wire: Wire, queue: str) -> None:
    """data-plane 4.3-2."""
    waiting = asyncio.create_task(wire.pop(queue, "p", wait=True, timeout=10_000))
    await asyncio.sleep(0.2)
    await wire.push(queue, 1, partition="other")
    await wire.push(queue, 2, partition="p")
    answer = await waiting
    assert data(answer) == [2]


async def test_discovery_serves_every_queue_with_the_labels(wire: Wire, queue: str) -> None:
    """data-plane 4.3-3: both must match where both are given, in name order, one budget."""
    for name, namespace, task in (("c", "n", "t"), ("a", "n", "t"), ("b", "n", "u")):
        await wire.configure(f"{queue}-{name}", namespace=f"{queue}-{namespace}", task=task)
        await wire.push(f"{queue}-{name}", *([name] * 3))
    labels: dict[str, Any] = {
        "namespace": f"{queue}-n",
        "partitions": 10,
        "subscriptionMode": "all",
    }
    answer = await wire.pop(None, batch=4, consumerGroup="g", **labels)
    assert answer is not None
    assert answer["queue"] == ""
    assert data(answer) == ["a", "a", "a", "b"]
    assert answer["partitionsClaimed"] == 2
    answer = await wire.pop(None, batch=100, consumerGroup="h", task="t", **labels)
    assert data(answer) == ["a"] * 3 + ["c"] * 3
    assert await wire.pop(None, namespace=f"{queue}-nowhere") is None


async def test_discovery_never_waits_and_creates_nothing(wire: Wire, queue: str) -> None:
    """data-plane 4.1, 4.3-3."""
    before = await wire.fingerprint()
    started = now()
    assert await wire.pop(None, namespace=queue, wait=True, timeout=5_000) is None
    assert now() - started < 2
    assert await wire.fingerprint() == before


async def test_discovery_leases_for_a_minute(wire: Wire, queue: str) -> None:
    """data-plane 4.1: 60 s by default, not the queue's leaseTime."""
    await wire.configure(queue, namespace=queue, leaseTime=500)
    await wire.push(queue, 1)
    answer = await wire.pop(None, namespace=queue)
    assert answer is not None
    left = (await wire.cursor(answer["messages"][0]))["lease_expires_at"] - datetime.now(UTC)
    assert 50 < left.total_seconds() <= 60


async def test_what_is_leased_is_not_claimable(wire: Wire, queue: str) -> None:
    """data-plane 4.3-4, 4.3-7: per partition and group; groups never exclude each other."""
    await wire.push(queue, 1, 2)
    [first] = await wire.take(queue, batch=1, consumerGroup="g")
    assert first["data"] == 1
    await wire.push(queue, 3)
    assert await wire.take(queue, consumerGroup="g") == []
    assert data(await wire.take(queue, consumerGroup="h")) == [1, 2, 3]
    await wire.expire(first)
    assert data(await wire.take(queue, consumerGroup="g")) == [1, 2, 3]


async def test_a_claim_crosses_appends_in_the_order_of_offsets(wire: Wire, queue: str) -> None:
    """data-plane 4.3-5, 12-2."""
    for n in range(20):
        await wire.push(queue, n)
    messages = await wire.take(queue, batch=15)
    assert data(messages) == list(range(15))
    await wire.ack(messages)
    assert data(await wire.take(queue)) == [15, 16, 17, 18, 19]


async def test_a_hot_partition_starves_nobody(wire: Wire, queue: str) -> None:
    """data-plane 4.3-6: a fair rotation for callers that take one partition at a time."""
    await wire.push(queue, *range(100), partition="hot")
    for n in range(5):
        await wire.push(queue, n, partition=f"cold-{n}")
    seen = []
    for _ in range(6):
        messages = await wire.take(queue, batch=1, partitions=1)
        seen.append(messages[0]["partition"])
        await wire.ack(messages)
    assert set(seen) == {"hot", *(f"cold-{n}" for n in range(5))}


async def test_concurrent_pops_of_a_group_share_nothing(wire: Wire, queue: str) -> None:
    """data-plane 4.3-7."""
    items = [{"queue": queue, "partition": str(n % 20), "payload": n} for n in range(200)]
    await wire.post("/api/v1/push", {"items": items}, 201)
    answers = await asyncio.gather(
        *(wire.pop(queue, batch=20, partitions=2, autopilot=False) for _ in range(15))
    )
    claimed = [
        message["partition"]
        for answer in answers
        if answer is not None
        for message in {each["partition"]: each for each in answer["messages"]}.values()
    ]
    assert len(claimed) == len(set(claimed)) == 20


async def test_a_leased_claim_moves_no_cursor(wire: Wire, queue: str) -> None:
    """data-plane 4.3-8."""
    await wire.push(queue, 1, 2, 3)
    messages = await wire.take(queue, batch=2)
    cursor = await wire.cursor(messages[0])
    assert cursor["committed_offset"] == -1
    assert cursor["batch_end_offset"] == 1
    assert str(cursor["lease_id"]) == messages[0]["leaseId"]


async def test_commit_on_delivery_moves_it_at_once(wire: Wire, queue: str) -> None:
    """data-plane 4.3-9, 12-3: no lease, attempt 1, immediately claimable for what follows."""
    await wire.push(queue, 1, 2, 3)
    messages = await wire.take(queue, batch=2, autoAck=True)
    assert data(messages) == [1, 2]
    assert {message["leaseId"] for message in messages} == {""}
    assert {message["deliveryAttempt"] for message in messages} == {1}
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["lease_id"]) == (1, None)
    assert data(await wire.take(queue, autoAck=True)) == [3]


async def test_a_partition_emptied_by_retention_is_passed_over(wire: Wire, queue: str) -> None:
    """data-plane 4.3-10: the cursor goes to the tail; a pop goes on behind the removed range."""
    await wire.configure(queue, retentionEnabled=True, retentionSeconds=1)
    await wire.push(queue, "old")
    [message] = await wire.take(queue)
    await wire.expire(message)
    await wire.age(queue, 100)
    await wire.removed(queue)
    assert await wire.take(queue) == []
    await wire.push(queue, "new")
    [message] = await wire.take(queue)
    assert (message["data"], message["offset"]) == ("new", 1)
    await wire.configure(queue, retentionEnabled=False)


async def test_a_call_has_one_lease(wire: Wire, queue: str) -> None:
    """data-plane 4.3-11: a UUIDv7 shared by all its claims."""
    for partition in "abc":
        await wire.push(queue, 1, partition=partition)
    answer = await wire.pop(queue, partitions=3)
    assert answer is not None
    assert {message["leaseId"] for message in answer["messages"]} == {answer["leaseId"]}
    assert uuid.UUID(answer["leaseId"]).version == 7


async def test_a_client_that_hangs_up_gets_no_lease(wire: Wire, queue: str) -> None:
    """data-plane 4.3-12: nor does it spend a delivery attempt."""
    await wire.configure(queue)
    async with httpx.AsyncClient(base_url=wire.http.base_url) as impatient:
        with pytest.raises(httpx.ReadTimeout):
            await impatient.get(f"/api/v1/pop/queue/{queue}?wait=true&timeout=20000", timeout=0.4)
    await asyncio.sleep(0.1)
    await wire.push(queue, 1)
    [message] = await wire.take(queue, wait=True, timeout=3_000)
    assert message["deliveryAttempt"] == 1


# Waiting.


async def test_a_wait_ends_in_a_204_before_its_timeout(wire: Wire, queue: str) -> None:
    """data-plane 4.4."""
    started = now()
    assert await wire.pop(queue, wait=True, timeout=700) is None
    assert 0.4 < now() - started < 0.8


async def test_without_wait_a_pop_answers_at_once(wire: Wire, queue: str) -> None:
    """data-plane 4.1."""
    started = now()
    assert await wire.pop(queue, timeout=5_000) is None
    assert now() - started < 1


async def test_a_wait_ends_when_a_nack_frees_the_partition(wire: Wire, queue: str) -> None:
    """data-plane 4.4, 6.4-13."""
    await wire.push(queue, 1)
    messages = await wire.take(queue)
    waiting = asyncio.create_task(wire.pop(queue, wait=True, timeout=10_000))
    await asyncio.sleep(0.2)
    started = now()
    await wire.ack(messages, "retry")
    assert data(await waiting) == [1]
    assert now() - started < 0.45


async def test_a_wait_ends_when_a_lease_runs_out(wire: Wire, queue: str) -> None:
    """data-plane 4.4."""
    await wire.push(queue, 1)
    await wire.take(queue, leaseSeconds=1)
    started = now()
    answer = await wire.pop(queue, wait=True, timeout=10_000)
    assert answer is not None
    assert answer["messages"][0]["deliveryAttempt"] == 2
    assert 0.5 < now() - started < 2.5


async def test_a_wait_ends_when_a_delay_does(wire: Wire, queue: str) -> None:
    """data-plane 4.4, 10.2."""
    await wire.configure(queue, delayedProcessing=1)
    started = now()
    await wire.push(queue, 1)
    assert await wire.pop(queue) is None
    assert data(await wire.pop(queue, wait=True, timeout=10_000)) == [1]
    assert 0.9 < now() - started < 2.5


async def test_waiters_are_served_one_per_partition(wire: Wire, queue: str) -> None:
    """data-plane 4.4: oldest first."""
    await wire.configure(queue)
    order: list[int] = []

    async def wait(number: int) -> None:
        answer = await wire.pop(queue, wait=True, timeout=20_000, batch=1)
        assert answer is not None
        order.append(number)

    waiting = []
    for number in range(3):
        waiting.append(asyncio.create_task(wait(number)))
        await asyncio.sleep(0.1)
    for partition in "abc":
        await wire.push(queue, partition, partition=partition)
        await asyncio.sleep(0.3)
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]


async def test_a_group_is_registered_before_it_waits(wire: Wire, queue: str) -> None:
    """data-plane 4.4: what is pushed during the wait counts as new."""
    waiting = asyncio.create_task(
        wire.pop(queue, wait=True, timeout=10_000, consumerGroup="g", subscriptionMode="new")
    )
    await asyncio.sleep(0.3)
    await wire.push(queue, "new")
    assert data(await waiting) == ["new"]


# Delivery attempts.


async def test_redelivery_counts_up(wire: Wire, queue: str) -> None:
    """data-plane 4.5: lease expiry, `retry`, `failed` at the head of the batch."""
    await wire.push(queue, 1, 2)
    messages = await wire.take(queue)
    assert {message["deliveryAttempt"] for message in messages} == {1}
    await wire.expire(messages[0])
    messages = await wire.take(queue)
    assert {message["deliveryAttempt"] for message in messages} == {2}
    await wire.ack(messages[0], "retry")
    messages = await wire.take(queue)
    assert {message["deliveryAttempt"] for message in messages} == {3}
    await wire.ack(messages[0], "failed")
    [first, _] = await wire.take(queue)
    assert first["deliveryAttempt"] == 4


async def test_the_rest_of_a_batch_counts_up_too(wire: Wire, queue: str) -> None:
    """data-plane 4.5: a partial ack moves the marker."""
    await wire.push(queue, 1, 2, 3)
    messages = await wire.take(queue)
    await wire.ack(messages[0])
    await wire.expire(messages[0])
    assert [m["deliveryAttempt"] for m in await wire.take(queue)] == [2, 2]


async def test_after_a_combined_ack_the_attempt_is_one_higher(wire: Wire, queue: str) -> None:
    """data-plane 4.5, question 9."""
    await wire.push(queue, 1, 2, 3)
    messages = await wire.take(queue)
    await wire.ack(messages, statuses=["completed", "failed", "completed"])
    assert [m["deliveryAttempt"] for m in await wire.take(queue)] == [2, 2]


async def test_a_settled_batch_clears_the_count(wire: Wire, queue: str) -> None:
    """data-plane 4.5."""
    await wire.push(queue, 1, 2)
    messages = await wire.take(queue, batch=1)
    await wire.expire(messages[0])
    messages = await wire.take(queue, batch=1)
    await wire.ack(messages)
    [message] = await wire.take(queue)
    assert (message["data"], message["deliveryAttempt"]) == (2, 1)


# Autopilot.


async def test_autopilot_fills_only_the_absent_knobs(wire: Wire, queue: str) -> None:
    """data-plane 4.6-1, 4.6-4: the echo has the values used; both pinned, no echo."""
    items = [{"queue": queue, "partition": str(n), "payload": n} for n in range(5)]
    await wire.post("/api/v1/push", {"items": items}, 201)

    async def echo(group: str | None, **knobs: Any) -> Any:
        answer = await wire.pop(
            queue, autopilot=True, consumerGroup=group, subscriptionMode="all", **knobs
        )
        assert answer is not None
        return answer.get("autopilot"), len(answer["messages"])

    assert await echo("a") == ({"partitions": 5, "batch": 100}, 5)
    assert await echo("b", batch=50) == ({"partitions": 5, "batch": 50}, 5)
    assert await echo("c", partitions=3) == ({"partitions": 3, "batch": 100}, 3)
    assert await echo("d", batch=4, partitions=2) == (None, 2)
    assert await echo(None) == ({"partitions": 5, "batch": 100}, 5)


async def test_autopilot_shares_what_is_ready_among_the_waiting(wire: Wire, queue: str) -> None:
    """data-plane 4.6-2: ceil(claimable / waiting), 1 to 64."""
    await wire.configure(queue)
    waiting = [
        asyncio.create_task(wire.pop(queue, autopilot=True, wait=True, timeout=10_000))
        for _ in range(4)
    ]
    await asyncio.sleep(0.3)
    items = [{"queue": queue, "partition": str(n), "payload": n} for n in range(8)]
    await wire.post("/api/v1/push", {"items": items}, 201)
    answers = await asyncio.gather(*waiting)
    assert sorted(answer["partitionsClaimed"] for answer in answers if answer) == [2, 2, 2, 2]


async def test_autopilot_has_no_effect_elsewhere(wire: Wire, queue: str) -> None:
    """data-plane 4.6-1: not on the partition route, nor on discovery, nor for conflation."""
    await wire.configure(queue, namespace=queue)
    await wire.push(queue, 1)
    group: dict[str, Any] = {"subscriptionMode": "all", "autopilot": True}
    for answer in (
        await wire.pop(queue, "Default", consumerGroup="a", **group),
        await wire.pop(None, namespace=queue, consumerGroup="b", **group),
        await wire.pop(queue, consumerGroup="c", conflation=True, **group),
    ):
        assert answer is not None
        assert "autopilot" not in answer


async def test_without_autopilot_absent_knobs_have_the_defaults(wire: Wire, queue: str) -> None:
    """data-plane 4.6-5: 200 messages of one partition."""
    await wire.push(queue, *range(250))
    await wire.push(queue, *range(250), partition="other")
    answer = await wire.pop(queue)
    assert answer is not None
    assert (len(answer["messages"]), answer["partitionsClaimed"]) == (200, 1)


async def test_autopilot_takes_a_hundred_before_it_knows_the_pace(wire: Wire, queue: str) -> None:
    """data-plane 4.6-3."""
    await wire.push(queue, *range(250))
    answer = await wire.pop(queue, autopilot=True)
    assert answer is not None
    assert (len(answer["messages"]), answer["autopilot"]["batch"]) == (100, 100)


async def test_the_batch_follows_the_pace_of_the_group(wire: Wire, queue: str) -> None:
    """data-plane 4.6-3: who acks a thousand within seconds gets more than the least, for itself."""
    await wire.push(queue, *range(3000))
    for group in ("fast", "other"):
        answer = await wire.pop(queue, consumerGroup=group, subscriptionMode="all", batch=1000)
        assert answer is not None
        if group == "fast":
            await wire.ack(answer["messages"], group=group)
    await wire.push(queue, 1, partition="p")
    fast = await wire.pop(queue, consumerGroup="fast", autopilot=True, partitions=1)
    other = await wire.pop(queue, consumerGroup="other", autopilot=True, partitions=1)
    assert fast is not None
    assert other is not None
    batch = fast["autopilot"]["batch"]
    assert 100 < batch <= 1000
    assert len(fast["messages"]) in (1, batch)
    assert other["autopilot"]["batch"] == 100


# Conflation.

CONFLATED: dict[str, Any] = {"conflation": True, "consumerGroup": "g", "subscriptionMode": "all"}


async def test_a_conflating_claim_delivers_only_the_newest(wire: Wire, queue: str) -> None:
    """data-plane 4.7-1, 4.7-3: the lease spans what it skips; a clean ack settles it."""
    await wire.push(queue, 1, 2, 3)
    answer = await wire.pop(queue, **CONFLATED)
    assert answer is not None
    assert answer["conflation"] is True
    assert data(answer) == [3]
    await wire.push(queue, 4)
    empty = await wire.pop(queue, **CONFLATED)
    assert (data(empty), empty and empty["conflation"]) == ([], True)
    await wire.ack(answer["messages"], group="g")
    assert data(await wire.pop(queue, **CONFLATED)) == [4]


async def test_a_failed_conflated_message_gives_way_to_the_newest(wire: Wire, queue: str) -> None:
    """data-plane 4.7-3: and when the budget is spent it is filed and the span retired."""
    await wire.configure(queue, retryLimit=1)
    await wire.push(queue, 1, 2)
    answer = await wire.pop(queue, **CONFLATED)
    assert answer is not None
    await wire.ack(answer["messages"], "failed", group="g")
    await wire.push(queue, 3)
    answer = await wire.pop(queue, **CONFLATED)
    assert data(answer) == [3]
    assert answer is not None
    await wire.ack(answer["messages"], "failed", group="g", error="bad")
    assert [letter["data"] for letter in await wire.dead_letters(queue)] == [3]
    assert data(await wire.pop(queue, **CONFLATED)) == []


async def test_a_conflating_claim_costs_one_of_the_batch(wire: Wire, queue: str) -> None:
    """data-plane 4.7-2: partitions defaults to batch."""
    for partition in "abcde":
        await wire.push(queue, 1, 2, partition=partition)
    answer = await wire.pop(queue, batch=3, **CONFLATED)
    assert answer is not None
    assert (data(answer), answer["partitionsClaimed"]) == ([2, 2, 2], 3)


async def test_the_stored_policy_wins_and_a_conflict_is_told(wire: Wire, queue: str) -> None:
    """data-plane 4.7, 4.7-4: on every answer, empty ones included."""
    await wire.push(queue, 1, 2)
    first = await wire.pop(queue, **CONFLATED)
    assert first is not None
    assert (first["conflation"], "conflationConflict" in first) == (True, False)
    for asked, conflict in ((True, False), (False, True), (None, False)):
        answer = await wire.pop(queue, consumerGroup="g", conflation=asked)
        assert answer is not None, asked
        assert answer["conflation"] is True
        assert answer.get("conflationConflict", False) is conflict
        assert (answer["messages"], answer["partitionsClaimed"], answer["leaseId"]) == ([], 0, "")

    assert await wire.pop(queue, consumerGroup="plain", subscriptionMode="new") is None
    answer = await wire.pop(queue, consumerGroup="plain", conflation=True)
    assert answer is not None
    assert answer["conflationConflict"] is True
    assert "conflation" not in answer
    assert await wire.pop(queue, consumerGroup="plain", conflation=False) is None


async def test_an_empty_conflating_pop_is_a_200(wire: Wire, queue: str) -> None:
    """data-plane 4.7-5."""
    response = await wire.http.get(
        f"/api/v1/pop/queue/{queue}?conflation=true&consumerGroup=g&wait=true&timeout=300"
    )
    assert response.status_code == 200
    assert response.json() == {
        "success": True,
        "queue": queue,
        "partition": "",
        "partitionId": "",
        "leaseId": "",
        "consumerGroup": "g",
        "messages": [],
        "partitionsClaimed": 0,
        "conflation": True,
    }


async def test_queue_mode_never_conflates(wire: Wire, queue: str) -> None:
    """data-plane 4.7-6."""
    await wire.push(queue, 1, 2)
    answer = await wire.pop(queue, consumerGroup=QUEUE_MODE, conflation=True)
    assert answer is not None
    assert data(answer) == [1, 2]
    assert "conflation" not in answer


async def test_conflation_respects_the_delay(wire: Wire, queue: str) -> None:
    """data-plane 4.7-1: newest not delayed."""
    await wire.configure(queue, delayedProcessing=100)
    await wire.push(queue, 1, 2)
    await wire.age(queue, 200)
    await wire.push(queue, 3)
    assert data(await wire.pop(queue, **CONFLATED)) == [2]


# Groups and starting points.


async def test_the_first_pop_registers_the_group(wire: Wire, queue: str) -> None:
    """data-plane 4.8-1: a time beats `now`, which beats the mode; later pops change nothing."""
    await wire.push(queue, "old")
    since = iso(datetime.now(UTC) - timedelta(hours=1))
    asked = {"consumerGroup": "g", "subscriptionMode": "new"}
    answer = await wire.pop(queue, "none", **asked)
    assert answer is None
    assert data(await wire.pop(queue, **asked, subscriptionFrom=since)) == ["old"]
    assert await wire.pop(queue, consumerGroup="h", subscriptionMode="new") is None
    assert await wire.pop(queue, consumerGroup="h", subscriptionMode="all") is None
    await wire.push(queue, "new")
    assert data(await wire.take(queue, consumerGroup="h")) == ["new"]


async def test_a_partition_pop_does_not_register(wire: Wire, queue: str) -> None:
    """data-plane 4.8-2: it seeds only that partition's cursor, from its own intent."""
    for partition in "abc":
        await wire.push(queue, partition, partition=partition)
    assert await wire.pop(queue, "a", consumerGroup="g", subscriptionMode="new") is None
    await wire.push(queue, "a2", partition="a")
    assert data(await wire.pop(queue, "a", consumerGroup="g", subscriptionMode="new")) == ["a2"]
    assert data(await wire.pop(queue, "b", consumerGroup="g", subscriptionMode="all")) == ["b"]
    taken = await wire.take(queue, consumerGroup="g", subscriptionMode="all")
    assert data(taken) == ["c"]


async def test_a_new_partition_is_read_whole_by_who_waited_for_it(wire: Wire, queue: str) -> None:
    """data-plane 4.3-2, 4.8-2: its first message comes after the pop, so it is new to it."""
    params = {"consumerGroup": "g", "subscriptionMode": "new"}
    for known in (False, True):
        partition = str(known)
        waiting = asyncio.create_task(
            wire.pop(queue, partition, wait=True, timeout=5_000, **params)
        )
        await asyncio.sleep(0.2)
        await wire.push(queue, partition, partition=partition)
        answer = await waiting
        assert data(answer) == [partition]
        assert answer is not None
        await wire.ack(answer["messages"], group="g")


async def test_a_wait_on_a_partition_gets_what_is_new(wire: Wire, queue: str) -> None:
    """data-plane 4.8-2: a partition with a past, and a group that starts now."""
    await wire.push(queue, "old")
    params: dict[str, Any] = {
        "consumerGroup": "g",
        "subscriptionMode": "new",
        "wait": True,
        "timeout": 5_000,
    }
    waiting = asyncio.create_task(wire.pop(queue, "Default", **params))
    await asyncio.sleep(0.3)
    await wire.push(queue, "new")
    assert data(await waiting) == ["new"]


async def test_a_conflating_partition_pop_registers(wire: Wire, queue: str) -> None:
    """data-plane 4.8-2."""
    await wire.push(queue, 1, 2, partition="a")
    answer = await wire.pop(queue, "a", **CONFLATED)
    assert data(answer) == [2]
    answer = await wire.pop(queue, consumerGroup="g", conflation=False)
    assert answer is not None
    assert answer["conflation"] is True
    assert answer["conflationConflict"] is True


async def test_queue_mode_starts_at_the_oldest(wire: Wire, queue: str) -> None:
    """data-plane 4.8-3: whatever the parameters say."""
    await wire.push(queue, "old")
    answer = await wire.pop(queue, subscriptionMode="new", subscriptionFrom="now")
    assert data(answer) == ["old"]


async def test_a_later_partition_is_read_from_its_first_message(wire: Wire, queue: str) -> None:
    """data-plane 4.8-4: seeding goes by append time, not by the tail at registration."""
    await wire.push(queue, "old", partition="a")
    assert await wire.pop(queue, consumerGroup="g", subscriptionMode="new") is None
    await wire.push(queue, "b1", partition="b")
    await wire.push(queue, "b2", partition="b")
    await wire.push(queue, "a2", partition="a")
    assert sorted(data(await wire.take(queue, consumerGroup="g"))) == ["a2", "b1", "b2"]


async def test_a_subscription_from_a_time_begins_with_its_append(wire: Wire, queue: str) -> None:
    """data-plane 4.8-4: just before the first append at or after the time."""
    await wire.push(queue, 1)
    await wire.age(queue, 100)
    between = iso(datetime.now(UTC) - timedelta(seconds=50))
    await wire.push(queue, 2, 3)
    answer = await wire.pop(queue, consumerGroup="g", subscriptionFrom=between)
    assert data(answer) == [2, 3]


async def test_a_subscription_in_the_future_waits_for_its_time(wire: Wire, queue: str) -> None:
    """data-plane 4.8-5: re-evaluated at each claim until it passes."""
    await wire.push(queue, "before")
    begin = datetime.now(UTC) + timedelta(seconds=1.2)
    params = {"consumerGroup": "g", "subscriptionFrom": iso(begin)}
    assert await wire.pop(queue, **params) is None
    await wire.push(queue, "still before")
    assert await wire.pop(queue, **params) is None
    await asyncio.sleep(1.5)
    await wire.push(queue, "after")
    assert data(await wire.pop(queue, **params)) == ["after"]


async def test_a_cursor_is_never_seeded_again(wire: Wire, queue: str) -> None:
    """data-plane 4.8-6."""
    await wire.push(queue, 1, 2)
    messages = await wire.take(queue, batch=1, consumerGroup="g")
    await wire.ack(messages, group="g")
    answer = await wire.pop(queue, consumerGroup="g", subscriptionMode="new")
    assert data(answer) == [2]


async def test_a_group_without_a_cursor_cannot_ack(wire: Wire, queue: str) -> None:
    """data-plane 4.8-7, 6.4-2: no cursor before something was delivered."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    [result] = await wire.ack({**message, "leaseId": ""}, group="never")
    assert result["success"] is False


# Framed answers.


async def frames_of(wire: Wire, queue: str, **params: str) -> httpx.Response:
    query = {"frames": "true", **params}
    return await wire.http.get(f"/api/v1/pop/queue/{queue}", params=query)


async def test_a_framed_answer_says_what_the_json_one_does(wire: Wire, queue: str) -> None:
    """data-plane 5."""
    trace_id = str(uuid.uuid4())
    items = [
        {"queue": queue, "payload": {"n": n}, "partition": p, "traceId": trace_id if n else None}
        for n in range(2)
        for p in ("a", "b")
    ]
    await wire.post("/api/v1/push", {"items": items}, 201)
    await wire.push(queue, None, partition="a")
    query: dict[str, Any] = {"partitions": "2", "subscriptionMode": "all", "autopilot": "true"}
    response = await frames_of(wire, queue, consumerGroup="framed", **query)
    assert response.headers["content-type"] == "application/x-queen-pop"
    assert is_pop_frames(response.content)
    framed = decode_pop_frames(response.content)
    plain = await wire.get(f"/api/v1/pop/queue/{queue}", consumerGroup="json", **query)
    for answer in (framed, plain):
        lease = answer.pop("leaseId")
        group = answer.pop("consumerGroup")
        for message in answer["messages"]:
            assert (message.pop("leaseId"), message.pop("consumerGroup")) == (lease, group)
    assert framed == plain


async def test_a_framed_empty_pop_is_a_204(wire: Wire, queue: str) -> None:
    """data-plane 5, question 5."""
    assert (await frames_of(wire, queue)).status_code == 204


async def test_a_conflating_pop_is_json_anyway(wire: Wire, queue: str) -> None:
    """data-plane 5."""
    await wire.push(queue, 1)
    response = await frames_of(wire, queue, conflation="true", consumerGroup="g")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["conflation"] is True


# Delay and window.


async def test_a_delayed_message_is_hidden_from_every_group(wire: Wire, queue: str) -> None:
    """data-plane 10.2: it cuts off the tail."""
    await wire.configure(queue, delayedProcessing=100)
    await wire.push(queue, 1, 2)
    await wire.age(queue, 200)
    await wire.push(queue, 3)
    assert data(await wire.take(queue)) == [1, 2]
    assert data(await wire.take(queue, consumerGroup="g")) == [1, 2]
    assert data(await wire.take(queue, "Default", consumerGroup="h")) == [1, 2]


async def test_a_partition_is_held_while_its_newest_message_is_young(
    wire: Wire, queue: str
) -> None:
    """data-plane 10.3: on all three routes."""
    await wire.configure(queue, windowBuffer=100, namespace=queue)
    await wire.push(queue, 1)
    await wire.age(queue, 90)
    await wire.push(queue, 2)
    await wire.age(queue, 90)
    for answer in (
        await wire.pop(queue),
        await wire.pop(queue, "Default"),
        await wire.pop(None, namespace=queue),
    ):
        assert answer is None
    await wire.age(queue, 20)
    assert data(await wire.take(queue)) == [1, 2]


async def test_a_wait_ends_when_the_quiet_time_is_reached(wire: Wire, queue: str) -> None:
    """data-plane 10.3."""
    await wire.configure(queue, windowBuffer=1)
    started = now()
    await wire.push(queue, 1)
    assert data(await wire.pop(queue, wait=True, timeout=10_000)) == [1]
    assert 0.9 < now() - started < 2.5
