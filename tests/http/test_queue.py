"""Queues over HTTP: data-plane 9."""

import asyncio
import uuid
from typing import Any

import pytest

from tests.support.wire import Wire, data

DEFAULTS = {
    "priority": 0,
    "leaseTime": 300,
    "retryLimit": 3,
    "retryDelay": 1000,
    "maxSize": 0,
    "maxQueueSize": 0,
    "ttl": 3600,
    "deadLetterQueue": True,
    "dlqAfterMaxRetries": True,
    "delayedProcessing": 0,
    "windowBuffer": 0,
    "retentionSeconds": 0,
    "completedRetentionSeconds": 0,
    "retentionEnabled": False,
    "encryptionEnabled": False,
    "maxWaitTimeSeconds": 0,
    "minPopWaitTime": 0,
    "dedupWindowSeconds": 3600,
    "retentionSinkHold": "",
    "retentionSinkHoldMaxSeconds": 604_800,
}
CHANGED = {
    "priority": 7,
    "leaseTime": 45,
    "retryLimit": 5,
    "retryDelay": 10,
    "maxSize": 5000,
    "ttl": 60,
    "deadLetterQueue": False,
    "dlqAfterMaxRetries": False,
    "delayedProcessing": 1,
    "windowBuffer": 2,
    "retentionSeconds": 3,
    "completedRetentionSeconds": 4,
    "retentionEnabled": True,
    "encryptionEnabled": True,
    "maxWaitTimeSeconds": 5,
    "minPopWaitTime": 6,
    "dedupWindowSeconds": 8,
    "retentionSinkHold": "a.B_9-",
    "retentionSinkHoldMaxSeconds": 60,
}


async def configure(wire: Wire, status: int = 200, **body: Any) -> Any:
    return await wire.post("/api/v1/configure", body, status)


async def options(wire: Wire, queue: str) -> dict[str, Any]:
    answer = await configure(wire, queue=queue, options={})
    stored: dict[str, Any] = answer["options"]
    return stored


async def test_the_answer_has_the_whole_configuration(wire: Wire, queue: str) -> None:
    """data-plane 9.3, 9.2: with the defaults of a queue that configure creates."""
    answer = await configure(wire, queue=queue, namespace="mail", task=None, options={})
    assert uuid.UUID(answer["queueId"]).version == 7
    assert answer == {
        "configured": True,
        "queueId": answer["queueId"],
        "partitionId": None,
        "queue": queue,
        "namespace": "mail",
        "task": "",
        "storage": "segments",
        "options": DEFAULTS,
    }


@pytest.mark.parametrize("name", [None, 7, ["q"], {}])
async def test_the_queue_is_required(wire: Wire, name: Any) -> None:
    """data-plane 9.1-1."""
    body = {} if name is None else {"queue": name}
    answer = await configure(wire, 400, **body)
    assert (answer["code"], "queue" in answer["error"]) == ("bad_request", True)


async def test_the_name_budget_applies(wire: Wire) -> None:
    """data-plane 9.1-1, 12: 447 bytes with the tenant's 36."""
    assert (await configure(wire, 413, queue="q" * 412))["code"] == "name_too_long"
    assert (await configure(wire, 413, queue="ä" * 206))["code"] == "name_too_long"
    await configure(wire, queue="q" * 411)


async def test_a_mode_that_is_none_is_refused(wire: Wire, queue: str) -> None:
    """data-plane 9.1-2: naming the two."""
    for mode in ("upsert", 1, "Merge"):
        answer = await configure(wire, 400, queue=queue, mode=mode)
        assert "merge" in answer["error"]
        assert "replace" in answer["error"]
    for fine in (None, "merge", "replace"):
        assert (await configure(wire, queue=queue, mode=fine))["configured"] is True


async def test_options_may_be_flat(wire: Wire, queue: str) -> None:
    """data-plane 9.1-3: when `options` is absent or not an object."""
    answer = await configure(wire, queue=queue, leaseTime=7, retryLimit=1)
    assert answer["options"] == {**DEFAULTS, "leaseTime": 7, "retryLimit": 1}
    answer = await configure(wire, queue=queue, leaseTime=8, options=None)
    assert answer["options"]["leaseTime"] == 8
    answer = await configure(wire, queue=queue, leaseTime=9, options=[])
    assert answer["options"]["leaseTime"] == 9
    answer = await configure(wire, queue=queue, leaseTime=10, options={})
    assert answer["options"]["leaseTime"] == 9


@pytest.mark.parametrize("label", ["namespace", "task"])
async def test_where_a_label_comes_from(wire: Wire, queue: str, label: str) -> None:
    """data-plane 9.1-4: inside `options` wins; outside only a non-empty string counts."""

    async def labelled(**body: Any) -> str:
        answer: str = (await configure(wire, queue=queue, **body))[label]
        return answer

    assert await labelled(**{label: "outer"}) == "outer"
    assert await labelled(**{label: None}) == "outer"
    assert await labelled(**{label: ""}) == "outer"
    assert await labelled(**{label: 7}) == "outer"
    assert await labelled(**{label: "outer", "options": {label: "inner"}}) == "inner"
    assert await labelled(options={}) == "inner"
    assert await labelled(options={label: 7}) == ""
    assert await labelled(**{label: "outer", "options": {label: None}}) == ""
    assert await labelled(**{label: "outer", "options": {}}) == "outer"


async def test_unknown_options_are_ignored(wire: Wire, queue: str) -> None:
    """data-plane 9.1-5, 1-3."""
    answer = await configure(wire, queue=queue, options={"colour": "red", "x": {"y": "\0"}})
    assert answer["options"] == DEFAULTS


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("leaseTime", 1.5),
        ("leaseTime", 60.0),
        ("leaseTime", "60"),
        ("leaseTime", True),
        ("leaseTime", 2**31),
        ("leaseTime", -(2**31) - 1),
        ("leaseTime", 10**300),
        ("retryLimit", [1]),
        ("retryLimit", {"a": "\0"}),
        ("retentionEnabled", 1),
        ("deadLetterQueue", "true"),
        ("retentionSinkHold", "a b"),
        ("retentionSinkHold", "x" * 65),
        ("retentionSinkHold", "ä"),
        ("retentionSinkHold", "a\n"),
        ("retentionSinkHold", "\0"),
        ("retentionSinkHoldMaxSeconds", 59),
        ("retentionSinkHoldMaxSeconds", 31_536_001),
    ],
)
async def test_a_wrong_option_changes_nothing(
    wire: Wire, queue: str, option: str, value: Any
) -> None:
    """data-plane 9.1-5: 400 `bad_request`, naming it."""
    await configure(wire, queue=queue, options={"priority": 1})
    before = await wire.fingerprint()
    answer = await configure(wire, 400, queue=queue, options={"priority": 2, option: value})
    assert answer["code"] == "bad_request"
    assert option in answer["error"]
    assert await wire.fingerprint() == before


@pytest.mark.parametrize("option", CHANGED)
async def test_merge_overwrites_what_is_sent(wire: Wire, queue: str, option: str) -> None:
    """data-plane 9.1-6: and null goes back to the default, one option at a time."""
    answer = await configure(wire, queue=queue, options={option: CHANGED[option]})
    alias = {"maxQueueSize": CHANGED[option]} if option == "maxSize" else {}
    assert answer["options"] == {**DEFAULTS, option: CHANGED[option], **alias}
    answer = await configure(wire, queue=queue, options={"priority": 3})
    assert answer["options"] == {**DEFAULTS, option: CHANGED[option], **alias, "priority": 3}
    answer = await configure(wire, queue=queue, options={option: None, "priority": None})
    assert answer["options"] == DEFAULTS


async def test_replace_starts_from_the_defaults(wire: Wire, queue: str) -> None:
    """data-plane 9.1-6: queue id and creation time survive both."""
    first = await configure(wire, queue=queue, options={**CHANGED, "namespace": "n", "task": "t"})
    assert first["options"] == {**CHANGED, "maxQueueSize": 5000}
    created = await wire.sql.fetchval("select created_at from queen.queues where name = $1", queue)
    second = await configure(wire, queue=queue, mode="replace", options={"leaseTime": 11})
    assert second["options"] == {**DEFAULTS, "leaseTime": 11}
    assert (second["namespace"], second["task"]) == ("", "")
    assert second["queueId"] == first["queueId"]
    assert created == await wire.sql.fetchval(
        "select created_at from queen.queues where name = $1", queue
    )


async def test_null_on_an_implicit_queue_is_configures_default(wire: Wire, queue: str) -> None:
    """data-plane 9.1-6, 9.2: the default of the table's "configure" column."""
    await wire.push(queue, 1)
    assert (await options(wire, queue))["leaseTime"] == 60
    answer = await configure(wire, queue=queue, options={"leaseTime": None})
    assert answer["options"]["leaseTime"] == 300


@pytest.mark.parametrize(
    ("option", "value", "stored"),
    [
        ("minPopWaitTime", -1, 0),
        ("minPopWaitTime", 60_001, 60_000),
        ("dedupWindowSeconds", -1, 0),
        ("leaseTime", -5, -5),
        ("retryLimit", -5, -5),
        ("retentionSinkHold", 7, ""),
    ],
)
async def test_values_out_of_range(
    wire: Wire, queue: str, option: str, value: Any, stored: Any
) -> None:
    """data-plane 9.2: what is clamped, and what is stored and read as something else."""
    answer = await configure(wire, queue=queue, options={option: value})
    assert answer["options"][option] == stored


async def test_what_the_sdk_sends_resets_its_nine(wire: Wire, queue: str) -> None:
    """data-plane 9.4."""
    await configure(wire, queue=queue, options={"dedupWindowSeconds": 9, "leaseTime": 9})
    nine = {
        "leaseTime": 300,
        "retryLimit": 3,
        "priority": 0,
        "delayedProcessing": 0,
        "windowBuffer": 0,
        "maxSize": 0,
        "retentionSeconds": 0,
        "completedRetentionSeconds": 0,
        "encryptionEnabled": False,
    }
    answer = await configure(wire, queue=queue, namespace=None, task=None, options=nine)
    assert answer["options"] == {**DEFAULTS, "dedupWindowSeconds": 9}


async def test_concurrent_changes_compose(wire: Wire, queue: str) -> None:
    """data-plane 9.1-6: a merge starts from what is stored, whoever stored it."""
    await asyncio.gather(
        *(
            configure(wire, queue=queue, options={option: value})
            for option, value in CHANGED.items()
        )
    )
    assert await options(wire, queue) == {**CHANGED, "maxQueueSize": 5000}


async def test_options_are_read_at_use(wire: Wire, queue: str) -> None:
    """data-plane 9.5: a delay hides and reveals stored messages at once."""
    await wire.push(queue, 1, ids=["t"])
    await wire.configure(queue, delayedProcessing=1000)
    assert await wire.take(queue) == []
    assert await wire.take(queue, consumerGroup="g") == []
    waiting = asyncio.create_task(wire.pop(queue, wait=True, timeout=10_000))
    await asyncio.sleep(0.2)
    await wire.configure(queue, delayedProcessing=0)
    assert data(await waiting) == [1]
    assert data(await wire.take(queue, consumerGroup="g")) == [1]
    await wire.configure(queue, dedupWindowSeconds=0)
    assert (await wire.push(queue, 2, ids=["t"]))[0]["status"] == "queued"


async def test_configuring_creates_no_partition(wire: Wire, queue: str) -> None:
    """data-plane 9.5."""
    before = await wire.count("partitions")
    await wire.configure(queue)
    assert await wire.count("partitions") == before


# Deleting.


async def delete(wire: Wire, queue: str) -> Any:
    response = await wire.http.delete(f"/api/v1/resources/queues/{queue}")
    assert response.status_code == 200
    return response.json()


async def test_deleting_removes_everything(wire: Wire, queue: str) -> None:
    """data-plane 9.6, question 14: dead letters too; both answers."""
    before = await wire.fingerprint()
    for partition in "ab":
        await wire.push(queue, 1, 2, partition=partition)
    messages = await wire.take(queue, consumerGroup="g")
    await wire.ack(messages[0], "dlq", group="g")
    await wire.take(queue)
    assert await delete(wire, queue) == {"deleted": True, "existed": True, "queue": queue}
    assert await wire.fingerprint() == before
    answer = await delete(wire, queue)
    assert answer.pop("message")
    assert answer == {"deleted": False, "existed": False, "queue": queue}


async def test_a_deleted_queue_begins_anew(wire: Wire, queue: str) -> None:
    """data-plane 9.6: new ids, offset 0, an id is free again."""
    old = await wire.configure(queue, leaseTime=9)
    await wire.push(queue, 1, 2, ids=["a", "b"])
    [before, _] = await wire.take(queue)
    await delete(wire, queue)
    answer = await wire.push(queue, 3, ids=["a"])
    assert [(item["status"], item["offset"]) for item in answer] == [("queued", 0)]
    [after] = await wire.take(queue)
    assert after["partitionId"] != before["partitionId"]
    new = await wire.configure(queue)
    assert new["queueId"] != old["queueId"]
    assert new["options"]["leaseTime"] == 60
    [refused] = await wire.ack(before)
    assert refused["success"] is False


async def test_a_name_may_hold_a_slash(wire: Wire, queue: str) -> None:
    """data-plane 0.1."""
    name = f"{queue}/a b"
    await wire.configure(name)
    assert (await delete(wire, f"{queue}%2Fa%20b"))["queue"] == name


async def test_parked_pops_of_a_deleted_queue_answer_empty(wire: Wire, queue: str) -> None:
    """data-plane 9.6: and do not bring the queue back."""
    await wire.configure(queue)
    parked = [
        asyncio.create_task(wire.pop(queue, wait=True, timeout=1_500)),
        asyncio.create_task(wire.pop(queue, wait=True, timeout=1_500, consumerGroup="g")),
        asyncio.create_task(wire.pop(queue, "p", wait=True, timeout=1_500)),
    ]
    await asyncio.sleep(0.3)
    await delete(wire, queue)
    assert await asyncio.gather(*parked) == [None, None, None]
    assert await wire.sql.fetchval("select count(*) from queen.queues where name = $1", queue) == 0


async def test_deleting_a_busy_queue(wire: Wire, queue: str) -> None:
    """data-plane 9.6: pushes, pops and acks meanwhile are before it or after it, never half."""
    stop = asyncio.Event()

    async def busy(number: int) -> None:
        while not stop.is_set():
            await wire.push(queue, number, partition=str(number % 3))
            messages = await wire.take(queue, partitions=1)
            if messages:
                await wire.ack(messages)

    workers = [asyncio.create_task(busy(number)) for number in range(6)]
    for _ in range(5):
        await asyncio.sleep(0.15)
        await delete(wire, queue)
    stop.set()
    await asyncio.gather(*workers)
    await delete(wire, queue)
    for table in ("messages", "cursors", "ready"):
        orphans = await wire.sql.fetchval(
            f"select count(*) from queen.{table} t left join queen.partitions p"
            f" on p.id = t.partition_id where p.id is null"
        )
        assert orphans == 0, table
