"""Dead letters over HTTP: data-plane 8."""

import json
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.wire import QUEUE_MODE, Wire, data


async def bury(wire: Wire, queue: str, *payloads: Any, **fields: Any) -> None:
    """Push payloads to a partition and give them up, one after the other."""
    partition = fields.pop("partition", "Default")
    for payload in payloads:
        await wire.push(queue, payload, partition=partition)
        group = fields.get("group")
        messages = await wire.take(queue, partition, consumerGroup=group)
        [result] = await wire.ack(messages[-1], "dlq", **fields)
        assert result["dlq"] is True


async def test_a_dead_letter_is_a_snapshot(wire: Wire, queue: str) -> None:
    """data-plane 8-4: its own id, where it came from, what it held, why and when."""
    await wire.configure(queue, retryLimit=1)
    await wire.push(queue, {"to": "a"}, partition="user-7", ids=["signup-7"])
    for error in ("first", "smtp 451"):
        [message] = await wire.take(queue, consumerGroup="senders")
        await wire.ack(message, "failed", group="senders", error=error)
    answer = await wire.get("/api/v1/dlq", queue=queue)
    [letter] = answer["messages"]
    assert uuid.UUID(letter["id"]).version == 7
    assert letter["failedAt"].endswith("Z")
    failed_at = datetime.fromisoformat(letter["failedAt"])
    assert len(letter["failedAt"]) == len("2026-03-01T08:10:00.000125Z")
    assert abs(datetime.now(UTC) - failed_at) < timedelta(seconds=30)
    assert answer == {
        "messages": [
            {
                "id": letter["id"],
                "queue": queue,
                "partition": "user-7",
                "partitionId": message["partitionId"],
                "createdAt": letter["failedAt"],
                "consumerGroup": "senders",
                "offset": 0,
                "messageId": message["id"],
                "transactionId": "signup-7",
                "data": {"to": "a"},
                "payload": {"to": "a"},
                "errorMessage": "smtp 451",
                "retryCount": 1,
                "failedAt": letter["failedAt"],
            }
        ],
        "total": 1,
        "pagination": {"limit": 100, "offset": 0},
    }


async def test_the_error_is_the_items_own_or_the_next_best(wire: Wire, queue: str) -> None:
    """data-plane 8-4: else any non-completed item's, else a text of ours."""
    await bury(wire, queue, 1)
    [letter] = await wire.dead_letters(queue)
    assert letter["errorMessage"]

    await wire.configure(queue, retryLimit=0)
    await wire.push(queue, 2, 3, 4)
    messages = await wire.take(queue)
    body = {
        "acknowledgments": [
            {
                **{key: message[key] for key in ("transactionId", "partitionId", "leaseId")},
                "status": status,
                "error": error,
            }
            for message, status, error in zip(
                messages,
                ["failed", "failed", "completed"],
                [None, "the reason", "no reason"],
                strict=True,
            )
        ]
    }
    await wire.post("/api/v1/ack/batch", body, 200)
    letters = (await wire.dead_letters(queue))[1:]
    assert sorted(letter["data"] for letter in letters) == [2, 3]
    assert {letter["errorMessage"] for letter in letters} == {"the reason"}


async def test_the_payload_is_kept_as_it_was(wire: Wire, queue: str) -> None:
    """data-plane 8-4: `data` and `payload`, byte for byte."""
    text = '{"b": 1.50, "a": [1E+2, "\\u0000"]}'
    body = f'{{"items":[{{"queue":"{queue}","payload":{text}}}]}}'
    await wire.http.post("/api/v1/push", content=body)
    await wire.ack(await wire.take(queue), "dlq")
    answer = await wire.http.get("/api/v1/dlq", params={"queue": queue})
    assert answer.text.count(text) == 2


async def test_a_dead_letter_outlives_its_message(wire: Wire, queue: str) -> None:
    """data-plane 8-4."""
    await bury(wire, queue, 1)
    [letter] = await wire.dead_letters(queue)
    await wire.sql.execute(
        "delete from queen.messages where partition_id = $1", int(letter["partitionId"])
    )
    assert await wire.dead_letters(queue) == [letter]


async def test_the_message_stays_for_other_groups(wire: Wire, queue: str) -> None:
    """data-plane 8-5."""
    await bury(wire, queue, 1)
    assert data(await wire.take(queue, consumerGroup="g")) == [1]


async def test_the_list_is_paged_newest_failure_first(wire: Wire, queue: str) -> None:
    """data-plane 8: limit 100 by default, clamped to 1..1000; total counts all matches."""
    await bury(wire, queue, 1, 2, 3, 4, 5)

    async def page(**params: Any) -> tuple[list[Any], int, dict[str, int]]:
        answer = await wire.get("/api/v1/dlq", queue=queue, **params)
        return data(answer["messages"]), answer["total"], answer["pagination"]

    assert await page() == ([5, 4, 3, 2, 1], 5, {"limit": 100, "offset": 0})
    assert await page(limit=2, offset=1) == ([4, 3], 5, {"limit": 2, "offset": 1})
    assert await page(limit=2, offset=10) == ([], 5, {"limit": 2, "offset": 10})
    assert await page(limit=0) == ([5], 5, {"limit": 1, "offset": 0})
    assert (await page(limit=10**9, offset=-3))[2] == {"limit": 1000, "offset": 0}
    assert (await page(limit=10**17, offset=10**17))[:2] == ([], 5)


async def test_the_filters(wire: Wire, queue: str) -> None:
    """data-plane 8, question 15: queue, partition, group, and the time of the failure."""
    await bury(wire, queue, 1, partition="a")
    await bury(wire, queue, 2, partition="b", group="g")
    await bury(wire, queue, 3, partition="b")
    third, second, first = (await wire.get("/api/v1/dlq", queue=queue))["messages"]

    async def found(**params: Any) -> list[Any]:
        return data(await wire.dead_letters(queue, **params))

    assert await found(partition="b") == [2, 3]
    assert await found(consumerGroup="g") == [2]
    assert await found(consumerGroup=QUEUE_MODE) == [1, 3]
    assert await found(partition="b", consumerGroup="g") == [2]
    assert await found(partition="none") == []
    assert await found(**{"from": second["failedAt"]}) == [2, 3]
    assert await found(to=second["failedAt"]) == [1, 2]
    assert await found(**{"from": first["failedAt"], "to": first["failedAt"]}) == [1]
    assert await found(**{"partition": "", "consumerGroup": "", "from": "", "to": ""}) == [1, 2, 3]
    assert third["data"] == 3
    elsewhere = await wire.get("/api/v1/dlq", queue=f"{queue}-other")
    assert elsewhere["messages"] == []
    everywhere = await wire.get("/api/v1/dlq", limit=1000)
    assert everywhere["total"] >= 3


async def test_a_time_that_is_none_is_refused(wire: Wire, queue: str) -> None:
    """data-plane 1-4: naming the parameter."""
    answer = await wire.get("/api/v1/dlq", 400, **{"from": "yesterday"})
    assert (answer["code"], "from" in answer["error"]) == ("bad_request", True)


# One message, as people look at it.


async def test_a_message_is_shown_with_its_groups(wire: Wire, queue: str) -> None:
    """admin 5.2, data-plane 14 test_pop: groups with what they consumed and lease."""
    await wire.push(queue, {"n": 1}, ids=["a/b c"])
    [message] = await wire.take(queue, autoAck=True)
    path = f"/api/v1/messages/{message['partitionId']}/a%2Fb%20c"
    shown = await wire.get(path)
    assert shown["consumerGroups"] == [
        {
            "name": QUEUE_MODE,
            "group": QUEUE_MODE,
            "committed": 0,
            "consumed": True,
            "leaseExpiresAt": None,
        }
    ]
    assert (shown["data"], shown["payload"], shown["status"]) == ({"n": 1}, {"n": 1}, "completed")
    assert shown["mode"] == {"hasQueueMode": True, "busGroupsCount": 0, "type": "queue"}
    assert (shown["queue"], shown["partition"]) == (queue, "Default")
    assert shown["queueConfig"]["leaseTime"] == 60

    [leased] = await wire.take(queue, consumerGroup="g")
    shown = await wire.get(path)
    assert shown["status"] == "processing"
    assert shown["mode"] == {"hasQueueMode": True, "busGroupsCount": 1, "type": "hybrid"}
    assert shown["consumerGroups"][1]["name"] == "g"
    assert shown["consumerGroups"][1]["leaseExpiresAt"].endswith("Z")
    await wire.ack(leased, "dlq", group="g", error="bad")
    shown = await wire.get(path)
    assert (shown["status"], shown["errorMessage"]) == ("dead_letter", "bad")


async def test_a_message_that_is_none(wire: Wire, queue: str) -> None:
    """admin 5.2: 404, whatever the address."""
    await wire.push(queue, 1, ids=["t"])
    [message] = await wire.take(queue)
    for partition_id, transaction_id in (
        (message["partitionId"], "other"),
        ("999999999", "t"),
        ("9" * 19, "t"),
        ("abc", "t"),
    ):
        answer = await wire.get(f"/api/v1/messages/{partition_id}/{transaction_id}", 404)
        assert answer["error"] == "Message not found"
    assert json.dumps(answer)
