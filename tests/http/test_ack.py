"""Acks over HTTP: data-plane 6, 8, and the outcomes that follow from them."""

import asyncio
from typing import Any

import pytest

from tests.support.wire import QUEUE_MODE, Wire, data

LEASE_LOST = "lease"
UNRESOLVABLE = "unresolv"


async def leased(wire: Wire, queue: str, count: int = 5, **options: Any) -> list[dict[str, Any]]:
    """Push messages 0, 1, … with transaction ids t0, t1, … and take them all."""
    if options:
        await wire.configure(queue, **options)
    await wire.push(queue, *range(count), ids=[f"t{n}" for n in range(count)])
    messages = await wire.take(queue)
    assert data(messages) == list(range(count))
    return messages


def successes(results: list[dict[str, Any]]) -> list[bool]:
    return [result["success"] for result in results]


# Requests and answers.


async def test_the_single_form_and_its_answer(wire: Wire, queue: str) -> None:
    """data-plane 6.1, 6.2: an array of one."""
    [message] = await leased(wire, queue, 1)
    body = {
        "transactionId": "t0",
        "partitionId": message["partitionId"],
        "status": "completed",
        "error": None,
        "consumerGroup": None,
        "leaseId": message["leaseId"],
    }
    assert await wire.post("/api/v1/ack", body, 200) == [
        {
            "index": 0,
            "transactionId": "t0",
            "success": True,
            "error": None,
            "leaseReleased": True,
            "dlq": False,
            "noop": False,
        }
    ]


@pytest.mark.parametrize("route", ["/api/v1/ack", "/api/v1/ack/batch"])
async def test_both_routes_take_both_forms(wire: Wire, queue: str, route: str) -> None:
    """data-plane 6.1: an empty array is read as the single form."""
    first, second, third = await leased(wire, queue, 3)
    single = {key: first[key] for key in ("transactionId", "partitionId", "leaseId")}
    [result] = await wire.post(route, {**single, "acknowledgments": []}, 200)
    assert result["success"] is True
    acks = [
        {key: message[key] for key in ("transactionId", "partitionId", "leaseId")}
        for message in (second, third)
    ]
    results = await wire.post(route, {"acknowledgments": acks}, 200)
    assert [result["index"] for result in results] == [0, 1]
    assert successes(results) == [True, True]


async def test_the_group_is_the_calls_not_the_items(wire: Wire, queue: str) -> None:
    """data-plane 6.1: a per-item group is ignored, and queue mode is the default."""
    await wire.push(queue, 1)
    messages = await wire.take(queue, consumerGroup="g")
    [result] = await wire.ack(messages, consumerGroup="g")
    assert result["success"] is False
    assert LEASE_LOST in result["error"]
    assert successes(await wire.ack(messages, group="g")) == [True]


@pytest.mark.parametrize("status", ["completed", "COMPLETED", "success", "", None])
async def test_whatever_is_no_other_status_means_completed(
    wire: Wire, queue: str, status: str | None
) -> None:
    """data-plane 6.1."""
    [message] = await leased(wire, queue, 1)
    [result] = await wire.ack(message, status=status)  # type: ignore[arg-type]
    assert (result["success"], result["leaseReleased"]) == (True, True)
    assert await wire.take(queue) == []


@pytest.mark.parametrize("status", ["FAILED", "Retry"])
async def test_statuses_are_case_insensitive(wire: Wire, queue: str, status: str) -> None:
    """data-plane 6.1."""
    [message] = await leased(wire, queue, 1)
    await wire.ack(message, status)
    assert data(await wire.take(queue)) == [0]


@pytest.mark.parametrize(
    "item",
    [
        {"transactionId": "t", "partitionId": 17},
        {"transactionId": 1, "partitionId": "17"},
        {"partitionId": "17"},
        {"transactionId": "t"},
        {"transactionId": "t", "partitionId": "17", "leaseId": 5},
        {"transactionId": "t", "partitionId": "17", "status": 1},
    ],
)
async def test_wrong_types_are_a_bad_body(wire: Wire, item: dict[str, Any]) -> None:
    """data-plane 6.1: a JSON number as partitionId is a type error."""
    for body in (item, {"acknowledgments": [item]}):
        answer = await wire.post("/api/v1/ack/batch", body, 400)
        assert answer["code"] == "bad_body"


async def test_an_address_that_is_none_fails_its_item_only(wire: Wire, queue: str) -> None:
    """data-plane 6.2, 6.4-1: not numeric, or no such partition."""
    [message] = await leased(wire, queue, 1)
    strange = [
        {**message, "partitionId": partition_id}
        for partition_id in ("abc", "-1", "", "1e3", "0", str(2**63), "9" * 25, "999999999999")
    ]
    results = await wire.ack([*strange, message])
    assert successes(results) == [False] * len(strange) + [True]
    assert all(result["error"] for result in results[:-1])


async def test_a_group_over_budget_is_a_413(wire: Wire, queue: str) -> None:
    """data-plane 6.2."""
    body = {"transactionId": "t", "partitionId": "1", "consumerGroup": "g" * 412}
    assert (await wire.post("/api/v1/ack", body, 413))["code"] == "name_too_long"


# Grouping.


async def test_targets_are_decided_one_by_one(wire: Wire, queue: str) -> None:
    """data-plane 6.3: by partition and lease; a refused one does not affect another."""
    items = [
        {"queue": queue, "partition": p, "payload": n, "transactionId": f"{p}{n}"}
        for p in "ab"
        for n in range(2)
    ]
    await wire.post("/api/v1/push", {"items": items}, 201)
    messages = await wire.take(queue)
    other = "019a44c3-0000-7111-8222-333344445555"
    calls = [
        {**messages[0], "leaseId": other},
        messages[1],
        messages[2],
        {**messages[3], "leaseId": other},
    ]
    results = await wire.ack(calls)
    assert successes(results) == [False, True, True, False]
    assert (await wire.cursor(messages[0]))["committed_offset"] == 1
    assert (await wire.cursor(messages[2]))["committed_offset"] == 0


# The rules.


async def test_a_group_without_a_cursor_is_refused(wire: Wire, queue: str) -> None:
    """data-plane 6.4-2: a lease error if a lease was given, else unresolvable."""
    [message] = await leased(wire, queue, 1)
    [fenced] = await wire.ack(message, group="other")
    [bare] = await wire.ack({**message, "leaseId": ""}, group="other")
    assert LEASE_LOST in fenced["error"]
    assert UNRESOLVABLE in bare["error"]


async def test_the_fence(wire: Wire, queue: str) -> None:
    """data-plane 6.4-3: the lease must be the cursor's and live, even if nobody else came."""
    messages = await leased(wire, queue)
    stranger = {**messages[0], "leaseId": "019a44c3-0000-7111-8222-333344445555"}
    for lost in (stranger, {**messages[0], "leaseId": "no uuid"}):
        [result] = await wire.ack(lost)
        assert (result["success"], LEASE_LOST in result["error"]) == (False, True)
    await wire.expire(messages[0])
    before = await wire.fingerprint()
    for status in ("completed", "failed", "retry", "dlq"):
        results = await wire.ack(messages, status)
        assert successes(results) == [False] * 5
        assert all(LEASE_LOST in result["error"] for result in results)
    assert await wire.fingerprint() == before


async def test_an_ack_without_a_lease_passes_the_fence(wire: Wire, queue: str) -> None:
    """data-plane 6.4-3: it acts on whatever lease is there."""
    messages = await leased(wire, queue)
    body = {"transactionId": "t4", "partitionId": messages[0]["partitionId"]}
    [result] = await wire.post("/api/v1/ack", body, 200)
    assert (result["success"], result["leaseReleased"]) == (True, True)
    assert (await wire.cursor(messages[0]))["committed_offset"] == 4


async def test_an_unknown_id_is_refused_and_charges_nothing(wire: Wire, queue: str) -> None:
    """data-plane 6.4-4, 6.4-12."""
    messages = await leased(wire, queue)
    before = await wire.fingerprint()
    for status in ("completed", "failed", "dlq"):
        [result] = await wire.ack({**messages[0], "transactionId": "never"}, status)
        assert result["success"] is False
        assert UNRESOLVABLE in result["error"]
        assert "committed" in result["error"]
    assert await wire.fingerprint() == before
    assert successes(await wire.ack(messages)) == [True] * 5


async def test_an_id_beyond_the_batch_is_not_in_the_span(wire: Wire, queue: str) -> None:
    """data-plane 6.4-4: the span ends with the batch while there is a lease."""
    await wire.push(queue, 1, 2, 3, ids=["a", "b", "c"])
    [message] = await wire.take(queue, batch=1)
    [result] = await wire.ack({**message, "transactionId": "c"})
    assert (result["success"], UNRESOLVABLE in result["error"]) == (False, True)


async def test_an_id_resolves_to_its_lowest_offset(wire: Wire, queue: str) -> None:
    """data-plane 6.4-4, 6.4-5: so only the full batch settles one that holds an id twice."""
    await wire.configure(queue, dedupWindowSeconds=0)
    for n, transaction_id in enumerate(["same", "other", "same"]):
        await wire.push(queue, n, ids=[transaction_id])
    messages = await wire.take(queue)
    await wire.ack(messages[2])
    assert (await wire.cursor(messages[0]))["committed_offset"] == 0
    await wire.expire(messages[0])
    messages = await wire.take(queue)
    assert data(messages) == [1, 2]
    results = await wire.ack([messages[1], messages[0]])
    assert [result["leaseReleased"] for result in results] == [True, True]
    assert (await wire.cursor(messages[0]))["committed_offset"] == 2


async def test_the_full_batch_with_an_id_twice_is_settled(wire: Wire, queue: str) -> None:
    """data-plane 6.4-5."""
    await wire.configure(queue, dedupWindowSeconds=0)
    for n, transaction_id in enumerate(["same", "other", "same"]):
        await wire.push(queue, n, ids=[transaction_id])
    messages = await wire.take(queue)
    results = await wire.ack(messages)
    assert successes(results) == [True] * 3
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["lease_id"], cursor["retry_count"]) == (2, None, 0)


async def test_the_lowest_signal_is_the_head(wire: Wire, queue: str) -> None:
    """data-plane 6.4-6: whatever the order of the items."""
    messages = await leased(wire, queue)
    await wire.ack([messages[3], messages[1], messages[0]], statuses=["dlq", "retry", "completed"])
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["retry_count"]) == (0, 0)
    assert await wire.dead_letters(queue) == []


@pytest.mark.parametrize(
    ("statuses", "committed", "retries", "filed"),
    [
        (["retry", "failed"], -1, 1, 0),
        (["failed", "dlq"], 0, 0, 1),
        (["retry", "dlq", "failed"], 0, 0, 1),
    ],
)
async def test_at_one_offset_the_strongest_signal_counts(
    wire: Wire, queue: str, statuses: list[str], committed: int, retries: int, filed: int
) -> None:
    """data-plane 6.4-6: dlq beats failed beats retry."""
    messages = await leased(wire, queue)
    await wire.ack([messages[0]] * len(statuses), statuses=statuses)
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["retry_count"]) == (committed, retries)
    assert len(await wire.dead_letters(queue)) == filed


async def test_acks_are_cumulative(wire: Wire, queue: str) -> None:
    """data-plane 6.4-7: an ack settles what lies below it; 6.4-9: the lease stays for the rest."""
    messages = await leased(wire, queue)
    [result] = await wire.ack(messages[2])
    assert result["leaseReleased"] is False
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], str(cursor["lease_id"])) == (2, messages[0]["leaseId"])
    assert await wire.take(queue) == []
    await wire.expire(messages[0])
    assert data(await wire.take(queue)) == [3, 4]


async def test_without_a_lease_only_the_commit_happens(wire: Wire, queue: str) -> None:
    """data-plane 6.4-8: signals answer success, and do nothing."""
    messages = await leased(wire, queue)
    await wire.ack(messages[1])
    await wire.ack(messages[2], "retry")
    free = [{**message, "leaseId": ""} for message in messages]
    for status in ("failed", "retry", "dlq"):
        assert successes(await wire.ack(free[3], status)) == [True]
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["retry_count"]) == (1, 0)
    assert successes(await wire.ack(free[3])) == [True]
    assert data(await wire.take(queue)) == [4]
    assert await wire.dead_letters(queue) == []


async def test_completing_the_batch_releases_it(wire: Wire, queue: str) -> None:
    """data-plane 6.4-9, 8-2: and resets the retry count."""
    messages = await leased(wire, queue)
    await wire.ack(messages[0], "failed")
    messages = await wire.take(queue)
    assert (await wire.cursor(messages[0]))["retry_count"] == 1
    [result] = await wire.ack(messages[-1])
    assert result["leaseReleased"] is True
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["lease_id"], cursor["retry_count"]) == (4, None, 0)


async def test_a_retry_hands_back_without_a_charge(wire: Wire, queue: str) -> None:
    """data-plane 6.4-9, 8-1: as often as it likes."""
    messages = await leased(wire, queue, retryLimit=1)
    results = await wire.ack(messages, statuses=["completed", "retry", *["completed"] * 3])
    assert successes(results) == [True] * 5
    assert {result["leaseReleased"] for result in results} == {True}
    for _ in range(3):
        messages = await wire.take(queue)
        assert data(messages) == [1, 2, 3, 4]
        assert (await wire.cursor(messages[0]))["retry_count"] == 0
        await wire.ack(messages[0], "retry")


async def test_a_nack_is_charged_once_a_call(wire: Wire, queue: str) -> None:
    """data-plane 6.4-9, 8-1: however many items failed; all behind it comes again."""
    messages = await leased(wire, queue)
    results = await wire.ack(
        messages, statuses=["completed", "failed", "failed", "completed", "failed"]
    )
    assert successes(results) == [True] * 5
    assert {result["dlq"] for result in results} == {False}
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["retry_count"]) == (0, 1)
    assert data(await wire.take(queue)) == [1, 2, 3, 4]


@pytest.mark.parametrize("limit", [0, 2, -1])
async def test_a_poison_message_is_filed_when_its_budget_is_spent(
    wire: Wire, queue: str, limit: int
) -> None:
    """data-plane 6.4-9, 6.5: delivered retryLimit + 1 times; negative acts as 0."""
    messages = await leased(wire, queue, 2, retryLimit=limit)
    for attempt in range(max(limit, 0)):
        [result] = await wire.ack(messages[0], "failed", error=f"try {attempt}")
        assert result["dlq"] is False
        messages = await wire.take(queue)
        assert data(messages) == [0, 1]
    [result] = await wire.ack(messages[0], "failed", error="the last")
    assert (result["dlq"], result["leaseReleased"]) == (True, True)
    [letter] = await wire.dead_letters(queue)
    assert (letter["data"], letter["errorMessage"]) == (0, "the last")
    assert letter["retryCount"] == max(limit, 0)
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["retry_count"]) == (0, 0)
    assert data(await wire.take(queue)) == [1]


async def test_with_the_dlq_off_the_head_is_dropped(wire: Wire, queue: str) -> None:
    """data-plane 6.4-9, 8-3: only when both switches are off."""
    off = {"retryLimit": 0, "deadLetterQueue": False, "dlqAfterMaxRetries": False}
    messages = await leased(wire, queue, 2, **off)
    [result] = await wire.ack(messages[0], "failed")
    assert (result["success"], result["dlq"]) == (True, False)
    assert await wire.dead_letters(queue) == []
    assert data(await wire.take(queue)) == [1]


@pytest.mark.parametrize("switch", ["deadLetterQueue", "dlqAfterMaxRetries"])
async def test_either_switch_turns_the_dlq_on(wire: Wire, queue: str, switch: str) -> None:
    """data-plane 8-3."""
    options = {"deadLetterQueue": False, "dlqAfterMaxRetries": False, switch: True}
    messages = await leased(wire, queue, 1, retryLimit=0, **options)
    await wire.ack(messages, "failed")
    assert len(await wire.dead_letters(queue)) == 1


async def test_a_dlq_status_files_at_once(wire: Wire, queue: str) -> None:
    """data-plane 6.4-9."""
    messages = await leased(wire, queue)
    [result] = await wire.ack(messages[0], "dlq", error="no use")
    assert (result["dlq"], result["leaseReleased"]) == (True, True)
    [letter] = await wire.dead_letters(queue)
    assert (letter["data"], letter["errorMessage"], letter["retryCount"]) == (0, "no use", 0)
    assert data(await wire.take(queue)) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("limit", "statuses", "filed", "left"),
    [
        # the budget was spent: a batch nacked whole goes to the DLQ in one call
        (0, ["failed"] * 5, [0, 1, 2, 3, 4], []),
        # completed passes, retry stops
        (0, ["failed", "completed", "failed", "retry", "completed"], [0, 2], [3, 4]),
        # not mentioned passes only below a completed one
        (0, ["failed", None, "completed", None, None], [0], [3, 4]),
        (0, ["failed", None, None, None, None], [0], [1, 2, 3, 4]),
        # the budget was not spent: failed stops behind a dlq head
        (3, ["dlq", "dlq", "failed", "completed", "completed"], [0, 1], [2, 3, 4]),
        (3, ["completed", "dlq", "completed", "dlq", "completed"], [1, 3], []),
    ],
)
async def test_what_lies_above_the_head_is_settled(
    wire: Wire,
    queue: str,
    limit: int,
    statuses: list[str | None],
    filed: list[int],
    left: list[int],
) -> None:
    """data-plane 6.4-10."""
    messages = await leased(wire, queue, retryLimit=limit)
    said = [(m, status) for m, status in zip(messages, statuses, strict=True) if status]
    results = await wire.ack([m for m, _ in said], statuses=[status for _, status in said])
    assert successes(results) == [True] * len(said)
    assert [letter["data"] for letter in await wire.dead_letters(queue)] == filed
    # Question 8: `dlq` says exactly which items were filed.
    flagged = [m["data"] for (m, _), result in zip(said, results, strict=True) if result["dlq"]]
    assert flagged == filed
    assert data(await wire.take(queue)) == left


async def test_settling_above_drops_when_the_dlq_is_off(wire: Wire, queue: str) -> None:
    """data-plane 6.4-10."""
    off = {"retryLimit": 0, "deadLetterQueue": False, "dlqAfterMaxRetries": False}
    messages = await leased(wire, queue, **off)
    await wire.ack(messages[:3], "failed")
    assert await wire.dead_letters(queue) == []
    assert data(await wire.take(queue)) == [3, 4]


async def test_a_repeat_of_the_settling_ack_succeeds(wire: Wire, queue: str) -> None:
    """data-plane 6.4-11: while that lease is the last one settled."""
    messages = await leased(wire, queue)
    first = await wire.ack(messages)
    again = await wire.ack(messages)
    assert again == first
    assert {(r["success"], r["noop"], r["leaseReleased"]) for r in again} == {(True, False, True)}
    [unknown] = await wire.ack({**messages[0], "transactionId": "never"})
    assert UNRESOLVABLE in unknown["error"]

    await wire.push(queue, 5)
    await wire.ack(await wire.take(queue))
    results = await wire.ack(messages)
    assert successes(results) == [False] * 5
    assert all(LEASE_LOST in result["error"] for result in results)


async def test_a_repeat_of_a_nack_is_refused(wire: Wire, queue: str) -> None:
    """data-plane 6.4-11: a redelivery release settles nothing."""
    messages = await leased(wire, queue)
    await wire.ack(messages, "failed")
    results = await wire.ack(messages, "failed")
    assert successes(results) == [False] * 5
    assert (await wire.cursor(messages[0]))["retry_count"] == 1


async def test_what_is_below_the_cursor(wire: Wire, queue: str) -> None:
    """data-plane 6.4-12: completed is a no-op, a signal is refused."""
    messages = await leased(wire, queue)
    await wire.ack(messages[2])
    [below] = await wire.ack(messages[0])
    assert (below["success"], below["noop"], below["leaseReleased"]) == (True, True, False)
    for status in ("failed", "retry", "dlq"):
        [refused] = await wire.ack(messages[0], status)
        assert refused["success"] is False
        assert "committed" in refused["error"]
    [above] = await wire.ack(messages[3])
    assert (above["success"], above["noop"]) == (True, False)


async def test_an_item_clamped_away_still_succeeds(wire: Wire, queue: str) -> None:
    """data-plane 6.4-12: and comes again."""
    messages = await leased(wire, queue)
    results = await wire.ack(messages[:3], statuses=["retry", "completed", "completed"])
    assert successes(results) == [True] * 3
    assert data(await wire.take(queue)) == [0, 1, 2, 3, 4]


async def test_an_ack_frees_the_partition_for_those_who_wait(wire: Wire, queue: str) -> None:
    """data-plane 6.4-13."""
    await wire.push(queue, 1, 2)
    messages = await wire.take(queue, batch=1)
    waiting = asyncio.create_task(wire.pop(queue, wait=True, timeout=10_000))
    await asyncio.sleep(0.2)
    started = asyncio.get_running_loop().time()
    await wire.ack(messages)
    assert data(await waiting) == [2]
    assert asyncio.get_running_loop().time() - started < 0.45


async def test_the_worked_outcomes(wire: Wire, queue: str) -> None:
    """data-plane 6.5: nack all five, four times in a row."""
    messages = await leased(wire, queue)
    for attempt in range(1, 5):
        assert {message["deliveryAttempt"] for message in messages} == {attempt}
        await wire.ack(messages, "failed")
        messages = await wire.take(queue)
    assert messages == []
    assert len(await wire.dead_letters(queue)) == 5
    await wire.push(queue, 5)
    [message] = await wire.take(queue)
    assert (message["offset"], message["deliveryAttempt"]) == (5, 1)


# Retries and dead letters.


async def test_expiry_spends_no_retry(wire: Wire, queue: str) -> None:
    """data-plane 8-1: a message that kills its worker each time never reaches the DLQ."""
    messages = await leased(wire, queue, 1, retryLimit=0)
    for attempt in range(2, 6):
        await wire.expire(messages[0])
        messages = await wire.take(queue)
        assert messages[0]["deliveryAttempt"] == attempt
    assert (await wire.cursor(messages[0]))["retry_count"] == 0
    assert await wire.dead_letters(queue) == []


async def test_the_retry_count_survives_a_partial_ack(wire: Wire, queue: str) -> None:
    """data-plane 8-2: one counter per cursor, reset only by a completed batch or a filed head."""
    messages = await leased(wire, queue)
    await wire.ack(messages[0], "failed")
    messages = await wire.take(queue)
    await wire.ack(messages[1])
    assert (await wire.cursor(messages[0]))["retry_count"] == 1
    await wire.ack(messages[2], "failed")
    messages = await wire.take(queue)
    assert data(messages) == [2, 3, 4]
    assert (await wire.cursor(messages[0]))["retry_count"] == 2


async def test_groups_retry_on_their_own(wire: Wire, queue: str) -> None:
    """data-plane 8-1, 8-5: the message stays in the log for other groups."""
    messages = await leased(wire, queue, 2, retryLimit=0)
    await wire.ack(messages, "failed")
    others = await wire.take(queue, consumerGroup="g")
    assert data(others) == [0, 1]
    assert (await wire.cursor(others[0]))["retry_count"] == 0
    assert len(await wire.dead_letters(queue, consumerGroup=QUEUE_MODE)) == 2
    assert await wire.dead_letters(queue, consumerGroup="g") == []


async def test_nothing_is_redelivered_after_its_ack(wire: Wire, queue: str) -> None:
    """data-plane 12-2, 12-3."""
    seen: list[int] = []
    await wire.push(queue, *range(50))
    while messages := await wire.take(queue, batch=7):
        seen += data(messages)
        await wire.ack(messages)
    assert seen == list(range(50))
