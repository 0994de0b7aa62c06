"""The transaction route: step 1, and the binary form of data-plane 3.4."""

import asyncio
import base64
import json
import uuid
from typing import Any

import pytest
from queen import Queen
from queen.http.push_binary import PushBatch, encode_transaction_frames

from tests.support.wire import QUEUE_MODE, Wire, data

STRANGER = "019a44c3-0000-7111-8222-333344445555"


def ack(message: dict[str, Any], status: str = "completed", **fields: Any) -> dict[str, Any]:
    """An ack operation for a message, under its own lease and group."""
    operation = {
        "type": "ack",
        "transactionId": message["transactionId"],
        "partitionId": message["partitionId"],
        "consumerGroup": message["consumerGroup"],
        "leaseId": message["leaseId"],
        "status": status,
    }
    return {**operation, **fields}


def push(queue: str, *payloads: Any, **fields: Any) -> dict[str, Any]:
    """A push operation of some payloads."""
    items = [{"queue": queue, "payload": payload, **fields} for payload in payloads]
    return {"type": "push", "items": items}


def put(key: str, value: Any, **fields: Any) -> dict[str, Any]:
    """A KV write into the tests' namespace."""
    return {"op": "put", "ns": "txn", "key": key, "value": value, "forever": True, **fields}


def once(key: str) -> dict[str, Any]:
    """A gate."""
    return put(key, True, op="putIfAbsent", required=True)


def schedule(queue: str, key: str, **fields: Any) -> dict[str, Any]:
    """A timer an hour ahead."""
    return {
        "op": "schedule",
        "queue": queue,
        "timerKey": key,
        "delayMs": 3_600_000,
        "txn": f"txn-{key}",
        "payload": base64.b64encode(b'{"n":1}').decode(),
        **fields,
    }


def get(key: str) -> dict[str, Any]:
    """A KV read from the tests' namespace."""
    return {"op": "get", "ns": "txn", "key": key}


async def value_of(wire: Wire, key: str) -> Any:
    row = await wire.sql.fetchrow(
        "select value from queen.kv where namespace = 'txn' and key = $1", key
    )
    return None if row is None else json.loads(row["value"])


def refused(verdict: dict[str, Any], reason: str) -> None:
    """Assert the shape of a rollback."""
    assert (verdict["success"], verdict["reason"], verdict["results"]) == (False, reason, [])
    assert uuid.UUID(verdict["transactionId"]).version == 7
    assert verdict["error"]


async def changes_nothing(wire: Wire, *operations: Any, status: int = 200, **riders: Any) -> Any:
    """Send a transaction that must leave every table as it was; return the verdict."""
    before = await wire.fingerprint()
    verdict = await wire.transaction(*operations, status=status, **riders)
    assert await wire.fingerprint() == before
    return verdict


# The answer.


async def test_the_results_share_one_flat_index_space(wire: Wire, queue: str) -> None:
    """step 1.8: operations in order, each item a slot; then kv, timers, positions."""
    await wire.push(queue, 1, 2)
    first, second = await wire.take(queue)
    verdict = await wire.transaction(
        ack(first),
        push(f"{queue}-out", 10, 11),
        ack(second),
        kv=[put(queue, {"b": 1, "a": 2.50}), get(f"{queue}-none")],
        timers=[schedule(queue, "k"), {"op": "cancel", "queue": queue, "timerKey": "none"}],
        positions=[{"queue": queue, "consumerGroup": "g", "offset": 1}],
    )
    results = verdict.pop("results")
    assert verdict == {"transactionId": verdict["transactionId"], "success": True}
    assert uuid.UUID(verdict["transactionId"]).version == 7
    assert [result["index"] for result in results] == list(range(9))
    assert [result["type"] for result in results] == [
        *("ack", "push", "push", "ack", "kv", "kv", "timer", "timer", "position")
    ]
    assert [result.get("opIndex") for result in results] == [None] * 4 + [0, 1, 0, 1, 0]
    assert results[0] == {
        "index": 0,
        "type": "ack",
        "success": True,
        "transactionId": first["transactionId"],
        "error": None,
        "dlq": False,
    }
    message_id = results[1]["messageId"]
    assert results[1] == {
        "index": 1,
        "type": "push",
        "success": True,
        "transactionId": message_id,
        "messageId": message_id,
        "queueName": f"{queue}-out",
    }
    assert (results[4]["op"], results[4]["applied"]) == ("put", True)
    assert (results[5]["op"], results[5]["found"]) == ("get", False)
    assert (results[6]["ok"], results[6]["status"]) == (True, "scheduled")
    assert (results[7]["ok"], results[7]["status"]) == (False, "absent")
    assert results[8] == {"index": 8, "opIndex": 0, "type": "position", "success": True}


async def test_null_is_absent(wire: Wire, queue: str) -> None:
    """step 1.1: for every part; unknown keys are ignored."""
    body = {
        "operations": [push(queue, 1)],
        **dict.fromkeys(("requiredLeases", "kv", "timers", "positions")),
        "colour": "red",
    }
    assert (await wire.post("/api/v1/transaction", body, 200))["success"] is True


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{",
        "null",
        '{"operations": {}}',
        '{"operations": [], "kv": "x"}',
        '{"operations": [7]}',
        '{"operations": [{"queue": "q", "payload": 1}]}',
        '{"operations": [{"type": "kv", "op": "put"}]}',
        '{"operations": [{"type": "timer"}]}',
        '{"operations": [{"type": "push", "items": [{"queue": "q"}]}]}',
        '{"operations": [{"type": "push", "items": [{"payload": 1}]}]}',
        '{"operations": [{"type": "ack", "transactionId": "t", "partitionId": 5}]}',
        '{"requiredLeases": [1]}',
        '{"operations": [{"type": "push", "items": [{"queue": "\\ud800", "payload": 1}]}]}',
    ],
)
async def test_what_is_not_the_shape_is_a_400_of_its_own_form(wire: Wire, body: str) -> None:
    """step 1.9, 1.10."""
    before = await wire.fingerprint()
    response = await wire.http.post("/api/v1/transaction", content=body)
    assert response.status_code == 400
    refused(response.json(), "bad_request")
    assert await wire.fingerprint() == before


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"kv": [], "timers": [], "positions": []},
        {"operations": [{"type": "push"}]},
        {"operations": [{"type": "push", "queue": "q", "payload": None}]},
        {"operations": [{"type": "push", "payload": 1}]},
        {"operations": [{"type": "ack", "transactionId": "t"}]},
        {"operations": [{"type": "ack", "transactionId": "t", "partitionId": "x"}]},
        {"positions": [{"queue": "q", "consumerGroup": "g", "offset": "1"}]},
        {"positions": [{"queue": "q", "consumerGroup": "g", "offset": -1}]},
        {"positions": [{"queue": "q", "consumerGroup": "g"}]},
        {"positions": [{"queue": "q", "consumerGroup": "g", "offset": 1, "metadata": "m" * 4097}]},
        {"positions": [7]},
    ],
)
async def test_what_makes_no_sense_is_a_200_bad_request(wire: Wire, parts: dict[str, Any]) -> None:
    """step 1.1, 1.10: no parts, inline push without queue or payload, partitionId, position."""
    operations = parts.pop("operations", [])
    refused(await changes_nothing(wire, *operations, **parts), "bad_request")


@pytest.mark.parametrize(
    ("item", "status", "code"),
    [
        ({"queue": "q" * 412}, 413, "name_too_long"),
        ({"queue": "q", "transactionId": "t" * 65_536}, 400, "bad_request"),
        ({"queue": "\0"}, 400, "bad_request"),
        ({"queue": "q", "payload": "a" * 16 * 1024 * 1024}, 413, "payload_too_large"),
    ],
)
async def test_limits_of_the_broker_look_as_everywhere(
    wire: Wire, item: dict[str, Any], status: int, code: str
) -> None:
    """step 1.10: engine-body failures."""
    operation = {"type": "push", "items": [{"payload": 1, **item}]}
    answer = await changes_nothing(wire, operation, status=status)
    assert answer["code"] == code
    assert "reason" not in answer


async def test_an_inline_push(wire: Wire, queue: str) -> None:
    """step 1.2: one item on the operation itself."""
    operation = {"type": "push", "queue": queue, "payload": 1, "partition": "", "transactionId": ""}
    verdict = await wire.transaction(operation)
    assert verdict["results"][0]["transactionId"] == ""
    assert data(await wire.take(queue, "Default")) == [1]


async def test_a_trace_id_is_stored(wire: Wire, queue: str) -> None:
    """step 1.2: if it is a UUID."""
    trace_id = str(uuid.uuid4())
    await wire.transaction(push(queue, 1, traceId=trace_id), push(queue, 2, traceId="none"))
    assert [message["traceId"] for message in await wire.take(queue)] == [trace_id, None]


# How an ack finds its lease.


async def test_the_defaults_of_an_ack(wire: Wire, queue: str) -> None:
    """step 1.3, 0.2: queue mode, no lease, completed; an id that is none resolves to nothing."""
    await wire.push(queue, 1, 2, 3, 4)
    messages = await wire.take(queue)
    partition_id = messages[0]["partitionId"]
    assert partition_id.isdecimal()
    bare = {"type": "ack", "partitionId": partition_id}
    refused(await changes_nothing(wire, bare), "rejected_ack")
    for more in (
        {},
        {"consumerGroup": "", "leaseId": "", "status": None},
        {"status": "Whatever"},
        {"status": "COMPLETED", "error": "not kept"},
    ):
        transaction_id = messages.pop(0)["transactionId"]
        verdict = await wire.transaction({**bare, "transactionId": transaction_id, **more})
        assert verdict["success"] is True
        assert (await wire.cursor({"consumerGroup": QUEUE_MODE, "partitionId": partition_id}))[
            "committed_offset"
        ] == 3 - len(messages)
    [result] = (await wire.transaction(push(queue, 5)))["results"]
    [message] = await wire.take(queue)
    assert message["transactionId"] == result["transactionId"]
    verdict = await wire.transaction(ack(message, "DLQ", error="kept"))
    assert verdict["results"][0]["dlq"] is True
    assert [letter["errorMessage"] for letter in await wire.dead_letters(queue)] == ["kept"]


async def test_a_fenced_ack_needs_its_lease(wire: Wire, queue: str) -> None:
    """step 1.4: held now, not expired, the message in the batch."""
    await wire.push(queue, 1, 2)
    [message] = await wire.take(queue, batch=1)
    for lost in (
        ack(message, leaseId=STRANGER),
        ack(message, transactionId="never"),
        ack(message, partitionId="99999999"),
        ack(message, partitionId="9" * 20),
        ack(message, consumerGroup="other"),
    ):
        verdict = await changes_nothing(wire, lost, push(queue, 3))
        refused(verdict, "rejected_ack")
        assert "rolled back" in verdict["error"]
    await wire.expire(message)
    refused(await changes_nothing(wire, ack(message), push(queue, 3)), "rejected_ack")


@pytest.mark.parametrize("form", ["required", "other ack"])
async def test_a_lease_is_lent_when_the_call_names_only_one(
    wire: Wire, queue: str, form: str
) -> None:
    """step 1.4."""
    await wire.push(queue, 1, 2)
    first, second = await wire.take(queue)
    await wire.expire(first)
    bare = ack(second, leaseId="")
    if form == "required":
        verdict = await changes_nothing(wire, bare, requiredLeases=[first["leaseId"], ""])
    else:
        verdict = await changes_nothing(wire, ack(first), bare)
    refused(verdict, "rejected_ack")
    # Two leases: none is lent, and an ack without one is not fenced.
    leases = [first["leaseId"], STRANGER]
    assert (await wire.transaction(bare, requiredLeases=leases))["success"] is True
    assert await wire.take(queue) == []


async def test_a_required_lease_on_no_ack_is_not_checked(wire: Wire, queue: str) -> None:
    """step 1.4."""
    verdict = await wire.transaction(push(queue, 1), requiredLeases=[STRANGER])
    assert verdict["success"] is True


async def test_what_is_already_acked(wire: Wire, queue: str) -> None:
    """step 1.4: a no-op under a live lease, rejected after its release; no grace here."""
    await wire.push(queue, 1, 2)
    first, second = await wire.take(queue)
    assert (await wire.transaction(ack(first)))["success"] is True
    assert (await wire.transaction(ack(first), push(queue, 3)))["success"] is True
    for status in ("failed", "retry", "dlq"):
        refused(await changes_nothing(wire, ack(first, status)), "rejected_ack")
    assert (await wire.transaction(ack(second)))["success"] is True
    refused(await changes_nothing(wire, ack(second)), "rejected_ack")
    assert (await wire.ack(second))[0]["success"] is True


async def test_acks_of_one_lease_are_judged_together(wire: Wire, queue: str) -> None:
    """step 1.4: three single acks that cover a batch release its lease."""
    await wire.push(queue, 1, 2, 3)
    messages = await wire.take(queue)
    await wire.transaction(*(ack(message) for message in messages))
    cursor = await wire.cursor(messages[0])
    assert (cursor["committed_offset"], cursor["lease_id"]) == (2, None)


# The semantics.


async def test_one_commit(wire: Wire, queue: str) -> None:
    """step 1.11-1: across queues, partitions and groups, all or nothing."""
    for partition in "ab":
        await wire.push(queue, partition, partition=partition)
    mine = await wire.take(queue)
    theirs = await wire.take(queue, consumerGroup="g")
    parts: list[Any] = [
        *(ack(message) for message in mine + theirs),
        push(f"{queue}-1", 1),
        push(f"{queue}-2", 2, partition="p"),
    ]
    refused(await changes_nothing(wire, *parts, ack(mine[0], leaseId=STRANGER)), "rejected_ack")
    verdict = await wire.transaction(*parts, kv=[put(queue, 1)], timers=[schedule(queue, "k")])
    assert verdict["success"] is True
    assert data(await wire.take(f"{queue}-1")) == [1]
    assert data(await wire.take(f"{queue}-2", "p")) == [2]
    assert await value_of(wire, queue) == 1
    assert await wire.take(queue) == await wire.take(queue, consumerGroup="g") == []


async def test_validation_comes_before_any_effect_in_its_order(wire: Wire, queue: str) -> None:
    """step 1.11-2: shape, timer provenance, timer shape, KV, positions, emptiness, operations."""
    shape = {"type": "unknown"}
    provenance = schedule(queue, "k", producerSub="me")
    timer = schedule(queue, "k", delayMs="soon")
    kv = {"op": "put", "ns": "BAD NS", "key": "k", "value": 1, "forever": True}
    position = {"queue": queue, "consumerGroup": "g", "offset": -1}
    operation = {"type": "ack", "transactionId": "t", "partitionId": "x"}

    async def reason(*operations: Any, status: int = 400, **riders: Any) -> str:
        verdict = await changes_nothing(wire, *operations, status=status, **riders)
        code: str = verdict["reason"]
        return code

    assert await reason(shape, timers=[provenance], kv=[kv]) == "bad_request"
    assert await reason(operation, timers=[timer, provenance], kv=[kv]) == (
        "timers_server_owned_field"
    )
    assert await reason(operation, timers=[timer], kv=[kv]) == "bad_request"
    assert await reason(operation, kv=[kv], positions=[position]) == "kv_bad_namespace"
    assert await reason(operation, positions=[position], status=200) == "bad_request"
    refused_operation = await changes_nothing(wire, push(queue, 1), operation)
    assert "partitionId" in refused_operation["error"]


async def test_judgement_goes_acks_pushes_kv(wire: Wire, queue: str) -> None:
    """step 1.11-3: the first refusal decides, whatever the order in which it is written."""
    await wire.push(queue, 1, ids=["taken"])
    [message] = await wire.take(queue)
    await wire.transaction(kv=[once(queue)])
    duplicate = push(queue, 2, transactionId="taken")
    lost = ack(message, leaseId=STRANGER)

    refused(await changes_nothing(wire, duplicate, lost, kv=[once(queue)]), "rejected_ack")
    refused(await changes_nothing(wire, duplicate, ack(message), kv=[once(queue)]), "duplicate")
    refused(await changes_nothing(wire, ack(message), kv=[once(queue)]), "kv_precondition")


async def test_an_unknown_queue_of_a_position(wire: Wire, queue: str) -> None:
    """step 1.7, 1.10."""
    position = {"queue": f"{queue}-none", "consumerGroup": "g", "offset": 1}
    verdict = await changes_nothing(wire, push(queue, 1), positions=[position])
    refused(verdict, "queue_not_found")


async def test_a_position_moves_the_group(wire: Wire, queue: str) -> None:
    """step 1.7: `offset` is the next to read, a lease there is released, null forgets."""
    await wire.push(queue, 0, 1, 2, 3)
    [first, *_] = await wire.take(queue, consumerGroup="g")
    position = {"queue": queue, "consumerGroup": "g", "offset": 2, "metadata": "here"}
    assert (await wire.transaction(positions=[position]))["success"] is True
    refused(await changes_nothing(wire, ack(first)), "rejected_ack")
    assert data(await wire.take(queue, consumerGroup="g")) == [2, 3]
    await wire.transaction(positions=[{**position, "offset": None}])
    assert data(await wire.take(queue, consumerGroup="g")) == [0, 1, 2, 3]


async def test_a_refusal_discards_everything(wire: Wire, queue: str) -> None:
    """step 1.11-4: the input message is still leased, and is acked by itself."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    await wire.transaction(kv=[once(queue)])
    parts: dict[str, Any] = {
        "kv": [put(f"{queue}-2", 1), once(queue)],
        "timers": [schedule(queue, "k")],
    }
    verdict = await changes_nothing(wire, ack(message), push(f"{queue}-out", 1), **parts)
    refused(verdict, "kv_precondition")
    assert await wire.take(queue) == []
    assert (await wire.ack(message))[0]["success"] is True


async def test_the_body_of_a_lost_precondition(wire: Wire, queue: str) -> None:
    """step 1.9: a flat failedIndex, kvReason, and what a reader would see now."""
    first = await wire.transaction(kv=[put(queue, {"b": 1.50, "a": None})])
    version = first["results"][0]["version"]
    verdict = await changes_nothing(wire, push(queue, 1, 2), kv=[put(f"{queue}-2", 1), once(queue)])
    assert verdict["error"]
    assert {**verdict, "transactionId": "", "error": ""} == {
        "transactionId": "",
        "success": False,
        "reason": "kv_precondition",
        "error": "",
        "results": [],
        "ok": False,
        "failedIndex": 3,
        "kvReason": "exists",
        "version": version,
        "value": {"b": 1.5, "a": None},
    }
    check = {"op": "check", "ns": "txn", "key": queue, "required": True}
    verdict = await changes_nothing(wire, kv=[{**check, "expect": version + 1}])
    assert (verdict["kvReason"], verdict["version"]) == ("version", version)
    verdict = await changes_nothing(wire, kv=[{**check, "key": f"{queue}-3", "expect": version}])
    assert (verdict["kvReason"], verdict["version"], verdict["value"]) == ("absent", 0, None)


async def test_the_value_of_a_lost_precondition_is_its_text(wire: Wire, queue: str) -> None:
    """decisions, the step: JSON text is kept as sent."""
    text = '{"b": 1.50, "a": [1E+2]}'
    operation = json.dumps({**once(queue), "value": 0}).replace('"value": 0', f'"value": {text}')
    body = f'{{"operations": [], "kv": [{operation}]}}'
    for _ in range(2):
        response = await wire.http.post("/api/v1/transaction", content=body)
    assert response.json()["reason"] == "kv_precondition"
    assert f'"value":{text}' in response.text


async def test_losses_that_are_not_required_commit(wire: Wire, queue: str) -> None:
    """step 1.11-5: applied false, absent; the rest commits."""
    await wire.transaction(kv=[put(queue, 1)])
    soft = {**once(queue), "required": False}
    cancel = {"op": "cancel", "queue": queue, "timerKey": "none"}
    verdict = await wire.transaction(push(queue, 1), kv=[soft], timers=[cancel])
    assert verdict["success"] is True
    assert verdict["results"][1]["applied"] is False
    assert (verdict["results"][2]["ok"], verdict["results"][2]["status"]) == (False, "absent")
    assert data(await wire.take(queue)) == [1]


async def test_a_schedule_of_an_existing_key_replaces_it(wire: Wire, queue: str) -> None:
    """step 1.11-3: not a failure."""
    for status in ("scheduled", "rescheduled"):
        verdict = await wire.transaction(timers=[schedule(queue, "k")])
        assert verdict["results"][0]["status"] == status


@pytest.mark.parametrize("window", [0, 3600])
async def test_a_repeat_within_the_call_is_stored_once(wire: Wire, queue: str, window: int) -> None:
    """step 1.11-6: also when the window is 0, and after defaulting the partition."""
    await wire.configure(queue, dedupWindowSeconds=window)
    verdict = await wire.transaction(
        push(queue, 1, transactionId="t"),
        push(queue, 2, transactionId="t", partition="Default"),
        push(queue, 3, transactionId="t", partition=""),
        push(queue, 4, transactionId="t", partition="other"),
    )
    results = verdict["results"]
    assert [result.get("duplicate") for result in results] == [None, True, True, None]
    assert len({result["messageId"] for result in results[:3]}) == 1
    assert sorted(data(await wire.take(queue))) == [1, 4]


async def test_a_stored_id_refuses_by_the_queues_window(wire: Wire, queue: str) -> None:
    """step 1.11-7: per partition, 0 is off."""
    await wire.push(queue, 1, ids=["t"])
    refused(await changes_nothing(wire, push(queue, 2, transactionId="t")), "duplicate")
    elsewhere = push(queue, 3, transactionId="t", partition="other")
    assert (await wire.transaction(elsewhere))["success"] is True
    await wire.configure(queue, dedupWindowSeconds=0)
    assert (await wire.transaction(push(queue, 4, transactionId="t")))["success"] is True


async def test_of_several_losers_the_first_in_apply_order_is_told(wire: Wire, queue: str) -> None:
    """step 1.11-8: keys are applied in their order, not in the array's."""
    keys = [f"{queue}-{name}" for name in "abc"]
    await wire.transaction(kv=[put(key, key) for key in keys])
    verdict = await changes_nothing(wire, kv=[once(keys[2]), once(keys[0]), once(keys[1])])
    assert (verdict["failedIndex"], verdict["value"]) == (1, keys[0])


async def test_reads_see_the_calls_own_writes(wire: Wire, queue: str) -> None:
    """step 1.11-9: but a get that stands before a write of its key sees the value before it."""
    await wire.transaction(kv=[put(queue, "old")])
    many = {"op": "getMany", "ns": "txn", "keys": [queue]}
    verdict = await wire.transaction(kv=[get(queue), put(queue, "new"), get(queue), many])
    before, written, after, several = verdict["results"]
    assert (before["value"], written["applied"], after["value"]) == ("old", True, "new")
    assert several["found"][0]["value"] == "new" if "found" in several else several


async def test_nothing_touches_the_cursors_meanwhile(wire: Wire, queue: str) -> None:
    """step 1.11-10: of transactions that ack one message, one commits."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    verdicts = await asyncio.gather(
        *(wire.transaction(ack(message), push(f"{queue}-out", n)) for n in range(8))
    )
    assert sorted(verdict["success"] for verdict in verdicts) == [False] * 7 + [True]
    assert {v["reason"] for v in verdicts if not v["success"]} == {"rejected_ack"}
    assert len(await wire.take(f"{queue}-out")) == 1


@pytest.mark.parametrize(("status", "again"), [("failed", True), ("retry", True), ("dlq", False)])
async def test_acks_that_only_signal_commit_too(
    wire: Wire, queue: str, status: str, again: bool
) -> None:
    """step 1.11-11, 1.11-13: the pushes still happen; `dlq` says what was filed."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    verdict = await wire.transaction(ack(message, status, error="bad"), push(f"{queue}-out", 1))
    assert verdict["success"] is True
    assert verdict["results"][0]["success"] is True
    assert verdict["results"][0]["dlq"] is (status == "dlq")
    assert data(await wire.take(f"{queue}-out")) == [1]
    assert data(await wire.take(queue)) == ([1] if again else [])
    assert (await wire.cursor(message))["retry_count"] == (1 if status == "failed" else 0)
    assert len(await wire.dead_letters(queue)) == (0 if again else 1)


async def test_a_failed_ack_on_a_spent_budget_files(wire: Wire, queue: str) -> None:
    """step 1.11-13, question 3."""
    await wire.configure(queue, retryLimit=0)
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    verdict = await wire.transaction(ack(message, "failed"))
    assert verdict["results"][0]["dlq"] is True


async def test_a_push_creates_within_the_commit(wire: Wire, queue: str) -> None:
    """step 1.11-12: a rollback creates neither queue nor partition."""
    await wire.transaction(kv=[once(queue)])
    refused(
        await changes_nothing(wire, push(f"{queue}-new", 1), kv=[once(queue)]), ("kv_precondition")
    )
    await wire.transaction(push(f"{queue}.new", 1, partition="p"))
    configured = await wire.configure(f"{queue}.new")
    assert (configured["task"], configured["options"]["leaseTime"]) == ("new", 60)


async def test_sending_it_again_is_a_new_transaction(wire: Wire, queue: str) -> None:
    """step 1.11-14: only what it carries stops it; ungated writes run again."""
    counter = {"op": "incr", "ns": "txn", "key": queue, "delta": 1, "forever": True}
    for _ in range(2):
        assert (await wire.transaction(push(queue, 1), kv=[counter]))["success"] is True
    assert await value_of(wire, queue) == 2
    assert data(await wire.take(queue)) == [1, 1]


async def test_a_pop_right_after_the_answer_sees_the_push(wire: Wire, queue: str) -> None:
    """step 1.11-15: and one that waits is woken."""
    await wire.configure(queue)
    waiting = asyncio.create_task(wire.pop(queue, wait=True, timeout=10_000, autoAck=True))
    await asyncio.sleep(0.2)
    await wire.transaction(push(queue, 1))
    assert data(await asyncio.wait_for(waiting, 0.45)) == [1]
    await wire.transaction(push(queue, 2))
    assert data(await wire.take(queue)) == [2]


async def test_riders_alone_are_a_transaction(wire: Wire, queue: str) -> None:
    """step 1.11-16, 1.5: their limits apply."""
    assert (await wire.transaction(kv=[put(queue, 1)]))["success"] is True
    assert (await wire.transaction(timers=[schedule(queue, "k")]))["success"] is True
    too_many = [get(f"{queue}-{n}") for n in range(65)]
    answer = await changes_nothing(wire, status=400, kv=too_many)
    refused(answer, "kv_too_many_ops")
    prefix = {"op": "getPrefix", "ns": "txn", "prefix": "a"}
    answer = await changes_nothing(wire, status=400, kv=[prefix])
    refused(answer, "kv_get_prefix_not_allowed_in_transaction")
    large = put(queue, "v" * 70_000)
    refused(await changes_nothing(wire, status=413, kv=[large]), "kv_value_too_large")


async def test_a_riders_keys_are_counted(wire: Wire, queue: str) -> None:
    """step 1.5: 256 in all, of which getMany names as many as it has."""
    many = [f"{queue}-{n}" for n in range(255)]
    reads = [{"op": "getMany", "ns": "txn", "keys": many}, get(queue)]
    assert (await wire.transaction(kv=reads))["success"] is True
    refused(
        await changes_nothing(wire, status=400, kv=[*reads, get(f"{queue}-x")]),
        "kv_too_many_keys",
    )


async def test_a_riders_timers_have_no_bounds_of_their_own(wire: Wire, queue: str) -> None:
    """step 1.6: neither the horizon, nor the payload's 1 MiB, nor the 256 operations."""
    large = base64.b64encode(b'"' + b"v" * 2 * 1024 * 1024 + b'"').decode()
    timers = [schedule(queue, f"k{n}") for n in range(300)]
    timers[0]["delayMs"] = 365 * 24 * 3_600_000
    timers[1]["payload"] = large
    verdict = await wire.transaction(timers=timers)
    assert [result["status"] for result in verdict["results"]] == ["scheduled"] * 300
    refused(
        await changes_nothing(wire, status=400, timers=[schedule(queue, "k0")] * 2), "bad_request"
    )
    foreign = schedule(queue, "k0", producerSub="me")
    answer = await changes_nothing(wire, status=400, timers=[foreign])
    refused(answer, "timers_server_owned_field")


async def test_pushes_to_one_partition_may_be_too_large(wire: Wire, queue: str) -> None:
    """step 1.10: over 96 MiB; nothing is written to other partitions either."""
    payload = b'"' + b"a" * (14 * 1024 * 1024) + b'"'
    batches = [
        PushBatch(queue, "small", [b"1"], ["s"]),
        PushBatch(queue, "large", [payload] * 7, [str(n) for n in range(7)]),
    ]
    refused(await binary(wire, encode_transaction_frames(b"{}", batches)), "too_large")
    assert await wire.take(queue) == []


async def test_a_transaction_frees_those_who_wait(wire: Wire, queue: str) -> None:
    """data-plane 4.4: an ack inside a transaction wakes as well."""
    await wire.push(queue, 1, 2)
    [message] = await wire.take(queue, batch=1)
    waiting = asyncio.create_task(wire.pop(queue, wait=True, timeout=10_000))
    await asyncio.sleep(0.2)
    await wire.transaction(ack(message))
    assert data(await asyncio.wait_for(waiting, 0.45)) == [2]


async def test_a_switched_off_surface_is_a_403(wire: Wire, queue: str) -> None:
    """step 1.10, question 1: before any other refusal of its parts."""
    broken = {"op": "put", "ns": "BAD NS"}
    try:
        await wire.sql.execute("update queen.switches set enabled = false")
        for kv in (put(queue, 1), broken):
            verdict = await wire.transaction(push(queue, 1), kv=[kv], status=403)
            refused(verdict, "kv_disabled")
        verdict = await wire.transaction(timers=[schedule(queue, "k")], status=403)
        refused(verdict, "timers_disabled")
        cancel = {"op": "cancel", "queue": queue, "timerKey": "k"}
        assert (await wire.transaction(push(queue, 2), timers=[cancel]))["success"] is True
    finally:
        await wire.sql.execute("update queen.switches set enabled = true")
    assert data(await wire.take(queue)) == [2]


# The binary form.


async def binary(wire: Wire, body: bytes, status: int = 200) -> Any:
    response = await wire.http.post("/api/v1/transaction", content=body)
    assert response.status_code == status, response.text
    return response.json()


async def test_a_binary_transaction(wire: Wire, queue: str) -> None:
    """step 1.13, data-plane 3.4: head operations, then the messages, then the riders."""
    await wire.push(queue, 1, ids=["in"])
    [message] = await wire.take(queue)
    head = {"operations": [ack(message)], "kv": [put(queue, 1)]}
    batches = [
        PushBatch(f"{queue}-out", "p", [b'{"n": 1.0}', b"2"], ["a", ""]),
        PushBatch(f"{queue}-out", "q", [b"3"], ["a"]),
        PushBatch(f"{queue}-out", "p", [b"4"], ["a"]),
    ]
    verdict = await binary(wire, encode_transaction_frames(json.dumps(head).encode(), batches))
    results = verdict["results"]
    assert verdict["success"] is True
    assert [result["type"] for result in results] == ["ack", "push", "push", "push", "push", "kv"]
    assert [result["index"] for result in results] == list(range(6))
    assert [result.get("duplicate") for result in results[1:5]] == [None, None, None, True]
    assert results[2]["transactionId"] == results[2]["messageId"]
    messages = await wire.take(f"{queue}-out", "p")
    assert [m["id"] for m in messages] == [results[1]["messageId"], results[2]["messageId"]]


async def test_a_binary_transaction_may_ask_for_counts(wire: Wire, queue: str) -> None:
    """step 1.13: flag 2; the riders are still rendered."""
    await wire.push(queue, 1)
    [message] = await wire.take(queue)
    head = {"operations": [ack(message)], "kv": [put(queue, 1)]}
    batches = [PushBatch(f"{queue}-out", "p", [b"1", b"2", b"3"], ["a", "b", "a"])]
    body = encode_transaction_frames(json.dumps(head).encode(), batches, counts=True)
    verdict = await binary(wire, body)
    [rider] = verdict.pop("results")
    assert (rider["type"], rider["opIndex"], rider["index"]) == ("kv", 0, 4)
    assert {**verdict, "transactionId": ""} == {
        "transactionId": "",
        "success": True,
        "pushed": 2,
        "duplicate": 1,
        "acked": 1,
    }


async def test_a_binary_transaction_without_a_head(wire: Wire, queue: str) -> None:
    """step 1.13: a head of length 0 means there is none; no parts at all is a 200."""
    body = encode_transaction_frames(None, [PushBatch(queue, "p", [b"1"], [""])])
    assert (await binary(wire, body))["success"] is True
    refused(await binary(wire, encode_transaction_frames(None, [])), "bad_request")


async def test_a_malformed_binary_transaction(wire: Wire, queue: str) -> None:
    """step 1.13: 400 with the transaction's own body, nothing written."""
    before = await wire.fingerprint()
    body = encode_transaction_frames(b"{}", [PushBatch(queue, "p", [b"1"], ["t"])])
    for bad in (
        *(body[:length] for length in range(4, len(body), 3)),
        body + b"\0",
        b"QTB1\x01" + body[5:],
        encode_transaction_frames(b"[]", [PushBatch(queue, "p", [b"1"], ["t"])]),
        encode_transaction_frames(b"{", [PushBatch(queue, "p", [b"1"], ["t"])]),
        encode_transaction_frames(b"{}", [PushBatch(queue, "p", [b"x"], ["t"])]),
    ):
        refused(await binary(wire, bad, 400), "bad_request")
    assert await wire.fingerprint() == before


async def test_the_sdk_commits_binary_in_the_callers_order(wire: Wire, queue: str) -> None:
    """step 1.13: the SDK's own bundle, pushes before acks."""
    await wire.push(queue, 1)
    async with Queen(str(wire.http.base_url), binary_push=True, push_compression=True) as client:
        [message] = await client.queue(queue).batch(1).wait(False).pop()
        verdict = await (
            client.transaction()
            .queue(f"{queue}-out")
            .push([{"data": {"n": 1}, "transactionId": "out"}])
            .ack(message)
            .once("txn", queue, forever=True)
            .commit()
        )
    assert verdict["success"] is True
    assert [result["type"] for result in verdict["results"]] == ["push", "ack", "kv"]
    assert [result["index"] for result in verdict["results"]] == [0, 1, 2]
    assert verdict["results"][0]["transactionId"] == "out"
